//! Two-dimensional convolution and its two gradients. One-dimensional and transposed convolutions use these too.

use serde::{Deserialize, Serialize};

use super::check::{args, args_opt, ensure, ensure_float, ensure_same_dtype, ensure_shape};
use super::operator::{Cost, OpClass, Operator};
use crate::TensorType;

/// Operands `(x [N, C, H, W], weight [O, C / groups, KH, KW], bias [O]?)`, result `[N, O, H', W']`.
///
/// `H' = (H + 2 padding - dilation (KH - 1) - 1) / stride + 1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conv2d {
    /// Vertical and horizontal stride.
    pub stride: [usize; 2],
    /// Zeros added on both sides, vertically and horizontally.
    pub padding: [usize; 2],
    /// Distance between the elements of the kernel.
    pub dilation: [usize; 2],
    /// The number of groups of channels. Each has its own kernels.
    pub groups: usize,
}

impl Conv2d {
    /// The size of the result in direction `i` (0 vertical, 1 horizontal), from the sizes of operand and kernel.
    pub fn output_size(&self, i: usize, input: usize, kernel: usize) -> Result<usize, String> {
        window_size(input, kernel, self.stride[i], [self.padding[i]; 2], self.dilation[i], false)
    }
}

/// The number of windows of a convolution or a pool. With `ceil`, the last window may reach beyond the padded operand.
pub(super) fn window_size(
    input: usize,
    kernel: usize,
    stride: usize,
    padding: [usize; 2],
    dilation: usize,
    ceil: bool,
) -> Result<usize, String> {
    ensure(kernel > 0 && stride > 0 && dilation > 0, || "kernel, stride and dilation must be positive".into())?;
    let extent = (kernel - 1).checked_mul(dilation).and_then(|r| r.checked_add(1)).ok_or("the kernel is too large")?;
    let padded = input
        .checked_add(padding[0])
        .and_then(|n| n.checked_add(padding[1]))
        .filter(|n| *n <= TensorType::MAX_BYTES)
        .ok_or("the padding is too large")?;
    ensure(padded >= extent, || {
        format!("a window of {extent} does not fit into {input} elements padded by {padding:?}")
    })?;
    let steps = padded - extent;
    let mut count = if ceil { steps.div_ceil(stride) } else { steps / stride } + 1;
    // A window must start inside the operand or its left padding.
    if ceil && (count - 1) * stride >= input + padding[0] {
        count -= 1;
    }
    Ok(count)
}

fn conv_flops(weight: &TensorType, result: &TensorType) -> f64 {
    // One multiply-add per result element and kernel element.
    2.0 * result.numel() as f64 * weight.shape.get(1..).map_or(0, |s| s.iter().product::<usize>()) as f64
}

impl Operator for Conv2d {
    fn name(&self) -> &'static str {
        "conv2d"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let ([x, w], bias) = args_opt(inputs)?;
        ensure_same_dtype(x, w)?;
        ensure_float(x)?;
        let (&[n, c, h, wd], &[o, cg, kh, kw]) = (&x.shape[..], &w.shape[..]) else {
            return Err(format!("needs four dimensions in operand and weight, got {x} and {w}"));
        };
        ensure(self.groups > 0 && c % self.groups == 0 && o % self.groups == 0, || {
            format!("{c} and {o} channels are not multiples of {} groups", self.groups)
        })?;
        ensure(cg == c / self.groups, || {
            format!("the weight {w} takes {cg} channels per group, but the operand has {}", c / self.groups)
        })?;
        if let Some(bias) = bias {
            ensure_same_dtype(x, bias)?;
            ensure_shape(bias, &[o], "the bias")?;
        }
        Ok(vec![TensorType::new(x.dtype, [n, o, self.output_size(0, h, kh)?, self.output_size(1, wd, kw)?])])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Cost::new(OpClass::Convolution, conv_flops(inputs[1], outputs[0]), inputs, outputs)
    }
}

/// Operands `(gradient [N, O, H', W'], weight)`, result: the gradient of a [`Conv2d`]'s operand, `[N, C, H, W]`.
///
/// This is also the transposed convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conv2dInputGrad {
    /// The convolution.
    pub conv: Conv2d,
    /// Height and width of its operand.
    pub input: [usize; 2],
}

impl Operator for Conv2dInputGrad {
    fn name(&self) -> &'static str {
        "convolution_backward.input"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [g, w] = args(inputs)?;
        let (&[n, ..], &[_, cg, ..]) = (&g.shape[..], &w.shape[..]) else {
            return Err(format!("needs four dimensions in gradient and weight, got {g} and {w}"));
        };
        let c = cg.checked_mul(self.conv.groups).ok_or("too many channels")?;
        let x = TensorType::new(g.dtype, [n, c, self.input[0], self.input[1]]);
        let y = self.conv.infer(&[&x, w])?;
        ensure(y[0] == *g, || format!("the convolution of {x} with {w} is {}, not {g}", y[0]))?;
        Ok(vec![x])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Cost::new(OpClass::Convolution, conv_flops(inputs[1], inputs[0]), inputs, outputs)
    }
}

/// Operands `(gradient [N, O, H', W'], x [N, C, H, W])`, result: the gradient of a [`Conv2d`]'s weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conv2dWeightGrad {
    /// The convolution.
    pub conv: Conv2d,
    /// Height and width of its kernel.
    pub kernel: [usize; 2],
}

impl Operator for Conv2dWeightGrad {
    fn name(&self) -> &'static str {
        "convolution_backward.weight"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [g, x] = args(inputs)?;
        let (&[_, o, ..], &[_, c, ..]) = (&g.shape[..], &x.shape[..]) else {
            return Err(format!("needs four dimensions in gradient and operand, got {g} and {x}"));
        };
        ensure(self.conv.groups > 0, || "needs at least one group".into())?;
        let w = TensorType::new(x.dtype, [o, c / self.conv.groups, self.kernel[0], self.kernel[1]]);
        let y = self.conv.infer(&[x, &w])?;
        ensure(y[0] == *g, || format!("the convolution of {x} with {w} is {}, not {g}", y[0]))?;
        Ok(vec![w])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Cost::new(OpClass::Convolution, conv_flops(outputs[0], inputs[0]), inputs, outputs)
    }
}
