//! The tensors that a peer keeps from pass to pass.

use std::collections::BTreeMap;
use std::sync::Arc;

use fusionllm_backend::{Backend, Tensor};
use fusionllm_graph::{HostTensor, TensorType, ValueKind};
use fusionllm_plan::{Optimizer, Program};

use crate::ExecError;

/// A tensor of a [`Snapshot`].
#[derive(Debug, Clone)]
pub struct SnapshotTensor {
    /// The name of the parameter or buffer.
    pub name: String,
    /// The slot's name, if this is optimizer state of the parameter.
    pub slot: Option<&'static str>,
    tensor: Tensor,
}

/// The tensors that a peer owns, as they were after one step. Taking one is cheap: tensors are shared, not copied.
pub struct Snapshot {
    /// The tensors, in the program's order.
    pub tensors: Vec<SnapshotTensor>,
    backend: Arc<dyn Backend>,
}

impl Snapshot {
    /// Copies a tensor to the host.
    pub fn download(&self, tensor: &SnapshotTensor) -> Result<HostTensor, ExecError> {
        Ok(self.backend.download(&tensor.tensor)?)
    }
}

/// A peer's backend, and its tensors there.
pub(crate) struct State {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) optimizer: Optimizer,
    /// Parameters, buffers and constants by name.
    pub(crate) tensors: BTreeMap<String, Tensor>,
    /// Optimizer state of owned parameters by name, one tensor per slot.
    pub(crate) slots: BTreeMap<String, Vec<Tensor>>,
}

impl State {
    pub(crate) fn new(backend: Arc<dyn Backend>, optimizer: Optimizer) -> Self {
        Self { backend, optimizer, tensors: BTreeMap::new(), slots: BTreeMap::new() }
    }

    pub(crate) fn load(&mut self, name: &str, tensor: &HostTensor) -> Result<(), ExecError> {
        let tensor = self.backend.upload(tensor)?;
        self.tensors.insert(name.into(), tensor);
        Ok(())
    }

    pub(crate) fn load_slot(&mut self, name: &str, slot: &str, tensor: &HostTensor) -> Result<(), ExecError> {
        let Some(index) = self.optimizer.slots().iter().position(|s| *s == slot) else {
            return Err(ExecError::State(format!("the optimizer has no state {slot:?} for {name:?}")));
        };
        if !self.slots.contains_key(name) {
            let zeros = self.zero_slots(tensor.ty())?;
            self.slots.insert(name.into(), zeros);
        }
        if let Some(slots) = self.slots.get_mut(name) {
            slots[index] = self.backend.upload(tensor)?;
        }
        Ok(())
    }

    pub(crate) fn read(&self, name: &str) -> Result<HostTensor, ExecError> {
        match self.tensors.get(name) {
            Some(t) => Ok(self.backend.download(t)?),
            None => Err(ExecError::State(format!("this peer has no tensor {name:?}"))),
        }
    }

    pub(crate) fn read_slot(&self, name: &str, slot: &str) -> Result<HostTensor, ExecError> {
        let index = self.optimizer.slots().iter().position(|s| *s == slot);
        match index.and_then(|i| self.slots.get(name)?.get(i)) {
            Some(t) => Ok(self.backend.download(t)?),
            None => Err(ExecError::State(format!("this peer has no optimizer state {slot:?} of {name:?}"))),
        }
    }

    pub(crate) fn prepare(&mut self, program: &Program) -> Result<(), ExecError> {
        program.validate()?;
        for holding in &program.holdings {
            let value = &program.values[&holding.value];
            match self.tensors.get(&value.name) {
                None => return Err(ExecError::State(format!("{:?} was not loaded", value.name))),
                Some(t) if *t.ty() != value.ty => {
                    let (name, expected, loaded) = (&value.name, &value.ty, t.ty());
                    return Err(ExecError::State(format!("{name:?} has type {expected}, but {loaded} was loaded")));
                }
                Some(_) => {}
            }
        }
        for reduction in program.reductions.iter().filter(|r| r.owner == program.peer) {
            let value = &program.values[&reduction.parameter];
            if !self.slots.contains_key(&value.name) {
                let zeros = self.zero_slots(&value.ty)?;
                self.slots.insert(value.name.clone(), zeros);
            }
        }
        Ok(())
    }

    fn zero_slots(&self, ty: &TensorType) -> Result<Vec<Tensor>, ExecError> {
        let zeros = HostTensor::zeros(ty.clone());
        let slots = self.optimizer.slots().iter().map(|_| self.backend.upload(&zeros));
        Ok(slots.collect::<Result<_, _>>()?)
    }

    pub(crate) fn snapshot(&self, program: &Program) -> Snapshot {
        let mut tensors = Vec::new();
        for holding in program.holdings.iter().filter(|h| h.owner) {
            let value = &program.values[&holding.value];
            if value.kind == ValueKind::Constant {
                continue;
            }
            if let Some(tensor) = self.tensors.get(&value.name) {
                tensors.push(SnapshotTensor { name: value.name.clone(), slot: None, tensor: tensor.clone() });
            }
            for (slot, tensor) in self.optimizer.slots().iter().zip(self.slots.get(&value.name).into_iter().flatten()) {
                tensors.push(SnapshotTensor { name: value.name.clone(), slot: Some(slot), tensor: tensor.clone() });
            }
        }
        Snapshot { tensors, backend: self.backend.clone() }
    }

    /// Bytes of all tensors.
    pub(crate) fn bytes(&self) -> u64 {
        self.tensors.values().chain(self.slots.values().flatten()).map(bytes).sum()
    }
}

pub(crate) fn bytes(t: &Tensor) -> u64 {
    t.ty().bytes() as u64
}
