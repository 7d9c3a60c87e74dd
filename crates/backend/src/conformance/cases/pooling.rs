use fusionllm_graph::ops::{
    AdaptiveAvgPool2d, AdaptiveAvgPool2dBackward, AvgPool2d, AvgPool2dBackward, MaxPool2d, MaxPool2dBackward,
};

use crate::conformance::case::{Cases, results};

/// Operand, window, stride, padding, dilation (of maxima), ceil mode.
type Shape = ([usize; 4], [usize; 2], [usize; 2], [usize; 2], [usize; 2], bool);

const SHAPES: &[Shape] = &[
    ([2, 2, 4, 6], [2, 2], [2, 2], [0, 0], [1, 1], false),
    ([1, 2, 5, 7], [3, 3], [2, 2], [1, 1], [1, 1], false),
    ([1, 1, 5, 6], [2, 3], [1, 2], [1, 0], [1, 1], false),
    ([1, 2, 5, 6], [2, 2], [2, 2], [0, 0], [1, 1], true),
    ([1, 1, 6, 5], [3, 2], [2, 3], [1, 1], [1, 1], true),
    ([1, 1, 7, 7], [2, 2], [2, 1], [0, 1], [2, 3], false),
    ([1, 1, 1, 1], [1, 1], [1, 1], [0, 0], [1, 1], false),
    ([2, 1, 1, 3], [1, 3], [1, 1], [0, 1], [1, 1], false),
    ([0, 2, 4, 4], [2, 2], [2, 2], [0, 0], [1, 1], false),
    ([2, 0, 4, 4], [2, 2], [2, 2], [0, 0], [1, 1], false),
    ([1, 1, 7, 7], [2, 2], [3, 3], [0, 0], [1, 1], false),
];

pub(super) fn cases(c: &mut Cases) -> Result<(), String> {
    for &(x, kernel, stride, padding, dilation, ceil_mode) in SHAPES {
        let input = [x[2], x[3]];
        let max = MaxPool2d { kernel, stride, padding, dilation, ceil_mode };
        let operand = c.distinct(&x);
        let forward = results(max, &[&operand])?;
        c.add(max, vec![operand]);
        let g = c.floats(&forward[0].array.ty.shape);
        c.add(MaxPool2dBackward { input }, vec![g, forward[1].clone()]).tied();
        for count_include_pad in [true, false] {
            let pool = AvgPool2d { kernel, stride, padding, ceil_mode, count_include_pad };
            let operand = c.floats(&x);
            let forward = results(pool, &[&operand])?;
            c.add(pool, vec![operand]);
            let g = c.floats(&forward[0].array.ty.shape);
            c.add(AvgPool2dBackward { pool, input }, vec![g]);
        }
    }
    let window = MaxPool2d { kernel: [2, 2], stride: [1, 1], padding: [1, 1], dilation: [1, 1], ceil_mode: false };
    // The first of equals, never the padding even where all elements are below 0, and NaN over all.
    for values in [[1.0; 4], [-5.0; 4], [f64::NEG_INFINITY; 4], [1.0, f64::NAN, 2.0, 3.0]] {
        c.add(window, vec![c.given(&[1, 1, 2, 2], &values)]).values_only();
    }
    for bad in [4, -1] {
        let op = MaxPool2dBackward { input: [2, 2] };
        c.add(op, vec![c.floats(&[1, 1, 1, 2]), c.ints(&[1, 1, 1, 2], &[0, bad])]).fails();
    }
    for (x, output) in [
        ([2, 2, 4, 4], [1, 1]),
        ([1, 2, 5, 7], [2, 3]),
        ([1, 1, 3, 2], [3, 2]),
        ([1, 1, 2, 3], [4, 5]),
        ([1, 1, 1, 1], [1, 1]),
        ([0, 2, 3, 3], [2, 2]),
        ([1, 2, 3, 3], [0, 2]),
    ] {
        c.add(AdaptiveAvgPool2d { output }, vec![c.floats(&x)]);
        let g = c.floats(&[x[0], x[1], output[0], output[1]]);
        c.add(AdaptiveAvgPool2dBackward { input: [x[2], x[3]] }, vec![g]);
    }
    Ok(())
}
