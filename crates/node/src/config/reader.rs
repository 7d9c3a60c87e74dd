//! Reads a settings file, and keeps the place of each piece for error messages.
//!
//! The file and the `--set` overrides become one tree of [`Node`]s. A [`Section`] reads one table of the tree and
//! notes the keys that were asked for. So the reading code itself is the list of valid keys.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::rc::Rc;

use toml::de::{DeTable, DeValue};

/// What is wrong in a settings file, where, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {message}")]
pub struct JobError {
    /// `file:line:column`; the file alone for a setting that is not written; or the override, such as `--set
    /// train.steps=x`.
    pub place: String,
    /// What is wrong.
    pub message: String,
    /// What to write instead.
    pub hint: String,
}

impl JobError {
    pub(super) fn new(place: impl fmt::Display, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { place: place.to_string(), message: message.into(), hint: hint.into() }
    }
}

/// Pairs of numbers.
pub(super) type Points = Vec<(f64, f64)>;

/// Names that users of other trainers write, and what to write here instead.
const OTHER_NAMES: [(&str, &str); 4] = [
    ("train.gradient_accumulation", GRADIENT_ACCUMULATION),
    ("train.gradient_accumulation_steps", GRADIENT_ACCUMULATION),
    ("train.dtype", DTYPE),
    ("train.precision", DTYPE),
];
const GRADIENT_ACCUMULATION: &str =
    "gradients accumulate over batch / micro_batch micro-batches: set train.batch and train.micro_batch";
const DTYPE: &str = "leave it out: parameters and activations are float32; [compression] makes messages smaller";

/// The least Jaro-Winkler similarity at which a name is suggested.
const MIN_LIKENESS: f64 = 0.7;

/// No size of a model or batch comes near this, and products of two sizes do not overflow.
const MAX_SIZE: u32 = i32::MAX as u32;

/// Where a value or a setting's name was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Place {
    /// A file, with line and column where known, both counted from 1.
    File { file: Rc<str>, at: Option<(usize, usize)> },
    /// An override on the command line.
    Set(Rc<str>),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { file, at: Some((line, column)) } => write!(f, "{file}:{line}:{column}"),
            Self::File { file, at: None } => f.write_str(file),
            Self::Set(set) => write!(f, "--set {set}"),
        }
    }
}

/// A value of the tree.
#[derive(Debug, Clone)]
pub(super) struct Node {
    key_place: Place,
    place: Place,
    item: Item,
}

#[derive(Debug, Clone)]
enum Item {
    Table(BTreeMap<String, Node>),
    List(Vec<Node>),
    Text(String),
    Integer(i64),
    Number(f64),
    Flag(bool),
    Date,
}

impl Item {
    /// The value, for messages.
    fn describe(&self) -> String {
        match self {
            Self::Table(_) => "a table".into(),
            Self::List(_) => "a list".into(),
            Self::Text(s) => format!("the text {s:?}"),
            Self::Integer(i) => i.to_string(),
            Self::Number(x) => x.to_string(),
            Self::Flag(b) => b.to_string(),
            Self::Date => "a date".into(),
        }
    }
}

/// Parses a whole file, which messages call `file`.
pub(super) fn parse(file: &str, text: &str) -> Result<Node, JobError> {
    let source = Source { file: file.into(), text };
    let table = DeTable::parse(text).map_err(|e| {
        let place = source.place(e.span().map_or(text.len(), |s| s.start));
        let hint = "the file is TOML: sections as [train], settings as name = value, text in quotes";
        JobError::new(place, e.message().replace('\n', ", "), hint)
    })?;
    let whole = Place::File { file: source.file.clone(), at: None };
    let item = source.table(table.get_ref())?;
    Ok(Node { key_place: whole.clone(), place: whole, item })
}

struct Source<'a> {
    file: Rc<str>,
    text: &'a str,
}

