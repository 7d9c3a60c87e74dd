//! Views, operators that only move elements, and operators without operands.

use serde::{Deserialize, Serialize};

use super::check::{args, broadcast_shapes, checked_numel, ensure, ensure_dim, ensure_same_dtype};
use super::operator::{Cost, Operator, View};
use crate::{DType, TensorType};

/// The same elements in row-major order, with another shape.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reshape {
    /// The new shape. It must have the same number of elements.
    pub shape: Vec<usize>,
}

impl Operator for Reshape {
    fn name(&self) -> &'static str {
        "view"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x] = args(inputs)?;
        ensure(checked_numel(&self.shape)? == x.numel(), || format!("cannot view {x} as {:?}", self.shape))?;
        Ok(vec![TensorType::new(x.dtype, self.shape.clone())])
    }

    fn view(&self) -> Option<View> {
        Some(View::Whole)
    }
}

/// Reorders dimensions: dimension `i` of the result is dimension `dims[i]` of the operand.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Permute {
    /// The order.
    pub dims: Vec<usize>,
}

impl Operator for Permute {
    fn name(&self) -> &'static str {
        "permute"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x] = args(inputs)?;
        let mut seen = self.dims.clone();
        seen.sort_unstable();
        ensure(seen.iter().copied().eq(0..x.rank()), || {
            format!("{:?} is not a permutation of the dimensions of {x}", self.dims)
        })?;
        Ok(vec![TensorType::new(x.dtype, self.dims.iter().map(|&d| x.shape[d]).collect::<Vec<_>>())])
    }

    fn view(&self) -> Option<View> {
        Some(View::Whole)
    }
}

/// Broadcasts to a shape: repeats dimensions of size 1 and adds leading dimensions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Expand {
    /// The shape of the result.
    pub shape: Vec<usize>,
}

impl Operator for Expand {
    fn name(&self) -> &'static str {
        "expand"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x] = args(inputs)?;
        ensure(broadcast_shapes(&[&x.shape, &self.shape])? == self.shape, || {
            format!("cannot expand {x} to {:?}", self.shape)
        })?;
        Ok(vec![TensorType::new(x.dtype, self.shape.clone())])
    }

    fn view(&self) -> Option<View> {
        Some(View::Repeated)
    }
}

/// The operand itself. No gradient passes through it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Detach;

impl Operator for Detach {
    fn name(&self) -> &'static str {
        "detach"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x] = args(inputs)?;
        Ok(vec![x.clone()])
    }

    fn view(&self) -> Option<View> {
        Some(View::Whole)
    }
}

/// The elements `start, start + step, …` below `end` of one dimension.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slice {
    /// The dimension.
    pub dim: usize,
    /// First index.
    pub start: usize,
    /// One past the last.
    pub end: usize,
    /// Distance between elements, at least 1.
    pub step: usize,
}

impl Operator for Slice {
    fn name(&self) -> &'static str {
        "slice.Tensor"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x] = args(inputs)?;
        ensure_dim(self.dim, x)?;
        ensure(self.step >= 1 && self.start <= self.end && self.end <= x.shape[self.dim], || {
            format!("{}..{} by {} is out of range for dimension {} of {x}", self.start, self.end, self.step, self.dim)
        })?;
        let mut shape = x.shape.clone();
        shape[self.dim] = (self.end - self.start).div_ceil(self.step);
        Ok(vec![TensorType::new(x.dtype, shape)])
    }

    fn view(&self) -> Option<View> {
        Some(View::Part)
    }
}

/// The reverse of a [`Slice`]: the operand in its former position, in a tensor of zeros.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SliceBackward {
    /// The slice.
    pub slice: Slice,
    /// The size of the sliced dimension in the result.
    pub size: usize,
}

impl Operator for SliceBackward {
    fn name(&self) -> &'static str {
        "slice_backward"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [g] = args(inputs)?;
        ensure_dim(self.slice.dim, g)?;
        let mut shape = g.shape.clone();
        shape[self.slice.dim] = self.size;
        let whole = TensorType::new(g.dtype, shape);
        let taken = self.slice.infer(&[&whole])?;
        ensure(taken[0] == *g, || format!("a slice of {whole} is {}, not {g}", taken[0]))?;
        Ok(vec![whole])
    }
}

/// Concatenates the operands along a dimension.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cat {
    /// The dimension.
    pub dim: usize,
}

