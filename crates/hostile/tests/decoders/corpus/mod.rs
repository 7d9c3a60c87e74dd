//! Valid bytes for each decoder, from the project's own encoders.

mod files;
mod messages;
mod programs;
#[path = "../../../../import/tests/common/mod.rs"]
mod pt2;

use fusionllm_hostile::{Form, Target};

/// Valid bytes for the decoder of this name.
pub(crate) fn samples(name: &str) -> Vec<Vec<u8>> {
    match name {
        "from-peer" => messages::from_peer(),
        "to-peer" => messages::to_peer(),
        "peer-hello" => messages::peer_hello(),
        "bulk-header" => messages::bulk_header(),
        "tensor-header" => messages::tensor_header(),
        "probe" => messages::probe(),
        "answer" => messages::answer(),
        "address" => messages::address(),
        "run-state" => vec![messages::run_state()],
        "atlas" => vec![messages::atlas()],
        "codec" => messages::codec(),
        "assignment" => programs::assignments(),
        "operator" => programs::operators(),
        "broker-key" => vec![(0..68).collect()],
        "broker-state" => vec![messages::broker_state()],
        "weights" => vec![files::weights()],
        "images" => vec![vec![3; 3073], vec![9; 2 * 3073]],
        "archive" => vec![pt2::archive(&pt2::program(), &pt2::weights())],
        "archive-program" => vec![pt2::program().to_string().into_bytes()],
        "graph" => programs::graphs(),
        "plan" => vec![programs::plan()],
        "tokenizer" => files::tokenizers(),
        "chats" => files::chats(),
        "chat-template" => files::templates(),
        name => files::texts(name),
    }
}

/// The program of an archive whose checksums are right.
pub(crate) fn archive_program() -> Target {
    fn decode(bytes: &[u8]) -> bool {
        let archive = fusionllm_hostile::TARGETS.iter().find(|t| t.name == "archive").unwrap();
        (archive.decode)(&pt2::archive_of(bytes.to_vec(), &pt2::weights()))
    }
    Target { name: "archive-program", form: Form::Text, decode }
}
