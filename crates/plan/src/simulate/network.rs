//! Channels that share links and uplinks.

use std::collections::VecDeque;

use super::load::{Load, ResourceKey};
use crate::cost::congestion::{send_rate, shared_bandwidth};

/// All channels and the resources that limit them, on the virtual clock.
pub(super) struct Network<'a> {
    load: &'a Load,
    channels: Vec<Channel>,
    resources: Vec<Resource>,
}

#[derive(Debug, Clone, Default)]
struct Channel {
    queue: VecDeque<Queued>,
    /// Bytes of the queue.
    queued: f64,
    flow: Option<Flow>,
    /// Counts the changes of the flow's rate, so that outdated departures are ignored.
    version: u32,
    busy: f64,
}

/// A message that waits to leave.
#[derive(Debug, Clone, Copy)]
struct Queued {
    pass: u32,
    message: u32,
    /// When the sender handed over the message.
    handed: f64,
}

/// The message that a channel sends now.
#[derive(Debug, Clone, Copy)]
struct Flow {
    /// Bytes left when its rate last changed.
    left: f64,
    rate: f64,
    /// The highest rate that congestion control allows, whatever the links could carry.
    max_rate: f64,
    /// When its rate last changed.
    since: f64,
    start: f64,
}

#[derive(Debug, Clone, Default)]
struct Resource {
    bandwidth: f64,
    /// The channels that send through it now, ascending.
    active: Vec<u32>,
    since: f64,
    busy: f64,
}

/// When the message of a channel will have left, unless its rate changes before.
#[derive(Debug, Clone, Copy)]
pub(super) struct Departure {
    pub(super) time: f64,
    pub(super) channel: u32,
    pub(super) version: u32,
}

/// A message whose last byte has left.
#[derive(Debug, Clone, Copy)]
pub(super) struct Departed {
    pub(super) pass: u32,
    pub(super) message: u32,
    /// When the sender handed over the message.
    pub(super) handed: f64,
    /// When its first byte left.
    pub(super) start: f64,
}

/// Seconds that channels and resources have been busy.
#[derive(Debug, Clone)]
pub(super) struct BusySeconds {
    pub(super) channels: Vec<f64>,
    pub(super) resources: Vec<f64>,
}

/// Whether a channel begins or stops to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    Begins,
    Stops,
}

impl<'a> Network<'a> {
    pub(super) fn new(load: &'a Load) -> Self {
        let resource = |&(_, bandwidth): &(ResourceKey, f64)| Resource { bandwidth, ..Resource::default() };
        Self {
            load,
            channels: vec![Channel::default(); load.channels.len()],
            resources: load.resources.iter().map(resource).collect(),
        }
    }

    /// Queues a message; returns its channel if that is idle.
    pub(super) fn queue(&mut self, now: f64, pass: u32, message: u32) -> Option<u32> {
        let m = &self.load.messages[message as usize];
        let channel = &mut self.channels[m.channel as usize];
        channel.queue.push_back(Queued { pass, message, handed: now });
        channel.queued += m.bytes;
        channel.flow.is_none().then_some(m.channel)
    }

    /// Starts to send the first message of a channel's queue, and returns it.
    pub(super) fn start(&mut self, now: f64, channel: u32, departures: &mut Vec<Departure>) -> Option<u32> {
        let load = self.load;
        let route = &load.channels[channel as usize];
        let c = &mut self.channels[channel as usize];
        let message = c.queue.front()?.message;
        let max_rate = send_rate(c.queued, route.round_trip);
        let left = load.messages[message as usize].bytes;
        c.flow = Some(Flow { left, rate: f64::INFINITY, max_rate, since: now, start: now });
        for &r in &route.resources {
            let r = &mut self.resources[r as usize];
            if r.active.is_empty() {
                r.since = now;
            }
            let at = r.active.partition_point(|&other| other < channel);
            r.active.insert(at, channel);
        }
        self.share(now, channel, Change::Begins, departures);
        Some(message)
    }

    /// The message that has left, if the departure is not outdated.
    pub(super) fn depart(
        &mut self,
        now: f64,
        channel: u32,
        version: u32,
        departures: &mut Vec<Departure>,
    ) -> Option<Departed> {
        let load = self.load;
        let c = &mut self.channels[channel as usize];
        if c.version != version {
            return None;
        }
        let (flow, queued) = (c.flow.take()?, c.queue.pop_front()?);
        c.queued -= load.messages[queued.message as usize].bytes;
        c.busy += now - flow.start;
        for &r in &load.channels[channel as usize].resources {
            let r = &mut self.resources[r as usize];
            r.active.retain(|&other| other != channel);
            if r.active.is_empty() {
                r.busy += now - r.since;
            }
        }
        self.share(now, channel, Change::Stops, departures);
        let Queued { pass, message, handed } = queued;
        Some(Departed { pass, message, handed, start: flow.start })
    }

    /// Recomputes the rates of all flows that share a resource with `channel`.
    fn share(&mut self, now: f64, channel: u32, change: Change, departures: &mut Vec<Departure>) {
        let load = self.load;
        let mut touched = Vec::new();
        if change == Change::Begins {
            touched.push(channel);
        }
        for &r in &load.channels[channel as usize].resources {
            touched.extend(self.resources[r as usize].active.iter().copied().filter(|&c| c != channel));
        }
        touched.sort_unstable();
        touched.dedup();
        for c in touched {
            let shares = load.channels[c as usize].resources.iter().map(|&r| {
                let r = &self.resources[r as usize];
                let waiting = r.active.iter().map(|&c| self.channels[c as usize].queued).sum();
                shared_bandwidth(r.bandwidth, r.active.len(), waiting) / r.active.len() as f64
            });
            let share = shares.fold(f64::INFINITY, f64::min);
            let Some(flow) = &mut self.channels[c as usize].flow else { continue };
            let rate = share.min(flow.max_rate);
            if rate == flow.rate && c != channel {
                continue;
            }
            // A flow that begins now has an infinite rate.
            if now > flow.since {
                flow.left = (flow.left - (now - flow.since) * flow.rate).max(0.0);
            }
            (flow.since, flow.rate) = (now, rate);
            let time = now + flow.left / rate;
            let channel = &mut self.channels[c as usize];
            channel.version += 1;
            departures.push(Departure { time, channel: c, version: channel.version });
        }
    }

    pub(super) fn busy(&self, now: f64) -> BusySeconds {
        let channel = |c: &Channel| c.busy + c.flow.map_or(0.0, |f| now - f.start);
        let resource = |r: &Resource| r.busy + if r.active.is_empty() { 0.0 } else { now - r.since };
        BusySeconds {
            channels: self.channels.iter().map(channel).collect(),
            resources: self.resources.iter().map(resource).collect(),
        }
    }
}
