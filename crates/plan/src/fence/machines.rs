//! From a cluster to units: single devices, or devices joined as replicas of each other.

use super::communities;
use super::problem::{Machines, Route, Unit};
use crate::{Cluster, PeerId};

/// Most units among which a plan is looked for.
const MOST: usize = 96;

/// No way at all.
const NOWHERE: Route = Route { latency: f64::INFINITY, per_byte: f64::INFINITY };

/// The ways between all devices of a cluster, and to and from its broker.
pub(crate) struct Ways<'a> {
    cluster: &'a Cluster,
    /// From `a` to `b` at `a * (devices + 1) + b`.
    routes: Vec<Route>,
}

impl<'a> Ways<'a> {
    pub(crate) fn new(cluster: &'a Cluster) -> Self {
        let width = cluster.devices().len() + 1;
        let mut routes = vec![Route::NONE; width * width];
        for a in 0..width {
            for b in (0..width).filter(|b| *b != a) {
                let link = cluster.link(peer(width, a), peer(width, b));
                routes[a * width + b] = match link {
                    Some(link) => Route { latency: link.latency, per_byte: 1.0 / link.bandwidth },
                    None => NOWHERE,
                };
            }
        }
        Self { cluster, routes }
    }

    fn route(&self, a: usize, b: usize) -> Route {
        self.routes[a * (self.cluster.devices().len() + 1) + b]
    }

    /// The devices that no plan can use, with the reason.
    pub(crate) fn out_of_reach(&self) -> Vec<(PeerId, &'static str)> {
        let devices = self.cluster.devices().len();
        let one_way = |a, b| self.route(a, b) == NOWHERE;
        let reason = |d: usize| match (one_way(devices, d), one_way(d, devices)) {
            (true, _) => Some("nothing leads to it from the broker"),
            (_, true) => Some("nothing leads from it to the broker"),
            _ => None,
        };
        (0..devices).filter_map(|d| Some((PeerId(d as u32), reason(d)?))).collect()
    }

    /// Seconds for `bytes` there and back.
    fn seconds(&self, a: u32, b: u32, bytes: f64) -> f64 {
        let (a, b) = (a as usize, b as usize);
        (self.route(a, b).seconds(bytes) + self.route(b, a).seconds(bytes)).min(f64::MAX / 1e12)
    }

    /// Devices in groups of `copies` that are near to each other (by the time that `bytes` take between them) and alike in speed (`whole` is the
    /// time of a device for the whole model); what is left over in smaller ones. Of too many groups, the fastest.
    pub(crate) fn groups(
        &self,
        devices: &[u32],
        copies: usize,
        bytes: f64,
        whole: impl Fn(u32) -> f64,
    ) -> Vec<Vec<u32>> {
        let mut groups: Vec<Vec<u32>> = if copies == 1 {
            devices.iter().map(|d| vec![*d]).collect()
        } else {
            let label = communities(devices.len(), |a, b| 1.0 / self.seconds(devices[a], devices[b], bytes).max(1e-12));
            let count = label.iter().max().map_or(0, |m| m + 1);
            let chunks = (0..count).flat_map(|c| {
                let mut members: Vec<u32> = (0..devices.len()).filter(|i| label[*i] == c).map(|i| devices[i]).collect();
                // Sites first: a group within one shares no uplink.
                let site = |d: u32| self.cluster.devices()[d as usize].site;
                members.sort_by(|a, b| site(*a).cmp(&site(*b)).then(whole(*a).total_cmp(&whole(*b))).then(a.cmp(b)));
                members.chunks(copies).map(<[u32]>::to_vec).collect::<Vec<_>>()
            });
            chunks.collect()
        };
        let speed = |g: &Vec<u32>| g.len() as f64 / g.iter().map(|d| whole(*d)).fold(0.0, f64::max);
        if groups.len() > MOST {
            groups.sort_by(|a, b| speed(b).total_cmp(&speed(a)).then(a.cmp(b)));
            groups.truncate(MOST);
        }
        groups.sort();
        groups
    }

    /// Groups as units. `class` is by device.
    pub(crate) fn machines(&self, groups: &[Vec<u32>], class: &[u32], whole: impl Fn(u32) -> f64) -> Machines {
        let devices = self.cluster.devices().len();
        let broker = vec![devices as u32];
        let worst = |a: &[u32], b: &[u32]| {
            let pairs = a.iter().flat_map(|x| b.iter().map(|y| (*x as usize, *y as usize)));
            pairs.filter(|(x, y)| x != y).map(|(x, y)| self.route(x, y)).fold(Route::NONE, |worst, r| Route {
                latency: worst.latency.max(r.latency),
                per_byte: worst.per_byte.max(r.per_byte),
            })
        };
        let unit = |members: &Vec<u32>| {
            let slowest = members.iter().copied().max_by(|a, b| whole(*a).total_cmp(&whole(*b))).unwrap_or(0);
            let memory = members.iter().map(|d| self.cluster.devices()[*d as usize].memory).min().unwrap_or(0);
            Unit {
                members: members.clone(),
                class: class[slowest as usize],
                memory: memory as f64,
                inside: worst(members, members),
            }
        };
        let all: Vec<&Vec<u32>> = groups.iter().chain([&broker]).collect();
        let uplinks = self.cluster.sites().iter().any(|s| s.uplink.is_some());
        let (mut routes, mut shared) = (Vec::with_capacity(all.len() * all.len()), Vec::new());
        for (i, a) in all.iter().enumerate() {
            for (j, b) in all.iter().enumerate() {
                routes.push(if i == j { Route::NONE } else { worst(a, b) });
                if uplinks {
                    shared.push(if i == j { Vec::new() } else { self.shared(a, b) });
                }
            }
        }
        Machines {
            units: groups.iter().map(unit).collect(),
            routes,
            shared,
            uplinks: if uplinks { 2 * self.cluster.sites().len() } else { 0 },
        }
    }

    /// The uplinks between two groups with seconds per byte, averaged over their pairs. A site's outward one has twice its index, its inward one that and one.
    fn shared(&self, a: &[u32], b: &[u32]) -> Vec<(u32, f64)> {
        let width = self.cluster.devices().len() + 1;
        let mut shared: Vec<(u32, f64)> = Vec::new();
        let pairs = (a.len() * b.len()) as f64;
        for (x, y) in a.iter().flat_map(|x| b.iter().map(move |y| (*x, *y))) {
            for (id, link) in self.cluster.shared(peer(width, x as usize), peer(width, y as usize)) {
                let (index, seconds) = (2 * id.site + u32::from(!id.outward), 1.0 / link.bandwidth / pairs);
                match shared.iter_mut().find(|s| s.0 == index) {
                    Some(s) => s.1 += seconds,
                    None => shared.push((index, seconds)),
                }
            }
        }
        shared
    }
}

/// The last place is the broker's.
fn peer(width: usize, place: usize) -> PeerId {
    if place + 1 == width { PeerId::BROKER } else { PeerId(place as u32) }
}
