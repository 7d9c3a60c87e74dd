//! The page of a run: an HTTP server beside the broker, or beside its owner on another machine.
//!
//! The broker's loop notes what happens on a [`SharedBoard`], and does nothing else for the page. While somebody watches, a
//! blocking thread draws the board, twice a second at most, and every viewer is sent the parts that differ from the
//! ones that it has. A viewer that is slow misses drawings: only the newest one is kept, so nobody waits for a viewer
//! and no queue grows.
//!
//! A run's owner is a viewer, too. Its server shows the parts that the broker sends.

mod board;
mod drawer;
mod guard;
mod listener;
mod metrics;
mod page;
mod render;
mod server;
mod site;

pub(crate) use board::{Look, SharedBoard};
pub use listener::Dashboard;
pub(crate) use listener::Listening;
pub(crate) use page::Page;
pub(crate) use render::parts;
pub(crate) use server::Server;
pub(crate) use site::{Drawing, Site, Viewer};
