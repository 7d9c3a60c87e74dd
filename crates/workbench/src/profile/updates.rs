//! What a step does for each parameter.

use std::collections::{HashMap, HashSet};

use fusionllm_backend::{Backend, Tensor};
use fusionllm_exec::Pace;
use fusionllm_graph::ops::{AdamwStep, Binary, SgdStep, SquaredNorm};
use fusionllm_graph::{DType, Graph, HostTensor, Op, TensorType};
use fusionllm_program::{Optimizer, Verdict};

use super::bench::{Took, typical};
use super::{Effort, Samples, Stopwatch, noise};
use crate::WorkbenchError;
use crate::machine::memory;

/// Bytes of the parameters that are measured in turn: more than caches hold.
pub(super) const TURN_BYTES: usize = 64 << 20;

impl Samples {
    /// Measures what a step does for each parameter.
    pub(super) fn updates(
        &mut self,
        backend: &dyn Backend,
        graph: &Graph,
        effort: Effort,
        slowdown: f64,
    ) -> Result<(), WorkbenchError> {
        let parameters: Vec<&TensorType> = graph.parameters().map(|v| graph.ty(v)).collect();
        turns(&parameters).iter().try_for_each(|turn| self.updates_in_turn(backend, turn, effort, slowdown))
    }

    /// Measures what a step does for each of these parameters: it adds to the gradient, takes the gradient's norm, and
    /// applies it by a rule. Like a step, it does so for one parameter after the other.
    fn updates_in_turn(
        &mut self,
        backend: &dyn Backend,
        turn: &[&TensorType],
        effort: Effort,
        slowdown: f64,
    ) -> Result<(), WorkbenchError> {
        let rules = [
            Optimizer::Adamw(AdamwStep { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 }),
            Optimizer::Sgd(SgdStep { momentum: 0.9, weight_decay: 5e-4, nesterov: false }),
        ];
        let types: HashSet<&TensorType> = turn.iter().copied().collect();
        let noises: HashMap<&TensorType, HostTensor> =
            types.into_iter().map(|ty| Ok((ty, noise(ty, 0.05)?))).collect::<Result<_, WorkbenchError>>()?;
        let fresh = |ty: &&TensorType| Ok::<Tensor, WorkbenchError>(backend.upload(&noises[*ty])?);

        let alone = backend.device().threads == Some(1);
        let mut pace = Pace::new(slowdown);
        let mut timed = |op: &Op, operands: Vec<Tensor>, results: &[TensorType]| {
            let held = memory::live_bytes() + results.iter().map(|t| t.bytes() as u64).sum::<u64>();
            memory::take_peak();
            pace.restart();
            let watch = Stopwatch::start(alone);
            let made = backend.run(op, operands, results)?;
            backend.synchronize()?;
            let took = Took { seconds: watch.seconds(), scratch: memory::take_peak().saturating_sub(held) };
            pace.count_work();
            Ok::<_, WorkbenchError>((took, made))
        };
        let mut took: HashMap<&TensorType, Vec<Took>> = HashMap::new();

        let sum = Op::from(Binary::Add);
        let mut gradients = turn.iter().map(fresh).collect::<Result<Vec<_>, _>>()?;
        for _ in 0..=effort.repeats {
            for (ty, gradient) in turn.iter().zip(&mut gradients) {
                let term = fresh(ty)?;
                let before = std::mem::replace(gradient, term.clone());
                let (once, made) = timed(&sum, vec![before, term], std::slice::from_ref(*ty))?;
                made.into_iter().for_each(|sum| *gradient = sum);
                took.entry(*ty).or_default().push(once);
            }
        }
        took.drain().for_each(|(ty, took)| self.add(&sum, &[ty, ty], &[ty], typical(&took)));

        let norm = Op::from(SquaredNorm);
        let scalar = TensorType::new(DType::F64, []);
        for _ in 0..=effort.repeats {
            for (ty, gradient) in turn.iter().zip(&gradients) {
                let (once, _) = timed(&norm, vec![gradient.clone()], std::slice::from_ref(&scalar))?;
                took.entry(*ty).or_default().push(once);
            }
        }
        took.drain().for_each(|(ty, took)| self.add(&norm, &[ty], &[&scalar], typical(&took)));

        for rule in &rules {
            let (op, slots) = (rule.op(), rule.slots().len());
            let hyper = rule.hyper(&Verdict { apply: true, update: 9, lr: 1e-3, factor: 1.0 }, 1.0);
            let hyper = HostTensor::from_f64([hyper.len()], &hyper)?;
            // The parameter and its slots.
            let state = |ty| (0..1 + slots).map(|_| fresh(ty)).collect::<Result<Vec<_>, _>>();
            let mut states = turn.iter().map(state).collect::<Result<Vec<_>, _>>()?;
            for _ in 0..=effort.repeats {
                for ((ty, gradient), state) in turn.iter().zip(&gradients).zip(&mut states) {
                    let mut operands = std::mem::take(state);
                    operands.insert(1, gradient.clone());
                    operands.push(backend.upload(&hyper)?);
                    let (once, made) = timed(&op, operands, &vec![(*ty).clone(); 1 + slots])?;
                    *state = made;
                    took.entry(*ty).or_default().push(once);
                }
            }
            took.drain().for_each(|(ty, took)| {
                let inputs: Vec<&TensorType> = std::iter::repeat_n(ty, 2 + slots).chain([hyper.ty()]).collect();
                self.add(&op, &inputs, &vec![ty; 1 + slots], typical(&took));
            });
        }
        Ok(())
    }
}

/// The parameters that are measured in turn: each type at least once, and as many others as the model has and a turn
/// holds. What no cache holds is then in none when its turn comes. Only a single type may be larger than a turn.
pub(super) fn turns<'a>(parameters: &[&'a TensorType]) -> Vec<Vec<&'a TensorType>> {
    let most = TURN_BYTES.min(parameters.iter().map(|ty| ty.bytes()).sum());
    let mut types = parameters.to_vec();
    types.sort_by_key(|ty| ty.numel());
    types.dedup();
    let mut turns: Vec<(usize, Vec<&TensorType>)> = Vec::new();
    for ty in types {
        match turns.last_mut() {
            Some((bytes, turn)) if *bytes + ty.bytes() <= most => {
                *bytes += ty.bytes();
                turn.push(ty);
            }
            _ => turns.push((ty.bytes(), vec![ty])),
        }
    }
    for (bytes, turn) in &mut turns {
        for ty in parameters {
            if *bytes + ty.bytes() <= most {
                *bytes += ty.bytes();
                turn.push(ty);
            }
        }
    }
    turns.into_iter().map(|(_, turn)| turn).collect()
}
