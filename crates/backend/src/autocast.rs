//! Mixed precision: f32 segments whose products are computed in bf16, as PyTorch's autocast computes them.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use fusionllm_graph::ops::{Binary, Cast, Unary};
use fusionllm_graph::{DType, HostTensor, Op, TensorType};

use crate::{Backend, BackendError, DeviceInfo, Done, Prepared, Segment, SegmentNode, Tensor};

/// A backend that computes what gains from it in bf16, inside segments. What enters and leaves a segment keeps its type,
/// so nobody else has to know.
///
/// Matrix products, convolutions and attention round their f32 operands to bf16, and so do their gradients. Operators
/// that only move or scale numbers take bf16 as it comes. All others compute in f32: losses, norms, softmax, sums, and
/// the update of parameters.
pub struct Autocast(Arc<dyn Backend>);

impl Autocast {
    /// The backend must hold bf16.
    pub fn new(backend: Arc<dyn Backend>) -> Self {
        Self(backend)
    }
}

/// A prepared segment of the backend, and which of its nodes each node of the f32 segment ends with.
struct Inner {
    prepared: Prepared,
    /// For each node of the bf16 segment, the node of the f32 segment that is done with it.
    ends: Vec<Option<usize>>,
}

impl Backend for Autocast {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn device(&self) -> DeviceInfo {
        self.0.device()
    }

    fn upload(&self, tensor: &HostTensor) -> Result<Tensor, BackendError> {
        self.0.upload(tensor)
    }

    fn download(&self, tensor: &Tensor) -> Result<HostTensor, BackendError> {
        self.0.download(tensor)
    }

    fn run(&self, op: &Op, inputs: Vec<Tensor>, outputs: &[TensorType]) -> Result<Vec<Tensor>, BackendError> {
        let results = inputs.len() as u32..(inputs.len() + outputs.len()) as u32;
        let node =
            SegmentNode { op: op.clone(), inputs: (0..inputs.len() as u32).collect(), outputs: outputs.to_vec() };
        let types = inputs.iter().map(|t| t.ty().clone()).collect();
        let prepared = self.prepare(Segment { inputs: types, nodes: vec![node], outputs: results.collect() })?;
        self.run_segment(&prepared, inputs, &mut |_| ControlFlow::Continue(()))
    }

    fn prepare(&self, segment: Segment) -> Result<Prepared, BackendError> {
        let (narrowed, ends) = narrowed(&segment);
        let prepared = self.0.prepare(narrowed)?;
        Ok(Prepared::new(segment, Inner { prepared, ends }))
    }

    fn run_segment(
        &self,
        segment: &Prepared,
        inputs: Vec<Tensor>,
        done: Done<'_>,
    ) -> Result<Vec<Tensor>, BackendError> {
        let Inner { prepared, ends } = segment
            .get()
            .ok_or_else(|| BackendError::Missing { name: "a segment that this backend has prepared".into() })?;
        let mut told = |node: usize| match ends.get(node).copied().flatten() {
            Some(node) => done(node),
            None => ControlFlow::Continue(()),
        };
        self.0.run_segment(prepared, inputs, &mut told)
    }

    fn runs_segments_whole(&self) -> bool {
        self.0.runs_segments_whole()
    }

    fn gains_from_bf16(&self) -> bool {
        self.0.gains_from_bf16()
    }

    fn synchronize(&self) -> Result<(), BackendError> {
        self.0.synchronize()
    }

    fn memory_in_use(&self) -> Option<u64> {
        self.0.memory_in_use()
    }
}

/// In which type an operator's f32 operands come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    /// In bf16: matrix units make it fast.
    Narrow,
    /// As they are, if all are bf16. Otherwise in f32.
    Follow,
    /// In f32: it is sensitive to rounding, or adds up.
    Wide,
}

