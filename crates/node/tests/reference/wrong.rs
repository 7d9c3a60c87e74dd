//! Every key of the documents, written wrongly in every way: one clear message, with advice that works.
//!
//! The documents say which keys there are, so a new key is tested as soon as it is described. What a key accepts, such
//! as a whole number where any number will do, is no fault. This prints the tables:
//!
//! ```console
//! $ cargo test -p fusionllm-node --test reference wrong -- --nocapture --test-threads=1
//! ```

use std::collections::BTreeMap;
use std::path::Path;

use fusionllm_workspace::config::{Job, JobError, Testbed};

use crate::advice::{Advice, Setting};
use crate::{
    BROKER, FIGURES, GPU, JOB, JOB_SECTIONS, LINK, PROCESSOR, PROFILE, SITE, TESTBED, UPLINK, files, joined, section,
};

/// Faults, each with the text that is written in the place of a value. Most keys accept some of them.
const VALUES: [(&str, &str); 14] = [
    ("a text", "\"zzz\""),
    ("a number in quotes", "\"8\""),
    ("a unit", "\"8 parsecs\""),
    ("a unit with two readings", "\"8 mb/s\""),
    ("a speed", "\"8 GFLOPS\""),
    ("a percentage", "\"80 %\""),
    ("a truth", "true"),
    ("a fraction", "8.5"),
    ("below all ranges", "-1"),
    ("zero", "0"),
    ("above all ranges", "99999999999999999999"),
    ("no number", "nan"),
    ("a list", "[true]"),
    ("a table", "{ zzz = 1 }"),
];

const ON_SITE: &str = "[[site]]\nname = \"s\"\nrate = \"1 Gbps\"\n[[device]]\nname = \"a\"\ngpu = \"T4\"\nKEY\n";
const TWO_WAYS: &str = "[[device]]\nname = \"a\"\ngpu = \"T4\"\n[[site]]\nname = \"s\"\n\
                        uplink = { rate = \"1 Gbps\" }\nKEY\n";
const ONE_WAY: &str = "[[device]]\nname = \"a\"\ngpu = \"T4\"\n[[device]]\nname = \"b\"\ngpu = \"T4\"\n\
                       [[link]]\nbetween = [\"a\", \"b\"]\nrate = \"1 Gbps\"\n\
                       [[site]]\nname = \"s\"\n[[link]]\nfrom = \"a\"\nto = \"s\"\nrate = \"1 Gbps\"\nKEY\n";

#[test]
fn wrong_jobs_get_advice_that_works() {
    let dir = files();
    let parse = |text: &str| Job::parse("file.toml", text, dir.path(), &[]).map(drop);
    let mut table = Table::default();
    for (headings, section, base) in JOB_SECTIONS {
        let mut base: Vec<(&str, &str, String)> = base.iter().map(|setting| split(setting)).collect();
        // Values that other settings would forbid.
        base.extend(match section {
            "compression" => vec![("compression", "name", "\"topk\"".to_owned())],
            "data" => vec![("train", "batch", "64".to_owned()), ("train", "micro_batch", "8".to_owned())],
            _ => Vec::new(),
        });
        let text = |dropped: &str, settings: &[Setting]| job_text(&base, section, dropped, settings);
        let written = Job::parse("file.toml", &text("", &[]), dir.path(), &[]).unwrap().to_toml().unwrap();
        let written: toml::Table = written.parse().unwrap();
        for (key, kind) in headings.iter().flat_map(|heading| kinds(JOB, heading)) {
            let path = path_for(section, &key, &base);
            let own =
                base.iter().find(|(s, k, _)| (*s, *k) == (section, key.as_str())).map(|(.., value)| value.clone());
            let value = own.unwrap_or_else(|| valid_value(&kind, path, &written, section, &key));
            let base = |settings: &[Setting]| text(&key, settings);
            table.add(&Key { section, key: &key, base: &base, value, path }, &parse);
        }
    }
    table.finish();
}

