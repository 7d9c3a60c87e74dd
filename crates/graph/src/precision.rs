//! Mixed precision: a graph whose products are computed in bf16, as PyTorch's autocast computes them.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ops::{Binary, Cast, Unary};
use crate::{Builder, DType, Graph, GraphError, NodeId, Op, TensorType, ValueId, ValueKind};

/// The type in which a model's f32 operators compute, or in which its frozen parameters are kept. Trained parameters,
/// buffers, optimizer state and losses are f32 in any case.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Everything in f32.
    #[default]
    F32,
    /// Matrix products, convolutions and attention in bf16.
    Bf16,
}

impl Precision {
    /// All of them, the default first.
    pub const ALL: [Self; 2] = [Self::F32, Self::Bf16];

    /// The name in job files.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Graph {
    /// This forward graph in another precision, with frozen parameters of type `frozen`. Inputs, parameters, buffers,
    /// constants and outputs keep their names, and all but frozen parameters keep their types.
    ///
    /// The type of each value is part of the result. So it depends on the graph alone, and not on where the graph is
    /// cut or on who computes. In bf16, casts stand where an operator reads a value in another type than the one in
    /// which it was made. Matrix products, convolutions and attention read their f32 operands in bf16. Operators that
    /// only move or scale numbers take bf16 as it comes. All others compute in f32: losses, norms, softmax and sums.
    /// Backward follows, because a gradient has the type of its value.
    ///
    /// A frozen parameter in bf16 is widened where an operator computes in f32, and so for each use anew. It is read
    /// from a table before it is widened.
    pub fn in_precision(self, precision: Precision, frozen: Precision) -> Result<Graph, GraphError> {
        match (precision, frozen) {
            (Precision::F32, Precision::F32) => Ok(self),
            _ => Narrowing::new(&self, precision, frozen).run(),
        }
    }
}

/// The type in which an operator reads its f32 operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    /// The operator reads them in bf16, because matrix units make it fast.
    Narrow,
    /// The operator reads them as they are if all are bf16, and otherwise in f32.
    Follow,
    /// The operator reads them in f32, because it is sensitive to rounding or adds up.
    Wide,
}

fn class(op: &Op) -> Class {
    match op {
        Op::Matmul(_) | Op::Linear(_) | Op::Conv2d(_) | Op::ScaledDotProductAttention(_) => Class::Narrow,
        _ if op.view().is_some() => Class::Follow,
        Op::SliceBackward(_)
        | Op::Cat(_)
        | Op::Embedding(_)
        | Op::Flip(_)
        | Op::ConstantPad(_)
        | Op::Gelu(_)
        | Op::Dropout(_)
        | Op::BinaryScalar(_)
        | Op::Where(_)
        | Op::Binary(Binary::Mul)
        | Op::Unary(Unary::Neg | Unary::Relu | Unary::Sigmoid | Unary::Silu | Unary::Tanh) => Class::Follow,
        _ => Class::Wide,
    }
}

/// Whether an operator only moves numbers, so that their type does not matter.
fn moves(op: &Op) -> bool {
    op.view().is_some()
        || matches!(op, Op::SliceBackward(_) | Op::Cat(_) | Op::Embedding(_) | Op::Flip(_) | Op::ConstantPad(_))
}

/// A value of the f32 graph in the bf16 graph.
#[derive(Debug, Clone)]
struct Forms {
    /// The value in the type in which it was made.
    made: ValueId,
    /// The value in other types.
    cast: BTreeMap<DType, ValueId>,
}

struct Narrowing<'a> {
    graph: &'a Graph,
    precision: Precision,
    frozen: Precision,
    b: Builder,
    /// The forms of each value of the f32 graph. Inputs, parameters, buffers and constants come first.
    forms: Vec<Option<Forms>>,
}

impl<'a> Narrowing<'a> {
    fn new(graph: &'a Graph, precision: Precision, frozen: Precision) -> Self {
        Self { graph, precision, frozen, b: Builder::new(graph.name.clone()), forms: vec![None; graph.values.len()] }
    }

    fn run(mut self) -> Result<Graph, GraphError> {
        self.sources()?;
        for id in self.graph.node_ids() {
            self.node(id)?;
        }
        self.b.set_scope("");
        for (name, v) in &self.graph.outputs {
            let value = self.form(*v, self.graph.ty(*v).dtype)?;
            self.b.output(name, value)?;
        }
        for u in &self.graph.state_updates {
            let (buffer, value) = (self.made(u.buffer)?, self.form(u.value, self.graph.ty(u.buffer).dtype)?);
            self.b.update_buffer(buffer, value)?;
        }
        for (key, value) in &self.graph.metadata {
            self.b.metadata(key, value.clone());
        }
        self.b.finish()
    }

