use std::collections::{BTreeMap, BTreeSet};

use fusionllm_compress::Codec;
use fusionllm_graph::{TensorType, Value, ValueId};
use fusionllm_plan::{
    Compression, Instruction, Link, Measured, Optimizer, PeerId, PlanError, Program, Rates, Slot, Verdict,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Version of the messages. Broker and joiner must have the same.
pub const VERSION: u32 = 4;

/// Largest control message, in bytes.
pub const MAX_CONTROL_BYTES: u64 = 4 << 20;

/// Largest assignment, in bytes.
pub const MAX_ASSIGNMENT_BYTES: u64 = 1 << 28;

/// Largest frame of a measurement, in bytes.
pub const MAX_PROBE_BYTES: u64 = 4 << 20;

/// What a joiner says first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`VERSION`].
    pub version: u32,
    /// The ticket's secret.
    pub secret: [u8; 16],
    /// What it wants to be called; empty leaves it to the broker.
    pub name: String,
    /// Its backend's name.
    pub backend: String,
    /// Its device, for people.
    pub device: String,
    /// Where other peers reach it, as its transport encodes that.
    pub addr: Vec<u8>,
}

/// What a peer tells the broker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum FromPeer {
    /// First of all.
    Hello(Hello),
    /// The answer to [`ToPeer::Measure`].
    Machine(Machine),
    /// The answer to [`ToPeer::Probe`]: the link that leads there and the one that leads back, or `None` if the two cannot reach each other.
    Links(Option<(Link, Link)>),
    /// The answer to [`ToPeer::StopProbing`].
    ProbingStopped,
    /// All is loaded, and the other peers are connected.
    Ready,
    /// A scalar of a pass.
    Report {
        /// The pass.
        pass: u64,
        /// Index in the program's reports.
        report: u32,
        /// The micro-batch.
        micro_batch: u32,
        /// The scalar.
        value: f64,
    },
    /// The squared norms of the gradients it owns.
    Norms {
        /// The pass.
        pass: u64,
        /// By parameter.
        squared_norms: Vec<(ValueId, f64)>,
    },
    /// A pass is over.
    PassDone {
        /// The pass.
        pass: u64,
        /// What it took.
        report: PassReport,
    },
    /// Another peer's connection to it is gone.
    PeerLost {
        /// Whose.
        peer: PeerId,
        /// Why.
        reason: String,
    },
    /// It cannot go on.
    Failed {
        /// Why.
        reason: String,
    },
}

/// How fast a peer's machine computes, as it says itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// What it attains.
    pub rates: Rates,
    /// Bytes of memory for parameters, activations and all else a peer holds.
    pub memory: u64,
    /// Operators take this many times as long as the rates say; at least 1.
    pub slowdown: f64,
    /// Operators whose time was measured.
    pub operators: Measured,
}

/// What stands in the headers of frames on the bulk lane between two machines, of which the one that connected measures and the other answers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum Probe {
    /// To be sent back.
    Echo,
    /// The payload is of no use but to be timed; the answer is [`Self::Elapsed`].
    Load,
    /// Seconds from the header's arrival to the payload's end.
    Elapsed(f64),
    /// Send so many bytes of [`Self::Load`], at most [`MAX_PROBE_BYTES`].
    Request(u64),
}

/// What a pass took on one peer.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PassReport {
    /// Seconds in kernels.
    pub compute_s: f64,
    /// Seconds waiting for messages.
    pub wait_s: f64,
    /// Seconds in all.
    pub total_s: f64,
    /// Most bytes held at once since the pass before: tensors, buffers of what comes and goes, and all else.
    pub peak_bytes: u64,
    /// Most bytes that the system ever kept in memory for the peer's process; 0 if it does not tell.
    pub resident_bytes: u64,
    /// Seconds of encoding and decoding, beside the computing.
    pub codec_s: f64,
    /// Payload bytes sent to each peer.
    pub sent: Vec<(PeerId, u64)>,
    /// Of what codecs made of the tensors for each peer: the largest relative error, |received - meant| / |meant| in the Euclidean norm, of one micro-batch.
    pub errors: Vec<(PeerId, f64)>,
    /// Where spectra were to be watched: of the tensors for each peer in one micro-batch, the largest stable rank, and that of what arrives in its place.
    pub spectra: Vec<(PeerId, f64, f64)>,
    /// Of large messages that came from each peer: their payload bytes, and the seconds from the first byte's arrival to the last's.
    pub received: Vec<(PeerId, u64, f64)>,
}

