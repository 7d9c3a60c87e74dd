//! Decoders of Hugging Face's families against `transformers`: logits, loss, gradients and ten steps of AdamW.
//!
//! `crates/models/stock/families.py` makes the models. Python is `FUSIONLLM_PYTHON`, or else the environment that
//! `.ci/run python` makes. Arguments of the command line that are no options choose cases by their names.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;

use fusionllm_backend::{Backend, interpret, open};
use fusionllm_exec::ExecError;
use fusionllm_exec::local::{LocalRun, Training};
use fusionllm_graph::ops::{AdamwStep, SgdStep};
use fusionllm_graph::{DType, Graph, HostTensor, ValueId, autodiff};
use fusionllm_models::{Decoder, Gpt2Config};
use fusionllm_plan::{Schedule, compile, equal_compute};
use fusionllm_program::{LearningRate, Optimizer, TensorKey};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use safetensors::SafeTensors;

/// The largest difference, relative to the largest number.
const TOLERANCE: f64 = 1e-4;

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    let python =
        std::env::var_os("FUSIONLLM_PYTHON").map_or_else(|| root.join("target/python/bin/python"), PathBuf::from);
    let usable = Command::new(&python).args(["-c", "import torch, transformers, safetensors"]).output();
    if !usable.is_ok_and(|output| output.status.success()) {
        return libtest_mimic::run(&arguments, vec![without_transformers(&python)]).exit_code();
    }
    let directory = tempfile::tempdir().unwrap();
    let mut make = Command::new(&python);
    make.arg(root.join("crates/models/stock/families.py")).arg(directory.path()).args(&arguments.filter);
    let output = make.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let names = std::fs::read(directory.path().join("cases.json")).unwrap();
    let names: Vec<String> = serde_json::from_slice(&names).unwrap();
    let trials = names.into_iter().map(|name| {
        let folder = directory.path().join(&name);
        Trial::test(name, move || compare(&folder))
    });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}

/// The only test where there is no `transformers`: it is ignored, unless PyTorch is required.
fn without_transformers(python: &Path) -> Trial {
    let reason = format!("takes Python with torch and transformers at {}: see `.ci/run python`", python.display());
    let required = std::env::var("FUSIONLLM_REQUIRE").unwrap_or_default();
    Trial::ignorable_test("numbers_match_transformers", move || {
        if required.split(',').any(|name| name.trim() == "torch") {
            return Err(format!("FUSIONLLM_REQUIRE asks for torch: {reason}").into());
        }
        Ok(Completion::ignored_with(reason))
    })
}

/// The float tensors and the integers of a safetensors file.
fn tensors(path: &Path) -> BTreeMap<String, HostTensor> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        let dtype = match view.dtype() {
            safetensors::Dtype::I64 => DType::I64,
            _ => DType::F32,
        };
        let ty = fusionllm_graph::TensorType::new(dtype, view.shape().to_vec());
        (name, HostTensor::from_bytes(ty, view.data().to_vec()).unwrap())
    };
    file.tensors().into_iter().map(tensor).collect()
}

/// The largest difference of two tensors over the largest number of the second, or over `floor` if that is larger.
fn difference(ours: &HostTensor, theirs: &HostTensor, floor: f64) -> f64 {
    let (ours, theirs) = (ours.to_f64(), theirs.to_f64());
    assert_eq!(ours.len(), theirs.len());
    let largest = theirs.iter().fold(floor, |most, x| most.max(x.abs()));
    ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs() / largest).fold(0.0, f64::max)
}

struct Case {
    graph: Graph,
    weights: BTreeMap<String, HostTensor>,
    batch: BTreeMap<String, HostTensor>,
    reference: BTreeMap<String, HostTensor>,
}

