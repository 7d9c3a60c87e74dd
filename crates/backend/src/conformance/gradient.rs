use std::collections::BTreeMap;

use fusionllm_graph::autodiff::differentiate;
use fusionllm_graph::{Builder, CounterRng, DType, GraphError, Init, Op, TensorType, TrainGraph, ValueId};

use super::reference::{Array, evaluate};
use super::{Case, Report, download, guarded, holds};
use crate::{Backend, interpret};

/// Operators without a derivative rule: backward operators and updates.
pub const NOT_DIFFERENTIABLE: &[&str] = &[
    "GeluBackward",
    "ThresholdBackward",
    "EmbeddingDenseBackward",
    "Conv2dWeightGrad",
    "MaxPool2dBackward",
    "AvgPool2dBackward",
    "AdaptiveAvgPool2dBackward",
    "LayerNormInputGrad",
    "LayerNormWeightGrad",
    "BatchNormInputGrad",
    "BatchNormWeightGrad",
    "SoftmaxBackward",
    "LogSoftmaxBackward",
    "ScaledDotProductAttentionBackward",
    "DropoutBackward",
    "CrossEntropyBackward",
    "AdamwStep",
    "SgdStep",
    "SquaredNorm",
];

/// Compares every gradient with central finite differences of the reference evaluator, in `f64`, or in `f32` if the
/// backend lacks `f64`.
///
/// The loss weighs each element of the results differently. Float operands are differentiated all at once and one by
/// one.
pub fn gradients(backend: &dyn Backend, cases: &[Case]) -> Report {
    let mut report = Report::default();
    let dtype = if holds(backend, DType::F64) { DType::F64 } else { DType::F32 };
    if dtype != DType::F64 {
        report.unsupported.insert(DType::F64);
    }
    for case in cases.iter().filter(|c| c.gradient) {
        let followers: Vec<usize> = (0..case.operands.len()).filter(|&i| case.operands[i].follows).collect();
        if followers.is_empty() || case.arrays(dtype).iter().any(|a| !holds(backend, a.ty.dtype)) {
            continue;
        }
        let mut wanted: Vec<Vec<usize>> = vec![followers.clone()];
        if followers.len() > 1 {
            wanted.extend(followers.iter().map(|&i| vec![i]));
        }
        for wanted in wanted {
            let outcome = guarded(|| check(backend, case, dtype, &wanted));
            report.record(format!("{case}, gradient of operands {wanted:?}"), outcome);
        }
    }
    report
}

/// The results that have a derivative: the first one, and all parts of a split.
fn differentiated(op: &Op, types: &[TensorType]) -> Vec<usize> {
    let all = if matches!(op, Op::Split(_)) { types.len() } else { 1 };
    (0..all).filter(|&i| types[i].dtype.is_float()).collect()
}

/// The loss of a case: half the weighted sum of its results.
struct Loss<'a> {
    case: &'a Case,
    /// Indices of results that have a derivative, and the weights of their elements.
    weights: Vec<(usize, Array)>,
}

impl<'a> Loss<'a> {
    fn new(case: &'a Case, arrays: &[Array]) -> Result<Self, String> {
        let types: Vec<TensorType> = evaluate(&case.op, arrays)?.into_iter().map(|a| a.ty).collect();
        let rng = CounterRng::for_name(3, "weights of the results");
        let weights = differentiated(&case.op, &types).into_iter().map(|i| {
            let draw = |j| f64::from(rng.uniform(j as u64, i as u64)) * 2.0 - 0.8;
            let values = (0..types[i].numel()).map(draw).collect();
            (i, Array::from_f64(&types[i].shape, values).converted(types[i].dtype))
        });
        Ok(Self { case, weights: weights.collect() })
    }

    /// The loss for operands of any float type.
    fn value(&self, arrays: &[Array]) -> Result<f64, String> {
        let results = evaluate(&self.case.op, arrays)?;
        let mut sum = 0.0;
        for (i, w) in &self.weights {
            sum += results[*i].floats()?.iter().zip(w.floats()?).map(|(y, w)| y * w).sum::<f64>();
        }
        Ok(0.5 * sum)
    }

