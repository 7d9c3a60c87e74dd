//! Messages, and the broker's and peers' state machines, without I/O.
//!
//! Nothing here knows a socket, a file or a clock: events and the time come in as arguments, actions go out. [`Lobby`] gathers the peers of a run, [`Survey`] has them measure what nobody
//! knows, [`Broker`] conducts it, [`Inbox`] checks
//! what a peer is sent before it is allocated. Nobody is trusted: the broker knows what each peer owes it ([`ExpectedReports`]), a peer checks its
//! [`Assignment`].
//!
//! # One run
//!
//! ```text
//!   joiner                         broker
//!     | -- Hello (secret, name) ---> |   Lobby: until all are there; peers are then numbered by name
//!     | <-- Measure, Probe -------- |   Survey, where the machines are not known: one measurement after the other,
//!     | -- Machine, Links --------- |     over connections of their own (Probe)
//!     | <-- Assignment (bulk) ------ |   Programs, who the others are, what to draw and what is loaded
//!     | <-- Load (bulk) ------------ |   loaded parameters and optimiser state, each peer its share
//!     | -- Ready ------------------> |
//!     | <-- Run pass 1, Run pass 2 - |   two passes ahead, each with its inputs (tensors)
//!     | == activations, gradients == peers, directly (tensors)
//!     | -- Report, Norms ----------> |
//!     | <-- Verdict ---------------- |   once all peers' norms of the pass are there
//!     | -- PassDone ---------------> |
//!     | <-- SetCodecs -------------- |   now and then: from the next Run on by the plan's next version
//!     | <-- Snapshot --------------- |   between two passes; training goes on
//!     | -- Saved …, SavedAll (bulk) -> |   commit
//!     | <-- Stop ------------------- |
//! ```
//!
//! Control messages are [postcard](https://postcard.jamesmunns.com)-encoded payloads under an empty header; tensors and bulk frames have a header ([`TensorHeader`], [`BulkHeader`]) and raw bytes, row-major and
//! little-endian.

mod broker;
mod expected;
mod inbox;
mod lobby;
mod message;
mod regulator;
mod survey;

pub use broker::{
    Action, AppliedCodecs, Broker, EvalRecord, EvalSchedule, Participant, PassKind, RunSettings, StepRecord,
    TrainingProgress,
};
pub use expected::ExpectedReports;
pub use inbox::{Inbox, Violation};
pub use lobby::{ExpectedPeers, Lobby, Member};
pub use message::{
    Assignment, BulkHeader, FromPeer, Hello, MAX_ASSIGNMENT_BYTES, MAX_CONTROL_BYTES, MAX_PROBE_BYTES, Machine,
    PassReport, Probe, TensorHeader, ToPeer, VERSION, decode, encode,
};
pub use regulator::{CodecChange, CodecChangeReason, CodecUpdate, Regulator};
pub use survey::Survey;
