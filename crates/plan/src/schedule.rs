//! The order in which each peer runs the passes of its stages.

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
}

/// One pass of one stage over one micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Task {
    /// Forward or backward.
    pub kind: TaskKind,
    /// The stage.
    pub stage: u32,
    /// The micro-batch.
    pub micro_batch: u32,
}

/// Direction of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TaskKind {
    /// Computes activations.
    Forward,
    /// Computes gradients.
    Backward,
}

/// The order of tasks per peer. Found by running all peers in rounds of one task each, so that it can never deadlock: what a task waits for stands in
/// an earlier round. Each stage takes its micro-batches in order, in both directions.
///
/// `forward_deps[s]` and `backward_deps[s]` are the other stages whose pass of the same kind stage `s` waits for.
pub fn order(
    schedule: Schedule,
    peer_of_stage: &[u32],
    peers: usize,
    micro_batches: u32,
    forward_deps: &[Vec<u32>],
    backward_deps: &[Vec<u32>],
    with_backward: bool,
) -> Vec<Vec<Task>> {
    let stages = peer_of_stage.len();
    let mut stages_of = vec![Vec::new(); peers];
    for (s, &peer) in peer_of_stage.iter().enumerate() {
        stages_of[peer as usize].push(s);
    }
    // Micro-batches done, by stage.
    let mut forward = vec![0u32; stages];
    let mut backward = vec![0u32; stages];
    let mut orders = vec![Vec::new(); peers];
    let mut left = stages * micro_batches as usize * if with_backward { 2 } else { 1 };
    while left > 0 {
        let (forward_before, backward_before) = (forward.clone(), backward.clone());
        let forward_ready = |s: usize| {
            let m = forward_before[s];
            // A stage needs no more under way than there are stages from it to the last.
            let room =
                !with_backward || schedule == Schedule::GPipe || ((m - backward_before[s]) as usize) < stages - s;
            m < micro_batches && room && forward_deps[s].iter().all(|&d| forward_before[d as usize] > m)
        };
        let backward_ready = |s: usize| {
            let m = backward_before[s];
            let enough = if schedule == Schedule::GPipe { micro_batches } else { m + 1 };
            with_backward
                && m < micro_batches
                && forward_before[s] >= enough
                && backward_deps[s].iter().all(|&d| backward_before[d as usize] > m)
        };
        let before = left;
        for (order, mine) in orders.iter_mut().zip(&stages_of) {
            // Of several, the earlier micro-batch first, then the later stage: it is nearer to its backward pass.
            let next = |ready: &dyn Fn(usize) -> bool, done: &[u32]| {
                mine.iter().copied().filter(|&s| ready(s)).min_by_key(|&s| (done[s], std::cmp::Reverse(s)))
            };
            let (kind, stage, done) = match next(&backward_ready, &backward_before) {
                Some(s) => (TaskKind::Backward, s, &mut backward[s]),
                None => match next(&forward_ready, &forward_before) {
                    Some(s) => (TaskKind::Forward, s, &mut forward[s]),
                    None => continue,
                },
            };
            order.push(Task { kind, stage: stage as u32, micro_batch: *done });
            *done += 1;
            left -= 1;
        }
        // Dependencies run to later stages forward and to earlier ones backward, so some task is always ready.
        debug_assert!(left < before, "the schedule stalled");
        if left == before {
            break;
        }
    }
    orders
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(n: usize) -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
        let forward = (0..n).map(|s| if s > 0 { vec![s as u32 - 1] } else { vec![] }).collect();
        let backward = (0..n).map(|s| if s + 1 < n { vec![s as u32 + 1] } else { vec![] }).collect();
        (forward, backward)
    }

    fn show(order: &[Task]) -> String {
        order
            .iter()
            .map(|t| format!("{}{}", if t.kind == TaskKind::Forward { 'F' } else { 'B' }, t.micro_batch))
            .collect::<Vec<_>>()
            .join(" ")
    }

    #[test]
    fn one_f_one_b_has_the_published_shape() {
        let (f, b) = chain(3);
        let orders = order(Schedule::OneFOneB, &[0, 1, 2], 3, 4, &f, &b, true);
        assert_eq!(show(&orders[0]), "F0 F1 F2 B0 F3 B1 B2 B3");
        assert_eq!(show(&orders[1]), "F0 F1 B0 F2 B1 F3 B2 B3");
        assert_eq!(show(&orders[2]), "F0 B0 F1 B1 F2 B2 F3 B3");
    }

    #[test]
    fn gpipe_runs_all_forward_passes_first() {
        let (f, b) = chain(2);
        let orders = order(Schedule::GPipe, &[0, 1], 2, 3, &f, &b, true);
        assert_eq!(show(&orders[0]), "F0 F1 F2 B0 B1 B2");
        assert_eq!(show(&orders[1]), "F0 F1 F2 B0 B1 B2");
    }

    #[test]
    fn two_stages_on_one_peer_finish() {
        let (f, b) = chain(4);
        for schedule in [Schedule::GPipe, Schedule::OneFOneB] {
            let orders = order(schedule, &[0, 1, 0, 1], 2, 5, &f, &b, true);
            assert_eq!(orders.iter().map(Vec::len).sum::<usize>(), 40);
        }
    }
}
