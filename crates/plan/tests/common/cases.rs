//! Random planning problems in the published ranges: links from 8 Mbps to 10 Gbps, devices whose speeds differ up to
//! tenfold. Every other problem is tight in memory.

use fusionllm_graph::ChoiceRng;
use fusionllm_plan::search::{Chain, Input, LinkCost, Machines, Message, Problem, Seconds, Tie, TieUser, Unit};

/// Problem number `seed`, with at most this many units and positions for cuts.
pub(crate) fn case(seed: u64, most_units: usize, most_cuts: usize) -> Problem {
    let mut d = ChoiceRng::new(seed);
    // Problems whose ends share a parameter are harder to solve exactly, so they are smaller.
    let tied = d.between(0, 3) == 0;
    let units = d.between(2, if tied { most_units.min(6) } else { most_units });
    let atoms = d.between(units.max(4), if tied { most_cuts.min(20) } else { most_cuts }) + 1;
    let prefix = |values: &[f64]| {
        let mut sum = 0.0;
        std::iter::once(0.0).chain(values.iter().map(|v| (sum += v, sum).1)).collect::<Vec<f64>>()
    };

    // Work in seconds of a device of speed 1. The work of a step is between a tenth and ten times its transfers.
    let work: Vec<f64> = (0..atoms).map(|_| d.log_uniform(0.2, 5.0)).collect();
    let scale = d.log_uniform(0.03, 3.0) / work.iter().sum::<f64>();
    let forward: Vec<f64> = work.iter().map(|w| w * scale).collect();
    let backward: Vec<f64> = forward.iter().map(|f| f * 2.0).collect();
    let parameters: Vec<f64> = (0..atoms).map(|_| d.log_uniform(1e6, 4e7)).collect();
    let update: Vec<f64> = parameters.iter().map(|p| p * 7.0 / 3e10).collect();
    let typical = d.log_uniform(1e5, 1e7);
    let mut messages = Vec::new();
    let mut across = vec![0.0; atoms + 1];
    for a in 1..atoms as u32 {
        let bytes = typical * d.log_uniform(0.25, 4.0);
        across[a as usize] = bytes;
        messages.push(Message { maker: a - 1, users: vec![a], bytes });
        messages.push(Message { maker: a, users: vec![a - 1], bytes });
    }
    // Residual values that skip atoms.
    for _ in 0..d.between(0, atoms / 4) {
        let from = d.between(0, atoms - 2) as u32;
        let to = (from + d.between(1, 4) as u32).min(atoms as u32 - 1);
        let bytes = typical * d.log_uniform(0.1, 1.0);
        messages.push(Message { maker: from, users: vec![to], bytes });
        messages.push(Message { maker: to, users: vec![from], bytes });
    }
    let kept: Vec<f64> = (0..atoms).map(|_| typical * d.log_uniform(1.0, 6.0)).collect();
    let ties = if tied {
        vec![Tie {
            users: [0, atoms as u32 - 1].map(|atom| TieUser { atom, parts: 1 }).to_vec(),
            bytes: d.log_uniform(1e6, 1e8),
        }]
    } else {
        Vec::new()
    };
    let mut state: Vec<f64> = parameters.iter().map(|p| p * 4.0).collect();
    for user in ties.iter().flat_map(|t| &t.users) {
        state[user.atom as usize] += 2.0 * ties[0].bytes;
    }

    let speeds: Vec<f64> = (0..units).map(|_| d.log_uniform(0.3, 3.0)).collect();
    let seconds = speeds.iter().map(|s| {
        let at = |v: &[f64]| prefix(&v.iter().map(|x| x / s).collect::<Vec<_>>());
        Seconds { forward: at(&forward), backward: at(&backward), weight: at(&forward), update: at(&update) }
    });
    let micro_batches = 1 << d.between(1, 5);
    let tight = d.between(0, 1) == 0;
    let need = state.iter().sum::<f64>() + kept.iter().sum::<f64>() * (micro_batches as f64).min(units as f64 / 2.0);
    let units: Vec<Unit> = (0..units as u32)
        .map(|u| {
            let memory = if tight { need / units as f64 * d.log_uniform(0.8, 4.0) } else { need * 100.0 };
            Unit {
                members: vec![u],
                class: u,
                memory,
                inside: LinkCost::NONE,
                exchange: LinkCost::NONE,
                processors: Vec::new(),
                offload: None,
            }
        })
        .collect();
    let mut links = Vec::new();
    for a in 0..=units.len() {
        for b in 0..=units.len() {
            // Links are drawn below the diagonal and are equal in both directions. The broker's are among them.
            let link = match a.cmp(&b) {
                std::cmp::Ordering::Equal => LinkCost::NONE,
                std::cmp::Ordering::Greater => LinkCost::new(d.log_uniform(1e-4, 0.1), 8.0 / d.log_uniform(8e6, 1e10)),
                std::cmp::Ordering::Less => LinkCost::NONE,
            };
            links.push(link);
        }
    }
    let width = units.len() + 1;
    for a in 0..width {
        for b in a + 1..width {
            links[a * width + b] = links[b * width + a];
        }
    }
    let chain = Chain {
        atoms,
        seconds: seconds.collect(),
        state: prefix(&state),
        parameters: prefix(&parameters),
        kept: prefix(&kept),
        kept_across: across,
        working: vec![typical; atoms],
        handed_on: vec![0.0; atoms + 1],
        messages,
        ties,
        inputs: vec![
            Input { atoms: vec![0], bytes: typical * 0.01 },
            Input { atoms: vec![atoms as u32 - 1], bytes: 8.0 },
        ],
    };
    let machines = Machines { units, links, lines: Vec::new(), line_count: 0, processor_count: 0 };
    Problem::new(chain, machines, micro_batches)
}
