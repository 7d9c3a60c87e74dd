//! The state of a run, as people and programs read it.

use std::fmt::Write;
use std::path::Path;

use fusionllm_node::owner::{Found, MemberStatus, Resting, RunPhase, RunStatus, Standing};

use crate::failure::Failure;
use crate::output::{legible, not_json, word};
use crate::table::{Table, command_fact, fact, width, wrap_under};
use crate::units::{bytes, measure, rate, seconds};

/// Interruptions that are shown; JSON has all that the broker sends.
const SHOWN_INCIDENTS: usize = 5;

/// A status as one JSON object.
pub(crate) fn object(found: &Found) -> Result<serde_json::Value, Failure> {
    match found {
        Found::Running(status) => serde_json::to_value(status).map_err(not_json),
        Found::Resting(files) => {
            Ok(serde_json::json!({ "phase": if files.over { "over" } else { "stopped" }, "files": files }))
        }
    }
}

/// A status as people read it. `run` is what the user calls the run.
pub(crate) fn text(found: &Found, run: &Path) -> String {
    legible(&match found {
        Found::Running(status) => running(status),
        Found::Resting(files) => resting(files, run),
    })
}

fn running(status: &RunStatus) -> String {
    let unknown = || "?".to_owned();
    let mut out = String::new();
    let mut line = |name: &str, value: String| out += &fact(name, &value);
    let present = status.members.iter().filter(|m| m.standing == Standing::Present).count();
    let phase = match (status.phase, status.loading) {
        (RunPhase::Waiting, _) => format!("waiting for members: {present} of {}", status.wanted),
        (RunPhase::Loading, Some((sent, total))) if total > 0 => {
            format!("loading: {} of {} sent by the broker", bytes(sent), bytes(total))
        }
        (phase, _) => phase.name().to_owned(),
    };
    line("phase", phase);
    let left = status.left_s;
    let left = left.map_or_else(String::new, |s| format!(", {} left", seconds(s)));
    line("step", format!("{} of {}{left}", status.step, status.steps));
    if let Some(loss) = status.loss {
        line("loss", format!("{loss:.4}"));
    }
    if status.step_s.is_some() || status.predicted_step_s.is_some() {
        let predicted = status.predicted_step_s.map_or_else(String::new, |s| format!(", predicted {}", seconds(s)));
        line("a step", format!("{}{predicted}", status.step_s.map_or_else(unknown, seconds)));
    }
    let saving = status.saving.map_or_else(String::new, |step| format!(", step {step} is on its way"));
    line(
        "checkpoint",
        format!("{}{saving}", status.saved.map_or("none yet".to_owned(), |step| format!("step {step}"))),
    );
    if !status.members.is_empty() {
        out += &format!("\n{}", members(status));
    }
    if status.more_members > 0 {
        let _ = writeln!(out, "  and {} more", status.more_members);
    }
    let total = status.incidents.len() as u64 + status.more_incidents;
    if total > 0 {
        let _ = writeln!(out, "\ninterruptions: {total}");
        for i in status.incidents.iter().rev().take(SHOWN_INCIDENTS).rev() {
            let (pause, lost) = (seconds(i.pause_s), seconds(i.lost_work_s));
            let line = format!("  {} {} at step {}: {pause} of pause, {lost} of work again", i.peer, i.kind, i.step);
            let _ = writeln!(out, "{}", wrap_under(&line, width(), 4).join("\n"));
        }
    }
    out
}

fn members(status: &RunStatus) -> Table {
    let columns = ["member", "standing", "backend", "device", "share", "computes", "predicted", "link"];
    let mut table = Table::new(columns, vec![4, 5, 6, 7]);
    for m in &status.members {
        let unmeasured = || m.flops.map_or_else(String::new, |f| measure(f, "FLOP/s"));
        let time = m.compute_s.map_or_else(unmeasured, seconds);
        let predicted = m.predicted_compute_s.filter(|_| m.compute_s.is_some()).map_or_else(String::new, seconds);
        let link = m.bytes_per_s.map_or_else(String::new, rate);
        let share = m.share_bytes.map_or_else(|| "spare".to_owned(), bytes);
        table.row([m.name.clone(), standing(m), m.backend.clone(), m.device.clone(), share, time, predicted, link]);
    }
    table
}

fn standing(member: &MemberStatus) -> String {
    match (member.standing, member.silent_s) {
        (Standing::Present, Some(s)) if s >= 3.0 => format!("silent for {}", seconds(s)),
        (Standing::Present, _) => "present".into(),
        (Standing::Silent, Some(s)) => format!("silent for {}", seconds(s)),
        (Standing::Silent, None) => "silent".into(),
        (Standing::Away, _) => "away".into(),
        (Standing::Out, _) => "out".into(),
    }
}

fn resting(files: &Resting, run: &Path) -> String {
    let of = files.steps.map_or_else(String::new, |steps| format!(" of {steps}"));
    let mut out = String::new();
    let mut line = |name: &str, value: String| out += &fact(name, &value);
    match files.over {
        true => line("phase", "over".into()),
        false => line("phase", format!("stopped: {}", files.reason)),
    }
    line("step", format!("{}{of}", files.step));
    if let Some(loss) = files.loss {
        line("loss", format!("{loss:.4}"));
    }
    match files.saved {
        Some(step) => line("checkpoint", format!("step {step} is safe")),
        None => line("checkpoint", "none".into()),
    }
    let unfinished = files.steps.is_none_or(|steps| files.saved.is_none_or(|saved| saved < steps));
    if files.saved.is_some() && unfinished {
        out += &command_fact("go on with", &format!("--resume {}", word(run)));
    }
    out
}
