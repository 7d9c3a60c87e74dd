//! Operators, named as in PyTorch's ATen: their attributes, shape rules and costs.
//!
//! To add an operator:
//! 1. Write its attributes, its shape rule, its cost and whether it makes views in the file of its family here.
//! 2. Add its name to the table below.
//! 3. Write its gradient, its decomposition or both in the file of the same name in `rules/`.
//! 4. Add a kernel to each backend, unless it has a decomposition: every backend runs those without a kernel.
//!
//! The conformance suite of the backend crate then fails until it has cases for the new operator.

mod attention;
mod check;
mod convolution;
mod elementwise;
mod index;
mod linear;
mod loss;
mod normalization;
mod operator;
mod optimizer;
mod pooling;
mod random;
mod reduce;
mod softmax;
mod view;

use serde::{Deserialize, Serialize};

use crate::TensorType;

pub use attention::{ScaledDotProductAttention, ScaledDotProductAttentionBackward};
pub use check::broadcast_shapes;
pub use convolution::{Conv2d, Conv2dInputGrad, Conv2dWeightGrad};
pub use elementwise::{
    Approximate, Binary, BinaryScalar, Cast, Clamp, Compare, CompareScalar, Gelu, GeluBackward, Logical,
    ThresholdBackward, Unary, Where,
};
pub use index::{
    Embedding, EmbeddingDenseBackward, Gather, Index, IndexAdd, IndexPut, IndexSelect, Scatter, ScatterAdd, Sort, TopK,
};
pub use linear::{Linear, Matmul};
pub use loss::{CrossEntropy, CrossEntropyBackward};
pub use normalization::{
    BatchNorm, BatchNormInputGrad, BatchNormWeightGrad, LayerNorm, LayerNormInputGrad, LayerNormWeightGrad,
};
pub use operator::{Cost, OpClass, Operator, View};
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

/// The table of operators: calls the macro `$then` with the name of each.
macro_rules! with_operators {
    ($then:ident) => {
        $then! {
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
    };
}
pub(crate) use with_operators;

macro_rules! define_op {
    ($($(#[$doc:meta])* $variant:ident,)*) => {
        /// One operator with its attributes.
        ///
        /// Backends match on it exhaustively: a new operator compiles only once every backend says how to run it.
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
            /// The names of all variants, for tests that must cover every operator.
            pub const VARIANTS: &[&str] = &[$(stringify!($variant)),*];

            /// The variant's name, as in [`Self::VARIANTS`].
            pub fn variant(&self) -> &'static str {
                match self {
                    $(Op::$variant(_) => stringify!($variant),)*
                }
            }

            /// The operator as a trait object.
            pub fn operator(&self) -> &dyn Operator {
                match self {
                    $(Op::$variant(op) => op,)*
                }
            }
        }
    };
}

with_operators!(define_op);

impl Op {
    /// The operator's key in text formats, such as `layer_norm`.
    pub fn tag(&self) -> String {
        let mut tag = String::new();
        for c in self.variant().chars() {
            if c.is_uppercase() && !tag.is_empty() {
                tag.push('_');
            }
            tag.extend(c.to_lowercase());
        }
        tag
    }

    /// The operator's name in ATen.
    pub fn name(&self) -> &'static str {
        self.operator().name()
    }

    /// The types of the results for operands of these types. The error names the requirement that they fail.
    pub fn infer(&self, inputs: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        inputs.iter().try_for_each(|t| t.check().map(drop))?;
        let outputs = self.operator().infer(inputs)?;
        outputs.iter().try_for_each(|t| t.check().map(drop).map_err(|e| format!("its result: {e}")))?;
        Ok(outputs)
    }

    /// Which elements of its operand each result shows, if the results are views.
    pub fn view(&self) -> Option<View> {
        self.operator().view()
    }

    /// The work for operands and results of these types.
    pub fn cost(&self, inputs: &[&TensorType], outputs: &[&TensorType]) -> Cost {
        self.operator().cost(inputs, outputs)
    }
}
