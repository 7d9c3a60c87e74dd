//! The cuts that a peer keeps, and the copies that members take of them.

mod fetch;
mod serve;
pub(crate) mod state;
mod vault;

pub(crate) use fetch::Fetch;
pub(crate) use serve::{Request, accept, watch_request};
pub(crate) use vault::{Kept, Spool, Vault};
