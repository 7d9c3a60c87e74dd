//! Programs: a peer's share of a Plan as the list of instructions it carries out for one step.

use std::collections::{BTreeMap, BTreeSet};

use fusionllm_graph::{Graph, Node, NodeId, Op, Phase, TensorType, TrainGraph, Value, ValueId, ValueKind};
use serde::{Deserialize, Serialize};

use crate::schedule::{Task, TaskKind, order};
use crate::{Placement, Plan, PlanError};

/// Index of a peer in [`Plan::peers`]; [`PeerId::BROKER`] is the machine with the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PeerId(pub u32);

impl PeerId {
    /// The broker.
    pub const BROKER: Self = Self(u32::MAX);
}

/// What one message between peers carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Slot {
    /// A value of one micro-batch: an input, an activation or a gradient.
    Value {
        /// The value.
        value: ValueId,
        /// The micro-batch.
        micro_batch: u32,
    },
    /// A part of a parameter's gradient, summed over the sender's micro-batches.
    Part {
        /// The parameter.
        parameter: ValueId,
        /// Index in [`Reduction::parts`].
        part: u32,
    },
    /// A parameter's new value, from its owner to its other holders.
    Parameter {
        /// The parameter.
        parameter: ValueId,
    },
}

/// One thing to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Instruction {
    /// Waits for a message.
    Receive {
        /// What it carries.
        slot: Slot,
        /// Who sends it.
        from: PeerId,
    },
    /// Runs a node.
    Run {
        /// The node.
        node: NodeId,
        /// On which micro-batch's values.
        micro_batch: u32,
    },
    /// Hands a message to the network and goes on.
    Send {
        /// What it carries.
        slot: Slot,
        /// Who gets it.
        to: PeerId,
    },
    /// Gives up a value; nothing reads it any more.
    Free {
        /// The value.
        value: ValueId,
        /// The micro-batch.
        micro_batch: u32,
    },
    /// Adds a value to a part of a parameter's gradient.
    Accumulate {
        /// Index in [`Program::reductions`].
        reduction: u32,
        /// Index in [`Reduction::parts`].
        part: u32,
        /// What is added.
        value: ValueId,
        /// The micro-batch.
        micro_batch: u32,
    },
    /// Leaves a value in a buffer.
    UpdateState {
        /// The buffer.
        buffer: ValueId,
        /// Its new content.
        value: ValueId,
        /// The micro-batch.
        micro_batch: u32,
    },
    /// Tells the broker a scalar.
    Report {
        /// Index in [`Program::reports`].
        report: u32,
        /// The scalar.
        value: ValueId,
        /// The micro-batch.
        micro_batch: u32,
    },
    /// Adds a parameter's parts in order into its gradient.
    Reduce {
        /// Index in [`Program::reductions`].
        reduction: u32,
    },
    /// Sends the squared norms of the owned gradients to the broker and waits for its verdict: the factor that clips, or that the step is not applied.
    Clip,
    /// Applies the optimiser to an owned parameter.
    Update {
        /// Index in [`Program::reductions`].
        reduction: u32,
    },
}

/// A part of a parameter's gradient: one use's, summed over micro-batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GradientPart {
    /// Who sums it.
    pub peer: PeerId,
    /// The value summed over micro-batches.
    pub value: ValueId,
}

/// How a parameter's gradient comes together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reduction {
    /// The parameter.
    pub parameter: ValueId,
    /// Who adds the parts and applies the update.
    pub owner: PeerId,
    /// Its parts, in the order in which they are added.
    pub parts: Vec<GradientPart>,
}

/// A tensor that stays on a peer from step to step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holding {
    /// The parameter, buffer or constant.
    pub value: ValueId,
    /// Whether this peer's copy is the one that is updated and saved.
    pub owner: bool,
}

