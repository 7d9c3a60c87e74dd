//! The atlas: all that is known of members' machines and of the links between them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use fusionllm_graph::units::{counted, rate, seconds};
use fusionllm_plan::{Cluster, Device, DirectLink, Link, Place, PlanError, Processor, Site};
use serde::{Deserialize, Serialize};

use crate::{ComputesOn, MachineProfile, Member, MemberId};

/// The known machines of members and the links between them. An atlas is kept over generations.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Atlas {
    pub(crate) machines: BTreeMap<MemberId, MachineProfile>,
    /// The links there and back between two members, of which the first has the smaller number. `None` if they cannot
    /// reach each other.
    pub(crate) links: BTreeMap<(MemberId, MemberId), Option<(Link, Link)>>,
    /// How many times slower members compute than when they were measured.
    slower: BTreeMap<MemberId, f64>,
    /// The pairs whose packets went through a relay when they were measured.
    pub(crate) relayed: BTreeSet<(MemberId, MemberId)>,
    /// The addresses from which members' packets reach the broker.
    lines: BTreeMap<MemberId, IpAddr>,
    /// The processors that members compute on.
    seats: BTreeMap<MemberId, Seat>,
    /// The members that were measured while nobody else was on their processor.
    alone: BTreeSet<MemberId>,
    /// By member that was measured together with others of its processor.
    crowds: BTreeMap<MemberId, Crowd>,
}

/// A member's place at a processor. Members with equal seats are equally fast, unless they have profiles.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Seat {
    at: ComputesOn,
    backend: String,
}

/// A measurement of several members at once on one processor.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Crowd {
    /// How many times as long a member's operators took as alone, without the time that it waited for a core.
    times_as_long: f64,
    /// The cores that all of them would keep busy.
    busy: f64,
}

impl Atlas {
    /// Notes how many times slower a member computes than when it was measured.
    pub fn set_slower(&mut self, member: MemberId, times: f64) {
        self.slower.insert(member, times.max(1.0));
    }

    /// Notes the address from which a member's packets reach the broker. Machines behind one router have the same
    /// address, and share the router's line. `None` is for an address that says nothing, as on one machine.
    pub fn set_line(&mut self, member: MemberId, from: Option<IpAddr>) {
        match from.map(|ip| ip.to_canonical()).filter(|ip| !ip.is_loopback()) {
            Some(ip) => self.lines.insert(member, ip),
            None => self.lines.remove(&member),
        };
    }

    /// Notes the processor that a member computes on, and its backend.
    pub fn set_processor(&mut self, member: MemberId, at: Option<ComputesOn>, backend: &str) {
        match at {
            Some(at) => _ = self.seats.insert(member, Seat { at, backend: backend.to_owned() }),
            None => _ = self.seats.remove(&member),
        }
    }

    /// Of `members`, those on one processor, for each processor that at least two of them compute on.
    pub(crate) fn neighbours(&self, members: &[MemberId]) -> Vec<Vec<MemberId>> {
        let mut by_processor: BTreeMap<[u8; 16], Vec<MemberId>> = BTreeMap::new();
        for member in members {
            if let Some(seat) = self.seats.get(member) {
                by_processor.entry(seat.at.id).or_default().push(*member);
            }
        }
        by_processor.into_values().filter(|members| members.len() > 1).collect()
    }

    /// Of members on one processor, the first of each kind that was never measured alone. A profile needs no measuring.
    pub(crate) fn unmeasured_kinds(&self, neighbours: &[MemberId]) -> Vec<MemberId> {
        let mut kinds: Vec<MemberId> = Vec::new();
        for member in neighbours {
            let Some(kind) = self.seats.get(member).filter(|seat| !seat.at.profiled) else { continue };
            if self.alone_of(*member).is_none() && !kinds.iter().any(|known| self.seats.get(known) == Some(kind)) {
                kinds.push(*member);
            }
        }
        kinds
    }

    /// A member that was measured alone and is as fast as this one: itself, or another in an equal seat.
    fn alone_of(&self, member: MemberId) -> Option<MemberId> {
        if self.alone.contains(&member) {
            return Some(member);
        }
        let seat = self.seats.get(&member).filter(|seat| !seat.at.profiled)?;
        self.alone.iter().copied().find(|other| self.seats.get(other) == Some(seat))
    }

    /// Takes in what a member measured alone.
    pub(crate) fn add_alone(&mut self, member: MemberId, machine: MachineProfile) {
        self.machines.insert(member, machine);
        self.alone.insert(member);
    }

