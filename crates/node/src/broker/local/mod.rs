//! Peers on this machine. Each is a process that runs the same `join` as anywhere.

mod emulation;

pub(crate) use emulation::Emulation;

use std::fs::File;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;

use fusionllm_backend::machine::memory::MemoryKills;
use fusionllm_data::DiskError;
use fusionllm_plan::Cluster;
use fusionllm_program::PeerId;
use fusionllm_transport::{PeerAddr, Ticket};
use tokio::process::{Child, Command};
use tokio::task::JoinSet;

use crate::NodeError;
use crate::broker::options::{LocalPeer, Peers};
use emulation::free_addresses;

/// The addresses by which a local peer reaches the others.
pub(crate) struct Invitation {
    /// The broker, at the address that this peer uses.
    pub(crate) ticket: Ticket,
    /// For emulated links: the address to listen at.
    pub(crate) pinned: Option<SocketAddr>,
}

/// Peers to start on this machine, and the links between them if those are emulated.
pub(crate) struct LocalPeers {
    pub(crate) emulation: Option<Emulation>,
    pub(crate) peers: Vec<(LocalPeer, Invitation)>,
}

impl LocalPeers {
    /// The peers to start, each with its invitation: no more than `wanted`. `testbed` holds the devices that the first
    /// plan uses.
    pub(crate) fn new(
        peers: &Peers,
        wanted: usize,
        testbed: Option<Cluster>,
        ticket: &Ticket,
    ) -> Result<Self, NodeError> {
        let invitation = |pinned: Option<SocketAddr>, broker: PeerAddr| Invitation {
            ticket: Ticket { addr: broker, ..ticket.clone() },
            pinned,
        };
        match (peers, testbed) {
            (Peers::Emulated { backend, .. }, Some(cluster)) => {
                let devices = cluster.devices().to_vec();
                let PeerAddr { key, addrs, .. } = ticket.addr.clone();
                let broker =
                    addrs.first().copied().ok_or_else(|| NodeError::State("the broker has no address".into()))?;
                let addresses = free_addresses(devices.len())?;
                let mut emulation = Emulation::start(cluster, broker, addresses.clone())?;
                let mut local = Vec::with_capacity(devices.len());
                for ((i, device), pinned) in (0..).zip(devices).zip(addresses) {
                    let broker = emulation.address(PeerId(i), PeerId::BROKER)?;
                    let peer = LocalPeer {
                        name: device.name,
                        backend: device.backend.unwrap_or_else(|| backend.clone()),
                        threads: 1,
                        slowdown: device.slowdown,
                    };
                    local.push((peer, invitation(Some(pinned), PeerAddr::new(key, vec![broker]))));
                }
                Ok(Self { emulation: Some(emulation), peers: local })
            }
            (Peers::Local(local), _) => {
                let invited = |p: &LocalPeer| (p.clone(), invitation(None, ticket.addr.clone()));
                Ok(Self { emulation: None, peers: local.iter().take(wanted).map(invited).collect() })
            }
            _ => Ok(Self { emulation: None, peers: Vec::new() }),
        }
    }
}

/// The processes of local peers. They end with this process.
pub(crate) struct Children {
    tasks: JoinSet<()>,
}

impl Children {
    /// Starts the processes. Each writes its log to `DIR/logs/NAME.log`. `failed` gets the reason if one ends badly.
    pub(crate) fn start(
        peers: &[(LocalPeer, Invitation)],
        directory: Option<&Path>,
        failed: impl Fn(String) + Clone + Send + 'static,
    ) -> Result<Self, NodeError> {
        let mut tasks = JoinSet::new();
        if peers.is_empty() {
            return Ok(Self { tasks });
        }
        let program =
            std::env::current_exe().map_err(|e| NodeError::State(format!("cannot find this program: {e}")))?;
        for (peer, invitation) in peers {
            let mut command = Command::new(&program);
            command.arg("join").arg(invitation.ticket.to_string());
            command.args(["--backend", &peer.backend, "--name", &peer.name]);
            if peer.slowdown > 1.0 {
                command.args(["--slowdown", &peer.slowdown.to_string()]);
            }
            if let Some(listen) = invitation.pinned {
                command.args(["--pinned", "--listen", &listen.to_string()]);
            }
            command.env("RAYON_NUM_THREADS", peer.threads.to_string());
            // However this process ends, the pipe closes, and the peer ends with it.
            command.arg("--child").stdin(Stdio::piped()).stdout(Stdio::null()).kill_on_drop(true);
            // Ctrl-C is for the broker, which stops its peers in good order.
            #[cfg(unix)]
            command.process_group(0);
            let log = match directory {
                Some(directory) => {
                    let path = directory.join("logs").join(format!("{}.log", peer.name));
                    let file = path.parent().map_or(Ok(()), std::fs::create_dir_all).and_then(|()| File::create(&path));
                    let file = file.map_err(DiskError::at(&path, "created"))?;
                    command.stderr(file);
                    Some(path)
                }
                None => {
                    command.stderr(Stdio::inherit());
                    None
                }
            };
            let child =
                command.spawn().map_err(|e| NodeError::State(format!("cannot start peer {:?}: {e}", peer.name)))?;
            let (name, failed, killed) = (peer.name.clone(), failed.clone(), MemoryKills::start());
            tasks.spawn(async move {
                if let Some(reason) = outcome(child, &name, log.as_deref(), killed).await {
                    failed(reason);
                }
            });
        }
        Ok(Self { tasks })
    }

    /// Waits until all have ended.
    pub(crate) async fn finish(mut self) {
        while self.tasks.join_next().await.is_some() {}
    }

    /// Waits two seconds for all to end, then kills the rest.
    pub(crate) async fn stop(mut self) {
        let all = async { while self.tasks.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(std::time::Duration::from_secs(2), all).await;
        self.tasks.shutdown().await;
    }
}

/// The reason for which a child ended badly, with the end of its log.
async fn outcome(mut child: Child, name: &str, log: Option<&Path>, killed: MemoryKills) -> Option<String> {
    // Waiting would close it.
    let _open_until_then = child.stdin.take();
    match child.wait().await {
        Ok(status) if status.success() => None,
        Ok(status) => {
            let text = log.and_then(|p| std::fs::read_to_string(p).ok()).unwrap_or_default();
            let mut lines = text.lines().rev().map(str::trim).filter(|line| !line.is_empty());
            let last = lines.next().unwrap_or("it left no message");
            // A hint says little without the error above it.
            let last = match (last.strip_prefix("hint: "), lines.next()) {
                (Some(hint), Some(error)) => {
                    format!("{}: {hint}", error.trim_start_matches("error: ").trim_start_matches("caused by: "))
                }
                _ => last.to_owned(),
            };
            match killed.verdict(status, &last) {
                Some(verdict) => Some(format!("peer {name:?} ended: {verdict}")),
                None => Some(format!("peer {name:?} ended ({status}): {last}")),
            }
        }
        Err(e) => Some(format!("peer {name:?}: {e}")),
    }
}
