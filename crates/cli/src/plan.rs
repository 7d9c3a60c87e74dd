//! `plan` and `simulate`.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use fusionllm_plan::{
    Cluster, Origin, PlanDetail, PlanError, SavedPlan, SimulateOptions, Simulation, WhatIf, simulate, what_if,
    what_if_sentences,
};
use fusionllm_program::{PeerId, Program};
use fusionllm_view::picture::{self, Picture, Strip};
use fusionllm_workbench::model::models;
use fusionllm_workbench::planning::{Planned, advise, plan_until};
use fusionllm_workspace::config::Testbed;

use crate::args::{PlanArgs, SimulateArgs};
use crate::failure::Failure;
use crate::output::{note, patiently, print, print_json, word};
use crate::table::{Table, width, wrap};
use crate::train::{load_job, runtime};
use crate::units;

/// Plans a job for a testbed and prints the predictions.
pub(crate) fn plan(args: &PlanArgs, json: bool) -> Result<(), Failure> {
    let mut set = args.set.clone();
    set.extend(args.scheduler.as_ref().map(|name| format!("plan.scheduler={name}")));
    set.extend(args.compression.as_ref().map(|name| format!("compression.name={name}")));
    let mut job = load_job(&args.job, &set, false)?;
    if let Some(file) = &job.plan.file {
        note(format_args!("this is a new plan; that of `plan.file` is shown by `fusionllm simulate {}`", word(file)));
    }
    let testbed = Testbed::load(&args.testbed)?.cluster;
    let started = Instant::now();
    let stop = on_interrupt()?;
    let planned = patiently("planning; Ctrl-C shows the best plan so far", || {
        let models = models(&mut job)?;
        plan_until(&job, models, &testbed, &stop)
    });
    let planned = planned?;
    let solve_s = Some(started.elapsed().as_secs_f64());
    let advice = (args.what_if && !stop.load(Relaxed)).then(|| {
        patiently("planning for better machines; Ctrl-C shows the plan with those that are done", || {
            let models = models(&mut job)?;
            advise(&job, &models, &testbed, &planned, &stop)
        })
    });
    let advice = advice.transpose()?.map(|found| (testbed.clone(), found));
    let Planned { plan, model, cluster, lower_bound_s, notes, programs, predicted, .. } = planned;
    let origin = Origin { lower_bound_step_s: lower_bound_s.filter(|b| *b > 0.0), solve_s, notes };
    let optimizer = job.train.optimizer.update_rule();
    let saved = SavedPlan { plan, cluster: cluster.unwrap_or(testbed), graph: model.forward, optimizer, origin };
    let outcome = Outcome::new(&saved, programs, predicted, advice, false)?;
    if let Some(path) = &args.output {
        write(path, &saved.to_json(&outcome.simulation).map_err(Failure::running)?)?;
    }
    if let Some(path) = &args.svg {
        let SavedPlan { plan, cluster, origin, .. } = &saved;
        let picture = picture::cluster(cluster, plan, &outcome.simulation, &outcome.what_if, &origin.notes);
        write(path, &picture.file())?;
    }
    outcome.show(&saved, json)?;
    if !json && let Some(path) = &args.output {
        let line = format!("carry it out with `fusionllm train {} --plan {}`", word(&args.job), word(path));
        print(&format!("\n{}\n", wrap(&line, width()).join("\n")))?;
    }
    Ok(())
}

/// A second Ctrl-C that comes sooner is the same act: some programs pass each signal on, too.
const ONE_ACT: Duration = Duration::from_secs(1);

/// A flag that the first Ctrl-C sets. The second one ends the program.
fn on_interrupt() -> Result<Arc<AtomicBool>, Failure> {
    let pressed = Arc::new(AtomicBool::new(false));
    let (flag, runtime) = (pressed.clone(), runtime()?);
    std::thread::spawn(move || {
        // Where signals cannot be listened to, Ctrl-C ends the program at once.
        if runtime.block_on(tokio::signal::ctrl_c()).is_ok() {
            flag.store(true, Relaxed);
            std::thread::sleep(ONE_ACT);
            let _ = runtime.block_on(tokio::signal::ctrl_c());
            std::process::exit(1);
        }
    });
    Ok(pressed)
}

