//! Every key of the documents, written wrongly in every way: one clear message, with advice that works.
//!
//! The documents say which keys there are, so a new key is tested as soon as it is described. A fault that a key
//! accepts, such as a whole number where a number is wanted, is none. `--nocapture` prints the table.

use fusionllm_node::config::JobError;

use crate::advice::{Setting, follow};

/// What is written in the place of a value. Most keys accept some of them.
const VALUES: [(&str, &str); 12] = [
    ("a text", "\"zzz\""),
    ("a number in quotes", "\"8\""),
    ("a unit", "\"8 parsecs\""),
    ("no quotes", "zzz"),
    ("a truth", "true"),
    ("a fraction", "8.5"),
    ("below all ranges", "-1"),
    ("zero", "0"),
    ("above all ranges", "99999999999999999999"),
    ("no number", "nan"),
    ("a list", "[true]"),
    ("a table", "{ zzz = 1 }"),
];

/// A key, in a file that is right without it.
pub(crate) struct Key<'a> {
    /// The name of the section in messages, such as `train`.
    pub(crate) section: &'a str,
    pub(crate) key: &'a str,
    /// The file, with the place of the setting.
    pub(crate) base: &'a dyn Fn(&[Setting]) -> String,
    /// A valid value of the key, for misspelling its name; the path of a file, for a key that takes one.
    pub(crate) value: String,
    pub(crate) path: &'a str,
}

/// The rows of the table.
#[derive(Default)]
pub(crate) struct Table {
    rows: Vec<String>,
    failed: Vec<String>,
}

impl Table {
    /// Writes the key wrongly in every way, and follows the advice.
    pub(crate) fn add(&mut self, key: &Key<'_>, parse: &dyn Fn(&str) -> Result<(), JobError>) {
        let mut refused = 0;
        for (fault, value) in VALUES {
            refused += usize::from(self.try_one(key, fault, key.key, value, parse));
        }
        let name = format!("{}.{}", key.section, key.key);
        if refused == 0 {
            self.failed.push(format!("{name} accepts everything"));
        }
        if !self.try_one(key, "a misspelt name", &misspelt(key.key), &key.value, parse) {
            self.failed.push(format!("{name} is accepted with a misspelt name"));
        }
    }

    /// Whether the setting is refused.
    fn try_one(
        &mut self,
        key: &Key<'_>,
        fault: &str,
        name: &str,
        value: &str,
        parse: &dyn Fn(&str) -> Result<(), JobError>,
    ) -> bool {
        let setting = Setting::new(name, value);
        let text = (key.base)(std::slice::from_ref(&setting));
        let Err(error) = parse(&text) else { return false };
        let line = text.lines().position(|l| l.contains(&setting.line())).map_or(0, |i| i + 1);
        let mut problems = Vec::new();
        if !error.place.starts_with(&format!("file.toml:{line}:")) {
            problems.push("the message names another line");
        }
        if !names(&error.message, name) {
            problems.push("the message does not name the key");
        }
        let attempts = follow(&error, &setting, key);
        let works = attempts.iter().any(|settings| {
            let text = (key.base)(settings);
            match parse(&text) {
                Ok(()) => true,
                // The next complaint may be about something else.
                Err(next) => !names(&next.message, key.key) && !names(&next.message, name),
            }
        });
        if attempts.is_empty() {
            problems.push("the hint says nothing to do");
        } else if !works {
            problems.push("the advice does not work");
        }
        let cell = |text: &str| text.replace('|', "\\|").replace('\n', " ");
        let row = format!(
            "| `{}.{}` | {fault}: `{name} = {value}` | {} | {} | {} |",
            key.section,
            key.key,
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
    pub(crate) fn finish(self) {
        println!("| key | fault | message | advice | works |\n| --- | --- | --- | --- | --- |");
        self.rows.iter().for_each(|row| println!("{row}"));
        assert!(self.failed.is_empty(), "{} of {}:\n{}", self.failed.len(), self.rows.len(), self.failed.join("\n"));
    }
}

/// Whether a message names a key: `key` or `section.key`.
fn names(message: &str, key: &str) -> bool {
    message.split('`').skip(1).step_by(2).any(|name| name == key || name.ends_with(&format!(".{key}")))
}

/// A name that no section has: without its second letter, or with its last letter twice if it is short.
fn misspelt(key: &str) -> String {
    let mut letters: Vec<char> = key.chars().collect();
    match (letters.len(), letters.last().copied()) {
        (0..=3, Some(last)) => letters.push(last),
        _ => drop(letters.remove(letters.len() / 2)),
    }
    letters.into_iter().collect()
}
