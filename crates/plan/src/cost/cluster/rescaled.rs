//! A cluster whose links are faster or slower than declared.

use std::collections::BTreeMap;

use fusionllm_program::PeerId;

use super::{Cluster, DirectLink, Line, Link, Place};
use crate::cost::Card;
use crate::error::PlanError;

impl Cluster {
    /// The cluster with the bandwidth of each connection multiplied by a factor.
    ///
    /// A line that several connections share gets the largest of their factors. A connection with a smaller factor is
    /// slower by itself. A network card becomes faster if a connection needs it, and never slower.
    ///
    /// # Errors
    ///
    /// A factor is not above zero.
    pub fn rescaled(&self, factors: &BTreeMap<(PeerId, PeerId), f64>) -> Result<Self, PlanError> {
        let mut of_site: BTreeMap<u32, f64> = BTreeMap::new();
        let mut of_link: BTreeMap<(Place, Place), f64> = BTreeMap::new();
        let largest = |known: &mut f64, factor: f64| *known = known.max(factor);
        for (&(from, to), &factor) in factors {
            for (line, _) in self.route(from, to).iter().flat_map(|r| r.lines()) {
                match line {
                    Line::Uplink { site, .. } => largest(of_site.entry(site).or_insert(factor), factor),
                    Line::Link { from, to } => largest(of_link.entry((from, to)).or_insert(factor), factor),
                    Line::Card { .. } => {}
                }
            }
        }
        let mut sites = self.sites.clone();
        for (i, site) in (0..).zip(&mut sites) {
            let Some(factor) = of_site.get(&i) else { continue };
            for link in [&mut site.uplink, &mut site.downlink].into_iter().flatten() {
                link.bandwidth *= factor;
            }
        }
        let mut direct = self.direct.clone();
        for l in &mut direct {
            l.link.bandwidth *= of_link.get(&(l.from, l.to)).unwrap_or(&1.0);
        }
        let shared = self.changed(self.devices.clone(), sites.clone(), direct.clone())?;
        let mut needed: BTreeMap<PeerId, Card> = BTreeMap::new();
        for (&(from, to), &factor) in factors {
            let (Some(now), Some(then)) = (self.route(from, to), shared.route(from, to)) else { continue };
            let bandwidth = factor * now.link().bandwidth;
            if bandwidth.is_infinite() {
                continue;
            }
            let ends = [
                (from, Card { outward: Some(bandwidth), inward: None }),
                (to, Card { outward: None, inward: Some(bandwidth) }),
            ];
            for (end, card) in ends {
                let known = needed.entry(end).or_default();
                *known = known.faster(card);
            }
            let without_cards = then.lines().filter(|(line, _)| !matches!(line, Line::Card { .. }));
            let rate = without_cards.map(|(_, link)| link.bandwidth).fold(f64::INFINITY, f64::min);
            let right = |rate: f64| (rate - bandwidth).abs() <= 1e-9 * bandwidth;
            if !right(rate) && !right(then.link().bandwidth) {
                let ends = (Place::Device(from.0), Place::Device(to.0));
                let is_link = |(line, link): (Line, Link)| matches!(line, Line::Link { .. }).then_some(link.latency);
                let link = Link { latency: now.lines().find_map(is_link).unwrap_or(0.0), bandwidth };
                direct.retain(|l| (l.from, l.to) != ends);
                direct.push(DirectLink { from: ends.0, to: ends.1, link });
            }
        }
        let cluster = self.changed(self.devices.clone(), sites, direct)?;
        // All devices of a host have its card.
        let card = |peer: PeerId| {
            let peers = self.host_of(peer).into_iter().flat_map(|host| self.devices_of(host));
            peers.filter_map(|p| needed.get(&p)).fold(self.card(peer), |card, needed| card.faster(*needed))
        };
        Ok(cluster.with_cards(card, self.card(PeerId::BROKER)))
    }
}
