//! The default backend: strided tensors in host memory and the kernels of this crate.
//!
//! `f64` and `f32` have tuned kernels. Half-precision operands are computed in `f32`, and the results are rounded once.

mod attention;
mod convolution;
mod elementwise;
mod index;
mod loss;
mod normalization;
mod optimizer;
mod pooling;
mod products;
mod reduce;
mod tensor;
mod view;

use fusionllm_graph::ops::{BinaryScalar, CompareScalar};
use fusionllm_graph::units::counted;
use fusionllm_graph::{DType, HostTensor, Op, TensorType};

use crate::guard::guarded;
use crate::kernels::generic::Operand;
use crate::kernels::simd::instructions;
use crate::{Backend, BackendError, DeviceInfo, Tensor, run_decomposed};
use tensor::Array;

/// This machine's processor, with kernels of this crate. Holds every element type.
#[derive(Debug, Clone, Copy, Default)]
pub struct Cpu;

impl Cpu {
    /// The name by which users choose it.
    pub const NAME: &str = "cpu";

    fn not_moved(reason: impl Into<String>) -> BackendError {
        BackendError::Tensor { backend: Self::NAME.into(), reason: reason.into() }
    }
}

impl Backend for Cpu {
    fn name(&self) -> &str {
        Self::NAME
    }

    fn device(&self) -> DeviceInfo {
        let processor = crate::machine::processor();
        match instructions() {
            Some(instructions) => DeviceInfo { name: format!("{} with {instructions}", processor.name), ..processor },
            None => processor,
        }
    }

    /// The backend's kernels for products take f32.
    fn slow_bf16(&self) -> bool {
        true
    }

    fn upload(&self, tensor: &HostTensor) -> Result<Tensor, BackendError> {
        Ok(Tensor::new(tensor.ty().clone(), Array::from_host(tensor)))
    }

    fn download(&self, tensor: &Tensor) -> Result<HostTensor, BackendError> {
        let array = tensor.get::<Array>().ok_or_else(|| Self::not_moved(foreign(tensor.ty())))?;
        array.to_host().map_err(Self::not_moved)
    }

    fn run(&self, op: &Op, inputs: Vec<Tensor>, outputs: &[TensorType]) -> Result<Vec<Tensor>, BackendError> {
        let types: Vec<TensorType> = inputs.iter().map(|t| t.ty().clone()).collect();
        let fail = |reason| BackendError::Operator {
            backend: Self::NAME.into(),
            op: op.name().into(),
            reason,
            operands: types.clone(),
        };
        if types.iter().any(|t| t.numel() == 0) && outputs.iter().any(|t| t.numel() > 0) && !takes_empty(op) {
            return run_decomposed(self, op, inputs)?.ok_or_else(|| fail("does not take empty operands".into()));
        }
        let mut arrays = Vec::with_capacity(inputs.len());
        for (tensor, ty) in inputs.into_iter().zip(&types) {
            arrays.push(tensor.into_inner::<Array>().ok_or_else(|| Self::not_moved(foreign(ty)))?);
        }
        let results = guarded(Self::NAME, || run(op, arrays, outputs)).map_err(fail)?;
        debug_assert!(results.iter().map(Array::ty).eq(outputs.iter().cloned()), "{op:?}: {results:?}");
        Ok(outputs.iter().cloned().zip(results).map(|(ty, x)| Tensor::new(ty, x)).collect())
    }
}

fn foreign(ty: &TensorType) -> String {
    format!("{ty} belongs to another backend")
}

/// An operator's results, or the reason why it failed.
type Ran = Result<Vec<Array>, String>;

/// Whether an operator with empty operands and other results needs no decomposition.
fn takes_empty(op: &Op) -> bool {
    !matches!(
        op,
        Op::Linear(_)
            | Op::LayerNorm(_)
            | Op::LayerNormInputGrad(_)
            | Op::LayerNormWeightGrad(_)
            | Op::BatchNorm(_)
            | Op::BatchNormInputGrad(_)
            | Op::BatchNormWeightGrad(_)
            | Op::ScaledDotProductAttention(_)
            | Op::ScaledDotProductAttentionBackward(_)
            | Op::CrossEntropy(_)
            | Op::CrossEntropyBackward(_)
    )
}

