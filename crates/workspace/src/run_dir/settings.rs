//! The settings in which the jobs of several runs differ.

use std::collections::BTreeMap;

use toml::{Table, Value};

use super::WRITTEN_IN;

/// A setting that does not have the same value in all jobs.
#[derive(Debug, Clone, PartialEq)]
pub struct DifferingSetting {
    /// The key with its section, such as `train.optimizer.lr`.
    pub key: String,
    /// The value in each job, in the order of the jobs. `None` where a job does not have the key.
    pub values: Vec<Option<Value>>,
}

impl DifferingSetting {
    /// The value in one job as people read it: text without quotation marks, and `-` for none.
    pub fn shown(&self, job: usize) -> String {
        self.values.get(job).and_then(Option::as_ref).map_or_else(|| "-".to_owned(), shown)
    }
}

/// A value as people read it: text without quotation marks, and without the token of a relay. Pages and lists are shown
/// to others.
fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => match text.split_once("?token=") {
            Some((url, _)) => format!("{url}?token=…"),
            None => text.clone(),
        },
        value => value.to_string(),
    }
}

/// All settings of a job with their whole keys, as people read them.
pub fn settings(job: &Table) -> Vec<(String, String)> {
    flat(job).into_iter().map(|(key, value)| (key, shown(value))).collect()
}

/// The settings in which jobs differ, sorted by their keys. Each job is a `job.toml` with every default filled in.
pub fn differing_settings<'a>(jobs: impl IntoIterator<Item = &'a Table>) -> Vec<DifferingSetting> {
    let jobs: Vec<BTreeMap<String, &Value>> = jobs.into_iter().map(flat).collect();
    let mut keys: Vec<&String> = jobs.iter().flat_map(BTreeMap::keys).collect();
    keys.sort();
    keys.dedup();
    let differs = |key: &&String| {
        let mut values = jobs.iter().map(|job| job.get(*key));
        let first = values.next();
        values.any(|value| Some(value) != first)
    };
    let values = |key: &String| jobs.iter().map(|job| job.get(key).map(|value| (*value).clone())).collect();
    let setting = |key: &String| DifferingSetting { key: key.clone(), values: values(key) };
    keys.into_iter().filter(differs).map(setting).collect()
}

/// The values of a job by their whole keys. A table without entries is a value, and so is an array.
fn flat(job: &Table) -> BTreeMap<String, &Value> {
    fn add<'a>(flat: &mut BTreeMap<String, &'a Value>, before: &str, table: &'a Table) {
        for (key, value) in table {
            let key = if before.is_empty() { key.clone() } else { format!("{before}.{key}") };
            match value {
                Value::Table(inner) if !inner.is_empty() => add(flat, &key, inner),
                value => drop(flat.insert(key, value)),
            }
        }
    }
    let mut all = BTreeMap::new();
    add(&mut all, "", job);
    // It is no setting, but the place of the file.
    all.remove(WRITTEN_IN);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn differences(jobs: &[&str]) -> Vec<String> {
        let jobs: Vec<Table> = jobs.iter().map(|job| job.parse().unwrap()).collect();
        let shown = |setting: DifferingSetting| {
            let values: Vec<String> = (0..jobs.len()).map(|job| setting.shown(job)).collect();
            format!("{}: {}", setting.key, values.join(", "))
        };
        differing_settings(&jobs).into_iter().map(shown).collect()
    }

    #[test]
    fn equal_settings_are_left_out() {
        let job = "[train]\nsteps = 4\noptimizer = { name = \"adamw\", lr = 0.002 }\n";
        assert_eq!(differences(&[]), [""; 0]);
        assert_eq!(differences(&[job]), [""; 0]);
        assert_eq!(differences(&[job, job, job]), [""; 0]);
        let other = "[train]\noptimizer = { lr = 0.001, name = \"adamw\" }\nsteps = 4\n";
        assert_eq!(differences(&[job, other, job]), ["train.optimizer.lr: 0.002, 0.001, 0.002"]);
    }

    #[test]
    fn a_missing_setting_differs_from_every_value() {
        let bare = "[data]\nkind = \"text\"\nfiles = [\"a\", \"b\"]\n[eval]\n";
        let other =
            "[data]\nkind = \"text\"\nfiles = [\"a\"]\ngroup = 1\n[eval]\nevery = 5\n[plan]\nscheduler = \"exact\"\n";
        assert_eq!(
            differences(&[bare, other]),
            [
                "data.files: [\"a\", \"b\"], [\"a\"]",
                "data.group: -, 1",
                "eval: {}, -",
                "eval.every: -, 5",
                "plan.scheduler: -, exact"
            ]
        );
    }

    #[test]
    fn the_token_of_a_relay_is_not_shown() {
        let job: Table = "network = { relay = \"http://relay.example.org:3340/?token=mfrggzdfmy\" }".parse().unwrap();
        let shown = [("network.relay".to_owned(), "http://relay.example.org:3340/?token=…".to_owned())];
        assert_eq!(settings(&job), shown);
    }

    /// `1` and `1.0` are values of two types, and a job's own file always has the same one for a key.
    #[test]
    fn numbers_keep_their_types() {
        assert_eq!(differences(&["a = 1", "a = 1.0"]), ["a: 1, 1.0"]);
    }
}
