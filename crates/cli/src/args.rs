use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use fusionllm_data::Tokenizer;
use fusionllm_node::Dashboard;

use crate::values::{
    Advertised, advertised, at_least_1, dashboard, memory, peers, period, share, slowdown, temperature, tokenizer,
    whole,
};

/// Trains one model over many machines, whatever their hardware and however slow the links between them.
#[derive(Debug, Parser)]
#[command(name = "fusionllm", version, max_term_width = 80)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,

    /// Print one JSON object, and nothing else, on standard output.
    #[arg(long, global = true, display_order = 100)]
    pub(crate) json: bool,

    /// Print results, warnings and errors alone, and no progress.
    #[arg(short, long, global = true, display_order = 101, conflicts_with = "verbose")]
    pub(crate) quiet: bool,

    /// Print what goes on inside; twice for more. The variable RUST_LOG chooses more precisely.
    #[arg(short, long, global = true, display_order = 102, action = ArgAction::Count)]
    pub(crate) verbose: u8,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train on this machine, one process per peer; without a job file, the quick start.
    Train(TrainArgs),
    /// Train a model of a Hugging Face folder on chats or text: writes a job file, says what fits where, and trains.
    Finetune(FinetuneArgs),
    /// Start a run over several machines: prints a ticket and waits for peers to join.
    Broker(BrokerArgs),
    /// Join a run as a peer, with the broker's ticket.
    Join(JoinArgs),
    /// Show how a run is doing: its phase, steps, members and interruptions.
    Status(StatusArgs),
    /// Show the page of a run, here or elsewhere, while it trains or when it is over.
    Dashboard(DashboardArgs),
    /// Write a page about a run, or about several side by side: curves, the cluster, a step, events.
    Report(ReportArgs),
    /// List runs: steps, losses, times, and the settings in which they differ.
    Runs(RunsArgs),
    /// Put a member out of a run for good. The run goes on without it.
    Kick(KickArgs),
    /// Make another ticket for a run.
    Invite(InviteArgs),
    /// Take a run's tickets back. Members stay.
    Revoke(RevokeArgs),
    /// Print the public key of this machine, for a run's list of allowed keys.
    Identity(IdentityArgs),
    /// Say how this machine can be reached, what works on it, and what to do about the rest.
    Doctor(DoctorArgs),
    /// Run a relay server, at which machines behind routers meet.
    Relay(RelayArgs),
    /// Cut a job's model over the devices of a testbed and predict the step time.
    Plan(PlanArgs),
    /// Simulate a saved plan; draw one step, or write it as a trace.
    Simulate(SimulateArgs),
    /// Measure how fast this machine computes, for testbed files.
    Profile(ProfileArgs),
    /// Check what computes.
    #[command(subcommand)]
    Backend(BackendCommand),
    /// Show the data of a job.
    #[command(subcommand)]
    Data(DataCommand),
    /// Continue a text with a trained language model.
    Generate(GenerateArgs),
    /// Talk with a trained language model.
    Chat(ChatArgs),
    /// Write a trained model for other programs.
    Export(ExportArgs),
    /// Import, show or check a model as a graph of operators.
    #[command(subcommand)]
    Graph(GraphCommand),
}

/// The backend that computes.
#[derive(Debug, Args)]
pub(crate) struct BackendArgs {
    /// Backend to compute with [default: cpu].
    #[arg(long, value_name = "BACKEND")]
    pub(crate) backend: Option<String>,

    /// Compute with another program: the command line of a worker, as in docs/worker.md.
    #[arg(long, value_name = "CMD", conflicts_with = "backend")]
    pub(crate) worker: Option<String>,
}

