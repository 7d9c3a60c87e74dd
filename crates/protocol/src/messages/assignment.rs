//! A peer's part in one generation of a run.

use std::collections::{BTreeMap, BTreeSet};

use fusionllm_graph::{TensorType, Value, ValueKind};
use fusionllm_plan::Compression;
use fusionllm_program::{Address, Medium, Optimizer, ParameterGroup, PeerId, Program, ProgramError, TensorKey};
use serde::{Deserialize, Serialize};

use crate::{Contact, MemberId};

/// The source of a tensor's first content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Source {
    /// The content is drawn from the seed, or zeros for optimizer state.
    Seed,
    /// The broker streams it as [`BulkHeader::Load`](crate::BulkHeader::Load).
    Broker,
    /// A member has it in its cut of [`Assignment::start`]. It may be the peer itself.
    Member(MemberId),
    /// It never changes, and a member has kept it since an earlier generation. It may be the peer itself.
    Shelf(MemberId),
}

/// A peer's part in one generation of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Assignment {
    /// The generation, from 1 on.
    pub generation: u32,
    /// The peer's number.
    pub peer: PeerId,
    /// All peers, by number.
    pub peers: Vec<Contact>,
    /// Members without a part that have tensors for this peer.
    pub donors: Vec<Contact>,
    /// The seed of initial values, dropout and codecs.
    pub seed: u64,
    /// The update rule.
    pub optimizer: Optimizer,
    /// The parameters, by name, whose rate and decay are not those of the rule.
    pub groups: BTreeMap<String, ParameterGroup>,
    /// How tensors are compressed. The programs have the codecs of the peer's links.
    pub compression: Compression,
    /// The program of a training step.
    pub train: Program,
    /// The program of an evaluation pass.
    pub eval: Program,
    /// The cut that the generation starts from: batches trained on before it.
    pub start: u64,
    /// The number of the last pass of earlier generations.
    pub passes_before: u64,
    /// The sources of first contents, for all parameters, buffers and constants of the programs, and for the optimizer
    /// state of owned parameters.
    pub sources: BTreeMap<TensorKey, Source>,
    /// The tensors of other members whose copies this peer keeps.
    pub mirrors: BTreeMap<MemberId, BTreeMap<TensorKey, TensorType>>,
}

impl Assignment {
    /// An assignment of these programs in a run's first generation, which begins with its first step. Whoever makes it
    /// adds the members and the tensors' sources.
    pub fn new(train: Program, eval: Program, optimizer: Optimizer) -> Self {
        Self {
            generation: 1,
            peer: train.peer,
            peers: Vec::new(),
            donors: Vec::new(),
            seed: 0,
            optimizer,
            groups: BTreeMap::new(),
            compression: Compression::default(),
            train,
            eval,
            start: 0,
            passes_before: 0,
            sources: BTreeMap::new(),
            mirrors: BTreeMap::new(),
        }
    }

    /// Checks everything that a peer relies on, so that it need not trust the sender.
    pub fn validate(&self) -> Result<(), ProgramError> {
        let fail = |m: String| Err(ProgramError(m));
        if self.peer.0 as usize >= self.peers.len() {
            return fail(format!("it is for {}, but the number of peers is {}", self.peer, self.peers.len()));
        }
        for program in [&self.train, &self.eval] {
            program.validate()?;
            if program.peer != self.peer {
                return fail(format!("it is for {}, not for {}", program.peer, self.peer));
            }
            for (_, p) in program.receives().chain(program.sends()) {
                if p != PeerId::BROKER && p.0 as usize >= self.peers.len() {
                    return fail(format!(
                        "it exchanges tensors with {p}, but the number of peers is {}",
                        self.peers.len()
                    ));
                }
            }
        }
        let slots = self.optimizer.slots().len();
        let state = |tensor: &Address| matches!(tensor, Address::OptimizerState { .. });
        let mut resting = self.train.resting().into_keys().filter(state);
        if resting.any(|tensor| self.train.key(tensor, self.optimizer).is_none()) {
            return fail(format!("it offloads optimizer state, but a parameter has only {slots} tensors of it"));
        }
        let parameters = |program: &Program| -> BTreeMap<TensorKey, Medium> {
            let resting = program.resting().into_iter().filter(|(tensor, _)| !state(tensor));
            resting.filter_map(|(tensor, at)| Some((program.key(tensor, self.optimizer)?, at))).collect()
        };
        let resting = parameters(&self.train);
        if parameters(&self.eval).iter().any(|(key, medium)| resting.get(key) != Some(medium)) {
            return fail("training and evaluation disagree about what is offloaded between passes".into());
        }
        let owned: BTreeSet<&str> = self.train.owned().map(|(v, _)| self.train.values[&v].name.as_str()).collect();
        for (name, group) in &self.groups {
            if !group.is_valid() || !owned.contains(name.as_str()) {
                return fail(format!("it gives {name:?} a rate and a decay that no update has"));
            }
        }
        let state = self.state();
        for program in [&self.train, &self.eval] {
            for value in program.holdings.iter().map(|h| &program.values[&h.value]) {
                if state.get(value.name.as_str()) != Some(&value) {
                    return fail(format!("training and evaluation disagree about {:?}", value.name));
                }
            }
        }
        self.check_sources(&state)
    }

