use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use fusionllm_node::data::Tokenizer;

/// One trainer of many machines: cuts any model over peers joined by slow links, and trains it.
#[derive(Debug, Parser)]
#[command(name = "fusionllm", version, max_term_width = 100)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,

    /// Print one JSON object on standard output and nothing else there.
    #[arg(long, global = true, display_order = 100)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train on this machine, one process a peer; without a job file, the quick start.
    Train(TrainArgs),
    /// Conduct a run over several machines: prints a ticket, starts once all peers have joined.
    Broker(BrokerArgs),
    /// Take part in a run with a broker's ticket.
    Join(JoinArgs),
    /// Cut a job over the devices of a testbed, and say how fast it would train.
    Plan(PlanArgs),
    /// Run a plan on a virtual clock.
    Simulate(SimulateArgs),
    /// Measure how fast this machine computes, for testbeds and plans.
    Profile(ProfileArgs),
    /// Go on with a text, by a trained language model.
    Generate(GenerateArgs),
    /// Write a trained model for other programs.
    Export(ExportArgs),
    /// Work with graphs of operators.
    #[command(subcommand)]
    Graph(GraphCommand),
}

/// What a run takes, wherever its peers are.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// The job file.
    pub(crate) job: Option<PathBuf>,

    /// Override a setting of the job file, such as train.steps=50.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    pub(crate) set: Vec<String>,

    /// Steps to train; the same as --set train.steps=N.
    #[arg(long, value_name = "N")]
    pub(crate) steps: Option<u64>,

    /// Seed; the same as --set train.seed=S.
    #[arg(long, value_name = "S")]
    pub(crate) seed: Option<u64>,

    /// Carry out this plan, with the peers that it names, instead of making one.
    #[arg(long, value_name = "P.json")]
    pub(crate) plan: Option<PathBuf>,

    /// Where the run leaves its files; a fresh directory under runs/ if left out.
    #[arg(long, value_name = "DIR")]
    pub(crate) run_dir: Option<PathBuf>,

    /// Go on from the newest checkpoint of this run directory, or from this checkpoint.
    #[arg(long, value_name = "DIR")]
    pub(crate) resume: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    pub(crate) run: RunArgs,

    /// Number of peers; 4 if left out.
    #[arg(long, value_name = "N", conflicts_with = "plan")]
    pub(crate) peers: Option<usize>,

    /// Devices and links to stand in for: a process for each device, with links as slow as the file says.
    #[arg(long, value_name = "T.toml", conflicts_with = "peers")]
    pub(crate) testbed: Option<PathBuf>,

    /// What peers compute with, such as burn-cpu, the default; several, separated by commas, are dealt out in turn.
    #[arg(long, value_name = "BACKEND", value_delimiter = ',')]
    pub(crate) backend: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct BrokerArgs {
    #[command(flatten)]
    pub(crate) run: RunArgs,

    /// Number of peers to wait for; 2 if left out.
    #[arg(long, value_name = "N", conflicts_with = "plan")]
    pub(crate) peers: Option<usize>,

    /// Address and port to listen on; every interface and a free port if left out.
    #[arg(long, value_name = "ADDR")]
    pub(crate) listen: Option<SocketAddr>,
}

#[derive(Debug, Args)]
pub(crate) struct JoinArgs {
    /// The ticket the broker printed.
    pub(crate) ticket: String,

    /// What to compute with, such as burn-cpu, the default.
    #[arg(long, value_name = "BACKEND")]
    pub(crate) backend: Option<String>,

    /// What to be called in the run; left out, the broker chooses.
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,

    /// Stand in for a device whose operators take so many times as long as on one core of this one.
    #[arg(long, value_name = "X", default_value_t = 1.0, value_parser = slowdown)]
    pub(crate) slowdown: f64,

    /// What this machine was measured to do, by `fusionllm profile -o`; left out, it is measured briefly where the run's plan needs it.
    #[arg(long, value_name = "DEVICE.toml")]
    pub(crate) profile: Option<PathBuf>,

    /// Memory that the run may count on, such as "8 GiB"; what is free if left out.
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    pub(crate) memory: Option<u64>,