fn compare(folder: &Path) -> Result<(), Failed> {
    let config: serde_json::Value = serde_json::from_slice(&std::fs::read(folder.join("config.json"))?)?;
    let decoder = match config["model_type"].as_str() {
        Some("gpt2") => serde_json::from_value::<Gpt2Config>(config)?.decoder()?,
        _ => Decoder::from_config(config.as_object().ok_or("no table")?)?,
    };
    let reference = tensors(&folder.join("reference.safetensors"));
    let &[samples, context] = reference["input_ids"].shape() else { return Err("no batch".into()) };
    let apart = reference.contains_key("position_ids");
    let graph = match apart {
        true => decoder.build_documents(samples, context, DType::F32)?,
        false => decoder.build(samples, context, DType::F32)?,
    };
    let weights = tensors(&folder.join("model.safetensors"));
    let names = |name: &str| decoder.checkpoint_names(name);
    // Every tensor of the file is one of the graph's, in the same shape.
    let known: Vec<String> = graph.parameters().flat_map(|v| names(&graph.value(v).name)).collect();
    if let Some(extra) = weights.keys().find(|name| !known.contains(name)) {
        return Err(format!("the model has no {extra}").into());
    }
    let of_name = |name: &str| names(name).into_iter().find_map(|name| weights.get(&name)).cloned();
    let weights = graph.parameters().map(|v| {
        let name = graph.value(v).name.clone();
        let tensor = of_name(&name).ok_or_else(|| Failed::from(format!("the file has no {name}")))?;
        (tensor.ty() == graph.ty(v)).then_some((name.clone(), tensor)).ok_or_else(|| format!("shape of {name}").into())
    });
    let weights = weights.collect::<Result<_, Failed>>()?;
    let mut batch = BTreeMap::from([("loss_weight".to_owned(), HostTensor::scalar(DType::F32, 1.0)?)]);
    let inputs = ["input_ids", "labels", "position_ids"];
    batch.extend(inputs.iter().filter_map(|name| Some(((*name).to_owned(), reference.get(*name)?.clone()))));
    let case = Case { graph, weights, batch, reference };
    let backend = open("cpu")?;
    case.logits(&*backend)?;
    if !apart {
        case.continuation(&decoder, &*backend)?;
    }
    for peers in [1, 3] {
        case.gradients(peers)?;
        case.training(peers)?;
    }
    Ok(())
}

impl Case {
    fn close(&self, name: &str, ours: &HostTensor, floor: f64) -> Result<(), Failed> {
        let off = difference(ours, &self.reference[name], floor);
        if off <= TOLERANCE { Ok(()) } else { Err(format!("{name} differs by {off:.2e}").into()) }
    }

    fn logits(&self, backend: &dyn Backend) -> Result<(), Failed> {
        let mut sources = BTreeMap::new();
        for (i, value) in self.graph.values.iter().enumerate() {
            let given = self.weights.get(&value.name).or_else(|| self.batch.get(&value.name));
            if let Some(tensor) = given.or_else(|| self.graph.constants.get(&value.name)) {
                sources.insert(ValueId(i as u32), backend.upload(tensor)?);
            }
        }
        let out = interpret(backend, &self.graph, sources, &[self.graph.outputs["logits"]])?;
        self.close("logits", &backend.download(&out[0])?, 0.0)
    }

