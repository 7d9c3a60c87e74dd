//! The `fusionllm` command: one trainer of many machines.

mod again;
mod allocator;
mod args;
mod backend;
mod chat;
mod data;
mod devices;
mod doctor;
mod failure;
mod finetune;
mod generate;
mod graph;
mod import;
mod join;
mod output;
mod owner;
mod page;
mod plan;
mod profile;
mod progress;
mod relay;
mod report;
mod runs;
mod status;
mod table;
mod train;
mod values;
mod watch;

use std::process::ExitCode;

use clap::Parser;
use clap::error::{ContextKind, ContextValue};
use fusionllm_graph::units;
use fusionllm_workspace::config::word_of_others;

use crate::args::{Arguments, BackendCommand, Command, DataCommand, GraphCommand};
use crate::failure::Failure;
use crate::output::Volume;

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        // Clap breaks the lines of help texts, but not those of errors.
        Err(e) if e.use_stderr() => {
            output::complain(e.render().to_string().trim_end());
            // Whoever comes from another trainer knows its options.
            if let Some(ContextValue::String(option)) = e.get(ContextKind::InvalidArg)
                && let Some(hint) = word_of_others(option.split('=').next().unwrap_or(option))
            {
                output::complain(format_args!("\nhint: {hint}"));
            }
            return ExitCode::from(e.exit_code().clamp(1, 255) as u8);
        }
        Err(e) => e.exit(),
    };
    match arguments.command {
        // A broker computes nothing that needs the same memory again, and it may stand on a small machine.
        Command::Train(_) | Command::Finetune(_) | Command::Broker(_) => allocator::return_freed_memory(),
        _ => allocator::keep_freed_memory(),
    }
    output::set_volume(match (arguments.quiet, arguments.verbose) {
        (true, _) => Volume::Quiet,
        (false, 0) => Volume::Usual,
        (false, _) => Volume::Verbose,
    });
    // Messages tell users what they must know. Everything else is logged for those who ask.
    let level = std::env::var("RUST_LOG").unwrap_or_else(|_| match arguments.verbose {
        0 => "off".into(),
        // A target is meant by its beginning, and ours begin so.
        1 => "fusionllm=info".into(),
        _ => "fusionllm=debug".into(),
    });
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
        Command::Dashboard(args) => owner::dashboard(&args, arguments.json),
        Command::Report(args) => page::report(&args, arguments.json),
        Command::Runs(args) => runs::runs(&args, arguments.json),
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
        Command::Data(DataCommand::Show(args)) => data::show(&args, arguments.json),
        Command::Finetune(args) => finetune::finetune(args, arguments.json),
        Command::Chat(args) => chat::chat(&args, arguments.json),
        Command::Generate(args) => generate::generate(&args, arguments.json),
        Command::Export(args) => generate::export(&args, arguments.json),
        Command::Graph(GraphCommand::Import(args)) => import::import(&args, arguments.json),
        Command::Graph(GraphCommand::Show(show)) => graph::show(&show, arguments.json),
        Command::Graph(GraphCommand::Check(args)) => import::check(&args, arguments.json),
    }
}
