use fusionllm_graph::ops::{
    Arange, Cat, ConstantPad, Detach, Expand, Flip, Full, Permute, Reshape, Slice, SliceBackward, Split, Triangle,
};
use fusionllm_graph::{DType, TensorType};

use crate::conformance::case::{Cases, Operand};

/// One operand of each kind of element type.
fn every_kind(c: &Cases, shape: &[usize]) -> [Operand; 4] {
    [c.floats(shape), c.numbers(DType::I64, shape), c.numbers(DType::I32, shape), c.bools(shape)]
}

pub(super) fn cases(c: &mut Cases) -> Result<(), String> {
    for (from, to) in
        [(&[2, 3, 4][..], &[6, 4][..]), (&[], &[1, 1]), (&[1], &[]), (&[0, 3], &[3, 0, 2]), (&[2, 6], &[3, 4])]
    {
        for x in every_kind(c, from) {
            c.add(Reshape { shape: to.to_vec() }, vec![x]);
        }
    }
    for (shape, dims) in [
        (&[2, 3][..], &[1, 0][..]),
        (&[2, 3, 4], &[2, 0, 1]),
        (&[2, 1, 3, 2], &[0, 2, 1, 3]),
        (&[], &[]),
        (&[0, 3], &[1, 0]),
    ] {
        for x in every_kind(c, shape) {
            c.add(Permute { dims: dims.to_vec() }, vec![x]);
        }
    }
    for (from, to) in [
        (&[1, 3][..], &[2, 3][..]),
        (&[3, 1], &[2, 3, 4]),
        (&[], &[2, 2]),
        (&[1], &[0]),
        (&[2, 3], &[2, 3]),
        (&[1, 2, 1], &[3, 2, 5]),
    ] {
        for x in every_kind(c, from) {
            c.add(Expand { shape: to.to_vec() }, vec![x]);
        }
    }
    for x in every_kind(c, &[2, 3]) {
        c.add(Detach, vec![x]).values_only();
    }
    slices(c);
    joins(c);
    for (shape, dims) in [(&[2, 3, 4][..], &[0][..]), (&[2, 3, 4], &[0, 2]), (&[3], &[0]), (&[2], &[]), (&[0, 2], &[1])]
    {
        for x in every_kind(c, shape) {
            c.add(Flip { dims: dims.to_vec() }, vec![x]);
        }
    }
    pads(c);
    sources(c);
    Ok(())
}

fn slices(c: &mut Cases) {
    for (shape, dim, start, end, step) in [
        (&[4, 3][..], 0, 1, 3, 1),
        (&[4, 3], 1, 0, 3, 2),
        (&[2, 7, 2], 1, 1, 7, 3),
        (&[2, 7, 2], 1, 6, 7, 1),
        (&[3], 0, 2, 2, 1),
        (&[2, 5], 1, 0, 5, 1),
        (&[0, 4], 1, 1, 3, 1),
        (&[6], 0, 0, 6, 100),
        (&[2, 3, 4], 0, 1, 2, usize::MAX),
    ] {
        let slice = Slice { dim, start, end, step };
        for x in every_kind(c, shape) {
            c.add(slice.clone(), vec![x]);
        }
        let mut taken = shape.to_vec();
        taken[dim] = (end - start).div_ceil(step);
        c.add(SliceBackward { slice, size: shape[dim] }, vec![c.floats(&taken)]);
    }
}

fn joins(c: &mut Cases) {
    for (shapes, dim) in [
        (&[&[2, 3][..], &[2, 1], &[2, 2]][..], 1),
        (&[&[2, 3], &[1, 3]], 0),
        (&[&[2]], 0),
        (&[&[0, 2], &[3, 2], &[0, 2]], 0),
        (&[&[2, 1, 3], &[2, 4, 3]], 1),
        (&[&[0], &[0]], 0),
    ] {
        for kind in 0..4 {
            let operands = shapes.iter().map(|s| every_kind(c, s)[kind].clone()).collect();
            c.add(Cat { dim }, operands);
        }
    }
    for (shape, dim, sizes) in [
        (&[2, 6][..], 1, &[1, 2, 3][..]),
        (&[4, 3], 0, &[2, 2]),
        (&[3], 0, &[3]),
        (&[2, 3], 1, &[0, 3, 0]),
        (&[2, 0], 1, &[0]),
        (&[2, 3, 4], 2, &[1, 1, 2]),
    ] {
        for x in every_kind(c, shape) {
            c.add(Split { dim, sizes: sizes.to_vec() }, vec![x]);
        }
    }
}

fn pads(c: &mut Cases) {
    for (shape, pads) in [
        (&[2, 3][..], vec![[1, 0], [0, 2]]),
        (&[2, 3], vec![[0, 0], [0, 0]]),
        (&[], vec![]),
        (&[1, 2, 2], vec![[1, 1], [0, 0], [2, 1]]),
        (&[0, 2], vec![[1, 1], [0, 1]]),
    ] {
        for x in every_kind(c, shape) {
            c.add(ConstantPad { pads: pads.clone(), value: 3.0 }, vec![x]);
        }
        c.add(ConstantPad { pads, value: f64::NEG_INFINITY }, vec![c.floats(shape)]).values_only();
    }
    for upper in [false, true] {
        for diagonal in [-2, -1, 0, 1, 5] {
            c.add(Triangle { upper, diagonal }, vec![c.floats(&[3, 4])]);
            c.add(Triangle { upper, diagonal }, vec![c.floats(&[2, 4, 3])]);
            c.add(Triangle { upper, diagonal }, vec![c.floats(&[0, 3])]);
        }
        for x in every_kind(c, &[3, 3]) {
            c.add(Triangle { upper, diagonal: 0 }, vec![x]);
        }
        // NaN times 0 would stay NaN, but elements that are cleared are 0.
        c.add(Triangle { upper, diagonal: 0 }, vec![c.given(&[2, 2], &[f64::NAN; 4])]).values_only();
    }
}

fn sources(c: &mut Cases) {
    for dtype in [DType::F64, DType::F32, DType::I64, DType::I32, DType::Bool, DType::F16, DType::BF16] {
        // Made from nothing, so the result's type is the one the case needs.
        let mut add = |op: fusionllm_graph::Op| {
            let case = c.add(op, vec![]);
            if matches!(dtype, DType::F16 | DType::BF16 | DType::F64 | DType::F32) {
                case.floats = vec![dtype];
            }
        };
        for shape in [&[2, 3][..], &[], &[0], &[1]] {
            for value in [0.0, 1.0, -2.5] {
                add(Full { ty: TensorType::new(dtype, shape), value }.into());
            }
        }
        if dtype.is_float() {
            for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.1] {
                add(Full { ty: TensorType::new(dtype, [2]), value }.into());
            }
            add(Arange { dtype, start: 0.5, step: -0.25, len: 5 }.into());
        }
        if dtype != DType::Bool {
            for (start, step, len) in [(0.0, 1.0, 6), (3.0, -2.0, 4), (5.0, 0.0, 2), (0.0, 1.0, 0)] {
                add(Arange { dtype, start, step, len }.into());
            }
        }
    }
}
