//! Compares an imported model with PyTorch's results.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use fusionllm_backend::open;
use fusionllm_data::weights::Weights;
use fusionllm_exec::ExecError;
use fusionllm_exec::local::{LocalRun, Training};
use fusionllm_graph::ops::SgdStep;
use fusionllm_graph::{DType, Graph, HostTensor, TensorType, TrainGraph, ValueId, autodiff};
use fusionllm_import::{FloatType, ImportOptions, Imported};
use fusionllm_plan::{Schedule, compile, equal_compute};
use fusionllm_program::{LearningRate, Optimizer, TensorKey};
use serde::Serialize;

use super::imported::ImportedModel;
use crate::WorkbenchError;

/// How far a model's loss, gradients and buffers are from those of its reference.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Deviations {
    /// The loss computed here.
    pub loss: f64,
    /// The reference loss.
    pub loss_reference: f64,
    /// The difference of the losses over the size of the reference loss.
    pub loss_rel_err: f64,
    /// The largest error of a gradient, `‖g − ref‖ / max(‖ref‖, 1e-6 · the largest ‖ref‖)`. NaN if a gradient is
    /// not finite.
    pub max_grad_rel_err: f64,
    /// The parameter with the largest error.
    pub worst_parameter: String,
    /// Gradients compared.
    pub parameters: usize,
    /// The largest error of a buffer after the pass, `‖b − ref‖ / ‖ref‖`. 0 if the reference has no buffers.
    pub max_buffer_rel_err: f64,
    /// The buffer with the largest error; empty if the reference has none.
    pub worst_buffer: String,
    /// Forward operators of the graph.
    pub operators: usize,
    /// The warnings that the user should read about the archive.
    #[serde(skip)]
    pub warnings: Vec<String>,
}

impl Deviations {
    /// The largest of the errors; infinite if one is NaN.
    pub fn error(&self) -> f64 {
        let number = |e: f64| if e.is_nan() { f64::INFINITY } else { e };
        [self.loss_rel_err, self.max_grad_rel_err, self.max_buffer_rel_err].into_iter().map(number).fold(0.0, f64::max)
    }
}

/// Computes loss and gradients of `model` over `peers` peers, and compares them with a reference. The reference is a
/// safetensors file with `input.NAME`, `loss` and `grad.PARAMETER`. It may have `buffer.NAME`, the buffers after the
/// forward pass. The float type is that of its loss. The file `weights` replaces the state of the archive.
/// `loss` is the output of the model that is the loss.
///
/// # Errors
///
/// A file cannot be read, the files do not fit each other, or an operator fails.
pub fn check(
    model: &Path,
    weights: Option<&Path>,
    loss: Option<&str>,
    reference: &Path,
    backend: &str,
    peers: usize,
) -> Result<Deviations, WorkbenchError> {
    let reference = Reference(Weights::open(reference)?);
    let loss_reference = reference.tensor("loss")?;
    let float_type = if loss_reference.dtype() == DType::F64 { FloatType::Double } else { FloatType::Single };
    let options =
        ImportOptions { batch_size: reference.samples(), float_type, loss: loss.map(str::to_owned), results: false };
    let mut model = ImportedModel::open(model, weights, options)?;
    let loss = reference.loss(model.imported())?;
    let graph = model.imported().graph.clone();
    let train = autodiff::differentiate(&graph, loss)?;

    let batch = reference.batch(&graph, loss)?;
    let mut run = one_step_run(&mut model, &graph, &train, backend, peers)?;
    let step = run.step(&[batch])?;
    let gradients = reference.compare(&run, &graph, &train, &model.imported().tied)?;

    let (worst_buffer, max_buffer_rel_err) = reference.compare_buffers(&run, &graph, &mut model)?;

    let largest = gradients.iter().map(|g| g.norm).fold(0.0, f64::max);
    let worst = gradients
        .iter()
        .map(|g| (g.parameter.clone(), g.relative_error(largest)))
        .max_by(|a, b| a.1.total_cmp(&b.1))
        .unwrap_or_default();
    let loss_reference = loss_reference.to_f64().first().copied().unwrap_or(f64::NAN);
    // A step with a gradient that is not finite is not applied, and leaves no momentum to compare.
    let max_grad_rel_err = if step.grad_norm.is_finite() { worst.1 } else { f64::NAN };
    let loss = step.loss;
    Ok(Deviations {
        loss,
        loss_reference,
        loss_rel_err: (loss - loss_reference).abs() / loss_reference.abs().max(f64::MIN_POSITIVE),
        max_grad_rel_err,
        worst_parameter: worst.0,
        parameters: gradients.len(),
        max_buffer_rel_err,
        worst_buffer,
        operators: graph.nodes.len(),
        warnings: model.warnings(),
    })
}

