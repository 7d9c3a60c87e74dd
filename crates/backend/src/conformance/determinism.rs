use fusionllm_graph::ops::{
    AdamwStep, Binary, Conv2d, Conv2dInputGrad, Conv2dWeightGrad, CrossEntropy, EmbeddingDenseBackward, Gelu,
    LayerNorm, LayerNormWeightGrad, Linear, Matmul, Permute, Reduce, ReduceKind, ScaledDotProductAttention, Softmax,
    SquaredNorm,
};
use fusionllm_graph::ops::{Approximate, BatchNorm, BatchNormWeightGrad};
use fusionllm_graph::{DType, HostTensor, Op, TensorType};

use super::value::same_bits;
use super::{Report, download, run};
use crate::{Backend, Tensor};

/// Runs large operators with one thread, with two threads, and with transposed operands. All runs must give the same
/// bits.
pub fn determinism(backend: &dyn Backend) -> Report {
    let mut report = Report::default();
    for (op, types) in large() {
        let what = format!("{op:?} of {types:?}");
        report.record(what, check(backend, &op, &types));
    }
    report
}

fn large() -> Vec<(Op, Vec<TensorType>)> {
    let f = |shape: &[usize]| TensorType::new(DType::F32, shape);
    let i = |shape: &[usize]| TensorType::new(DType::I64, shape);
    let conv = Conv2d { stride: [2, 2], padding: [1, 1], dilation: [1, 1], groups: 1 };
    let sum = |dims: &[usize]| Reduce { kind: ReduceKind::Sum, dims: dims.to_vec(), keepdim: false };
    let (x, y) = (f(&[4, 16, 33, 32]), f(&[4, 24, 17, 16]));
    let adamw = AdamwStep { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 };
    let attention = ScaledDotProductAttention { is_causal: true, scale: 0.2 };
    vec![
        (Matmul.into(), vec![f(&[193, 300]), f(&[300, 257])]),
        (Matmul.into(), vec![f(&[6, 65, 48]), f(&[6, 48, 64])]),
        (Matmul.into(), vec![f(&[1, 700]), f(&[700, 600])]),
        (Linear.into(), vec![f(&[500, 130]), f(&[257, 130]), f(&[257])]),
        // Above 4 Mi elements, some libraries cut sums by the number of threads.
        (sum(&[0]).into(), vec![f(&[(5 << 20) + 3])]),
        (SquaredNorm.into(), vec![f(&[(5 << 20) + 3])]),
        (sum(&[0, 1]).into(), vec![f(&[2100, 2100])]),
        (sum(&[0]).into(), vec![f(&[3000, 300])]),
        (sum(&[1]).into(), vec![f(&[300, 3000])]),
        (sum(&[0, 2, 3]).into(), vec![f(&[8, 16, 40, 40])]),
        (Binary::Add.into(), vec![f(&[600, 1000]), f(&[1000])]),
        (Gelu { approximate: Approximate::Tanh }.into(), vec![f(&[600, 1000])]),
        (Softmax { dim: 1 }.into(), vec![f(&[300, 1001])]),
        (LayerNorm { dims: 1, eps: 1e-5 }.into(), vec![f(&[600, 300]), f(&[300]), f(&[300])]),
        (LayerNormWeightGrad { dims: 1 }.into(), vec![f(&[600, 300]), f(&[600, 300]), f(&[600, 1]), f(&[600, 1])]),
        (BatchNorm { momentum: 0.1, eps: 1e-5 }.into(), vec![x.clone(), f(&[16]), f(&[16]), f(&[16]), f(&[16])]),
        (BatchNormWeightGrad.into(), vec![x.clone(), x.clone(), f(&[16]), f(&[16])]),
        (conv.into(), vec![x.clone(), f(&[24, 16, 3, 3]), f(&[24])]),
        (Conv2dInputGrad { conv, input: [33, 32] }.into(), vec![y.clone(), f(&[24, 16, 3, 3])]),
        (Conv2dWeightGrad { conv, kernel: [3, 3] }.into(), vec![y, x]),
        (attention.into(), vec![f(&[2, 4, 65, 32]), f(&[2, 4, 65, 32]), f(&[2, 4, 65, 32])]),
        (EmbeddingDenseBackward { num_weights: 50, padding_idx: None }.into(), vec![f(&[2000, 64]), i(&[2000])]),
        (CrossEntropy { ignore_index: -100 }.into(), vec![f(&[300, 1001]), i(&[300])]),
        (
            adamw.into(),
            vec![f(&[300_001]), f(&[300_001]), f(&[300_001]), f(&[300_001]), TensorType::new(DType::F64, [4])],
        ),
    ]
}

/// Random numbers: floats in [0.1, 1.1), which are also valid variances, and small indices.
fn operand(ty: &TensorType, salt: usize) -> Result<HostTensor, String> {
    let bits =
        |i: usize| (i.wrapping_add(salt) as u32).wrapping_mul(2_654_435_761).rotate_left(13).wrapping_mul(0x9E37_79B1);
    let n = ty.numel();
    match ty.dtype {
        DType::I64 => {
            HostTensor::from_i64(ty.shape.clone(), &(0..n).map(|i| i64::from(bits(i) % 50)).collect::<Vec<_>>())
        }
        dtype => {
            let values: Vec<f32> = (0..n).map(|i| bits(i) as f32 / u32::MAX as f32 + 0.1).collect();
            HostTensor::from_f32(ty.shape.clone(), &values).and_then(|t| t.cast(dtype))
        }
    }
    .map_err(|e| e.to_string())
}

fn check(backend: &dyn Backend, op: &Op, types: &[TensorType]) -> Result<(), String> {
    let hosts = types.iter().enumerate().map(|(i, ty)| operand(ty, i << 20)).collect::<Result<Vec<_>, _>>()?;
    let upload = |h: &HostTensor| backend.upload(h).map_err(|e| e.to_string());
    let compute = |operands: Vec<Tensor>| -> Result<Vec<HostTensor>, String> {
        run(backend, op, operands)?.iter().map(|t| download(backend, t)).collect()
    };
    let under = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().map_err(|e| e.to_string())?;
        let operands = hosts.iter().map(upload).collect::<Result<Vec<_>, _>>()?;
        pool.install(|| compute(operands))
    };
    let one = under(1)?;
    for (a, b) in one.iter().zip(&under(2)?) {
        same_bits(a, b).map_err(|e| format!("with one and two threads: {e}"))?;
    }
    // These are the same operands as transposed views of transposed tensors.
    let transposed = hosts
        .iter()
        .map(|h| {
            let reverse = Op::from(Permute { dims: (0..h.shape().len()).rev().collect() });
            let there = run(backend, &reverse, vec![upload(h)?])?.remove(0);
            let host = download(backend, &there)?;
            Ok(run(backend, &reverse, vec![upload(&host)?])?.remove(0))
        })
        .collect::<Result<Vec<Tensor>, String>>()?;
    for (a, b) in one.iter().zip(&compute(transposed)?) {
        same_bits(a, b).map_err(|e| format!("with contiguous and transposed operands: {e}"))?;
    }
    Ok(())
}
