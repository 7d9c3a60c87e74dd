//! Indices of values and nodes in a graph.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Index of a value in [`Graph::values`](crate::Graph::values).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ValueId(pub u32);

/// Index of a node in [`Graph::nodes`](crate::Graph::nodes).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeId(pub u32);

impl ValueId {
    /// The position in the list of values or nodes.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl NodeId {
    /// The position in the list of values or nodes.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for ValueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "%{}", self.0)
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}
