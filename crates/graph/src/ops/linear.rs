//! Matrix products.

use serde::{Deserialize, Serialize};

use super::elementwise::broadcast_shapes;
use super::{Backward, Cost, OpClass, Operator, args, args_opt, float, of_shape, same_dtype, want};
use crate::{Builder, GraphError, TensorType, ValueId};

/// `(a [.., M, K], b [.., K, N])`: `[.., M, N]`; the leading dimensions broadcast.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Matmul;

impl Operator for Matmul {
    fn name(&self) -> &'static str {
        "matmul"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let [a, b] = args(inputs)?;
        same_dtype(a, b)?;
        float(a)?;
        let ([ab @ .., m, ka], [bb @ .., kb, n]) = (&a.shape[..], &b.shape[..]) else {
            return Err(format!("needs at least two dimensions in each operand, got {a} and {b}"));
        };
        want(ka == kb, || format!("inner sizes differ: {ka} in {a}, {kb} in {b}"))?;
        let mut shape = broadcast_shapes(&[ab, bb])?;
        shape.extend([*m, *n]);
        Ok(vec![TensorType::new(a.dtype, shape)])
    }

    // dA = G Bᵀ, dB = Aᵀ G, summed over broadcast leading dimensions.
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let (a, b, g) = (cx.inputs[0], cx.inputs[1], cx.grad(0)?);
        let da = cx.want(0, |cx| {
            let bt = cx.b.transpose(b)?;
            let d = cx.b.matmul(g, bt)?;
            cx.b.sum_to(d, a)
        })?;
        let db = cx.want(1, |cx| {
            // A matrix shared by all leading dimensions: one product over all rows instead of one each and a sum.
            if cx.b.ty(b).rank() == 2 && cx.b.ty(a).rank() > 2 {
                let a2 = cx.b.flatten_leading(a)?;
                let g2 = cx.b.flatten_leading(g)?;
                let at = cx.b.transpose(a2)?;
                return cx.b.matmul(at, g2);
            }
            let at = cx.b.transpose(a)?;
            let d = cx.b.matmul(at, g)?;
            cx.b.sum_to(d, b)
        })?;
        Ok(vec![da, db])
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        let k = inputs.first().and_then(|a| a.shape.last()).copied().unwrap_or(0);
        let n = outputs.first().map_or(0, |y| y.numel());
        Cost::new(OpClass::Matmul, 2.0 * n as f64 * k as f64, inputs, outputs)
    }
}

/// `(x [.., in], weight [out, in], bias [out]?)`: `x weightᵀ + bias`, `[.., out]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Linear;

impl Operator for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let ([x, w], bias) = args_opt(inputs)?;
        same_dtype(x, w)?;
        float(x)?;
        want(w.rank() == 2, || format!("the weight must have two dimensions, got {w}"))?;
        let (last, lead) = x.shape.split_last().ok_or("the operand must have a dimension")?;
        want(*last == w.shape[1], || format!("the operand's last size is {last}, the weight's is {}", w.shape[1]))?;
        if let Some(bias) = bias {
            same_dtype(x, bias)?;
            of_shape(bias, &w.shape[..1], "the bias")?;
        }
        let mut shape = lead.to_vec();
        shape.push(w.shape[0]);
        Ok(vec![TensorType::new(x.dtype, shape)])
    }

    // dX = G W, dW = Gᵀ X, db = Σ G, over all leading dimensions.
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        let (x, w, g) = (cx.inputs[0], cx.inputs[1], cx.grad(0)?);
        let g2 = cx.b.flatten_leading(g)?;
        let dx = cx.want(0, |cx| {
            let d = cx.b.matmul(g2, w)?;
            let shape = cx.b.ty(x).shape.clone();
            cx.b.reshape(d, shape)
        })?;
        let dw = cx.want(1, |cx| {
            let gt = cx.b.transpose(g2)?;
            let x2 = cx.b.flatten_leading(x)?;
            cx.b.matmul(gt, x2)
        })?;
        let db = cx.want(2, |cx| cx.b.sum(g2, &[0], false))?;
        Ok(if cx.inputs.len() == 3 { vec![dx, dw, db] } else { vec![dx, dw] })
    }

    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Matmul.cost(inputs, outputs)
    }

    fn decompose(&self, b: &mut Builder, inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        let x2 = b.flatten_leading(inputs[0])?;
        let wt = b.transpose(inputs[1])?;
        let mut y = b.matmul(x2, wt)?;
        if let Some(&bias) = inputs.get(2) {
            y = b.add(y, bias)?;
        }
        let mut shape = b.ty(inputs[0]).shape.clone();
        if let Some(last) = shape.last_mut() {
            *last = b.ty(inputs[1]).shape[0];
        }
        Ok(Some(vec![b.reshape(y, shape)?]))
    }
}
