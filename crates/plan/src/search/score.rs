//! The cost of a plan in closed form. Planners compare plans by it.
//!
//! A plan has `n` micro-batches over stages that compute for `C` and wait `R` for their neighbours' messages. A step
//! takes `Σ (C + R) + (n - 1) · max(period)`, and then what follows the last backward pass. This is the pipeline
//! formula of Huang et al. (2019), with links as stations of their own.
//!
//! A period is the time that one more micro-batch takes at a station. A station is a machine, a link, a shared
//! line, or a [`RoundTrip`]. Machines that take turns at a stage divide its micro-batches. Under zero-bubble
//! schedules a round trip leaves out weight gradients, which wait for gaps.

use super::problem::Problem;
use super::round_trip::RoundTrip;
use crate::schedule::Schedule;

/// Atoms `lo..hi` on one unit: a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StageRange {
    /// Index in [`Machines::units`](super::Machines::units).
    pub unit: u32,
    /// The first atom.
    pub lo: u32,
    /// One past the last atom.
    pub hi: u32,
}

/// The station that limits how fast micro-batches follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bottleneck {
    /// The machine of this unit.
    Unit(u32),
    /// A processor that several devices compute on.
    Processor(u32),
    /// The link between these units. The number of units stands for the broker.
    Link(u32, u32),
    /// A shared line, such as a network card or an uplink.
    Line(u32),
    /// The round trip from this stage to the last and back.
    RoundTrip(u32),
}

/// The cost of a plan.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Score {
    /// Seconds of a step; infinite if two stages have no link.
    pub step: f64,
    /// Bytes by which the plan exceeds the machines' memory, summed over machines.
    pub excess: f64,
    /// The bottleneck of the step.
    pub bottleneck: Bottleneck,
}

impl Score {
    /// Whether the plan can be carried out.
    pub fn feasible(&self) -> bool {
        self.excess == 0.0 && self.step.is_finite()
    }

    /// Planners prefer the smaller key: first a plan that fits, then a faster one.
    pub(super) fn key(&self) -> (f64, f64) {
        (self.excess, self.step)
    }

    pub(crate) fn better(&self, other: &Self) -> bool {
        self.key() < other.key()
    }
}

/// A plan and its cost.
#[derive(Debug, Clone, PartialEq)]
pub struct ScoredPlan {
    /// The stages, in the order of the atoms.
    pub stages: Vec<StageRange>,
    /// The schedule.
    pub schedule: Schedule,
    /// The cost.
    pub score: Score,
}

impl Problem {
    /// The cost of a plan. Its stages cover all atoms in order. A unit may appear twice.
    pub fn evaluate(&self, stages: &[StageRange], schedule: Schedule) -> Score {
        let mut e = Evaluation::new(self, stages, schedule);
        let pipeline = e.count_stages();
        let reachable = e.count_links();
        let step = pipeline + e.limits.forward + e.limits.rest + self.reductions(stages);
        let step = if reachable && step.is_finite() { step } else { f64::INFINITY };
        Score { step, excess: e.excess, bottleneck: e.limits.who }
    }

    /// A plan with its cost.
    pub(crate) fn scored(&self, stages: Vec<StageRange>, schedule: Schedule) -> ScoredPlan {
        let score = self.evaluate(&stages, schedule);
        ScoredPlan { stages, schedule, score }
    }

    /// Seconds to reduce the gradients of parameters with several holders, and to return the new values.
    fn reductions(&self, stages: &[StageRange]) -> f64 {
        let machines = &self.machines;
        let mut seconds = 0.0;
        for tie in &self.chain.ties {
            let mut holders: Vec<(usize, u32)> = Vec::new();
            for user in &tie.users {
                let unit = stages[stages.partition_point(|g| g.hi <= user.atom)].unit as usize;
                match holders.iter_mut().find(|h| h.0 == unit) {
                    Some(holder) => holder.1 += user.parts,
                    None => holders.push((unit, user.parts)),
                }
            }
            let owner = holders[0].0;
            let exchanges =
                holders[1..].iter().map(|&(unit, parts)| tie.exchange_seconds(machines, unit, owner, parts));
            seconds += exchanges.fold(0.0, f64::max);
        }
        let replicas = stages.iter().map(|g| {
            let unit = &machines.units[g.unit as usize];
            let bytes = self.chain.parameters[g.hi as usize] - self.chain.parameters[g.lo as usize];
            if unit.copies() > 1 { unit.exchange.seconds(bytes) } else { 0.0 }
        });
        seconds + replicas.fold(0.0, f64::max)
    }
}

/// Bytes of one micro-batch from one stage to another.
#[derive(Clone, Copy)]
struct StageFlow {
    from: usize,
    to: usize,
    bytes: f64,
}

