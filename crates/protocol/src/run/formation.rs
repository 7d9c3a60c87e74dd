//! A plan for members that are there, and the order with which its generation begins.

use std::collections::BTreeSet;
use std::sync::Arc;

use fusionllm_plan::{Cluster, Line, Link};
use fusionllm_program::{PeerId, TensorKey};

use crate::{ExpectedReports, MemberId, Restart};

/// A plan for members that are there, as far as the run has to know it. Lists are in the order of peers.
#[derive(Debug, Clone, PartialEq)]
pub struct Formation {
    /// The members that take part.
    pub members: Vec<MemberId>,
    /// The reports that each member must send.
    pub expected: Vec<ExpectedReports>,
    /// The tensors that each member owns: its share of a cut.
    pub shares: Vec<Arc<BTreeSet<TensorKey>>>,
    /// Bytes of each share.
    pub share_bytes: Vec<u64>,
    /// Version of the plan.
    pub version: u32,
    /// Micro-batches per pass.
    pub micro_batches: u32,
    /// Passes per evaluation.
    pub eval_passes: u64,
    /// Predicted seconds per step, where the machines are known.
    pub predicted_step_s: Option<f64>,
    /// Predicted seconds of computing per step of each member; empty if the machines are not known.
    pub predicted_compute_s: Vec<f64>,
    /// The machines and links that it was made for, where they are known: device `i` is member `i`.
    pub cluster: Option<Cluster>,
    /// Estimated seconds that it takes to change to this plan.
    pub move_s: f64,
}

impl Formation {
    /// Bytes per second from one of its peers to another one, where that is known.
    pub(crate) fn bandwidth(&self, from: usize, to: usize) -> Option<f64> {
        Some(self.cluster.as_ref()?.link(PeerId(from as u32), PeerId(to as u32))?.bandwidth)
    }

    /// The lines from one of its peers to another one, as far as they are known.
    pub(crate) fn lines(&self, from: usize, to: usize) -> impl Iterator<Item = (Line, Link)> {
        let route = |cluster: &Cluster| cluster.route(PeerId(from as u32), PeerId(to as u32));
        self.cluster.as_ref().and_then(route).into_iter().flat_map(|route| route.lines().collect::<Vec<_>>())
    }

    /// Whether two of its peers are known to be in one site.
    pub(crate) fn share_a_site(&self, a: usize, b: usize) -> bool {
        let site = |peer: usize| self.cluster.as_ref()?.devices().get(peer)?.site;
        site(a).is_some() && site(a) == site(b)
    }
}

/// A peer that keeps a copy of another one's share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mirroring {
    /// The member whose share it is.
    pub owner: MemberId,
    /// The member that keeps the copy.
    pub buddy: MemberId,
}

/// The order to the driver to begin a generation.
#[derive(Debug, Clone, PartialEq)]
pub struct Order {
    /// The generation.
    pub generation: u32,
    /// The members that take part, by their numbers as peers.
    pub members: Vec<MemberId>,
    /// The state that it starts from, and who has it.
    pub restart: Restart,
    /// The number of the last pass of earlier generations.
    pub passes_before: u64,
    /// The copies that peers keep of each other's shares.
    pub mirrors: Vec<Mirroring>,
}
