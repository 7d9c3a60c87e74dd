//! Compiles a plan and streams every peer its share.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;

use fusionllm_graph::{HostTensor, TensorType, ValueKind};
use fusionllm_plan::{Optimizer, PeerId, PerPass, Plan, Program, Slot, compile, compile_forward};
use fusionllm_protocol::{Assignment, BulkHeader, ExpectedReports, MAX_ASSIGNMENT_BYTES, decode, encode};
use fusionllm_transport::PeerAddr;
use tokio::sync::mpsc;

use super::admission::Candidate;
use super::conductor::Conductor;
use super::emulation::Emulation;
use super::incoming::{Incoming, receive_bulk, receive_control};
use super::peer::{Peer, PeerInput};
use super::store::Store;
use crate::NodeError;
use crate::net::{self, Outbox, neighbours};

/// A tensor that the broker sends before the first pass: a value, or one slot of its optimizer state.
type Load = (String, Option<String>);

impl Conductor {
    /// Compiles the plan and sends every candidate its programs and the tensors that it cannot draw from the seed.
    pub(super) async fn assign(
        &self,
        plan: &Plan,
        candidates: Vec<Candidate>,
        mut emulation: Option<&mut Emulation>,
        store: &Store,
        events: &mpsc::UnboundedSender<Incoming>,
    ) -> Result<Vec<Peer>, NodeError> {
        let train = compile(plan, &self.model.forward, &self.model.train)?;
        let eval = compile_forward(plan, &self.model.forward, &self.model.eval, &self.reports())?;
        let addresses: Vec<(String, Vec<u8>)> =
            candidates.iter().map(|c| (c.member.name.clone(), c.member.addr.clone())).collect();
        let mut peers = Vec::with_capacity(candidates.len());
        for ((i, candidate), (train, eval)) in (0..).map(PeerId).zip(candidates).zip(train.into_iter().zip(eval)) {
            let mut addresses = addresses.clone();
            if let Some(emulation) = emulation.as_deref_mut() {
                for p in neighbours(&[&train, &eval]) {
                    let (name, addr) = &mut addresses[p.0 as usize];
                    let real: PeerAddr = decode(addr).map_err(|e| NodeError::Protocol(format!("{name:?}: {e}")))?;
                    let emulated = PeerAddr::new(real.key, vec![emulation.address(i, p)?]);
                    *addr = encode(&emulated).map_err(NodeError::Protocol)?;
                }
            }
            let mut assignment = Assignment {
                peer: i,
                peers: addresses,
                seed: self.job.train.seed,
                optimizer: self.job.train.optimizer.update_rule(),
                compression: plan.compression,
                train,
                eval,
                loads: BTreeSet::new(),
            };
            assignment.loads = self.loads(&assignment, store);
            peers.push(self.send_share(candidate, assignment, store, events).await?);
        }
        Ok(peers)
    }

    /// Sends one assignment with its tensors, and starts the tasks that read the peer's lanes.
    async fn send_share(
        &self,
        candidate: Candidate,
        assignment: Assignment,
        store: &Store,
        events: &mpsc::UnboundedSender<Incoming>,
    ) -> Result<Peer, NodeError> {
        let Candidate { member, connection, lanes } = candidate;
        let peer = assignment.peer;
        let bytes = encode(&assignment).map_err(NodeError::Protocol)?;
        if bytes.len() as u64 > MAX_ASSIGNMENT_BYTES {
            return Err(NodeError::input(format!(
                "the program of {:?} is too long to send; use fewer micro-batches",
                member.name
            )));
        }
        tokio::spawn(receive_control(lanes.control, peer, events.clone()));
        let saved = saved_types(&assignment.train, assignment.optimizer);
        tokio::spawn(receive_bulk(lanes.bulk, peer, saved, store.inbox(), events.clone()));
        let lost = |e: NodeError| match e {
            NodeError::Lost(cause) => {
                NodeError::LostPeer { peer, name: member.name.clone(), reason: cause.to_string() }
            }
            e => e,
        };
        net::send_bulk(&connection, &BulkHeader::Assign, vec![bytes.into()]).await.map_err(lost)?;
        for (name, slot) in &assignment.loads {
            let tensor = self.initial(name, slot.as_deref(), store)?;
            let header = BulkHeader::Load { name: name.clone(), slot: slot.clone() };
            net::send_bulk(&connection, &header, vec![tensor.into_bytes().into()]).await.map_err(lost)?;
        }
        Ok(Peer {
            outbox: Outbox::new(connection.clone()),
            connection,
            inputs: PerPass { train: inputs(&assignment.train), eval: inputs(&assignment.eval) },
            expected: ExpectedReports::new(&assignment.train, &assignment.eval),
            train: assignment.train,
            name: member.name,
            backend: member.backend,
        })
    }

    /// The tensors that a peer cannot draw from the seed.
    fn loads(&self, assignment: &Assignment, store: &Store) -> BTreeSet<Load> {
        let resumed = store.resumed().is_some();
        let mut loads = BTreeSet::new();
        for (name, value) in assignment.state() {
            let given = match value.kind {
                ValueKind::Constant => true,
                ValueKind::Parameter(_) => resumed || self.source.is_some() || self.weights.is_some(),
                _ => resumed || self.source.is_some(),
            };
            if given {
                loads.insert((name.to_string(), None));
            }
        }
        for (_, r) in assignment.train.owned().filter(|_| resumed) {
            let name = &assignment.train.values[&r.parameter].name;
            loads.extend(assignment.optimizer.slots().iter().map(|s| (name.clone(), Some(s.to_string()))));
        }
        loads
    }

    /// The first content of a tensor: from the checkpoint, the imported archive or the weights file.
    fn initial(&self, name: &str, slot: Option<&str>, store: &Store) -> Result<HostTensor, NodeError> {
        if let Some(constant) = self.model.train.graph.constants.get(name) {
            return Ok(constant.clone());
        }
        if let Some(tensor) = store.saved(name, slot)? {
            return Ok(tensor);
        }
        let value = self.model.forward.find(name);
        if let (Some(source), Some(v)) = (&self.source, value) {
            let value = self.model.forward.value(v);
            // A weights file holds parameters only: buffers still come from the archive.
            if self.weights.is_none() || !matches!(value.kind, ValueKind::Parameter(_)) {
                return source.lock().unwrap_or_else(PoisonError::into_inner).initial(value);
            }
        }
        match (&self.weights, value) {
            (Some(weights), Some(v)) => Ok(weights.parameter(name, self.model.forward.ty(v))?),
            _ => Err(NodeError::State(format!("nothing says what {name:?} starts as"))),
        }
    }
}

/// The inputs that a program receives from the broker.
fn inputs(program: &Program) -> Vec<PeerInput> {
    let incoming = program.incoming().into_iter().filter_map(|(slot, (from, _))| match slot {
        Slot::Value { value, micro_batch } if from == PeerId::BROKER => {
            Some(PeerInput { value, micro_batch, name: program.values[&value].name.clone() })
        }
        _ => None,
    });
    incoming.collect()
}

/// Names, slots and types of the tensors in a peer's snapshot.
fn saved_types(program: &Program, optimizer: Optimizer) -> BTreeMap<Load, TensorType> {
    let mut types = BTreeMap::new();
    for h in program.holdings.iter().filter(|h| h.owner) {
        let value = &program.values[&h.value];
        types.insert((value.name.clone(), None), value.ty.clone());
        for slot in optimizer.slots() {
            types.insert((value.name.clone(), Some(slot.to_string())), value.ty.clone());
        }
    }
    types
}
