//! QUIC endpoints between public keys, and framing.
