//! A joiner: takes its share of a run, computes it, and reports to the broker.
//!
//! One thread computes, and everything else is asynchronous. A [`Mailbox`](mailbox::Mailbox) holds what arrived for
//! that thread, and an [`Outbox`](crate::net::Outbox) per connection queues what it sends. So the thread waits only
//! where its Program waits.
//!
//! A [`Session`] lasts from the first connection to the broker to the end of the run. What runs in one generation
//! belongs to a [`Generation`](generation::Generation), which ends when the broker regroups or something is lost. The
//! [`Vault`] with the copies of cuts stays. The decisions are made by the [`Follower`], which knows no network.

mod assigned;
mod broker;
mod carry_out;
mod compute;
mod computing;
mod copies;
mod cuts;
mod events;
mod generation;
mod observer;
mod progress;
mod session;
mod shared;
mod survey;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

#[cfg(feature = "decoders")]
pub(crate) use assigned::accepts_assignment;
use broker::Introduction;
use copies::accept;
use cuts::Vault;
use events::Event;
use fusionllm_backend::{Backend, DeviceInfo};
use fusionllm_graph::Advice;
use fusionllm_plan::Device;
use fusionllm_protocol::Follower;
use fusionllm_transport::{Allowed, Endpoint, EndpointOptions, Secret, SecretKey, Ticket};
use fusionllm_workbench::machine::compute_threads;
pub use observer::{JoinEvent, JoinObserver, PartEnd, Participation};
use progress::Progress;
use session::Session;
use shared::Shared;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tracing::Instrument;

use crate::NodeError;
use crate::keys::identity;
use crate::machine::interrupts::{self, Interrupts};

/// The options with which a joiner takes part.
pub struct JoinOptions {
    /// The broker's ticket.
    pub ticket: Ticket,
    /// The backend that computes.
    pub backend: Arc<dyn Backend>,
    /// The peer's name; if empty, the broker chooses one.
    pub name: String,
    /// The file of this machine's identity, which is written if there is none; `None` for a new identity.
    pub identity: Option<PathBuf>,
    /// The address to listen at; `None` for every interface and a free port.
    pub listen: Option<SocketAddr>,
    /// Addresses that lead to this machine but belong to none of its interfaces, such as a router's forwarded port.
    pub advertise: Vec<SocketAddr>,
    /// For emulated links: whether the peer talks to no address but those it is given.
    pub pinned: bool,
    /// How many times slower than this machine the peer computes, at least 1. Above 1, the backend gets one thread.
    pub slowdown: f64,
    /// A profile of this machine; `None` to measure it briefly if the broker asks.
    pub profile: Option<Device>,
    /// Bytes of memory that the run may use; `None` for all that is free.
    pub memory: Option<u64>,
    /// The receiver of the events that people should know.
    pub observer: JoinObserver,
}

impl JoinOptions {
    /// A peer under a name of the broker's choice, with a new identity, that gives the run all that is free.
    pub fn new(ticket: Ticket, backend: Arc<dyn Backend>) -> Self {
        Self {
            ticket,
            backend,
            name: String::new(),
            identity: None,
            listen: None,
            advertise: Vec::new(),
            pinned: false,
            slowdown: 1.0,
            profile: None,
            memory: None,
            observer: JoinObserver::default(),
        }
    }
}

/// Takes part in a run until the broker ends it, or this peer is asked to leave: by Ctrl-C, SIGTERM, SIGHUP or SIGQUIT.
/// Another Ctrl-C ends it at once.
///
/// A lost connection ends nothing: the peer reports a lost neighbour and waits for its next part, and it tries to reach
/// a lost broker again.
///
/// # Errors
///
/// The broker cannot be reached, refuses this peer, or stops the run.
pub async fn join(options: JoinOptions) -> Result<Participation, NodeError> {
    let allowed = Allowed::Only(BTreeSet::from([options.ticket.addr.key]));
    let secret_key = match &options.identity {
        Some(path) => identity(path)?,
        None => SecretKey::generate(),
    };
    let endpoint = Endpoint::bind(EndpointOptions {
        secret_key,
        allowed,
        listen: options.listen,
        advertise: options.advertise.clone(),
        pinned: options.pinned,
        relay: options.ticket.relay(),
        ..EndpointOptions::new()
    })
    .await?;
    let result = take_part(&endpoint, options).await;
    // A broker that was not reached need not hear of the end, which would take seconds.
    let unheard = matches!(result, Err(NodeError::BrokerUnreachable(_))) && endpoint.stats().connections == 0;
    if !unheard {
        let reason = result.as_ref().err().map(Advice::one_line).unwrap_or_default();
        endpoint.close(&reason).await;
    }
    result
}

async fn take_part(endpoint: &Endpoint, options: JoinOptions) -> Result<Participation, NodeError> {
    let JoinOptions { ticket, backend, name, slowdown, profile, memory, observer, .. } = options;
    let (sender, events) = mpsc::unbounded_channel();
    // A processor shares its memory with other programs, so only free memory counts.
    let DeviceInfo { threads, memory_bytes, .. } = backend.device();
    let memory = memory.or(memory_bytes.filter(|_| threads.is_none()));
    let shared = Arc::new(Shared {
        endpoint: endpoint.clone(),
        backend,
        slowdown,
        threads: compute_threads(slowdown)?,
        memory,
        observer,
        progress: Arc::new(Progress::default()),
        vault: Vault::default(),
        saving: tokio::sync::watch::Sender::new(0),
        arrivals: Mutex::new(None),
        events: sender,
    });
    let mut process = [0; 8];
    process.copy_from_slice(&Secret::generate().as_bytes()[..8]);
    let (process, profiled) = (u64::from_le_bytes(process), profile.is_some());
    let introduction = Introduction { ticket, name, process, profiled };
    let mut interrupts = Interrupts::new()?;
    let (connection, lanes) = tokio::select! {
        dialled = introduction.dial(&shared) => dialled?,
        _ = interrupts.next() => return Err(NodeError::Stopped("this machine had not joined yet".into())),
    };
    let mut tasks = JoinSet::new();
    tasks.spawn(accept(shared.clone()));
    tasks.spawn({
        let shared = shared.clone();
        interrupts::report(interrupts, move |stop| shared.send(Event::Interrupt(stop)))
    });
    let mut session = Session {
        shared,
        events,
        introduction: Arc::new(introduction),
        follower: Follower::new(),
        broker: None,
        number: 0,
        profile,
        contacts: BTreeMap::new(),
        members: BTreeMap::new(),
        assigned: None,
        generation: None,
        early: BTreeMap::new(),
        requests: BTreeMap::new(),
        next_request: 0,
        took_part: false,
        leaving: false,
        tasks,
    };
    let name = session.introduction.name.clone();
    session.run(connection, lanes).instrument(tracing::info_span!("peer", name)).await
}
