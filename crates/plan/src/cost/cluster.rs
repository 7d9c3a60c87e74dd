//! The machines to train on: devices, sites and the links between them.

use std::collections::{BTreeMap, HashSet};

use serde::{Deserialize, Serialize};

use super::device::{Device, Rates};
use crate::error::PlanError;
use crate::program::PeerId;

/// Devices, their sites, the links that join them, and the broker's place.
///
/// Device `i` is `PeerId(i)`. A message takes a [`Route`]: the uplink of the sender's site, the direct link, and the
/// uplink of the receiver's site.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Parts", into = "Parts")]
pub struct Cluster {
    devices: Vec<Device>,
    sites: Vec<Site>,
    /// The direct links, sorted by their ends. No two have the same ends.
    direct: Vec<DirectLink>,
    broker: Place,
}

/// One direction of a connection. A message of `M` bytes takes `latency + M / bandwidth`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// Seconds.
    pub latency: f64,
    /// Bytes/s.
    pub bandwidth: f64,
}

impl Link {
    /// Seconds that `bytes` take if nothing else uses the link.
    pub fn seconds(&self, bytes: f64) -> f64 {
        self.latency + bytes / self.bandwidth
    }
}

/// Devices in one place.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Site {
    /// The site's name.
    pub name: String,
    /// The link between any two of its devices, in each direction. Each pair has its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inside: Option<Link>,
    /// The link that carries all messages that leave the site, and in the other direction all messages that enter it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uplink: Option<Link>,
    /// The link that carries all messages that enter the site, if it differs from `uplink`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub downlink: Option<Link>,
}

/// An end of a [`DirectLink`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    /// A device, by index.
    Device(u32),
    /// Every machine of a site, by index.
    Site(u32),
    /// The broker, if it runs on a machine of its own.
    Broker,
}

/// A declared link from one place to another. Between two sites, each pair of their devices has its own.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct DirectLink {
    /// The sender's side.
    pub from: Place,
    /// The receiver's side.
    pub to: Place,
    /// Its latency and bandwidth.
    #[serde(flatten)]
    pub link: Link,
}

/// One direction of a site's uplink, which several pairs of devices share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct UplinkId {
    /// Index of the site.
    pub site: u32,
    /// Whether messages leave the site. Otherwise they enter it.
    pub outward: bool,
}

/// All links that a message crosses from one machine to another.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Route {
    /// The direct link; `None` if only the uplinks limit.
    pub direct: Option<Link>,
    /// The uplink of the sender's site.
    pub up: Option<(UplinkId, Link)>,
    /// The uplink of the receiver's site.
    pub down: Option<(UplinkId, Link)>,
}

impl Route {
    /// The route as one link: latencies add up, and the least bandwidth limits. On one machine the bandwidth is
    /// infinite.
    pub fn link(&self) -> Link {
        let pieces = [self.direct, self.up.map(|u| u.1), self.down.map(|d| d.1)];
        let free = Link { latency: 0.0, bandwidth: f64::INFINITY };
        pieces.into_iter().flatten().fold(free, |whole, piece| Link {
            latency: whole.latency + piece.latency,
            bandwidth: whole.bandwidth.min(piece.bandwidth),
        })
    }
}

impl Cluster {
    /// A cluster of these parts. The broker stands at `broker`, by default on the first device's machine.
    ///
    /// # Errors
    ///
    /// There is no device, a name is used twice, an index does not exist, or two direct links have the same ends.
    /// Bandwidths and rates must be above zero, latencies at least zero, slowdowns at least one.
    pub fn new(
        devices: Vec<Device>,
        sites: Vec<Site>,
        mut direct: Vec<DirectLink>,
        broker: Option<Place>,
    ) -> Result<Self, PlanError> {
        direct.sort_by_key(|l| (l.from, l.to));
        let cluster = Self { devices, sites, direct, broker: broker.unwrap_or(Place::Device(0)) };
        cluster.check().map_err(PlanError::Cluster)?;
        Ok(cluster)
    }

