//! The model as a graph of operators: types, shapes, validation, and differentiation.
//!
//! This crate imports no other crate of the workspace and does no I/O.
//!
//! A [`Graph`] is plain data. Its nodes each apply one operator ([`Op`]) to typed values. Values from outside are
//! inputs, parameters, buffers and constants. [`autodiff::differentiate`] adds the backward operators to a forward
//! graph, as plain nodes. [`Graph::evaluation`] returns the form used for evaluation, and [`Graph::in_precision`] the
//! form that computes in bf16. [`Graph::freeze`] and [`Graph::with_adapters`] leave parameters as they are and train
//! others beside them. [`batch::BatchLoss`] says how the loss of a batch follows from its micro-batches.
//!
//! Layers, from the bottom: `types` and `ids`; `ops` (attributes, shapes, costs); `graph`; `builder`; `rules`
//! (gradients and decompositions, which write operators with the builder); `autodiff`, `batch`, `eval`, `lora` and
//! `precision`.
//!
//! ```
//! use fusionllm_graph::{Builder, DType, Init};
//!
//! let mut b = Builder::new("affine");
//! let x = b.input("x", DType::F32, [4, 3])?;
//! let y = b.input("y", DType::I64, [4])?;
//! let w = b.parameter("w", DType::F32, [2, 3], Init::Normal { std: 0.02 })?;
//! let logits = b.linear(x, w, None)?;
//! let loss = b.cross_entropy(logits, y, -100)?;
//! b.output("loss", loss)?;
//! let graph = b.finish()?;
//! let train = fusionllm_graph::autodiff::differentiate(&graph, loss)?;
//! assert_eq!(train.gradients.len(), 1);
//! # Ok::<(), fusionllm_graph::GraphError>(())
//! ```

pub mod autodiff;
pub mod batch;
mod builder;
mod builder_ops;
mod error;
mod eval;
mod file;
mod graph;
mod host_tensor;
mod ids;
pub mod init;
pub mod lora;
mod number;
pub mod ops;
mod precision;
mod print;
mod rng;
mod rules;
mod state;
mod types;
pub mod units;
mod validate;

pub use builder::Builder;
pub use error::{Advice, GraphError};
pub use file::{FORMAT_VERSION, GraphFile};
pub use graph::{Graph, Node, ParameterGradient, Phase, StateUpdate, TrainGraph, Value, ValueKind};
pub use host_tensor::HostTensor;
pub use ids::{NodeId, ValueId};
pub use init::Init;
pub use ops::{Cost, Op};
pub use precision::Precision;
pub use rng::{ChoiceRng, CounterRng};
pub use state::StateTensor;
pub use types::{DType, Shape, TensorType};
