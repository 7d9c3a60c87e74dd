//! Every decoder of `fusionllm-hostile`, on changed bytes: it returns, and takes no more memory than the bytes account
//! for.
//!
//! `FUSIONLLM_MUTATIONS=1000000 cargo test -p fusionllm-hostile --release` tries more changes of each sample, from
//! `FUSIONLLM_FIRST_MUTATION` on. `FUSIONLLM_TARGET=graph` tries one decoder. `-- --nocapture` shows the slowest case
//! of each. `FUSIONLLM_CORPUS=DIR` writes the samples to files, and `fuzz/` at the root is for libFuzzer.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]

mod allocation;
mod corpus;
mod mutate;
mod regressions;

use std::fmt::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use allocation::peak;
use fusionllm_hostile::{TARGETS, Target};
use mutate::mutated;

/// Bytes that a decoder may always have: caches of threads, tables, the tensors of a short program, and the first guess
/// at the length of a list.
const ALWAYS: u64 = 48 << 20;

/// Bytes that a decoder may have for each byte of its input.
const PER_BYTE: u64 = 64;

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is not a number: {text:?}")))
}

/// The number of changes of a decoder's samples that every test run tries. Decoders that write a file or run programs
/// take longer.
fn usual(target: &Target) -> u64 {
    match target.name {
        "assignment" | "operator" => 60_000,
        "weights" | "images" | "manifest" | "profile" | "archive" | "archive-program" | "graph" | "plan"
        | "tokenizer" | "chats" | "chat-template" => 1_000,
        _ => 40_000,
    }
}

/// The number of panics so far, on any thread. A backend turns panics of its kernels into errors, but they are faults
/// all the same.
fn panics() -> u64 {
    static PANICS: AtomicU64 = AtomicU64::new(0);
    static COUNTED: Once = Once::new();
    COUNTED.call_once(|| {
        let print = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            PANICS.fetch_add(1, Relaxed);
            print(panic);
        }));
    });
    PANICS.load(Relaxed)
}

/// The fault of a decoder with these bytes, if it panicked or took too much memory.
fn fault(target: &Target, bytes: &[u8], accepted: &mut u64) -> Option<String> {
    let before = panics();
    let (outcome, most) = peak(|| catch_unwind(AssertUnwindSafe(|| (target.decode)(bytes))));
    if outcome.is_err() || panics() > before {
        return Some("it panicked, as the message above says".into());
    }
    *accepted += u64::from(matches!(outcome, Ok(true)));
    let allowed = ALWAYS + PER_BYTE * bytes.len() as u64;
    (most > allowed).then(|| format!("it took {most} bytes of memory for {} bytes", bytes.len()))
}

/// Faults shown for each decoder.
const SHOWN: usize = 5;

/// Tries one decoder. Returns its faults.
fn try_all(target: &Target) -> Vec<String> {
    let samples = corpus::samples(target.name);
    for (i, sample) in samples.iter().enumerate() {
        assert!((target.decode)(sample), "{}: sample {i} is not accepted", target.name);
    }
    let first = number("FUSIONLLM_FIRST_MUTATION").unwrap_or(0);
    let count = number("FUSIONLLM_MUTATIONS").unwrap_or_else(|| usual(target));
    let (mut faults, mut accepted, mut slowest, started) = (Vec::new(), 0, (0.0, 0), Instant::now());
    for seed in first..first + count {
        let bytes = mutated(&samples, target.form, seed);
        let began = Instant::now();
        if let Some(fault) = fault(target, &bytes, &mut accepted) {
            let mut shown = String::new();
            match std::str::from_utf8(&bytes) {
                Ok(text) if text.len() < 2000 => write!(shown, "{text:?}").unwrap(),
                _ => write!(shown, "{:?}", &bytes[..bytes.len().min(400)]).unwrap(),
            }
            faults.push(format!("{}, mutation {seed}: {fault}: {shown}", target.name));
            if faults.len() == SHOWN {
                break;
            }
        }
        let took = began.elapsed().as_secs_f64();
        if took > slowest.0 {
            slowest = (took, seed);
        }
    }
    println!(
        "{}: {} samples, {count} changes ({accepted} accepted) in {:.1} s, the slowest {} in {:.4} s",
        target.name,
        samples.len(),
        started.elapsed().as_secs_f64(),
        slowest.1,
        slowest.0
    );
    faults
}

/// Valid bytes for a fuzzer to begin with, in one directory for each decoder, if `FUSIONLLM_CORPUS` names a place.
#[test]
fn samples_are_written_where_asked() {
    let Some(place) = std::env::var_os("FUSIONLLM_CORPUS") else { return };
    for target in TARGETS {
        let directory = std::path::Path::new(&place).join(target.name);
        std::fs::create_dir_all(&directory).unwrap();
        for (i, sample) in corpus::samples(target.name).iter().enumerate() {
            std::fs::write(directory.join(format!("sample-{i}")), sample).unwrap();
        }
    }
}

/// One test for all, because memory is counted for the whole process.
#[test]
fn no_bytes_cause_a_panic_or_take_much_memory() {
    let only = std::env::var("FUSIONLLM_TARGET").ok();
    let program = corpus::archive_program();
    let targets = TARGETS.iter().chain([&program]).filter(|t| only.as_ref().is_none_or(|name| name == t.name));
    let faults: Vec<Vec<String>> = targets.map(try_all).collect();
    assert!(!faults.is_empty(), "no decoder is called {only:?}");
    let faults = faults.concat();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
