//! The files of a run's owner: job and testbed files, run directories and checkpoints.
//!
//! [`config`] reads the job file and the testbed file. [`run_dir`] describes the files that a run leaves, and
//! [`checkpoint`] those of its checkpoints. Nothing here opens a socket.

pub mod checkpoint;
pub mod config;
pub mod run_dir;