/// Spreads the model over `peers` peers, ready for one step that keeps its gradients.
fn one_step_run(
    model: &mut ImportedModel,
    graph: &Graph,
    train: &TrainGraph,
    backend: &str,
    peers: usize,
) -> Result<LocalRun, WorkbenchError> {
    let names: Vec<String> = (0..peers.max(1)).map(|p| format!("p{p}")).collect();
    let plan = equal_compute(graph, &names, 1, Schedule::default())?;
    let programs = compile(&plan, graph, train)?;
    let backends = names
        .iter()
        .map(|_| open(backend).map_err(|e| WorkbenchError::input(e.to_string())))
        .collect::<Result<Vec<_>, _>>()?;
    // With plain gradient descent, the momentum after one step is the gradient.
    let training = Training {
        optimizer: Optimizer::Sgd(SgdStep { momentum: 0.0, weight_decay: 0.0, nesterov: false }),
        learning_rate: LearningRate { base: 0.0, warmup: 0, cosine_until: None, min: 0.0 },
        clip: None,
        seed: 1,
    };
    Ok(LocalRun::new(programs, &backends, training, |value| {
        model.initial(value).map_err(|e| ExecError::State(e.to_string()))
    })?)
}

/// PyTorch's inputs, loss and gradients.
struct Reference(Weights);

/// The distance of one gradient from its reference.
struct Gradient {
    parameter: String,
    distance: f64,
    /// The norm of the reference.
    norm: f64,
}

impl Gradient {
    /// `largest` is the largest norm of a reference gradient. It bounds the error of gradients near zero.
    fn relative_error(&self, largest: f64) -> f64 {
        if self.distance == 0.0 { 0.0 } else { self.distance / self.norm.max(1e-6 * largest) }
    }
}

impl Reference {
    fn error(&self, message: impl fmt::Display) -> WorkbenchError {
        WorkbenchError::input(format!("{}: {message}", self.0.path().display()))
    }

    fn tensor(&self, name: &str) -> Result<HostTensor, WorkbenchError> {
        self.0.read(name)?.ok_or_else(|| {
            WorkbenchError::input_with_hint(
                format!("{}: it holds no tensor `{name}`", self.0.path().display()),
                "a reference has the tensors input.NAME, loss and grad.PARAMETER",
            )
        })
    }

    /// The loss of a model. A number that no parameter changes is one if PyTorch has gradients of it, which are 0, as
    /// those of a count are.
    fn loss(&self, imported: &Imported) -> Result<ValueId, WorkbenchError> {
        let Some(error) = imported.without_loss() else {
            let loss = imported.graph.outputs.get("loss").copied();
            return loss.ok_or_else(|| WorkbenchError::State(format!("{} has no loss", imported.graph.name)));
        };
        let has_gradients = self.0.tensor_types().any(|(name, _)| name.starts_with("grad."));
        let is_number = |ty: &TensorType| ty.dtype.is_float() && ty.numel() == 1;
        let mut numbers =
            imported.graph.outputs.values().filter(|v| has_gradients && is_number(imported.graph.ty(**v)));
        match (numbers.next(), numbers.next()) {
            (Some(number), None) => Ok(*number),
            _ => Err(error.into()),
        }
    }

    /// The number of samples in the first input that has rows.
    fn samples(&self) -> Option<usize> {
        self.0
            .tensor_types()
            .filter(|(name, _)| name.starts_with("input."))
            .find_map(|(_, ty)| ty.shape.first().copied())
    }

    /// The inputs of the graph, as one micro-batch.
    fn batch(&self, graph: &Graph, loss: ValueId) -> Result<BTreeMap<String, HostTensor>, WorkbenchError> {
        let mut batch = BTreeMap::new();
        for v in graph.inputs() {
            let (name, ty) = (&graph.value(v).name, graph.ty(v));
            let given = self.tensor(&format!("input.{name}"))?.cast(ty.dtype)?;
            if given.ty() != ty {
                return Err(self.error(format!("`input.{name}` is {}, the model takes {ty}", given.ty())));
            }
            batch.insert(name.clone(), given);
        }
        batch.insert("loss_weight".into(), HostTensor::scalar(graph.ty(loss).dtype, 1.0)?);
        Ok(batch)
    }

