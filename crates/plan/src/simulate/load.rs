//! Programs as what they cost: seconds of computing, messages, and the bytes at hand.

use std::collections::{BTreeMap, HashMap};

use fusionllm_compress::Codec;
use fusionllm_graph::ops::OpClass;
use fusionllm_graph::{Op, Phase, TensorType, ValueId};

use super::{Conditions, Doing, message_bytes};
use crate::estimate::{Coding, Copying, kind, squared_norm, sum, update};
use crate::{Cluster, Device, Instruction, PeerId, PlanError, Program, Slot};

/// What a peer does next.
#[derive(Debug, Clone, Copy)]
pub(super) enum Step {
    /// Computes; meanwhile it holds at most `peak` bytes.
    Compute { doing: Doing, micro_batch: Option<u32>, seconds: f64, peak: u64 },
    /// Waits for a message.
    Receive { message: u32 },
    /// Hands over a message.
    Send { message: u32 },
    /// Exchanges norms for the verdict.
    Clip,
}

/// A message of every step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Message {
    pub(super) from: PeerId,
    pub(super) to: PeerId,
    pub(super) slot: Slot,
    /// Of the tensor as it is sent.
    pub(super) payload: u64,
    /// On the line.
    pub(super) bytes: f64,
    pub(super) channel: u32,
    /// Seconds of the codec threads at its two ends, if it goes through a codec.
    pub(super) encode: f64,
    pub(super) decode: f64,
}

/// Messages from one peer to another: they keep their order.
#[derive(Debug, Clone)]
pub(super) struct Channel {
    pub(super) from: PeerId,
    pub(super) to: PeerId,
    pub(super) latency: f64,
    /// Seconds from there and back.
    pub(super) round_trip: f64,
    /// Indices of what bounds it.
    pub(super) resources: Vec<u32>,
}

/// Something with a bandwidth: a line from one machine to another, or a direction of an uplink.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum ResourceKey {
    Line(PeerId, PeerId),
    Shared(crate::SharedId),
}

pub(super) struct Load {
    /// By peer.
    pub(super) steps: Vec<Vec<Step>>,
    pub(super) messages: Vec<Message>,
    pub(super) channels: Vec<Channel>,
    /// With their bandwidths.
    pub(super) resources: Vec<(ResourceKey, f64)>,
    /// The messages of the broker, in the order in which it sends them.
    pub(super) inputs: Vec<u32>,
    /// The peers that wait for the verdict: those that are not left out.
    pub(super) voters: Vec<u32>,
    /// By peer: seconds that norms take to the broker and the verdict takes back.
    pub(super) to_broker: Vec<f64>,
    pub(super) from_broker: Vec<f64>,
    pub(super) micro_batches: u32,
}

