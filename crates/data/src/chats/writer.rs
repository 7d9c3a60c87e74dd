//! From a conversation to the tokens of a sample, and which of them are trained on.

use std::borrow::Cow;
use std::ops::Range;

use super::line::{Conversation, Problem};
use crate::template::{ChatTemplate, Message, TemplateError};
use crate::{DataError, Tokenizer, TrainOn};

/// The tokens of a sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Written {
    /// At most one token more than the context, because the last one is only predicted.
    pub(crate) tokens: Vec<u32>,
    /// Whether each token is trained on. The first one is never predicted.
    pub(crate) trained: Vec<bool>,
    /// Tokens at the end that are left out.
    pub(crate) cut: usize,
}

impl Written {
    /// The places that it takes in the context, at least 1: the last of its tokens is only predicted.
    pub(super) fn places(&self) -> usize {
        self.tokens.len() - 1
    }
}

/// Writes conversations for a model.
pub(super) struct Writer {
    pub(super) tokenizer: Tokenizer,
    pub(super) template: Option<ChatTemplate>,
    pub(super) context: usize,
    pub(super) train_on: TrainOn,
}

/// The reason why a conversation is not written.
pub(super) enum Failure {
    /// It is broken.
    Broken(Problem),
    /// The data cannot be used at all.
    Data(DataError),
}

impl From<Problem> for Failure {
    fn from(problem: Problem) -> Self {
        Self::Broken(problem)
    }
}

impl From<DataError> for Failure {
    fn from(error: DataError) -> Self {
        Self::Data(error)
    }
}

const TEMPLATE: &str = "write template = \"PATH\" in [data], the model's template for chats in Jinja";
const REFUSED: &str = "change the conversation to what the template takes";
const FAILED: &str = "correct the template, or name another one with `template` in [data]";
const MARK: &str = "name a template that has {% generation %} and {% endgeneration %} around the answers, or write \
     train_on = \"all\" in [data]";
const CONTEXT: &str = "raise data.context, or shorten the conversation";

impl Writer {
    /// The sample of a line.
    pub(super) fn write(&self, line: &str) -> Result<Written, Failure> {
        let conversation = Conversation::read(line, self.train_on == TrainOn::Answers)?;
        let (tokens, trained) = match &conversation {
            Conversation::Messages(messages) => self.with_template(messages, None)?,
            Conversation::Completion(messages, before) => self.with_template(messages, Some(*before))?,
            Conversation::Texts(prompt, completion) => self.plain(prompt, completion)?,
            Conversation::Whole(text) => self.plain("", text)?,
        };
        Ok(self.cut(tokens, trained)?)
    }

    /// Cuts a sample to the context.
    fn cut(&self, mut tokens: Vec<u32>, mut trained: Vec<bool>) -> Result<Written, Problem> {
        let length = tokens.len();
        let targets = |trained: &[bool]| trained.iter().skip(1).any(|trained| *trained);
        if !targets(&trained) {
            return Err(Problem::new("there is no token to train on", "remove the line, or give it an answer"));
        }
        tokens.truncate(self.context + 1);
        trained.truncate(self.context + 1);
        if !targets(&trained) {
            let context = self.context;
            let message = format!("it has {length} tokens, and no answer begins within `data.context` = {context}");
            return Err(Problem::new(message, CONTEXT));
        }
        Ok(Written { cut: length - tokens.len(), tokens, trained })
    }

