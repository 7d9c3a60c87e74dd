//! The virtual clock: peers, channels and the broker, in the order in which things happen.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::load::{Load, Message, ResourceKey, Step};
use super::{ALIKE, Doing, LinkLoad, PROCESS, PeerLoad, STEPS, SharedLoad, Simulation, Span, Transfer};
use crate::{Cluster, PASSES_IN_FLIGHT, PeerId, PlanError, Slot};

/// Passes of which messages may be under way at once: that which peers end, and those whose inputs are ahead.
const AHEAD: usize = PASSES_IN_FLIGHT + 1;

/// What happens at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A message's last byte has come.
    Arrive { pass: u32, message: u32 },
    /// A message can go out: it is encoded.
    Encoded { pass: u32, message: u32 },
    /// A message can be read: it is decoded.
    Decoded { pass: u32, message: u32 },
    /// A message's last byte has left, if the flow is still the one it was when this was foreseen.
    Sent { channel: u32, version: u32 },
    /// A peer goes on.
    Go(u32),
    /// The broker hands over the inputs of a pass.
    Feed(u32),
}

pub(super) struct Engine<'a> {
    load: &'a Load,
    cluster: &'a Cluster,
    record: bool,
    now: f64,
    /// By time, then in the order in which they were foreseen.
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    foreseen: u64,
    peers: Vec<Peer>,
    channels: Vec<Channel>,
    resources: Vec<Resource>,
    /// By pass modulo [`AHEAD`], and message: whether it arrived.
    arrived: Vec<Vec<bool>>,
    /// By pass.
    rounds: Vec<Round>,
    /// By pass modulo [`AHEAD`], if they are to be recorded.
    transfers: Vec<Vec<Transfer>>,
}

#[derive(Debug, Clone, Default)]
struct Peer {
    at: usize,
    pass: u32,
    /// When its codec thread will have done all that it was given.
    codec: f64,
    /// Its own clock: never before the engine's while it computes.
    time: f64,
    /// The message it waits for, or none and then for the verdict.
    waiting: Option<Option<u32>>,
    /// Bytes of messages that wait to be read or to leave.
    buffered: u64,
    /// Bytes it held when it last computed.
    held: u64,
    peak: u64,
    /// Of the pass under way.
    doing: Pass,
    /// Of the pass before.
    done: Pass,
}

/// What a peer did in a pass.
#[derive(Debug, Clone, Default)]
struct Pass {
    load: PeerLoad,
    update_s: f64,
    spans: Vec<Span>,
}

#[derive(Debug, Clone, Default)]
struct Channel {
    /// Messages by pass, and when they were handed over.
    queue: VecDeque<(u32, u32, f64)>,
    /// Bytes of the queue.
    queued: f64,
    flow: Option<Flow>,
    version: u32,
    busy: f64,
}

#[derive(Debug, Clone, Copy)]
struct Flow {
    /// Bytes left when it last changed its rate.
    left: f64,
    rate: f64,
    /// Most that its rate can be: what congestion control lets out, whatever the way could carry.
    pace: f64,
    since: f64,
    start: f64,
}

#[derive(Debug, Clone, Default)]
struct Resource {
    bandwidth: f64,
    /// Channels that send through it now, ascending.
    active: Vec<u32>,
    since: f64,
    busy: f64,
}

/// How far all peers are with a pass.
#[derive(Debug, Clone, Copy, Default)]
struct Round {
    /// Who has sent norms.
    norms: usize,
    /// When the last of them come to the broker.
    norms_at: f64,
    /// Who is through.
    reports: usize,
    /// When the last report of it comes to the broker.
    reported_at: f64,
}

impl<'a> Engine<'a> {
    pub(super) fn new(load: &'a Load, cluster: &'a Cluster, record: bool) -> Self {
        let resource = |&(_, bandwidth): &(ResourceKey, f64)| Resource { bandwidth, ..Resource::default() };
        Self {
            load,
            cluster,
            record,
            now: 0.0,
            events: BinaryHeap::new(),
            foreseen: 0,
            peers: vec![Peer::default(); load.steps.len()],
            channels: vec![Channel::default(); load.channels.len()],
            resources: load.resources.iter().map(resource).collect(),
            arrived: vec![vec![false; load.messages.len()]; AHEAD],
            rounds: vec![Round::default(); STEPS.end() + AHEAD],
            transfers: vec![Vec::new(); AHEAD],
        }
    }