/// A peer's share of a graph, and what it does with it in one step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Program {
    /// Whose it is.
    pub peer: PeerId,
    /// Micro-batches a step.
    pub micro_batches: u32,
    /// The values it touches.
    pub values: BTreeMap<ValueId, Value>,
    /// The nodes it runs.
    pub nodes: BTreeMap<NodeId, Node>,
    /// What it keeps.
    pub holdings: Vec<Holding>,
    /// The gradients it has a part in, in graph order.
    pub reductions: Vec<Reduction>,
    /// Names of the scalars it reports.
    pub reports: Vec<String>,
    /// What it does.
    pub instructions: Vec<Instruction>,
}

/// The Programs of a training step, one per peer of the plan.
pub fn compile(plan: &Plan, forward: &Graph, train: &TrainGraph) -> Result<Vec<Program>, PlanError> {
    plan.validate(forward)?;
    let targets = train
        .gradients
        .iter()
        .flat_map(|g| g.contributions.iter().copied())
        .chain(train.graph.state_updates.iter().map(|u| u.value))
        .chain([train.loss]);
    let live = train.graph.ancestors(targets);
    Compiler::new(plan, forward, &train.graph, live, vec![("loss".into(), train.loss)])?.run(Some(train))
}

/// The Programs of a forward pass over an evaluation graph that reports some of its outputs, one per peer of the plan.
pub fn compile_forward(
    plan: &Plan,
    forward: &Graph,
    eval: &Graph,
    reports: &[&str],
) -> Result<Vec<Program>, PlanError> {
    let reports = reports
        .iter()
        .map(|name| match eval.outputs.get(*name) {
            Some(v) => Ok((name.to_string(), *v)),
            None => Err(PlanError::Plan(format!("the graph has no output {name:?}"))),
        })
        .collect::<Result<Vec<_>, _>>()?;
    let live = eval.ancestors(reports.iter().map(|(_, v)| *v));
    Compiler::new(plan, forward, eval, live, reports)?.run(None)
}

struct Compiler<'a> {
    plan: &'a Plan,
    graph: &'a Graph,
    live: Vec<bool>,
    /// By node.
    stage_of: Vec<u32>,
    /// By node: made from constants alone, or a view no smaller than its operands; run again where it is needed instead of sent.
    cheap: Vec<bool>,
    reports: Vec<(String, ValueId)>,
}

impl<'a> Compiler<'a> {
    fn new(
        plan: &'a Plan,
        forward: &Graph,
        graph: &'a Graph,
        live: Vec<bool>,
        reports: Vec<(String, ValueId)>,
    ) -> Result<Self, PlanError> {
        let stage_of = Placement::new(plan, forward, graph)?.stage_of;
        let mut constant = vec![false; graph.nodes.len()];
        let mut cheap = vec![false; graph.nodes.len()];
        for id in graph.node_ids() {
            let node = graph.node(id);
            constant[id.index()] = node.inputs.iter().all(|v| match graph.producer(*v) {
                Some(p) => constant[p.index()],
                None => graph.value(*v).kind == ValueKind::Constant,
            });
            cheap[id.index()] =
                constant[id.index()] || matches!(node.op, Op::Reshape(_) | Op::Permute(_) | Op::Expand(_));
        }
        Ok(Self { plan, graph, live, stage_of, cheap, reports })
    }

    fn peer_of(&self, node: NodeId) -> PeerId {
        PeerId(self.plan.stages[self.stage_of[node.index()] as usize].peer)
    }

    fn is_forward(&self, node: NodeId) -> bool {
        self.graph.node(node).phase == Phase::Forward
    }

