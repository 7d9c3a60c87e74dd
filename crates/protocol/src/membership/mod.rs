//! Who takes part in a run, and what is known of their machines and links.

mod admission;
mod atlas;
mod roster;
mod survey;

pub use admission::{Admission, Identity, Invitation, TicketRole};
pub use atlas::Atlas;
pub use roster::{ExpectedPeers, Member, Roster, other_version};
pub use survey::Survey;
