//! The tensors that a peer keeps from pass to pass.

use std::collections::BTreeMap;
use std::sync::Arc;

use fusionllm_backend::{Backend, Tensor};
use fusionllm_graph::{HostTensor, TensorType, ValueKind};
use fusionllm_plan::{Medium, Movable, Optimizer, Program};

use crate::ExecError;
use crate::storage::{Media, Stored};

/// A tensor of a [`Snapshot`].
#[derive(Clone)]
pub struct SnapshotTensor {
    /// The name of the parameter or buffer.
    pub name: String,
    /// The slot's name, if this is optimizer state of the parameter.
    pub slot: Option<&'static str>,
    held: Held,
}

/// The tensors that a peer owns, as they were after one step. Taking one is cheap: tensors are shared, not copied.
pub struct Snapshot {
    /// The tensors, in the program's order.
    pub tensors: Vec<SnapshotTensor>,
    backend: Arc<dyn Backend>,
}

impl Snapshot {
    /// Copies a tensor to the host, from the device or from where it was offloaded to.
    pub fn download(&self, tensor: &SnapshotTensor) -> Result<HostTensor, ExecError> {
        tensor.held.download(&*self.backend)
    }
}

/// Where a tensor is. It is in memory, on a medium, or in both places with the same content.
#[derive(Clone, Default)]
pub(crate) struct Held {
    memory: Option<Tensor>,
    away: Option<Arc<dyn Stored>>,
}

impl Held {
    fn ty(&self) -> Option<&TensorType> {
        self.memory.as_ref().map(Tensor::ty).or_else(|| self.away.as_ref().map(|away| away.ty()))
    }

    pub(crate) fn download(&self, backend: &dyn Backend) -> Result<HostTensor, ExecError> {
        match (&self.memory, &self.away) {
            (Some(tensor), _) => Ok(backend.download(tensor)?),
            (None, Some(away)) => away.load(),
            (None, None) => Err(ExecError::State("a tensor is neither in memory nor offloaded".into())),
        }
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
    pub(crate) media: Media,
    /// What is away between passes.
    resting: BTreeMap<Key, Medium>,
    tensors: BTreeMap<Key, Held>,
}

impl State {
    pub(crate) fn new(backend: Arc<dyn Backend>, optimizer: Optimizer) -> Self {
        Self { backend, optimizer, media: Media::default(), resting: BTreeMap::new(), tensors: BTreeMap::new() }
    }

    /// A tensor in memory.
    pub(crate) fn get(&self, key: &Key) -> Option<&Tensor> {
        self.tensors.get(key)?.memory.as_ref()
    }

    /// A tensor, wherever it is.
    pub(crate) fn held(&self, key: &Key) -> Option<&Held> {
        self.tensors.get(key)
    }

    pub(crate) fn take(&mut self, key: &Key) -> Option<Tensor> {
        self.tensors.remove(key)?.memory
    }

    pub(crate) fn put(&mut self, key: Key, tensor: Tensor) {
        self.tensors.insert(key, Held { memory: Some(tensor), away: None });
    }

    /// Moves a tensor out of memory. Returns its bytes.
    pub(crate) fn offload(&mut self, key: &Key, to: Medium) -> Result<u64, ExecError> {
        let held = self.tensors.get_mut(key).ok_or_else(|| missing(key))?;
        let tensor = held.memory.take().ok_or_else(|| missing(key))?;
        let freed = bytes(&tensor);
        if held.away.is_none() {
            let host = self.backend.download(&tensor)?;
            drop(tensor);
            held.away = Some(self.media.store(to, host)?);
        }
        Ok(freed)
    }

    /// Moves a tensor back into memory. Returns its bytes.
    pub(crate) fn fetch(&mut self, key: &Key) -> Result<u64, ExecError> {
        let held = self.tensors.get_mut(key).ok_or_else(|| missing(key))?;
        let away = held.away.as_ref().ok_or_else(|| missing(key))?;
        let tensor = self.backend.upload(&away.load()?)?;
        let taken = bytes(&tensor);
        held.memory = Some(tensor);
        Ok(taken)
    }

