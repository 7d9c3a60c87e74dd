//! How machines come in: the endpoint and its tickets, and what is not a member's.

mod addresses;
mod endpoint;
mod farewell;
mod incoming;
mod tickets;
mod visitors;

pub(crate) use addresses::usable;
pub(crate) use endpoint::open_endpoint;
pub(crate) use farewell::{GOODBYE_TIMEOUT, part, refuse};
pub(crate) use incoming::{Incoming, KnownKeys, SavedShare, accept, receive_bulk, receive_control};
pub(crate) use tickets::{admission, invite, renewed, unix_s, write_tickets};
pub(crate) use visitors::Visitors;