fn run(op: &Op, inputs: Vec<Array>, outputs: &[TensorType]) -> Ran {
    if outputs.iter().all(|t| t.numel() == 0) {
        return Ok(outputs.iter().map(Array::empty).collect());
    }
    let half = |dtype| matches!(dtype, DType::F16 | DType::BF16);
    if computes(op) && (inputs.iter().any(|x| half(x.dtype)) || outputs.iter().any(|t| half(t.dtype))) {
        return in_single(op, inputs, outputs);
    }
    match op {
        Op::Detach(_)
        | Op::Reshape(_)
        | Op::Permute(_)
        | Op::Expand(_)
        | Op::Slice(_)
        | Op::Split(_)
        | Op::Flip(_)
        | Op::SliceBackward(_)
        | Op::Cat(_)
        | Op::ConstantPad(_)
        | Op::Full(_)
        | Op::Triangle(_)
        | Op::Arange(_) => view::run(op, inputs, outputs),
        Op::Unary(_)
        | Op::Binary(_)
        | Op::BinaryScalar(_)
        | Op::Compare(_)
        | Op::CompareScalar(_)
        | Op::Logical(_)
        | Op::Where(_)
        | Op::Clamp(_)
        | Op::Cast(_)
        | Op::Gelu(_)
        | Op::GeluBackward(_)
        | Op::ThresholdBackward(_)
        | Op::Dropout(_)
        | Op::DropoutBackward(_) => elementwise::run(op, inputs, outputs),
        Op::Reduce(_) | Op::ArgReduce(_) | Op::SquaredNorm(_) => reduce::run(op, inputs, outputs),
        Op::Embedding(_)
        | Op::EmbeddingDenseBackward(_)
        | Op::IndexSelect(_)
        | Op::IndexAdd(_)
        | Op::Gather(_)
        | Op::ScatterAdd(_)
        | Op::Scatter(_)
        | Op::Index(_)
        | Op::IndexPut(_)
        | Op::TopK(_)
        | Op::Sort(_)
        | Op::CumSum(_) => index::run(op, inputs, outputs),
        Op::CrossEntropy(_) | Op::CrossEntropyBackward(_) => loss::run(op, inputs, outputs),
        Op::Matmul(_) | Op::Linear(_) => products::run(op, inputs, outputs),
        Op::Conv2d(_) | Op::Conv2dInputGrad(_) | Op::Conv2dWeightGrad(_) => convolution::run(op, inputs, outputs),
        Op::MaxPool2d(_)
        | Op::MaxPool2dBackward(_)
        | Op::AvgPool2d(_)
        | Op::AvgPool2dBackward(_)
        | Op::AdaptiveAvgPool2d(_)
        | Op::AdaptiveAvgPool2dBackward(_) => pooling::run(op, inputs, outputs),
        Op::ScaledDotProductAttention(_) | Op::ScaledDotProductAttentionBackward(_) => {
            attention::run(op, inputs, outputs)
        }
        Op::LayerNorm(_)
        | Op::LayerNormInputGrad(_)
        | Op::LayerNormWeightGrad(_)
        | Op::BatchNorm(_)
        | Op::BatchNormInputGrad(_)
        | Op::BatchNormWeightGrad(_)
        | Op::Softmax(_)
        | Op::SoftmaxBackward(_)
        | Op::LogSoftmax(_)
        | Op::LogSoftmaxBackward(_) => normalization::run(op, inputs, outputs),
        Op::AdamwStep(_) | Op::SgdStep(_) => optimizer::run(op, inputs, outputs),
    }
}

/// Whether an operator computes floats, rather than moving elements or converting them.
fn computes(op: &Op) -> bool {
    let moves = matches!(
        op,
        Op::Flip(_)
            | Op::SliceBackward(_)
            | Op::Cat(_)
            | Op::ConstantPad(_)
            | Op::Full(_)
            | Op::Triangle(_)
            | Op::Arange(_)
            | Op::Where(_)
            | Op::Cast(_)
            | Op::Embedding(_)
            | Op::IndexSelect(_)
            | Op::Gather(_)
            | Op::Scatter(_)
            | Op::Index(_)
            | Op::IndexPut(_)
            | Op::TopK(_)
            | Op::Sort(_)
    );
    op.view().is_none() && !moves
}

/// Runs an operator with `f32` in place of half precision.
fn in_single(op: &Op, inputs: Vec<Array>, outputs: &[TensorType]) -> Ran {
    let single = |dtype| if matches!(dtype, DType::F16 | DType::BF16) { DType::F32 } else { dtype };
    // Scalars are rounded to the operand's type, as PyTorch rounds them in comparisons.
    let rounded = |scalar: f64| match inputs.first().map(|x| x.dtype) {
        Some(DType::F16) => half::f16::from_f32(scalar as f32).to_f64(),
        Some(DType::BF16) => half::bf16::from_f32(scalar as f32).to_f64(),
        _ => scalar,
    };
    let op = match op {
        Op::BinaryScalar(op) => BinaryScalar { scalar: rounded(op.scalar), ..*op }.into(),
        Op::CompareScalar(op) => CompareScalar { scalar: rounded(op.scalar), ..*op }.into(),
        op => op.clone(),
    };
    let types: Vec<TensorType> = outputs.iter().map(|t| TensorType::new(single(t.dtype), t.shape.clone())).collect();
    let widened = |x: Array| {
        let dtype = single(x.dtype);
        elementwise::cast(x, dtype)
    };
    let results = run(&op, inputs.into_iter().map(widened).collect(), &types)?;
    Ok(results.into_iter().zip(outputs).map(|(x, ty)| elementwise::cast(x, ty.dtype)).collect())
}

