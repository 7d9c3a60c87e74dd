//! The file through which tensors pass. It lies in shared memory if there is room.
//!
//! It is read and written like any file. A mapping would let the other process end this one by shortening the file.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

/// The size of the file is a multiple of this. One such piece has room for most activations.
const UNIT: u64 = 1 << 20;
/// The memory that processes share on Linux.
const SHARED_MEMORY: &str = "/dev/shm";
/// Distinguishes the names of a process's files.
static CREATED: AtomicU64 = AtomicU64::new(0);

pub(super) struct Exchange {
    file: File,
    path: PathBuf,
    bytes: u64,
}

impl Exchange {
    /// A new file with room for at least so many bytes. The room is taken at once, so that neither side runs out of it
    /// later.
    pub(super) fn create(bytes: u64) -> Result<Self, String> {
        let bytes = bytes.max(1).checked_next_multiple_of(UNIT).ok_or("no tensor is that large")?;
        let mut places = vec![std::env::temp_dir()];
        if Path::new(SHARED_MEMORY).is_dir() {
            places.insert(0, SHARED_MEMORY.into());
        }
        let mut reasons = Vec::new();
        for place in places {
            let path = place.join(format!("fusionllm-{}-{}", process::id(), CREATED.fetch_add(1, Ordering::Relaxed)));
            let exchange = open(&path).and_then(|file| {
                let mut exchange = Self { file, path: path.clone(), bytes };
                let copied = io::copy(&mut io::repeat(0).take(bytes), &mut exchange.file)?;
                if copied == bytes { Ok(exchange) } else { Err(ErrorKind::StorageFull.into()) }
            });
            match exchange {
                Ok(exchange) => return Ok(exchange),
                Err(e) => {
                    let _ = fs::remove_file(&path);
                    reasons.push(format!("{}: {e}", path.display()));
                }
            }
        }
        Err(format!("there is no room for a tensor of {bytes} bytes on its way to it ({})", reasons.join("; ")))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The file stays until both sides have closed it, even if one is killed.
    pub(super) fn remove_name(&self) {
        let _ = fs::remove_file(&self.path);
    }

    pub(super) fn write(&mut self, data: &[u8]) -> Result<(), String> {
        let written = self.file.seek(SeekFrom::Start(0)).and_then(|_| self.file.write_all(data));
        written.map_err(|e| format!("{}: {e}", self.path.display()))
    }

    pub(super) fn read(&mut self, bytes: usize) -> Result<Vec<u8>, String> {
        let mut data = vec![0; bytes];
        let read = self.file.seek(SeekFrom::Start(0)).and_then(|_| self.file.read_exact(&mut data));
        read.map(|()| data).map_err(|e| format!("{}: {e}", self.path.display()))
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.remove_name();
    }
}

/// Creates a file that other users cannot read.
fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}