impl Operator for Cat {
    fn name(&self) -> &'static str {
        "cat"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let first = *inputs.first().ok_or("takes at least one operand")?;
        ensure_dim(self.dim, first)?;
        let mut shape = first.shape.clone();
        shape[self.dim] = 0;
        for x in inputs {
            ensure_same_dtype(first, x)?;
            let alike = x.rank() == first.rank()
                && x.shape.iter().zip(&first.shape).enumerate().all(|(i, (a, b))| i == self.dim || a == b);
            ensure(alike, || format!("cannot concatenate {first} and {x} along dimension {}", self.dim))?;
            shape[self.dim] = shape[self.dim].checked_add(x.shape[self.dim]).ok_or("the result is too large")?;
        }
        Ok(vec![TensorType::new(first.dtype, shape)])
    }
}

/// Cuts a dimension into parts. Each part is a result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Split {
    /// The dimension.
    pub dim: usize,
    /// The sizes of the parts. They must add up to the size of the dimension.
    pub sizes: Vec<usize>,
}

impl Operator for Split {
    fn name(&self) -> &'static str {
        "split_with_sizes"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x] = args(inputs)?;
        ensure_dim(self.dim, x)?;
        let total = self.sizes.iter().try_fold(0usize, |n, &s| n.checked_add(s));
        ensure(!self.sizes.is_empty() && total == Some(x.shape[self.dim]), || {
            format!("parts {:?} do not add up to dimension {} of {x}", self.sizes, self.dim)
        })?;
        Ok(self
            .sizes
            .iter()
            .map(|&s| {
                let mut shape = x.shape.clone();
                shape[self.dim] = s;
                TensorType::new(x.dtype, shape)
            })
            .collect())
    }

    fn view(&self) -> Option<View> {
        Some(View::Part)
    }
}

/// Reverses the order of elements along dimensions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flip {
    /// The dimensions, without repetition.
    pub dims: Vec<usize>,
}

impl Operator for Flip {
    fn name(&self) -> &'static str {
        "flip"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x] = args(inputs)?;
        for (i, &d) in self.dims.iter().enumerate() {
            ensure_dim(d, x)?;
            ensure(!self.dims[..i].contains(&d), || format!("dimension {d} is listed twice"))?;
        }
        Ok(vec![x.clone()])
    }
}

/// Pads the operand with a constant.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ConstantPad {
    /// The number of elements added before and after, for every dimension.
    pub pads: Vec<[usize; 2]>,
    /// The value of the added elements.
    #[serde(with = "crate::number")]
    pub value: f64,
}

impl Operator for ConstantPad {
    fn name(&self) -> &'static str {
        "constant_pad_nd"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x] = args(inputs)?;
        ensure(self.pads.len() == x.rank(), || format!("got {} pads for {x}", self.pads.len()))?;
        let shape = x
            .shape
            .iter()
            .zip(&self.pads)
            .map(|(&n, &[a, b])| n.checked_add(a).and_then(|n| n.checked_add(b)).ok_or("the result is too large"))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(vec![TensorType::new(x.dtype, shape)])
    }
}

/// Keeps one triangle of the last two dimensions and sets the rest to zero.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Triangle {
    /// Whether to keep the upper triangle (`triu`: column - row >= diagonal). Otherwise the lower (`tril`: column -
    /// row <= diagonal).
    pub upper: bool,
    /// The diagonal that bounds the triangle; 0 is the main diagonal.
    pub diagonal: i64,
}

impl Operator for Triangle {
    fn name(&self) -> &'static str {
        if self.upper { "triu" } else { "tril" }
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x] = args(inputs)?;
        ensure(x.rank() >= 2, || format!("needs at least two dimensions, got {x}"))?;
        Ok(vec![x.clone()])
    }
}

/// A tensor with one value in every element. It has no operand.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Full {
    /// The type of the result.
    pub ty: TensorType,
    /// The value of every element, converted to that type.
    #[serde(with = "crate::number")]
    pub value: f64,
}

impl Operator for Full {
    fn name(&self) -> &'static str {
        "full"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [] = args(inputs)?;
        checked_numel(&self.ty.shape)?;
        Ok(vec![self.ty.clone()])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Cost::memory(0.0, inputs, outputs)
    }
}

/// The `len` numbers `start, start + step, …`. It has no operand.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Arange {
    /// The element type: any but boolean.
    pub dtype: DType,
    /// First element.
    pub start: f64,
    /// The difference between neighbours.
    pub step: f64,
    /// The number of elements.
    pub len: usize,
}

impl Operator for Arange {
    fn name(&self) -> &'static str {
        "arange.start_step"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [] = args(inputs)?;
        ensure(self.dtype != DType::Bool, || "the element type must not be bool".into())?;
        Ok(vec![TensorType::new(self.dtype, [self.len])])
    }
}
