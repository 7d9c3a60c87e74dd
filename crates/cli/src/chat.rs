//! `chat`: a conversation with a trained model.

use std::io::{BufRead, IsTerminal, stdin, stdout};
use std::path::Path;

use fusionllm_data::{ChatTemplate, Message};
use fusionllm_workbench::model::SavedModel;
use fusionllm_workbench::model::generate::{Generator, Sampling};
use serde_json::json;

use crate::args::ChatArgs;
use crate::failure::Failure;
use crate::output::{legible, print, print_json, tell};

/// Answers one message, or each line of standard input.
pub(crate) fn chat(args: &ChatArgs, json: bool) -> Result<(), Failure> {
    let backend = args.backend.open()?;
    let model = SavedModel::open(&args.checkpoint, args.adapter.as_deref())?;
    let template = template(&model, &args.checkpoint)?;
    let mut talk = Talk {
        generator: Generator::new(model, backend, None)?,
        template,
        opening: args.system.iter().map(|text| Message::new("system", text)).collect(),
        messages: Vec::new(),
        sampling: Sampling { temperature: args.temperature, top_k: 0, top_p: args.top_p, seed: args.seed },
        longest: args.tokens,
    };
    if let Some(message) = &args.message {
        let answer = talk.answer(message, !json)?;
        return if json { print_json(&json!({ "message": message, "answer": answer })) } else { Ok(()) };
    }
    let terminal = stdin().is_terminal();
    if terminal {
        tell("Each line is a message. An empty line forgets all before it, and Ctrl-D ends.");
    }
    let mut answers = Vec::new();
    loop {
        if terminal && !json {
            print("\n> ")?;
        }
        let mut line = String::new();
        let read = stdin().lock().read_line(&mut line);
        if read.map_err(|e| Failure::input(format!("standard input cannot be read: {e}")))? == 0 {
            break;
        }
        match line.trim_end_matches(['\n', '\r']) {
            "" => talk.messages.clear(),
            message => {
                let answer = talk.answer(message, !json)?;
                answers.push(json!({ "message": message, "answer": answer }));
            }
        }
    }
    if json { print_json(&json!({ "turns": answers })) } else { Ok(()) }
}

/// The template of a model.
fn template(model: &SavedModel, asked: &Path) -> Result<ChatTemplate, Failure> {
    if model.network.tokenizer.is_none() {
        return Err(Failure::input(format!("{}: the model's tokenizer is unknown", asked.display()))
            .hint("`fusionllm generate --tokenizer` continues a text with it"));
    }
    model.chat_template()?.ok_or_else(|| {
        Failure::input(format!("{}: the model has no template for chats", asked.display())).hint(
            "`fusionllm generate` continues a text with it; a template is a file chat_template.jinja beside the \
             tokenizer",
        )
    })
}

/// A conversation.
struct Talk {
    generator: Generator,
    template: ChatTemplate,
    /// The messages before the first one of the conversation.
    opening: Vec<Message>,
    messages: Vec<Message>,
    sampling: Sampling,
    longest: usize,
}

impl Talk {
    /// The model's answer to a message, which is `shown` as it comes.
    fn answer(&mut self, message: &str, shown: bool) -> Result<String, Failure> {
        self.messages.push(Message::new("user", message));
        let all = [&self.opening[..], &self.messages[..]].concat();
        let prompt = self.template.render(&all, true).map_err(|e| Failure::input(e.to_string()))?.text;
        let terminal = stdout().is_terminal();
        let (mut text, mut printed) = (String::new(), Ok(()));
        self.generator.answer(&prompt, &self.sampling, self.longest, |piece| {
            text += piece;
            if shown {
                printed = if terminal { print(&legible(piece)) } else { print(piece) };
            }
            printed.is_ok()
        })?;
        printed?;
        if shown {
            print("\n")?;
        }
        self.messages.push(Message::new("assistant", &text));
        Ok(text)
    }
}
