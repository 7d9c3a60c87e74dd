//! From a cluster to units: single devices, or devices joined as replicas.

use crate::cost::{Cluster, Device};
use crate::program::PeerId;
use crate::search::{LinkCost, Machines, OffloadCost, Unit, UplinkShare, communities};

/// Most units among which a plan is searched.
const MAX_UNITS: usize = 96;

/// The cost between two devices if no link leads from one to the other.
const NO_LINK: LinkCost = LinkCost { latency: f64::INFINITY, per_byte: f64::INFINITY };

/// The costs of links between all devices of a cluster and its broker.
pub(super) struct DeviceLinks<'a> {
    cluster: &'a Cluster,
    /// From `a` to `b` at `a * (devices + 1) + b`.
    costs: Vec<LinkCost>,
}

impl<'a> DeviceLinks<'a> {
    pub(super) fn new(cluster: &'a Cluster) -> Self {
        let width = cluster.devices().len() + 1;
        let mut costs = vec![LinkCost::NONE; width * width];
        for a in 0..width {
            for b in (0..width).filter(|b| *b != a) {
                let link = cluster.link(peer(width, a), peer(width, b));
                costs[a * width + b] = match link {
                    Some(link) => LinkCost { latency: link.latency, per_byte: 1.0 / link.bandwidth },
                    None => NO_LINK,
                };
            }
        }
        Self { cluster, costs }
    }

    fn cost(&self, a: usize, b: usize) -> LinkCost {
        self.costs[a * (self.cluster.devices().len() + 1) + b]
    }

    /// The devices that no plan can use, with the reason.
    pub(super) fn out_of_reach(&self) -> Vec<(PeerId, &'static str)> {
        let devices = self.cluster.devices().len();
        let one_way = |a, b| self.cost(a, b) == NO_LINK;
        let reason = |d: usize| match (one_way(devices, d), one_way(d, devices)) {
            (true, _) => Some("no link leads to it from the broker"),
            (_, true) => Some("no link leads from it to the broker"),
            _ => None,
        };
        (0..devices).filter_map(|d| Some((PeerId(d as u32), reason(d)?))).collect()
    }

    /// Seconds for `bytes` there and back.
    fn seconds(&self, a: u32, b: u32, bytes: f64) -> f64 {
        let (a, b) = (a as usize, b as usize);
        (self.cost(a, b).seconds(bytes) + self.cost(b, a).seconds(bytes)).min(f64::MAX / 1e12)
    }

    /// Groups of `copies` devices that are near each other and equally fast. Nearness is the time that `bytes` take
    /// between them. `model_seconds` is a device's time for the whole model. Remaining devices form smaller groups.
    /// If there are too many groups, the fastest are kept.
    pub(super) fn groups(
        &self,
        devices: &[u32],
        copies: usize,
        bytes: f64,
        model_seconds: impl Fn(u32) -> f64,
    ) -> Vec<Vec<u32>> {
        let mut groups: Vec<Vec<u32>> = if copies == 1 {
            devices.iter().map(|d| vec![*d]).collect()
        } else {
            let label = communities(devices.len(), |a, b| 1.0 / self.seconds(devices[a], devices[b], bytes).max(1e-12));
            let count = label.iter().max().map_or(0, |m| m + 1);
            let chunks = (0..count).flat_map(|c| {
                let mut members: Vec<u32> = (0..devices.len()).filter(|i| label[*i] == c).map(|i| devices[i]).collect();
                // Sorted by site first: a group within one site shares no uplink.
                let site = |d: u32| self.cluster.devices()[d as usize].site;
                members.sort_by(|a, b| {
                    site(*a).cmp(&site(*b)).then(model_seconds(*a).total_cmp(&model_seconds(*b))).then(a.cmp(b))
                });
                members.chunks(copies).map(<[u32]>::to_vec).collect::<Vec<_>>()
            });
            chunks.collect()
        };
        let speed = |g: &Vec<u32>| g.len() as f64 / g.iter().map(|d| model_seconds(*d)).fold(0.0, f64::max);
        if groups.len() > MAX_UNITS {
            groups.sort_by(|a, b| speed(b).total_cmp(&speed(a)).then(a.cmp(b)));
            groups.truncate(MAX_UNITS);
        }
        groups.sort();
        groups
    }

