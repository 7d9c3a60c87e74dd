use std::collections::BTreeSet;
use std::fmt::Write;

use insta::assert_snapshot;

use super::*;

/// The whole file, with what the program does not read.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    group: Vec<Group>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Group {
    title: String,
    source: String,
    gpus: Vec<Gpu>,
}

fn table() -> Table {
    toml::from_str(include_str!("gpus.toml")).unwrap()
}

/// The name of the GPU that is found.
fn found(written: &str) -> &'static str {
    find(written).map(|gpu| gpu.name.as_str()).unwrap_or_else(|e| panic!("{}\n{}", e.message, e.hint))
}

fn refused(written: &str) -> String {
    let Unfound { message, hint } = find(written).unwrap_err();
    format!("{message}\nhint: {hint}")
}

#[test]
fn the_file_is_plausible() {
    let groups = table().group;
    let count: usize = groups.iter().map(|group| group.gpus.len()).sum();
    assert_eq!(count, GPUS.len(), "the program reads the whole file");
    for group in &groups {
        let makers = ["NVIDIA, ", "AMD, ", "Apple, ", "Intel, "];
        assert!(makers.iter().any(|maker| group.source.starts_with(maker)), "{}", group.source);
        for gpu in &group.gpus {
            assert!((1.0..=200.0).contains(&gpu.tflops), "{gpu:?}");
            let operations_per_byte = gpu.tflops * 1e3 / gpu.gb_per_s;
            assert!((5.0..=120.0).contains(&operations_per_byte), "{gpu:?}: {operations_per_byte}");
            assert!(gpu.gib.is_none_or(|gib| (2.0..=288.0).contains(&gib)), "{gpu:?}");
        }
    }
}

/// The GPUs that the table had first, on which simulated tables depend.
const FIRST: [(&str, f64, f64, f64); 29] = [
    ("GTX 1080 Ti", 11.3, 484.0, 11.0),
    ("P100", 9.5, 732.0, 16.0),
    ("V100", 15.7, 900.0, 16.0),
    ("T4", 8.1, 320.0, 16.0),
    ("RTX 2070", 7.9, 448.0, 8.0),
    ("RTX 2080", 10.6, 448.0, 8.0),
    ("RTX 2080 Ti", 14.2, 616.0, 11.0),
    ("RTX 3060", 12.7, 360.0, 12.0),
    ("RTX 3070", 20.3, 448.0, 8.0),
    ("RTX 3080", 29.8, 760.0, 10.0),
    ("RTX 3090", 35.6, 936.0, 24.0),
    ("A10", 31.2, 600.0, 24.0),
    ("A40", 37.4, 696.0, 48.0),
    ("RTX A6000", 38.7, 768.0, 48.0),
    ("A100 40GB", 19.5, 1555.0, 40.0),
    ("A100 80GB", 19.5, 2039.0, 80.0),
    ("RTX 4060", 15.1, 272.0, 8.0),
    ("RTX 4070", 29.1, 504.0, 12.0),
    ("RTX 4080", 48.7, 717.0, 16.0),
    ("RTX 4090", 82.6, 1008.0, 24.0),
    ("L4", 30.3, 300.0, 24.0),
    ("L40S", 91.6, 864.0, 48.0),
    ("RTX 5090", 104.8, 1792.0, 32.0),
    ("H100 PCIe", 51.2, 2039.0, 80.0),
    ("H100 SXM", 66.9, 3352.0, 80.0),
    ("H200", 66.9, 4800.0, 141.0),
    ("RX 7900 XTX", 61.4, 960.0, 24.0),
    ("MI250X die", 23.9, 1638.0, 64.0),
    ("MI300X", 163.4, 5300.0, 192.0),
];

#[test]
fn the_first_gpus_keep_their_figures() {
    for first in FIRST {
        let gpu = find(first.0).unwrap();
        assert_eq!((gpu.name.as_str(), gpu.tflops, gpu.gb_per_s, gpu.gib.unwrap()), first);
    }
}

