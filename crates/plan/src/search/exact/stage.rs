//! One more stage before a plan's end, and the time and traffic that it adds.

use std::ops::Range;

use super::super::problem::Problem;
use super::super::round_trip::RoundTrip;
use super::super::score::{Bottleneck, Limits, StationLoad};
use super::state::{LastStage, LastTraffic, State};
use crate::schedule::Schedule;

/// Seconds per micro-batch of a shared line.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct LineLoad {
    pub(super) forward: f64,
    pub(super) backward: f64,
}

/// One more stage before a state. It adds the same to all ends with that state.
pub(super) struct Stage {
    /// Seconds that the stage adds to the pipeline.
    pub(super) pipeline: f64,
    /// See [`Problem::delayed`].
    pub(super) delayed: f64,
    /// Seconds of reductions.
    pub(super) reductions: f64,
    /// Those of its machine and its links.
    pub(super) limits: Limits,
    /// The load of each shared line.
    pub(super) lines: Vec<LineLoad>,
    traffic: Traffic,
}

/// Bytes per micro-batch between the stage and each unit.
struct Traffic {
    /// Activations to the unit.
    down: Vec<f64>,
    /// Gradients from the unit.
    up: Vec<f64>,
}

/// Whether the stage's unit also holds the last stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum UnitUse {
    First,
    Again,
}

impl Stage {
    /// A stage of `unit` from atom `lo` to the state's. `count` is the number of stages from it on. `None` if it
    /// exceeds the unit's memory or if a link is missing.
    pub(super) fn new(
        problem: &Problem,
        schedule: Schedule,
        state: &State,
        unit: u32,
        lo: u32,
        count: u32,
        unit_use: UnitUse,
    ) -> Option<Self> {
        let (u, a, b) = (unit as usize, lo as usize, state.lo as usize);
        let trip = problem.round_trip(schedule);
        let last = state.last.as_ref().filter(|_| unit_use == UnitUse::Again);
        let [forward, backward] = problem.compute(u, a, b);
        let delayed = problem.delayed(schedule, u, a, b);
        let machine = machine(problem, trip, unit, a..b, count, last)?;
        let after = machine.after;
        let mut limits = Limits::new(problem, schedule, Bottleneck::Unit(unit));
        limits.station(Bottleneck::Unit(unit), machine);
        let mut stage = Self {
            pipeline: forward + backward - delayed,
            delayed,
            reductions: 0.0,
            limits,
            lines: vec![LineLoad::default(); problem.machines.line_count],
            traffic: Traffic::new(problem, state, unit, lo),
        };
        let has_links = stage.add_links(problem, u, last) && stage.add_inputs(problem, u, lo..state.lo, last);
        stage.reductions = owned_reductions(problem, state, unit, lo);
        (has_links && (stage.pipeline + stage.reductions + after).is_finite()).then_some(stage)
    }

    /// Returns whether every message has a link.
    fn add_links(&mut self, problem: &Problem, u: usize, last: Option<&LastStage>) -> bool {
        let machines = &problem.machines;
        let (mut there, mut back) = (0.0_f64, 0.0_f64);
        let mut has_links = true;
        for v in 0..machines.units.len() {
            let (down, up) = (self.traffic.down[v], self.traffic.up[v]);
            // The links of a unit that comes again also carry the last stage's traffic.
            let LastTraffic { received, sent } = last.map_or(LastTraffic::default(), |l| l.traffic[v]);
            let (received, sent) = (f64::from_bits(received), f64::from_bits(sent));
            if down + up + received + sent == 0.0 {
                continue;
            }
            there = there.max(machines.link(u, v).seconds(down));
            back = back.max(machines.link(v, u).seconds(up));
            for share in machines.lines(u, v) {
                self.lines[share.line as usize].forward += down * share.per_byte;
            }
            for share in machines.lines(v, u) {
                self.lines[share.line as usize].backward += up * share.per_byte;
            }
            for (from, to, forward, backward) in [(u, v, down, sent), (v, u, received, up)] {
                let (forward, backward) = (problem.busy(from, to, forward), problem.busy(from, to, backward));
                has_links &= (forward + backward).is_finite();
                let load = StationLoad { forward, backward, after: 0.0 };
                self.limits.station(Bottleneck::Link(from as u32, to as u32), load);
            }
        }
        self.pipeline += there + back;
        has_links
    }

