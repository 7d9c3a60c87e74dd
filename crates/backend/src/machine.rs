//! What machine this is.

use std::fs;

use crate::Device;

/// This machine's processor, with the threads that kernels share.
pub(crate) fn processor() -> Device {
    let field = |file: &str, key: &str| -> Option<String> {
        let text = fs::read_to_string(file).ok()?;
        let line = text.lines().find(|l| l.starts_with(key))?;
        Some(line.split_once(':')?.1.trim().to_string())
    };
    let memory = field("/proc/meminfo", "MemTotal").and_then(|s| s.trim_end_matches(" kB").parse::<u64>().ok());
    Device {
        name: field("/proc/cpuinfo", "model name").unwrap_or_else(|| std::env::consts::ARCH.into()),
        threads: Some(rayon::current_num_threads()),
        memory_bytes: memory.map(|k| k * 1024),
    }
}