/// Seconds per micro-batch at a station, and once per step after the last micro-batch.
#[derive(Clone, Copy, Default)]
pub(super) struct StationLoad {
    pub(super) forward: f64,
    pub(super) backward: f64,
    pub(super) after: f64,
}

/// The link between two units, in one direction.
struct LinkLoad {
    from: usize,
    to: usize,
    load: StationLoad,
}

/// The stations with the most load.
pub(super) struct Limits {
    /// Whether forward and backward do not overlap, as with GPipe.
    phased: bool,
    /// Micro-batches less one.
    more: f64,
    /// The longest forward phase, if the schedule is phased.
    pub(super) forward: f64,
    /// The longest of the rest, with what follows it.
    pub(super) rest: f64,
    who: Bottleneck,
}

impl Limits {
    /// No load. `who` is named until some station has load.
    pub(super) fn new(problem: &Problem, schedule: Schedule, who: Bottleneck) -> Self {
        let more = f64::from(problem.micro_batches) - 1.0;
        Self { phased: schedule == Schedule::GPipe, more, forward: 0.0, rest: 0.0, who }
    }

    pub(super) fn station(&mut self, who: Bottleneck, load: StationLoad) {
        let rest = if self.phased {
            self.forward = self.forward.max(self.more * load.forward);
            self.more * load.backward + load.after
        } else {
            self.more * (load.forward + load.backward) + load.after
        };
        if rest > self.rest {
            (self.rest, self.who) = (rest, who);
        }
    }
}

struct Evaluation<'a> {
    problem: &'a Problem,
    stages: &'a [StageRange],
    schedule: Schedule,
    /// Whether a unit holds several stages.
    repeats: bool,
    flows: Vec<StageFlow>,
    /// The load of each shared processor.
    processors: Vec<StationLoad>,
    limits: Limits,
    excess: f64,
}

impl<'a> Evaluation<'a> {
    fn new(problem: &'a Problem, stages: &'a [StageRange], schedule: Schedule) -> Self {
        Self {
            problem,
            stages,
            schedule,
            repeats: (0..stages.len()).any(|s| stages[..s].iter().any(|g| g.unit == stages[s].unit)),
            flows: flows(problem, stages),
            processors: vec![StationLoad::default(); problem.machines.processor_count],
            limits: Limits::new(problem, schedule, Bottleneck::Unit(stages[0].unit)),
            excess: 0.0,
        }
    }

    fn unit(&self, stage: usize) -> usize {
        self.stages[stage].unit as usize
    }

    fn ends(&self, stage: usize) -> (usize, usize) {
        (self.stages[stage].lo as usize, self.stages[stage].hi as usize)
    }

    /// By stage: seconds that it waits for its activations to arrive, and for its gradients.
    fn waits(&self) -> Vec<[f64; 2]> {
        let mut waits = vec![[0.0_f64; 2]; self.stages.len()];
        for &StageFlow { from, to, bytes } in &self.flows {
            let seconds = self.problem.machines.link(self.unit(from), self.unit(to)).seconds(bytes);
            let (stage, direction) = if from < to { (from, 0) } else { (to, 1) };
            waits[stage][direction] = waits[stage][direction].max(seconds);
        }
        waits
    }

    /// Counts the load and memory of machines, and round trips; returns the pipeline's seconds for one micro-batch.
    fn count_stages(&mut self) -> f64 {
        let (problem, count) = (self.problem, self.stages.len());
        let trip = problem.round_trip(self.schedule);
        let waits = self.waits();
        let mut pipeline = 0.0;
        let mut ahead = vec![0; count + 1];
        for s in (0..count).rev() {
            let (lo, hi) = self.ends(s);
            let unit = self.unit(s);
            let [forward, backward] = problem.compute(unit, lo, hi);
            let delayed = problem.delayed(self.schedule, unit, lo, hi);
            pipeline += forward + backward - delayed + waits[s][0] + waits[s][1];
            ahead[s] = ahead[s + 1] + problem.machines.units[unit].copies();
            let period = trip.period(pipeline + delayed, ahead[s]);
            self.limits
                .station(Bottleneck::RoundTrip(s as u32), StationLoad { forward: period, ..StationLoad::default() });
            // The stages of a unit count together, at the first of them.
            let earlier = &self.stages[..s];
            if !(self.repeats && earlier.iter().any(|g| g.unit == self.stages[s].unit)) {
                self.machine(s, trip, &ahead);
            }
        }
        for (processor, load) in (0..).zip(std::mem::take(&mut self.processors)) {
            self.limits.station(Bottleneck::Processor(processor), load);
        }
        let (lo, hi) = self.ends(0);
        pipeline + problem.delayed(self.schedule, self.unit(0), lo, hi)
    }

