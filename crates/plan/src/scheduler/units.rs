//! From a cluster to units: single devices, or devices joined as replicas.

use std::collections::BTreeMap;

use foldhash::HashMap;
use fusionllm_program::PeerId;

use crate::cost::congestion::{send_rate, window};
use crate::cost::{Cluster, Device, Line, Place, Processor};
use crate::search::{LineShare, LinkCost, Machines, OffloadCost, ProcessorShare, Unit, communities};

/// Most units among which a plan is searched.
pub(super) const SEARCHED_UNITS: usize = 96;

/// The cost between two devices if no link leads from one to the other.
const NO_LINK: LinkCost = LinkCost::new(f64::INFINITY, f64::INFINITY);

/// Where a route has fewer lines than the longest.
const NO_LINE: u32 = u32::MAX;

/// The costs of links between all devices of a cluster and its broker.
pub(super) struct DeviceLinks<'a> {
    cluster: &'a Cluster,
    /// From `a` to `b` at `a * (devices + 1) + b`.
    costs: Vec<LinkCost>,
    /// The numbers of the lines that messages take, in the order of `costs`.
    routes: Vec<[u32; 5]>,
    /// By line: seconds per byte.
    per_byte: Vec<f64>,
}

impl<'a> DeviceLinks<'a> {
    pub(super) fn new(cluster: &'a Cluster) -> Self {
        let width = cluster.devices().len() + 1;
        let mut links = Self {
            cluster,
            costs: vec![LinkCost::NONE; width * width],
            routes: vec![[NO_LINE; 5]; width * width],
            per_byte: vec![0.0; 2 * (width + cluster.sites().len()) + cluster.direct_links().len()],
        };
        for a in 0..width {
            for b in (0..width).filter(|b| *b != a) {
                links.add(a, b);
            }
        }
        for a in 0..width {
            for b in 0..a {
                links.limit_by_windows(a * width + b, b * width + a);
            }
        }
        links
    }

    fn add(&mut self, a: usize, b: usize) {
        let width = self.cluster.devices().len() + 1;
        let at = a * width + b;
        let Some(route) = self.cluster.route(peer(width, a), peer(width, b)) else {
            self.costs[at] = NO_LINK;
            return;
        };
        let link = route.link();
        self.costs[at] = LinkCost::new(link.latency, 1.0 / link.bandwidth);
        for (slot, (line, link)) in self.routes[at].iter_mut().zip(route.lines()) {
            if let Some(number) = number(self.cluster, line) {
                *slot = number;
                self.per_byte[number as usize] = 1.0 / link.bandwidth;
            }
        }
    }

    /// Counts the windows of a connection, whose two directions are at these places.
    fn limit_by_windows(&mut self, there: usize, back: usize) {
        let round_trip = self.costs[there].latency + self.costs[back].latency;
        for at in [there, back] {
            let window = window(1.0 / self.costs[at].per_byte, round_trip);
            self.costs[at].window_per_byte = 1.0 / send_rate(window, round_trip, window);
        }
    }

    /// The lines from one device to another that others may use, too.
    fn lines(&self, a: u32, b: u32) -> impl Iterator<Item = u32> {
        let at = a as usize * (self.cluster.devices().len() + 1) + b as usize;
        self.routes[at].into_iter().filter(|line| *line != NO_LINE)
    }

    fn cost(&self, a: usize, b: usize) -> LinkCost {
        self.costs[a * (self.cluster.devices().len() + 1) + b]
    }

