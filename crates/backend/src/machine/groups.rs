//! The control groups of Linux that this process is in, with their limits on memory.
//!
//! The kernel kills a process if one of its groups, or a group around that, goes over its limit. Containers, systemd,
//! Slurm and Kubernetes set such limits, and `/proc/meminfo` knows nothing of them. There are two versions, and a
//! machine may have both. The files are those of the kernel's documents `cgroup-v1/memory` and `cgroup-v2`.

use std::fs;
use std::path::{Path, PathBuf};

/// A group with a limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Group {
    /// The name that the kernel gives it.
    pub(super) name: String,
    /// The bytes that its processes may have together.
    pub(super) allowed: u64,
    /// The bytes that they have, without files' contents that the kernel can drop.
    pub(super) used: u64,
}

/// One of the two versions, by its mounts and the names of its files.
struct Version {
    /// The kind of its file system, and the option that the mount of its memory has.
    mount: (&'static str, Option<&'static str>),
    limits: &'static [&'static str],
    used: &'static str,
    /// Contents of files in `memory.stat`, of the group and those inside it.
    droppable: [&'static str; 2],
    /// The file that counts the processes that the kernel has killed.
    killed: &'static str,
}

const V1: Version = Version {
    mount: ("cgroup", Some("memory")),
    limits: &["memory.limit_in_bytes"],
    used: "memory.usage_in_bytes",
    droppable: ["total_inactive_file", "total_active_file"],
    killed: "memory.oom_control",
};

/// Above `memory.high`, the kernel slows a group's processes down until they hardly move.
const V2: Version = Version {
    mount: ("cgroup2", None),
    limits: &["memory.max", "memory.high"],
    used: "memory.current",
    droppable: ["inactive_file", "active_file"],
    killed: "memory.events",
};

/// The groups of this process that have a limit. `root` is the root of the file system.
pub(super) fn limited(root: &Path) -> Vec<Group> {
    directories(root).iter().filter_map(|(version, directory, name)| group(version, directory, name)).collect()
}

/// How many processes of these groups the kernel has killed because memory ran out.
pub(super) fn killed(root: &Path) -> u64 {
    directories(root)
        .iter()
        .filter_map(|(version, directory, _)| entry(&directory.join(version.killed), "oom_kill"))
        .sum()
}

fn group(version: &Version, directory: &Path, name: &str) -> Option<Group> {
    // A group without limit says "max" in version 2, and in version 1 more than any machine has.
    let limits = version.limits.iter().filter_map(|file| number(&directory.join(file)));
    let allowed = limits.min()?;
    let stat = directory.join("memory.stat");
    let droppable: u64 = version.droppable.iter().filter_map(|key| entry(&stat, key)).sum();
    let used = number(&directory.join(version.used))?.saturating_sub(droppable);
    Some(Group { name: name.to_owned(), allowed, used })
}

/// The directory of each group that this process is in, from the inside outwards, with the group's name.
fn directories(root: &Path) -> Vec<(&'static Version, PathBuf, String)> {
    let read = |file: &str| fs::read_to_string(root.join(file)).unwrap_or_default();
    let (own, mounts) = (read("proc/self/cgroup"), read("proc/self/mountinfo"));
    let mut directories = Vec::new();
    for line in own.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(number), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let version = match controllers {
            "" if number == "0" => &V2,
            list if list.split(',').any(|c| c == "memory") => &V1,
            _ => continue,
        };
        let Some((top, mount)) = mounts.lines().find_map(|line| mounted(line, version)) else { continue };
        let mount = root.join(mount.trim_start_matches('/'));
        // A container may see its own group as the mount, and itself by the name that the host gave it.
        let inside = Path::new(path).strip_prefix(&top).map(|inside| mount.join(inside));
        let innermost = inside.ok().filter(|directory| directory.is_dir()).unwrap_or_else(|| mount.clone());
        for directory in innermost.ancestors() {
            let Ok(name) = directory.strip_prefix(&mount) else { break };
            directories.push((version, directory.to_owned(), format!("/{}", name.display())));
        }
    }
    directories
}

