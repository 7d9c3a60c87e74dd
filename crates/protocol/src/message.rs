use std::collections::{BTreeMap, BTreeSet};

use fusionllm_compress::Codec;
use fusionllm_graph::{TensorType, Value, ValueId};
use fusionllm_plan::{
    Compression, Instruction, Link, Measured, Optimizer, PassKind, PeerId, PlanError, Program, Rates, Slot, Verdict,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Version of the messages. Broker and joiner must have the same version.
pub const VERSION: u32 = 5;

/// Largest control message, in bytes.
pub const MAX_CONTROL_BYTES: u64 = 4 << 20;

/// Largest assignment, in bytes.
pub const MAX_ASSIGNMENT_BYTES: u64 = 1 << 28;

/// Largest frame of a link measurement, in bytes.
pub const MAX_PROBE_BYTES: u64 = 4 << 20;

/// A joiner's first message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`VERSION`].
    pub version: u32,
    /// The ticket's secret.
    pub secret: [u8; 16],
    /// The requested name. If it is empty, the broker chooses one.
    pub name: String,
    /// The backend's name.
    pub backend: String,
    /// The device's name, for people.
    pub device: String,
    /// The address for other peers, as the transport encodes it.
    pub addr: Vec<u8>,
}

/// A message from a peer to the broker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum FromPeer {
    /// The first message.
    Hello(Hello),
    /// The answer to [`ToPeer::Measure`].
    Machine(MachineProfile),
    /// The answer to [`ToPeer::Probe`]: the links there and back, or `None` if the two cannot reach each other.
    Links(Option<(Link, Link)>),
    /// The answer to [`ToPeer::StopProbing`].
    ProbingStopped,
    /// All tensors are loaded, and the other peers are connected.
    Ready,
    /// A scalar of a pass.
    Report {
        /// The pass.
        pass: u64,
        /// Index among the program's reports.
        report: u32,
        /// The micro-batch.
        micro_batch: u32,
        /// The scalar.
        value: f64,
    },
    /// The squared norms of the gradients that the peer owns.
    Norms {
        /// The pass.
        pass: u64,
        /// By parameter.
        squared_norms: Vec<(ValueId, f64)>,
    },
    /// The peer has completed a pass.
    PassDone {
        /// The pass.
        pass: u64,
        /// The peer's measurements.
        report: PassReport,
    },
    /// The connection to another peer has ended.
    PeerLost {
        /// The other peer.
        peer: PeerId,
        /// Why the connection ended.
        reason: String,
    },
    /// The peer cannot continue.
    Failed {
        /// Why.
        reason: String,
    },
}

/// A machine's speed and memory, as its peer measured them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MachineProfile {
    /// Attained rates of computing and of memory.
    pub rates: Rates,
    /// Bytes of memory for the run: parameters, activations and everything else.
    pub memory: u64,
    /// Operators take this many times as long as the rates say; at least 1.
    pub slowdown: f64,
    /// Measured times of operators.
    pub operators: Measured,
}

/// The header of a frame of a link measurement. The machine that connected measures, and the other answers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum Probe {
    /// Send this frame back.
    Echo,
    /// The payload is only there to be timed. The answer is [`Self::Elapsed`].
    Load,
    /// Seconds from the arrival of the header to the end of the payload.
    Elapsed(f64),
    /// Send a [`Self::Load`] of this many bytes, at most [`MAX_PROBE_BYTES`].
    Request(u64),
}

/// A peer's measurements of one pass. Lists are in the order of peers.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PassReport {
    /// Seconds without waiting.
    pub compute_s: f64,
    /// Seconds of waiting for messages.
    pub wait_s: f64,
    /// Seconds in total.
    pub total_s: f64,
    /// Most bytes allocated at once since the previous pass: tensors, message buffers and everything else.
    pub peak_bytes: u64,
    /// Most bytes of the peer's process that the system has kept in memory so far; 0 if the system does not report it.
    pub resident_bytes: u64,
    /// Seconds of encoding and decoding, in parallel to computing.
    pub codec_s: f64,
    /// Bytes sent to each peer.
    pub sent: Vec<SentBytes>,
    /// Errors of the codecs of each link.
    pub errors: Vec<CodecError>,
    /// Stable ranks on each link, in steps that measure them.
    pub spectra: Vec<CodecSpectrum>,
    /// Large messages received from each peer.
    pub received: Vec<ReceivedBytes>,
}

/// Bytes sent to one peer in a pass.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SentBytes {
    /// The receiver.
    pub to: PeerId,
    /// Bytes of payload.
    pub bytes: u64,
}

/// The largest error of a codec among the tensors of one micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CodecError {
    /// The receiver.
    pub to: PeerId,
    /// |decoded - exact| / |exact|, in the Euclidean norm.
    pub relative_error: f64,
}

/// The largest stable rank among the tensors of one micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CodecSpectrum {
    /// The receiver.
    pub to: PeerId,
    /// The stable rank of the exact tensor.
    pub exact: f64,
    /// The stable rank of the same tensor, decoded.
    pub decoded: f64,
}

/// Large messages from one peer in a pass.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ReceivedBytes {
    /// The sender.
    pub from: PeerId,
    /// Bytes of payload.
    pub bytes: u64,
    /// Seconds from each message's first byte to its last, summed.
    pub seconds: f64,
}

