//! Codecs chosen link by link, by running the step on the virtual clock.

use std::collections::BTreeMap;

use fusionllm_compress::{Bits, Codec, IntBlocks};

use crate::compression::{LARGE, Traffic};
use crate::{Cluster, Conditions, Optimizer, PeerId, PlanError, Program, simulate};

/// How much longer than with the strongest codecs everywhere a step may take for the sake of milder ones.
pub(crate) const SLACK: f64 = 1.005;

/// From the mildest to the strongest. No top-k: a GPT-2 of 10 million parameters whose activations crossed three links at 10x was at a validation loss of 3.36
/// when without codecs it was at 2.45 (150 steps, `scripts/compression.py convergence`). With shared masks it does far less harm, though more than four bits do. Who wants it names it.
const LADDER: [Codec; 4] = [
    Codec::None,
    Codec::Bf16,
    Codec::Int(IntBlocks { bits: Bits::Eight, rotate: false, stochastic: false }),
    Codec::Int(IntBlocks { bits: Bits::Four, rotate: true, stochastic: false }),
];

/// The codec of every link: the mildest with which the link is not what the step waits for.
///
/// With the strongest codecs everywhere a step takes as little time as it can. Then codecs are relaxed for as long as the step stays within [`SLACK`] of that: first all links
/// together, as neighbours in a pipeline, and links behind one uplink, are only as fast as all of them; then link by link, the fastest first, a level each in turn. Fast links get
/// codecs too where encoding takes less of a processor than the bytes it saves ([`TRAFFIC`](crate::TRAFFIC)).
pub(crate) fn choose(
    programs: &[Program],
    traffic: &Traffic,
    cluster: &Cluster,
    optimizer: Optimizer,
    ratio: f64,
) -> Result<BTreeMap<(PeerId, PeerId), Codec>, PlanError> {
    let ladder: Vec<Codec> = LADDER.into_iter().filter(|c| c.ratio(LARGE) <= ratio).collect();
    let seconds = traffic.seconds(cluster)?;
    let mut order: Vec<((PeerId, PeerId), f64)> = traffic.links.keys().copied().zip(seconds).collect();
    order.sort_by(|a, b| a.1.total_cmp(&b.1));
    let mut trial = Trial { programs: programs.to_vec(), cluster, optimizer };
    let strongest = ladder.len() - 1;
    let mut levels: BTreeMap<(PeerId, PeerId), usize> = traffic.links.keys().map(|l| (*l, strongest)).collect();
    let limit = SLACK * trial.step_s(&levels, &ladder)?;
    let mut common = strongest;
    while common > 0 {
        let milder = levels.keys().map(|l| (*l, common - 1)).collect();
        if trial.step_s(&milder, &ladder)? > limit {
            break;
        }
        (levels, common) = (milder, common - 1);
    }
    // A level each time round: the first links are not to use up what all have.
    let mut left: Vec<(PeerId, PeerId)> = order.into_iter().map(|(link, _)| link).collect();
    while !left.is_empty() {
        let mut more = Vec::new();
        for link in left {
            let Some(level) = levels[&link].checked_sub(1) else { continue };
            let mut milder = levels.clone();
            milder.insert(link, level);
            if trial.step_s(&milder, &ladder)? <= limit {
                levels = milder;
                more.push(link);
            }
        }
        left = more;
    }
    Ok(levels.into_iter().map(|(link, level)| (link, ladder[level])).collect())
}

struct Trial<'a> {
    programs: Vec<Program>,
    cluster: &'a Cluster,
    optimizer: Optimizer,
}

impl Trial<'_> {
    /// Seconds of a step with these codecs.
    fn step_s(&mut self, levels: &BTreeMap<(PeerId, PeerId), usize>, ladder: &[Codec]) -> Result<f64, PlanError> {
        for p in &mut self.programs {
            p.codecs =
                levels.iter().filter(|((from, _), _)| *from == p.peer).map(|((_, to), l)| (*to, ladder[*l])).collect();
        }
        let conditions = Conditions { optimizer: self.optimizer, record: false };
        Ok(simulate(&self.programs, self.cluster, &conditions)?.step_s)
    }
}
