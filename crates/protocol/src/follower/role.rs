//! The parts of an assignment that a follower needs, and the actions that it asks of its caller.

use std::collections::{BTreeMap, BTreeSet};

use fusionllm_program::{PeerId, TensorKey};

use crate::{Assignment, FromPeer, MemberId, Source};

/// A peer's part in one generation, as far as a [`Follower`](super::Follower) needs to know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Role {
    /// The generation.
    pub generation: u32,
    /// The peer itself.
    pub me: MemberId,
    /// The cut that the generation starts from.
    pub start: u64,
    /// The members that the peer exchanges tensors with.
    pub neighbours: BTreeSet<MemberId>,
    /// The sources of first contents.
    pub sources: BTreeMap<TensorKey, Source>,
    /// The tensors of the peer's share of a cut.
    pub share: BTreeSet<TensorKey>,
    /// The tensors that never change and that the peer keeps for later generations.
    pub shelved: BTreeSet<TensorKey>,
    /// The tensors of other members whose copies the peer keeps.
    pub mirrors: BTreeMap<MemberId, BTreeSet<TensorKey>>,
}

impl Role {
    /// The peer's part in a valid assignment. `neighbours` are the peers that its programs exchange tensors with.
    pub fn new(assignment: &Assignment, neighbours: &BTreeSet<PeerId>) -> Self {
        let member = |peer: &PeerId| assignment.peers.get(peer.0 as usize).map(|contact| contact.member);
        let keys = |(of, tensors): (&MemberId, &BTreeMap<TensorKey, _>)| (*of, tensors.keys().cloned().collect());
        Self {
            generation: assignment.generation,
            me: member(&assignment.peer).unwrap_or(MemberId::BROKER),
            start: assignment.start,
            neighbours: neighbours.iter().filter_map(member).collect(),
            sources: assignment.sources.clone(),
            share: assignment.share().into_keys().collect(),
            shelved: assignment.shelved(),
            mirrors: assignment.mirrors.iter().map(keys).collect(),
        }
    }
}

/// An action that a [`Follower`](super::Follower) asks of its caller. A list of actions is carried out in its order.
/// The methods that are named here are the follower's.
#[derive(Debug, Clone, PartialEq)]
pub enum FollowerAction {
    /// Stop computing, loading and copying, close the connections of the generation, and call `ended` once nothing of
    /// it runs any more.
    Stop,
    /// Forget a cut.
    Forget {
        /// The cut.
        step: u64,
    },
    /// Begin a generation. It gets its tensors and connections by the actions that follow.
    Begin {
        /// The generation.
        generation: u32,
    },
    /// Draw these parameters and buffers from the seed, and call `loaded` for each.
    Draw {
        /// The tensors.
        keys: Vec<TensorKey>,
    },
    /// Take these tensors from a cut that is here, and call `loaded` for each.
    Take {
        /// The cut.
        step: u64,
        /// The tensors.
        keys: Vec<TensorKey>,
    },
    /// Ask another member for these tensors, and call `loaded` for each, or `lost`.
    Fetch {
        /// The member.
        from: MemberId,
        /// The cut.
        step: u64,
        /// The tensors.
        keys: Vec<TensorKey>,
    },
    /// Connect to these members, and call `connected` for each, or `lost`.
    Connect {
        /// The members.
        with: BTreeSet<MemberId>,
    },
    /// Everything is there: send [`FromPeer::Ready`] and compute.
    Start {
        /// The generation.
        generation: u32,
    },
    /// Fetch a copy of these tensors, then call `copied`. An earlier copy from the same member that is not complete is
    /// not wanted any more.
    Copy {
        /// The member.
        of: MemberId,
        /// The cut.
        step: u64,
        /// The tensors.
        keys: Vec<TensorKey>,
        /// Most bytes per second; `None` for no limit.
        bytes_per_s: Option<f64>,
    },
    /// Send the tensors that a request asks for. All of them are here.
    Serve(u64),
    /// Answer a request with [`BulkHeader::NoCopy`](crate::BulkHeader::NoCopy).
    Refuse(u64),
    /// Send a message to the broker.
    Tell(FromPeer),
}

/// The answer to a member that wants to exchange tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Greeting {
    /// Use the connection now, and call `connected`.
    Use,
    /// Keep the connection, and ask again after [`FollowerAction::Connect`].
    Keep,
    /// Close the connection. It belongs to an earlier generation, or nobody expects it.
    Close,
}
