//! Frozen parameters, and low-rank adapters beside them (LoRA, Hu et al., 2021), with the names and the first values of
//! the Python library PEFT.

use std::collections::BTreeMap;

use crate::ops::{Dropout, Permute};
use crate::{Builder, Graph, GraphError, Init, NodeId, Op, ValueId, ValueKind};

/// The size and the strength of adapters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adapters {
    /// The rows of `A` and the columns of `B`.
    pub rank: usize,
    /// The factor of `B A x`. PEFT's is `alpha / rank`.
    pub scale: f64,
    /// The probability with which an element of `x` is dropped before `A`, in [0, 1).
    pub dropout: f64,
}

/// A layer that multiplies activations `[.., in]` by a weight and returns `[.., out]`.
#[derive(Debug, Clone, PartialEq)]
pub struct LinearLayer {
    /// The module: the name of the weight without `.weight`.
    pub name: String,
    /// The weight: a parameter, frozen or not, or a buffer.
    pub weight: ValueId,
    /// Channels of the activations.
    pub inputs: usize,
    /// Channels of the result.
    pub outputs: usize,
    /// Whether the weight is `[in, out]`, as that of `Conv1D` in `transformers`, and not `[out, in]`.
    pub transposed: bool,
    /// The products. A layer may be used several times.
    pub nodes: Vec<NodeId>,
}

impl LinearLayer {
    /// The names of `A [rank, in]` and `B [out, rank]`.
    pub fn adapter_names(&self) -> [String; 2] {
        ["A", "B"].map(|matrix| format!("{}.lora_{matrix}.weight", self.name))
    }
}

impl Graph {
    /// This graph without the training of the parameters whose names `is_frozen` accepts.
    pub fn freeze(mut self, is_frozen: impl Fn(&str) -> bool) -> Self {
        for value in &mut self.values {
            if let ValueKind::Parameter(init) = &value.kind
                && is_frozen(&value.name)
            {
                value.kind = ValueKind::Frozen(init.clone());
            }
        }
        self
    }

    /// The linear layers, in the order in which they first run.
    pub fn linear_layers(&self) -> Vec<LinearLayer> {
        let mut layers: Vec<LinearLayer> = Vec::new();
        let mut known = BTreeMap::new();
        for id in self.node_ids() {
            let Some((weight, transposed)) = self.weight_of(id) else { continue };
            let at = *known.entry(weight).or_insert_with(|| {
                let (name, shape) = (&self.value(weight).name, &self.ty(weight).shape);
                let name = name.strip_suffix(".weight").unwrap_or(name).to_owned();
                let [inputs, outputs] = if transposed { [shape[0], shape[1]] } else { [shape[1], shape[0]] };
                layers.push(LinearLayer { name, weight, inputs, outputs, transposed, nodes: Vec::new() });
                layers.len() - 1
            });
            layers[at].nodes.push(id);
        }
        layers
    }

    /// The weight of a product of activations with state of the model, and whether it is `[in, out]`.
    fn weight_of(&self, id: NodeId) -> Option<(ValueId, bool)> {
        let node = self.node(id);
        let (product, turned) = match node.op {
            Op::Linear(_) => (*node.inputs.get(1)?, false),
            Op::Matmul(_) => (*node.inputs.get(1)?, true),
            _ => return None,
        };
        let is_state = |v: ValueId| self.value(v).kind.init().is_some();
        let is_weight = |v: ValueId| is_state(v) && self.ty(v).rank() == 2;
        if is_state(*node.inputs.first()?) {
            return None;
        }
        if is_weight(product) {
            return Some((product, turned));
        }
        match self.producer(product).map(|n| self.node(n)) {
            Some(view) if is_transposition(&view.op) && is_weight(view.inputs[0]) => Some((view.inputs[0], !turned)),
            _ => None,
        }
    }

