//! What a plan costs, in closed form: the figure that planners compare.
//!
//! For `n` micro-batches over stages that compute `C` and wait `R` for what their neighbours send, a step takes
//! `Σ (C + R) + (n - 1) · max(period)` (the pipeline formula of Huang et al., 2019, with links as stations of their own), then what follows
//! the last backward pass. Of machines that take turns at a stage, each adds its own share of the micro-batches less one. A period is what one more micro-batch costs at the
//! station that limits: a machine's passes, a line's or a shared uplink's
//! transfers, or, where a schedule lets only so many micro-batches go ahead of a stage (1F1B as many as there are machines from there on), the round trip to the end and back divided by that
//! number. Under zero-bubble schedules a round trip leaves out gradients of weights, which wait for gaps.

use super::problem::Problem;
use crate::Schedule;

/// Atoms `lo..hi` on one unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Index in [`Machines::units`](super::Machines::units).
    pub unit: u32,
    /// The first atom.
    pub lo: u32,
    /// The one after the last.
    pub hi: u32,
}

/// What limits how fast micro-batches follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bottleneck {
    /// The machine of this unit.
    Unit(u32),
    /// The line between these units; the number of units stands for the broker.
    Line(u32, u32),
    /// A shared uplink.
    Uplink(u32),
    /// The round trip from this stage to the last and back, for the micro-batches that the schedule lets go ahead.
    RoundTrip(u32),
}

/// What a step costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Score {
    /// Seconds of a step; infinite where there is no way.
    pub step: f64,
    /// Bytes beyond what the machines have, added up.
    pub excess: f64,
    /// What limits.
    pub bottleneck: Bottleneck,
}

impl Score {
    /// Whether it can be carried out.
    pub fn feasible(&self) -> bool {
        self.excess == 0.0 && self.step.is_finite()
    }

    /// The order in which planners prefer: what fits, then what is faster.
    pub(crate) fn key(&self) -> (f64, f64) {
        (self.excess, self.step)
    }

    pub(crate) fn better(&self, other: &Self) -> bool {
        self.key() < other.key()
    }
}

/// Micro-batches between forward and backward at a stage with `ahead` machines from it to the last, its own included.
pub(crate) fn under_way(schedule: Schedule, micro_batches: u32, ahead: usize) -> usize {
    schedule.room(ahead).min(micro_batches as usize)
}

/// Seconds per micro-batch at a station, forward and backward, and what it adds after the last.
#[derive(Clone, Copy, Default)]
struct Load {
    forward: f64,
    backward: f64,
    after: f64,
}

/// Keeps the stations that limit.
struct Limits {
    gpipe: bool,
    more: f64,
    /// The longest forward phase: used by GPipe alone, whose phases do not overlap.
    forward: f64,
    /// The longest of the rest, with what follows it.
    rest: f64,
    who: Bottleneck,
}

