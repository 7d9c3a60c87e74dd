use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;

use fusionllm_compress::Codec;
use fusionllm_graph::{DType, TensorType, ValueId};
use fusionllm_plan::{Disk, Link, Measured, OperatorCurves, Rates};
use fusionllm_program::{Address, PassKind, PeerId, Program, TensorKey, Verdict};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::bounded::{Bounded, Left};
use crate::{PassReport, Request};

/// Version of the messages. Broker and joiner must have the same version.
pub const VERSION: u32 = 23;

/// Largest first message of a connection, in bytes. Its sender is still a stranger.
pub const MAX_HELLO_BYTES: u64 = 8 << 10;

/// Largest control message, in bytes.
pub const MAX_CONTROL_BYTES: u64 = 4 << 20;

/// Largest assignment, in bytes.
pub const MAX_ASSIGNMENT_BYTES: u64 = 1 << 26;

/// Largest frame of a link measurement, in bytes.
pub const MAX_PROBE_BYTES: u64 = 16 << 20;

/// A machine that has joined a run. Numbers follow the order of joining, and no number is used again.
///
/// A [`PeerId`] is a place in one plan. A member may have one place in one generation and another in the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MemberId(pub u32);

impl MemberId {
    /// The broker.
    pub const BROKER: Self = Self(u32::MAX);
}

impl fmt::Display for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::BROKER => f.write_str("broker"),
            Self(m) => write!(f, "member {m}"),
        }
    }
}

/// The name and address by which a member is reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contact {
    /// The member.
    pub member: MemberId,
    /// Its name.
    pub name: String,
    /// Its address, as the transport encodes it.
    pub addr: Vec<u8>,
}

/// A joiner's first message. It may not be longer than [`MAX_HELLO_BYTES`]. The version stays its first field, so that
/// [`hello_version`] can read it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    /// [`VERSION`].
    pub version: u32,
    /// The ticket's secret.
    pub secret: [u8; 16],
    /// A number that each start of a joiner draws. It tells the broker whether the same process comes back, with the
    /// tensors that it keeps, or another one was started with the same key.
    pub process: u64,
    /// The requested name. If it is empty, the broker chooses one.
    pub name: String,
    /// The backend's name.
    pub backend: String,
    /// The device's name, for people.
    pub device: String,
    /// Whether the device says that it computes in bf16 no faster than in f32.
    pub slow_bf16: bool,
    /// The address for other members, as the transport encodes it.
    pub addr: Vec<u8>,
    /// The processor that it computes on; `None` if it has one to itself, or does not know.
    pub processor: Option<ComputesOn>,
}

/// A processor that other members may compute on, too.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ComputesOn {
    /// Members of the run with the same number compute on the same cores. It means nothing in another run.
    pub id: [u8; 16],
    /// How many cores they are.
    pub cores: u32,
    /// The cores that the member keeps busy while it computes.
    pub busy: f64,
    /// Whether the member has a profile, which it tells instead of measuring.
    pub profiled: bool,
}

/// The first message on a connection from one member to another.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum PeerHello {
    /// The connection carries the tensors of one generation's passes, in both directions.
    Exchange {
        /// [`Assignment::generation`](crate::Assignment::generation).
        generation: u32,
    },
    /// The sender asks for copies of tensors. They come as [`BulkHeader::Copy`], in this order, and then the sender of
    /// this message closes the connection. [`BulkHeader::NoCopy`] is the answer of a member that does not have them.
    Fetch {
        /// The cut.
        step: u64,
        /// The tensors.
        tensors: Vec<TensorKey>,
        /// Most bytes per second to send; `None` for no limit.
        bytes_per_s: Option<f64>,
    },
    /// The sender measures the link with [`Probe`] frames.
    Probe,
    /// The sender is the broker, which was started again: the receiver's connection to it is no more.
    Restarted,
}

