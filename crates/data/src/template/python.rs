//! The functions and filters that `transformers` gives to the templates of chats, beside Jinja2 itself.

use std::io;

use minijinja::value::Kwargs;
use minijinja::{Environment, Error, ErrorKind, Value};
use minijinja_contrib::pycompat;
use serde::Serialize;
use serde_json::ser::{CompactFormatter, Formatter, PrettyFormatter};

/// The day that the clock of a template shows (`strftime_now`), at midnight: year, month and day. The real day would
/// make the data of a resumed run differ from those before. The templates of Llama take this one where they find no
/// clock.
pub(super) const DAY: (i32, usize, usize) = (2024, 7, 26);

/// The most blanks by which JSON is indented.
const WIDEST: usize = 64;

/// The message of a template that refuses a conversation.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Raised(pub(super) String);

/// Adds Python's methods of strings and maps, and the functions and filters of `transformers`.
pub(super) fn add_to(environment: &mut Environment<'static>) {
    environment.set_unknown_method_callback(pycompat::unknown_method_callback);
    // The engine takes nothing for an empty list.
    environment.add_test("iterable", |value: Value| !value.is_none() && value.try_iter().is_ok());
    environment.add_filter("tojson", tojson);
    environment.add_function("strftime_now", strftime_now);
    environment.add_function("raise_exception", |message: Value| -> Result<Value, Error> {
        let message = message.to_string();
        Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
    });
}

/// JSON as Python's `json.dumps(x, ensure_ascii=False)` writes it.
fn tojson(value: Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    if indent.is_some_and(|indent| indent > WIDEST) {
        return Err(Error::new(ErrorKind::InvalidOperation, format!("tojson indents by {WIDEST} blanks at most")));
    }
    let separators: Option<Vec<String>> = options.get("separators")?;
    let sorted: Option<bool> = options.get("sort_keys")?;
    let ascii: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let given = separators.as_deref().and_then(|separators| match separators {
        [item, key] => Some((item.clone(), key.clone())),
        _ => None,
    });
    let usual = if indent.is_some() { "," } else { ", " };
    let (item, key) = given.unwrap_or_else(|| (usual.into(), ": ".into()));
    let blanks = " ".repeat(indent.unwrap_or_default());
    let style = Style { item, key, lines: indent.map(|_| PrettyFormatter::with_indent(blanks.as_bytes())) };
    let mut out = Vec::new();
    let mut serializer = serde_json::Serializer::with_formatter(&mut out, style);
    let written = match sorted.unwrap_or_default() {
        // Its maps are sorted.
        true => serde_json::to_value(&value).and_then(|value| value.serialize(&mut serializer)),
        false => value.serialize(&mut serializer),
    };
    let failed = |e: String| Error::new(ErrorKind::BadSerialization, e);
    written.map_err(|e| failed(e.to_string()))?;
    let text = String::from_utf8(out).map_err(|e| failed(e.to_string()))?;
    Ok(if ascii.unwrap_or_default() { escaped(&text) } else { text })
}

/// JSON in which every character beyond ASCII is an escape.
fn escaped(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for c in json.chars() {
        match c.is_ascii() {
            true => text.push(c),
            false => c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| text += &format!("\\u{unit:04x}")),
        }
    }
    text
}

/// The blanks and separators of Python.
struct Style<'a> {
    item: String,
    key: String,
    /// The lines, if each value has one of its own.
    lines: Option<PrettyFormatter<'a>>,
}

macro_rules! forward {
    ($($method:ident),*) => {
        $(fn $method<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
            match &mut self.lines {
                Some(lines) => lines.$method(out),
                None => CompactFormatter.$method(out),
            }
        })*
    };
}

impl Style<'_> {
    /// Writes the text before a value: after the first, a separator.
    fn separate<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if !first {
            out.write_all(self.item.as_bytes())?;
        }
        match &mut self.lines {
            // For the first value, that is the new line alone.
            Some(lines) => lines.begin_array_value(out, true),
            None => Ok(()),
        }
    }
}

impl Formatter for Style<'_> {
    forward!(begin_array, end_array, end_array_value, begin_object, end_object, end_object_value);

    fn begin_array_value<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.separate(out, first)
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.separate(out, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(self.key.as_bytes())
    }
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// [`DAY`] in a format of Python's `strftime`.
fn strftime_now(format: &str) -> Result<String, Error> {
    let (year, month, day) = DAY;
    let mut text = String::new();
    let mut letters = format.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            text.push(letter);
            continue;
        }
        let mut directive = letters.next();
        let is_padded = directive != Some('-');
        if !is_padded {
            directive = letters.next();
        }
        let number = |n: usize| if is_padded { format!("{n:02}") } else { n.to_string() };
        let month_name = MONTHS[month - 1];
        text += &match directive {
            Some('Y') => year.to_string(),
            Some('y') => number(year as usize % 100),
            Some('m') => number(month),
            Some('B') => month_name.to_owned(),
            Some('b' | 'h') => month_name.chars().take(3).collect(),
            Some('d') => number(day),
            Some('A') => "Friday".to_owned(),
            Some('a') => "Fri".to_owned(),
            Some('H' | 'M' | 'S') => number(0),
            Some('I') => "12".to_owned(),
            Some('p') => "AM".to_owned(),
            Some('j') => "208".to_owned(),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T' | 'X') => "00:00:00".to_owned(),
            Some('%') => "%".to_owned(),
            other => {
                let directive = other.map(String::from).unwrap_or_default();
                let message = format!("strftime_now knows no %{directive}");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        };
    }
    Ok(text)
}
