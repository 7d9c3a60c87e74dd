//! The copies of cuts that members take from each other: one fetches, the other serves.

mod fetch;
mod serve;

pub(crate) use fetch::Fetch;
pub(crate) use serve::{Request, accept, watch_request};