    pub(super) fn run(mut self) -> Result<Simulation, PlanError> {
        for pass in 0..PASSES_IN_FLIGHT as u32 {
            self.at(0.0, Event::Feed(pass));
        }
        for p in 0..self.peers.len() as u32 {
            self.at(0.0, Event::Go(p));
        }
        // Passes that all are through, when they were, and what the last took.
        let (mut done, mut end, mut step_s) = (0, 0.0, f64::INFINITY);
        let mut before = self.busy();
        while let Some(Reverse((time, _, event))) = self.events.pop() {
            self.now = f64::from_bits(time);
            self.handle(event);
            if self.rounds[done].reports < self.peers.len() {
                continue;
            }
            let took = self.now - end;
            let alike = (took - step_s).abs() <= ALIKE * took;
            (end, step_s) = (self.now, took);
            done += 1;
            if (done >= *STEPS.start() && alike) || done >= *STEPS.end() {
                return Ok(self.result(step_s, done - 1, &before));
            }
            before = self.busy();
        }
        let (p, waiting) = (0..).zip(&self.peers).find_map(|(p, peer)| Some((PeerId(p), peer.waiting?))).unzip();
        let what = match waiting {
            Some(Some(m)) => format!("{:?}", self.load.messages[m as usize].slot),
            _ => "the verdict".into(),
        };
        let name = self.cluster.name(p.unwrap_or(PeerId::BROKER));
        Err(PlanError::Program(format!("{name} waits for ever for {what}")))
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Arrive { pass, message } => {
                let Message { to, decode, .. } = self.load.messages[message as usize];
                self.code(to, decode, Event::Decoded { pass, message });
            }
            Event::Encoded { pass, message } => self.send(pass, message),
            Event::Decoded { pass, message } => self.arrive(pass, message),
            Event::Sent { channel, version } => self.sent(channel, version),
            Event::Go(peer) => self.go(peer),
            Event::Feed(pass) => self.feed(pass),
        }
    }

    fn at(&mut self, time: f64, event: Event) {
        self.foreseen += 1;
        // Times are never negative, so that their bits are ordered as they are.
        self.events.push(Reverse((time.to_bits(), self.foreseen, event)));
    }

    /// Lets a peer go on until it waits, or until something it does is seen by others.
    fn go(&mut self, p: u32) {
        let index = p as usize;
        let load = self.load;
        let steps = &load.steps[index];
        let peer = &mut self.peers[index];
        if let Some(what) = peer.waiting.take() {
            let (doing, micro_batch) = match what {
                None => (Doing::Verdict, None),
                Some(m) => match load.messages[m as usize].slot {
                    Slot::Value { micro_batch, .. } => (Doing::Wait, Some(micro_batch)),
                    _ => (Doing::Wait, None),
                },
            };
            peer.spend(PeerId(p), doing, micro_batch, self.now - peer.time, self.record);
            peer.time = self.now;
            // The verdict is all that a peer does not look for again.
            peer.at += usize::from(what.is_none());
        }
        loop {
            let peer = &mut self.peers[index];
            let Some(step) = steps.get(peer.at) else {
                if peer.time > self.now {
                    let time = peer.time;
                    self.at(time, Event::Go(p));
                    return;
                }
                if !self.finish_pass(p) {
                    return;
                }
                continue;
            };
            if let Step::Compute { doing, micro_batch, seconds, peak } = *step {
                peer.spend(PeerId(p), doing, micro_batch, seconds, self.record);
                peer.held = peak;
                peer.peak = peer.peak.max(peak + peer.buffered);
                peer.at += 1;
                continue;
            }
            if peer.time > self.now {
                let time = peer.time;
                self.at(time, Event::Go(p));
                return;
            }
            match *step {
                Step::Compute { .. } => {}
                Step::Receive { message } => {
                    let pass = peer.pass;
                    let slot = &mut self.arrived[pass as usize % AHEAD][message as usize];
                    if !std::mem::take(slot) {
                        peer.waiting = Some(Some(message));
                        return;
                    }
                    peer.buffered -= load.messages[message as usize].payload.min(peer.buffered);
                    peer.at += 1;
                }
                Step::Send { message } => {
                    let pass = peer.pass;
                    peer.at += 1;
                    peer.buffered += load.messages[message as usize].payload;
                    peer.peak = peer.peak.max(peer.held + peer.buffered);
                    let Message { from, encode, .. } = load.messages[message as usize];
                    self.code(from, encode, Event::Encoded { pass, message });
                }
                Step::Clip => {
                    peer.waiting = Some(None);
                    self.norms(p);
                    return;
                }
            }
        }
    }

    /// Lets a peer's codec thread work for so long, and then go on with `then`. What goes through no codec does not wait for it.
    fn code(&mut self, peer: PeerId, seconds: f64, then: Event) {
        let now = self.now;
        match self.peers.get_mut(peer.0 as usize) {
            Some(peer) if seconds > 0.0 => {
                peer.codec = peer.codec.max(now) + seconds;
                let done = peer.codec;
                self.at(done, then);
            }
            _ => self.handle(then),
        }
    }

    /// Norms of a peer are under way; the last to come bring the verdict to all.
    fn norms(&mut self, p: u32) {
        let pass = self.peers[p as usize].pass;
        let round = &mut self.rounds[pass as usize];
        round.norms += 1;
        round.norms_at = round.norms_at.max(self.now + self.load.to_broker[p as usize]);
        let judged = round.norms_at;
        if round.norms == self.load.voters.len() {
            let load = self.load;
            for &q in &load.voters {
                self.at(judged + load.from_broker[q as usize], Event::Go(q));
            }
        }
    }

    /// Whether the peer has another pass before it.
    fn finish_pass(&mut self, p: u32) -> bool {
        let now = self.now;
        let peer = &mut self.peers[p as usize];
        let pass = peer.pass;
        peer.done = std::mem::take(&mut peer.doing);
        peer.pass += 1;
        peer.at = 0;
        let round = &mut self.rounds[pass as usize];
        round.reports += 1;
        round.reported_at = round.reported_at.max(now + self.load.to_broker[p as usize]);
        let (all, at) = (round.reports == self.peers.len(), round.reported_at);
        if all {
            self.at(at, Event::Feed(pass + PASSES_IN_FLIGHT as u32));
        }
        (pass as usize) < *STEPS.end()
    }

    fn feed(&mut self, pass: u32) {
        self.transfers[pass as usize % AHEAD].clear();
        for &message in &self.load.inputs {
            self.send(pass, message);
        }
    }

    fn send(&mut self, pass: u32, message: u32) {
        let Message { channel, bytes, .. } = self.load.messages[message as usize];
        let c = &mut self.channels[channel as usize];
        c.queue.push_back((pass, message, self.now));
        c.queued += bytes;
        if c.flow.is_none() {
            self.start(channel);
        }
    }

    /// Puts the first message of a channel on its way.
    fn start(&mut self, channel: u32) {
        let c = &mut self.channels[channel as usize];
        let Some(&(_, message, _)) = c.queue.front() else { return };
        let load = self.load;
        let m = &load.messages[message as usize];
        let pace = pace(c.queued, load.channels[channel as usize].round_trip);
        c.flow = Some(Flow { left: m.bytes, rate: f64::INFINITY, pace, since: self.now, start: self.now });
        // The first byte brings the message's length, and its reader makes room for all of it.
        if let Some(reader) = self.peers.get_mut(m.to.0 as usize) {
            reader.buffered += m.payload;
            reader.peak = reader.peak.max(reader.held + reader.buffered);
        }
        for &r in &load.channels[channel as usize].resources {
            let r = &mut self.resources[r as usize];
            if r.active.is_empty() {
                r.since = self.now;
            }
            let at = r.active.partition_point(|&other| other < channel);
            r.active.insert(at, channel);
        }
        self.share(channel, true);
    }

    /// Gives every flow its share of what it uses, after a channel began or ended to send.
    fn share(&mut self, channel: u32, began: bool) {
        let load = self.load;
        let mut touched = Vec::new();
        if began {
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
                carried(r.bandwidth, r.active.len(), waiting) / r.active.len() as f64
            });
            let share = shares.fold(f64::INFINITY, f64::min);
            let Some(flow) = &mut self.channels[c as usize].flow else { continue };
            let rate = share.min(flow.pace);
            if rate == flow.rate && c != channel {
                continue;
            }
            // A flow of infinite rate is one that begins now.
            if self.now > flow.since {
                flow.left = (flow.left - (self.now - flow.since) * flow.rate).max(0.0);
            }
            (flow.since, flow.rate) = (self.now, rate);
            let end = self.now + flow.left / rate;
            let channel = &mut self.channels[c as usize];
            channel.version += 1;
            let version = channel.version;
            self.at(end, Event::Sent { channel: c, version });
        }
    }

    fn sent(&mut self, channel: u32, version: u32) {
        let load = self.load;
        let c = &mut self.channels[channel as usize];
        if c.version != version {
            return;
        }
        let (Some(flow), Some((pass, message, handed))) = (c.flow.take(), c.queue.pop_front()) else { return };
        c.queued -= load.messages[message as usize].bytes;
        c.busy += self.now - flow.start;
        for &r in &load.channels[channel as usize].resources {
            let r = &mut self.resources[r as usize];
            r.active.retain(|&other| other != channel);
            if r.active.is_empty() {
                r.busy += self.now - r.since;
            }
        }
        self.share(channel, false);
        let m = &load.messages[message as usize];
        let arrived = self.now + load.channels[channel as usize].latency;
        if self.record {
            self.transfers[pass as usize % AHEAD].push(Transfer {
                from: m.from,
                to: m.to,
                slot: m.slot,
                bytes: m.payload,
                sent: handed,
                start: flow.start,
                end: self.now,
                arrived,
            });
        }
        self.at(arrived, Event::Arrive { pass, message });
        self.start(channel);
    }

    fn arrive(&mut self, pass: u32, message: u32) {
        let m = &self.load.messages[message as usize];
        self.arrived[pass as usize % AHEAD][message as usize] = true;
        // What may have to be sent again is kept until then.
        if let Some(sender) = self.peers.get_mut(m.from.0 as usize) {
            sender.buffered -= m.payload.min(sender.buffered);
        }
        let peer = &mut self.peers[m.to.0 as usize];
        if peer.waiting == Some(Some(message)) && peer.pass == pass {
            let now = self.now;
            self.at(now, Event::Go(m.to.0));
        }
    }
    /// Seconds that channels and resources have been busy.
    fn busy(&self) -> (Vec<f64>, Vec<f64>) {
        let channel = |c: &Channel| c.busy + c.flow.map_or(0.0, |f| self.now - f.start);
        let resource = |r: &Resource| r.busy + if r.active.is_empty() { 0.0 } else { self.now - r.since };
        (self.channels.iter().map(channel).collect(), self.resources.iter().map(resource).collect())
    }

    fn result(mut self, step_s: f64, pass: usize, before: &(Vec<f64>, Vec<f64>)) -> Simulation {
        let load = self.load;
        let busy = self.busy();
        let closed_form_s = self.closed_form();
        let mut channel_bytes = vec![(0u64, 0u32); load.channels.len()];
        let mut resource_bytes = vec![0u64; load.resources.len()];
        for m in &load.messages {
            let (bytes, messages) = &mut channel_bytes[m.channel as usize];
            *bytes += m.payload;
            *messages += 1;
            for &r in &load.channels[m.channel as usize].resources {
                resource_bytes[r as usize] += m.payload;
            }
        }
        let mut links: Vec<LinkLoad> = (0..load.channels.len())
            .map(|c| LinkLoad {
                from: load.channels[c].from,
                to: load.channels[c].to,
                bytes: channel_bytes[c].0,
                messages: channel_bytes[c].1,
                busy_s: busy.0[c] - before.0[c],
            })
            .collect();
        links.sort_by_key(|l| (l.from, l.to));
        let mut shared: Vec<SharedLoad> = (0..load.resources.len())
            .filter_map(|r| match load.resources[r].0 {
                ResourceKey::Shared(id) => {
                    Some(SharedLoad { id, bytes: resource_bytes[r], busy_s: busy.1[r] - before.1[r] })
                }
                ResourceKey::Line(..) => None,
            })
            .collect();
        shared.sort_by_key(|s| s.id);
        let mut spans: Vec<Span> = self.peers.iter_mut().flat_map(|p| std::mem::take(&mut p.done.spans)).collect();
        let mut transfers = std::mem::take(&mut self.transfers[pass % AHEAD]);
        transfers.sort_by(|a, b| (a.from, a.to).cmp(&(b.from, b.to)).then(a.start.total_cmp(&b.start)));
        let origin = spans.iter().map(|s| s.start).fold(f64::INFINITY, f64::min);
        for s in &mut spans {
            (s.start, s.end) = (s.start - origin, s.end - origin);
        }
        for t in &mut transfers {
            for time in [&mut t.sent, &mut t.start, &mut t.end, &mut t.arrived] {
                *time -= origin;
            }
        }
        let peers = self.peers.iter().map(|p| PeerLoad { peak_bytes: p.peak + PROCESS, ..p.done.load }).collect();
        Simulation { step_s, closed_form_s, peers, links, shared, spans, transfers }
    }

    /// See [`Simulation::closed_form_s`]; the sending of a peer is that on its slowest channel to another peer.
    fn closed_form(&self) -> f64 {
        let load = self.load;
        let count = f64::from(load.micro_batches);
        let mut sends = vec![(0.0f64, 0.0f64); self.peers.len()];
        let mut bytes = vec![0.0; load.channels.len()];
        for m in load.messages.iter().filter(|m| matches!(m.slot, Slot::Value { .. })) {
            bytes[m.channel as usize] += m.bytes / count;
        }
        for (c, bytes) in load.channels.iter().zip(bytes) {
            if let Some((busy, delay)) = sends.get_mut(c.from.0 as usize) {
                let narrowest = c.resources.iter().map(|&r| load.resources[r as usize].1).fold(f64::INFINITY, f64::min);
                *busy = busy.max(bytes / narrowest);
                *delay = delay.max(c.latency);
            }
        }
        let (mut through, mut slowest, mut tail) = (0.0, 0.0f64, 0.0f64);
        for (i, (p, (busy, delay))) in self.peers.iter().zip(sends).enumerate() {
            let compute = (p.done.load.compute_s - p.done.update_s) / count;
            through += compute + busy + delay;
            slowest = slowest.max(compute).max(busy);
            tail = tail.max(p.done.update_s + load.to_broker[i] + load.from_broker[i]);
        }
        through + (count - 1.0) * slowest + tail
    }
}

