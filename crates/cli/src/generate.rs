//! `generate` and `export`: what a trained model is good for.

use std::io::IsTerminal;
use std::time::Instant;

use fusionllm_graph::units::counted;
use fusionllm_workbench::model::generate::{Generator, Sampling};
use fusionllm_workbench::model::{SavedModel, export};
use fusionllm_workspace::config::Family;
use serde_json::json;

use crate::args::{ExportArgs, ExportFormat, GenerateArgs};
use crate::failure::Failure;
use crate::output::{legible, note, print, print_json, tell};
use crate::units::seconds;

/// Prints the prompt and the text that the model goes on with, as it comes.
pub(crate) fn generate(args: &GenerateArgs, json: bool) -> Result<(), Failure> {
    let backend = args.backend.open()?;
    let model = SavedModel::open(&args.checkpoint, args.adapter.as_deref())?;
    let mut generator = Generator::new(model, backend, args.tokenizer.clone())?;
    let GenerateArgs { temperature, top_k, top_p, seed, .. } = *args;
    let sampling = Sampling { temperature, top_k, top_p, seed };
    let started = Instant::now();
    let mut text = String::new();
    let mut printed = Ok(());
    let terminal = std::io::stdout().is_terminal();
    let show = |piece: &str| if terminal { print(&legible(piece)) } else { print(piece) };
    if !json {
        show(&args.prompt)?;
    }
    let tokens = generator.generate(&args.prompt, &sampling, args.tokens, &args.stop, |piece| {
        text += piece;
        if !json {
            printed = show(piece);
        }
        printed.is_ok()
    })?;
    printed?;
    let took = started.elapsed().as_secs_f64();
    if json {
        return print_json(&json!({
            "prompt": args.prompt,
            "text": text,
            "tokens": tokens,
            "temperature": args.temperature,
            "top_k": args.top_k,
            "top_p": args.top_p,
            "seed": args.seed,
            "tokens_per_s": tokens as f64 / took.max(1e-9),
        }));
    }
    print("\n")?;
    if std::io::stderr().is_terminal() {
        tell(format_args!(
            "\n{} in {} ({:.0} tokens/s)",
            counted(tokens, "token"),
            seconds(took),
            tokens as f64 / took.max(1e-9)
        ));
    }
    Ok(())
}

/// Writes a trained model for other programs.
pub(crate) fn export(args: &ExportArgs, json: bool) -> Result<(), Failure> {
    let model = SavedModel::open(&args.checkpoint, args.adapter.as_deref())?;
    let format = args.format.unwrap_or(match &model.network.family {
        _ if model.network.lora.is_some() && !args.merge => ExportFormat::Peft,
        Family::Gpt2(_) | Family::Decoder(_) => ExportFormat::Hf,
        Family::Resnet(_) => ExportFormat::Torchvision,
        Family::Imported { .. } => ExportFormat::Pt2Weights,
    });
    let mut notes = Vec::new();
    let files = match format {
        ExportFormat::Hf => export::hugging_face(&model, &args.output)?,
        ExportFormat::Torchvision => export::torchvision(&model, &args.output)?,
        ExportFormat::Pt2Weights => export::pt2_weights(&model, &args.output)?,
        ExportFormat::Peft => export::peft(&model, &args.output)?,
        ExportFormat::Gguf => {
            let written = export::gguf(&model, &args.output)?;
            notes = written.notes;
            written.files
        }
    };
    notes.iter().for_each(note);
    if matches!(format, ExportFormat::Hf) && model.network.tokenizer.is_none() {
        note("no tokenizer is written, because none with so many tokens is known here: copy the model's own");
    }
    if json {
        return print_json(&json!({
            "from": model.path(),
            "step": model.step(),
            "directory": args.output,
            "files": files,
        }));
    }
    let of = model.step().map_or(String::new(), |s| format!(" of step {s}"));
    print(&format!(
        "wrote {} in {}: the model{of} in {}\n",
        files.join(", "),
        args.output.display(),
        model.path().display()
    ))
}
