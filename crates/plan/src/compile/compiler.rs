//! The places of a graph's nodes and tensors, and the times when they are needed.

use std::collections::{BTreeMap, BTreeSet};

use foldhash::{HashSet, HashSetExt};
use fusionllm_graph::{Graph, NodeId, Phase, StateUpdate, TrainGraph, ValueId};
use fusionllm_program::{GradientPart, PassKind, PeerId, Reduction};

use super::node_stages::NodeStages;
use super::tasks::{StageTasks, Task, order};
use super::uses::{UseParts, Uses};
use crate::codecs::coded_values;
use crate::error::PlanError;
use crate::graph_facts::cheap;
use crate::plan::{Plan, Stage};
use crate::schedule::TaskKind;

/// Most runs of operators (nodes times micro-batches) in one step.
const MAX_RUNS: u64 = 1 << 26;

/// The work of one stage in one kind of task, the same for each micro-batch.
#[derive(Default)]
pub(super) struct Pass {
    /// The nodes to run, in graph order.
    pub(super) nodes: Vec<NodeId>,
    /// The buffers that change, by the last node that reads the old content.
    pub(super) updates: BTreeMap<NodeId, Vec<StateUpdate>>,
}

pub(super) struct Compiler<'a> {
    pub(super) plan: &'a Plan,
    pub(super) graph: &'a Graph,
    /// By node: whether a report, a gradient or a buffer depends on it.
    live: Vec<bool>,
    /// The stage of each node.
    stage_of: Vec<u32>,
    /// See [`cheap`].
    pub(super) cheap: Vec<bool>,
    /// By node: whether it is a weight gradient that no other task waits for. Always false if the schedule has no
    /// weight tasks.
    delayed: Vec<bool>,
    /// The peers that keep each parameter and buffer, the owner first.
    pub(super) holders: BTreeMap<ValueId, Vec<PeerId>>,
    /// The buffers that change, and the stage that changes them.
    pub(super) changing: BTreeMap<ValueId, u32>,
    /// The number of micro-batches after which the turns of all stages repeat.
    period: u32,
    pub(super) kind: PassKind,
    pub(super) reductions: BTreeMap<ValueId, Reduction>,
    /// See [`Uses::parts`].
    parts: BTreeMap<ValueId, Vec<UseParts>>,
    pub(super) reports: Vec<(String, ValueId)>,
    /// The values that a codec may apply to. There are none in an evaluation.
    pub(super) coded: BTreeSet<ValueId>,
}

