/// The rule that a Program breaks. A peer refuses to run it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("program: {0}")]
pub struct ProgramError(pub String);
