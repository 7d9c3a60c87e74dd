use fusionllm_graph::ops::{Conv2d, Conv2dInputGrad, Conv2dWeightGrad};

use crate::conformance::case::Cases;

struct Shape {
    x: [usize; 4],
    /// Channels out, kernel height and width.
    o: usize,
    kernel: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
    groups: usize,
}

/// Stride 1, no padding, one group.
const PLAIN: Shape =
    Shape { x: [2, 3, 5, 4], o: 4, kernel: [3, 3], stride: [1, 1], padding: [0, 0], dilation: [1, 1], groups: 1 };

pub(super) fn cases(c: &mut Cases) -> Result<(), String> {
    for s in [
        PLAIN,
        Shape { padding: [1, 1], ..PLAIN },
        // ResNet's: stride 2 of odd and even sizes, where the input gradient needs output padding.
        Shape { stride: [2, 2], padding: [1, 1], ..PLAIN },
        Shape { x: [1, 2, 6, 6], stride: [2, 2], padding: [1, 1], ..PLAIN },
        Shape { x: [1, 2, 9, 8], kernel: [7, 7], stride: [2, 2], padding: [3, 3], o: 2, ..PLAIN },
        Shape { kernel: [1, 1], ..PLAIN },
        Shape { kernel: [1, 1], stride: [2, 2], ..PLAIN },
        // A stride that leaves rows and columns no window reaches.
        Shape { x: [1, 1, 8, 7], kernel: [2, 2], stride: [3, 3], ..PLAIN },
        Shape { kernel: [2, 3], stride: [2, 1], padding: [0, 2], ..PLAIN },
        Shape { x: [1, 2, 7, 6], dilation: [2, 2], padding: [2, 1], ..PLAIN },
        Shape { x: [1, 4, 4, 4], groups: 2, ..PLAIN },
        Shape { x: [2, 4, 4, 4], groups: 4, padding: [1, 1], ..PLAIN },
        Shape { x: [1, 4, 6, 7], groups: 2, dilation: [1, 2], stride: [2, 1], padding: [1, 0], ..PLAIN },
        Shape { x: [1, 1, 1, 1], kernel: [1, 1], o: 1, ..PLAIN },
        Shape { x: [1, 2, 1, 5], kernel: [1, 3], padding: [0, 1], ..PLAIN },
        Shape { x: [1, 1, 2, 2], kernel: [3, 3], padding: [2, 2], o: 1, ..PLAIN },
        Shape { x: [0, 3, 4, 4], ..PLAIN },
        // Padding alone: the kernel is larger than the operand.
        Shape { x: [1, 2, 0, 3], kernel: [2, 2], padding: [1, 1], ..PLAIN },
    ] {
        let Shape { x, o, kernel, stride, padding, dilation, groups } = s;
        let conv = Conv2d { stride, padding, dilation, groups };
        let w = [o, x[1] / groups, kernel[0], kernel[1]];
        c.add(conv, vec![c.floats(&x), c.floats(&w)]).slack(3.0);
        c.add(conv, vec![c.floats(&x), c.floats(&w), c.floats(&[o])]).slack(3.0);
        let y = [x[0], o, conv.output_size(0, x[2], kernel[0])?, conv.output_size(1, x[3], kernel[1])?];
        c.add(Conv2dInputGrad { conv, input: [x[2], x[3]] }, vec![c.floats(&y), c.floats(&w)]).slack(3.0);
        c.add(Conv2dWeightGrad { conv, kernel }, vec![c.floats(&y), c.floats(&x)]).slack(5.0);
    }
    let (conv, [x, w, y]) = (
        Conv2d { stride: [1, 1], padding: [0, 0], dilation: [1, 1], groups: 1 },
        [[2, 3, 5, 4], [4, 3, 3, 3], [2, 4, 3, 2]],
    );
    c.add(conv, vec![c.floats(&x), c.floats(&w)]).half().slack(3.0);
    c.add(Conv2dInputGrad { conv, input: [5, 4] }, vec![c.floats(&y), c.floats(&w)]).half().slack(3.0);
    c.add(Conv2dWeightGrad { conv, kernel: [3, 3] }, vec![c.floats(&y), c.floats(&x)]).half().slack(5.0);
    Ok(())
}
