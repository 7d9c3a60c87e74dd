//! Follows the advice of a message to the letter.

use fusionllm_workspace::config::JobError;

use crate::wrong::Key;

/// A line of a settings file.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Setting {
    /// The section, if it is not that of the key in question.
    pub(crate) section: Option<String>,
    pub(crate) key: String,
    pub(crate) value: String,
}

impl Setting {
    pub(crate) fn new(key: &str, value: &str) -> Self {
        Self { section: None, key: key.to_owned(), value: value.to_owned() }
    }

    pub(crate) fn line(&self) -> String {
        format!("{} = {}", self.key, self.value)
    }
}

/// The ways that an advice offers, each as the settings to write in the place of the wrong one.
#[derive(Default)]
pub(crate) struct Advice {
    /// Each of these must work.
    pub(crate) lines: Vec<Vec<Setting>>,
    /// One of these must work: the advice lists what there is, and leaves the choice to the reader.
    pub(crate) list: Vec<Vec<Setting>>,
}

impl Advice {
    /// Reads a hint about a wrong setting.
    pub(crate) fn of(error: &JobError, wrong: &Setting, key: &Key<'_>) -> Self {
        let hint = error.hint.replace("PATH", key.path);
        let instead = |value: String| vec![Setting { value, ..wrong.clone() }];
        let renamed = |name: &str| vec![Setting { key: name.to_owned(), ..wrong.clone() }];
        // A name that was meant is better advice than the list of names.
        if let Some(name) = between(&hint, "did you mean `", '`') {
            return Self { lines: vec![renamed(name)], list: Vec::new() };
        }
        if let Some(value) = between(&hint, "did you mean \"", '"') {
            return Self { lines: vec![instead(format!("{value:?}"))], list: Vec::new() };
        }
        let mut advice = Self::default();
        for lead in ["write ", "such as ", " or "] {
            let lines = hint.match_indices(lead).filter_map(|(at, _)| line(&hint[at + lead.len()..]));
            advice.lines.extend(lines.map(|setting| vec![setting]));
        }
        if let Some(name) = between(&hint, "[[site]] on a line, and name = \"", '"') {
            let site = Setting { section: Some("[[site]]".into()), ..Setting::new("name", &format!("{name:?}")) };
            advice.lines.push(vec![wrong.clone(), site]);
        }
        if hint.contains("a text in quotes") {
            advice.lines.push(instead("\"zzz\"".into()));
        }
        if hint.contains("paths start at") {
            advice.lines.push(instead(format!("{:?}", key.path)));
        }
        if hint.starts_with("write [") || hint.contains("leave it out") {
            advice.lines.push(Vec::new());
        }
        advice.lines.extend(rule(&hint).map(instead));
        for lead in ["it is one of ", "the sites are ", "there are ", "has all GPUs, such as ", "write "] {
            let Some((_, list)) = hint.split_once(lead) else { continue };
            let items = list.split(';').next().unwrap_or_default().split(", ").filter(|item| is_value(item));
            advice.list.extend(items.map(|item| instead(item.to_owned())));
        }
        if let Some((_, names)) = hint.split_once(" takes ") {
            let listed = names.split(", ").any(|name| name == key.key);
            advice.list.push(if listed { renamed(key.key) } else { Vec::new() });
        }
        advice
    }
}

/// The value at the edge of a rule such as "it must be at least 0 and below 1".
fn rule(hint: &str) -> Option<String> {
    for (lead, is_valid) in [("at least ", true), ("at most ", true), ("above ", false)] {
        let Some((_, rest)) = hint.split_once(lead) else { continue };
        let token = rest.split([' ', ',', ';', ':']).next().unwrap_or_default();
        let Ok(number) = token.parse::<f64>() else { continue };
        let value = if is_valid { token.to_owned() } else { format!("{:?}", number + 1e-9) };
        return Some(if hint.starts_with("both") { format!("[{value}, {value}]") } else { value });
    }
    None
}

/// The text between a lead and the next character of this kind.
fn between<'h>(hint: &'h str, lead: &str, end: char) -> Option<&'h str> {
    let (_, rest) = hint.split_once(lead)?;
    rest.split_once(end).map(|(text, _)| text)
}

/// Whether a text is one value of TOML.
fn is_value(text: &str) -> bool {
    format!("x = {text}").parse::<toml::Table>().is_ok_and(|table| table.len() == 1)
}

/// The longest start of a text that is a line of a settings file, and the section that the text names after it.
fn line(text: &str) -> Option<Setting> {
    let ends = text.char_indices().map(|(i, c)| i + c.len_utf8());
    let parsed = |end: usize| {
        let table = text[..end].parse::<toml::Table>().ok()?;
        (table.len() == 1).then_some((end, table))
    };
    let (end, table) = ends.rev().find_map(parsed)?;
    let (key, value) = table.into_iter().next()?;
    // A start such as `[train]` is a section without a setting.
    let section = text[end..].trim_start().strip_prefix("in [").and_then(|rest| rest.split_once(']'));
    let section = section.map(|(name, _)| name.to_owned());
    text.starts_with(&key).then(|| Setting { section, key, value: value.to_string() })
}
