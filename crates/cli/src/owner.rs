//! `status`, `kick`, `invite`, `revoke` and `identity`: what the owner of a run and its joiners do besides training.

use std::fmt::Write;
use std::io::Read;
use std::path::Path;

use fusionllm_node::owner::{Found, MemberStatus, OwnedRun, Resting, RunPhase, RunStatus, Standing, public_key};

use crate::args::{IdentityArgs, InviteArgs, KickArgs, RevokeArgs, StatusArgs};
use crate::failure::Failure;
use crate::output::{legible, print, print_json, word};
use crate::table::{Table, fact};
use crate::train::runtime;
use crate::units::{bytes, measure, rate, seconds};

/// Interruptions that are shown; JSON has all that the broker sends.
const SHOWN_INCIDENTS: usize = 5;

/// Longest line of standard input that is read.
const MAX_LINE_BYTES: u64 = 4096;

/// The run that an argument names: a directory, an owner's ticket, or `-` for a ticket on standard input.
fn owned(run: &str) -> Result<OwnedRun, Failure> {
    if run != "-" {
        return Ok(OwnedRun::new(run)?);
    }
    let mut text = String::new();
    let read = std::io::stdin().take(MAX_LINE_BYTES).read_to_string(&mut text);
    read.map_err(|e| Failure::input(format!("cannot read the ticket from standard input: {e}")))?;
    Ok(OwnedRun::new(text.lines().next().unwrap_or_default())?)
}

/// Shows how a run is doing.
pub(crate) fn status(args: &StatusArgs, json: bool) -> Result<(), Failure> {
    let run = owned(&args.run)?;
    match runtime()?.block_on(run.status())? {
        Found::Running(status) if json => print_json(&status),
        Found::Running(status) => print(&legible(&running(&status))),
        Found::Resting(resting) if json => {
            print_json(&serde_json::json!({ "phase": if resting.over { "over" } else { "stopped" }, "files": resting }))
        }
        Found::Resting(files) => print(&legible(&resting(&files, Path::new(&args.run)))),
    }
}

/// Puts a member out of a run.
pub(crate) fn kick(args: &KickArgs, json: bool) -> Result<(), Failure> {
    let run = owned(&args.run)?;
    done(&runtime()?.block_on(run.kick(&args.name))?, json)?;
    if json {
        return Ok(());
    }
    print("whoever still has the ticket can join with another key; `fusionllm revoke` takes the ticket back\n")
}

/// Takes tickets back.
pub(crate) fn revoke(args: &RevokeArgs, json: bool) -> Result<(), Failure> {
    let run = owned(&args.run)?;
    done(&runtime()?.block_on(run.revoke(args.ticket.as_deref()))?, json)
}

fn done(what: &str, json: bool) -> Result<(), Failure> {
    if json { print_json(&serde_json::json!({ "done": what })) } else { print(&format!("{what}\n")) }
}

/// Makes another ticket.
pub(crate) fn invite(args: &InviteArgs, json: bool) -> Result<(), Failure> {
    let run = owned(&args.run)?;
    let ticket = runtime()?.block_on(run.invite(args.limits.ticket_expires, args.limits.ticket_uses))?;
    if json {
        return print_json(&serde_json::json!({ "ticket": ticket }));
    }
    print(&format!("fusionllm join {ticket}\n"))
}

/// Prints the public key of an identity file.
pub(crate) fn identity(args: &IdentityArgs, json: bool) -> Result<(), Failure> {
    let key = public_key(&args.file)?;
    if json { print_json(&serde_json::json!({ "key": key })) } else { print(&format!("{key}\n")) }
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
    let left = status.left_s.filter(|_| status.phase == RunPhase::Training);
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
            let _ = writeln!(out, "  {} {} at step {}: {pause} of pause, {lost} of work again", i.peer, i.kind, i.step);
        }
    }
    out
}

fn members(status: &RunStatus) -> Table<7> {
    let columns = ["member", "standing", "backend", "device", "share", "computes", "link"];
    let mut table = Table::new(columns, vec![4]);
    for m in &status.members {
        let time = match (m.compute_s, m.predicted_compute_s) {
            (Some(s), Some(p)) => format!("{}, predicted {}", seconds(s), seconds(p)),
            (Some(s), None) => seconds(s),
            _ => m.flops.map_or_else(String::new, |f| measure(f, "FLOP/s")),
        };
        let link = m.bytes_per_s.map_or_else(String::new, rate);
        let share = m.share_bytes.map_or_else(|| "spare".to_owned(), bytes);
        table.row([m.name.clone(), standing(m), m.backend.clone(), m.device.clone(), share, time, link]);
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
    let mut line = |name: &str, value: String| {
        let _ = writeln!(out, "{name:<12}{value}");
    };
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
        line("go on with", format!("--resume {}", word(run)));
    }
    out
}
