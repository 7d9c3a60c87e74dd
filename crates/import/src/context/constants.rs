//! Constants: values of known content, computed at import.

use std::hash::{DefaultHasher, Hash, Hasher};

use fusionllm_graph::{DType, HostTensor, TensorType, ValueId};

use super::{Constant, Context, MAX_TOTAL_CONSTANT_BYTES, Result, Value};

impl Context<'_> {
    /// A constant with this content, which the import computed.
    pub(crate) fn constant(&mut self, tensor: HostTensor) -> Result<Value> {
        let bytes = tensor.bytes().len();
        self.spend(bytes)?;
        let known = self.constants.len();
        let value = self.stored_constant(tensor);
        if self.constants.len() > known {
            self.constant_bytes = self.constant_bytes.saturating_add(bytes);
        }
        match self.constant_bytes {
            bytes if bytes > MAX_TOTAL_CONSTANT_BYTES => {
                Err(format!("its constants have more than {} MiB", MAX_TOTAL_CONSTANT_BYTES >> 20).into())
            }
            _ => Ok(value),
        }
    }

    /// A constant with this content, which the file stores. The size of the file bounds such constants.
    pub(crate) fn stored_constant(&mut self, tensor: HostTensor) -> Value {
        let mut hash = DefaultHasher::new();
        (tensor.ty(), tensor.bytes()).hash(&mut hash);
        let same = self.constants_by_hash.entry(hash.finish()).or_default();
        if let Some(&i) = same.iter().find(|&&i| self.constants[i].tensor == tensor) {
            return Value::Constant(i);
        }
        same.push(self.constants.len());
        self.constants.push(Constant { tensor, value: None });
        Value::Constant(self.constants.len() - 1)
    }

    /// The content of a constant; `None` for values of the graph.
    pub(crate) fn constant_tensor(&self, value: Value) -> Option<&HostTensor> {
        match value {
            Value::Constant(i) => Some(&self.constants[i].tensor),
            Value::Node(_) => None,
        }
    }

    /// The number that every element of a constant has; `None` if elements differ, and for values of the graph.
    pub(crate) fn constant_number(&self, value: Value) -> Option<f64> {
        let tensor = self.constant_tensor(value)?;
        let size = tensor.dtype().size();
        let first = tensor.bytes().get(..size)?;
        if !tensor.bytes().chunks_exact(size).all(|e| e == first) {
            return None;
        }
        let one = HostTensor::from_bytes(TensorType::new(tensor.dtype(), []), first.to_vec()).ok()?;
        one.to_f64().first().copied()
    }

    /// The value in the graph. Adds a constant to the graph when a node first reads it.
    pub(crate) fn materialize(&mut self, value: Value) -> Result<ValueId> {
        let i = match value {
            Value::Node(id) => return Ok(id),
            Value::Constant(i) => i,
        };
        if let Some(id) = self.constants[i].value {
            return Ok(id);
        }
        let tensor = self.constants[i].tensor.clone();
        let full = tensor.shape().to_vec();
        let small = without_repetition(&tensor)?;
        let b = &mut self.builder;
        // A double cannot represent all 64-bit integers.
        let id = if small.ty().numel() == 1 && small.dtype() != DType::I64 {
            let number = small.to_f64().first().copied().unwrap_or(0.0);
            b.full(TensorType::new(small.dtype(), small.shape()), number)?
        } else {
            b.constant(&format!("constant_{i}"), small)?
        };
        let id = b.expand(id, full)?;
        self.constants[i].value = Some(id);
        Ok(id)
    }

    /// The elements of a constant as integers; `None` for values of the graph.
    pub(crate) fn constant_integers(&mut self, value: Value) -> Result<Option<Vec<i64>>> {
        if self.constant_tensor(value).is_none() {
            return Ok(None);
        }
        let value = self.cast(value, DType::I64)?;
        Ok(self.constant_tensor(value).and_then(HostTensor::to_i64))
    }
}

/// Cuts every dimension along which all slices are equal to one slice.
fn without_repetition(tensor: &HostTensor) -> Result<HostTensor> {
    let mut bytes = tensor.bytes().to_vec();
    let mut shape = tensor.shape().to_vec();
    for d in 0..shape.len() {
        let inner = shape[d + 1..].iter().product::<usize>() * tensor.dtype().size();
        if shape[d] <= 1 || inner == 0 {
            continue;
        }
        let alike = bytes.chunks_exact(shape[d] * inner).all(|block| {
            let (first, rest) = block.split_at(inner);
            rest.chunks_exact(inner).all(|slice| slice == first)
        });
        if alike {
            bytes = bytes.chunks_exact(shape[d] * inner).flat_map(|block| block[..inner].to_vec()).collect();
            shape[d] = 1;
        }
    }
    Ok(HostTensor::from_bytes(TensorType::new(tensor.dtype(), shape), bytes)?)
}