    fn check_sources(&self, state: &BTreeMap<&str, &Value>) -> Result<(), ProgramError> {
        let fail = |m: String| Err(ProgramError(m));
        for (key, ty) in self.mirrors.values().flatten() {
            ty.check().map_err(|e| ProgramError(format!("the copy of {key}: {e}")))?;
        }
        let needed = self.tensor_types();
        for (key, source) in &self.sources {
            if !needed.contains_key(key) {
                return fail(format!("it says where {key} comes from, but no program needs it"));
            }
            let frozen = key.slot.is_none()
                && state.get(key.name.as_str()).is_some_and(|v| matches!(v.kind, ValueKind::Frozen(_)));
            let drawn = key.slot.is_some() || state.get(key.name.as_str()).is_some_and(|v| v.kind.init().is_some());
            match source {
                Source::Seed if !drawn => return fail(format!("{key} is a constant, which no seed can draw")),
                Source::Shelf(_) if !frozen => return fail(format!("{key} changes, so no member keeps it for good")),
                Source::Member(m) | Source::Shelf(m) if self.contact(*m).is_none() => {
                    return fail(format!("{key} comes from {m}, whose address is unknown"));
                }
                _ => {}
            }
        }
        match needed.keys().find(|key| !self.sources.contains_key(key)) {
            Some(key) => fail(format!("it does not say where {key} comes from")),
            None => Ok(()),
        }
    }

    /// How to reach a member of this assignment.
    pub fn contact(&self, member: MemberId) -> Option<&Contact> {
        self.peers.iter().chain(&self.donors).find(|c| c.member == member)
    }

    /// The tensors that the peer keeps from pass to pass, with their types: those of [`Self::state`], and the optimizer
    /// state of the parameters that it owns.
    pub fn tensor_types(&self) -> BTreeMap<TensorKey, &TensorType> {
        let values = self.state().into_iter().map(|(name, v)| (TensorKey::value(name), &v.ty));
        let mut tensors: BTreeMap<TensorKey, &TensorType> = values.collect();
        tensors.extend(optimizer_state(&self.train, self.optimizer));
        tensors
    }

    /// The tensors that never change and that no seed can draw, which the peer keeps for later generations.
    pub fn shelved(&self) -> BTreeSet<TensorKey> {
        let state = self.state().into_iter().filter(|(_, value)| matches!(value.kind, ValueKind::Frozen(_)));
        let keys = state.map(|(name, _)| TensorKey::value(name));
        keys.filter(|key| self.sources.get(key).is_some_and(|source| *source != Source::Seed)).collect()
    }

    /// The peer's share of a cut.
    pub fn share(&self) -> BTreeMap<TensorKey, TensorType> {
        share_of(&self.train, self.optimizer)
    }

    /// Bytes of the copies that the peer keeps of others' shares.
    pub fn mirrored_bytes(&self) -> u64 {
        let types = self.mirrors.values().flat_map(BTreeMap::values);
        types.fold(0, |sum, ty| sum.saturating_add(ty.bytes() as u64))
    }

    /// The most bytes of tensors in memory that a pass of either program needs, with those that the peer keeps there
    /// for itself. See [`Program::peak_bytes`].
    pub fn peak_bytes(&self) -> u64 {
        let own = self.tensor_types().values().fold(0u64, |sum, ty| sum.saturating_add(ty.bytes() as u64));
        let away = self.train.resting();
        let own = away.keys().fold(own, |sum, tensor| sum.saturating_sub(self.train.bytes(*tensor)));
        own.saturating_add(self.train.peak_bytes().max(self.eval.peak_bytes()))
    }

    /// The parameters, buffers and constants that the peer keeps from pass to pass for either program, by name.
    pub fn state(&self) -> BTreeMap<&str, &Value> {
        let programs = [&self.eval, &self.train].into_iter();
        programs
            .flat_map(|p| p.holdings.iter().filter_map(|h| p.values.get(&h.value)))
            .map(|v| (v.name.as_str(), v))
            .collect()
    }
}

/// The share of a cut that the peer with this training program has: the tensors that it owns, with their optimizer
/// state. Constants are not among them.
pub fn share_of(train: &Program, optimizer: Optimizer) -> BTreeMap<TensorKey, TensorType> {
    let owned = train.holdings.iter().filter(|h| h.owner).map(|h| &train.values[&h.value]);
    let values = owned.filter(|v| v.kind != ValueKind::Constant).map(|v| (TensorKey::value(&v.name), &v.ty));
    values.chain(optimizer_state(train, optimizer)).map(|(key, ty)| (key, ty.clone())).collect()
}

/// The optimizer state of the parameters that the peer with this training program owns.
fn optimizer_state(train: &Program, optimizer: Optimizer) -> impl Iterator<Item = (TensorKey, &TensorType)> {
    let slots = 0..optimizer.slots().len() as u32;
    let state = train.owned().flat_map(move |(parameter, _)| {
        slots.clone().map(move |slot| (parameter, Address::OptimizerState { parameter, slot }))
    });
    state.filter_map(move |(parameter, tensor)| Some((train.key(tensor, optimizer)?, &train.values[&parameter].ty)))
}
