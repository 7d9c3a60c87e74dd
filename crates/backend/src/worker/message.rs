//! The messages of docs/worker.md.

use std::path::Path;

use fusionllm_graph::TensorType;
use serde::{Deserialize, Serialize};

use crate::Segment;

/// The version of the protocol.
pub(super) const PROTOCOL: u32 = 2;

/// A worker's first message, in which it introduces itself.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Hello {
    pub(super) protocol: u32,
    pub(super) name: String,
    pub(super) version: String,
    pub(super) device: String,
    pub(super) memory_bytes: Option<u64>,
    pub(super) dtypes: Vec<String>,
    pub(super) operators: Vec<String>,
}

/// The first message to a worker, and all requests.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Request<'a> {
    Start {
        protocol: u32,
    },
    Exchange {
        path: &'a Path,
        bytes: u64,
    },
    Upload {
        tensor: u64,
        #[serde(rename = "type")]
        ty: &'a TensorType,
        at: u64,
    },
    Download {
        tensor: u64,
        at: u64,
    },
    Prepare {
        segment: u64,
        #[serde(flatten)]
        of: &'a Segment,
    },
    Run {
        segment: u64,
        inputs: &'a [u64],
        outputs: &'a [u64],
        free: &'a [u64],
    },
    Free {
        tensors: &'a [u64],
    },
    /// The only one without an answer.
    Forget {
        segments: &'a [u64],
    },
    Synchronize {},
}

/// A message from a worker.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Answer {
    Hello(Hello),
    Done(Finished),
    Error(Failed),
    Alive {},
}

/// A request was carried out.
#[derive(Debug, Deserialize)]
pub(super) struct Finished {
    /// The type of a tensor that was downloaded.
    #[serde(rename = "type")]
    pub(super) ty: Option<TensorType>,
}

/// The reason why a request was not carried out.
#[derive(Debug, Deserialize)]
pub(super) struct Failed {
    pub(super) reason: String,
    /// The place of the node in its segment.
    pub(super) node: Option<usize>,
    pub(super) kind: Option<String>,
}
