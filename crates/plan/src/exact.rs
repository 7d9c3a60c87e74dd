//! The best plan there is, for small cases: what OP-Fence is measured against.

use std::collections::BTreeMap;

use crate::Schedule;
use crate::fence::{Found, Problem, Segment, under_way};

/// Most units.
pub const MAX_UNITS: usize = 8;

/// Most positions between atoms where a cut may fall.
pub const MAX_CUTS: usize = 40;

/// The best of all plans: every subset of units, in every order, with every cut, under each of `schedules`; where the model has tied parameters, also those in
/// which one unit holds the first stage and the last. `below` is the cost of a known plan, if there is one: what cannot beat it is not looked at. `None` if
/// nothing beats it, or nothing fits.
///
/// Dynamic programming from the end of the chain over (units used, first unit, position), keeping of each state the costs that no other is at least as good as in
/// every respect.
///
/// # Panics
///
/// Never; but units of several members, and cases beyond [`MAX_UNITS`] and [`MAX_CUTS`], give `None` as well: see [`is_small`].
pub fn exact(problem: &Problem, schedules: &[Schedule], below: Option<f64>) -> Option<Found> {
    if is_small(problem) { narrow(problem, schedules, below, usize::MAX) } else { None }
}

/// As [`exact`], but of the ends that begin at one position and have as many stages no more than `width` are gone on with, those with the lowest bounds: no longer
/// always the best, but soon there. Units have one member each, and there are at most 32.
pub(crate) fn narrow(problem: &Problem, schedules: &[Schedule], below: Option<f64>, width: usize) -> Option<Found> {
    let mut best: Option<Found> = None;
    for &schedule in schedules {
        let below = best.as_ref().map(|b| b.score.step).or(below).unwrap_or(f64::INFINITY);
        best = Search::new(problem, schedule, below).run(width).or(best);
    }
    best
}

/// Whether [`exact`] takes the case.
pub fn is_small(problem: &Problem) -> bool {
    let units = &problem.machines.units;
    units.len() <= MAX_UNITS && problem.chain.atoms <= MAX_CUTS + 1 && units.iter().all(|u| u.copies() == 1)
}

/// What decides how a plan's end may be completed.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct State {
    /// Where the first of its stages begins.
    lo: u32,
    /// The units it uses, as a set.
    used: u32,
    /// The first stage's unit.
    first: u32,
    /// By message that crosses `lo`: the units behind it that make or use it. By tie that is open at `lo`, its holders with their parts.
    open: Vec<u32>,
    /// If the last stage's unit may come again as the first's.
    last: Option<Last>,
}

/// The last stage, of a plan in which its unit comes again.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Last {
    unit: u32,
    lo: u32,
    /// By unit: bytes per micro-batch that the last stage gets and sends, as bits.
    traffic: Vec<(u64, u64)>,
}

/// Costs so far; none of them falls as stages are added.
#[derive(Debug, Clone)]
struct Label {
    /// Of one micro-batch, there and back.
    pipe: f64,
    /// Of reductions.
    after: f64,
    /// Of the stations that limit, for all micro-batches but the first: of the forward phase (GPipe alone), and of the rest.
    forward: f64,
    rest: f64,
    /// By shared uplink, seconds per micro-batch forward and backward.
    uplinks: Vec<[f64; 2]>,
    /// Index in [`Search::stages`].
    stage: usize,
}

impl Label {
    fn covers(&self, other: &Self) -> bool {
        self.pipe <= other.pipe
            && self.pipe + self.after <= other.pipe + other.after
            && self.forward <= other.forward
            && self.rest <= other.rest
            && self.uplinks.iter().zip(&other.uplinks).all(|(a, b)| a[0] <= b[0] && a[1] <= b[1])
    }
}

/// See [`Search::to_come`].
#[derive(Default)]
struct ToCome {
    pipe: f64,
    after: f64,
    forward: f64,
    rest: f64,
    /// What a second of the pipeline adds to the rest, since no more micro-batches go ahead than there are stages.
    round_trip: f64,
}

struct Search<'a> {
    problem: &'a Problem,
    schedule: Schedule,
    more: f64,
    below: f64,
    /// By unit: what its load counts in the weighed sum that bounds the largest load; see [`crate::bound`].
    weights: Vec<f64>,
    /// By atom: of all before it, the fastest that they can be computed, and their least weighed sums forward and backward.
    least: Vec<[f64; 3]>,
    /// By cut, see [`Problem::neighbours`].
    neighbours: Vec<[f64; 2]>,
    /// Every stage of every label, with the one that follows it.
    stages: Vec<(Segment, Option<usize>)>,
}