    /// The tokens of messages. If those that lead to the others are counted (`before`), the others are the answer.
    fn with_template(&self, messages: &[Message], before: Option<usize>) -> Result<(Vec<u32>, Vec<bool>), Failure> {
        let Some(template) = &self.template else {
            let message = "the conversations need the model's template for chats, and there is none".into();
            return Err(Failure::Data(DataError::Broken { message, hint: TEMPLATE.into() }));
        };
        let rendered = template.render(messages, false).map_err(|e| refused(&e))?;
        let all_from = |start: usize| std::iter::once(start..rendered.text.len()).collect();
        let answers = match (self.train_on, before) {
            (TrainOn::All, _) => all_from(0),
            (TrainOn::Answers, Some(before)) => {
                let start = lead(template, messages, before, &rendered.text)?;
                all_from(start)
            }
            (TrainOn::Answers, None) if template.marks_answers() => rendered.answers,
            (TrainOn::Answers, None) => answers(template, messages, &rendered.text)?,
        };
        let tokens = self.tokenizer.encode_with_places(&rendered.text)?;
        let trained = tokens.iter().map(|(_, place)| answers.iter().any(|answer| overlap(answer, place))).collect();
        Ok((tokens.into_iter().map(|(token, _)| token).collect(), trained))
    }

    /// The tokens of a text that is in the model's own form already. As `transformers` and TRL do, it begins with what
    /// the tokenizer puts before each text, and ends with the end of a text.
    fn plain(&self, prompt: &str, completion: &str) -> Result<(Vec<u32>, Vec<bool>), Failure> {
        let text = match prompt {
            "" => Cow::Borrowed(completion),
            prompt => Cow::Owned(format!("{prompt}{completion}")),
        };
        let answer = match self.train_on {
            TrainOn::All => 0..text.len(),
            TrainOn::Answers => prompt.len()..text.len(),
        };
        let encoded = self.tokenizer.encode_with_places(&text)?;
        let (tokens, trained): (Vec<u32>, Vec<bool>) =
            encoded.iter().map(|(token, place)| (*token, overlap(&answer, place))).unzip();
        let opening = self.tokenizer.opening();
        let opening = if tokens.starts_with(opening) { &[] } else { opening };
        let end = self.tokenizer.end_of_text().filter(|end| tokens.last() != Some(end));
        let all = opening.iter().copied().chain(tokens).chain(end).collect();
        let before = std::iter::repeat_n(self.train_on == TrainOn::All, opening.len());
        Ok((all, before.chain(trained).chain(end.map(|_| true)).collect()))
    }
}

/// Whether a token shares a byte with an answer. A token that begins in the blank before it is thus a part of it: a
/// model that is asked has not written that token yet.
fn overlap(answer: &Range<usize>, token: &Range<usize>) -> bool {
    token.start < answer.end && token.end > answer.start
}

fn refused(error: &TemplateError) -> Problem {
    let hint = match error {
        TemplateError::Failed { .. } => FAILED,
        TemplateError::Refused(_) | TemplateError::Marked(_) => REFUSED,
    };
    Problem::new(error.to_string(), hint)
}

/// The length of what a model is given before it writes the message after the first `before`. It is the start of the
/// whole `text`.
fn lead(template: &ChatTemplate, messages: &[Message], before: usize, text: &str) -> Result<usize, Problem> {
    let lead = template.render(&messages[..before], true).map_err(|e| refused(&e))?.text;
    if text.starts_with(&lead) {
        return Ok(lead.len());
    }
    let message = format!(
        "where message {} begins is unknown, because the chat template writes what is before it differently when it \
         asks for an answer",
        before + 1
    );
    Err(Problem::new(message, MARK))
}

/// The answers in a text whose template does not mark them: what a message of the model adds to the text that the model
/// is given before it.
fn answers(template: &ChatTemplate, messages: &[Message], text: &str) -> Result<Vec<Range<usize>>, Problem> {
    let answer = |(place, _): (usize, &Message)| {
        let start = lead(template, messages, place, text)?;
        if place + 1 == messages.len() {
            return Ok(start..text.len());
        }
        let end = template.render(&messages[..=place], false).map_err(|e| refused(&e))?.text;
        if text.starts_with(&end) && end.len() >= start {
            return Ok(start..end.len());
        }
        let message = format!(
            "where message {} ends is unknown, because the chat template writes it differently once others follow",
            place + 1
        );
        Err(Problem::new(message, MARK))
    };
    messages.iter().enumerate().filter(|(_, message)| message.is_answer()).map(answer).collect()
}