/// The broker runs on a machine of its own.
const BROKER_ALONE: &str = "[[device]]\nname = \"a\"\ngpu = \"T4\"\nsite = \"s\"\n[[site]]\nname = \"s\"\nrate = \"1 Gbps\"\n\
                            [broker]\nat = \"s\"\nKEY\n";

#[test]
fn wrong_testbeds_get_advice_that_works() {
    let dir = files();
    let parse = |text: &str| Testbed::parse("file.toml", text, dir.path()).map(drop);
    let sections: [(&str, &str, &[&str]); 6] = [
        ("`[[device]]`", "device", &[GPU, FIGURES, PROFILE, ON_SITE]),
        ("`processor`", "device.processor", &[PROCESSOR]),
        ("`[[site]]`", "site", &[SITE, TWO_WAYS]),
        ("`uplink`", "site.uplink", &[UPLINK]),
        ("`[[link]]`", "link", &[LINK, ONE_WAY]),
        ("`[broker]`", "broker", &[BROKER, BROKER_ALONE]),
    ];
    let mut table = Table::default();
    for (heading, section, bases) in sections {
        for (key, kind) in kinds(TESTBED, heading) {
            let value = testbed_value(&key, &kind);
            let fits = |base: &&&str| parse(&testbed_text(base, &key, &[Setting::new(&key, &value)])).is_ok();
            let base = bases.iter().find(fits).unwrap_or_else(|| panic!("{section}.{key} = {value} is never valid"));
            let text = |settings: &[Setting]| testbed_text(base, &key, settings);
            table.add(&Key { section, key: &key, base: &text, value: value.clone(), path: "D.toml" }, &parse);
        }
    }
    table.finish();
}

/// A key, in a file that is right without it or with a valid value.
pub(crate) struct Key<'a> {
    /// The name of the section in messages, such as `train`.
    pub(crate) section: &'a str,
    pub(crate) key: &'a str,
    /// The file with these settings instead of the key.
    base: &'a dyn Fn(&[Setting]) -> String,
    value: String,
    /// A file that is there, for a key that takes a path.
    pub(crate) path: &'a str,
}

/// The rows of the table.
#[derive(Default)]
struct Table {
    rows: Vec<String>,
    failed: Vec<String>,
}

impl Table {
    /// Writes the key wrongly in every way, and follows the advice.
    fn add(&mut self, key: &Key<'_>, parse: &dyn Fn(&str) -> Result<(), JobError>) {
        let name = format!("{}.{}", key.section, key.key);
        let mut refused = 0;
        for (fault, value) in VALUES {
            refused += usize::from(self.try_one(key, fault, &Setting::new(key.key, value), parse));
        }
        if refused == 0 {
            self.failed.push(format!("{name} accepts everything"));
        }
        if key.value.starts_with('"') {
            let bare = Setting::new(key.key, key.value.trim_matches('"'));
            self.try_one(key, "no quotes", &bare, parse);
        }
        if !self.try_one(key, "a misspelt name", &Setting::new(&misspelt(key.key), &key.value), parse) {
            self.failed.push(format!("{name} is accepted with a misspelt name"));
        }
    }