    /// Lets a unit take more than its memory, for the time that offloading the rest takes.
    pub(super) fn let_offload(&self, unit: &mut Unit) {
        let rates =
            unit.members.iter().filter_map(|d| self.cluster.devices().get(*d as usize)).map(Device::offload_rate);
        // Each byte that is offloaded leaves and returns.
        let per_byte = 2.0 / rates.fold(f64::INFINITY, f64::min);
        unit.offload = Some(OffloadCost { memory: unit.memory, per_byte });
        unit.memory = f64::INFINITY;
    }

    /// Groups as units. `class` is by device.
    pub(super) fn machines(&self, groups: &[Vec<u32>], class: &[u32], model_seconds: impl Fn(u32) -> f64) -> Machines {
        let devices = self.cluster.devices().len();
        let broker = vec![devices as u32];
        let worst = |a: &[u32], b: &[u32]| {
            let pairs = a.iter().flat_map(|x| b.iter().map(|y| (*x as usize, *y as usize)));
            pairs.filter(|(x, y)| x != y).map(|(x, y)| self.cost(x, y)).fold(LinkCost::NONE, |worst, r| LinkCost {
                latency: worst.latency.max(r.latency),
                per_byte: worst.per_byte.max(r.per_byte),
            })
        };
        let unit = |members: &Vec<u32>| {
            let slowest =
                members.iter().copied().max_by(|a, b| model_seconds(*a).total_cmp(&model_seconds(*b))).unwrap_or(0);
            let memory = members.iter().map(|d| self.cluster.devices()[*d as usize].memory).min().unwrap_or(0);
            Unit {
                members: members.clone(),
                class: class[slowest as usize],
                memory: memory as f64,
                inside: worst(members, members),
                offload: None,
            }
        };
        let all: Vec<&Vec<u32>> = groups.iter().chain([&broker]).collect();
        let shared = self.cluster.sites().iter().any(|s| s.uplink.is_some());
        let (mut links, mut uplinks) = (Vec::with_capacity(all.len() * all.len()), Vec::new());
        for (i, a) in all.iter().enumerate() {
            for (j, b) in all.iter().enumerate() {
                links.push(if i == j { LinkCost::NONE } else { worst(a, b) });
                if shared {
                    uplinks.push(if i == j { Vec::new() } else { self.uplinks(a, b) });
                }
            }
        }
        Machines {
            units: groups.iter().map(unit).collect(),
            links,
            uplinks,
            uplink_count: if shared { 2 * self.cluster.sites().len() } else { 0 },
        }
    }

    /// The uplinks between two groups, with their seconds per byte averaged over pairs of devices. The number of a
    /// site's outward uplink is twice the site's index, and that of the inward uplink is one more.
    fn uplinks(&self, a: &[u32], b: &[u32]) -> Vec<UplinkShare> {
        let width = self.cluster.devices().len() + 1;
        let mut shares: Vec<UplinkShare> = Vec::new();
        let pairs = (a.len() * b.len()) as f64;
        for (x, y) in a.iter().flat_map(|x| b.iter().map(move |y| (*x, *y))) {
            for (id, link) in self.cluster.uplinks(peer(width, x as usize), peer(width, y as usize)) {
                let (uplink, per_byte) = (2 * id.site + u32::from(!id.outward), 1.0 / link.bandwidth / pairs);
                match shares.iter_mut().find(|s| s.uplink == uplink) {
                    Some(share) => share.per_byte += per_byte,
                    None => shares.push(UplinkShare { uplink, per_byte }),
                }
            }
        }
        shares
    }
}

/// The peer at a place in the table of links. The last place is the broker's.
fn peer(width: usize, place: usize) -> PeerId {
    if place + 1 == width { PeerId::BROKER } else { PeerId(place as u32) }
}
