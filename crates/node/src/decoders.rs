//! Decoders of this crate that have no other public face, so that `fusionllm-hostile` can try them.

use fusionllm_protocol::Assignment;

use crate::broker::{reads_key, reads_state};
use crate::peer::accepts_assignment;
use crate::{keys, relay};

/// Whether these bytes are a file `broker-key`.
pub fn is_broker_key(bytes: &[u8]) -> bool {
    reads_key(bytes)
}

/// Whether these bytes are a file `state` of a run directory.
pub fn is_broker_state(bytes: &[u8]) -> bool {
    reads_state(bytes)
}

/// Whether this text is an identity file.
pub fn is_identity(text: &str) -> bool {
    keys::parse_identity(text).is_some()
}

/// Whether this text is a list of keys.
pub fn is_allowed_keys(text: &str) -> bool {
    keys::parse_allowed(text).is_ok()
}

/// Whether this text is a relay's secret.
pub fn is_relay_secret(text: &str) -> bool {
    relay::parse(text).is_some()
}

/// Whether a peer accepts an assignment, with so many bytes of memory. The error says why not.
pub fn accepts(assignment: Assignment, memory: Option<u64>) -> Result<(), String> {
    accepts_assignment(assignment, memory)
}