/// Options of `train` and `broker`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// The job file; `-` reads it from standard input.
    pub(crate) job: Option<PathBuf>,

    /// Override a key of the job file, such as train.steps=50.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    pub(crate) set: Vec<String>,

    /// Stop at step N, before or after the end of the job; the same as --set train.steps=N. A job without steps has
    /// this length.
    #[arg(long, value_name = "N", value_parser = at_least_1::<u64>, allow_negative_numbers = true)]
    pub(crate) steps: Option<u64>,

    /// Seed; the same as --set train.seed=S.
    #[arg(long, value_name = "S", value_parser = whole::<u64>, allow_negative_numbers = true)]
    pub(crate) seed: Option<u64>,

    /// Use this plan and the peers that it names instead of making a plan.
    #[arg(long, value_name = "P.json")]
    pub(crate) plan: Option<PathBuf>,

    /// Directory for the run's files [default: a new one under runs/].
    #[arg(long, value_name = "DIR")]
    pub(crate) run_dir: Option<PathBuf>,

    /// Continue from this checkpoint, or from the newest one in this run directory.
    #[arg(long, value_name = "DIR")]
    pub(crate) resume: Option<PathBuf>,

    /// Serve the run's page at this address; any but a loopback one needs the token that is printed. "off" serves none
    /// [default: 127.0.0.1:8800, or another port that is free].
    #[arg(long, value_name = "ADDR", value_parser = dashboard)]
    pub(crate) dashboard: Option<Dashboard>,

    /// Make the run's directory, print it, and train nothing. Programs that put files there call it first.
    #[arg(long, hide = true, conflicts_with = "run_dir")]
    pub(crate) reserve: bool,

    /// Save and stop once standard input closes. A program that starts this one holds it open, so that nothing stays
    /// when that program ends. A job on standard input then ends with a zero byte.
    #[arg(long, hide = true)]
    pub(crate) tethered: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// Directories of runs.
    #[arg(required = true, value_name = "RUN")]
    pub(crate) runs: Vec<PathBuf>,

    /// The file to write. It needs nothing else, and no network.
    #[arg(short, long, value_name = "F.html", default_value = "report.html")]
    pub(crate) output: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    pub(crate) run: RunArgs,

    /// Number of peers [default: 4].
    #[arg(long, value_name = "N", conflicts_with = "plan", value_parser = peers, allow_negative_numbers = true)]
    pub(crate) peers: Option<usize>,

    /// Emulate the devices and links of this file: one process per device.
    #[arg(long, value_name = "T.toml", conflicts_with = "peers")]
    pub(crate) testbed: Option<PathBuf>,

    /// Backends of the peers, separated by commas; peers take them in turn [default: cpu].
    #[arg(long, value_name = "BACKEND", value_delimiter = ',')]
    pub(crate) backend: Vec<String>,

    /// A worker to compute with, by its command line; peers take workers in turn after the backends.
    #[arg(long, value_name = "CMD")]
    pub(crate) worker: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct FinetuneArgs {
    /// The folder of a model, as Hugging Face publishes it.
    pub(crate) folder: PathBuf,

    /// The files to learn from: JSON lines with `messages`, `prompt` and `completion` or `text`, or text files.
    #[arg(required = true, value_name = "DATA")]
    pub(crate) data: Vec<PathBuf>,

    /// Train all weights. Otherwise adapters beside them are trained (LoRA).
    #[arg(long)]
    pub(crate) full: bool,

    /// Go through the data N times [default: 3, or 1 above 10,000 samples].
    #[arg(long, value_name = "N", conflicts_with = "steps", value_parser = at_least_1::<u64>)]
    pub(crate) epochs: Option<u64>,

    /// Train for N steps.
    #[arg(long, value_name = "N", value_parser = at_least_1::<u64>, allow_negative_numbers = true)]
    pub(crate) steps: Option<u64>,

    /// The job file to write [default: finetune.toml, or another name if that one is another job's].
    #[arg(long, value_name = "JOB.toml")]
    pub(crate) job: Option<PathBuf>,

    /// Override a key of the job file, such as lora.rank=8.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    pub(crate) set: Vec<String>,

    /// Seed; the same as --set train.seed=S.
    #[arg(long, value_name = "S", value_parser = whole::<u64>, allow_negative_numbers = true)]
    pub(crate) seed: Option<u64>,

    /// Train over several machines: prints a ticket and waits for peers to join.
    #[arg(long)]
    pub(crate) broker: bool,

    /// Number of peers [default: 1, or 2 with --broker].
    #[arg(long, value_name = "N", value_parser = peers, allow_negative_numbers = true)]
    pub(crate) peers: Option<usize>,

    /// Emulate the devices and links of this file; with --broker, the joiners' machines and links as you know them.
    #[arg(long, value_name = "T.toml")]
    pub(crate) testbed: Option<PathBuf>,

    /// Backends of the peers, separated by commas; peers take them in turn [default: cpu].
    #[arg(long, value_name = "BACKEND", value_delimiter = ',', conflicts_with = "broker")]
    pub(crate) backend: Vec<String>,

    /// A worker to compute with, by its command line; peers take workers in turn after the backends.
    #[arg(long, value_name = "CMD", conflicts_with = "broker")]
    pub(crate) worker: Vec<String>,

    /// Directory for the run's files [default: a new one under runs/].
    #[arg(long, value_name = "DIR")]
    pub(crate) run_dir: Option<PathBuf>,

    /// Serve the run's page at this address; any but a loopback one needs the token that is printed. "off" serves none
    /// [default: 127.0.0.1:8800, or another port that is free].
    #[arg(long, value_name = "ADDR", value_parser = dashboard)]
    pub(crate) dashboard: Option<Dashboard>,

    #[command(flatten)]
    pub(crate) listening: Listening,

    #[command(flatten)]
    pub(crate) limits: TicketLimits,
}