/// A message from a peer to the broker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum FromPeer {
    /// The first message.
    Hello(Hello),
    /// The answer to [`ToPeer::Measure`].
    Machine(Box<MachineProfile>),
    /// The answer to [`ToPeer::Probe`].
    Links {
        /// The other end.
        with: MemberId,
        /// The links there and back, or `None` if the two cannot reach each other.
        links: Option<(Link, Link)>,
        /// Whether packets between the two go through a relay.
        relayed: bool,
    },
    /// All tensors of an assignment are loaded, and its other peers are connected.
    Ready {
        /// [`Assignment::generation`](crate::Assignment::generation).
        generation: u32,
    },
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
        /// The squared norm of each gradient, by parameter.
        squared_norms: Vec<(ValueId, f64)>,
    },
    /// The peer has completed a pass.
    PassDone {
        /// The pass.
        pass: u64,
        /// The peer's measurements.
        report: PassReport,
    },
    /// A sign of life, which is sent every second, whatever the peer does.
    Heartbeat(Heartbeat),
    /// The peer has a copy of another member's share, as [`ToPeer::Mirror`] asked.
    Mirrored {
        /// The cut.
        step: u64,
        /// The member whose share it is.
        of: MemberId,
    },
    /// The peer has taken a cut, as [`ComputeCommand::Snapshot`] asked, and keeps it.
    Kept {
        /// The cut.
        step: u64,
    },
    /// The peer keeps the tensors of its assignment that never change, for later generations.
    Shelved {
        /// The assignment's generation.
        generation: u32,
    },
    /// The peer cannot reach another member, or the connection to it has ended.
    LinkLost {
        /// The assignment's generation.
        generation: u32,
        /// The other member.
        member: MemberId,
        /// The reason why the connection ended.
        reason: String,
    },
    /// The peer cannot carry out its assignment.
    Failed {
        /// The assignment's generation.
        generation: u32,
        /// Why.
        reason: String,
    },
    /// The peer wants to leave. It goes on until the broker sends [`ToPeer::Stop`].
    Leaving,
    /// The only message of a run's owner, who is no member.
    Ask(Request),
    /// The first message of a machine that only looks whether it could join. The answer is [`ToPeer::Welcome`], and
    /// then the sender measures the link with [`Probe`] frames. It never becomes a member.
    Visit {
        /// [`VERSION`].
        version: u32,
        /// The ticket's secret.
        secret: [u8; 16],
    },
}

/// How far a peer has come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// The generation that it works in; 0 before the first assignment.
    pub generation: u32,
    /// A number that grows whenever the peer gets anything done: instructions carried out, bytes loaded and sent.
    pub progress: u64,
    /// The member that it waits for, if it waits.
    pub waits_for: Option<MemberId>,
    /// The free bytes of its disk, where its copies stand; `None` if they are unknown.
    pub disk_free: Option<u64>,
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
    /// Measured bytes that operators hold beside their operands and results.
    pub scratch: OperatorCurves,
    /// Its disk.
    pub disk: Disk,
    /// Bytes/s between the device's memory and its host's, if the device has memory of its own.
    pub host_link: Option<f64>,
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

/// The reason why a member's part in a run is over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Farewell {
    /// The run has ended in good order, with its model saved.
    Over {
        /// The steps that are done.
        step: u64,
        /// The steps that the job asks for. The user may stop a run earlier.
        steps: u64,
    },
    /// The member asked to leave, and the run goes on without it.
    Left,
    /// The run goes on without the member.
    PutOut {
        /// The fault of the member, in words that call the member "it".
        reason: String,
    },
    /// The run has failed, or was stopped at once.
    Failed {
        /// Why.
        reason: String,
    },
}

/// A command for a peer's computing thread, which carries its commands out in their order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ComputeCommand {
    /// Run the training or the evaluation program.
    Run {
        /// Number of the pass. It grows over all generations.
        pass: u64,
        /// Version of the plan that it uses.
        version: u32,
        /// The program to run.
        kind: PassKind,
        /// Batches trained on before it. Counter-based operators draw from it.
        step: u64,
        /// Whether to look for numbers that are not finite, and to say where the first one came from.
        inspect: bool,
    },
    /// All further passes use the plan's next version.
    SetCodecs {
        /// That version.
        version: u32,
        /// The codecs of the peer's links, by receiver.
        codecs: BTreeMap<PeerId, Codec>,
    },
    /// Keep the tensors that you own as they are now: a cut.
    Snapshot {
        /// The cut: batches trained on before it.
        step: u64,
        /// Whether to stream them to the broker, for a checkpoint.
        save: bool,
    },
}

