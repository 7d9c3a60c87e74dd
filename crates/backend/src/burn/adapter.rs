//! Which of a machine's graphics adapters computes.

use burn_cubecl::CubeDevice;
use burn_cubecl::cubecl::device::WgpuDeviceKind;

/// Kinds of adapters, the best first. The last one is the processor, by a software driver such as Mesa's lavapipe.
const KINDS: [&str; 5] = ["discrete", "integrated", "virtual", "other", "cpu"];

/// The best adapter, the first of a kind, or one by its number. The error lists those that exist.
pub(super) fn choose(which: Option<&str>) -> Result<CubeDevice, String> {
    let mut adapters = CubeDevice::enumerate_all();
    adapters.sort_by_key(|adapter| KINDS.iter().position(|name| *name == kind(adapter)));
    let at = match which {
        None => Some(0),
        Some(which) => which.parse().ok().or_else(|| adapters.iter().position(|adapter| kind(adapter) == which)),
    };
    if let Some(adapter) = at.and_then(|at: usize| adapters.get(at)) {
        return Ok(adapter.clone());
    }
    if adapters.is_empty() {
        return Err("this machine has no graphics adapter, or no driver of Vulkan, Metal or DirectX 12 for it".into());
    }
    let names = adapters.iter().enumerate().map(|(i, adapter)| format!("{i} ({}, {})", kind(adapter), maker(adapter)));
    Err(format!("this machine's adapters are {}", names.collect::<Vec<_>>().join("; ")))
}

/// The maker's name of an adapter.
pub(super) fn maker(adapter: &CubeDevice) -> String {
    adapter.client().properties().identity.name.clone()
}

fn kind(adapter: &CubeDevice) -> &'static str {
    let CubeDevice::Wgpu(adapter) = adapter else { return "other" };
    match adapter.kind {
        WgpuDeviceKind::DiscreteGpu(_) => "discrete",
        WgpuDeviceKind::IntegratedGpu(_) => "integrated",
        WgpuDeviceKind::VirtualGpu(_) => "virtual",
        WgpuDeviceKind::Cpu => "cpu",
        _ => "other",
    }
}