    /// Takes in what a member measured while these members of its processor did.
    pub(crate) fn add_crowded(&mut self, member: MemberId, machine: MachineProfile, together: &[MemberId]) {
        let seats = together.iter().filter_map(|m| self.seats.get(m)).filter(|seat| !seat.at.profiled);
        let busy: f64 = seats.clone().map(|seat| seat.at.busy).sum();
        let alone = self.alone_of(member).and_then(|m| self.machines.get(&m));
        let times_as_long = alone.and_then(|alone| machine.operators.times_as_long(&alone.operators));
        if let Some((seat, times_as_long)) = self.seats.get(&member).zip(times_as_long).filter(|_| seats.count() > 1) {
            // Several threads are measured by a clock, which also runs while they wait for a core.
            let waited = if seat.at.busy > 1.0 { (busy / f64::from(seat.at.cores)).max(1.0) } else { 1.0 };
            self.crowds.insert(member, Crowd { times_as_long: times_as_long / waited, busy });
        }
        self.machines.entry(member).or_insert(machine);
    }

    /// The processor of a member, under the name of the first of `members` that computes there.
    fn processor(&self, member: MemberId, members: &[&Member]) -> Option<Processor> {
        let at = self.seats.get(&member)?.at;
        let is_there = |m: &MemberId| self.seats.get(m).is_some_and(|seat| seat.at.id == at.id);
        let first = members.iter().find(|m| is_there(&m.id))?;
        // A limit may have changed between two arrivals. All of them have the cores that the first one told.
        let cores = f64::from(self.seats.get(&first.id)?.at.cores);
        let busy = at.busy.min(cores);
        let crowds: Vec<&Crowd> = self.crowds.iter().filter(|(m, _)| is_there(m)).map(|(_, crowd)| crowd).collect();
        let mean = |of: fn(&Crowd) -> f64| crowds.iter().map(|c| of(c)).sum::<f64>() / crowds.len() as f64;
        let (crowded, crowd) = match crowds.is_empty() {
            true => (1.0, busy),
            false => (mean(|c| c.times_as_long).max(1.0), mean(|c| c.busy)),
        };
        Some(Processor { name: first.name.clone(), cores, busy, crowded, crowd })
    }

    /// The line of a member, if it is known.
    pub(crate) fn line(&self, member: MemberId) -> Option<IpAddr> {
        self.lines.get(&member).copied()
    }

    /// How many times slower a member computes than when it was measured.
    pub fn slower(&self, member: MemberId) -> f64 {
        self.slower.get(&member).copied().unwrap_or(1.0)
    }

    /// Notes that two members cannot reach each other any more.
    pub fn cut_off(&mut self, a: MemberId, b: MemberId) {
        self.links.insert((a.min(b), a.max(b)), None);
    }

    /// Forgets that some links of a member did not work, so that they are measured again.
    pub fn forget_failures(&mut self, member: MemberId) {
        self.links.retain(|(a, b), links| links.is_some() || (*a != member && *b != member));
    }

    /// The link from one member to another, if it is known and works.
    pub fn link(&self, from: MemberId, to: MemberId) -> Option<Link> {
        let (there, back) = (*self.links.get(&(from.min(to), from.max(to)))?)?;
        Some(if from < to { there } else { back })
    }

    /// Measured operations per second of a member's matrix products.
    pub fn flops(&self, member: MemberId) -> Option<f64> {
        self.machines.get(&member).map(|machine| machine.rates.matmul / machine.slowdown)
    }

    /// The bandwidth, in bytes/s, of the fastest link from a member.
    pub fn highest_bandwidth(&self, from: MemberId) -> Option<f64> {
        let others = self.links.keys().filter(|(a, b)| *a == from || *b == from);
        let rates = others.filter_map(|(a, b)| self.link(from, if *a == from { *b } else { *a }));
        rates.map(|link| link.bandwidth).max_by(f64::total_cmp)
    }

    /// Whether two members are known not to reach each other.
    pub fn is_cut_off(&self, a: MemberId, b: MemberId) -> bool {
        self.links.get(&(a.min(b), a.max(b))) == Some(&None)
    }

