//! Kinds of files, told by how they begin, for messages about files that are not what a job takes them for.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// A kind of file that is no text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileKind {
    /// Its name, with an article.
    pub name: &'static str,
    holds: Holds,
}

/// The content of a file, which decides how it becomes something that is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Holds {
    /// Other files, or one that is compressed. With the command that unpacks it.
    Packed(&'static str),
    /// Other files in a zip archive, which `torch.save` and `torch.export.save` write.
    Zip,
    /// Objects of Python, perhaps tensors.
    Pickle,
    /// An array of NumPy.
    Array,
    /// Rows and columns. With the function of pandas that reads them.
    Table(&'static str),
    /// Tensors of a model.
    Weights,
    /// Pages or slides.
    Document,
    /// A pointer to the file that was meant.
    Pointer,
    /// A page of a site, instead of the file that was meant.
    Page,
    /// Pictures, sound, programs.
    Other,
}

/// The use that a job makes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Text or conversations.
    Text,
    /// Tensors or weights in a safetensors file.
    Tensors,
    /// A model that `torch.export.save` wrote.
    Archive,
    /// A job, a testbed or another file of settings.
    Settings,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Text => "text",
            Self::Tensors => "a safetensors file",
            Self::Archive => "a model that torch.export.save wrote",
            Self::Settings => "a file of settings",
        })
    }
}

use Holds::{Array, Document, Other, Packed, Page, Pickle, Pointer, Table, Weights, Zip};

/// How files of each kind begin: the place of some bytes, and the bytes. The first that fits counts.
const BEGINNINGS: &[(usize, &[u8], &str, Holds)] = &[
    (8, b"{\"", "a safetensors file", Weights),
    (0, b"version https://git-lfs", "a pointer of Git LFS", Pointer),
    (0, &[0x1f, 0x8b, 8], "a gzip file", Packed("gunzip")),
    (0, &[0x28, 0xb5, 0x2f, 0xfd], "a Zstandard file", Packed("unzstd")),
    (0, b"BZh", "a bzip2 file", Packed("bunzip2")),
    (0, &[0xfd, b'7', b'z', b'X', b'Z', 0], "an xz file", Packed("unxz")),
    (0, &[4, 0x22, 0x4d, 0x18], "an LZ4 file", Packed("unlz4")),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", Packed("7z x")),
    (0, b"Rar!", "a RAR archive", Packed("unrar x")),
    (0, b"PK\x03\x04", "a zip archive", Zip),
    (257, b"ustar", "a tar archive", Packed("tar -xf")),
    (0, b"PAR1", "a Parquet table", Table("read_parquet")),
    (0, b"ARROW1", "an Arrow table", Table("read_feather")),
    (0, &[0xff, 0xff, 0xff, 0xff], "an Arrow table", Table("read_feather")),
    (0, b"Obj\x01", "an Avro table", Other),
    (0, b"ORC", "an ORC table", Table("read_orc")),
    (0, b"SQLite format 3\0", "an SQLite database", Other),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file", Array),
    (0, b"\x93NUMPY", "a NumPy array", Array),
    (0, b"GGUF", "a GGUF file of llama.cpp", Weights),
    (0, &[0x80, 2], "a pickle of Python", Pickle),
    (0, &[0x80, 3], "a pickle of Python", Pickle),
    (0, &[0x80, 4], "a pickle of Python", Pickle),
    (0, &[0x80, 5], "a pickle of Python", Pickle),
    (0, b"%PDF-", "a PDF document", Document),
    (0, b"\xd0\xcf\x11\xe0", "a document of Microsoft Office", Document),
    (0, b"{\\rtf", "an RTF document", Document),
    (0, b"\x89PNG", "a PNG picture", Other),
    (0, &[0xff, 0xd8, 0xff], "a JPEG picture", Other),
    (0, b"GIF8", "a GIF picture", Other),
    (0, b"BM", "a BMP picture", Other),
    (0, b"II*\0", "a TIFF picture", Other),
    (0, b"MM\0*", "a TIFF picture", Other),
    (8, b"WEBP", "a WebP picture", Other),
    (8, b"WAVE", "a WAV recording", Other),
    (0, b"ID3", "an MP3 recording", Other),
    (0, b"fLaC", "a FLAC recording", Other),
    (0, b"OggS", "an Ogg recording", Other),
    (4, b"ftyp", "an MP4 video", Other),
    (0, b"\x1aE\xdf\xa3", "a Matroska video", Other),
    (0, b"\x7fELF", "a program", Other),
    (0, b"MZ", "a program", Other),
];

