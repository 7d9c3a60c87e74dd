//! The disk of this machine.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Bytes that this process may still write to a file on the disk with this directory; `None` where the system does not
/// say.
#[cfg(unix)]
pub(crate) fn available(directory: &Path) -> Option<u64> {
    let disk = rustix::fs::statvfs(directory).ok()?;
    let free = disk.f_bavail.checked_mul(disk.f_frsize)?;
    let of_a_file = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
    Some(of_a_file.map_or(free, |limit| limit.min(free)))
}

#[cfg(not(unix))]
pub(crate) fn available(_: &Path) -> Option<u64> {
    None
}

/// Bytes for which there is room in [`directory`].
pub(crate) fn room() -> Option<u64> {
    available(&directory())
}

/// The directory of files that end with the process. On many systems, `/tmp` is memory and `/var/tmp` is not.
pub(crate) fn directory() -> PathBuf {
    let on_disk = PathBuf::from("/var/tmp");
    match std::env::var_os("TMPDIR") {
        None if on_disk.is_dir() => on_disk,
        _ => std::env::temp_dir(),
    }
}

#[cfg(unix)]
pub(crate) fn read_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, bytes, offset)
}

#[cfg(unix)]
pub(crate) fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
}

#[cfg(windows)]
pub(crate) fn read_at(file: &File, mut bytes: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, bytes, offset)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => (bytes, offset) = (&mut bytes[read..], offset + read as u64),
        }
    }
    Ok(())
}

#[cfg(windows)]
pub(crate) fn write_at(file: &File, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        let written = std::os::windows::fs::FileExt::seek_write(file, bytes, offset)?;
        (bytes, offset) = (&bytes[written..], offset + written as u64);
    }
    Ok(())
}

/// Bytes of the tensors that are written and read to measure the disk, and their number.
const PROBE_BYTES: usize = 1 << 20;
const PROBES: usize = 24;

/// Bytes/s at which tensors are written to a file in [`directory`] and read back; `None` if they cannot be. The system
/// holds recent files in memory, as it does for a run that leaves it room.
pub(crate) fn rate() -> Option<f64> {
    let file = tempfile::tempfile_in(directory()).ok()?;
    let probe = |place: usize| {
        let (bytes, offset) = (vec![1; PROBE_BYTES], (place * PROBE_BYTES) as u64);
        let started = Instant::now();
        write_at(&file, &bytes, offset).ok()?;
        let mut read = vec![0; PROBE_BYTES];
        read_at(&file, &mut read, offset).ok()?;
        Some(started.elapsed().as_secs_f64())
    };
    // A run writes to the same places in every step.
    (0..PROBES).try_for_each(|place| probe(place).map(|_| ()))?;
    let mut seconds = (0..PROBES).map(probe).collect::<Option<Vec<f64>>>()?;
    seconds.sort_by(f64::total_cmp);
    Some(2.0 * PROBE_BYTES as f64 / seconds[PROBES / 2].max(1e-7))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(unix)]
    fn the_system_tells_what_is_free() {
        let directory = tempfile::tempdir().unwrap();
        assert!(available(directory.path()).is_some_and(|b| b > 4096));
        assert_eq!(available(&directory.path().join("missing")), None);
    }
}