    /// Copies the values that come from outside, in their order.
    fn sources(&mut self) -> Result<(), GraphError> {
        for (i, v) in self.graph.values.iter().enumerate() {
            let ty = match (&v.kind, self.frozen, v.ty.dtype) {
                (ValueKind::Result { .. }, ..) => continue,
                (ValueKind::Frozen(_), Precision::Bf16, DType::F32) => TensorType::new(DType::BF16, v.ty.shape.clone()),
                _ => v.ty.clone(),
            };
            let made = self.b.copy_source(self.graph, ValueId(i as u32), ty)?;
            self.forms[i] = Some(Forms { made, cast: BTreeMap::new() });
        }
        Ok(())
    }

    fn node(&mut self, id: NodeId) -> Result<(), GraphError> {
        let node = self.graph.node(id);
        self.b.set_scope(node.name.rsplit_once('.').map_or("", |(scope, _)| scope));
        let mut types = Vec::with_capacity(node.inputs.len());
        let narrow = self.is_narrow(id)?;
        for v in &node.inputs {
            let declared = self.graph.ty(*v).dtype;
            types.push(if narrow && declared == DType::F32 { DType::BF16 } else { declared });
        }
        // An operator that takes no bf16 computes in f32.
        let narrowed = node.inputs.iter().zip(&types).map(|(v, dtype)| {
            let shape = self.graph.ty(*v).shape.clone();
            TensorType::new(*dtype, shape)
        });
        let narrowed: Vec<TensorType> = narrowed.collect();
        if narrow && node.op.infer(&narrowed.iter().collect::<Vec<_>>()).is_err() {
            types = node.inputs.iter().map(|v| self.graph.ty(*v).dtype).collect();
        }
        let inputs = node.inputs.iter().zip(types).map(|(v, dtype)| self.form(*v, dtype));
        let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
        let outputs = self.b.apply(node.op.clone(), &inputs)?;
        for (v, made) in node.outputs.iter().zip(outputs) {
            self.forms[v.index()] = Some(Forms { made, cast: BTreeMap::new() });
        }
        Ok(())
    }

    /// Whether a node reads its f32 operands in bf16.
    fn is_narrow(&self, id: NodeId) -> Result<bool, GraphError> {
        let node = self.graph.node(id);
        Ok(match class(&node.op) {
            Class::Narrow => self.precision == Precision::Bf16,
            // A graph in f32 computes nothing in bf16. Frozen parameters may be moved in it.
            Class::Follow if self.precision == Precision::F32 && !moves(&node.op) => false,
            Class::Follow => {
                let mut any = false;
                for v in node.inputs.iter().filter(|v| self.graph.ty(**v).dtype == DType::F32) {
                    if self.b.ty(self.made(*v)?).dtype != DType::BF16 {
                        return Ok(false);
                    }
                    any = true;
                }
                any
            }
            Class::Wide => false,
        })
    }

    fn forms_of(&self, v: ValueId) -> Result<&Forms, GraphError> {
        self.forms[v.index()].as_ref().ok_or_else(|| GraphError::Structure {
            graph: self.graph.name.clone(),
            reason: format!("{:?} is read before it is computed", self.graph.value(v).name),
        })
    }

    fn made(&self, v: ValueId) -> Result<ValueId, GraphError> {
        Ok(self.forms_of(v)?.made)
    }

    /// A value in a type.
    fn form(&mut self, v: ValueId, dtype: DType) -> Result<ValueId, GraphError> {
        let forms = self.forms_of(v)?;
        let made = forms.made;
        if self.b.ty(made).dtype == dtype {
            return Ok(made);
        }
        if let Some(known) = forms.cast.get(&dtype) {
            return Ok(*known);
        }
        let cast = self.b.op(Cast { dtype }, &[made])?;
        // Each use of a tensor that stays casts it anew, so that no copy of a parameter is sent or kept.
        if let (ValueKind::Result { .. } | ValueKind::Input, Some(forms)) =
            (&self.graph.value(v).kind, &mut self.forms[v.index()])
        {
            forms.cast.insert(dtype, cast);
        }
        Ok(cast)
    }
}