    /// The first sample, read in two parts and then token by token, gives the logits of the whole.
    fn continuation(&self, decoder: &Decoder, backend: &dyn Backend) -> Result<(), Failed> {
        let theirs = &self.reference["logits"];
        let &[_, length, vocabulary] = theirs.shape() else { return Err("no logits".into()) };
        let (ids, logits) = (self.batch["input_ids"].to_i64().ok_or("no tokens")?, theirs.to_f64());
        let mut caches: BTreeMap<String, HostTensor> = BTreeMap::new();
        let mut first = 0;
        for count in [length / 2, length / 2 - 4, 1, 1, 1, 1] {
            let Some(graph) = decoder.continuation(count, length + 3, DType::F32)? else { return Ok(()) };
            let new = first as i64..(first + count) as i64;
            let given = BTreeMap::from([
                ("input_ids", HostTensor::from_i64([1, count], &ids[first..first + count])?),
                ("positions", HostTensor::from_i64([count], &new.collect::<Vec<_>>())?),
            ]);
            let mut sources = BTreeMap::new();
            for (i, value) in graph.values.iter().enumerate() {
                let name = value.name.as_str();
                let known = self.weights.get(name).or_else(|| given.get(name)).or_else(|| graph.constants.get(name));
                // Positions that have no token yet may hold anything.
                let empty =
                    || HostTensor::from_f64(value.ty.shape.clone(), &vec![1e3; value.ty.numel()])?.cast(DType::F32);
                let tensor = match name.strip_prefix("cache.") {
                    Some(part) => caches.get(part).cloned().map_or_else(empty, Ok)?,
                    None => match known {
                        Some(tensor) => tensor.clone(),
                        None => continue,
                    },
                };
                sources.insert(ValueId(i as u32), backend.upload(&tensor)?);
            }
            let (names, targets): (Vec<&String>, Vec<ValueId>) = graph.outputs.iter().unzip();
            for (name, tensor) in names.into_iter().zip(interpret(backend, &graph, sources, &targets)?) {
                let tensor = backend.download(&tensor)?;
                let Some(part) = name.strip_prefix("new.") else {
                    let at = (first + count - 1) * vocabulary;
                    let row = HostTensor::from_f64(tensor.shape().to_vec(), &logits[at..at + vocabulary])?;
                    let off = difference(&tensor, &row, 0.0);
                    if off > TOLERANCE {
                        return Err(format!("token {} differs by {off:.2e}", first + count - 1).into());
                    }
                    continue;
                };
                caches.insert(part.to_owned(), tensor);
            }
            first += count;
        }
        if first == length { Ok(()) } else { Err(format!("{first} of {length} tokens").into()) }
    }

    fn run(&self, peers: usize, optimizer: Optimizer, rate: f64) -> Result<LocalRun, Failed> {
        let train = autodiff::differentiate(&self.graph, self.graph.outputs["loss"])?;
        let names: Vec<String> = (0..peers).map(|peer| format!("p{peer}")).collect();
        let plan = equal_compute(&self.graph, &names, 1, Schedule::default())?;
        let programs = compile(&plan, &self.graph, &train)?;
        let backends: Vec<Arc<dyn Backend>> = names.iter().map(|_| open("cpu")).collect::<Result<_, _>>()?;
        let learning_rate = LearningRate { base: rate, warmup: 0, cosine_until: None, min: 0.0 };
        let training = Training { optimizer, learning_rate, clip: None, seed: 1 };
        let initial = |value: &fusionllm_graph::Value| {
            let tensor = self.weights.get(&value.name).or_else(|| self.graph.constants.get(&value.name));
            tensor.cloned().ok_or_else(|| ExecError::State(format!("{} has no content", value.name)))
        };
        Ok(LocalRun::new(programs, &backends, training, initial)?)
    }

    fn gradients(&self, peers: usize) -> Result<(), Failed> {
        // After one step of plain gradient descent, the momentum is the gradient.
        let sgd = Optimizer::Sgd(SgdStep { momentum: 0.0, weight_decay: 0.0, nesterov: false });
        let mut run = self.run(peers, sgd, 0.0)?;
        let loss = run.step(std::slice::from_ref(&self.batch))?.loss;
        self.close("loss", &HostTensor::from_f64([], &[loss])?, 0.0)?;
        let largest = |tensor: &HostTensor| tensor.to_f64().iter().fold(0.0f64, |most, x| most.max(x.abs()));
        let gradients = self.reference.iter().filter(|(name, _)| name.starts_with("grad."));
        let floor = gradients.clone().map(|(_, gradient)| largest(gradient)).fold(0.0, f64::max) * 1e-3;
        for (name, _) in gradients {
            let parameter = name.trim_start_matches("grad.");
            self.close(name, &run.read(TensorKey::slot(parameter, "momentum_buffer"))?, floor)?;
        }
        Ok(())
    }

    fn training(&self, peers: usize) -> Result<(), Failed> {
        let adamw = AdamwStep { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
        let mut run = self.run(peers, Optimizer::Adamw(adamw), 1e-3)?;
        for (step, theirs) in self.reference["losses"].to_f64().into_iter().enumerate() {
            let ours = run.step(std::slice::from_ref(&self.batch))?.loss;
            if (ours - theirs).abs() > TOLERANCE * theirs.abs() {
                return Err(format!("step {step} over {peers} peers: a loss of {ours}, PyTorch's is {theirs}").into());
            }
        }
        Ok(())
    }
}
