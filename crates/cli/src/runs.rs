//! `runs`: a list of runs, and the settings in which they differ.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use fusionllm_graph::units::counted;
use fusionllm_node::NodeError;
use fusionllm_workspace::run_dir::{
    BrokenRun, DifferingSetting, RunOverview, RunState, Runs, differing_settings, list_runs,
};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::args::RunsArgs;
use crate::failure::Failure;
use crate::output::{complain, legible, print, print_json};
use crate::table::{Table, shorten, width, wrap};
use crate::units::seconds;

/// The directory of runs that nobody gave another place.
const USUAL: &str = "runs";

/// A run's name takes at most this many characters in the table, so that settings have room beside it.
const LONGEST_NAME: usize = 16;

/// A setting takes at most this many characters in the table.
const LONGEST_SETTING: usize = 20;

/// Settings that the steps in the table show already.
const STEPS: [&str; 2] = ["train.steps", "train.stop"];

/// Lists the runs of a directory.
pub(crate) fn runs(args: &RunsArgs, json: bool) -> Result<(), Failure> {
    let directory = args.directory.as_deref().unwrap_or(Path::new(USUAL));
    let Runs { runs, broken } = match directory.exists() {
        false if args.directory.is_none() => Runs::default(),
        false => {
            return Err(Failure::input(format!("{}: there is no such directory", directory.display()))
                .hint("give a directory with runs in it; without one, the runs in runs/ are listed"));
        }
        true => list_runs(directory).map_err(NodeError::from)?,
    };
    let settings = differing_settings(runs.iter().map(|run| &run.job));
    if json {
        return print_json(&Listed::new(directory, &runs, &settings, broken));
    }
    print(&legible(&text(&runs, &settings, directory, now())))?;
    for BrokenRun { directory, reason } in broken {
        complain(format_args!("{}: {reason}", directory.display()));
    }
    Ok(())
}

fn text(runs: &[RunOverview], settings: &[DifferingSetting], directory: &Path, now: f64) -> String {
    if runs.is_empty() {
        let directory = directory.display();
        return format!("{directory}: no runs are here yet; `fusionllm train` makes one in runs/\n");
    }
    let base = table(runs, &[], now);
    let mut room = width().saturating_sub(base.to_string().lines().map(|line| line.chars().count()).max().unwrap_or(0));
    let (mut shown, mut left_out) = (Vec::new(), Vec::new());
    // Without a length of its own, the learning rate decays over all steps, and differs with them.
    let steps: Vec<_> = settings.iter().filter(|setting| STEPS.contains(&setting.key.as_str())).collect();
    let is_told = |setting: &&DifferingSetting| steps.iter().any(|steps| steps.values == setting.values);
    for setting in settings.iter().filter(|setting| !is_told(setting)) {
        let cells = (0..runs.len()).map(|run| setting.shown(run).chars().count());
        let wide =
            2 + cells.chain([heading(setting, settings).chars().count()]).max().unwrap_or(0).min(LONGEST_SETTING);
        if wide <= room {
            room -= wide;
            shown.push((heading(setting, settings), setting));
        } else {
            left_out.push(setting.key.as_str());
        }
    }
    let mut out = table(runs, &shown, now).to_string();
    if !left_out.is_empty() {
        let also = if shown.is_empty() { "" } else { " also" };
        let sentence = format!("\nthe runs{also} differ in {} (--json has the values)", left_out.join(", "));
        out += &format!("{}\n", wrap(&sentence, width()).join("\n"));
    }
    out
}

/// The last part of a setting's key, if no other setting ends so.
fn heading<'a>(setting: &'a DifferingSetting, settings: &[DifferingSetting]) -> &'a str {
    fn last(key: &str) -> &str {
        key.rsplit('.').next().unwrap_or(key)
    }
    let name = last(&setting.key);
    let alike = settings.iter().filter(|other| last(&other.key) == name).count();
    if alike == 1 { name } else { &setting.key }
}

fn table(runs: &[RunOverview], settings: &[(&str, &DifferingSetting)], now: f64) -> Table {
    let headings = ["run", "state", "step", "loss", "val", "took", "started"];
    let mut table =
        Table::new(headings.into_iter().chain(settings.iter().map(|(heading, _)| *heading)), [2, 3, 4, 5, 6]);
    for (i, run) in runs.iter().enumerate() {
        let loss = |loss: Option<f64>| loss.map_or_else(|| "-".to_owned(), |loss| format!("{loss:.3}"));
        let cells = [
            shorten(&name(&run.directory), LONGEST_NAME),
            run.state.name().to_owned(),
            format!("{}/{}", run.step, run.steps.map_or_else(|| "?".to_owned(), |steps| steps.to_string())),
            loss(run.loss),
            loss(run.val_loss),
            run.took_s.map_or_else(|| "-".to_owned(), seconds),
            run.started.map_or_else(|| "-".to_owned(), |started| ago(now - started)),
        ];
        let values = settings.iter().map(|(_, setting)| shorten(&setting.shown(i), LONGEST_SETTING));
        table.row(cells.into_iter().chain(values));
    }
    table
}

