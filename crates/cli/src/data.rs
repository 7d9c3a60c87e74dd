//! `data`: the data of a job.

use fusionllm_data::{Data, Dataset, Example, Tokenizer};
use fusionllm_graph::units::counted;
use serde_json::json;

use crate::args::ShowDataArgs;
use crate::failure::Failure;
use crate::output::{legible, print, print_json};
use crate::train::load_job;

/// The marks around text that is trained on, with colours and without.
const BOLD: [&str; 2] = ["\u{1b}[1;32m", "\u{1b}[0m"];
const BRACKETS: [&str; 2] = ["⟦", "⟧"];

/// Tokens that follow each other, and are all trained on or all not.
struct Piece<'a> {
    text: String,
    tokens: &'a [u32],
    is_trained: bool,
}

/// Prints training samples as the model sees them, in the order in which a run draws them.
pub(crate) fn show(args: &ShowDataArgs, json: bool) -> Result<(), Failure> {
    let job = load_job(&args.job, &args.set, false)?;
    let Some((tokenizer, context)) = job.data.written() else {
        let kind = if matches!(job.data, Data::Tensors(_)) { "tensors" } else { "images" };
        let failure = Failure::input(format!("the data are {kind}, and only text and chats are shown"));
        return Err(failure.hint("name a job whose data.kind is \"text\" or \"chats\""));
    };
    let data = Dataset::open(&job.data, job.train.seed)?;
    let examples = (0..args.samples as u64).filter_map(|sample| data.example(sample).transpose());
    let mut shown = Vec::new();
    if !json {
        print(&format!("{data}\n"))?;
    }
    for (number, example) in examples.enumerate() {
        let example = example?;
        let pieces = pieces(tokenizer, &example);
        let padded = (context + 1).saturating_sub(example.tokens.len().max(1));
        let trained = example.trained.iter().filter(|trained| **trained).count();
        if !json {
            print(&text(number, &example, &pieces, [trained, padded]))?;
            continue;
        }
        let pieces = pieces
            .iter()
            .map(|piece| json!({ "text": piece.text, "tokens": piece.tokens.len(), "trained": piece.is_trained }));
        shown.push(json!({
            "origin": example.origin,
            "tokens": example.tokens,
            "trained": example.trained,
            "pieces": pieces.collect::<Vec<_>>(),
            "trained_tokens": trained,
            "cut": example.cut,
            "padded": padded,
        }));
    }
    if json {
        return print_json(&json!({ "data": data.to_string(), "context": context, "samples": shown }));
    }
    Ok(())
}

/// The pieces of a sample. Characters that a piece has only a part of become U+FFFD.
fn pieces<'a>(tokenizer: &Tokenizer, example: &'a Example) -> Vec<Piece<'a>> {
    let mut tokens = &example.tokens[..];
    let runs = example.trained.chunk_by(|a, b| a == b);
    let piece = |run: &[bool]| {
        let (own, rest) = tokens.split_at(run.len());
        tokens = rest;
        let bytes: Vec<u8> = own.iter().flat_map(|token| tokenizer.bytes(*token).unwrap_or_default()).collect();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        Piece { text, tokens: own, is_trained: run.first() == Some(&true) }
    };
    runs.map(piece).collect()
}

/// A sample for people.
fn text(number: usize, example: &Example, pieces: &[Piece<'_>], [trained, padded]: [usize; 2]) -> String {
    let colours = console::colors_enabled();
    let mut text = format!(
        "\nsample {number}, {}: {}, {trained} trained on",
        example.origin,
        counted(example.tokens.len(), "token")
    );
    if example.cut > 0 {
        text += &format!(", {} cut at the end", example.cut);
    }
    if padded > 0 {
        text += &format!(", {padded} of padding");
    }
    text.push('\n');
    for piece in pieces {
        let [before, after] = match piece.is_trained {
            true if colours => BOLD,
            true => BRACKETS,
            false => [""; 2],
        };
        text += &format!("{before}{}{after}", legible(&piece.text));
    }
    text.push('\n');
    text
}
