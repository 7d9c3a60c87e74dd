//! The OP-DAG: typed operators, shapes, validation, autodiff and model families.
//!
//! This crate imports no other crate of the workspace and does no I/O. A [`Graph`] is plain data: values with a
//! type, nodes that each apply one [`Op`], and the names of what comes in (inputs, parameters, buffers) and goes out.
//! [`autodiff::differentiate`] turns a forward graph into one that also holds the backward operators, each still one
//! plain node; [`Graph::evaluation`] turns it into its evaluation form.
//!
//! ```
//! use fusionllm_graph::{Builder, DType};
//!
//! let mut b = Builder::new("affine");
//! let x = b.input("x", DType::F32, [4, 3])?;
//! let y = b.input("y", DType::I64, [4])?;
//! let w = b.parameter("w", DType::F32, [2, 3], fusionllm_graph::Init::Normal { std: 0.02 })?;
//! let logits = b.linear(x, w, None)?;
//! let loss = b.cross_entropy(logits, y, -100)?;
//! b.output("loss", loss)?;
//! let graph = b.finish()?;
//! let train = fusionllm_graph::autodiff::differentiate(&graph, loss)?;
//! assert_eq!(train.gradients.len(), 1);
//! # Ok::<(), fusionllm_graph::GraphError>(())
//! ```

pub mod autodiff;
mod builder;
mod error;
mod eval;
mod graph;
pub mod init;
pub mod models;
mod number;
pub mod ops;
mod print;
mod rng;
mod tensor;

pub use builder::Builder;
pub use error::GraphError;
pub use graph::{
    FORMAT_VERSION, Graph, GraphFile, Node, NodeId, ParameterGradient, Phase, StateUpdate, TrainGraph, Value, ValueId,
    ValueKind,
};
pub use init::Init;
pub use ops::{Cost, Op};
pub use rng::{CounterRng, Dice};
pub use tensor::{DType, HostTensor, Shape, TensorType};
