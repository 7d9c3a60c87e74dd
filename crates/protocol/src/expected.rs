use std::collections::{BTreeMap, BTreeSet};

use fusionllm_graph::ValueId;
use fusionllm_plan::{Instruction, Program};

/// What a peer owes the broker in each pass, by its Programs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExpectedReports {
    /// The scalars it reports in a training step, each with its micro-batch.
    train: BTreeSet<(u32, u32)>,
    /// The same, of an evaluation.
    eval: BTreeSet<(u32, u32)>,
    /// The parameters whose squared gradient norms it sends.
    norms: BTreeSet<ValueId>,
}

impl ExpectedReports {
    /// The duties of a peer with these programs.
    pub fn new(train: &Program, eval: &Program) -> Self {
        let reports = |p: &Program| {
            let report = |i: &Instruction| match *i {
                Instruction::Report { report, micro_batch, .. } => Some((report, micro_batch)),
                _ => None,
            };
            p.instructions.iter().filter_map(report).collect()
        };
        let norms = train.owned().map(|(_, r)| r.parameter).collect();
        Self { train: reports(train), eval: reports(eval), norms }
    }

    /// By report and micro-batch.
    pub(crate) fn reports(&self, train: bool) -> &BTreeSet<(u32, u32)> {
        if train { &self.train } else { &self.eval }
    }

    /// Whether all that it owes is among the reports of a pass.
    pub(crate) fn reported(&self, train: bool, reports: &BTreeMap<(u32, u32), f64>) -> bool {
        self.reports(train).iter().all(|key| reports.contains_key(key))
    }

    /// In graph order.
    pub(crate) fn norms(&self) -> impl Iterator<Item = &ValueId> {
        self.norms.iter()
    }
}
