//! A conversation on a line of a JSONL file.

use std::fmt;

use minijinja::Value;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::template::{ASSISTANT, Message};

/// The text that a line asks the model to learn.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Conversation {
    /// Turns, of which the model learns its own.
    Messages(Vec<Message>),
    /// Turns that lead to others, which the model learns. The first are as many as the number says.
    Completion(Vec<Message>, usize),
    /// A text that leads to another, which the model learns.
    Texts(String, String),
    /// A text that the model learns as a whole.
    Whole(String),
}

/// The reason why a line cannot be trained on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Problem {
    /// The fault.
    pub(super) message: String,
    /// Advice to the user.
    pub(super) hint: &'static str,
}

impl Problem {
    pub(super) fn new(message: impl Into<String>, hint: &'static str) -> Self {
        Self { message: message.into(), hint }
    }
}

const FIELDS: &str = "write an object with `messages`, a list of objects with `role` and `content`; or with `prompt` \
     and `completion`; or with `text`";
const CONTENT: &str = "write `role` and `content` as texts in each message; calls of tools and images are not read";
const ANSWER: &str = "add an answer with the role \"assistant\", or write train_on = \"all\" in [data]";

impl Conversation {
    /// Reads a line. If it must have an `answer`, there is a message of the model.
    pub(super) fn read(line: &str, answer: bool) -> Result<Self, Problem> {
        let line = line.trim_start_matches('\u{feff}').trim();
        let fields: Fields = serde_json::from_str(line).map_err(|e| {
            let message = match e.is_data() {
                true => "this is no JSON object".to_owned(),
                false => format!("column {}: this is no JSON", e.column()),
            };
            Problem::new(message, "write one JSON object on each line, without line breaks inside")
        })?;
        if !matches!(fields.tools, Part::Missing | Part::Null) && !fields.tools.is_empty() {
            return Err(Problem::new("it has `tools`, which are not read", "leave conversations with tools out"));
        }
        let read = match (fields.messages, fields.conversations, fields.prompt, fields.completion, fields.text) {
            (Part::Missing, Part::Missing, Part::Missing, Part::Missing, Part::Missing) => {
                let there: Vec<String> = fields.others.iter().take(8).map(|key| format!("{key:?}")).collect();
                let there = if there.is_empty() { "none".into() } else { there.join(", ") };
                let message = format!("the object has no field `messages`, `prompt` or `text`, but {there}");
                return Err(Problem::new(message, FIELDS));
            }
            (Part::Missing, Part::Missing, Part::Missing, Part::Missing, text) => Self::Whole(text.into_text("text")?),
            (Part::Missing, Part::Missing, Part::Missing, _, _) => {
                return Err(Problem::new("it has a `completion`, but no `prompt`", FIELDS));
            }
            (Part::Missing, Part::Missing, _, Part::Missing, _) => {
                return Err(Problem::new("it has a `prompt`, but no `completion`", FIELDS));
            }
            (Part::Missing, Part::Missing, Part::List(prompt), completion, _) => {
                let mut messages = messages("prompt", prompt)?;
                let before = messages.len();
                messages.extend(completion.into_messages("completion")?);
                Self::Completion(messages, before)
            }
            (Part::Missing, Part::Missing, prompt, completion, _) => {
                Self::Texts(prompt.into_text("prompt")?, completion.into_text("completion")?)
            }
            (Part::Missing, conversations, ..) => Self::Messages(conversations.into_messages("conversations")?),
            (messages, ..) => Self::Messages(messages.into_messages("messages")?),
        };
        let has_answer = match &read {
            Self::Messages(messages) => messages.iter().any(Message::is_answer),
            Self::Completion(messages, before) => messages[*before..].iter().any(Message::is_answer),
            Self::Texts(_, completion) => !completion.is_empty(),
            Self::Whole(text) => !text.is_empty(),
        };
        let message = match &read {
            _ if has_answer => return Ok(read),
            Self::Whole(_) => "its text is empty",
            Self::Texts(..) if answer => "its completion is empty",
            Self::Messages(_) if answer => "there is no answer: no message has the role \"assistant\"",
            Self::Completion(..) if answer => {
                "there is no answer: no message of the completion has the role \"assistant\""
            }
            _ => return Ok(read),
        };
        Err(Problem::new(message, ANSWER))
    }

