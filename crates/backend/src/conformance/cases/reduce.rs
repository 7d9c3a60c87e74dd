use fusionllm_graph::DType;
use fusionllm_graph::ops::{
    ArgReduce, CumSum, LogSoftmax, LogSoftmaxBackward, Reduce, ReduceKind, Softmax, SoftmaxBackward,
};

use crate::conformance::case::{Cases, results};

/// Shapes with the dimensions to reduce.
const REDUCED: &[(&[usize], &[usize])] = &[
    (&[2, 3, 4], &[0, 1, 2]),
    (&[2, 3, 4], &[1]),
    (&[2, 3, 4], &[0, 2]),
    (&[2, 3, 4], &[2]),
    (&[2, 3, 4], &[0]),
    (&[2, 1, 3], &[1]),
    (&[5], &[0]),
    (&[], &[]),
    (&[2, 3], &[]),
    (&[0, 3], &[1]),
    (&[2, 3, 2, 2, 2], &[1, 3]),
];

pub(super) fn cases(c: &mut Cases) -> Result<(), String> {
    use ReduceKind::{All, Amax, Amin, Any, Mean, Sum};
    for kind in ReduceKind::ALL {
        let extremum = matches!(kind, Amax | Amin);
        for &(shape, dims) in REDUCED {
            for keepdim in [false, true] {
                let op = Reduce { kind, dims: dims.to_vec(), keepdim };
                if matches!(kind, Any | All) {
                    c.add(op, vec![c.bools(shape)]);
                } else {
                    c.add(op, vec![if extremum { c.distinct(shape) } else { c.floats(shape) }]);
                }
            }
        }
        if !extremum {
            // An empty sum is 0, an empty product 1, an empty mean NaN.
            let op = Reduce { kind, dims: vec![0], keepdim: false };
            match kind {
                Any | All => c.add(op, vec![c.bools(&[0, 3])]),
                _ => c.add(op, vec![c.floats(&[0, 3])]),
            };
        }
        if !matches!(kind, Mean | Any | All) {
            for dtype in [DType::I64, DType::I32] {
                let op = Reduce { kind, dims: vec![1], keepdim: false };
                c.add(op, vec![c.numbers(dtype, &[3, 4, 2])]);
            }
        }
    }
    for kind in [Any, All] {
        for value in [true, false] {
            let x = c.given_bools(&[2, 3], &[value; 6]);
            c.add(Reduce { kind, dims: vec![0, 1], keepdim: false }, vec![x]);
        }
    }
    c.add(Reduce { kind: Sum, dims: vec![0, 1], keepdim: false }, vec![c.floats(&[5, 7])]).half();
    c.add(Reduce { kind: Mean, dims: vec![1], keepdim: true }, vec![c.floats(&[5, 7])]).half();
    // Longer than any vector register or unrolled loop, and odd.
    for (shape, dims) in [(&[3, 1037][..], vec![1]), (&[1037, 3], vec![0]), (&[7, 11, 13], vec![0, 2])] {
        for kind in [Sum, Mean, Amax] {
            let op = Reduce { kind, dims: dims.clone(), keepdim: false };
            c.add(op, vec![c.between(shape, -1.0, 1.0)]).values_only().slack(20.0);
        }
    }
    let nan = f64::NAN;
    for kind in [Sum, Amax, Amin] {
        let x = c.given(&[3, 2], &[1.0, nan, nan, -1.0, f64::INFINITY, 2.0]);
        c.add(Reduce { kind, dims: vec![1], keepdim: false }, vec![x]).values_only();
    }
    // Ties share the gradient: finite differences see one-sided slopes there, so only the values are compared.
    c.add(Reduce { kind: Amax, dims: vec![0], keepdim: false }, vec![c.given(&[4], &[1.0, 3.0, 3.0, 2.0])])
        .values_only();
    // The derivative of a product is the product of the others, with one zero and with two.
    let zeros = c.given(&[4, 3], &[2.0, 0.0, 3.0, 0.0, 0.0, 2.0, 1.0, 2.0, -3.0, 0.0, 0.0, 0.0]);
    for dims in [vec![0], vec![1], vec![0, 1]] {
        c.add(Reduce { kind: ReduceKind::Prod, dims, keepdim: false }, vec![zeros.clone()]);
    }
    let infinite = c.given(&[2, 2], &[f64::NEG_INFINITY; 4]);
    c.add(Reduce { kind: Amax, dims: vec![1], keepdim: true }, vec![infinite]).values_only();
    arguments(c);
    for (shape, dim) in [(&[2, 3, 4][..], 0), (&[2, 3, 4], 1), (&[2, 3, 4], 2), (&[1], 0), (&[2, 0], 1), (&[0, 2], 1)] {
        c.add(CumSum { dim }, vec![c.floats(shape)]);
    }
    c.add(CumSum { dim: 1 }, vec![c.numbers(DType::I64, &[2, 5])]);
    c.add(CumSum { dim: 0 }, vec![c.numbers(DType::I32, &[4])]);
    softmax(c)
}