    /// From now on, what `program` has away between passes is away, even before the first one.
    pub(crate) fn rest(&mut self, program: &Program) -> Result<(), ExecError> {
        for (what, medium) in program.resting() {
            let value = program.movable_value(what).and_then(|v| program.values.get(&v));
            let value = value.ok_or_else(|| ExecError::State("the program moves what it does not have".into()))?;
            let slot = match what {
                Movable::Slot { slot, .. } => Some(slot as usize),
                _ => None,
            };
            let key = Key { name: value.name.clone(), slot };
            if self.get(&key).is_some() {
                self.offload(&key, medium)?;
            }
            self.resting.insert(key, medium);
        }
        Ok(())
    }

    /// Sets a tensor from the host, in memory or where it rests.
    fn set(&mut self, key: Key, tensor: &HostTensor) -> Result<(), ExecError> {
        let held = match self.resting.get(&key) {
            Some(medium) => Held { memory: None, away: Some(self.media.store(*medium, tensor.clone())?) },
            None => Held { memory: Some(self.backend.upload(tensor)?), away: None },
        };
        self.tensors.insert(key, held);
        Ok(())
    }

    /// A parameter's optimizer state, as far as it is there.
    pub(crate) fn slots(&self, name: &str) -> impl Iterator<Item = (&'static str, &Held)> {
        let slots = self.optimizer.slots().iter().enumerate();
        slots.filter_map(move |(i, slot)| Some((*slot, self.tensors.get(&Key { name: name.into(), slot: Some(i) })?)))
    }

    pub(crate) fn load(&mut self, name: &str, tensor: &HostTensor) -> Result<(), ExecError> {
        self.set(Key { name: name.into(), slot: None }, tensor)
    }

    pub(crate) fn load_slot(&mut self, name: &str, slot: &str, tensor: &HostTensor) -> Result<(), ExecError> {
        let Some(index) = self.slot(slot) else {
            return Err(ExecError::State(format!("the optimizer has no state {slot:?} for {name:?}")));
        };
        self.zero_slots(name, tensor.ty())?;
        self.set(Key { name: name.into(), slot: Some(index) }, tensor)
    }

    fn slot(&self, slot: &str) -> Option<usize> {
        self.optimizer.slots().iter().position(|s| *s == slot)
    }

    pub(crate) fn read(&self, name: &str) -> Result<HostTensor, ExecError> {
        match self.held(&Key { name: name.into(), slot: None }) {
            Some(held) => held.download(&*self.backend),
            None => Err(ExecError::State(format!("this peer has no tensor {name:?}"))),
        }
    }

    pub(crate) fn read_slot(&self, name: &str, slot: &str) -> Result<HostTensor, ExecError> {
        let index = self.slot(slot);
        match index.and_then(|i| self.held(&Key { name: name.into(), slot: Some(i) })) {
            Some(held) => held.download(&*self.backend),
            None => Err(ExecError::State(format!("this peer has no optimizer state {slot:?} of {name:?}"))),
        }
    }

    /// Checks that the program's tensors are there, and makes missing optimizer state.
    pub(crate) fn prepare(&mut self, program: &Program) -> Result<(), ExecError> {
        program.validate()?;
        self.rest(program)?;
        for holding in &program.holdings {
            let value = &program.values[&holding.value];
            let key = Key { name: value.name.clone(), slot: None };
            match self.held(&key).and_then(Held::ty) {
                None => return Err(ExecError::State(format!("{:?} was not loaded", value.name))),
                Some(loaded) if *loaded != value.ty => {
                    let (name, expected) = (&value.name, &value.ty);
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
            if self.held(&key).is_none() {
                self.set(key, &HostTensor::zeros(ty.clone()))?;
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
            let tensor = self.held(&Key { name: name.clone(), slot: None }).map(|held| (None, held));
            for (slot, held) in tensor.into_iter().chain(self.slots(name).map(|(slot, held)| (Some(slot), held))) {
                tensors.push(SnapshotTensor { name: name.clone(), slot, held: held.clone() });
            }
        }
        Snapshot { tensors, backend: self.backend.clone() }
    }

    /// Bytes of all tensors in memory.
    pub(crate) fn bytes(&self) -> u64 {
        self.tensors.values().filter_map(|held| held.memory.as_ref()).map(bytes).sum()
    }
}

fn missing(key: &Key) -> ExecError {
    ExecError::State(format!("there is no tensor of {:?} to move; this is a bug, please report it", key.name))
}

pub(crate) fn bytes(t: &Tensor) -> u64 {
    t.ty().bytes() as u64
}