impl Limits {
    fn station(&mut self, who: Bottleneck, load: Load) {
        let rest = if self.gpipe {
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

impl Problem {
    /// The cost of a plan: segments in the order of the atoms, which they cover. A unit may appear twice.
    pub fn evaluate(&self, segments: &[Segment], schedule: Schedule) -> Score {
        let machines = &self.machines;
        let stages = segments.len();
        let unit = |s: usize| segments[s].unit as usize;
        let ends = |s: usize| (segments[s].lo as usize, segments[s].hi as usize);
        let stage_of = |atom: u32| segments.partition_point(|g| g.hi <= atom);
        let repeats = (0..stages).any(|s| segments[..s].iter().any(|g| g.unit == segments[s].unit));

        // Bytes of one micro-batch from stage to stage: activations by sender, gradients by sender.
        let mut flows: Vec<(usize, usize, f64)> = Vec::with_capacity(2 * stages);
        for cut in 1..stages {
            let at = segments[cut].lo;
            let first_flow = flows.len();
            for &m in &self.crossing[at as usize] {
                let message = &self.chain.messages[m as usize];
                let sender = if message.maker < at { cut - 1 } else { cut };
                // Each message is counted at the cut beside its maker alone.
                if message.maker < segments[sender].lo || message.maker >= segments[sender].hi {
                    continue;
                }
                let mut last = usize::MAX;
                for &user in &message.users {
                    let receiver = stage_of(user);
                    if receiver == last || receiver == sender || unit(receiver) == unit(sender) {
                        continue;
                    }
                    last = receiver;
                    match flows[first_flow..].iter_mut().find(|f| (f.0, f.1) == (sender, receiver)) {
                        Some(flow) => flow.2 += message.bytes,
                        None => flows.push((sender, receiver, message.bytes)),
                    }
                }
            }
        }

        // What each stage waits for after its own passes: its activations' arrival, and its gradients'.
        let mut wait = vec![[0.0_f64; 2]; stages];
        for &(from, to, bytes) in &flows {
            let seconds = machines.route(unit(from), unit(to)).seconds(bytes);
            let (stage, way) = if from < to { (from, 0) } else { (to, 1) };
            wait[stage][way] = wait[stage][way].max(seconds);
        }

        let more = f64::from(self.micro_batches) - 1.0;
        let gpipe = schedule == Schedule::GPipe;
        let mut limits = Limits { gpipe, more, forward: 0.0, rest: 0.0, who: Bottleneck::Unit(segments[0].unit) };
        let mut excess = 0.0;
        let mut pipe = 0.0;
        let copies = |s: usize| machines.units[unit(s)].copies();
        let mut ahead = vec![0; stages + 1];
        for s in (0..stages).rev() {
            let (lo, hi) = ends(s);
            let [forward, backward] = self.compute(unit(s), lo, hi);
            let delayed = self.delayed(schedule, unit(s), lo, hi);
            pipe += forward + backward - delayed + wait[s][0] + wait[s][1];
            ahead[s] = ahead[s + 1] + copies(s);
            let fly = under_way(schedule, self.micro_batches, ahead[s]);
            if fly < self.micro_batches as usize {
                let load = Load { forward: (pipe + delayed) / fly as f64, ..Load::default() };
                limits.station(Bottleneck::RoundTrip(s as u32), load);
            }
            // A unit's stages count together, at the first of them.
            if repeats && segments[..s].iter().any(|g| g.unit == segments[s].unit) {
                continue;
            }
            let (mut load, mut memory) = (Load::default(), 0.0);
            for t in (s..stages).filter(|&t| t == s || (repeats && segments[t].unit == segments[s].unit)) {
                let (lo, hi) = ends(t);
                let [forward, backward] = self.compute(unit(s), lo, hi);
                load.forward += forward;
                load.backward += backward;
                load.after += self.finish(unit(s), lo, hi);
                memory += self.memory(unit(s), lo, hi, under_way(schedule, self.micro_batches, ahead[t]));
            }
            let turns = self.turns(copies(s));
            let copies = copies(s) as f64;
            load.forward *= turns;
            load.backward *= turns;
            limits.station(Bottleneck::Unit(segments[s].unit), load);
            excess += (memory - machines.units[unit(s)].memory).max(0.0) * copies;
            // Replicas that hand on buffers go forward one after the other.
            let handed_on = self.chain.handed_on[hi] - self.chain.handed_on[lo];
            if copies > 1.0 && handed_on > 0.0 {
                let forward = forward + machines.units[unit(s)].inside.seconds(handed_on);
                limits.station(Bottleneck::Unit(segments[s].unit), Load { forward, ..Load::default() });
            }
        }
        let (lo, hi) = ends(0);
        pipe += self.delayed(schedule, unit(0), lo, hi);

        // Lines and uplinks, each direction for itself.
        let mut lines: Vec<(usize, usize, Load)> = Vec::with_capacity(flows.len());
        let mut uplinks = vec![Load::default(); machines.uplinks];
        let mut reachable = true;
        let mut carry = |from: usize, to: usize, forward: f64, backward: f64| {
            let load = Load {
                forward: self.busy(from, to, forward),
                backward: self.busy(from, to, backward),
                ..Load::default()
            };
            reachable &= (load.forward + load.backward).is_finite();
            match lines.iter_mut().find(|l| repeats && (l.0, l.1) == (from, to)) {
                Some((_, _, sum)) => {
                    sum.forward += load.forward;
                    sum.backward += load.backward;
                }
                None => lines.push((from, to, load)),
            }
            for &(uplink, per_byte) in machines.uplinks(from, to) {
                uplinks[uplink as usize].forward += forward * per_byte;
                uplinks[uplink as usize].backward += backward * per_byte;
            }
        };
        for &(from, to, bytes) in &flows {
            let (forward, backward) = if from < to { (bytes, 0.0) } else { (0.0, bytes) };
            carry(unit(from), unit(to), forward, backward);
        }
        for (s, segment) in segments.iter().enumerate() {
            let read: f64 = self
                .chain
                .inputs
                .iter()
                .filter(|i| i.atoms.iter().any(|a| (segment.lo..segment.hi).contains(a)))
                .map(|i| i.bytes)
                .sum();
            if read > 0.0 {
                carry(machines.broker(), unit(s), read, 0.0);
            }
        }
        for (from, to, load) in lines {
            limits.station(Bottleneck::Line(from as u32, to as u32), load);
        }
        for (u, load) in (0..).zip(uplinks) {
            limits.station(Bottleneck::Uplink(u), load);
        }

        let step = pipe + limits.forward + limits.rest + self.reductions(segments);
        let step = if reachable && step.is_finite() { step } else { f64::INFINITY };
        Score { step, excess, bottleneck: limits.who }
    }

    /// What share of the micro-batches after the first a member of a unit with so many takes after its own first.
    fn turns(&self, copies: usize) -> f64 {
        let rounds = (self.micro_batches as usize).div_ceil(copies);
        (rounds - 1) as f64 / (f64::from(self.micro_batches) - 1.0).max(1.0)
    }

    /// Seconds in which gradients of parameters with several holders come together and new values go back.
    fn reductions(&self, segments: &[Segment]) -> f64 {
        let machines = &self.machines;
        let mut seconds = 0.0;
        for tie in &self.chain.ties {
            let mut holders: Vec<(usize, u32)> = Vec::new();
            for &(atom, parts) in &tie.atoms {
                let unit = segments[segments.partition_point(|g| g.hi <= atom)].unit as usize;
                match holders.iter_mut().find(|h| h.0 == unit) {
                    Some(holder) => holder.1 += parts,
                    None => holders.push((unit, parts)),
                }
            }
            let owner = holders[0].0;
            let there_and_back = holders[1..].iter().map(|&(unit, parts)| {
                machines.route(unit, owner).seconds(tie.bytes * f64::from(parts))
                    + machines.route(owner, unit).seconds(tie.bytes)
            });
            seconds += there_and_back.fold(0.0, f64::max);
        }
        let replicas = segments.iter().map(|g| {
            let unit = &machines.units[g.unit as usize];
            let bytes = self.chain.parameters[g.hi as usize] - self.chain.parameters[g.lo as usize];
            if unit.copies() > 1 { 2.0 * unit.inside.seconds(bytes) } else { 0.0 }
        });
        seconds + replicas.fold(0.0, f64::max)
    }
}