/// What the broker tells a peer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ToPeer {
    /// It may not take part.
    Refused {
        /// Why.
        reason: String,
    },
    /// Say how fast you are. Links are to be measured next: let the others connect.
    Measure {
        /// All peers' names and addresses, by number.
        peers: Vec<(String, Vec<u8>)>,
    },
    /// Connect to another peer, or to the broker once more, and measure the link there and the one back.
    Probe {
        /// Whom to connect to.
        with: PeerId,
        /// Seconds of sending in one direction that are enough.
        patience_s: f64,
    },
    /// All is measured: let nobody connect any more.
    StopProbing,
    /// Run the training program, or the evaluation program.
    Run {
        /// Number of the pass.
        pass: u64,
        /// Version of the plan that it runs by.
        version: u32,
        /// Whether it trains.
        train: bool,
        /// Batches trained on before it; counter-based operators draw from it.
        step: u64,
    },
    /// The answer to all peers' norms.
    Verdict {
        /// The pass.
        pass: u64,
        /// The verdict.
        verdict: Verdict,
    },
    /// All passes from here on run by this version of the plan, the one after that of the passes so far.
    SetCodecs {
        /// The version.
        version: u32,
        /// The codecs of the peer's links, by receiver.
        codecs: BTreeMap<PeerId, Codec>,
    },
    /// Take a snapshot of what you own and stream it.
    Snapshot {
        /// The step, for the answer.
        step: u64,
    },
    /// The run is over.
    Stop {
        /// Why, for people; empty if it went well.
        reason: String,
    },
}

/// A peer's part in a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Assignment {
    /// Which peer it is.
    pub peer: PeerId,
    /// All peers' names and addresses, by number.
    pub peers: Vec<(String, Vec<u8>)>,
    /// Seed of initial values and dropout.
    pub seed: u64,
    /// The update rule.
    pub optimizer: Optimizer,
    /// How tensors are compressed, besides the codecs of its links.
    pub compression: Compression,
    /// Its share of a training step.
    pub train: Program,
    /// Its share of an evaluation pass.
    pub eval: Program,
    /// What the broker streams: parameters, buffers and constants by name, optimiser state by name and slot. The rest is drawn from the seed.
    pub loads: BTreeSet<(String, Option<String>)>,
}

impl Assignment {
    /// Checks all that taking part relies on, so that an assignment from a stranger can be trusted afterwards.
    pub fn validate(&self) -> Result<(), PlanError> {
        let fail = |m: String| Err(PlanError::Program(m));
        if self.peer.0 as usize >= self.peers.len() {
            return fail(format!("it is for {}, of {} peers", self.peer, self.peers.len()));
        }
        for program in [&self.train, &self.eval] {
            program.validate()?;
            if program.peer != self.peer {
                return fail(format!("it is for {}, not for {}", program.peer, self.peer));
            }
            for i in &program.instructions {
                if let Instruction::Receive { from: p, .. } | Instruction::Send { to: p, .. } = i
                    && *p != PeerId::BROKER
                    && p.0 as usize >= self.peers.len()
                {
                    return fail(format!("it exchanges tensors with {p}, of {} peers", self.peers.len()));
                }
            }
        }
        let kept = self.kept();
        for program in [&self.train, &self.eval] {
            for value in program.holdings.iter().map(|h| &program.values[&h.value]) {
                if kept.get(value.name.as_str()) != Some(&value) {
                    return fail(format!("training and evaluation disagree about {:?}", value.name));
                }
            }
        }
        let trained: BTreeSet<&str> =
            self.train.owned().map(|(_, r)| self.train.values[&r.parameter].name.as_str()).collect();
        for (name, slot) in &self.loads {
            let known = match slot {
                None => kept.contains_key(name.as_str()),
                Some(slot) => trained.contains(name.as_str()) && self.optimizer.slots().contains(&slot.as_str()),
            };
            if !known {
                return fail(format!("{name:?} is to be loaded, but nothing needs it"));
            }
        }
        Ok(())
    }

    /// What the peer keeps from pass to pass, for either program, by name.
    pub fn kept(&self) -> BTreeMap<&str, &Value> {
        let programs = [&self.eval, &self.train].into_iter();
        programs
            .flat_map(|p| p.holdings.iter().filter_map(|h| p.values.get(&h.value)))
            .map(|v| (v.name.as_str(), v))
            .collect()
    }
}

/// The header of a frame on the tensors lane; the payload is the tensor's bytes, or its coded form, which says itself by which codec.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TensorHeader {
    /// The pass it belongs to.
    pub pass: u64,
    /// Whether that is a pass of the training program, whose values are numbered on their own.
    pub train: bool,
    /// What it is.
    pub slot: Slot,
    /// Whether the payload is the tensor's coded form instead of its own bytes.
    pub coded: bool,
}

/// The header of a frame on the bulk lane.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum BulkHeader {
    /// Broker to peer: the payload is an [`Assignment`].
    Assign,
    /// Broker to peer: a tensor it starts from.
    Load {
        /// The parameter, buffer or constant.
        name: String,
        /// The slot, for optimiser state.
        slot: Option<String>,
    },
    /// Peer to broker: a tensor of a snapshot.
    Saved {
        /// The step.
        step: u64,
        /// The parameter or buffer.
        name: String,
        /// The slot, for optimiser state.
        slot: Option<String>,
        /// Element type and shape.
        ty: TensorType,
    },
    /// Peer to broker: that was the snapshot's last tensor.
    SavedAll {
        /// The step.
        step: u64,
    },
}

/// The bytes of a message.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, String> {
    postcard::to_stdvec(message).map_err(|e| e.to_string())
}

/// A message from its bytes, all of them.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => Err(format!("{} bytes too many", rest.len())),
        Err(e) => Err(e.to_string()),
    }
}
