//! The options with which a run is conducted.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use fusionllm_plan::{Cluster, Plan};
use fusionllm_workspace::config::Known;

use super::records::Resume;
use crate::web::Dashboard;

/// The options with which a run is conducted.
pub struct BrokerOptions {
    /// The machines that take part.
    pub peers: Peers,
    /// The address to listen at; `None` for every interface and a free port.
    pub listen: Option<SocketAddr>,
    /// Addresses that lead to this machine but belong to none of its interfaces, such as a router's forwarded port.
    pub advertise: Vec<SocketAddr>,
    /// A plan to carry out instead of making one. Joiners must use its peers' names. A peer without a stage may be
    /// absent.
    pub plan: Option<Plan>,
    /// The joiners' machines and links that are known without measuring, by their names.
    pub known: Option<Known>,
    /// The run directory; `None` for a new one under `runs/`, or for that of the run to resume.
    pub directory: Option<PathBuf>,
    /// The run or checkpoint to go on from.
    pub resume: Option<Resume>,
    /// The limits on who may join.
    pub entry: Entry,
    /// Where the run's page is served.
    pub dashboard: Dashboard,
}

impl BrokerOptions {
    /// A new run of these peers, in a new directory under `runs/`, that listens on every interface and has no page.
    pub fn new(peers: Peers) -> Self {
        Self {
            peers,
            listen: None,
            advertise: Vec::new(),
            plan: None,
            known: None,
            directory: None,
            resume: None,
            entry: Entry::default(),
            dashboard: Dashboard::Off,
        }
    }
}

/// The limits on who may join a run. By default, everybody with the ticket may.
#[derive(Debug, Clone, Default)]
pub struct Entry {
    /// The time for which the ticket is valid; `None` for as long as the run goes on.
    pub valid: Option<Duration>,
    /// How many machines may join with the ticket; `None` for any number.
    pub uses: Option<u32>,
    /// A file with the only keys that may join; `None` for all.
    pub allow: Option<PathBuf>,
}

/// A peer to start on this machine.
#[derive(Debug, Clone, PartialEq)]
pub struct LocalPeer {
    /// The peer's name.
    pub name: String,
    /// The peer's backend.
    pub backend: String,
    /// The threads that it computes with.
    pub threads: usize,
    /// How many times slower than this machine it computes.
    pub slowdown: f64,
}

/// The machines that take part in a run.
#[derive(Debug, Clone)]
pub enum Peers {
    /// This number of joiners, on any machines.
    Joiners(usize),
    /// Processes that the broker starts on this machine.
    Local(Vec<LocalPeer>),
    /// A process on this machine for each device that the plan uses, with the testbed's links emulated between them.
    /// Each computes with one thread.
    Emulated {
        /// Devices and links.
        testbed: Cluster,
        /// The backend of devices that name none.
        backend: String,
    },
}

impl Peers {
    /// The largest number of peers.
    pub fn count(&self) -> usize {
        match self {
            Self::Joiners(count) => *count,
            Self::Local(peers) => peers.len(),
            Self::Emulated { testbed, .. } => testbed.devices().len(),
        }
    }
}