impl Load {
    pub(super) fn new(programs: &[Program], cluster: &Cluster, conditions: &Conditions) -> Result<Self, PlanError> {
        let mut roads = Roads { cluster, channels: Vec::new(), known: HashMap::new(), resources: BTreeMap::new() };
        let mut messages = Vec::new();
        let mut inputs = Vec::new();
        // By receiver and slot; senders find their messages here.
        let mut index: HashMap<(PeerId, Slot), u32> = HashMap::new();
        for p in programs {
            for i in &p.instructions {
                let Instruction::Receive { slot, from } = *i else { continue };
                // The sender's codec decides; the broker has none.
                let sender = programs.get(from.0 as usize);
                let ty = ty(p, slot.value())?;
                let payload = sender.and_then(|s| s.payload(slot, p.peer)).unwrap_or(ty.bytes()) as u64;
                let codec = sender.map_or(Codec::None, |s| s.codec(slot, p.peer));
                let takes = |end: PeerId, coding| match (codec, cluster.devices().get(end.0 as usize)) {
                    (Codec::None, _) | (_, None) => 0.0,
                    (codec, Some(device)) => device.codec_seconds(coding, &codec, ty.numel()),
                };
                let (encode, decode) = (takes(from, Coding::Encode), takes(p.peer, Coding::Decode));
                let channel = roads.channel(from, p.peer)?;
                let id = messages.len() as u32;
                let (to, bytes) = (p.peer, message_bytes(payload));
                messages.push(Message { from, to, slot, payload, bytes, channel, encode, decode });
                if from == PeerId::BROKER {
                    inputs.push(id);
                }
                index.insert((p.peer, slot), id);
            }
        }
        let control = |from, to, bytes| {
            let link = cluster.link(from, to).ok_or_else(|| no_way(cluster, from, to))?;
            Ok::<f64, PlanError>(link.seconds(message_bytes(bytes)))
        };
        let (mut to_broker, mut from_broker) = (Vec::new(), Vec::new());
        let mut steps = Vec::with_capacity(programs.len());
        for (p, device) in programs.iter().zip(cluster.devices()) {
            steps.push(Writer::new(p, device, conditions)?.steps(&index, &messages)?);
            // A parameter's number and its norm.
            to_broker.push(control(p.peer, PeerId::BROKER, 10 * p.owned().count() as u64)?);
            from_broker.push(control(PeerId::BROKER, p.peer, 32)?);
        }
        let votes = |steps: &Vec<Step>| steps.iter().any(|s| matches!(s, Step::Clip));
        let voters = (0..).zip(&steps).filter(|(_, s)| votes(s)).map(|(p, _)| p).collect();
        let micro_batches = programs.first().map_or(1, |p| p.micro_batches);
        // Inputs go out micro-batch by micro-batch.
        inputs.sort_by_key(|&m| match messages[m as usize].slot {
            Slot::Value { micro_batch, value } => (micro_batch, messages[m as usize].to, value),
            slot => (u32::MAX, messages[m as usize].to, slot.value()),
        });
        let mut resources: Vec<(u32, (ResourceKey, f64))> =
            roads.resources.into_iter().map(|(key, (id, bandwidth))| (id, (key, bandwidth))).collect();
        resources.sort_by_key(|r| r.0);
        let resources = resources.into_iter().map(|r| r.1).collect();
        let channels = roads.channels;
        Ok(Self { steps, messages, channels, resources, inputs, voters, to_broker, from_broker, micro_batches })
    }
}

fn ty(p: &Program, v: ValueId) -> Result<&TensorType, PlanError> {
    let value = p.values.get(&v).ok_or_else(|| PlanError::Program(format!("{} does not know value {v}", p.peer)))?;
    Ok(&value.ty)
}

fn no_way(cluster: &Cluster, from: PeerId, to: PeerId) -> PlanError {
    PlanError::Cluster(format!("no link leads from {} to {}", cluster.name(from), cluster.name(to)))
}

struct Roads<'a> {
    cluster: &'a Cluster,
    channels: Vec<Channel>,
    known: HashMap<(PeerId, PeerId), u32>,
    resources: BTreeMap<ResourceKey, (u32, f64)>,
}

impl Roads<'_> {
    fn channel(&mut self, from: PeerId, to: PeerId) -> Result<u32, PlanError> {
        if let Some(&id) = self.known.get(&(from, to)) {
            return Ok(id);
        }
        let path = self.cluster.path(from, to).ok_or_else(|| no_way(self.cluster, from, to))?;
        let mut resources = Vec::new();
        let mut add = |key: ResourceKey, bandwidth: f64| {
            let next = self.resources.len() as u32;
            resources.push(self.resources.entry(key).or_insert((next, bandwidth)).0);
        };
        if let Some((id, link)) = path.up {
            add(ResourceKey::Shared(id), link.bandwidth);
        }
        if let Some(link) = path.line {
            add(ResourceKey::Line(self.cluster.host(from), self.cluster.host(to)), link.bandwidth);
        }
        if let Some((id, link)) = path.down {
            add(ResourceKey::Shared(id), link.bandwidth);
        }
        let id = self.channels.len() as u32;
        let latency = path.link().latency;
        // Without a way back there is no connection, which shows elsewhere.
        let round_trip = latency + self.cluster.link(to, from).map_or(latency, |back| back.latency);
        self.channels.push(Channel { from, to, latency, round_trip, resources });
        self.known.insert((from, to), id);
        Ok(id)
    }
}

/// Turns one peer's instructions into steps.
struct Writer<'a> {
    program: &'a Program,
    device: &'a Device,
    /// By node number, less the first: seconds, bytes of scratch, and phase.
    nodes: Vec<(f64, u64, Phase)>,
    first_node: u32,
    memory: Memory,
    /// By micro-batch: whether its backward pass has begun.
    turned: Vec<bool>,
    update: Vec<(f64, f64)>,
    out: Vec<Step>,
}

