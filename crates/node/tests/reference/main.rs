//! `docs/job.md` and `docs/testbed.md` name every key that the reader accepts, with its default. Their examples
//! work. The message about each key that is wrong has advice that works.

mod advice;
mod wrong;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use fusionllm_workspace::config::{Job, Known, Testbed, load_profile};
use tempfile::TempDir;

const JOB: &str = include_str!("../../../../docs/job.md");
const TESTBED: &str = include_str!("../../../../docs/testbed.md");

/// Sections of the job document, with the section of the file and the settings that make their keys valid.
const JOB_SECTIONS: [(&[&str], &str, &[&str]); 16] = [
    (&["`[model]`", "GPT-2"], "model", &[]),
    (&["`[model]`", "ResNet"], "model", &["model.family=resnet", "data.train=image.bin"]),
    (&["`[model]`", "Imported from PyTorch"], "model", &["model.file=model.pt2"]),
    (&["`[lora]`"], "lora", &["lora.rank=16"]),
    (&["`[data]`", "Text"], "data", &[]),
    (&["`[data]`", "Chats"], "data", &["data.kind=chats", "data.files=chats.jsonl"]),
    (&["`[data]`", "CIFAR-10"], "data", &["model.family=resnet", "data.train=image.bin"]),
    (&["`[data]`", "Tensors"], "data", &["model.file=model.pt2", "data.kind=tensors", "data.files=shards"]),
    (&["`[train]`"], "train", &[]),
    (&["`[train.optimizer]`", "AdamW"], "train.optimizer", &[]),
    (&["`[train.optimizer]`", "SGD"], "train.optimizer", &["train.optimizer.name=sgd"]),
    (&["`[plan]`"], "plan", &[]),
    (&["`[compression]`"], "compression", &[]),
    (&["`[checkpoint]`"], "checkpoint", &[]),
    (&["`[eval]`"], "eval", &[]),
    (&["`[network]`"], "network", &[]),
];

#[test]
fn the_job_document_has_every_key_and_default() {
    let dir = files();
    for (headings, section, base) in JOB_SECTIONS {
        let parse = |setting: &str| {
            let overrides: Vec<String> = base.iter().copied().chain([setting]).map(str::to_owned).collect();
            Job::parse("job.toml", "", dir.path(), &overrides)
        };
        let unknown = parse(&format!("{section}.zzz=1")).unwrap_err();
        let entries: BTreeMap<String, Option<String>> = headings.iter().flat_map(|h| entries(JOB, h)).collect();
        assert_eq!(keys(&entries), accepted(&unknown.hint), "{headings:?}");
        let plain = parse("train.seed=1").unwrap();
        for (key, default) in entries {
            let Some(default) = default else { continue };
            let section_sets_key = base.iter().any(|set| set.starts_with(&format!("{section}.{key}=")));
            if section_sets_key {
                continue;
            }
            let setting = format!("{section}.{key}={default}");
            assert_eq!(parse(&setting).unwrap_or_else(|e| panic!("{setting}: {e}")), plain, "{setting} is no default");
        }
    }
}

#[test]
fn the_jobs_of_the_job_document_are_read() {
    let dir = files();
    for example in examples(JOB) {
        Job::parse("job.toml", example, dir.path(), &[]).unwrap_or_else(|e| panic!("{e}: {}\n{example}", e.hint));
    }
}

const GPU: &str = "[[device]]\nname = \"a\"\ngpu = \"T4\"\nKEY\n";
const FIGURES: &str = "[[device]]\nname = \"a\"\ntflops = 1\nmemory_bandwidth = \"9 GB/s\"\nmemory = \"1 GiB\"\nKEY\n";
const PROFILE: &str = "[[device]]\nname = \"a\"\nprofile = \"D.toml\"\nKEY\n";
const SITE: &str = "[[device]]\nname = \"a\"\ngpu = \"T4\"\n[[site]]\nname = \"s\"\nrate = \"1 Gbps\"\nKEY\n";
const UPLINK: &str =
    "[[device]]\nname = \"a\"\ngpu = \"T4\"\n[[site]]\nname = \"s\"\n[site.uplink]\nrate = \"1 Gbps\"\nKEY\n";
const PROCESSOR: &str = "[[device]]\nname = \"a\"\ngpu = \"T4\"\n[device.processor]\nname = \"pc\"\ncores = 1\nKEY\n";
const LINK: &str = "[[device]]\nname = \"a\"\ngpu = \"T4\"\n[[device]]\nname = \"b\"\ngpu = \"T4\"\n\
                    [[link]]\nbetween = [\"a\", \"b\"]\nrate = \"1 Gbps\"\nKEY\n";
const BROKER: &str = "[[device]]\nname = \"a\"\ngpu = \"T4\"\n[broker]\nKEY\n";

