//! Plans to Programs: which peer runs, keeps, sends and receives what, and when.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use fusionllm_graph::{Graph, NodeId, Op, Phase, StateUpdate, TrainGraph, ValueId, ValueKind};

use crate::schedule::{Task, TaskKind, order};
use crate::{GradientPart, Holding, Instruction, PeerId, Placement, Plan, PlanError, Program, Reduction, Slot};

/// Most nodes times micro-batches of one step.
const MAX_RUNS: u64 = 1 << 26;

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
    let placement = Placement::of_training(plan, forward, train)?;
    let mut compiler = Compiler::new(plan, &train.graph, live, placement, vec![("loss".into(), train.loss)])?;
    compiler.reduce(train)?;
    compiler.run()
}

/// The Programs of a forward pass over an evaluation graph that reports some of its outputs, one per peer of the plan.
pub fn compile_forward(
    plan: &Plan,
    forward: &Graph,
    eval: &Graph,
    reports: &[&str],
) -> Result<Vec<Program>, PlanError> {
    plan.validate(forward)?;
    let reports = reports
        .iter()
        .map(|name| match eval.outputs.get(*name) {
            Some(v) => Ok((name.to_string(), *v)),
            None => Err(PlanError::Plan(format!("the graph has no output {name:?}"))),
        })
        .collect::<Result<Vec<_>, _>>()?;
    let live = eval.ancestors(reports.iter().map(|(_, v)| *v));
    Compiler::new(plan, eval, live, Placement::of_evaluation(plan, forward, eval)?, reports)?.run()
}

/// What one stage does in one direction with each micro-batch.
#[derive(Default)]
struct Pass {
    /// In the graph's order.
    nodes: Vec<NodeId>,
    /// Buffers that get their new content once all of the pass has read the old one.
    updates: Vec<StateUpdate>,
}

struct Compiler<'a> {
    plan: &'a Plan,
    graph: &'a Graph,
    /// By node: whether anything that counts depends on it.
    live: Vec<bool>,
    /// By node.
    peer_of: Vec<PeerId>,
    /// By node.
    stage_of: Vec<u32>,
    /// By node: made from constants alone, or a view; run again where it is needed instead of sent.
    cheap: Vec<bool>,
    /// The peers that keep each parameter and buffer; the owner first.
    holders: BTreeMap<ValueId, Vec<PeerId>>,
    /// Whether gradients are reduced and applied.
    trains: bool,
    reductions: Vec<Reduction>,
    reports: Vec<(String, ValueId)>,
}

impl<'a> Compiler<'a> {
    fn new(
        plan: &'a Plan,
        graph: &'a Graph,
        live: Vec<bool>,
        Placement { stage_of }: Placement,
        reports: Vec<(String, ValueId)>,
    ) -> Result<Self, PlanError> {
        if let Some(s) = plan.stages.iter().position(|s| s.replicas().len() > 1) {
            return Err(PlanError::Plan(format!("stage {s} has several peers, which no peer can carry out yet")));
        }
        let runs = live.iter().filter(|l| **l).count() as u64 * u64::from(plan.micro_batches);
        if runs > MAX_RUNS {
            return Err(PlanError::Plan(format!(
                "{} micro-batches of this graph are {runs} runs of operators a step, of which {MAX_RUNS} are possible",
                plan.micro_batches
            )));
        }
        if let Some((name, _)) = reports.iter().find(|(_, v)| graph.producer(*v).is_none()) {
            return Err(PlanError::Plan(format!("no operator computes {name:?}")));
        }
        let peer_of: Vec<PeerId> = stage_of.iter().map(|&s| plan.stages[s as usize].peer(0)).collect();
        let cheap = cheap(graph);
        let holders = holders(plan, graph, &stage_of);
        let c = Self {
            plan,
            graph,
            live,
            peer_of,
            stage_of,
            cheap,
            holders,
            trains: false,
            reductions: Vec::new(),
            reports,
        };
        c.check_state()?;
        Ok(c)
    }

