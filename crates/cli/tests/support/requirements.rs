//! Tests that need more than a clone of the repository has.
//!
//! Such a test returns [`Missing`] where its requirement is not met, and is then reported as ignored with the reason.
//! `FUSIONLLM_REQUIRE` names the requirements that must be met, separated by commas: there the same test fails.

use std::process::ExitCode;

use libtest_mimic::{Arguments, Completion, Failed, Trial};

/// A requirement of a test that is missing here.
pub(crate) struct Missing {
    /// The name by which `FUSIONLLM_REQUIRE` asks for it.
    pub(crate) requirement: &'static str,
    pub(crate) reason: String,
}

pub(crate) type Test = fn() -> Result<(), Missing>;

/// The `main` of a test binary: runs these functions as tests.
macro_rules! main {
    ($($test:ident),+ $(,)?) => {
        fn main() -> std::process::ExitCode {
            requirements::run(&[$((stringify!($test), $test as requirements::Test)),+])
        }
    };
}
pub(crate) use main;

pub(crate) fn run(tests: &[(&'static str, Test)]) -> ExitCode {
    let required = std::env::var("FUSIONLLM_REQUIRE").unwrap_or_default();
    let trial = |(name, test): &(&'static str, Test)| {
        let (test, required) = (*test, required.clone());
        Trial::ignorable_test(*name, move || completion(test(), &required))
    };
    let itself = Trial::test("what_is_missing_is_reported", || {
        what_is_missing_is_reported();
        Ok(())
    });
    libtest_mimic::run(&Arguments::from_args(), tests.iter().map(trial).chain([itself]).collect()).exit_code()
}

fn completion(result: Result<(), Missing>, required: &str) -> Result<Completion, Failed> {
    match result {
        Ok(()) => Ok(Completion::Completed),
        Err(missing) if required.split(',').any(|name| name.trim() == missing.requirement) => {
            Err(format!("FUSIONLLM_REQUIRE asks for {}: {}", missing.requirement, missing.reason).into())
        }
        Err(missing) => Ok(Completion::ignored_with(missing.reason)),
    }
}

fn what_is_missing_is_reported() {
    let of = |required| completion(Err(Missing { requirement: "root", reason: "takes root".into() }), required);
    let ignored = |required| matches!(of(required), Ok(Completion::Ignored { reason: Some(r) }) if r == "takes root");
    assert!(ignored("") && ignored("roots,cifar10"));
    assert!(of("root").is_err() && of("cifar10, root").is_err());
    assert!(matches!(completion(Ok(()), "root"), Ok(Completion::Completed)));
}
