//! Operators that address elements by integer tensors: `i64` and never negative. Importers resolve negative indices.

use serde::{Deserialize, Serialize};

use super::check::{
    args, broadcast_shapes, ensure, ensure_dim, ensure_dtype, ensure_number, ensure_same_dtype, ensure_shape,
};
use super::operator::Operator;
use crate::units::counted;
use crate::{DType, TensorType};

fn indices(t: &TensorType) -> Result<(), String> {
    ensure_dtype(t, DType::I64, "the index")
}

/// Operands `(weight [V, D], ids [..])`, result `[.., D]`: the rows of the weight that the ids name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Embedding {
    /// The row with gradient zero.
    pub padding_idx: Option<usize>,
}

impl Operator for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [w, ids] = args(inputs)?;
        ensure(w.rank() == 2, || format!("the weight must have two dimensions, got {w}"))?;
        indices(ids)?;
        let mut shape = ids.shape.clone();
        shape.push(w.shape[1]);
        Ok(vec![TensorType::new(w.dtype, shape)])
    }
}

/// Operands `(gradient [.., D], ids [..])`, result: the gradient of an embedding's weight, `[num_weights, D]`.
///
/// The gradients of a row that several ids name are added in the order of the ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmbeddingDenseBackward {
    /// Rows of the weight.
    pub num_weights: usize,
    /// The row with gradient zero.
    pub padding_idx: Option<usize>,
}

impl Operator for EmbeddingDenseBackward {
    fn name(&self) -> &'static str {
        "embedding_dense_backward"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [g, ids] = args(inputs)?;
        indices(ids)?;
        let (width, lead) = g.shape.split_last().ok_or("the gradient must have a dimension")?;
        ensure(lead == ids.shape, || format!("the shapes of gradient {g} and ids {ids} do not match"))?;
        Ok(vec![TensorType::new(g.dtype, [self.num_weights, *width])])
    }
}

/// Operands `(x, index [n])`, result: the slices of one dimension that the index names, in its order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct IndexSelect {
    /// The dimension.
    pub dim: usize,
}

impl Operator for IndexSelect {
    fn name(&self) -> &'static str {
        "index_select"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x, index] = args(inputs)?;
        ensure_dim(self.dim, x)?;
        indices(index)?;
        ensure(index.rank() == 1, || format!("the index must have one dimension, got {index}"))?;
        let mut shape = x.shape.clone();
        shape[self.dim] = index.shape[0];
        Ok(vec![TensorType::new(x.dtype, shape)])
    }
}

/// Operands `(x, index [n], source)`: adds the slices of the source to the slices of `x` that the index names.
///
/// Additions are in the order of the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct IndexAdd {
    /// The dimension.
    pub dim: usize,
}

impl Operator for IndexAdd {
    fn name(&self) -> &'static str {
        "index_add"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x, index, source] = args(inputs)?;
        let taken = IndexSelect { dim: self.dim }.infer(&[x, index])?;
        ensure_same_dtype(x, source)?;
        ensure_shape(source, &taken[0].shape, "the source")?;
        Ok(vec![x.clone()])
    }
}

/// Operands `(x, index)`: `out[i][j] = x[index[i][j]][j]` for `dim` 0, and so on.
///
/// The index must not be larger than `x`, except in `dim`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gather {
    /// The dimension.
    pub dim: usize,
}

impl Operator for Gather {
    fn name(&self) -> &'static str {
        "gather"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x, index] = args(inputs)?;
        ensure_dim(self.dim, x)?;
        indices(index)?;
        let fits = x.rank() == index.rank()
            && x.shape.iter().zip(&index.shape).enumerate().all(|(d, (a, b))| d == self.dim || b <= a);
        ensure(fits, || {
            format!("the shapes of index {index} and operand {x} do not match along dimension {}", self.dim)
        })?;
        Ok(vec![TensorType::new(x.dtype, index.shape.clone())])
    }
}

/// Operands `(x, index, source)`: adds each element of the source where [`Gather`] would read it.
///
/// Additions are in row-major order of the index. The source has the shape of the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScatterAdd {
    /// The dimension.
    pub dim: usize,
}

impl Operator for ScatterAdd {
    fn name(&self) -> &'static str {
        "scatter_add"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x, index, source] = args(inputs)?;
        let read = Gather { dim: self.dim }.infer(&[x, index])?;
        ensure_same_dtype(x, source)?;
        ensure_shape(source, &read[0].shape, "the source")?;
        Ok(vec![x.clone()])
    }
}

