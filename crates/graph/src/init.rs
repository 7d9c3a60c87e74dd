//! Initial values of parameters and buffers. Every peer draws the same bits.

use serde::{Deserialize, Serialize};

use crate::{CounterRng, GraphError, HostTensor, TensorType};

/// The initial value of a parameter or buffer when no weights are loaded.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Init {
    /// The same value in every element.
    Constant(f64),
    /// Normally distributed with mean 0.
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// Uniformly distributed in [-bound, bound).
    Uniform {
        /// Half the width of the interval.
        bound: f64,
    },
}

impl Init {
    /// Draws the value of the parameter `name`. It depends on nothing but the seed, the name and the type.
    pub fn draw(&self, seed: u64, name: &str, ty: &TensorType) -> Result<HostTensor, GraphError> {
        let rng = CounterRng::for_name(seed, name);
        let n = ty.numel() as u64;
        let values: Vec<f64> = match *self {
            Self::Constant(c) => vec![c; ty.numel()],
            Self::Normal { std } => (0..n).map(|i| std * rng.normal(i, 0)).collect(),
            Self::Uniform { bound } => (0..n).map(|i| bound * (2.0 * f64::from(rng.uniform(i, 0)) - 1.0)).collect(),
        };
        HostTensor::from_f64(ty.shape.clone(), &values)?.cast(ty.dtype)
    }
}
