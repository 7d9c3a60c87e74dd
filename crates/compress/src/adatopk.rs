//! AdaTopK: stronger compression on slower links.

/// The compression ratio of each link, from the seconds that its uncompressed messages take.
///
/// r_i = max(1, r·R_i / max_j R_j): the slowest link gets the whole ratio r, and a link r times as fast gets none.
///
/// The published rule counts entries instead of bytes: max(1, c·r·R_i / max_j R_j), where c = 3 is the cost of an index
/// and a value over the cost of a value. Here [`TopK`](crate::TopK) converts the ratio of bytes to a ratio of entries,
/// with the exact cost of its wire form ([`TopK::entry_overhead`](crate::TopK::entry_overhead)).
pub fn adatopk(ratio: f64, seconds: &[f64]) -> Vec<f64> {
    let slowest = seconds.iter().copied().fold(0.0, f64::max);
    seconds.iter().map(|s| if slowest > 0.0 { (ratio * s / slowest).max(1.0) } else { 1.0 }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_link_gets_the_whole_ratio() {
        assert_eq!(adatopk(100.0, &[8.0, 2.0, 0.01, 0.0]), [100.0, 25.0, 1.0, 1.0]);
        assert_eq!(adatopk(100.0, &[0.0, 0.0]), [1.0, 1.0]);
        assert_eq!(adatopk(100.0, &[]), [0.0; 0]);
    }
}
