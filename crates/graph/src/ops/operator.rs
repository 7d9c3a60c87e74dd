//! The trait behind each operator, and the cost of an operator.

use serde::{Deserialize, Serialize};

use crate::TensorType;

/// The facts of an operator that its operands' types decide. Each operator also has gradient and decomposition rules.
pub trait Operator {
    /// The operator's name in ATen.
    fn name(&self) -> &'static str;

    /// The types of the results, or the requirement that the operands fail. Never panics, whatever the operands.
    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String>;

    /// Which elements of its operand each result shows, if the results are views.
    fn view(&self) -> Option<View> {
        None
    }

    /// The work on any device. By default memory-bound, with one operation per result element. Views count as no work.
    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        match self.view() {
            Some(_) => Cost { flops: 0.0, bytes: 0.0, class: OpClass::View },
            None => Cost::memory(elements(outputs), inputs, outputs),
        }
    }
}

/// A result that shares the memory of the only operand. It differs in how elements are addressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum View {
    /// Each element of the operand once.
    Whole,
    /// Each element, some of them more than once.
    Repeated,
    /// Some of the elements.
    Part,
}

/// The number of elements of all these tensors. A node may name one operand many times, so no integer is sure to hold
/// the sum.
pub(super) fn elements(types: &[&TensorType]) -> f64 {
    types.iter().map(|t| t.numel() as f64).sum()
}

/// The class of hardware unit that limits an operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OpClass {
    /// Matrix products.
    Matmul,
    /// Convolutions.
    Convolution,
    /// Limited by memory traffic.
    Memory,
    /// Operators whose results are [views](super::View).
    View,
}

/// The work of one operator, independent of the device.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// Floating-point operations; a multiply-add counts as two.
    pub flops: f64,
    /// Bytes read and written.
    pub bytes: f64,
    /// The hardware unit that limits it.
    pub class: OpClass,
}

impl Cost {
    /// `flops` operations that read every operand and write every result once.
    pub fn new(class: OpClass, flops: f64, inputs: &[&TensorType], outputs: &[&TensorType]) -> Self {
        let bytes = inputs.iter().chain(outputs).map(|t| t.bytes() as f64).sum();
        Self { flops, bytes, class }
    }

    /// The cost of a memory-bound operator.
    pub fn memory(flops: f64, inputs: &[&TensorType], outputs: &[&TensorType]) -> Self {
        Self::new(OpClass::Memory, flops, inputs, outputs)
    }
}