    /// A buffer that forward changes is read by forward nodes of one stage alone: elsewhere, or later, there is no telling which micro-batch's content is found.
    fn check_state(&self) -> Result<(), PlanError> {
        let readers = self.graph.consumers();
        for u in &self.graph.state_updates {
            let name = &self.graph.value(u.buffer).name;
            let Some(maker) = self.graph.producer(u.value) else {
                return Err(PlanError::Plan(format!("no operator computes the new content of buffer {name:?}")));
            };
            let stage = self.stage_of[maker.index()];
            for &id in &readers[u.buffer.index()] {
                if self.graph.node(id).phase != Phase::Forward {
                    return Err(PlanError::Plan(format!(
                        "{:?} needs the content of buffer {name:?} once more for its gradient, but forward has changed it by then",
                        self.graph.node(id).name
                    )));
                }
                if self.stage_of[id.index()] != stage {
                    return Err(PlanError::Plan(format!(
                        "buffer {name:?} changes in forward, so all that reads and writes it must sit in one stage"
                    )));
                }
            }
        }
        Ok(())
    }

    /// Settles where the parts of each gradient are summed and added.
    fn reduce(&mut self, train: &TrainGraph) -> Result<(), PlanError> {
        self.trains = true;
        for g in &train.gradients {
            let mut parts = Vec::with_capacity(g.contributions.len());
            for &value in &g.contributions {
                let Some(maker) = self.graph.producer(value) else {
                    return Err(PlanError::Plan(format!(
                        "parameter {:?} is itself a term of the loss, so that no operator makes its gradient; scale it by one",
                        self.graph.value(g.parameter).name
                    )));
                };
                parts.push(GradientPart { peer: self.peer_of[maker.index()], value });
            }
            let owner = self.holders[&g.parameter][0];
            self.reductions.push(Reduction { parameter: g.parameter, owner, parts });
        }
        Ok(())
    }

    fn run(self) -> Result<Vec<Program>, PlanError> {
        let passes = self.passes();
        let orders = self.order(&passes);
        let uses = self.uses();
        let programs = orders.iter().enumerate().map(|(p, tasks)| {
            let peer = PeerId(p as u32);
            let mut emitter = Emitter { c: &self, peer, uses: &uses, present: HashSet::new(), out: Vec::new() };
            for task in tasks {
                if let Some(pass) = passes.get(&(task.kind, task.stage)) {
                    emitter.pass(pass, task.micro_batch);
                }
            }
            if self.trains {
                emitter.finish_step();
            }
            let instructions = insert_frees(self.graph, emitter.out);
            self.program(peer, instructions, &uses)
        });
        Ok(programs.collect())
    }

    /// Live nodes and state updates per direction and stage.
    fn passes(&self) -> BTreeMap<(TaskKind, u32), Pass> {
        let mut passes: BTreeMap<(TaskKind, u32), Pass> = BTreeMap::new();
        for id in self.graph.node_ids().filter(|n| self.live[n.index()]) {
            passes.entry((self.kind(id), self.stage_of[id.index()])).or_default().nodes.push(id);
        }
        for u in &self.graph.state_updates {
            if let Some(maker) = self.graph.producer(u.value).filter(|m| self.live[m.index()]) {
                let key = (self.kind(maker), self.stage_of[maker.index()]);
                passes.entry(key).or_default().updates.push(*u);
            }
        }
        passes
    }

    fn kind(&self, id: NodeId) -> TaskKind {
        if self.graph.node(id).phase == Phase::Forward { TaskKind::Forward } else { TaskKind::Backward }
    }

