//! Processors that several peers compute on.
//!
//! All tasks of a processor slow down by the same factor, so it has a clock of its own, which runs slower the more of
//! its cores are busy. A task ends when that clock has advanced by the task's seconds.

use std::collections::BTreeMap;

use crate::cost::{Cluster, Processor};

/// The processors that at least two peers compute on.
pub(super) struct Processors {
    shared: Vec<Shared>,
    /// By peer.
    seats: Vec<Option<Seat>>,
}

/// A peer's place at a processor.
#[derive(Debug, Clone, Copy)]
struct Seat {
    processor: u32,
    /// The cores that it keeps busy while it computes.
    busy: f64,
}

/// Something that a peer does on a processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Task {
    /// The computing thread's work until something that others can see.
    Compute(u32),
    /// The codec thread's work for one message.
    Code(u32),
}

/// When the next task of a processor will be done, unless another begins before.
#[derive(Debug, Clone, Copy)]
pub(super) struct Done {
    pub(super) time: f64,
    pub(super) processor: u32,
    pub(super) version: u32,
}

struct Shared {
    /// As the device sees it that keeps the fewest cores busy.
    processor: Processor,
    /// Seconds of work that a task would have done which began with the clock.
    clock: f64,
    /// When the clock was read last.
    read: f64,
    /// The cores that tasks keep busy, by the clock at their end, and then in the order in which they began.
    tasks: BTreeMap<(u64, u32), (Task, f64)>,
    begun: u32,
    /// Counts the changes of what is done next, so that outdated ends are ignored.
    version: u32,
}

impl Processors {
    pub(super) fn new(cluster: &Cluster) -> Self {
        let mut of: BTreeMap<&str, Vec<(usize, &Processor)>> = BTreeMap::new();
        for (i, device) in cluster.devices().iter().enumerate() {
            if let Some(processor) = &device.processor {
                of.entry(&processor.name).or_default().push((i, processor));
            }
        }
        let mut processors = Self { shared: Vec::new(), seats: vec![None; cluster.devices().len()] };
        for devices in of.into_values().filter(|devices| devices.len() > 1) {
            for (i, processor) in &devices {
                processors.seats[*i] = Some(Seat { processor: processors.shared.len() as u32, busy: processor.busy });
            }
            let least = devices.into_iter().map(|(_, p)| p).min_by(|a, b| a.busy.total_cmp(&b.busy));
            processors.shared.extend(least.map(|processor| Shared {
                processor: processor.clone(),
                clock: 0.0,
                read: 0.0,
                tasks: BTreeMap::new(),
                begun: 0,
                version: 0,
            }));
        }
        processors
    }

    /// Whether a peer computes on a processor that others use, too.
    pub(super) fn is_shared(&self, peer: u32) -> bool {
        self.seats.get(peer as usize).is_some_and(Option::is_some)
    }

    /// Begins a task that would take so many seconds alone.
    pub(super) fn begin(&mut self, now: f64, task: Task, seconds: f64) -> Option<Done> {
        let (Task::Compute(peer) | Task::Code(peer)) = task;
        let seat = self.seats.get(peer as usize).copied().flatten()?;
        let shared = &mut self.shared[seat.processor as usize];
        shared.advance(now);
        let busy = match task {
            Task::Compute(_) => seat.busy,
            Task::Code(_) => 1.0,
        };
        shared.begun += 1;
        // The clock is never negative, so its bits have the same order.
        shared.tasks.insert(((shared.clock + seconds).to_bits(), shared.begun), (task, busy));
        shared.next(seat.processor)
    }

    /// The task that is done, unless that is outdated, and when the one after it will be.
    pub(super) fn finish(&mut self, now: f64, processor: u32, version: u32) -> Option<(Task, Option<Done>)> {
        let shared = &mut self.shared[processor as usize];
        if shared.version != version {
            return None;
        }
        let ((end, _), (task, _)) = shared.tasks.pop_first()?;
        (shared.clock, shared.read) = (f64::from_bits(end), now);
        Some((task, shared.next(processor)))
    }
}

impl Shared {
    fn times_longer(&self) -> f64 {
        self.processor.times_longer(self.tasks.values().map(|(_, busy)| busy).sum())
    }

    fn advance(&mut self, now: f64) {
        if !self.tasks.is_empty() {
            self.clock += (now - self.read) / self.times_longer();
        }
        self.read = now;
    }

    fn next(&mut self, processor: u32) -> Option<Done> {
        self.version += 1;
        let ((end, _), _) = self.tasks.first_key_value()?;
        let left = (f64::from_bits(*end) - self.clock).max(0.0);
        Some(Done { time: self.read + left * self.times_longer(), processor, version: self.version })
    }
}
