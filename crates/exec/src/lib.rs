//! Runs a Program on a backend.
