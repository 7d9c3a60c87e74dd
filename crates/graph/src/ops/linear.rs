//! Matrix products.

use serde::{Deserialize, Serialize};

use super::check::{args, args_opt, broadcast_shapes, ensure, ensure_float, ensure_same_dtype, ensure_shape};
use super::operator::{Cost, OpClass, Operator};
use crate::TensorType;

/// Operands `(a [.., M, K], b [.., K, N])`, result `[.., M, N]`. The leading dimensions broadcast.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Matmul;

impl Operator for Matmul {
    fn name(&self) -> &'static str {
        "matmul"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [a, b] = args(inputs)?;
        ensure_same_dtype(a, b)?;
        ensure_float(a)?;
        let ([ab @ .., m, ka], [bb @ .., kb, n]) = (&a.shape[..], &b.shape[..]) else {
            return Err(format!("needs at least two dimensions in each operand, got {a} and {b}"));
        };
        ensure(ka == kb, || format!("inner sizes differ: {ka} in {a}, {kb} in {b}"))?;
        let mut shape = broadcast_shapes(&[ab, bb])?;
        shape.extend([*m, *n]);
        Ok(vec![TensorType::new(a.dtype, shape)])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        let k = inputs.first().and_then(|a| a.shape.last()).copied().unwrap_or(0);
        let n = outputs.first().map_or(0, |y| y.numel());
        Cost::new(OpClass::Matmul, 2.0 * n as f64 * k as f64, inputs, outputs)
    }
}

/// Operands `(x [.., in], weight [out, in], bias [out]?)`, result `x weightᵀ + bias`, `[.., out]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Linear;

impl Operator for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let ([x, w], bias) = args_opt(inputs)?;
        ensure_same_dtype(x, w)?;
        ensure_float(x)?;
        ensure(w.rank() == 2, || format!("the weight must have two dimensions, got {w}"))?;
        let (last, lead) = x.shape.split_last().ok_or("the operand must have a dimension")?;
        ensure(*last == w.shape[1], || {
            format!("the last dimension of the operand is {last}, but that of the weight is {}", w.shape[1])
        })?;
        if let Some(bias) = bias {
            ensure_same_dtype(x, bias)?;
            ensure_shape(bias, &w.shape[..1], "the bias")?;
        }
        let mut shape = lead.to_vec();
        shape.push(w.shape[0]);
        Ok(vec![TensorType::new(x.dtype, shape)])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Matmul.cost(inputs, outputs)
    }
}
