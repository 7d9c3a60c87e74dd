//! The disk of this machine.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use fusionllm_plan::Disk;

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

/// So many bytes of a file. They are read into memory that is not set to zero first, which would take half as long as
/// reading them from the system's cache.
#[cfg(unix)]
pub(crate) fn read_at(file: &File, length: usize, offset: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(length.max(1));
    while bytes.len() < length {
        let at = offset + bytes.len() as u64;
        match rustix::io::pread(file, rustix::buffer::spare_capacity(&mut bytes), at) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    // The allocator may have given more than was asked for.
    bytes.truncate(length);
    Ok(bytes)
}

#[cfg(unix)]
pub(crate) fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
}

#[cfg(windows)]
pub(crate) fn read_at(file: &File, length: usize, offset: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    let mut at = 0;
    while at < length {
        match std::os::windows::fs::FileExt::seek_read(file, &mut bytes[at..], offset + at as u64)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => at += read,
        }
    }
    Ok(bytes)
}

#[cfg(windows)]
pub(crate) fn write_at(file: &File, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        let written = std::os::windows::fs::FileExt::seek_write(file, bytes, offset)?;
        (bytes, offset) = (&bytes[written..], offset + written as u64);
    }
    Ok(())
}

/// Bytes of the tensors that are written and read to measure the disk, and their number. A processor's caches have no
/// room for them, as they have none for what a run moves: with 1 MiB, a disk seemed twice as fast.
const PROBE_BYTES: usize = 4 << 20;
const PROBES: usize = 12;

/// The rates at which tensors are written to a file in [`directory`] and read back; `None` if they cannot be. The system
/// holds recent files in memory, as it does for a run that leaves it room.
pub(crate) fn rates() -> Option<Disk> {
    let file = tempfile::tempfile_in(directory()).ok()?;
    let places = || (0..PROBES).map(|place| (place * PROBE_BYTES) as u64);
    let rate = |probe: &dyn Fn(u64) -> io::Result<f64>| {
        let mut seconds = places().map(probe).collect::<io::Result<Vec<_>>>().ok()?;
        seconds.sort_by(f64::total_cmp);
        Some(PROBE_BYTES as f64 / seconds[PROBES / 2].max(1e-7))
    };
    let writing = |place| {
        let bytes = vec![1; PROBE_BYTES];
        let started = Instant::now();
        write_at(&file, &bytes, place)?;
        Ok(started.elapsed().as_secs_f64())
    };
    let reading = |place| {
        let started = Instant::now();
        read_at(&file, PROBE_BYTES, place)?;
        Ok(started.elapsed().as_secs_f64())
    };
    // A run writes to the same places in every step, and reads none of them soon after.
    rate(&writing)?;
    Some(Disk { write: rate(&writing)?, read: rate(&reading)? })
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

    #[test]
    fn what_was_written_is_read_back() {
        let file = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = (0..100_000u32).map(|i| i as u8).collect();
        write_at(&file, &bytes, 77).unwrap();
        assert_eq!(read_at(&file, 99_000, 1_077).unwrap(), bytes[1_000..]);
        assert!(read_at(&file, 0, 5).unwrap().is_empty());
        assert_eq!(read_at(&file, 9, 100_070).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
