//! The bottleneck of a step, and how much faster the step would be with a faster line or device.

use fusionllm_graph::units;
use fusionllm_program::{PeerId, Program};

use super::{SimulateOptions, Simulation, simulate};
use crate::cost::{Card, Cluster, Device, DirectLink, Line, Link, Place};
use crate::error::PlanError;

/// One change to a cluster, and the step it would bring.
#[derive(Debug, Clone, PartialEq)]
pub struct WhatIf {
    /// The change.
    pub change: Change,
    /// Whether there is a new plan for the changed cluster. Otherwise the plan stays.
    pub replanned: bool,
    /// Seconds from step to step after it.
    pub step_s: f64,
    /// How many times as fast the step would be.
    pub speedup: f64,
}

/// A part of a cluster that is better, or there once more.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Change {
    /// Both directions of a network card, an uplink or a link.
    Line {
        /// The direction that is busier.
        line: Line,
        /// The line now.
        now: Link,
        /// The faster line.
        then: Link,
    },
    /// A device that computes several times as fast, and with it the others on its processor.
    Device {
        /// Its peer.
        peer: PeerId,
        /// How many times as fast.
        times: f64,
    },
    /// A device with more memory.
    Memory {
        /// Its peer.
        peer: PeerId,
        /// Bytes of memory then.
        then: u64,
    },
    /// One more device, beside one that is like it.
    OneMore {
        /// The peer of the device that is there.
        like: PeerId,
    },
}

/// Common rates of links: 10 and 100 Mbps, 1, 10 and 100 Gbps, in bytes/s.
const COMMON_RATES: [f64; 5] = [1.25e6, 12.5e6, 125e6, 1.25e9, 12.5e9];

/// The smallest speed-up that is reported.
const MIN_SPEEDUP: f64 = 1.01;

/// Latencies above this, in seconds, are worth shortening.
const LONG_LATENCY_S: f64 = 1e-3;

/// How many lines and devices are tried: the busiest of each.
const MAX_LINES: usize = 5;
const MAX_DEVICES: usize = 2;

/// The changes that would make the step faster, the largest speed-up first. The first one names the bottleneck. Empty
/// if no single change helps.
///
/// Each change is simulated. The busiest lines get the next common rate or a tenth of their latency. The busiest
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
    for change in candidates(now, cluster) {
        let Some(changed) = change.apply(cluster)? else { continue };
        let step_s = simulate(programs, &changed, &options)?.step_s;
        found.push(WhatIf { change, replanned: false, step_s, speedup: now.step_s / step_s });
    }
    Ok(worthwhile(found))
}

/// The changes that make the step faster, the largest speed-up first.
pub(crate) fn worthwhile(mut found: Vec<WhatIf>) -> Vec<WhatIf> {
    found.retain(|w| w.speedup >= MIN_SPEEDUP);
    found.sort_by(|a, b| b.speedup.total_cmp(&a.speedup));
    found
}

/// Sentences for people about the changes that [`what_if`] found: the first names the bottleneck.
pub fn what_if_sentences(cluster: &Cluster, found: &[WhatIf]) -> Vec<String> {
    const SHOWN: usize = 6;
    if found.is_empty() {
        return vec!["nothing alone limits the step".into()];
    }
    let sentence = |(i, w): (usize, &WhatIf)| {
        let (what, how) = w.change.words(cluster);
        let times = if w.speedup < 1.095 { format!("{:.2}", w.speedup) } else { format!("{:.1}", w.speedup) };
        let which = if w.replanned { "a new plan" } else { "this plan" };
        let gain = format!("{which} would be {times}x faster ({} a step)", units::seconds(w.step_s));
        match i {
            0 => format!("{what} limits the step: {how} {gain}"),
            _ => format!("{what}: {how} {gain}"),
        }
    };
    found.iter().enumerate().take(SHOWN).map(sentence).collect()
}

/// The changes that are tried with one plan: of its busiest lines and devices.
pub(crate) fn candidates(now: &Simulation, cluster: &Cluster) -> Vec<Change> {
    let mut changes = Vec::new();
    let mut lines: Vec<_> = now.lines.iter().filter(|l| l.busy_s > 0.0).collect();
    lines.sort_by(|a, b| b.busy_s.total_cmp(&a.busy_s));
    let mut tried: Vec<Line> = Vec::new();
    for load in lines {
        let (line, now) = (load.line, load.link);
        if tried.len() < MAX_LINES && !tried.contains(&line.back()) {
            tried.push(line);
            changes.extend(faster(now).into_iter().map(|then| Change::Line { line, now, then }));
        }
    }
    let mut peers: Vec<(PeerId, f64)> = (0..).map(PeerId).zip(now.peers.iter().map(|p| p.compute_s)).collect();
    peers.sort_by(|a, b| b.1.total_cmp(&a.1));
    let mut tried: Vec<PeerId> = Vec::new();
    for (peer, _) in peers {
        let together = |other: &PeerId| processor(cluster, peer).is_some_and(|p| processor(cluster, *other) == Some(p));
        if tried.len() < MAX_DEVICES && !tried.iter().any(together) {
            tried.push(peer);
            changes.push(Change::Device { peer, times: 2.0 });
        }
    }
    changes
}

/// The name of the processor that a device computes on.
fn processor(cluster: &Cluster, peer: PeerId) -> Option<&str> {
    cluster.devices().get(peer.0 as usize)?.processor.as_ref().map(|p| p.name.as_str())
}

/// The link at the next common rate, and with a tenth of its latency.
fn faster(link: Link) -> Vec<Link> {
    let rate = COMMON_RATES.into_iter().find(|r| *r >= 2.0 * link.bandwidth);
    let latency = (link.latency > LONG_LATENCY_S).then_some(link.latency / 10.0);
    let with_rate = rate.map(|bandwidth| Link { bandwidth, ..link });
    with_rate.into_iter().chain(latency.map(|latency| Link { latency, ..link })).collect()
}