    fn order(&self, passes: &BTreeMap<(TaskKind, u32), Pass>) -> Vec<Vec<Task>> {
        // The other stages whose pass of the same direction each pass waits for.
        let mut deps = [vec![BTreeSet::new(); self.plan.stages.len()], vec![BTreeSet::new(); self.plan.stages.len()]];
        for ((kind, stage), pass) in passes {
            for v in pass.nodes.iter().flat_map(|n| &self.graph.node(*n).inputs) {
                if let Some(p) = self.graph.producer(*v) {
                    let from = self.stage_of[p.index()];
                    if from != *stage && self.kind(p) == *kind {
                        deps[*kind as usize][*stage as usize].insert(from);
                    }
                }
            }
        }
        let [forward, backward] = deps.map(|d| d.into_iter().map(Vec::from_iter).collect::<Vec<_>>());
        let peer_of_stage: Vec<u32> = self.plan.stages.iter().map(|s| s.peer(0).0).collect();
        let Plan { schedule, micro_batches, ref peers, .. } = *self.plan;
        order(schedule, &peer_of_stage, peers.len(), micro_batches, &forward, &backward, self.trains)
    }

    fn uses(&self) -> Uses {
        let mut uses = Uses {
            readers: vec![BTreeSet::new(); self.graph.values.len()],
            parts: BTreeMap::new(),
            reports: BTreeMap::new(),
        };
        let mut pending: Vec<(ValueId, PeerId)> = Vec::new();
        for id in self.graph.node_ids().filter(|n| self.live[n.index()]) {
            pending.extend(self.graph.node(id).inputs.iter().map(|v| (*v, self.peer_of[id.index()])));
        }
        let mut again = HashSet::new();
        while let Some((v, peer)) = pending.pop() {
            match self.graph.producer(v) {
                Some(n) if self.peer_of[n.index()] == peer => {}
                Some(n) if self.cheap[n.index()] => {
                    if again.insert((n, peer)) {
                        pending.extend(self.graph.node(n).inputs.iter().map(|v| (*v, peer)));
                    }
                }
                _ => {
                    uses.readers[v.index()].insert(peer);
                }
            }
        }
        for (r, reduction) in (0..).zip(&self.reductions) {
            for (part, p) in (0..).zip(&reduction.parts) {
                uses.parts.entry(p.value).or_default().push((r, part));
            }
        }
        for (r, (_, v)) in (0..).zip(&self.reports) {
            uses.reports.entry(*v).or_default().push(r);
        }
        uses
    }

    fn program(&self, peer: PeerId, instructions: Vec<Instruction>, uses: &Uses) -> Program {
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
        let mut touched = BTreeSet::new();
        for i in &program.instructions {
            match *i {
                Instruction::Run { node, .. } => {
                    program.nodes.entry(node).or_insert_with(|| {
                        let n = self.graph.node(node);
                        touched.extend(n.inputs.iter().chain(&n.outputs).copied());
                        n.clone()
                    });
                }
                Instruction::Receive { slot, .. } | Instruction::Send { slot, .. } => {
                    touched.insert(slot.value());
                }
                _ => {}
            }
        }
        for (i, value) in self.graph.values.iter().enumerate() {
            let v = ValueId(i as u32);
            let owner = match value.kind {
                ValueKind::Parameter(_) | ValueKind::Buffer(_) => match &self.holders[&v][..] {
                    list if list.contains(&peer) => list[0] == peer,
                    _ => continue,
                },
                // Saved nowhere, so nobody's own.
                ValueKind::Constant if uses.readers[i].contains(&peer) => false,
                _ => continue,
            };
            touched.insert(v);
            program.holdings.push(Holding { value: v, owner });
        }
        // Instructions name only reductions this peer has a part in, and are renumbered to those.
        let mut index = vec![u32::MAX; self.reductions.len()];
        for (i, r) in self.reductions.iter().enumerate() {
            if r.owner == peer || r.parts.iter().any(|p| p.peer == peer) {
                index[i] = program.reductions.len() as u32;
                touched.insert(r.parameter);
                touched.extend(r.parts.iter().map(|p| p.value));
                program.reductions.push(r.clone());
            }
        }
        for i in &mut program.instructions {
            if let Instruction::Accumulate { reduction, .. }
            | Instruction::Reduce { reduction }
            | Instruction::Update { reduction } = i
            {
                *reduction = index[*reduction as usize];
            }
        }
        program.values = touched.into_iter().map(|v| (v, self.graph.value(v).clone())).collect();
        program
    }
}

