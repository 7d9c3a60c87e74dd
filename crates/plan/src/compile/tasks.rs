//! The order in which each peer runs its tasks.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use crate::schedule::{Schedule, TaskKind};

/// One pass of one stage over one micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Task {
    pub(super) kind: TaskKind,
    pub(super) stage: u32,
    pub(super) micro_batch: u32,
}

/// The facts about one stage that decide the order of its tasks.
#[derive(Debug, Clone, Default)]
pub(super) struct StageTasks {
    /// See [`Stage::peers`](crate::Stage::peers).
    pub(super) peers: Vec<u32>,
    /// By kind of task: the tasks of other stages that it waits for, over the same micro-batch.
    pub(super) waits: [Vec<(TaskKind, u32)>; 3],
    /// Whether forward changes a buffer. Each forward task then waits for the forward task of the previous micro-batch.
    pub(super) chained: bool,
}

impl StageTasks {
    fn peer(&self, micro_batch: u32) -> Option<u32> {
        self.peers.get(micro_batch as usize % self.peers.len().max(1)).copied()
    }
}

/// The micro-batches of one stage that one peer runs.
struct Share {
    stage: usize,
    micro_batches: Vec<u32>,
    /// By kind: how many tasks are done.
    done: [usize; 3],
    /// How many micro-batches may be between forward and backward.
    in_flight: usize,
    /// How many micro-batches may be kept, including those that wait for their weight task.
    kept: usize,
}

/// Orders the tasks of `kinds`, for each peer.
///
/// All peers are simulated in lock-step rounds. In each round, a peer runs one task for each of its stages. A task
/// waits only for tasks of earlier rounds, so the order cannot deadlock. A peer takes the micro-batches of a stage in
/// order.
pub(super) fn order(
    schedule: Schedule,
    kinds: &[TaskKind],
    stages: &[StageTasks],
    peers: usize,
    micro_batches: u32,
) -> Vec<Vec<Task>> {
    let mut shares = shares(schedule, stages, peers, micro_batches);
    let mut rounds = Rounds::new(schedule, kinds, stages, micro_batches);
    let mut orders = vec![Vec::new(); peers];
    let mut left = stages.len() * micro_batches as usize * kinds.len();
    // While a tensor is on a link, all peers may be idle.
    let mut idle_rounds = 0;
    while left > 0 && idle_rounds <= rounds.link_delay {
        let before = left;
        for (peer, (order, shares)) in (0..).zip(orders.iter_mut().zip(&mut shares)) {
            left -= rounds.run_peer(peer, shares, order);
        }
        // Take the earliest unfinished micro-batch. Its next forward, backward or weight task is always ready.
        idle_rounds = if left < before { 0 } else { idle_rounds + 1 };
        debug_assert!(idle_rounds <= rounds.link_delay || left == 0, "the schedule stalled");
        rounds.round += 1;
    }
    orders
}

struct Rounds<'a> {
    stages: &'a [StageTasks],
    kinds: &'a [TaskKind],
    /// The kinds of tasks, the preferred first.
    preference: [TaskKind; 3],
    /// Whether forward and backward do not overlap.
    phased: bool,
    link_delay: usize,
    /// By kind and stage: whether another stage waits for the task. Always true unless the schedule is phased.
    awaited: Vec<Vec<bool>>,
    /// By kind, stage and micro-batch: the round in which the task ran.
    done_in: Vec<Vec<Vec<usize>>>,
    round: usize,
}

impl<'a> Rounds<'a> {
    fn new(schedule: Schedule, kinds: &'a [TaskKind], stages: &'a [StageTasks], micro_batches: u32) -> Self {
        let phased = schedule == Schedule::GPipe;
        let awaited = |kind: TaskKind, stage: usize| {
            !phased || stages.iter().any(|s| s.waits[kind as usize].contains(&(kind, stage as u32)))
        };
        Self {
            stages,
            kinds,
            // A task near the end of the step goes first. But where weight gradients fill the gaps, forward tasks go
            // first, because all other peers wait for them.
            preference: match schedule.delays_weights() {
                true => [TaskKind::Forward, TaskKind::Backward, TaskKind::Weight],
                false => [TaskKind::Backward, TaskKind::Forward, TaskKind::Weight],
            },
            phased,
            link_delay: schedule.link_delay(),
            awaited: kinds.iter().map(|k| (0..stages.len()).map(|s| awaited(*k, s)).collect()).collect(),
            done_in: vec![vec![vec![usize::MAX; micro_batches as usize]; stages.len()]; kinds.len()],
            round: 0,
        }
    }