    /// Whether the setting is refused.
    fn try_one(
        &mut self,
        key: &Key<'_>,
        fault: &str,
        wrong: &Setting,
        parse: &dyn Fn(&str) -> Result<(), JobError>,
    ) -> bool {
        let text = (key.base)(std::slice::from_ref(wrong));
        let Err(error) = parse(&text) else { return false };
        let line = text.lines().position(|line| line == wrong.line()).map_or(0, |i| i + 1);
        let works = |settings: &Vec<Setting>| match parse(&(key.base)(settings)) {
            Ok(()) => true,
            // The next complaint may be about something else.
            Err(next) => !names(&next.message, key.key) && !names(&next.message, &wrong.key),
        };
        let advice = Advice::of(&error, wrong, key);
        let problems = [
            (!error.place.starts_with(&format!("file.toml:{line}:")), "the message names another place"),
            (!names(&error.message, &wrong.key), "the message does not name the key"),
            (advice.lines.is_empty() && advice.list.is_empty(), "the hint says nothing to do"),
            (!advice.lines.iter().all(works), "the advice does not work"),
            (!advice.list.is_empty() && !advice.list.iter().any(works), "nothing of the list works"),
        ];
        let problems: Vec<&str> = problems.into_iter().filter(|(is_so, _)| *is_so).map(|(_, what)| what).collect();
        let cell = |text: &str| text.replace('|', "\\|").replace('\n', " ");
        let row = format!(
            "| `{}.{}` | {fault}: `{}` | {} | {} | {} |",
            key.section,
            key.key,
            wrong.line(),
            cell(&error.to_string()),
            cell(&error.hint),
            if problems.is_empty() { "yes".to_owned() } else { problems.join("; ") }
        );
        if !problems.is_empty() {
            self.failed.push(row.clone());
        }
        self.rows.push(row);
        true
    }

    /// Prints the table, and fails with the rows that are not as they should be.
    fn finish(self) {
        println!("| key | fault | message | advice | works |\n| --- | --- | --- | --- | --- |");
        self.rows.iter().for_each(|row| println!("{row}"));
        assert!(self.failed.is_empty(), "{} of {}:\n{}", self.failed.len(), self.rows.len(), self.failed.join("\n"));
    }
}

/// Whether a message names a key, as `key`, `section.key` or [key].
fn names(message: &str, key: &str) -> bool {
    let mut quoted = message.split('`').skip(1).step_by(2);
    quoted.any(|name| name.split('.').any(|part| part == key)) || message.contains(&format!(".{key}]"))
}

/// The key without its middle letter, or with its last letter twice if it is short.
fn misspelt(key: &str) -> String {
    let mut letters: Vec<char> = key.chars().collect();
    match (letters.len(), letters.last().copied()) {
        (0..=3, Some(last)) => letters.push(last),
        (length, _) => drop(letters.remove(length / 2)),
    }
    letters.into_iter().collect()
}

/// Section, key and value of a setting such as `model.family=resnet`.
fn split(setting: &str) -> (&str, &str, String) {
    let (name, value) = setting.split_once('=').unwrap();
    let (section, key) = name.rsplit_once('.').unwrap();
    let is_number = value.parse::<f64>().is_ok();
    (section, key, if is_number { value.to_owned() } else { format!("{value:?}") })
}

/// A job of these settings, where those of `section` stand in the place of the key `dropped`.
fn job_text(base: &[(&str, &str, String)], section: &str, dropped: &str, settings: &[Setting]) -> String {
    let mut sections: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let replaced = |s: &str, key: &str| {
        settings.iter().any(|new| new.key == key && new.section.as_deref().unwrap_or(section) == s)
    };
    for (s, key, value) in base {
        if (*s, *key) != (section, dropped) && !replaced(s, key) {
            sections.entry((*s).to_owned()).or_default().push(format!("{key} = {value}"));
        }
    }
    for setting in settings {
        let section = setting.section.clone().unwrap_or_else(|| section.to_owned());
        sections.entry(section).or_default().push(setting.line());
    }
    sections.iter().map(|(name, lines)| format!("[{name}]\n{}\n", lines.join("\n"))).collect()
}

/// A testbed with these settings in the place of KEY. Its table loses the key that they are about.
fn testbed_text(base: &str, dropped: &str, settings: &[Setting]) -> String {
    let (before, after) = base.split_once("KEY").unwrap();
    let table = before.rfind("\n[").map_or(0, |at| at + 1);
    let (others, own) = before.split_at(table);
    let is_kept = |line: &&str| {
        let key = line.split(" = ").next().unwrap_or_default();
        key != dropped && !settings.iter().any(|new| new.section.is_none() && new.key == key)
    };
    let own: Vec<&str> = own.lines().filter(is_kept).collect();
    let (here, there): (Vec<&Setting>, Vec<&Setting>) = settings.iter().partition(|s| s.section.is_none());
    let lines: Vec<String> = here.iter().map(|setting| setting.line()).collect();
    let tables = there.iter().map(|s| format!("{}\n{}\n", s.section.as_deref().unwrap_or_default(), s.line()));
    format!("{others}{}\n{}\n{after}{}", own.join("\n"), lines.join("\n"), tables.collect::<String>())
}

