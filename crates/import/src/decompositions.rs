//! The operators that `run_decompositions()` of PyTorch replaces.

use crate::aten;

/// The operators of ATen that it replaces by others, sorted, one a line: printed by `stock/decompositions.py`.
const DECOMPOSED: &str = include_str!("decomposed.txt");

/// Whether `run_decompositions()` replaces an operator, such as `aten.index_fill_.int_Scalar`, by others. It counts
/// in-place forms, and forms with `out`, as the plain operator.
pub(crate) fn decomposes(target: &str) -> bool {
    let Some((name, overload)) = target.strip_prefix("aten.").and_then(|rest| rest.split_once('.')) else {
        return false;
    };
    let functional = name.strip_suffix('_').unwrap_or(name);
    let writes = functional != name || overload.ends_with("out");
    let known = || aten::ATEN.iter().flat_map(|(_, entries)| *entries).any(|e| e.name == functional);
    DECOMPOSED.lines().any(|line| line == functional) || writes && known()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operators_in_place_count_by_their_functions() {
        assert!(decomposes("aten.index_fill_.int_Scalar") && decomposes("aten.index_fill.int_Scalar"));
        assert!(decomposes("aten.add.out") && decomposes("aten.diag.default"));
        assert!(!decomposes("aten.add.Unknown") && !decomposes("aten.grid_sampler_2d.default"));
        assert!(!decomposes("mine.diag.default"));
    }
}