/// A name also finds its GPU in the ways in which tools and people write it, and finds no other.
#[test]
fn every_name_finds_its_own_gpu() {
    for gpu in GPUS.iter() {
        for name in gpu.names() {
            let mut spellings = vec![name.to_owned(), name.to_uppercase(), name.to_lowercase()];
            spellings.extend([name.replace(' ', ""), name.replace(' ', "-"), name.replace('-', " ")]);
            spellings.extend(
                ["NVIDIA GeForce", "Tesla", "Quadro", "AMD Radeon (TM)", "Intel(R)", "Apple"]
                    .map(|maker| format!("{maker} {name}")),
            );
            spellings.extend(["GPU", "Graphics", "Series", "Generation"].map(|end| format!("{name} {end}")));
            spellings.extend(gpu.gib.map(|gib| format!("{name} {gib}GB")));
            for spelling in spellings {
                let found: Vec<&str> =
                    GPUS.iter().filter(|gpu| gpu.is_called(&plain(&spelling))).map(|gpu| gpu.name.as_str()).collect();
                assert_eq!(found, [gpu.name.as_str()], "{spelling}");
            }
        }
    }
}

#[test]
fn names_are_those_that_tools_print() {
    let printed = [
        // nvidia-smi
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("GeForce GTX 1080 Ti", "GTX 1080 Ti"),
        ("NVIDIA GeForce GTX 1660 SUPER", "GTX 1660 Super"),
        ("NVIDIA GeForce RTX 4070 Ti", "RTX 4070 Ti"),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", "RTX 4070 Laptop"),
        ("NVIDIA GeForce RTX 3080 Ti Laptop GPU", "RTX 3080 Ti Laptop"),
        ("NVIDIA TITAN RTX", "Titan RTX"),
        ("Quadro RTX 8000", "RTX 8000 Turing"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell Workstation Edition"),
        ("Tesla P100-PCIE-16GB", "P100"),
        ("Tesla P100-SXM2-16GB", "P100-SXM2"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla V100-SXM2-32GB", "V100 32GB"),
        ("Tesla V100-PCIE-16GB", "V100-PCIE-16GB"),
        ("Tesla V100S-PCIE-32GB", "V100S-PCIE-32GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200 96GB"),
        ("NVIDIA B200", "B200"),
        // rocm-smi and rocminfo
        ("AMD Radeon RX 7800 XT", "RX 7800 XT"),
        ("Radeon RX 580 Series", "RX 580"),
        ("AMD Radeon VII", "Radeon VII"),
        ("AMD Radeon(TM) 8060S Graphics", "Radeon 8060S"),
        ("AMD Instinct MI250X", "MI250X die"),
        ("AMD Instinct MI300X", "MI300X"),
        // macOS
        ("Apple M3 Max", "M3 Max"),
        ("Apple M1", "M1"),
        // Intel's tools
        ("Intel(R) Arc(TM) A750 Graphics", "Arc A750"),
        ("Intel® Arc™ B580 Graphics", "Arc B580"),
        // People
        ("rtx3080", "RTX 3080"),
        ("RTX-4070Ti", "RTX 4070 Ti"),
        ("a100 80gb", "A100 80GB"),
        ("RTX 4090 24GB", "RTX 4090"),
        ("RTX 3080 10GB", "RTX 3080"),
        ("RTX 3080 12GB", "RTX 3080 12GB"),
        ("M3 Max 30-core", "M3 Max 30-core"),
    ];
    for (written, name) in printed {
        assert_eq!(found(written), name, "{written}");
    }
}

#[test]
fn a_name_of_several_gpus_is_refused_with_the_choices() {
    assert_snapshot!(refused("NVIDIA A100"), @r#"
    "NVIDIA A100" stands for several GPUs
    hint: write gpu = "A100 40GB", "A100 80GB" or "A100 80GB PCIe"
    "#);
    assert_snapshot!(refused("h100"), @r#"
    "h100" stands for several GPUs
    hint: write gpu = "H100 PCIe", "H100 SXM" or "H100 NVL"
    "#);
    assert_snapshot!(refused("NVIDIA GeForce RTX 4060 Ti"), @r#"
    "NVIDIA GeForce RTX 4060 Ti" stands for several GPUs
    hint: write gpu = "RTX 4060 Ti 8GB" or "RTX 4060 Ti 16GB"
    "#);
    assert_snapshot!(refused("NVIDIA GeForce RTX 3080 Laptop GPU"), @r#"
    "NVIDIA GeForce RTX 3080 Laptop GPU" stands for several GPUs
    hint: write gpu = "RTX 3080 Laptop 8GB" or "RTX 3080 Laptop 16GB"
    "#);
    assert_snapshot!(refused("Intel(R) Arc(TM) A770 Graphics"), @r#"
    "Intel(R) Arc(TM) A770 Graphics" stands for several GPUs
    hint: write gpu = "Arc A770 8GB" or "Arc A770 16GB"
    "#);
    assert_snapshot!(refused("Quadro RTX 6000"), @r#"
    "Quadro RTX 6000" stands for several GPUs
    hint: write gpu = "RTX 6000 Turing" or "RTX 6000 Ada"
    "#);
    assert_snapshot!(refused("Tesla V100-PCIE"), @r#"
    "Tesla V100-PCIE" stands for several GPUs
    hint: write gpu = "V100-PCIE-16GB" or "V100-PCIE-32GB"
    "#);
}

#[test]
fn the_hint_for_an_unknown_name_has_near_names_alone() {
    assert_snapshot!(refused("RTX 5080 Ti"), @r#"
    no GPU "RTX 5080 Ti" is in the table
    hint: did you mean "RTX 5080" or "RTX 5080 Laptop"? docs/gpus.md has all GPUs; for another, give tflops, memory_bandwidth and memory instead
    "#);
    assert_snapshot!(refused("RTX 4050"), @r#"
    no GPU "RTX 4050" is in the table
    hint: did you mean "RTX 4050 Laptop"? docs/gpus.md has all GPUs; for another, give tflops, memory_bandwidth and memory instead
    "#);
    assert_snapshot!(refused("RX 7950 XTX"), @r#"
    no GPU "RX 7950 XTX" is in the table
    hint: docs/gpus.md has all GPUs, such as "RTX 3080"; for another, give tflops, memory_bandwidth and memory instead
    "#);
    assert_snapshot!(refused("A6000"), @r#"
    no GPU "A6000" is in the table
    hint: did you mean "RTX A6000"? docs/gpus.md has all GPUs; for another, give tflops, memory_bandwidth and memory instead
    "#);
    assert_snapshot!(refused("4090"), @r#"
    no GPU "4090" is in the table
    hint: did you mean "RTX 4090", "RTX 4090 D" or "RTX 4090 Laptop"? docs/gpus.md has all GPUs; for another, give tflops, memory_bandwidth and memory instead
    "#);
    assert_snapshot!(refused("AMD Instinct MI250X / MI250"), @r#"
    no GPU "AMD Instinct MI250X / MI250" is in the table
    hint: did you mean "MI250 die" or "MI250X die"? docs/gpus.md has all GPUs; for another, give tflops, memory_bandwidth and memory instead
    "#);
    assert_snapshot!(refused("RTX 4090 12GB"), @r#"
    no GPU "RTX 4090 12GB" is in the table
    hint: did you mean "RTX 4090", "RTX 4090 D" or "RTX 4090 Laptop"? docs/gpus.md has all GPUs; for another, give tflops, memory_bandwidth and memory instead
    "#);
    assert_snapshot!(refused("Apple M4 Max"), @r#"
    no GPU "Apple M4 Max" is in the table
    hint: docs/gpus.md has all GPUs, such as "RTX 3080"; for another, give tflops, memory_bandwidth and memory instead
    "#);
    assert_snapshot!(refused(""), @r#"
    no GPU "" is in the table
    hint: docs/gpus.md has all GPUs, such as "RTX 3080"; for another, give tflops, memory_bandwidth and memory instead
    "#);
    for written in ["RX 480", "RX 570", "RX 5090", "RX 3080", "RTX 308", "A1", "RTX", "NVIDIA", "Laptop", "GTX"] {
        assert!(!refused(written).contains("did you mean"), "{}", refused(written));
    }
}

/// Whatever is suggested has the written number.
#[test]
fn no_suggestion_has_another_number() {
    let numbers: BTreeSet<&str> =
        GPUS.iter().flat_map(Gpu::names).flat_map(|name| name.split(|c: char| !c.is_ascii_digit())).collect();
    for number in numbers.into_iter().filter(|number| !number.is_empty()) {
        for written in [format!("RX {number} XYZ"), format!("RTX {number} XYZ"), format!("A{number} XYZ")] {
            let refused = refused(&written);
            let Some((_, near)) = refused.split_once("did you mean ") else { continue };
            for name in near.split('?').next().unwrap_or_default().split('"').skip(1).step_by(2) {
                assert_eq!(family(name).map(|(_, number)| number), Some(number), "{refused}");
            }
        }
    }
}

/// `docs/gpus.md`.
fn document() -> String {
    let mut out = String::from(
        "# The GPUs that testbed files may name\n\n\
         This page is written from `crates/workspace/src/config/gpus/gpus.toml`. A test compares the two, and\n\
         `UPDATE_DOCS=1 cargo test -p fusionllm-workspace gpus` writes this page again.\n\n\
         A testbed file names a GPU with `gpu = \"RTX 3080\"`. The name may also be what `nvidia-smi`, `rocm-smi`,\n\
         `rocminfo` or macOS prints, such as `NVIDIA GeForce RTX 3080`:\n\n\
         - Case, spaces, hyphens and the names of makers and brands do not count. Neither do `GPU`, `Graphics`, `Series`\n  \
           and `Generation`.\n\
         - The memory may stand behind the name: `RTX 3080 10GB`. A name that fits several rows is refused with the\n  \
           choices, such as `A100`.\n\
         - A laptop's GPU is another one than the desktop's of the same number.\n\n\
         TFLOP/s are 10^12 operations a second in single precision, at the boost clock and without tensor cores. GB/s\n\
         are the memory bandwidth in 10^9 bytes a second. A row without memory is a GPU that shares that of its machine.\n\
         Such a device needs `memory`, and has no `host_link`. For a GPU that is not here, give `tflops`,\n\
         `memory_bandwidth` and `memory` ([testbed.md](testbed.md)).\n",
    );
    for Group { title, source, gpus } in table().group {
        let _ = write!(
            out,
            "\n## {title}\n\nSource: {source}.\n\n\
             | GPU | TFLOP/s | GB/s | GiB | also |\n| --- | ---: | ---: | ---: | --- |\n"
        );
        for Gpu { name, also, tflops, gb_per_s, gib } in gpus {
            let gib = gib.map_or("–".to_owned(), |gib| gib.to_string());
            let _ = writeln!(out, "| {name} | {tflops:.1} | {gb_per_s} | {gib} | {} |", also.join(", "));
        }
    }
    out
}

/// `UPDATE_DOCS=1 cargo test -p fusionllm-workspace gpus` writes the document.
#[test]
fn the_document_of_gpus_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/gpus.md");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, document()).unwrap();
    }
    let written = std::fs::read_to_string(path).unwrap();
    assert_eq!(written, document(), "run UPDATE_DOCS=1 cargo test -p fusionllm-workspace gpus");
}