    fn run(self, train: Option<&TrainGraph>) -> Result<Vec<Program>, PlanError> {
        let stages = self.plan.stages.len();
        // Live nodes per stage and direction, and the stages whose passes each waits for.
        let mut passes: BTreeMap<(TaskKind, u32), Vec<NodeId>> = BTreeMap::new();
        let mut deps = [vec![BTreeSet::new(); stages], vec![BTreeSet::new(); stages]];
        for id in self.graph.node_ids().filter(|n| self.live[n.index()]) {
            let stage = self.stage_of[id.index()];
            let kind = if self.is_forward(id) { TaskKind::Forward } else { TaskKind::Backward };
            passes.entry((kind, stage)).or_default().push(id);
            for v in &self.graph.node(id).inputs {
                if let Some(p) = self.graph.producer(*v) {
                    let from = self.stage_of[p.index()];
                    if from != stage && self.is_forward(p) == self.is_forward(id) {
                        deps[kind as usize][stage as usize].insert(from);
                    }
                }
            }
        }
        let [forward_deps, backward_deps] =
            deps.map(|d| d.into_iter().map(|s| s.into_iter().collect()).collect::<Vec<Vec<u32>>>());
        let peer_of_stage: Vec<u32> = self.plan.stages.iter().map(|s| s.peer).collect();
        let peers = self.plan.peers.len();
        let orders = order(
            self.plan.schedule,
            &peer_of_stage,
            peers,
            self.plan.micro_batches,
            &forward_deps,
            &backward_deps,
            train.is_some(),
        );

        let holders = self.holders()?;
        let reductions = self.reductions(train, &holders)?;
        let mut uses = Uses::default();
        for (p, order) in orders.iter().enumerate() {
            for v in self.needs(PeerId(p as u32), order, &passes) {
                uses.readers.entry(v).or_default().push(PeerId(p as u32));
            }
        }
        for (i, r) in reductions.iter().enumerate() {
            for (part, p) in r.parts.iter().enumerate() {
                uses.parts.entry(p.value).or_default().push((i as u32, part as u32));
            }
        }
        (0..peers)
            .map(|p| {
                let peer = PeerId(p as u32);
                let mut emitter = Emitter { c: &self, peer, uses: &uses, present: BTreeSet::new(), out: Vec::new() };
                for task in &orders[p] {
                    for n in passes.get(&(task.kind, task.stage)).map_or(&[][..], |v| v) {
                        emitter.run(*n, task.micro_batch);
                    }
                }
                let mut instructions = emitter.out;
                if train.is_some() {
                    finish_step(&reductions, &holders, peer, &mut instructions);
                }
                Ok(self.program(peer, insert_frees(self.graph, instructions), &holders, &reductions))
            })
            .collect()
    }

    /// The values a peer must be sent for one micro-batch.
    fn needs(
        &self,
        peer: PeerId,
        order: &[Task],
        passes: &BTreeMap<(TaskKind, u32), Vec<NodeId>>,
    ) -> BTreeSet<ValueId> {
        let mut needs = BTreeSet::new();
        let kinds: BTreeSet<(TaskKind, u32)> = order.iter().map(|t| (t.kind, t.stage)).collect();
        let mut pending: Vec<ValueId> = kinds
            .iter()
            .filter_map(|k| passes.get(k))
            .flatten()
            .flat_map(|n| self.graph.node(*n).inputs.iter().copied())
            .collect();
        let mut seen = BTreeSet::new();
        while let Some(v) = pending.pop() {
            if !seen.insert(v) {
                continue;
            }
            match self.graph.producer(v) {
                Some(n) if self.peer_of(n) == peer => {}
                Some(n) if self.cheap[n.index()] => pending.extend(&self.graph.node(n).inputs),
                Some(_) => {
                    needs.insert(v);
                }
                None if self.graph.value(v).kind == ValueKind::Input => {
                    needs.insert(v);
                }
                None => {}
            }
        }
        needs
    }

