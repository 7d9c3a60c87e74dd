//! Channels that share lines: network cards, uplinks and links.
//!
//! The rates of channels are fair in the sense of max-min: no channel can become faster without slowing one that is not
//! faster. Each line has a level, the most that it lets a channel send, and a channel sends at the lowest level of its
//! lines. A line sets its level so that its channels fill it, given their levels elsewhere. Lines do so in turn until no
//! level changes (Charny, Clark and Jain, 1995). The level of a line that its channels cannot fill is infinite.

use std::collections::VecDeque;

use super::load::Load;
use crate::cost::Line;
use crate::cost::congestion::{send_rate, shared_bandwidth};

/// Levels that differ by less than this share are equal.
const TOLERANCE: f64 = 1e-9;

/// Most levels that are set when a channel begins or stops to send. It is reached only if levels oscillate.
const MAX_RELAXATIONS: usize = 10_000;

/// All channels and the lines that limit them, on the virtual clock.
pub(super) struct Network<'a> {
    load: &'a Load,
    channels: Vec<Channel>,
    lines: Vec<SharedLine>,
    buffers: Buffers,
}

/// What is computed anew whenever a channel begins or stops to send. The memory is kept.
#[derive(Debug, Default)]
struct Buffers {
    /// Lines whose levels are to be set.
    waiting: VecDeque<u32>,
    /// Channels of lines whose levels have changed.
    touched: Vec<u32>,
    /// The most that each channel of a line may send.
    limits: Vec<f64>,
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
    /// Bytes/s; 0 until it is known.
    rate: f64,
    /// The highest rate that congestion control and the channel's lines allow if no other channel sends.
    max_rate: f64,
    /// When its rate last changed.
    since: f64,
    start: f64,
}

