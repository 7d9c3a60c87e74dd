//! The state of a model: its parameters and buffers, as files of weights have them.

use crate::{Graph, TensorType, ValueKind};

/// A tensor of a model's state.
#[derive(Debug, Clone, PartialEq)]
pub struct StateTensor {
    /// Its names. Tied tensors are one tensor with several names, and a file may have it under any of them.
    pub names: Vec<String>,
    /// Its type.
    pub ty: TensorType,
    /// Whether it is a parameter that is trained, or that is trained unless a job freezes it.
    pub trained: bool,
}

impl Graph {
    /// The state of the model, each tensor under its name in the graph.
    pub fn state(&self) -> impl Iterator<Item = StateTensor> {
        self.values.iter().filter_map(|value| {
            let trained = match value.kind {
                ValueKind::Parameter(_) | ValueKind::Frozen(_) => true,
                ValueKind::Buffer(_) => false,
                _ => return None,
            };
            Some(StateTensor { names: vec![value.name.clone()], ty: value.ty.clone(), trained })
        })
    }
}