impl Source<'_> {
    fn place(&self, offset: usize) -> Place {
        let before = &self.text[..self.text.floor_char_boundary(offset)];
        let line_start = before.rfind('\n').map_or(0, |i| i + 1);
        let at = (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1);
        Place::File { file: self.file.clone(), at: Some(at) }
    }

    fn table(&self, table: &DeTable<'_>) -> Result<Item, JobError> {
        let mut items = BTreeMap::new();
        for (key, value) in table.iter() {
            let place = self.place(value.span().start);
            let item = self.item(value.get_ref(), &place)?;
            let key_place = self.place(key.span().start);
            items.insert(key.get_ref().to_string(), Node { key_place, place, item });
        }
        Ok(Item::Table(items))
    }

    fn item(&self, value: &DeValue<'_>, place: &Place) -> Result<Item, JobError> {
        match value {
            DeValue::Table(table) => self.table(table),
            DeValue::Array(values) => {
                let nodes = values.iter().map(|v| {
                    let place = self.place(v.span().start);
                    let item = self.item(v.get_ref(), &place)?;
                    Ok(Node { key_place: place.clone(), place, item })
                });
                Ok(Item::List(nodes.collect::<Result<_, _>>()?))
            }
            scalar => scalar_item(scalar, place),
        }
    }
}

fn scalar_item(value: &DeValue<'_>, place: &Place) -> Result<Item, JobError> {
    let too_large = |digits: &str| JobError::new(place, format!("{digits} is out of range"), "use a number below 2^63");
    Ok(match value {
        DeValue::String(s) => Item::Text(s.to_string()),
        DeValue::Boolean(b) => Item::Flag(*b),
        DeValue::Integer(i) => {
            Item::Integer(i64::from_str_radix(i.as_str(), i.radix()).map_err(|_| too_large(i.as_str()))?)
        }
        DeValue::Float(x) => Item::Number(x.as_str().parse().map_err(|_| too_large(x.as_str()))?),
        _ => Item::Date,
    })
}

/// Reads a JSON file of settings. Nulls count as not written.
pub(super) fn parse_json(path: &Path) -> Result<Node, JobError> {
    let name = path.display().to_string();
    let hint = "give a config.json as Hugging Face publishes them";
    let text = std::fs::read_to_string(path)
        .map_err(|e| JobError::new(&name, format!("the file cannot be read: {e}"), hint))?;
    let values: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&text)
        .map_err(|e| JobError::new(format!("{name}:{}:{}", e.line(), e.column()), e.to_string(), hint))?;
    let place = Place::File { file: name.as_str().into(), at: None };
    Ok(json_node(&serde_json::Value::Object(values), &place))
}

fn json_node(value: &serde_json::Value, place: &Place) -> Node {
    use serde_json::Value;
    let item = match value {
        Value::Object(map) => {
            let written = map.iter().filter(|(_, v)| !v.is_null());
            Item::Table(written.map(|(k, v)| (k.clone(), json_node(v, place))).collect())
        }
        Value::Array(values) => Item::List(values.iter().map(|v| json_node(v, place)).collect()),
        Value::String(s) => Item::Text(s.clone()),
        Value::Bool(b) => Item::Flag(*b),
        Value::Number(n) => match n.as_i64() {
            Some(i) => Item::Integer(i),
            None => Item::Number(n.as_f64().unwrap_or(f64::NAN)),
        },
        Value::Null => Item::List(Vec::new()),
    };
    Node { key_place: place.clone(), place: place.clone(), item }
}

impl Node {
    fn table(&self) -> Option<&BTreeMap<String, Node>> {
        match &self.item {
            Item::Table(items) => Some(items),
            _ => None,
        }
    }