    /// Compares all gradients of the reference with those that `run` computed. `tied` maps other names of a parameter
    /// to its name in the graph.
    fn compare(
        &self,
        run: &LocalRun,
        graph: &Graph,
        train: &TrainGraph,
        tied: &BTreeMap<String, String>,
    ) -> Result<Vec<Gradient>, WorkbenchError> {
        let mut gradients = Vec::new();
        for (key, ty) in self.0.tensor_types() {
            let Some(given) = key.strip_prefix("grad.") else { continue };
            let name = tied.get(given).map_or(given, String::as_str);
            let trained = train.gradients.iter().any(|g| graph.value(g.parameter).name == name);
            let own = match trained {
                true => Some(run.read(TensorKey::slot(name, "momentum_buffer"))?),
                false if graph.find(name).is_some() => None,
                false => return Err(self.error(format!("the model has no parameter {given:?}"))),
            };
            if own.as_ref().is_some_and(|own| own.ty().numel() != ty.numel()) {
                return Err(self.error(format!("`{key}` is not of the parameter's size")));
            }
            let (distance, norm) = self.distance_and_norm(key, &ty, own.as_ref())?;
            gradients.push(Gradient { parameter: given.to_owned(), distance, norm });
        }
        Ok(gradients)
    }

    /// The norm of the difference from a tensor of the reference, and the norm of that one. `own` is zero if it is
    /// missing. Both are read in parts, because a second copy of a large gradient may not fit into the memory.
    fn distance_and_norm(
        &self,
        key: &str,
        ty: &TensorType,
        own: Option<&HostTensor>,
    ) -> Result<(f64, f64), WorkbenchError> {
        const PART: usize = 1 << 16;
        let (mut distance, mut norm, mut bytes) = (0.0, 0.0, Vec::new());
        for start in (0..ty.numel()).step_by(PART) {
            let count = PART.min(ty.numel() - start);
            bytes.clear();
            self.0.append(key, start * ty.dtype.size(), count * ty.dtype.size(), &mut bytes)?;
            let reference = numbers(ty.dtype, &bytes)?;
            let own = match own {
                Some(own) => {
                    let size = own.dtype().size();
                    numbers(own.dtype(), &own.bytes()[start * size..(start + count) * size])?
                }
                None => vec![0.0; count],
            };
            distance += own.iter().zip(&reference).map(|(a, b)| (a - b).powi(2)).sum::<f64>();
            norm += reference.iter().map(|x| x * x).sum::<f64>();
        }
        Ok((distance.sqrt(), norm.sqrt()))
    }

    /// The buffer that is furthest from the reference after the forward pass, and its relative error. A buffer that the
    /// graph does not have is as the archive stores it.
    fn compare_buffers(
        &self,
        run: &LocalRun,
        graph: &Graph,
        model: &mut ImportedModel,
    ) -> Result<(String, f64), WorkbenchError> {
        let mut worst = (String::new(), 0.0);
        for (key, ty) in self.0.tensor_types() {
            let Some(given) = key.strip_prefix("buffer.") else { continue };
            let name = model.imported().tied.get(given).map_or(given, String::as_str).to_owned();
            let own = match graph.buffers().any(|v| graph.value(v).name == name) {
                true => run.read(&name)?,
                false => model.archive().state_dict_tensor(&name)?,
            };
            if own.ty().numel() != ty.numel() {
                return Err(self.error(format!("`{key}` is not of the buffer's size")));
            }
            let (distance, norm) = self.distance_and_norm(key, &ty, Some(&own))?;
            let error = if distance == 0.0 { 0.0 } else { distance / norm.max(f64::MIN_POSITIVE) };
            if worst.0.is_empty() || error.is_nan() || error > worst.1 {
                worst = (given.to_owned(), error);
            }
        }
        Ok(worst)
    }
}

/// A part of a tensor, as numbers.
fn numbers(dtype: DType, bytes: &[u8]) -> Result<Vec<f64>, WorkbenchError> {
    let ty = TensorType::new(dtype, [bytes.len() / dtype.size()]);
    Ok(HostTensor::from_bytes(ty, bytes.to_vec())?.to_f64())
}