/// By node, whether it is run again where it is needed instead of sent.
pub(crate) fn cheap(graph: &Graph) -> Vec<bool> {
    let mut constant = vec![false; graph.nodes.len()];
    let mut cheap = vec![false; graph.nodes.len()];
    for (n, node) in graph.nodes.iter().enumerate() {
        constant[n] = node.inputs.iter().all(|v| match graph.producer(*v) {
            Some(p) => constant[p.index()],
            None => graph.value(*v).kind == ValueKind::Constant,
        });
        // A view of a parameter is sent like any other value: its reader keeps no copy of the parameter.
        let of_state =
            node.inputs.iter().any(|v| matches!(graph.value(*v).kind, ValueKind::Parameter(_) | ValueKind::Buffer(_)));
        let view = matches!(node.op, Op::Reshape(_) | Op::Permute(_) | Op::Expand(_));
        cheap[n] = constant[n] || (view && !of_state);
    }
    cheap
}

/// The peers that keep each parameter and buffer. Nodes that are not live count too: the evaluation form may run them.
fn holders(plan: &Plan, graph: &Graph, stage_of: &[u32]) -> BTreeMap<ValueId, Vec<PeerId>> {
    let mut stages: BTreeMap<ValueId, BTreeSet<u32>> =
        graph.parameters().chain(graph.buffers()).map(|v| (v, BTreeSet::new())).collect();
    for (node, stage) in graph.nodes.iter().zip(stage_of) {
        for v in &node.inputs {
            if let Some(readers) = stages.get_mut(v) {
                readers.insert(*stage);
            }
        }
    }
    stages
        .into_iter()
        .map(|(v, mut stages)| {
            // The reader of the earliest stage owns it: its next value is needed there first. What nobody reads stays with the first stage.
            if stages.is_empty() {
                stages.insert(0);
            }
            let mut peers: Vec<PeerId> = Vec::new();
            for stage in stages {
                let peer = plan.stages[stage as usize].peer(0);
                if !peers.contains(&peer) {
                    peers.push(peer);
                }
            }
            (v, peers)
        })
        .collect()
}

/// Who waits for each value.
struct Uses {
    /// By value: the peers it is sent to, or, for a constant, that keep it. Its maker is not among them.
    readers: Vec<BTreeSet<PeerId>>,
    /// The gradients (reduction and part) it belongs to.
    parts: BTreeMap<ValueId, Vec<(u32, u32)>>,
    /// The reports it is.
    reports: BTreeMap<ValueId, Vec<u32>>,
}

/// Writes one peer's instructions.
struct Emitter<'a> {
    c: &'a Compiler<'a>,
    peer: PeerId,
    uses: &'a Uses,
    /// Values at hand, per micro-batch.
    present: HashSet<(ValueId, u32)>,
    out: Vec<Instruction>,
}