impl<'a> Search<'a> {
    fn new(problem: &'a Problem, schedule: Schedule, below: f64) -> Self {
        let units = problem.machines.units.len();
        let atoms = problem.chain.atoms;
        let seconds = |u: usize, lo: usize, hi: usize| problem.compute(u, lo, hi).iter().sum::<f64>();
        let weights: Vec<f64> = (0..units).map(|u| 1.0 / seconds(u, 0, atoms).max(1e-300)).collect();
        let mut least = vec![[0.0; 3]];
        for a in 0..atoms {
            let of = |f: &dyn Fn(usize) -> f64| (0..units).map(f).fold(f64::INFINITY, f64::min);
            let [_, forward, backward] = least[a];
            least.push([
                of(&|u| seconds(u, 0, a + 1) - problem.delayed(schedule, u, 0, a + 1)),
                forward + of(&|u| weights[u] * problem.compute(u, a, a + 1)[0]),
                backward + of(&|u| weights[u] * problem.compute(u, a, a + 1)[1]),
            ]);
        }
        let neighbours = (0..=atoms).map(|cut| problem.neighbours(cut)).collect();
        let more = f64::from(problem.micro_batches) - 1.0;
        Self { problem, schedule, more, below, weights, least, neighbours, stages: Vec::new() }
    }

    fn run(mut self, width: usize) -> Option<Found> {
        let atoms = self.problem.chain.atoms as u32;
        let units = self.problem.machines.units.len() as u32;
        let wraps: &[bool] = if self.problem.chain.ties.is_empty() { &[false] } else { &[false, true] };
        let mut best: Option<Found> = None;
        for &wrap in wraps {
            // Plans' ends by their number of stages.
            let empty = State { lo: atoms, used: 0, first: u32::MAX, open: Vec::new(), last: None };
            let start = Label {
                pipe: 0.0,
                after: 0.0,
                forward: 0.0,
                rest: 0.0,
                uplinks: vec![[0.0; 2]; self.problem.machines.uplinks],
                stage: usize::MAX,
            };
            let mut layer = BTreeMap::from([(empty, vec![start])]);
            for count in 1..=units + u32::from(wrap) {
                let mut next: BTreeMap<State, Vec<Label>> = BTreeMap::new();
                for (state, labels) in &layer {
                    for unit in 0..units {
                        let again = state.last.as_ref().is_some_and(|l| l.unit == unit && state.first != unit);
                        if state.used >> unit & 1 == 1 && !again {
                            continue;
                        }
                        for lo in 0..state.lo {
                            let complete = lo == 0;
                            // A unit that comes again takes the first stage, and of such plans no other is looked at here.
                            if again != complete && (again || wrap) {
                                continue;
                            }
                            let Some(stage) = Stage::new(&self, state, unit, lo, count, again) else { continue };
                            let open = if complete { Vec::new() } else { self.open(state, unit, lo) };
                            let last = if wrap { Some(stage.last(state, unit, lo)) } else { None };
                            let state = State { lo, used: state.used | 1 << unit, first: unit, open, last };
                            let to_come = if complete { ToCome::default() } else { self.to_come(&state, count) };
                            for label in labels {
                                let new = self.extend(label, &stage, count, complete);
                                if self.total(&new, &to_come) >= self.below {
                                    continue;
                                }
                                let segment = Segment { unit, lo, hi: stage.hi };
                                let after = (label.stage != usize::MAX).then_some(label.stage);
                                if complete {
                                    best = Some(self.finish(segment, after, best));
                                    continue;
                                }
                                let kept = next.entry(state.clone()).or_default();
                                if !kept.iter().any(|k| k.covers(&new)) {
                                    kept.retain(|k| !new.covers(k));
                                    self.stages.push((segment, after));
                                    kept.push(Label { stage: self.stages.len() - 1, ..new });
                                }
                            }
                        }
                    }
                }
                layer = if width == usize::MAX { next } else { self.best_ends(next, count, width) };
            }
        }
        best
    }

