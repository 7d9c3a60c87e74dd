//! The disk of this machine.

use std::path::Path;

/// Bytes that this user may still write on the disk with this directory; `None` where the system does not say.
#[cfg(unix)]
pub(crate) fn available(directory: &Path) -> Option<u64> {
    let disk = rustix::fs::statvfs(directory).ok()?;
    disk.f_bavail.checked_mul(disk.f_frsize)
}

#[cfg(not(unix))]
pub(crate) fn available(_: &Path) -> Option<u64> {
    None
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