impl<'a> Writer<'a> {
    fn new(program: &'a Program, device: &'a Device, conditions: &Conditions) -> Result<Self, PlanError> {
        let first_node = program.nodes.keys().next().map_or(0, |n| n.0);
        let last_node = program.nodes.keys().next_back().map_or(0, |n| n.0);
        let mut nodes = vec![(0.0, 0, Phase::Forward); (last_node - first_node) as usize + 1];
        let kinds = device.knows_kinds();
        let mut views: HashMap<ValueId, &str> = HashMap::new();
        for (id, node) in &program.nodes {
            let types = |ids: &[ValueId]| ids.iter().map(|v| ty(program, *v)).collect::<Result<Vec<_>, _>>();
            let (inputs, outputs) = (types(&node.inputs)?, types(&node.outputs)?);
            let (name, cost) = (node.op.name(), node.op.cost(&inputs, &outputs));
            let kind = match kinds {
                true => kind(&node.op, &inputs, &outputs, |i| views.get(&node.inputs[i]).copied()),
                false => String::new(),
            };
            if kinds && cost.class == OpClass::View {
                views.extend(node.outputs.iter().map(|v| (*v, name)));
            }
            let (seconds, scratch) = (device.seconds_of(&kind, name, &cost), device.scratch_bytes(&kind, name, &cost));
            nodes[(id.0 - first_node) as usize] = (seconds, scratch, node.phase);
        }
        let mut update_seconds = Vec::new();
        for r in &program.reductions {
            let ty = ty(program, r.parameter)?;
            let (norm, cost) = squared_norm(ty);
            let norm = device.seconds(norm, &cost);
            let (step, cost) = update(&conditions.optimizer, ty);
            update_seconds.push((norm, device.seconds(step, &cost)));
        }
        Ok(Self {
            program,
            device,
            nodes,
            first_node,
            memory: Memory::new(program, conditions)?,
            turned: vec![false; program.micro_batches as usize],
            update: update_seconds,
            out: Vec::new(),
        })
    }

