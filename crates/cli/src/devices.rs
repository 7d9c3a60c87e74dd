//! The devices that this machine could compute with, and those that it computes with by default.

use fusionllm_backend::worker::{FoundWorker, find};
use fusionllm_backend::{names, open, worker_name};
use serde::Serialize;

use crate::failure::Failure;
use crate::output::{print, print_json, tell};
use crate::table::Table;
use crate::units::bytes;

/// A framework on one of this machine's devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Candidate {
    /// The device's name for [`open`].
    #[serde(skip)]
    pub(crate) name: String,
    framework: String,
    /// The maker's name.
    device: String,
    /// Bytes of its memory, where known.
    memory: Option<u64>,
    /// Whether it is better than the processor for sure. The program's own backends for graphics adapters start each
    /// operator alone, and an adapter may be software, so they are not.
    better: bool,
    /// The option with which a command uses it.
    option: String,
}

impl Candidate {
    fn built_in(name: &str) -> Option<Self> {
        let device = open(name).ok()?.device();
        Some(Self {
            name: name.to_owned(),
            framework: name.to_owned(),
            better: false,
            device: device.name,
            memory: device.memory_bytes,
            option: format!("--backend {name}"),
        })
    }

    /// Frameworks know less of the processor than this program.
    fn worker(found: FoundWorker, processor: &str) -> Self {
        let FoundWorker { name, version, device, memory_bytes, accelerator, command } = found;
        Self {
            framework: format!("{name} {version}"),
            device: if accelerator { device } else { processor.to_owned() },
            memory: memory_bytes,
            better: accelerator,
            option: format!("--worker \"{command}\""),
            name: worker_name(&command),
        }
    }
}

/// The backends of this program and the workers that were found, on every device.
pub(crate) fn all() -> Vec<Candidate> {
    tell("looking for devices and frameworks");
    let mut all: Vec<Candidate> = names().iter().filter_map(|name| Candidate::built_in(name)).collect();
    let processor = all.first().map(|c| c.device.clone()).unwrap_or_default();
    all.extend(find().into_iter().map(|found| Candidate::worker(found, &processor)));
    all
}

/// The accelerators of the first framework that has any, or else the first device of all.
fn best(all: &[Candidate]) -> Vec<&Candidate> {
    match all.iter().find(|candidate| candidate.better) {
        Some(first) => all.iter().filter(|c| c.better && c.framework == first.framework).collect(),
        None => all.iter().take(1).collect(),
    }
}

/// The names of what this machine should compute with: one for each of its accelerators, or one for its processor.
pub(crate) fn choose() -> Vec<String> {
    best(&all()).into_iter().map(|candidate| candidate.name.clone()).collect()
}

/// Prints all, those that [`choose`] takes with a mark.
pub(crate) fn list(json: bool) -> Result<(), Failure> {
    let all = all();
    let chosen = best(&all);
    if json {
        return print_json(&serde_json::json!({ "candidates": all, "best": chosen }));
    }
    let mut table = Table::new(["", "FRAMEWORK", "DEVICE", "MEMORY"], [3]);
    for candidate in &all {
        let Candidate { framework, device, memory, .. } = candidate;
        table.row([
            if chosen.contains(&candidate) { "*" } else { "" }.to_owned(),
            framework.clone(),
            device.clone(),
            memory.map(bytes).unwrap_or_default(),
        ]);
    }
    // An option is there to be copied, so it is not shortened.
    let options = all.iter().map(|candidate| format!("     {}\n", candidate.option));
    let table = table.to_string();
    let rows = table.lines().map(|row| format!("{row}\n")).zip(std::iter::once(String::new()).chain(options));
    let rows: String = rows.map(|(row, option)| row + &option).collect();
    print(&format!("{rows}\n* is what `fusionllm join` takes without an option\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_accelerators_of_one_framework_are_the_best() {
        let candidate = |framework: &str, device: &str, better| Candidate {
            name: String::new(),
            framework: framework.into(),
            device: device.into(),
            memory: None,
            better,
            option: String::new(),
        };
        let all = [
            candidate("cpu", "Xeon", false),
            candidate("torch 2.11", "H100", true),
            candidate("torch 2.11", "A100", true),
            candidate("torch 2.11", "Xeon", false),
            candidate("jax 0.10", "H100", true),
        ];
        assert_eq!(best(&all), [&all[1], &all[2]]);
        assert_eq!(best(&all[..1]), [&all[0]]);
        assert_eq!(best(&[]), [] as [&Candidate; 0]);
    }
}
