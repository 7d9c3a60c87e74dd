//! Plans to Programs: which peer runs, keeps, sends and receives what, and when.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use fusionllm_graph::{Graph, NodeId, Op, Phase, StateUpdate, TrainGraph, ValueId, ValueKind};

use crate::compression::codable;
use crate::emit::{Emitter, insert_frees};
use crate::schedule::{StageTasks, Task, TaskKind, order};
use crate::{GradientPart, Holding, Instruction, PeerId, Placement, Plan, PlanError, Program, Reduction, Stage};

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
    let mut programs = compiler.run()?;
    if plan.compression.shared_masks {
        programs.iter_mut().for_each(|p| p.masks = masks(p, train));
    }
    Ok(programs)
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

/// What one stage does in one kind of pass with each micro-batch.
#[derive(Default)]
pub(crate) struct Pass {
    /// In the graph's order.
    pub(crate) nodes: Vec<NodeId>,
    /// Buffers that get their new content, by the node after which nothing reads the old one any more.
    pub(crate) updates: BTreeMap<NodeId, Vec<StateUpdate>>,
}

pub(crate) struct Compiler<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) graph: &'a Graph,
    /// By node: whether anything that counts depends on it.
    live: Vec<bool>,
    /// By node.
    stage_of: Vec<u32>,
    /// By node: made from constants alone, or a view; run again where it is needed instead of sent.
    pub(crate) cheap: Vec<bool>,
    /// By node: a gradient that nothing outside its stage's weight passes waits for, where the schedule has such passes.
    delayed: Vec<bool>,
    /// The peers that keep each parameter and buffer; the owner first.
    pub(crate) holders: BTreeMap<ValueId, Vec<PeerId>>,
    /// The buffers that change, with the stage in which they do.
    pub(crate) changing: BTreeMap<ValueId, u32>,
    /// After how many micro-batches the same peers' turn is again, in all stages.
    period: u32,
    /// Whether gradients are reduced and applied.
    trains: bool,
    pub(crate) reductions: Vec<Reduction>,
    reports: Vec<(String, ValueId)>,
    /// By node: an activation or an activation's gradient, which may be sent less exactly than it was computed.
    varies: Vec<bool>,
}

