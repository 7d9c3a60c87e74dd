//! A joiner's answers while the broker measures its machine. [`fusionllm_protocol::Survey`] is the broker's side.

use std::sync::Arc;

use fusionllm_backend::Backend;
use fusionllm_plan::{Device, PeerId};
use fusionllm_protocol::{FromPeer, MachineProfile, ToPeer, decode};
use fusionllm_transport::{Endpoint, PeerAddr};

use crate::machine::memory;
use crate::net::probe::{ProbeResponder, probe};
use crate::{NodeError, profile};

/// Answers the survey for this machine.
pub(crate) struct Surveyed<'a> {
    pub(crate) endpoint: &'a Endpoint,
    pub(crate) broker: &'a PeerAddr,
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) slowdown: f64,
    /// A profile of this machine, if there is one.
    pub(crate) profile: Option<Device>,
    /// Bytes of memory that the run may use; `None` for all that is free.
    pub(crate) memory: Option<u64>,
    /// The addresses of all peers, by number.
    pub(crate) peers: Vec<PeerAddr>,
    pub(crate) responder: Option<ProbeResponder>,
}

impl Surveyed<'_> {
    /// The answer to a message of the broker.
    pub(crate) async fn answer(&mut self, message: ToPeer) -> Result<FromPeer, NodeError> {
        match message {
            ToPeer::Measure { peers } => {
                let decoded = peers.iter().map(|(name, addr)| {
                    decode(addr).map_err(|e| NodeError::Protocol(format!("the address of {name:?}: {e}")))
                });
                self.peers = decoded.collect::<Result<_, _>>()?;
                let machine = self.machine().await?;
                // Starts only now, so that no measurement disturbs another.
                self.responder = Some(ProbeResponder::start(self.endpoint, self.peers.iter().map(|a| a.key).collect()));
                Ok(FromPeer::Machine(machine))
            }
            ToPeer::Probe { with, patience_s } => {
                let addr = match with {
                    PeerId::BROKER => Some(self.broker),
                    PeerId(p) => self.peers.get(p as usize),
                };
                let addr = addr
                    .ok_or_else(|| NodeError::Protocol(format!("the broker named {with}, of {}", self.peers.len())))?;
                let links = probe(self.endpoint, addr, patience_s).await;
                if let Err(e) = &links {
                    tracing::warn!("no link to {with}: {e}");
                }
                Ok(FromPeer::Links(links.ok()))
            }
            ToPeer::StopProbing => {
                self.responder = None;
                Ok(FromPeer::ProbingStopped)
            }
            other => Err(NodeError::Protocol(format!("the broker said {other:?} before an assignment"))),
        }
    }

    async fn machine(&self) -> Result<MachineProfile, NodeError> {
        let device = match &self.profile {
            Some(device) => device.clone(),
            None => {
                let (backend, slowdown) = (self.backend.clone(), self.slowdown);
                let measured = tokio::task::spawn_blocking(move || profile::measure_briefly(&backend, slowdown));
                measured.await.map_err(|e| NodeError::State(e.to_string()))??
            }
        };
        let processor = self.backend.device().threads.is_some();
        let memory = self.memory.or_else(|| memory::available().filter(|_| processor)).unwrap_or(device.memory);
        Ok(MachineProfile { rates: device.rates, memory, slowdown: self.slowdown, operators: device.measured })
    }
}
