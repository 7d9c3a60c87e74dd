//! The suite that every backend passes. It compares results with the operators' definitions.
//!
//! - [`cases`] lists operators with operands.
//! - [`values`] compares a backend's results with the [`mod@reference`] evaluator, for several memory layouts of the
//!   operands and for decompositions. It also checks that operands in use elsewhere do not change.
//! - [`gradients`] compares each derivative with finite differences.
//! - [`segments`](segments()) compares segments of several operators, which a backend gets as a whole.
//! - [`determinism`] repeats large operators with different numbers of threads.
//! - [`uncovered`] names operators without a case, and [`sample`] takes a part of the cases.

mod case;
mod cases;
mod determinism;
mod gradient;
pub mod reference;
mod segments;
mod value;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use fusionllm_graph::ops::{
    Approximate, Binary, BinaryScalar, Compare, CompareScalar, Gelu, GeluBackward, Logical, ReduceKind, Unary,
};
use fusionllm_graph::{DType, HostTensor, Op, TensorType};

use crate::{Backend, Tensor};

pub use case::{Case, Operand};
pub use cases::cases;
pub use determinism::determinism;
pub use gradient::{NOT_DIFFERENTIABLE, gradients};
pub use segments::segments;
pub use value::{transfers, values};

/// The outcome of one part of the suite.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Report {
    /// Number of comparisons.
    pub checks: usize,
    /// Failed comparisons, with the operator and its operands.
    pub failures: Vec<String>,
    /// Element types that the backend lacks. Their cases were skipped.
    pub unsupported: BTreeSet<DType>,
}

impl Report {
    fn record(&mut self, what: impl fmt::Display, outcome: Result<(), String>) {
        self.checks += 1;
        if let Err(reason) = outcome {
            self.failures.push(format!("{what}: {reason}"));
        }
    }
}

/// Failures printed for each operator.
const SHOWN: usize = 3;

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} of {} checks failed; unsupported: {:?}", self.failures.len(), self.checks, self.unsupported)?;
        // A broken operator fails in many cases, of which a few are enough.
        let mut shown: BTreeMap<&str, usize> = BTreeMap::new();
        for failure in &self.failures {
            let operator = failure.split(['(', ' ']).next().unwrap_or(failure);
            let count = shown.entry(operator).or_default();
            *count += 1;
            if *count <= SHOWN {
                writeln!(f, "- {failure}")?;
            }
        }
        for (operator, count) in shown.into_iter().filter(|(_, count)| *count > SHOWN) {
            writeln!(f, "- {operator}: {} more", count - SHOWN)?;
        }
        Ok(())
    }
}

/// Operators without a case, and kinds of operators without a case.
pub fn uncovered(cases: &[Case]) -> Vec<String> {
    let mut missing: BTreeSet<String> = Op::VARIANTS.iter().map(|v| v.to_string()).collect();
    for op in kinds() {
        missing.insert(kind(&op));
    }
    for case in cases.iter().filter(|c| !c.fails) {
        missing.remove(case.op.variant());
        missing.remove(&kind(&case.op));
    }
    missing.into_iter().collect()
}

/// One case in `every`, of as many kinds of operators as possible: the first case of each kind, then the second ones.
pub fn sample(cases: Vec<Case>, every: usize) -> Vec<Case> {
    let count = cases.len().div_ceil(every.max(1));
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let number = |case: Case| {
        let number = seen.entry(kind(&case.op)).or_default();
        *number += 1;
        (*number, case)
    };
    let mut numbered: Vec<(usize, Case)> = cases.into_iter().map(number).collect();
    numbered.sort_by_key(|(number, _)| *number);
    numbered.into_iter().take(count).map(|(_, case)| case).collect()
}

/// An operator's variant with the attribute that chooses what it computes.
fn kind(op: &Op) -> String {
    let variant = op.variant();
    match op {
        Op::BinaryScalar(op) => format!("{variant} {:?} reverse={}", op.op, op.reverse),
        Op::Gelu(op) => format!("{variant} {:?}", op.approximate),
        Op::GeluBackward(op) => format!("{variant} {:?}", op.approximate),
        Op::Reduce(op) => format!("{variant} {:?}", op.kind),
        _ => format!("{variant} {}", op.name()),
    }
}

fn kinds() -> Vec<Op> {
    let mut kinds: Vec<Op> = Vec::new();
    kinds.extend(Unary::ALL.map(Op::from));
    kinds.extend(Binary::ALL.map(Op::from));
    for reverse in [false, true] {
        kinds.extend(Binary::ALL.map(|op| Op::from(BinaryScalar { op, scalar: 1.0, reverse })));
    }
    kinds.extend(Compare::ALL.map(Op::from));
    kinds.extend(Compare::ALL.map(|op| Op::from(CompareScalar { op, scalar: 1.0 })));
    kinds.extend(Logical::ALL.map(Op::from));
    kinds.extend(
        ReduceKind::ALL.map(|kind| Op::from(fusionllm_graph::ops::Reduce { kind, dims: vec![], keepdim: false })),
    );
    for approximate in [Approximate::None, Approximate::Tanh] {
        kinds.extend([Op::from(Gelu { approximate }), Op::from(GeluBackward { approximate })]);
    }
    kinds
}

/// Runs an operator. A panic becomes an error.
fn run(backend: &dyn Backend, op: &Op, inputs: Vec<Tensor>) -> Result<Vec<Tensor>, String> {
    let types: Vec<TensorType> = inputs.iter().map(|t| t.ty().clone()).collect();
    let outputs = op.infer(&types.iter().collect::<Vec<_>>())?;
    let results = guarded(|| backend.run(op, inputs, &outputs).map_err(|e| e.to_string()))?;
    let found: Vec<&TensorType> = results.iter().map(Tensor::ty).collect();
    if found.iter().copied().ne(&outputs) {
        return Err(format!("its results are {found:?} instead of {outputs:?}"));
    }
    Ok(results)
}

fn guarded<T>(f: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|_| Err(format!("{PANICKED} instead of returning an error")))
}

const PANICKED: &str = "the backend panicked";

fn download(backend: &dyn Backend, tensor: &Tensor) -> Result<HostTensor, String> {
    let host = guarded(|| backend.download(tensor).map_err(|e| e.to_string()))?;
    if host.ty() != tensor.ty() {
        return Err(format!("a tensor of type {} comes down as {}", tensor.ty(), host.ty()));
    }
    Ok(host)
}

/// Whether the backend holds tensors of this type.
fn holds(backend: &dyn Backend, dtype: DType) -> bool {
    backend.upload(&HostTensor::zeros(TensorType::new(dtype, [1]))).is_ok()
}
