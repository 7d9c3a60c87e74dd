//! The tree of values of a settings file, each with the location where it was written.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::rc::Rc;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::{JobError, read_text};

/// The place where a value or a setting's name was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Location {
    /// A file. Line and column count from 1, and may be unknown.
    File { file: Rc<str>, at: Option<(usize, usize)> },
    /// An override on the command line.
    Set(Rc<str>),
}

impl fmt::Display for Location {
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
pub(in crate::config) struct Node {
    pub(super) key_location: Location,
    pub(super) location: Location,
    pub(super) item: Item,
}

#[derive(Debug, Clone)]
pub(super) enum Item {
    Table(BTreeMap<String, Node>),
    List(Vec<Node>),
    Text(String),
    Integer(i64),
    Number(f64),
    Flag(bool),
    Date,
}

impl Item {
    /// The value as messages name it.
    pub(super) fn describe(&self) -> String {
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

    /// The number in a text between quotes, if it is one: plain, or in percent.
    pub(super) fn quoted_number(&self) -> Option<f64> {
        let Self::Text(text) = self else { return None };
        let plain = |text: &str| text.trim().replace('_', "").parse().ok().filter(|x: &f64| x.is_finite());
        plain(text).or_else(|| percent(text))
    }

    /// The truth value that this value means in another language.
    pub(super) fn meant_flag(&self) -> Option<bool> {
        match self {
            Self::Integer(1) => Some(true),
            Self::Integer(0) => Some(false),
            Self::Text(text) => match text.trim().to_lowercase().as_str() {
                "true" | "yes" | "on" | "1" => Some(true),
                "false" | "no" | "off" | "0" => Some(false),
                _ => None,
            },
            _ => None,
        }
    }
}

/// The share that a text such as `12.5 %` gives.
fn percent(text: &str) -> Option<f64> {
    let number = text.trim().strip_suffix('%')?.trim_end();
    // The exponent keeps decimals exact.
    format!("{number}e-2").parse().ok().filter(|x: &f64| x.is_finite())
}

/// The text that stands for a null of JSON, which TOML does not have.
pub(in crate::config) const NULL: &str = "none";

/// Parses TOML. Messages call it `file`.
pub(in crate::config) fn parse(file: &str, text: &str) -> Result<Node, JobError> {
    let source = Source { file: file.into(), text };
    let table = DeTable::parse(text).map_err(|e| {
        let offset = e.span().map_or(text.len(), |s| s.start);
        let reason = e.message().replace('\n', ", ");
        let setting = source.line(offset).split_once('=').filter(|(key, _)| is_word(key.trim()));
        let (message, hint) = match setting.map(|(key, value)| (key.trim(), value)) {
            Some((key, value)) => (format!("`{key}`: {reason}"), unquoted(key, value)),
            None => (reason, None),
        };
        let form = "the file is TOML: sections as [train], settings as name = value, text in quotes";
        JobError::new(source.location(offset), message, hint.unwrap_or_else(|| form.into()))
    })?;
    let whole = Location::File { file: source.file.clone(), at: None };
    let item = source.table(table.get_ref());
    Ok(Node { key_location: whole.clone(), location: whole, item })
}

/// Whether a text could be the name of a setting, with the sections around it.
fn is_word(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_alphanumeric() || "_-.".contains(c))
}

/// The settings that are shares with their unit.
const SHARES: [&str; 1] = ["loss_budget"];

/// The hint for a setting whose text stands without quotes, whose number is in percent, or whose truth is written as in
/// Python.
fn unquoted(key: &str, value: &str) -> Option<String> {
    let value = value.split('#').next().unwrap_or_default().trim();
    let value = match value {
        "True" => "true".to_owned(),
        "False" => "false".to_owned(),
        share if share.ends_with('%') && SHARES.contains(&key) => format!("\"{share}\""),
        share if share.ends_with('%') => format!("{:?}", percent(share)?),
        // Letters, besides that of an exponent, make a text.
        word if word.starts_with(char::is_alphanumeric)
            && word.contains(|c: char| c.is_alphabetic() && !matches!(c, 'e' | 'E'))
            && !word.contains(['"', '\\']) =>
        {
            format!("\"{word}\"")
        }
        _ => return None,
    };
    Some(format!("write {key} = {value}"))
}

struct Source<'a> {
    file: Rc<str>,
    text: &'a str,
}

impl Source<'_> {
    fn location(&self, offset: usize) -> Location {
        let before = &self.text[..self.text.floor_char_boundary(offset)];
        let line_start = before.rfind('\n').map_or(0, |i| i + 1);
        let at = (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1);
        Location::File { file: self.file.clone(), at: Some(at) }
    }

    /// The line at an offset.
    fn line(&self, offset: usize) -> &str {
        let offset = self.text.floor_char_boundary(offset);
        let start = self.text[..offset].rfind('\n').map_or(0, |i| i + 1);
        self.text[start..].lines().next().unwrap_or_default()
    }

    fn table(&self, table: &DeTable<'_>) -> Item {
        let node = |key_location: Location, value: &Spanned<DeValue<'_>>| Node {
            key_location,
            location: self.location(value.span().start),
            item: self.item(value.get_ref()),
        };
        let items = table.iter().map(|(key, value)| {
            let key_location = self.location(key.span().start);
            (key.get_ref().to_string(), node(key_location, value))
        });
        Item::Table(items.collect())
    }

    fn item(&self, value: &DeValue<'_>) -> Item {
        match value {
            DeValue::Table(table) => self.table(table),
            DeValue::Array(values) => {
                let nodes = values.iter().map(|v| {
                    let location = self.location(v.span().start);
                    Node { key_location: location.clone(), location, item: self.item(v.get_ref()) }
                });
                Item::List(nodes.collect())
            }
            scalar => scalar_item(scalar),
        }
    }
}