fn class(op: &Op) -> Class {
    match op {
        Op::Matmul(_)
        | Op::Linear(_)
        | Op::Conv2d(_)
        | Op::Conv2dInputGrad(_)
        | Op::Conv2dWeightGrad(_)
        | Op::ScaledDotProductAttention(_)
        | Op::ScaledDotProductAttentionBackward(_) => Class::Narrow,
        Op::Reshape(_)
        | Op::Permute(_)
        | Op::Expand(_)
        | Op::Slice(_)
        | Op::SliceBackward(_)
        | Op::Split(_)
        | Op::Cat(_)
        | Op::Flip(_)
        | Op::Detach(_)
        | Op::ConstantPad(_)
        | Op::Gelu(_)
        | Op::GeluBackward(_)
        | Op::ThresholdBackward(_)
        | Op::Dropout(_)
        | Op::BinaryScalar(_)
        | Op::Where(_)
        | Op::Binary(Binary::Mul)
        | Op::Unary(Unary::Neg | Unary::Relu | Unary::Sigmoid | Unary::Silu | Unary::Tanh) => Class::Follow,
        // Sums of gradients over micro-batches are additions, too.
        _ => Class::Wide,
    }
}

/// The bf16 segment, and for each of its nodes the node of `segment` that is done with it, if any.
fn narrowed(segment: &Segment) -> (Segment, Vec<Option<usize>>) {
    let mut rewriting = Rewriting {
        nodes: Vec::new(),
        ends: Vec::new(),
        next: segment.inputs.len() as u32,
        forms: (0..).zip(&segment.inputs).map(|(number, ty)| Forms::new(ty.clone(), ty.dtype, number)).collect(),
    };
    for (i, node) in segment.nodes.iter().enumerate() {
        rewriting.node(node);
        if let Some(end) = rewriting.ends.last_mut() {
            *end = Some(i);
        }
    }
    let outputs = segment.outputs.iter().map(|v| {
        let declared = rewriting.forms[*v as usize].ty.dtype;
        rewriting.form(*v, declared)
    });
    let outputs = outputs.collect();
    (Segment { inputs: segment.inputs.clone(), nodes: rewriting.nodes, outputs }, rewriting.ends)
}

/// A value of the f32 segment in the bf16 segment.
struct Forms {
    /// Its type in the f32 segment.
    ty: TensorType,
    /// The type in which it was made.
    own: DType,
    /// Its numbers, by type.
    numbers: BTreeMap<DType, u32>,
}

impl Forms {
    fn new(ty: TensorType, own: DType, number: u32) -> Self {
        Self { ty, own, numbers: BTreeMap::from([(own, number)]) }
    }
}

struct Rewriting {
    nodes: Vec<SegmentNode>,
    ends: Vec<Option<usize>>,
    next: u32,
    forms: Vec<Forms>,
}

impl Rewriting {
    fn node(&mut self, node: &SegmentNode) {
        let mut singles = node.inputs.iter().map(|v| &self.forms[*v as usize]).filter(|f| f.ty.dtype == DType::F32);
        let narrow = match class(&node.op) {
            Class::Narrow => true,
            Class::Follow => {
                singles.next().is_some_and(|f| f.own == DType::BF16) && singles.all(|f| f.own == DType::BF16)
            }
            Class::Wide => false,
        };
        let narrowed = if narrow { self.narrowed_types(node) } else { None };
        let declared = || node.inputs.iter().map(|v| self.forms[*v as usize].ty.dtype).collect();
        let (operands, results) = narrowed.unwrap_or_else(|| (declared(), node.outputs.clone()));
        let inputs = node.inputs.iter().zip(operands).map(|(v, dtype)| self.form(*v, dtype)).collect();
        for (ty, made) in node.outputs.iter().zip(&results) {
            self.forms.push(Forms::new(ty.clone(), made.dtype, self.next));
            self.next += 1;
        }
        self.push(SegmentNode { op: node.op.clone(), inputs, outputs: results });
    }

    /// The types of a node's operands and results where f32 operands become bf16. `None` if it does not run so.
    fn narrowed_types(&self, node: &SegmentNode) -> Option<(Vec<DType>, Vec<TensorType>)> {
        let operand = |(i, v): (usize, &u32)| {
            let ty = &self.forms[*v as usize].ty;
            let narrow = ty.dtype == DType::F32 && !is_sum(&node.op, i);
            TensorType::new(if narrow { DType::BF16 } else { ty.dtype }, ty.shape.clone())
        };
        let operands: Vec<TensorType> = node.inputs.iter().enumerate().map(operand).collect();
        let results = node.op.infer(&operands.iter().collect::<Vec<_>>()).ok()?;
        Some((operands.iter().map(|ty| ty.dtype).collect(), results))
    }

