//! Copies that peers keep of each other's shares: who keeps which, and how often they are made.

use std::collections::{BTreeMap, VecDeque};

use fusionllm_plan::Line;

use super::speed::median;
use crate::{Atlas, Formation, Mirroring};

/// The largest part of the training time that copies may cost.
const MAX_COPY_COST: f64 = 0.025;

/// Copies are made as often as is best if members are lost after this many seconds of training on average.
const SECONDS_PER_LOSS: f64 = 600.0;

/// Least seconds between two cuts for copies.
const MIN_COPY_PERIOD_S: f64 = 2.0;

/// The part of a link's rate that a copy may use.
pub(super) const COPY_RATE: f64 = 0.5;

/// A resource that copies share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Shared {
    /// All lines into the peer at this place of the formation.
    Into(usize),
    Line(Line),
}

/// Bytes per second from one peer of a formation to another one: as measured, or as the plan knows it.
pub(super) fn bandwidth(atlas: &Atlas, formation: &Formation, from: usize, to: usize) -> Option<f64> {
    let measured = atlas.link(formation.members[from], formation.members[to]).map(|l| l.bandwidth);
    measured.or_else(|| formation.bandwidth(from, to))
}

/// Chooses the member that keeps a copy of each share. Returns these pairs, and the seconds until the last copy is
/// complete if copies have all lines to themselves. A copy goes where it is complete first. A place in another site is
/// preferred if the copy can be kept up to date there, because a site may lose its power or its line.
pub(super) fn buddies(atlas: &Atlas, formation: &Formation) -> (Vec<Mirroring>, f64) {
    let mut busy: BTreeMap<Shared, f64> = BTreeMap::new();
    let mut mirrors = Vec::new();
    let count = formation.members.len();
    for (i, (&owner, &bytes)) in formation.members.iter().zip(&formation.share_bytes).enumerate() {
        // The time until which each line is busy, if this place gets the copy.
        let until = |place: usize| {
            let rate = bandwidth(atlas, formation, i, place).unwrap_or(f64::MAX);
            let known = formation.lines(i, place).map(|(line, link)| (Shared::Line(line), link.bandwidth));
            let lines = [(Shared::Into(place), rate)].into_iter().chain(known);
            let until = lines.map(|(line, rate)| (line, busy.get(&line).unwrap_or(&0.0) + bytes as f64 / rate));
            until.collect::<Vec<_>>()
        };
        // The key by which places are compared: whether the copy is safe there, when it is complete, and when the place
        // has all its copies.
        let rank = |place: usize| {
            let until = until(place);
            let seconds = until.iter().map(|(_, until)| *until).fold(0.0, f64::max);
            let is_safe = !formation.share_a_site(i, place) && copy_period(seconds) <= MAX_FAR_PERIOD_S;
            // Numbers that are not negative are ordered like their bits.
            (!is_safe, seconds.to_bits(), until[0].1.to_bits())
        };
        // The search starts at the next peer, so that equal links make a ring.
        let others = (1..count).map(|k| (i + k) % count);
        let others = others.filter(|place| !atlas.is_cut_off(owner, formation.members[*place]));
        let Some(place) = others.min_by_key(|place| rank(*place)) else { continue };
        let lines = until(place);
        busy.extend(lines);
        mirrors.push(Mirroring { owner, buddy: formation.members[place] });
    }
    (mirrors, busy.into_values().fold(0.0, f64::max))
}

/// The times when cuts are taken for copies, and when each step was complete.
#[derive(Debug)]
pub(super) struct CopyPace {
    began: f64,
    pub(super) copying: bool,
    /// The longest time that the copy of one share took, of the cut that is being copied.
    longest_s: f64,
    /// The seconds of each step during which that cut was copied.
    beside: Vec<f64>,
    /// The seconds of the last steps during which nothing was copied.
    quiet: VecDeque<f64>,
    /// The cost of copying a cut, in seconds of training, as steps showed it or as it follows from the links' rates.
    cost_s: f64,
    /// The cost of all copies so far, in seconds of training.
    pub(super) spent_s: f64,
    /// The time when the next cut is due. It is infinite until a generation begins, and until the cost of the last cut is
    /// known.
    pub(super) next: f64,
    /// The time when each step since the last cut was complete.
    completed: BTreeMap<u64, f64>,
}

/// Steps whose median is the time of a step without copies.
const QUIET_STEPS: usize = 15;

/// Copies go to another site if they can be made again after this many seconds.
const MAX_FAR_PERIOD_S: f64 = 60.0;

