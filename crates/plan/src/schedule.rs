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
    let mut forward_done = vec![0u32; stages];
    let mut backward_done = vec![0u32; stages];
    let mut orders = vec![Vec::new(); peers];
    let total = stages * micro_batches as usize * if with_backward { 2 } else { 1 };
    let mut count = 0;
    while count < total {
        let (forward_before, backward_before) = (forward_done.clone(), backward_done.clone());
        let ready_forward = |s: usize, done: &[u32]| {
            let m = done[s];
            m < micro_batches && forward_deps[s].iter().all(|&d| forward_before[d as usize] > m)
        };
        let ready_backward = |s: usize, done: &[u32]| {
            let m = done[s];
            with_backward
                && m < forward_before[s]
                && backward_deps[s].iter().all(|&d| backward_before[d as usize] > m)
                && (schedule != Schedule::GPipe || forward_before[s] == micro_batches)
        };
        let mut progressed = false;
        for (peer, order) in orders.iter_mut().enumerate() {
            let mine = || (0..stages).filter(|&s| peer_of_stage[s] as usize == peer);
            // Of several stages that could go forward, the earlier micro-batch first, then the later stage: it is nearer to its backward pass.
            let forward = mine()
                .filter(|&s| ready_forward(s, &forward_done))
                .filter(|&s| {
                    // A stage needs no more under way than there are stages from it to the last.
                    !with_backward
                        || schedule == Schedule::GPipe
                        || ((forward_done[s] - backward_done[s]) as usize) < stages - s
                })
                .min_by_key(|&s| (forward_done[s], std::cmp::Reverse(s)));
            let backward = mine()
                .filter(|&s| ready_backward(s, &backward_done))
                .min_by_key(|&s| (backward_done[s], std::cmp::Reverse(s)));
            let task = match (forward, backward) {
                (_, Some(s)) => {
                    backward_done[s] += 1;
                    Task { kind: TaskKind::Backward, stage: s as u32, micro_batch: backward_done[s] - 1 }
                }
                (Some(s), None) => {
                    forward_done[s] += 1;
                    Task { kind: TaskKind::Forward, stage: s as u32, micro_batch: forward_done[s] - 1 }
                }
                (None, None) => continue,
            };
            order.push(task);
            count += 1;
            progressed = true;
        }
        // Dependencies run to later stages forward and to earlier ones backward, so some task is always ready.
        debug_assert!(progressed, "the schedule stalled");
        if !progressed {
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
