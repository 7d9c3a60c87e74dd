//! Operators, named as PyTorch's ATen names them: each entry holds its attributes, its shape rule, its backward rule and
//! its cost rule, and, where it is made of simpler operators, its decomposition.
//!
//! To add one: write its entry in the file of its family, add a line to the table below, and a kernel to each backend (or
//! a decomposition, which every backend runs without a kernel). The conformance suite in the backend crate then asks
//! for its cases.

mod attention;
mod convolution;
mod elementwise;
mod index;
mod linear;
mod loss;
mod normalization;
mod optimizer;
mod pooling;
mod random;
mod reduce;
mod softmax;
mod view;

use serde::{Deserialize, Serialize};

use crate::{Builder, GraphError, TensorType, ValueId};

pub use attention::{ScaledDotProductAttention, ScaledDotProductAttentionBackward};
pub use convolution::{Conv2d, Conv2dInputGrad, Conv2dWeightGrad};
pub use elementwise::{
    Approximate, Binary, BinaryScalar, Cast, Clamp, Compare, CompareScalar, Gelu, GeluBackward, Logical,
    ThresholdBackward, Unary, Where, broadcast_shapes,
};
pub use index::{
    Embedding, EmbeddingDenseBackward, Gather, Index, IndexAdd, IndexPut, IndexSelect, Scatter, ScatterAdd, Sort, TopK,
};
pub use linear::{Linear, Matmul};
pub use loss::{CrossEntropy, CrossEntropyBackward};
pub use normalization::{
    BatchNorm, BatchNormInputGrad, BatchNormWeightGrad, LayerNorm, LayerNormInputGrad, LayerNormWeightGrad,
};
pub use optimizer::{AdamwStep, SgdStep, SquaredNorm};
pub use pooling::{
    AdaptiveAvgPool2d, AdaptiveAvgPool2dBackward, AvgPool2d, AvgPool2dBackward, MaxPool2d, MaxPool2dBackward,
};
pub use random::{Dropout, DropoutBackward};
pub use reduce::{ArgReduce, CumSum, Reduce, ReduceKind};
pub use softmax::{LogSoftmax, LogSoftmaxBackward, Softmax, SoftmaxBackward};
pub use view::{
    Arange, Cat, ConstantPad, Detach, Expand, Flip, Full, Permute, Reshape, Slice, SliceBackward, Split, Triangle,
};

/// What one operator is: everything about it but its kernels.
pub trait Operator {
    /// The name ATen gives it.
    fn name(&self) -> &'static str;

    /// The types of its outputs, or what it asks of its operands. Never panics, whatever the operands.
    fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String>;

    /// Adds to the graph the operators that compute the gradients of its inputs, and returns one per input: `None` where
    /// none is wanted or the derivative is zero everywhere.
    fn backward(&self, cx: &mut Backward<'_>) -> Result<Vec<Option<ValueId>>, GraphError> {
        Err(cx.not_differentiable("no derivative is defined"))
    }

    /// What it costs on any device. By default memory-bound with one operation per output element.
    fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        Cost::memory(outputs.iter().map(|t| t.numel()).sum::<usize>() as f64, inputs, outputs)
    }

    /// Adds simpler operators that compute the same outputs, for backends without a kernel of its own.
    fn decompose(&self, _b: &mut Builder, _inputs: &[ValueId]) -> Result<Option<Vec<ValueId>>, GraphError> {
        Ok(None)
    }
}

/// The class of hardware unit that limits an operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OpClass {
    /// Matrix products.
    Matmul,
    /// Convolutions.
    Convolution,
    /// Limited by memory traffic.
    Memory,
    /// Changes how elements are addressed; moves none, or few. Cheaper to redo than to send.
    View,
}

/// Work of one operator, independent of the device.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// Floating-point operations; a multiply-add counts two.
    pub flops: f64,
    /// Bytes read and written.
    pub bytes: f64,
    /// What limits it.
    pub class: OpClass,
}

impl Cost {
    /// `flops` operations over all operands once.
    pub fn new(class: OpClass, flops: f64, inputs: &[&TensorType], outputs: &[&TensorType]) -> Self {
        let bytes = inputs.iter().chain(outputs).map(|t| t.bytes()).sum::<usize>() as f64;
        Self { flops, bytes, class }
    }

    /// A memory-bound operator.
    pub fn memory(flops: f64, inputs: &[&TensorType], outputs: &[&TensorType]) -> Self {
        Self::new(OpClass::Memory, flops, inputs, outputs)
    }

    /// A view: no work worth counting.
    pub fn view() -> Self {
        Self { flops: 0.0, bytes: 0.0, class: OpClass::View }
    }
}

/// What a backward rule sees: the forward operands and results, and the gradients that reach the results.
pub struct Backward<'a> {
    /// The graph being extended.
    pub b: &'a mut Builder,
    /// Forward operands.
    pub inputs: &'a [ValueId],
    /// Forward results.
    pub outputs: &'a [ValueId],
    /// Gradient of the loss with respect to each result; `None` where none reaches it.
    pub grads: &'a [Option<ValueId>],
    /// Which operands want a gradient.
    pub wanted: &'a [bool],
    /// The forward operator's ATen name and node name, for errors.
    pub(crate) at: (&'static str, &'a str, crate::NodeId),
}

