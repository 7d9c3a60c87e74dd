//! Writing files so that a crash or a full disk leaves the old content or the new, never half of it.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A failure of the disk, at one file.
#[derive(Debug, thiserror::Error)]
#[error("{}: cannot be {action}", path.display())]
pub struct DiskError {
    /// The file or directory.
    pub path: PathBuf,
    /// What was tried, as in "cannot be written".
    pub action: &'static str,
    /// The system's reason.
    pub source: io::Error,
}

impl DiskError {
    /// For `map_err`.
    pub(crate) fn at(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self { path, action, source }
    }

    /// What the user can do about it.
    pub fn hint(&self) -> &'static str {
        match self.source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                "free some space, then continue with --resume; all earlier checkpoints are intact"
            }
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                "choose another --run-dir, or give yourself the right to write there"
            }
            io::ErrorKind::NotFound => "check the path",
            _ => "check the disk and the path",
        }
    }
}

/// Replaces the file at `path` by `content`, in one step that a crash cannot split.
pub(crate) fn write_atomic(path: &Path, content: &[u8]) -> Result<(), DiskError> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".partial");
    let partial = path.with_file_name(name);
    let written = (|| {
        let mut file = File::create(&partial)?;
        file.write_all(content)?;
        file.sync_all()?;
        drop(file);
        fs::rename(&partial, path)
    })();
    if let Err(source) = written {
        // The space is worth more than a second error.
        let _ = fs::remove_file(&partial);
        return Err(DiskError { path: path.to_owned(), action: "written", source });
    }
    sync_directory(path.parent().unwrap_or(Path::new(".")))
}

/// Makes renames and new names in a directory last through a power cut, where the system can.
pub(crate) fn sync_directory(directory: &Path) -> Result<(), DiskError> {
    if cfg!(unix) {
        let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
        let synced = File::open(directory).and_then(|d| d.sync_all());
        synced.map_err(DiskError::at(directory, "written"))?;
    }
    Ok(())
}
