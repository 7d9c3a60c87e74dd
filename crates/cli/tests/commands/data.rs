//! Training on chats, and what `data show` prints.

use std::fs;
use std::path::Path;

use insta::assert_snapshot;
use serde_json::Value;

use super::{TINY, call, losses};

const TEMPLATE: &str = "{% for m in messages %}{{ 'A:' if m.role == 'assistant' else 'Q:' }}{{ m.content }}\n\
     {% endfor %}{% if add_generation_prompt %}A:{% endif %}";

/// A job with chats, whose `template` comes from a file of its own.
fn job(directory: &Path) {
    let line = |n: usize| {
        format!(
            "{{\"messages\": [{{\"role\": \"user\", \"content\": \"{n}?\"}}, \
             {{\"role\": \"assistant\", \"content\": \"It is {n}.\"}}]}}\n"
        )
    };
    fs::write(directory.join("chats.jsonl"), (0..12).map(line).collect::<String>()).unwrap();
    fs::write(directory.join("chat.jinja"), TEMPLATE).unwrap();
    let text = "[data]\nfiles = [\"chats.jsonl\"]\ntemplate = \"chat.jinja\"\nshuffle = false\n[train]\nsteps = 2\n";
    fs::write(directory.join("job.toml"), text).unwrap();
}

#[test]
fn samples_are_shown_as_the_model_sees_them() {
    let dir = tempfile::tempdir().unwrap();
    job(dir.path());
    let show = |args: &[&str]| call(dir.path(), &[&["data", "show", "job.toml"], args].concat());
    let ran = show(&["--samples=2", "--set=data.context=12"]);
    assert_eq!(ran.status, 0, "{}", ran.err);
    let directory = dir.path().canonicalize().unwrap().display().to_string();
    assert_snapshot!(ran.out.replace(&directory, "DIR"), @"
    1 file of chats, 0.00 MB: 11 conversations to train on, 1 held out; of the first 12, 12 are cut to 12 tokens

    sample 0, DIR/chats.jsonl, line 1: 13 tokens, 6 trained on, 3 cut at the end
    Q:0?
    A:⟦It is ⟧

    sample 1, DIR/chats.jsonl, line 2: 13 tokens, 6 trained on, 3 cut at the end
    Q:1?
    A:⟦It is ⟧
    ");
    let shown = show(&["--samples=1", "--json"]).json();
    let sample = &shown["samples"][0];
    assert_eq!(sample["pieces"][1], serde_json::json!({ "text": "It is 0.\n", "tokens": 9, "trained": true }));
    assert_eq!((&sample["trained_tokens"], &sample["cut"]), (&9.into(), &0.into()));
    assert_eq!(sample["tokens"].as_array().unwrap().len(), sample["trained"].as_array().unwrap().len());
    // The quick start's text.
    fs::write(dir.path().join("job.toml"), "").unwrap();
    let text = show(&["--samples=1", "--json"]).json();
    assert_eq!((&text["context"], &text["samples"][0]["trained_tokens"]), (&128.into(), &128.into()));
    fs::write(dir.path().join("image.bin"), [0; 3073]).unwrap();
    let images = show(&["--set=model.family=resnet", "--set=data.train=image.bin"]);
    assert_snapshot!(images.failure(2, dir.path()), @r#"
    error: the data are images, and only text and chats are shown
    hint: name a job whose data.kind is "text" or "chats"
    "#);
}

/// The run has the template, so its own file is needed no more.
#[test]
fn a_run_trains_on_chats_and_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    job(dir.path());
    let tiny = |args: &[&str]| call(dir.path(), &[args, &TINY[..]].concat());
    tiny(&["train", "job.toml", "--peers=2", "--run-dir=run", "--json", "--steps=1"]).json();
    tiny(&["train", "job.toml", "--peers=1", "--run-dir=whole", "--json"]).json();
    fs::remove_file(dir.path().join("chat.jinja")).unwrap();
    assert_eq!(fs::read_to_string(dir.path().join("run/tokenizer/chat_template.jinja")).unwrap(), TEMPLATE);
    let resumed: Value = call(dir.path(), &["train", "--resume=run", "--peers=1", "--steps=2", "--json"]).json();
    assert_eq!(resumed["steps"], 2);
    let trained = |run: &str| losses(&dir.path().join(run)).into_iter().map(|(loss, _)| loss).collect::<Vec<_>>();
    assert_eq!(trained("run"), trained("whole"));
    call(dir.path(), &["generate", "run", "--prompt=Q:1?", "--tokens=3", "--json"]).json();
}