    fn steps(mut self, index: &HashMap<(PeerId, Slot), u32>, messages: &[Message]) -> Result<Vec<Step>, PlanError> {
        let program = self.program;
        let unknown = || PlanError::Program(format!("{} was not validated", program.peer));
        let parameter = |r: u32| program.reductions.get(r as usize).ok_or_else(unknown);
        for (at, i) in program.instructions.iter().enumerate() {
            match *i {
                Instruction::Receive { slot, .. } => {
                    let message = *index.get(&(program.peer, slot)).ok_or_else(unknown)?;
                    self.out.push(Step::Receive { message });
                    let bytes = ty(program, slot.value())?.bytes() as u64;
                    match slot {
                        Slot::Value { value, micro_batch } => self.memory.put(value, micro_batch),
                        Slot::Part { .. } => self.memory.add(bytes),
                        Slot::Parameter { .. } | Slot::Buffer { .. } => {}
                    }
                    let seconds = self.device.copy_seconds(Copying::Upload, bytes as f64);
                    let beside = self.device.traffic_seconds(messages[message as usize].bytes);
                    self.exchange(slot, seconds + beside, bytes);
                }
                Instruction::Send { slot, to } => {
                    let bytes = ty(program, slot.value())?.bytes() as u64;
                    self.exchange(slot, self.device.copy_seconds(Copying::Download, bytes as f64), bytes);
                    if let Slot::Part { .. } = slot {
                        self.memory.remove(bytes);
                    }
                    let message = *index.get(&(to, slot)).ok_or_else(|| {
                        PlanError::Program(format!("{} sends {to} what it does not wait for", program.peer))
                    })?;
                    self.out.push(Step::Send { message });
                    let beside = self.device.traffic_seconds(messages[message as usize].bytes);
                    if beside > 0.0 {
                        self.exchange(slot, beside, 0);
                    }
                }
                Instruction::Run { node, micro_batch } => {
                    let slot = node.0.checked_sub(self.first_node).and_then(|n| self.nodes.get(n as usize));
                    let &(seconds, scratch, phase) = slot.ok_or_else(unknown)?;
                    let n = program.nodes.get(&node).ok_or_else(unknown)?;
                    let turned = self.turned.get_mut(micro_batch as usize).ok_or_else(unknown)?;
                    *turned |= phase != Phase::Forward;
                    let doing = match phase {
                        // Run again on behalf of backward.
                        Phase::Forward if *turned => Doing::Backward,
                        Phase::Forward => Doing::Forward,
                        Phase::InputGrad => Doing::Backward,
                        Phase::WeightGrad => Doing::WeightGrad,
                    };
                    let frees = program.instructions[at + 1..].iter().map_while(|i| match *i {
                        Instruction::Free { value, micro_batch: m } if m == micro_batch => Some(value),
                        _ => None,
                    });
                    let peak = self.memory.run(&n.op, &n.inputs, &n.outputs, micro_batch, frees);
                    self.compute(doing, Some(micro_batch), seconds, peak + scratch);
                }
                Instruction::Free { value, micro_batch } => self.memory.free(value, micro_batch),
                Instruction::Accumulate { reduction, part, value, micro_batch } => {
                    let ty = ty(program, parameter(reduction)?.parameter)?;
                    let (name, cost) = sum(ty);
                    // The first part is moved, not added.
                    let bytes = ty.bytes() as u64;
                    let first = self.memory.accumulate(reduction, part, bytes);
                    let moved =
                        first && program.instructions.get(at + 1) == Some(&Instruction::Free { value, micro_batch });
                    let held = self.memory.live - if moved { bytes } else { 0 };
                    let seconds = if first { 0.0 } else { self.device.seconds(name, &cost) };
                    self.compute(Doing::WeightGrad, Some(micro_batch), seconds, held);
                }
                Instruction::UpdateState { .. } | Instruction::Report { .. } => {}
                Instruction::Reduce { reduction } => {
                    let r = parameter(reduction)?;
                    let ty = ty(program, r.parameter)?;
                    let (name, cost) = sum(ty);
                    let more = r.parts.len().saturating_sub(1);
                    let peak = self.memory.live;
                    self.memory.remove(more as u64 * ty.bytes() as u64);
                    self.compute(Doing::Update, None, more as f64 * self.device.seconds(name, &cost), peak);
                }
                Instruction::Clip => {
                    let owned: Vec<u32> = program.owned().map(|(i, _)| i).collect();
                    let seconds = owned.iter().map(|&i| self.update[i as usize].0).sum();
                    self.compute(Doing::Update, None, seconds, self.memory.live);
                    self.out.push(Step::Clip);
                }
                Instruction::Update { reduction } => {
                    let ty = ty(program, parameter(reduction)?.parameter)?;
                    let peak = self.memory.live;
                    self.memory.remove(ty.bytes() as u64);
                    self.compute(Doing::Update, None, self.update[reduction as usize].1, peak);
                }
            }
        }
        Ok(self.out)
    }

    /// Computing on behalf of a message, or lost to it, with so many bytes of it at hand.
    fn exchange(&mut self, slot: Slot, seconds: f64, bytes: u64) {
        let (doing, micro_batch) = match slot {
            Slot::Value { micro_batch, .. } if self.turned.get(micro_batch as usize) == Some(&true) => {
                (Doing::Backward, Some(micro_batch))
            }
            Slot::Value { micro_batch, .. } | Slot::Buffer { micro_batch, .. } => (Doing::Forward, Some(micro_batch)),
            Slot::Part { .. } | Slot::Parameter { .. } => (Doing::Update, None),
        };
        self.compute(doing, micro_batch, seconds, self.memory.live + bytes);
    }

    /// Adds to the step before where that does the same.
    fn compute(&mut self, what: Doing, which: Option<u32>, time: f64, held: u64) {
        let backward = |d: Doing| matches!(d, Doing::Backward | Doing::WeightGrad);
        if let Some(Step::Compute { doing, micro_batch, seconds, peak }) = self.out.last_mut()
            && *micro_batch == which
            && (*doing == what || (backward(*doing) && backward(what)))
        {
            // Gradients of parameters count as put off only where nothing else is done with them.
            *doing = if *doing == what { what } else { Doing::Backward };
            *seconds += time;
            *peak = held.max(*peak);
        } else {
            self.out.push(Step::Compute { doing: what, micro_batch: which, seconds: time, peak: held });
        }
    }
}

/// Bytes at hand while a Program runs. Reshaped, permuted and expanded tensors share what they are made of.
struct Memory {
    live: u64,
    /// By value number, less the first: bytes, and the value whose bytes these are.
    values: Vec<(u64, u32)>,
    first: u32,
    /// By value and micro-batch: how many of the values at hand share its bytes.
    shares: Vec<u16>,
    micro_batches: usize,
    /// Sums that have begun, by reduction and part.
    sums: HashMap<(u32, u32), ()>,
}