    /// Listen here, and talk to no address but those given: for peers between which links are emulated.
    #[arg(long, value_name = "ADDR", hide = true)]
    pub(crate) pinned: Option<SocketAddr>,
}

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// The job file.
    pub(crate) job: PathBuf,

    /// The devices and links to plan for.
    #[arg(long, value_name = "T.toml")]
    pub(crate) testbed: PathBuf,

    /// Override a setting of the job file, such as train.micro_batch=4.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    pub(crate) set: Vec<String>,

    /// Who cuts; the same as --set plan.scheduler=NAME.
    #[arg(long, value_name = "NAME")]
    pub(crate) scheduler: Option<String>,

    /// What is done to tensors on slow links; the same as --set compression.name=NAME.
    #[arg(long, value_name = "NAME")]
    pub(crate) compression: Option<String>,

    /// Write the plan with all that simulating it takes.
    #[arg(short, long, value_name = "P.json")]
    pub(crate) output: Option<PathBuf>,

    /// Draw the cluster with the cut.
    #[arg(long, value_name = "F.svg")]
    pub(crate) svg: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct SimulateArgs {
    /// A file that `plan -o` wrote.
    #[arg(value_name = "P.json")]
    pub(crate) plan: PathBuf,

    /// Draw one step: what every peer does, and every message.
    #[arg(long, value_name = "F.svg")]
    pub(crate) svg: Option<PathBuf>,

    /// Write one step as a trace that Perfetto and Chrome open.
    #[arg(long, value_name = "F.json")]
    pub(crate) trace: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct ProfileArgs {
    /// Measure this job's own operators, which makes its predictions closer, and those of other jobs only briefly.
    #[arg(value_name = "JOB.toml")]
    pub(crate) job: Option<PathBuf>,

    /// Write what was measured, for `profile = "DEVICE.toml"` in testbeds.
    #[arg(short, long, value_name = "DEVICE.toml")]
    pub(crate) output: Option<PathBuf>,

    /// Measure this backend alone.
    #[arg(long, value_name = "BACKEND")]
    pub(crate) backend: Option<String>,

    /// Measure with so many threads alone.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) threads: Option<u16>,

    /// Rest between operators as a device with this slowdown does, whose caches cool meanwhile; the figures are those of the work alone.
    #[arg(long, value_name = "X", default_value_t = 1.0, value_parser = slowdown)]
    pub(crate) slowdown: f64,
}

#[derive(Debug, Subcommand)]
pub(crate) enum GraphCommand {
    /// Turn a model from PyTorch's torch.export into a graph file with its weights.
    Import(ImportArgs),
    /// Print a model's operators, parameters and costs.
    Show(ShowArgs),
    /// Compare loss and gradients of a model from torch.export with those that PyTorch computed.
    Check(CheckArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    /// The archive that torch.export.save wrote.
    pub(crate) model: PathBuf,

    /// The directory to write: graph.json, model.safetensors and, if there are any, constants.safetensors.
    #[arg(short, long, value_name = "DIR")]
    pub(crate) output: PathBuf,

    /// Samples at once, where the model was exported with a dynamic batch dimension.
    #[arg(long, value_name = "N")]
    pub(crate) samples: Option<usize>,
}

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// The archive that torch.export.save wrote.
    pub(crate) model: PathBuf,

    /// A safetensors file with input.NAME, loss and grad.PARAMETER, as PyTorch computed them.
    #[arg(long, value_name = "REF.safetensors")]
    pub(crate) against: PathBuf,

    /// What to compute with, such as burn-cpu, the default.
    #[arg(long, value_name = "BACKEND")]
    pub(crate) backend: Option<String>,

    /// Number of peers to cut the model over, all in this process.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) peers: u16,

    /// Largest relative error that passes.
    #[arg(long, value_name = "T", default_value_t = 1e-3)]
    pub(crate) tolerance: f64,
}

#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    /// A graph file, a .pt2 archive, a job file, a run's directory, or a GPT-2's config.json from Hugging Face.
    pub(crate) path: PathBuf,

    /// List the backward operators too.
    #[arg(long)]
    pub(crate) backward: bool,
}

#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    /// A run's directory, a checkpoint's, or one with config.json and model.safetensors from Hugging Face.
    pub(crate) checkpoint: PathBuf,

    /// The text to go on with.
    #[arg(long, value_name = "TEXT")]
    pub(crate) prompt: String,

    /// Tokens to write.
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub(crate) tokens: usize,

    /// Below 1 for likelier text, above for wilder; 0 always takes the likeliest token.
    #[arg(long, value_name = "T", default_value_t = 0.8, value_parser = temperature, allow_negative_numbers = true)]
    pub(crate) temperature: f64,

    /// Choose among the K likeliest tokens; 0 for all.
    #[arg(long, value_name = "K", default_value_t = 0)]
    pub(crate) top_k: usize,

    /// The same seed gives the same text.
    #[arg(long, value_name = "S", default_value_t = 1)]
    pub(crate) seed: u64,

    /// What to compute with, such as burn-cpu, the default.
    #[arg(long, value_name = "BACKEND")]
    pub(crate) backend: Option<String>,

    /// What tokens stand for, where the checkpoint does not tell.
    #[arg(long, value_name = "TOKENIZER", value_parser = tokenizer)]
    pub(crate) tokenizer: Option<Tokenizer>,
}

fn temperature(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(t) if t >= 0.0 && t.is_finite() => Ok(t),
        _ => Err("it is a number of at least 0".into()),
    }
}

fn slowdown(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if x >= 1.0 && x.is_finite() => Ok(x),
        _ => Err("it is a number of at least 1".into()),
    }
}

fn memory(text: &str) -> Result<u64, String> {
    fusionllm_node::config::parse_size(text)
}

fn tokenizer(text: &str) -> Result<Tokenizer, String> {
    text.parse()
}

#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// A run's directory, a checkpoint's, or one with config.json and model.safetensors from Hugging Face.
    pub(crate) checkpoint: PathBuf,

    /// Whose files to write.
    #[arg(long, value_enum)]
    pub(crate) format: ExportFormat,

    /// The directory to write; it must hold no model yet.
    #[arg(short, long, value_name = "DIR")]
    pub(crate) output: PathBuf,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum ExportFormat {
    /// GPT-2's config.json and model.safetensors, for `transformers`.
    Hf,
    /// A ResNet's model.safetensors under torchvision's names.
    Torchvision,
    /// The state_dict of a model that was imported from torch.export, as model.safetensors.
    Pt2Weights,
}
