//! Rows of a table by their indices, and the gradient of the table.

use super::parallel::{each, grain, part, rows_per_chunk};
use super::{Float, IndexError};

/// Fails on the first index outside `0..size`.
pub(crate) fn check_indices(ids: &[i64], size: usize) -> Result<(), IndexError> {
    match ids.iter().find(|&&i| i < 0 || i as u64 >= size as u64) {
        Some(&index) => Err(IndexError { index, size }),
        None => Ok(()),
    }
}

/// `out[i] = table[ids[i]]`: `out [ids.len(), width]`, `table [_, width]`.
pub(crate) fn embedding<T: Copy + Send + Sync>(
    out: &mut [T],
    table: &[T],
    ids: &[i64],
    width: usize,
) -> Result<(), IndexError> {
    assert_eq!(out.len(), ids.len() * width, "embedding: result of {} rows of {width}", ids.len());
    if width == 0 {
        return Ok(());
    }
    check_indices(ids, table.len() / width)?;
    let chunk = rows_per_chunk(width);
    each(out, chunk * width, grain(chunk * width), |i, out| {
        for (out, &id) in out.chunks_exact_mut(width).zip(part(ids, i, chunk)) {
            out.copy_from_slice(&table[id as usize * width..][..width]);
        }
    });
    Ok(())
}

/// Clears `dtable [_, width]`, then adds `grad[i]` to `dtable[ids[i]]` in the order of `i`. The row `padding` stays 0.
pub(crate) fn embedding_backward<T: Float>(
    dtable: &mut [T],
    grad: &[T],
    ids: &[i64],
    width: usize,
    padding: Option<usize>,
) -> Result<(), IndexError> {
    assert_eq!(grad.len(), ids.len() * width, "embedding: gradient of {} rows of {width}", ids.len());
    if width == 0 {
        return Ok(());
    }
    check_indices(ids, dtable.len() / width)?;
    // Each task owns a range of the table's rows, so the order of each row's sum is fixed.
    let chunk = rows_per_chunk(width).max(dtable.len() / width / 64).max(1);
    each(dtable, chunk * width, grain(chunk * width), |c, rows| {
        rows.fill(T::ZERO);
        let first = c * chunk;
        for (&id, g) in ids.iter().zip(grad.chunks_exact(width)) {
            let id = id as usize;
            if id < first || id - first >= rows.len() / width || padding == Some(id) {
                continue;
            }
            for (d, &g) in rows[(id - first) * width..][..width].iter_mut().zip(g) {
                *d += g;
            }
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_read_and_their_gradients_add_up() {
        let table: Vec<f64> = (0..12).map(f64::from).collect();
        let ids = [2, 0, 2, 3];
        let mut out = [0.0; 12];
        embedding(&mut out, &table, &ids, 3).unwrap();
        assert_eq!(out, [6.0, 7.0, 8.0, 0.0, 1.0, 2.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0]);
        let mut d = [9.0; 12];
        embedding_backward(&mut d, &out, &ids, 3, Some(3)).unwrap();
        assert_eq!(d, [0.0, 1.0, 2.0, 0.0, 0.0, 0.0, 12.0, 14.0, 16.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn indices_are_checked() {
        let want = Err(IndexError { index: 4, size: 4 });
        assert_eq!(embedding(&mut [0.0; 3], &[0.0; 12], &[4], 3), want);
        assert_eq!(embedding_backward(&mut [0.0; 12], &[0.0; 3], &[4], 3, None), want);
        assert_eq!(embedding(&mut [0.0; 3], &[0.0; 12], &[-1], 3), Err(IndexError { index: -1, size: 4 }));
    }
}