    /// Puts `section.key=value` into the tree. The value has TOML's syntax; a bare word is text.
    pub(super) fn set(&mut self, setting: &str) -> Result<(), JobError> {
        let place = Place::Set(setting.trim().into());
        let form = "write --set section.key=value, such as --set train.steps=100";
        let (path, text) =
            setting.split_once('=').ok_or_else(|| JobError::new(&place, "an override needs a value", form))?;
        let keys: Vec<&str> = path.split('.').map(str::trim).collect();
        if keys.iter().any(|k| k.is_empty()) {
            return Err(JobError::new(&place, "an override needs the name of a setting", form));
        }
        let mut node = self;
        for key in keys {
            if !matches!(node.item, Item::Table(_)) {
                node.place = place.clone();
                node.item = Item::Table(BTreeMap::new());
            }
            let Item::Table(items) = &mut node.item else { return Ok(()) };
            node = items.entry(key.to_owned()).or_insert_with(|| Node {
                key_place: place.clone(),
                place: place.clone(),
                item: Item::Table(BTreeMap::new()),
            });
        }
        node.item = override_item(text.trim(), &place)?;
        node.place = place;
        Ok(())
    }
}

fn override_item(text: &str, place: &Place) -> Result<Item, JobError> {
    // Each part of an override has the place of the override.
    fn convert(value: &DeValue<'_>, place: &Place) -> Result<Item, JobError> {
        let node = |value: &DeValue<'_>| {
            let item = convert(value, place)?;
            Ok(Node { key_place: place.clone(), place: place.clone(), item })
        };
        match value {
            DeValue::Table(table) => {
                let items = table.iter().map(|(k, v)| Ok((k.get_ref().to_string(), node(v.get_ref())?)));
                Ok(Item::Table(items.collect::<Result<_, _>>()?))
            }
            DeValue::Array(values) => {
                Ok(Item::List(values.iter().map(|v| node(v.get_ref())).collect::<Result<_, _>>()?))
            }
            scalar => scalar_item(scalar, place),
        }
    }
    match DeValue::parse(text) {
        Ok(value) => convert(value.get_ref(), place),
        Err(e) if text.starts_with(['"', '\'', '[', '{']) => Err(JobError::new(
            place,
            e.message().replace('\n', ", "),
            "the value has TOML's syntax: 3, 1e-4, true, word, \"text\", [\"a\", \"b\"]",
        )),
        Err(_) => Ok(Item::Text(text.to_owned())),
    }
}

/// Reads the settings of one table, and reports unknown ones.
pub(super) struct Section<'a> {
    /// Dotted; empty for the top of the file.
    name: String,
    /// The place of settings that are not written.
    file: Place,
    items: Option<&'a BTreeMap<String, Node>>,
    /// A second table, for keys that are not in `items`.
    behind: Option<&'a BTreeMap<String, Node>>,
    asked: RefCell<Vec<&'static str>>,
}

