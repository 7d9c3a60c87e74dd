//! The template that writes a conversation as one text, as the model has learnt to read it.
//!
//! Templates are written for Python's Jinja2, in the settings of `transformers`: its function `apply_chat_template`
//! gives the same text.

mod message;
mod python;

use std::borrow::Cow;
use std::error::Error;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Value, context};
use serde::{Serialize, Serializer};

use crate::{DataError, Tokenizer};

pub(crate) use message::ASSISTANT;
pub use message::Message;

/// The file of a template, beside a `tokenizer.json`.
const JINJA: &str = "chat_template.jinja";

/// The file of settings that has the template where there is no file of it.
const CONFIG: &str = "tokenizer_config.json";

/// The key of the template there.
const KEY: &str = "chat_template";

/// Where an answer begins and ends in a text that a template prints. Unicode keeps these characters free for programs.
const MARKS: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];

/// The work that a template may do for one conversation, about one operator or 64 bytes each. The longest conversations
/// take less, and a template that never ends takes a few seconds.
const FUEL: u64 = 20_000_000;

/// The advice about a template that cannot be used.
const HINT: &str = "fetch the model's folder again, or write template = \"PATH\" in [data], a template in Jinja";

/// A model's template for chats.
#[derive(Clone)]
pub struct ChatTemplate {
    /// The file or folder as a job names it.
    path: PathBuf,
    template: Arc<Compiled>,
}

struct Compiled {
    source: String,
    /// The texts of special tokens by the names that templates have for them, such as `bos_token`.
    special: Vec<(String, String)>,
    environment: Environment<'static>,
    /// Whether the template marks what the model wrote (`{% generation %}`).
    marks_answers: bool,
}

/// A conversation as one text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// The text, with the texts of special tokens.
    pub text: String,
    /// The bytes of what the model wrote, in their order, if the template marks it. See
    /// [`ChatTemplate::marks_answers`].
    pub answers: Vec<Range<usize>>,
}

/// The reason why a template does not print a conversation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// The template itself refuses the conversation (`raise_exception`).
    #[error("the chat template refuses the messages: {0}")]
    Refused(String),
    /// The template does something that cannot be done.
    #[error("line {line} of the chat template: {message}")]
    Failed {
        /// The line of the template, from 1; 0 if it is unknown.
        line: usize,
        /// The fault.
        message: String,
    },
    /// A message has a character that marks answers.
    #[error("a message has the character U+{:04X}, which no text may have", u32::from(*.0))]
    Marked(char),
}

impl ChatTemplate {
    /// The name of a template's file.
    pub const FILE: &'static str = JINJA;

    /// Reads the template of a folder, or the one in a file: a template in Jinja, or a `tokenizer_config.json`. Its
    /// special tokens are those of `tokenizer`.
    ///
    /// # Errors
    ///
    /// There is no template, its file cannot be read, or it is no valid template.
    pub fn open(path: &Path, tokenizer: &Tokenizer) -> Result<Self, DataError> {
        Self::find(path, tokenizer)?.ok_or_else(|| {
            malformed(path, format!("there is no chat template here: no {JINJA}, and no {KEY} in a {CONFIG}"))
        })
    }

    /// The template of a folder or file like [`Self::open`], if there is one.
    ///
    /// # Errors
    ///
    /// A file cannot be read, or its template is not valid.
    pub fn find(path: &Path, tokenizer: &Tokenizer) -> Result<Option<Self>, DataError> {
        let file = match path.is_dir() {
            true => [JINJA, CONFIG].map(|name| path.join(name)).into_iter().find(|file| file.is_file()),
            false => Some(path.to_owned()),
        };
        let Some(file) = file else { return Ok(None) };
        let bytes = crate::read(&file)?;
        let source = match file.extension().is_some_and(|extension| extension == "json") {
            true => in_settings(&file, &bytes)?,
            false => Some(String::from_utf8(bytes).map_err(|_| malformed(&file, "it is not UTF-8"))?),
        };
        let compiled = source.map(|source| Compiled::new(source, tokenizer.special_texts()));
        let template = compiled.transpose().map_err(|e| malformed(&file, e.to_string()))?;
        Ok(template.map(|template| Self { path: path.to_owned(), template: Arc::new(template) }))
    }

    /// The file or folder as a job names it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The same template, written in a job as the path `path`.
    #[must_use]
    pub fn at(&self, path: &Path) -> Self {
        Self { path: path.to_owned(), template: self.template.clone() }
    }

    /// The template itself, in Jinja.
    pub fn source(&self) -> &str {
        &self.template.source
    }

    /// Whether the template says what the model wrote (`{% generation %}`), so that [`Rendered::answers`] has it.
    pub fn marks_answers(&self) -> bool {
        self.template.marks_answers
    }

