//! Hosts and their network cards.

use std::collections::HashMap;

use super::{Cluster, Place, Site};
use crate::program::PeerId;

/// The host of each device, and the rate of each host's network card.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Hosts {
    /// By device: the first device of its host.
    first: Vec<u32>,
    /// By device: bytes/s of its host's card in each direction; `None` if nothing is known of it.
    cards: Vec<Option<f64>>,
    /// The same of a broker on a machine of its own.
    broker: Option<f64>,
}

impl Hosts {
    pub(super) fn new(cluster: &Cluster) -> Self {
        let mut named: HashMap<&str, u32> = HashMap::new();
        let first: Vec<u32> = (0..)
            .zip(&cluster.devices)
            .map(|(i, d)| d.host.as_deref().map_or(i, |host| *named.entry(host).or_insert(i)))
            .collect();
        let fastest = fastest_links(cluster);
        let rate =
            |declared: Option<f64>, machine, site| declared.or_else(|| default_rate(cluster, &fastest, machine, site));
        // All devices of a host declare the same card, but each has links of its own.
        let mut of_hosts: Vec<Option<f64>> = vec![None; first.len()];
        for ((i, d), &host) in (0..).zip(&cluster.devices).zip(&first) {
            let of_host = &mut of_hosts[host as usize];
            *of_host = faster(*of_host, rate(d.network, Place::Device(i), d.site));
        }
        let cards = first.iter().map(|host| of_hosts[*host as usize]).collect();
        let broker = match cluster.broker {
            Place::Device(_) => None,
            Place::Site(s) => rate(cluster.broker_network, Place::Broker, Some(s)),
            Place::Broker => rate(cluster.broker_network, Place::Broker, None),
        };
        Self { first, cards, broker }
    }
}

/// By place: the bytes/s of its fastest declared link, in either direction.
fn fastest_links(cluster: &Cluster) -> HashMap<Place, f64> {
    let mut fastest: HashMap<Place, f64> = HashMap::new();
    for l in &cluster.direct {
        for end in [l.from, l.to] {
            let rate = fastest.entry(end).or_insert(l.link.bandwidth);
            *rate = rate.max(l.link.bandwidth);
        }
    }
    fastest
}

/// The rate of a card that is not declared: that inside its site, or that of a faster link of its own. If the site
/// declares no rate inside, it is the fastest of the links that the machine can use.
fn default_rate(cluster: &Cluster, fastest: &HashMap<Place, f64>, machine: Place, site: Option<u32>) -> Option<f64> {
    let own = fastest.get(&machine).copied();
    let Some((site, Site { inside, uplink, downlink, .. })) =
        site.and_then(|s| Some((s, cluster.sites.get(s as usize)?)))
    else {
        return own;
    };
    match inside {
        Some(inside) => faster(own, Some(inside.bandwidth)),
        None => {
            let of_site = fastest.get(&Place::Site(site)).copied();
            let uplinks = [uplink, downlink].into_iter().map(|l| l.map(|l| l.bandwidth));
            uplinks.fold(faster(own, of_site), faster)
        }
    }
}

/// The larger of two rates, if any is known.
fn faster(a: Option<f64>, b: Option<f64>) -> Option<f64> {
    a.into_iter().chain(b).reduce(f64::max)
}

impl Cluster {
    /// The machine that a peer runs on: the first device of its host, or [`Place::Broker`]. `None` if the device does
    /// not exist.
    pub fn host_of(&self, peer: PeerId) -> Option<Place> {
        match self.place(peer)? {
            Place::Device(d) => self.hosts.first.get(d as usize).copied().map(Place::Device),
            other => Some(other),
        }
    }

    /// Bytes/s of the network card of a peer's host, in each direction: as declared in [`Device::network`], by default
    /// the rate inside its site or of a faster link of its own. Without a site, or if the site declares no rate inside,
    /// it is the fastest of all links that the machine can use. `None` if there are none.
    ///
    /// [`Device::network`]: crate::Device::network
    pub fn card(&self, peer: PeerId) -> Option<f64> {
        match self.place(peer)? {
            Place::Device(d) => *self.hosts.cards.get(d as usize)?,
            _ => self.hosts.broker,
        }
    }

    /// The devices of a host, which [`Self::host_of`] names by its first.
    pub(super) fn devices_of(&self, host: Place) -> impl Iterator<Item = PeerId> {
        let first = match host {
            Place::Device(d) => Some(d),
            _ => None,
        };
        (0..).zip(&self.hosts.first).filter(move |(_, f)| Some(**f) == first).map(|(i, _)| PeerId(i))
    }

    /// The cluster with these network cards, by device, and of the broker. A card that is already so fast by default
    /// stays undeclared.
    pub(super) fn with_cards(mut self, of_device: impl Fn(PeerId) -> Option<f64>, broker: Option<f64>) -> Self {
        for i in 0..self.devices.len() {
            let (peer, rate) = (PeerId(i as u32), of_device(PeerId(i as u32)));
            if rate.is_some() && rate != self.card(peer) {
                self.devices[i].network = rate;
            }
        }
        if broker.is_some() && broker != self.card(PeerId::BROKER) {
            self.broker_network = broker;
        }
        self.hosts = Hosts::new(&self);
        self
    }
}
