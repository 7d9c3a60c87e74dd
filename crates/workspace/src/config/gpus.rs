//! Common GPUs with their makers' figures.

use fusionllm_plan::{Device, HOST_LINK_RATE, Rates};

/// A GPU by its data sheet: boost clock, single precision without tensor cores.
pub(super) struct Gpu {
    pub(super) name: &'static str,
    tflops: f64,
    gb_per_s: f64,
    gib: f64,
}

/// The fractions of the peaks that operators reach where nothing was measured. Large matrix products reach 0.7 to
/// 0.9, and the small ones of training less. Streaming kernels reach about 0.8 of the memory bandwidth.
pub(super) const PRODUCTS: f64 = 0.6;
const CONVOLUTIONS: f64 = 0.5;
const MEMORY: f64 = 0.8;

/// Seconds to launch a kernel in a framework's eager mode.
const OVERHEAD: f64 = 10e-6;

const fn gpu(name: &'static str, tflops: f64, gb_per_s: f64, gib: f64) -> Gpu {
    Gpu { name, tflops, gb_per_s, gib }
}

/// Sources: NVIDIA's architecture whitepapers (GP100, V100, TU102, GA100, GA102, AD102, H100, Blackwell RTX) and data
/// sheets; AMD's data sheets of the RX 7900 XTX, MI250X (one of its two dies) and MI300X.
pub(super) const GPUS: &[Gpu] = &[
    gpu("GTX 1080 Ti", 11.3, 484.0, 11.0),
    gpu("P100", 9.5, 732.0, 16.0),
    gpu("V100", 15.7, 900.0, 16.0),
    gpu("T4", 8.1, 320.0, 16.0),
    gpu("RTX 2070", 7.9, 448.0, 8.0),
    gpu("RTX 2080", 10.6, 448.0, 8.0),
    gpu("RTX 2080 Ti", 14.2, 616.0, 11.0),
    gpu("RTX 3060", 12.7, 360.0, 12.0),
    gpu("RTX 3070", 20.3, 448.0, 8.0),
    gpu("RTX 3080", 29.8, 760.0, 10.0),
    gpu("RTX 3090", 35.6, 936.0, 24.0),
    gpu("A10", 31.2, 600.0, 24.0),
    gpu("A40", 37.4, 696.0, 48.0),
    gpu("RTX A6000", 38.7, 768.0, 48.0),
    gpu("A100 40GB", 19.5, 1555.0, 40.0),
    gpu("A100 80GB", 19.5, 2039.0, 80.0),
    gpu("RTX 4060", 15.1, 272.0, 8.0),
    gpu("RTX 4070", 29.1, 504.0, 12.0),
    gpu("RTX 4080", 48.7, 717.0, 16.0),
    gpu("RTX 4090", 82.6, 1008.0, 24.0),
    gpu("L4", 30.3, 300.0, 24.0),
    gpu("L40S", 91.6, 864.0, 48.0),
    gpu("RTX 5090", 104.8, 1792.0, 32.0),
    gpu("H100 PCIe", 51.2, 2039.0, 80.0),
    gpu("H100 SXM", 66.9, 3352.0, 80.0),
    gpu("H200", 66.9, 4800.0, 141.0),
    gpu("RX 7900 XTX", 61.4, 960.0, 24.0),
    gpu("MI250X die", 23.9, 1638.0, 64.0),
    gpu("MI300X", 163.4, 5300.0, 192.0),
];

impl Gpu {
    /// A device that reaches `efficiency` of the peak in matrix products, and the other peaks in proportion.
    pub(super) fn device(&self, name: String, efficiency: f64) -> Device {
        let share = efficiency / PRODUCTS;
        let rates = Rates {
            matmul: efficiency * self.tflops * 1e12,
            convolution: (share * CONVOLUTIONS).min(1.0) * self.tflops * 1e12,
            memory: (share * MEMORY).min(1.0) * self.gb_per_s * 1e9,
            overhead: OVERHEAD,
        };
        let memory = (self.gib * (1u64 << 30) as f64) as u64;
        Device { host_link: Some(HOST_LINK_RATE), ..Device::new(name, rates, memory) }
    }
}