#[derive(Debug, Args)]
pub(crate) struct BrokerArgs {
    #[command(flatten)]
    pub(crate) run: RunArgs,

    /// Number of peers to wait for [default: 2].
    #[arg(long, value_name = "N", conflicts_with = "plan", value_parser = peers, allow_negative_numbers = true)]
    pub(crate) peers: Option<usize>,

    /// The joiners' machines and links as you know them, by their names; the rest is measured.
    #[arg(long, value_name = "T.toml")]
    pub(crate) testbed: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) listening: Listening,

    #[command(flatten)]
    pub(crate) limits: TicketLimits,

    /// Admit the keys in this file alone: one per line, as `fusionllm identity` prints them.
    #[arg(long, value_name = "FILE")]
    pub(crate) allow: Option<PathBuf>,
}

/// Where a machine listens.
#[derive(Debug, Args)]
pub(crate) struct Listening {
    /// Address and port to listen on [default: all interfaces, a free port].
    #[arg(long, value_name = "ADDR")]
    pub(crate) listen: Option<SocketAddr>,

    /// Address and port that lead here from outside, such as a router's forwarded port; may be repeated.
    #[arg(long, value_name = "ADDR", value_parser = advertised)]
    pub(crate) advertise: Vec<Advertised>,
}

impl Listening {
    /// The addresses that lead here from outside.
    pub(crate) fn addresses(&self) -> Vec<SocketAddr> {
        self.advertise.iter().flat_map(|advertised| advertised.addresses.clone()).collect()
    }
}

/// For whom a ticket is. Machines that have joined may come back in any case.
#[derive(Debug, Args)]
pub(crate) struct TicketLimits {
    /// Let nobody new join with the ticket after this time, such as 90min or 7d [default: no limit].
    #[arg(long, value_name = "TIME", value_parser = period)]
    pub(crate) ticket_expires: Option<Duration>,

    /// Let this many machines join with the ticket [default: no limit].
    #[arg(long, value_name = "N", value_parser = at_least_1::<u32>, allow_negative_numbers = true)]
    pub(crate) ticket_uses: Option<u32>,
}