impl Backward<'_> {
    /// The gradient of result `i`; a zero tensor where none reaches it.
    pub fn grad(&mut self, i: usize) -> Result<ValueId, GraphError> {
        match self.grads[i] {
            Some(g) => Ok(g),
            None => {
                let ty = self.b.ty(self.outputs[i]).clone();
                self.b.full(ty, 0.0)
            }
        }
    }

    /// Evaluates `f` if operand `i` wants a gradient.
    pub fn want(
        &mut self,
        i: usize,
        f: impl FnOnce(&mut Self) -> Result<ValueId, GraphError>,
    ) -> Result<Option<ValueId>, GraphError> {
        if self.wanted.get(i).copied().unwrap_or(false) { f(self).map(Some) } else { Ok(None) }
    }

    /// The error of a rule that cannot go on.
    pub fn not_differentiable(&self, reason: &str) -> GraphError {
        GraphError::NotDifferentiable {
            op: self.at.0.into(),
            name: self.at.1.into(),
            node: self.at.2,
            reason: reason.into(),
        }
    }
}

macro_rules! operators {
    ($($(#[$doc:meta])* $variant:ident,)*) => {
        /// One operator with its attributes.
        ///
        /// Backends match on it exhaustively, so that a new operator does not compile until each has decided how to run it.
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum Op {
            $(
                #[doc = concat!("See [`", stringify!($variant), "`].")]
                $variant($variant),
            )*
        }

        $(
            impl From<$variant> for Op {
                fn from(op: $variant) -> Self {
                    Op::$variant(op)
                }
            }
        )*

        impl Op {
            /// Every variant's name, for suites that must miss none.
            pub const VARIANTS: &[&str] = &[$(stringify!($variant)),*];

            /// Its name in [`Self::VARIANTS`].
            pub fn variant(&self) -> &'static str {
                match self {
                    $(Op::$variant(_) => stringify!($variant),)*
                }
            }

            /// The operator's entry.
            pub fn operator(&self) -> &dyn Operator {
                match self {
                    $(Op::$variant(op) => op,)*
                }
            }
        }
    };
}

operators! {
    Unary, Binary, BinaryScalar, Compare, CompareScalar, Logical, Where, Clamp, Cast, Gelu, GeluBackward, ThresholdBackward,
    Reduce, ArgReduce, CumSum,
    Reshape, Permute, Expand, Detach, Slice, SliceBackward, Cat, Split, Flip, ConstantPad, Triangle, Full, Arange,
    Embedding, EmbeddingDenseBackward, IndexSelect, IndexAdd, Gather, ScatterAdd, Scatter, Index, IndexPut, TopK, Sort,
    Matmul, Linear,
    Conv2d, Conv2dInputGrad, Conv2dWeightGrad,
    MaxPool2d, MaxPool2dBackward, AvgPool2d, AvgPool2dBackward, AdaptiveAvgPool2d, AdaptiveAvgPool2dBackward,
    LayerNorm, LayerNormInputGrad, LayerNormWeightGrad, BatchNorm, BatchNormInputGrad, BatchNormWeightGrad,
    Softmax, SoftmaxBackward, LogSoftmax, LogSoftmaxBackward,
    ScaledDotProductAttention, ScaledDotProductAttentionBackward,
    Dropout, DropoutBackward,
    CrossEntropy, CrossEntropyBackward,
    AdamwStep, SgdStep, SquaredNorm,
}

impl Op {
    /// The name ATen gives it.
    pub fn name(&self) -> &'static str {
        self.operator().name()
    }

    /// The types of its outputs for operands of these types. The error says what it asks for.
    pub fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        for t in inputs {
            if t.checked_bytes().is_none_or(|b| b > isize::MAX as usize) {
                return Err(format!("{t} is larger than any memory"));
            }
        }
        let outputs = self.operator().infer(inputs)?;
        match outputs.iter().find(|t| t.checked_bytes().is_none_or(|b| b > isize::MAX as usize)) {
            Some(t) => Err(format!("its result {t} is larger than any memory")),
            None => Ok(outputs),
        }
    }

    /// What it costs for operands of these types.
    pub fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        self.operator().cost(inputs, outputs)
    }
}

/// Exactly `N` operands.
fn args<'a, const N: usize>(inputs: &[&'a TensorType]) -> Result<[&'a TensorType; N], String> {
    <[&TensorType; N]>::try_from(inputs).map_err(|_| format!("takes {N} operand(s), got {}", inputs.len()))
}

/// `N` operands and perhaps one more.
fn args_opt<'a, const N: usize>(
    inputs: &[&'a TensorType],
) -> Result<([&'a TensorType; N], Option<&'a TensorType>), String> {
    match inputs.len() {
        n if n == N => Ok((args::<N>(inputs)?, None)),
        n if n == N + 1 => Ok((args::<N>(&inputs[..N])?, Some(inputs[N]))),
        n => Err(format!("takes {N} or {} operands, got {n}", N + 1)),
    }
}

fn want(condition: bool, reason: impl FnOnce() -> String) -> Result<(), String> {
    if condition { Ok(()) } else { Err(reason()) }
}

fn float(t: &TensorType) -> Result<(), String> {
    want(t.dtype.is_float(), || format!("needs a float operand, got {t}"))
}

fn same_dtype(a: &TensorType, b: &TensorType) -> Result<(), String> {
    want(a.dtype == b.dtype, || format!("operands have different element types, {} and {}", a.dtype, b.dtype))
}

fn of_type(t: &TensorType, dtype: crate::DType, what: &str) -> Result<(), String> {
    want(t.dtype == dtype, || format!("{what} must be {dtype}, got {t}"))
}

fn in_rank(dim: usize, t: &TensorType) -> Result<(), String> {
    want(dim < t.rank(), || format!("dimension {dim} is out of range for {t}"))
}

fn of_shape(t: &TensorType, shape: &[usize], what: &str) -> Result<(), String> {
    want(t.shape == shape, || format!("{what} must have shape {shape:?}, got {t}"))
}

/// Sizes multiplied, or an error where they overflow.
fn product(sizes: &[usize]) -> Result<usize, String> {
    sizes.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).ok_or_else(|| format!("{sizes:?} has too many elements"))
}
