//! What brokers, peers and owners of runs send each other.

mod assignment;
mod bounded;
mod control;
mod owner;
mod progress;
mod report;
mod status;

pub use assignment::{Assignment, Source, share_of};
pub use control::{
    BulkHeader, ComputeCommand, ComputesOn, Contact, Farewell, FromPeer, Heartbeat, Hello, MAX_ASSIGNMENT_BYTES,
    MAX_CONTROL_BYTES, MAX_HELLO_BYTES, MAX_PROBE_BYTES, MachineProfile, MemberId, PeerHello, Probe, TensorHeader,
    ToPeer, VERSION, decode, encode, hello_version,
};
pub use owner::{Question, Request};
pub use progress::TrainingProgress;
pub use report::{
    CodecError, CodecSpectrum, MAX_SPANS, PassReport, PassSpan, ReceivedBytes, ReceivedMessage, SentBytes,
};
pub use status::{Answer, IncidentStatus, MAX_LISTED, MemberStatus, RunPhase, RunStatus, Standing};