#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// A run directory, an owner's ticket, or `-` for such a ticket on standard input.
    pub(crate) run: String,

    /// Show the status again each second, until the run ends or Ctrl-C. With --json, each is an object on a line.
    #[arg(long)]
    pub(crate) watch: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DashboardArgs {
    /// A run directory, an owner's ticket, or `-` for such a ticket on standard input.
    pub(crate) run: String,

    /// Serve the page at this address, unless the run's broker serves it on this machine; any but a loopback one needs
    /// the token that is printed [default: 127.0.0.1:8800, or another port that is free].
    #[arg(long, value_name = "ADDR")]
    pub(crate) dashboard: Option<SocketAddr>,
}

#[derive(Debug, Args)]
pub(crate) struct RunsArgs {
    /// The directory with the runs [default: runs].
    #[arg(value_name = "DIR")]
    pub(crate) directory: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct KickArgs {
    /// A run directory, an owner's ticket, or `-` for such a ticket on standard input.
    pub(crate) run: String,

    /// The member's name, as `fusionllm status` shows it. Its key cannot come back.
    pub(crate) name: String,
}

#[derive(Debug, Args)]
pub(crate) struct InviteArgs {
    /// A run directory, an owner's ticket, or `-` for such a ticket on standard input.
    pub(crate) run: String,

    #[command(flatten)]
    pub(crate) limits: TicketLimits,
}

#[derive(Debug, Args)]
pub(crate) struct RevokeArgs {
    /// A run directory, an owner's ticket, or `-` for such a ticket on standard input.
    pub(crate) run: String,

