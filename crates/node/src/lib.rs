//! Joins the pure crates to clock, disk and network: brokers and peers.
