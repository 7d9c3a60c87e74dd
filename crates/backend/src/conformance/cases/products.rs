use fusionllm_graph::ops::{Linear, Matmul, ScaledDotProductAttention, ScaledDotProductAttentionBackward};

use crate::conformance::case::{Case, Cases, Operand, results};

pub(super) fn cases(c: &mut Cases) -> Result<(), String> {
    for (a, b) in [
        (&[2, 3][..], &[3, 4][..]),
        (&[1, 1], &[1, 1]),
        (&[5, 1], &[1, 3]),
        (&[1, 7], &[7, 1]),
        (&[2, 3, 4], &[2, 4, 2]),
        (&[2, 3, 4], &[4, 2]),
        (&[3, 4], &[2, 4, 2]),
        (&[2, 1, 3, 2], &[3, 2, 4]),
        (&[0, 3], &[3, 2]),
        (&[2, 0], &[0, 3]),
        (&[2, 3], &[3, 0]),
        (&[0, 2, 3], &[3, 2]),
        (&[2, 3, 1, 2], &[1, 1, 2, 1]),
    ] {
        c.add(Matmul, vec![c.floats(a), c.floats(b)]);
    }
    c.add(Matmul, vec![c.floats(&[3, 5]), c.floats(&[5, 2])]).half();
    // Sizes beyond one register tile, and not multiples of it.
    c.add(Matmul, vec![c.between(&[37, 65], -1.0, 1.0), c.between(&[65, 29], -1.0, 1.0)]).values_only();
    for (x, o) in [(&[2, 3][..], 4), (&[2, 2, 3], 1), (&[3], 2), (&[0, 3], 2), (&[1, 1], 1), (&[2, 0], 3)] {
        let inner = x[x.len() - 1];
        c.add(Linear, vec![c.floats(x), c.floats(&[o, inner])]);
        c.add(Linear, vec![c.floats(x), c.floats(&[o, inner]), c.floats(&[o])]);
    }
    c.add(Linear, vec![c.floats(&[2, 3]), c.floats(&[4, 3]), c.floats(&[4])]).half();
    attention(c)
}

/// Attention, and its backward operator on the results.
fn both(
    c: &mut Cases,
    op: ScaledDotProductAttention,
    operands: Vec<Operand>,
    gradient: bool,
) -> Result<&mut Case, String> {
    let forward = results(op, &operands.iter().collect::<Vec<_>>())?;
    let g = c.floats(&forward[0].array.ty.shape);
    let backward: Vec<Operand> = [&g, &operands[0], &operands[1], &operands[2], &forward[0], &forward[1].summed()]
        .into_iter()
        .chain(operands.get(3))
        .cloned()
        .collect();
    let case = c.add(op, operands);
    if !gradient {
        case.values_only();
    }
    Ok(c.add(ScaledDotProductAttentionBackward { forward: op }, backward).tied().slack(3.0))
}

fn attention(c: &mut Cases) -> Result<(), String> {
    // q [B, H, L, E], k [B, G, S, E], v [B, G, S, F].
    for ([b, h, g, l, s], [e, f]) in [
        ([2, 2, 2, 3, 3], [4, 4]),
        ([1, 4, 2, 3, 5], [2, 3]),
        ([2, 3, 1, 1, 4], [1, 2]),
        ([1, 1, 1, 1, 1], [1, 1]),
        ([1, 2, 2, 4, 2], [3, 3]),
        ([0, 2, 2, 2, 2], [2, 2]),
        ([1, 2, 1, 0, 2], [2, 2]),
        ([1, 1, 1, 2, 0], [2, 2]),
    ] {
        for is_causal in [false, true] {
            let op = ScaledDotProductAttention { is_causal, scale: 0.6 };
            let qkv = |c: &Cases| vec![c.floats(&[b, h, l, e]), c.floats(&[b, g, s, e]), c.floats(&[b, g, s, f])];
            let operands = qkv(c);
            both(c, op, operands, true)?;
            // An added mask, also a learned one, and one that broadcasts.
            for shape in [&[b, h, l, s][..], &[l, s], &[1, 1, 1, s]] {
                let mut operands = qkv(c);
                operands.push(c.floats(shape));
                both(c, op, operands, true)?;
            }
            // A boolean mask, with the last key open to all so that no row is empty.
            let mut operands = qkv(c);
            let open: Vec<bool> = (0..l * s).map(|i| i % 3 != 1 || i % s.max(1) == 0).collect();
            operands.push(c.given_bools(&[l, s], &open));
            both(c, op, operands, true)?;
        }
    }
    // Rows without a visible key give 0, and no gradient. A mask of -∞ has the same effect.
    let op = ScaledDotProductAttention { is_causal: false, scale: 0.5 };
    let qkv = |c: &Cases| vec![c.floats(&[1, 2, 2, 3]), c.floats(&[1, 2, 3, 3]), c.floats(&[1, 2, 3, 2])];
    let mut operands = qkv(c);
    operands.push(c.given_bools(&[2, 3], &[false, false, false, true, false, true]));
    both(c, op, operands, true)?;
    let mut operands = qkv(c);
    let closed = f64::NEG_INFINITY;
    operands.push(c.given(&[2, 3], &[closed, closed, closed, 0.0, closed, 0.5]));
    both(c, op, operands, false)?;
    // Large scores do not overflow.
    let op = ScaledDotProductAttention { is_causal: true, scale: 100.0 };
    let operands = qkv(c);
    let forward = c.add(op, operands);
    forward.values_only().slack(300.0);
    let op = ScaledDotProductAttention { is_causal: true, scale: 0.5 };
    let operands = vec![c.floats(&[1, 2, 5, 4]), c.floats(&[1, 2, 5, 4]), c.floats(&[1, 2, 5, 4])];
    c.add(op, operands.clone()).half();
    both(c, op, operands, true)?.half();
    // Longer than a block of any tiled kernel.
    let operands = vec![c.floats(&[1, 2, 70, 8]), c.floats(&[1, 2, 70, 8]), c.floats(&[1, 2, 70, 8])];
    both(c, op, operands, false)?;
    Ok(())
}
