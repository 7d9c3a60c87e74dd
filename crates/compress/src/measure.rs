//! The error of a decoded tensor, and the flatness of a spectrum.

use crate::noise::Noise;

/// ‖received - sent‖ / ‖sent‖ in the Euclidean norm; 0 if both are zero. The slices must have the same length.
pub fn relative_error(sent: &[f32], received: &[f32]) -> f64 {
    pulp::Arch::new().dispatch(
        #[inline(always)]
        || relative_error_here(sent, received),
    )
}

/// The stable rank ‖X‖_F² / σ₁² of a matrix with rows of `columns` elements. It lies between 1 and the rank, and is
/// larger for a flatter spectrum.
///
/// σ₁ comes from power iteration on XᵀX with a fixed start. It stops when σ₁² changes by less than 10⁻⁴ of itself, or
/// after 100 rounds. Returns `None` for a zero or non-finite matrix, and for a length that `columns` does not divide.
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
        // |XᵀX v| of a unit vector v is at most σ₁², and converges to it.
        largest = next.iter().map(|x| x * x).sum::<f64>().sqrt();
        vector = next;
        if (largest - before).abs() <= 1e-4 * largest {
            break;
        }
    }
    (largest > 0.0).then(|| frobenius / largest)
}

/// Independent sums, so that additions can use vector instructions.
const LANES: usize = 8;

/// `pulp` compiles this function for each width of vectors.
#[inline(always)]
fn relative_error_here(sent: &[f32], received: &[f32]) -> f64 {
    let mut difference = [0.0f64; LANES];
    let mut norm = [0.0f64; LANES];
    let (a, a_rest) = sent.as_chunks::<LANES>();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_error_by_hand() {
        let sent = [3.0, 4.0].repeat(5);
        let received = [3.0, 3.0].repeat(5);
        assert!((relative_error(&sent, &received) - (1.0f64 / 25.0).sqrt()).abs() < 1e-12);
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