/// Simulates a saved plan.
pub(crate) fn simulate_file(args: &SimulateArgs, json: bool) -> Result<(), Failure> {
    let path = args.plan.display();
    let hint = "simulate takes a file that `fusionllm plan -o` wrote";
    let text = std::fs::read_to_string(&args.plan)
        .map_err(|e| Failure::input(format!("{path}: the file cannot be read")).because(&e).hint(hint))?;
    let saved = SavedPlan::from_json(&text).map_err(|e| Failure::input(format!("{path}: {e}")).hint(hint))?;
    let programs = saved.programs()?;
    let outcome = Outcome::new(&saved, programs, None, None, args.svg.is_some() || args.trace.is_some())?;
    if let Some(path) = &args.svg {
        write(path, &step_picture(&saved.cluster, &outcome.simulation).file())?;
    }
    if let Some(path) = &args.trace {
        write(path, &picture::chrome_trace(&saved.cluster, &outcome.simulation))?;
    }
    outcome.show(&saved, json)
}

fn step_picture(cluster: &Cluster, simulation: &Simulation) -> Picture {
    let names: Vec<&str> = cluster.devices().iter().map(|d| d.name.as_str()).collect();
    picture::timeline(&names, &[Strip::predicted(simulation)])
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    std::fs::write(path, text)
        .map_err(|e| Failure::running(format!("{}: cannot be written", path.display())).because(&e))
}

/// A simulated plan, and the step times with better machines.
struct Outcome {
    simulation: Simulation,
    /// The changes that make this plan faster.
    what_if: Vec<WhatIf>,
    /// The changes with which a new plan is faster, and the cluster that is changed.
    advice: Option<(Cluster, Vec<WhatIf>)>,
}

impl Outcome {
    fn new(
        saved: &SavedPlan,
        programs: Vec<Program>,
        predicted: Option<Simulation>,
        advice: Option<(Cluster, Vec<WhatIf>)>,
        record: bool,
    ) -> Result<Self, Failure> {
        let options = SimulateOptions { optimizer: saved.optimizer, record };
        let simulation = match predicted {
            Some(simulation) => simulation,
            None => simulate(&programs, &saved.cluster, &options)?,
        };
        let what_if = what_if(&programs, &saved.cluster, &options, &simulation)?;
        Ok(Self { simulation, what_if, advice })
    }

    /// Changes to tell, with a sentence for each. If there is none, one sentence says so.
    fn changes(&self, saved: &SavedPlan) -> (&[WhatIf], Vec<String>) {
        let (cluster, changes) = match &self.advice {
            Some((cluster, changes)) => (cluster, changes),
            None => (&saved.cluster, &self.what_if),
        };
        (changes, what_if_sentences(cluster, changes))
    }

    fn show(&self, saved: &SavedPlan, json: bool) -> Result<(), Failure> {
        if !json {
            return print(&self.text(saved));
        }
        let failed = |e: PlanError| Failure::running(e);
        let mut object = saved.to_value(&self.simulation, PlanDetail::Summary).map_err(failed)?;
        if let Some(object) = object.as_object_mut() {
            let (changes, lines) = self.changes(saved);
            let changes = changes.iter().zip(lines).map(|(w, line)| {
                serde_json::json!({
                    "what_if": line, "predicted_step_s": w.step_s, "speedup": w.speedup, "replanned": w.replanned,
                })
            });
            object.insert("what_if".into(), changes.collect());
        }
        print_json(&object)
    }

    fn text(&self, saved: &SavedPlan) -> String {
        let mut out = self.heading(saved);
        let (devices, missing) = self.devices(saved);
        let _ = write!(out, "\n{devices}");
        if let Some(lines) = self.lines(saved) {
            let _ = write!(out, "\n{lines}");
        }
        out += "\n";
        for line in missing.iter().chain(&saved.origin.notes).chain(&self.changes(saved).1) {
            out += &format!("{}\n", wrap(line, width()).join("\n"));
        }
        out
    }

