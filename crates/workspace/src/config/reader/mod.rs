//! Reads a settings file, and keeps the place of each piece for error messages.
//!
//! The file and the `--set` overrides become one tree of [`Node`]s. A [`Section`] reads one table of the tree and
//! notes the keys that were asked for. So the reading code itself is the list of valid keys.

mod numbers;
mod text;
mod tree;
mod words;

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;

use fusionllm_graph::Advice;
pub(super) use text::{decode, read_text};
use tree::{Item, Location};
pub(super) use tree::{Json, NULL, Node, parse, parse_json};
pub use words::word_of_others;

/// An error in a settings file, with its place and a hint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {message}")]
pub struct JobError {
    /// `file:line:column`, or the file alone for a setting that is not written. For an override: the override, such
    /// as `--set train.steps=x`.
    pub place: String,
    /// The description of the error.
    pub message: String,
    /// The advice what to write instead.
    pub hint: String,
}

impl JobError {
    pub(super) fn new(place: impl fmt::Display, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { place: place.to_string(), message: message.into(), hint: hint.into() }
    }
}

impl Advice for JobError {
    fn hint(&self) -> Option<Cow<'_, str>> {
        Some(self.hint.as_str().into())
    }
}

/// The points of a curve, as pairs of numbers.
pub(super) type Points = Vec<(f64, f64)>;

/// The minimum Jaro-Winkler similarity of a name that is suggested.
const MIN_LIKENESS: f64 = 0.7;

/// The minimum Jaro-Winkler similarity of a name that is taken for another one, misspelt.
const MISSPELT_LIKENESS: f64 = 0.85;

/// Reads the settings of one table, and reports unknown ones.
pub(super) struct Section<'a> {
    /// The dotted name of the table; empty for the top of the file.
    name: String,
    /// The place of settings that are not written.
    file: Location,
    items: Option<&'a BTreeMap<String, Node>>,
    /// A second table, for keys that are missing in `items`.
    behind: Option<&'a BTreeMap<String, Node>>,
    asked: RefCell<Vec<&'static str>>,
}

impl<'a> Section<'a> {
    /// The top of the tree, which holds the sections.
    pub(super) fn top(root: &'a Node) -> Self {
        let (name, file) = (String::new(), root.location.clone());
        Self { name, file, items: root.table(), behind: None, asked: RefCell::default() }
    }

    /// This section, with the top of another file for keys that are not written here. The other file may have unknown
    /// keys.
    pub(super) fn backed_by<'b>(&'b self, other: &'b Node) -> Section<'b> {
        Section {
            name: self.name.clone(),
            file: self.file.clone(),
            items: self.items,
            behind: other.table(),
            asked: self.asked.clone(),
        }
    }

    /// The settings that are written here, as JSON, without some keys.
    pub(super) fn written_besides(&self, keys: &[&str]) -> serde_json::Map<String, serde_json::Value> {
        let items = self.items.into_iter().flatten().filter(|(key, _)| !keys.contains(&key.as_str()));
        items.map(|(key, node)| (key.clone(), node.to_json())).collect()
    }

    fn node(&self, key: &'static str) -> Option<&'a Node> {
        let mut asked = self.asked.borrow_mut();
        if !asked.contains(&key) {
            asked.push(key);
        }
        self.written(key)
    }

    fn written(&self, key: &str) -> Option<&'a Node> {
        let own = self.items.and_then(|items| items.get(key));
        own.or_else(|| self.behind.and_then(|items| items.get(key)))
    }

    /// Whether the section itself is written, if only its head.
    pub(super) fn is_written(&self) -> bool {
        self.items.is_some()
    }

    /// Whether the setting is written.
    pub(super) fn has(&self, key: &str) -> bool {
        self.written(key).is_some()
    }

    pub(super) fn full_name(&self, key: &str) -> String {
        if self.name.is_empty() { key.to_owned() } else { format!("{}.{key}", self.name) }
    }