    /// The devices that no plan can use, with the reason.
    pub(super) fn out_of_reach(&self) -> Vec<(PeerId, &'static str)> {
        let devices = self.cluster.devices().len();
        let one_way = |a, b| self.cost(a, b).per_byte.is_infinite();
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

    /// Communities of devices that are near each other. Nearness is the time that `bytes` take between them.
    pub(super) fn communities(&self, devices: &[u32], bytes: f64) -> Vec<Vec<u32>> {
        let label = communities(devices.len(), |a, b| 1.0 / self.seconds(devices[a], devices[b], bytes).max(1e-12));
        let mut found = vec![Vec::new(); label.iter().max().map_or(0, |m| m + 1)];
        label.into_iter().zip(devices).for_each(|(community, d)| found[community].push(*d));
        found
    }

    /// Groups of `copies` devices of a community, which are about equally fast. `model_seconds` is a device's time for
    /// the whole model. Remaining devices form smaller groups. If there are too many groups, the fastest are kept.
    pub(super) fn groups(
        &self,
        communities: &[Vec<u32>],
        copies: usize,
        model_seconds: impl Fn(u32) -> f64,
    ) -> Vec<Vec<u32>> {
        let of_community = |members: &Vec<u32>| {
            let mut members = members.clone();
            // Sorted by site first: a group within one site takes no uplink.
            let site = |d: u32| self.cluster.devices()[d as usize].site;
            members.sort_by(|a, b| {
                site(*a).cmp(&site(*b)).then(model_seconds(*a).total_cmp(&model_seconds(*b))).then(a.cmp(b))
            });
            members.chunks(copies).map(<[u32]>::to_vec).collect::<Vec<_>>()
        };
        let mut groups: Vec<Vec<u32>> = communities.iter().flat_map(of_community).collect();
        let speed = |g: &Vec<u32>| g.len() as f64 / g.iter().map(|d| model_seconds(*d)).fold(0.0, f64::max);
        if groups.len() > SEARCHED_UNITS {
            groups.sort_by(|a, b| speed(b).total_cmp(&speed(a)).then(a.cmp(b)));
            groups.truncate(SEARCHED_UNITS);
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
            pairs.filter(|(x, y)| x != y).map(|(x, y)| self.cost(x, y)).fold(LinkCost::NONE, LinkCost::worse)
        };
        let processor = |d: u32| self.cluster.devices()[d as usize].processor.as_ref();
        let mut users: BTreeMap<&str, u32> = BTreeMap::new();
        groups.iter().flatten().filter_map(|d| processor(*d)).for_each(|p| *users.entry(&p.name).or_default() += 1);
        users.retain(|_, users| *users > 1);
        let numbers: BTreeMap<&str, u32> = users.into_keys().zip(0..).collect();
        let shares_of =
            |members: &[u32]| processor_shares(&numbers, members.iter().filter_map(|d| processor(*d)), members.len());
        let unit = |members: &Vec<u32>| {
            let slowest =
                members.iter().copied().max_by(|a, b| model_seconds(*a).total_cmp(&model_seconds(*b))).unwrap_or(0);
            let inside = worst(members, members);
            let memory = members.iter().map(|d| self.cluster.devices()[*d as usize].memory).min().unwrap_or(0);
            Unit {
                members: members.clone(),
                class: class[slowest as usize],
                memory: memory as f64,
                inside,
                processors: shares_of(members),
                exchange: LinkCost::new(2.0 * inside.latency, self.exchange(members, inside)),
                offload: None,
            }
        };
        let all: Vec<&Vec<u32>> = groups.iter().chain([&broker]).collect();
        let (mut links, mut lines) =
            (Vec::with_capacity(all.len() * all.len()), Vec::with_capacity(all.len() * all.len()));
        for (i, a) in all.iter().enumerate() {
            for (j, b) in all.iter().enumerate() {
                links.push(if i == j { LinkCost::NONE } else { worst(a, b) });
                // The plan's cost leaves out messages to the broker.
                lines.push(if i == j || j == groups.len() { Vec::new() } else { self.shares(a, b) });
            }
        }
        let line_count = keep_shared(&mut lines);
        Machines { units: groups.iter().map(unit).collect(), links, lines, line_count, processor_count: numbers.len() }
    }

    /// The lines between two groups, with their seconds per byte averaged over pairs of devices.
    fn shares(&self, a: &[u32], b: &[u32]) -> Vec<LineShare> {
        let mut shares: BTreeMap<u32, f64> = BTreeMap::new();
        let pairs = (a.len() * b.len()) as f64;
        for (x, y) in a.iter().flat_map(|x| b.iter().map(move |y| (*x, *y))) {
            for line in self.lines(x, y) {
                *shares.entry(line).or_default() += self.per_byte[line as usize] / pairs;
            }
        }
        shares.into_iter().map(|(line, per_byte)| LineShare { line, per_byte }).collect()
    }

    /// Seconds per byte of parameters of which each of these devices owns an equal part. Each device sends to each other
    /// one its gradients of that one's part, and the new values of its own part.
    fn exchange(&self, members: &[u32], inside: LinkCost) -> f64 {
        let part = 2.0 / members.len() as f64;
        let mut busy: BTreeMap<u32, f64> = BTreeMap::new();
        for (x, y) in members.iter().flat_map(|x| members.iter().map(move |y| (*x, *y))).filter(|(x, y)| x != y) {
            for line in self.lines(x, y) {
                *busy.entry(line).or_default() += part * self.per_byte[line as usize];
            }
        }
        let of_pair = part * inside.per_byte.max(inside.window_per_byte);
        busy.into_values().fold(of_pair, f64::max)
    }
}

/// What devices take of processors, which have these numbers.
fn processor_shares<'p>(
    numbers: &BTreeMap<&str, u32>,
    of_members: impl Iterator<Item = &'p Processor>,
    members: usize,
) -> Vec<ProcessorShare> {
    let mut shares: BTreeMap<u32, f64> = BTreeMap::new();
    for processor in of_members {
        if let Some(number) = numbers.get(processor.name.as_str()) {
            *shares.entry(*number).or_default() += processor.busy / processor.cores;
        }
    }
    let share = |(processor, of_step)| ProcessorShare { processor, of_micro_batch: of_step / members as f64, of_step };
    shares.into_iter().map(share).collect()
}

