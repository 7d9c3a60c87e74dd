//! The machines to train on: devices, sites and the links between them.

mod cards;
mod check;
mod parts;
mod rescaled;
mod route;
mod select;
#[cfg(test)]
mod tests;

use cards::Hosts;
use fusionllm_program::PeerId;
use parts::Parts;
pub use route::{Line, Route};
use serde::{Deserialize, Serialize};

use super::card::Card;
use super::device::Device;
use crate::error::PlanError;

/// Devices, their hosts and sites, the links that join them, and the broker's place.
///
/// Device `i` is `PeerId(i)`. A message takes a [`Route`]: the sender's network card, the uplink of its site, the
/// direct link, the uplink of the receiver's site, and the receiver's network card.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Parts", into = "Parts")]
pub struct Cluster {
    devices: Vec<Device>,
    sites: Vec<Site>,
    /// The direct links, sorted by their ends. No two have the same ends.
    direct: Vec<DirectLink>,
    broker: Place,
    /// The network card of a broker on a machine of its own, as far as it is declared.
    broker_network: Card,
    /// Follows from the rest. It is boxed because clusters are moved often.
    hosts: Box<Hosts>,
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
    /// The link between any two of its devices, in each direction. Each pair has its own. It is also the rate of their
    /// network cards, which all of a device's links share.
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

/// A declared link from one place to another. If an end is a site, all devices of the site share the link.
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

impl Cluster {
    /// A cluster of these parts. The broker stands at `broker`, by default on the first device's machine.
    ///
    /// # Errors
    ///
    /// There is no device, a name is used twice, an index does not exist, two direct links have the same ends, or
    /// devices of one host differ in their site or network card. Bandwidths and rates must be above zero, latencies at
    /// least zero, slowdowns at least one.
    pub fn new(
        devices: Vec<Device>,
        sites: Vec<Site>,
        mut direct: Vec<DirectLink>,
        broker: Option<Place>,
    ) -> Result<Self, PlanError> {
        direct.sort_by_key(|l| (l.from, l.to));
        let broker = broker.unwrap_or(Place::Device(0));
        Self { devices, sites, direct, broker, broker_network: Card::default(), hosts: Box::default() }.finished()
    }

    /// The cluster with this network card in the broker's own machine.
    ///
    /// # Errors
    ///
    /// A rate is not above zero, or the broker runs on a device's machine, whose card is [`Device::network`].
    pub fn with_broker_network(self, card: Card) -> Result<Self, PlanError> {
        Self { broker_network: card, ..self }.finished()
    }

    /// The cluster with other parts. The broker keeps its place.
    pub(crate) fn changed(
        &self,
        devices: Vec<Device>,
        sites: Vec<Site>,
        mut direct: Vec<DirectLink>,
    ) -> Result<Self, PlanError> {
        direct.sort_by_key(|l| (l.from, l.to));
        Self { devices, sites, direct, hosts: Box::default(), ..*self }.finished()
    }

    /// Checks the parts and derives the rest.
    fn finished(mut self) -> Result<Self, PlanError> {
        self.check().map_err(PlanError::Cluster)?;
        self.hosts = Box::new(Hosts::new(&self));
        Ok(self)
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

    /// The declared rates of the network card of the broker's own machine.
    pub fn broker_network(&self) -> Card {
        self.broker_network
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

    fn place_name(&self, place: Place) -> &str {
        match place {
            Place::Device(d) => self.name(PeerId(d)),
            Place::Site(s) => self.sites.get(s as usize).map_or("?", |s| &s.name),
            Place::Broker => "broker",
        }
    }
}