    /// Counts the load and memory of the unit whose first stage is `s`.
    fn machine(&mut self, s: usize, trip: RoundTrip, ahead: &[usize]) {
        let (problem, count, unit) = (self.problem, self.stages.len(), self.unit(s));
        let (mut load, mut memory) = (StationLoad::default(), 0.0);
        for t in (s..count).filter(|&t| t == s || (self.repeats && self.unit(t) == unit)) {
            let (lo, hi) = self.ends(t);
            let [forward, backward] = problem.compute(unit, lo, hi);
            load.forward += forward;
            load.backward += backward;
            load.after += problem.step_end(unit, lo, hi);
            memory += problem.memory(unit, lo, hi, trip.in_flight(ahead[t]));
        }
        for share in &problem.machines.units[unit].processors {
            let total = &mut self.processors[share.processor as usize];
            total.forward += share.of_micro_batch * load.forward;
            total.backward += share.of_micro_batch * load.backward;
            total.after += share.of_step * load.after;
        }
        let copies = problem.machines.units[unit].copies();
        let turns = problem.turns(copies);
        let copies = copies as f64;
        load.forward *= turns;
        load.backward *= turns;
        self.limits.station(Bottleneck::Unit(unit as u32), load);
        self.excess += (memory - problem.machines.units[unit].memory).max(0.0) * copies;
        // Replicas that hand buffers on run forward one after the other.
        let (lo, hi) = self.ends(s);
        let handed_on = problem.chain.handed_on[hi] - problem.chain.handed_on[lo];
        if copies > 1.0 && handed_on > 0.0 {
            let [forward, _] = problem.compute(unit, lo, hi);
            let forward = forward + problem.machines.units[unit].inside.seconds(handed_on);
            self.limits.station(Bottleneck::Unit(unit as u32), StationLoad { forward, ..StationLoad::default() });
        }
    }

    /// Counts the load of links and shared lines, each direction for itself; returns whether every message has a link.
    fn count_links(&mut self) -> bool {
        let (problem, machines) = (self.problem, &self.problem.machines);
        let mut links: Vec<LinkLoad> = Vec::with_capacity(self.flows.len());
        let mut lines = vec![StationLoad::default(); machines.line_count];
        let mut reachable = true;
        let repeats = self.repeats;
        let mut carry = |from: usize, to: usize, forward: f64, backward: f64| {
            let load = StationLoad {
                forward: problem.busy(from, to, forward),
                backward: problem.busy(from, to, backward),
                ..StationLoad::default()
            };
            reachable &= (load.forward + load.backward).is_finite();
            match links.iter_mut().find(|l| repeats && (l.from, l.to) == (from, to)) {
                Some(link) => {
                    link.load.forward += load.forward;
                    link.load.backward += load.backward;
                }
                None => links.push(LinkLoad { from, to, load }),
            }
            for share in machines.lines(from, to) {
                lines[share.line as usize].forward += forward * share.per_byte;
                lines[share.line as usize].backward += backward * share.per_byte;
            }
        };
        for &StageFlow { from, to, bytes } in &self.flows {
            let (forward, backward) = if from < to { (bytes, 0.0) } else { (0.0, bytes) };
            carry(self.unit(from), self.unit(to), forward, backward);
        }
        for stage in self.stages {
            let inputs = problem.chain.inputs.iter();
            let read: f64 = inputs.filter(|i| i.is_read_by(stage.lo..stage.hi)).map(|i| i.bytes).sum();
            if read > 0.0 {
                carry(machines.broker(), stage.unit as usize, read, 0.0);
            }
        }
        for LinkLoad { from, to, load } in links {
            self.limits.station(Bottleneck::Link(from as u32, to as u32), load);
        }
        for (line, load) in (0..).zip(lines) {
            self.limits.station(Bottleneck::Line(line), load);
        }
        reachable
    }
}

/// The messages of one micro-batch between stages on different units.
fn flows(problem: &Problem, stages: &[StageRange]) -> Vec<StageFlow> {
    let stage_of = |atom: u32| stages.partition_point(|g| g.hi <= atom);
    let mut flows: Vec<StageFlow> = Vec::with_capacity(2 * stages.len());
    for cut in 1..stages.len() {
        let at = stages[cut].lo;
        let first_flow = flows.len();
        for &m in &problem.crossing[at as usize] {
            let message = &problem.chain.messages[m as usize];
            let from = if message.maker < at { cut - 1 } else { cut };
            // Each message is counted only at the cut beside its maker.
            if message.maker < stages[from].lo || message.maker >= stages[from].hi {
                continue;
            }
            let mut last = usize::MAX;
            for &user in &message.users {
                let to = stage_of(user);
                if to == last || to == from || stages[to].unit == stages[from].unit {
                    continue;
                }
                last = to;
                match flows[first_flow..].iter_mut().find(|f| (f.from, f.to) == (from, to)) {
                    Some(flow) => flow.bytes += message.bytes,
                    None => flows.push(StageFlow { from, to, bytes: message.bytes }),
                }
            }
        }
    }
    flows
}
