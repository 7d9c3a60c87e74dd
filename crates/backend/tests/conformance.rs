//! Every backend of this build passes the conformance suite. So does the reference evaluator, which tests the graph's
//! decompositions and derivatives without any kernel.
//!
//! `FUSIONLLM_CASES=Conv2d cargo test …` runs only the cases whose text contains a word.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use backends::backends;
use fusionllm_backend::Backend;
use fusionllm_backend::conformance::reference::Reference;
use fusionllm_backend::conformance::{self, Case, Report};
use fusionllm_graph::DType;

#[path = "support/backends.rs"]
mod backends;

fn cases() -> Vec<Case> {
    let mut cases = conformance::cases().unwrap();
    if let Ok(word) = std::env::var("FUSIONLLM_CASES") {
        cases.retain(|c| c.to_string().contains(&word));
    }
    cases
}

fn on_every_backend(part: impl Fn(&dyn Backend) -> Report) {
    let mut failed = String::new();
    for backend in backends().into_iter().chain([Arc::new(Reference) as Arc<dyn Backend>]) {
        let report = part(&*backend);
        // Half precision is optional; these types are not.
        let needed = [DType::F64, DType::F32, DType::I64, DType::Bool];
        assert!(needed.iter().all(|d| !report.unsupported.contains(d)), "{}: {report}", backend.name());
        if !report.failures.is_empty() {
            failed += &format!("{}: {report}", backend.name());
        }
    }
    assert!(failed.is_empty(), "{failed}");
}

#[test]
fn every_operator_has_a_case() {
    let missing = conformance::uncovered(&conformance::cases().unwrap());
    assert!(missing.is_empty(), "operators without a case: {missing:?}");
}

/// A framework that compiles each case is tested on a part of them.
#[test]
fn one_case_in_twelve_has_every_operator() {
    let all = conformance::cases().unwrap();
    let (count, part) = (all.len(), conformance::sample(all, 12));
    assert_eq!(part.len(), count.div_ceil(12));
    let missing = conformance::uncovered(&part);
    assert!(missing.is_empty(), "of {count} cases, {} lack {missing:?}", part.len());
}

#[test]
fn values_are_those_of_the_definitions() {
    let cases = cases();
    on_every_backend(|b| conformance::values(b, &cases));
}

#[test]
fn gradients_are_the_slopes_of_the_loss() {
    let cases = cases();
    on_every_backend(|b| conformance::gradients(b, &cases));
}

#[test]
fn segments_have_the_results_of_their_operators() {
    on_every_backend(conformance::segments);
}

#[test]
fn tensors_survive_upload_and_download() {
    on_every_backend(conformance::transfers);
}

#[test]
fn bits_do_not_depend_on_the_number_of_threads() {
    for backend in backends() {
        let report = conformance::determinism(&*backend);
        assert!(report.failures.is_empty(), "{}: {report}", backend.name());
    }
}
