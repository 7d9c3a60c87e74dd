//! Sends every member of a new generation its programs, and the tensors that only the broker has.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bytes::Bytes;
use fusionllm_graph::ValueKind;
use fusionllm_plan::Cluster;
use fusionllm_program::{ParameterGroup, PeerId, PerPass, Program, TensorKey};
use fusionllm_protocol::{
    Assignment, BulkHeader, Contact, MAX_ASSIGNMENT_BYTES, MemberId, Order, Source, decode, encode, share_of,
};
use fusionllm_transport::{Connection, PeerAddr};
use fusionllm_workbench::model::Model;
use tokio::sync::mpsc::UnboundedSender;

use super::codec_updates::CodecAdvisor;
use super::conductor::Conductor;
use super::contents::Contents;
use super::entry::Incoming;
use super::evaluation::{Evaluation, HeldOut};
use super::generation::{Generation, Loading, Peer, inputs, sends};
use super::planner::Proposal;
use crate::NodeError;
use crate::net::{self, neighbours};

impl Conductor<'_> {
    /// Begins the generation of this order with the plan that it was made for.
    pub(super) fn begin(&mut self, order: &Order, proposal: Proposal) -> Result<(), NodeError> {
        let Proposal { planned, eval, .. } = proposal;
        let (generation, events) = (order.generation, self.events.clone());
        let advisor = CodecAdvisor::start(&planned, move |decision| {
            let event = match decision {
                Ok(codecs) => Incoming::NewCodecs(generation, codecs),
                Err(e) => Incoming::Note(format!("codecs stay as they are: {e}")),
            };
            // The run may be over.
            drop(events.send(event));
        })?;
        let (job, plan, model) = (planned.job, planned.plan, Arc::new(planned.model));
        let checkpoint = match order.restart.holders.is_empty() {
            true => self.store.checkpoint(order.restart.progress.step)?,
            false => None,
        };
        let contents = Arc::new(Contents { origin: self.origin.clone(), model: model.clone(), checkpoint });
        let optimizer = job.train.optimizer.update_rule();
        let mut shares = BTreeMap::new();
        for (member, train) in order.members.iter().zip(&planned.programs) {
            let share = share_of(train, optimizer);
            self.links.expect(*member, share.clone());
            shares.insert(*member, share);
        }
        let mut loading = Loading::default();
        let mut peers = Vec::with_capacity(order.members.len());
        for (member, (train, eval)) in order.members.iter().copied().zip(planned.programs.iter().zip(eval)) {
            let mirrors = order.mirrors.iter().filter(|m| m.buddy == member);
            let mirrors = mirrors.filter_map(|m| Some((m.owner, shares.get(&m.owner)?.clone()))).collect();
            let mut assignment = Assignment {
                generation: order.generation,
                seed: job.train.seed,
                compression: plan.compression,
                start: order.restart.progress.step,
                passes_before: order.passes_before,
                mirrors,
                groups: groups(train, &model),
                ..Assignment::new(train.clone(), eval, optimizer)
            };
            let to = PeerId(peers.len() as u32);
            let shelf = |key: &TensorKey| self.shelves.nearest(key, to, &order.members, planned.cluster.as_ref());
            assignment.sources = sources(&assignment, member, order, &contents, shelf);
            self.shelves.assign(member, &assignment);
            self.introduce(&mut assignment, member, order)?;
            let mut peer = self.peer(member, &assignment);
            let from_broker = |cluster: &Cluster| cluster.link(PeerId::BROKER, PeerId(peers.len() as u32));
            peer.latency_s = planned.cluster.as_ref().and_then(from_broker).map_or(0.0, |link| link.latency);
            peers.push(peer);
            self.send(member, &assignment, &contents, &mut loading)?;
        }
        let held_out = HeldOut::of(&job, self.data.eval_samples(), &model);
        let per_batch = plan.micro_batches as usize;
        let evaluation = Evaluation::new(held_out, per_batch, &self.feeds, &self.data, &model)?;
        let predicted = planned.predicted;
        let number = order.generation;
        self.current = Some(Generation { number, job, model, plan, evaluation, predicted, peers, advisor, loading });
        Ok(())
    }

    fn peer(&self, member: MemberId, assignment: &Assignment) -> Peer {
        let known = self.run.roster().get(member);
        Peer {
            member,
            name: self.run.roster().display_name(member).to_owned(),
            backend: known.map(|m| m.backend.clone()).unwrap_or_default(),
            device: known.map(|m| m.device.clone()).unwrap_or_default(),
            inputs: PerPass { train: inputs(&assignment.train), eval: inputs(&assignment.eval) },
            operators: assignment.train.nodes.len(),
            sends: sends(&assignment.train),
            latency_s: 0.0,
        }
    }

    /// Adds the contacts of the members that this one talks to. All peers are named, because links are known by number.
    fn introduce(&mut self, assignment: &mut Assignment, me: MemberId, order: &Order) -> Result<(), NodeError> {
        let asked = assignment.sources.values().filter_map(|source| match source {
            Source::Member(m) | Source::Shelf(m) => Some(*m),
            _ => None,
        });
        let mut needed: BTreeSet<MemberId> = asked.chain(assignment.mirrors.keys().copied()).collect();
        let talks_to = neighbours(&[&assignment.train, &assignment.eval]);
        needed.extend(talks_to.iter().filter_map(|p| order.members.get(p.0 as usize)));
        // A member that copies this one's tensors must be let in.
        needed.extend(order.mirrors.iter().filter(|m| m.owner == me).map(|m| m.buddy));
        for member in &order.members {
            assignment.peers.push(self.contact(me, *member, needed.contains(member))?);
        }
        for donor in needed.into_iter().filter(|m| !order.members.contains(m)) {
            assignment.donors.push(self.contact(me, donor, true)?);
        }
        Ok(())
    }

    /// The contact by which `viewer` reaches `target`. Emulated links are set up only where they are `used`.
    fn contact(&mut self, viewer: MemberId, target: MemberId, used: bool) -> Result<Contact, NodeError> {
        let Some(member) = self.run.roster().get(target) else {
            return Err(NodeError::State(format!("{target} is not known")));
        };
        let mut contact = member.contact();
        let viewer = self.run.roster().display_name(viewer).to_owned();
        if let Some(emulation) = self.emulation.as_mut().filter(|_| used && viewer != contact.name) {
            let real: PeerAddr = decode(&contact.addr).map_err(NodeError::Protocol)?;
            let addrs = vec![emulation.address_by_name(&viewer, &contact.name)?];
            contact.addr = encode(&PeerAddr { addrs, ..real }).map_err(NodeError::Protocol)?;
        }
        Ok(contact)
    }

    /// Starts to send an assignment, and the tensors whose source is the broker.
    fn send(
        &self,
        member: MemberId,
        assignment: &Assignment,
        contents: &Arc<Contents>,
        loading: &mut Loading,
    ) -> Result<(), NodeError> {
        let bytes = encode(assignment).map_err(NodeError::Protocol)?;
        if bytes.len() as u64 > MAX_ASSIGNMENT_BYTES {
            return Err(NodeError::input(format!(
                "the program of {:?} is too long to send; use fewer micro-batches",
                self.run.roster().display_name(member)
            )));
        }
        let Some(link) = self.links.get(member) else { return Ok(()) };
        let types = assignment.tensor_types();
        let mut keys = Vec::new();
        for (key, source) in &assignment.sources {
            let Some(ty) = types.get(key) else { continue };
            match source {
                Source::Broker => {
                    let bytes = contents.bytes(key, ty) as u64;
                    loading.total += bytes;
                    loading.moved += bytes;
                    keys.push(key.clone());
                }
                Source::Member(from) | Source::Shelf(from) if *from != member => loading.moved += ty.bytes() as u64,
                Source::Member(_) | Source::Shelf(_) | Source::Seed => {}
            }
        }
        let load = Load {
            connection: link.connection.clone(),
            generation: assignment.generation,
            keys,
            contents: contents.clone(),
            sent: loading.sent.clone(),
        };
        loading.tasks.spawn(load.run(bytes.into(), self.events.clone()));
        Ok(())
    }
}