    /// By position, the `width` ends with the lowest bounds.
    fn best_ends(&self, layer: BTreeMap<State, Vec<Label>>, count: u32, width: usize) -> BTreeMap<State, Vec<Label>> {
        let mut ends: BTreeMap<u32, Vec<(f64, State, Label)>> = BTreeMap::new();
        for (state, labels) in layer {
            let to_come = self.to_come(&state, count);
            let here = ends.entry(state.lo).or_default();
            here.extend(labels.into_iter().map(|l| (self.total(&l, &to_come), state.clone(), l)));
        }
        let mut kept: BTreeMap<State, Vec<Label>> = BTreeMap::new();
        for mut ends in ends.into_values() {
            ends.sort_by(|a, b| a.0.total_cmp(&b.0));
            ends.truncate(width);
            for (_, state, label) in ends {
                kept.entry(state).or_default().push(label);
            }
        }
        kept
    }

    /// What completing a plan's end adds at least.
    fn to_come(&self, state: &State, count: u32) -> ToCome {
        let units = self.problem.machines.units.len() as u32;
        let free = |u: &u32| state.used >> u & 1 == 0 || state.last.as_ref().is_some_and(|l| l.unit == *u);
        let weight: f64 = (0..units).filter(free).map(|u| self.weights[u as usize]).sum();
        let [mut pipe, forward, backward] = self.least[state.lo as usize];
        // One of the free units hands over to the first stage, and one of them owns what the ends share.
        let machines = &self.problem.machines;
        let [down, up] = self.neighbours[state.lo as usize];
        let first = state.first as usize;
        let to_first = (0..units)
            .filter(free)
            .map(|u| u as usize)
            .filter(|u| *u != first)
            .map(|u| machines.route(u, first).seconds(down) + machines.route(first, u).seconds(up));
        pipe += to_first.fold(f64::INFINITY, f64::min);
        let ties = self.problem.chain.ties.iter().enumerate().filter(|(_, t)| t.atoms[0].0 < state.lo);
        let after = ties.map(|(t, tie)| {
            let owned_by = |owner: u32| {
                let from = (0..units).filter(|v| *v != owner && self.held(state, t, *v) > 0).map(|v| {
                    machines
                        .route(v as usize, owner as usize)
                        .seconds(tie.bytes * f64::from(self.held(state, t, v) & 0xffff))
                        + machines.route(owner as usize, v as usize).seconds(tie.bytes)
                });
                from.fold(0.0, f64::max)
            };
            (0..units).filter(free).map(owned_by).fold(f64::INFINITY, f64::min)
        });
        let after = after.sum();
        let load = |weighed: f64| if weighed > 0.0 { self.more * weighed / weight } else { 0.0 };
        let stages = count + ((0..units).filter(free).count() as u32).min(state.lo);
        if self.schedule == Schedule::GPipe {
            return ToCome { pipe, after, forward: load(forward), rest: load(backward), round_trip: 0.0 };
        }
        let round_trip = self.round_trip(1.0, stages);
        ToCome { pipe, after, forward: 0.0, rest: load(forward + backward), round_trip }
    }

    /// What a round trip of `pipe` seconds from a stage with so many from it to the last adds for all micro-batches but one.
    fn round_trip(&self, pipe: f64, stages: u32) -> f64 {
        let fly = under_way(self.schedule, self.problem.micro_batches, stages as usize);
        if fly < self.problem.micro_batches as usize { self.more * pipe / fly as f64 } else { 0.0 }
    }

    /// What a plan with this end takes at least.
    fn total(&self, label: &Label, to_come: &ToCome) -> f64 {
        let pipe = label.pipe + to_come.pipe;
        let rest = label.rest.max(to_come.rest).max(pipe * to_come.round_trip);
        pipe + label.after + to_come.after + label.forward.max(to_come.forward) + rest
    }

    /// Keeps a whole plan if it is the best so far.
    fn finish(&mut self, first: Segment, mut after: Option<usize>, best: Option<Found>) -> Found {
        let mut segments = vec![first];
        while let Some((segment, next)) = after.map(|i| self.stages[i]) {
            segments.push(segment);
            after = next;
        }
        let score = self.problem.evaluate(&segments, self.schedule);
        let new = Found { segments, schedule: self.schedule, score };
        if score.feasible() {
            self.below = self.below.min(score.step);
        }
        match best {
            Some(best) if !new.score.better(&best.score) => best,
            _ => new,
        }
    }

