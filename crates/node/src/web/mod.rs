//! The page of a run: an HTTP server beside the broker.
//!
//! The broker's loop notes what happens on a [`SharedBoard`], and does nothing else for the page. While somebody watches, a
//! blocking thread draws the board, twice a second at most, and every viewer is sent the parts that differ from the
//! ones that it has. A viewer that is slow misses drawings: only the newest one is kept, so nobody waits for a viewer
//! and no queue grows.

mod board;
mod guard;
mod listener;
mod metrics;
mod render;
mod server;
mod site;

pub(crate) use board::{Look, SharedBoard};
pub use listener::Dashboard;
pub(crate) use listener::Listening;
pub(crate) use server::Server;
