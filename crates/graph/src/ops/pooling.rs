//! Two-dimensional pooling of `[N, C, H, W]`.

use serde::{Deserialize, Serialize};

use super::check::{args, ensure, ensure_dtype, ensure_float};
use super::convolution::window_size;
use super::operator::{Cost, Operator};
use crate::{DType, TensorType};

fn image(x: &TensorType) -> Result<[usize; 4], String> {
    ensure_float(x)?;
    <[usize; 4]>::try_from(&x.shape[..]).map_err(|_| format!("needs four dimensions, got {x}"))
}

/// The number of elements of all windows together.
fn window_reads(kernel: [usize; 2], result: &TensorType) -> f64 {
    kernel.iter().map(|n| *n as f64).product::<f64>() * result.numel() as f64
}

/// Results: the largest element of every window, and its position `row * W + column` in the operand's plane (`i64`).
///
/// Padding is never the largest. The first of equal elements is taken. As in PyTorch, NaN is larger than all numbers,
/// and the last of several NaN is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MaxPool2d {
    /// Window size.
    pub kernel: [usize; 2],
    /// Distance between windows.
    pub stride: [usize; 2],
    /// Padding on both sides, at most half the window.
    pub padding: [usize; 2],
    /// Distance between the elements of a window.
    pub dilation: [usize; 2],
    /// Whether the last window may reach beyond the padded operand.
    pub ceil_mode: bool,
}

impl Operator for MaxPool2d {
    fn name(&self) -> &'static str {
        "max_pool2d_with_indices"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x] = args(inputs)?;
        let [n, c, h, w] = image(x)?;
        ensure((0..2).all(|i| self.padding[i] <= self.kernel[i] / 2), || {
            "padding must be at most half the window".into()
        })?;
        // Without this bound, a dilated window could contain nothing but padding.
        ensure((0..2).all(|i| self.padding[i] == 0 || self.dilation[i] <= x.shape[2 + i]), || {
            format!("with padding and a dilation of {:?}, windows could miss {x}", self.dilation)
        })?;
        let size = |i: usize, d| {
            window_size(d, self.kernel[i], self.stride[i], [self.padding[i]; 2], self.dilation[i], self.ceil_mode)
        };
        let shape = [n, c, size(0, h)?, size(1, w)?];
        Ok(vec![TensorType::new(x.dtype, shape), TensorType::new(DType::I64, shape)])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Cost::memory(window_reads(self.kernel, outputs[0]), inputs, outputs)
    }
}

/// Operands `(gradient, positions)`: adds each element of the gradient at its position, in row-major order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MaxPool2dBackward {
    /// Height and width of the operand of the pool.
    pub input: [usize; 2],
}

impl Operator for MaxPool2dBackward {
    fn name(&self) -> &'static str {
        "max_pool2d_with_indices_backward"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [g, at] = args(inputs)?;
        let [n, c, ..] = image(g)?;
        ensure_dtype(at, DType::I64, "the positions")?;
        ensure(g.shape == at.shape, || format!("the shapes of gradient {g} and positions {at} differ"))?;
        Ok(vec![TensorType::new(g.dtype, [n, c, self.input[0], self.input[1]])])
    }
}

/// The mean of every window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AvgPool2d {
    /// Window size.
    pub kernel: [usize; 2],
    /// Distance between windows.
    pub stride: [usize; 2],
    /// Zeros added on both sides, at most half the window.
    pub padding: [usize; 2],
    /// Whether the last window may reach beyond the padded operand. Elements beyond it never count.
    pub ceil_mode: bool,
    /// Whether padding counts in the mean.
    pub count_include_pad: bool,
}

impl Operator for AvgPool2d {
    fn name(&self) -> &'static str {
        "avg_pool2d"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x] = args(inputs)?;
        let [n, c, h, w] = image(x)?;
        ensure((0..2).all(|i| self.padding[i] <= self.kernel[i] / 2), || {
            "padding must be at most half the window".into()
        })?;
        let size =
            |i: usize, d| window_size(d, self.kernel[i], self.stride[i], [self.padding[i]; 2], 1, self.ceil_mode);
        Ok(vec![TensorType::new(x.dtype, [n, c, size(0, h)?, size(1, w)?])])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Cost::memory(window_reads(self.kernel, outputs[0]), inputs, outputs)
    }
}

/// The gradient of the operand of an [`AvgPool2d`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AvgPool2dBackward {
    /// The pool.
    pub pool: AvgPool2d,
    /// Height and width of its operand.
    pub input: [usize; 2],
}

impl Operator for AvgPool2dBackward {
    fn name(&self) -> &'static str {
        "avg_pool2d_backward"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [g] = args(inputs)?;
        let [n, c, ..] = image(g)?;
        let x = TensorType::new(g.dtype, [n, c, self.input[0], self.input[1]]);
        let y = self.pool.infer(&[&x])?;
        ensure(y[0] == *g, || format!("the pool of {x} is {}, not {g}", y[0]))?;
        Ok(vec![x])
    }
}

/// Means over `output[0] x output[1]` regions. Region `i` of `n` covers `⌊i d / n⌋ .. ⌈(i + 1) d / n⌉` of size `d`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdaptiveAvgPool2d {
    /// Height and width of the result.
    pub output: [usize; 2],
}

impl Operator for AdaptiveAvgPool2d {
    fn name(&self) -> &'static str {
        "_adaptive_avg_pool2d"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [x] = args(inputs)?;
        let [n, c, h, w] = image(x)?;
        ensure(h > 0 && w > 0, || format!("cannot pool the empty planes of {x}"))?;
        Ok(vec![TensorType::new(x.dtype, [n, c, self.output[0], self.output[1]])])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Cost::memory(inputs[0].numel() as f64, inputs, outputs)
    }
}

/// The gradient of the operand of an [`AdaptiveAvgPool2d`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdaptiveAvgPool2dBackward {
    /// Height and width of the operand of the pool.
    pub input: [usize; 2],
}

impl Operator for AdaptiveAvgPool2dBackward {
    fn name(&self) -> &'static str {
        "_adaptive_avg_pool2d_backward"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [g] = args(inputs)?;
        let [n, c, ..] = image(g)?;
        ensure(self.input[0] > 0 && self.input[1] > 0, || "cannot pool empty planes".into())?;
        Ok(vec![TensorType::new(g.dtype, [n, c, self.input[0], self.input[1]])])
    }
}
