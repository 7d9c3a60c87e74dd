//! What limits a step, and how much faster it would be otherwise.

use crate::{Cluster, Conditions, Device, Line, Link, PeerId, Place, PlanError, Program, Simulation, Site, simulate};

/// One change to a cluster, and the step time it would bring.
#[derive(Debug, Clone, PartialEq)]
pub struct WhatIf {
    /// The change.
    pub change: Change,
    /// Seconds from step to step after it.
    pub step_s: f64,
    /// How many times as fast that is.
    pub speedup: f64,
}

/// Something that could be better.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Change {
    /// Both directions between two machines, from `now` to a faster link.
    Link {
        /// One end.
        from: PeerId,
        /// The other.
        to: PeerId,
        /// The way as it is.
        now: Link,
        /// As it would be.
        then: Link,
    },
    /// A site's uplink.
    Uplink {
        /// Index of the site.
        site: u32,
        /// As it is.
        now: Link,
        /// As it would be.
        then: Link,
    },
    /// A device that computes so many times as fast.
    Device {
        /// Its peer.
        peer: PeerId,
        /// How many times.
        times: f64,
    },
}

/// Rates that people buy: 10 and 100 Mbps, 1, 10 and 100 Gbps.
const RATES: [f64; 5] = [1.25e6, 12.5e6, 125e6, 1.25e9, 12.5e9];

/// A change that brings less than this is none.
const LEAST: f64 = 1.01;

/// What would make the step faster, the most first: tried by simulating it with the busiest links at the next of the usual rates or with a tenth of their
/// latency, and with the busiest devices twice as fast. The first names the bottleneck; none where nothing alone helps.
///
/// # Errors
///
/// As [`simulate`].
pub fn what_if(
    programs: &[Program],
    cluster: &Cluster,
    conditions: &Conditions,
    now: &Simulation,
) -> Result<Vec<WhatIf>, PlanError> {
    let conditions = Conditions { record: false, ..*conditions };
    let mut found = Vec::new();
    for change in candidates(cluster, now) {
        let Some(changed) = change.apply(cluster)? else { continue };
        let step_s = simulate(programs, &changed, &conditions)?.step_s;
        let speedup = now.step_s / step_s;
        if speedup >= LEAST {
            found.push(WhatIf { change, step_s, speedup });
        }
    }
    found.sort_by(|a, b| b.speedup.total_cmp(&a.speedup));
    Ok(found)
}

fn candidates(cluster: &Cluster, now: &Simulation) -> Vec<Change> {
    let mut changes = Vec::new();
    let faster = |link: Link| {
        let rate = RATES.into_iter().find(|r| *r >= 2.0 * link.bandwidth)?;
        Some(Link { bandwidth: rate, ..link })
    };
    let mut links: Vec<_> = now.links.iter().filter(|l| l.busy_s > 0.0).collect();
    links.sort_by(|a, b| b.busy_s.total_cmp(&a.busy_s));
    let mut pairs: Vec<(PeerId, PeerId)> = Vec::new();
    for l in links {
        let (a, b) = (cluster.host(l.from), cluster.host(l.to));
        let pair = (a.min(b), a.max(b));
        if pairs.len() == 3 || pairs.contains(&pair) {
            continue;
        }
        // An uplink's limit is the uplink's matter.
        if let Some(line) = cluster.path(a, b).and_then(|p| p.line) {
            pairs.push(pair);
            changes.extend(faster(line).map(|then| Change::Link { from: a, to: b, now: line, then }));
            if line.latency > 1e-3 {
                let then = Link { latency: line.latency / 10.0, ..line };
                changes.push(Change::Link { from: a, to: b, now: line, then });
            }
        }
    }
    let mut shared: Vec<_> = now.shared.iter().filter(|s| s.busy_s > 0.0).collect();
    shared.sort_by(|a, b| b.busy_s.total_cmp(&a.busy_s));
    let mut sites: Vec<u32> = shared.iter().map(|s| s.id.site).collect();
    let mut seen = std::collections::BTreeSet::new();
    sites.retain(|s| seen.insert(*s));
    for site in sites.into_iter().take(2) {
        if let Some(uplink) = cluster.sites()[site as usize].uplink {
            changes.extend(faster(uplink).map(|then| Change::Uplink { site, now: uplink, then }));
            if uplink.latency > 1e-3 {
                let then = Link { latency: uplink.latency / 10.0, ..uplink };
                changes.push(Change::Uplink { site, now: uplink, then });
            }
        }
    }
    let mut peers: Vec<(PeerId, f64)> = (0..).map(PeerId).zip(now.peers.iter().map(|p| p.compute_s)).collect();
    peers.sort_by(|a, b| b.1.total_cmp(&a.1));
    changes.extend(peers.into_iter().take(2).map(|(peer, _)| Change::Device { peer, times: 2.0 }));
    changes
}

impl Change {
    /// The cluster after it, if it can be.
    fn apply(&self, cluster: &Cluster) -> Result<Option<Cluster>, PlanError> {
        let mut devices: Vec<Device> = cluster.devices().to_vec();
        let mut sites: Vec<Site> = cluster.sites().to_vec();
        let mut lines: Vec<Line> = cluster.lines().to_vec();
        match *self {
            Self::Link { from, to, then, .. } => {
                let place = |p: PeerId| if p == PeerId::BROKER { Place::Broker } else { Place::Device(p.0) };
                for (a, b) in [(from, to), (to, from)] {
                    let Some(path) = cluster.path(a, b) else { continue };
                    let (a, b) = (place(a), place(b));
                    lines.retain(|l| (l.from, l.to) != (a, b));
                    // The way back may be better as it is.
                    let link = path.line.map_or(then, |l| Link {
                        latency: l.latency.min(then.latency),
                        bandwidth: l.bandwidth.max(then.bandwidth),
                    });
                    lines.push(Line { from: a, to: b, link });
                }
            }
            Self::Uplink { site, then, .. } => match sites.get_mut(site as usize) {
                Some(site) => site.uplink = Some(then),
                None => return Ok(None),
            },
            Self::Device { peer, times } => match devices.get_mut(peer.0 as usize) {
                Some(device) => {
                    let rates = &mut device.rates;
                    for rate in [&mut rates.matmul, &mut rates.convolution, &mut rates.memory] {
                        *rate *= times;
                    }
                    rates.overhead /= times;
                    for curve in device.operators.values_mut() {
                        *curve = curve.faster(times);
                    }
                }
                None => return Ok(None),
            },
        }
        Cluster::new(devices, sites, lines, Some(cluster.broker())).map(Some)
    }
}