/// The better of two links. The other direction of a line may already be better than the change.
fn better(now: Link, then: Link) -> Link {
    Link { latency: now.latency.min(then.latency), bandwidth: now.bandwidth.max(then.bandwidth) }
}

impl Change {
    /// The part that changes, and how.
    fn words(&self, cluster: &Cluster) -> (String, String) {
        let better = |now: &Link, then: &Link| match now.latency > then.latency {
            true => format!("with a latency of {}", units::seconds(then.latency)),
            false => format!("at {}", units::rate(then.bandwidth)),
        };
        match self {
            // A change counts for both directions.
            Self::Line { line: Line::Card { host, .. }, now, then } => {
                (format!("the network card of {}", cluster.host_name(*host)), better(now, then))
            }
            Self::Line { line: Line::Uplink { site, .. }, now, then } => {
                let name = cluster.sites().get(*site as usize).map_or("?", |s| &s.name);
                (format!("the uplink of {name}"), better(now, then))
            }
            Self::Line { line, now, then } => (format!("the {}", cluster.line_name(*line)), better(now, then)),
            Self::Device { peer, times } => {
                let on = processor(cluster, *peer);
                let others = (0..cluster.devices().len() as u32).map(PeerId).filter(|other| other != peer);
                let shared = on.is_some() && others.into_iter().any(|other| processor(cluster, other) == on);
                let what = if shared { "the processor of" } else { "device" };
                (format!("{what} {}", cluster.name(*peer)), format!("{times} times as fast"))
            }
            Self::Memory { peer, then } => {
                (format!("the memory of {}", cluster.name(*peer)), format!("with {}", units::bytes(*then)))
            }
            Self::OneMore { like } => {
                ("the number of devices".into(), format!("with one more like {}", cluster.name(*like)))
            }
        }
    }

    /// The same change of a cluster from which `devices` were selected: device `i` was `devices[i]`.
    pub(crate) fn before_selection(self, devices: &[PeerId]) -> Self {
        let device = |d: u32| devices.get(d as usize).map_or(d, |p| p.0);
        let place = |p: Place| if let Place::Device(d) = p { Place::Device(device(d)) } else { p };
        match self {
            Self::Line { line, now, then } => {
                let line = match line {
                    Line::Card { host, outward } => Line::Card { host: place(host), outward },
                    Line::Link { from, to } => Line::Link { from: place(from), to: place(to) },
                    uplink @ Line::Uplink { .. } => uplink,
                };
                Self::Line { line, now, then }
            }
            Self::Device { peer, times } => Self::Device { peer: PeerId(device(peer.0)), times },
            Self::Memory { peer, then } => Self::Memory { peer: PeerId(device(peer.0)), then },
            Self::OneMore { like } => Self::OneMore { like: PeerId(device(like.0)) },
        }
    }

    /// The changed cluster, if it has the part that changes.
    ///
    /// # Errors
    ///
    /// The changed parts make no cluster.
    pub fn apply(&self, cluster: &Cluster) -> Result<Option<Cluster>, PlanError> {
        let (mut devices, mut sites) = (cluster.devices().to_vec(), cluster.sites().to_vec());
        let mut direct = cluster.direct_links().to_vec();
        match *self {
            Self::Line { line: Line::Card { host, .. }, then, .. } => {
                let faster = |peer| cluster.card(peer).faster(Card::new(then.bandwidth));
                if host == Place::Broker {
                    return cluster.clone().with_broker_network(faster(PeerId::BROKER)).map(Some);
                }
                let members = (0..).map(PeerId).zip(&mut devices);
                members.filter(|(p, _)| cluster.host_of(*p) == Some(host)).for_each(|(p, d)| d.network = faster(p));
            }
            Self::Line { line: Line::Uplink { site, .. }, then, .. } => match sites.get_mut(site as usize) {
                Some(site) => {
                    site.downlink = site.downlink.map(|now| better(now, then));
                    site.uplink = site.uplink.map(|now| better(now, then));
                }
                None => return Ok(None),
            },
            Self::Line { line: Line::Link { from, to }, then, .. } => {
                for (from, to) in [(from, to), (to, from)] {
                    let known = direct.iter().position(|l| (l.from, l.to) == (from, to));
                    let link = known.map_or(then, |at| better(direct.remove(at).link, then));
                    direct.push(DirectLink { from, to, link });
                }
            }
            Self::Device { peer, .. } if peer.0 as usize >= devices.len() => return Ok(None),
            Self::Device { peer, times } => {
                let on = processor(cluster, peer);
                let faster = |other| other == peer || (on.is_some() && processor(cluster, other) == on);
                let devices = (0..).map(PeerId).zip(&mut devices);
                devices.filter(|(other, _)| faster(*other)).for_each(|(_, device)| device.speed_up(times));
            }
            Self::Memory { peer, then } => match devices.get_mut(peer.0 as usize) {
                Some(device) => device.memory = then,
                None => return Ok(None),
            },
            // A device that has links of its own cannot be there twice.
            Self::OneMore { like } => match devices.get(like.0 as usize) {
                Some(device) if device.site.is_some() => {
                    let taken = |name: &String| devices.iter().any(|d| d.name == *name);
                    let mut names = (2..).map(|n| format!("{}-{n}", device.name));
                    let name = names.find(|name| !taken(name)).unwrap_or_default();
                    // It is a machine of its own.
                    devices.push(Device { name, host: None, processor: None, ..device.clone() });
                }
                _ => return Ok(None),
            },
        }
        cluster.changed(devices, sites, direct).map(Some)
    }
}
