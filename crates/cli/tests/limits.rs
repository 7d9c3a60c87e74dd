//! Limits of a container: `doctor` names them, and a worker that the system kills is named so. Making a control group
//! takes root.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test that cannot go on fails")]

#[path = "support/requirements.rs"]
mod requirements;

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use requirements::Missing;
use serde_json::Value;

requirements::main!(a_group_bounds_what_a_machine_has, a_worker_that_is_killed_for_memory_is_named_so);

/// A control group with a limit on memory, of the version that this machine has.
struct Group(PathBuf);

impl Group {
    fn with_limit(name: &str, bytes: u64) -> Result<Self, Missing> {
        let missing = |reason: &str| Missing { requirement: "cgroup", reason: reason.to_owned() };
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let of_memory =
            own.lines().any(|line| line.split(':').nth(1).is_some_and(|c| c.split(',').any(|c| c == "memory")));
        let (tree, limit) = match of_memory {
            true => ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            false => ("/sys/fs/cgroup", "memory.max"),
        };
        let group = Self(PathBuf::from(tree).join(format!("fusionllm-{name}-{}", std::process::id())));
        fs::create_dir(&group.0).map_err(|_| missing("making a control group takes Linux and root"))?;
        let limited = fs::write(group.0.join(limit), bytes.to_string());
        limited.map_err(|_| missing("this machine's control groups do not limit memory"))?;
        Ok(group)
    }

    /// Runs a command in the group.
    fn run(&self, directory: &std::path::Path, args: &[&str]) -> Output {
        let mut command = Command::new("sh");
        command.args(["-c", "echo $$ > \"$0/cgroup.procs\" && exec \"$@\""]).arg(&self.0);
        command.arg(env!("CARGO_BIN_EXE_fusionllm")).args(args).current_dir(directory).output().unwrap()
    }

    fn name(&self) -> String {
        format!("/{}", self.0.file_name().unwrap().to_str().unwrap())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

fn a_group_bounds_what_a_machine_has() -> Result<(), Missing> {
    let directory = tempfile::tempdir().unwrap();
    let group = Group::with_limit("bounds", 600 << 20)?;
    let output = group.run(directory.path(), &["doctor", "--json"]);
    let findings: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!((1..600 << 20).contains(&findings["memory"].as_u64().unwrap()), "{findings}");
    let limit = format!("the limit of control group {}, 600 MiB", group.name());
    assert_eq!(findings["memory_limit"], limit);
    Ok(())
}

fn a_worker_that_is_killed_for_memory_is_named_so() -> Result<(), Missing> {
    let directory = tempfile::tempdir().unwrap();
    let group = Group::with_limit("kills", 50 << 20)?;
    // It keeps the one line that never ends.
    let hungry = format!("sh -c 'echo $$ > {}/cgroup.procs && exec tail /dev/zero'", group.0.display());
    let mut command = Command::new(env!("CARGO_BIN_EXE_fusionllm"));
    let output = command.args(["profile", "--worker", &hungry]).current_dir(directory.path()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(
        said.contains("it ended (the system killed it because memory ran out; raise the limit, or use less"),
        "{said}"
    );
    Ok(())
}