/// The keys below a heading, each with the text about its type.
fn kinds(document: &str, heading: &str) -> BTreeMap<String, String> {
    let entry = |text: &str| {
        let text = joined(text);
        let (key, rest) = text.strip_prefix('`')?.split_once("`: ")?;
        let end = [", default", ", no default", ", required"].iter().filter_map(|word| rest.find(word)).min();
        Some((key.to_owned(), rest[..end.unwrap_or(rest.len())].to_owned()))
    };
    section(document, heading).split("\n- ").skip(1).filter_map(entry).collect()
}

/// A file or a folder that a path of a job may lead to.
fn path_for<'p>(section: &str, key: &str, base: &[(&str, &str, String)]) -> &'p str {
    let is = |kind: &str| base.iter().any(|(_, key, value)| *key == "kind" && *value == format!("\"{kind}\""));
    let (tensors, chats) = (is("tensors"), is("chats"));
    match (section, key) {
        ("data", "files" | "validation") if tensors => "shards/a.safetensors",
        ("data", "files" | "validation") if chats => "chats.jsonl",
        ("data", "template") => "chat.jinja",
        ("data", "files" | "validation") => "corpus/a.txt",
        ("data", _) => "image.bin",
        ("model", "config") => "config.json",
        ("model", "path") => "folder",
        _ => "model.pt2",
    }
}

/// A valid value: the default, or one that the type names.
fn valid_value(kind: &str, path: &str, job: &toml::Table, section: &str, key: &str) -> String {
    if kind.starts_with("path") {
        return format!("{path:?}");
    }
    if kind.starts_with("section") {
        return "{}".to_owned();
    }
    let table = section.split('.').try_fold(job, |table, name| table.get(name)?.as_table());
    match table.and_then(|table| table.get(key)) {
        Some(value) => value.to_string(),
        None if kind.starts_with("integer") => "8".to_owned(),
        None if kind.starts_with("list of tables") => "[{ parameters = \"*\", lr = 0.1 }]".to_owned(),
        None if kind.starts_with("list") => "[\"*\"]".to_owned(),
        None => kind.split('`').nth(1).unwrap_or_else(|| panic!("{section}.{key}: {kind}")).to_owned(),
    }
}

/// A valid value of a testbed's key.
fn testbed_value(key: &str, kind: &str) -> String {
    match (key, kind.split([':', '.']).next().unwrap_or_default()) {
        ("at" | "from", _) => "\"a\"",
        ("to" | "site", _) => "\"s\"",
        ("gpu", _) => "\"T4\"",
        (_, "string") => "\"x\"",
        (_, "path") => "\"D.toml\"",
        (_, "integer") => "1",
        (_, "number") => "1.0",
        (_, "rate") => "\"1 Gbps\"",
        (_, "time") => "\"1 ms\"",
        (_, "size") => "\"1 GiB\"",
        (_, "two strings") => "[\"a\", \"b\"]",
        ("processor", _) => "{ name = \"x\", cores = 1 }",
        (_, "table") => "{ rate = \"1 Gbps\" }",
        (_, "table of curves") => "{}",
        (_, other) => panic!("{key}: {other}"),
    }
    .to_owned()
}

/// The files that the tables name are there.
#[test]
fn wrong_values_are_tried_with_files_that_are_there() {
    let dir = files();
    let jobs = ["corpus/a.txt", "shards/a.safetensors", "image.bin", "model.pt2", "config.json", "folder"];
    for path in jobs.into_iter().chain(["chats.jsonl", "chat.jinja", "D.toml"]) {
        assert!(Path::new(dir.path()).join(path).exists(), "{path}");
    }
}