/// Seconds from one cut for copies to the next, if copying one costs so many seconds of training.
///
/// The period `t` with the least expected waste `cost / t + t / (2 * SECONDS_PER_LOSS)`: the cost of copies, and the
/// work that is done again after a loss. J. W. Young, "A first order approximation to the optimum checkpoint interval",
/// 1974.
fn copy_period(cost: f64) -> f64 {
    (2.0 * cost * SECONDS_PER_LOSS).sqrt().max(cost / MAX_COPY_COST).max(MIN_COPY_PERIOD_S)
}

impl Default for CopyPace {
    fn default() -> Self {
        Self {
            began: 0.0,
            copying: false,
            longest_s: 0.0,
            beside: Vec::new(),
            quiet: VecDeque::new(),
            cost_s: 0.0,
            spent_s: 0.0,
            next: f64::INFINITY,
            completed: BTreeMap::new(),
        }
    }
}

impl CopyPace {
    pub(super) fn begin(&mut self, now: f64) {
        if !self.copying {
            (self.began, self.copying, self.longest_s, self.next) = (now, true, 0.0, f64::INFINITY);
            self.beside.clear();
        }
    }

    /// A generation is planned, in which copying a cut takes this long. A copy in progress is void.
    pub(super) fn plan(&mut self, copied_s: f64) {
        (self.copying, self.cost_s, self.next) = (false, copied_s, f64::INFINITY);
        self.beside.clear();
        self.quiet.clear();
    }

    /// A generation begins.
    pub(super) fn restart(&mut self, now: f64) {
        self.next = now + copy_period(self.cost_s);
    }

    pub(super) fn share_copied(&mut self, seconds: f64) {
        self.longest_s = self.longest_s.max(seconds);
    }

    pub(super) fn copied(&mut self) {
        self.copying = false;
    }

    pub(super) fn complete(&mut self, step: u64, now: f64) {
        self.completed.insert(step, now);
    }

    /// Notes the seconds of a step. The first step that ends after a cut was copied tells the cost of copying.
    pub(super) fn note_step(&mut self, step_s: f64) {
        if !self.copying && self.next.is_finite() {
            self.quiet.push_back(step_s);
            if self.quiet.len() > QUIET_STEPS {
                self.quiet.pop_front();
            }
            return;
        }
        self.beside.push(step_s);
        if !self.copying {
            self.settle();
        }
    }

    /// Learns the cost of copying the last cut from how much slower the steps beside it were. If the same link bounds
    /// training and copies, training loses the seconds of the link that copies took. The figure stays within bounds of
    /// these seconds, because steps are also slow or fast for other reasons.
    fn settle(&mut self) {
        let if_bound = COPY_RATE * self.longest_s;
        if self.quiet.is_empty() {
            self.cost_s = if_bound;
            self.spent_s += if_bound;
        } else {
            let quiet = median(self.quiet.iter().copied().collect());
            let slower = self.beside.iter().sum::<f64>() - self.beside.len() as f64 * quiet;
            self.cost_s = 0.5 * (self.cost_s + slower.clamp(0.1 * if_bound, 2.0 * if_bound));
            self.spent_s += slower;
        }
        self.next = self.began + copy_period(self.cost_s);
    }

    /// Notes when steps were complete before this broker started. `steps` has them in order, with their seconds, and
    /// the last one was complete at `end`.
    pub(super) fn note_earlier_steps(&mut self, steps: &[(u64, f64)], end: f64) {
        let mut at = end;
        for (step, seconds) in steps.iter().rev() {
            self.completed.insert(*step, at);
            at -= seconds;
        }
        self.completed.extend(steps.first().map(|(first, _)| (first.saturating_sub(1), at)));
    }

    /// Seconds from the end of a step until `then`.
    pub(super) fn since(&self, step: u64, then: f64) -> f64 {
        self.completed.get(&step).map_or(0.0, |at| (then - at).max(0.0))
    }

    /// Seconds from the end of one step to the end of another one; infinite if they are not known.
    pub(super) fn work_s(&self, from: u64, to: u64) -> f64 {
        match (self.completed.get(&from), self.completed.get(&to)) {
            (Some(from), Some(to)) => to - from,
            _ => f64::INFINITY,
        }
    }

    /// Forgets the steps to which the run cannot go back: those before `step`, except the checkpoint's.
    pub(super) fn forget_before(&mut self, step: u64, on_disk: u64) {
        self.completed.retain(|s, _| *s >= step || *s == on_disk);
    }
}

#[cfg(test)]
mod tests {
    use fusionllm_plan::{Cluster, Device, Link, Rates, Site};

    use super::*;
    use crate::MemberId;