    /// An error about a setting, at its value, or at the file if the setting is not written.
    pub(super) fn error(&self, key: &str, message: impl Into<String>, hint: impl Into<String>) -> JobError {
        let location = self.written(key).map_or(&self.file, |node| &node.location);
        JobError::new(location, message, hint)
    }

    fn wrong_type(&self, key: &str, node: &Node, wanted: &str, hint: impl Into<String>) -> JobError {
        let name = self.full_name(key);
        JobError::new(&node.location, format!("`{name}` takes {wanted}, not {}", node.item.describe()), hint)
    }

    /// A table in this section.
    pub(super) fn section(&self, key: &'static str) -> Result<Section<'a>, JobError> {
        let items = match self.node(key) {
            None => None,
            Some(Node { item: Item::Table(items), .. }) => Some(items),
            Some(node) => {
                let name = self.full_name(key);
                return Err(JobError::new(
                    &node.location,
                    format!("`{name}` is a section, not {}", node.item.describe()),
                    format!("write [{name}] on a line, and its settings below"),
                ));
            }
        };
        let (name, file) = (self.full_name(key), self.file.clone());
        Ok(Section { name, file, items, behind: None, asked: RefCell::default() })
    }

    /// The tables `[[key]]`, in order.
    pub(super) fn tables(&self, key: &'static str) -> Result<Vec<Section<'a>>, JobError> {
        let name = self.full_name(key);
        let wrong = |node: &Node| {
            let message = format!("`{name}` is a list of tables, not {}", node.item.describe());
            JobError::new(&node.location, message, format!("write [[{name}]] on a line, and its settings below"))
        };
        let Some(node) = self.node(key) else { return Ok(Vec::new()) };
        let Item::List(nodes) = &node.item else { return Err(wrong(node)) };
        let section = |node: &'a Node| match &node.item {
            Item::Table(items) => {
                let (name, file) = (name.clone(), node.location.clone());
                Ok(Section { name, file, items: Some(items), behind: None, asked: RefCell::default() })
            }
            _ => Err(wrong(node)),
        };
        nodes.iter().map(section).collect()
    }

    /// An error about a missing setting, or about a setting that is one of `keys`, misspelt.
    pub(super) fn missing(&self, keys: &[&str], message: &str, hint: &str) -> JobError {
        self.misspelt(keys).err().unwrap_or_else(|| JobError::new(&self.file, message, hint))
    }

    /// Reports a setting whose name is almost one of `keys`, which decide what the section may have. Without it, the
    /// other settings would be reported.
    pub(super) fn misspelt(&self, keys: &[&str]) -> Result<(), JobError> {
        for key in keys.iter().filter(|key| !self.has(key)) {
            let like = |written: &str| strsim::jaro_winkler(written, key) >= MISSPELT_LIKENESS;
            let asked = |written: &str| self.asked.borrow().contains(&written);
            let found = self.items.into_iter().flatten().find(|(written, _)| like(written) && !asked(written));
            if let Some((written, node)) = found {
                let message = format!("unknown setting `{written}` in [{}]", self.name);
                return Err(JobError::new(&node.key_location, message, format!("did you mean `{key}`?")));
            }
        }
        Ok(())
    }

    /// A table of lists of pairs of numbers, by name.
    pub(super) fn curves(&self, key: &'static str) -> Result<Vec<(String, Points)>, JobError> {
        let section = self.section(key)?;
        let number = |node: &Node| match node.item {
            Item::Integer(i) => Some(i as f64),
            Item::Number(x) => Some(x),
            _ => None,
        };
        let pair = |node: &Node| match &node.item {
            Item::List(pair) => match &pair[..] {
                [a, b] => Some((number(a)?, number(b)?)),
                _ => None,
            },
            _ => None,
        };
        let curve = |(name, node): (&String, &'a Node)| {
            let points = match &node.item {
                Item::List(points) => points.iter().map(pair).collect::<Option<Vec<_>>>(),
                _ => None,
            };
            match points {
                Some(points) => Ok((name.clone(), points)),
                None => {
                    let hint =
                        format!("write {key} = {{ {name} = [[1e6, 2e-5], [1e9, 1e-2]] }}, with what was measured");
                    Err(self.wrong_type(&format!("{key}.{name}"), node, "a list of pairs of numbers", hint))
                }
            }
        };
        section.items.into_iter().flatten().map(curve).collect()
    }

    /// `true` or `false`.
    pub(super) fn flag(&self, key: &'static str) -> Result<Option<bool>, JobError> {
        match self.node(key) {
            None => Ok(None),
            Some(Node { item: Item::Flag(b), .. }) => Ok(Some(*b)),
            Some(node) => {
                let hint = match node.item.meant_flag() {
                    Some(meant) => format!("write {key} = {meant}"),
                    None => format!("write {key} = true or {key} = false"),
                };
                Err(self.wrong_type(key, node, "true or false", hint))
            }
        }
    }

    /// Text.
    pub(super) fn text(&self, key: &'static str) -> Result<Option<&'a str>, JobError> {
        self.text_or(key, |item| match item {
            Item::Integer(_) | Item::Number(_) | Item::Flag(_) => format!("write {key} = \"{}\"", item.describe()),
            _ => "it must be a text in quotes".into(),
        })
    }

    /// A setting that is one of some names. They are listed if it is no text. Whether the text is one of them is not
    /// checked.
    pub(super) fn name_among(
        &self,
        key: &'static str,
        names: &[&str],
        lead: &str,
    ) -> Result<Option<&'a str>, JobError> {
        self.text_or(key, |item| suggest(&item.describe(), names, lead))
    }

    /// One of several things, by its position from 0 or by its name.
    pub(super) fn position_or_name(&self, key: &'static str) -> Result<Option<String>, JobError> {
        if self.is_number(key) {
            return Ok(self.count(key, 0)?.map(|position| position.to_string()));
        }
        let hint = format!("write {key} = 0 for the first one, or its name in quotes");
        Ok(self.text_or(key, |_| hint.clone())?.map(str::to_owned))
    }

    /// The path of a file.
    pub(super) fn path(&self, key: &'static str) -> Result<Option<&'a str>, JobError> {
        self.text_or(key, |_| format!("write {key} = \"PATH\", the path of a file"))
    }

    /// Reads a text. `hint` says what to write if the setting is no text.
    fn text_or(&self, key: &'static str, hint: impl Fn(&Item) -> String) -> Result<Option<&'a str>, JobError> {
        match self.node(key) {
            None => Ok(None),
            Some(Node { item: Item::Text(s), .. }) => Ok(Some(s)),
            Some(node) => Err(self.wrong_type(key, node, "a string", hint(&node.item))),
        }
    }

    /// Reads a list of texts. A single text is a list of one. `hint` says what to write if the setting is neither.
    pub(super) fn texts(&self, key: &'static str, hint: &str) -> Result<Option<Vec<&'a str>>, JobError> {
        let Some(node) = self.node(key) else { return Ok(None) };
        let wrong = |node| self.wrong_type(key, node, "a list of strings", hint);
        match &node.item {
            Item::Text(s) => Ok(Some(vec![s])),
            Item::List(nodes) => {
                let texts = nodes.iter().map(|n| match &n.item {
                    Item::Text(s) => Ok(s.as_str()),
                    _ => Err(wrong(n)),
                });
                texts.collect::<Result<_, _>>().map(Some)
            }
            _ => Err(wrong(node)),
        }
    }

    /// The text of a setting that another section looks at. It stays unknown to this one.
    pub(super) fn peek(&self, key: &str) -> Option<&'a str> {
        match &self.written(key)?.item {
            Item::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Whether the setting is written with this text.
    pub(super) fn is(&self, key: &str, text: &str) -> bool {
        matches!(self.written(key).map(|n| &n.item), Some(Item::Text(s)) if s == text)
    }

    /// Whether the setting comes from the command line.
    pub(super) fn is_overridden(&self, key: &str) -> bool {
        self.written(key).is_some_and(|node| matches!(node.location, Location::Set(_)))
    }

    /// Whether the setting is written as a number.
    pub(super) fn is_number(&self, key: &str) -> bool {
        matches!(self.written(key).map(|n| &n.item), Some(Item::Integer(_) | Item::Number(_)))
    }

    /// Whether the setting is written as text or as a list.
    pub(super) fn is_text_or_list(&self, key: &str) -> bool {
        matches!(self.written(key).map(|n| &n.item), Some(Item::Text(_) | Item::List(_)))
    }

    /// Whether the setting is a number that is written as text.
    pub(super) fn is_quoted_number(&self, key: &str) -> bool {
        self.written(key).is_some_and(|node| node.item.quoted_number().is_some())
    }

    /// One of the names in `choices`.
    pub(super) fn choice<T: Copy>(&self, key: &'static str, choices: &[(&str, T)]) -> Result<Option<T>, JobError> {
        let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
        let lead = "it is one of";
        let written = self.name_among(key, &names, lead)?;
        let Some(written) = written else { return Ok(None) };
        if let Some((_, value)) = choices.iter().find(|(name, _)| *name == written) {
            return Ok(Some(*value));
        }
        let message = format!("`{}` cannot be \"{written}\"", self.full_name(key));
        Err(self.error(key, message, suggest(written, &names, lead)))
    }

    /// Reports the first key that the reading code did not ask for.
    pub(super) fn finish(&self) -> Result<(), JobError> {
        let asked = self.asked.borrow();
        let unknown = self.items.into_iter().flatten().find(|(key, _)| !asked.contains(&key.as_str()));
        let Some((key, node)) = unknown else { return Ok(()) };
        let (message, hint) = if !self.name.is_empty() {
            let message = format!("unknown setting `{key}` in [{}]", self.name);
            (message, suggest_name(key, &asked, &format!("[{}] takes", self.name)))
        } else if let Item::Table(_) = node.item {
            (format!("unknown section `{key}`"), suggest_name(key, &asked, "the sections are"))
        } else {
            let hint = format!("put it below its section's header; the sections are {}", asked.join(", "));
            (format!("the setting `{key}` stands outside the sections"), hint)
        };
        // A word may be ours, too, and not taken here: another optimizer has it.
        let ours = format!("`{}`", self.full_name(key));
        let hint = word_of_others(key).filter(|hint| !hint.contains(&ours)).map_or(hint, str::to_owned);
        Err(JobError::new(&node.key_location, message, hint))
    }
}

/// A hint about a value, such as `did you mean "x"? LEAD "x", "y"`.
pub(super) fn suggest(written: &str, valid: &[&str], lead: &str) -> String {
    let question = nearest(written, valid).map(|n| format!("did you mean \"{n}\"? ")).unwrap_or_default();
    let valid: Vec<String> = valid.iter().map(|name| format!("\"{name}\"")).collect();
    format!("{question}{lead} {}", valid.join(", "))
}

/// A hint about the name of a setting: "did you mean `x`? LEAD x, y".
fn suggest_name(written: &str, valid: &[&str], lead: &str) -> String {
    let question = nearest(written, valid).map(|n| format!("did you mean `{n}`? ")).unwrap_or_default();
    format!("{question}{lead} {}", valid.join(", "))
}

/// The name that is most like the written one, if any is like it.
fn nearest<'n>(written: &str, names: &[&'n str]) -> Option<&'n str> {
    let likeness = |name: &str| strsim::jaro_winkler(&written.to_lowercase(), &name.to_lowercase());
    let nearest = names.iter().max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    nearest.copied().filter(|name| likeness(name) >= MIN_LIKENESS)
}
