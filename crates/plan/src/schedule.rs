//! The order in which each peer runs the passes of its stages.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// How forward and backward passes of micro-batches interleave.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum Schedule {
    /// All forward passes, then all backward passes (Huang et al., 2019).
    #[serde(rename = "gpipe")]
    GPipe,
    /// A backward pass as soon as there is one, and no more micro-batches under way than the stages ahead need (Narayanan et al., 2019).
    #[default]
    #[serde(rename = "1f1b")]
    OneFOneB,
    /// As 1F1B, but a backward pass computes only what other stages wait for; gradients of weights are made when a peer would idle, or when it keeps as many
    /// micro-batches as the first stage does with 1F1B (ZB-H1 of Qi et al., 2023).
    #[serde(rename = "zb-h1")]
    ZeroBubble,
    /// As ZB-H1 with about twice as many micro-batches under way (ZB-H2 of the same): they fill the time that tensors spend on slow links, and take memory for it.
    #[serde(rename = "zb-h2")]
    DeepZeroBubble,
}

impl Schedule {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::GPipe, Self::OneFOneB, Self::ZeroBubble, Self::DeepZeroBubble];

    /// What users call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::GPipe => "gpipe",
            Self::OneFOneB => "1f1b",
            Self::ZeroBubble => "zb-h1",
            Self::DeepZeroBubble => "zb-h2",
        }
    }

    /// The kinds of passes a training step has, in the order in which a micro-batch goes through them.
    pub fn kinds(self) -> &'static [TaskKind] {
        match self {
            Self::GPipe | Self::OneFOneB => &[TaskKind::Forward, TaskKind::Backward],
            Self::ZeroBubble | Self::DeepZeroBubble => &[TaskKind::Forward, TaskKind::Backward, TaskKind::Weight],
        }
    }

    /// Whether gradients of weights wait for gaps.
    pub(crate) fn delays_weights(self) -> bool {
        self.kinds().contains(&TaskKind::Weight)
    }

    /// How many micro-batches may be between forward and backward at a stage from which on so many peers can be at work on one.
    pub(crate) fn room(self, peers: usize) -> usize {
        match self {
            Self::GPipe => usize::MAX,
            Self::OneFOneB | Self::ZeroBubble => peers,
            Self::DeepZeroBubble => 2 * peers - 1,
        }
    }

    /// How many passes long tensors are taken to be on their way from peer to peer. Where that is some time, there are gaps in which weights belong, not at the end.
    fn way(self) -> usize {
        match self {
            Self::GPipe | Self::OneFOneB | Self::ZeroBubble => 0,
            Self::DeepZeroBubble => 1,
        }
    }
}

/// One pass of one stage over one micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Task {
    pub(crate) kind: TaskKind,
    pub(crate) stage: u32,
    pub(crate) micro_batch: u32,
}

impl StageTasks {
    /// Who has a micro-batch of the stage.
    fn peer(&self, micro_batch: u32) -> Option<u32> {
        self.peers.get(micro_batch as usize % self.peers.len().max(1)).copied()
    }
}

/// What a pass computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TaskKind {
    /// Activations.
    Forward,
    /// Gradients; under zero-bubble schedules only those that other operators wait for.
    Backward,
    /// The other gradients: those of weights.
    Weight,
}

/// A stage as far as the order of tasks goes.
#[derive(Debug, Clone, Default)]
pub(crate) struct StageTasks {
    /// As in [`Stage::peers`](crate::Stage::peers).
    pub(crate) peers: Vec<u32>,
    /// By kind of pass: the passes of other stages over the same micro-batch that it waits for.
    pub(crate) waits: [Vec<(TaskKind, u32)>; 3],
    /// Whether forward changes something, so that each forward pass waits for that of the micro-batch before.
    pub(crate) chained: bool,
}

/// The share of a stage that one peer has.
struct Lane {
    stage: usize,
    micro_batches: Vec<u32>,
    /// How many of them are done, by kind.
    done: [usize; 3],
    /// How many of them may be on their way to their backward pass.
    room: usize,
    /// How many of them may be kept in all, those that wait for their weight pass among them.
    kept: usize,
}

