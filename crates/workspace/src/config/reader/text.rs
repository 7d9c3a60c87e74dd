//! The text of a settings file.

use std::path::Path;

use fusionllm_data::{FileKind, Role, encoding};

use super::JobError;

/// Reads a file of settings. Messages call it `what`, such as "the job file"; `hint` says which file to give instead.
pub(in crate::config) fn read_text(path: &Path, what: &str, hint: &str) -> Result<String, JobError> {
    let name = path.display().to_string();
    if path.is_dir() {
        return Err(JobError::new(name, format!("{what} cannot be read: this is a directory"), hint));
    }
    if let Some(kind) = FileKind::at(path, Role::Settings) {
        let message = format!("this is {}, not {}", kind.name, Role::Settings);
        return Err(JobError::new(name, message, kind.hint(Role::Settings, path)));
    }
    match std::fs::read(path) {
        Ok(bytes) => decode(&name, bytes),
        Err(e) => Err(JobError::new(name, format!("{what} cannot be read: {e}"), hint)),
    }
}

/// The text in the bytes of a settings file, without the mark that some editors put at its start.
pub(in crate::config) fn decode(name: &str, bytes: Vec<u8>) -> Result<String, JobError> {
    if let Some(encoding) = encoding::wide(&bytes) {
        return Err(JobError::new(name, format!("the file is in {}, not in UTF-8", encoding.name), encoding.hint));
    }
    match String::from_utf8(bytes) {
        Ok(text) => Ok(text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text)),
        Err(e) => {
            let valid = &e.as_bytes()[..e.utf8_error().valid_up_to()];
            let line = valid.iter().filter(|b| **b == b'\n').count() + 1;
            Err(JobError::new(
                format!("{name}:{line}"),
                "this line is not in UTF-8",
                "save the file in UTF-8; if it is in Latin-1, convert it: iconv -f LATIN1 -t UTF-8 OLD > NEW",
            ))
        }
    }
}
