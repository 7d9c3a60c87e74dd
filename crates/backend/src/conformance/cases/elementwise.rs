use fusionllm_graph::DType;
use fusionllm_graph::ops::{
    Approximate, Binary, BinaryScalar, Cast, Clamp, Compare, CompareScalar, Gelu, GeluBackward, Logical,
    ThresholdBackward, Unary, Where,
};

use crate::conformance::case::{Cases, Operand};

/// Pairs of shapes that broadcast.
const BROADCAST: &[(&[usize], &[usize])] = &[
    (&[2, 3], &[2, 3]),
    (&[], &[]),
    (&[3, 1, 2], &[4, 1]),
    (&[2, 3], &[]),
    (&[1], &[5]),
    (&[2, 1, 3], &[3]),
    (&[0, 3], &[1, 3]),
    (&[2, 1], &[1, 0]),
];

pub(super) fn cases(c: &mut Cases) -> Result<(), String> {
    unary(c);
    binary(c);
    logic(c);
    casts(c);
    gelu(c);
    Ok(())
}

fn unary(c: &mut Cases) {
    for op in Unary::ALL {
        if op == Unary::LogicalNot {
            for shape in [&[2, 3][..], &[], &[0]] {
                c.add(op, vec![c.bools(shape)]);
            }
            continue;
        }
        for shape in [&[2, 3, 4][..], &[], &[1], &[0, 2]] {
            let x = match op {
                Unary::Log | Unary::Sqrt | Unary::Rsqrt => c.between(shape, 0.2, 5.0),
                Unary::Log1p => c.between(shape, -0.8, 5.0),
                _ => c.floats(shape),
            };
            let case = c.add(op, vec![x]);
            if shape.len() == 3 && op != Unary::Erf {
                case.half();
            }
        }
        if matches!(op, Unary::Neg | Unary::Abs | Unary::Sign) {
            for dtype in [DType::I64, DType::I32] {
                c.add(op, vec![c.numbers(dtype, &[3, 2])]);
            }
        }
    }
    let inf = f64::INFINITY;
    let extremes = [0.0, -0.0, inf, -inf, f64::NAN, 40.0, -40.0];
    use Unary::{Abs, Erf, Exp, Expm1, Log, Neg, Reciprocal, Relu, Rsqrt, Sigmoid, Silu, Softplus, Sqrt, Tanh};
    for op in [Neg, Abs, Exp, Expm1, Log, Sqrt, Rsqrt, Reciprocal, Tanh, Sigmoid, Erf, Relu, Softplus] {
        c.add(op, vec![c.given(&[7], &extremes)]).values_only();
    }
    c.add(Silu, vec![c.given(&[5], &[0.0, inf, f64::NAN, 40.0, -40.0])]).values_only();
    // Far out the functions are flat, and close to 0 nothing may be lost.
    for op in [Tanh, Sigmoid, Silu, Softplus, Erf, Expm1, Unary::Log1p] {
        c.add(op, vec![c.given(&[6], &[1e-6, -1e-6, 12.0, -0.999, 30.0, 8.5])]).values_only();
    }
    let halves = [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.0, 7.0];
    for op in [Unary::Round, Unary::Floor, Unary::Ceil, Unary::Trunc] {
        c.add(op, vec![c.given(&[8], &halves)]).values_only();
    }
}

/// Operands for `op` that stay away from its poles and jumps.
fn pair(c: &Cases, op: Binary, a: &[usize], b: &[usize]) -> [Operand; 2] {
    match op {
        Binary::Pow => [c.between(a, 0.3, 2.0), c.between(b, -2.0, 2.0)],
        Binary::Maximum | Binary::Minimum => [c.floats(a), c.between(b, -0.09, 0.09)],
        // Quotients between 1.1 and 1.9, of either sign.
        Binary::Fmod | Binary::Remainder | Binary::FloorDivide => {
            let sign = |o: Operand, c: &Cases| {
                let flip = c.between(a, -1.0, 1.0);
                match (o.array.floats(), flip.array.floats()) {
                    (Ok(v), Ok(f)) => c.given(a, &v.iter().zip(f).map(|(v, f)| v * f.signum()).collect::<Vec<_>>()),
                    _ => o,
                }
            };
            [sign(c.between(a, 2.3, 3.7), c), c.between(b, 2.0, 2.05)]
        }
        _ => [c.floats(a), c.floats(b)],
    }
}

