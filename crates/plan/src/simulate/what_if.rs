//! The bottleneck of a step, and how much faster the step would be with a faster link or device.

use std::collections::BTreeSet;

use super::{SimulateOptions, Simulation, simulate};
use crate::cost::{Cluster, DirectLink, Link, Place};
use crate::error::PlanError;
use crate::program::{PeerId, Program};

/// One change to a cluster, and the step it would bring.
#[derive(Debug, Clone, PartialEq)]
pub struct WhatIf {
    /// The change.
    pub change: Change,
    /// Seconds from step to step after it.
    pub step_s: f64,
    /// How many times as fast the step would be.
    pub speedup: f64,
}

/// A faster part of a cluster.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Change {
    /// Both directions between two machines.
    Link {
        /// One end.
        from: PeerId,
        /// The other end.
        to: PeerId,
        /// The link now.
        now: Link,
        /// The faster link.
        then: Link,
    },
    /// A site's uplink.
    Uplink {
        /// Index of the site.
        site: u32,
        /// The uplink now.
        now: Link,
        /// The faster uplink.
        then: Link,
    },
    /// A device that computes several times as fast.
    Device {
        /// Its peer.
        peer: PeerId,
        /// How many times as fast.
        times: f64,
    },
}

/// Common rates of links: 10 and 100 Mbps, 1, 10 and 100 Gbps, in bytes/s.
const COMMON_RATES: [f64; 5] = [1.25e6, 12.5e6, 125e6, 1.25e9, 12.5e9];

/// The smallest speed-up that is reported.
const MIN_SPEEDUP: f64 = 1.01;

/// Latencies above this, in seconds, are worth shortening.
const LONG_LATENCY_S: f64 = 1e-3;

/// How many links, uplinks and devices are tried: the busiest of each.
const MAX_LINKS: usize = 3;
const MAX_UPLINKS: usize = 2;
const MAX_DEVICES: usize = 2;

/// The changes that would make the step faster, the largest speed-up first. The first one names the bottleneck. Empty
/// if no single change helps.
///
/// Each change is simulated. The busiest links get the next common rate or a tenth of their latency. The busiest
/// devices compute twice as fast.
///
/// # Errors
///
/// The same as those of [`simulate`].
pub fn what_if(
    programs: &[Program],
    cluster: &Cluster,
    options: &SimulateOptions,
    now: &Simulation,
) -> Result<Vec<WhatIf>, PlanError> {
    let options = SimulateOptions { record: false, ..*options };
    let mut found = Vec::new();
    for change in candidates(cluster, now) {
        let Some(changed) = change.apply(cluster)? else { continue };
        let step_s = simulate(programs, &changed, &options)?.step_s;
        let speedup = now.step_s / step_s;
        if speedup >= MIN_SPEEDUP {
            found.push(WhatIf { change, step_s, speedup });
        }
    }
    found.sort_by(|a, b| b.speedup.total_cmp(&a.speedup));
    Ok(found)
}

fn candidates(cluster: &Cluster, now: &Simulation) -> Vec<Change> {
    let mut changes = Vec::new();
    let mut links: Vec<_> = now.links.iter().filter(|l| l.busy_s > 0.0).collect();
    links.sort_by(|a, b| b.busy_s.total_cmp(&a.busy_s));
    let mut pairs: Vec<(PeerId, PeerId)> = Vec::new();
    for l in links {
        let (from, to) = (cluster.host(l.from), cluster.host(l.to));
        let pair = (from.min(to), from.max(to));
        if pairs.len() == MAX_LINKS || pairs.contains(&pair) {
            continue;
        }
        // The uplinks are tried below.
        if let Some(now) = cluster.route(from, to).and_then(|r| r.direct) {
            pairs.push(pair);
            changes.extend(faster(now).into_iter().map(|then| Change::Link { from, to, now, then }));
        }
    }
    let mut uplinks: Vec<_> = now.uplinks.iter().filter(|u| u.busy_s > 0.0).collect();
    uplinks.sort_by(|a, b| b.busy_s.total_cmp(&a.busy_s));
    let mut seen = BTreeSet::new();
    let sites = uplinks.iter().map(|u| u.id.site).filter(|s| seen.insert(*s));
    for site in sites.take(MAX_UPLINKS) {
        if let Some(now) = cluster.sites()[site as usize].uplink {
            changes.extend(faster(now).into_iter().map(|then| Change::Uplink { site, now, then }));
        }
    }
    let mut peers: Vec<(PeerId, f64)> = (0..).map(PeerId).zip(now.peers.iter().map(|p| p.compute_s)).collect();
    peers.sort_by(|a, b| b.1.total_cmp(&a.1));
    changes.extend(peers.into_iter().take(MAX_DEVICES).map(|(peer, _)| Change::Device { peer, times: 2.0 }));
    changes
}

/// The link at the next common rate, and with a tenth of its latency.
fn faster(link: Link) -> Vec<Link> {
    let rate = COMMON_RATES.into_iter().find(|r| *r >= 2.0 * link.bandwidth);
    let latency = (link.latency > LONG_LATENCY_S).then_some(link.latency / 10.0);
    let with_rate = rate.map(|bandwidth| Link { bandwidth, ..link });
    with_rate.into_iter().chain(latency.map(|latency| Link { latency, ..link })).collect()
}

impl Change {
    /// The changed cluster, if it has the changed part.
    fn apply(&self, cluster: &Cluster) -> Result<Option<Cluster>, PlanError> {
        let (mut devices, mut sites) = (cluster.devices().to_vec(), cluster.sites().to_vec());
        let mut direct = cluster.direct_links().to_vec();
        match *self {
            Self::Link { from, to, then, .. } => {
                let place = |p: PeerId| if p == PeerId::BROKER { Place::Broker } else { Place::Device(p.0) };
                for (a, b) in [(from, to), (to, from)] {
                    let Some(route) = cluster.route(a, b) else { continue };
                    let (a, b) = (place(a), place(b));
                    direct.retain(|l| (l.from, l.to) != (a, b));
                    // The link back may already be better.
                    let link = route.direct.map_or(then, |l| Link {
                        latency: l.latency.min(then.latency),
                        bandwidth: l.bandwidth.max(then.bandwidth),
                    });
                    direct.push(DirectLink { from: a, to: b, link });
                }
            }
            Self::Uplink { site, then, .. } => match sites.get_mut(site as usize) {
                Some(site) => {
                    // If the site has a downlink of its own, the change never makes it worse.
                    site.downlink = site.downlink.map(|l| if l.bandwidth > then.bandwidth { l } else { then });
                    site.uplink = Some(then);
                }
                None => return Ok(None),
            },
            Self::Device { peer, times } => match devices.get_mut(peer.0 as usize) {
                Some(device) => device.speed_up(times),
                None => return Ok(None),
            },
        }
        Cluster::new(devices, sites, direct, Some(cluster.broker())).map(Some)
    }
}