/// The number of a line that several pairs of devices may use.
fn number(cluster: &Cluster, line: Line) -> Option<u32> {
    let (devices, sites) = (cluster.devices().len() as u32, cluster.sites().len() as u32);
    let uplinks = 2 * (devices + 1);
    let links = uplinks + 2 * sites;
    match line {
        Line::Card { host: Place::Device(host), outward } => Some(2 * host + u32::from(outward)),
        Line::Card { outward, .. } => Some(2 * devices + u32::from(outward)),
        Line::Uplink { site, outward } => Some(uplinks + 2 * site + u32::from(outward)),
        Line::Link { from, to } => {
            let at = cluster.direct_links().binary_search_by_key(&(from, to), |l| (l.from, l.to));
            at.ok().map(|at| links + at as u32)
        }
    }
}

/// Drops lines that only one pair of units uses, because that pair's link already counts them. The others get new
/// numbers. Returns how many they are.
fn keep_shared(lines: &mut [Vec<LineShare>]) -> usize {
    let mut pairs: BTreeMap<u32, u32> = BTreeMap::new();
    lines.iter().flatten().for_each(|share| *pairs.entry(share.line).or_default() += 1);
    let shared = pairs.into_iter().filter(|(_, pairs)| *pairs > 1).map(|(line, _)| line);
    let numbers: HashMap<u32, u32> = shared.zip(0..).collect();
    for of_pair in lines {
        of_pair.retain_mut(|share| {
            let number = numbers.get(&share.line);
            number.inspect(|n| share.line = **n).is_some()
        });
    }
    numbers.len()
}

/// The peer at a place in the table of links. The last place is the broker's.
fn peer(width: usize, place: usize) -> PeerId {
    if place + 1 == width { PeerId::BROKER } else { PeerId(place as u32) }
}