/// The rate at which a connection lets out so many bytes that nothing else holds up. It sends a quarter faster than a window in a round trip, or in 10 ms if that is
/// shorter (see `congestion.rs` of `fusionllm_transport`); the window grows as long as it holds tensors up (RFC 9002, section 7.3), until the receiver's does.
fn pace(bytes: f64, round_trip: f64) -> f64 {
    const FIRST: f64 = 131_072.0;
    const MOST: f64 = 1_250_000.0;
    let spread = if bytes < MOST { round_trip.min(0.01) } else { round_trip };
    1.25 * bytes.clamp(FIRST, MOST) / spread
}

/// Bytes a second that a line carries for several connections which have so many bytes for it. More than a router's usual queue of 100 ms overflows it; what is lost is sent again, and
/// connections that have lost something hold back while others do too. Two connections then use 0.85 of the line, many 0.7: between what the bench `shared_uplink` of `fusionllm_transport` shows of
/// connections in lockstep (0.9 and 0.6) and what training runs did that filled uplinks all the time (0.87 with two, 0.8 with four).
fn carried(bandwidth: f64, connections: usize, waiting: f64) -> f64 {
    const QUEUE_S: f64 = 0.1;
    const LEAST_QUEUE: f64 = 65_536.0;
    if connections < 2 || waiting <= (QUEUE_S * bandwidth).max(LEAST_QUEUE) {
        return bandwidth;
    }
    bandwidth * (0.7 + 0.3 / connections as f64)
}