    /// Runs one peer's tasks of this round, one for each of its stages; returns how many ran. If a peer holds a short
    /// first stage and the last stage, it must run both in a round to keep pace with the others.
    fn run_peer(&mut self, peer: u32, shares: &mut [Share], order: &mut Vec<Task>) -> usize {
        let mut idle = vec![true; shares.len()];
        let mut ran = 0;
        while let Some((kind, i, micro_batch)) = self.next(peer, shares, &idle) {
            idle[i] = false;
            let share = &mut shares[i];
            share.done[kind as usize] += 1;
            self.done_in[kind as usize][share.stage][micro_batch as usize] = self.round;
            order.push(Task { kind, stage: share.stage as u32, micro_batch });
            ran += 1;
        }
        ran
    }

    /// A peer's next task: kind, index of its share, and micro-batch.
    fn next(&self, peer: u32, shares: &[Share], idle: &[bool]) -> Option<(TaskKind, usize, u32)> {
        self.preference.iter().filter(|k| self.kinds.contains(k)).find_map(|&kind| {
            let open = (0..shares.len()).filter(|i| idle[*i]);
            let candidates = open.filter_map(|i| Some((i, self.ready(peer, shares, i, kind)?)));
            // The earlier micro-batch goes first, then the later stage: it is nearer to its backward pass.
            let (i, m) = candidates.min_by_key(|&(i, m)| (m, Reverse(shares[i].stage)))?;
            Some((kind, i, m))
        })
    }

    /// The share's next micro-batch for a task of this kind, if the task can run in this round.
    fn ready(&self, peer: u32, shares: &[Share], index: usize, kind: TaskKind) -> Option<u32> {
        let share = &shares[index];
        let k = kind as usize;
        let last = self.kinds.len() - 1;
        let at = share.done[k];
        let m = *share.micro_batches.get(at)?;
        let own = match kind {
            TaskKind::Forward if last == 0 || self.phased => true,
            TaskKind::Forward => {
                share.done[0] - share.done[1] < share.in_flight && share.done[0] - share.done[last] < share.kept
            }
            TaskKind::Backward if self.phased => share.done[0] == share.micro_batches.len(),
            TaskKind::Backward | TaskKind::Weight => share.done[k - 1] > at,
        };
        let stage = &self.stages[share.stage];
        let over = |kind: TaskKind, stage: usize, m: u32| {
            let remote = self.stages[stage].peer(m) != Some(peer);
            let delay = if remote { self.link_delay } else { 0 };
            self.done_in[kind as usize][stage][m as usize].saturating_add(delay) < self.round
        };
        let chain = kind != TaskKind::Forward || !stage.chained || m == 0 || over(kind, share.stage, m - 1);
        let others = stage.waits[k].iter().all(|&(kind, s)| over(kind, s as usize, m));
        // Under a phased schedule, tasks that no stage waits for run after the peer's other tasks of that kind. The
        // others must not wait behind them for slow links.
        let turn = self.awaited[k][share.stage]
            || shares.iter().all(|s| !self.awaited[k][s.stage] || s.done[k] == s.micro_batches.len());
        (own && chain && others && turn).then_some(m)
    }
}