impl Memory {
    fn new(program: &Program, conditions: &Conditions) -> Result<Self, PlanError> {
        let first = program.values.keys().next().map_or(0, |v| v.0);
        let last = program.values.keys().next_back().map_or(0, |v| v.0);
        let mut values = vec![(0, 0); (last - first) as usize + 1];
        for (v, value) in &program.values {
            values[(v.0 - first) as usize] = (value.ty.bytes() as u64, v.0 - first);
        }
        for node in program.nodes.values() {
            let view = matches!(node.op, Op::Reshape(_) | Op::Permute(_) | Op::Expand(_));
            if let (true, [input], [output]) = (view, &node.inputs[..], &node.outputs[..]) {
                let root = values[(input.0 - first) as usize].1;
                values[(output.0 - first) as usize].1 = root;
            }
        }
        let bytes = |v: ValueId| Ok::<u64, PlanError>(ty(program, v)?.bytes() as u64);
        let mut live = 0;
        for h in &program.holdings {
            live += bytes(h.value)?;
        }
        for (_, r) in program.owned() {
            live += bytes(r.parameter)? * conditions.optimizer.slots().len() as u64;
        }
        let micro_batches = program.micro_batches as usize;
        let mut memory = Self {
            live,
            shares: vec![0; values.len() * micro_batches],
            values,
            first,
            micro_batches,
            sums: HashMap::new(),
        };
        // What stays from step to step is never freed through a view of it.
        for h in &program.holdings {
            let root = (h.value.0 - first) as usize;
            memory.shares[root * micro_batches..(root + 1) * micro_batches].fill(1);
        }
        Ok(memory)
    }

    fn share(&mut self, v: ValueId, micro_batch: u32) -> Option<(&mut u16, u64)> {
        let root = self.values.get(v.0.checked_sub(self.first)? as usize)?.1 as usize;
        let bytes = self.values[root].0;
        let slot = self.shares.get_mut(root * self.micro_batches + micro_batch as usize)?;
        Some((slot, bytes))
    }

    fn put(&mut self, v: ValueId, micro_batch: u32) {
        if let Some((shares, bytes)) = self.share(v, micro_batch) {
            *shares += 1;
            let fresh = *shares == 1;
            self.live += if fresh { bytes } else { 0 };
        }
    }

    fn free(&mut self, v: ValueId, micro_batch: u32) {
        if let Some((shares, bytes)) = self.share(v, micro_batch)
            && *shares > 0
        {
            *shares -= 1;
            let gone = *shares == 0;
            self.live -= if gone { bytes } else { 0 };
        }
    }

    /// Puts an operator's results; yields the bytes held while it runs. One that memory limits writes over an operand of the same size that is given up.
    fn run(
        &mut self,
        op: &Op,
        inputs: &[ValueId],
        outputs: &[ValueId],
        micro_batch: u32,
        frees: impl Iterator<Item = ValueId>,
    ) -> u64 {
        let before = self.live;
        for v in outputs {
            self.put(*v, micro_batch);
        }
        let [output] = outputs else { return self.live };
        if self.live == before || !elementwise(op) {
            return self.live;
        }
        let size = self.live - before;
        let mut given = frees.filter(|v| inputs.contains(v) && v != output);
        let in_place = given.any(|v| self.share(v, micro_batch).is_some_and(|(shares, b)| *shares == 1 && b == size));
        if in_place { before } else { self.live }
    }

    /// Whether this is the sum's first term.
    fn accumulate(&mut self, reduction: u32, part: u32, bytes: u64) -> bool {
        let first = self.sums.insert((reduction, part), ()).is_none();
        self.live += if first { bytes } else { 0 };
        first
    }

    fn add(&mut self, bytes: u64) {
        self.live += bytes;
    }

    fn remove(&mut self, bytes: u64) {
        self.live = self.live.saturating_sub(bytes);
    }
}

/// Whether backends run it in the place of an operand.
fn elementwise(op: &Op) -> bool {
    matches!(
        op,
        Op::Unary(_)
            | Op::Binary(_)
            | Op::BinaryScalar(_)
            | Op::Gelu(_)
            | Op::GeluBackward(_)
            | Op::ThresholdBackward(_)
            | Op::Dropout(_)
            | Op::DropoutBackward(_)
    )
}
