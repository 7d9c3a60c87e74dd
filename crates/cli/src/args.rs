use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

/// One trainer of many machines: cuts any model over peers joined by slow links, and trains it.
#[derive(Debug, Parser)]
#[command(name = "fusionllm", version, about, max_term_width = 100)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,

    /// Print one JSON object on standard output and nothing else there.
    #[arg(long, global = true)]
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

    /// Carry out this plan instead of making one.
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

    /// Number of peers.
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub(crate) peers: usize,

    /// What peers compute with; several, separated by commas, are dealt to the peers in turn.
    #[arg(long, value_name = "BACKEND", value_delimiter = ',')]
    pub(crate) backend: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct BrokerArgs {
    #[command(flatten)]
    pub(crate) run: RunArgs,

    /// Number of peers to wait for.
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub(crate) peers: usize,

    /// Address and port to listen on; every interface and a free port if left out.
    #[arg(long, value_name = "ADDR")]
    pub(crate) listen: Option<SocketAddr>,
}

#[derive(Debug, Args)]
pub(crate) struct JoinArgs {
    /// The ticket the broker printed.
    pub(crate) ticket: String,

    /// What to compute with.
    #[arg(long, value_name = "BACKEND")]
    pub(crate) backend: Option<String>,

    /// What to be called in the run.
    #[arg(long, value_name = "NAME", default_value = "")]
    pub(crate) name: String,
}

#[derive(Debug, Subcommand)]
pub(crate) enum GraphCommand {
    /// Print a model's operators, parameters and costs.
    Show(ShowArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    /// A graph file, a job file, a run's directory, or a GPT-2's config.json from Hugging Face.
    pub(crate) path: PathBuf,

    /// List the backward operators too.
    #[arg(long)]
    pub(crate) backward: bool,
}