fn scalar_item(value: &DeValue<'_>) -> Item {
    match value {
        DeValue::String(s) => Item::Text(s.to_string()),
        DeValue::Boolean(b) => Item::Flag(*b),
        // An integer that does not fit 64 bits is refused by the code that reads it, with the setting's name.
        DeValue::Integer(i) => match i64::from_str_radix(i.as_str(), i.radix()) {
            Ok(i) => Item::Integer(i),
            Err(_) => Item::Number(i.as_str().parse().unwrap_or(f64::INFINITY)),
        },
        DeValue::Float(x) => Item::Number(x.as_str().parse().unwrap_or(f64::NAN)),
        _ => Item::Date,
    }
}

/// A JSON file of settings: its values, and the same as a tree in which a null counts as not written.
pub(in crate::config) struct Json {
    pub(in crate::config) values: serde_json::Map<String, serde_json::Value>,
    pub(in crate::config) node: Node,
}

/// Reads a JSON file of settings.
pub(in crate::config) fn parse_json(path: &Path) -> Result<Json, JobError> {
    let name = path.display().to_string();
    let hint = "give a config.json as Hugging Face publishes them";
    let text = read_text(path, "the file", hint)?;
    let values: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&text)
        .map_err(|e| JobError::new(format!("{name}:{}:{}", e.line(), e.column()), e.to_string(), hint))?;
    let location = Location::File { file: name.as_str().into(), at: None };
    let node = json_node(&serde_json::Value::Object(values.clone()), &location);
    Ok(Json { values, node })
}

fn json_node(value: &serde_json::Value, location: &Location) -> Node {
    use serde_json::Value;
    let item = match value {
        Value::Object(map) => {
            let written = map.iter().filter(|(_, v)| !v.is_null());
            Item::Table(written.map(|(k, v)| (k.clone(), json_node(v, location))).collect())
        }
        Value::Array(values) => Item::List(values.iter().map(|v| json_node(v, location)).collect()),
        Value::String(s) => Item::Text(s.clone()),
        Value::Bool(b) => Item::Flag(*b),
        Value::Number(n) => match n.as_i64() {
            Some(i) => Item::Integer(i),
            None => Item::Number(n.as_f64().unwrap_or(f64::NAN)),
        },
        Value::Null => Item::List(Vec::new()),
    };
    Node { key_location: location.clone(), location: location.clone(), item }
}

impl Node {
    pub(super) fn table(&self) -> Option<&BTreeMap<String, Node>> {
        match &self.item {
            Item::Table(items) => Some(items),
            _ => None,
        }
    }

    /// The value as JSON. TOML has no null, which the text "none" stands for.
    pub(in crate::config) fn to_json(&self) -> serde_json::Value {
        match &self.item {
            Item::Table(items) => items.iter().map(|(key, node)| (key.clone(), node.to_json())).collect(),
            Item::List(nodes) => nodes.iter().map(Self::to_json).collect(),
            Item::Text(text) if text == NULL => serde_json::Value::Null,
            Item::Text(text) => text.as_str().into(),
            Item::Integer(i) => (*i).into(),
            Item::Number(x) => (*x).into(),
            Item::Flag(b) => (*b).into(),
            Item::Date => serde_json::Value::Null,
        }
    }

    /// Puts `section.key=value` into the tree. The value has TOML's syntax; a bare word is text.
    pub(in crate::config) fn set(&mut self, setting: &str) -> Result<(), JobError> {
        let location = Location::Set(setting.trim().into());
        let form = "write --set section.key=value, such as --set train.steps=100";
        let (path, text) =
            setting.split_once('=').ok_or_else(|| JobError::new(&location, "an override needs a value", form))?;
        let keys: Vec<&str> = path.split('.').map(str::trim).collect();
        if keys.iter().any(|k| k.is_empty()) {
            return Err(JobError::new(&location, "an override needs the name of a setting", form));
        }
        let mut node = self;
        for key in keys {
            if !matches!(node.item, Item::Table(_)) {
                node.location = location.clone();
                node.item = Item::Table(BTreeMap::new());
            }
            let Item::Table(items) = &mut node.item else { return Ok(()) };
            node = items.entry(key.to_owned()).or_insert_with(|| Node {
                key_location: location.clone(),
                location: location.clone(),
                item: Item::Table(BTreeMap::new()),
            });
        }
        node.item = override_item(text.trim(), &location)?;
        node.location = location;
        Ok(())
    }
}

fn override_item(text: &str, location: &Location) -> Result<Item, JobError> {
    // Each part of an override has the location of the override.
    fn convert(value: &DeValue<'_>, location: &Location) -> Item {
        let node = |value: &DeValue<'_>| Node {
            key_location: location.clone(),
            location: location.clone(),
            item: convert(value, location),
        };
        match value {
            DeValue::Table(table) => {
                Item::Table(table.iter().map(|(k, v)| (k.get_ref().to_string(), node(v.get_ref()))).collect())
            }
            DeValue::Array(values) => Item::List(values.iter().map(|v| node(v.get_ref())).collect()),
            scalar => scalar_item(scalar),
        }
    }
    match DeValue::parse(text) {
        Ok(value) => Ok(convert(value.get_ref(), location)),
        Err(e) if text.starts_with(['"', '\'', '[', '{']) => Err(JobError::new(
            location,
            e.message().replace('\n', ", "),
            "the value has TOML's syntax: 3, 1e-4, true, word, \"text\", [\"a\", \"b\"]",
        )),
        Err(_) => Ok(Item::Text(text.to_owned())),
    }
}