/// The groups of the parameters that a training program updates.
fn groups(train: &Program, model: &Model) -> BTreeMap<String, ParameterGroup> {
    let owned = train.owned().filter_map(|(parameter, _)| train.values.get(&parameter));
    owned.filter_map(|v| Some((v.name.clone(), *model.groups.get(&v.name)?))).collect()
}

/// The source of each tensor of an assignment: the members that have it, the member itself first. `shelf` names a member
/// from which a tensor comes that never changes.
fn sources(
    assignment: &Assignment,
    me: MemberId,
    order: &Order,
    contents: &Contents,
    shelf: impl Fn(&TensorKey) -> Option<MemberId>,
) -> BTreeMap<TensorKey, Source> {
    let state = assignment.state();
    let source = |key: &TensorKey| match order.restart.holders.get(key) {
        Some(holders) if holders.contains(&me) => Source::Member(me),
        Some(holders) => holders.first().map_or(Source::Seed, |m| Source::Member(*m)),
        None => match state.get(key.name.as_str()) {
            Some(value) if contents.has(key, value) => match value.kind {
                ValueKind::Frozen(_) => shelf(key).map_or(Source::Broker, Source::Shelf),
                _ => Source::Broker,
            },
            _ => Source::Seed,
        },
    };
    assignment.tensor_types().into_keys().map(|key| (key.clone(), source(&key))).collect()
}

/// A task that sends one member its assignment and tensors.
struct Load {
    connection: Connection,
    generation: u32,
    keys: Vec<TensorKey>,
    contents: Arc<Contents>,
    sent: Arc<AtomicU64>,
}

impl Load {
    async fn run(self, assignment: Bytes, events: UnboundedSender<Incoming>) {
        // A lost connection is reported by the tasks that read it.
        if net::send_bulk(&self.connection, &BulkHeader::Assign, vec![assignment]).await.is_err() {
            return;
        }
        for key in self.keys {
            let mut reading = None;
            loop {
                let (contents, wanted) = (self.contents.clone(), key.clone());
                let next = move || {
                    let mut reading = reading.map_or_else(|| contents.begin(&wanted), Ok)?;
                    let piece = contents.next(&mut reading)?;
                    Ok((reading, piece))
                };
                let next = tokio::task::spawn_blocking(next).await;
                let (read, piece) = match next.map_err(|e| NodeError::State(e.to_string())).and_then(|next| next) {
                    Ok(next) => next,
                    Err(e) => return drop(events.send(Incoming::LoadFailed(e))),
                };
                let length = piece.len();
                let header = BulkHeader::Load { generation: self.generation, key: key.clone(), dtype: read.ty.dtype };
                if net::send_bulk(&self.connection, &header, vec![piece]).await.is_err() {
                    return;
                }
                self.sent.fetch_add(length as u64, Relaxed);
                if read.read == read.ty.bytes() {
                    break;
                }
                reading = Some(read);
            }
        }
    }
}