    /// Returns whether the broker has a link to the unit, if that reads inputs.
    fn add_inputs(&mut self, problem: &Problem, u: usize, atoms: Range<u32>, last: Option<&LastStage>) -> bool {
        let read = |atoms: Range<u32>| -> f64 {
            let inputs = problem.chain.inputs.iter().filter(|i| i.is_read_by(atoms.clone()));
            inputs.map(|i| i.bytes).sum()
        };
        let here = read(atoms);
        let all = here + last.map_or(0.0, |l| read(l.lo..problem.chain.atoms as u32));
        let broker = problem.machines.broker();
        let forward = problem.busy(broker, u, all);
        let load = StationLoad { forward, ..StationLoad::default() };
        self.limits.station(Bottleneck::Link(broker as u32, u as u32), load);
        for share in problem.machines.lines(broker, u) {
            self.lines[share.line as usize].forward += here * share.per_byte;
        }
        forward.is_finite()
    }

    /// The last stage as the state before this stage has it, with its traffic to and from this stage. This stage
    /// itself, if it is the last.
    pub(super) fn last(&self, state: &State, unit: u32, lo: u32) -> LastStage {
        let Some(last) = &state.last else {
            return LastStage { unit, lo, traffic: vec![LastTraffic::default(); self.traffic.down.len()] };
        };
        let mut last = last.clone();
        if unit != last.unit {
            let (received, sent) = (self.traffic.down[last.unit as usize], self.traffic.up[last.unit as usize]);
            last.traffic[unit as usize] = LastTraffic { received: received.to_bits(), sent: sent.to_bits() };
        }
        last
    }
}

/// The load of the stage's machine, with that of the last stage if the unit holds it too. `None` if it exceeds the
/// memory.
fn machine(
    problem: &Problem,
    trip: RoundTrip,
    unit: u32,
    atoms: Range<usize>,
    count: u32,
    last: Option<&LastStage>,
) -> Option<StationLoad> {
    let u = unit as usize;
    let [mut forward, mut backward] = problem.compute(u, atoms.start, atoms.end);
    let mut memory = problem.memory(u, atoms.start, atoms.end, trip.in_flight(count as usize));
    let mut after = problem.step_end(u, atoms.start, atoms.end);
    if let Some(last) = last {
        let (lo, hi) = (last.lo as usize, problem.chain.atoms);
        let [f, b] = problem.compute(u, lo, hi);
        (forward, backward) = (forward + f, backward + b);
        memory += problem.memory(u, lo, hi, trip.in_flight(1));
        after += problem.step_end(u, lo, hi);
    }
    (memory <= problem.machines.units[u].memory).then_some(StationLoad { forward, backward, after })
}

/// Seconds to reduce the gradients of the ties that the stage's unit owns.
fn owned_reductions(problem: &Problem, state: &State, unit: u32, lo: u32) -> f64 {
    let ties = problem.chain.ties.iter().enumerate();
    let owned = ties.filter(|(_, tie)| (lo..state.lo).contains(&tie.owner_atom()));
    owned.map(|(t, _)| state.reduction_seconds(problem, t, unit)).sum()
}

impl Traffic {
    fn new(problem: &Problem, state: &State, unit: u32, lo: u32) -> Self {
        let units = problem.machines.units.len();
        let here = lo..state.lo;
        let mut traffic = Self { down: vec![0.0; units], up: vec![0.0; units] };
        for (&m, &behind) in problem.crossing[state.lo as usize].iter().zip(&state.open) {
            let message = &problem.chain.messages[m as usize];
            let activation = message.maker < state.lo;
            let here = match activation {
                true => here.contains(&message.maker),
                false => message.users.iter().any(|x| here.contains(x)),
            };
            if !here {
                continue;
            }
            let bytes = if activation { &mut traffic.down } else { &mut traffic.up };
            for (v, bytes) in bytes.iter_mut().enumerate() {
                if behind >> v & 1 == 1 && v != unit as usize {
                    *bytes += message.bytes;
                }
            }
        }
        traffic
    }
}
