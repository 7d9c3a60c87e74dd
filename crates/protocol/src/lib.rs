//! Messages, and the state machines of broker and peers, without I/O.
//!
//! Nothing here uses a socket, a file or a clock. Events and the time come in as arguments, and actions go out.
//! [`Lobby`] gathers the peers of a run. [`Survey`] has them measure unknown machines and links. [`Broker`] conducts
//! the run. [`Inbox`] checks the header of each tensor before a peer allocates memory for it.
//!
//! Nobody is trusted. The broker knows the reports that each peer must send ([`ExpectedReports`]). A peer validates its
//! [`Assignment`].
//!
//! # One run
//!
//! ```text
//!   joiner                         broker
//!     | -- Hello (secret, name) ---> |   Lobby: until all peers have joined; then they are numbered by name
//!     | <-- Measure, Probe,          |   Survey, if the machines are not known: one measurement after another,
//!     |     StopProbing ------------ |     over separate connections (Probe)
//!     | -- Machine, Links,           |
//!     |    ProbingStopped ---------> |
//!     | <-- Assignment (bulk) ------ |   Programs, the other peers, and which tensors are drawn or loaded
//!     | <-- Load (bulk) ------------ |   parameters and optimizer state, each peer its share
//!     | -- Ready ------------------> |
//!     | <-- Run pass 1, Run pass 2 - |   passes ahead, each with its inputs (tensors)
//!     | == activations, gradients == peers, directly (tensors)
//!     | -- Report, Norms ----------> |
//!     | <-- Verdict ---------------- |   once all peers' norms of the pass have arrived
//!     | -- PassDone ---------------> |
//!     | <-- SetCodecs -------------- |   rarely: from the next Run on, the plan's next version
//!     | <-- Snapshot --------------- |   between two passes; training continues
//!     | -- Saved …, SavedAll (bulk) -> |   commit
//!     | <-- Stop ------------------- |
//! ```
//!
//! A control message is a payload in [postcard](https://postcard.jamesmunns.com) under an empty header. Frames of
//! tensors and on the bulk lane have a header ([`TensorHeader`], [`BulkHeader`]) and a payload of raw bytes, row-major
//! and little-endian.

mod broker;
mod expected;
mod inbox;
mod lobby;
mod message;
mod regulator;
mod survey;

pub use broker::{
    Action, AppliedCodecs, BatchId, Broker, EvalRecord, EvalSchedule, Participant, RunSettings, StepRecord,
    TrainingProgress,
};
pub use expected::ExpectedReports;
pub use inbox::{Inbox, UnexpectedTensor};
pub use lobby::{ExpectedPeers, Lobby, Member};
pub use message::{
    Assignment, BulkHeader, CodecError, CodecSpectrum, FromPeer, Hello, MAX_ASSIGNMENT_BYTES, MAX_CONTROL_BYTES,
    MAX_PROBE_BYTES, MachineProfile, PassReport, Probe, ReceivedBytes, SentBytes, TensorHeader, ToPeer, VERSION,
    decode, encode,
};
pub use regulator::{CodecChange, CodecChangeReason, CodecUpdate, Regulator};
pub use survey::Survey;
