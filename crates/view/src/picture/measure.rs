//! The width of texts, without a font at hand.

/// The width of a text, in the unit of `size`. It is that of a wide sans-serif font in semibold, so that a text is
/// hardly ever wider.
pub(crate) fn text_width(text: &str, size: f64) -> f64 {
    text.chars().map(advance).sum::<f64>() * size
}

/// The text, shortened at its end with an ellipsis until it fits.
pub(crate) fn shortened(text: &str, size: f64, width: f64) -> String {
    if text_width(text, size) <= width {
        return text.into();
    }
    let mut room = width / size - advance('…');
    let fits = |c: &char| {
        room -= advance(*c);
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
        'i' | 'j' | 'l' | 'I' | '\'' | '|' | '.' | ',' | ':' | ';' | '!' => 0.38,
        ' ' | '(' | ')' | '[' | ']' | 'f' | 't' | 'r' | '-' | '/' | '·' => 0.45,
        'm' | 'M' | 'w' | 'W' | '@' | '%' | '—' | '…' | '→' | '↔' | '×' => 1.05,
        'A'..='Z' | '&' | '<' | '>' | '+' | '=' | '~' => 0.82,
        'a'..='z' | '0'..='9' => 0.68,
        // Combining marks and joiners take no room of their own.
        '\u{300}'..='\u{36f}' | '\u{200b}'..='\u{200f}' | '\u{fe00}'..='\u{fe0f}' => 0.0,
        c if c.is_ascii() => 0.72,
        // Latin letters with marks, Greek and Cyrillic.
        '\u{80}'..='\u{52f}' => 0.9,
        // Scripts from Hebrew on, and symbols. Those of East Asia and pictures fill a square.
        '\u{530}'..='\u{10ff}' => 1.0,
        _ => 1.2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_shortened_to_what_fits() {
        assert_eq!(shortened("ann's home", 12.0, 200.0), "ann's home");
        let short = shortened("a machine with a long name", 12.0, 80.0);
        assert!(short.ends_with('…') && text_width(&short, 12.0) <= 80.0, "{short}");
        assert_eq!(shortened("東京の計算機", 10.0, 50.0), "東京の…");
        assert_eq!(shortened("wide", 10.0, 8.0), "");
    }
}
