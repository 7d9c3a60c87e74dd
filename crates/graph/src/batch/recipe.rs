//! What the broker computes for the batch: statistics of the data, and the micro-batches' shares.

use std::collections::BTreeMap;

use super::class::{Class, Classes, Combine, Share};
use super::{Evaluate, Weight, Weights};
use crate::ops::{Binary, Unary};
use crate::{DType, Graph, GraphError, HostTensor, NodeId, Op, TensorType, ValueId, ValueKind};

/// The computation of the inputs that the model does not have.
#[derive(Debug, Clone, Default)]
pub(super) struct Recipe {
    sources: Vec<(ValueId, Source)>,
    steps: Vec<Step>,
    /// Statistics of the batch: the input that takes one, and whether it is only divided by.
    pub(super) statistics: Vec<(String, ValueId, bool)>,
    /// Shares of a micro-batch: the input that takes one, its type, and the share.
    pub(super) shares: Vec<(String, DType, Share)>,
    /// The number of targets of each cross-entropy in the loss.
    pub(super) counts: Vec<(NodeId, ValueId)>,
}

#[derive(Debug, Clone)]
enum Source {
    /// The input of this name. Its samples differ between the micro-batches.
    Rows(String),
    /// The input of this name, which all micro-batches share.
    Same(String),
    Constant(HostTensor),
}

#[derive(Debug, Clone)]
struct Step {
    op: Op,
    inputs: Vec<ValueId>,
    outputs: Vec<ValueId>,
    types: Vec<TensorType>,
    /// For each result, how those of the micro-batches are joined.
    combine: Vec<Option<Combine>>,
    /// Whether the second operand, or the only one, is a statistic that is divided by.
    divides: bool,
}

/// A value during the computation.
enum Held {
    Each(Vec<HostTensor>),
    One(HostTensor),
}

impl Recipe {
    pub(super) fn of(counts: Vec<(NodeId, ValueId)>) -> Self {
        Self { counts, ..Self::default() }
    }

    /// The inputs that are filled in.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        let statistics = self.statistics.iter().map(|(name, ..)| name.as_str());
        statistics.chain(self.shares.iter().map(|(name, ..)| name.as_str()))
    }

    /// Adds the nodes of `graph` that compute the statistics and the counts.
    pub(super) fn complete(&mut self, graph: &Graph, classes: &Classes<'_>) {
        let wanted = self.statistics.iter().map(|(_, v, _)| *v).chain(self.counts.iter().map(|(_, v)| *v));
        let live = graph.ancestors(wanted);
        let nodes = graph.nodes.iter().zip(live).filter(|(_, live)| *live).map(|(node, _)| node);
        let mut read: Vec<ValueId> = Vec::new();
        for node in nodes {
            read.extend(&node.inputs);
            let divisor = match (&node.op, &node.inputs[..]) {
                (Op::Binary(Binary::Div), [_, by]) => Some(*by),
                (Op::Unary(Unary::Reciprocal), [by]) => Some(*by),
                (Op::BinaryScalar(op), [by]) if op.op == Binary::Div && op.reverse => Some(*by),
                _ => None,
            };
            self.steps.push(Step {
                op: node.op.clone(),
                inputs: node.inputs.clone(),
                outputs: node.outputs.clone(),
                types: graph.types(&node.outputs).into_iter().cloned().collect(),
                combine: node.outputs.iter().map(|v| classes.combine.get(v).copied()).collect(),
                divides: divisor.is_some_and(|v| classes.is_statistic(v)),
            });
        }
        read.sort();
        read.dedup();
        for v in read {
            let value = graph.value(v);
            let source = match (&value.kind, graph.constants.get(&value.name)) {
                (ValueKind::Input, _) if matches!(classes.class(v), Class::Rows { .. }) => {
                    Source::Rows(value.name.clone())
                }
                (ValueKind::Input, _) => Source::Same(value.name.clone()),
                (ValueKind::Constant, Some(tensor)) => Source::Constant(tensor.clone()),
                _ => continue,
            };
            self.sources.push((v, source));
        }
    }

    /// Whether the statistics and counts depend on the model's input of this name.
    pub(super) fn reads(&self, input: &str) -> bool {
        self.sources.iter().any(|(_, source)| match source {
            Source::Rows(name) | Source::Same(name) => name == input,
            Source::Constant(_) => false,
        })
    }

    pub(super) fn feed(
        &self,
        weight: Weight,
        micro_batches: &mut [BTreeMap<String, HostTensor>],
        factors: &[f64],
        run: Evaluate<'_>,
    ) -> Result<Weights, GraphError> {
        // The number of micro-batches.
        let n: f64 = factors.iter().sum();
        let mut held = self.sources(micro_batches)?;
        // The targets of each micro-batch, by cross-entropy.
        let mut counts: BTreeMap<NodeId, Vec<f64>> = BTreeMap::new();
        for step in &self.steps {
            for (i, value) in step.run(&held, micro_batches.len(), run)?.into_iter().enumerate() {
                let (v, combine) = (step.outputs[i], step.combine[i]);
                if let (Held::Each(each), Some((node, _))) = (&value, self.counts.iter().find(|(_, c)| *c == v)) {
                    counts.insert(*node, each.iter().map(|t| t.to_f64().first().copied().unwrap_or(0.0)).collect());
                }
                let joined = match (value, combine) {
                    (Held::Each(each), Some(combine)) => Held::One(combine.join(&each, factors, n)?),
                    (Held::One(one), Some(combine)) => Held::One(combine.join(&[one], &[1.0], n)?),
                    (value, _) => value,
                };
                held.insert(v, joined);
            }
        }
        for (name, v, divides) in &self.statistics {
            let Some(Held::One(tensor)) = held.get(v) else { return Err(missing(name)) };
            let tensor = if *divides { without_zeros(tensor)? } else { tensor.clone() };
            micro_batches.iter_mut().for_each(|m| drop(m.insert(name.clone(), tensor.clone())));
        }
        let total = |counts: &Vec<f64>| counts.iter().zip(factors).map(|(count, factor)| count * factor).sum::<f64>();
        let share = |share: Share, m: usize| {
            let part = match share.targets.and_then(|node| counts.get(&node)) {
                Some(counts) => counts[m] / total(counts).max(1.0),
                None => 1.0,
            };
            part * n.powi(share.power)
        };
        for (m, inputs) in micro_batches.iter_mut().enumerate() {
            for (name, dtype, s) in &self.shares {
                inputs.insert(name.clone(), HostTensor::scalar(*dtype, share(*s, m))?);
            }
        }
        let of_targets = || Share { power: 0, targets: self.counts.first().map(|(node, _)| *node) };
        let weights = factors.iter().enumerate().map(|(m, factor)| {
            factor
                * match weight {
                    Weight::Equal => 1.0 / n,
                    Weight::Whole => 1.0,
                    Weight::Targets => share(of_targets(), m),
                }
        });
        let targets = match &self.counts[..] {
            [(node, _)] => counts.get(node).map(total),
            _ => None,
        };
        Ok(Weights { weights: weights.collect(), targets })
    }

    fn sources(&self, micro_batches: &[BTreeMap<String, HostTensor>]) -> Result<BTreeMap<ValueId, Held>, GraphError> {
        let input = |m: &BTreeMap<String, HostTensor>, name: &str| m.get(name).cloned().ok_or_else(|| missing(name));
        let mut held = BTreeMap::new();
        for (v, source) in &self.sources {
            let value = match source {
                Source::Constant(tensor) => Held::One(tensor.clone()),
                Source::Rows(name) => {
                    Held::Each(micro_batches.iter().map(|m| input(m, name)).collect::<Result<_, _>>()?)
                }
                Source::Same(name) => match micro_batches.first() {
                    Some(first) => Held::One(input(first, name)?),
                    None => continue,
                },
            };
            held.insert(*v, value);
        }
        Ok(held)
    }
}

