//! The memory that the system gives to this process: what the machine has, and what the control groups and resource
//! limits of this process allow.

use std::fmt;
use std::path::Path;

use fusionllm_graph::units::bytes;

use super::groups;

/// The root of the file system, which tests replace.
const ROOT: &str = "/";

/// A limit on memory that is lower than the machine's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Limit {
    /// The processes of this control group may have so many bytes together.
    Group(String, u64),
    /// The process may have so many bytes, by the resource limit of this name.
    Resource(&'static str, u64),
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Group(name, allowed) => write!(f, "the limit of control group {name}, {}", bytes(*allowed)),
            Self::Resource(name, allowed) => write!(f, "the resource limit {name}, {}", bytes(*allowed)),
        }
    }
}

/// Bytes that this process may come to have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Room {
    /// The bytes.
    pub bytes: u64,
    /// The limit that decides, unless it is the machine's memory.
    pub limit: Option<Limit>,
}

/// The memory that this process could still get now; `None` where the system does not say.
pub fn room() -> Option<Room> {
    let groups = groups::limited(Path::new(ROOT)).into_iter();
    let groups = groups.map(|g| (g.allowed.saturating_sub(g.used), Limit::Group(g.name, g.allowed)));
    let resources = resources().into_iter();
    let resources =
        resources.map(|(name, allowed, used)| (allowed.saturating_sub(used), Limit::Resource(name, allowed)));
    least(machine().map(|m| m.available), groups.chain(resources))
}

/// The memory that this process could have if no other one needed any; `None` where the system does not say.
pub fn total() -> Option<u64> {
    let groups = groups::limited(Path::new(ROOT)).into_iter().map(|g| (g.allowed, Limit::Group(g.name, g.allowed)));
    let resources = resources().into_iter().map(|(name, allowed, _)| (allowed, Limit::Resource(name, allowed)));
    least(machine().map(|m| m.total), groups.chain(resources)).map(|room| room.bytes)
}

/// The least of what the machine has and what each limit allows.
fn least(machine: Option<u64>, limits: impl Iterator<Item = (u64, Limit)>) -> Option<Room> {
    let machine = machine.map(|bytes| Room { bytes, limit: None });
    machine
        .into_iter()
        .chain(limits.map(|(bytes, limit)| Room { bytes, limit: Some(limit) }))
        .min_by_key(|room| room.bytes)
}

/// The bytes that the system keeps in memory for this process, without files' contents; 0 where it does not say.
pub fn resident() -> u64 {
    figure("/proc/self/status", "RssAnon:").unwrap_or(0)
}

/// The most bytes that the system ever kept in memory for this process; 0 where it does not say.
pub fn resident_peak() -> u64 {
    figure("/proc/self/status", "VmHWM:").unwrap_or(0)
}

/// How many processes the system had killed for memory at some time. Compared with later, it tells what ended a child.
#[derive(Debug, Clone, Copy)]
pub struct MemoryKills(u64);

impl MemoryKills {
    /// Counts from now on.
    pub fn start() -> Self {
        Self(Self::total())
    }

    /// Says that a process ended for want of memory, if the system has killed any for that since the start, or if the
    /// process itself got none. `status` is how it ended, and `last_words` the last line of its standard error.
    pub fn verdict(&self, status: std::process::ExitStatus, last_words: &str) -> Option<String> {
        let how = if by_kill(status) && Self::total() != self.0 {
            "the system killed it because memory ran out"
        // What Rust's standard library says before it aborts.
        } else if last_words.starts_with("memory allocation of ") {
            "the system gave it no more memory"
        } else {
            return None;
        };
        let limit = room().and_then(|room| room.limit).map_or_else(String::new, |limit| format!(" ({limit})"));
        Some(format!(
            "{how}{limit}; raise the limit, or use less: a smaller train.micro_batch, fewer peers on one machine, or \
             `join --memory`"
        ))
    }

    fn total() -> u64 {
        let vmstat = std::fs::read_to_string("/proc/vmstat").unwrap_or_default();
        let machine = vmstat.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse::<u64>().ok());
        machine.unwrap_or(0).saturating_add(groups::killed(Path::new(ROOT)))
    }
}

#[cfg(unix)]
fn by_kill(status: std::process::ExitStatus) -> bool {
    const SIGKILL: i32 = 9;
    // A shell between the two says it as 128 and the signal's number.
    std::os::unix::process::ExitStatusExt::signal(&status) == Some(SIGKILL) || status.code() == Some(128 + SIGKILL)
}

#[cfg(not(unix))]
fn by_kill(_: std::process::ExitStatus) -> bool {
    false
}

/// The machine's memory, in bytes.
struct Machine {
    total: u64,
    available: u64,
}

#[cfg(target_os = "linux")]
fn machine() -> Option<Machine> {
    let of = |name| figure("/proc/meminfo", name);
    Some(Machine { total: of("MemTotal:")?, available: of("MemAvailable:")? })
}

#[cfg(not(target_os = "linux"))]
fn machine() -> Option<Machine> {
    let ram = sysinfo::MemoryRefreshKind::nothing().with_ram();
    let system = sysinfo::System::new_with_specifics(sysinfo::RefreshKind::nothing().with_memory(ram));
    let known = system.total_memory() > 0;
    known.then(|| Machine { total: system.total_memory(), available: system.available_memory() })
}

/// The resource limits on memory: their names, the bytes that they allow, and those that this process has of them.
#[cfg(unix)]
fn resources() -> Vec<(&'static str, u64, u64)> {
    use rustix::process::{Resource, getrlimit};
    let limits = [("RLIMIT_AS", Resource::As, "VmSize:"), ("RLIMIT_DATA", Resource::Data, "VmData:")];
    let known = limits.into_iter().filter_map(|(name, resource, used)| {
        Some((name, getrlimit(resource).current?, figure("/proc/self/status", used).unwrap_or(0)))
    });
    known.collect()
}

#[cfg(not(unix))]
fn resources() -> Vec<(&'static str, u64, u64)> {
    Vec::new()
}

/// A figure of one of Linux's tables, in bytes. Other systems have no such files.
fn figure(table: &str, name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(table).ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix(name))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_limit_decides_and_is_named() {
        let group = || (300, Limit::Group("/job".into(), 1000));
        let resource = || (200, Limit::Resource("RLIMIT_AS", 5000));
        assert_eq!(least(Some(100), [group()].into_iter()), Some(Room { bytes: 100, limit: None }));
        let room = least(Some(400), [group(), resource()].into_iter()).unwrap();
        assert_eq!(
            (room.bytes, room.limit.unwrap().to_string()),
            (200, "the resource limit RLIMIT_AS, 4.88 KiB".into())
        );
        assert_eq!(least(None, [group()].into_iter()).map(|room| room.bytes), Some(300));
        assert_eq!(least(None, [].into_iter()), None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_system_tells_what_is_there() {
        let held = std::hint::black_box(vec![1u8; 32 << 20]);
        assert!(resident_peak() > held.len() as u64);
        assert!(room().is_some_and(|room| room.bytes > 1 << 20) && total() >= room().map(|room| room.bytes));
    }
}
