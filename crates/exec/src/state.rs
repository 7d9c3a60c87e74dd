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

/// The name of a tensor that stays from pass to pass: of a parameter, buffer or constant, or of a parameter's optimizer
/// state.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) name: String,
    /// Index of the optimizer's slot.
    pub(crate) slot: Option<usize>,
}

/// A peer's backend, and its tensors there.
pub(crate) struct State {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) optimizer: Optimizer,
    tensors: BTreeMap<Key, Tensor>,
}

impl State {
    pub(crate) fn new(backend: Arc<dyn Backend>, optimizer: Optimizer) -> Self {
        Self { backend, optimizer, tensors: BTreeMap::new() }
    }

    pub(crate) fn get(&self, key: &Key) -> Option<&Tensor> {
        self.tensors.get(key)
    }

    pub(crate) fn take(&mut self, key: &Key) -> Option<Tensor> {
        self.tensors.remove(key)
    }

    pub(crate) fn put(&mut self, key: Key, tensor: Tensor) {
        self.tensors.insert(key, tensor);
    }

    /// A parameter's optimizer state, as far as it is there.
    pub(crate) fn slots(&self, name: &str) -> impl Iterator<Item = (&'static str, &Tensor)> {
        let slots = self.optimizer.slots().iter().enumerate();
        slots.filter_map(move |(i, slot)| Some((*slot, self.tensors.get(&Key { name: name.into(), slot: Some(i) })?)))
    }

    pub(crate) fn load(&mut self, name: &str, tensor: &HostTensor) -> Result<(), ExecError> {
        let tensor = self.backend.upload(tensor)?;
        self.put(Key { name: name.into(), slot: None }, tensor);
        Ok(())
    }

    pub(crate) fn load_slot(&mut self, name: &str, slot: &str, tensor: &HostTensor) -> Result<(), ExecError> {
        let Some(index) = self.slot(slot) else {
            return Err(ExecError::State(format!("the optimizer has no state {slot:?} for {name:?}")));
        };
        self.zero_slots(name, tensor.ty())?;
        let tensor = self.backend.upload(tensor)?;
        self.put(Key { name: name.into(), slot: Some(index) }, tensor);
        Ok(())
    }

    fn slot(&self, slot: &str) -> Option<usize> {
        self.optimizer.slots().iter().position(|s| *s == slot)
    }

    pub(crate) fn read(&self, name: &str) -> Result<HostTensor, ExecError> {
        match self.get(&Key { name: name.into(), slot: None }) {
            Some(t) => Ok(self.backend.download(t)?),
            None => Err(ExecError::State(format!("this peer has no tensor {name:?}"))),
        }
    }

    pub(crate) fn read_slot(&self, name: &str, slot: &str) -> Result<HostTensor, ExecError> {
        let index = self.slot(slot);
        match index.and_then(|i| self.get(&Key { name: name.into(), slot: Some(i) })) {
            Some(t) => Ok(self.backend.download(t)?),
            None => Err(ExecError::State(format!("this peer has no optimizer state {slot:?} of {name:?}"))),
        }
    }

    /// Checks that the program's tensors are there, and makes missing optimizer state.
    pub(crate) fn prepare(&mut self, program: &Program) -> Result<(), ExecError> {
        program.validate()?;
        for holding in &program.holdings {
            let value = &program.values[&holding.value];
            match self.get(&Key { name: value.name.clone(), slot: None }) {
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
            self.zero_slots(&value.name, &value.ty)?;
        }
        Ok(())
    }

    /// Makes a parameter's optimizer state where it is missing.
    fn zero_slots(&mut self, name: &str, ty: &TensorType) -> Result<(), ExecError> {
        for slot in 0..self.optimizer.slots().len() {
            let key = Key { name: name.into(), slot: Some(slot) };
            if self.get(&key).is_none() {
                let zeros = self.backend.upload(&HostTensor::zeros(ty.clone()))?;
                self.put(key, zeros);
            }
        }
        Ok(())
    }

    pub(crate) fn snapshot(&self, program: &Program) -> Snapshot {
        let mut tensors = Vec::new();
        for holding in program.holdings.iter().filter(|h| h.owner) {
            let value = &program.values[&holding.value];
            if value.kind == ValueKind::Constant {
                continue;
            }
            let name = &value.name;
            let tensor = self.get(&Key { name: name.clone(), slot: None }).map(|tensor| (None, tensor));
            for (slot, tensor) in tensor.into_iter().chain(self.slots(name).map(|(slot, t)| (Some(slot), t))) {
                tensors.push(SnapshotTensor { name: name.clone(), slot, tensor: tensor.clone() });
            }
        }
        Snapshot { tensors, backend: self.backend.clone() }
    }

    /// Bytes of all tensors.
    pub(crate) fn bytes(&self) -> u64 {
        self.tensors.values().map(bytes).sum()
    }
}

pub(crate) fn bytes(t: &Tensor) -> u64 {
    t.ty().bytes() as u64
}
