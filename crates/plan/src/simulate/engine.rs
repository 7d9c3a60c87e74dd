//! The virtual clock: events of peers, messages and the broker, in the order of their times.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use fusionllm_program::{Address, PASSES_IN_FLIGHT, PeerId, ProgramError};

use super::load::Load;
use super::messages::Message;
use super::network::{Departed, Departure, Network};
use super::processors::{Done, Processors, Task};
use super::steps::Step;
use super::{
    Activity, LineLoad, LinkLoad, PROCESS_BYTES, PeerLoad, STEADY_TOLERANCE, STEPS, Simulation, Span, Transfer,
};
use crate::cost::Cluster;
use crate::error::PlanError;

/// Passes that may have messages in flight at once. A peer may have finished the oldest pass in flight already.
const MESSAGE_PASSES: usize = PASSES_IN_FLIGHT + 1;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A message's last byte has arrived.
    Arrive { pass: u32, message: u32 },
    /// A message is encoded and can leave.
    Encoded { pass: u32, message: u32 },
    /// A message is decoded and can be read.
    Decoded { pass: u32, message: u32 },
    /// A message's last byte has left, unless its rate has changed since this was foreseen.
    Sent { channel: u32, version: u32 },
    /// A task of a shared processor is done, unless others have begun or ended since this was foreseen.
    Done { processor: u32, version: u32 },
    /// A peer continues.
    Continue(u32),
    /// The broker sends the inputs of a pass.
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
    network: Network<'a>,
    processors: Processors,
    departures: Vec<Departure>,
    /// By pass modulo [`MESSAGE_PASSES`], and message: whether it arrived.
    arrived: Vec<Vec<bool>>,
    /// By pass.
    progress: Vec<Progress>,
    /// By pass modulo [`MESSAGE_PASSES`], if they are recorded.
    transfers: Vec<Vec<Transfer>>,
}

/// The message or verdict that a peer waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Waiting {
    Message(u32),
    Verdict,
}

#[derive(Debug, Clone, Default)]
struct Peer {
    /// Index of its next step.
    at: usize,
    pass: u32,
    /// When the peer's codec thread will be idle, if it has a core to itself.
    codec_idle: f64,
    /// On a shared processor: the seconds that the codec thread still has to compute, message by message, and what is
    /// then done. It computes the first.
    coding: VecDeque<(f64, Event)>,
    /// On a shared processor: the work that the peer computes now, in seconds without the others.
    burst: Vec<(Activity, Option<u32>, f64)>,
    /// The peer's own clock, never before the engine's while it computes.
    time: f64,
    waiting: Option<Waiting>,
    /// Bytes of messages that wait to be read or to leave.
    buffered: u64,
    /// Bytes that the peer held when it last computed.
    held: u64,
    peak: u64,
    current: PassRecord,
    previous: PassRecord,
}

/// A peer's work in one pass: its load, the time of its updates, and its spans.
#[derive(Debug, Clone, Default)]
struct PassRecord {
    load: PeerLoad,
    update_s: f64,
    spans: Vec<Span>,
}

/// How far all peers are with a pass.
#[derive(Debug, Clone, Copy, Default)]
struct Progress {
    /// How many peers have sent their norms.
    norms: usize,
    /// When the last norms reach the broker.
    norms_at: f64,
    /// How many peers have finished.
    reports: usize,
    /// When the last report reaches the broker.
    reported_at: f64,
}

impl<'a> Engine<'a> {
    pub(super) fn new(load: &'a Load, cluster: &'a Cluster, record: bool) -> Self {
        Self {
            load,
            cluster,
            record,
            now: 0.0,
            events: BinaryHeap::new(),
            foreseen: 0,
            peers: vec![Peer::default(); load.steps.len()],
            network: Network::new(load),
            processors: Processors::new(cluster),
            departures: Vec::new(),
            arrived: vec![vec![false; load.messages.len()]; MESSAGE_PASSES],
            progress: vec![Progress::default(); STEPS.end() + MESSAGE_PASSES],
            transfers: vec![Vec::new(); MESSAGE_PASSES],
        }
    }