    fn check(&self) -> Result<(), String> {
        if self.devices.is_empty() {
            return Err("it has no devices".into());
        }
        let mut names = HashSet::new();
        for name in self.devices.iter().map(|d| &d.name).chain(self.sites.iter().map(|s| &s.name)) {
            if name.is_empty() || !names.insert(name) {
                return Err(format!("the name {name:?} is empty, or names two devices or sites"));
            }
        }
        for d in &self.devices {
            let Rates { matmul, convolution, memory, overhead } = d.rates;
            let overhead = overhead >= 0.0 && overhead.is_finite();
            if !overhead || ![matmul, convolution, memory].into_iter().all(positive) {
                return Err(format!("the rates of device {:?} must be above zero, its overhead at least zero", d.name));
            }
            if !(d.slowdown >= 1.0 && d.slowdown.is_finite()) {
                return Err(format!("device {:?} has slowdown {}; it must be at least 1", d.name, d.slowdown));
            }
            if d.site.is_some_and(|s| s as usize >= self.sites.len()) {
                return Err(format!("device {:?} is in a site that does not exist", d.name));
            }
        }
        for s in &self.sites {
            for link in [s.inside, s.uplink, s.downlink].into_iter().flatten() {
                check_link(&link, || format!("site {:?}", s.name))?;
            }
        }
        for place in self.direct.iter().flat_map(|l| [l.from, l.to]).chain([self.broker]) {
            let there = match place {
                Place::Device(d) => (d as usize) < self.devices.len(),
                Place::Site(s) => (s as usize) < self.sites.len(),
                Place::Broker => true,
            };
            if !there {
                return Err(format!("{place:?} does not exist"));
            }
        }
        for l in &self.direct {
            check_link(&l.link, || format!("the link from {} to {}", self.place_name(l.from), self.place_name(l.to)))?;
        }
        match self.direct.windows(2).find(|w| (w[0].from, w[0].to) == (w[1].from, w[1].to)) {
            Some(w) => {
                let (from, to) = (self.place_name(w[0].from), self.place_name(w[0].to));
                Err(format!("there are two links from {from} to {to}"))
            }
            None => Ok(()),
        }
    }

    /// The devices; device `i` is `PeerId(i)`.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// The sites.
    pub fn sites(&self) -> &[Site] {
        &self.sites
    }

    /// The declared links, sorted by their ends.
    pub fn direct_links(&self) -> &[DirectLink] {
        &self.direct
    }

    /// The broker's place: on a device's machine, or on its own machine, in a site or outside all sites
    /// ([`Place::Broker`]).
    pub fn broker(&self) -> Place {
        self.broker
    }

    /// The links that messages cross from one machine to another. `None` if no link leads there or a device does not
    /// exist.
    ///
    /// The most specific direct link counts: device to device, device to site, site to device, then site to site.
    /// Within a site it is [`Site::inside`]. Two sites with uplinks need no direct link. A broker on a device's
    /// machine uses that device's links.
    pub fn route(&self, from: PeerId, to: PeerId) -> Option<Route> {
        let (a, b) = (self.place(from)?, self.place(to)?);
        if a == b {
            return Some(Route { direct: None, up: None, down: None });
        }
        let (a_site, b_site) = (self.site_of(a), self.site_of(b));
        let site = |s: Option<u32>| s.map(Place::Site);
        let ends = [(Some(a), Some(b)), (Some(a), site(b_site)), (site(a_site), Some(b)), (site(a_site), site(b_site))];
        let direct = ends.into_iter().find_map(|(from, to)| self.direct_link(from?, to?));
        if a_site.is_some() && a_site == b_site {
            let direct = direct.or_else(|| self.sites[a_site? as usize].inside)?;
            return Some(Route { direct: Some(direct), up: None, down: None });
        }
        let uplink = |site: Option<u32>, outward| {
            let site = site?;
            let Site { uplink, downlink, .. } = &self.sites[site as usize];
            let link = if outward { *uplink } else { downlink.or(*uplink) };
            Some((UplinkId { site, outward }, link?))
        };
        let (up, down) = (uplink(a_site, true), uplink(b_site, false));
        (direct.is_some() || (up.is_some() && down.is_some())).then_some(Route { direct, up, down })
    }