/// A message from the broker to a peer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ToPeer {
    /// The peer may not join.
    Refused {
        /// Why.
        reason: String,
    },
    /// Measure your machine. Accept connections from the other peers, which will measure links.
    Measure {
        /// All peers' names and addresses, by number.
        peers: Vec<(String, Vec<u8>)>,
    },
    /// Connect to another peer or to the broker, and measure the links there and back.
    Probe {
        /// The peer to connect to.
        with: PeerId,
        /// Seconds of sending in one direction that suffice.
        patience_s: f64,
    },
    /// All links are measured. Accept no more connections.
    StopProbing,
    /// Run the training or the evaluation program.
    Run {
        /// Number of the pass.
        pass: u64,
        /// Version of the plan that it uses.
        version: u32,
        /// Which program.
        kind: PassKind,
        /// Batches trained on before it. Counter-based operators draw from it.
        step: u64,
    },
    /// The answer to all peers' norms.
    Verdict {
        /// The pass.
        pass: u64,
        /// The verdict.
        verdict: Verdict,
    },
    /// All further passes use the plan's next version.
    SetCodecs {
        /// That version.
        version: u32,
        /// The codecs of the peer's links, by receiver.
        codecs: BTreeMap<PeerId, Codec>,
    },
    /// Take a snapshot of the tensors that you own, and stream it.
    Snapshot {
        /// The step, to be repeated in the answer.
        step: u64,
    },
    /// The run has ended.
    Stop {
        /// Why; empty after a regular end.
        reason: String,
    },
}

/// A peer's part in a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Assignment {
    /// The peer's number.
    pub peer: PeerId,
    /// All peers' names and addresses, by number.
    pub peers: Vec<(String, Vec<u8>)>,
    /// The seed of initial values, dropout and codecs.
    pub seed: u64,
    /// The update rule.
    pub optimizer: Optimizer,
    /// How tensors are compressed. The programs have the codecs of the peer's links.
    pub compression: Compression,
    /// The program of a training step.
    pub train: Program,
    /// The program of an evaluation pass.
    pub eval: Program,
    /// The tensors that the broker streams: parameters, buffers and constants by name, optimizer state by name and
    /// slot. All others are drawn from the seed.
    pub loads: BTreeSet<(String, Option<String>)>,
}

impl Assignment {
    /// Checks everything that a peer relies on, so that it need not trust the sender.
    pub fn validate(&self) -> Result<(), PlanError> {
        let fail = |m: String| Err(PlanError::Program(m));
        if self.peer.0 as usize >= self.peers.len() {
            return fail(format!("it is for {}, but the number of peers is {}", self.peer, self.peers.len()));
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
                    return fail(format!(
                        "it exchanges tensors with {p}, but the number of peers is {}",
                        self.peers.len()
                    ));
                }
            }
        }
        let state = self.state();
        for program in [&self.train, &self.eval] {
            for value in program.holdings.iter().map(|h| &program.values[&h.value]) {
                if state.get(value.name.as_str()) != Some(&value) {
                    return fail(format!("training and evaluation disagree about {:?}", value.name));
                }
            }
        }
        let trained: BTreeSet<&str> =
            self.train.owned().map(|(_, r)| self.train.values[&r.parameter].name.as_str()).collect();
        for (name, slot) in &self.loads {
            let known = match slot {
                None => state.contains_key(name.as_str()),
                Some(slot) => trained.contains(name.as_str()) && self.optimizer.slots().contains(&slot.as_str()),
            };
            if !known {
                return fail(format!("{name:?} is to be loaded, but no program needs it"));
            }
        }
        Ok(())
    }

    /// The parameters, buffers and constants that the peer keeps from pass to pass for either program, by name.
    pub fn state(&self) -> BTreeMap<&str, &Value> {
        let programs = [&self.eval, &self.train].into_iter();
        programs
            .flat_map(|p| p.holdings.iter().filter_map(|h| p.values.get(&h.value)))
            .map(|v| (v.name.as_str(), v))
            .collect()
    }
}

/// The header of a frame on the tensors lane.
///
/// The payload is the tensor's bytes, or its encoded form. The encoded form names its codec.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TensorHeader {
    /// The pass.
    pub pass: u64,
    /// The pass's kind. Training and evaluation number their values independently.
    pub kind: PassKind,
    /// What the tensor is.
    pub slot: Slot,
    /// Whether the payload is encoded.
    pub coded: bool,
}

/// The header of a frame on the bulk lane.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum BulkHeader {
    /// Broker to peer: the payload is an [`Assignment`].
    Assign,
    /// Broker to peer: the payload is one of [`Assignment::loads`].
    Load {
        /// The parameter, buffer or constant.
        name: String,
        /// The slot, for optimizer state.
        slot: Option<String>,
    },
    /// Peer to broker: the payload is a tensor of a snapshot.
    Saved {
        /// The step.
        step: u64,
        /// The parameter or buffer.
        name: String,
        /// The slot, for optimizer state.
        slot: Option<String>,
        /// Element type and shape.
        ty: TensorType,
    },
    /// Peer to broker: the snapshot is complete.
    SavedAll {
        /// The step.
        step: u64,
    },
}

/// Encodes a message.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, String> {
    postcard::to_stdvec(message).map_err(|e| e.to_string())
}

/// Decodes a message from exactly these bytes.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => Err(format!("{} bytes too many", rest.len())),
        Err(e) => Err(e.to_string()),
    }
}
