//! burn's three kinds of tensors as one type, and copies to and from the host.

use burn_backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn_backend::{
    Backend, BoolDType, DType as BurnType, Element, FloatDType, IntDType, Scalar, Shape, TensorData, TensorMetadata,
    try_read_sync,
};
use fusionllm_graph::{DType, HostTensor, TensorType};

const _: () = assert!(cfg!(target_endian = "little"), "tensors in host memory are little-endian");

/// One of burn's backends, with the functions in which they differ.
pub(super) trait Framework: Backend {
    /// The type in which it stores booleans.
    const BOOL: BoolDType;

    /// The tensor in row-major order, as if it had just been uploaded. It is for kernels whose bits depend on strides.
    fn contiguous(x: Data<Self>) -> Data<Self>;
}

/// A tensor of burn backend `B`. Without dimensions it has the shape `[1]`, since not all backends know such tensors.
#[derive(Debug, Clone)]
pub(super) enum Data<B: Framework> {
    Float(FloatTensor<B>),
    Int(IntTensor<B>),
    Bool(BoolTensor<B>),
}

/// Applies the function for the tensor's kind.
macro_rules! by_kind {
    ($data:expr, $t:ident => $float:expr, $int:expr, $bool:expr $(,)?) => {
        match $data {
            Data::Float($t) => Data::Float($float),
            Data::Int($t) => Data::Int($int),
            Data::Bool($t) => Data::Bool($bool),
        }
    };
}

pub(super) use by_kind;

pub(super) fn float_type(dtype: DType) -> FloatDType {
    match dtype {
        DType::F64 => FloatDType::F64,
        DType::F16 => FloatDType::F16,
        DType::BF16 => FloatDType::BF16,
        _ => FloatDType::F32,
    }
}

pub(super) fn int_type(dtype: DType) -> IntDType {
    if dtype == DType::I32 { IntDType::I32 } else { IntDType::I64 }
}

/// The shape in which [`Data`] of these dimensions is stored.
pub(super) fn shape(dims: &[usize]) -> Shape {
    Shape::from(if dims.is_empty() { vec![1] } else { dims.to_vec() })
}

/// A scalar of the element type, converted as casts convert.
pub(super) fn scalar(value: f64, dtype: DType) -> Scalar {
    match dtype {
        DType::I64 => Scalar::Int(value as i64),
        DType::I32 => Scalar::Int(i64::from(value as i32)),
        DType::Bool => Scalar::Bool(value != 0.0),
        _ => Scalar::Float(value),
    }
}

impl<B: Framework> Data<B> {
    /// Copies a tensor to the device.
    pub(super) fn from_host(tensor: &HostTensor, device: &B::Device) -> Self {
        fn typed<E: Element + bytemuck::Pod>(t: &HostTensor) -> TensorData {
            let mut v = vec![E::zeroed(); t.ty().numel()];
            bytemuck::cast_slice_mut(&mut v).copy_from_slice(t.bytes());
            TensorData::new(v, shape(t.shape()))
        }
        match tensor.dtype() {
            DType::F64 => Self::Float(B::float_from_data(typed::<f64>(tensor), device)),
            DType::F32 => Self::Float(B::float_from_data(typed::<f32>(tensor), device)),
            DType::F16 => Self::Float(B::float_from_data(typed::<half::f16>(tensor), device)),
            DType::BF16 => Self::Float(B::float_from_data(typed::<half::bf16>(tensor), device)),
            DType::I64 => Self::Int(B::int_from_data(typed::<i64>(tensor), device)),
            DType::I32 => Self::Int(B::int_from_data(typed::<i32>(tensor), device)),
            DType::Bool => {
                let v: Vec<bool> = tensor.bytes().iter().map(|&b| b != 0).collect();
                Self::Bool(Self::from_bools(v, tensor.shape(), device))
            }
        }
    }

    pub(super) fn from_bools(values: Vec<bool>, dims: &[usize], device: &B::Device) -> BoolTensor<B> {
        let data = TensorData::new(values, shape(dims));
        B::bool_from_data(data.convert_dtype(BurnType::Bool(B::BOOL)), device)
    }

    /// A tensor without elements.
    pub(super) fn empty(ty: &TensorType, device: &B::Device) -> Self {
        Self::from_host(&HostTensor::zeros(ty.clone()), device)
    }

    /// All elements `value`.
    pub(super) fn full(ty: &TensorType, value: f64, device: &B::Device) -> Self {
        let (s, v) = (shape(&ty.shape), scalar(value, ty.dtype));
        match ty.dtype {
            DType::I64 | DType::I32 => Self::Int(B::int_full(s, v, device, int_type(ty.dtype))),
            DType::Bool if value != 0.0 => Self::Bool(B::bool_ones(s, device, B::BOOL)),
            DType::Bool => Self::Bool(B::bool_zeros(s, device, B::BOOL)),
            _ => Self::Float(B::float_full(s, v, device, float_type(ty.dtype))),
        }
    }

    fn into_data(self) -> Result<TensorData, String> {
        let read = match self {
            Self::Float(t) => try_read_sync(B::float_into_data(t)),
            Self::Int(t) => try_read_sync(B::int_into_data(t)),
            Self::Bool(t) => try_read_sync(B::bool_into_data(t)),
        };
        read.ok_or("its content is not ready")?.map_err(|e| e.to_string())
    }

    /// Copies the tensor to the host. It has type `ty`.
    pub(super) fn into_host(self, ty: &TensorType) -> Result<HostTensor, String> {
        if ty.numel() == 0 {
            return Ok(HostTensor::zeros(ty.clone()));
        }
        let mut data = self.into_data()?;
        if ty.dtype == DType::Bool {
            data = data.try_cast(burn_type(ty.dtype)).map_err(|e| e.to_string())?;
        }
        if data.dtype() != burn_type(ty.dtype) {
            return Err(format!("{:?} came back where {ty} was expected", data.dtype()));
        }
        let bytes = data.into_bytes().try_into_vec::<u8>().unwrap_or_else(|bytes| bytes.to_vec());
        HostTensor::from_bytes(ty.clone(), bytes).map_err(|e| e.to_string())
    }

    /// The elements of an `i64` tensor.
    pub(super) fn into_i64(self) -> Result<Vec<i64>, String> {
        self.into_data()?.try_into_vec::<i64>().map_err(|e| format!("{e:?}"))
    }

    pub(super) fn float(self) -> Result<FloatTensor<B>, String> {
        match self {
            Self::Float(t) => Ok(t),
            _ => Err("needs a float tensor".into()),
        }
    }

    pub(super) fn int(self) -> Result<IntTensor<B>, String> {
        match self {
            Self::Int(t) => Ok(t),
            _ => Err("needs an integer tensor".into()),
        }
    }

    pub(super) fn bool(self) -> Result<BoolTensor<B>, String> {
        match self {
            Self::Bool(t) => Ok(t),
            _ => Err("needs a boolean tensor".into()),
        }
    }

    pub(super) fn shape(&self) -> Vec<usize> {
        match self {
            Self::Float(t) => t.shape().to_vec(),
            Self::Int(t) => t.shape().to_vec(),
            Self::Bool(t) => t.shape().to_vec(),
        }
    }
}

pub(super) fn burn_type(dtype: DType) -> BurnType {
    match dtype {
        DType::F64 => BurnType::F64,
        DType::F32 => BurnType::F32,
        DType::F16 => BurnType::F16,
        DType::BF16 => BurnType::BF16,
        DType::I64 => BurnType::I64,
        DType::I32 => BurnType::I32,
        DType::Bool => BurnType::Bool(BoolDType::Native),
    }
}