    pub(super) fn run(mut self) -> Result<Simulation, PlanError> {
        for pass in 0..PASSES_IN_FLIGHT as u32 {
            self.at(0.0, Event::Feed(pass));
        }
        for p in 0..self.peers.len() as u32 {
            self.at(0.0, Event::Continue(p));
        }
        // How many passes all peers have finished, when they finished the last, and how long it took.
        let (mut done, mut end, mut step_s) = (0, 0.0, f64::INFINITY);
        let mut before = self.network.busy(self.now);
        while let Some(Reverse((time, _, event))) = self.events.pop() {
            self.now = f64::from_bits(time);
            self.handle(event);
            if self.progress[done].reports < self.peers.len() {
                continue;
            }
            let took = self.now - end;
            let steady = (took - step_s).abs() <= STEADY_TOLERANCE * took;
            (end, step_s) = (self.now, took);
            done += 1;
            if (done >= *STEPS.start() && steady) || done >= *STEPS.end() {
                return Ok(self.result(step_s, done - 1, &before));
            }
            before = self.network.busy(self.now);
        }
        let (p, waiting) = (0..).zip(&self.peers).find_map(|(p, peer)| Some((PeerId(p), peer.waiting?))).unzip();
        let what = match waiting {
            Some(Waiting::Message(m)) => format!("{:?}", self.load.messages[m as usize].tensor),
            _ => "the verdict".into(),
        };
        let name = self.cluster.name(p.unwrap_or(PeerId::BROKER));
        Err(ProgramError(format!("{name} waits forever for {what}")).into())
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Arrive { pass, message } => {
                let Message { to, decode, .. } = self.load.messages[message as usize];
                self.run_codec(to, decode, Event::Decoded { pass, message });
            }
            Event::Encoded { pass, message } => self.send(pass, message),
            Event::Decoded { pass, message } => self.arrive(pass, message),
            Event::Sent { channel, version } => self.sent(channel, version),
            Event::Done { processor, version } => self.done(processor, version),
            Event::Continue(peer) => self.run_peer(peer),
            Event::Feed(pass) => self.feed(pass),
        }
    }

    fn at(&mut self, time: f64, event: Event) {
        self.foreseen += 1;
        // Times are never negative, so their bits have the same order.
        self.events.push(Reverse((time.to_bits(), self.foreseen, event)));
    }

    /// Runs a peer until it waits, or until it does something that others see.
    fn run_peer(&mut self, p: u32) {
        let index = p as usize;
        let load = self.load;
        let shares = self.processors.is_shared(p);
        self.end_wait(p);
        loop {
            let peer = &mut self.peers[index];
            let step = load.steps[index].get(peer.at);
            let work = match step {
                Some(&Step::Compute { activity, micro_batch, seconds, peak }) => {
                    Some((activity, micro_batch, seconds, peak))
                }
                Some(&Step::Exchange { activity, micro_batch, message, receives, peak }) => {
                    let seconds = load.messages[message as usize].lost[usize::from(receives)];
                    Some((activity, micro_batch, seconds, peak))
                }
                _ => None,
            };
            if let Some((activity, micro_batch, seconds, peak)) = work {
                if shares {
                    peer.burst.push((activity, micro_batch, seconds));
                } else {
                    peer.spend(PeerId(p), activity, micro_batch, seconds, self.record);
                }
                peer.held = peak;
                peer.peak = peer.peak.max(peak + peer.buffered);
                peer.at += 1;
                continue;
            }
            if !peer.burst.is_empty() {
                peer.time = self.now;
                let seconds = peer.burst.iter().map(|(_, _, seconds)| seconds).sum();
                let done = self.processors.begin(self.now, Task::Compute(p), seconds);
                self.foresee(done);
                return;
            }
            if peer.time > self.now {
                let time = peer.time;
                self.at(time, Event::Continue(p));
                return;
            }
            let pass = peer.pass;
            match step {
                None => {
                    if !self.finish_pass(p) {
                        return;
                    }
                }
                Some(&Step::Receive { message }) => {
                    let arrived = &mut self.arrived[pass as usize % MESSAGE_PASSES][message as usize];
                    if !std::mem::take(arrived) {
                        peer.waiting = Some(Waiting::Message(message));
                        return;
                    }
                    let Message { payload, mask, given_up, .. } = load.messages[message as usize];
                    peer.buffered = (peer.buffered + mask).saturating_sub(payload + given_up);
                    peer.at += 1;
                }
                Some(&Step::Send { message }) => {
                    let Message { from, encode, payload, mask, given_up, .. } = load.messages[message as usize];
                    peer.at += 1;
                    peer.buffered = (peer.buffered + payload + mask).saturating_sub(given_up);
                    peer.peak = peer.peak.max(peer.held + peer.buffered);
                    self.run_codec(from, encode, Event::Encoded { pass, message });
                }
                Some(Step::Clip) => {
                    peer.waiting = Some(Waiting::Verdict);
                    self.norms(p);
                    return;
                }
                Some(Step::Compute { .. } | Step::Exchange { .. }) => {}
            }
        }
    }

    /// Counts the time for which a peer has waited, if it did.
    fn end_wait(&mut self, p: u32) {
        let peer = &mut self.peers[p as usize];
        let Some(waiting) = peer.waiting.take() else { return };
        let (activity, micro_batch) = match waiting {
            Waiting::Verdict => (Activity::Verdict, None),
            Waiting::Message(m) => match self.load.messages[m as usize].tensor {
                Address::Value { micro_batch, .. } => (Activity::Wait, Some(micro_batch)),
                _ => (Activity::Wait, None),
            },
        };
        peer.spend(PeerId(p), activity, micro_batch, self.now - peer.time, self.record);
        peer.time = self.now;
        // A message is looked for again; the verdict is not.
        peer.at += usize::from(waiting == Waiting::Verdict);
    }

    /// Ends a task of a shared processor.
    fn done(&mut self, processor: u32, version: u32) {
        let Some((task, next)) = self.processors.finish(self.now, processor, version) else { return };
        self.foresee(next);
        match task {
            Task::Compute(p) => {
                let peer = &mut self.peers[p as usize];
                let burst = std::mem::take(&mut peer.burst);
                let alone: f64 = burst.iter().map(|(_, _, seconds)| seconds).sum();
                let times = if alone > 0.0 { (self.now - peer.time) / alone } else { 0.0 };
                for (activity, micro_batch, seconds) in burst {
                    peer.spend(PeerId(p), activity, micro_batch, times * seconds, self.record);
                }
                peer.time = self.now;
                self.run_peer(p);
            }
            Task::Code(p) => {
                let coding = &mut self.peers[p as usize].coding;
                let coded = coding.pop_front();
                if let Some(&(seconds, _)) = coding.front() {
                    let done = self.processors.begin(self.now, task, seconds);
                    self.foresee(done);
                }
                coded.into_iter().for_each(|(_, then)| self.handle(then));
            }
        }
    }

    fn foresee(&mut self, done: Option<Done>) {
        if let Some(Done { time, processor, version }) = done {
            self.at(time, Event::Done { processor, version });
        }
    }

    /// Keeps a peer's codec thread busy for `seconds`, then raises `then`. A message without a codec does not wait
    /// for the thread.
    fn run_codec(&mut self, peer: PeerId, seconds: f64, then: Event) {
        let now = self.now;
        let shares = self.processors.is_shared(peer.0);
        match self.peers.get_mut(peer.0 as usize) {
            Some(at) if seconds > 0.0 && shares => {
                at.coding.push_back((seconds, then));
                if at.coding.len() == 1 {
                    let done = self.processors.begin(now, Task::Code(peer.0), seconds);
                    self.foresee(done);
                }
            }
            Some(peer) if seconds > 0.0 => {
                peer.codec_idle = peer.codec_idle.max(now) + seconds;
                let done = peer.codec_idle;
                self.at(done, then);
            }
            _ => self.handle(then),
        }
    }

    /// A peer sends its norms. The last one's norms bring the verdict to all.
    fn norms(&mut self, p: u32) {
        let pass = self.peers[p as usize].pass;
        let progress = &mut self.progress[pass as usize];
        progress.norms += 1;
        progress.norms_at = progress.norms_at.max(self.now + self.load.to_broker[p as usize]);
        let judged = progress.norms_at;
        if progress.norms == self.load.voters.len() {
            let load = self.load;
            for &q in &load.voters {
                self.at(judged + load.from_broker[q as usize], Event::Continue(q));
            }
        }
    }

    /// Ends a peer's pass; returns whether it has another.
    fn finish_pass(&mut self, p: u32) -> bool {
        let now = self.now;
        let peer = &mut self.peers[p as usize];
        let pass = peer.pass;
        peer.previous = std::mem::take(&mut peer.current);
        peer.pass += 1;
        peer.at = 0;
        let progress = &mut self.progress[pass as usize];
        progress.reports += 1;
        progress.reported_at = progress.reported_at.max(now + self.load.to_broker[p as usize]);
        let (all, at) = (progress.reports == self.peers.len(), progress.reported_at);
        if all {
            self.at(at, Event::Feed(pass + PASSES_IN_FLIGHT as u32));
        }
        (pass as usize) < *STEPS.end()
    }

    fn feed(&mut self, pass: u32) {
        self.transfers[pass as usize % MESSAGE_PASSES].clear();
        for &message in &self.load.inputs {
            self.send(pass, message);
        }
    }

    fn send(&mut self, pass: u32, message: u32) {
        if let Some(idle) = self.network.queue(self.now, pass, message) {
            self.start(idle);
        }
    }

    /// Starts to send the first message of a channel.
    fn start(&mut self, channel: u32) {
        let message = self.network.start(self.now, channel, &mut self.departures);
        self.foresee_departures();
        let Some(message) = message else { return };
        let m = &self.load.messages[message as usize];
        // The first byte brings the message's length. The reader then allocates the whole message.
        if let Some(reader) = self.peers.get_mut(m.to.0 as usize) {
            reader.buffered += m.payload;
            reader.peak = reader.peak.max(reader.held + reader.buffered);
        }
    }

    fn foresee_departures(&mut self) {
        let mut departures = std::mem::take(&mut self.departures);
        for Departure { time, channel, version } in departures.drain(..) {
            self.at(time, Event::Sent { channel, version });
        }
        self.departures = departures;
    }

    fn sent(&mut self, channel: u32, version: u32) {
        let departed = self.network.depart(self.now, channel, version);
        let Some(Departed { pass, message, handed, start }) = departed else { return };
        let m = &self.load.messages[message as usize];
        let arrived = self.now + self.load.channels[channel as usize].latency;
        if self.record {
            self.transfers[pass as usize % MESSAGE_PASSES].push(Transfer {
                from: m.from,
                to: m.to,
                tensor: m.tensor,
                bytes: m.payload,
                sent: handed,
                start,
                end: self.now,
                arrived,
            });
        }
        self.at(arrived, Event::Arrive { pass, message });
        self.start(channel);
    }

    fn arrive(&mut self, pass: u32, message: u32) {
        let m = &self.load.messages[message as usize];
        self.arrived[pass as usize % MESSAGE_PASSES][message as usize] = true;
        // The sender keeps a message until it arrives, in case it must be sent again.
        if let Some(sender) = self.peers.get_mut(m.from.0 as usize) {
            sender.buffered -= m.payload.min(sender.buffered);
        }
        let peer = &mut self.peers[m.to.0 as usize];
        if peer.waiting == Some(Waiting::Message(message)) && peer.pass == pass {
            let now = self.now;
            self.at(now, Event::Continue(m.to.0));
        }
    }

    fn result(mut self, step_s: f64, pass: usize, before: &[f64]) -> Simulation {
        let closed_form_s = self.closed_form();
        let (links, lines) = self.loads(before);
        let mut spans: Vec<Span> = self.peers.iter_mut().flat_map(|p| std::mem::take(&mut p.previous.spans)).collect();
        let mut transfers = std::mem::take(&mut self.transfers[pass % MESSAGE_PASSES]);
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
        let load = |p: &Peer| PeerLoad { peak_bytes: p.peak + PROCESS_BYTES, ..p.previous.load };
        let peers: Vec<PeerLoad> = self.peers.iter().map(load).collect();
        // The first steps draw on messages that were sent ahead. In the long run, none of them is sent faster than its
        // lines carry them.
        let step_s = lines.iter().map(|line| line.busy_s).fold(step_s, f64::max);
        Simulation { step_s, closed_form_s, peers, links, lines, spans, transfers }
    }

    /// The load of every channel since `before`, and of every line.
    fn loads(&self, before: &[f64]) -> (Vec<LinkLoad>, Vec<LineLoad>) {
        let load = self.load;
        let busy = self.network.busy(self.now);
        let channels = load.channels.iter().zip(busy.iter().zip(before));
        let mut links: Vec<LinkLoad> = channels
            .map(|(c, (now, before))| LinkLoad { from: c.from, to: c.to, bytes: 0, messages: 0, busy_s: now - before })
            .collect();
        let line = |&(line, link)| LineLoad { line, link, bytes: 0, busy_s: 0.0 };
        let mut lines: Vec<LineLoad> = load.lines.iter().map(line).collect();
        for m in &load.messages {
            let link = &mut links[m.channel as usize];
            link.bytes += m.payload;
            link.messages += 1;
            for &l in &load.channels[m.channel as usize].lines {
                let line = &mut lines[l as usize];
                line.bytes += m.payload;
                line.busy_s += m.bytes / line.link.bandwidth;
            }
        }
        links.sort_by_key(|l| (l.from, l.to));
        lines.sort_by_key(|l| l.line);
        (links, lines)
    }

    /// See [`Simulation::closed_form_s`]. A peer sends for as long as its busiest line takes for its bytes.
    fn closed_form(&self) -> f64 {
        let load = self.load;
        let count = f64::from(load.micro_batches);
        let mut lines = vec![0.0; load.lines.len()];
        let mut sends = vec![BTreeMap::new(); self.peers.len()];
        let mut delays = vec![0.0f64; self.peers.len()];
        for m in load.messages.iter().filter(|m| matches!(m.tensor, Address::Value { .. })) {
            let Some(sends) = sends.get_mut(m.from.0 as usize) else { continue };
            let channel = &load.channels[m.channel as usize];
            for &l in &channel.lines {
                let busy = m.bytes / count / load.lines[l as usize].1.bandwidth;
                *sends.entry(l).or_insert(0.0) += busy;
                lines[l as usize] += busy;
            }
            let delay = &mut delays[m.from.0 as usize];
            *delay = delay.max(channel.latency);
        }
        let (mut through, mut slowest) = (0.0, lines.into_iter().fold(0.0f64, f64::max));
        let mut tail = 0.0f64;
        for (i, p) in self.peers.iter().enumerate() {
            let compute = (p.previous.load.compute_s - p.previous.update_s) / count;
            through += compute + sends[i].values().copied().fold(0.0, f64::max) + delays[i];
            slowest = slowest.max(compute);
            tail = tail.max(p.previous.update_s + load.to_broker[i] + load.from_broker[i]);
        }
        through + (count - 1.0) * slowest + tail
    }
}

impl Peer {
    /// Advances the peer's clock.
    fn spend(&mut self, peer: PeerId, activity: Activity, micro_batch: Option<u32>, seconds: f64, record: bool) {
        let start = self.time;
        self.time += seconds;
        let load = &mut self.current.load;
        match activity {
            Activity::Wait | Activity::Verdict => load.wait_s += seconds,
            Activity::Forward => load.forward_s += seconds,
            Activity::Update => self.current.update_s += seconds,
            Activity::Backward | Activity::WeightGrad | Activity::Offload => {}
        }
        if activity.computes() {
            load.compute_s += seconds;
        }
        if !record || seconds <= 0.0 {
            return;
        }
        match self.current.spans.last_mut() {
            Some(s) if s.activity == activity && s.micro_batch == micro_batch && s.end == start => s.end = self.time,
            _ => self.current.spans.push(Span { peer, activity, micro_batch, start, end: self.time }),
        }
    }
}