    /// The peers that keep each parameter, buffer and constant; the owner first.
    fn holders(&self) -> Result<BTreeMap<ValueId, Vec<PeerId>>, PlanError> {
        let mut readers: BTreeMap<ValueId, BTreeMap<u32, PeerId>> = BTreeMap::new();
        for id in self.graph.node_ids() {
            for v in &self.graph.node(id).inputs {
                if matches!(
                    self.graph.value(*v).kind,
                    ValueKind::Parameter(_) | ValueKind::Buffer(_) | ValueKind::Constant
                ) {
                    readers.entry(*v).or_default().insert(self.stage_of[id.index()], self.peer_of(id));
                }
            }
        }
        // A constant may also be read by a cheap node that runs again elsewhere; whoever holds any part of the graph gets all small constants it may need.
        let mut holders: BTreeMap<ValueId, Vec<PeerId>> = BTreeMap::new();
        let first = PeerId(self.plan.stages[0].peer);
        for (i, value) in self.graph.values.iter().enumerate() {
            let v = ValueId(i as u32);
            match value.kind {
                ValueKind::Parameter(_) | ValueKind::Buffer(_) => {
                    // The reader of the earliest stage owns it: its next value is needed there first. What nobody reads stays with the first stage.
                    let mut list: Vec<PeerId> = Vec::new();
                    for peer in
                        readers.get(&v).map(|r| r.values().copied().collect::<Vec<_>>()).unwrap_or_else(|| vec![first])
                    {
                        if !list.contains(&peer) {
                            list.push(peer);
                        }
                    }
                    holders.insert(v, list);
                }
                ValueKind::Constant => {
                    holders.insert(v, (0..self.plan.peers.len() as u32).map(PeerId).collect());
                }
                _ => {}
            }
        }
        for u in &self.graph.state_updates {
            let list = &holders[&u.buffer];
            let maker = self.graph.producer(u.value).map(|n| self.peer_of(n));
            if list.len() != 1 || maker.is_some_and(|m| m != list[0]) {
                return Err(PlanError::Plan(format!(
                    "buffer {:?} changes in forward, so all that reads and writes it must sit on one peer",
                    self.graph.value(u.buffer).name
                )));
            }
        }
        Ok(holders)
    }

    fn reductions(
        &self,
        train: Option<&TrainGraph>,
        holders: &BTreeMap<ValueId, Vec<PeerId>>,
    ) -> Result<Vec<Reduction>, PlanError> {
        let Some(train) = train else { return Ok(Vec::new()) };
        train
            .gradients
            .iter()
            .map(|g| {
                let parts = g
                    .contributions
                    .iter()
                    .map(|v| match self.graph.producer(*v) {
                        Some(n) => Ok(GradientPart { peer: self.peer_of(n), value: *v }),
                        None => Err(PlanError::Plan("the loss is itself a parameter".into())),
                    })
                    .collect::<Result<Vec<_>, _>>()?;
                Ok(Reduction { parameter: g.parameter, owner: holders[&g.parameter][0], parts })
            })
            .collect()
    }

    fn program(
        &self,
        peer: PeerId,
        instructions: Vec<Instruction>,
        holders: &BTreeMap<ValueId, Vec<PeerId>>,
        reductions: &[Reduction],
    ) -> Program {
        let mut program = Program {
            peer,
            micro_batches: self.plan.micro_batches,
            values: BTreeMap::new(),
            nodes: BTreeMap::new(),
            holdings: Vec::new(),
            reductions: Vec::new(),
            reports: self.reports.iter().map(|(name, _)| name.clone()).collect(),
            instructions,
        };
        let mut read = BTreeSet::new();
        for i in &program.instructions {
            match *i {
                Instruction::Run { node, .. } => {
                    let n = self.graph.node(node);
                    read.extend(n.inputs.iter().chain(&n.outputs).copied());
                    program.nodes.entry(node).or_insert_with(|| n.clone());
                }
                Instruction::Receive { slot, .. } | Instruction::Send { slot, .. } => {
                    let (Slot::Value { value: v, .. }
                    | Slot::Part { parameter: v, .. }
                    | Slot::Parameter { parameter: v }) = slot;
                    read.insert(v);
                }
                _ => {}
            }
        }
        for (v, list) in holders {
            let constant = self.graph.value(*v).kind == ValueKind::Constant;
            if list.contains(&peer) && (!constant || read.contains(v)) {
                read.insert(*v);
                program.holdings.push(Holding { value: *v, owner: list[0] == peer });
            }
        }
        // Renumber the reductions to those this peer has a part in.
        let mut index = vec![None; reductions.len()];
        for (i, r) in reductions.iter().enumerate() {
            if r.owner == peer || r.parts.iter().any(|p| p.peer == peer) {
                index[i] = Some(program.reductions.len() as u32);
                read.insert(r.parameter);
                read.extend(r.parts.iter().map(|p| p.value));
                program.reductions.push(r.clone());
            }
        }
        for i in &mut program.instructions {
            if let Instruction::Accumulate { reduction, .. }
            | Instruction::Reduce { reduction }
            | Instruction::Update { reduction } = i
            {
                // Instructions name only reductions this peer has a part in.
                *reduction = index[*reduction as usize].unwrap_or(u32::MAX);
            }
        }
        program.values = read.into_iter().map(|v| (v, self.graph.value(v).clone())).collect();
        program
    }
}