    /// Whether a line looks like a conversation: an object with a field that no plain text has.
    pub(super) fn is_in(line: &str) -> bool {
        serde_json::from_str(line.trim_start_matches('\u{feff}')).is_ok_and(|fields: Fields| {
            [fields.messages, fields.conversations, fields.prompt].iter().any(|part| !matches!(part, Part::Missing))
        })
    }
}

/// The fields of a line that are read.
#[derive(Default)]
struct Fields {
    messages: Part,
    conversations: Part,
    prompt: Part,
    completion: Part,
    text: Part,
    tools: Part,
    others: Vec<String>,
}

/// The value of a field.
#[derive(Default)]
enum Part {
    #[default]
    Missing,
    Null,
    Text(String),
    List(Vec<Entry>),
    /// Something else, in words.
    Other(&'static str),
}

/// An entry of a list of messages: the fields of a message, or something else, in words.
type Entry = Result<Turn, &'static str>;

/// The fields of a message.
#[derive(Default)]
struct Turn {
    role: Scalar,
    content: Scalar,
    others: Vec<(String, Value)>,
}

/// The value of a field that should be a text.
#[derive(Default)]
enum Scalar {
    #[default]
    Missing,
    Text(String),
    /// Something else, in words.
    Other(&'static str),
}

impl Part {
    fn is_empty(&self) -> bool {
        matches!(self, Self::List(list) if list.is_empty())
    }

    fn describe(&self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Null => "null",
            Self::Text(_) => "a text",
            Self::List(_) => "a list",
            Self::Other(kind) => kind,
        }
    }

    fn into_text(self, name: &str) -> Result<String, Problem> {
        match self {
            Self::Text(text) => Ok(text),
            other => Err(Problem::new(format!("`{name}` is {}, not a text", other.describe()), FIELDS)),
        }
    }

    fn into_messages(self, name: &str) -> Result<Vec<Message>, Problem> {
        match self {
            Self::List(list) => messages(name, list),
            other => Err(Problem::new(format!("`{name}` is {}, not a list of messages", other.describe()), FIELDS)),
        }
    }
}

/// The messages of a list, which must have one.
fn messages(name: &str, list: Vec<Entry>) -> Result<Vec<Message>, Problem> {
    if list.is_empty() {
        return Err(Problem::new(format!("`{name}` is an empty list"), FIELDS));
    }
    let message = |(number, entry): (usize, Entry)| {
        let fields = entry
            .map_err(|kind| Problem::new(format!("message {number} of `{name}` is {kind}, not an object"), CONTENT))?;
        let text = |key: &str, value: Scalar| match value {
            Scalar::Text(text) => Ok(text),
            Scalar::Missing => Err(Problem::new(format!("message {number} of `{name}` has no `{key}`"), CONTENT)),
            Scalar::Other(kind) => {
                let message = format!("the `{key}` of message {number} of `{name}` is {kind}, not a text");
                Err(Problem::new(message, CONTENT))
            }
        };
        let (role, content) = (text("role", fields.role)?, text("content", fields.content)?);
        Ok(Message { role, content, others: fields.others })
    };
    (1..).zip(list).map(message).collect()
}

/// Methods of a visitor to whom a value is only a kind of thing.
macro_rules! kinds {
    ($other:expr) => {
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a value")
        }

        fn visit_bool<E>(self, _: bool) -> Result<Self::Value, E> {
            Ok($other("true or false"))
        }

        fn visit_i64<E>(self, _: i64) -> Result<Self::Value, E> {
            Ok($other("a number"))
        }

        fn visit_u64<E>(self, _: u64) -> Result<Self::Value, E> {
            Ok($other("a number"))
        }

        fn visit_f64<E>(self, _: f64) -> Result<Self::Value, E> {
            Ok($other("a number"))
        }
    };
}

