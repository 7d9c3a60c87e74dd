use fusionllm_graph::ops::{Approximate, Gelu, Unary};
use fusionllm_graph::{Builder, GraphError, ValueId};

/// The function between the products of a feed-forward layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// The Gaussian error linear unit.
    Gelu,
    /// The same with a hyperbolic tangent for the error function.
    GeluTanh,
    /// `max(x, 0)`.
    Relu,
    /// `x sigmoid(x)`.
    Silu,
}

impl Activation {
    /// The names that Hugging Face's `config.json` has for the functions.
    pub const NAMES: [(&'static str, Self); 6] = [
        ("gelu", Self::Gelu),
        ("gelu_new", Self::GeluTanh),
        ("gelu_pytorch_tanh", Self::GeluTanh),
        ("relu", Self::Relu),
        ("silu", Self::Silu),
        ("swish", Self::Silu),
    ];

    /// The function of this name; `None` for an unknown one.
    pub fn named(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|(_, activation)| *activation)
    }

    /// The operator on `x`.
    pub(crate) fn apply(self, b: &mut Builder, x: ValueId) -> Result<ValueId, GraphError> {
        match self {
            Self::Gelu => b.op(Gelu { approximate: Approximate::None }, &[x]),
            Self::GeluTanh => b.op(Gelu { approximate: Approximate::Tanh }, &[x]),
            Self::Relu => b.unary(Unary::Relu, x),
            Self::Silu => b.unary(Unary::Silu, x),
        }
    }
}
