//! The command that goes on with a run, for advice.

use std::path::Path;

use crate::args::{BrokerArgs, RunArgs, TrainArgs};
use crate::output::word;

/// The command that a user typed to start a run, without the settings that the run directory has.
pub(crate) struct Again {
    /// The command, and the options that no run directory has.
    words: Vec<String>,
    /// The job, and the options that change it.
    settings: Vec<String>,
}

impl Again {
    pub(crate) fn train(args: &TrainArgs) -> Self {
        let mut again = Self::new("train", &args.run);
        again.add("--peers", &args.peers);
        again.add("--testbed", &args.testbed.as_ref().map(|path| path.display()));
        again.add("--backend", &Some(args.backend.join(",")).filter(|names| !names.is_empty()));
        args.worker.iter().for_each(|command| again.add("--worker", &Some(command)));
        again
    }

    /// The number of peers counts where no plan has it.
    pub(crate) fn broker(args: &BrokerArgs, peers: Option<usize>) -> Self {
        let mut again = Self::new("broker", &args.run);
        again.add("--peers", &peers.filter(|_| args.run.plan.is_none()));
        again.add("--testbed", &args.testbed.as_ref().map(|path| path.display()));
        again.add("--listen", &args.listening.listen);
        args.listening.advertise.iter().for_each(|addr| again.add("--advertise", &Some(addr)));
        again.add("--allow", &args.allow.as_ref().map(|path| path.display()));
        again
    }

    fn new(command: &str, run: &RunArgs) -> Self {
        let mut again = Self { words: vec!["fusionllm".into(), command.into()], settings: Vec::new() };
        again.add("--dashboard", &run.dashboard);
        again.add("--plan", &run.plan.as_ref().map(|path| path.display()));
        let words = std::mem::take(&mut again.words);
        again.words.extend(run.job.as_ref().map(word));
        run.set.iter().for_each(|set| again.add("--set", &Some(set)));
        again.add("--steps", &run.steps);
        again.add("--seed", &run.seed);
        Self { settings: std::mem::replace(&mut again.words, words), ..again }
    }

    fn add(&mut self, option: &str, value: &Option<impl ToString>) {
        if let Some(value) = value {
            self.words.extend([option.to_owned(), word(value.to_string())]);
        }
    }

    /// Goes on with the run in this directory, under its settings.
    pub(crate) fn resume(&self, run: &Path) -> String {
        let resume = ["--resume".to_owned(), word(run)];
        [&self.words[..], &resume[..]].concat().join(" ")
    }

    /// The same command again, from this checkpoint.
    pub(crate) fn resume_as_typed(&self, checkpoint: &Path) -> String {
        let (command, options) = self.words.split_at(2);
        let resume = ["--resume".to_owned(), word(checkpoint)];
        [command, &self.settings[..], options, &resume[..]].concat().join(" ")
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Arguments, Command};

    fn again(line: &str) -> Again {
        match Arguments::parse_from(line.split(' ')).command {
            Command::Train(args) => Again::train(&args),
            Command::Broker(args) => Again::broker(&args, args.peers),
            other => panic!("{other:?}"),
        }
    }

    /// After a broker's run, the advice was a command that trains on this machine.
    #[test]
    fn a_run_goes_on_by_the_command_that_started_it() {
        let run = Path::new("runs/0001");
        for (typed, resume) in [
            ("fusionllm train", "fusionllm train --resume runs/0001"),
            ("fusionllm train j.toml --set a.b=1 --steps 9 --run-dir r", "fusionllm train --resume runs/0001"),
            (
                "fusionllm train --peers 3 --backend cpu,burn --worker w",
                "fusionllm train --peers 3 --backend 'cpu,burn' --worker w --resume runs/0001",
            ),
            (
                "fusionllm broker j.toml --peers 3 --listen 0.0.0.0:4433 --advertise 192.0.2.1:4433 --ticket-uses 2",
                "fusionllm broker --peers 3 --listen 0.0.0.0:4433 --advertise 192.0.2.1:4433 --resume runs/0001",
            ),
        ] {
            assert_eq!(again(typed).resume(run), resume);
        }
        let typed = again("fusionllm train j.toml --peers 2 --set a.b=1 --steps 9 --resume runs/0001");
        let older = Path::new("runs/my run/step-3");
        let command = "fusionllm train j.toml --set 'a.b=1' --steps 9 --peers 2 --resume 'runs/my run/step-3'";
        assert_eq!(typed.resume_as_typed(older), command);
    }
}
