//! Parameter updates.

use fusionllm_graph::ops::{AdamwStep, SgdStep};
use fusionllm_graph::{Op, TensorType};

use super::tensor::Array;
use super::{Ran, all, generic, with_float};
use crate::kernels::{self, Adamw, Float, Sgd};

pub(super) fn run(op: &Op, inputs: Vec<Array>, outputs: &[TensorType]) -> Ran {
    let dtype = outputs[0].dtype;
    match op {
        Op::AdamwStep(op) => {
            let inputs = all(inputs)?;
            with_float!(dtype, T => Ok(adamw::<T>(op, inputs)))
        }
        Op::SgdStep(op) => {
            let inputs = all(inputs)?;
            with_float!(dtype, T => Ok(sgd::<T>(op, inputs)))
        }
        _ => generic(op, inputs, outputs),
    }
}

fn adamw<T: Float>(op: &AdamwStep, [p, g, m, v, hyper]: [Array; 5]) -> Vec<Array> {
    let (g, hyper) = (g.contiguous(), hyper.contiguous());
    let [mut p, mut m, mut v] = [p, m, v].map(Array::change::<T>);
    let h = hyper.elements::<f64>();
    let step = Adamw {
        lr: h[0],
        beta1: op.beta1,
        beta2: op.beta2,
        eps: op.eps,
        weight_decay: op.weight_decay,
        correction1: h[1],
        correction2: h[2],
        factor: h[3],
    };
    kernels::adamw::<T>(p.elements(), g.elements(), m.elements(), v.elements(), &step);
    vec![p.done(), m.done(), v.done()]
}

fn sgd<T: Float>(op: &SgdStep, [p, g, m, hyper]: [Array; 4]) -> Vec<Array> {
    let (g, hyper) = (g.contiguous(), hyper.contiguous());
    let [mut p, mut m] = [p, m].map(Array::change::<T>);
    let h = hyper.elements::<f64>();
    let step =
        Sgd { lr: h[0], momentum: op.momentum, weight_decay: op.weight_decay, nesterov: op.nesterov, factor: h[1] };
    kernels::sgd::<T>(p.elements(), g.elements(), m.elements(), &step);
    vec![p.done(), m.done()]
}
