//! The cuts that a peer keeps: its own, and copies of other members' shares.

pub(crate) mod state;
mod vault;

pub(crate) use vault::{Kept, Spool, Vault};