    /// The route as one link, see [`Route::link`]. `None` if there is no route.
    pub fn link(&self, from: PeerId, to: PeerId) -> Option<Link> {
        self.route(from, to).map(|p| p.link())
    }

    /// The shared uplinks that a message crosses, in order.
    pub fn uplinks(&self, from: PeerId, to: PeerId) -> impl Iterator<Item = (UplinkId, Link)> {
        self.route(from, to).into_iter().flat_map(|p| [p.up, p.down]).flatten()
    }

    /// A device's name, or `broker`.
    pub fn name(&self, peer: PeerId) -> &str {
        match peer {
            PeerId::BROKER => "broker",
            PeerId(p) => self.devices.get(p as usize).map_or("?", |d| &d.name),
        }
    }

    /// The device of this name.
    pub fn find(&self, name: &str) -> Option<PeerId> {
        (0..).zip(&self.devices).find(|(_, d)| d.name == name).map(|(i, _)| PeerId(i))
    }

    /// The cluster of some devices, in the given order: device `i` is `devices[i]`. All sites stay. If the broker's
    /// device is left out, the broker keeps its place and its links.
    ///
    /// # Errors
    ///
    /// A device does not exist, is named twice, or none is named.
    pub fn select(&self, devices: &[PeerId]) -> Result<Self, PlanError> {
        let fail = |m: String| Err(PlanError::Cluster(m));
        let mut index = vec![None; self.devices.len()];
        let mut chosen = Vec::with_capacity(devices.len());
        for (i, p) in (0..).zip(devices) {
            match (self.devices.get(p.0 as usize), index.get_mut(p.0 as usize)) {
                (Some(device), Some(slot @ None)) => {
                    *slot = Some(i);
                    chosen.push(device.clone());
                }
                _ => return fail(format!("{p} does not exist, or is named twice")),
            }
        }
        // If the broker's device is left out, its machine becomes the broker's own.
        let moved = |p: Place| match p {
            Place::Device(d) if index[d as usize].is_none() && p == self.broker => Some(Place::Broker),
            Place::Device(d) => index[d as usize].map(Place::Device),
            other => Some(other),
        };
        let direct = self
            .direct
            .iter()
            .filter_map(|l| Some(DirectLink { from: moved(l.from)?, to: moved(l.to)?, ..*l }))
            .collect();
        let broker = match (moved(self.broker), self.site_of(self.broker)) {
            (Some(Place::Broker), Some(site)) => Some(Place::Site(site)),
            (place, _) => place,
        };
        Self::new(chosen, self.sites.clone(), direct, broker)
    }

    /// The cluster with the bandwidth of each link multiplied by a factor.
    ///
    /// An uplink gets the largest factor of the links through it. A link with a smaller factor is slower by itself.
    ///
    /// # Errors
    ///
    /// A factor is not above zero.
    pub fn rescaled(&self, factors: &BTreeMap<(PeerId, PeerId), f64>) -> Result<Self, PlanError> {
        let mut best: BTreeMap<u32, f64> = BTreeMap::new();
        for (&(from, to), &factor) in factors {
            for (id, _) in self.uplinks(from, to) {
                let of_site = best.entry(id.site).or_insert(factor);
                *of_site = of_site.max(factor);
            }
        }
        let mut sites = self.sites.clone();
        for (i, site) in (0..).zip(&mut sites) {
            let Some(factor) = best.get(&i) else { continue };
            for link in [&mut site.uplink, &mut site.downlink].into_iter().flatten() {
                link.bandwidth *= factor;
            }
        }
        let mut direct = self.direct.clone();
        for (&(from, to), &factor) in factors {
            let Some(route) = self.route(from, to).filter(|p| p.link().bandwidth.is_finite()) else { continue };
            let ends = (Place::Device(from.0), Place::Device(to.0));
            let latency = route.direct.map_or(0.0, |l| l.latency);
            let link = Link { latency, bandwidth: factor * route.link().bandwidth };
            direct.retain(|l| (l.from, l.to) != ends);
            direct.push(DirectLink { from: ends.0, to: ends.1, link });
        }
        Self::new(self.devices.clone(), sites, direct, Some(self.broker))
    }