    #[test]
    fn copies_cost_little_and_are_as_frequent_as_is_best() {
        let waste = |cost: f64, period: f64| cost / period + period / (2.0 * SECONDS_PER_LOSS);
        for cost in [0.0, 0.001, 0.05, 0.5, 5.0, 600.0] {
            let period = copy_period(cost);
            assert!(period >= MIN_COPY_PERIOD_S && cost / period <= 1.001 * MAX_COPY_COST, "{cost}: {period}");
            if period > MIN_COPY_PERIOD_S && cost / period < 0.999 * MAX_COPY_COST {
                let around = [0.8, 1.25].map(|factor| waste(cost, factor * period));
                assert!(around.iter().all(|other| *other > waste(cost, period)), "{cost}: {period}");
            }
        }
        assert!((copy_period(0.05) - 7.75).abs() < 0.01);
        assert_eq!(copy_period(3.0), 120.0);
    }

    #[test]
    fn no_cut_is_due_before_a_generation_begins() {
        let mut pace = CopyPace::default();
        for began in [7.0, 5000.0] {
            assert!(pace.next.is_infinite(), "{pace:?}");
            pace.plan(5.0);
            assert!(pace.next.is_infinite(), "its peers load their tensors: {pace:?}");
            pace.restart(began);
            assert_eq!(pace.next, began + copy_period(5.0));
            pace.plan(5.0);
        }
    }

    const GBPS: f64 = 1.25e8;

    /// The copies of four shares of 50 MB, two in each of two sites. The links inside a site have 10 Gbps.
    fn buddies_of_two_sites(uplink: f64) -> (Vec<(u32, u32)>, f64) {
        let link = |bandwidth| Some(Link { latency: 0.001, bandwidth });
        let site =
            |name: &str| Site { name: name.into(), inside: link(10.0 * GBPS), uplink: link(uplink), downlink: None };
        let rates = Rates { matmul: 1e9, convolution: 1e9, memory: 1e9, overhead: 0.0 };
        let device = |i: u32| Device { site: Some(i / 2), ..Device::new(format!("p{i}"), rates, 1 << 30) };
        let cluster = Cluster::new((0..4).map(device).collect(), vec![site("a"), site("b")], Vec::new(), None);
        let formation = Formation {
            members: (0..4).map(MemberId).collect(),
            expected: Vec::new(),
            shares: Vec::new(),
            share_bytes: vec![50_000_000; 4],
            version: 1,
            micro_batches: 1,
            eval_passes: 0,
            predicted_step_s: None,
            predicted_compute_s: Vec::new(),
            cluster: Some(cluster.unwrap()),
            move_s: 0.0,
        };
        let (mirrors, seconds) = buddies(&Atlas::default(), &formation);
        (mirrors.into_iter().map(|m| (m.owner.0, m.buddy.0)).collect(), seconds)
    }

    #[test]
    fn copies_go_to_another_site_unless_that_takes_long() {
        let (across, seconds) = buddies_of_two_sites(GBPS);
        assert_eq!(across, [(0, 2), (1, 3), (2, 0), (3, 1)]);
        assert!((seconds - 0.8).abs() < 1e-9, "two copies share each uplink: {seconds}");
        let (inside, seconds) = buddies_of_two_sites(0.1 * GBPS);
        assert_eq!(inside, [(0, 1), (1, 0), (2, 3), (3, 2)]);
        assert!((seconds - 0.04).abs() < 1e-9, "{seconds}");
    }

    /// The seconds between the last two of many cuts, if a step takes a second and a copy takes its link ten, at half
    /// the link's rate. Steps beside a copy take longer by this factor.
    fn period(factor: f64) -> f64 {
        let (mut pace, mut now, mut step) = (CopyPace::default(), 0.0, 0);
        pace.plan(10.0);
        pace.restart(now);
        let (mut last, mut period) = (0.0, 0.0);
        for _ in 0..20_000 {
            if !pace.copying && now >= pace.next {
                pace.begin(now);
                (last, period) = (now, now - last);
            }
            let step_s = if pace.copying { factor } else { 1.0 };
            now += step_s;
            step += 1;
            pace.complete(step, now);
            if pace.copying && now >= pace.began + 20.0 {
                pace.share_copied(20.0);
                pace.copied();
            }
            pace.note_step(step_s);
        }
        period
    }

    #[test]
    fn copies_that_cost_nothing_are_made_more_often() {
        let [free, dear] = [1.0, 2.0].map(period);
        // Copies cost a tenth of what they would cost if links bound the steps, and then all of it.
        assert!((free - copy_period(1.0)).abs() <= 2.0, "{free}");
        assert!((dear - copy_period(10.0)).abs() <= 2.0, "{dear}");
    }
}