/// Operands `(x, index, source)`: like [`ScatterAdd`], but replaces elements. The last write in row-major order wins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scatter {
    /// The dimension.
    pub dim: usize,
}

impl Operator for Scatter {
    fn name(&self) -> &'static str {
        "scatter.src"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        ScatterAdd { dim: self.dim }.infer(inputs)
    }
}

/// Operands `(x, index…)`: advanced indexing, such as `x[:, i, :, j]`.
///
/// The index tensors address the dimensions that `indexed` marks, and broadcast together. In the result, their shape
/// replaces the marked dimensions if those are adjacent. Otherwise it comes first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Index {
    /// For every dimension of `x`, whether an index addresses it. There are as many true entries as indices.
    pub indexed: Vec<bool>,
}

impl Index {
    /// The shape of the result, the broadcast shape of the indices, and the position of the latter in the former.
    pub fn layout(&self, x: &TensorType, index: &[&TensorType]) -> Result<(Vec<usize>, Vec<usize>, usize), String> {
        ensure(self.indexed.len() == x.rank(), || {
            format!("{} dimensions are marked, but the operand is {x}", self.indexed.len())
        })?;
        let marked: Vec<usize> = (0..x.rank()).filter(|&d| self.indexed[d]).collect();
        ensure(!marked.is_empty() && marked.len() == index.len(), || {
            format!("{} marked for {}", counted(marked.len(), "dimension"), counted(index.len(), "index operand"))
        })?;
        for i in index {
            indices(i)?;
        }
        let shapes: Vec<&[usize]> = index.iter().map(|i| &i.shape[..]).collect();
        let at = broadcast_shapes(&shapes)?;
        let adjacent = marked.windows(2).all(|w| w[1] == w[0] + 1);
        let position = if adjacent { marked[0] } else { 0 };
        let mut shape: Vec<usize> = (0..x.rank()).filter(|&d| !self.indexed[d]).map(|d| x.shape[d]).collect();
        shape.splice(position..position, at.iter().copied());
        Ok((shape, at, position))
    }
}

impl Operator for Index {
    fn name(&self) -> &'static str {
        "index.Tensor"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let (x, index) = inputs.split_first().ok_or("takes an operand and at least one index")?;
        Ok(vec![TensorType::new(x.dtype, self.layout(x, index)?.0)])
    }
}

/// Operands `(x, values, index…)`: writes the values where [`Index`] would read them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IndexPut {
    /// See [`Index::indexed`].
    pub indexed: Vec<bool>,
    /// Whether to add, in row-major order of the values. Otherwise elements are replaced and the last write wins.
    pub accumulate: bool,
}

impl Operator for IndexPut {
    fn name(&self) -> &'static str {
        "index_put"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let (&x, rest) = inputs.split_first().ok_or("takes an operand, values and at least one index")?;
        let (&values, index) = rest.split_first().ok_or("takes an operand, values and at least one index")?;
        let (shape, ..) = Index { indexed: self.indexed.clone() }.layout(x, index)?;
        ensure_same_dtype(x, values)?;
        ensure_shape(values, &shape, "the values")?;
        Ok(vec![x.clone()])
    }
}

/// Results: the `k` largest or smallest elements of a dimension, sorted, and their positions (`i64`).
///
/// Equal elements keep their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TopK {
    /// The number of elements.
    pub k: usize,
    /// The dimension.
    pub dim: usize,
    /// Whether to find the largest elements. Otherwise the smallest.
    pub largest: bool,
}

impl Operator for TopK {
    fn name(&self) -> &'static str {
        "topk"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x] = args(inputs)?;
        ensure_dim(self.dim, x)?;
        ensure_number(x)?;
        ensure(self.k <= x.shape[self.dim], || {
            format!("cannot take {} elements of dimension {} of {x}", self.k, self.dim)
        })?;
        let mut shape = x.shape.clone();
        shape[self.dim] = self.k;
        Ok(vec![TensorType::new(x.dtype, shape.clone()), TensorType::new(DType::I64, shape)])
    }
}

/// Results: the elements sorted along a dimension, and their former positions (`i64`). Equal elements keep their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sort {
    /// The dimension.
    pub dim: usize,
    /// Whether the largest comes first.
    pub descending: bool,
}

impl Operator for Sort {
    fn name(&self) -> &'static str {
        "sort.stable"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x] = args(inputs)?;
        ensure_dim(self.dim, x)?;
        ensure_number(x)?;
        Ok(vec![x.clone(), TensorType::new(DType::I64, x.shape.clone())])
    }
}
