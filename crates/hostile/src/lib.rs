//! Bytes from strangers.
//!
//! Each [`Target`] is one decoder: of a message, a file or a text that somebody else wrote. Whatever the bytes, it
//! returns. It never panics, and it allocates no more than a small multiple of the bytes. `tests/decoders` holds all of
//! them to this.

mod files;
mod messages;
mod programs;

pub use messages::short_run;
pub use programs::{assignment_of, one_operator};

/// The form of a decoder's bytes, which a change of them can keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Numbers of fixed or variable length.
    Binary,
    /// Words and numbers, such as TOML and JSON.
    Text,
}

/// A decoder.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// The decoder's name.
    pub name: &'static str,
    /// The form of the decoder's bytes.
    pub form: Form,
    /// Decodes the bytes and uses what they say. Returns whether they were accepted.
    pub decode: fn(&[u8]) -> bool,
}

const fn binary(name: &'static str, decode: fn(&[u8]) -> bool) -> Target {
    Target { name, form: Form::Binary, decode }
}

const fn text(name: &'static str, decode: fn(&[u8]) -> bool) -> Target {
    Target { name, form: Form::Text, decode }
}

/// All decoders.
pub const TARGETS: &[Target] = &[
    binary("from-peer", messages::from_peer),
    binary("to-peer", messages::to_peer),
    binary("peer-hello", messages::peer_hello),
    binary("bulk-header", messages::bulk_header),
    binary("tensor-header", messages::tensor_header),
    binary("probe", messages::probe),
    binary("answer", messages::answer),
    binary("address", messages::address),
    binary("run-state", messages::run_state),
    binary("atlas", messages::atlas),
    binary("codec", messages::codec),
    binary("assignment", programs::assignment),
    binary("broker-key", files::broker_key),
    binary("broker-state", files::broker_state),
    binary("weights", files::weights),
    binary("images", files::images),
    binary("archive", files::archive),
    text("operator", programs::operator),
    text("ticket", files::ticket),
    text("relay-url", files::relay_url),
    text("relay-secret", files::relay_secret),
    text("identity", files::identity),
    text("allowed-keys", files::allowed_keys),
    text("manifest", files::manifest),
    text("graph", files::graph),
    text("plan", files::plan),
    text("job", files::job),
    text("testbed", files::testbed),
    text("profile", files::profile),
    text("tokenizer", files::tokenizer),
    text("chats", files::chats),
    text("chat-template", files::template),
];
