use fusionllm_graph::ops::{
    AdamwStep, CrossEntropy, CrossEntropyBackward, Dropout, DropoutBackward, SgdStep, SquaredNorm,
};

use crate::conformance::case::{Cases, results};

pub(super) fn cases(c: &mut Cases) -> Result<(), String> {
    for (shape, p, stream, key) in [
        (&[3, 7][..], 0.3, 0, 5),
        (&[3, 7], 0.3, 1, 5),
        (&[257], 0.1, u64::MAX, -1),
        (&[2, 2], 0.0, 3, i64::MIN + 3),
        (&[], 0.5, 0, (1 << 60) + 1),
        (&[0, 3], 0.5, 0, 1),
    ] {
        let case = c.add(Dropout { p, stream }, vec![c.floats(shape), c.ints(&[], &[key])]);
        if shape.len() == 1 {
            case.values_only();
        }
        c.add(DropoutBackward { scale: 1.0 / (1.0 - p) }, vec![c.floats(shape), c.bools(shape)]);
    }
    cross_entropy(c)?;
    optimizers(c);
    for shape in [&[3, 5][..], &[], &[0], &[1031]] {
        c.add(SquaredNorm, vec![c.floats(shape)]);
    }
    // Accumulated in f64: in f32 the small squares would vanish beside the large one.
    let mut values = vec![1e-3; 2000];
    values[0] = 1e3;
    c.add(SquaredNorm, vec![c.given(&[2000], &values)]);
    Ok(())
}

fn cross_entropy(c: &mut Cases) -> Result<(), String> {
    for (targets, classes) in
        [(&[0, 2, 1, 2][..], 3), (&[0, -100, 1, -100], 3), (&[0], 1), (&[4, 0], 5), (&[-100, -100], 2), (&[], 3)]
    {
        for ignore_index in [-100, 1] {
            if ignore_index == 1 && targets.contains(&-100) {
                continue;
            }
            let n = targets.len();
            let (logits, target) = (c.floats(&[n, classes]), c.ints(&[n], targets));
            let op = CrossEntropy { ignore_index };
            let forward = results(op, &[&logits, &target])?;
            let case = c.add(op, vec![logits.clone(), target.clone()]);
            if targets.iter().all(|&t| t == ignore_index) {
                // The loss is NaN, as PyTorch has it.
                case.values_only();
            }
            let g = c.floats(&[]);
            c.add(CrossEntropyBackward { ignore_index }, vec![g, logits, target, forward[1].clone()]).tied();
        }
    }
    let target = c.ints(&[2], &[0, 2]);
    let large = c.given(&[2, 3], &[1000.0, 990.0, -1000.0, f64::NEG_INFINITY, 0.0, 1.0]);
    c.add(CrossEntropy { ignore_index: -100 }, vec![large, target]).values_only().slack(20.0);
    // A row that does not count may hold an infinity in any place.
    let infinite = c.given(&[2, 3], &[f64::NEG_INFINITY, 0.5, 1.0, 2.0, 0.0, 1.0]);
    c.add(CrossEntropy { ignore_index: -100 }, vec![infinite, c.ints(&[2], &[-100, 2])]).values_only();
    let (logits, target) = (c.floats(&[9, 301]), c.indices(&[9], 301));
    let forward = results(CrossEntropy { ignore_index: -100 }, &[&logits, &target])?;
    c.add(CrossEntropy { ignore_index: -100 }, vec![logits.clone(), target.clone()]).values_only();
    let operands = vec![c.floats(&[]), logits, target, forward[1].clone()];
    c.add(CrossEntropyBackward { ignore_index: -100 }, operands).tied();
    for bad in [3, -1, i64::MAX] {
        let (logits, target) = (c.floats(&[2, 3]), c.ints(&[2], &[1, bad]));
        c.add(CrossEntropy { ignore_index: -100 }, vec![logits.clone(), target.clone()]).fails();
        let operands = vec![c.floats(&[]), logits, target, c.floats(&[2])];
        c.add(CrossEntropyBackward { ignore_index: -100 }, operands).fails();
    }
    Ok(())
}

fn optimizers(c: &mut Cases) {
    for shape in [&[3, 4][..], &[], &[1], &[0, 2], &[1031]] {
        for (weight_decay, hyper) in [(0.1, [1e-2, 0.1, 0.001, 1.0]), (0.0, [3e-4, 0.5, 0.3, 0.25])] {
            let op = AdamwStep { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay };
            let moments = [c.floats(shape), c.between(shape, 0.0, 2.0)];
            let [m, v] = moments;
            let operands = vec![c.floats(shape), c.floats(shape), m, v, c.doubles(&[4], &hyper)];
            c.add(op, operands);
        }
        for (momentum, weight_decay, nesterov) in [(0.9, 1e-2, false), (0.9, 1e-2, true), (0.0, 0.0, false)] {
            let op = SgdStep { momentum, weight_decay, nesterov };
            let operands = vec![c.floats(shape), c.floats(shape), c.floats(shape), c.doubles(&[2], &[0.1, 0.5])];
            c.add(op, operands);
        }
    }
    // A parameter that has had no gradient yet stays finite.
    let zero = c.given(&[3], &[0.0; 3]);
    let operands = vec![c.floats(&[3]), zero.clone(), zero.clone(), zero, c.doubles(&[4], &[1e-3, 0.1, 1e-3, 1.0])];
    c.add(AdamwStep { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 }, operands);
}
