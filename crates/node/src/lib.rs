//! Joins the pure crates to clock, disk and network.

pub mod config;
pub mod data;
mod disk;
pub mod run_dir;

pub use disk::DiskError;
