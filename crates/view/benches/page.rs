//! The page of a large run: how long a drawing of it takes, and how large its parts are.
//!
//! ```console
//! $ cargo bench -p fusionllm-view --bench page [-- --write FILE]
//! ```
//!
//! `--write` also writes a page to a file, and its parts beside it as JSON, for `scripts/page.py`.

#![allow(clippy::unwrap_used)]

use std::time::Instant;

use fusionllm_graph::units::{bytes, seconds};
use fusionllm_view::page;
use run::Run;

#[path = "../tests/support/run.rs"]
mod run;

const STEPS: u64 = 10_000;
const PEERS: usize = 100;
const ROUNDS: usize = 20;

fn main() {
    let run = Run::new(STEPS, PEERS);
    let mut times: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let began = Instant::now();
            let parts = page::parts(&run.view());
            page::served("a run", &parts.map(|(name, part)| (name, part.into_string())), "nonce", true);
            began.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    println!("{STEPS} steps, {PEERS} peers: a drawing takes {} (median of {ROUNDS})", seconds(times[ROUNDS / 2]));
    let parts: Vec<(&str, String)> =
        page::parts(&run.view()).into_iter().map(|(name, part)| (name, part.into_string())).collect();
    for (name, part) in &parts {
        println!("  {name:<10}{:>12}", bytes(part.len() as u64));
    }
    let page = page::report(&[run.view()]);
    println!("  {:<10}{:>12}", "the page", bytes(page.len() as u64));
    let mut arguments = std::env::args().skip_while(|a| a != "--write").skip(1);
    if let Some(file) = arguments.next() {
        std::fs::write(&file, page).unwrap();
        std::fs::write(format!("{file}.json"), serde_json::to_string(&parts).unwrap()).unwrap();
    }
}