impl Step {
    fn run(&self, held: &BTreeMap<ValueId, Held>, n: usize, run: Evaluate<'_>) -> Result<Vec<Held>, GraphError> {
        let operands = self.inputs.iter().map(|v| held.get(v).ok_or_else(|| missing(self.op.name())));
        let operands = operands.collect::<Result<Vec<_>, _>>()?;
        let apply = |m: usize| -> Result<Vec<HostTensor>, GraphError> {
            let mut inputs: Vec<HostTensor> = operands
                .iter()
                .map(|held| match held {
                    Held::Each(each) => each[m].clone(),
                    Held::One(one) => one.clone(),
                })
                .collect();
            if let (true, Some(by)) = (self.divides, inputs.last_mut()) {
                *by = without_zeros(by)?;
            }
            run(&self.op, inputs, &self.types)
                .map_err(|reason| GraphError::Tensor(format!("{}: {reason}", self.op.name())))
        };
        if operands.iter().all(|held| matches!(held, Held::One(_))) {
            return Ok(apply(0)?.into_iter().map(Held::One).collect());
        }
        let mut results: Vec<Vec<HostTensor>> = vec![Vec::with_capacity(n); self.outputs.len()];
        for m in 0..n {
            for (all, one) in results.iter_mut().zip(apply(m)?) {
                all.push(one);
            }
        }
        Ok(results.into_iter().map(Held::Each).collect())
    }
}

impl Combine {
    /// Joins the values of `n` micro-batches in their order, or the one value that all have. Each counts `factors`
    /// times.
    fn join(self, each: &[HostTensor], factors: &[f64], n: f64) -> Result<HostTensor, GraphError> {
        let Some(first) = each.first() else { return Err(missing("micro-batch")) };
        let mut joined: Option<Vec<f64>> = None;
        for (tensor, factor) in each.iter().zip(factors).filter(|(_, factor)| **factor != 0.0) {
            let counted = tensor.to_f64().into_iter().map(|x| match self {
                Self::Sum { .. } => x * factor,
                Self::Product => x.powf(*factor),
                Self::Max | Self::Min => x,
            });
            joined = Some(match joined {
                None => counted.collect(),
                Some(before) => (before.into_iter().zip(counted))
                    .map(|(a, b)| match self {
                        Self::Sum { .. } => a + b,
                        Self::Product => a * b,
                        Self::Max => a.max(b),
                        Self::Min => a.min(b),
                    })
                    .collect(),
            });
        }
        let mut joined = joined.unwrap_or_else(|| vec![0.0; first.ty().numel()]);
        if let Self::Sum { power } = self {
            joined.iter_mut().for_each(|x| *x *= n.powi(power));
        }
        if !first.dtype().is_float() {
            // Factors are fractions, whose sums are only almost integers.
            joined.iter_mut().for_each(|x| *x = x.round());
        }
        HostTensor::from_f64(first.shape(), &joined)?.cast(first.dtype())
    }
}

/// A divisor. Where it is 0, there is nothing to divide.
fn without_zeros(tensor: &HostTensor) -> Result<HostTensor, GraphError> {
    let numbers: Vec<f64> = tensor.to_f64().into_iter().map(|x| if x == 0.0 { 1.0 } else { x }).collect();
    HostTensor::from_f64(tensor.shape(), &numbers)?.cast(tensor.dtype())
}

fn missing(name: &str) -> GraphError {
    GraphError::Tensor(format!("a micro-batch has no {name:?}"))
}
