//! Orders in which a pipeline may pass through machines: group by group, over the cheapest links.

use super::communities::communities;
use super::problem::{MAX_THOROUGH_UNITS, Problem};

/// Into how many parts the path over all groups is divided, to try beginnings and ends of it.
const MAX_PARTS: usize = 8;

/// Orders of units to cut the chain for, the most promising first. An order may leave units out, and has none of them
/// twice.
pub(super) fn orders(problem: &Problem) -> Vec<Vec<u32>> {
    let n = problem.machines.units.len();
    let bytes = typical_message_bytes(problem);
    let seconds = |a: usize, b: usize| {
        let m = &problem.machines;
        let there_and_back = m.link(a, b).seconds(bytes) + m.link(b, a).seconds(bytes);
        if there_and_back.is_finite() { there_and_back } else { f64::MAX / 1e12 }
    };
    let groups = grouped(n, seconds);
    let mut orders: Vec<Vec<u32>> = Vec::new();
    let mut add = |order: Vec<u32>| {
        if !order.is_empty() && !orders.contains(&order) {
            orders.push(order);
        }
    };
    let whole = join(&groups, seconds);
    add(whole.concat());
    add(whole.iter().rev().flat_map(|g| g.iter().rev().copied()).collect());
    // Neighbouring groups without the others: machines behind slow links may only slow the step.
    // If there are many groups, only some beginnings and ends of the path are tried.
    let stride = whole.len().div_ceil(MAX_PARTS);
    for first in (0..whole.len()).step_by(stride) {
        for last in (first..whole.len()).rev().step_by(stride) {
            let some = whole.len() <= 3 || first == 0 || last + 1 == whole.len();
            if some && last - first + 1 < whole.len() {
                add(whole[first..=last].concat());
                add(whole[first..=last].iter().rev().flat_map(|g| g.iter().rev().copied()).collect());
            }
        }
    }
    if n > MAX_THOROUGH_UNITS {
        return orders;
    }
    add((0..n as u32).collect());
    add((0..n as u32).rev().collect());
    let atoms = problem.chain.atoms;
    let mut by_speed: Vec<u32> = (0..n as u32).collect();
    by_speed.sort_by(|a, b| {
        let whole = |u: &u32| problem.compute(*u as usize, 0, atoms).iter().sum::<f64>();
        whole(a).total_cmp(&whole(b))
    });
    add(by_speed);
    let mut by_memory: Vec<u32> = (0..n as u32).collect();
    by_memory.sort_by(|a, b| {
        let memory = |u: &u32| problem.machines.units[*u as usize].memory;
        memory(b).total_cmp(&memory(a))
    });
    add(by_memory);
    orders
}

/// The median size of the messages at a cut, in bytes.
pub(crate) fn typical_message_bytes(problem: &Problem) -> f64 {
    let mut sizes: Vec<f64> = problem.across.iter().map(|[down, _]| *down).filter(|b| *b > 0.0).collect();
    sizes.sort_by(f64::total_cmp);
    sizes.get(sizes.len() / 2).copied().unwrap_or(1.0)
}

/// Units by community of the graph of throughputs, each community in the order of a short path.
pub(super) fn grouped(n: usize, seconds: impl Fn(usize, usize) -> f64) -> Vec<Vec<u32>> {
    let label = communities(n, |a, b| 1.0 / seconds(a, b).max(1e-12));
    let count = label.iter().max().map_or(0, |m| m + 1);
    (0..count)
        .map(|c| {
            let members: Vec<u32> = (0..n as u32).filter(|u| label[*u as usize] == c).collect();
            let path = shortest_path(members.len(), |a, b| seconds(members[a] as usize, members[b] as usize));
            path.into_iter().map(|i| members[i]).collect()
        })
        .collect()
}

/// Groups in the order of a short path over them, each ordered so that neighbours' ends meet.
fn join(groups: &[Vec<u32>], seconds: impl Fn(usize, usize) -> f64) -> Vec<Vec<u32>> {
    let nearest = |a: &[u32], b: &[u32]| {
        a.iter().flat_map(|x| b.iter().map(|y| seconds(*x as usize, *y as usize))).fold(f64::INFINITY, f64::min)
    };
    let path = shortest_path(groups.len(), |a, b| nearest(&groups[a], &groups[b]));
    let mut joined: Vec<Vec<u32>> = Vec::with_capacity(groups.len());
    for (i, &g) in path.iter().enumerate() {
        let mut group = groups[g].clone();
        if let Some(end) = joined.last().and_then(|before| before.last()).copied() {
            // The member nearest to the previous group comes first.
            let distance = |u: &u32| seconds(end as usize, *u as usize);
            let entry =
                (0..group.len()).min_by(|a, b| distance(&group[*a]).total_cmp(&distance(&group[*b]))).unwrap_or(0);
            let first = group[entry];
            if 2 * entry >= group.len() {
                group.reverse();
            }
            group.retain(|u| *u != first);
            group.insert(0, first);
        }
        if let Some(next) = path.get(i + 1).map(|n| &groups[*n]) {
            let from = usize::from(i > 0 && group.len() > 1);
            let exit = (from..group.len()).min_by(|a, b| {
                let distance = |u: u32| nearest(&[u], next);
                distance(group[*a]).total_cmp(&distance(group[*b])).then(b.cmp(a))
            });
            if let Some(exit) = exit {
                let last = group.remove(exit);
                group.push(last);
            }
        }
        joined.push(group);
    }
    joined
}