/// Who waits for each value.
#[derive(Default)]
struct Uses {
    /// The peers it is sent to.
    readers: BTreeMap<ValueId, Vec<PeerId>>,
    /// The gradients (reduction and part) it belongs to.
    parts: BTreeMap<ValueId, Vec<(u32, u32)>>,
}

struct Emitter<'a> {
    c: &'a Compiler<'a>,
    peer: PeerId,
    uses: &'a Uses,
    /// Values at hand, per micro-batch.
    present: BTreeSet<(ValueId, u32)>,
    out: Vec<Instruction>,
}

impl Emitter<'_> {
    /// Makes a value available: by receiving it, or by running a cheap node again.
    fn ensure(&mut self, v: ValueId, micro_batch: u32) {
        if self.present.contains(&(v, micro_batch)) {
            return;
        }
        let graph = self.c.graph;
        match graph.producer(v) {
            Some(n) if self.c.peer_of(n) != self.peer && self.c.cheap[n.index()] => self.apply(n, micro_batch),
            Some(n) => self.receive(v, micro_batch, self.c.peer_of(n)),
            None if graph.value(v).kind == ValueKind::Input => self.receive(v, micro_batch, PeerId::BROKER),
            None => {}
        }
    }

    fn receive(&mut self, value: ValueId, micro_batch: u32, from: PeerId) {
        self.present.insert((value, micro_batch));
        self.out.push(Instruction::Receive { slot: Slot::Value { value, micro_batch }, from });
    }

    fn apply(&mut self, node: NodeId, micro_batch: u32) {
        let n = self.c.graph.node(node);
        for v in &n.inputs {
            self.ensure(*v, micro_batch);
        }
        self.out.push(Instruction::Run { node, micro_batch });
        self.present.extend(n.outputs.iter().map(|v| (*v, micro_batch)));
    }

    /// Runs a node of this peer's own and passes on what others wait for.
    fn run(&mut self, node: NodeId, micro_batch: u32) {
        self.apply(node, micro_batch);
        let graph = self.c.graph;
        for v in graph.node(node).outputs.clone() {
            for &to in self.uses.readers.get(&v).into_iter().flatten().filter(|p| **p != self.peer) {
                self.out.push(Instruction::Send { slot: Slot::Value { value: v, micro_batch }, to });
            }
            for &(reduction, part) in self.uses.parts.get(&v).into_iter().flatten() {
                self.out.push(Instruction::Accumulate { reduction, part, value: v, micro_batch });
            }
            for u in graph.state_updates.iter().filter(|u| u.value == v) {
                self.out.push(Instruction::UpdateState { buffer: u.buffer, value: v, micro_batch });
            }
            for (i, _) in self.c.reports.iter().enumerate().filter(|(_, (_, r))| *r == v) {
                self.out.push(Instruction::Report { report: i as u32, value: v, micro_batch });
            }
        }
    }
}

