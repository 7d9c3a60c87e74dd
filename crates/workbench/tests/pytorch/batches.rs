//! Whole batches against PyTorch, cut into micro-batches and over replicas. `crates/import/stock/batches.py` defines the
//! losses.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use fusionllm_backend::{Backend, BackendError, open};
use fusionllm_data::weights::Weights;
use fusionllm_exec::ExecError;
use fusionllm_exec::local::{LocalRun, Training};
use fusionllm_graph::batch::Doubt;
use fusionllm_graph::ops::{AdamwStep, SgdStep};
use fusionllm_graph::{HostTensor, Op, TensorType};
use fusionllm_import::ImportOptions;
use fusionllm_plan::{Plan, Schedule, compile, equal_compute};
use fusionllm_program::{LearningRate, Optimizer, TensorKey};
use fusionllm_workbench::model::Model;
use fusionllm_workbench::model::imported::ImportedModel;
use fusionllm_workspace::config::Job;
use libtest_mimic::{Arguments, Failed, Trial};
use serde::Deserialize;

/// Samples of a batch.
const ROWS: usize = 8;
/// Batches of each loss, and steps of a training.
const BATCHES: usize = 8;
const STEPS: usize = 30;
/// Single precision on both sides.
const TOLERANCE: f64 = 1e-5;

/// A loss, as `batches.py` lists it.
#[derive(Deserialize)]
struct Loss {
    name: String,
    kind: Kind,
}

#[derive(Deserialize, Clone, Copy)]
#[serde(rename_all = "snake_case")]
enum Kind {
    /// The loss of a batch follows from its micro-batches.
    AddsUp,
    /// Samples meet in the loss.
    Couples,
    /// The analysis cannot tell.
    Unknown,
    /// A stock model, which PyTorch has trained.
    Trained,
}

/// A test for each loss that the command line chooses. One process exports all of them.
pub(super) fn trials(python: &Path, arguments: &Arguments) -> Vec<Trial> {
    let (losses, directory) = super::exported::<Loss>(python, "batches.py", "losses.json", arguments);
    let directory = Arc::new(directory);
    let trial = |loss: Loss| {
        let directory = directory.clone();
        Trial::test(format!("batches::{}", loss.name), move || match loss.kind {
            Kind::AddsUp => adds_up(directory.path(), &loss.name),
            Kind::Couples => is_doubted(directory.path(), &loss.name, |d| matches!(d, Doubt::Couples(_))),
            Kind::Unknown => is_doubted(directory.path(), &loss.name, |d| matches!(d, Doubt::Unknown(_))),
            Kind::Trained => trained(directory.path(), &loss.name),
        })
    };
    losses.into_iter().map(trial).collect()
}

fn built(directory: &Path, name: &str, micro_batch: usize) -> Result<Model, Failed> {
    let text = format!(
        "[model]\nfile = \"{name}.pt2\"\n[data]\nkind = \"tensors\"\nfiles = [\"{name}.safetensors\"]\n\
         [train]\nbatch = {ROWS}\nmicro_batch = {micro_batch}"
    );
    let path = directory.join(format!("{name}.{micro_batch}.toml"));
    std::fs::write(&path, text)?;
    let job = Job::load(&path, &[])?;
    Model::build(&job, micro_batch).map_err(|e| Failed::from(e.to_string()))
}

/// It is told that micro-batches may not add up to the batch. Where the micro-batch is the batch, the loss is PyTorch's.
fn is_doubted(directory: &Path, name: &str, expected: fn(&Doubt) -> bool) -> Result<(), Failed> {
    let model = built(directory, name, 2)?;
    if !model.loss.doubts.iter().any(expected) || model.doubt(ROWS).is_none() {
        return Err(format!("the doubts are {:?}", model.loss.doubts).into());
    }
    Cut::new(directory, name, ROWS, 1, GRADIENTS)?.compare()
}

fn adds_up(directory: &Path, name: &str) -> Result<(), Failed> {
    for micro_batch in [1, 2, 4, 8] {
        for peers in [1, 3] {
            let cut = Cut::new(directory, name, micro_batch, peers, GRADIENTS)?;
            cut.expect_no_doubts()?;
            cut.compare()?;
        }
    }
    Ok(())
}