fn binary(c: &mut Cases) {
    for op in Binary::ALL {
        for &(a, b) in BROADCAST {
            let [x, y] = pair(c, op, a, b);
            let case = c.add(op, vec![x, y]);
            if a == b && !a.is_empty() {
                case.half();
            }
            let [y, x] = pair(c, op, b, a);
            c.add(op, vec![y, x]);
        }
        let [x, _] = pair(c, op, &[2, 3], &[]);
        c.add(BinaryScalar { op, scalar: 2.02, reverse: false }, vec![x]);
        let [_, x] = pair(c, op, &[], &[2, 3]);
        c.add(BinaryScalar { op, scalar: 3.1, reverse: true }, vec![x]);
        let [x, _] = pair(c, op, &[0], &[]);
        c.add(BinaryScalar { op, scalar: 2.02, reverse: false }, vec![x]);
        let [x, _] = pair(c, op, &[], &[]);
        c.add(BinaryScalar { op, scalar: 2.02, reverse: true }, vec![x]);
        if !matches!(op, Binary::Div | Binary::Pow) {
            for dtype in [DType::I64, DType::I32] {
                c.add(op, vec![c.numbers(dtype, &[4, 3]), c.numbers(dtype, &[3])]);
                c.add(op, vec![c.numbers(dtype, &[]), c.numbers(dtype, &[2, 2])]);
                for reverse in [false, true] {
                    c.add(BinaryScalar { op, scalar: -3.0, reverse }, vec![c.numbers(dtype, &[7])]);
                }
            }
        }
    }
    let nan = f64::NAN;
    for op in [Binary::Maximum, Binary::Minimum] {
        let (x, y) = (c.given(&[4], &[nan, 1.0, nan, 2.0]), c.given(&[4], &[1.0, nan, nan, 2.0]));
        c.add(op, vec![x, y]).values_only();
        c.add(BinaryScalar { op, scalar: 1.0, reverse: false }, vec![c.given(&[3], &[nan, 0.5, 2.0])]).values_only();
    }
    for op in [Binary::Fmod, Binary::Remainder, Binary::FloorDivide] {
        let (x, y) = (c.ints(&[3], &[4, -7, 5]), c.ints(&[3], &[2, 0, 3]));
        c.add(op, vec![x, y]).fails();
        c.add(BinaryScalar { op, scalar: 7.0, reverse: true }, vec![c.ints(&[2], &[3, 0])]).fails();
        // All four pairs of signs, and exact quotients.
        let (x, y) = (c.ints(&[8], &[7, -7, 7, -7, 6, -6, 6, -6]), c.ints(&[8], &[3, 3, -3, -3, 3, 3, -3, -3]));
        c.add(op, vec![x, y]);
        let (x, y) = (c.given(&[4], &[7.5, -7.5, 7.5, -7.5]), c.given(&[4], &[2.0, 2.0, -2.0, -2.0]));
        c.add(op, vec![x, y]);
    }
    // Integers beyond what f64 or f32 hold exactly.
    let large = [(1 << 53) + 1, -(1 << 60) - 3, (1 << 24) + 1];
    for op in [Binary::Add, Binary::Sub, Binary::Maximum] {
        let (x, y) = (c.ints(&[3], &large), c.ints(&[3], &[2, 1, 0]));
        c.add(op, vec![x, y]);
    }
    // Powers of integers have a derivative at negative bases and at 0 too.
    for scalar in [2.0, 3.0, 1.0, 0.0] {
        let x = c.given(&[5], &[-1.5, -0.5, 0.0, 0.5, 2.0]);
        c.add(BinaryScalar { op: Binary::Pow, scalar, reverse: false }, vec![x]);
    }
    c.add(BinaryScalar { op: Binary::Pow, scalar: 0.5, reverse: false }, vec![c.between(&[4], 0.2, 3.0)]);
    c.add(BinaryScalar { op: Binary::Pow, scalar: -1.5, reverse: false }, vec![c.between(&[4], 0.2, 3.0)]);
}

