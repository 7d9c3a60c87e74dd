//! The events that a joiner tells people about while it takes part.

use std::fmt;
use std::sync::Arc;

use fusionllm_workbench::profile::LeftOut;

/// An event of a joiner.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum JoinEvent {
    /// The broker has not answered for these seconds since the joiner began to connect.
    Waiting {
        /// The broker's addresses.
        at: String,
        /// Seconds.
        seconds: f64,
    },
    /// Operators of the job's model are not measured. Their times are estimated.
    LeftOut(LeftOut),
    /// The connection to the broker has ended. The joiner keeps its copies and tries to reach it again.
    BrokerLost {
        /// Why.
        reason: String,
    },
    /// The broker is reached again.
    BrokerBack,
    /// The disk has no room for copies, so they take memory.
    CopiesInMemory {
        /// The place where there is no room, and the reason.
        reason: String,
    },
    /// The tensors of the plan leave little room for memory that is free and kept.
    MemoryShort {
        /// Bytes that tensors and such memory may take together.
        room: u64,
    },
    /// The user asked to leave. The joiner goes on until its share is with others.
    Leaving,
}

/// Receives the events of a joiner, from any thread.
#[derive(Clone)]
pub struct JoinObserver(Arc<dyn Fn(JoinEvent) + Send + Sync>);

impl JoinObserver {
    /// An observer that calls `told` with every event.
    pub fn new(told: impl Fn(JoinEvent) + Send + Sync + 'static) -> Self {
        Self(Arc::new(told))
    }

    pub(crate) fn tell(&self, event: JoinEvent) {
        (self.0)(event);
    }
}

/// An observer that nobody listens to.
impl Default for JoinObserver {
    fn default() -> Self {
        Self::new(|_| {})
    }
}

impl fmt::Debug for JoinObserver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JoinObserver")
    }
}

/// A joiner's part in a run, after its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Participation {
    /// Whether it ever had a share of the model, and stayed to the end.
    pub took_part: bool,
    /// The way in which its part ended.
    pub end: PartEnd,
}

/// The way in which a joiner's part in a run ended in good order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartEnd {
    /// The run is over.
    Over {
        /// The steps that are done.
        step: u64,
        /// The steps that the job asks for.
        steps: u64,
    },
    /// The joiner left, as its user asked. The run goes on without it.
    Left,
}
