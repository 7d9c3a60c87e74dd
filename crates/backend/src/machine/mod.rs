//! This machine: its processor, and the memory that the system gives to this process.

mod groups;
pub mod memory;

use std::fs;
use std::path::Path;
use std::thread::available_parallelism;

use crate::DeviceInfo;

/// This machine's processor, and the number of threads that kernels share.
pub(crate) fn processor() -> DeviceInfo {
    let field = |file: &str, key: &str| -> Option<String> {
        let text = fs::read_to_string(file).ok()?;
        let line = text.lines().find(|l| l.starts_with(key))?;
        Some(line.split_once(':')?.1.trim().to_string())
    };
    DeviceInfo {
        name: field("/proc/cpuinfo", "model name").unwrap_or_else(|| std::env::consts::ARCH.into()),
        threads: Some(rayon::current_num_threads()),
        memory_bytes: memory::total(),
    }
}

/// The cores that this process may compute on, and what tells them from the cores of other machines and containers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cores {
    /// Processes with the same text compute on the same cores. It is different after the next start of the machine.
    pub identity: String,
    /// How many they are.
    pub count: usize,
}

/// The cores of this process; `None` where the system does not say which they are, as on any other than Linux.
pub fn cores() -> Option<Cores> {
    let count = available_parallelism().ok()?.get();
    Some(Cores { identity: identity(Path::new("/"), count)?, count })
}

/// The start of the machine and the cores that the process may use. A control group may allow it fewer, which are then
/// its own.
fn identity(root: &Path, count: usize) -> Option<String> {
    let read = |file: &str| fs::read_to_string(root.join(file)).ok();
    let boot = read("proc/sys/kernel/random/boot_id")?;
    let status = read("proc/self/status")?;
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed:"))?.trim();
    let cores: u32 = allowed.chars().filter_map(|digit| digit.to_digit(16)).map(u32::count_ones).sum();
    let group = if count < cores as usize { read("proc/self/cgroup")? } else { String::new() };
    Some([boot.trim(), allowed, group.trim()].join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_of_a_machine_have_the_same_cores_unless_they_are_kept_apart() {
        let root = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("proc/sys/kernel/random/boot_id", "ac30\n");
        write("proc/self/status", "Name:\ta\nCpus_allowed:\tf,0000000f\nCpus_allowed_list:\t0-3,32-35\n");
        write("proc/self/cgroup", "0::/a\n");
        let whole = identity(root.path(), 8);
        assert_eq!(whole.as_deref(), Some("ac30\nf,0000000f\n"));
        let limited = identity(root.path(), 2);
        write("proc/self/cgroup", "0::/b\n");
        assert_eq!(identity(root.path(), 8), whole);
        assert_ne!(identity(root.path(), 2), limited, "two containers, each with a quota of two cores");
        write("proc/self/status", "Cpus_allowed:\tf0\n");
        assert_ne!(identity(root.path(), 4), whole);
        fs::remove_file(root.path().join("proc/sys/kernel/random/boot_id")).unwrap();
        assert_eq!(identity(root.path(), 8), None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_process_knows_its_cores() {
        assert!(cores().is_some_and(|cores| cores.count >= 1 && cores.identity.len() > 36));
    }
}