/// A short path through all of `n` places. It is exact for up to nine (Held and Karp, 1962). For more, it is the best
/// of several nearest-neighbour paths, improved by reversing parts (2-opt).
fn shortest_path(n: usize, seconds: impl Fn(usize, usize) -> f64) -> Vec<usize> {
    if n <= 1 {
        return (0..n).collect();
    }
    let mut d = vec![0.0; n * n];
    for a in 0..n {
        for b in 0..n {
            d[a * n + b] = seconds(a, b);
        }
    }
    if n <= 9 { exact_path(n, &d) } else { near_path(n, &d) }
}

fn exact_path(n: usize, d: &[f64]) -> Vec<usize> {
    let sets = 1 << n;
    let mut best = vec![(f64::INFINITY, n); sets * n];
    for a in 0..n {
        best[(1 << a) * n + a].0 = 0.0;
    }
    for set in 1..sets {
        for a in (0..n).filter(|a| set >> a & 1 == 1) {
            let so_far = best[set * n + a].0;
            for b in (0..n).filter(|b| set >> b & 1 == 0) {
                let slot = &mut best[(set | 1 << b) * n + b];
                if so_far + d[a * n + b] < slot.0 {
                    *slot = (so_far + d[a * n + b], a);
                }
            }
        }
    }
    let mut set = sets - 1;
    let mut at = (0..n).min_by(|a, b| best[set * n + a].0.total_cmp(&best[set * n + b].0)).unwrap_or(0);
    let mut path = vec![at];
    while path.len() < n {
        let before = best[set * n + at].1;
        set &= !(1 << at);
        at = before;
        path.push(at);
    }
    path
}

fn near_path(n: usize, d: &[f64]) -> Vec<usize> {
    let length = |p: &[usize]| p.windows(2).map(|w| d[w[0] * n + w[1]]).sum::<f64>();
    let starts = (0..n).step_by(n.div_ceil(16));
    let paths = starts.map(|start| {
        let mut path = vec![start];
        let mut left: Vec<usize> = (0..n).filter(|a| *a != start).collect();
        let mut at = start;
        while let Some(i) = (0..left.len()).min_by(|i, j| d[at * n + left[*i]].total_cmp(&d[at * n + left[*j]])) {
            at = left.remove(i);
            path.push(at);
        }
        path
    });
    let mut path = paths.min_by(|a, b| length(a).total_cmp(&length(b))).unwrap_or_default();
    // Reversing path[i..=j] changes only the edges at its two ends, since `d` is symmetric.
    let edge = |a: Option<&usize>, b: Option<&usize>| a.zip(b).map_or(0.0, |(a, b)| d[a * n + b]);
    for _ in 0..20 {
        let mut gained = false;
        for i in 0..n - 1 {
            for j in i + 1..n {
                let (before, after) = (i.checked_sub(1).and_then(|k| path.get(k)), path.get(j + 1));
                let now = edge(before, path.get(i)) + edge(path.get(j), after);
                let then = edge(before, path.get(j)) + edge(path.get(i), after);
                if then < now * (1.0 - 1e-9) {
                    path[i..=j].reverse();
                    gained = true;
                }
            }
        }
        if !gained {
            break;
        }
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_on_a_line_are_visited_from_end_to_end() {
        for n in [2, 7, 9, 10, 40] {
            // Machine i is at place[i] on a line, so the shortest path has n - 1 unit steps.
            let place: Vec<usize> = (0..n).map(|i| i * 7 % n).collect();
            if n % 7 == 0 {
                continue;
            }
            let path = shortest_path(n, |a, b| place[a].abs_diff(place[b]) as f64);
            let length: usize = path.windows(2).map(|w| place[w[0]].abs_diff(place[w[1]])).sum();
            assert_eq!(length, n - 1, "{n}: {path:?}");
        }
    }
}
