use std::fmt;
use std::path::PathBuf;

use fusionllm_graph::GraphError;

/// Why an archive cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The file cannot be read.
    #[error("{}: cannot be read: {source}\n  hint: check the path and that you may read the file", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// It is not an archive of `torch.export.save`, or a damaged one.
    #[error(
        "{archive}: {member}: {reason}\n  hint: write the file anew with torch.export.save of PyTorch 2.9 or later"
    )]
    Damaged {
        /// The archive.
        archive: String,
        /// The member at fault; empty for the archive as a whole.
        member: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The model uses operators that are not known here.
    #[error("{archive}: {} not supported:{}\n  hint: the table of supported operators is in docs/operators.md; export the model without these, or ask for them", Count(missing.len()), Lines(missing))]
    Missing {
        /// The archive.
        archive: String,
        /// All of them, by name.
        missing: Vec<Missing>,
    },
    /// A node cannot be translated.
    #[error("{archive}: {target} ({node}{at}): {reason}")]
    Node {
        /// The archive.
        archive: String,
        /// The operator as PyTorch calls it.
        target: String,
        /// The node's name in the exported graph.
        node: String,
        /// Where in the user's model it stands; empty if the file does not say.
        at: Box<str>,
        /// Why not.
        reason: String,
    },
    /// The model as a whole cannot be used.
    #[error("{archive}: {reason}")]
    Model {
        /// The archive.
        archive: String,
        /// Why not, and what to do.
        reason: String,
    },
    /// What was made of it is no sound graph.
    #[error("{archive}: {source}")]
    Graph {
        /// The archive.
        archive: String,
        /// What is wrong.
        source: GraphError,
    },
}

/// An operator that is not known here, and where the model uses it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    /// As PyTorch calls it, such as `aten.grid_sampler_2d.default`.
    pub target: String,
    /// The nodes, in order, with their place in the user's model.
    pub uses: Vec<String>,
}

/// Uses that are spelled out; the rest is counted.
const SHOWN: usize = 3;

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: used by {}", self.target, self.uses[..self.uses.len().min(SHOWN)].join(", "))?;
        match self.uses.len().saturating_sub(SHOWN) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

struct Count(usize);

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            1 => f.write_str("1 operator is"),
            n => write!(f, "{n} operators are"),
        }
    }
}

struct Lines<'a>(&'a [Missing]);

impl fmt::Display for Lines<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|m| write!(f, "\n  {m}"))
    }
}

/// Why one operator cannot be translated; whoever asked knows which and where.
#[derive(Debug)]
pub(crate) struct Refused(pub(crate) String);

impl From<GraphError> for Refused {
    fn from(e: GraphError) -> Self {
        Self(match e {
            // The node is named already.
            GraphError::Operand { reason, operands, .. } => {
                let types: Vec<String> = operands.iter().map(|t| t.to_string()).collect();
                format!("{reason}; operands: {}", types.join(", "))
            }
            e => e.to_string(),
        })
    }
}

impl From<String> for Refused {
    fn from(reason: String) -> Self {
        Self(reason)
    }
}

impl From<&str> for Refused {
    fn from(reason: &str) -> Self {
        Self(reason.into())
    }
}
