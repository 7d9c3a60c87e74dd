//! Tensors that share memory, as in PyTorch: a write through one changes all others.

use fusionllm_graph::Op;
use fusionllm_graph::ops::Permute;

use super::{Context, Result, Tensor, TensorId, Value};

impl Context<'_> {
    /// Adds a tensor with memory of its own.
    pub(crate) fn new_tensor(&mut self, value: Value) -> TensorId {
        self.writes.push(0);
        self.add_tensor(Tensor { storage: self.writes.len() - 1, view: None, value, version: 0 })
    }

    fn add_tensor(&mut self, tensor: Tensor) -> TensorId {
        self.tensors.push(tensor);
        TensorId(self.tensors.len() - 1)
    }

    /// Adds a tensor that shares the memory of another. Without operators it is that tensor itself.
    pub(crate) fn view(&mut self, tensor: TensorId, ops: Vec<Op>) -> Result<TensorId> {
        let mut value = self.read(tensor)?;
        let mut base = tensor;
        for op in ops {
            value = self.op(op.clone(), &[value])?;
            let Tensor { storage, version, .. } = self.tensors[base.0];
            base = self.add_tensor(Tensor { storage, view: Some((base, op)), value, version });
        }
        Ok(base)
    }

    /// The present value of a tensor. Brings the tensors that it is a view of up to date too, so each is computed once
    /// after a write, however long the chain of views is.
    pub(crate) fn read(&mut self, tensor: TensorId) -> Result<Value> {
        let newest = self.writes[self.tensors[tensor.0].storage];
        let mut stale = Vec::new();
        let mut at = tensor;
        while let Tensor { view: Some((base, op)), version, .. } = &self.tensors[at.0]
            && *version != newest
        {
            stale.push((at, *base, op.clone()));
            at = *base;
        }
        while let Some((at, base, op)) = stale.pop() {
            let value = self.op(op, &[self.tensors[base.0].value])?;
            let tensor = &mut self.tensors[at.0];
            (tensor.value, tensor.version) = (value, newest);
        }
        Ok(self.tensors[tensor.0].value)
    }

    /// Overwrites a tensor and all tensors that share its memory. Converts the value to the tensor's type and shape.
    pub(crate) fn write(&mut self, tensor: TensorId, value: Value) -> Result<()> {
        let old = self.read(tensor)?;
        let ty = self.ty(old).clone();
        let value = self.cast(value, ty.dtype)?;
        let mut value = self.expand(value, &ty.shape)?;
        let mut at = tensor;
        while let Some((base, step)) = self.tensors[at.0].view.clone() {
            value = self.with_part_replaced(self.tensors[base.0].value, &step, value)?;
            at = base;
        }
        let root = &mut self.tensors[at.0];
        let version = &mut self.writes[root.storage];
        *version += 1;
        (root.value, root.version) = (value, *version);
        Ok(())
    }

    /// `whole` with the part that `step` selects replaced by `part`.
    fn with_part_replaced(&mut self, whole: Value, step: &Op, part: Value) -> Result<Value> {
        let shape = self.shape(whole);
        match step {
            Op::Reshape(_) => self.reshape(part, &shape),
            Op::Permute(Permute { dims }) => {
                let mut inverse = vec![0; dims.len()];
                for (i, &d) in dims.iter().enumerate() {
                    inverse[d] = i;
                }
                self.permute(part, &inverse)
            }
            Op::Slice(slice) => self.slice_scatter(whole, part, slice),
            _ => Err("it writes through a view that repeats elements, which is not supported".into()),
        }
    }
}