    /// This graph with an adapter beside each of these linear layers: `y + scale · B A dropout(x)`. `A` is drawn as PEFT
    /// draws it, and `B` is 0, so the result is that of the graph without adapters at first.
    ///
    /// # Errors
    ///
    /// The graph has a value with the name of a matrix of an adapter.
    pub fn with_adapters(&self, adapters: &Adapters, layers: &[LinearLayer]) -> Result<Graph, GraphError> {
        let mut b = Builder::new(self.name.clone());
        let mut map: Vec<Option<ValueId>> = vec![None; self.values.len()];
        for (i, v) in self.values.iter().enumerate().filter(|(_, v)| !matches!(v.kind, ValueKind::Result { .. })) {
            map[i] = Some(b.copy_source(self, ValueId(i as u32), v.ty.clone())?);
        }
        let mut matrices = BTreeMap::new();
        for layer in layers {
            let [down, up] = layer.adapter_names();
            let dtype = self.ty(layer.weight).dtype;
            let bound = 1.0 / (layer.inputs.max(1) as f64).sqrt();
            let down = b.parameter(&down, dtype, [adapters.rank, layer.inputs], Init::Uniform { bound })?;
            let up = b.parameter(&up, dtype, [layer.outputs, adapters.rank], Init::Constant(0.0))?;
            matrices.extend(layer.nodes.iter().map(|node| (*node, (layer, down, up))));
        }
        let mut stream = self.nodes.iter().filter(|n| matches!(n.op, Op::Dropout(_))).count() as u64;
        let of = |map: &[Option<ValueId>], v: ValueId| {
            map[v.index()].ok_or_else(|| GraphError::Structure {
                graph: self.name.clone(),
                reason: format!("{:?} is read before it is computed", self.value(v).name),
            })
        };
        for id in self.node_ids() {
            let node = self.node(id);
            b.set_scope(node.name.rsplit_once('.').map_or("", |(scope, _)| scope));
            let inputs = node.inputs.iter().map(|v| of(&map, *v)).collect::<Result<Vec<_>, _>>()?;
            let mut outputs = b.apply(node.op.clone(), &inputs)?;
            if let (Some((layer, down, up)), [y, ..]) = (matrices.get(&id), &mut outputs[..]) {
                b.set_scope(&layer.name);
                let x = match adapters.dropout {
                    0.0 => inputs[0],
                    p => {
                        let key = b.rng_key()?;
                        stream += 1;
                        b.scope("lora_dropout", |b| b.op(Dropout { p, stream: stream - 1 }, &[inputs[0], key]))?
                    }
                };
                let low = b.scope("lora_A", |b| b.linear(x, *down, None))?;
                let low = if adapters.scale == 1.0 { low } else { b.mul_scalar(low, adapters.scale)? };
                let change = b.scope("lora_B", |b| b.linear(low, *up, None))?;
                *y = b.add(*y, change)?;
            }
            for (v, made) in node.outputs.iter().zip(outputs) {
                map[v.index()] = Some(made);
            }
        }
        b.set_scope("");
        for (name, v) in &self.outputs {
            b.output(name, of(&map, *v)?)?;
        }
        for u in &self.state_updates {
            b.update_buffer(of(&map, u.buffer)?, of(&map, u.value)?)?;
        }
        for (key, value) in &self.metadata {
            b.metadata(key, value.clone());
        }
        b.finish()
    }
}

fn is_transposition(op: &Op) -> bool {
    matches!(op, Op::Permute(Permute { dims }) if dims[..] == [1, 0])
}

/// Whether a pattern of a user names a tensor or a module: by the whole name, or by parts of it that follow each other,
/// such as `q_proj`, `layers.0` or `mlp.up_proj.weight`. `*` stands for any text.
pub fn names(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (format!("*.{pattern}.*"), format!(".{name}."));
    let mut pieces = pattern.split('*');
    // Both ends of the pattern are `*`, so each piece may stand anywhere after the one before it.
    pieces.try_fold(&name[..], |rest, piece| rest.find(piece).map(|at| &rest[at + piece.len()..])).is_some()
}

/// Whether a module is in one of a model's blocks: one of the parts of its name is a number, as in `layers.0.mlp`.
pub fn is_in_block(module: &str) -> bool {
    module.split('.').any(|part| part.parse::<u32>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_names_whole_parts() {
        let name = "model.layers.10.self_attn.q_proj.weight";
        for pattern in ["q_proj", "layers.10", "*", "model", "weight", name, "layers.*.q_proj", "*_proj", "self_*"] {
            assert!(names(pattern, name), "{pattern}");
        }
        for pattern in ["proj", "layers.1", "k_proj", "q_proj.layers", "10.q_proj", "layers.*.k_proj", "odel"] {
            assert!(!names(pattern, name), "{pattern}");
        }
    }
}
