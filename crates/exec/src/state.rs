//! The tensors that a peer keeps from pass to pass.

use std::collections::BTreeMap;
use std::sync::Arc;

use fusionllm_backend::{Backend, Tensor};
use fusionllm_graph::{HostTensor, TensorType, ValueKind};
use fusionllm_program::{Medium, Optimizer, ParameterGroup, Program, TensorKey};

use crate::ExecError;
use crate::storage::{Media, Stored};

/// A tensor of a [`Snapshot`].
#[derive(Clone)]
pub struct SnapshotTensor {
    /// The tensor's name.
    pub key: TensorKey,
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

/// The place of a tensor: in memory, on a medium, or both with the same content.
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

/// A peer's backend, and its tensors there.
pub(crate) struct State {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) optimizer: Optimizer,
    /// The parameters with settings of their own.
    pub(crate) groups: BTreeMap<String, ParameterGroup>,
    pub(crate) media: Media,
    /// The tensors that are away between passes, each with its medium.
    resting: BTreeMap<TensorKey, Medium>,
    tensors: BTreeMap<TensorKey, Held>,
}

impl State {
    pub(crate) fn new(backend: Arc<dyn Backend>, optimizer: Optimizer) -> Self {
        Self {
            backend,
            optimizer,
            groups: BTreeMap::new(),
            media: Media::default(),
            resting: BTreeMap::new(),
            tensors: BTreeMap::new(),
        }
    }

    /// The rule by which a parameter is updated, and the multiple of the learning rate.
    pub(crate) fn update_rule(&self, parameter: &str) -> (Optimizer, f64) {
        match self.groups.get(parameter) {
            Some(group) => (self.optimizer.with_weight_decay(group.weight_decay), group.rate),
            None => (self.optimizer, 1.0),
        }
    }

    /// A tensor in memory.
    pub(crate) fn get(&self, key: &TensorKey) -> Option<&Tensor> {
        self.tensors.get(key)?.memory.as_ref()
    }

    /// A tensor, wherever it is.
    pub(crate) fn held(&self, key: &TensorKey) -> Option<&Held> {
        self.tensors.get(key)
    }

    pub(crate) fn take(&mut self, key: &TensorKey) -> Option<Tensor> {
        self.tensors.remove(key)?.memory
    }

    pub(crate) fn put(&mut self, key: TensorKey, tensor: Tensor) {
        self.tensors.insert(key, Held { memory: Some(tensor), away: None });
    }

    /// Replaces a tensor by an earlier content of it.
    pub(crate) fn put_back(&mut self, key: TensorKey, held: Held) {
        self.tensors.insert(key, held);
    }

    /// Moves a tensor out of memory. Returns its bytes.
    pub(crate) fn offload(&mut self, key: &TensorKey, to: Medium) -> Result<u64, ExecError> {
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
    pub(crate) fn fetch(&mut self, key: &TensorKey) -> Result<u64, ExecError> {
        let held = self.tensors.get_mut(key).ok_or_else(|| missing(key))?;
        let away = held.away.as_ref().ok_or_else(|| missing(key))?;
        let tensor = self.backend.upload(&away.load()?)?;
        let taken = bytes(&tensor);
        held.memory = Some(tensor);
        Ok(taken)
    }

    /// Keeps the tensors away that `program` has away between passes, from now on, even before the first pass.
    pub(crate) fn rest(&mut self, program: &Program) -> Result<(), ExecError> {
        for (tensor, medium) in program.resting() {
            let key = program.key(tensor, self.optimizer);
            let key = key.ok_or_else(|| ExecError::State("the program moves a tensor that it does not have".into()))?;
            if self.get(&key).is_some() {
                self.offload(&key, medium)?;
            }
            self.resting.insert(key, medium);
        }
        Ok(())
    }

    /// Sets a tensor from the host, in memory or where it rests.
    fn set(&mut self, key: TensorKey, tensor: &HostTensor) -> Result<(), ExecError> {
        let held = match self.resting.get(&key) {
            Some(medium) => Held { memory: None, away: Some(self.media.store(*medium, tensor.clone())?) },
            None => Held { memory: Some(self.backend.upload(tensor)?), away: None },
        };
        self.tensors.insert(key, held);
        Ok(())
    }

    /// The keys of a parameter's optimizer state.
    pub(crate) fn slots(&self, name: &str) -> impl Iterator<Item = TensorKey> + use<> {
        let name = name.to_owned();
        self.optimizer.slots().iter().map(move |slot| TensorKey::slot(name.as_str(), *slot))
    }

    /// Sets a tensor from the host. The other slots of a parameter's optimizer state start at zero.
    pub(crate) fn load(&mut self, key: TensorKey, tensor: &HostTensor) -> Result<(), ExecError> {
        if key.slot.is_some() {
            if !self.slots(&key.name).any(|slot| slot == key) {
                return Err(ExecError::State(format!("the optimizer has no {key}")));
            }
            self.zero_slots(&key.name, tensor.ty())?;
        }
        self.set(key, tensor)
    }

    pub(crate) fn read(&self, key: &TensorKey) -> Result<HostTensor, ExecError> {
        match self.held(key) {
            Some(held) => held.download(&*self.backend),
            None => Err(ExecError::State(format!("this peer has no tensor {key}"))),
        }
    }

    /// Checks that the program's tensors are there, and makes missing optimizer state.
    pub(crate) fn prepare(&mut self, program: &Program) -> Result<(), ExecError> {
        program.validate()?;
        self.rest(program)?;
        for holding in &program.holdings {
            let value = &program.values[&holding.value];
            let key = TensorKey::value(&value.name);
            match self.held(&key).and_then(Held::ty) {
                None => return Err(ExecError::State(format!("{:?} was not loaded", value.name))),
                Some(loaded) if *loaded != value.ty => {
                    let (name, expected) = (&value.name, &value.ty);
                    return Err(ExecError::State(format!("{name:?} has type {expected}, but {loaded} was loaded")));
                }
                Some(_) => {}
            }
        }
        for (parameter, _) in program.owned() {
            let value = &program.values[&parameter];
            self.zero_slots(&value.name, &value.ty)?;
        }
        Ok(())
    }

    /// Makes a parameter's optimizer state where it is missing.
    fn zero_slots(&mut self, name: &str, ty: &TensorType) -> Result<(), ExecError> {
        for key in self.slots(name) {
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
            for key in std::iter::once(TensorKey::value(&value.name)).chain(self.slots(&value.name)) {
                if let Some(held) = self.held(&key).cloned() {
                    tensors.push(SnapshotTensor { key, held });
                }
            }
        }
        Snapshot { tensors, backend: self.backend.clone() }
    }

    /// Bytes of all tensors in memory.
    pub(crate) fn bytes(&self) -> u64 {
        self.tensors.values().filter_map(|held| held.memory.as_ref()).map(bytes).sum()
    }
}

fn missing(key: &TensorKey) -> ExecError {
    ExecError::State(format!("there is no {key} to move; this is a bug, please report it"))
}

pub(crate) fn bytes(t: &Tensor) -> u64 {
    t.ty().bytes() as u64
}
