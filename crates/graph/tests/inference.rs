//! Shape rules on random operands: they return types or an error, and never panic or overflow.

#![allow(clippy::unwrap_used)]

use fusionllm_graph::ops::*;
use fusionllm_graph::{Builder, DType, Op, TensorType};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

fn size() -> impl Strategy<Value = usize> {
    prop_oneof![
        8 => 0usize..5,
        1 => Just(1 << 31),
        1 => Just(1usize << 62),
        1 => Just(usize::MAX),
        1 => Just(usize::MAX / 2),
    ]
}

fn pair() -> impl Strategy<Value = [usize; 2]> {
    [size(), size()]
}

fn sizes(length: std::ops::Range<usize>) -> impl Strategy<Value = Vec<usize>> {
    proptest::collection::vec(size(), length)
}

fn tensor() -> impl Strategy<Value = TensorType> {
    let dtype = prop_oneof![
        6 => Just(DType::F32),
        2 => Just(DType::F64),
        3 => Just(DType::I64),
        1 => Just(DType::I32),
        2 => Just(DType::Bool),
        1 => Just(DType::F16),
    ];
    (dtype, sizes(0..6)).prop_map(|(dtype, shape)| TensorType::new(dtype, shape))
}

fn number() -> impl Strategy<Value = f64> {
    prop_oneof![Just(0.0), Just(0.5), Just(-3.0), Just(f64::NAN), Just(f64::INFINITY), Just(1e300)]
}

fn conv() -> impl Strategy<Value = Conv2d> {
    (pair(), pair(), pair(), size()).prop_map(|(stride, padding, dilation, groups)| Conv2d {
        stride,
        padding,
        dilation,
        groups,
    })
}

/// Operators with random attributes. Most are invalid.
fn op() -> impl Strategy<Value = Op> {
    let dims = || sizes(0..4);
    let of = any::<bool>;
    let plain = proptest::sample::select(vec![
        Op::Where(Where),
        Matmul.into(),
        Linear.into(),
        BatchNormInputGrad.into(),
        BatchNormWeightGrad.into(),
        SquaredNorm.into(),
        Gelu { approximate: Approximate::Tanh }.into(),
        GeluBackward { approximate: Approximate::None }.into(),
        ThresholdBackward { threshold: 0.0 }.into(),
        CrossEntropy { ignore_index: -100 }.into(),
        CrossEntropyBackward { ignore_index: 3 }.into(),
        DropoutBackward { scale: 2.0 }.into(),
        ScaledDotProductAttention { is_causal: true, scale: 1.0 }.into(),
        ScaledDotProductAttentionBackward { forward: ScaledDotProductAttention { is_causal: false, scale: 1.0 } }
            .into(),
        AdamwStep { beta1: 0.9, beta2: 0.9, eps: 0.0, weight_decay: 0.0 }.into(),
        SgdStep { momentum: 0.9, weight_decay: 0.0, nesterov: true }.into(),
        BatchNorm { momentum: 0.1, eps: 0.0 }.into(),
        Cast { dtype: DType::Bool }.into(),
        Detach.into(),
    ]);
    let elementwise = (0usize..23, number(), of()).prop_flat_map(|(i, scalar, reverse)| {
        let binary = Binary::ALL[i % Binary::ALL.len()];
        let compare = Compare::ALL[i % Compare::ALL.len()];
        proptest::sample::select(vec![
            Op::Unary(Unary::ALL[i]),
            binary.into(),
            compare.into(),
            Logical::ALL[i % 3].into(),
            BinaryScalar { op: binary, scalar, reverse }.into(),
            CompareScalar { op: compare, scalar }.into(),
            Clamp { min: Some(scalar), max: None, open: false }.into(),
            Dropout { p: scalar, stream: 1 }.into(),
        ])
    });
    let by_dim = (size(), size(), of(), of()).prop_flat_map(|(dim, k, a, b)| {
        proptest::sample::select(vec![
            Op::ArgReduce(ArgReduce { largest: a, dim, keepdim: b }),
            CumSum { dim }.into(),
            Cat { dim }.into(),
            IndexSelect { dim }.into(),
            IndexAdd { dim }.into(),
            Gather { dim }.into(),
            ScatterAdd { dim }.into(),
            Scatter { dim }.into(),
            TopK { k, dim, largest: a }.into(),
            Sort { dim, descending: b }.into(),
            Softmax { dim }.into(),
            SoftmaxBackward { dim }.into(),
            LogSoftmax { dim }.into(),
            LogSoftmaxBackward { dim }.into(),
            LayerNorm { dims: dim, eps: 0.0 }.into(),
            LayerNormInputGrad { dims: dim }.into(),
            LayerNormWeightGrad { dims: dim }.into(),
            Embedding { padding_idx: a.then_some(k) }.into(),
            EmbeddingDenseBackward { num_weights: k, padding_idx: b.then_some(dim) }.into(),
            Arange { dtype: DType::I64, start: 0.0, step: 1.0, len: k }.into(),
            Triangle { upper: a, diagonal: k as i64 }.into(),
        ])
    });
    let by_dims = (dims(), tensor(), 0usize..7, of()).prop_flat_map(|(dims, ty, kind, keepdim)| {
        let indexed: Vec<bool> = dims.iter().map(|d| d % 2 == 1).collect();
        proptest::sample::select(vec![
            Op::Reduce(Reduce { kind: ReduceKind::ALL[kind], dims: dims.clone(), keepdim }),
            Reshape { shape: dims.clone() }.into(),
            Permute { dims: dims.clone() }.into(),
            Expand { shape: dims.clone() }.into(),
            Flip { dims: dims.clone() }.into(),
            Split { dim: kind, sizes: dims.clone() }.into(),
            ConstantPad { pads: dims.iter().map(|&d| [d, kind]).collect(), value: 0.0 }.into(),
            Full { ty, value: 1.0 }.into(),
            Index { indexed: indexed.clone() }.into(),
            IndexPut { indexed, accumulate: keepdim }.into(),
        ])
    });
    let slices = (size(), size(), size(), size(), size()).prop_flat_map(|(dim, start, end, step, size)| {
        let slice = Slice { dim, start, end, step };
        proptest::sample::select(vec![Op::Slice(slice.clone()), SliceBackward { slice, size }.into()])
    });
    let windows = (conv(), pair(), pair(), of(), of()).prop_flat_map(|(conv, a, b, c, d)| {
        let Conv2d { stride, padding, dilation, .. } = conv;
        let pool = AvgPool2d { kernel: a, stride, padding, ceil_mode: c, count_include_pad: d };
        proptest::sample::select(vec![
            Op::Conv2d(conv),
            Conv2dInputGrad { conv, input: a }.into(),
            Conv2dWeightGrad { conv, kernel: b }.into(),
            MaxPool2d { kernel: a, stride, padding, dilation, ceil_mode: c }.into(),
            MaxPool2dBackward { input: a }.into(),
            pool.into(),
            AvgPool2dBackward { pool, input: b }.into(),
            AdaptiveAvgPool2d { output: a }.into(),
            AdaptiveAvgPool2dBackward { input: a }.into(),
        ])
    });
    prop_oneof![plain, elementwise, by_dim, by_dims, slices, windows]
}