/// A line and the channels that send through it now.
#[derive(Debug, Clone)]
struct SharedLine {
    bandwidth: f64,
    /// Ascending.
    active: Vec<u32>,
    /// The most that it lets a channel send, in bytes/s.
    level: f64,
    /// Whether its level is to be set anew.
    waits: bool,
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

impl<'a> Network<'a> {
    pub(super) fn new(load: &'a Load) -> Self {
        let line = |bandwidth| SharedLine { bandwidth, active: Vec::new(), level: f64::INFINITY, waits: false };
        Self {
            load,
            channels: vec![Channel::default(); load.channels.len()],
            lines: load.lines.iter().map(|l| line(l.1.bandwidth)).collect(),
            buffers: Buffers::default(),
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

    /// Starts to send the first message of a channel's queue, and returns it. Without one, the channel leaves its lines
    /// to others.
    pub(super) fn start(&mut self, now: f64, channel: u32, departures: &mut Vec<Departure>) -> Option<u32> {
        let load = self.load;
        let route = &load.channels[channel as usize];
        let c = &mut self.channels[channel as usize];
        let message = c.queue.front().map(|queued| queued.message);
        c.flow = message.map(|message| {
            let max_rate = send_rate(c.queued, route.round_trip, route.window).min(route.bandwidth);
            Flow { left: load.messages[message as usize].bytes, rate: 0.0, max_rate, since: now, start: now }
        });
        for &l in &route.shared {
            let active = &mut self.lines[l as usize].active;
            match (active.binary_search(&channel), message) {
                (Err(at), Some(_)) => active.insert(at, channel),
                (Ok(at), None) => drop(active.remove(at)),
                _ => {}
            }
        }
        self.share(now, channel, departures);
        message
    }

    /// The message that has left, if the departure is not outdated. [`Self::start`] must follow.
    pub(super) fn depart(&mut self, now: f64, channel: u32, version: u32) -> Option<Departed> {
        let load = self.load;
        let c = &mut self.channels[channel as usize];
        if c.version != version {
            return None;
        }
        let (flow, queued) = (c.flow.take()?, c.queue.pop_front()?);
        c.queued -= load.messages[queued.message as usize].bytes;
        c.busy += now - flow.start;
        let Queued { pass, message, handed } = queued;
        Some(Departed { pass, message, handed, start: flow.start })
    }

    /// Recomputes all rates after `channel` has begun or stopped to send.
    fn share(&mut self, now: f64, channel: u32, departures: &mut Vec<Departure>) {
        let mut buffers = std::mem::take(&mut self.buffers);
        self.set_levels(channel, &mut buffers);
        let touched = &mut buffers.touched;
        touched.push(channel);
        touched.sort_unstable();
        touched.dedup();
        for c in touched.drain(..) {
            let rate = self.limit(c, None);
            let Some(flow) = &mut self.channels[c as usize].flow else { continue };
            if rate == flow.rate {
                continue;
            }
            flow.left = (flow.left - (now - flow.since) * flow.rate).max(0.0);
            (flow.since, flow.rate) = (now, rate);
            let time = now + flow.left / rate;
            let channel = &mut self.channels[c as usize];
            channel.version += 1;
            departures.push(Departure { time, channel: c, version: channel.version });
        }
        self.buffers = buffers;
    }

    /// Sets the levels of a channel's lines, and of all lines on which that has an effect. Adds the channels of lines
    /// whose level has changed to those that are touched.
    fn set_levels(&mut self, channel: u32, buffers: &mut Buffers) {
        let load = self.load;
        let Buffers { waiting, touched, limits } = buffers;
        waiting.extend(&load.channels[channel as usize].shared);
        waiting.iter().for_each(|l| self.lines[*l as usize].waits = true);
        for _ in 0..MAX_RELAXATIONS {
            let Some(l) = waiting.pop_front() else { break };
            let level = self.fair_level(l, limits);
            let line = &mut self.lines[l as usize];
            line.waits = false;
            if level == line.level || (level - line.level).abs() <= TOLERANCE * level.min(line.level) {
                continue;
            }
            let falls = level < line.level;
            line.level = level;
            let changed = touched.len();
            touched.extend_from_slice(&line.active);
            for c in &touched[changed..] {
                for &other in &load.channels[*c as usize].shared {
                    let line = &mut self.lines[other as usize];
                    // A line that its channels did not fill is not filled by less.
                    let has_effect = other != l && !(falls && line.level.is_infinite());
                    if has_effect && !std::mem::replace(&mut line.waits, true) {
                        waiting.push_back(other);
                    }
                }
            }
        }
        waiting.drain(..).for_each(|l| self.lines[l as usize].waits = false);
    }

    /// The bytes/s that a line carries for all its channels.
    fn capacity(&self, line: u32) -> f64 {
        let SharedLine { bandwidth, active, .. } = &self.lines[line as usize];
        let (mut in_flight, mut round_trip, mut pausing) = (0.0, f64::INFINITY, 0);
        for &c in active {
            let (channel, route) = (&self.channels[c as usize], &self.load.channels[c as usize]);
            in_flight += channel.queued.min(route.window);
            round_trip = route.round_trip.min(round_trip);
            pausing += usize::from(channel.queue.len() < 2);
        }
        // Training runs that kept uplinks full used no more of them than those that paused.
        let pausing = match self.load.lines[line as usize].0 {
            Line::Card { .. } => pausing,
            Line::Uplink { .. } | Line::Link { .. } => active.len(),
        };
        shared_bandwidth(*bandwidth, active.len(), pausing, in_flight, round_trip)
    }

    /// The level at which a line's channels fill it; infinite if they do not.
    fn fair_level(&self, line: u32, limits: &mut Vec<f64>) -> f64 {
        let active = &self.lines[line as usize].active;
        // What a channel may send is never more than its lines carry.
        if active.len() < 2 {
            return f64::INFINITY;
        }
        limits.clear();
        limits.extend(active.iter().map(|&c| self.limit(c, Some(line))));
        let mut free = self.capacity(line);
        if limits.iter().sum::<f64>() <= free {
            return f64::INFINITY;
        }
        limits.sort_by(f64::total_cmp);
        for (i, limit) in limits.iter().enumerate() {
            let share = free / (limits.len() - i) as f64;
            if *limit > share {
                return share;
            }
            free -= limit;
        }
        f64::INFINITY
    }

    /// The most that a channel may send, by its own limits and the levels of all its lines but one.
    fn limit(&self, channel: u32, without: Option<u32>) -> f64 {
        let own = self.channels[channel as usize].flow.map_or(f64::INFINITY, |f| f.max_rate);
        let shared = self.load.channels[channel as usize].shared.iter().filter(|l| Some(**l) != without);
        shared.map(|l| self.lines[*l as usize].level).fold(own, f64::min)
    }

    /// By channel: the seconds in which it has sent.
    pub(super) fn busy(&self, now: f64) -> Vec<f64> {
        self.channels.iter().map(|c| c.busy + c.flow.map_or(0.0, |f| now - f.start)).collect()
    }
}

#[cfg(test)]
mod tests {
    use fusionllm_graph::ChoiceRng;
    use fusionllm_program::{Address, PeerId};

    use super::*;
    use crate::cost::{Line, Link};
    use crate::simulate::load::Channel as Route;
    use crate::simulate::messages::Message;

    /// Channels over random lines. Each has many messages.
    fn load(choices: &mut ChoiceRng) -> Load {
        let lines = (0..choices.between(1, 8) as u32).map(|i| {
            let line = Line::Uplink { site: i, outward: true };
            (line, Link { latency: 0.0, bandwidth: choices.log_uniform(1e5, 1e8) })
        });
        let lines: Vec<(Line, Link)> = lines.collect();
        let channels: Vec<Route> = (0..choices.between(2, 12))
            .map(|_| {
                let mut shared: Vec<u32> = (0..lines.len() as u32).collect();
                shared.retain(|_| choices.one_in(2));
                let slowest = shared.iter().map(|l| lines[*l as usize].1.bandwidth).fold(f64::INFINITY, f64::min);
                let bandwidth = choices.log_uniform(1e4, 1e9).min(slowest);
                let (from, to) = (PeerId(0), PeerId(1));
                let window = 1.25e6;
                Route { from, to, latency: 0.0, round_trip: 1e-5, lines: shared.clone(), shared, bandwidth, window }
            })
            .collect();
        let tensor = Address::Held { value: fusionllm_graph::ValueId(0) };
        let message =
            |channel| Message { bytes: 1e6, ..Message::new((PeerId(0), PeerId(1)), tensor, channel, channel) };
        let messages = (0..channels.len() as u32).map(message).collect();
        Load {
            steps: Vec::new(),
            messages,
            masks: Vec::new(),
            channels,
            lines,
            inputs: Vec::new(),
            voters: Vec::new(),
            to_broker: Vec::new(),
            from_broker: Vec::new(),
            micro_batches: 1,
        }
    }

    /// Whether no channel can become faster without slowing one that is not faster.
    fn is_fair(network: &Network<'_>) -> bool {
        let rate = |c: &u32| network.channels[*c as usize].flow.map_or(0.0, |f| f.rate);
        let near = |a: f64, b: f64| (a - b).abs() <= 1e-6 * b;
        let active = (0..network.channels.len() as u32).filter(|c| network.channels[*c as usize].flow.is_some());
        active.into_iter().all(|c| {
            let own = network.channels[c as usize].flow.map_or(0.0, |f| f.max_rate);
            let bottleneck = |l: &u32| {
                let active = &network.lines[*l as usize].active;
                let (sum, most) = (active.iter().map(rate).sum(), active.iter().map(rate).fold(0.0, f64::max));
                near(sum, network.capacity(*l)) && near(rate(&c), most)
            };
            near(rate(&c), own) || network.load.channels[c as usize].shared.iter().any(bottleneck)
        })
    }

    #[test]
    fn rates_are_fair_whatever_begins_and_ends() {
        for seed in 0..200 {
            let mut choices = ChoiceRng::new(seed);
            let load = load(&mut choices);
            let mut network = Network::new(&load);
            let mut departures = Vec::new();
            for time in 0..40 {
                let channel = choices.below(load.channels.len()) as u32;
                let now = f64::from(time) * 1e-9;
                match network.channels[channel as usize].flow {
                    Some(_) => {
                        let version = network.channels[channel as usize].version;
                        network.depart(now, channel, version).unwrap();
                    }
                    None => assert!(network.queue(now, 0, channel).is_some()),
                }
                network.start(now, channel, &mut departures);
                assert!(is_fair(&network), "{seed}: {:?}", network.channels);
            }
        }
    }
}