impl<'a> Section<'a> {
    /// The top of the tree, which holds the sections.
    pub(super) fn top(root: &'a Node) -> Self {
        let (name, file) = (String::new(), root.place.clone());
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

    /// Whether the setting is written.
    pub(super) fn has(&self, key: &str) -> bool {
        self.written(key).is_some()
    }

    pub(super) fn full_name(&self, key: &str) -> String {
        if self.name.is_empty() { key.to_owned() } else { format!("{}.{key}", self.name) }
    }

    /// An error about a setting, at its value, or at the file if the setting is not written.
    pub(super) fn error(&self, key: &str, message: impl Into<String>, hint: impl Into<String>) -> JobError {
        let place = self.written(key).map_or(&self.file, |node| &node.place);
        JobError::new(place, message, hint)
    }

    fn wrong_type(&self, key: &str, node: &Node, wanted: &str, example: &str) -> JobError {
        let name = self.full_name(key);
        let message = format!("`{name}` takes {wanted}, not {}", node.item.describe());
        JobError::new(&node.place, message, format!("write {key} = {example}"))
    }

    /// A table in this section.
    pub(super) fn section(&self, key: &'static str) -> Result<Section<'a>, JobError> {
        let items = match self.node(key) {
            None => None,
            Some(Node { item: Item::Table(items), .. }) => Some(items),
            Some(node) => {
                let name = self.full_name(key);
                return Err(JobError::new(
                    &node.place,
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
            JobError::new(&node.place, message, format!("write [[{name}]] on a line, and its settings below"))
        };
        let Some(node) = self.node(key) else { return Ok(Vec::new()) };
        let Item::List(nodes) = &node.item else { return Err(wrong(node)) };
        let section = |node: &'a Node| match &node.item {
            Item::Table(items) => {
                let (name, file) = (name.clone(), node.place.clone());
                Ok(Section { name, file, items: Some(items), behind: None, asked: RefCell::default() })
            }
            _ => Err(wrong(node)),
        };
        nodes.iter().map(section).collect()
    }

    /// An error about a missing setting.
    pub(super) fn missing(&self, message: &str, hint: &str) -> JobError {
        JobError::new(&self.file, message, hint)
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
                None => Err(self.wrong_type(name, node, "a list of pairs of numbers", "[[1e6, 2e-5], [1e9, 1e-2]]")),
            }
        };
        section.items.into_iter().flatten().map(curve).collect()
    }

    /// A whole number of at least `least`. A float is accepted if it is whole (`1e3`).
    pub(super) fn count(&self, key: &'static str, least: u64) -> Result<Option<u64>, JobError> {
        let Some(node) = self.node(key) else { return Ok(None) };
        let value = match node.item {
            Item::Integer(i) => i,
            // Below 2^53 every whole float is exact.
            Item::Number(x) if x.fract() == 0.0 && x.abs() < 9e15 => x as i64,
            _ => {
                let example = least.max(1).to_string();
                return Err(self.wrong_type(key, node, "a whole number", &example));
            }
        };
        match u64::try_from(value) {
            Ok(v) if v >= least => Ok(Some(v)),
            _ => {
                let message = format!("`{}` is {value}", self.full_name(key));
                Err(self.error(key, message, format!("it must be at least {least}")))
            }
        }
    }

    /// [`Self::count`] for sizes in memory: at most [`MAX_SIZE`].
    pub(super) fn size(&self, key: &'static str, least: u64) -> Result<Option<usize>, JobError> {
        let Some(n) = self.count(key, least)? else { return Ok(None) };
        match u32::try_from(n) {
            Ok(size) if size <= MAX_SIZE => Ok(Some(size as usize)),
            _ => {
                let message = format!("`{}` is {n}", self.full_name(key));
                Err(self.error(key, message, format!("it must be at most {MAX_SIZE}")))
            }
        }
    }

    /// A finite number that `valid` accepts. `rule` describes the valid ones.
    pub(super) fn number(
        &self,
        key: &'static str,
        rule: &str,
        valid: impl Fn(f64) -> bool,
    ) -> Result<Option<f64>, JobError> {
        let Some(node) = self.node(key) else { return Ok(None) };
        let value = match node.item {
            Item::Integer(i) => i as f64,
            Item::Number(x) => x,
            _ => return Err(self.wrong_type(key, node, "a number", "0.1")),
        };
        if value.is_finite() && valid(value) {
            return Ok(Some(value));
        }
        let message = format!("`{}` is {value}", self.full_name(key));
        Err(self.error(key, message, format!("it must be {rule}")))
    }

    /// Two numbers in a list.
    pub(super) fn pair(
        &self,
        key: &'static str,
        rule: &str,
        valid: impl Fn(f64) -> bool,
    ) -> Result<Option<[f64; 2]>, JobError> {
        let Some(node) = self.node(key) else { return Ok(None) };
        let Item::List(nodes) = &node.item else {
            return Err(self.wrong_type(key, node, "two numbers", "[0.9, 0.95]"));
        };
        let numbers: Option<Vec<f64>> = nodes
            .iter()
            .map(|n| match n.item {
                Item::Integer(i) => Some(i as f64),
                Item::Number(x) => Some(x),
                _ => None,
            })
            .collect();
        match numbers.as_deref() {
            Some(&[a, b]) if valid(a) && valid(b) => Ok(Some([a, b])),
            Some(&[_, _]) => {
                let message = format!("`{}` is out of range", self.full_name(key));
                Err(self.error(key, message, format!("both must be {rule}")))
            }
            _ => {
                let message = format!("`{}` takes two numbers", self.full_name(key));
                Err(self.error(key, message, format!("write {key} = [0.9, 0.95]")))
            }
        }
    }

    /// `true` or `false`.
    pub(super) fn flag(&self, key: &'static str) -> Result<Option<bool>, JobError> {
        match self.node(key) {
            None => Ok(None),
            Some(Node { item: Item::Flag(b), .. }) => Ok(Some(*b)),
            Some(node) => Err(self.wrong_type(key, node, "true or false", "true")),
        }
    }

    /// Text.
    pub(super) fn text(&self, key: &'static str) -> Result<Option<&'a str>, JobError> {
        match self.node(key) {
            None => Ok(None),
            Some(Node { item: Item::Text(s), .. }) => Ok(Some(s)),
            Some(node) => Err(self.wrong_type(key, node, "a string", "\"...\"")),
        }
    }

    /// A list of texts. A single text is a list of one.
    pub(super) fn texts(&self, key: &'static str) -> Result<Option<Vec<&'a str>>, JobError> {
        let Some(node) = self.node(key) else { return Ok(None) };
        let wrong = |node| self.wrong_type(key, node, "a list of strings", "[\"a.txt\", \"b.txt\"]");
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

    /// Whether the setting is written with this text.
    pub(super) fn is(&self, key: &str, text: &str) -> bool {
        matches!(self.written(key).map(|n| &n.item), Some(Item::Text(s)) if s == text)
    }

    /// Whether the setting is written as a number.
    pub(super) fn is_number(&self, key: &str) -> bool {
        matches!(self.written(key).map(|n| &n.item), Some(Item::Integer(_) | Item::Number(_)))
    }

    /// One of the names in `choices`.
    pub(super) fn choice<T: Copy>(&self, key: &'static str, choices: &[(&str, T)]) -> Result<Option<T>, JobError> {
        let Some(written) = self.text(key)? else { return Ok(None) };
        if let Some((_, value)) = choices.iter().find(|(name, _)| *name == written) {
            return Ok(Some(*value));
        }
        let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
        let message = format!("`{}` cannot be \"{written}\"", self.full_name(key));
        Err(self.error(key, message, suggest(written, &names, "it is one of")))
    }

    /// Refuses keys that nobody asked for.
    pub(super) fn finish(&self) -> Result<(), JobError> {
        let asked = self.asked.borrow();
        let unknown = self.items.into_iter().flatten().find(|(key, _)| !asked.contains(&key.as_str()));
        let Some((key, node)) = unknown else { return Ok(()) };
        let (message, hint) = if !self.name.is_empty() {
            let message = format!("unknown setting `{key}` in [{}]", self.name);
            let elsewhere = OTHER_NAMES.iter().find(|(name, _)| *name == self.full_name(key));
            let suggestion = || suggest(key, &asked, &format!("[{}] takes", self.name));
            (message, elsewhere.map_or_else(suggestion, |(_, hint)| (*hint).to_owned()))
        } else if let Item::Table(_) = node.item {
            (format!("unknown section `{key}`"), suggest(key, &asked, "the sections are"))
        } else {
            let hint = format!("put it below its section's header; the sections are {}", asked.join(", "));
            (format!("the setting `{key}` stands outside the sections"), hint)
        };
        Err(JobError::new(&node.key_place, message, hint))
    }
}

/// `did you mean `x`? LEAD a, b, c`.
pub(super) fn suggest(written: &str, valid: &[&str], lead: &str) -> String {
    let likeness = |name: &str| strsim::jaro_winkler(&written.to_lowercase(), &name.to_lowercase());
    let nearest = valid.iter().max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    let nearest = nearest.filter(|name| likeness(name) >= MIN_LIKENESS);
    let question = nearest.map(|n| format!("did you mean `{n}`? ")).unwrap_or_default();
    format!("{question}{lead} {}", valid.join(", "))
}