impl<'a> Compiler<'a> {
    fn new(
        plan: &'a Plan,
        graph: &'a Graph,
        live: Vec<bool>,
        Placement { stage_of }: Placement,
        reports: Vec<(String, ValueId)>,
    ) -> Result<Self, PlanError> {
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
        let cheap = cheap(graph);
        let holders = holders(plan, graph, &stage_of);
        let changing = graph.state_updates.iter().filter_map(|u| {
            let maker = graph.producer(u.value).filter(|m| live[m.index()])?;
            Some((u.buffer, stage_of[maker.index()]))
        });
        let c = Self {
            plan,
            graph,
            cheap,
            delayed: vec![false; graph.nodes.len()],
            holders,
            changing: changing.collect(),
            period: period(plan),
            trains: false,
            reductions: Vec::new(),
            reports,
            varies: varies(graph),
            live,
            stage_of,
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

    /// The stage that a node sits in.
    pub(crate) fn stage(&self, node: NodeId) -> &'a Stage {
        &self.plan.stages[self.stage_of[node.index()] as usize]
    }

    /// Settles where the parts of each gradient are summed and added: use by use, and for each use turn by turn. Who takes the turns decides nothing about the sum.
    fn reduce(&mut self, train: &TrainGraph) -> Result<(), PlanError> {
        self.trains = true;
        if self.plan.schedule.kinds().contains(&TaskKind::Weight) {
            self.delay();
        }
        for g in &train.gradients {
            let mut parts = Vec::with_capacity(g.contributions.len());
            for &value in &g.contributions {
                let Some(maker) = self.graph.producer(value) else {
                    return Err(PlanError::Plan(format!(
                        "parameter {:?} is itself a term of the loss, so that no operator makes its gradient; scale it by one",
                        self.graph.value(g.parameter).name
                    )));
                };
                let peers = &self.stage(maker).peers;
                parts.extend((0..).zip(peers).map(|(turn, peer)| {
                    let micro_batches = (self.plan.micro_batches - turn).div_ceil(peers.len() as u32);
                    GradientPart { peer: PeerId(*peer), value, micro_batches }
                }));
            }
            let owner = self.holders[&g.parameter][0];
            self.reductions.push(Reduction { parameter: g.parameter, owner, parts });
        }
        Ok(())
    }

    /// Finds the gradients that can wait for a weight pass: nothing but such gradients of the same stage reads them.
    fn delay(&mut self) {
        let readers = self.graph.consumers();
        for id in self.graph.node_ids().rev().filter(|n| self.live[n.index()]) {
            let node = self.graph.node(id);
            let mut users = node.outputs.iter().flat_map(|v| &readers[v.index()]).filter(|u| self.live[u.index()]);
            self.delayed[id.index()] = node.phase == Phase::WeightGrad
                && users.all(|u| self.delayed[u.index()] && self.stage_of[u.index()] == self.stage_of[id.index()]);
        }
    }

    fn run(self) -> Result<Vec<Program>, PlanError> {
        let passes = self.passes();
        let orders = self.order(&passes);
        let uses = self.uses();
        let used = self.plan.used();
        let programs = orders.iter().enumerate().map(|(p, tasks)| {
            let peer = PeerId(p as u32);
            let mut emitter = Emitter::new(&self, peer, &uses);
            for task in tasks {
                if let Some(pass) = passes.get(&(task.kind, task.stage)) {
                    emitter.pass(pass, task.micro_batch);
                }
            }
            if used.contains(&peer) {
                emitter.finish_pass(self.trains);
            }
            let instructions = insert_frees(self.graph, emitter.out);
            self.program(peer, instructions, &uses)
        });
        Ok(programs.collect())
    }

    /// Live nodes and state updates per kind of pass and stage.
    fn passes(&self) -> BTreeMap<(TaskKind, u32), Pass> {
        let mut passes: BTreeMap<(TaskKind, u32), Pass> = BTreeMap::new();
        for id in self.graph.node_ids().filter(|n| self.live[n.index()]) {
            passes.entry((self.kind(id), self.stage_of[id.index()])).or_default().nodes.push(id);
        }
        let readers = self.graph.consumers();
        for u in &self.graph.state_updates {
            if let Some(maker) = self.graph.producer(u.value).filter(|m| self.live[m.index()]) {
                let pass = passes.entry((self.kind(maker), self.stage_of[maker.index()])).or_default();
                let readers = readers[u.buffer.index()].iter().copied().filter(|r| self.live[r.index()]);
                let last = readers.fold(maker, NodeId::max);
                pass.updates.entry(last).or_default().push(*u);
            }
        }
        passes
    }

    fn kind(&self, id: NodeId) -> TaskKind {
        match self.graph.node(id).phase {
            Phase::Forward => TaskKind::Forward,
            _ if self.delayed[id.index()] => TaskKind::Weight,
            _ => TaskKind::Backward,
        }
    }

    fn order(&self, passes: &BTreeMap<(TaskKind, u32), Pass>) -> Vec<Vec<Task>> {
        let stage = |s: &Stage| StageTasks { peers: s.peers.clone(), ..StageTasks::default() };
        let mut stages: Vec<StageTasks> = self.plan.stages.iter().map(stage).collect();
        for ((kind, stage), pass) in passes {
            let operands = pass.nodes.iter().flat_map(|n| &self.graph.node(*n).inputs);
            let makers = operands.filter_map(|v| self.graph.producer(*v));
            let waits: BTreeSet<_> = makers.map(|p| (self.kind(p), self.stage_of[p.index()])).collect();
            let tasks = &mut stages[*stage as usize];
            tasks.waits[*kind as usize] = waits.into_iter().filter(|(_, s)| s != stage).collect();
            tasks.chained |= !pass.updates.is_empty();
        }
        let Plan { schedule, micro_batches, ref peers, .. } = *self.plan;
        let kinds = if self.trains { schedule.kinds() } else { &[TaskKind::Forward] };
        order(schedule, kinds, &stages, peers.len(), micro_batches)
    }

    fn uses(&self) -> Uses {
        let mut uses = Uses {
            readers: (0..self.period).map(|m| self.readers(m)).collect(),
            parts: BTreeMap::new(),
            reports: BTreeMap::new(),
        };
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

    /// Who waits for each value of a micro-batch.
    fn readers(&self, micro_batch: u32) -> BTreeMap<ValueId, BTreeSet<PeerId>> {
        let mut readers: BTreeMap<ValueId, BTreeSet<PeerId>> = BTreeMap::new();
        let mut pending: Vec<(ValueId, PeerId)> = Vec::new();
        for id in self.graph.node_ids().filter(|n| self.live[n.index()]) {
            let peer = self.stage(id).peer(micro_batch);
            pending.extend(self.graph.node(id).inputs.iter().map(|v| (*v, peer)));
        }
        let mut again = HashSet::new();
        while let Some((v, peer)) = pending.pop() {
            match self.graph.producer(v) {
                Some(n) if self.stage(n).peer(micro_batch) == peer => {}
                Some(n) if self.cheap[n.index()] => {
                    if again.insert((n, peer)) {
                        pending.extend(self.graph.node(n).inputs.iter().map(|v| (*v, peer)));
                    }
                }
                _ => {
                    readers.entry(v).or_default().insert(peer);
                }
            }
        }
        readers
    }

    fn program(&self, peer: PeerId, instructions: Vec<Instruction>, uses: &Uses) -> Program {
        let mut program = Program {
            peer,
            version: self.plan.version,
            micro_batches: self.plan.micro_batches,
            values: BTreeMap::new(),
            nodes: BTreeMap::new(),
            holdings: Vec::new(),
            reductions: Vec::new(),
            reports: self.reports.iter().map(|(name, _)| name.clone()).collect(),
            instructions,
            coded: BTreeSet::new(),
            masks: BTreeMap::new(),
            codecs: BTreeMap::new(),
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
                Instruction::Receive { slot, from: other } | Instruction::Send { slot, to: other } => {
                    let v = slot.value();
                    touched.insert(v);
                    let varies = self.graph.producer(v).is_some_and(|n| self.varies[n.index()]);
                    if self.trains && codable(slot, other, self.graph.ty(v), varies) {
                        program.coded.insert(v);
                    }
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
                ValueKind::Constant if uses.reads(v, peer) => false,
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
        if !program.coded.is_empty() {
            let ours = self.plan.codecs.iter().filter(|l| l.from == peer);
            program.codecs = ours.map(|l| (l.to, l.codec)).collect();
        }
        program.values = touched.into_iter().map(|v| (v, self.graph.value(v).clone())).collect();
        program
    }
}

/// See [`Program::masks`].
fn masks(program: &Program, train: &TrainGraph) -> BTreeMap<ValueId, BTreeSet<ValueId>> {
    let mut received = BTreeSet::new();
    let mut sent = BTreeSet::new();
    for i in &program.instructions {
        match *i {
            Instruction::Receive { slot, .. } if program.may_be_coded(slot) => received.insert(slot.value()),
            Instruction::Send { slot, .. } if program.may_be_coded(slot) => sent.insert(slot.value()),
            _ => false,
        };
    }
    let graph = &train.graph;
    // A reshaped tensor was not received, but what it is a view of.
    let came = |mut v: ValueId| {
        while !received.contains(&v) {
            let node = graph.node(graph.producer(v)?);
            v = *node.inputs.first().filter(|_| matches!(node.op, Op::Reshape(_)))?;
        }
        Some(v)
    };
    let of = |g: &ValueId| train.gradient_of.get(g).into_iter().flatten().filter_map(|v| came(*v)).collect();
    sent.iter().map(|g| (*g, of(g))).filter(|(_, of): &(_, BTreeSet<_>)| !of.is_empty()).collect()
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

/// By node, whether it makes an activation or an activation's gradient. Gradients of parameters are none, nor is what depends on parameters alone.
fn varies(graph: &Graph) -> Vec<bool> {
    let mut varies = vec![false; graph.nodes.len()];
    for (n, node) in graph.nodes.iter().enumerate() {
        varies[n] = node.phase != Phase::WeightGrad
            && node.inputs.iter().any(|v| match graph.producer(*v) {
                Some(p) => varies[p.index()],
                None => graph.value(*v).kind == ValueKind::Input,
            });
    }
    varies
}

/// The least common multiple of the stages' numbers of turns, or the number of micro-batches where that is less.
fn period(plan: &Plan) -> u32 {
    let gcd = |mut a: u64, mut b: u64| {
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    let mut period = 1u64;
    for stage in &plan.stages {
        let turns = stage.peers.len() as u64;
        period = period / gcd(period, turns) * turns;
        if period >= u64::from(plan.micro_batches) {
            return plan.micro_batches;
        }
    }
    period as u32
}

/// The peers that keep each parameter and buffer, the owner first. Nodes that are not live count too: the evaluation form may run them.
///
/// Of the replicas that could own a parameter, the one that owns least so far does: so they share the updates, the optimiser's state, and the
/// traffic of gradients and new values.
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
    for u in &graph.state_updates {
        if let (Some(readers), Some(maker)) = (stages.get_mut(&u.buffer), graph.producer(u.value)) {
            readers.insert(stage_of[maker.index()]);
        }
    }
    let mut owned: BTreeMap<PeerId, u64> = BTreeMap::new();
    stages
        .into_iter()
        .map(|(v, mut stages)| {
            // The reader of the earliest stage owns it: its next value is needed there first. What nobody reads stays with the first stage.
            if stages.is_empty() {
                stages.insert(0);
            }
            let mut peers: Vec<PeerId> = Vec::new();
            for stage in stages {
                let mut replicas = plan.stages[stage as usize].replicas();
                if peers.is_empty()
                    && let Some(least) = (0..replicas.len()).min_by_key(|i| owned.get(&replicas[*i]).copied())
                {
                    replicas[..=least].rotate_right(1);
                    *owned.entry(replicas[0]).or_default() += graph.ty(v).bytes() as u64;
                }
                for peer in replicas {
                    if !peers.contains(&peer) {
                        peers.push(peer);
                    }
                }
            }
            (v, peers)
        })
        .collect()
}

/// Who waits for each value.
pub(crate) struct Uses {
    /// By micro-batch, until turns repeat, and value: the peers it is sent to, or, for a constant, that keep it. Its maker is not among them.
    readers: Vec<BTreeMap<ValueId, BTreeSet<PeerId>>>,
    /// The gradients (reduction and part) it belongs to: for each, a part for every turn of its stage.
    parts: BTreeMap<ValueId, Vec<(u32, u32)>>,
    /// The reports it is.
    pub(crate) reports: BTreeMap<ValueId, Vec<u32>>,
}

impl Uses {
    /// Whom a micro-batch's value is sent to.
    pub(crate) fn readers(&self, value: ValueId, micro_batch: u32) -> impl Iterator<Item = PeerId> {
        let turn = &self.readers[micro_batch as usize % self.readers.len()];
        turn.get(&value).into_iter().flatten().copied()
    }

    /// The gradients (reduction and part) that a micro-batch's value is added to, where its stage has so many turns.
    pub(crate) fn parts(&self, value: ValueId, micro_batch: u32, turns: usize) -> impl Iterator<Item = (u32, u32)> {
        let parts = self.parts.get(&value).map_or(&[][..], Vec::as_slice);
        parts.chunks(turns).map(move |of_use| of_use[micro_batch as usize % turns])
    }

    /// Whether a peer waits for a value of any micro-batch.
    fn reads(&self, value: ValueId, peer: PeerId) -> bool {
        self.readers.iter().any(|turn| turn.get(&value).is_some_and(|peers| peers.contains(&peer)))
    }
}
