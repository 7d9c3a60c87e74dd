//! Everything that reaches a peer's loop. A task or thread of its own reads each source.

use fusionllm_program::TensorKey;
use fusionllm_protocol::{MemberId, PeerHello, ToPeer};
use fusionllm_transport::{Connection, Lanes};
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::assigned::Assigned;
use super::cuts::Kept;
use crate::NodeError;
use crate::machine::interrupts::Stop;

/// The channel on which events are sent. Sending fails only once the loop is over, and then nobody needs them.
pub(super) type Events = mpsc::UnboundedSender<Event>;

/// An event for a peer's loop.
pub(super) enum Event {
    /// Something came over a connection to the broker, which has this number.
    Broker(u64, FromBroker),
    /// The broker was reached again, or not.
    Dialled(Result<(Connection, Lanes), NodeError>),
    /// A member connected and said hello. It has a place among the visitors.
    Greeted { connection: Connection, lanes: Lanes, hello: PeerHello, place: OwnedSemaphorePermit },
    /// A neighbour was reached.
    Linked { generation: u32, member: MemberId, connection: Connection, lanes: Lanes },
    /// A neighbour should have connected by now.
    Overdue { generation: u32, member: MemberId, obstacle: Option<String> },
    /// The computing thread has loaded a tensor.
    Loaded { generation: u32, key: TensorKey, shelved: bool },
    /// A member cannot be reached, or does not have what it should have.
    Lost { generation: u32, member: MemberId, reason: String },
    /// Something of a generation failed.
    Failed { generation: u32, reason: String },
    /// The vault has a cut, which is to be sent to the broker if it comes along.
    CutTaken { generation: u32, step: u64, save: Option<Vec<(TensorKey, Kept)>> },
    /// A copy of a member's tensors is complete.
    Copied { generation: u32, step: u64, of: MemberId, tensors: Vec<(TensorKey, Kept)> },
    /// A request waited long enough, or its sender has gone.
    RequestOver(u64),
    /// The computing thread of a generation has ended, by itself for this reason.
    Ended { generation: u32, failure: Option<String> },
    /// The peer cannot go on at all.
    Broken(NodeError),
    /// The user or the system asks the peer to leave.
    Interrupt(Stop),
}

/// An event of the connection to the broker.
pub(super) enum FromBroker {
    /// A control message.
    Message(ToPeer),
    /// An assignment that this peer can carry out.
    Assigned(Box<Assigned>),
    /// An assignment that it cannot carry out, and why.
    Unfit { generation: u32, reason: String },
    /// The connection has ended.
    Gone(NodeError),
}