    /// The peer whose machine and links `peer` uses. It is `peer` itself, unless `peer` is a broker on a device's
    /// machine.
    pub fn host(&self, peer: PeerId) -> PeerId {
        match (peer, self.broker) {
            (PeerId::BROKER, Place::Device(d)) => PeerId(d),
            _ => peer,
        }
    }

    /// The machine that a peer runs on.
    fn place(&self, peer: PeerId) -> Option<Place> {
        match (peer, self.broker) {
            (PeerId::BROKER, on @ Place::Device(_)) => Some(on),
            (PeerId::BROKER, _) => Some(Place::Broker),
            (PeerId(d), _) => ((d as usize) < self.devices.len()).then_some(Place::Device(d)),
        }
    }

    fn site_of(&self, machine: Place) -> Option<u32> {
        match (machine, self.broker) {
            (Place::Device(d), _) => self.devices.get(d as usize)?.site,
            (Place::Broker, Place::Site(s)) => Some(s),
            _ => None,
        }
    }

    fn direct_link(&self, from: Place, to: Place) -> Option<Link> {
        let at = self.direct.binary_search_by_key(&(from, to), |l| (l.from, l.to)).ok()?;
        Some(self.direct[at].link)
    }

    fn place_name(&self, place: Place) -> &str {
        match place {
            Place::Device(d) => self.name(PeerId(d)),
            Place::Site(s) => self.sites.get(s as usize).map_or("?", |s| &s.name),
            Place::Broker => "broker",
        }
    }
}

fn positive(x: f64) -> bool {
    x > 0.0 && x.is_finite()
}

fn check_link(link: &Link, name: impl Fn() -> String) -> Result<(), String> {
    if !positive(link.bandwidth) {
        return Err(format!("{} has a bandwidth of {} bytes/s; it must be above zero", name(), link.bandwidth));
    }
    if !(link.latency >= 0.0 && link.latency.is_finite()) {
        return Err(format!("{} has a latency of {} s; it must be at least zero", name(), link.latency));
    }
    Ok(())
}

/// The serialised form.
#[derive(Serialize, Deserialize)]
struct Parts {
    devices: Vec<Device>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    sites: Vec<Site>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    links: Vec<DirectLink>,
    broker: Place,
}

impl TryFrom<Parts> for Cluster {
    type Error = PlanError;

    fn try_from(p: Parts) -> Result<Self, PlanError> {
        Self::new(p.devices, p.sites, p.links, Some(p.broker))
    }
}

