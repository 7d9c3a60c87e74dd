//! The brief measurement of a joiner, for which the others wait.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use fusionllm_backend::Backend;
use fusionllm_graph::{Advice, Node, NodeId};
use fusionllm_plan::Device;
use fusionllm_program::{Instruction, Program};

use super::{BRIEF, Effort, LeftOut, Samples, cost_of, few_networks, measure_on, sample};
use crate::WorkbenchError;

/// The effort for a job's own step, while the other joiners wait.
const JOINING: Effort = Effort { warm_up: 1, patience: Duration::from_millis(1500), repeats: 1 };

/// Estimated seconds of a pass over a job's own operators that a joiner measures.
const MAX_PASS_S: f64 = 5.0;

/// Measures a few small networks in about a second, and then operators of a job's model, by [`samples`](super::samples)
/// of it. These may be a stranger's. A sample that needs more than `memory` bytes, or too much time, is measured with
/// fewer micro-batches. If not even one fits, its operators are measured one after the other, and what does not fit then
/// is left out. That is the last resort: an operator that runs again and again finds its operands in the caches, where
/// those of a step left something else.
///
/// # Errors
///
/// The backend fails.
pub fn measure_briefly(
    backend: &Arc<dyn Backend>,
    slowdown: f64,
    memory: Option<u64>,
    own: &[Program],
) -> Result<(Device, Option<LeftOut>), WorkbenchError> {
    let mut device = measure_on(backend, (few_networks()?, BRIEF), (&[], 0), slowdown, |_| {})?;
    let mut left_out = LeftOut::new(memory);
    crate::machine::compute_threads(slowdown)?.install(|| {
        let mut samples = Samples::default();
        for program in own {
            if let Err(e) = program.validate() {
                tracing::info!("the broker's sample of the model is not valid: {e}");
                continue;
            }
            let fitting = sample::fitting(program, |program| {
                memory.is_none_or(|memory| sample::needed_bytes(program) <= memory)
                    && slowdown * pass_s(program, &device) <= MAX_PASS_S
            });
            let measured = fitting.map(|program| samples.own(backend, &program, &BTreeMap::new(), JOINING, slowdown));
            if !matches!(measured, Some(Ok(()))) {
                samples.one_by_one(backend, program, &device, slowdown, &mut left_out);
            }
        }
        device.measured.operators.by_signature.extend(samples.seconds);
    });
    Ok((device, (left_out.count() > 0).then_some(left_out)))
}

/// The estimated seconds of a pass over a valid Program.
fn pass_s(program: &Program, device: &Device) -> f64 {
    let cost = |node: &Node| device.seconds(node.op.name(), &cost_of(program, node));
    let costs: BTreeMap<NodeId, f64> = program.nodes.iter().map(|(id, node)| (*id, cost(node))).collect();
    let runs = program.instructions.iter().filter_map(|instruction| match instruction {
        Instruction::Run { node, .. } => Some(costs[node]),
        _ => None,
    });
    runs.sum()
}

impl Samples {
    /// Measures a model's own operators one after the other, as far as they fit. The quickest come first.
    fn one_by_one(
        &mut self,
        backend: &Arc<dyn Backend>,
        sample: &Program,
        device: &Device,
        slowdown: f64,
        left_out: &mut LeftOut,
    ) {
        let mut alone: Vec<(f64, Program)> =
            sample::one_by_one(sample).into_values().map(|p| (slowdown * pass_s(&p, device), p)).collect();
        alone.sort_by(|a, b| a.0.total_cmp(&b.0));
        let effort = Effort { patience: JOINING.patience / alone.len().max(1) as u32, ..JOINING };
        left_out.of += alone.len();
        let mut taken_s = 0.0;
        for (seconds, program) in alone {
            let needed = sample::needed_bytes(&program);
            if left_out.memory.is_some_and(|memory| needed > memory) {
                left_out.too_large += 1;
                left_out.needed = left_out.needed.max(needed);
            } else if taken_s + seconds > MAX_PASS_S {
                left_out.too_slow += 1;
            } else if let Err(e) = self.own(backend, &program, &BTreeMap::new(), effort, slowdown) {
                left_out.failed += 1;
                tracing::info!("an operator of the model cannot be measured: {}", e.one_line());
            } else {
                taken_s += seconds;
            }
        }
    }
}
