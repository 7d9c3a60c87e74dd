//! Reading a `config.json`, so that no key is overlooked that changes the result.

use std::cell::RefCell;
use std::collections::BTreeSet;

use serde_json::{Map, Value};

/// A `config.json` whose model cannot be built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ConfigError {
    /// The key that the error is about.
    pub key: String,
    /// The description of the error.
    pub message: String,
    /// Advice to the user.
    pub hint: String,
}

impl ConfigError {
    pub(super) fn new(key: &str, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { key: key.to_owned(), message: message.into(), hint: hint.into() }
    }
}

/// A table of keys and values, which notes the keys that were asked for.
pub(super) struct Keys<'a> {
    /// The key of the table itself, for messages; empty for the whole file.
    within: &'a str,
    /// `None` for a table that is not written.
    values: Option<&'a Map<String, Value>>,
    asked: RefCell<BTreeSet<&'a str>>,
}

/// The largest size in a `config.json`. It keeps products of sizes small enough to compute with.
const MAX_SIZE: u64 = 1 << 40;

impl<'a> Keys<'a> {
    pub(super) fn new(within: &'a str, values: Option<&'a Map<String, Value>>) -> Self {
        Self { within, values, asked: RefCell::default() }
    }

    /// A value, if it is written and not null.
    pub(super) fn value(&self, key: &'a str) -> Option<&'a Value> {
        self.asked.borrow_mut().insert(key);
        self.written(key).filter(|value| !value.is_null())
    }

    /// Whether the key is written with the value null.
    pub(super) fn is_null(&self, key: &'a str) -> bool {
        self.asked.borrow_mut().insert(key);
        self.written(key).is_some_and(Value::is_null)
    }

    fn written(&self, key: &str) -> Option<&'a Value> {
        self.values?.get(key)
    }

    /// The key as messages name it.
    fn name(&self, key: &str) -> String {
        if self.within.is_empty() { key.to_owned() } else { format!("{}.{key}", self.within) }
    }

    pub(super) fn error(&self, key: &str, message: impl Into<String>, hint: impl Into<String>) -> ConfigError {
        let key = if self.within.is_empty() { key } else { self.within };
        ConfigError::new(key, message, hint)
    }

    /// The error about a value that is not what it must be.
    pub(super) fn wrong(&self, key: &str, must: &str) -> ConfigError {
        let value = self.written(key).map_or_else(|| "missing".to_owned(), Value::to_string);
        let name = self.name(key);
        self.error(key, format!("`{name}` is {value}, but it must be {must}"), "correct it, or fetch config.json again")
    }

    /// The error about a key that must be written.
    pub(super) fn missing(&self, key: &str) -> ConfigError {
        self.error(key, format!("`{}` is missing", self.name(key)), "fetch the whole config.json of the model")
    }

    fn read<T>(
        &self,
        key: &'a str,
        must: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| self.wrong(key, must))
    }

    /// A size: at least 1.
    pub(super) fn size(&self, key: &'a str) -> Result<Option<usize>, ConfigError> {
        let size = |value: &Value| value.as_u64().filter(|n| (1..=MAX_SIZE).contains(n));
        Ok(self.read(key, "a whole number above 0", size)?.map(|n| n as usize))
    }

    /// A size that must be written.
    pub(super) fn needed(&self, key: &'a str) -> Result<usize, ConfigError> {
        self.size(key)?.ok_or_else(|| self.missing(key))
    }

    /// A number that fulfils a condition, in words as well.
    pub(super) fn number(
        &self,
        key: &'a str,
        must: &str,
        valid: impl FnOnce(f64) -> bool,
    ) -> Result<Option<f64>, ConfigError> {
        self.read(key, must, |value| value.as_f64().filter(|x| x.is_finite() && valid(*x)))
    }

    /// A number above 0.
    pub(super) fn positive(&self, key: &'a str) -> Result<Option<f64>, ConfigError> {
        self.number(key, "a number above 0", |x| x > 0.0)
    }

    /// A probability of dropout. Default 0.
    pub(super) fn dropout(&self, key: &'a str) -> Result<f64, ConfigError> {
        let p = self.number(key, "a number from 0 to below 1", |p| (0.0..1.0).contains(&p))?;
        Ok(p.unwrap_or(0.0))
    }

    pub(super) fn flag(&self, key: &'a str) -> Result<Option<bool>, ConfigError> {
        self.read(key, "true or false", Value::as_bool)
    }

    pub(super) fn text(&self, key: &'a str) -> Result<Option<&'a str>, ConfigError> {
        self.read(key, "a text", Value::as_str)
    }

    pub(super) fn table(&self, key: &'a str) -> Result<Option<Keys<'a>>, ConfigError> {
        Ok(self.read(key, "a table", Value::as_object)?.map(|values| Keys::new(key, Some(values))))
    }

    /// A list of `length` values.
    pub(super) fn list(&self, key: &'a str, length: usize) -> Result<Option<&'a [Value]>, ConfigError> {
        let list = |value: &'a Value| value.as_array().map(Vec::as_slice).filter(|list| list.len() == length);
        self.read(key, &format!("a list of {length} values"), list)
    }

    /// A list of `length` numbers above 0.
    pub(super) fn positives(&self, key: &'a str, length: usize) -> Result<Option<Vec<f64>>, ConfigError> {
        let number = |value: &Value| value.as_f64().filter(|x| x.is_finite() && *x > 0.0);
        let numbers = |value: &'a Value| {
            let list = value.as_array().filter(|list| list.len() == length)?;
            list.iter().map(number).collect()
        };
        self.read(key, &format!("a list of {length} numbers above 0"), numbers)
    }

    /// Reports the first key that was not asked for, that is none of `harmless`, and that says anything. Names of
    /// settings do not begin with an underscore.
    pub(super) fn finish(&self, harmless: &[&str]) -> Result<(), ConfigError> {
        let asked = self.asked.borrow();
        let says_nothing = |value: &Value| match value {
            Value::Null | Value::Bool(false) => true,
            Value::Array(list) => list.is_empty(),
            Value::Object(table) => table.is_empty(),
            _ => false,
        };
        let unknown = self.values.into_iter().flatten().find(|(key, value)| {
            let known = asked.contains(key.as_str()) || harmless.contains(&key.as_str()) || key.starts_with('_');
            !known && !says_nothing(value)
        });
        let Some((key, value)) = unknown else { return Ok(()) };
        let name = self.name(key);
        let message = format!("`{name}` = {value} is not understood, and may change what the model computes");
        Err(self.error(
            key,
            message,
            "remove the key if the model is the same without it, or export the model with torch.export",
        ))
    }
}
