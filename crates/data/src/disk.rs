//! Atomic writes: after a crash or on a full disk, a file has its old content or its new content, never a part.

use std::borrow::Cow;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use fusionllm_graph::Advice;

/// A file or directory cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[error("{}: cannot be {action}", path.display())]
pub struct DiskError {
    /// The file or directory.
    pub path: PathBuf,
    /// The failed action, as a participle: "cannot be `written`".
    pub action: &'static str,
    /// The reason that the system gives.
    pub source: io::Error,
}

impl DiskError {
    /// Makes the argument of a `map_err`.
    pub fn at(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self { path, action, source }
    }
}

impl Advice for DiskError {
    fn hint(&self) -> Option<Cow<'_, str>> {
        let hint = match self.source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                "free some space, then continue with --resume; all earlier checkpoints are intact"
            }
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                "choose another --run-dir, or give yourself the right to write there"
            }
            io::ErrorKind::NotFound => "check the path",
            io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
                "a file stands where a directory is needed: choose another path, or remove that file"
            }
            io::ErrorKind::IsADirectory => "a directory stands where a file is needed: give the path of a file",
            _ => "check the disk and the path",
        };
        Some(hint.into())
    }
}

/// Replaces the content of the file at `path` atomically.
pub fn write_atomic(path: &Path, content: &[u8]) -> Result<(), DiskError> {
    replace(path, content, File::options().write(true).create(true).truncate(true))
}

/// Replaces the content of a file atomically. Only the user can read it, where the system knows users.
pub fn write_private_atomic(path: &Path, content: &[u8]) -> Result<(), DiskError> {
    let mut options = File::options();
    options.write(true).create(true).truncate(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    replace(path, content, &options)
}

fn replace(path: &Path, content: &[u8], options: &OpenOptions) -> Result<(), DiskError> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".partial");
    let partial = path.with_file_name(name);
    let written = (|| {
        let mut file = options.open(&partial)?;
        file.write_all(content)?;
        flush(&file)?;
        drop(file);
        fs::rename(&partial, path)
    })();
    if let Err(source) = written {
        // The partial file is removed to free its space. The first error is the one to report.
        let _ = fs::remove_file(&partial);
        return Err(DiskError { path: path.to_owned(), action: "written", source });
    }
    sync_directory(path.parent().unwrap_or(Path::new(".")))
}

/// Writes a new file with a text that, on Unix, only this user can read.
///
/// # Errors
///
/// The file exists, or the disk fails.
pub fn write_private(path: &Path, content: &[u8]) -> Result<(), DiskError> {
    let mut options = File::options();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let written = options.open(path).and_then(|mut file| file.write_all(content));
    written.map_err(DiskError::at(path, "written"))
}

/// Flushes a file to the disk, where the file system can do that: [`cannot_flush`].
pub fn flush(file: &File) -> io::Result<()> {
    file.sync_all().or_else(|e| if is_refusal(&e) { Ok(()) } else { Err(e) })
}

/// Flushes a directory to the disk, so that new and renamed files survive a power cut, where the file system can do that:
/// [`cannot_flush`]. It does nothing outside Unix.
pub fn sync_directory(directory: &Path) -> Result<(), DiskError> {
    match synced(directory) {
        Err(e) if !is_refusal(&e) => Err(DiskError::at(directory, "written")(e)),
        _ => Ok(()),
    }
}

/// The reason why a directory cannot be flushed to the disk: its file system does not do that, as some over a network
/// and in user space do not, or this user may not open it. After a power cut, files there may be missing or damaged.
pub fn cannot_flush(directory: &Path) -> Option<io::Error> {
    synced(directory).err().filter(is_refusal)
}

fn synced(directory: &Path) -> io::Result<()> {
    if cfg!(not(unix)) {
        return Ok(());
    }
    let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
    File::open(directory)?.sync_all()
}

/// Whether a system refuses to flush a file, and does not fail to.
fn is_refusal(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidInput, PermissionDenied, Unsupported};
    matches!(error.kind(), InvalidInput | Unsupported | PermissionDenied)
}
