//! The workers that this machine could run: the frameworks of its Python, with their devices.

use std::env;
use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::process::SAFE_PATH;

/// The time in which a Python has to answer. It imports every framework.
const PATIENCE: Duration = Duration::from_secs(60);
/// The longest answer that is read.
const MAX_ANSWER: u64 = 1 << 20;
/// The environment variable that names the Python to ask.
const PYTHON: &str = "FUSIONLLM_PYTHON";

/// Runs the module `fusionllm_worker` as `-m` would. But a Python older than 3.11, which does not know [`SAFE_PATH`],
/// ends before it imports anything: `sys` is a part of it, and no file.
const LIST: &str = "import sys
sys.version_info < (3, 11) and sys.exit()
import runpy
runpy.run_module('fusionllm_worker', run_name='__main__')";

/// A worker that this machine could run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FoundWorker {
    /// The framework, such as `torch`.
    pub name: String,
    /// The framework's version.
    pub version: String,
    /// The maker's name of the device.
    pub device: String,
    /// The device's memory in bytes, where known.
    pub memory_bytes: Option<u64>,
    /// Whether the device is something else than the processor.
    pub accelerator: bool,
    /// The command line that starts it.
    pub command: String,
}

/// The list that a Python prints.
#[derive(Deserialize)]
struct Listing {
    workers: Vec<Listed>,
}

#[derive(Deserialize)]
struct Listed {
    name: String,
    version: String,
    device: String,
    memory_bytes: Option<u64>,
    accelerator: bool,
    arguments: Vec<String>,
}

/// Asks Python for workers, those to prefer first. It takes a few seconds where large frameworks are installed. The
/// list is empty where no Python of version 3.11 or newer has the module `fusionllm_worker`.
///
/// The Python is `FUSIONLLM_PYTHON`, or else the first one with workers: that in the directory of this program, as in a
/// virtual environment, or that on the `PATH`.
pub fn find() -> Vec<FoundWorker> {
    let pythons = match env::var(PYTHON) {
        Ok(python) => vec![python],
        Err(_) => {
            let beside = env::current_exe().ok().and_then(|program| program.parent().map(PathBuf::from));
            let beside = beside.map(|directory| directory.join("python")).filter(|python| python.is_file());
            let beside = beside.and_then(|python| python.into_os_string().into_string().ok());
            beside.into_iter().chain(["python3", "python"].map(str::to_owned)).collect()
        }
    };
    pythons.iter().find_map(|python| ask(python)).unwrap_or_default()
}

/// The workers of a Python; `None` if it cannot tell.
fn ask(python: &str) -> Option<Vec<FoundWorker>> {
    let mut child = Command::new(python)
        .args(["-c", LIST])
        .env(SAFE_PATH.0, SAFE_PATH.1)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let stdout = child.stdout.take()?;
    let (sender, answer) = mpsc::channel();
    thread::spawn(move || {
        let mut text = String::new();
        let read = stdout.take(MAX_ANSWER).read_to_string(&mut text);
        let _ = sender.send(read.map(|_| text));
    });
    let answer = answer.recv_timeout(PATIENCE);
    // The process has written its whole answer, or it took too long.
    let _ = child.kill();
    let _ = child.wait();
    parse(python, &answer.ok()?.ok()?)
}

fn parse(python: &str, text: &str) -> Option<Vec<FoundWorker>> {
    let listing: Listing = serde_json::from_str(text).ok()?;
    let found = |worker: Listed| {
        let Listed { name, version, device, memory_bytes, accelerator, arguments } = worker;
        let words = [python].into_iter().chain(arguments.iter().map(String::as_str));
        let command = shlex::try_join(words).ok()?;
        Some(FoundWorker { name, version, device, memory_bytes, accelerator, command })
    };
    Some(listing.workers.into_iter().filter_map(found).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listing_becomes_command_lines() {
        let text = r#"{"workers": [{"name": "torch", "version": "2.11", "device": "H100", "memory_bytes": 85899345920,
            "accelerator": true, "arguments": ["-m", "fusionllm_torch", "--device", "cuda:0"], "arguments2": 1}]}"#;
        let [found] = &parse("/my env/python", text).unwrap()[..] else { panic!("one worker") };
        assert_eq!(found.command, "'/my env/python' -m fusionllm_torch --device cuda:0");
        assert!(found.accelerator && found.memory_bytes == Some(80 << 30));
        assert_eq!(parse("python", "Traceback"), None);
        assert_eq!(parse("python", r#"{"workers": []}"#), Some(Vec::new()));
    }

    #[test]
    fn a_python_that_is_none_has_no_workers() {
        assert_eq!(ask("/nowhere/python"), None);
        assert_eq!(ask("false"), None);
        assert_eq!(ask("echo"), None);
    }
}
