//! Texts that are not UTF-8.

/// An encoding that is not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Encoding {
    /// The name that `iconv` knows.
    pub name: &'static str,
    /// The advice for the user.
    pub hint: &'static str,
}

macro_rules! encoding {
    ($name:literal) => {
        Encoding {
            name: $name,
            hint: concat!("save it in UTF-8, or convert it: iconv -f ", $name, " -t UTF-8 OLD > NEW"),
        }
    };
}

/// The bytes from the start that tell the encoding.
const LOOKED_AT: usize = 4096;

/// The encoding of a text whose characters take two or four bytes each. `None` for UTF-8, for another encoding, and for
/// bytes that are no text.
pub fn wide(bytes: &[u8]) -> Option<Encoding> {
    let start = &bytes[..bytes.len().min(LOOKED_AT) & !1];
    let is_text = |unit: fn([u8; 2]) -> u16| {
        let units = start.chunks_exact(2).map(|pair| unit([pair[0], pair[1]]));
        // The last character may be cut.
        char::decode_utf16(units).filter(Result::is_err).count() <= 1
    };
    // If there is no mark at the start, Latin letters tell the encoding: they leave every second byte 0, and no other.
    let zeros = |offset: usize| start.iter().skip(offset).step_by(2).filter(|b| **b == 0).count();
    let only = |here: usize, there: usize| start.len() >= 8 && there == 0 && here * 20 >= start.len() * 9;
    match start {
        [0xff, 0xfe, 0, 0, ..] => Some(encoding!("UTF-32")),
        [0xff, 0xfe, ..] if is_text(u16::from_le_bytes) => Some(encoding!("UTF-16")),
        [0xfe, 0xff, ..] if is_text(u16::from_be_bytes) => Some(encoding!("UTF-16")),
        _ if only(zeros(1), zeros(0)) => Some(encoding!("UTF-16LE")),
        _ if only(zeros(0), zeros(1)) => Some(encoding!("UTF-16BE")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn utf16(text: &str, mark: &[u8], unit: fn(u16) -> [u8; 2]) -> Vec<u8> {
        mark.iter().copied().chain(text.encode_utf16().flat_map(unit)).collect()
    }

    #[test]
    fn wide_characters_are_found_and_bytes_are_not_taken_for_them() {
        let text = "[train]\nsteps = 3 # über 😀\n".repeat(300);
        let name = |bytes: &[u8]| wide(bytes).map(|e| e.name);
        assert_eq!(name(&utf16(&text, &[0xff, 0xfe], u16::to_le_bytes)), Some("UTF-16"));
        assert_eq!(name(&utf16("\u{65e5}\u{672c}", &[0xfe, 0xff], u16::to_be_bytes)), Some("UTF-16"));
        assert_eq!(name(&utf16(&text.replace('😀', ""), &[], u16::to_le_bytes)), Some("UTF-16LE"));
        assert_eq!(name(&utf16("a text", &[], u16::to_be_bytes)), Some("UTF-16BE"));
        assert_eq!(name(&[0xff, 0xfe, 0, 0, b'a', 0, 0, 0]), Some("UTF-32"));
        for other in [text.as_bytes(), b"", b"\0", &[0; 100], &[0xff, 0xfe, 0x00, 0xdc, 0x01, 0xdc, 0x02, 0xdc]] {
            assert_eq!(name(other), None);
        }
        let numbers: Vec<u8> = (0..1000u16).flat_map(u16::to_le_bytes).collect();
        assert_eq!(name(&numbers), None);
    }
}
