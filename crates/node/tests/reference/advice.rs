//! Follows the advice of a message to the letter.

use fusionllm_node::config::JobError;

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

/// The settings that the advice asks for, in the place of the wrong one: one list for each thing that it offers.
pub(crate) fn follow(error: &JobError, wrong: &Setting, key: &Key<'_>) -> Vec<Vec<Setting>> {
    let hint = error.hint.replace("PATH", key.path);
    let instead = |value: String| vec![Setting { value, ..wrong.clone() }];
    let mut all = Vec::new();
    // The name that was meant.
    if let Some((name, _)) = hint.split_once("did you mean `").and_then(|(_, rest)| rest.split_once('`')) {
        all.push(vec![Setting { key: name.to_owned(), ..wrong.clone() }]);
        return all;
    }
    // The value that was meant, or one of a list.
    if let Some((value, _)) = hint.split_once("did you mean \"").and_then(|(_, rest)| rest.split_once('"')) {
        all.push(instead(format!("{value:?}")));
        return all;
    }
    // Whole lines.
    for lead in ["write ", "such as ", " or ", "in it: write "] {
        for (at, _) in hint.match_indices(lead) {
            all.extend(line(&hint[at + lead.len()..]).map(|setting| vec![setting]));
        }
    }
    if hint.starts_with("write [") {
        all.push(Vec::new());
    }
    if let Some((_, name)) = hint.split_once("[[site]] on a line, and name = ") {
        let name = name.trim_end_matches(" below").to_owned();
        all.push(vec![wrong.clone(), Setting { section: Some("[[site]]".into()), key: "name".into(), value: name }]);
    }
    // A list of what there is.
    for lead in ["it is one of ", "the sites are ", "there are ", "the table has ", "write "] {
        let Some((_, list)) = hint.split_once(lead) else { continue };
        let items = list.split(['.', ';']).next().unwrap_or_default().split(", ").map(str::trim);
        all.extend(items.filter(|item| is_value(item)).map(|item| instead(item.to_owned())));
    }
    // A rule. The number at its edge is the first that comes to mind.
    for (lead, beyond) in [("at least ", 0.0), ("at most ", 0.0), ("above ", 1e-9)] {
        let Some((_, rest)) = hint.split_once(lead) else { continue };
        let number = rest.split([' ', ',', ';', ':']).next().and_then(|n| n.parse::<f64>().ok());
        let Some(number) = number else { continue };
        let value = if number.fract() == 0.0 && beyond == 0.0 {
            format!("{number:.0}")
        } else {
            format!("{:?}", number + beyond)
        };
        all.push(instead(if hint.starts_with("both") { format!("[{value}, {value}]") } else { value }));
        break;
    }
    if hint.contains("a text in quotes") {
        all.push(instead("\"zzz\"".into()));
    }
    if hint.contains("leave it out") {
        all.push(Vec::new());
    }
    all
}

/// Whether a text is one value of TOML.
fn is_value(text: &str) -> bool {
    format!("x = {text}").parse::<toml::Table>().is_ok()
}

/// The longest start of a text that is a line of a settings file, and the section that it names after that.
fn line(text: &str) -> Option<Setting> {
    let ends = text.char_indices().map(|(i, c)| i + c.len_utf8());
    let parsed = |end: usize| text[..end].parse::<toml::Table>().ok().filter(|t| t.len() == 1).map(|t| (end, t));
    let (end, table) = ends.filter_map(parsed).last()?;
    let (key, value) = table.into_iter().next()?;
    let section = text[end..].strip_prefix(" in [").and_then(|rest| rest.split_once(']')).map(|(name, _)| name);
    Some(Setting { section: section.map(str::to_owned), key, value: value.to_string() })
}
