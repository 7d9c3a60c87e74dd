//! Messages, and the state machines of broker and peers, without I/O.
//!
//! Nothing here uses a socket, a file or a clock. Events and the time come in as arguments, and actions go out.
//! [`Run`] is the broker's machine for a whole run. [`Roster`] says who takes part, [`Survey`] has members measure
//! unknown machines and links, [`GenerationMachine`] conducts one generation, and [`Custody`] knows who has which
//! tensor. [`Inbox`] checks the header of each tensor before a peer allocates memory for it.
//!
//! Nobody is trusted. The broker knows the reports that each peer must send ([`ExpectedReports`]). A peer validates its
//! [`Assignment`].
//!
//! # One run
//!
//! ```text
//!   joiner                         broker
//!     | -- Hello (secret, name) ---> |   Admission: it may join. Roster: a member, with a number that stays
//!     | <-- Contacts, Measure, Probe |   Survey, if machines are not known: one measurement after another, over
//!     | -- Machine, Links ---------> |     separate connections (PeerHello::Probe)
//!     | <-- Assignment (bulk) ------ |   Programs, the other peers, and where each tensor comes from
//!     | <-- Load (bulk) ------------ |   what the broker has; the rest is drawn, or fetched from members
//!     | -- Ready ------------------> |
//!     | <-- Run pass 1, Run pass 2 - |   passes ahead, each with its inputs (tensors)
//!     | == activations, gradients == peers, directly (tensors; PeerHello::Exchange)
//!     | -- Report, Norms ----------> |
//!     | <-- Verdict ---------------- |   once all peers' norms of the pass have arrived
//!     | -- PassDone ---------------> |
//!     | <-- SetCodecs -------------- |   rarely: from the next Run on, the plan's next version
//!     | <-- Snapshot --------------- |   a cut, between two passes; training continues
//!     | -- Kept ------------------> |
//!     | -- Saved …, SavedAll (bulk) -> |   a checkpoint
//!     | <-- Mirror ----------------- |   keep a copy of another peer's share (PeerHello::Fetch)
//!     | -- Mirrored ---------------> |
//!     | <-- Release ---------------- |   older cuts are not needed any more
//!     | <-- Stop ------------------- |
//! ```
//!
//! # Generations
//!
//! A *generation* is one membership and one Plan. A *cut* is the state after a step, and a generation starts from one.
//! When a peer is lost, leaves or comes, the broker sends [`ToPeer::Regroup`], plans again for those who are there,
//! and assigns the next generation. Its tensors come from the newest cut of which every tensor is still somewhere: with
//! its owner, with the member that mirrors the owner's share, or in a checkpoint. Passes are numbered over all
//! generations, so that a message of an earlier one is told by its number, and skipped.
//!
//! # Who may join
//!
//! [`Admission`] holds the run's tickets and keys. The run's owner shows the secret of the owner's ticket, on a
//! connection of its own. It sends one [`Request`], gets one [`Answer`], and is no member.
//!
//! ```text
//!   owner                          broker
//!     | -- Ask (Request) ----------> |   in the place of Hello
//!     | <-- Answer ----------------- |   RunStatus, or what was done
//! ```
//!
//! A control message is a payload in [postcard](https://postcard.jamesmunns.com) under an empty header. Frames of
//! tensors and on the bulk lane have a header ([`TensorHeader`], [`BulkHeader`]) and a payload of raw bytes, row-major
//! and little-endian.

mod follower;
mod generation;
mod membership;
mod messages;
mod notice;
mod regulator;
mod run;

pub use follower::{Follower, FollowerAction, Greeting, Inbox, Role, SHELF, UnexpectedTensor};
pub use generation::{
    AppliedCodecs, BatchId, EvalRecord, EvalSchedule, ExpectedReports, GenerationAction, GenerationMachine,
    Participant, RunSettings, StepRecord,
};
pub use membership::{
    Admission, Atlas, ExpectedPeers, Identity, Invitation, Member, Roster, Survey, TicketRole, other_version,
};
pub use messages::{
    Answer, Assignment, BulkHeader, CodecError, CodecSpectrum, ComputeCommand, ComputesOn, Contact, Farewell, FromPeer,
    Heartbeat, Hello, IncidentStatus, MAX_ASSIGNMENT_BYTES, MAX_CONTROL_BYTES, MAX_HELLO_BYTES, MAX_LISTED,
    MAX_PROBE_BYTES, MAX_SPANS, MachineProfile, MemberId, MemberStatus, PassReport, PassSpan, PeerHello, Probe,
    Question, ReceivedBytes, ReceivedMessage, Request, RunPhase, RunStatus, SentBytes, Source, Standing, TensorHeader,
    ToPeer, TrainingProgress, VERSION, decode, encode, hello_version, share_of,
};
pub use notice::{Incident, IncidentKind, Notice};
pub use regulator::{CodecChange, CodecChangeReason, CodecUpdate, Regulator};
pub use run::{Action, Arrival, Custody, Formation, Mirroring, Order, Past, Restart, Run, RunOptions, RunState, Share};
