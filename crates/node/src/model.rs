//! From a job to graphs, and to the weights it starts from.

use std::path::Path;

use fusionllm_graph::{DType, Graph, HostTensor, TensorType, TrainGraph, Value, autodiff};
use safetensors::SafeTensors;

use crate::NodeError;
use crate::config::{Data, Family, Job};
use crate::data::IMAGE_SIZE;

/// A model's graphs at the micro-batch's size.
#[derive(Debug)]
pub struct Model {
    /// What plans are made for.
    pub forward: Graph,
    /// With its backward operators.
    pub train: TrainGraph,
    /// Without dropout, with running statistics.
    pub eval: Graph,
}

impl Model {
    /// The graphs of a job.
    pub fn build(job: &Job) -> Result<Self, NodeError> {
        Self::from_forward(forward(job, job.train.micro_batch)?)
    }

    /// The graphs of any forward graph with an output `loss`.
    pub fn from_forward(forward: Graph) -> Result<Self, NodeError> {
        let Some(&loss) = forward.outputs.get("loss") else {
            return Err(NodeError::Input(format!("graph {:?} has no output named \"loss\"", forward.name)));
        };
        let train = autodiff::differentiate(&forward, loss)?;
        let eval = forward.evaluation()?;
        Ok(Self { forward, train, eval })
    }
}

/// A job's forward graph for `samples` samples at once.
pub fn forward(job: &Job, samples: usize) -> Result<Graph, NodeError> {
    Ok(match (&job.model.family, &job.data) {
        (Family::Gpt2(config), Data::Text(text)) => config.build(samples, text.context, DType::F32)?,
        (Family::Gpt2(config), _) => config.build(samples, config.n_positions, DType::F32)?,
        (Family::Resnet(config), _) => config.build(samples, IMAGE_SIZE, DType::F32)?,
    })
}

/// Weights in a safetensors file, by the graph's names or, for GPT-2, by those of the bare transformer (without `transformer.`).
pub struct Weights {
    path: String,
    map: memmap2::Mmap,
}

impl Weights {
    /// Opens a file and checks that it is one.
    pub fn open(path: &Path) -> Result<Self, NodeError> {
        let shown = path.display().to_string();
        let fail = |e: String| NodeError::Input(format!("{shown}: {e}\n  hint: give a .safetensors file"));
        let file = std::fs::File::open(path).map_err(|e| fail(format!("cannot be read: {e}")))?;
        // SAFETY: the map is only read; a file that another program cuts short while it is mapped would fault, as with any mapped file.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(|e| fail(format!("cannot be mapped: {e}")))?;
        SafeTensors::deserialize(&map).map_err(|e| fail(format!("is no safetensors file: {e}")))?;
        Ok(Self { path: shown, map })
    }

    /// The content of a parameter or buffer in its own element type.
    pub fn read(&self, value: &Value) -> Result<HostTensor, NodeError> {
        let fail = |e: String| NodeError::Input(format!("{}: {e}", self.path));
        let file = SafeTensors::deserialize(&self.map).map_err(|e| fail(e.to_string()))?;
        let bare = value.name.strip_prefix("transformer.").unwrap_or(&value.name);
        let view = file
            .tensor(&value.name)
            .or_else(|_| file.tensor(bare))
            .map_err(|_| fail(format!("there is no tensor {:?}; is it a file of this model?", value.name)))?;
        let dtype = match view.dtype() {
            safetensors::Dtype::F64 => DType::F64,
            safetensors::Dtype::F32 => DType::F32,
            safetensors::Dtype::F16 => DType::F16,
            safetensors::Dtype::BF16 => DType::BF16,
            other => return Err(fail(format!("{:?} has element type {other:?}; floats are wanted", value.name))),
        };
        let tensor = HostTensor::from_bytes(TensorType::new(dtype, view.shape()), view.data().to_vec())?;
        if tensor.shape() != value.ty.shape {
            return Err(fail(format!("{:?} is {}, the model's is {}", value.name, tensor.ty(), value.ty)));
        }
        Ok(tensor.cast(value.ty.dtype)?)
    }
}
