//! The scene to draw: areas with blocks of devices, and the connections between them.

use std::collections::{BTreeMap, HashMap};

use fusionllm_graph::units::{bytes, counted, ranges, rate, seconds};
use fusionllm_plan::{Change, Cluster, Device, Line, LineLoad, Link, Place, Plan, Simulation};
use fusionllm_program::PeerId;

/// Up to this many alike devices of a stage are drawn one by one, if there are few devices in their area.
const ALONE: usize = 3;
const FEW: usize = 6;

/// Up to this many devices without a site have an area each.
const AREAS_WITHOUT_SITE: usize = 12;

/// The cluster as it is drawn.
pub(super) struct Scene {
    /// Whether anything limits the step.
    pub(super) limited: bool,
    /// In pipeline order.
    pub(super) areas: Vec<Area>,
    /// Between areas, the busiest first.
    pub(super) bundles: Vec<Bundle>,
}

/// A site, or a device without one.
pub(super) struct Area {
    pub(super) title: String,
    /// The rate inside and what is sent there, from long to short.
    pub(super) subtitles: Vec<String>,
    pub(super) uplink: Option<Uplink>,
    /// In pipeline order.
    pub(super) blocks: Vec<Block>,
    /// Connections between two of its blocks.
    pub(super) inside: Vec<Bundle>,
}

/// A site's uplink, with the shares of the step that it is busy.
pub(super) struct Uplink {
    pub(super) link: Link,
    pub(super) out: f64,
    pub(super) in_: f64,
    pub(super) limits: bool,
    pub(super) tooltip: String,
}

/// A device, or several alike ones with the same stages.
pub(super) struct Block {
    pub(super) title: String,
    pub(super) stages: String,
    pub(super) detail: String,
    /// How many devices it is.
    pub(super) count: usize,
    /// Least and largest share of the step that they compute.
    pub(super) busy: Option<[f64; 2]>,
    /// Largest share of the memory that they need, and the least memory.
    pub(super) memory: Option<(f64, u64)>,
    /// Largest share of the step that a network card is busy, and its rate.
    pub(super) network: Option<(f64, f64)>,
    pub(super) limits: bool,
    pub(super) tooltip: String,
}

/// Everything that two areas send each other, or two blocks of an area.
pub(super) struct Bundle {
    /// Two indices, the smaller one first.
    pub(super) ends: [usize; 2],
    pub(super) bytes: u64,
    /// The share of the step that the busiest line on the way is busy.
    pub(super) busy: f64,
    /// Bytes/s of that line; infinite within one host.
    pub(super) rate: f64,
    pub(super) limits: bool,
    pub(super) tooltip: String,
}

/// A machine of the scene: a device, or the broker on a machine of its own or of a device that has no stage.
type Machine = PeerId;

struct Facts<'a> {
    cluster: &'a Cluster,
    plan: &'a Plan,
    simulation: &'a Simulation,
    limit: Option<Change>,
    lines: HashMap<Line, &'a LineLoad>,
    /// The stages of each device.
    stages: Vec<Vec<usize>>,
}

impl Scene {
    /// `limit` is the line or device that limits the step.
    pub(super) fn new(cluster: &Cluster, plan: &Plan, simulation: &Simulation, limit: Option<Change>) -> Self {
        let mut stages = vec![Vec::new(); cluster.devices().len()];
        for (s, stage) in plan.stages.iter().enumerate() {
            for p in stage.replicas() {
                if let Some(of) = stages.get_mut(p.0 as usize) {
                    of.push(s);
                }
            }
        }
        let lines = simulation.lines.iter().map(|l| (l.line, l)).collect();
        let facts = Facts { cluster, plan, simulation, limit, lines, stages };
        let places = facts.places();
        let mut areas = Vec::new();
        // The area and the block of each machine.
        let mut at: HashMap<Machine, (usize, usize)> = HashMap::new();
        for (site, machines) in places {
            let blocks = facts.blocks(&machines);
            for (b, (_, members)) in blocks.iter().enumerate() {
                at.extend(members.iter().map(|m| (*m, (areas.len(), b))));
            }
            areas.push(facts.area(site, blocks));
        }
        let (bundles, inside) = facts.bundles(&at);
        for (area, pairs) in inside {
            let limits = if pairs.iter().any(|b| b.limits) { " · limits the step" } else { "" };
            let sent = format!("{} a step{limits}", bytes(pairs.iter().map(|b| b.bytes).sum()));
            let area: &mut Area = &mut areas[area];
            area.subtitles.iter_mut().for_each(|s| *s = format!("{s} · {sent}"));
            area.subtitles.push(sent);
            area.inside = pairs;
        }
        Self { limited: limit.is_some(), areas, bundles }
    }
}