/// A message from the broker to a peer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ToPeer {
    /// The peer may not join.
    Refused {
        /// Why.
        reason: String,
    },
    /// The members that may connect to this one, besides those of its assignment.
    Contacts(Vec<Contact>),
    /// Measure your machine.
    Measure {
        /// Programs to run besides, without any peer: operators of the job's model.
        programs: Vec<Program>,
    },
    /// Connect to another member or to the broker, and measure the links there and back.
    Probe {
        /// The member to connect to.
        with: MemberId,
        /// Seconds of sending in one direction that suffice.
        patience_s: f64,
    },
    /// Assignments of earlier generations are void. Stop computing, keep the copies of cuts, and wait.
    Regroup {
        /// The next generation.
        generation: u32,
    },
    /// A command for the thread that computes.
    Compute(ComputeCommand),
    /// The answer to all peers' norms.
    Verdict {
        /// The pass.
        pass: u64,
        /// The verdict.
        verdict: Verdict,
    },
    /// Fetch a copy of another member's share of a cut, and keep it. The tensors are those of
    /// [`Assignment::mirrors`](crate::Assignment::mirrors).
    Mirror {
        /// The cut.
        step: u64,
        /// The member whose share it is.
        of: MemberId,
        /// Most bytes per second; `None` for no limit.
        bytes_per_s: Option<f64>,
    },
    /// Forget the cuts before this one.
    Release {
        /// The oldest cut that is still needed.
        before: u64,
    },
    /// The peer's part in the run is over.
    Stop(Farewell),
    /// The answer to [`FromPeer::Visit`].
    Welcome {
        /// The address from which the visitor's packets arrive; `None` through a relay.
        seen_as: Option<SocketAddr>,
        /// The broker's clock, in seconds since the Unix epoch.
        clock_s: f64,
    },
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
    /// The address of the tensor.
    pub tensor: Address,
    /// Whether the payload is encoded.
    pub coded: bool,
}

/// The header of a frame on the bulk lane.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum BulkHeader {
    /// Broker to peer: the payload is an [`Assignment`](crate::Assignment).
    Assign,
    /// Broker to peer: the payload is the next piece of a tensor whose source is the broker.
    Load {
        /// The assignment's generation.
        generation: u32,
        /// The tensor.
        key: TensorKey,
        /// The element type of the payload. Floats may come in another type than the tensor's.
        dtype: DType,
    },
    /// Member to member: the payload is the next piece of the tensors that [`PeerHello::Fetch`] asked for. No piece
    /// spans two tensors.
    Copy,
    /// Member to member: the sender does not have the tensors that [`PeerHello::Fetch`] asked for.
    NoCopy,
    /// Peer to broker: the payload is a piece of a tensor of a cut.
    Saved {
        /// The cut.
        step: u64,
        /// The tensor.
        key: TensorKey,
        /// Element type and shape.
        ty: TensorType,
        /// The place of the payload's first byte.
        start: u64,
    },
    /// Peer to broker: all tensors of the cut have been sent.
    SavedAll {
        /// The cut.
        step: u64,
    },
}

/// Encodes a message.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, String> {
    postcard::to_stdvec(message).map_err(|e| e.to_string())
}

/// The version in a [`FromPeer::Hello`] that may be of another version, and so have other fields.
pub fn hello_version(bytes: &[u8]) -> Option<u32> {
    match postcard::take_from_bytes::<(u32, u32)>(bytes) {
        Ok(((0, version), _)) => Some(version),
        _ => None,
    }
}

/// Bytes that the lists of a message may take in memory, whatever its length.
const LISTS_ALWAYS: u64 = 64 << 10;

/// Bytes that these lists may take for each byte of the message. An instruction takes up to 7, and other parts of
/// assignments less.
const LISTS_PER_BYTE: u64 = 10;

/// Decodes a message from exactly these bytes.
///
/// The elements of all its lists and maps together may take 64 KiB, and ten bytes for each byte of the message. A list
/// that claims more is refused before its first element is decoded. A list has room for up to twice its elements, and
/// while it grows, its former memory is still there. So the decoded message, with its texts, takes at most 31 times its
/// bytes at any time, and a few mebibytes for the room that serde gives to a list at its begin.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    let most = LISTS_PER_BYTE.saturating_mul(bytes.len() as u64).saturating_add(LISTS_ALWAYS);
    let left = Left::new(Some(most));
    let mut format = postcard::Deserializer::from_bytes(bytes);
    match (T::deserialize(Bounded::new(&mut format, &left)), left.get()) {
        (Err(_), None) => Err(format!("its lists need more than {most} bytes of memory")),
        (Err(e), _) => Err(e.to_string()),
        (Ok(message), _) => match format.finalize() {
            Ok([]) => Ok(message),
            Ok(rest) => Err(format!("{} bytes too many", rest.len())),
            Err(e) => Err(e.to_string()),
        },
    }
}
