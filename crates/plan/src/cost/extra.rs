use fusionllm_graph::ops::{Binary, SquaredNorm};
use fusionllm_graph::{Cost, DType, Op, TensorType};
use fusionllm_program::Optimizer;

use super::device::Device;

/// An operator that no graph node stands for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExtraOperator {
    /// Its ATen name.
    pub name: &'static str,
    /// Its work.
    pub cost: Cost,
}

impl ExtraOperator {
    fn new(op: &Op, inputs: &[&TensorType], outputs: &[&TensorType]) -> Self {
        Self { name: op.name(), cost: op.cost(inputs, outputs) }
    }

    /// Seconds on a device.
    pub(crate) fn seconds(&self, device: &Device) -> f64 {
        device.seconds(self.name, &self.cost)
    }
}

/// The operator that adds a tensor to a sum.
pub(crate) fn sum(ty: &TensorType) -> ExtraOperator {
    ExtraOperator::new(&Op::from(Binary::Add), &[ty, ty], &[ty])
}

/// The operator that computes a gradient's squared norm.
pub(crate) fn squared_norm(ty: &TensorType) -> ExtraOperator {
    ExtraOperator::new(&Op::from(SquaredNorm), &[ty], &[&TensorType::new(DType::F64, [])])
}

/// The operator that applies a gradient.
pub(crate) fn update(optimizer: &Optimizer, ty: &TensorType) -> ExtraOperator {
    let outputs = vec![ty; 1 + optimizer.slots().len()];
    // The hyper-parameters are a few scalars.
    let hyper = TensorType::new(DType::F64, [4]);
    let inputs: Vec<&TensorType> = [ty, ty].into_iter().chain(outputs[1..].iter().copied()).chain([&hyper]).collect();
    ExtraOperator::new(&optimizer.op(), &inputs, &outputs)
}
