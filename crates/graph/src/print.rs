//! The printed form of a graph.

use std::fmt;

use crate::{Graph, ValueKind};

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "graph {} {{", self.name)?;
        for (i, v) in self.values.iter().enumerate() {
            let kind = match &v.kind {
                ValueKind::Input => "input",
                ValueKind::RngKey => "rng key",
                ValueKind::Parameter(_) => "parameter",
                ValueKind::Frozen(_) => "frozen parameter",
                ValueKind::Buffer(_) => "buffer",
                ValueKind::Constant => "constant",
                ValueKind::Result { .. } => continue,
            };
            writeln!(f, "  %{i}: {} = {kind} {}", v.ty, v.name)?;
        }
        for node in &self.nodes {
            let results: Vec<String> = node.outputs.iter().map(|v| format!("{v}: {}", self.ty(*v))).collect();
            let operands: Vec<String> = node.inputs.iter().map(|v| v.to_string()).collect();
            writeln!(f, "  {} = {}({})  // {}", results.join(", "), node.op.name(), operands.join(", "), node.name)?;
        }
        for u in &self.state_updates {
            writeln!(f, "  {} <- {}", u.buffer, u.value)?;
        }
        for (name, v) in &self.outputs {
            writeln!(f, "  return {name} = {v}")?;
        }
        write!(f, "}}")
    }
}