/// What follows the last micro-batch: gradients come together at their owners, are clipped and applied, and new values go to the other holders.
fn finish_step(
    reductions: &[Reduction],
    holders: &BTreeMap<ValueId, Vec<PeerId>>,
    peer: PeerId,
    out: &mut Vec<Instruction>,
) {
    for r in reductions {
        for (part, p) in r.parts.iter().enumerate() {
            let slot = Slot::Part { parameter: r.parameter, part: part as u32 };
            if p.peer == peer && r.owner != peer {
                out.push(Instruction::Send { slot, to: r.owner });
            }
        }
    }
    for (i, r) in reductions.iter().enumerate().filter(|(_, r)| r.owner == peer) {
        for (part, p) in r.parts.iter().enumerate().filter(|(_, p)| p.peer != peer) {
            out.push(Instruction::Receive {
                slot: Slot::Part { parameter: r.parameter, part: part as u32 },
                from: p.peer,
            });
        }
        out.push(Instruction::Reduce { reduction: i as u32 });
    }
    out.push(Instruction::Clip);
    for (i, r) in reductions.iter().enumerate().filter(|(_, r)| r.owner == peer) {
        out.push(Instruction::Update { reduction: i as u32 });
        for to in &holders[&r.parameter][1..] {
            out.push(Instruction::Send { slot: Slot::Parameter { parameter: r.parameter }, to: *to });
        }
    }
    for r in reductions.iter().filter(|r| r.owner != peer && holders[&r.parameter].contains(&peer)) {
        out.push(Instruction::Receive { slot: Slot::Parameter { parameter: r.parameter }, from: r.owner });
    }
}

/// Puts a [`Instruction::Free`] behind the last use of every value of every micro-batch.
fn insert_frees(graph: &Graph, instructions: Vec<Instruction>) -> Vec<Instruction> {
    let transient = |v: ValueId| matches!(graph.value(v).kind, ValueKind::Result { .. } | ValueKind::Input);
    let mut gone: BTreeSet<(ValueId, u32)> = BTreeSet::new();
    let mut reversed = Vec::with_capacity(instructions.len() * 2);
    for i in instructions.into_iter().rev() {
        let (touched, micro_batch): (Vec<ValueId>, u32) = match i {
            Instruction::Run { node, micro_batch } => {
                let n = graph.node(node);
                (n.inputs.iter().chain(&n.outputs).copied().collect(), micro_batch)
            }
            Instruction::Receive { slot: Slot::Value { value, micro_batch }, .. }
            | Instruction::Send { slot: Slot::Value { value, micro_batch }, .. }
            | Instruction::Accumulate { value, micro_batch, .. }
            | Instruction::UpdateState { value, micro_batch, .. }
            | Instruction::Report { value, micro_batch, .. } => (vec![value], micro_batch),
            _ => (Vec::new(), 0),
        };
        for value in touched {
            if transient(value) && gone.insert((value, micro_batch)) {
                reversed.push(Instruction::Free { value, micro_batch });
            }
        }
        reversed.push(i);
    }
    reversed.reverse();
    reversed
}

impl Program {
    /// The messages it waits for in one step, with their senders and types: what a peer may be sent.
    pub fn incoming(&self) -> BTreeMap<Slot, (PeerId, TensorType)> {
        let mut incoming = BTreeMap::new();
        for i in &self.instructions {
            if let Instruction::Receive { slot, from } = *i {
                let v = match slot {
                    Slot::Value { value, .. } => value,
                    Slot::Part { parameter, .. } | Slot::Parameter { parameter } => parameter,
                };
                if let Some(value) = self.values.get(&v) {
                    incoming.insert(slot, (from, value.ty.clone()));
                }
            }
        }
        incoming
    }

