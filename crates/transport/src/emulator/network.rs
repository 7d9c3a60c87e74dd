//! Links and routes over them, without sockets or a clock.

#[cfg(test)]
mod tests;

use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use super::link::{Crossing, HEADER_BYTES, Link, LinkSpec, LinkStats};

/// A link of a [`Network`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(usize);

/// A sequence of a [`Network`]'s links that datagrams cross one after another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RouteId(usize);

impl RouteId {
    /// The route's index in the order of [`Network::add_route`].
    pub fn index(self) -> usize {
        self.0
    }
}

/// Links, routes and the datagrams in flight.
///
/// All times count from one fixed moment, and callers pass them in ascending order. The same calls give the same
/// deliveries.
#[derive(Debug)]
pub struct Network {
    links: Vec<Link>,
    routes: Vec<Vec<LinkId>>,
    in_flight: BinaryHeap<Reverse<InFlight>>,
    arrived: VecDeque<Delivery>,
    sent: u64,
    random: u64,
}

/// A datagram at the end of its route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivery {
    /// The time when the datagram arrived.
    pub due: Duration,
    /// Its route.
    pub route: RouteId,
    /// Its payload.
    pub datagram: Vec<u8>,
}

impl Network {
    /// A network without links. `seed` decides which datagrams a lossy link drops.
    pub fn new(seed: u64) -> Self {
        Self {
            links: Vec::new(),
            routes: Vec::new(),
            in_flight: BinaryHeap::new(),
            arrived: VecDeque::new(),
            sent: 0,
            random: seed,
        }
    }

    /// Adds a link.
    pub fn add_link(&mut self, spec: LinkSpec) -> LinkId {
        self.links.push(Link::new(spec));
        LinkId(self.links.len() - 1)
    }

    /// Adds a route over `links`. Routes may share links. A route without links delivers at once.
    pub fn add_route(&mut self, links: Vec<LinkId>) -> RouteId {
        self.routes.push(links);
        RouteId(self.routes.len() - 1)
    }

    /// Sends a datagram.
    pub fn send(&mut self, now: Duration, route: RouteId, datagram: Vec<u8>) {
        self.advance(now);
        self.sent += 1;
        self.enter(InFlight { due: now, order: self.sent, hop: 0, crossing: Crossing::default(), route, datagram });
    }

    /// Records that the sender of this route had more to send than the `bytes` sent in `since ..= now`. During that
    /// time the sender, not the links, limited the traffic.
    pub fn add_backlog(&mut self, since: Duration, now: Duration, route: RouteId, bytes: u64) {
        for link in &self.routes[route.0] {
            self.links[link.0].add_backlog(since, now, bytes);
        }
    }

    /// The time when the next datagram leaves a link. Nothing arrives before.
    pub fn next_due(&self) -> Option<Duration> {
        let arrived = self.arrived.front().map(|delivery| delivery.due);
        arrived.or_else(|| self.in_flight.peek().map(|Reverse(next)| next.due))
    }

    /// The next datagram that has arrived by `now`, in the order of arrival.
    pub fn deliver(&mut self, now: Duration) -> Option<Delivery> {
        self.advance(now);
        self.arrived.pop_front()
    }

    /// Delivers a datagram like [`Self::deliver`]. After those, it also delivers datagrams that are on their last link
    /// and arrive by `soon`.
    ///
    /// Datagrams on an earlier link stay there. Moving them early would put them before others on a shared link.
    pub fn deliver_early(&mut self, now: Duration, soon: Duration) -> Option<Delivery> {
        self.advance(now);
        while self.arrived.is_empty() {
            let Reverse(next) = self.in_flight.peek()?;
            if next.due > soon || next.hop + 1 < self.routes[next.route.0].len() {
                return None;
            }
            self.hop();
        }
        self.arrived.pop_front()
    }

    /// Cuts a link. Datagrams on it are lost, and so are all that enter it.
    pub fn cut(&mut self, now: Duration, link: LinkId) {
        self.advance(now);
        self.links[link.0].cut();
    }

    /// Mends a cut link. Its queue is empty.
    pub fn heal(&mut self, now: Duration, link: LinkId) {
        self.advance(now);
        self.links[link.0].heal(now);
    }

    /// Sets the probability, from 0 to 1, with which a link drops each datagram.
    pub fn set_loss(&mut self, now: Duration, link: LinkId, probability: f64) {
        self.advance(now);
        self.links[link.0].set_loss(probability);
    }

    /// The counters of every link at `now`, in the order of [`Self::add_link`].
    pub fn stats(&mut self, now: Duration) -> Vec<LinkStats> {
        self.advance(now);
        self.links.iter().map(|link| link.stats().clone()).collect()
    }

    /// Moves every datagram that leaves a link by `now` to its next link, in the order of these moments. A datagram
    /// must not reserve its place on a shared link while it still waits for a slow one.
    fn advance(&mut self, now: Duration) {
        while self.in_flight.peek().is_some_and(|Reverse(next)| next.due <= now) {
            self.hop();
        }
    }

    /// Moves the datagram that next leaves its link to the following one.
    fn hop(&mut self) {
        let Some(Reverse(mut datagram)) = self.in_flight.pop() else { return };
        let link = self.routes[datagram.route.0][datagram.hop];
        if self.links[link.0].leave(&datagram.crossing) {
            datagram.hop += 1;
            self.enter(datagram);
        }
    }

    /// Enters the link at `datagram.hop` at the time `datagram.due`.
    fn enter(&mut self, mut datagram: InFlight) {
        let Some(link) = self.routes[datagram.route.0].get(datagram.hop) else {
            self.arrived.push_back(Delivery { due: datagram.due, route: datagram.route, datagram: datagram.datagram });
            return;
        };
        let bytes = datagram.datagram.len() as u64 + HEADER_BYTES;
        let link = &mut self.links[link.0];
        if let Some(crossing) = link.enter(datagram.due, bytes, &mut self.random) {
            datagram.due = crossing.due;
            datagram.crossing = crossing;
            self.in_flight.push(Reverse(datagram));
        }
    }
}

/// A datagram on a link. Datagrams are ordered by when they leave the link, then by when they were sent.
#[derive(Debug)]
struct InFlight {
    due: Duration,
    order: u64,
    /// Index of the link within the route.
    hop: usize,
    crossing: Crossing,
    route: RouteId,
    datagram: Vec<u8>,
}

impl Ord for InFlight {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.due, self.order).cmp(&(other.due, other.order))
    }
}

impl PartialOrd for InFlight {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for InFlight {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for InFlight {}
