//! The width of texts, without a font at hand.

/// How much wider a text of the class `strong` is.
const STRONG: f64 = 1.12;

/// The width of a text of some classes, in the unit of `size`. It is that of DejaVu Sans, which is among the widest
/// sans-serif fonts, so that a text is hardly ever wider.
pub(crate) fn text_width(text: &str, size: f64, class: &str) -> f64 {
    let strong = class.split(' ').any(|c| c == "strong");
    text.chars().map(advance).sum::<f64>() * size * if strong { STRONG } else { 1.0 }
}

/// The text, shortened at its end with an ellipsis until it fits.
pub(crate) fn shortened(text: &str, size: f64, class: &str, width: f64) -> String {
    if text_width(text, size, class) <= width {
        return text.into();
    }
    let mut room = width - text_width("…", size, class);
    let fits = |c: &char| {
        room -= text_width(c.encode_utf8(&mut [0; 4]), size, class);
        room >= 0.0
    };
    let kept: String = text.chars().take_while(fits).collect();
    match kept.trim_end() {
        "" => String::new(),
        kept => format!("{kept}…"),
    }
}

/// The advance of a character, as a share of the font's size.
fn advance(c: char) -> f64 {
    match c {
        'i' | 'j' | 'l' | 'I' | '\'' | '|' | '.' | ',' | ':' | ';' | ' ' | '·' => 0.34,
        '(' | ')' | '[' | ']' | 'f' | 't' | 'r' | '-' | '/' | '!' => 0.42,
        'c' | 'k' | 's' | 'v' | 'x' | 'y' | 'z' | 'J' => 0.59,
        'm' | 'W' | '@' | '%' | '—' | '…' => 1.0,
        'w' | 'M' | 'O' | 'Q' | '&' | '<' | '>' | '+' | '=' | '~' | '→' | '×' | '−' => 0.87,
        'A'..='Z' => 0.74,
        'a'..='z' | '0'..='9' => 0.64,
        // Combining marks and joiners take no room of their own.
        '\u{300}'..='\u{36f}' | '\u{200b}'..='\u{200f}' | '\u{fe00}'..='\u{fe0f}' => 0.0,
        c if c.is_ascii() || c == '–' => 0.7,
        // Latin letters with marks, Greek and Cyrillic.
        '\u{80}'..='\u{52f}' => 0.9,
        // Scripts from Hebrew on. Those of East Asia, symbols and pictures fill a square or more.
        '\u{530}'..='\u{10ff}' => 1.0,
        _ => 1.2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_shortened_to_what_fits() {
        assert_eq!(shortened("ann's home", 12.0, "ink", 200.0), "ann's home");
        let short = shortened("a machine with a long name", 12.0, "ink strong", 80.0);
        assert!(short.ends_with('…') && text_width(&short, 12.0, "ink strong") <= 80.0, "{short}");
        assert_eq!(shortened("東京の計算機", 10.0, "", 50.0), "東京の…");
        assert_eq!(shortened("wide", 10.0, "", 8.0), "");
    }
}
