//! How near a decoded tensor is to what was meant, and how flat its spectrum is.

use crate::noise::Noise;

/// ‖received - meant‖ / ‖meant‖ in the Euclidean norm; 0 for two zeros. The slices have the same length.
pub fn relative_error(meant: &[f32], received: &[f32]) -> f64 {
    pulp::Arch::new().dispatch(RelativeError { meant, received })
}

/// The stable rank ‖X‖_F² / σ₁² of a matrix with rows of `columns` elements: between 1 and the rank, and the larger the flatter the spectrum.
///
/// σ₁ by power iteration on XᵀX from a fixed start, until a round changes σ₁² by less than 10⁻⁴, 100 rounds at most. `None` where it has no meaning: a zero or non-finite
/// matrix, or a length that `columns` does not divide.
pub fn stable_rank(matrix: &[f32], columns: usize) -> Option<f64> {
    if columns == 0 || matrix.is_empty() || !matrix.len().is_multiple_of(columns) {
        return None;
    }
    let frobenius: f64 = matrix.iter().map(|x| f64::from(*x).powi(2)).sum();
    if !(frobenius.is_finite() && frobenius > 0.0) {
        return None;
    }
    let noise = Noise::new(0);
    let mut vector: Vec<f64> = (0..columns).map(|i| f64::from(noise.centred(i as u32))).collect();
    let mut largest = 0.0;
    for _ in 0..100 {
        let norm = vector.iter().map(|x| x * x).sum::<f64>().sqrt();
        let mut next = vec![0.0; columns];
        for row in matrix.chunks_exact(columns) {
            let product: f64 = row.iter().zip(&vector).map(|(x, v)| f64::from(*x) * v).sum::<f64>() / norm;
            for (n, x) in next.iter_mut().zip(row) {
                *n += product * f64::from(*x);
            }
        }
        let before = largest;
        // |XᵀX v| of a unit vector: at most σ₁², and equal to it at the end.
        largest = next.iter().map(|x| x * x).sum::<f64>().sqrt();
        vector = next;
        if (largest - before).abs() <= 1e-4 * largest {
            break;
        }
    }
    (largest > 0.0).then(|| frobenius / largest)
}

const LANES: usize = 8;

/// What is compiled for every width of vectors.
struct RelativeError<'a> {
    meant: &'a [f32],
    received: &'a [f32],
}

impl pulp::WithSimd for RelativeError<'_> {
    type Output = f64;

    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, _: S) -> f64 {
        let Self { meant, received } = self;
        let mut difference = [0.0f64; LANES];
        let mut norm = [0.0f64; LANES];
        let (a, a_rest) = meant.as_chunks::<LANES>();
        let (b, b_rest) = received.as_chunks::<LANES>();
        for (a, b) in a.iter().zip(b) {
            for i in 0..LANES {
                let (x, y) = (f64::from(a[i]), f64::from(b[i]));
                difference[i] += (y - x) * (y - x);
                norm[i] += x * x;
            }
        }
        for (x, y) in a_rest.iter().zip(b_rest) {
            let (x, y) = (f64::from(*x), f64::from(*y));
            difference[0] += (y - x) * (y - x);
            norm[0] += x * x;
        }
        let (difference, norm) = (difference.iter().sum::<f64>(), norm.iter().sum::<f64>());
        if difference == 0.0 { 0.0 } else { (difference / norm).sqrt() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_error_by_hand() {
        let meant = [3.0, 4.0].repeat(5);
        let received = [3.0, 3.0].repeat(5);
        assert!((relative_error(&meant, &received) - (1.0f64 / 25.0).sqrt()).abs() < 1e-12);
        assert_eq!(relative_error(&[0.0], &[0.0]), 0.0);
    }

    #[test]
    fn stable_rank_of_known_spectra() {
        // diag(2, 1, 1): 6 / 4.
        let diagonal = [2.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0];
        assert!((stable_rank(&diagonal, 3).unwrap() - 1.5).abs() < 1e-3);
        let outer: Vec<f32> = (0..12).map(|i| ((i / 4 + 1) * (i % 4 + 1)) as f32).collect();
        assert!((stable_rank(&outer, 4).unwrap() - 1.0).abs() < 1e-6);
        assert_eq!(stable_rank(&[0.0; 4], 2), None);
        assert_eq!(stable_rank(&[f32::NAN; 4], 2), None);
        assert_eq!(stable_rank(&[1.0; 4], 3), None);
    }
}