    /// The ticket to take back [default: all tickets for peers].
    pub(crate) ticket: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct IdentityArgs {
    /// The identity's file. If there is none, a new identity is written there.
    pub(crate) file: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// The ticket of a run, to try the link to its broker; `-` reads it from standard input.
    pub(crate) ticket: Option<String>,

    /// Without a ticket: the relay to try, a URL or "default".
    #[arg(long, value_name = "URL", conflicts_with = "ticket")]
    pub(crate) relay: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct RelayArgs {
    /// Address and port to listen on, with TCP and UDP; port 0 picks a free one.
    #[arg(long, value_name = "ADDR", default_value = "0.0.0.0:3340")]
    pub(crate) listen: SocketAddr,

    /// Name or address by which other machines reach the relay [default: this machine's address].
    #[arg(long, value_name = "NAME[:PORT]")]
    pub(crate) host: Option<String>,

    /// Keep the relay's secret in this file, so that its URL stays the same; a missing file is made.
    #[arg(long, value_name = "FILE")]
    pub(crate) secret: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct JoinArgs {
    /// The ticket that the broker printed; `-` reads it from standard input, so that other users do not see it
    /// [default: the environment variable FUSIONLLM_TICKET].
    pub(crate) ticket: Option<String>,

    /// Backend to compute with [default: every accelerator of this machine, or else cpu]. May be repeated; each makes a
    /// peer.
    #[arg(long, value_name = "BACKEND")]
    pub(crate) backend: Vec<String>,

    /// Compute with another program: the command line of a worker, as in docs/worker.md. May be repeated; each makes a
    /// peer.
    #[arg(long, value_name = "CMD")]
    pub(crate) worker: Vec<String>,

    /// Name of this peer in the run [default: the broker chooses].
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,

    /// Keep the same key in every run, so that this machine may come back to one whose ticket is used up or has expired:
    /// the file of its identity, written if there is none. Further peers of this machine have FILE-1, FILE-2.
    #[arg(long, value_name = "FILE")]
    pub(crate) identity: Option<PathBuf>,

    /// Emulate a slower device: each operator takes X times as long as here on one core.
    #[arg(long, value_name = "X", default_value_t = 1.0, value_parser = slowdown, allow_negative_numbers = true)]
    pub(crate) slowdown: f64,

    /// Measurements of this machine, from `fusionllm profile -o` [default: measure briefly if needed].
    #[arg(long, value_name = "DEVICE.toml")]
    pub(crate) profile: Option<PathBuf>,

    /// Memory that the run may use, such as "8 GiB" [default: all free memory].
    #[arg(long, value_name = "SIZE", value_parser = memory)]
    pub(crate) memory: Option<u64>,

    #[command(flatten)]
    pub(crate) listening: Listening,

    /// Connect to given addresses alone. Emulated links need it.
    #[arg(long, hide = true)]
    pub(crate) pinned: bool,

    /// Leave once standard input closes. See `RunArgs::tethered`.
    #[arg(long, hide = true)]
    pub(crate) tethered: bool,

    /// End at once when standard input closes: for the peers that `train` starts.
    #[arg(long, hide = true)]
    pub(crate) child: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// The job file; `-` reads it from standard input.
    pub(crate) job: PathBuf,

    /// The devices and links to plan for.
    #[arg(long, value_name = "T.toml")]
    pub(crate) testbed: PathBuf,

    /// Override a setting of the job file, such as train.micro_batch=4.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    pub(crate) set: Vec<String>,

    /// How to cut the model; the same as --set plan.scheduler=NAME.
    #[arg(long, value_name = "NAME")]
    pub(crate) scheduler: Option<String>,

    /// Codec for slow links; the same as --set compression.name=NAME.
    #[arg(long, value_name = "NAME")]
    pub(crate) compression: Option<String>,

    /// Write the plan to this file, for `train --plan` and `simulate`.
    #[arg(short, long, value_name = "P.json")]
    pub(crate) output: Option<PathBuf>,

    /// Draw the devices, their links and their shares of the model.
    #[arg(long, value_name = "F.svg")]
    pub(crate) svg: Option<PathBuf>,

    /// Plan again for each better machine or line that is named, also with more memory and with one more machine.
    #[arg(long)]
    pub(crate) what_if: bool,
}

#[derive(Debug, Args)]
pub(crate) struct SimulateArgs {
    /// A plan that `fusionllm plan -o` wrote.
    #[arg(value_name = "P.json")]
    pub(crate) plan: PathBuf,

    /// Draw one step as a timeline of every peer and message.
    #[arg(long, value_name = "F.svg")]
    pub(crate) svg: Option<PathBuf>,

    /// Write one step as a trace that Perfetto and Chrome open.
    #[arg(long, value_name = "F.json")]
    pub(crate) trace: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct ProfileArgs {
    /// Measure the operators of this job, which makes its predictions more accurate.
    #[arg(value_name = "JOB.toml")]
    pub(crate) job: Option<PathBuf>,

    /// Write the measurements to this file, for `profile = "DEVICE.toml"` in testbed files.
    #[arg(short, long, value_name = "DEVICE.toml")]
    pub(crate) output: Option<PathBuf>,

    /// Measure this backend only.
    #[arg(long, value_name = "BACKEND")]
    pub(crate) backend: Option<String>,

    /// Measure another program: the command line of a worker, as in docs/worker.md.
    #[arg(long, value_name = "CMD", conflicts_with = "backend")]
    pub(crate) worker: Option<String>,

    /// List what this machine could compute with, and measure nothing.
    #[arg(long, conflicts_with_all = ["job", "output", "backend", "worker", "threads"])]
    pub(crate) list: bool,

    /// Measure with N threads only.
    #[arg(long, value_name = "N", value_parser = at_least_1::<u16>, allow_negative_numbers = true)]
    pub(crate) threads: Option<u16>,

    /// Pause between operators as an emulated device with this slowdown does, which cools caches.
    #[arg(long, value_name = "X", default_value_t = 1.0, value_parser = slowdown, allow_negative_numbers = true)]
    pub(crate) slowdown: f64,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BackendCommand {
    /// Compare every operator with its definition, in values, gradients and repeated runs.
    Check(CheckBackendArgs),
}

#[derive(Debug, Args)]
pub(crate) struct CheckBackendArgs {
    #[command(flatten)]
    pub(crate) backend: BackendArgs,

    /// Check only operators whose name contains this word, such as "conv2d".
    #[arg(long, value_name = "WORD")]
    pub(crate) only: Option<String>,

    /// Check one case in N only, of as many operators as possible, for frameworks that compile each.
    #[arg(long, value_name = "N", default_value = "1", allow_negative_numbers = true)]
    pub(crate) every: NonZeroUsize,
}

#[derive(Debug, Subcommand)]
pub(crate) enum DataCommand {
    /// Print training samples as the model sees them, with what it is trained on in colour or in brackets.
    Show(ShowDataArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ShowDataArgs {
    /// The job file; `-` reads it from standard input.
    pub(crate) job: PathBuf,

    /// Number of samples, in the order in which a run draws them.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = at_least_1::<u32>, allow_negative_numbers = true)]
    pub(crate) samples: u32,

    /// Override a key of the job file, such as data.context=512.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    pub(crate) set: Vec<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum GraphCommand {
    /// Turn a PyTorch model from torch.export into a graph file and its weights.
    Import(ImportArgs),
    /// Print a model's operators, shapes, parameters and costs.
    Show(ShowArgs),
    /// Compare a model's loss and gradients with those that PyTorch computed.
    Check(CheckArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    /// The archive that torch.export.save wrote.
    pub(crate) model: PathBuf,

    /// The directory to write: graph.json, model.safetensors and, if there are any, constants.safetensors.
    #[arg(short, long, value_name = "DIR")]
    pub(crate) output: PathBuf,

    /// Samples per micro-batch, if the model was exported with a dynamic batch dimension.
    #[arg(long, value_name = "N", value_parser = at_least_1::<usize>, allow_negative_numbers = true)]
    pub(crate) samples: Option<usize>,

    /// Which output is the loss: its position from 0, or its name [default: one that has a gradient].
    #[arg(long, value_name = "OUTPUT", allow_negative_numbers = true)]
    pub(crate) loss: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// The archive that torch.export.save wrote.
    pub(crate) model: PathBuf,

    /// PyTorch's results: a safetensors file with input.NAME, loss, grad.PARAMETER and, if wanted, buffer.NAME.
    #[arg(long, value_name = "REF.safetensors")]
    pub(crate) against: PathBuf,

    /// Weights that replace the archive's, as PyTorch's load_state_dict does.
    #[arg(long, value_name = "WEIGHTS.safetensors")]
    pub(crate) weights: Option<PathBuf>,

    /// Which output is the loss: its position from 0, or its name [default: one that has a gradient].
    #[arg(long, value_name = "OUTPUT", allow_negative_numbers = true)]
    pub(crate) loss: Option<String>,

    #[command(flatten)]
    pub(crate) backend: BackendArgs,

    /// Number of peers to cut the model over, all of them in this process.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_1::<u16>, allow_negative_numbers = true)]
    pub(crate) peers: u16,

    /// Largest relative error that counts as equal.
    #[arg(long, value_name = "T", default_value_t = 1e-3)]
    pub(crate) tolerance: f64,
}

#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    /// A graph file, a .pt2 archive, a job file, a run's directory, or a GPT-2's config.json from Hugging Face.
    pub(crate) path: PathBuf,

    /// Print the backward operators too.
    #[arg(long)]
    pub(crate) backward: bool,
}

#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    /// A run's directory, a checkpoint's, or one with config.json and model.safetensors from Hugging Face.
    pub(crate) checkpoint: PathBuf,

    /// Add adapters to the model's weights: the folder in which PEFT or `fusionllm export` wrote them.
    #[arg(long, value_name = "DIR")]
    pub(crate) adapter: Option<PathBuf>,

    /// The text to continue.
    #[arg(long, value_name = "TEXT")]
    pub(crate) prompt: String,

    /// Number of tokens to write.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub(crate) tokens: usize,

    /// Randomness of the choice: 0 always takes the most likely token.
    #[arg(long, value_name = "T", default_value_t = 0.8, value_parser = temperature, allow_negative_numbers = true)]
    pub(crate) temperature: f64,

    /// Choose among the K most likely tokens; 0 for all.
    #[arg(long, value_name = "K", default_value_t = 0, value_parser = whole::<usize>, allow_negative_numbers = true)]
    pub(crate) top_k: usize,

    /// Choose among the most likely tokens that have this share of the probability together; 1 for all.
    #[arg(long, value_name = "P", default_value_t = 1.0, value_parser = share, allow_negative_numbers = true)]
    pub(crate) top_p: f64,

    /// End before this text. May be given more than once.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) stop: Vec<String>,

    /// The same seed gives the same text.
    #[arg(long, value_name = "S", default_value_t = 1, value_parser = whole::<u64>, allow_negative_numbers = true)]
    pub(crate) seed: u64,

    #[command(flatten)]
    pub(crate) backend: BackendArgs,

    /// The tokenizer, if the checkpoint does not name one.
    #[arg(long, value_name = "TOKENIZER", value_parser = tokenizer)]
    pub(crate) tokenizer: Option<Tokenizer>,
}

#[derive(Debug, Args)]
pub(crate) struct ChatArgs {
    /// A run's directory, a checkpoint's, or one with config.json and model.safetensors from Hugging Face.
    pub(crate) checkpoint: PathBuf,

    /// Add adapters to the model's weights: the folder in which PEFT or `fusionllm export` wrote them.
    #[arg(long, value_name = "DIR")]
    pub(crate) adapter: Option<PathBuf>,

    /// The text of the system message.
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,

    /// Answer this and end. Otherwise each line of standard input is a message, and an empty line forgets all before it.
    #[arg(short, long, value_name = "TEXT")]
    pub(crate) message: Option<String>,

    /// The longest answer, in tokens.
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub(crate) tokens: usize,

    /// How random the answers are; 0 takes the most likely token each time.
    #[arg(long, value_name = "T", default_value_t = 0.7)]
    pub(crate) temperature: f64,

    /// Draw from the smallest set of tokens that have this probability together.
    #[arg(long, value_name = "P", default_value_t = 0.95)]
    pub(crate) top_p: f64,

    /// Seed.
    #[arg(long, value_name = "S", default_value_t = 1)]
    pub(crate) seed: u64,

    #[command(flatten)]
    pub(crate) backend: BackendArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// A run's directory, a checkpoint's, or one with config.json and model.safetensors from Hugging Face.
    pub(crate) checkpoint: PathBuf,

    /// Add adapters to the model's weights: the folder in which PEFT or `fusionllm export` wrote them.
    #[arg(long, value_name = "DIR")]
    pub(crate) adapter: Option<PathBuf>,

    /// The program whose files to write [default: by the kind of model; peft if a run trained adapters].
    #[arg(long, value_enum)]
    pub(crate) format: Option<ExportFormat>,

    /// Write the whole model, with the adapters that a run trained added to its weights.
    #[arg(long, conflicts_with = "format")]
    pub(crate) merge: bool,

    /// The directory to write. It must not contain a model yet.
    #[arg(short, long, value_name = "DIR")]
    pub(crate) output: PathBuf,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum ExportFormat {
    /// GPT-2's config.json, model.safetensors and tokenizer.json, for `transformers`.
    Hf,
    /// A ResNet's model.safetensors under torchvision's names.
    Torchvision,
    /// The state_dict of a model that was imported from torch.export, as model.safetensors.
    Pt2Weights,
    /// The adapters that a run trained, as adapter_config.json and adapter_model.safetensors, for PEFT.
    Peft,
    /// A language model with its tokenizer as model.gguf, for llama.cpp. Adapters are added to the weights.
    Gguf,
}
