//! What a joiner answers while the broker finds out what its machines can do; [`fusionllm_protocol::Survey`] is the broker's side.

use std::sync::Arc;

use fusionllm_backend::Backend;
use fusionllm_plan::{Device, PeerId};
use fusionllm_protocol::{FromPeer, Machine, ToPeer, decode};
use fusionllm_transport::{Endpoint, PeerAddr};

use crate::probe::{Answering, probe};
use crate::{NodeError, memory, profile};

/// Answers for one machine.
pub(crate) struct Surveyed<'a> {
    pub(crate) endpoint: &'a Endpoint,
    pub(crate) broker: &'a PeerAddr,
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) slowdown: f64,
    /// What was measured before, if it was.
    pub(crate) profile: Option<Device>,
    /// Bytes that it lends, if not all that are free.
    pub(crate) memory: Option<u64>,
    /// By number; nobody before it was told.
    pub(crate) peers: Vec<PeerAddr>,
    pub(crate) answering: Option<Answering>,
}

impl Surveyed<'_> {
    /// The answer to a message.
    ///
    /// # Errors
    ///
    /// The message belongs elsewhere, or the machine could not be measured.
    pub(crate) async fn answer(&mut self, message: ToPeer) -> Result<FromPeer, NodeError> {
        match message {
            ToPeer::Measure { peers } => {
                let decoded = peers.iter().map(|(name, addr)| {
                    decode(addr).map_err(|e| NodeError::Protocol(format!("the address of {name:?}: {e}")))
                });
                self.peers = decoded.collect::<Result<_, _>>()?;
                let machine = self.machine().await?;
                // Only now, so that no measurement disturbs another.
                self.answering = Some(Answering::start(self.endpoint, self.peers.iter().map(|a| a.key).collect()));
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
                self.answering = None;
                Ok(FromPeer::ProbingStopped)
            }
            other => Err(NodeError::Protocol(format!("the broker said {other:?} before an assignment"))),
        }
    }

    async fn machine(&self) -> Result<Machine, NodeError> {
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
        Ok(Machine { rates: device.rates, memory, slowdown: self.slowdown, operators: device.measured })
    }
}