/// By peer: its shares of the stages.
fn shares(schedule: Schedule, stages: &[StageTasks], peers: usize, micro_batches: u32) -> Vec<Vec<Share>> {
    let mut shares: Vec<Vec<Share>> = (0..peers).map(|_| Vec::new()).collect();
    let replicas: Vec<BTreeSet<u32>> = stages.iter().map(|s| s.peers.iter().copied().collect()).collect();
    let all: usize = replicas.iter().map(BTreeSet::len).sum();
    // How many peers can work on a micro-batch from this stage on.
    let mut ahead = 0;
    for ((stage, tasks), replicas) in stages.iter().enumerate().zip(replicas).rev() {
        ahead += replicas.len();
        for peer in replicas {
            let turns = tasks.peers.iter().filter(|p| **p == peer).count();
            let mine = (0..micro_batches).filter(|m| tasks.peers[*m as usize % tasks.peers.len()] == peer);
            // The peer's part of the micro-batches that keep all those peers busy.
            let limit = |peers| schedule.in_flight_limit(peers).saturating_mul(turns).div_ceil(tasks.peers.len());
            let [in_flight, kept] = [ahead, all].map(limit);
            shares[peer as usize].push(Share { stage, micro_batches: mine.collect(), done: [0; 3], in_flight, kept });
        }
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;
    use TaskKind::{Backward, Forward, Weight};

    /// A chain of stages, each on the given peers.
    fn chain(peers: &[&[u32]]) -> Vec<StageTasks> {
        let n = peers.len();
        let stage = |s: usize| StageTasks {
            peers: peers[s].to_vec(),
            waits: [
                if s > 0 { vec![(Forward, s as u32 - 1)] } else { vec![] },
                if s + 1 < n { vec![(Backward, s as u32 + 1)] } else { vec![] },
                vec![],
            ],
            chained: false,
        };
        (0..n).map(stage).collect()
    }

    fn orders(schedule: Schedule, stages: &[StageTasks], peers: usize, micro_batches: u32) -> Vec<String> {
        let letter = |k: TaskKind| match k {
            Forward => 'F',
            Backward => 'B',
            Weight => 'W',
        };
        let show = |order: &Vec<Task>| {
            order.iter().map(|t| format!("{}{}", letter(t.kind), t.micro_batch)).collect::<Vec<_>>().join(" ")
        };
        order(schedule, schedule.kinds(), stages, peers, micro_batches).iter().map(show).collect()
    }

    #[test]
    fn one_f_one_b_has_the_published_shape() {
        let orders = orders(Schedule::OneFOneB, &chain(&[&[0], &[1], &[2]]), 3, 4);
        assert_eq!(orders[0], "F0 F1 F2 B0 F3 B1 B2 B3");
        assert_eq!(orders[1], "F0 F1 B0 F2 B1 F3 B2 B3");
        assert_eq!(orders[2], "F0 B0 F1 B1 F2 B2 F3 B3");
    }

    #[test]
    fn gpipe_runs_all_forward_passes_first() {
        let orders = orders(Schedule::GPipe, &chain(&[&[0], &[1]]), 2, 3);
        assert_eq!(orders[0], "F0 F1 F2 B0 B1 B2");
        assert_eq!(orders[1], "F0 F1 F2 B0 B1 B2");
    }

    /// The first peer also has the last stage. It must send all its activations before it waits for the last stage's.
    #[test]
    fn gpipe_runs_tasks_that_no_stage_waits_for_last() {
        let order = order(Schedule::GPipe, Schedule::GPipe.kinds(), &chain(&[&[0], &[1], &[0]]), 2, 3);
        let stages = |kind| Vec::from_iter(order[0].iter().filter(|t| t.kind == kind).map(|t| t.stage));
        assert_eq!(stages(Forward), [0, 0, 0, 2, 2, 2]);
        assert_eq!(stages(Backward), [2, 2, 2, 0, 0, 0]);
    }

    /// No stage keeps more than three micro-batches. Late stages, which keep fewer under 1F1B, delay their weight
    /// gradients until they keep as many.
    #[test]
    fn weight_gradients_fill_the_gaps() {
        let orders = orders(Schedule::ZeroBubble, &chain(&[&[0], &[1], &[2]]), 3, 5);
        assert_eq!(orders[0], "F0 F1 F2 B0 W0 F3 B1 W1 F4 B2 W2 B3 W3 B4 W4");
        assert_eq!(orders[1], "F0 F1 B0 F2 B1 W0 F3 B2 W1 F4 B3 W2 B4 W3 W4");
        assert_eq!(orders[2], "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 F4 B4 W2 W3 W4");
    }

    /// Five micro-batches are in flight; ZB-H1 has three.
    #[test]
    fn more_micro_batches_hide_slow_links() {
        let orders = orders(Schedule::DeepZeroBubble, &chain(&[&[0], &[1], &[2]]), 3, 6);
        assert_eq!(orders[0], "F0 F1 F2 F3 F4 B0 W0 F5 B1 B2 W1 W2 B3 B4 W3 W4 B5 W5");
        assert_eq!(orders[2], "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 F5 B5 W1 W2 W3 W4 W5");
    }

    #[test]
    fn several_stages_and_replicas_finish() {
        let layouts: [&[&[u32]]; 4] = [
            &[&[0], &[1], &[0], &[1]],
            &[&[0, 1], &[2, 3], &[0]],
            &[&[0], &[1, 2, 3], &[3, 2]],
            &[&[0, 0, 1], &[1, 2], &[2, 1, 0]],
        ];
        for layout in layouts {
            for schedule in Schedule::ALL {
                for chained in [false, true] {
                    let mut stages = chain(layout);
                    stages[1].chained = chained;
                    let orders = order(schedule, schedule.kinds(), &stages, 4, 5);
                    let tasks = orders.iter().map(Vec::len).sum::<usize>();
                    assert_eq!(tasks, layout.len() * 5 * schedule.kinds().len(), "{layout:?} {schedule:?}");
                }
            }
        }
    }

    /// Each of two parallel pipelines is as deep as one alone, so no peer keeps more micro-batches. A single peer
    /// before four replicas feeds them all.
    #[test]
    fn the_in_flight_limit_counts_the_peers_ahead() {
        let stages = chain(&[&[0, 1], &[2, 3], &[4, 5]]);
        let limits = |stages: &[StageTasks], peers| -> Vec<usize> {
            shares(Schedule::OneFOneB, stages, peers, 8).iter().map(|s| s[0].in_flight).collect()
        };
        assert_eq!(limits(&stages, 6), [3, 3, 2, 2, 1, 1]);
        assert_eq!(limits(&chain(&[&[0], &[1, 2, 3, 4]]), 5), [5, 1, 1, 1, 1]);
    }
}
