//! Errors of reading and translating an archive.

use std::borrow::Cow;
use std::fmt;
use std::path::PathBuf;

use fusionllm_graph::{Advice, GraphError};

/// An archive that cannot be read or translated. [`ImportError::hint`] says what to do.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The file cannot be opened.
    #[error("{}: cannot be opened", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The file is not an archive of `torch.export.save`, or it is damaged.
    #[error("{archive}: {member}: {reason}")]
    Damaged {
        /// The archive.
        archive: String,
        /// The damaged member, or "the file as a whole".
        member: String,
        /// The damage.
        reason: String,
    },
    /// The archive does not have the content of a tensor.
    #[error("{archive}: it does not have the content of `{tensor}`")]
    Absent {
        /// The archive.
        archive: String,
        /// The tensor's name in the module's `state_dict`, or that of its member.
        tensor: String,
    },
    /// A tensor has elements of a type that the importer does not support.
    #[error("{archive}: `{tensor}`: {reason}")]
    ElementType {
        /// The archive.
        archive: String,
        /// The tensor's name in the module's `state_dict`, or among its constants.
        tensor: String,
        /// The reason.
        reason: String,
    },
    /// The model uses operators that the importer does not support.
    #[error("{archive}: {} not supported:{}", Count(operators.len()), Lines(operators))]
    UnsupportedOperators {
        /// The archive.
        archive: String,
        /// All of the operators, sorted by name.
        operators: Vec<UnsupportedOperator>,
    },
    /// A node cannot be translated.
    #[error("{archive}: {target} ({node}{place}): {reason}")]
    Node {
        /// The archive.
        archive: String,
        /// The operator's name in PyTorch.
        target: String,
        /// The node's name in the exported graph.
        node: Box<str>,
        /// The node's place in the user's model; empty if the file does not say.
        place: Box<str>,
        /// The reason.
        reason: String,
        /// Whether `run_decompositions()` of PyTorch would replace the operator by others.
        decomposes: bool,
    },
    /// The model as a whole cannot be used.
    #[error("{archive}: {reason}")]
    Model {
        /// The archive.
        archive: String,
        /// The reason.
        reason: String,
    },
    /// The model was exported for another batch size.
    #[error("{archive}: the model was exported for a batch of {exported}, but a batch of {requested} is needed")]
    BatchSize {
        /// The archive.
        archive: String,
        /// Samples per batch in the archive.
        exported: usize,
        /// Samples per batch that the caller asked for.
        requested: usize,
    },
    /// The file that replaces the module's `state_dict` cannot be read.
    #[error(transparent)]
    State(StateError),
    /// An output was asked for that cannot be the loss.
    #[error("{archive}: {reason}")]
    Loss {
        /// The archive.
        archive: String,
        /// The reason.
        reason: String,
        /// The outputs that can be the loss, as a sentence names them; empty if there are none.
        others: String,
    },
    /// The translated graph is invalid.
    #[error("{archive}: the translated graph is invalid: {source}")]
    Graph {
        /// The archive.
        archive: String,
        /// The error.
        source: GraphError,
    },
}

/// The reason why another source of a `state_dict` cannot be read.
pub type StateError = Box<dyn std::error::Error + Send + Sync>;

impl Advice for ImportError {
    fn hint(&self) -> Option<Cow<'_, str>> {
        Some(match self {
            Self::Unreadable { .. } => "check the path, and that you may read the file".into(),
            Self::Damaged { .. } => "save the model again with torch.export.save of PyTorch 2.9 or later".into(),
            Self::Absent { .. } => "name the file that torch.export.save wrote: --set model.file=PATH".into(),
            Self::ElementType { .. } => {
                "convert the tensor before the export: complex numbers to two real tensors with \
                                         `.real` and `.imag`, others with `.to(torch.float32)` or `.to(torch.int64)`"
                    .into()
            }
            Self::UnsupportedOperators { operators, .. } => without_unsupported(operators).into(),
            Self::Node { decomposes: true, .. } => DECOMPOSE.into(),
            Self::BatchSize { .. } => "export the model with a dynamic batch dimension".into(),
            Self::Loss { others, .. } if others.is_empty() => RETURN_A_LOSS.into(),
            Self::Loss { others, .. } => format!("name another one by its position or name: {others}").into(),
            Self::Node { .. } | Self::Model { .. } | Self::State(_) | Self::Graph { .. } => return None,
        })
    }
}

/// The advice about a model without a loss.
pub(crate) const RETURN_A_LOSS: &str = "export a module whose forward(x, y) returns the mean loss: a tensor of one \
                                        number, computed from the parameters by operators that have a gradient";

/// Whether an operator is the only trace that `x.data = y` leaves in an archive. `torch.export` drops the assignment.
pub(crate) fn is_assignment_to_data(target: &str) -> bool {
    target.contains("aten._has_compatible_shallow_copy_type.")
}

/// The advice if PyTorch can replace an operator by others.
const DECOMPOSE: &str = "call program.run_decompositions() before torch.export.save: it replaces this by simpler \
                         operators, which may be supported; but it drops `detach` and `no_grad`, so the gradients of a \
                         model that uses them are then wrong";

/// The hint for unsupported operators.
fn without_unsupported(operators: &[UnsupportedOperator]) -> String {
    let all = "docs/operators.md lists the supported operators";
    let stays: Vec<&str> = operators.iter().filter(|o| !o.decomposes).map(|o| o.target.as_str()).collect();
    if operators.iter().any(|o| is_assignment_to_data(&o.target)) {
        return "torch.export leaves an assignment to `.data` out of the archive; write `x.copy_(y)` in \
                `torch.no_grad()` instead"
            .into();
    }
    match stays.len() {
        0 => DECOMPOSE.into(),
        n if n == operators.len() => format!("{all}; export the model without the others"),
        _ => format!("{all}; export the model without {}. As to the others, {DECOMPOSE}", stays.join(", ")),
    }
}

/// An operator that the importer does not support, and the nodes that use it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnsupportedOperator {
    /// The operator's name in PyTorch, such as `aten.grid_sampler_2d.default`.
    pub target: String,
    /// The nodes in order, each with its place in the user's model.
    pub uses: Vec<String>,
    /// Whether `run_decompositions()` of PyTorch would replace it by others.
    pub decomposes: bool,
}

/// Uses listed in a message. Further uses are counted.
const MAX_USES_SHOWN: usize = 3;

impl fmt::Display for UnsupportedOperator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: used by {}", self.target, self.uses[..self.uses.len().min(MAX_USES_SHOWN)].join(", "))?;
        match self.uses.len().saturating_sub(MAX_USES_SHOWN) {
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

struct Lines<'a>(&'a [UnsupportedOperator]);

impl fmt::Display for Lines<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|m| write!(f, "\n  {m}"))
    }
}

/// The reason why a node cannot be translated. The caller adds the node and its place.
#[derive(Debug)]
pub(crate) struct TranslationError(pub(crate) String);

impl From<GraphError> for TranslationError {
    fn from(e: GraphError) -> Self {
        Self(match e {
            // The caller names the node.
            GraphError::Operand { reason, operands, .. } => {
                let types: Vec<String> = operands.iter().map(|t| t.to_string()).collect();
                format!("{reason}; operands: {}", types.join(", "))
            }
            e => e.to_string(),
        })
    }
}

impl From<String> for TranslationError {
    fn from(reason: String) -> Self {
        Self(reason)
    }
}

impl From<&str> for TranslationError {
    fn from(reason: &str) -> Self {
        Self(reason.into())
    }
}