/// The losses of a training are those of PyTorch's with whole batches.
fn trained(directory: &Path, name: &str) -> Result<(), Failed> {
    let adamw = AdamwStep { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    for micro_batch in [1, 2, 8] {
        for peers in [1, 3] {
            let mut cut = Cut::new(directory, name, micro_batch, peers, (Optimizer::Adamw(adamw), 1e-3))?;
            cut.expect_no_doubts()?;
            for step in 0..STEPS {
                let (ours, theirs) = (cut.step(step)?, cut.read(&format!("loss.{step}"))?.to_f64()[0]);
                if (ours - theirs).abs() > 1e-4 || ours.is_nan() {
                    return Err(format!("{}, step {step}: the loss is {ours}, PyTorch's {theirs}", cut.place()).into());
                }
            }
        }
    }
    Ok(())
}

/// With a momentum that forgets, the buffer of plain gradient descent is the gradient of the last step.
const GRADIENTS: (Optimizer, f64) =
    (Optimizer::Sgd(SgdStep { momentum: 0.0, weight_decay: 0.0, nesterov: false }), 0.0);

/// A model whose batches are cut.
struct Cut {
    model: Model,
    micro_batch: usize,
    peers: usize,
    reference: Weights,
    run: LocalRun,
    cpu: Arc<dyn Backend>,
}

impl Cut {
    fn new(
        directory: &Path,
        name: &str,
        micro_batch: usize,
        peers: usize,
        (optimizer, rate): (Optimizer, f64),
    ) -> Result<Self, Failed> {
        let model = built(directory, name, micro_batch)?;
        let file = directory.join(format!("{name}.pt2"));
        let options = ImportOptions { batch_size: Some(micro_batch), ..Default::default() };
        let mut archive = ImportedModel::open(&file, None, options)?;
        let names: Vec<String> = (0..peers).map(|p| format!("p{p}")).collect();
        let count = ROWS / micro_batch;
        let mut plan = equal_compute(&model.forward, &names, count as u32, Schedule::default())?;
        replicate(&mut plan, peers, count);
        let backends: Vec<Arc<dyn Backend>> = names.iter().map(|_| open("cpu")).collect::<Result<_, _>>()?;
        let learning_rate = LearningRate { base: rate, warmup: 0, cosine_until: None, min: 0.0 };
        let training = Training { optimizer, learning_rate, clip: None, seed: 1 };
        let programs = compile(&plan, &model.forward, &model.train)?;
        let constants = model.train.graph.constants.clone();
        let run = LocalRun::new(programs, &backends, training, |value| match constants.get(&value.name) {
            Some(constant) => Ok(constant.clone()),
            None => archive.initial(value).map_err(|e| ExecError::State(e.to_string())),
        })?;
        let reference = Weights::open(&directory.join(format!("{name}.safetensors")))?;
        Ok(Self { model, micro_batch, peers, reference, run, cpu: open("cpu")? })
    }

    fn place(&self) -> String {
        format!("micro-batches of {}, {} peers", self.micro_batch, self.peers)
    }

    fn expect_no_doubts(&self) -> Result<(), Failed> {
        let (doubts, places) = (&self.model.loss.doubts, &self.model.loss.places);
        if doubts.is_empty() { Ok(()) } else { Err(format!("{}: {doubts:?} at {places:?}", self.place()).into()) }
    }

    fn read(&self, key: &str) -> Result<HostTensor, Failed> {
        self.reference.read(key)?.ok_or_else(|| Failed::from(format!("there is no {key}")))
    }

    /// One step on a batch of the reference. Returns its loss.
    fn step(&mut self, number: usize) -> Result<f64, Failed> {
        let (forward, count) = (&self.model.forward, ROWS / self.micro_batch);
        let mut micro_batches = vec![BTreeMap::new(); count];
        for v in forward.inputs().filter(|v| !self.model.loss.fills_in(&forward.value(*v).name)) {
            let value = forward.value(v);
            let whole = self.read(&format!("input.{number}.{}", value.name))?.cast(value.ty.dtype)?;
            let part = whole.bytes().len() / count;
            for (m, inputs) in micro_batches.iter_mut().enumerate() {
                let bytes = whole.bytes()[m * part..(m + 1) * part].to_vec();
                inputs.insert(value.name.clone(), HostTensor::from_bytes(value.ty.clone(), bytes)?);
            }
        }
        let cpu = &self.cpu;
        let evaluate = |op: &Op, inputs: Vec<HostTensor>, types: &[TensorType]| {
            let run = || -> Result<Vec<HostTensor>, BackendError> {
                let uploaded = inputs.iter().map(|t| cpu.upload(t)).collect::<Result<_, _>>()?;
                cpu.run(op, uploaded, types)?.iter().map(|t| cpu.download(t)).collect()
            };
            run().map_err(|e| e.to_string())
        };
        let weights = self.model.loss.feed(&mut micro_batches, &vec![1.0; count], count, &evaluate)?.weights;
        for (inputs, weight) in micro_batches.iter_mut().zip(weights) {
            inputs.insert("loss_weight".into(), HostTensor::from_f32([], &[weight as f32])?);
        }
        Ok(self.run.step(&micro_batches)?.loss)
    }

    /// Compares loss and gradients of each batch with PyTorch's.
    fn compare(mut self) -> Result<(), Failed> {
        for number in 0..BATCHES {
            let place = format!("batch {number}, {}", self.place());
            let (ours, theirs) = (self.step(number)?, self.read(&format!("loss.{number}"))?.to_f64()[0]);
            if (ours - theirs).abs() > TOLERANCE * theirs.abs().max(1.0) || ours.is_nan() {
                return Err(format!("{place}: the loss is {ours}, PyTorch's {theirs}").into());
            }
            for gradient in &self.model.train.gradients {
                let name = &self.model.train.graph.value(gradient.parameter).name;
                let ours = self.run.read(TensorKey::slot(name, "momentum_buffer"))?.to_f64();
                let theirs = match self.reference.read(&format!("grad.{number}.{name}"))? {
                    Some(tensor) => tensor.to_f64(),
                    None => vec![0.0; ours.len()],
                };
                let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
                let distance = norm(&mut ours.iter().zip(&theirs).map(|(a, b)| a - b));
                let size = norm(&mut theirs.iter().copied());
                if distance > TOLERANCE * size.max(0.1) || distance.is_nan() {
                    return Err(format!("{place}: the gradient of {name} is off by {distance:e} of {size:e}").into());
                }
            }
        }
        Ok(())
    }
}

/// Gives every second stage to two peers in turn.
fn replicate(plan: &mut Plan, peers: usize, micro_batches: usize) {
    for (s, stage) in plan.stages.iter_mut().enumerate() {
        if s % 2 == 0 && peers > 1 && micro_batches > 1 {
            let first = stage.peers[0];
            stage.peers = vec![first, (first + 1) % peers as u32];
        }
    }
}
