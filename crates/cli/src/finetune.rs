//! `finetune`: from a Hugging Face folder and a file of chats or text to a job, and then to a run.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use fusionllm_data::weights::Weights;
use fusionllm_data::{Chats, Data, Dataset, write_atomic};
use fusionllm_graph::DType;
use fusionllm_graph::units::{bytes, count, counted, seconds};
use fusionllm_plan::Cluster;
use fusionllm_workbench::WorkbenchError;
use fusionllm_workbench::model::Model;
use fusionllm_workbench::planning::{Planned, plan_blind, plan_for};
use fusionllm_workbench::profile::{measure_briefly, samples};
use fusionllm_workspace::config::{Job, Network};

use crate::args::{BrokerArgs, FinetuneArgs, RunArgs, TrainArgs};
use crate::backend::open_backend;
use crate::failure::Failure;
use crate::output::{tell, word};
use crate::train::{broker, train};

/// Conversations or texts whose length is looked at.
const MEASURED: u64 = 256;

/// The longest context that is chosen. Longer samples are cut, unless the user writes a larger one.
const LONGEST_CONTEXT: usize = 2048;

/// The context of text that has no samples of its own.
const TEXT_CONTEXT: usize = 512;

/// Samples above which one epoch is enough.
const MANY_SAMPLES: usize = 10_000;

/// Samples of a batch, unless there are fewer.
const BATCH: usize = 8;

/// The settings that follow from the folder and the data.
struct Settings {
    full: bool,
    folder: PathBuf,
    data: Vec<PathBuf>,
    /// Whether the folder has its weights in bf16.
    is_bf16: bool,
    context: usize,
    batch: usize,
    steps: u64,
    /// Steps between two validations, each with a checkpoint.
    every: u64,
    /// Why there are so many steps, in words.
    length: String,
    /// Why the context is what it is, in words.
    lengths: String,
    /// Whether a sample has several conversations.
    packing: bool,
}

/// Writes a job file for a folder and its data, and trains it.
pub(crate) fn finetune(args: FinetuneArgs, json: bool) -> Result<(), Failure> {
    let settings = settings(&args)?;
    let text = settings.job();
    let path = match &args.job {
        Some(path) => path.clone(),
        None => free_name(&text),
    };
    if args.job.is_some() && fs::read_to_string(&path).is_ok_and(|there| there != text) {
        return Err(Failure::input(format!("{}: there is another file already", path.display()))
            .hint("remove it, or give another name to --job"));
    }
    // What the user overrides is checked with the rest before anything is written.
    let directory = std::env::current_dir().unwrap_or_else(|_| PathBuf::from("."));
    let job = Job::parse(&path.display().to_string(), &text, &directory, &args.set)?;
    describe(&job, &settings, &args)?;
    write_atomic(&path, text.as_bytes()).map_err(WorkbenchError::from)?;
    let overridden: String = args.set.iter().map(|set| format!(" --set {}", word(set))).collect();
    let again = format!("fusionllm train {}{overridden}", word(&path));
    tell(format_args!("the job is in {}; `{again}` trains it again", path.display()));
    let FinetuneArgs { set, seed, run_dir, dashboard, peers, testbed, backend, worker, listening, limits, .. } = args;
    let run = RunArgs {
        job: Some(path),
        set,
        steps: None,
        seed,
        plan: None,
        run_dir,
        resume: None,
        dashboard,
        reserve: false,
        tethered: false,
    };
    match args.broker {
        true => broker(BrokerArgs { run, peers, testbed, listening, limits, allow: None }, json),
        false => train(
            TrainArgs { run, peers: Some(peers.unwrap_or(1)).filter(|_| testbed.is_none()), testbed, backend, worker },
            json,
        ),
    }
}

