use burn_backend::{Backend as _, BoolDType, DType as BurnType, StreamId};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::{CubeBackend, CubeDevice};
use fusionllm_graph::{DType, HostTensor, Op, TensorType};

use super::tensor::{Data, Framework, by_kind};
use super::{adapter, shared};
use crate::guard::guarded;
use crate::{Backend, BackendError, Cpu, DeviceInfo, Tensor};

/// burn on a graphics adapter, over wgpu: Vulkan, Metal or DirectX 12.
///
/// The type of a tensor decides where the tensor is. The adapter has the types with which it computes rightly. Tensors
/// of the other types are in host memory, where the backend `cpu` computes: f64, bf16, and tensors without elements.
pub struct Wgpu {
    name: String,
    device: CubeDevice,
    /// The maker's name of the adapter.
    adapter: String,
    /// Element types that the adapter has.
    types: Vec<DType>,
    /// burn has a queue for each thread. One for all calls makes [`Backend::synchronize`] wait for all of them.
    stream: StreamId,
}

impl Framework for CubeBackend {
    // Shaders have no smaller integers.
    const BOOL: BoolDType = BoolDType::U32;

    fn contiguous(x: Data<Self>) -> Data<Self> {
        by_kind!(x, t => into_contiguous(t), into_contiguous(t), into_contiguous(t))
    }
}

impl Wgpu {
    /// The name by which users choose it. `burn-wgpu:WHICH` chooses an adapter.
    pub const NAME: &str = "burn-wgpu";

    /// Opens an adapter: the best one, the first of a kind such as `integrated` or `cpu`, or one by its number.
    ///
    /// # Errors
    ///
    /// This machine has no such adapter, or its driver fails.
    pub fn open(which: Option<&str>) -> Result<Self, BackendError> {
        let name = which.map_or_else(|| Self::NAME.to_owned(), |which| format!("{}:{which}", Self::NAME));
        let opened = guarded(Self::NAME, || {
            let device = adapter::choose(which)?;
            let adapter = adapter::maker(&device);
            // burn claims f64, too, but computes wrong exponentials and sines with it. It knows no bf16 here.
            let held = [
                (DType::F32, BurnType::F32),
                (DType::F16, BurnType::F16),
                (DType::I64, BurnType::I64),
                (DType::I32, BurnType::I32),
                (DType::Bool, BurnType::Bool(CubeBackend::BOOL)),
            ];
            let held = held.into_iter().filter(|(_, burn)| CubeBackend::supports_dtype(&device, *burn));
            Ok((adapter, held.map(|(dtype, _)| dtype).collect(), device))
        });
        match opened {
            Ok((adapter, types, device)) => Ok(Self { name, device, adapter, types, stream: StreamId::allocate() }),
            Err(reason) => Err(BackendError::Device { backend: name, reason }),
        }
    }

    /// Whether the adapter has tensors of this type.
    fn holds(&self, ty: &TensorType) -> bool {
        ty.numel() > 0 && self.types.contains(&ty.dtype)
    }

    fn run_on_host(&self, op: &Op, inputs: &[Tensor], outputs: &[TensorType]) -> Result<Vec<Tensor>, BackendError> {
        let down = |t: &Tensor| if self.holds(t.ty()) { Cpu.upload(&self.download(t)?) } else { Ok(t.clone()) };
        let up = |t: Tensor| if self.holds(t.ty()) { self.upload(&Cpu.download(&t)?) } else { Ok(t) };
        let operands = inputs.iter().map(down).collect::<Result<_, _>>()?;
        Cpu.run(op, operands, outputs)?.into_iter().map(up).collect()
    }
}

impl Backend for Wgpu {
    fn name(&self) -> &str {
        &self.name
    }

    fn device(&self) -> DeviceInfo {
        DeviceInfo { name: self.adapter.clone(), threads: None, memory_bytes: None }
    }

    fn upload(&self, tensor: &HostTensor) -> Result<Tensor, BackendError> {
        match self.holds(tensor.ty()) {
            true => self.stream.executes(|| shared::upload::<CubeBackend>(self, &self.device, tensor)),
            false => Cpu.upload(tensor),
        }
    }

    fn download(&self, tensor: &Tensor) -> Result<HostTensor, BackendError> {
        match self.holds(tensor.ty()) {
            true => self.stream.executes(|| shared::download::<CubeBackend>(self, tensor)),
            false => Cpu.download(tensor),
        }
    }

    fn run(&self, op: &Op, inputs: Vec<Tensor>, outputs: &[TensorType]) -> Result<Vec<Tensor>, BackendError> {
        if inputs.iter().map(Tensor::ty).chain(outputs).all(|ty| self.holds(ty)) && !burn_is_wrong(op) {
            return self.stream.executes(|| shared::run::<CubeBackend>(self, &self.device, op, inputs, outputs));
        }
        // Only the hyper-parameters are f64. The decomposition converts them, and leaves the rest where it is.
        if matches!(op, Op::AdamwStep(_) | Op::SgdStep(_)) && outputs.iter().all(|ty| self.holds(ty)) {
            return shared::decomposed(self, op, inputs);
        }
        self.run_on_host(op, &inputs, outputs)
    }

    fn synchronize(&self) -> Result<(), BackendError> {
        let wait = || CubeBackend::sync(&self.device).map_err(|e| e.to_string());
        self.stream
            .executes(|| guarded(&self.name, wait))
            .map_err(|reason| BackendError::Device { backend: self.name.clone(), reason })
    }

    fn memory_in_use(&self) -> Option<u64> {
        let usage = || Ok(CubeBackend::memory_pool_usage(&self.device).map(|usage| usage.bytes_in_use));
        guarded(&self.name, usage).ok().flatten()
    }
}

/// Whether burn's kernel for adapters computes something else than the operator's definition. Scattered floats are
/// added in the order in which threads come to them, and the maxima of pools lose NaN and some indices.
fn burn_is_wrong(op: &Op) -> bool {
    matches!(op, Op::ScatterAdd(_) | Op::MaxPool2d(_) | Op::MaxPool2dBackward(_))
}