/// The order of tasks per peer, of those kinds. Found by running all peers in rounds of one task for each of their stages, so that it can never deadlock: what a
/// task waits for stands in an earlier round. Each peer takes the micro-batches of a stage in order, in every kind of pass.
pub(crate) fn order(
    schedule: Schedule,
    kinds: &[TaskKind],
    stages: &[StageTasks],
    peers: usize,
    micro_batches: u32,
) -> Vec<Vec<Task>> {
    let n = micro_batches as usize;
    let mut lanes = lanes(schedule, stages, peers, micro_batches);
    // Where phases do not overlap, passes of a kind that no stage waits for come after the peer's others of that kind: those have others waiting, and need not wait for slow links themselves.
    let phased = schedule == Schedule::GPipe;
    let awaited =
        |kind: TaskKind, stage: usize| stages.iter().any(|s| s.waits[kind as usize].contains(&(kind, stage as u32)));
    let awaited: Vec<Vec<bool>> =
        kinds.iter().map(|k| (0..stages.len()).map(|s| !phased || awaited(*k, s)).collect()).collect();
    // In which round a task was done, by kind, stage and micro-batch.
    let mut done_in = vec![vec![vec![usize::MAX; n]; stages.len()]; kinds.len()];
    let mut orders = vec![Vec::new(); peers];
    let mut left = stages.len() * n * kinds.len();
    let last = kinds.len() - 1;
    // What is nearer to the end of a step goes first; but where weights, which nobody waits for, fill the gaps, forward passes are what all others wait for.
    let preference = match schedule.delays_weights() {
        true => [TaskKind::Forward, TaskKind::Backward, TaskKind::Weight],
        false => [TaskKind::Backward, TaskKind::Forward, TaskKind::Weight],
    };
    // Rounds that a tensor spends between peers, and in which nobody may have anything to do.
    let way = schedule.way();
    let mut idle_rounds = 0;
    for round in 0.. {
        let before = left;
        for (peer, (order, lanes)) in (0..).zip(orders.iter_mut().zip(&mut lanes)) {
            // One task of each of its stages: a peer with a short first stage and the last, both a part of its share, is to keep pace with the others.
            let mut idle = vec![true; lanes.len()];
            loop {
                let ready = |lane: &Lane, kind: TaskKind| -> Option<u32> {
                    let k = kind as usize;
                    let at = lane.done[k];
                    let m = *lane.micro_batches.get(at)?;
                    let own = match kind {
                        TaskKind::Forward if last == 0 || phased => true,
                        TaskKind::Forward => {
                            lane.done[0] - lane.done[1] < lane.room && lane.done[0] - lane.done[last] < lane.kept
                        }
                        TaskKind::Backward if phased => lane.done[0] == lane.micro_batches.len(),
                        TaskKind::Backward | TaskKind::Weight => lane.done[k - 1] > at,
                    };
                    let stage = &stages[lane.stage];
                    let over = |kind: TaskKind, stage: usize, m: u32| {
                        let far = stages[stage].peer(m) != Some(peer);
                        done_in[kind as usize][stage][m as usize].saturating_add(if far { way } else { 0 }) < round
                    };
                    let chain = kind != TaskKind::Forward || !stage.chained || m == 0 || over(kind, lane.stage, m - 1);
                    let others = stage.waits[k].iter().all(|&(kind, s)| over(kind, s as usize, m));
                    let turn = awaited[k][lane.stage]
                        || lanes.iter().all(|l| !awaited[k][l.stage] || l.done[k] == l.micro_batches.len());
                    (own && chain && others && turn).then_some(m)
                };
                // Of several, the earlier micro-batch first, then the later stage: it is nearer to its backward pass.
                let next = preference.iter().filter(|k| kinds.contains(k)).find_map(|&kind| {
                    let open = (0..lanes.len()).filter(|l| idle[*l]);
                    let candidates = open.filter_map(|l| Some((l, ready(&lanes[l], kind)?)));
                    let (l, m) = candidates.min_by_key(|&(l, m)| (m, Reverse(lanes[l].stage)))?;
                    Some((kind, l, m))
                });
                let Some((kind, l, micro_batch)) = next else { break };
                idle[l] = false;
                let lane = &mut lanes[l];
                lane.done[kind as usize] += 1;
                done_in[kind as usize][lane.stage][micro_batch as usize] = round;
                order.push(Task { kind, stage: lane.stage as u32, micro_batch });
                left -= 1;
            }
        }
        // Of the earliest micro-batch that is not over, the earliest stage's forward pass, the last stage's backward pass or any weight pass is always ready.
        idle_rounds = if left < before { 0 } else { idle_rounds + 1 };
        debug_assert!(idle_rounds <= way || left == 0, "the schedule stalled");
        if left == 0 || idle_rounds > way {
            break;
        }
    }
    orders
}

