//! The choice among a machine's graphics adapters.

use burn_cubecl::CubeDevice;
use burn_cubecl::cubecl::device::{WgpuBackend, WgpuDevice, WgpuDeviceKind};

/// Kinds of adapters, the best first. The last one is the processor, by a software driver such as Mesa's lavapipe.
const KINDS: [(&str, WgpuDeviceKind); 5] = [
    ("discrete", WgpuDeviceKind::DiscreteGpu(0)),
    ("integrated", WgpuDeviceKind::IntegratedGpu(0)),
    ("virtual", WgpuDeviceKind::VirtualGpu(0)),
    ("other", WgpuDeviceKind::Other(0)),
    ("cpu", WgpuDeviceKind::Cpu),
];

/// OpenGL is not among them: its shaders lack what tensors need.
const INTERFACES: [WgpuBackend; 3] = [WgpuBackend::Vulkan, WgpuBackend::Metal, WgpuBackend::Dx12];

/// The best adapter, the first of a kind, or one by its number. The error lists those that exist.
pub(super) fn choose(which: Option<&str>) -> Result<CubeDevice, String> {
    let adapters = adapters();
    let at = match which {
        None => Some(0),
        Some(which) => which.parse().ok().or_else(|| adapters.iter().position(|(kind, _)| *kind == which)),
    };
    if let Some((_, adapter)) = at.and_then(|at: usize| adapters.get(at)) {
        return Ok(adapter.clone());
    }
    if adapters.is_empty() {
        return Err("this machine has no graphics adapter, or no driver of Vulkan, Metal or DirectX 12 for it".into());
    }
    let listed = |(i, (kind, adapter)): (usize, &(&str, CubeDevice))| format!("{i} ({kind}, {})", maker(adapter));
    let listed: Vec<String> = adapters.iter().enumerate().map(listed).collect();
    Err(format!("this machine's adapters are {}", listed.join("; ")))
}

/// The maker's name of an adapter.
pub(super) fn maker(adapter: &CubeDevice) -> String {
    adapter.client().properties().identity.name.clone()
}

/// All adapters with their kinds, the best first. One that has two interfaces is here twice.
fn adapters() -> Vec<(&'static str, CubeDevice)> {
    let mut found = Vec::new();
    for (name, kind) in KINDS {
        for interface in INTERFACES {
            let like = CubeDevice::from(WgpuDevice::new(kind.clone()).on(interface));
            found.extend(CubeDevice::enumerate(like.to_id()).into_iter().map(|id| (name, CubeDevice::from_id(id))));
        }
    }
    found
}
