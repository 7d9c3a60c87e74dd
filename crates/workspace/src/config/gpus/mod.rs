//! Common GPUs with their makers' figures.
//!
//! `gpus.toml` is the table, and `docs/gpus.md` is written from it. GPUs are found by the names that `nvidia-smi`,
//! `rocm-smi`, `rocminfo` and macOS print.

use std::sync::LazyLock;

use fusionllm_plan::{Device, HOST_LINK_RATE, Rates};
use serde::Deserialize;

/// A GPU of the table. `gpus.toml` describes the fields.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Gpu {
    pub(super) name: String,
    #[serde(default)]
    also: Vec<String>,
    tflops: f64,
    gb_per_s: f64,
    gib: Option<f64>,
}

/// The reason why a name leads to no GPU.
#[derive(Debug)]
pub(super) struct Unfound {
    pub(super) message: String,
    pub(super) hint: String,
}

/// The lead of a hint that names an example. [`EXAMPLE`] follows.
pub(super) const LEAD: &str = "docs/gpus.md has all GPUs, such as";
pub(super) const EXAMPLE: &str = "RTX 3080";

/// The fractions of the peaks that operators reach where nothing was measured. Large matrix products reach 0.7 to
/// 0.9, and the small ones of training less. Streaming kernels reach about 0.8 of the memory bandwidth.
pub(super) const PRODUCTS: f64 = 0.6;
const CONVOLUTIONS: f64 = 0.5;
const MEMORY: f64 = 0.8;

/// Seconds to launch a kernel in a framework's eager mode.
const OVERHEAD: f64 = 10e-6;

/// Words that tools print beside the name of a GPU.
const BESIDE: [&str; 13] = [
    "nvidia",
    "geforce",
    "tesla",
    "quadro",
    "amd",
    "radeon",
    "instinct",
    "intel",
    "apple",
    "graphics",
    "gpu",
    "generation",
    "series",
];

// A test parses the file, so the table is never empty.
static GPUS: LazyLock<Vec<Gpu>> = LazyLock::new(|| {
    #[derive(Default, Deserialize)]
    struct Table {
        group: Vec<Group>,
    }
    #[derive(Deserialize)]
    struct Group {
        gpus: Vec<Gpu>,
    }
    let table: Table = toml::from_str(include_str!("gpus.toml")).unwrap_or_default();
    table.group.into_iter().flat_map(|group| group.gpus).collect()
});

/// The GPU of this name.
///
/// # Errors
///
/// The name is that of no GPU, or it stands for several.
pub(super) fn find(written: &str) -> Result<&'static Gpu, Unfound> {
    let name = plain(written);
    if let Some(gpu) = GPUS.iter().find(|gpu| gpu.is_called(&name)) {
        return Ok(gpu);
    }
    let variants: Vec<&Gpu> = GPUS.iter().filter(|gpu| gpu.is_variant_of(&name)).collect();
    if variants.len() > 1 {
        let message = format!("\"{written}\" stands for several GPUs");
        return Err(Unfound { message, hint: format!("write gpu = {}", choices(&variants)) });
    }
    let near: Vec<&Gpu> = GPUS.iter().filter(|gpu| gpu.is_near(written)).collect();
    let known = match near.is_empty() {
        true => format!("{LEAD} \"{EXAMPLE}\""),
        false => format!("did you mean {}? docs/gpus.md has all GPUs", choices(&near)),
    };
    Err(Unfound {
        message: format!("no GPU \"{written}\" is in the table"),
        hint: format!("{known}; for another, give tflops, memory_bandwidth and memory instead"),
    })
}

impl Gpu {
    /// The memory in bytes, unless the GPU shares that of its machine.
    pub(super) fn memory(&self) -> Option<u64> {
        self.gib.map(|gib| (gib * (1u64 << 30) as f64) as u64)
    }

    /// A device that reaches `efficiency` of the peak in matrix products, and the other peaks in proportion.
    pub(super) fn device(&self, name: String, efficiency: f64, memory: u64) -> Device {
        let share = efficiency / PRODUCTS;
        let rates = Rates {
            matmul: efficiency * self.tflops * 1e12,
            convolution: (share * CONVOLUTIONS).min(1.0) * self.tflops * 1e12,
            memory: (share * MEMORY).min(1.0) * self.gb_per_s * 1e9,
            overhead: OVERHEAD,
        };
        // There is nothing to gain from a copy in the host's memory if it is the same memory.
        let host_link = self.gib.map(|_| HOST_LINK_RATE);
        Device { host_link, ..Device::new(name, rates, memory) }
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(&self.name).chain(&self.also).map(String::as_str)
    }

    /// Whether a plain name is one of this GPU's, or one of them with its memory behind.
    fn is_called(&self, written: &str) -> bool {
        let without_memory = self.gib.and_then(|gib| written.strip_suffix(&format!("{gib}gb")));
        self.names().map(plain).any(|name| name == written || Some(name.as_str()) == without_memory)
    }

    /// Whether a plain name with a number is the first words of one of this GPU's names.
    fn is_variant_of(&self, written: &str) -> bool {
        let starts = |name: &str| {
            let mut ends = name.match_indices([' ', '-']).map(|(end, _)| end);
            ends.any(|end| plain(&name[..end]) == written)
        };
        written.contains(|c: char| c.is_ascii_digit()) && self.names().any(starts)
    }

    /// Whether a name has the number of this GPU's, behind the same letters or the last of them.
    fn is_near(&self, written: &str) -> bool {
        match (family(&self.name), family(written)) {
            (Some((letters, number)), Some((last, same))) => number == same && letters.ends_with(&last),
            _ => false,
        }
    }
}

/// A name in lower case, without what tools add, and without spaces and hyphens.
fn plain(name: &str) -> String {
    let mut plain = name.to_lowercase().replace("(tm)", "").replace("(r)", "");
    plain.retain(char::is_alphanumeric);
    BESIDE.iter().fold(plain, |plain, word| plain.replace(word, ""))
}

/// The plain letters before the first number in a name, and the number.
fn family(name: &str) -> Option<(String, &str)> {
    let (letters, rest) = name.split_at(name.find(|c: char| c.is_ascii_digit())?);
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    Some((plain(letters), &rest[..end]))
}

/// The names in quotes, such as `"A", "B" or "C"`.
fn choices(gpus: &[&Gpu]) -> String {
    let names: Vec<String> = gpus.iter().map(|gpu| format!("\"{}\"", gpu.name)).collect();
    match names.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, others)) => format!("{} or {last}", others.join(", ")),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests;
