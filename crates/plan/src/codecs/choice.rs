//! The choice of each link's codec.

use std::collections::BTreeMap;

use fusionllm_compress::{Bits, Codec, TopK, ValueFormat, adatopk};
use fusionllm_program::{Optimizer, PeerId, Program};

use super::rule::{Compression, Compressor, LinkCodec};
use super::traffic::Traffic;
use crate::cost::Cluster;
use crate::error::PlanError;
use crate::simulate::{SimulateOptions, Simulator};

/// The most that rules which know the links let a step grow, relative to the shortest one, to use less lossy codecs.
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
        let simulator = |cluster| Simulator::new(programs, cluster, &SimulateOptions::new(optimizer));
        let mut simulator = cluster.filter(|_| self.looks_for_need()).map(simulator).transpose()?;
        self.choose_with(&mut programs.to_vec(), cluster, simulator.as_mut())
    }

    /// See [`Self::choose`]. `simulator` is that of the programs, on the cluster. Both are left with any codecs.
    pub(crate) fn choose_with(
        &self,
        programs: &mut [Program],
        cluster: Option<&Cluster>,
        simulator: Option<&mut Simulator<'_>>,
    ) -> Result<Vec<LinkCodec>, PlanError> {
        if !(self.ratio >= 1.0 && self.ratio.is_finite()) {
            return Err(PlanError::Plan(format!("the compression ratio is {}; it must be at least 1", self.ratio)));
        }
        let traffic = Traffic::new(programs);
        let links: Vec<LinkEnds> = traffic.links.keys().copied().collect();
        let unknown = || PlanError::UnknownLinks { compression: self.compressor.name() };
        let codecs: BTreeMap<LinkEnds, Codec> = match self.compressor {
            Compressor::AdaTopK | Compressor::Auto => {
                let (cluster, simulator) = cluster.zip(simulator).ok_or_else(unknown)?;
                let ladders = self.ladders(&traffic);
                Trial { programs, cluster, simulator, ladders }.mildest(&traffic)?
            }
            Compressor::AdaTopKPublished => {
                let ratios = adatopk(self.ratio, &traffic.seconds(cluster.ok_or_else(unknown)?)?);
                let int8 = Some(ValueFormat::Int(Bits::Eight));
                let top_k = |(link, ratio)| (link, Codec::TopK(TopK { ratio, values: int8 }));
                links.into_iter().zip(ratios).filter(|(_, ratio)| *ratio > 1.0).map(top_k).collect()
            }
            name => links.into_iter().map(|link| (link, name.uniform(self.ratio))).collect(),
        };
        let all = codecs.into_iter().map(|((from, to), codec)| LinkCodec {
            from,
            to,
            codec: codec.with_stochastic_rounding(self.stochastic_rounding),
        });
        Ok(all.filter(|l| traffic.saves((l.from, l.to), &l.codec)).collect())
    }

    /// The shortest step, in seconds, that a rule which knows the links can reach with one codec for all of them.
    /// `simulator` is that of the programs, on the cluster. The programs are left with any codecs.
    pub(crate) fn shortest_step_s(
        &self,
        programs: &mut [Program],
        cluster: &Cluster,
        mut simulator: Simulator<'_>,
    ) -> Result<f64, PlanError> {
        let ladders = self.ladders(&Traffic::new(programs));
        let steps = Trial { programs, cluster, simulator: &mut simulator, ladders }.common_steps()?;
        Ok(steps.into_iter().fold(f64::INFINITY, f64::min))
    }

    /// By link: the codecs to choose from.
    fn ladders(&self, traffic: &Traffic) -> BTreeMap<LinkEnds, Vec<Codec>> {
        let ladder = traffic.widest().map_or_else(|| vec![Codec::None], |widest| self.ladder(widest));
        traffic.links.keys().map(|link| (*link, ladder.clone())).collect()
    }
}

/// Gives each sender the codecs of its links.
pub(crate) fn assign(programs: &mut [Program], codecs: &[LinkCodec]) {
    for p in programs {
        p.codecs = codecs.iter().filter(|l| l.from == p.peer).map(|l| (l.to, l.codec)).collect();
    }
}

struct Trial<'a, 's> {
    programs: &'a mut [Program],
    cluster: &'a Cluster,
    simulator: &'a mut Simulator<'s>,
    /// By link: the codecs to choose from, the least lossy first. The first is none.
    ladders: BTreeMap<LinkEnds, Vec<Codec>>,
}

/// Links that get the same codec.
type Group = Vec<LinkEnds>;

/// Most groups. With fewer links, each is a group of its own.
const MAX_GROUPS: usize = 64;