    /// The measured cluster, in which device `i` is member `i` of the list. Members that share a line form a site with
    /// an uplink. There is a note for each such line, and for each pair that cannot reach each other, or only through a
    /// relay.
    ///
    /// # Errors
    ///
    /// A machine is not measured.
    pub fn cluster(&self, members: &[&Member]) -> Result<(Cluster, Vec<String>), PlanError> {
        let mut devices = Vec::with_capacity(members.len());
        for member in members {
            let Some(machine) = self.machines.get(&member.id) else {
                return Err(PlanError::Cluster(format!("the machine of {:?} has not been measured", member.name)));
            };
            // What others of its processor took from it while they were measured together is counted apart.
            let alone = self.alone_of(member.id).and_then(|m| self.machines.get(&m)).unwrap_or(machine);
            devices.push(Device {
                processor: self.processor(member.id, members),
                slowdown: machine.slowdown * self.slower(member.id),
                measured: alone.operators.clone(),
                scratch: machine.scratch.clone(),
                backend: Some(member.backend.clone()),
                disk: machine.disk,
                host_link: machine.host_link,
                ..Device::new(member.name.clone(), alone.rates, machine.memory)
            });
        }
        let place = |m: MemberId| match m {
            MemberId::BROKER => Some(Place::Broker),
            m => members.iter().position(|known| known.id == m).map(|i| Place::Device(i as u32)),
        };
        let name = |m: MemberId| members.iter().find(|known| known.id == m).map_or("the broker", |m| m.name.as_str());
        let (mut direct, mut notes) = (Vec::new(), Vec::new());
        for (&(a, b), links) in &self.links {
            let Some((from, to)) = place(a).zip(place(b)) else { continue };
            match links {
                Some((there, back)) => {
                    if self.relayed.contains(&(a, b)) {
                        notes.push(relayed_note(name(a), name(b), there, back));
                    }
                    direct.push(DirectLink { from, to, link: *there });
                    direct.push(DirectLink { from: to, to: from, link: *back });
                }
                None => notes.push(format!(
                    "{} and {} cannot reach each other; check that no firewall blocks UDP between them, or name a relay in the \
                     job: [network] relay",
                    name(a),
                    name(b)
                )),
            }
        }
        let ids: Vec<MemberId> = members.iter().map(|m| m.id).collect();
        for neighbours in self.neighbours(&ids) {
            let names: Vec<&str> = neighbours.iter().map(|m| name(*m)).collect();
            let cores = self.seats.get(&neighbours[0]).map_or(0, |seat| seat.at.cores);
            notes.push(format!(
                "{} compute on one machine, and divide its {}",
                several(&names),
                counted(cores, "core")
            ));
        }
        let mut sites = Vec::new();
        for sharers in self.sharers(members) {
            let Some(site) = self.shared_line(members, &sharers) else { continue };
            notes.push(shared_note(&site));
            sharers.iter().for_each(|i| devices[*i].site = Some(sites.len() as u32));
            sites.push(site);
        }
        Ok((Cluster::new(devices, sites, direct, Some(Place::Broker))?, notes))
    }

    /// The places of members that share a line, for each line.
    fn sharers(&self, members: &[&Member]) -> Vec<Vec<usize>> {
        let mut by_line: BTreeMap<IpAddr, Vec<usize>> = BTreeMap::new();
        for (i, member) in members.iter().enumerate() {
            if let Some(line) = self.line(member.id) {
                by_line.entry(line).or_default().push(i);
            }
        }
        by_line.into_values().filter(|sharers| sharers.len() > 1).collect()
    }

    /// The site of members that share a line. No two of them were measured at once, so the fastest link through the
    /// line tells its rate. `None` if none is known.
    fn shared_line(&self, members: &[&Member], sharers: &[usize]) -> Option<Site> {
        let inside: BTreeSet<MemberId> = sharers.iter().map(|i| members[*i].id).collect();
        let ends = self.links.keys().filter(|(a, b)| inside.contains(a) != inside.contains(b));
        let outward = ends.map(|(a, b)| if inside.contains(a) { (*a, *b) } else { (*b, *a) });
        let fastest = |links: &mut dyn Iterator<Item = Option<Link>>| {
            let rates = links.flatten().map(|link| link.bandwidth);
            rates.max_by(f64::total_cmp).map(|bandwidth| Link { latency: 0.0, bandwidth })
        };
        let uplink = fastest(&mut outward.clone().map(|(from, to)| self.link(from, to)))?;
        let downlink = fastest(&mut outward.map(|(to, from)| self.link(from, to)))?;
        let names: Vec<&str> = sharers.iter().map(|i| members[*i].name.as_str()).collect();
        let name = format!("line of {}", several(&names));
        Some(Site { name, inside: None, uplink: Some(uplink), downlink: Some(downlink) })
    }
}

/// At least two names, in few words.
fn several(names: &[&str]) -> String {
    match names {
        [first, second] => format!("{first} and {second}"),
        all => format!("{} and {} more", all[0], all.len() - 1),
    }
}

fn shared_note(site: &Site) -> String {
    let of = |link: Option<Link>| rate(link.map_or(0.0, |link| link.bandwidth));
    let (up, down) = (of(site.uplink), of(site.downlink));
    format!("the {} is shared: {up} out of it, {down} into it, for all of them together", site.name)
}

fn relayed_note(a: &str, b: &str, there: &Link, back: &Link) -> String {
    format!(
        "{a} and {b} reach each other only through the relay: {} and {}, {} each way; `fusionllm doctor` on both says why",
        rate(there.bandwidth),
        rate(back.bandwidth),
        seconds(there.latency)
    )
}