/// What each peer has of each stage.
fn lanes(schedule: Schedule, stages: &[StageTasks], peers: usize, micro_batches: u32) -> Vec<Vec<Lane>> {
    let mut lanes: Vec<Vec<Lane>> = (0..peers).map(|_| Vec::new()).collect();
    let replicas: Vec<BTreeSet<u32>> = stages.iter().map(|s| s.peers.iter().copied().collect()).collect();
    let all: usize = replicas.iter().map(BTreeSet::len).sum();
    // How many peers can be at work on a micro-batch from this stage on.
    let mut ahead = 0;
    for ((stage, tasks), replicas) in stages.iter().enumerate().zip(replicas).rev() {
        ahead += replicas.len();
        for peer in replicas {
            let turns = tasks.peers.iter().filter(|p| **p == peer).count();
            let mine = (0..micro_batches).filter(|m| tasks.peers[*m as usize % tasks.peers.len()] == peer);
            // Its share of as many micro-batches as keep all those peers at work.
            let share = |peers| schedule.room(peers).saturating_mul(turns).div_ceil(tasks.peers.len());
            let [room, kept] = [ahead, all].map(share);
            lanes[peer as usize].push(Lane { stage, micro_batches: mine.collect(), done: [0; 3], room, kept });
        }
    }
    lanes
}

#[cfg(test)]
mod tests {
    use super::*;
    use TaskKind::{Backward, Forward, Weight};

    /// A chain of stages on these peers.
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

    /// The first peer also has the last stage: it hands on all that it has before it waits for what comes back to it.
    #[test]
    fn gpipe_lets_nobody_wait_for_what_nobody_waits_for() {
        let order = order(Schedule::GPipe, Schedule::GPipe.kinds(), &chain(&[&[0], &[1], &[0]]), 2, 3);
        let stages = |kind| Vec::from_iter(order[0].iter().filter(|t| t.kind == kind).map(|t| t.stage));
        assert_eq!(stages(Forward), [0, 0, 0, 2, 2, 2]);
        assert_eq!(stages(Backward), [2, 2, 2, 0, 0, 0]);
    }

    /// No stage keeps more than three micro-batches; the last ones of 1F1B, which keep fewer, let weights wait until then.
    #[test]
    fn weight_gradients_fill_the_gaps() {
        let orders = orders(Schedule::ZeroBubble, &chain(&[&[0], &[1], &[2]]), 3, 5);
        assert_eq!(orders[0], "F0 F1 F2 B0 W0 F3 B1 W1 F4 B2 W2 B3 W3 B4 W4");
        assert_eq!(orders[1], "F0 F1 B0 F2 B1 W0 F3 B2 W1 F4 B3 W2 B4 W3 W4");
        assert_eq!(orders[2], "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 F4 B4 W2 W3 W4");
    }

    /// Five under way where ZB-H1 has three.
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

    /// Two pipelines side by side are each as deep as one: no peer keeps more micro-batches than without the other. One peer before four feeds them all.
    #[test]
    fn room_follows_what_is_ahead() {
        let stages = chain(&[&[0, 1], &[2, 3], &[4, 5]]);
        let rooms = |stages: &[StageTasks], peers| -> Vec<usize> {
            lanes(Schedule::OneFOneB, stages, peers, 8).iter().map(|l| l[0].room).collect()
        };
        assert_eq!(rooms(&stages, 6), [3, 3, 2, 2, 1, 1]);
        assert_eq!(rooms(&chain(&[&[0], &[1, 2, 3, 4]]), 5), [5, 1, 1, 1, 1]);
    }
}