/// Groups of links that are busy for similar times, in the order of these. The links are sorted by them.
fn groups(links: &[(LinkEnds, f64)]) -> Vec<Group> {
    if links.len() <= MAX_GROUPS {
        return links.iter().map(|(link, _)| vec![*link]).collect();
    }
    let mut similar: f64 = 1.01;
    loop {
        let magnitude = |seconds: f64| (seconds.max(f64::MIN_POSITIVE).ln() / similar.ln()).floor();
        let like = links.chunk_by(|a, b| magnitude(a.1) == magnitude(b.1));
        if like.clone().count() <= MAX_GROUPS {
            return like.map(|group| group.iter().map(|(link, _)| *link).collect()).collect();
        }
        similar *= similar;
    }
}

/// By link: the place of its codec on the ladder.
type Levels = BTreeMap<LinkEnds, usize>;

impl Trial<'_, '_> {
    /// For each link the least lossy codec of its ladder that keeps the link from slowing the step. So the step is no
    /// longer than without codecs.
    ///
    /// All links first get the same level, since neighbours in a pipeline, and links behind one uplink, are only as fast
    /// as all of them. The shortest of these steps sets the limit: [`SLACK`] times as long. It need not be the one with
    /// the strongest codecs, because encoding takes time. From the least lossy level within the limit, links are then
    /// relaxed, the fastest first. A fast link gets a codec too, where encoding takes less of the processor than sending
    /// the bytes it saves.
    fn mildest(mut self, traffic: &Traffic) -> Result<BTreeMap<LinkEnds, Codec>, PlanError> {
        let steps = self.common_steps()?;
        let limit = SLACK * steps.iter().copied().fold(f64::INFINITY, f64::min);
        let mut levels = self.common(steps.iter().position(|step| *step <= limit).unwrap_or(0));
        let mut fastest: Vec<(LinkEnds, f64)> =
            self.ladders.keys().copied().zip(traffic.seconds(self.cluster)?).collect();
        fastest.sort_by(|a, b| a.1.total_cmp(&b.1));
        // Each round relaxes a link by one level, so that the first links do not use up the slack of all.
        let mut left = groups(&fastest);
        while !left.is_empty() {
            left.retain(|group| group.iter().any(|link| levels[link] > 0));
            left = self.relax(&left, &mut levels, limit)?;
        }
        let chosen = levels.into_iter().filter_map(|(link, level)| Some((link, *self.ladders[&link].get(level)?)));
        Ok(chosen.collect())
    }

    /// The same level for all links, as far as their ladders go.
    fn common(&self, level: usize) -> Levels {
        self.ladders.iter().map(|(link, ladder)| (*link, level.min(ladder.len().saturating_sub(1)))).collect()
    }

    /// By level: seconds of a step if all links have it. There is always one.
    fn common_steps(&mut self) -> Result<Vec<f64>, PlanError> {
        let levels = self.ladders.values().map(Vec::len).max().unwrap_or(0).max(1);
        (0..levels).map(|level| self.step_s(&self.common(level))).collect()
    }

    /// Relaxes groups of links by a level, where the step stays within the limit. Returns these groups. If all of them
    /// together slow the step, each half is tried, and so on: most links of a plan are alike.
    fn relax(&mut self, links: &[Group], levels: &mut Levels, limit: f64) -> Result<Vec<Group>, PlanError> {
        if links.is_empty() {
            return Ok(Vec::new());
        }
        let mut milder = levels.clone();
        for link in links.iter().flatten() {
            milder.entry(*link).and_modify(|level| *level = level.saturating_sub(1));
        }
        if self.step_s(&milder)? <= limit {
            *levels = milder;
            return Ok(links.to_vec());
        }
        if links.len() == 1 {
            return Ok(Vec::new());
        }
        let (first, second) = links.split_at(links.len() / 2);
        let mut relaxed = self.relax(first, levels, limit)?;
        relaxed.extend(self.relax(second, levels, limit)?);
        Ok(relaxed)
    }

    /// Seconds of a step with these codecs.
    fn step_s(&mut self, levels: &Levels) -> Result<f64, PlanError> {
        let codec = |(&(from, to), &level): (&LinkEnds, &usize)| {
            Some(LinkCodec { from, to, codec: *self.ladders[&(from, to)].get(level)? })
        };
        let codecs: Vec<LinkCodec> = levels.iter().filter_map(codec).collect();
        assign(self.programs, &codecs);
        self.simulator.set_codecs(self.programs)?;
        Ok(self.simulator.run(false)?.step_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_links_are_few_groups_of_like_ones() {
        let links = |n: u32| -> Vec<(LinkEnds, f64)> {
            (0..n).map(|i| ((PeerId(i), PeerId(i + 1)), 1e-3 * 1.02f64.powi(i as i32))).collect()
        };
        assert_eq!(groups(&links(40)).len(), 40, "few links are apart");
        assert!(groups(&[]).is_empty());
        let groups = groups(&links(500));
        assert!((20..=MAX_GROUPS).contains(&groups.len()), "{}", groups.len());
        assert!(groups.iter().all(|group| 1.02f64.powi(group.len() as i32) < 2.0), "{groups:?}");
        assert_eq!(groups.concat(), links(500).into_iter().map(|(link, _)| link).collect::<Vec<_>>(), "in order");
    }
}