/// How a page of a site begins. It is text, but neither tensors nor a model.
const PAGES: [&str; 2] = ["<!doctype html", "<html"];

/// The bytes from the start that tell the kind.
const LOOKED_AT: usize = 512;

impl FileKind {
    /// The kind of a file with these first bytes, as far as it is one that `role` does not take. Letters alone are no
    /// reason to take a text for something else.
    pub fn of(bytes: &[u8], role: Role) -> Option<Self> {
        let start = &bytes[..bytes.len().min(LOOKED_AT)];
        // The last character may be cut.
        let is_utf8 = std::str::from_utf8(start).err().is_none_or(|e| e.error_len().is_none());
        let is_text = is_utf8 && !start.iter().any(|byte| matches!(byte, 0 | 1));
        let begins =
            |(at, magic, ..): &&(usize, &[u8], &str, Holds)| start.get(*at..).is_some_and(|s| s.starts_with(magic));
        // The length of a header may look like anything.
        if role == Role::Tensors && start.get(8) == Some(&b'{') {
            return None;
        }
        let mut found = BEGINNINGS.iter().filter(begins).map(|(_, _, name, holds)| Self { name, holds: *holds });
        let own = |kind: &Self| match role {
            Role::Text | Role::Settings => !is_text || matches!(kind.holds, Pointer | Document),
            Role::Tensors => true,
            Role::Archive => kind.holds != Zip,
        };
        let binary = || {
            let is_binary = role == Role::Text && start.contains(&0);
            is_binary.then_some(Self { name: "a binary file", holds: Other })
        };
        let page = || {
            let lower = String::from_utf8_lossy(start).trim_start().to_lowercase();
            let is_page = role != Role::Text && PAGES.iter().any(|begin| lower.starts_with(begin));
            is_page.then_some(Self { name: "a web page", holds: Page })
        };
        let text = || {
            let is_text = is_text && !start.is_empty() && matches!(role, Role::Tensors | Role::Archive);
            is_text.then_some(Self { name: "a text file", holds: Other })
        };
        found.find(own).or_else(page).or_else(text).or_else(binary)
    }

    /// The kind of the file at `path`. `None` if it is one that `role` takes, of an unknown kind, or cannot be read.
    pub fn at(path: &Path, role: Role) -> Option<Self> {
        let mut start = Vec::with_capacity(LOOKED_AT);
        File::open(path).ok()?.take(LOOKED_AT as u64).read_to_end(&mut start).ok()?;
        Self::of(&start, role)
    }