/// Finds out the settings that the user need not say.
fn settings(args: &FinetuneArgs) -> Result<Settings, Failure> {
    let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let folder = absolute(&args.folder);
    if !folder.join("config.json").is_file() {
        return Err(Failure::input(format!("{}: there is no Hugging Face folder here", folder.display()))
            .hint("give the folder of a model, with config.json, safetensors files and tokenizer.json"));
    }
    if let Some(missing) = args.data.iter().find(|path| !path.is_file()) {
        return Err(Failure::input(format!("{}: there is no such file", missing.display()))
            .hint("give files of chats (JSON lines) or of text"));
    }
    let data: Vec<PathBuf> = args.data.iter().map(|path| absolute(path)).collect();
    let longest = Network::published(&folder.join("config.json"))?.context.min(LONGEST_CONTEXT);
    let stored = Weights::open(&folder).map_err(WorkbenchError::from)?;
    let is_bf16 = stored.tensor_types().filter(|(_, ty)| ty.dtype.is_float()).all(|(_, ty)| ty.dtype == DType::BF16);
    let mut settings = Settings {
        full: args.full,
        folder,
        data,
        is_bf16,
        context: longest,
        batch: BATCH,
        steps: 1,
        every: 1,
        length: String::new(),
        lengths: String::new(),
        packing: false,
    };
    // A job of the longest samples says how long they are.
    let directory = std::env::current_dir().unwrap_or_else(|_| PathBuf::from("."));
    let parse = |settings: &Settings| Job::parse("the job", &settings.job(), &directory, &args.set);
    let mut job = parse(&settings)?;
    if let Data::Chats(chats) = &mut job.data {
        // Each conversation is measured by itself.
        chats.packing = false;
    }
    let data = Dataset::open(&job.data, job.train.seed)?;
    if let Data::Chats(_) = &job.data {
        let measured = MEASURED.min(data.train_samples() as u64);
        let (mut most, mut all) = (0, 0);
        for sample in 0..measured {
            if let Some(example) = data.example(sample)? {
                let length = example.tokens.len() + example.cut;
                (most, all) = (most.max(length), all + length.min(longest));
            }
        }
        // A context is one token shorter than the sample whose next tokens it predicts.
        settings.context = (most.saturating_sub(1)).next_multiple_of(16).clamp(16, longest);
        settings.lengths =
            format!("the longest of {} has {}", counted(measured, "conversation"), counted(most, "token"));
        // Half of each sample would be padding.
        settings.packing = 2 * all < settings.context * measured as usize;
    } else {
        settings.context = longest.min(TEXT_CONTEXT);
        settings.lengths = "text is cut into pieces of this length".to_owned();
    }
    let job = parse(&settings)?;
    let samples = match &job.data {
        Data::Chats(Chats { packing: false, .. }) => data.train_samples(),
        _ => Dataset::open(&job.data, job.train.seed)?.train_samples(),
    };
    // Packed or not, a step learns from about as many conversations.
    settings.batch = (BATCH * samples).div_ceil(data.train_samples().max(1)).clamp(1, samples.max(1));
    let batch = parse(&settings)?.train.batch;
    let epochs = args.epochs.unwrap_or(if samples > MANY_SAMPLES { 1 } else { 3 });
    settings.steps = args.steps.unwrap_or_else(|| (epochs * samples as u64).div_ceil(batch as u64).max(1));
    // How many samples conversations are packed into is an estimate.
    let about = if matches!(&job.data, Data::Chats(Chats { packing: true, .. })) { "about " } else { "" };
    let length = format!("{about}{}", counted(samples, "sample"));
    settings.length = match args.steps {
        Some(_) => format!("{length} to train on"),
        None => format!("{} of {length}", counted(epochs, "epoch")),
    };
    settings.every = settings.steps.div_ceil(10);
    Ok(settings)
}

