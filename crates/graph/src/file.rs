//! The file form of a graph, and the digest that names it.

use serde::{Deserialize, Serialize};

use crate::{Graph, GraphError};

/// Version of the graph file.
pub const FORMAT_VERSION: u32 = 1;

/// The file form of a graph: JSON with a version number.
#[derive(Debug, Serialize, Deserialize)]
pub struct GraphFile {
    /// [`FORMAT_VERSION`].
    pub fusionllm_graph: u32,
    /// The graph.
    pub graph: Graph,
}

impl Graph {
    /// The graph file as text. It does not contain the constants.
    pub fn to_json(&self) -> Result<String, GraphError> {
        let file = GraphFile { fusionllm_graph: FORMAT_VERSION, graph: self.clone() };
        serde_json::to_string_pretty(&file).map_err(|e| GraphError::File(e.to_string()))
    }

    /// Reads a graph file and validates the graph. The caller adds the constants from the file beside it.
    pub fn from_json(text: &str) -> Result<Self, GraphError> {
        #[derive(Deserialize)]
        struct Version {
            fusionllm_graph: u32,
        }
        let version: Version =
            serde_json::from_str(text).map_err(|e| GraphError::File(format!("not a FusionLLM graph: {e}")))?;
        if version.fusionllm_graph != FORMAT_VERSION {
            return Err(GraphError::File(format!(
                "it has format version {}, but this program reads version {FORMAT_VERSION}",
                version.fusionllm_graph
            )));
        }
        let file: GraphFile = serde_json::from_str(text).map_err(|e| GraphError::File(e.to_string()))?;
        file.graph.validate()?;
        Ok(file.graph)
    }

    /// A digest (32 hexadecimal digits) of everything that affects the graph's results. Checkpoints and plans contain
    /// it.
    pub fn digest(&self) -> String {
        let mut h = blake3::Hasher::new();
        let add = |h: &mut blake3::Hasher, text: &str| {
            h.update(&(text.len() as u64).to_le_bytes());
            h.update(text.as_bytes());
        };
        for v in &self.values {
            add(&mut h, &v.name);
            add(&mut h, &v.ty.to_string());
            add(&mut h, &format!("{:?}", v.kind));
        }
        for n in &self.nodes {
            add(&mut h, &format!("{:?}{:?}{:?}", n.op, n.inputs, n.outputs));
        }
        add(&mut h, &format!("{:?}{:?}", self.outputs, self.state_updates));
        for (name, t) in &self.constants {
            add(&mut h, name);
            h.update(t.bytes());
        }
        h.finalize().to_hex()[..32].to_string()
    }
}