fn arguments(c: &mut Cases) {
    for largest in [true, false] {
        for keepdim in [false, true] {
            for (shape, dim) in [(&[2, 3, 4][..], 0), (&[2, 3, 4], 1), (&[2, 3, 4], 2), (&[1], 0), (&[0, 2], 1)] {
                c.add(ArgReduce { largest, dim, keepdim }, vec![c.distinct(shape)]);
            }
        }
        let op = ArgReduce { largest, dim: 1, keepdim: false };
        // Of equal elements, the first one counts.
        c.add(op.clone(), vec![c.given(&[2, 5], &[0.0, 2.0, -1.0, 2.0, -1.0, 1.0, 1.0, 1.0, 1.0, 1.0])]);
        c.add(op.clone(), vec![c.numbers(DType::I64, &[3, 6])]);
        c.add(op, vec![c.numbers(DType::I32, &[3, 6])]);
    }
}

fn softmax(c: &mut Cases) -> Result<(), String> {
    for (shape, dim) in
        [(&[2, 3, 4][..], 2), (&[2, 3, 4], 0), (&[2, 3, 4], 1), (&[1], 0), (&[3, 1], 1), (&[0, 3], 1), (&[2, 0], 1)]
    {
        let forward = c.floats(shape);
        let (y, log_y) = (results(Softmax { dim }, &[&forward])?, results(LogSoftmax { dim }, &[&forward])?);
        for half in [false, true] {
            let (a, b) = (Softmax { dim }, LogSoftmax { dim });
            if half && dim == 2 {
                c.add(a, vec![forward.clone()]).half();
                c.add(b, vec![forward.clone()]).half();
            } else if !half && dim != 2 {
                c.add(a, vec![forward.clone()]);
                c.add(b, vec![forward.clone()]);
            }
        }
        c.add(SoftmaxBackward { dim }, vec![c.floats(shape), y[0].clone()]).tied();
        c.add(LogSoftmaxBackward { dim }, vec![c.floats(shape), log_y[0].clone()]).tied();
    }
    // Large and infinite logits do not overflow.
    let large = c.given(&[2, 3], &[1000.0, 999.0, -1000.0, f64::NEG_INFINITY, 0.0, 1.0]);
    c.add(Softmax { dim: 1 }, vec![large.clone()]).values_only();
    c.add(LogSoftmax { dim: 1 }, vec![large]).values_only();
    c.add(Softmax { dim: 1 }, vec![c.floats(&[3, 517])]).values_only();
    c.add(LogSoftmax { dim: 1 }, vec![c.floats(&[3, 517])]).values_only();
    let empty = c.given(&[2, 2], &[f64::NEG_INFINITY, f64::NEG_INFINITY, f64::NAN, 0.0]);
    c.add(Softmax { dim: 1 }, vec![empty]).values_only();
    Ok(())
}