    /// A label with one more stage before it.
    fn extend(&self, label: &Label, stage: &Stage, count: u32, complete: bool) -> Label {
        let mut new = label.clone();
        new.pipe += stage.seconds;
        new.after += stage.after;
        let gpipe = self.schedule == Schedule::GPipe;
        for (forward, backward, after) in &stage.stations {
            if gpipe {
                new.forward = new.forward.max(self.more * forward);
                new.rest = new.rest.max(self.more * backward + after);
            } else {
                new.rest = new.rest.max(self.more * (forward + backward) + after);
            }
        }
        new.rest = new.rest.max(self.round_trip(new.pipe + stage.delayed, count));
        if complete {
            new.pipe += stage.delayed;
        }
        for (sum, add) in new.uplinks.iter_mut().zip(&stage.uplinks) {
            (sum[0], sum[1]) = (sum[0] + add[0], sum[1] + add[1]);
            if gpipe {
                new.forward = new.forward.max(self.more * sum[0]);
                new.rest = new.rest.max(self.more * sum[1]);
            } else {
                new.rest = new.rest.max(self.more * (sum[0] + sum[1]));
            }
        }
        new
    }

    /// See [`State::open`], once `unit` holds atoms from `lo` to the state's.
    fn open(&self, state: &State, unit: u32, lo: u32) -> Vec<u32> {
        let chain = &self.problem.chain;
        let behind = |m: u32| {
            let at = self.problem.crossing[state.lo as usize].binary_search(&m).ok();
            at.and_then(|i| state.open.get(i).copied()).unwrap_or(0)
        };
        let mut open = Vec::new();
        for &m in &self.problem.crossing[lo as usize] {
            let message = &chain.messages[m as usize];
            let mine =
                (lo..state.lo).contains(&message.maker) || message.users.iter().any(|u| (lo..state.lo).contains(u));
            // Who makes it is all that counts of a gradient, who uses it of an activation; neither is made behind the cut and used there alike.
            let gradient = message.maker >= lo;
            let made_here = (lo..state.lo).contains(&message.maker);
            let before = if gradient && made_here { 0 } else { behind(m) };
            let counts = if gradient { made_here } else { mine };
            open.push(before | u32::from(counts) << unit);
        }
        for (t, tie) in chain.ties.iter().enumerate() {
            if tie.atoms[0].0 >= lo {
                continue;
            }
            for u in 0..self.problem.machines.units.len() as u32 {
                let mine: u32 = if u == unit { parts(tie, lo, state.lo) } else { 0 };
                open.push(mine + self.held(state, t, u));
            }
        }
        open
    }

    /// How many parts of a tie's gradient a unit makes behind the state's cut; one more than that if it holds the parameter, 0 if it does not.
    fn held(&self, state: &State, tie: usize, unit: u32) -> u32 {
        let ties = &self.problem.chain.ties;
        if state.open.is_empty() || ties[tie].atoms[0].0 >= state.lo {
            return 0;
        }
        let before = ties[..tie].iter().filter(|t| t.atoms[0].0 < state.lo).count();
        let messages = self.problem.crossing[state.lo as usize].len();
        state.open[messages + before * self.problem.machines.units.len() + unit as usize]
    }
}

/// Parts that atoms `lo..hi` make, plus 2^16 for each atom among them that reads the parameter.
fn parts(tie: &crate::fence::Tie, lo: u32, hi: u32) -> u32 {
    tie.atoms.iter().filter(|(a, _)| (lo..hi).contains(a)).map(|(_, parts)| parts + (1 << 16)).sum()
}

/// What one more stage adds, whatever follows it within its state.
struct Stage {
    hi: u32,
    seconds: f64,
    /// See [`Problem::delayed`].
    delayed: f64,
    after: f64,
    /// Forward, backward, and once after the last.
    stations: Vec<(f64, f64, f64)>,
    uplinks: Vec<[f64; 2]>,
    /// Bytes of activations to each unit, and of gradients from each.
    down: Vec<f64>,
    up: Vec<f64>,
}

