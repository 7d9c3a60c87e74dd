//! `status`, `dashboard`, `kick`, `invite`, `revoke` and `identity`: what the owner of a run and its joiners do besides training.

use std::io::Read;
use std::path::Path;

use fusionllm_node::interrupted;
use fusionllm_node::owner::{OwnedRun, public_key};
use fusionllm_node::page::RunPage;

use crate::args::{DashboardArgs, IdentityArgs, InviteArgs, KickArgs, RevokeArgs, StatusArgs};
use crate::failure::Failure;
use crate::output::{print, print_json};
use crate::status::{object, text};
use crate::train::runtime;
use crate::watch::watch;

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
    let runtime = runtime()?;
    if args.watch {
        return runtime.block_on(watch(&run, Path::new(&args.run), json));
    }
    match runtime.block_on(run.status())? {
        found if json => print_json(&object(&found)?),
        found => print(&text(&found, Path::new(&args.run))),
    }
}

/// Shows where the page of a run is, and serves it if its broker does not.
pub(crate) fn dashboard(args: &DashboardArgs, json: bool) -> Result<(), Failure> {
    let run = owned(&args.run)?;
    runtime()?.block_on(async {
        let page = run.page(args.dashboard).await?;
        let interrupted = interrupted()?;
        let (url, end) = match &page {
            RunPage::AtBroker(url) => (url, ""),
            RunPage::Here(served) => (&served.url, " (Ctrl-C ends it)"),
        };
        match json {
            true => print_json(&serde_json::json!({ "address": url }))?,
            false => print(&format!("the run's page: {url}{end}\n"))?,
        }
        if let RunPage::Here(_) = page {
            interrupted.await;
        }
        Ok(())
    })
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
