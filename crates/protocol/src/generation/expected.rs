use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use fusionllm_graph::{DType, TensorType, ValueId};
use fusionllm_program::{Instruction, PassKind, PerPass, Program};

use super::program_outline::ProgramOutline;

/// Identifies a reported scalar within a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ReportKey {
    /// Index among the program's reports.
    pub(crate) report: u32,
    pub(crate) micro_batch: u32,
}

/// The reports and norms that a peer must send in each pass, according to its Programs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExpectedReports {
    reports: PerPass<BTreeSet<ReportKey>>,
    /// The parameters whose squared gradient norms the peer sends, with their types.
    norms: BTreeMap<ValueId, TensorType>,
    outline: Arc<ProgramOutline>,
}

impl ExpectedReports {
    /// The reports and norms that a peer with these programs must send.
    pub fn new(train: &Program, eval: &Program) -> Self {
        let reports = |p: &Program| {
            let report = |i: &Instruction| match *i {
                Instruction::Report { report, micro_batch, .. } => Some(ReportKey { report, micro_batch }),
                _ => None,
            };
            p.instructions.iter().filter_map(report).collect()
        };
        let ty = |v: &ValueId| train.values.get(v).map(|value| (*v, value.ty.clone()));
        let norms = train.owned().filter_map(|(parameter, _)| ty(&parameter)).collect();
        let reports = PerPass { train: reports(train), eval: reports(eval) };
        Self { reports, norms, outline: Arc::new(ProgramOutline::new(train)) }
    }

    pub(crate) fn reports(&self, kind: PassKind) -> &BTreeSet<ReportKey> {
        &self.reports[kind]
    }

    /// Whether `reports` contains all of this peer's reports.
    pub(crate) fn all_reported(&self, kind: PassKind, reports: &BTreeMap<ReportKey, f64>) -> bool {
        self.reports(kind).iter().all(|key| reports.contains_key(key))
    }

    /// The parameters whose squared gradient norms the peer sends, in graph order.
    pub(crate) fn norms(&self) -> impl Iterator<Item = &ValueId> {
        self.norms.keys()
    }

    /// Whether a gradient of this parameter's type can have this squared norm. The norm of a gradient that is not
    /// finite is not finite either.
    pub(crate) fn is_possible(&self, parameter: ValueId, squared_norm: f64) -> bool {
        let most = self.norms.get(&parameter).map_or(0.0, largest_squared_norm);
        !squared_norm.is_finite() || (0.0..=most).contains(&squared_norm)
    }

    /// The places that the peer may name in an inspected pass.
    pub(crate) fn outline(&self) -> &ProgramOutline {
        &self.outline
    }
}

/// An upper bound of a tensor's squared norm: twice that of a tensor whose numbers are all the largest of its type. The
/// factor leaves room for the rounding of sums.
fn largest_squared_norm(ty: &TensorType) -> f64 {
    let largest = match ty.dtype {
        DType::F16 => 65504.0,
        DType::BF16 | DType::F32 => f64::from(f32::MAX),
        _ => f64::MAX,
    };
    2.0 * largest * largest * ty.numel().max(1) as f64
}