/// The last part of a run's path.
fn name(directory: &Path) -> String {
    let name = directory.file_name().map(|name| name.to_string_lossy().into_owned());
    name.unwrap_or_else(|| directory.display().to_string())
}

/// A time as long ago as a person would say.
fn ago(seconds: f64) -> String {
    let minutes = (seconds / 60.0).max(0.0) as u64;
    match minutes {
        0 => "just now".to_owned(),
        1..60 => format!("{minutes} min ago"),
        60..2880 => format!("{} h ago", minutes / 60),
        _ => format!("{} ago", counted(minutes / 1440, "day")),
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// The list as one JSON object.
#[derive(Serialize)]
struct Listed<'a> {
    directory: &'a Path,
    runs: Vec<ListedRun<'a>>,
    /// The keys of all settings in which the runs differ.
    differing: Vec<&'a str>,
    broken: Vec<BrokenRun>,
}

#[derive(Serialize)]
struct ListedRun<'a> {
    name: String,
    directory: &'a Path,
    state: RunState,
    step: u64,
    steps: Option<u64>,
    loss: Option<f64>,
    val_loss: Option<f64>,
    /// Seconds since 1970.
    started: Option<f64>,
    took_s: Option<f64>,
    /// The values of the differing settings; `null` where this run's job has none.
    settings: Map<String, Value>,
}

impl<'a> Listed<'a> {
    fn new(
        directory: &'a Path,
        runs: &'a [RunOverview],
        settings: &'a [DifferingSetting],
        broken: Vec<BrokenRun>,
    ) -> Self {
        let listed = |(i, run): (usize, &'a RunOverview)| {
            let value = |setting: &DifferingSetting| {
                let value = setting.values.get(i).and_then(|value| serde_json::to_value(value.as_ref()?).ok());
                (setting.key.clone(), value.unwrap_or_default())
            };
            ListedRun {
                name: name(&run.directory),
                directory: &run.directory,
                state: run.state,
                step: run.step,
                steps: run.steps,
                loss: run.loss,
                val_loss: run.val_loss,
                started: run.started,
                took_s: run.took_s,
                settings: settings.iter().map(value).collect(),
            }
        };
        let differing = settings.iter().map(|setting| setting.key.as_str()).collect();
        Self { directory, runs: runs.iter().enumerate().map(listed).collect(), differing, broken }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(name: &str, state: RunState, step: u64, loss: Option<f64>, job: &str) -> RunOverview {
        RunOverview {
            directory: Path::new("runs").join(name),
            state,
            step,
            steps: Some(400),
            loss,
            val_loss: loss.map(|loss| loss + 0.25),
            started: Some(1e9 + step as f64),
            took_s: Some(step as f64 * 0.731),
            job: job.parse().unwrap(),
        }
    }

    #[test]
    fn runs_are_compared_in_eighty_columns() {
        let job = |lr: &str, more: &str| format!("[train]\nsteps = {lr}0\noptimizer = {{ lr = {lr} }}\n{more}");
        let runs = [
            run("0001", RunState::Over, 400, Some(2.1219), &job("2", "[data]\nfiles = [\"a/very/long/name.txt\"]\n")),
            run("0002", RunState::Stopped, 0, None, &job("1", "")),
            run(
                "a-run-with-a-name-that-somebody-chose",
                RunState::Running,
                123,
                Some(2.5),
                &job("12", "[model]\nlr = 1"),
            ),
            run("0003", RunState::Running, 124, Some(2.5), &job("12", "[eval]\nevery = 2")),
        ];
        let settings = differing_settings(runs.iter().map(|run| &run.job));
        insta::assert_snapshot!(text(&runs, &settings, Path::new("runs"), 1e9 + 7_400.0), @"
          run               state       step   loss    val        took  started  every
          0001              over     400/400  2.122  2.372  4 min 52 s  1 h ago  -
          0002              stopped    0/400      -      -        0 ms  2 h ago  -
          a-run-wi…y-chose  running  123/400  2.500  2.750  1 min 30 s  2 h ago  -
          0003              running  124/400  2.500  2.750  1 min 31 s  2 h ago  2

        the runs also differ in data.files, model.lr, train.optimizer.lr (--json has
          the values)
        ");
        insta::assert_snapshot!(text(&runs[3..], &[], Path::new("runs"), 2e9), @"
          run   state       step   loss    val        took         started
          0003  running  124/400  2.500  2.750  1 min 31 s  11574 days ago
        ");
        insta::assert_snapshot!(text(&[], &[], Path::new("elsewhere"), 0.0), @"elsewhere: no runs are here yet; `fusionllm train` makes one in runs/");
    }

    #[test]
    fn times_are_told_as_people_do() {
        let told = [-5.0, 59.0, 60.0, 3599.0, 3600.0, 172_799.0, 172_800.0].map(ago);
        assert_eq!(told, ["just now", "just now", "1 min ago", "59 min ago", "1 h ago", "47 h ago", "2 days ago"]);
    }
}
