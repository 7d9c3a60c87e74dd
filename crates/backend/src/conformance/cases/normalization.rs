use fusionllm_graph::ops::{
    BatchNorm, BatchNormInputGrad, BatchNormWeightGrad, LayerNorm, LayerNormInputGrad, LayerNormWeightGrad,
};

use crate::conformance::case::{Cases, results};

pub(super) fn cases(c: &mut Cases) -> Result<(), String> {
    for (shape, dims) in [
        (&[3, 5][..], 1),
        (&[2, 3, 4], 1),
        (&[2, 3, 4], 2),
        (&[2, 3, 4], 3),
        (&[4], 1),
        (&[2, 1], 1),
        (&[0, 3], 1),
        (&[3, 131], 1),
    ] {
        // A stretched operand has no variance, which magnifies rounding by 1 / √eps.
        let op = LayerNorm { dims, eps: 1e-2 };
        let last = &shape[shape.len() - dims..];
        let (x, w, b) = (c.floats(shape), c.floats(last), c.floats(last));
        let forward = results(op, &[&x])?;
        let (mean, rstd) = (forward[1].clone(), forward[2].clone());
        let large = shape.contains(&131);
        for operands in [vec![x.clone()], vec![x.clone(), w.clone()], vec![x.clone(), w.clone(), b]] {
            let case = c.add(op, operands).slack(5.0);
            if large {
                case.values_only();
            } else if shape == [3, 5] {
                case.half().slack(3.0);
            }
        }
        let g = c.floats(shape);
        let operands = vec![g, x, mean, rstd];
        c.add(LayerNormInputGrad { dims }, operands.clone()).tied().slack(10.0);
        c.add(LayerNormWeightGrad { dims }, operands.clone()).tied().slack(10.0);
        let weighted = [operands, vec![w]].concat();
        c.add(LayerNormInputGrad { dims }, weighted).tied().slack(10.0);
    }
    // A mean far from 0: the squares' mean less the mean's square would lose everything.
    c.add(LayerNorm { dims: 1, eps: 1e-5 }, vec![c.between(&[2, 8], 1000.0, 1002.0)]).values_only().slack(100.0);

    for shape in [&[2, 3, 2, 2][..], &[4, 2], &[2, 1, 3], &[1, 2, 3, 1], &[2, 2, 1, 1], &[2, 0, 3], &[3, 2, 2, 2, 2]] {
        let ch = [shape[1]];
        let op = BatchNorm { momentum: 0.1, eps: 1e-2 };
        let (x, w, b) = (c.floats(shape), c.floats(&ch), c.floats(&ch));
        let operands = vec![x.clone(), w.clone(), b, c.floats(&ch), c.between(&ch, 0.5, 2.0)];
        let forward = results(op, &operands.iter().collect::<Vec<_>>())?;
        let (mean, rstd) = (forward[1].clone(), forward[2].clone());
        c.add(op, operands).slack(10.0);
        let g = c.floats(shape);
        c.add(BatchNormWeightGrad, vec![g.clone(), x.clone(), mean.clone(), rstd.clone()]).tied().slack(10.0);
        c.add(BatchNormInputGrad, vec![g, x, mean, rstd, w]).tied().slack(10.0);
    }
    let ch = [2];
    let far = c.between(&[4, 2, 3, 3], 1000.0, 1002.0);
    let operands = vec![far, c.floats(&ch), c.floats(&ch), c.floats(&ch), c.between(&ch, 0.5, 2.0)];
    c.add(BatchNorm { momentum: 0.3, eps: 1e-5 }, operands).values_only().slack(200.0);
    Ok(())
}