impl Stage {
    /// `None` if it does not fit, or there is no way.
    fn new(search: &Search<'_>, state: &State, unit: u32, lo: u32, count: u32, again: bool) -> Option<Self> {
        let problem = search.problem;
        let (machines, chain) = (&problem.machines, &problem.chain);
        let (u, hi) = (unit as usize, state.lo);
        let units = machines.units.len();
        let (a, b) = (lo as usize, hi as usize);
        let [mut forward, mut backward] = problem.compute(u, a, b);
        let fly = |ahead| under_way(search.schedule, problem.micro_batches, ahead);
        let mut memory = problem.memory(u, a, b, fly(count as usize));
        let mut finish = problem.finish(u, a, b);
        let delayed = problem.delayed(search.schedule, u, a, b);
        let seconds = forward + backward - delayed;
        let last = state.last.as_ref().filter(|_| again);
        let read = |lo: u32, hi: u32| -> f64 {
            let inputs = chain.inputs.iter().filter(|i| i.atoms.iter().any(|a| (lo..hi).contains(a)));
            inputs.map(|i| i.bytes).sum()
        };
        let mut fed = read(lo, hi);
        if let Some(last) = last {
            let (a, b) = (last.lo as usize, chain.atoms);
            let [f, b_] = problem.compute(u, a, b);
            (forward, backward) = (forward + f, backward + b_);
            memory += problem.memory(u, a, b, fly(1));
            finish += problem.finish(u, a, b);
            fed += read(last.lo, chain.atoms as u32);
        }
        if memory > machines.units[u].memory {
            return None;
        }

        let (mut down, mut up) = (vec![0.0; units], vec![0.0; units]);
        for (&m, &behind) in problem.crossing[b].iter().zip(&state.open) {
            let message = &chain.messages[m as usize];
            let flow = if message.maker < hi {
                if message.maker < lo {
                    continue;
                }
                &mut down
            } else {
                if !message.users.iter().any(|x| (lo..hi).contains(x)) {
                    continue;
                }
                &mut up
            };
            for (v, bytes) in flow.iter_mut().enumerate() {
                if behind >> v & 1 == 1 && v != u {
                    *bytes += message.bytes;
                }
            }
        }
        let mut stage = Self {
            hi,
            seconds,
            delayed,
            after: 0.0,
            stations: vec![(forward, backward, finish)],
            uplinks: vec![[0.0; 2]; machines.uplinks],
            down,
            up,
        };
        let (mut there, mut back) = (0.0_f64, 0.0_f64);
        for v in 0..units {
            let (down, up) = (stage.down[v], stage.up[v]);
            there = there.max(machines.route(u, v).seconds(down));
            back = back.max(machines.route(v, u).seconds(up));
            stage.uplink(machines.uplinks(u, v), down, 0);
            stage.uplink(machines.uplinks(v, u), up, 1);
            // On the lines of a unit that comes again the last stage's traffic runs too.
            let (got, sent) = last.map_or((0.0, 0.0), |l| {
                let (got, sent) = l.traffic[v];
                (f64::from_bits(got), f64::from_bits(sent))
            });
            stage.stations.push((problem.busy(u, v, down), problem.busy(u, v, sent), 0.0));
            stage.stations.push((problem.busy(v, u, got), problem.busy(v, u, up), 0.0));
        }
        stage.seconds += there + back;
        let broker = machines.broker();
        stage.stations.push((problem.busy(broker, u, fed), 0.0, 0.0));
        stage.uplink(machines.uplinks(broker, u), read(lo, hi), 0);
        stage.after = stage.reductions(search, state, unit, lo);
        let finite =
            (stage.seconds + stage.after).is_finite() && stage.stations.iter().all(|s| (s.0 + s.1 + s.2).is_finite());
        finite.then_some(stage)
    }

    fn uplink(&mut self, uplinks: &[(u32, f64)], bytes: f64, way: usize) {
        for &(uplink, per_byte) in uplinks {
            self.uplinks[uplink as usize][way] += bytes * per_byte;
        }
    }

    /// Of the ties whose owner this stage's unit is.
    fn reductions(&self, search: &Search<'_>, state: &State, unit: u32, lo: u32) -> f64 {
        let machines = &search.problem.machines;
        let mut seconds = 0.0;
        for (t, tie) in search.problem.chain.ties.iter().enumerate() {
            if !(lo..self.hi).contains(&tie.atoms[0].0) {
                continue;
            }
            let there_and_back = (0..machines.units.len()).filter(|v| *v != unit as usize).map(|v| {
                let held = search.held(state, t, v as u32);
                if held == 0 {
                    return 0.0;
                }
                let parts = f64::from(held & 0xffff);
                machines.route(v, unit as usize).seconds(tie.bytes * parts)
                    + machines.route(unit as usize, v).seconds(tie.bytes)
            });
            seconds += there_and_back.fold(0.0, f64::max);
        }
        seconds
    }

    /// The last stage as the state behind this one has it, with this one's traffic to and from it; or this one, if it is the last.
    fn last(&self, state: &State, unit: u32, lo: u32) -> Last {
        let Some(last) = &state.last else {
            return Last { unit, lo, traffic: vec![(0, 0); self.down.len()] };
        };
        let mut last = last.clone();
        if unit != last.unit {
            let (got, sent) = (self.down[last.unit as usize], self.up[last.unit as usize]);
            last.traffic[unit as usize] = (got.to_bits(), sent.to_bits());
        }
        last
    }
}
