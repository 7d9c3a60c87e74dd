//! Cross entropy of logits and class indices.

use super::parallel::{each, each2, grain, part};
use super::simd::simd;
use super::softmax::log_sum_exp;
use super::{Float, IndexError};

/// Fails on the first target that is neither `ignore` nor a class.
fn check(target: &[i64], ignore: i64, classes: usize) -> Result<usize, IndexError> {
    let mut counted = 0;
    for &t in target {
        if t != ignore {
            usize::try_from(t).ok().filter(|&t| t < classes).ok_or(IndexError { index: t, size: classes })?;
            counted += 1;
        }
    }
    Ok(counted)
}

/// The mean of `lse - logits[target]` over targets other than `ignore`, or NaN if all are ignored. `logits` are `[n,
/// classes]`. `lse [n]` becomes `ln Σ e^logits` of each row.
pub(crate) fn cross_entropy<T: Float>(
    lse: &mut [T],
    logits: &[T],
    target: &[i64],
    classes: usize,
    ignore: i64,
) -> Result<T, IndexError> {
    simd! {
        fn row<T: Float>(logits: &[T]) -> (T, T) {
            log_sum_exp(logits)
        }
    }
    assert!(lse.len() == target.len() && logits.len() == target.len() * classes, "cross_entropy: operands do not fit");
    let counted = check(target, ignore, classes)?;
    let mut losses = vec![0.0f64; target.len()];
    each2((lse, 1), (&mut losses, 1), grain(classes), |i, lse, loss| {
        let logits = part(logits, i, classes);
        let (max, log) = row(logits);
        lse[0] = max + log;
        if target[i] != ignore {
            loss[0] = (max - logits[target[i] as usize]).f64() + log.f64();
        }
    });
    Ok(T::of(losses.iter().sum::<f64>() / counted as f64))
}

/// The gradient of [`cross_entropy`]'s logits times `grad`: `(softmax - one-hot) grad / counted`, and 0 in ignored
/// rows. It overwrites `logits`, which are first copied from `source` if there is one.
pub(crate) fn cross_entropy_backward<T: Float>(
    logits: &mut [T],
    source: Option<&[T]>,
    grad: T,
    target: &[i64],
    lse: &[T],
    classes: usize,
    ignore: i64,
) -> Result<(), IndexError> {
    simd! {
        fn block<T: Float>(x: &mut [T], lse: T, weight: T) {
            for v in x {
                *v = (*v - lse).exp() * weight;
            }
        }
    }
    assert!(lse.len() == target.len() && logits.len() == target.len() * classes, "cross_entropy: operands do not fit");
    assert!(source.is_none_or(|s| s.len() == logits.len()), "operand and result differ in length");
    let counted = check(target, ignore, classes)?;
    let weight = grad / T::of(counted as f64);
    // Blocks of a row that fit the first-level cache.
    const BLOCK: usize = 4096;
    each(logits, classes, grain(classes), |i, row| {
        if target[i] == ignore {
            return row.fill(T::ZERO);
        }
        for (j, x) in row.chunks_mut(BLOCK).enumerate() {
            if let Some(source) = source {
                let start = i * classes + j * BLOCK;
                x.copy_from_slice(&source[start..start + x.len()]);
            }
            block(x, lse[i], weight);
        }
        row[target[i] as usize] -= weight;
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const IGNORE: i64 = -100;

    /// dL/dlogits = (softmax - one-hot) g / counted, compared with (L(+h) - L(-h)) / 2h.
    #[test]
    fn gradient_matches_differences() {
        let (n, classes, h) = (4, 37, 1e-6);
        let logits: Vec<f64> = (0..n * classes).map(|i| (i as f64 * 2.3).sin() * 4.0).collect();
        let target = [3, IGNORE, 36, 0];
        let loss = |x: &[f64]| cross_entropy(&mut [0.0; 4], x, &target, classes, IGNORE).unwrap();
        let mut lse = [0.0; 4];
        cross_entropy(&mut lse, &logits, &target, classes, IGNORE).unwrap();
        let mut d = vec![0.0; logits.len()];
        cross_entropy_backward(&mut d, Some(&logits), 3.0, &target, &lse, classes, IGNORE).unwrap();
        for i in 0..logits.len() {
            let (mut hi, mut lo) = (logits.clone(), logits.clone());
            hi[i] += h;
            lo[i] -= h;
            let want = 3.0 * (loss(&hi) - loss(&lo)) / (2.0 * h);
            assert!((d[i] - want).abs() < 1e-8, "{i}: {} {want}", d[i]);
        }
        let mut in_place = logits;
        cross_entropy_backward(&mut in_place, None, 3.0, &target, &lse, classes, IGNORE).unwrap();
        assert_eq!(d, in_place);
    }

    #[test]
    fn targets_are_checked() {
        for bad in [5, -1, i64::MIN] {
            let e = cross_entropy(&mut [0.0f32], &[0.0; 5], &[bad], 5, IGNORE).unwrap_err();
            assert_eq!(e, IndexError { index: bad, size: 5 });
        }
        assert!(cross_entropy(&mut [0.0f32], &[0.0; 5], &[IGNORE], 5, IGNORE).unwrap().is_nan());
    }
}