impl Settings {
    /// The job, for people to read and to change.
    fn job(&self) -> String {
        let Self { context, batch, steps, every, length, lengths, packing, .. } = self;
        let quoted = |path: &Path| serde_json::Value::from(path.display().to_string()).to_string();
        let files: Vec<String> = self.data.iter().map(|path| quoted(path)).collect();
        let packing = match packing {
            true => {
                "# Conversations share a sample, and none sees another. Alone, most of it would be padding.\npacking = true\n"
            }
            false => "",
        };
        let (rate, warmup) = (if self.full { "2e-5" } else { "2e-4" }, steps.div_ceil(20));
        let mut job = format!("[model]\npath = {}\n", quoted(&self.folder));
        if !self.full {
            if self.is_bf16 {
                job += "# The folder has its weights in bf16, so nothing is lost.\nfrozen_dtype = \"bf16\"\n";
            }
            job += "\n# Adapters beside all linear layers of the blocks. Without this section, all weights are trained.\n\
                    [lora]\nrank = 16\nalpha = 32\n";
        }
        let _ = write!(
            job,
            "\n[data]\nfiles = [{}]\n# Tokens: {lengths}.\ncontext = {context}\n{packing}validation = 0.1\n\
             \n[train]\n# {length}\nsteps = {steps}\nbatch = {batch}\n\
             \n[train.optimizer]\nlr = {rate}\nweight_decay = 0.0\nwarmup = {warmup}\ndecay = \"cosine\"\n\
             \n[eval]\nevery = {every}\nbatches = 0\n\n[checkpoint]\nevery = {every}\n\
             keep_best = true\n",
            files.join(", ")
        );
        job
    }
}

/// The first of `finetune.toml`, `finetune-2.toml` and so on that is free or has this text already.
fn free_name(text: &str) -> PathBuf {
    let name = |n: usize| if n == 1 { "finetune.toml".to_owned() } else { format!("finetune-{n}.toml") };
    let fits = |path: &PathBuf| !path.exists() || fs::read_to_string(path).is_ok_and(|there| there == text);
    (1..).map(|n| PathBuf::from(name(n))).find(fits).unwrap_or_default()
}

/// The plan for this machine alone, which is measured for it.
fn alone(job: &Job, model: Model) -> Result<Planned, Failure> {
    let backend = open_backend(fusionllm_backend::names()[0])?;
    let models = vec![model];
    let memory = fusionllm_backend::machine::memory::room().map(|room| room.bytes);
    let (device, _) = measure_briefly(&backend, 1.0, memory, &samples(&models, job.train.batch))?;
    Ok(plan_for(job, models, &Cluster::new(vec![device], Vec::new(), Vec::new(), None).map_err(WorkbenchError::from)?)?)
}

/// Says what is trained, on what, and what fits where.
fn describe(job: &Job, settings: &Settings, args: &FinetuneArgs) -> Result<(), Failure> {
    let data = Dataset::open(&job.data, job.train.seed)?;
    tell(format_args!("{data}; {}, so the context is {}", settings.lengths, job.data.written().map_or(0, |(_, c)| c)));
    let model = Model::build(job, job.train.micro_batch.value)?;
    let graph = &model.forward;
    let numbers = |v| graph.ty(v).numel() as f64;
    let (trained, frozen): (f64, f64) = (graph.parameters().map(numbers).sum(), graph.frozen().map(numbers).sum());
    let kept = if job.model.frozen_dtype.name() == "bf16" { " in bf16" } else { "" };
    match frozen {
        0.0 => tell(format_args!("all {} parameters are trained", count(trained))),
        _ => tell(format_args!(
            "adapters train {} numbers, {:.1} % of the {} that stay as they are{kept}",
            count(trained),
            100.0 * trained / frozen,
            count(frozen)
        )),
    }
    tell(format_args!(
        "{} of {} ({})",
        counted(job.train.steps, "step"),
        counted(job.train.batch, "sample"),
        settings.length
    ));
    if args.testbed.is_none() {
        let peers = args.peers.unwrap_or(if args.broker { 2 } else { 1 });
        let planned = match peers {
            1 if !args.broker && args.backend.is_empty() && args.worker.is_empty() => alone(job, model)?,
            _ => plan_blind(job, model, peers)?.prepared()?,
        };
        let most = planned.memory_bytes().into_iter().max().unwrap_or(0);
        let peers = planned.programs.len();
        let each = if peers == 1 { "a peer needs".to_owned() } else { format!("each of {peers} peers needs up to") };
        let steps = job.train.stop as f64;
        let time = planned.predicted.as_ref().map_or(String::new(), |step| {
            format!("; a step takes {}, and all of them {}", seconds(step.step_s), seconds(step.step_s * steps))
        });
        tell(format_args!("{each} {} of memory{time}", bytes(most)));
    }
    Ok(())
}