#[test]
fn the_testbed_document_has_every_key_and_default() {
    let dir = files();
    let sections: [(&str, &[&str]); 6] = [
        ("`[[device]]`", &[GPU, FIGURES, PROFILE]),
        ("`processor`", &[PROCESSOR]),
        ("`[[site]]`", &[SITE]),
        ("`uplink`", &[UPLINK]),
        ("`[[link]]`", &[LINK]),
        ("`[broker]`", &[BROKER]),
    ];
    for (heading, bases) in sections {
        let entries = entries(TESTBED, heading);
        let mut accepts = BTreeSet::new();
        for base in bases {
            let parse = |key: &str| Testbed::parse("t.toml", &base.replace("KEY", key), dir.path());
            let known = accepted(&parse("zzz = 1").unwrap_err().hint);
            for (key, default) in &entries {
                if let Some(default) = default.as_ref().filter(|_| known.contains(key)) {
                    let setting = format!("{key} = {default}");
                    let set = parse(&setting).unwrap_or_else(|e| panic!("{setting}: {e}"));
                    assert_eq!(set, parse("").unwrap(), "{setting} is no default");
                }
            }
            accepts.extend(known);
        }
        assert_eq!(keys(&entries), accepts, "{heading}");
    }
}

#[test]
fn the_profile_document_has_every_key() {
    let dir = files();
    let path = dir.path().join("P.toml");
    let mut accepts = BTreeSet::new();
    for base in [GPU, FIGURES] {
        fs::write(&path, base.replace("KEY", "zzz = 1")).unwrap();
        accepts.extend(accepted(&load_profile(&path).unwrap_err().hint));
    }
    let documented: BTreeSet<String> = section(TESTBED, "The device profile")
        .lines()
        .filter(|l| l.starts_with("- "))
        .flat_map(|l| l.split(':').next().unwrap().split('`').skip(1).step_by(2))
        .map(str::to_owned)
        .collect();
    let section = joined(section(TESTBED, "The device profile"));
    assert!(accepts.iter().all(|key| section.contains(&format!("`{key}`"))), "{accepts:?}");
    assert!(documented.is_subset(&accepts), "{documented:?} {accepts:?}");
}

#[test]
fn the_testbeds_of_the_testbed_document_are_read() {
    let dir = files();
    let (profiles, testbeds): (Vec<_>, Vec<_>) = examples(TESTBED).partition(|e| e.contains("threads = "));
    let of_joiners = section(TESTBED, "What joiners need not measure");
    for example in testbeds {
        let read = match of_joiners.contains(example) {
            true => Known::parse("t.toml", example, dir.path()).map(drop),
            false => Testbed::parse("t.toml", example, dir.path()).map(drop),
        };
        read.unwrap_or_else(|e| panic!("{e}: {}\n{example}", e.hint));
    }
    for example in profiles {
        fs::write(dir.path().join("P.toml"), example).unwrap();
        load_profile(&dir.path().join("P.toml")).unwrap_or_else(|e| panic!("{e}: {}\n{example}", e.hint));
    }
}

/// The files that the examples name.
fn files() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in ["corpus/a.txt", "shards/a.safetensors", "model.pt2", "image.bin", "data_batch_1.bin", "test_batch.bin"]
    {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap_or(Path::new("."))).unwrap();
        fs::write(path, "").unwrap();
    }
    fs::write(dir.path().join("config.json"), "{}").unwrap();
    fs::write(dir.path().join("chats.jsonl"), r#"{"text": "a"}"#).unwrap();
    fs::write(dir.path().join("chat.jinja"), "{{ messages[0].content }}").unwrap();
    fs::create_dir(dir.path().join("folder")).unwrap();
    fs::write(dir.path().join("folder/config.json"), "{}").unwrap();
    let tokenizer = include_str!("../../../../testdata/tokenizers/byte_level/tokenizer.json");
    fs::write(dir.path().join("folder/tokenizer.json"), tokenizer).unwrap();
    let profile = FIGURES.replace("KEY", "") + &FIGURES.replace("KEY", "threads = 8");
    fs::write(dir.path().join("D.toml"), profile).unwrap();
    dir
}

/// The text below a heading, up to the next heading.
fn section<'a>(document: &'a str, heading: &str) -> &'a str {
    let start = document
        .lines()
        .find(|l| l.starts_with('#') && l.trim_start_matches('#').trim() == heading)
        .unwrap_or_else(|| panic!("no heading {heading}"));
    let body = &document[start.as_ptr() as usize - document.as_ptr() as usize + start.len()..];
    body.find("\n#").map_or(body, |end| &body[..end])
}

fn joined(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The keys below a heading, each with its default if that is a literal.
fn entries(document: &str, heading: &str) -> BTreeMap<String, Option<String>> {
    let entry = |text: &str| {
        let text = joined(text);
        let (key, rest) = text.strip_prefix('`')?.split_once("`:")?;
        let default = rest.split_once(", default `").and_then(|(_, d)| d.split_once('`')).map(|(d, _)| d);
        // A default in words, such as "`lr` / 10", is no literal, and neither is another setting's name.
        let literal = default.filter(|d| rest.contains(&format!(", default `{d}`.")) && !d.contains("train."));
        Some((key.to_owned(), literal.map(str::to_owned)))
    };
    section(document, heading).split("\n- ").skip(1).filter_map(entry).collect()
}

fn keys(entries: &BTreeMap<String, Option<String>>) -> BTreeSet<String> {
    entries.keys().cloned().collect()
}

/// The keys that a hint lists: "[train] takes steps, batch".
fn accepted(hint: &str) -> BTreeSet<String> {
    let (_, keys) = hint.split_once(" takes ").unwrap_or_else(|| panic!("the hint lists no keys: {hint}"));
    keys.split(", ").map(str::to_owned).collect()
}

/// The blocks of TOML.
fn examples(document: &str) -> impl Iterator<Item = &str> {
    document.split("```toml\n").skip(1).filter_map(|b| b.split_once("```").map(|(text, _)| text))
}