    /// The gradients of the operands in `wanted`, as autodiff and the backend compute them. Returns `None` if the
    /// operator has no derivative.
    fn gradients(
        &self,
        backend: &dyn Backend,
        arrays: &[Array],
        wanted: &[usize],
    ) -> Result<Option<Vec<Vec<f64>>>, String> {
        let e = |e: GraphError| e.to_string();
        let mut b = Builder::new("gradient");
        let mut given: Vec<(ValueId, Array)> = Vec::new();
        for (i, a) in arrays.iter().enumerate() {
            let (name, shape) = (format!("operand{i}"), a.ty.shape.clone());
            let id = match wanted.contains(&i) {
                true => b.parameter(&name, a.ty.dtype, shape, Init::Constant(0.0)),
                false => b.input(&name, a.ty.dtype, shape),
            };
            given.push((id.map_err(e)?, a.clone()));
        }
        let operands: Vec<ValueId> = given.iter().map(|(id, _)| *id).collect();
        let loss = self.build(&mut b, &operands, &mut given).map_err(e)?.ok_or("no result has a derivative")?;
        let listed = NOT_DIFFERENTIABLE.contains(&self.case.op.variant());
        let train = match differentiate(&b.finish().map_err(e)?, loss) {
            Err(GraphError::NotDifferentiable { .. }) if listed => return Ok(None),
            Err(e) => return Err(e.to_string()),
            Ok(_) if listed => return Err("it is listed as not differentiable, but is".into()),
            Ok(train) => train,
        };
        given.push((train.loss_weight, Array::filled(train.graph.ty(train.loss_weight).clone(), 0.5)));
        let found = run(backend, &train, given)?;
        let none = |i: usize| vec![0.0; arrays[i].ty.numel()];
        Ok(Some(wanted.iter().map(|&i| found.get(&operands[i]).cloned().unwrap_or_else(|| none(i))).collect()))
    }

    /// Adds the operator and the weighted sum of its results to a graph.
    fn build(
        &self,
        b: &mut Builder,
        operands: &[ValueId],
        given: &mut Vec<(ValueId, Array)>,
    ) -> Result<Option<ValueId>, GraphError> {
        let results = b.apply(self.case.op.clone(), operands)?;
        let mut loss: Option<ValueId> = None;
        for (i, w) in &self.weights {
            let weight = b.input(&format!("weight{i}"), w.ty.dtype, w.ty.shape.clone())?;
            given.push((weight, w.clone()));
            let weighted = b.mul(results[*i], weight)?;
            let dims: Vec<usize> = (0..w.ty.rank()).collect();
            let part = b.sum(weighted, &dims, false)?;
            loss = Some(match loss {
                None => part,
                Some(sum) => b.add(sum, part)?,
            });
        }
        Ok(loss)
    }
}

/// The gradient of each parameter, with its contributions added.
fn run(
    backend: &dyn Backend,
    train: &TrainGraph,
    given: Vec<(ValueId, Array)>,
) -> Result<BTreeMap<ValueId, Vec<f64>>, String> {
    let mut sources = BTreeMap::new();
    for (id, array) in given {
        sources.insert(id, backend.upload(&array.to_host()?).map_err(|e| e.to_string())?);
    }
    let targets: Vec<ValueId> = train.gradients.iter().flat_map(|g| g.contributions.iter().copied()).collect();
    let computed = interpret(backend, &train.graph, sources, &targets).map_err(|e| e.to_string())?;
    let mut computed = computed.iter();
    let mut found: BTreeMap<ValueId, Vec<f64>> = BTreeMap::new();
    for g in &train.gradients {
        for part in computed.by_ref().take(g.contributions.len()) {
            let part = download(backend, part)?;
            if part.ty() != train.graph.ty(g.parameter) {
                return Err(format!("the gradient of {} is {}", train.graph.ty(g.parameter), part.ty()));
            }
            let sum = found.entry(g.parameter).or_insert_with(|| vec![0.0; part.ty().numel()]);
            sum.iter_mut().zip(part.to_f64()).for_each(|(s, v)| *s += v);
        }
    }
    Ok(found)
}

fn check(backend: &dyn Backend, case: &Case, dtype: DType, wanted: &[usize]) -> Result<(), String> {
    let arrays = case.arrays(dtype);
    let loss = Loss::new(case, &arrays)?;
    if loss.weights.is_empty() {
        return Ok(());
    }
    let Some(gradients) = loss.gradients(backend, &arrays, wanted)? else {
        return Ok(());
    };
    // Differences are taken in f64, whatever type the backend computes in.
    let exact: Vec<Array> =
        arrays.iter().map(|a| if a.ty.dtype == dtype { a.converted(DType::F64) } else { a.clone() }).collect();
    let (step, tolerance) = (case.step, case.slack * if dtype == DType::F64 { 1e-7 } else { 1e-4 });
    for (&i, gradient) in wanted.iter().zip(&gradients) {
        for (j, &found) in gradient.iter().enumerate() {
            let shifted = |by: f64| -> Result<f64, String> {
                let mut moved = exact.clone();
                let mut values = moved[i].floats()?.to_vec();
                values[j] += by;
                moved[i] = Array::from_f64(&exact[i].ty.shape, values);
                loss.value(&moved)
            };
            let difference = (shifted(step)? - shifted(-step)?) / (2.0 * step);
            let close = (found - difference).abs() <= tolerance * (1.0 + difference.abs());
            if !close {
                return Err(format!(
                    "operand {i}, element {j}: the gradient is {found}, the difference quotient {difference}"
                ));
            }
        }
    }
    Ok(())
}
