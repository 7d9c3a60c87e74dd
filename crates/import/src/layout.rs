//! The place of a tensor's elements in memory. PyTorch's `reshape` and `contiguous` return views or copies by it.

use crate::archive::row_major;
use crate::schema::{Hint, Size, TensorMeta};

/// Element type, sizes, strides and offset of a tensor when it was exported.
pub(crate) struct Layout {
    /// The number of PyTorch's `ScalarType`.
    pub(crate) element_type: i64,
    pub(crate) shape: Vec<usize>,
    pub(crate) strides: Vec<usize>,
    pub(crate) offset: usize,
}

impl Layout {
    /// The place of a tensor in memory; `None` if the file does not say it.
    pub(crate) fn of(meta: &TensorMeta) -> Option<Self> {
        let sizes = |all: &[Size]| all.iter().map(exported).collect::<Option<Vec<_>>>();
        let (shape, strides) = (sizes(&meta.sizes)?, sizes(&meta.strides)?);
        let offset = meta.storage_offset.as_ref().map_or(Some(0), exported)?;
        (shape.len() == strides.len()).then_some(Self { element_type: meta.dtype, shape, strides, offset })
    }

    /// Whether the elements follow each other in memory, in the order of their indices.
    pub(crate) fn is_row_major(&self) -> bool {
        self.has_strides(&row_major(&self.shape))
    }

    /// Whether these are the strides. That of a single slice does not count.
    pub(crate) fn has_strides(&self, strides: &[usize]) -> bool {
        let all = self.strides.iter().zip(strides).zip(&self.shape);
        self.strides.len() == strides.len() && all.into_iter().all(|((own, other), n)| own == other || *n <= 1)
    }

    /// Whether strides can describe the same elements in another shape. They can if each run of dimensions that follow
    /// each other in memory is cut into dimensions of its own.
    pub(crate) fn can_be_viewed_as(&self, shape: &[usize]) -> bool {
        if self.shape.contains(&0) {
            return true;
        }
        let mut runs: Vec<(usize, usize)> = Vec::new();
        for (&n, &stride) in self.shape.iter().zip(&self.strides).filter(|(n, _)| **n != 1) {
            match runs.last_mut() {
                Some((size, last)) if n.checked_mul(stride) == Some(*last) => {
                    (*size, *last) = (size.saturating_mul(n), stride);
                }
                _ => runs.push((n, stride)),
            }
        }
        let mut sizes = shape.iter().filter(|n| **n != 1);
        runs.into_iter().all(|(run, _)| {
            let mut product = 1usize;
            while product < run {
                let Some(n) = sizes.next() else { return false };
                product = product.saturating_mul(*n);
            }
            product == run
        })
    }
}

/// A size as it was at export.
fn exported(size: &Size) -> Option<usize> {
    match size {
        Size::AsInt(n) => usize::try_from(*n).ok(),
        Size::AsExpr(e) => match e.hint {
            Some(Hint::AsInt(n)) => usize::try_from(n).ok(),
            _ => None,
        },
    }
}
