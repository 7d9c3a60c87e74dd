//! Hosts and their network cards.

use foldhash::{HashMap, HashMapExt};
use fusionllm_program::PeerId;

use super::{Cluster, Link, Place, Site};
use crate::cost::Card;

/// The host of each device, and the network card of each host.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Hosts {
    /// By device: the first device of its host.
    first: Vec<u32>,
    /// By device: its host's card.
    cards: Vec<Card>,
    /// The card of a broker on a machine of its own.
    broker: Card,
}

impl Hosts {
    pub(super) fn new(cluster: &Cluster) -> Self {
        let mut named: HashMap<&str, u32> = HashMap::new();
        let first: Vec<u32> = (0..)
            .zip(&cluster.devices)
            .map(|(i, d)| d.host.as_deref().map_or(i, |host| *named.entry(host).or_insert(i)))
            .collect();
        let links = fastest_links(cluster);
        // All devices of a host declare the same card, but each has links of its own.
        let mut of_hosts = vec![Card::default(); first.len()];
        for ((i, d), &host) in (0..).zip(&cluster.devices).zip(&first) {
            let card = d.network.or(default_card(cluster, &links, Place::Device(i), d.site));
            of_hosts[host as usize] = of_hosts[host as usize].faster(card);
        }
        let cards = first.iter().map(|host| of_hosts[*host as usize]).collect();
        let site = cluster.site_of(Place::Broker);
        let broker = cluster.broker_network.or(default_card(cluster, &links, Place::Broker, site));
        Self { first, cards, broker }
    }
}

/// By place: the rates of the fastest declared link from there and of the fastest to there.
fn fastest_links(cluster: &Cluster) -> HashMap<Place, Card> {
    let mut fastest: HashMap<Place, Card> = HashMap::new();
    for l in &cluster.direct {
        let rate = Some(l.link.bandwidth);
        let ends = [(l.from, Card { outward: rate, inward: None }), (l.to, Card { outward: None, inward: rate })];
        for (end, card) in ends {
            let known = fastest.entry(end).or_default();
            *known = known.faster(card);
        }
    }
    fastest
}

/// A card that is not declared: as fast as the links inside its site, or as a faster link of its own. If the site
/// declares no links inside, it is as fast as the fastest of the links that the machine can use.
fn default_card(cluster: &Cluster, links: &HashMap<Place, Card>, machine: Place, site: Option<u32>) -> Card {
    let of = |place| links.get(&place).copied().unwrap_or_default();
    let rate = |link: &Option<Link>| link.map(|l| l.bandwidth);
    let of_site = match site.and_then(|s| Some((s, cluster.sites.get(s as usize)?))) {
        Some((_, Site { inside: Some(inside), .. })) => Card::new(inside.bandwidth),
        Some((site, Site { uplink, downlink, .. })) => {
            let uplink = Card { outward: rate(uplink), inward: rate(downlink).or(rate(uplink)) };
            uplink.faster(of(Place::Site(site)))
        }
        None => Card::default(),
    };
    of(machine).faster(of_site)
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

    /// The network card of a peer's host: as declared in [`Device::network`], by default as fast in each direction as
    /// the links inside its site or as a faster link of its own. Without a site, or if the site declares no links
    /// inside, it is as fast as the fastest of all links that the machine can use.
    ///
    /// [`Device::network`]: crate::Device::network
    pub fn card(&self, peer: PeerId) -> Card {
        match self.place(peer) {
            Some(Place::Device(d)) => self.hosts.cards.get(d as usize).copied().unwrap_or_default(),
            Some(_) => self.hosts.broker,
            None => Card::default(),
        }
    }

    /// The devices of a host, which [`Self::host_of`] names by its first.
    pub(super) fn devices_of(&self, host: Place) -> impl Iterator<Item = PeerId> {
        let on_host = move |first: u32| Place::Device(first) == host;
        (0..).zip(&self.hosts.first).filter(move |(_, first)| on_host(**first)).map(|(i, _)| PeerId(i))
    }

    /// The cluster with these network cards, by device, and of a broker on a machine of its own. A card that is already
    /// so fast by default stays undeclared.
    pub(super) fn with_cards(mut self, of_device: impl Fn(PeerId) -> Card, broker: Card) -> Self {
        for i in 0..self.devices.len() {
            let (peer, card) = (PeerId(i as u32), of_device(PeerId(i as u32)));
            if card != self.card(peer) {
                self.devices[i].network = card;
            }
        }
        if !matches!(self.broker, Place::Device(_)) && broker != self.card(PeerId::BROKER) {
            self.broker_network = broker;
        }
        self.hosts = Box::new(Hosts::new(&self));
        self
    }
}