/// The group at the top of a mount, and where it is mounted, if a line of `mountinfo` is about groups of this version.
fn mounted(line: &str, version: &Version) -> Option<(String, String)> {
    let (mount, system) = line.split_once(" - ")?;
    let mut system = system.split(' ');
    let (kind, _, options) = (system.next()?, system.next()?, system.next()?);
    let (its_kind, option) = version.mount;
    if kind != its_kind || option.is_some_and(|option| !options.split(',').any(|o| o == option)) {
        return None;
    }
    let mut fields = mount.split(' ').skip(3);
    Some((unescaped(fields.next()?), unescaped(fields.next()?)))
}

/// A path of `mountinfo`, which writes spaces and the like in octal digits.
fn unescaped(path: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(path.to_owned(), |path, (code, character)| path.replace(code, character))
}

fn number(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// The number after a key, in a file with one key per line.
fn entry(file: &Path, key: &str) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file system with these files.
    fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    fn found(files: &[(&str, &str)]) -> Vec<(String, u64, u64)> {
        limited(root(files).path()).into_iter().map(|g| (g.name, g.allowed, g.used)).collect()
    }

    #[test]
    fn every_group_around_a_process_counts() {
        let groups = found(&[
            ("proc/self/cgroup", "0::/user.slice/run-1.scope\n"),
            (
                "proc/self/mountinfo",
                "31 23 0:28 / /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n",
            ),
            ("sys/fs/cgroup/user.slice/memory.max", "8000000\n"),
            ("sys/fs/cgroup/user.slice/memory.high", "6000000\n"),
            ("sys/fs/cgroup/user.slice/memory.current", "5000000\n"),
            ("sys/fs/cgroup/user.slice/memory.stat", "anon 1\ninactive_file 300000\nactive_file 700000\n"),
            ("sys/fs/cgroup/user.slice/run-1.scope/memory.max", "max\n"),
            ("sys/fs/cgroup/user.slice/run-1.scope/memory.high", "max\n"),
            ("sys/fs/cgroup/user.slice/run-1.scope/memory.current", "4000000\n"),
        ]);
        assert_eq!(groups, [("/user.slice".to_owned(), 6_000_000, 4_000_000)]);
    }

    #[test]
    fn version_1_has_the_memory_in_a_tree_of_its_own() {
        let files = [
            ("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/slurm/job_7\n0::/\n"),
            (
                "proc/self/mountinfo",
                "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,cpu,memory\n\
                 41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n",
            ),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1\n"),
            ("sys/fs/cgroup/memory/slurm/job_7/memory.limit_in_bytes", "400000000\n"),
            ("sys/fs/cgroup/memory/slurm/job_7/memory.usage_in_bytes", "90000000\n"),
            ("sys/fs/cgroup/memory/slurm/job_7/memory.stat", "inactive_file 1\ntotal_inactive_file 40000000\n"),
            ("sys/fs/cgroup/memory/slurm/job_7/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
        ];
        let groups = found(&files);
        assert_eq!(groups[0], ("/slurm/job_7".to_owned(), 400_000_000, 50_000_000));
        assert_eq!(groups[1], ("/".to_owned(), 9_223_372_036_854_771_712, 1));
        assert_eq!(killed(root(&files).path()), 2);
    }

    /// In a container, the mount is the container's group. `/proc/self/cgroup` names it as the host does, or, in a
    /// namespace of its own, as `/`.
    #[test]
    fn a_container_sees_its_own_group() {
        for (own, top) in
            [("/docker/ab\\040c", "/docker/ab\\040c"), ("/", "/"), ("/../elsewhere", "/"), ("/", "/../..")]
        {
            let cgroup = format!("0::{}\n", unescaped(own));
            let mount = format!("31 23 0:28 {top} /sys/fs/cgroup ro - cgroup2 cgroup rw\n");
            let groups = found(&[
                ("proc/self/cgroup", &cgroup),
                ("proc/self/mountinfo", &mount),
                ("sys/fs/cgroup/memory.max", "1000\n"),
                ("sys/fs/cgroup/memory.current", "300\n"),
            ]);
            assert_eq!(groups, [("/".to_owned(), 1000, 300)], "{own} under {top}");
        }
    }

    #[test]
    fn a_system_without_groups_limits_nothing() {
        assert_eq!(found(&[]), []);
        assert_eq!(found(&[("proc/self/cgroup", "4:memory:/a\nnonsense\n")]), []);
    }
}
