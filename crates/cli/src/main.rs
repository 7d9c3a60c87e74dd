//! The `fusionllm` command: one trainer of many machines.

mod args;
mod backend;
mod devices;
mod doctor;
mod failure;
mod generate;
mod graph;
mod import;
mod join;
mod output;
mod owner;
mod plan;
mod profile;
mod progress;
mod relay;
mod report;
mod table;
mod train;
mod units;

use std::process::ExitCode;

use clap::Parser;
use fusionllm_node::memory::Counting;

use crate::args::{Arguments, BackendCommand, Command, GraphCommand};
use crate::failure::Failure;

// Measured on a GPT-2 block: 0.7 of PyTorch's time with it, 0.94 with glibc's allocator.
#[global_allocator]
static ALLOCATOR: Counting<mimalloc::MiMalloc> = Counting(mimalloc::MiMalloc);

/// The allocator returns freed memory to the system after this time; its default is 1 s. The next step needs the same
/// memory again. With the default, peers with longer steps spent up to a fifth of their time on new pages.
const PURGE_DELAY_MS: std::ffi::c_long = 120_000;

/// `mi_option_purge_delay`, which the bindings leave out.
const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;

fn keep_freed_memory() {
    // SAFETY: sets a number that the allocator reads atomically; a number that is no option of its own is ignored.
    unsafe { libmimalloc_sys::mi_option_set_default(PURGE_DELAY, PURGE_DELAY_MS) };
}

/// For a peer whose memory is short: what it frees must not add to what it holds. New pages then take up to half of the
/// time of a step, but even with a delay of 1 ms, resident memory was a quarter above the limit.
fn return_freed_memory() {
    // SAFETY: as above.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, 0) };
}

/// What is logged. A relay would warn of every machine that leaves, and iroh complains when it stops using a relay.
const LEVELS: &str = "warn,iroh_relay::server=error,iroh::socket::transports::relay=off";

fn main() -> ExitCode {
    keep_freed_memory();
    let arguments = Arguments::parse();
    let level = std::env::var("FUSIONLLM_LOG").unwrap_or_else(|_| LEVELS.into());
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::new(level))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .init();
    match run(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if let Some(report) = failure.report() {
                output::complain(report);
            }
            ExitCode::from(failure.status())
        }
    }
}

fn run(arguments: Arguments) -> Result<(), Failure> {
    match arguments.command {
        Command::Train(train) => train::train(train, arguments.json),
        Command::Broker(broker) => train::broker(broker, arguments.json),
        Command::Join(join) => join::join(join, arguments.json),
        Command::Status(args) => owner::status(&args, arguments.json),
        Command::Kick(args) => owner::kick(&args, arguments.json),
        Command::Invite(args) => owner::invite(&args, arguments.json),
        Command::Revoke(args) => owner::revoke(&args, arguments.json),
        Command::Identity(args) => owner::identity(&args, arguments.json),
        Command::Doctor(args) => doctor::doctor(args, arguments.json),
        Command::Relay(args) => relay::relay(args, arguments.json),
        Command::Plan(args) => plan::plan(&args, arguments.json),
        Command::Simulate(args) => plan::simulate_file(&args, arguments.json),
        Command::Profile(args) => profile::profile(&args, arguments.json),
        Command::Backend(BackendCommand::Check(args)) => backend::check(&args, arguments.json),
        Command::Generate(args) => generate::generate(&args, arguments.json),
        Command::Export(args) => generate::export(&args, arguments.json),
        Command::Graph(GraphCommand::Import(args)) => import::import(&args, arguments.json),
        Command::Graph(GraphCommand::Show(show)) => graph::show(&show, arguments.json),
        Command::Graph(GraphCommand::Check(args)) => import::check(&args, arguments.json),
    }
}