    fn heading(&self, saved: &SavedPlan) -> String {
        let plan = &saved.plan;
        let parameters: usize = saved.graph.parameters().map(|v| saved.graph.ty(v).numel()).sum();
        let mut out = format!(
            "{}, {} parameters, on {}: {} a step\n{}, {} schedule, {}",
            saved.graph.name,
            units::count(parameters as f64),
            units::counted(plan.used().len(), "device"),
            units::seconds(self.simulation.step_s),
            plan.scheduler,
            plan.schedule.name(),
            units::counted(plan.micro_batches, "micro-batch")
        );
        if let Some(s) = saved.origin.solve_s {
            let _ = write!(out, "; planned in {}", units::seconds(s));
        }
        out += "\n";
        out
    }

    /// A row for each device, and a sentence for each that has too little memory.
    fn devices(&self, saved: &SavedPlan) -> (Table, Vec<String>) {
        let (plan, cluster) = (&saved.plan, &saved.cluster);
        let mut table =
            Table::new(["DEVICE", "SITE", "STAGES", "OPERATORS", "COMPUTE", "BUSY", "MEMORY", "OF"], [3, 4, 5, 6, 7]);
        let mut missing = Vec::new();
        for (p, (device, load)) in (0..).map(PeerId).zip(cluster.devices().iter().zip(&self.simulation.peers)) {
            let stages: Vec<usize> =
                (0..plan.stages.len()).filter(|s| plan.stages[*s].replicas().contains(&p)).collect();
            let operators: usize = stages.iter().map(|s| plan.stages[*s].nodes.len()).sum();
            let site = device.site.and_then(|s| cluster.sites().get(s as usize)).map_or("", |s| &s.name);
            table.row([
                device.name.clone(),
                site.to_owned(),
                units::ranges(&stages),
                operators.to_string(),
                units::seconds(load.compute_s),
                self.share(load.compute_s),
                units::bytes(load.peak_bytes),
                units::bytes(device.memory),
            ]);
            if load.peak_bytes > device.memory {
                let bytes = units::bytes(load.peak_bytes - device.memory);
                missing.push(format!("{} lacks {bytes} of memory for its share", device.name));
            }
        }
        (table, missing)
    }

    /// The network cards, uplinks and links that are busiest, and how many there are besides.
    fn lines(&self, saved: &SavedPlan) -> Option<String> {
        const SHOWN: usize = 8;
        let cluster = &saved.cluster;
        let mut lines: Vec<_> = self.simulation.lines.iter().collect();
        lines.sort_by(|a, b| b.busy_s.total_cmp(&a.busy_s));
        let rest = lines.split_off(lines.len().min(SHOWN));
        let mut table = Table::new(["LINE", "RATE", "LATENCY", "PER STEP", "BUSY"], [1, 2, 3, 4]);
        for load in &lines {
            table.row([
                cluster.line_name(load.line),
                units::rate(load.link.bandwidth),
                units::seconds(load.link.latency),
                units::bytes(load.bytes),
                self.share(load.busy_s),
            ]);
        }
        let more = match rest.first() {
            Some(load) => {
                let (more, share) = (units::counted(rest.len(), "more line"), self.share(load.busy_s));
                format!("  and {more}, at most {share} busy; --json lists them\n")
            }
            None => String::new(),
        };
        let limit = self.simulation.limiting_line().map_or(String::new(), |load| {
            let line = format!("  {} is busy all the time and limits the step", cluster.line_name(load.line));
            format!("{}\n", wrap(&line, width()).join("\n"))
        });
        (!lines.is_empty()).then(|| format!("{table}{more}{limit}"))
    }

    /// A part of the step, in percent.
    fn share(&self, seconds: f64) -> String {
        format!("{:.0} %", 100.0 * seconds / self.simulation.step_s)
    }
}
