/// The ratio of bytes for each link, from the seconds that its uncompressed messages take: r_i = max(1, r·R_i / max_j R_j), so that the slowest link gets the
/// whole ratio and a link that is r times as fast none.
///
/// The published rule speaks of entries instead of bytes and writes max(1, c·r·R_i / max_j R_j), c = 3 for what an index costs beside its value. Here
/// [`TopK`](crate::TopK) turns the ratio of bytes into that of entries, with the exact cost of its wire form ([`TopK::entry_cost`](crate::TopK::entry_cost)).
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