impl<'a> Compiler<'a> {
    pub(super) fn new(
        plan: &'a Plan,
        graph: &'a Graph,
        live: Vec<bool>,
        NodeStages { stage_of }: NodeStages,
        reports: Vec<(String, ValueId)>,
    ) -> Result<Self, PlanError> {
        let runs = live.iter().filter(|l| **l).count() as u64 * u64::from(plan.micro_batches);
        if runs > MAX_RUNS {
            return Err(PlanError::Plan(format!(
                "{} micro-batches of this graph run {runs} operators per step, but at most {MAX_RUNS} are possible",
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
            kind: PassKind::Eval,
            reductions: BTreeMap::new(),
            parts: BTreeMap::new(),
            reports,
            coded: BTreeSet::new(),
            live,
            stage_of,
        };
        c.check_state()?;
        Ok(c)
    }

    /// Checks that only forward nodes of one stage read a buffer that forward changes. Nodes elsewhere, or later,
    /// could find any micro-batch's content.
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
                        "{:?} needs the old content of buffer {name:?} for its gradient, but forward changes it",
                        self.graph.node(id).name
                    )));
                }
                if self.stage_of[id.index()] != stage {
                    return Err(PlanError::Plan(format!(
                        "forward changes buffer {name:?}, so all nodes that read or write it must be in one stage"
                    )));
                }
            }
        }
        Ok(())
    }

    /// The turn of a micro-batch. The same peers run the stages of all that have the same turn.
    pub(super) fn turn(&self, micro_batch: u32) -> u32 {
        micro_batch % self.period
    }

    /// Whether nothing depends on the number of a micro-batch but the peers that run it: no buffer goes from one to the
    /// next, and another one comes after it for each peer. The last ones complete sums, which are then sent.
    pub(super) fn repeats(&self, micro_batch: u32) -> bool {
        let turns = self.plan.stages.iter().map(|s| s.peers.len()).max().unwrap_or(1);
        self.changing.is_empty() && micro_batch as usize + turns < self.plan.micro_batches as usize
    }

    /// The stage of a node.
    pub(super) fn stage(&self, node: NodeId) -> &'a Stage {
        &self.plan.stages[self.stage_of[node.index()] as usize]
    }

    /// Makes it a training step. Decides where the parts of each gradient are summed and added. There is one part for
    /// each use and each turn, whichever peer takes the turn. The parts of a turn are added first, because one peer
    /// often has all of them. If the uses have different numbers of turns, the parts are added use by use.
    pub(super) fn reduce(&mut self, train: &TrainGraph) -> Result<(), PlanError> {
        self.kind = PassKind::Train;
        self.coded = coded_values(train);
        if self.plan.schedule.kinds().contains(&TaskKind::Weight) {
            self.delay();
        }
        for g in &train.gradients {
            let mut uses = Vec::with_capacity(g.contributions.len());
            for &value in &g.contributions {
                let Some(maker) = self.graph.producer(value) else {
                    return Err(PlanError::Plan(format!(
                        "parameter {:?} is itself a term of the loss, so no operator computes its gradient; multiply it by one",
                        self.graph.value(g.parameter).name
                    )));
                };
                uses.push((value, self.stage(maker).peers.as_slice()));
            }
            let turns = |(u, (_, peers)): (usize, &(ValueId, &[u32]))| (0..peers.len()).map(move |turn| (u, turn));
            let mut order: Vec<(usize, usize)> = uses.iter().enumerate().flat_map(turns).collect();
            let by_turn = uses.windows(2).all(|w| w[0].1.len() == w[1].1.len());
            if by_turn {
                order.sort_by_key(|(u, turn)| (*turn, *u));
            }
            let bracket = if by_turn { uses.len() as u32 } else { 1 };
            let mut of_uses = vec![Vec::new(); uses.len()];
            (0..).zip(&order).for_each(|(part, (u, _))| of_uses[*u].push(part));
            for (by_turn, (value, _)) in of_uses.into_iter().zip(&uses) {
                self.parts.entry(*value).or_default().push(UseParts { parameter: g.parameter, by_turn });
            }
            let part = |(u, turn): (usize, usize)| {
                let (value, peers) = uses[u];
                let micro_batches = (self.plan.micro_batches - turn as u32).div_ceil(peers.len() as u32);
                GradientPart { peer: PeerId(peers[turn]), value, micro_batches }
            };
            let parts = order.into_iter().map(part).collect();
            let owner = self.holders[&g.parameter][0];
            self.reductions.insert(g.parameter, Reduction { owner, parts, bracket });
        }
        Ok(())
    }

    /// Finds the gradients that can wait for a weight task: only such gradients of the same stage read them.
    fn delay(&mut self) {
        let readers = self.graph.consumers();
        for id in self.graph.node_ids().rev().filter(|n| self.live[n.index()]) {
            let node = self.graph.node(id);
            let mut users = node.outputs.iter().flat_map(|v| &readers[v.index()]).filter(|u| self.live[u.index()]);
            self.delayed[id.index()] = node.phase == Phase::WeightGrad
                && users.all(|u| self.delayed[u.index()] && self.stage_of[u.index()] == self.stage_of[id.index()]);
        }
    }

    /// Live nodes and buffer updates, by kind of task and stage.
    pub(super) fn passes(&self) -> BTreeMap<(TaskKind, u32), Pass> {
        let mut passes: BTreeMap<(TaskKind, u32), Pass> = BTreeMap::new();
        for id in self.graph.node_ids().filter(|n| self.live[n.index()]) {
            passes.entry((self.task_kind(id), self.stage_of[id.index()])).or_default().nodes.push(id);
        }
        let readers = self.graph.consumers();
        for u in &self.graph.state_updates {
            if let Some(maker) = self.graph.producer(u.value).filter(|m| self.live[m.index()]) {
                let pass = passes.entry((self.task_kind(maker), self.stage_of[maker.index()])).or_default();
                let readers = readers[u.buffer.index()].iter().copied().filter(|r| self.live[r.index()]);
                let last = readers.fold(maker, NodeId::max);
                pass.updates.entry(last).or_default().push(*u);
            }
        }
        passes
    }

    fn task_kind(&self, id: NodeId) -> TaskKind {
        match self.graph.node(id).phase {
            Phase::Forward => TaskKind::Forward,
            _ if self.delayed[id.index()] => TaskKind::Weight,
            _ => TaskKind::Backward,
        }
    }

    pub(super) fn order(&self, passes: &BTreeMap<(TaskKind, u32), Pass>) -> Vec<Vec<Task>> {
        let stage = |s: &Stage| StageTasks { peers: s.peers.clone(), ..StageTasks::default() };
        let mut stages: Vec<StageTasks> = self.plan.stages.iter().map(stage).collect();
        for ((kind, stage), pass) in passes {
            let operands = pass.nodes.iter().flat_map(|n| &self.graph.node(*n).inputs);
            let makers = operands.filter_map(|v| self.graph.producer(*v));
            let waits: BTreeSet<_> = makers.map(|p| (self.task_kind(p), self.stage_of[p.index()])).collect();
            let tasks = &mut stages[*stage as usize];
            tasks.waits[*kind as usize] = waits.into_iter().filter(|(_, s)| s != stage).collect();
            tasks.chained |= !pass.updates.is_empty();
        }
        let Plan { schedule, micro_batches, ref peers, .. } = *self.plan;
        let kinds = if self.kind.trains() { schedule.kinds() } else { &[TaskKind::Forward] };
        order(schedule, kinds, &stages, peers.len(), micro_batches)
    }

    pub(super) fn uses(&self) -> Uses {
        let readers = (0..self.period).map(|m| self.readers(m)).collect();
        let mut uses = Uses { readers, parts: self.parts.clone(), reports: BTreeMap::new() };
        for (r, (_, v)) in (0..).zip(&self.reports) {
            uses.reports.entry(*v).or_default().push(r);
        }
        uses
    }

    /// The peers that need each value of a micro-batch.
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
}

/// The least common multiple of the stages' numbers of turns, but at most the number of micro-batches.
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

/// The peers that keep each parameter and buffer, the owner first. Nodes that are not live count too, because an
/// evaluation may run them.
///
/// If several replicas could own a parameter, the one that owns the fewest bytes so far owns it. This spreads
/// updates, optimizer state and traffic.
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
            // The earliest stage owns a parameter, because it needs the new value first. The first stage owns a
            // parameter that no node reads.
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
