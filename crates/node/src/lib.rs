//! Joins the pure crates to clock, disk and network.

pub mod config;
pub mod data;