/// Runs a generic kernel.
fn generic(op: &Op, inputs: Vec<Array>, outputs: &[TensorType]) -> Ran {
    let inputs: Vec<Array> = inputs.into_iter().map(Array::contiguous).collect();
    let types: Vec<TensorType> = inputs.iter().map(Array::ty).collect();
    let operands: Vec<Operand<'_>> = inputs.iter().zip(&types).map(|(x, ty)| x.operand(ty)).collect();
    let results = crate::kernels::generic::run(op, &operands, outputs)?.ok_or("has no kernel for these operands")?;
    Ok(outputs.iter().zip(results).map(|(ty, buffer)| Array::from_buffer(buffer, ty)).collect())
}

/// All `N` operands.
fn all<const N: usize>(inputs: Vec<Array>) -> Result<[Array; N], String> {
    inputs.try_into().map_err(|v: Vec<Array>| format!("takes {}, got {}", counted(N, "operand"), v.len()))
}

/// `N` operands and perhaps one more.
fn all_and_optional<const N: usize>(mut inputs: Vec<Array>) -> Result<([Array; N], Option<Array>), String> {
    let last = if inputs.len() > N { inputs.pop() } else { None };
    Ok((all(inputs)?, last))
}

fn one(x: Array) -> Ran {
    Ok(vec![x])
}

/// Runs `$body` with `$T` as `f32` or `f64`; the result is an error for other types.
macro_rules! with_float {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            ::fusionllm_graph::DType::F32 => {
                type $T = f32;
                $body
            }
            ::fusionllm_graph::DType::F64 => {
                type $T = f64;
                $body
            }
            dtype => Err(format!("computes f32 and f64, not {dtype}")),
        }
    };
}

use with_float;

#[cfg(all(test, feature = "conformance"))]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use fusionllm_graph::ops::View;

    use super::*;
    use crate::conformance::cases;

    /// The elements of the first operand that the results show, if all results share its memory.
    fn shown(op: &Op, operands: &[Array], outputs: &[TensorType]) -> Option<View> {
        let results = run(op, operands.to_vec(), outputs).unwrap();
        let memory = |x: &Array| x.memory::<u8>().as_ptr();
        let of_first = |x: &Array| memory(x) == memory(&operands[0]);
        let kind = |x: &Array| match places(x) {
            places if places.iter().collect::<BTreeSet<_>>().len() < operands[0].numel() => View::Part,
            places if places.len() > operands[0].numel() => View::Repeated,
            _ => View::Whole,
        };
        results.iter().map(|x| of_first(x).then(|| kind(x))).reduce(both).flatten()
    }

    /// The places of a tensor's elements in memory.
    fn places(x: &Array) -> Vec<isize> {
        let mut places = vec![x.start as isize];
        for (&size, &stride) in x.shape.iter().zip(&x.strides) {
            places = places.iter().flat_map(|at| (0..size as isize).map(move |i| at + i * stride)).collect();
        }
        places
    }

    /// An operator that shows all elements in some cases is a view of a part if it shows a part in others.
    fn both(a: Option<View>, b: Option<View>) -> Option<View> {
        a.zip(b).map(|(a, b)| if a as u8 > b as u8 { a } else { b })
    }

    /// A plan counts no work for views. An operator is one exactly if its results share memory in every case.
    #[test]
    fn views_are_the_results_that_share_memory() {
        let mut found: BTreeMap<&str, (Option<View>, Option<View>)> = BTreeMap::new();
        for case in cases().unwrap().iter().filter(|case| !case.fails && !case.operands.is_empty()) {
            let operands = case.arrays(DType::F32).into_iter().map(|a| Array::from_host(&a.to_host().unwrap()));
            let operands: Vec<Array> = operands.collect();
            let types: Vec<TensorType> = operands.iter().map(Array::ty).collect();
            let outputs = case.op.infer(&types.iter().collect::<Vec<_>>()).unwrap();
            if types.iter().chain(&outputs).all(|ty| ty.numel() > 0) {
                let view = shown(&case.op, &operands, &outputs);
                let (_, known) = found.entry(case.op.variant()).or_insert((case.op.view(), view));
                *known = both(*known, view);
            }
        }
        for (operator, (declared, found)) in found {
            assert_eq!(declared, found, "{operator}");
        }
    }
}