impl From<Cluster> for Parts {
    fn from(c: Cluster) -> Self {
        Self { devices: c.devices, sites: c.sites, links: c.direct, broker: c.broker }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: PeerId = PeerId(0);
    const B: PeerId = PeerId(1);
    const C: PeerId = PeerId(2);

    fn link(latency: f64, bandwidth: f64) -> Link {
        Link { latency, bandwidth }
    }

    /// Devices a and b are at home, behind an uplink; c is in a laboratory.
    fn cluster(broker: Option<Place>) -> Cluster {
        let rates = Rates { matmul: 1e12, convolution: 1e12, memory: 1e11, overhead: 1e-6 };
        let at = |name: &str, site| Device { site: Some(site), ..Device::new(name, rates, 1 << 30) };
        let home = Site {
            name: "home".into(),
            inside: Some(link(0.001, 1e8)),
            uplink: Some(link(0.0625, 1e6)),
            downlink: None,
        };
        let lab = Site { name: "lab".into(), inside: None, uplink: None, downlink: None };
        let direct = vec![
            DirectLink { from: Place::Site(0), to: Place::Site(1), link: link(0.125, 5e6) },
            DirectLink { from: Place::Site(1), to: Place::Site(0), link: link(0.125, 5e5) },
            DirectLink { from: Place::Device(1), to: Place::Site(1), link: link(0.25, 7e5) },
        ];
        Cluster::new(vec![at("a", 0), at("b", 0), at("c", 1)], vec![home, lab], direct, broker).unwrap()
    }

    #[test]
    fn messages_take_the_most_specific_link_and_every_uplink() {
        let c = cluster(None);
        assert_eq!(c.link(A, B), Some(link(0.001, 1e8)));
        assert_eq!(c.link(A, C), Some(link(0.1875, 1e6)), "the uplink limits");
        assert_eq!(c.link(C, A), Some(link(0.1875, 5e5)), "the direct link limits");
        assert_eq!(c.link(B, C), Some(link(0.3125, 7e5)), "b has its own link");
        let out = UplinkId { site: 0, outward: true };
        assert_eq!(c.uplinks(B, C).map(|s| s.0).collect::<Vec<_>>(), [out]);
        assert_eq!(c.uplinks(C, B).map(|s| s.0).collect::<Vec<_>>(), [UplinkId { outward: false, ..out }]);
        assert_eq!(c.uplinks(A, B).count(), 0);
        assert_eq!(c.link(A, PeerId(3)), None);
    }

    #[test]
    fn the_broker_uses_the_links_of_its_place() {
        let c = cluster(None);
        assert_eq!(c.link(PeerId::BROKER, A).unwrap().bandwidth, f64::INFINITY, "with the first device");
        assert_eq!(c.link(PeerId::BROKER, C), c.link(A, C));
        let c = cluster(Some(Place::Site(1)));
        assert_eq!(c.link(PeerId::BROKER, A), c.link(C, A));
        assert_eq!(c.link(PeerId::BROKER, C), None, "no link joins two machines of the laboratory");
        assert_eq!(cluster(Some(Place::Broker)).link(PeerId::BROKER, A), None);
    }

    #[test]
    fn selected_devices_keep_their_links() {
        let c = cluster(Some(Place::Device(1)));
        let s = c.select(&[C, A]).unwrap();
        assert_eq!(s.link(PeerId(0), PeerId(1)), c.link(C, A));
        assert_eq!(s.broker(), Place::Site(0));
        assert_eq!(s.link(PeerId::BROKER, PeerId(0)), c.link(B, C), "the broker keeps b's own link");
        assert_eq!(s.link(PeerId::BROKER, PeerId(1)), c.link(B, A));
        assert!(c.select(&[A, A]).is_err());
        assert!(c.select(&[PeerId(7)]).is_err());
        assert!(c.select(&[]).is_err());
    }

    #[test]
    fn links_are_rescaled() {
        let c = cluster(None);
        let now = c.rescaled(&BTreeMap::from([((A, C), 0.5), ((B, C), 0.25), ((A, B), 2.0)])).unwrap();
        assert_eq!(now.sites()[0].uplink, Some(link(0.0625, 5e5)), "the factor of the best link through it");
        assert_eq!(now.link(A, C), Some(link(0.1875, 5e5)));
        assert_eq!(now.link(B, C), Some(link(0.3125, 1.75e5)), "slower by itself");
        assert_eq!(now.link(A, B), Some(link(0.001, 2e8)));
        assert_eq!(now.link(B, A), c.link(B, A), "nothing is known of the link back");
        assert_eq!(c.rescaled(&BTreeMap::new()).unwrap(), c);
        assert!(c.rescaled(&BTreeMap::from([((A, C), 0.0)])).is_err());
    }

    #[test]
    fn a_cluster_survives_its_file() {
        let c = cluster(Some(Place::Site(0)));
        let text = serde_json::to_string(&c).unwrap();
        assert_eq!(serde_json::from_str::<Cluster>(&text).unwrap(), c);
        let broken = text.replace("\"bandwidth\":500000.0", "\"bandwidth\":0.0");
        assert_ne!(broken, text);
        let e = serde_json::from_str::<Cluster>(&broken).unwrap_err().to_string();
        assert!(e.contains("the link from lab to home has a bandwidth of 0 bytes/s"), "{e}");
    }
}
