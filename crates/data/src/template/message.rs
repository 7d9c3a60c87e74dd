//! The messages of a conversation, as a template reads them.

use minijinja::Value;

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    /// Who speaks: `system`, `user` or `assistant`, or another role that the template knows.
    pub role: String,
    /// The text.
    pub content: String,
    /// Other fields, which a template may read.
    pub(crate) others: Vec<(String, Value)>,
}

/// The role of the model's answers.
pub(crate) const ASSISTANT: &str = "assistant";

/// The names under which data have what a model thought before its answer. Templates read the first.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

impl Message {
    /// A message without other fields.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into(), others: Vec::new() }
    }

    pub(crate) fn is_answer(&self) -> bool {
        self.role == ASSISTANT
    }

    /// The map that a template reads, as `transformers` gives it: without fields that are null.
    pub(super) fn to_value(&self) -> Value {
        let own = [("role", Value::from(self.role.as_str())), ("content", Value::from(self.content.as_str()))];
        let others = self.others.iter().map(|(key, value)| (key.as_str(), value.clone()));
        let is_there = |(_, value): &(&str, Value)| !value.is_none();
        let mut fields: Vec<(&str, Value)> = own.into_iter().chain(others).filter(is_there).collect();
        let named = |name: &&str| fields.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
        if let Some(reasoning) = REASONING.iter().find_map(named) {
            for name in &REASONING[..2] {
                match fields.iter_mut().find(|(key, _)| key == name) {
                    Some((_, value)) if *name == REASONING[0] => *value = reasoning.clone(),
                    Some(_) => {}
                    None => fields.push((name, reasoning.clone())),
                }
            }
        }
        Value::from_pairs(fields)
    }
}
