//! The Hadamard rotation with random signs. It spreads an outlier over 64 elements.

use crate::noise::Noise;

/// Size of the transform.
const ROWS: usize = 64;

/// Columns of a piece. Rows of 16 are whole vectors, so the transform adds and subtracts rows without shuffling.
const COLUMNS: usize = 16;

/// Elements of a whole piece.
pub(crate) const PIECE: usize = ROWS * COLUMNS;

/// The number of elements after `n` elements are filled up with zeros.
pub(crate) fn padded(n: usize) -> usize {
    n.next_multiple_of(ROWS)
}

/// Multiplies each column of a part by random signs and by a Hadamard matrix, in place. `part` are the elements of a
/// tensor from `start` on. Its length is a whole number of rows, as [`padded`] makes it.
#[inline(always)]
pub(crate) fn rotate(part: &mut [f32], start: usize, signs: Noise) {
    let columns = columns(part);
    for (i, rows) in part.chunks_exact_mut(ROWS * columns).enumerate() {
        flip(rows, start + i * ROWS, signs);
        hadamard(rows);
    }
}

/// Undoes [`rotate`].
#[inline(always)]
pub(crate) fn unrotate(part: &mut [f32], start: usize, signs: Noise) {
    let columns = columns(part);
    for (i, rows) in part.chunks_exact_mut(ROWS * columns).enumerate() {
        hadamard(rows);
        flip(rows, start + i * ROWS, signs);
    }
}

#[inline(always)]
fn columns(part: &[f32]) -> usize {
    if part.len() == PIECE { COLUMNS } else { 1 }
}

/// Flips signs at random. Bit c of a row's random word decides about column c.
#[inline(always)]
fn flip(rows: &mut [f32], start: usize, signs: Noise) {
    let columns = rows.len() / ROWS;
    for (r, row) in rows.chunks_exact_mut(columns).enumerate() {
        let word = signs.word((start + r * columns) as u32);
        for (c, x) in row.iter_mut().enumerate() {
            *x = f32::from_bits(x.to_bits() ^ ((word >> c) << 31));
        }
    }
}

/// The orthonormal Hadamard transform of every column. It is its own inverse.
#[inline(always)]
fn hadamard(rows: &mut [f32]) {
    let columns = rows.len() / ROWS;
    for half in [1, 2, 4, 8, 16, 32] {
        for pair in rows.chunks_exact_mut(2 * half * columns) {
            let (a, b) = pair.split_at_mut(half * columns);
            // Whole rows: with a length that it does not know, the compiler handles short rows element by element.
            let ((a, a_rest), (b, b_rest)) = (a.as_chunks_mut::<COLUMNS>(), b.as_chunks_mut::<COLUMNS>());
            for (a, b) in a.iter_mut().zip(b) {
                let (x, y) = (*a, *b);
                *a = std::array::from_fn(|i| x[i] + y[i]);
                *b = std::array::from_fn(|i| x[i] - y[i]);
            }
            for (a, b) in a_rest.iter_mut().zip(b_rest) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
    }
    for x in rows {
        // 1 / sqrt(64), a power of two.
        *x *= 0.125;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wave(n: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 7919 % 1013) as f32 - 500.0) / 64.0).collect()
    }

    fn transformed(x: &[f32]) -> Vec<f32> {
        let mut y = x.to_vec();
        hadamard(&mut y);
        y
    }

    #[test]
    fn the_transform_is_its_own_inverse_and_keeps_norms() {
        for n in [ROWS, PIECE] {
            let x = wave(n);
            let y = transformed(&x);
            let norm = |v: &[f32]| v.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
            assert!((norm(&x) / norm(&y) - 1.0).abs() < 1e-6);
            // Sums of 64 multiples of 1/64 below 2^9 are exact, and so is the factor.
            assert_eq!(transformed(&y), x);
        }
    }

    /// By definition, entry (i, j) of the matrix is -1 to the power of the number of bits that i and j share.
    #[test]
    fn the_transform_matches_its_definition() {
        let x = wave(PIECE);
        let y = transformed(&x);
        for (r, c) in [(0, 0), (1, 1), (5, 0), (63, 1), (42, 15)] {
            let sign = |s: usize| if (s & r).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
            let sum: f32 = (0..ROWS).map(|s| x[s * COLUMNS + c] * sign(s)).sum();
            assert_eq!(y[r * COLUMNS + c], sum / 8.0);
        }
    }

    #[test]
    fn rotation_can_be_undone_and_depends_on_seed_and_position() {
        for n in [PIECE, 3 * ROWS] {
            let x = wave(n);
            let rotated = |start, seed| {
                let mut y = x.clone();
                rotate(&mut y, start, Noise::new(seed));
                y
            };
            assert_ne!(rotated(0, 7), rotated(0, 8));
            assert_ne!(rotated(0, 7), rotated(PIECE, 7));
            let mut y = rotated(PIECE, 7);
            unrotate(&mut y, PIECE, Noise::new(7));
            assert_eq!(y, x);
        }
    }
}