    /// The advice for the user, how the file becomes one that `role` takes.
    pub fn hint(&self, role: Role, path: &Path) -> String {
        let path = path.display();
        match (self.holds, role) {
            (Pointer, _) => "fetch the file itself: git lfs pull".into(),
            (Page, _) => "fetch the file itself: the link led to a page about it, or to an error".into(),
            (Zip | Pickle, Role::Tensors) => format!(
                "if `torch.save` wrote it, convert it: python3 -c \"import torch; from safetensors.torch import \
                 save_file; save_file(torch.load('{path}', weights_only=True), 'NEW.safetensors')\""
            ),
            (Zip, Role::Text) => format!("unpack it: unzip {path}"),
            (Zip | Pickle, Role::Archive) => "save the model with torch.export.save".into(),
            (Packed(command), _) => format!("unpack it: {command} {path}"),
            (Array, Role::Tensors) => {
                "write the array into a safetensors file, with `safetensors.numpy.save_file`".into()
            }
            (Table(_), Role::Tensors) => {
                "write its columns into a safetensors file, with `safetensors.numpy.save_file`".into()
            }
            (Table(read), Role::Text) => format!(
                "write it as JSON lines, with a column `text` or `messages`: python3 -c \"import pandas; \
                 pandas.{read}('{path}').to_json('NEW.jsonl', orient='records', lines=True)\""
            ),
            (Document, Role::Text) => "write its text into a file, such as with pdftotext or pandoc".into(),
            (Weights, Role::Archive) => {
                "name it as `model.weights`, and the model with `model.path` or `model.file`".into()
            }
            (Weights, Role::Tensors) => "convert it to safetensors, or fetch the model in that form".into(),
            (_, Role::Text) => "leave it out of [data], which takes texts in UTF-8".into(),
            (_, Role::Tensors) => "name a safetensors file".into(),
            (_, Role::Archive) => "name a file that torch.export.save wrote".into(),
            (Zip, Role::Settings) => "a job names a model: write file = \"PATH\" in its [model]".into(),
            (Weights, Role::Settings) => "a job names weights: write weights = \"PATH\" in its [model]".into(),
            (_, Role::Settings) => "give a text file in TOML; `docs/job.md` has the settings of a job".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_text_is_told_and_text_is_not_taken_for_it() {
        let name = |bytes: &[u8], role| FileKind::of(bytes, role).map(|kind| kind.name);
        let mut tar = vec![0u8; 512];
        tar[257..262].copy_from_slice(b"ustar");
        let safetensors = *b"\x40\0\0\0\0\0\0\0{\"a\":{}}";
        for (bytes, expected) in [
            (&b"\x1f\x8b\x08\0\0\0\0\0\0\x03"[..], "a gzip file"),
            (b"PK\x03\x04\x14\0\0\0", "a zip archive"),
            (b"\x89PNG\r\n\x1a\n", "a PNG picture"),
            (b"PAR1\x15\x04\x15\0", "a Parquet table"),
            (b"BM\x36\0\x0c\0\0\0", "a BMP picture"),
            (b"%PDF-1.7\n", "a PDF document"),
            (b"version https://git-lfs.github.com/spec/v1\noid", "a pointer of Git LFS"),
            (&tar, "a tar archive"),
            (&safetensors, "a safetensors file"),
        ] {
            assert_eq!(name(bytes, Role::Text), Some(expected));
        }
        // These begin as other files do, and are texts.
        for text in
            ["BMW builds cars.", "MZ is a star.", "ID3 is a tag", "GGUF, a format", "PK", "ORC armies", "Rar!", "BZh"]
        {
            assert_eq!(name(text.as_bytes(), Role::Text), None, "{text}");
        }
        // A character that is cut where the look ends makes no binary file of a text.
        assert_eq!(name(format!("BM{}", "日本".repeat(200)).as_bytes(), Role::Text), None);
        assert_eq!(name(&[0; 600], Role::Text), Some("a binary file"));
        let page = b"\n<!DOCTYPE html><html>";
        assert_eq!(name(page, Role::Text), None);
        assert_eq!(name(page, Role::Tensors), Some("a web page"));
        assert_eq!(name(&safetensors, Role::Tensors), None);
        assert_eq!(name(b"PK\x03\x04\x14\0\0\0", Role::Archive), None);
        assert_eq!(name(&safetensors, Role::Archive), Some("a safetensors file"));
        for role in [Role::Tensors, Role::Archive] {
            assert_eq!(name(b"a,b\n1,2\n", role), Some("a text file"));
            assert_eq!(name(b"", role), None);
        }
    }
}