impl Peer {
    /// Lets time pass for a peer, whatever it does in it.
    fn spend(&mut self, peer: PeerId, doing: Doing, micro_batch: Option<u32>, seconds: f64, record: bool) {
        let start = self.time;
        self.time += seconds;
        let load = &mut self.doing.load;
        match doing {
            Doing::Wait | Doing::Verdict => load.wait_s += seconds,
            Doing::Forward => load.forward_s += seconds,
            Doing::Update => self.doing.update_s += seconds,
            Doing::Backward | Doing::WeightGrad => {}
        }
        if !matches!(doing, Doing::Wait | Doing::Verdict) {
            load.compute_s += seconds;
        }
        if !record || seconds <= 0.0 {
            return;
        }
        match self.doing.spans.last_mut() {
            Some(s) if s.doing == doing && s.micro_batch == micro_batch && s.end == start => s.end = self.time,
            _ => self.doing.spans.push(Span { peer, doing, micro_batch, start, end: self.time }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{carried, pace};

    #[test]
    fn the_window_goes_at_once_and_the_receivers_once_a_round_trip() {
        assert_eq!([0.001, 0.01, 0.2].map(|rtt| pace(65_536.0, rtt)), [163_840_000.0, 16_384_000.0, 16_384_000.0]);
        assert_eq!(pace(200_000.0, 0.2), 25_000_000.0, "it grew");
        assert_eq!(pace(1e9, 0.2), 7_812_500.0, "the receiver takes no more");
    }

    #[test]
    fn a_line_carries_less_for_a_crowd_that_overflows_its_queue() {
        assert_eq!(carried(1e6, 1, 1e9), 1e6, "one finds its rate");
        assert_eq!([2, 8].map(|n| carried(1e6, n, 1e5)), [1e6; 2], "its queue takes it");
        assert_eq!([2, 4].map(|n| carried(1e6, n, 1.1e5).round()), [850_000.0, 775_000.0]);
        assert_eq!(carried(1e5, 2, 65_536.0), 1e5, "the least of queues");
    }
}
