//! The precision of a run.

use std::fmt;

use serde::{Deserialize, Serialize};

/// In which type peers compute. Parameters, optimizer state, sums of gradients and messages are f32 in any case.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Everything in f32.
    #[default]
    F32,
    /// Matrix products, convolutions and attention in bf16, on devices that gain from it.
    Bf16,
}

impl Precision {
    /// All of them, the default first.
    pub const ALL: [Self; 2] = [Self::F32, Self::Bf16];

    /// The name in job files.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