fn logic(c: &mut Cases) {
    for op in Compare::ALL {
        for &(a, b) in BROADCAST {
            c.add(op, vec![c.floats(a), c.floats(b)]);
        }
        let (x, y) = (c.given(&[3, 1], &[1.0, 2.0, f64::NAN]), c.given(&[3], &[1.0, 2.0, f64::NAN]));
        c.add(op, vec![x, y]).values_only();
        c.add(op, vec![c.indices(&[3, 4], 3), c.indices(&[4], 3)]);
        c.add(op, vec![c.numbers(DType::I32, &[9]), c.numbers(DType::I32, &[])]);
        c.add(op, vec![c.bools(&[2, 3]), c.bools(&[3])]);
        let x = c.given(&[5], &[1.0, -1.0, 0.1, f64::NAN, f64::INFINITY]);
        c.add(CompareScalar { op, scalar: 1.0 }, vec![x]).values_only();
        // 0.1 is another number in each float type. The operand's number counts.
        c.add(CompareScalar { op, scalar: 0.1 }, vec![c.given(&[2], &[0.1, 0.2])]).values_only();
        c.add(CompareScalar { op, scalar: f64::NEG_INFINITY }, vec![c.given(&[2], &[f64::NEG_INFINITY, 0.0])])
            .values_only();
        c.add(CompareScalar { op, scalar: 2.0 }, vec![c.indices(&[2, 3], 4)]);
        c.add(CompareScalar { op, scalar: 2.0 }, vec![c.floats(&[0, 3])]);
        c.add(CompareScalar { op, scalar: 2.0 }, vec![c.floats(&[])]);
        c.add(op, vec![c.ints(&[2], &[(1 << 53) + 1, 5]), c.ints(&[2], &[1 << 53, 5])]);
    }
    for op in Logical::ALL {
        for &(a, b) in BROADCAST {
            c.add(op, vec![c.bools(a), c.bools(b)]);
        }
    }
    for shapes in [
        [&[2, 3][..], &[2, 3], &[2, 3]],
        [&[2, 1], &[3], &[]],
        [&[], &[2, 2], &[2, 2]],
        [&[4, 1, 2], &[3, 1], &[1, 1, 1]],
        [&[3], &[0, 3], &[1]],
    ] {
        c.add(Where, vec![c.bools(shapes[0]), c.floats(shapes[1]), c.floats(shapes[2])]);
    }
    c.add(Where, vec![c.bools(&[2, 3]), c.numbers(DType::I64, &[3]), c.numbers(DType::I64, &[2, 1])]);
    c.add(Where, vec![c.bools(&[2, 3]), c.bools(&[3]), c.bools(&[2, 1])]);
    // Elements that are not chosen do not matter, not even NaN.
    let (chosen, other) = (c.given(&[3], &[1.0, f64::NAN, 3.0]), c.given(&[3], &[f64::NAN, 2.0, f64::INFINITY]));
    c.add(Where, vec![c.given_bools(&[3], &[true, false, true]), chosen, other]).values_only();
    for (min, max) in [(Some(-0.7), Some(0.9)), (Some(0.05), None), (None, Some(0.05))] {
        for shape in [&[3, 4][..], &[], &[0]] {
            c.add(Clamp { min, max, open: shape.is_empty() }, vec![c.floats(shape)]);
        }
        c.add(
            Clamp {
                min: min.map(|m: f64| (4.0 * m).round()),
                max: None.or(max.map(|m: f64| (4.0 * m).round())),
                open: false,
            },
            vec![c.numbers(DType::I64, &[6])],
        );
        c.add(Clamp { min, max, open: false }, vec![c.given(&[3], &[f64::NAN, f64::INFINITY, f64::NEG_INFINITY])])
            .values_only();
    }
}

fn casts(c: &mut Cases) {
    let all = [DType::F64, DType::F32, DType::I64, DType::I32, DType::Bool];
    for dtype in all {
        // Conversions round, so the step and the operands are such that f32 holds exactly.
        c.add(Cast { dtype }, vec![c.given(&[2, 3], &[0.0, 1.875, -1.875, 0.5, 3.0, -0.25])]).step(0.125);
        c.add(Cast { dtype }, vec![c.given(&[], &[-2.75])]).step(0.125);
        c.add(Cast { dtype }, vec![c.given(&[2], &[0.1, 1e-3])]).values_only();
        c.add(Cast { dtype }, vec![c.floats(&[0, 2])]);
        c.add(Cast { dtype }, vec![c.ints(&[4], &[0, 1, -3, 1000])]);
        c.add(Cast { dtype }, vec![c.numbers(DType::I32, &[3])]);
        c.add(Cast { dtype }, vec![c.bools(&[5])]);
    }
    for dtype in [DType::F16, DType::BF16] {
        let case = c.add(Cast { dtype }, vec![c.floats(&[5])]);
        // Only where half precision is: the case runs in the half types alone.
        case.floats = vec![dtype];
        case.values_only();
    }
}

fn gelu(c: &mut Cases) {
    for approximate in [Approximate::None, Approximate::Tanh] {
        for shape in [&[3, 5][..], &[], &[1], &[0, 4]] {
            let case = c.add(Gelu { approximate }, vec![c.floats(shape)]);
            if shape.len() == 2 && shape[0] > 0 {
                case.half();
            }
            c.add(GeluBackward { approximate }, vec![c.floats(shape), c.floats(shape)]);
        }
        c.add(Gelu { approximate }, vec![c.given(&[5], &[0.0, 9.0, -9.0, 1e-4, -3.5])]);
        let (g, x) = (c.floats(&[5]), c.given(&[5], &[0.0, 9.0, -9.0, 1e-4, -3.5]));
        c.add(GeluBackward { approximate }, vec![g, x]);
    }
    for threshold in [0.0, 0.5] {
        for shape in [&[3, 5][..], &[], &[0]] {
            c.add(ThresholdBackward { threshold }, vec![c.floats(shape), c.floats(shape)]);
        }
        let (g, x) = (c.given(&[3], &[1.0, f64::NAN, f64::INFINITY]), c.given(&[3], &[threshold, -1.0, -1.0]));
        c.add(ThresholdBackward { threshold }, vec![g, x]);
    }
}
