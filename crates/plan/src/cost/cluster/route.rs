//! The lines that a message takes from one machine to another.

use fusionllm_program::PeerId;

use super::{Cluster, Link, Place, Site};

/// One direction of a connection that several pairs of machines may share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Line {
    /// The network card of a host.
    Card {
        /// The host, see [`Cluster::host_of`].
        host: Place,
        /// Whether messages leave the host. Otherwise they enter it.
        outward: bool,
    },
    /// The uplink of a site.
    Uplink {
        /// Index of the site.
        site: u32,
        /// Whether messages leave the site. Otherwise they enter it.
        outward: bool,
    },
    /// A link with the ends that are declared, or between two devices of a site.
    Link {
        /// The sender's side.
        from: Place,
        /// The receiver's side.
        to: Place,
    },
}

impl Line {
    /// The other direction.
    pub fn back(self) -> Self {
        match self {
            Self::Card { host, outward } => Self::Card { host, outward: !outward },
            Self::Uplink { site, outward } => Self::Uplink { site, outward: !outward },
            Self::Link { from, to } => Self::Link { from: to, to: from },
        }
    }
}

/// All lines that a message takes from one machine to another.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Route {
    /// In order: the sender's card, the uplink of its site, the direct link, the uplink of the receiver's site, the
    /// receiver's card.
    lines: [Option<(Line, Link)>; 5],
}

impl Route {
    /// The lines, in the order in which a message takes them. A message within one host takes none.
    pub fn lines(&self) -> impl Iterator<Item = (Line, Link)> {
        self.lines.into_iter().flatten()
    }

    /// The route as one link: latencies add up, and the least bandwidth limits. Within one host the bandwidth is
    /// infinite.
    pub fn link(&self) -> Link {
        let free = Link { latency: 0.0, bandwidth: f64::INFINITY };
        self.lines().fold(free, |whole, (_, line)| Link {
            latency: whole.latency + line.latency,
            bandwidth: whole.bandwidth.min(line.bandwidth),
        })
    }
}

impl Cluster {
    /// The lines that messages take from one machine to another. `None` if no link leads there or a device does not
    /// exist.
    ///
    /// The most specific direct link counts: device to device, device to site, site to device, then site to site.
    /// Within a site it is [`Site::inside`]. Two sites with uplinks need no direct link. A broker on a device's
    /// machine uses that device's links.
    pub fn route(&self, from: PeerId, to: PeerId) -> Option<Route> {
        let hosts = (self.host_of(from)?, self.host_of(to)?);
        if hosts.0 == hosts.1 {
            return Some(Route::default());
        }
        let (a, b) = (self.place(from)?, self.place(to)?);
        let (a_site, b_site) = (self.site_of(a), self.site_of(b));
        let site = |s: Option<u32>| s.map(Place::Site);
        let ends = [(Some(a), Some(b)), (Some(a), site(b_site)), (site(a_site), Some(b)), (site(a_site), site(b_site))];
        let direct = ends.into_iter().find_map(|(from, to)| self.direct_link(from?, to?));
        let card = |peer, host, outward| {
            let bandwidth = self.card(peer).rate(outward)?;
            Some((Line::Card { host, outward }, Link { latency: 0.0, bandwidth }))
        };
        let (out, in_) = (card(from, hosts.0, true), card(to, hosts.1, false));
        if a_site.is_some() && a_site == b_site {
            let inside = || Some((Line::Link { from: a, to: b }, self.sites[a_site? as usize].inside?));
            let direct = direct.or_else(inside)?;
            return Some(Route { lines: [out, None, Some(direct), None, in_] });
        }
        let uplink = |site: Option<u32>, outward| {
            let site = site?;
            let Site { uplink, downlink, .. } = &self.sites[site as usize];
            let link = if outward { *uplink } else { downlink.or(*uplink) };
            Some((Line::Uplink { site, outward }, link?))
        };
        let (up, down) = (uplink(a_site, true), uplink(b_site, false));
        (direct.is_some() || (up.is_some() && down.is_some())).then_some(Route { lines: [out, up, direct, down, in_] })
    }

    /// The route as one link, see [`Route::link`]. `None` if there is no route.
    pub fn link(&self, from: PeerId, to: PeerId) -> Option<Link> {
        self.route(from, to).map(|p| p.link())
    }

    /// The name of a line for people: `card of a, out`, `uplink of home, in`, or `link a -> b`.
    pub fn line_name(&self, line: Line) -> String {
        let direction = |outward| if outward { "out" } else { "in" };
        match line {
            Line::Card { host, outward } => format!("card of {}, {}", self.host_name(host), direction(outward)),
            Line::Uplink { site, outward } => {
                format!("uplink of {}, {}", self.place_name(Place::Site(site)), direction(outward))
            }
            Line::Link { from, to } => format!("link {} -> {}", self.place_name(from), self.place_name(to)),
        }
    }

    /// The name of a host: as declared, else that of its device.
    pub fn host_name(&self, host: Place) -> &str {
        let declared = match host {
            Place::Device(d) => self.devices.get(d as usize).and_then(|d| d.host.as_deref()),
            _ => None,
        };
        declared.unwrap_or_else(|| self.place_name(host))
    }

    /// The place whose links a peer uses.
    pub(super) fn place(&self, peer: PeerId) -> Option<Place> {
        match (peer, self.broker) {
            (PeerId::BROKER, on @ Place::Device(_)) => Some(on),
            (PeerId::BROKER, _) => Some(Place::Broker),
            (PeerId(d), _) => ((d as usize) < self.devices.len()).then_some(Place::Device(d)),
        }
    }

    pub(super) fn site_of(&self, machine: Place) -> Option<u32> {
        match (machine, self.broker) {
            (Place::Device(d), _) => self.devices.get(d as usize)?.site,
            (Place::Broker, Place::Site(s)) => Some(s),
            _ => None,
        }
    }

    fn direct_link(&self, from: Place, to: Place) -> Option<(Line, Link)> {
        let at = self.direct.binary_search_by_key(&(from, to), |l| (l.from, l.to)).ok()?;
        Some((Line::Link { from, to }, self.direct[at].link))
    }
}
