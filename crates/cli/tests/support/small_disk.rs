//! A disk that a test can fill. Mounting it takes Linux and root.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use crate::requirements::Missing;

/// A small file system in memory. Dropping it unmounts it.
pub(crate) struct SmallDisk(TempDir);

impl SmallDisk {
    pub(crate) fn mount(mebibytes: u32) -> Result<Self, Missing> {
        let dir = tempfile::tempdir().unwrap();
        let size = format!("size={mebibytes}m");
        let mount = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(dir.path()).output();
        match mount.is_ok_and(|out| out.status.success()) {
            true => Ok(Self(dir)),
            false => Err(Missing { requirement: "root", reason: "mounting a small disk takes Linux and root".into() }),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    /// Leaves not one free byte.
    pub(crate) fn fill(&self) {
        let mut file = fs::File::create(self.0.path().join("filler")).unwrap();
        let mut size = 1 << 20;
        while size > 0 {
            if file.write_all(&vec![0; size]).is_err() {
                size /= 2;
            }
        }
    }

    /// Frees what [`Self::fill`] took.
    pub(crate) fn empty(&self) {
        fs::remove_file(self.0.path().join("filler")).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).output();
    }
}
