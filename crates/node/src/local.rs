//! Peers on this machine, each a process of its own: the same `join` that runs anywhere.

use std::fs::File;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;

use fusionllm_transport::Ticket;
use tokio::process::{Child, Command};
use tokio::task::JoinSet;

use crate::NodeError;

/// A peer to start here.
#[derive(Debug, Clone, PartialEq)]
pub struct LocalPeer {
    /// Its name.
    pub name: String,
    /// Its backend.
    pub backend: String,
    /// Threads it computes with.
    pub threads: usize,
    /// How many times slower than this machine it is to be.
    pub slowdown: f64,
}

/// How a local peer finds the others.
pub(crate) struct Entrance {
    /// The broker, as this peer sees it.
    pub(crate) ticket: Ticket,
    /// Where it listens if it may talk to none but the addresses that it is given.
    pub(crate) pinned: Option<SocketAddr>,
}

/// The processes of local peers. They end with this one.
pub(crate) struct Children {
    tasks: JoinSet<()>,
}

impl Children {
    /// Starts them; each writes its log to `DIR/logs/NAME.log`. `failed` is told of one that ends badly.
    pub(crate) fn start(
        peers: &[(LocalPeer, Entrance)],
        directory: Option<&Path>,
        failed: impl Fn(String) + Clone + Send + 'static,
    ) -> Result<Self, NodeError> {
        let mut tasks = JoinSet::new();
        if peers.is_empty() {
            return Ok(Self { tasks });
        }
        let program =
            std::env::current_exe().map_err(|e| NodeError::State(format!("cannot find this program: {e}")))?;
        for (peer, entrance) in peers {
            let mut command = Command::new(&program);
            command.arg("join").arg(entrance.ticket.to_string());
            command.args(["--backend", &peer.backend, "--name", &peer.name]);
            if peer.slowdown > 1.0 {
                command.args(["--slowdown", &peer.slowdown.to_string()]);
            }
            if let Some(listen) = entrance.pinned {
                command.args(["--pinned", &listen.to_string()]);
            }
            command.env("RAYON_NUM_THREADS", peer.threads.to_string());
            command.stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true);
            // Ctrl-C is for the broker, which lets its peers finish.
            #[cfg(unix)]
            command.process_group(0);
            let log = match directory {
                Some(directory) => {
                    let path = directory.join("logs").join(format!("{}.log", peer.name));
                    let file = path.parent().map_or(Ok(()), std::fs::create_dir_all).and_then(|()| File::create(&path));
                    let file = file.map_err(|e| NodeError::Disk(format!("{}: {e}", path.display())))?;
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
            let (name, failed) = (peer.name.clone(), failed.clone());
            tasks.spawn(async move {
                if let Some(reason) = outcome(child, &name, log.as_deref()).await {
                    failed(reason);
                }
            });
        }
        Ok(Self { tasks })
    }

    /// Waits until all have ended by themselves.
    pub(crate) async fn finish(mut self) {
        while self.tasks.join_next().await.is_some() {}
    }

    /// Gives them a moment to end, then ends them.
    pub(crate) async fn stop(mut self) {
        let all = async { while self.tasks.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(std::time::Duration::from_secs(2), all).await;
        self.tasks.shutdown().await;
    }
}

/// Why a child ended badly, with the last line of its log.
async fn outcome(mut child: Child, name: &str, log: Option<&Path>) -> Option<String> {
    match child.wait().await {
        Ok(status) if status.success() => None,
        Ok(status) => {
            let text = log.and_then(|p| std::fs::read_to_string(p).ok()).unwrap_or_default();
            let last =
                text.lines().rev().find(|l| !l.trim().is_empty()).unwrap_or("it left no message").trim().to_string();
            Some(format!("peer {name:?} ended ({status}): {last}"))
        }
        Err(e) => Some(format!("peer {name:?}: {e}")),
    }
}