impl Emitter<'_> {
    fn pass(&mut self, pass: &Pass, micro_batch: u32) {
        for n in &pass.nodes {
            self.run(*n, micro_batch);
        }
        for &StateUpdate { buffer, value } in &pass.updates {
            self.out.push(Instruction::UpdateState { buffer, value, micro_batch });
        }
    }

    /// Runs a node of this peer's own and passes on what others wait for.
    fn run(&mut self, node: NodeId, micro_batch: u32) {
        self.apply(node, micro_batch);
        for &value in &self.c.graph.node(node).outputs {
            for &to in &self.uses.readers[value.index()] {
                self.out.push(Instruction::Send { slot: Slot::Value { value, micro_batch }, to });
            }
            for &(reduction, part) in self.uses.parts.get(&value).into_iter().flatten() {
                self.out.push(Instruction::Accumulate { reduction, part, value, micro_batch });
            }
            for &report in self.uses.reports.get(&value).into_iter().flatten() {
                self.out.push(Instruction::Report { report, value, micro_batch });
            }
        }
    }

    fn apply(&mut self, node: NodeId, micro_batch: u32) {
        let n = self.c.graph.node(node);
        for v in &n.inputs {
            self.ensure(*v, micro_batch);
        }
        self.out.push(Instruction::Run { node, micro_batch });
        self.present.extend(n.outputs.iter().map(|v| (*v, micro_batch)));
    }

    /// Makes a value available: by receiving it, or by running a cheap node again.
    fn ensure(&mut self, v: ValueId, micro_batch: u32) {
        if self.present.contains(&(v, micro_batch)) {
            return;
        }
        match self.c.graph.producer(v) {
            Some(n) if self.c.cheap[n.index()] && self.c.peer_of[n.index()] != self.peer => self.apply(n, micro_batch),
            Some(n) => self.receive(v, micro_batch, self.c.peer_of[n.index()]),
            None if self.c.graph.value(v).kind == ValueKind::Input => self.receive(v, micro_batch, PeerId::BROKER),
            None => {}
        }
    }

    fn receive(&mut self, value: ValueId, micro_batch: u32, from: PeerId) {
        self.present.insert((value, micro_batch));
        self.out.push(Instruction::Receive { slot: Slot::Value { value, micro_batch }, from });
    }

    /// What follows the last micro-batch: gradients come together at their owners, are clipped and applied, and new values go to the other holders.
    fn finish_step(&mut self) {
        let (peer, out) = (self.peer, &mut self.out);
        for r in self.c.reductions.iter().filter(|r| r.owner != peer) {
            for (part, _) in (0..).zip(&r.parts).filter(|(_, p)| p.peer == peer) {
                out.push(Instruction::Send { slot: Slot::Part { parameter: r.parameter, part }, to: r.owner });
            }
        }
        let owned = || (0..).zip(&self.c.reductions).filter(|(_, r)| r.owner == peer);
        for (reduction, r) in owned() {
            for (part, p) in (0..).zip(&r.parts).filter(|(_, p)| p.peer != peer) {
                out.push(Instruction::Receive { slot: Slot::Part { parameter: r.parameter, part }, from: p.peer });
            }
            out.push(Instruction::Reduce { reduction });
        }
        out.push(Instruction::Clip);
        for (reduction, r) in owned() {
            out.push(Instruction::Update { reduction });
            for &to in &self.c.holders[&r.parameter][1..] {
                out.push(Instruction::Send { slot: Slot::Parameter { parameter: r.parameter }, to });
            }
        }
        for r in self.c.reductions.iter().filter(|r| self.c.holders[&r.parameter][1..].contains(&peer)) {
            out.push(Instruction::Receive { slot: Slot::Parameter { parameter: r.parameter }, from: r.owner });
        }
    }
}

/// Puts an [`Instruction::Free`] behind the last use of every value of every micro-batch.
fn insert_frees(graph: &Graph, instructions: Vec<Instruction>) -> Vec<Instruction> {
    let transient = |v: ValueId| matches!(graph.value(v).kind, ValueKind::Result { .. } | ValueKind::Input);
    let mut gone: HashSet<(ValueId, u32)> = HashSet::new();
    let mut reversed = Vec::with_capacity(instructions.len() * 2);
    for i in instructions.into_iter().rev() {
        let mut touch = |value: ValueId, micro_batch: u32| {
            if transient(value) && gone.insert((value, micro_batch)) {
                reversed.push(Instruction::Free { value, micro_batch });
            }
        };
        match i {
            Instruction::Run { node, micro_batch } => {
                let n = graph.node(node);
                n.inputs.iter().chain(&n.outputs).for_each(|v| touch(*v, micro_batch));
            }
            Instruction::Receive { slot: Slot::Value { value, micro_batch }, .. }
            | Instruction::Send { slot: Slot::Value { value, micro_batch }, .. }
            | Instruction::Accumulate { value, micro_batch, .. }
            | Instruction::UpdateState { value, micro_batch, .. }
            | Instruction::Report { value, micro_batch, .. } => touch(value, micro_batch),
            _ => {}
        }
        reversed.push(i);
    }
    reversed.reverse();
    reversed
}
