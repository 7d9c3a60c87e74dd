//! The state of a plan's end: everything that decides how the end may be completed.

use super::super::problem::{Problem, Tie};

/// The end of a plan: its last stages. Two ends with the same state may be completed by the same first stages.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct State {
    /// The atom where the first stage of this end begins.
    pub(super) lo: u32,
    /// The units that this end uses, as a bit set.
    pub(super) used: u32,
    /// The first stage's unit.
    pub(super) first: u32,
    /// One entry per message that crosses `lo`: a bit set of the units from `lo` on that make or use it. After these,
    /// one entry per unit for each tied parameter with holders on both sides of `lo`: the count that [`parts`] gives.
    pub(super) open: Vec<u32>,
    /// The last stage, if its unit may come again as the first.
    pub(super) last: Option<LastStage>,
}

/// The last stage of a plan whose first stage is on the same unit.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LastStage {
    pub(super) unit: u32,
    pub(super) lo: u32,
    /// The traffic with each unit.
    pub(super) traffic: Vec<LastTraffic>,
}

/// Bytes per micro-batch between the last stage and another unit, as the bits of an `f64`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LastTraffic {
    pub(super) received: u64,
    pub(super) sent: u64,
}

/// The summand for each atom that reads the parameter, added to its number of parts.
const READER: u32 = 1 << 16;

/// The parts of a tie's gradient that atoms `lo..hi` make, plus [`READER`] for each of them that reads the parameter.
fn parts(tie: &Tie, lo: u32, hi: u32) -> u32 {
    tie.users.iter().filter(|u| (lo..hi).contains(&u.atom)).map(|u| u.parts + READER).sum()
}

impl State {
    pub(super) fn empty(atoms: u32) -> Self {
        Self { lo: atoms, used: 0, first: u32::MAX, open: Vec::new(), last: None }
    }

    pub(super) fn uses(&self, unit: u32) -> bool {
        self.used >> unit & 1 == 1
    }

    /// [`Self::open`] after `unit` takes the atoms from `lo` to this state's.
    pub(super) fn open_before(&self, problem: &Problem, unit: u32, lo: u32) -> Vec<u32> {
        let chain = &problem.chain;
        let behind = |m: u32| {
            let at = problem.crossing[self.lo as usize].binary_search(&m).ok();
            at.and_then(|i| self.open.get(i).copied()).unwrap_or(0)
        };
        let here = lo..self.lo;
        let mut open = Vec::new();
        for &m in &problem.crossing[lo as usize] {
            let message = &chain.messages[m as usize];
            // Of a gradient, only its maker counts; of an activation, only its users. No message is made behind the
            // cut and also used there.
            let gradient = message.maker >= lo;
            let made_here = here.contains(&message.maker);
            let used_here = message.users.iter().any(|u| here.contains(u));
            let before = if gradient && made_here { 0 } else { behind(m) };
            let counts = made_here || (!gradient && used_here);
            open.push(before | u32::from(counts) << unit);
        }
        for (t, tie) in chain.ties.iter().enumerate().filter(|(_, tie)| tie.owner_atom() < lo) {
            for u in 0..problem.machines.units.len() as u32 {
                let here = if u == unit { parts(tie, lo, self.lo) } else { 0 };
                open.push(here + self.held(problem, t, u));
            }
        }
        open
    }

    /// The count that [`parts`] gives for a unit behind this state's cut; 0 if the unit does not hold the parameter.
    fn held(&self, problem: &Problem, tie: usize, unit: u32) -> u32 {
        let ties = &problem.chain.ties;
        if self.open.is_empty() || ties[tie].owner_atom() >= self.lo {
            return 0;
        }
        let before = ties[..tie].iter().filter(|t| t.owner_atom() < self.lo).count();
        let messages = problem.crossing[self.lo as usize].len();
        self.open[messages + before * problem.machines.units.len() + unit as usize]
    }

    /// How many parts of a tie's gradient a unit makes behind this state's cut; `None` if it does not hold the
    /// parameter.
    pub(super) fn tie_parts(&self, problem: &Problem, tie: usize, unit: u32) -> Option<u32> {
        let held = self.held(problem, tie, unit);
        (held > 0).then_some(held & (READER - 1))
    }

    /// Seconds to reduce a tie's gradient if `owner` owns the parameter.
    pub(super) fn reduction_seconds(&self, problem: &Problem, tie: usize, owner: u32) -> f64 {
        let others = (0..problem.machines.units.len() as u32).filter(|v| *v != owner);
        let exchanges = others.filter_map(|v| {
            let parts = self.tie_parts(problem, tie, v)?;
            let tie = &problem.chain.ties[tie];
            Some(tie.exchange_seconds(&problem.machines, v as usize, owner as usize, parts))
        });
        exchanges.fold(0.0, f64::max)
    }
}