    /// Checks all that running it relies on, so that a program from the network can be trusted afterwards: every reference, every type by the
    /// operator's own rule, and that each value is there when it is used.
    pub fn validate(&self) -> Result<(), PlanError> {
        let fail = |m: String| Err(PlanError::Program(m));
        let ty = |v: &ValueId| self.values.get(v).map(|v| &v.ty);
        for (id, node) in &self.nodes {
            let (inputs, outputs) = (
                node.inputs.iter().map(ty).collect::<Option<Vec<_>>>(),
                node.outputs.iter().map(ty).collect::<Option<Vec<_>>>(),
            );
            let (Some(inputs), Some(outputs)) = (inputs, outputs) else {
                return fail(format!("node {id} {:?} names a value that is not there", node.name));
            };
            match node.op.infer(&inputs) {
                Ok(types) if types.iter().eq(outputs) => {}
                Ok(_) => {
                    return fail(format!(
                        "node {id} {:?}: its results' types are not what {} makes",
                        node.name,
                        node.op.name()
                    ));
                }
                Err(e) => return fail(format!("node {id} {:?} ({}): {e}", node.name, node.op.name())),
            }
        }
        let held: BTreeSet<ValueId> = self.holdings.iter().map(|h| h.value).collect();
        if let Some(v) = held.iter().find(|v| !self.values.contains_key(v)) {
            return fail(format!("it holds {v}, which is not there"));
        }
        for r in &self.reductions {
            let of = ty(&r.parameter);
            if of.is_none() || r.parts.is_empty() || r.parts.iter().any(|p| ty(&p.value) != of) {
                return fail(format!("the gradient parts of {} do not fit it", r.parameter));
            }
        }
        let mut present: BTreeSet<(ValueId, u32)> = BTreeSet::new();
        let available = |present: &BTreeSet<(ValueId, u32)>, v: ValueId, m: u32| {
            held.contains(&v)
                || present.contains(&(v, m))
                || self.values.get(&v).is_some_and(|value| value.kind == ValueKind::RngKey)
        };
        for (at, i) in self.instructions.iter().enumerate() {
            let ok = match *i {
                Instruction::Receive { slot: Slot::Value { value, micro_batch }, from } => {
                    from != self.peer && self.values.contains_key(&value) && present.insert((value, micro_batch))
                }
                Instruction::Run { node, micro_batch } => match self.nodes.get(&node) {
                    Some(n) => {
                        let ready = n.inputs.iter().all(|v| available(&present, *v, micro_batch));
                        present.extend(n.outputs.iter().map(|v| (*v, micro_batch)));
                        ready
                    }
                    None => false,
                },
                Instruction::Send { slot: Slot::Value { value, micro_batch }, .. }
                | Instruction::UpdateState { value, micro_batch, .. } => available(&present, value, micro_batch),
                Instruction::Report { report, value, micro_batch } => {
                    (report as usize) < self.reports.len()
                        && available(&present, value, micro_batch)
                        && ty(&value).is_some_and(|t| t.numel() == 1)
                }
                Instruction::Accumulate { reduction, part, value, micro_batch } => {
                    let r = self.reductions.get(reduction as usize);
                    r.and_then(|r| r.parts.get(part as usize)).is_some_and(|p| p.value == value)
                        && available(&present, value, micro_batch)
                }
                Instruction::Free { value, micro_batch } => present.remove(&(value, micro_batch)),
                Instruction::Reduce { reduction } | Instruction::Update { reduction } => self
                    .reductions
                    .get(reduction as usize)
                    .is_some_and(|r| r.owner == self.peer && held.contains(&r.parameter)),
                Instruction::Receive { slot, .. } | Instruction::Send { slot, .. } => match slot {
                    Slot::Part { parameter, part } => {
                        self.reductions.iter().any(|r| r.parameter == parameter && (part as usize) < r.parts.len())
                    }
                    Slot::Parameter { parameter } => held.contains(&parameter),
                    Slot::Value { .. } => true,
                },
                Instruction::Clip => true,
            };
            if !ok {
                return fail(format!("instruction {at} ({i:?}) names what is not there"));
            }
        }
        Ok(())
    }
}
