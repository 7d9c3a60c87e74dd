//! The recipe by which the broker computes statistics of a batch's data, and the shares of its micro-batches.

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

    /// Whether the statistics or the counts depend on the input of this name.
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
        (factors, per_batch): (&[f64], usize),
        run: Evaluate<'_>,
    ) -> Result<Weights, GraphError> {
        if micro_batches.is_empty() {
            return Ok(Weights { weights: Vec::new(), targets: None });
        }
        let set = Set { factors, per_batch: per_batch as f64 };
        let mut held = self.sources(micro_batches)?;
        // The targets of each micro-batch, by cross-entropy.
        let mut counts: BTreeMap<NodeId, Vec<f64>> = BTreeMap::new();
        for step in &self.steps {
            for (i, value) in step.run(&held, micro_batches.len(), run)?.into_iter().enumerate() {
                let (v, combine) = (step.outputs[i], step.combine[i]);
                if let Some((node, _)) = self.counts.iter().find(|(_, c)| *c == v) {
                    let number = |tensor: &HostTensor| tensor.to_f64().first().copied().unwrap_or(0.0);
                    let of_each = match &value {
                        Held::Each(each) => each.iter().map(number).collect(),
                        Held::One(one) => vec![number(one); micro_batches.len()],
                    };
                    counts.insert(*node, of_each);
                }
                let joined = match (value, combine) {
                    (Held::Each(each), Some(combine)) => Held::One(set.join(combine, &each)?),
                    (Held::One(one), Some(combine)) => Held::One(set.scaled(combine, one)?),
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
        let share = |share: Share, m: usize| match share.targets.and_then(|node| counts.get(&node)) {
            Some(counts) => set.share_of_targets(counts, m) * set.per_batch.powi(share.power),
            None => set.share(share.power, m),
        };
        let of_loss = match weight {
            Weight::Equal => Some(Share::EQUAL),
            Weight::Whole => Some(Share::WHOLE),
            Weight::Targets(node) => Some(Share { power: 0, targets: Some(node) }),
            Weight::Inside => None,
        };
        let mut weights = Vec::with_capacity(micro_batches.len());
        for (m, inputs) in micro_batches.iter_mut().enumerate() {
            for (name, dtype, s) in &self.shares {
                inputs.insert(name.clone(), HostTensor::scalar(*dtype, share(*s, m))?);
            }
            weights.push(of_loss.map_or(1.0, |s| share(s, m)));
        }
        let mut all = counts.values();
        let targets = all.next().filter(|_| all.next().is_none()).map(|counts| set.sum(counts));
        Ok(Weights { weights, targets })
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

/// Micro-batches, each of which counts as often as its factor says.
struct Set<'a> {
    factors: &'a [f64],
    /// The micro-batches of a batch. Sums are those of a batch, or of a batch on average if the set is larger.
    per_batch: f64,
}

impl Set<'_> {
    /// A sum over the micro-batches, in their order.
    fn sum(&self, numbers: &[f64]) -> f64 {
        numbers.iter().zip(self.factors).map(|(number, factor)| number * factor).sum()
    }

    fn share_of_targets(&self, counts: &[f64], m: usize) -> f64 {
        let all = self.sum(counts);
        // Without targets there is nothing to share.
        counts[m] * self.factors[m] / if all == 0.0 { 1.0 } else { all }
    }

    /// The share of a micro-batch in a value that is `n^power` times the sum over the `n` micro-batches of a batch.
    fn share(&self, power: i32, m: usize) -> f64 {
        self.factors[m] * self.per_batch.powi(power + 1) / self.factors.iter().sum::<f64>()
    }

    /// Joins the micro-batches' values, in their order.
    fn join(&self, combine: Combine, each: &[HostTensor]) -> Result<HostTensor, GraphError> {
        let Some(first) = each.first() else { return Err(missing("micro-batch")) };
        let neutral = match combine {
            Combine::Sum { .. } => 0.0,
            Combine::Product => 1.0,
            Combine::Max => f64::NEG_INFINITY,
            Combine::Min => f64::INFINITY,
        };
        let mut joined = vec![neutral; first.ty().numel()];
        for (tensor, factor) in each.iter().zip(self.factors).filter(|(_, factor)| **factor != 0.0) {
            for (a, b) in joined.iter_mut().zip(tensor.to_f64()) {
                *a = match combine {
                    Combine::Sum { .. } => *a + factor * b,
                    Combine::Product => *a * b.powf(*factor),
                    Combine::Max => a.max(b),
                    Combine::Min => a.min(b),
                };
            }
        }
        if let Combine::Sum { power } = combine {
            let scale = self.per_batch.powi(power + 1) / self.factors.iter().sum::<f64>();
            joined.iter_mut().for_each(|x| *x *= scale);
        }
        if !first.dtype().is_float() {
            // Factors are fractions, whose sums are only almost integers.
            joined.iter_mut().for_each(|x| *x = x.round());
        }
        HostTensor::from_f64(first.shape(), &joined)?.cast(first.dtype())
    }

    /// The value of a batch, from the one that all micro-batches have.
    fn scaled(&self, combine: Combine, one: HostTensor) -> Result<HostTensor, GraphError> {
        let Combine::Sum { power } = combine else { return Ok(one) };
        let scaled: Vec<f64> = one.to_f64().into_iter().map(|x| x * self.per_batch.powi(power)).collect();
        HostTensor::from_f64(one.shape(), &scaled)?.cast(one.dtype())
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
