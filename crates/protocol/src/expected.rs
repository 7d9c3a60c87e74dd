use std::collections::{BTreeMap, BTreeSet};

use fusionllm_graph::ValueId;
use fusionllm_plan::{Instruction, PassKind, PerPass, Program};

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
    /// The parameters whose squared gradient norms the peer sends.
    norms: BTreeSet<ValueId>,
}

impl ExpectedReports {
    /// What a peer with these programs must send.
    pub fn new(train: &Program, eval: &Program) -> Self {
        let reports = |p: &Program| {
            let report = |i: &Instruction| match *i {
                Instruction::Report { report, micro_batch, .. } => Some(ReportKey { report, micro_batch }),
                _ => None,
            };
            p.instructions.iter().filter_map(report).collect()
        };
        let norms = train.owned().map(|(_, r)| r.parameter).collect();
        Self { reports: PerPass { train: reports(train), eval: reports(eval) }, norms }
    }

    pub(crate) fn reports(&self, kind: PassKind) -> &BTreeSet<ReportKey> {
        &self.reports[kind]
    }

    /// Whether `reports` contains all of this peer's reports.
    pub(crate) fn all_reported(&self, kind: PassKind, reports: &BTreeMap<ReportKey, f64>) -> bool {
        self.reports(kind).iter().all(|key| reports.contains_key(key))
    }

    /// In graph order.
    pub(crate) fn norms(&self) -> impl Iterator<Item = &ValueId> {
        self.norms.iter()
    }
}