/// Reads the rest of an object.
fn skip_map<'de, A: MapAccess<'de>>(mut map: A) -> Result<(), A::Error> {
    while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
    Ok(())
}

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Scalars;
        impl<'de> Visitor<'de> for Scalars {
            type Value = Scalar;
            kinds!(Scalar::Other);

            fn visit_str<E>(self, text: &str) -> Result<Scalar, E> {
                Ok(Scalar::Text(text.to_owned()))
            }

            fn visit_unit<E>(self) -> Result<Scalar, E> {
                Ok(Scalar::Other("null"))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Scalar, A::Error> {
                while list.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Scalar::Other("a list"))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Scalar, A::Error> {
                skip_map(map)?;
                Ok(Scalar::Other("an object"))
            }
        }
        deserializer.deserialize_any(Scalars)
    }
}

impl<'de> Deserialize<'de> for Part {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Parts;
        impl<'de> Visitor<'de> for Parts {
            type Value = Part;
            kinds!(Part::Other);

            fn visit_str<E>(self, text: &str) -> Result<Part, E> {
                Ok(Part::Text(text.to_owned()))
            }

            fn visit_unit<E>(self) -> Result<Part, E> {
                Ok(Part::Null)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Part, A::Error> {
                let mut entries = Vec::new();
                while let Some(EntryOf(entry)) = list.next_element()? {
                    entries.push(entry);
                }
                Ok(Part::List(entries))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Part, A::Error> {
                skip_map(map)?;
                Ok(Part::Other("an object"))
            }
        }
        deserializer.deserialize_any(Parts)
    }
}

/// An element of a list of messages.
struct EntryOf(Entry);

impl<'de> Deserialize<'de> for EntryOf {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Entry;
            kinds!(Err);

            fn visit_str<E>(self, _: &str) -> Result<Entry, E> {
                Ok(Err("a text"))
            }

            fn visit_unit<E>(self) -> Result<Entry, E> {
                Ok(Err("null"))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Entry, A::Error> {
                while list.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Err("a list"))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entry, A::Error> {
                let mut fields = Turn::default();
                while let Some(key) = map.next_key::<String>()? {
                    match key.as_str() {
                        "role" => fields.role = map.next_value()?,
                        "content" => fields.content = map.next_value()?,
                        // ShareGPT's names.
                        "from" => fields.role = speaker(map.next_value()?),
                        "value" => fields.content = map.next_value()?,
                        _ => fields.others.push((key, map.next_value()?)),
                    }
                }
                Ok(Ok(fields))
            }
        }
        deserializer.deserialize_any(Entries).map(Self)
    }
}

/// The role of a speaker of ShareGPT.
fn speaker(from: Scalar) -> Scalar {
    match from {
        Scalar::Text(name) if name == "human" => Scalar::Text("user".into()),
        Scalar::Text(name) if name == "gpt" => Scalar::Text(ASSISTANT.into()),
        other => other,
    }
}

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Objects;
        impl<'de> Visitor<'de> for Objects {
            type Value = Fields;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
                let mut fields = Fields::default();
                while let Some(key) = map.next_key::<String>()? {
                    let place = match key.as_str() {
                        "messages" => &mut fields.messages,
                        "conversations" => &mut fields.conversations,
                        "prompt" => &mut fields.prompt,
                        "completion" => &mut fields.completion,
                        "text" => &mut fields.text,
                        "tools" => &mut fields.tools,
                        _ => {
                            map.next_value::<IgnoredAny>()?;
                            fields.others.push(key);
                            continue;
                        }
                    };
                    *place = map.next_value()?;
                }
                Ok(fields)
            }
        }
        deserializer.deserialize_map(Objects)
    }
}
