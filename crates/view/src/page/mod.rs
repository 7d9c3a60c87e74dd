//! One page about a run, or about several.
//!
//! [`report`] is a file that needs nothing else. The page of a run that goes on is the same, and a server sends it the
//! [`parts`] that have changed.

mod chart;
mod compare;
mod curves;
mod parts;
mod recorded;
mod tables;

use fusionllm_events::{StepMetrics, Timed};
use fusionllm_plan::{PlanError, SavedPlan, SimulateOptions, Simulation, WhatIf, simulate, what_if};
use fusionllm_protocol::RunStatus;
use fusionllm_workspace::run_dir::{StepTrace, Summary};
use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::picture;

pub use parts::{PART_NAMES, parts};
pub use recorded::Recorded;
use serde_json::Value;
use toml::Table;

/// A run, as a page shows it.
#[derive(Debug, Clone, Copy)]
pub struct RunView<'a> {
    /// The name by which people find the run, such as its directory.
    pub name: &'a str,
    /// Its job, with every default filled in.
    pub job: &'a Table,
    /// The steps, or some of them.
    pub metrics: &'a [StepMetrics],
    /// All validations: the step, and the loss if it is finite.
    pub validations: &'a [(u64, Option<f64>)],
    /// Everything else that happened.
    pub events: &'a [&'a Timed],
    /// The plan, where machines and links are known.
    pub prediction: Option<&'a Prediction>,
    /// The activities of each peer in the last step, if they are known.
    pub last_step: Option<&'a StepTrace>,
    /// The figures of the run so far, or of the whole run.
    pub summary: Option<&'a Summary>,
    /// The run at this moment, if it goes on.
    pub status: Option<&'a RunStatus>,
}

/// A plan for known machines, with its simulated step. It is made once for each plan, since it takes a while.
#[derive(Debug)]
pub struct Prediction {
    /// The plan, its machines and its model.
    pub saved: SavedPlan,
    /// A step, with all activities and messages.
    pub simulation: Simulation,
    /// The changes that would make the step faster; the first one names what limits it.
    pub changes: Vec<WhatIf>,
}

impl Prediction {
    /// The prediction for the text of a plan file; `None` if the file does not describe the machines.
    ///
    /// # Errors
    ///
    /// It is no plan file of this version, or it cannot be simulated.
    pub fn read(text: &str) -> Result<Option<Self>, PlanError> {
        let of_known = serde_json::from_str::<Value>(text).is_ok_and(|plan| plan.get("cluster").is_some());
        if of_known { Self::new(SavedPlan::from_json(text)?).map(Some) } else { Ok(None) }
    }

    /// The prediction for a plan.
    ///
    /// # Errors
    ///
    /// The same as those of [`SavedPlan::programs`] and [`simulate`].
    pub fn new(saved: SavedPlan) -> Result<Self, PlanError> {
        let programs = saved.programs()?;
        let options = SimulateOptions { optimizer: saved.optimizer, record: true };
        let simulation = simulate(&programs, &saved.cluster, &options)?;
        let changes = what_if(&programs, &saved.cluster, &options, &simulation)?;
        Ok(Self { saved, simulation, changes })
    }
}

const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("script.js");
const LIVE_SCRIPT: &str = include_str!("live.js");

/// A page about runs that needs no other file, and no network. Several runs are compared first.
pub fn report(runs: &[RunView<'_>]) -> String {
    let title = match runs {
        [run] => run.name.to_owned(),
        runs => format!("{} runs", runs.len()),
    };
    let body = match runs {
        [run] => html! { @for (id, part) in parts(run) { section #(id) { (part) } } },
        runs => html! {
            header { h1 { (title) } }
            (compare::table_and_chart(runs))
            @for run in runs {
                details.run { summary { (run.name) } @for (_, part) in parts(run) { section { (part) } } }
            }
        },
    };
    page(&title, &body, SCRIPT, None)
}

/// The page of a run that a server shows, with the HTML of its [`parts`]. Its script carries a nonce, for servers that
/// allow no other script. If the page is `live`, the script puts the parts there that the server sends later.
pub fn served<T: AsRef<str>>(name: &str, parts: &[(&str, T)], nonce: &str, live: bool) -> String {
    let body = html! {
        @if live { p #connection role="status" hidden {} }
        @for (id, content) in parts {
            section #(id) { (PreEscaped(content.as_ref())) }
        }
    };
    let script = if live { &format!("{SCRIPT}{LIVE_SCRIPT}") } else { SCRIPT };
    page(name, &body, script, Some(nonce))
}

/// The validations among steps.
pub fn validations(metrics: &[StepMetrics]) -> Vec<(u64, Option<f64>)> {
    metrics.iter().filter(|m| m.val_loss.is_some()).map(|m| (m.step, m.val_loss)).collect()
}

fn page(title: &str, body: &Markup, script: &str, nonce: Option<&str>) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) " · FusionLLM" }
                // Without it, browsers ask for a file.
                link rel="icon" href="data:,";
                style { (PreEscaped(STYLE)) (PreEscaped(picture::style())) }
            }
            body {
                main { (body) }
                footer { "FusionLLM " (env!("CARGO_PKG_VERSION")) }
                script nonce=[nonce] { (PreEscaped(script)) }
            }
        }
    };
    page.into_string()
}
