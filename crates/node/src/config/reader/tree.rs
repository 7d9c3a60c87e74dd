//! The tree of values of a settings file, each with the place where it was written.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::rc::Rc;

use toml::de::{DeTable, DeValue};

use super::JobError;

/// Where a value or a setting's name was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Place {
    /// A file. Line and column count from 1, and may be unknown.
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
pub(in crate::config) struct Node {
    pub(super) key_place: Place,
    pub(super) place: Place,
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
}

/// Parses TOML. Messages call it `file`.
pub(in crate::config) fn parse(file: &str, text: &str) -> Result<Node, JobError> {
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

/// Reads a JSON file of settings. A null counts as not written.
pub(in crate::config) fn parse_json(path: &Path) -> Result<Node, JobError> {
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
    pub(super) fn table(&self) -> Option<&BTreeMap<String, Node>> {
        match &self.item {
            Item::Table(items) => Some(items),
            _ => None,
        }
    }

    /// Puts `section.key=value` into the tree. The value has TOML's syntax; a bare word is text.
    pub(in crate::config) fn set(&mut self, setting: &str) -> Result<(), JobError> {
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