impl Facts<'_> {
    fn device(&self, m: Machine) -> Option<&Device> {
        self.cluster.devices().get(m.0 as usize)
    }

    fn stages(&self, m: Machine) -> &[usize] {
        self.stages.get(m.0 as usize).map_or(&[], |s| s)
    }

    /// The machine that a peer runs on.
    fn machine(&self, peer: PeerId) -> Machine {
        match (peer, self.cluster.broker()) {
            (PeerId::BROKER, Place::Device(d)) if !self.stages(PeerId(d)).is_empty() => PeerId(d),
            _ => peer,
        }
    }

    fn site(&self, m: Machine) -> Option<u32> {
        match (m, self.cluster.broker()) {
            (PeerId::BROKER, Place::Device(d)) => self.device(PeerId(d))?.site,
            (PeerId::BROKER, Place::Site(s)) => Some(s),
            _ => self.device(m)?.site,
        }
    }

    /// The machines that take part, by site, all in pipeline order.
    fn places(&self) -> Vec<(Option<u32>, Vec<Machine>)> {
        let mut machines: Vec<Machine> =
            (0..self.stages.len() as u32).map(PeerId).filter(|m| !self.stages(*m).is_empty()).collect();
        machines.sort_by_key(|m| (self.stages(*m).first().copied(), *m));
        let sends = self.simulation.links.iter().any(|l| self.machine(l.from) == PeerId::BROKER && l.bytes > 0);
        machines.extend(sends.then_some(PeerId::BROKER));
        let alone = machines.iter().filter(|m| self.site(**m).is_none()).count() <= AREAS_WITHOUT_SITE;
        let mut number: HashMap<(Option<u32>, Machine), usize> = HashMap::new();
        let mut places: Vec<(Option<u32>, Vec<Machine>)> = Vec::new();
        for m in machines {
            let site = self.site(m);
            let own = if site.is_none() && alone { m } else { PeerId::BROKER };
            let at = *number.entry((site, own)).or_insert(places.len());
            if at == places.len() {
                places.push((site, Vec::new()));
            }
            places[at].1.push(m);
        }
        places
    }

    fn area(&self, site: Option<u32>, blocks: Vec<(Block, Vec<Machine>)>) -> Area {
        let machines: usize = blocks.iter().map(|b| b.1.len()).sum();
        let blocks: Vec<Block> = blocks.into_iter().map(|b| b.0).collect();
        let Some((number, site)) = site.and_then(|s| Some((s, self.cluster.sites().get(s as usize)?))) else {
            let title = if machines > 1 { "machines without a site" } else { "" };
            return Area { title: title.into(), subtitles: Vec::new(), uplink: None, blocks, inside: Vec::new() };
        };
        let describe = |l: Link| format!("{}, {}", rate(l.bandwidth), seconds(l.latency));
        let subtitles = match site.inside.filter(|_| machines > 1) {
            Some(inside) => [describe(inside), rate(inside.bandwidth)].map(|l| format!("inside {l}")).to_vec(),
            None => Vec::new(),
        };
        let load = |outward| self.lines.get(&Line::Uplink { site: number, outward }).copied();
        let share = |outward| load(outward).map_or(0.0, |l| l.busy_s / step(self.simulation));
        let carried = |outward| bytes(load(outward).map_or(0, |l| l.bytes));
        let uplink = site.uplink.map(|link| Uplink {
            link,
            out: share(true),
            in_: share(false),
            limits: self.limited(|l| matches!(l, Line::Uplink { site, .. } if site == number)),
            tooltip: format!(
                "uplink of {}: {} out, {} in; {} out and {} in a step, busy {} and {} of it",
                site.name,
                describe(link),
                describe(site.downlink.unwrap_or(link)),
                carried(true),
                carried(false),
                percent(share(true)),
                percent(share(false))
            ),
        });
        Area { title: site.name.clone(), subtitles, uplink, blocks, inside: Vec::new() }
    }

    /// Whether a line limits the step. A change of a line counts for both directions.
    fn limited(&self, mut which: impl FnMut(Line) -> bool) -> bool {
        matches!(self.limit, Some(Change::Line { line, .. }) if which(line) || which(line.back()))
    }

    /// The blocks of an area, and the machines of each.
    fn blocks(&self, machines: &[Machine]) -> Vec<(Block, Vec<Machine>)> {
        let kind = |m: Machine| {
            let d = self.device(m);
            let speed = d.map(|d| [d.rates.matmul, d.slowdown].map(f64::to_bits));
            (self.stages(m), d.map(|d| d.memory), speed, d.and_then(|d| d.backend.as_deref()))
        };
        let mut number = BTreeMap::new();
        let mut groups: Vec<Vec<Machine>> = Vec::new();
        for &m in machines {
            let at = *number.entry(kind(m)).or_insert(groups.len());
            if at == groups.len() {
                groups.push(Vec::new());
            }
            groups[at].push(m);
        }
        let few = machines.len() <= FEW;
        let apart =
            |g: Vec<Machine>| if g.len() > ALONE || !few { vec![g] } else { g.into_iter().map(|m| vec![m]).collect() };
        groups.into_iter().flat_map(apart).map(|members| (self.block(&members), members)).collect()
    }

    fn block(&self, members: &[Machine]) -> Block {
        let first = members.first().copied().unwrap_or(PeerId::BROKER);
        let network = members.iter().filter_map(|m| self.network(*m)).max_by(|a, b| a.0.total_cmp(&b.0));
        let limits = members.iter().any(|m| match self.limit {
            Some(Change::Device { peer, .. }) => peer == *m,
            _ => self.limited(|l| matches!(l, Line::Card { host, .. } if self.cluster.host_of(*m) == Some(host))),
        });
        let Some(device) = self.device(first) else {
            let title = match self.cluster.broker() {
                Place::Device(d) => format!("broker on {}", self.cluster.name(PeerId(d))),
                _ => "broker".into(),
            };
            let (stages, detail, tooltip) = (String::new(), "sends the batches".into(), "the broker's machine".into());
            return Block { title, stages, detail, count: 1, busy: None, memory: None, network, limits, tooltip };
        };
        let stages = self.stages(first);
        let operators: usize = stages.iter().map(|s| self.plan.stages[*s].nodes.len()).sum();
        let replicas = stages.iter().map(|s| self.plan.stages[*s].replicas().len()).max().unwrap_or(1);
        let step = step(self.simulation);
        let loads: Vec<_> = members.iter().filter_map(|m| self.simulation.peers.get(m.0 as usize)).collect();
        let busy =
            loads.iter().map(|l| l.compute_s / step).fold([f64::INFINITY, 0.0], |[a, b], x| [a.min(x), b.max(x)]);
        let peak = loads.iter().map(|l| l.peak_bytes).max().unwrap_or(0);
        let mut detail = vec![counted(operators, "operator")];
        match (replicas, members.len()) {
            (1, _) => {}
            (n, some) if some == n => detail.push(format!("{n} replicas")),
            (n, some) => detail.push(format!("{some} of {n} replicas")),
        }
        let title = match members {
            [one] => self.cluster.name(*one).to_owned(),
            few if few.len() <= ALONE => few.iter().map(|m| self.cluster.name(*m)).collect::<Vec<_>>().join(", "),
            many => format!("{} × {}", many.len(), stem(&device.name)),
        };
        let names: Vec<&str> = members.iter().take(24).map(|m| self.cluster.name(*m)).collect();
        let more = if members.len() > names.len() { ", …" } else { "" };
        let tooltip = format!(
            "{}{more}: {}; computes up to {} of {} a step, holds up to {} of {}",
            names.join(", "),
            named(stages),
            seconds(busy[1] * step),
            seconds(step),
            bytes(peak),
            bytes(device.memory)
        );
        Block {
            title,
            stages: named(stages),
            detail: detail.join(" · "),
            count: members.len(),
            busy: (!loads.is_empty()).then_some(busy),
            memory: Some((peak as f64 / device.memory.max(1) as f64, device.memory)),
            network,
            limits,
            tooltip,
        }
    }

    /// The busier direction of a machine's network card: the share of the step, and the rate.
    fn network(&self, m: Machine) -> Option<(f64, f64)> {
        let host = self.cluster.host_of(m)?;
        let load = |outward| self.lines.get(&Line::Card { host, outward }).copied();
        let busier = [true, false].into_iter().filter_map(load).max_by(|a, b| a.busy_s.total_cmp(&b.busy_s))?;
        Some((busier.busy_s / step(self.simulation), busier.link.bandwidth))
    }

    /// The connections between areas, and those between blocks of each area.
    fn bundles(&self, at: &HashMap<Machine, (usize, usize)>) -> (Vec<Bundle>, BTreeMap<usize, Vec<Bundle>>) {
        let mut between: BTreeMap<[usize; 2], Gathered> = BTreeMap::new();
        let mut inside: BTreeMap<usize, BTreeMap<[usize; 2], Gathered>> = BTreeMap::new();
        for l in self.simulation.links.iter().filter(|l| l.bytes > 0) {
            let [from, to] = [l.from, l.to].map(|p| self.machine(p));
            let (Some(&a), Some(&b)) = (at.get(&from), at.get(&to)) else { continue };
            // A broker on a device's machine sends nothing to it over a line.
            if from == to {
                continue;
            }
            let sorted = |a: usize, b: usize| if a < b { [a, b] } else { [b, a] };
            let gathered = match a.0 == b.0 {
                true => inside.entry(a.0).or_default().entry(sorted(a.1, b.1)).or_default(),
                false => between.entry(sorted(a.0, b.0)).or_default(),
            };
            gathered.bytes[usize::from(a > b)] += l.bytes;
            let mut lines: Vec<(Line, Link)> =
                self.cluster.route(l.from, l.to).map_or(Vec::new(), |r| r.lines().collect());
            if a.0 != b.0 && lines.iter().any(|(l, _)| !matches!(l, Line::Card { .. })) {
                // Cards are drawn at their devices.
                lines.retain(|(l, _)| !matches!(l, Line::Card { .. }));
            }
            for (line, link) in lines {
                let busy = self.lines.get(&line).map_or(l.busy_s, |load| load.busy_s);
                gathered.limits |= matches!(line, Line::Link { .. }) && self.limited(|l| l == line);
                if gathered.busiest.is_none_or(|(most, ..)| busy > most) {
                    gathered.busiest = Some((busy, line, link));
                }
            }
        }
        let finish = |(ends, g): ([usize; 2], Gathered)| g.bundle(ends, self.cluster, step(self.simulation));
        let busiest_first = |all: BTreeMap<[usize; 2], Gathered>| {
            let mut all: Vec<Bundle> = all.into_iter().map(finish).collect();
            all.sort_by(|a, b| (b.busy, b.bytes).partial_cmp(&(a.busy, a.bytes)).unwrap_or(a.ends.cmp(&b.ends)));
            all
        };
        let inside = inside.into_iter().map(|(area, pairs)| (area, busiest_first(pairs))).collect();
        (busiest_first(between), inside)
    }
}