/// Operands that often match: copies of the first, or types that other operands usually have beside it.
fn operands() -> impl Strategy<Value = Vec<TensorType>> {
    (tensor(), proptest::collection::vec((0u8..6, tensor()), 0..7)).prop_map(|(first, rest)| {
        let mut all = vec![first.clone()];
        for (how, other) in rest {
            all.push(match how {
                0 | 1 => first.clone(),
                2 => TensorType::new(DType::I64, first.shape.clone()),
                3 => TensorType::new(first.dtype, &first.shape[first.rank().saturating_sub(1)..]),
                4 => TensorType::new(first.dtype, first.shape.get(1).into_iter().copied().collect::<Vec<_>>()),
                _ => other,
            });
        }
        all
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 20_000,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(9),
        ..ProptestConfig::default()
    })]

    #[test]
    fn shape_rules_never_panic(op in op(), operands in operands(), count in 0usize..8) {
        let operands = &operands[..count.min(operands.len())];
        let types: Vec<&TensorType> = operands.iter().collect();
        if let Ok(outputs) = op.infer(&types) {
            // Accepted results have a size and a cost. A decomposition has the same results.
            for ty in &outputs {
                prop_assert!(ty.check().is_ok(), "{op:?}: {ty}");
            }
            let cost = op.cost(&types, &outputs.iter().collect::<Vec<_>>());
            prop_assert!(cost.flops >= 0.0 && cost.bytes >= 0.0, "{op:?}: {cost:?}");
            let mut b = Builder::new("decomposed");
            let ids: Vec<_> = operands
                .iter()
                .enumerate()
                .map(|(i, t)| b.input(&format!("x{i}"), t.dtype, t.shape.clone()).unwrap())
                .collect();
            match op.decompose(&mut b, &ids) {
                Ok(Some(results)) => {
                    let made: Vec<&TensorType> = results.iter().map(|v| b.ty(*v)).collect();
                    prop_assert_eq!(made, outputs.iter().collect::<Vec<_>>(), "{:?}", op);
                }
                Ok(None) => {}
                // Intermediate results may be larger than any memory. No other error is valid.
                Err(e) => prop_assert!(e.to_string().contains("larger than any memory"), "{op:?} of {operands:?}: {e}"),
            }
        }
    }
}

/// The test above would pass if all operands were refused. Here most operators must accept some.
#[test]
fn most_operators_accept_some_operands() {
    use proptest::strategy::ValueTree;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut accepted = std::collections::BTreeSet::new();
    for _ in 0..20_000 {
        let op = op().new_tree(&mut runner).unwrap().current();
        let operands = operands().new_tree(&mut runner).unwrap().current();
        for count in 0..=operands.len() {
            let types: Vec<&TensorType> = operands[..count].iter().collect();
            if op.infer(&types).is_ok() {
                accepted.insert(op.variant());
            }
        }
    }
    let never: Vec<&&str> = Op::VARIANTS.iter().filter(|v| !accepted.contains(*v)).collect();
    assert!(never.len() < 25, "never accepted: {never:?}");
}
