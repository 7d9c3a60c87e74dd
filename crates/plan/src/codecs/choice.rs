//! The choice of each link's codec.

use std::collections::BTreeMap;

use fusionllm_compress::{Codec, adatopk};

use super::rule::{Compression, Compressor, LinkCodec};
use super::traffic::Traffic;
use crate::cost::Cluster;
use crate::error::PlanError;
use crate::optimizer::Optimizer;
use crate::program::{PeerId, Program};
use crate::simulate::{SimulateOptions, simulate};

/// The most that `auto` lets a step grow, relative to the strongest codecs on every link, to use less lossy codecs.
pub const SLACK: f64 = 1.005;

/// A directed link: sender and receiver.
type LinkEnds = (PeerId, PeerId);

impl Compression {
    /// Chooses the codec of every link on which `programs` send tensors that may be compressed. Device `i` of
    /// `cluster` runs peer `i`. Links without a codec are left out, and so are those whose codec would make no tensor
    /// smaller.
    ///
    /// # Errors
    ///
    /// The ratio is below 1. Or the rule needs the links' rates, and there is no cluster or no route between two
    /// peers.
    pub fn choose(
        &self,
        programs: &[Program],
        cluster: Option<&Cluster>,
        optimizer: Optimizer,
    ) -> Result<Vec<LinkCodec>, PlanError> {
        if !(self.ratio >= 1.0 && self.ratio.is_finite()) {
            return Err(PlanError::Plan(format!("the compression ratio is {}; it must be at least 1", self.ratio)));
        }
        let traffic = Traffic::new(programs);
        let links: Vec<LinkEnds> = traffic.links.keys().copied().collect();
        let known = || cluster.ok_or(PlanError::UnknownLinks { compression: self.compressor.name() });
        let codecs: Vec<Codec> = match self.compressor {
            Compressor::AdaTopK => {
                let ratios = adatopk(self.ratio, &traffic.seconds(known()?)?);
                ratios.into_iter().map(|r| if r > 1.0 { Compressor::TopK.uniform(r) } else { Codec::None }).collect()
            }
            Compressor::Auto => self.auto(programs, &traffic, known()?, optimizer)?.into_values().collect(),
            name => vec![name.uniform(self.ratio); links.len()],
        };
        let all = links.into_iter().zip(codecs).map(|((from, to), codec)| LinkCodec {
            from,
            to,
            codec: codec.with_stochastic_rounding(self.stochastic_rounding),
        });
        Ok(all.filter(|l| traffic.saves((l.from, l.to), &l.codec)).collect())
    }

    /// Chooses for each link the least lossy codec that keeps the link from slowing the step. It never chooses top-k.
    ///
    /// With the strongest codec on every link, a step is as short as it can be. Codecs are then relaxed for as long as
    /// the step stays within [`SLACK`] of that. First all links are relaxed together: neighbours in a pipeline, and links
    /// behind one uplink, are only as fast as all of them. Then each link is relaxed a level at a time, the fastest link
    /// first. A fast link gets a codec too, where encoding takes less of the processor than sending the bytes it saves.
    fn auto(
        &self,
        programs: &[Program],
        traffic: &Traffic,
        cluster: &Cluster,
        optimizer: Optimizer,
    ) -> Result<BTreeMap<LinkEnds, Codec>, PlanError> {
        let Some(widest) = traffic.widest() else { return Ok(BTreeMap::new()) };
        let ladder = self.ladder(widest);
        let seconds = traffic.seconds(cluster)?;
        let mut order: Vec<(LinkEnds, f64)> = traffic.links.keys().copied().zip(seconds).collect();
        order.sort_by(|a, b| a.1.total_cmp(&b.1));
        let mut trial = Trial { programs: programs.to_vec(), cluster, optimizer, ladder: &ladder };
        let strongest = ladder.len() - 1;
        let mut levels: BTreeMap<LinkEnds, usize> = traffic.links.keys().map(|l| (*l, strongest)).collect();
        let limit = SLACK * trial.step_s(&levels)?;
        let mut common = strongest;
        while common > 0 {
            let milder = levels.keys().map(|l| (*l, common - 1)).collect();
            if trial.step_s(&milder)? > limit {
                break;
            }
            (levels, common) = (milder, common - 1);
        }
        // Each round relaxes a link by one level, so that the first links do not use up the slack of all.
        let mut left: Vec<LinkEnds> = order.into_iter().map(|(link, _)| link).collect();
        while !left.is_empty() {
            let mut more = Vec::new();
            for link in left {
                let Some(level) = levels[&link].checked_sub(1) else { continue };
                let mut milder = levels.clone();
                milder.insert(link, level);
                if trial.step_s(&milder)? <= limit {
                    levels = milder;
                    more.push(link);
                }
            }
            left = more;
        }
        Ok(levels.into_iter().map(|(link, level)| (link, ladder[level])).collect())
    }
}

/// Gives each sender the codecs of its links.
pub(crate) fn assign(programs: &mut [Program], codecs: &[LinkCodec]) {
    for p in programs {
        p.codecs = codecs.iter().filter(|l| l.from == p.peer).map(|l| (l.to, l.codec)).collect();
    }
}

struct Trial<'a> {
    programs: Vec<Program>,
    cluster: &'a Cluster,
    optimizer: Optimizer,
    ladder: &'a [Codec],
}

impl Trial<'_> {
    /// Seconds of a step with these levels of the ladder.
    fn step_s(&mut self, levels: &BTreeMap<LinkEnds, usize>) -> Result<f64, PlanError> {
        let codec = |(&(from, to), &level): (&LinkEnds, &usize)| LinkCodec { from, to, codec: self.ladder[level] };
        let codecs: Vec<LinkCodec> = levels.iter().map(codec).collect();
        assign(&mut self.programs, &codecs);
        Ok(simulate(&self.programs, self.cluster, &SimulateOptions::new(self.optimizer))?.step_s)
    }
}
