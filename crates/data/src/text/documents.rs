//! Documents of text files, as tokens.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;
use ruzstd::decoding::StreamingDecoder;
use serde_json::Value;

use crate::{DataError, NOT_UTF_8, Tokenizer};

/// Reads documents and notes their digest.
pub(super) struct Reader<'a> {
    tokenizer: &'a Tokenizer,
    /// The tokens before each document.
    before: Vec<u32>,
    hasher: blake3::Hasher,
    pub(super) files: usize,
    pub(super) bytes: u64,
}

/// Bytes of short documents that are encoded at once.
const AT_ONCE: usize = 1 << 20;

impl<'a> Reader<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, before: tokenizer.before_document(), hasher: blake3::Hasher::new(), files: 0, bytes: 0 }
    }

    /// The tokens before each document.
    pub(super) fn before(&self) -> impl Iterator<Item = u32> + '_ {
        self.before.iter().copied()
    }

    /// The digest of all that was read.
    pub(super) fn digest(&self) -> String {
        self.hasher.finalize().to_hex().to_string()
    }

    /// The tokens of a file: of one document, or of many if the file is of JSON lines.
    pub(super) fn file(&mut self, path: &Path) -> Result<Vec<u32>, DataError> {
        let (bytes, name) = unpacked(path, crate::read(path)?)?;
        crate::check_text(path, &bytes)?;
        let lines = name.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("jsonl"));
        let text = String::from_utf8(bytes).map_err(|e| {
            let place = e.utf8_error().valid_up_to();
            DataError::Malformed {
                path: path.to_owned(),
                message: format!("byte {place} is not UTF-8"),
                hint: NOT_UTF_8,
            }
        })?;
        self.note(text.as_bytes());
        if lines { self.lines(path, &text) } else { self.tokens(&[&text]) }
    }

    /// The tokens of a document that is no file.
    pub(super) fn document(&mut self, text: &str) -> Result<Vec<u32>, DataError> {
        self.note(text.as_bytes());
        self.tokens(&[text])
    }

    /// The tokens of documents, each an object on a line of its own. Empty lines are no documents.
    fn lines(&self, path: &Path, text: &str) -> Result<Vec<u32>, DataError> {
        let mut tokens = Vec::new();
        let (mut waiting, mut bytes) = (Vec::new(), 0);
        for (line, number) in text.lines().zip(1..).filter(|(line, _)| !line.trim().is_empty()) {
            let document = document(line).map_err(|problem| DataError::Malformed {
                path: path.to_owned(),
                message: format!("line {number}: {problem}"),
                hint: "write one JSON object on each line, with the document in its field \"text\"; or write kind = \"chats\" for conversations",
            })?;
            bytes += document.len();
            waiting.push(document);
            if bytes >= AT_ONCE {
                tokens.extend(self.tokens(&waiting)?);
                (waiting, bytes) = (Vec::new(), 0);
            }
        }
        tokens.extend(self.tokens(&waiting)?);
        Ok(tokens)
    }

    fn tokens(&self, documents: &[impl AsRef<str>]) -> Result<Vec<u32>, DataError> {
        let texts: Vec<&str> = documents.iter().map(AsRef::as_ref).collect();
        let encoded = self.tokenizer.encode_all(&texts)?;
        Ok(encoded.into_iter().flat_map(|tokens| self.before().chain(tokens)).collect())
    }

    fn note(&mut self, bytes: &[u8]) {
        self.files += 1;
        self.bytes += bytes.len() as u64;
        // The lengths distinguish files whose contents join to the same bytes.
        self.hasher.update(&(bytes.len() as u64).to_le_bytes());
        self.hasher.update(bytes);
    }
}

/// The content of a compressed file, and the name without the ending that says so. Other files stay as they are.
fn unpacked(path: &Path, bytes: Vec<u8>) -> Result<(Vec<u8>, PathBuf), DataError> {
    let mut content = Vec::new();
    let read = match &bytes[..] {
        [0x1f, 0x8b, 8, ..] => MultiGzDecoder::new(&bytes[..]).read_to_end(&mut content),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => StreamingDecoder::new(&bytes[..])
            .map_err(io::Error::other)
            .and_then(|mut decoder| decoder.read_to_end(&mut content)),
        _ => return Ok((bytes, path.to_owned())),
    };
    match read {
        Ok(_) => Ok((content, path.with_extension(""))),
        Err(e) => Err(DataError::Malformed {
            path: path.to_owned(),
            message: format!("it cannot be unpacked: {e}"),
            hint: "fetch the file again",
        }),
    }
}

/// The field `text` of an object.
fn document(line: &str) -> Result<String, String> {
    let json = serde_json::from_str(line).map_err(|e| format!("column {}: this is no JSON", e.column()))?;
    let Value::Object(mut object) = json else { return Err("this is no JSON object".into()) };
    match object.remove("text") {
        Some(Value::String(text)) => Ok(text),
        Some(_) => Err("the field \"text\" is no string".into()),
        None => {
            let fields: Vec<String> = object.keys().take(8).map(|key| format!("{key:?}")).collect();
            Err(format!(
                "the object has no field \"text\", but {}",
                if fields.is_empty() { "none".into() } else { fields.join(", ") }
            ))
        }
    }
}
