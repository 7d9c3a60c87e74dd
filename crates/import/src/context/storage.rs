//! Tensors that share memory, as in PyTorch: a write through one changes all others.
//!
//! Tensors that share memory need not share gradients. `detach` and a part without gradients make tensors of the same
//! memory that autograd does not know, and a write that it does not see changes numbers alone. So a storage has one
//! *root* for each history that autograd sees. A root is the whole memory as a value of the graph, and views are
//! computed from a root. A write changes one root; another takes over the numbers when it is next read, and keeps its
//! gradient.

use std::collections::HashSet;

use fusionllm_graph::DType;
use fusionllm_graph::ops::{Expand, IndexPut, IndexSelect, Permute, Reshape, Slice};

use super::{Context, MAX_POSITIONS, Result, Value};

/// The index of a tensor in the context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TensorId(usize);

/// A tensor of the exported graph: a root of its storage, or a view of another tensor.
pub(super) struct Tensor {
    storage: usize,
    root: TensorId,
    /// The tensor that this one is a view of, and how it is computed from that.
    view: Option<(TensorId, Step)>,
    /// The storage's version at which the value is right. If it is the newest version, the values of all tensors that
    /// this one is a view of are right, too.
    value: Value,
    version: u32,
}

/// Memory that tensors share.
pub(super) struct Storage {
    /// How often the storage was written.
    version: u32,
    /// The root that was written last. Its value has this version.
    newest: TensorId,
    /// The root of the tensors that autograd never tracks, once there is one.
    untracked: Option<TensorId>,
    /// The owner of the memory, if nothing may write to it.
    fixed: Option<String>,
}

/// A step that computes a view from the tensor that it is a view of.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Step {
    /// All elements, with another shape.
    Reshape(Reshape),
    /// All elements, with dimensions in another order.
    Permute(Permute),
    /// All elements, repeated.
    Expand(Expand),
    /// Some of the elements.
    Slice(Slice),
    /// The slices of a dimension at these positions, a constant.
    At {
        /// The dimension.
        dim: usize,
        /// The positions.
        positions: Value,
    },
}

