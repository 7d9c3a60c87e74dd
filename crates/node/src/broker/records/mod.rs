//! What a run leaves on the disk, and how it goes on from there.

mod figures;
mod keeper;
mod ledger;
mod resume;
mod store;

pub(crate) use figures::PeerFacts;
pub(crate) use keeper::{Inbox, KeeperEvent, SavedPiece};
pub(crate) use ledger::DiskNews;
pub use resume::Resume;
pub(crate) use resume::{Identity, Left, Subject, read_atlas};
#[cfg(feature = "decoders")]
pub(crate) use resume::{reads_key, reads_state};
pub(crate) use store::{Store, check, checkpoints_under_way};