/// A bundle of links while they are gathered.
#[derive(Default)]
struct Gathered {
    /// From the first end to the second, and back.
    bytes: [u64; 2],
    busiest: Option<(f64, Line, Link)>,
    limits: bool,
}

impl Gathered {
    fn bundle(self, ends: [usize; 2], cluster: &Cluster, step_s: f64) -> Bundle {
        let [there, back] = self.bytes.map(bytes);
        let way = match self.busiest {
            Some((busy, line, link)) => format!(
                "busiest on the way: {}, {}, {}, busy {} of the step",
                cluster.line_name(line),
                rate(link.bandwidth),
                seconds(link.latency),
                percent(busy / step_s)
            ),
            None => "within one host".into(),
        };
        Bundle {
            ends,
            bytes: self.bytes.iter().sum(),
            busy: self.busiest.map_or(0.0, |b| b.0 / step_s),
            rate: self.busiest.map_or(f64::INFINITY, |b| b.2.bandwidth),
            limits: self.limits,
            tooltip: format!("{there} there and {back} back a step; {way}"),
        }
    }
}

/// Seconds of a step, above zero: shares of it are finite.
pub(super) fn step(simulation: &Simulation) -> f64 {
    if simulation.step_s > 0.0 { simulation.step_s } else { f64::INFINITY }
}

/// `54 %`.
pub(super) fn percent(share: f64) -> String {
    match 100.0 * share {
        p if p > 0.0 && p < 0.5 => "<1 %".into(),
        p => format!("{p:.0} %"),
    }
}

/// A name without its number: `ann` of `ann-2`.
pub(super) fn stem(name: &str) -> &str {
    match name.rsplit_once('-') {
        Some((stem, number)) if !stem.is_empty() && number.bytes().all(|b| b.is_ascii_digit()) => stem,
        _ => name,
    }
}

/// `stage 3`, or `stages 0–3, 7`.
fn named(stages: &[usize]) -> String {
    format!("{} {}", if stages.len() == 1 { "stage" } else { "stages" }, ranges(stages))
}