    /// The number of a value in a type.
    fn form(&mut self, v: u32, dtype: DType) -> u32 {
        let forms = &self.forms[v as usize];
        if let Some(number) = forms.numbers.get(&dtype) {
            return *number;
        }
        let (from, ty) = (forms.numbers[&forms.own], TensorType::new(dtype, forms.ty.shape.clone()));
        let number = self.next;
        self.next += 1;
        self.push(SegmentNode { op: Cast { dtype }.into(), inputs: vec![from], outputs: vec![ty] });
        self.forms[v as usize].numbers.insert(dtype, number);
        number
    }

    fn push(&mut self, node: SegmentNode) {
        self.nodes.push(node);
        self.ends.push(None);
    }
}

/// Whether an operand is a sum that an operator with 16-bit operands takes in f32.
fn is_sum(op: &Op, operand: usize) -> bool {
    const LSE: usize = 5;
    matches!(op, Op::ScaledDotProductAttentionBackward(_)) && operand == LSE
}

#[cfg(test)]
mod tests {
    use fusionllm_graph::ops::{CrossEntropy, Gelu, Linear};
    use fusionllm_graph::{Builder, CounterRng};

    use super::*;
    use crate::Cpu;

    fn random(ty: &TensorType, stream: u64) -> HostTensor {
        let rng = CounterRng::new(7);
        let numbers: Vec<f32> = (0..ty.numel() as u64).map(|i| rng.uniform(i, stream) - 0.5).collect();
        HostTensor::from_f32(ty.shape.clone(), &numbers).unwrap()
    }

    /// Two layers with a GELU between, a residual, and a loss.
    fn network() -> Segment {
        let mut b = Builder::new("network");
        let x = b.input("x", DType::F32, [8, 16]).unwrap();
        let w = b.input("w", DType::F32, [16, 16]).unwrap();
        let y = b.input("y", DType::I64, [8]).unwrap();
        let h = b.op(Linear, &[x, w]).unwrap();
        let h = b.op(Gelu { approximate: fusionllm_graph::ops::Approximate::None }, &[h]).unwrap();
        let h = b.op(Linear, &[h, w]).unwrap();
        let h = b.add(h, x).unwrap();
        let loss = b.apply(CrossEntropy { ignore_index: -100 }, &[h, y]).unwrap();
        Segment::of_graph(b.graph(), &[x, w, y], &[loss[0], h]).unwrap()
    }

    #[test]
    fn products_are_narrow_and_losses_wide() {
        let (segment, ends) = narrowed(&network());
        let made: Vec<String> =
            segment.nodes.iter().map(|n| format!("{} {}", n.op.name(), n.outputs[0].dtype.name())).collect();
        let expected = ["_to_copy bf16", "_to_copy bf16", "linear bf16", "gelu bf16", "linear bf16", "_to_copy f32"];
        assert_eq!(made[..6], expected, "{made:?}");
        assert_eq!(made[6..], ["add f32", "cross_entropy_loss f32"], "{made:?}");
        assert_eq!(ends, [None, None, Some(0), Some(1), Some(2), None, Some(3), Some(4)]);
    }

    #[test]
    fn results_are_those_of_f32_within_the_rounding_of_bf16() {
        let segment = network();
        let cpu: Arc<dyn Backend> = Arc::new(Cpu);
        let labels = HostTensor::from_i64([8], &[0, 1, 2, 3, 4, 5, 6, 7]).unwrap();
        let run = |backend: &dyn Backend| {
            let given = [random(&segment.inputs[0], 1), random(&segment.inputs[1], 2), labels.clone()];
            let inputs = given.iter().map(|t| backend.upload(t).unwrap()).collect();
            let (mut told, prepared) = (Vec::new(), backend.prepare(segment.clone()).unwrap());
            let done: Done<'_> = &mut |node| {
                told.push(node);
                ControlFlow::Continue(())
            };
            let results = backend.run_segment(&prepared, inputs, done).unwrap();
            assert_eq!(told, [0, 1, 2, 3, 4]);
            results.iter().map(|t| backend.download(t).unwrap()).collect::<Vec<_>>()
        };
        let (exact, rounded) = (run(&*cpu), run(&Autocast::new(cpu.clone())));
        for (a, b) in exact.iter().zip(&rounded) {
            assert_eq!(a.ty(), b.ty());
            let (a, b) = (a.to_f64(), b.to_f64());
            let far = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(far > 0.0 && far < 0.02, "{far}");
        }
    }
}
