use std::fs;

use crate::DeviceInfo;

/// This machine's processor, and the number of threads that kernels share.
pub(crate) fn processor() -> DeviceInfo {
    let field = |file: &str, key: &str| -> Option<String> {
        let text = fs::read_to_string(file).ok()?;
        let line = text.lines().find(|l| l.starts_with(key))?;
        Some(line.split_once(':')?.1.trim().to_string())
    };
    let memory = field("/proc/meminfo", "MemTotal").and_then(|s| s.trim_end_matches(" kB").parse::<u64>().ok());
    DeviceInfo {
        name: field("/proc/cpuinfo", "model name").unwrap_or_else(|| std::env::consts::ARCH.into()),
        threads: Some(rayon::current_num_threads()),
        memory_bytes: memory.map(|k| k * 1024),
    }
}
