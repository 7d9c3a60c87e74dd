//! Runs in other people's hands: signals, and the units and scripts in `deploy`.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test that cannot go on fails")]

mod scene;
mod signals;
mod units;
