//! This machine: its processor, and the memory that the system gives to this process.

mod groups;
pub mod memory;

use std::fs;

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