impl Context<'_> {
    /// Adds a tensor with memory of its own.
    pub(crate) fn new_tensor(&mut self, value: Value) -> TensorId {
        let root = TensorId(self.tensors.len());
        self.storages.push(Storage { version: 0, newest: root, untracked: None, fixed: None });
        self.tensors.push(Tensor { storage: self.storages.len() - 1, root, view: None, value, version: 0 });
        root
    }

    /// Adds the result of an operator. Where gradients are off, it has none.
    pub(crate) fn new_result(&mut self, value: Value) -> Result<TensorId> {
        let value = if self.gradients { value } else { self.detach(value)? };
        Ok(self.new_tensor(value))
    }

    /// Refuses all writes to the memory of a tensor. `owner` says what it belongs to and what to do instead.
    pub(crate) fn fix(&mut self, tensor: TensorId, owner: String) {
        let storage = self.tensors[tensor.0].storage;
        self.storages[storage].fixed = Some(owner);
    }

    /// Whether anything wrote to the memory of a tensor.
    pub(crate) fn is_written(&self, tensor: TensorId) -> bool {
        self.storages[self.tensors[tensor.0].storage].version > 0
    }

    /// Adds a tensor that shares the memory of another. Without steps it is that tensor itself. Where gradients are
    /// off, it has none.
    pub(crate) fn view(&mut self, tensor: TensorId, steps: Vec<Step>) -> Result<TensorId> {
        let mut base = if self.gradients { tensor } else { self.untracked(tensor)? };
        let mut value = self.read(base)?;
        for step in steps {
            value = self.viewed(value, &step)?;
            base = self.add_view(base, step, value)?;
        }
        Ok(base)
    }

    fn viewed(&mut self, base: Value, step: &Step) -> Result<Value> {
        match step {
            Step::Reshape(op) => self.op(op.clone(), &[base]),
            Step::Permute(op) => self.op(op.clone(), &[base]),
            Step::Expand(op) => self.op(op.clone(), &[base]),
            Step::Slice(op) => self.op(op.clone(), &[base]),
            Step::At { dim, positions } => self.op(IndexSelect { dim: *dim }, &[base, *positions]),
        }
    }

    fn add_view(&mut self, base: TensorId, step: Step, value: Value) -> Result<TensorId> {
        if self.tensors.len() >= self.max_nodes {
            return Err(format!("the model has more than {} tensors, too many for this file", self.max_nodes).into());
        }
        let Tensor { storage, root, version, .. } = self.tensors[base.0];
        self.tensors.push(Tensor { storage, root, view: Some((base, step)), value, version });
        Ok(TensorId(self.tensors.len() - 1))
    }

    /// Adds a tensor that is the same memory as another, but without its gradient.
    pub(crate) fn detached(&mut self, tensor: TensorId) -> Result<TensorId> {
        self.read(tensor)?;
        let mut chain = Vec::new();
        let mut at = tensor;
        while let Some((base, step)) = &self.tensors[at.0].view {
            chain.push((at, step.clone()));
            at = *base;
        }
        let Tensor { storage, value, version, .. } = self.tensors[at.0];
        let value = self.detach(value)?;
        let root = TensorId(self.tensors.len());
        self.tensors.push(Tensor { storage, root, view: None, value, version });
        let mut base = root;
        for (at, step) in chain.into_iter().rev() {
            let value = self.detach(self.tensors[at.0].value)?;
            base = self.add_view(base, step, value)?;
        }
        Ok(base)
    }

    /// A view of the tensor for a part of the model without gradients: the same memory, without its gradient. PyTorch
    /// refuses writes to such views where gradients are on. So all such views of a storage may share one root.
    fn untracked(&mut self, tensor: TensorId) -> Result<TensorId> {
        let Tensor { storage, root, value, .. } = self.tensors[tensor.0];
        if self.storages[storage].untracked == Some(root) || !self.dtype(value).is_float() {
            return Ok(tensor);
        }
        let detached = self.detached(tensor)?;
        self.storages[storage].untracked = Some(self.tensors[detached.0].root);
        Ok(detached)
    }

    /// The present value of a tensor. Brings the tensors that it is a view of up to date too, so each is computed once
    /// after a write, however long the chain of views is.
    pub(crate) fn read(&mut self, tensor: TensorId) -> Result<Value> {
        let newest = self.storages[self.tensors[tensor.0].storage].version;
        let mut stale = Vec::new();
        let mut at = tensor;
        while self.tensors[at.0].version != newest {
            match &self.tensors[at.0].view {
                Some((base, step)) => {
                    stale.push((at, *base, step.clone()));
                    at = *base;
                }
                None => {
                    self.catch_up(at)?;
                    break;
                }
            }
        }
        while let Some((at, base, step)) = stale.pop() {
            let value = self.viewed(self.tensors[base.0].value, &step)?;
            let tensor = &mut self.tensors[at.0];
            (tensor.value, tensor.version) = (value, newest);
        }
        Ok(self.tensors[tensor.0].value)
    }

    /// Gives a root the numbers that were written through another one.
    fn catch_up(&mut self, root: TensorId) -> Result<()> {
        let Tensor { storage, value, .. } = self.tensors[root.0];
        let Storage { newest, version, .. } = self.storages[storage];
        let value = self.with_gradient_of(value, self.tensors[newest.0].value)?;
        let tensor = &mut self.tensors[root.0];
        (tensor.value, tensor.version) = (value, version);
        Ok(())
    }

    /// Overwrites a tensor and all tensors that share its memory. Converts the value to the tensor's type and shape.
    /// Where gradients are off, only numbers change.
    pub(crate) fn write(&mut self, tensor: TensorId, value: Value) -> Result<()> {
        if let Some(owner) = &self.storages[self.tensors[tensor.0].storage].fixed {
            return Err(format!("it overwrites {owner}").into());
        }
        let old = self.read(tensor)?;
        let ty = self.ty(old).clone();
        let value = self.cast(value, ty.dtype)?;
        let mut value = self.expand(value, &ty.shape)?;
        let mut at = tensor;
        while let Some((base, step)) = self.tensors[at.0].view.clone() {
            value = self.with_part_replaced(self.tensors[base.0].value, &step, value)?;
            at = base;
        }
        if !self.gradients {
            value = self.with_gradient_of(self.tensors[at.0].value, value)?;
        }
        let root = &mut self.tensors[at.0];
        let storage = &mut self.storages[root.storage];
        storage.version += 1;
        storage.newest = at;
        (root.value, root.version) = (value, storage.version);
        Ok(())
    }

    /// Fails if an operator that overwrites `written` reads other elements of it through `read`, because the numbers
    /// that it reads would depend on the order in which it writes. An operator that works `by_element` may read the
    /// element that it overwrites.
    pub(crate) fn check_overlap(&mut self, written: TensorId, read: TensorId, by_element: bool) -> Result<()> {
        if self.tensors[written.0].storage != self.tensors[read.0].storage {
            return Ok(());
        }
        let (to, from) = (self.steps(written), self.steps(read));
        let common = to.iter().zip(&from).take_while(|(a, b)| a == b).count();
        let apart = match (to.get(common), from.get(common)) {
            (Some(Step::Slice(a)), Some(Step::Slice(b))) => a.dim == b.dim && (a.end <= b.start || b.end <= a.start),
            (None, None) => by_element,
            _ => false,
        };
        if apart || self.reads_its_own_elements(written, &to, &from, by_element)? {
            return Ok(());
        }
        Err("it reads elements that it overwrites, so its result depends on the order of its writes; read from a copy \
             (`clone`)"
            .into())
    }

    /// Whether none of the elements behind the steps `from` is overwritten through the steps `to`, or only those that
    /// stand at the same place. `tensor` is one of the tensors.
    fn reads_its_own_elements(
        &mut self,
        tensor: TensorId,
        to: &[Step],
        from: &[Step],
        by_element: bool,
    ) -> Result<bool> {
        let root = self.tensors[self.tensors[tensor.0].root.0].value;
        let shape = self.shape(root);
        let all = self.arange(DType::I64, 0.0, 1.0, shape.iter().product())?;
        let all = self.reshape(all, &shape)?;
        let mut ends = [all; 2];
        for (end, steps) in ends.iter_mut().zip([to, from]) {
            for step in steps {
                *end = self.viewed(*end, step)?;
            }
        }
        let [written, mut read] = ends;
        let target = self.shape(written);
        let broadcasts = fusionllm_graph::ops::broadcast_shapes(&[&self.shape(read), &target]);
        let paired = by_element && broadcasts.is_ok_and(|shape| shape == target);
        if paired {
            read = self.expand(read, &target)?;
        }
        let too_large = "its operands share memory, and are too large to find out which elements";
        let written = self.constant_integers(written)?.ok_or(too_large)?;
        let read = self.constant_integers(read)?.ok_or(too_large)?;
        let overwritten: HashSet<i64> = written.iter().copied().collect();
        let own = |i: usize, at: i64| paired && written.get(i) == Some(&at);
        Ok(read.iter().enumerate().all(|(i, at)| own(i, *at) || !overwritten.contains(at)))
    }

    /// The steps from the root of a tensor to it.
    fn steps(&self, tensor: TensorId) -> Vec<Step> {
        let mut steps = Vec::new();
        let mut at = tensor;
        while let Some((base, step)) = &self.tensors[at.0].view {
            steps.push(step.clone());
            at = *base;
        }
        steps.reverse();
        steps
    }

    /// `whole` with the part that `step` selects replaced by `part`.
    fn with_part_replaced(&mut self, whole: Value, step: &Step, part: Value) -> Result<Value> {
        let ty = self.ty(whole).clone();
        match step {
            Step::Reshape(_) => self.reshape(part, &ty.shape),
            // An expansion may only add dimensions of size 1.
            Step::Expand(Expand { shape }) if shape.iter().product::<usize>() == ty.numel() => {
                self.reshape(part, &ty.shape)
            }
            Step::Permute(Permute { dims }) => {
                let mut inverse = vec![0; dims.len()];
                for (i, &d) in dims.iter().enumerate() {
                    inverse[d] = i;
                }
                self.permute(part, &inverse)
            }
            Step::Slice(slice) => self.slice_scatter(whole, part, slice),
            Step::At { dim, positions } => self.with_slices_replaced(whole, *dim, *positions, part),
            Step::Expand(_) => Err("it writes through a view that repeats elements, which is not supported; \
                                write to a copy (`clone`), or to the tensor before it is expanded"
                .into()),
        }
    }

    fn with_slices_replaced(&mut self, whole: Value, dim: usize, positions: Value, part: Value) -> Result<Value> {
        let mut at = self.constant_integers(positions)?.ok_or("it writes to positions that depend on the data")?;
        at.sort_unstable();
        if at.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err("it writes through a view whose elements overlap, which is not supported; write to a copy \
                        (`clone`), or to the tensor itself"
                .into());
        }
        let mut indexed = vec![false; self.rank(whole)];
        indexed[dim] = true;
        self.op(IndexPut { indexed, accumulate: false }, &[whole, part, positions])
    }

    /// `whole` with a slice replaced by `part`.
    pub(crate) fn slice_scatter(&mut self, whole: Value, part: Value, slice: &Slice) -> Result<Value> {
        let &Slice { dim, start, end, step } = slice;
        if step == 1 {
            let size = self.shape(whole)[dim];
            let before = self.slice(whole, dim, 0, start, 1)?;
            let after = self.slice(whole, dim, end, size, 1)?;
            return self.cat(&[before, part, after], dim);
        }
        if (end - start).div_ceil(step) > MAX_POSITIONS {
            return Err(
                format!("it writes with a step of {step} to more than {MAX_POSITIONS} positions, too many").into()
            );
        }
        let positions: Vec<i64> = (start..end).step_by(step).map(|at| at as i64).collect();
        let positions = self.positions(&positions)?;
        self.with_slices_replaced(whole, dim, positions, part)
    }
}