    /// The text of a conversation. With `add_generation_prompt`, it ends with what comes before the model's next
    /// answer.
    ///
    /// The template's clock (`strftime_now`) always shows 26 July 2024, so that data do not depend on the day.
    ///
    /// # Errors
    ///
    /// The template refuses the conversation, or fails.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<Rendered, TemplateError> {
        let compiled = &*self.template;
        if compiled.marks_answers {
            let mut contents = messages.iter().flat_map(|message| message.content.chars());
            if let Some(mark) = contents.find(|c| MARKS.contains(c)) {
                return Err(TemplateError::Marked(mark));
            }
        }
        let special = Value::from_pairs(compiled.special.iter().map(|(name, text)| (name.as_str(), text.as_str())));
        let messages: Vec<Value> = messages.iter().map(Message::to_value).collect();
        let own = context! { messages, add_generation_prompt, tools => (), documents => () };
        let template = compiled.environment.get_template(JINJA).map_err(|e| TemplateError::of(&e))?;
        let text = template.render(context! { ..own, ..special }).map_err(|e| TemplateError::of(&e))?;
        Ok(if compiled.marks_answers { without_marks(&text) } else { Rendered { text, answers: Vec::new() } })
    }
}

impl Compiled {
    fn new(source: String, special: Vec<(String, String)>) -> Result<Self, TemplateError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|e| TemplateError::of(&e))?);
        environment.set_fuel(Some(FUEL));
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        python::add_to(&mut environment);
        let marked = with_marks(&source);
        let marks_answers = matches!(marked, Cow::Owned(_));
        let marked = marked.into_owned();
        environment.add_template_owned(JINJA, marked).map_err(|e| TemplateError::of(&e))?;
        Ok(Self { source, special, environment, marks_answers })
    }
}

fn malformed(path: &Path, message: impl Into<String>) -> DataError {
    DataError::Malformed { path: path.to_owned(), message: message.into(), hint: HINT }
}

/// The template in a `tokenizer_config.json`: a text, or a list of templates with names, of which `default` is taken.
fn in_settings(path: &Path, bytes: &[u8]) -> Result<Option<String>, DataError> {
    let settings: serde_json::Value =
        serde_json::from_slice(bytes).map_err(|e| malformed(path, format!("it is no JSON: {e}")))?;
    match &settings[KEY] {
        serde_json::Value::Null => Ok(None),
        serde_json::Value::String(template) => Ok(Some(template.clone())),
        templates => {
            let mut named = templates.as_array().into_iter().flatten();
            let default = named.find(|template| template["name"] == "default");
            match default.and_then(|default| default["template"].as_str()) {
                Some(template) => Ok(Some(template.to_owned())),
                None => Err(malformed(path, format!("`{KEY}` is no text, and no list with a template \"default\""))),
            }
        }
    }
}

impl TemplateError {
    fn of(error: &minijinja::Error) -> Self {
        let mut cause: Option<&(dyn Error + 'static)> = Some(error);
        let mut innermost = error;
        while let Some(e) = cause {
            if let Some(python::Raised(message)) = e.downcast_ref() {
                return Self::Refused(message.clone());
            }
            innermost = e.downcast_ref().unwrap_or(innermost);
            cause = e.source();
        }
        let kind = innermost.kind().to_string();
        let message = innermost.detail().map_or_else(|| kind.clone(), |detail| format!("{kind}: {detail}"));
        Self::Failed { line: innermost.line().unwrap_or_default(), message }
    }
}

/// A template that prints a mark where an answer begins, and another where it ends. `{% generation %}` and
/// `{% endgeneration %}` are no tags of Jinja, so each becomes a block that prints a mark. Being a block, it treats the
/// blanks around it as the tag would. A template without the tags stays as it is.
fn with_marks(source: &str) -> Cow<'_, str> {
    let mut marked = String::new();
    let mut copied = 0;
    for (start, _) in source.match_indices("{%") {
        let Some((inside, _)) = source[start + 2..].split_once("%}") else { break };
        let left = inside.strip_prefix(['-', '+']).unwrap_or(inside);
        let name = left.strip_suffix(['-', '+']).unwrap_or(left);
        let mark = match name.trim() {
            "generation" => MARKS[0],
            "endgeneration" => MARKS[1],
            _ => continue,
        };
        let before = &inside[..inside.len() - left.len()];
        let after = &left[name.len()..];
        marked += &source[copied..start];
        marked += &format!("{{%{before} if true %}}{{{{ '{mark}' }}}}{{% endif {after}%}}");
        // The lines of the template keep their numbers.
        marked.extend(name.chars().filter(|c| *c == '\n'));
        copied = start + "{%%}".len() + inside.len();
    }
    if copied == 0 {
        return Cow::Borrowed(source);
    }
    marked += &source[copied..];
    Cow::Owned(marked)
}

/// A text without the marks, and the places where they were.
fn without_marks(marked: &str) -> Rendered {
    let mut text = String::with_capacity(marked.len());
    let (mut answers, mut begun) = (Vec::new(), None);
    for c in marked.chars() {
        if c == MARKS[0] {
            begun = Some(text.len());
        } else if c == MARKS[1] {
            answers.extend(begun.take().map(|start| start..text.len()));
        } else {
            text.push(c);
        }
    }
    Rendered { text, answers }
}

/// Two templates are equal if they print the same texts.
impl PartialEq for ChatTemplate {
    fn eq(&self, other: &Self) -> bool {
        (&self.template.source, &self.template.special) == (&other.template.source, &other.template.special)
    }
}

/// The path in a job file.
impl Serialize for ChatTemplate {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.path.serialize(serializer)
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ChatTemplate({})", self.path.display())
    }
}
