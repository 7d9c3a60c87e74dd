//! How operators carry samples along: the rules of [`Classes`] for operands with a part for each sample.

use super::Doubt;
use super::class::{Axis, Class, Classes, Share, passes_powers, works_by_element};
use crate::ops::{Binary, Index, Unary, View};
use crate::{Node, NodeId, Op, TensorType, ValueId};

/// The reason why a node's result has no rows.
enum Refusal {
    Couples,
    Unknown,
    /// The result is a sum over the samples.
    Sum(i32),
}

use Refusal::{Couples, Unknown};

type Found<T> = Result<T, Refusal>;

impl Classes<'_> {
    /// The results of a node of which at least one operand has a part for each sample, and none is a sum of parts.
    pub(super) fn rows(&mut self, id: NodeId, node: &Node, operands: &[Class]) -> Vec<Class> {
        let power = self.power(id, node, operands);
        let found = power.and_then(|power| Ok((self.axis(node)?, power)));
        match found {
            Ok((axis, power)) => match node.op {
                // Batch norm is a layer that is meant to see its micro-batch. Its statistics are no part of the loss.
                Op::BatchNorm(_) => vec![Class::Rows { axis, power }, Class::Same { power: 0 }],
                _ => vec![Class::Rows { axis, power }],
            },
            Err(Couples) => vec![Class::Lost(Doubt::Couples(id))],
            Err(Unknown) => vec![Class::Lost(Doubt::Unknown(id))],
            Err(Refusal::Sum(power)) => vec![Class::Sum(Share::WHOLE.times(power))],
        }
    }

    /// The power of the number of micro-batches by which the result grows.
    fn power(&mut self, id: NodeId, node: &Node, operands: &[Class]) -> Found<i32> {
        let powers: Vec<i32> = operands
            .iter()
            .map(|c| match c {
                Class::Rows { power, .. } | Class::Same { power } => *power,
                _ => 0,
            })
            .collect();
        match &node.op {
            Op::Binary(Binary::Mul) | Op::Matmul(_) => Ok(powers.iter().sum()),
            Op::Binary(Binary::Div) => Ok(powers[0] - powers[1]),
            Op::Unary(Unary::Reciprocal) => Ok(-powers[0]),
            Op::BinaryScalar(op) => {
                let literal = self.literal(id, op, node.inputs[0]).ok_or(Unknown)?;
                match op.op {
                    Binary::Mul => Ok(powers[0] + literal),
                    Binary::Div if op.reverse => Ok(literal - powers[0]),
                    Binary::Div => Ok(powers[0] - literal),
                    _ if powers[0] == 0 && literal == 0 => Ok(0),
                    _ => Err(Unknown),
                }
            }
            _ if powers.iter().all(|p| *p == 0) => Ok(0),
            op if passes_powers(op) && powers.windows(2).all(|w| w[0] == w[1]) => Ok(powers[0]),
            _ => Err(Unknown),
        }
    }

    fn axis_of(&self, v: ValueId) -> Option<Axis> {
        match self.class(v) {
            Class::Rows { axis, .. } => Some(axis),
            _ => None,
        }
    }

    /// The place of the samples in the first result.
    fn axis(&self, node: &Node) -> Found<Axis> {
        let inputs = &node.inputs;
        let out = self.graph.ty(node.outputs[0]);
        let x = inputs.first().and_then(|v| self.axis_of(*v));
        let ty = self.graph.ty(inputs[0]);
        let others_same = || inputs[1..].iter().all(|v| self.axis_of(*v).is_none());
        // An operator that joins the elements of these dimensions.
        let apart_from = |dims: &[usize]| {
            let axis = x.filter(|_| others_same()).ok_or(Unknown)?;
            if dims.contains(&axis.dim) { Err(Couples) } else { Ok(axis) }
        };
        let without = |axis: Axis, dims: &[usize], keepdim: bool| {
            let before = if keepdim { 0 } else { dims.iter().filter(|d| **d < axis.dim).count() };
            Axis { dim: axis.dim - before, ..axis }
        };
        match &node.op {
            op if works_by_element(op) => self.aligned(inputs, out),
            Op::Expand(_) => self.aligned(inputs, out),
            Op::Dropout(_) => x.ok_or(Unknown),
            Op::Reduce(op) => Ok(without(apart_from(&op.dims)?, &op.dims, op.keepdim)),
            Op::ArgReduce(op) => Ok(without(apart_from(&[op.dim])?, &[op.dim], op.keepdim)),
            Op::CumSum(op) => apart_from(&[op.dim]),
            Op::Softmax(op) => apart_from(&[op.dim]),
            Op::LogSoftmax(op) => apart_from(&[op.dim]),
            // Experts sort the tokens that they get, and put them back.
            Op::Sort(op) => apart_from(&[op.dim]).map_err(|_| Unknown),
            Op::TopK(op) => apart_from(&[op.dim]).map_err(|_| Unknown),
            Op::Flip(op) => apart_from(&op.dims),
            Op::ConstantPad(op) => {
                let padded = op.pads.iter().enumerate().filter(|(_, pad)| **pad != [0, 0]);
                apart_from(&padded.map(|(d, _)| d).collect::<Vec<_>>())
            }
            Op::LayerNorm(op) => apart_from(&(ty.rank() - op.dims.min(ty.rank())..ty.rank()).collect::<Vec<_>>()),
            Op::Triangle(_) => match x.ok_or(Unknown)? {
                axis if axis.dim + 2 < ty.rank() => Ok(axis),
                _ => Err(Unknown),
            },
            Op::Reshape(_) => self.reshaped(x.ok_or(Unknown)?, ty, out),
            Op::Permute(op) => {
                let axis = x.ok_or(Unknown)?;
                let dim = op.dims.iter().position(|d| *d == axis.dim).ok_or(Unknown)?;
                Ok(Axis { dim, ..axis })
            }
            Op::Slice(op) => {
                let axis = x.ok_or(Unknown)?;
                let whole = |at: usize| at.is_multiple_of(self.sizes.groups() * axis.inner);
                match op.dim != axis.dim || (op.step == 1 && whole(op.start) && whole(op.end)) {
                    true => Ok(axis),
                    false => Err(Couples),
                }
            }
            Op::Split(op) => {
                let axis = x.ok_or(Unknown)?;
                let whole = |size: &usize| size.is_multiple_of(self.sizes.groups() * axis.inner);
                if op.dim != axis.dim || op.sizes.iter().all(whole) { Ok(axis) } else { Err(Couples) }
            }
            Op::Cat(op) => {
                let axis = inputs.iter().find_map(|v| self.axis_of(*v)).ok_or(Unknown)?;
                inputs.iter().try_for_each(|v| match self.axis_of(*v) {
                    Some(other) if other == axis => Ok(()),
                    Some(_) => Err(Couples),
                    None if axis.dim != op.dim && self.uniform[v.index()][axis.dim] => Ok(()),
                    None => Err(Unknown),
                })?;
                Ok(axis)
            }
            Op::Embedding(_) => match x {
                Some(_) => Err(Couples),
                None => self.axis_of(inputs[1]).ok_or(Unknown),
            },
            Op::IndexSelect(op) => match (x, self.axis_of(inputs[1])) {
                (Some(axis), None) if axis.dim != op.dim => Ok(axis),
                (None, Some(axis)) => Ok(Axis { dim: op.dim, ..axis }),
                (Some(_), Some(_)) => Err(Couples),
                _ => Err(Unknown),
            },
            Op::Gather(op) => match (x, self.axis_of(inputs[1])) {
                // Each sample picks numbers of a table that all share.
                (None, Some(axis)) if axis.dim == op.dim => Ok(axis),
                _ => self.aligned_apart_from(op.dim, inputs, out),
            },
            Op::Scatter(op) => self.aligned_apart_from(op.dim, inputs, out),
            Op::ScatterAdd(op) => match (x, self.axis_of(inputs[1])) {
                (None, Some(axis)) if axis.dim == op.dim => self.counted(inputs, axis, op.dim),
                _ => self.aligned_apart_from(op.dim, inputs, out),
            },
            Op::IndexAdd(op) => match (x, self.axis_of(inputs[1])) {
                (None, Some(axis)) => self.counted(inputs, Axis { dim: op.dim, ..axis }, op.dim),
                _ => Err(Unknown),
            },
            Op::Index(op) => self.indexed(op, node),
            Op::IndexPut(op) => {
                let axis = x.filter(|_| others_same()).ok_or(Unknown)?;
                let first = op.indexed.iter().position(|i| *i).unwrap_or(0);
                let values = self.graph.ty(inputs[1]);
                if axis.dim < first && values.numel() == 1 { Ok(axis) } else { Err(Unknown) }
            }
            Op::Matmul(_) => self.product(node),
            Op::Linear(_) => match x {
                Some(axis) if axis.dim + 1 == ty.rank() => Err(Couples),
                Some(axis) if others_same() => Ok(axis),
                Some(_) => Err(Couples),
                None => Err(Unknown),
            },
            Op::Conv2d(_) | Op::MaxPool2d(_) | Op::AvgPool2d(_) | Op::AdaptiveAvgPool2d(_) | Op::BatchNorm(_) => {
                match x.filter(|_| others_same()).ok_or(Unknown)? {
                    axis if axis.dim == 0 => Ok(axis),
                    _ => Err(Unknown),
                }
            }
            Op::ScaledDotProductAttention(_) => match self.aligned(inputs, out)? {
                axis if axis.dim < 2 => Ok(axis),
                _ => Err(Couples),
            },
            _ => Err(Unknown),
        }
    }

    /// The samples of operands that broadcast to `out`. They must have them at the same place.
    fn aligned(&self, inputs: &[ValueId], out: &TensorType) -> Found<Axis> {
        let mut found: Option<Axis> = None;
        for v in inputs {
            let Some(axis) = self.axis_of(*v) else { continue };
            let axis = Axis { dim: axis.dim + out.rank() - self.graph.ty(*v).rank(), ..axis };
            if found.is_some_and(|found| found != axis) {
                return Err(if self.sizes.groups() == 1 { Unknown } else { Couples });
            }
            found = Some(axis);
        }
        let axis = found.ok_or(Unknown)?;
        // What varies along the samples, and is the same in each micro-batch, belongs to places and not to samples.
        let varies = |v: &ValueId| {
            let dim = (axis.dim + self.graph.ty(*v).rank()).checked_sub(out.rank());
            self.axis_of(*v).is_none() && dim.is_some_and(|dim| !self.uniform[v.index()][dim])
        };
        if inputs.iter().any(varies) { Err(Unknown) } else { Ok(axis) }
    }

    fn aligned_apart_from(&self, dim: usize, inputs: &[ValueId], out: &TensorType) -> Found<Axis> {
        match self.aligned(inputs, out)? {
            axis if axis.dim == dim => Err(Couples),
            axis => Ok(axis),
        }
    }

    /// Adds a part of each sample to a place of a tensor of zeros, as in counting classes.
    fn counted(&self, inputs: &[ValueId], axis: Axis, dim: usize) -> Found<Axis> {
        let source = self.axis_of(inputs[2]);
        let same = source.is_none() && self.uniform[inputs[2].index()].get(dim) == Some(&true);
        let power = match self.class(inputs[2]) {
            Class::Rows { power, .. } | Class::Same { power } => power,
            _ => return Err(Unknown),
        };
        match self.is_zero(inputs[0]) && (source == Some(axis) || same) {
            true => Err(Refusal::Sum(power)),
            false => Err(Unknown),
        }
    }

    /// The samples keep their distances in memory order.
    fn reshaped(&self, axis: Axis, from: &TensorType, to: &TensorType) -> Found<Axis> {
        let after = |ty: &TensorType, dim: usize| ty.shape[dim + 1..].iter().product::<usize>();
        let stride = axis.inner * after(from, axis.dim);
        let fits = |dim: &usize| {
            let after = after(to, *dim);
            stride >= after
                && after > 0
                && stride.is_multiple_of(after)
                && (after * to.shape[*dim]).is_multiple_of(stride * self.sizes.groups())
        };
        let unmoved = Some(axis.dim).filter(|d| to.shape.get(..=*d) == from.shape.get(..=*d) && fits(d));
        let dim = unmoved.or_else(|| (0..to.rank()).find(fits)).ok_or(match self.sizes.groups() {
            1 => Unknown,
            _ => Couples,
        })?;
        Ok(Axis { dim, inner: stride / after(to, dim) })
    }

    fn indexed(&self, op: &Index, node: &Node) -> Found<Axis> {
        let (x, index) = (node.inputs[0], &node.inputs[1..]);
        let (ty, types) = (self.graph.ty(x), self.graph.types(index));
        let (_, at, position) = op.layout(ty, &types).map_err(|_| Unknown)?;
        let at = TensorType::new(ty.dtype, at);
        let first = op.indexed.iter().position(|i| *i).unwrap_or(0);
        match self.axis_of(x) {
            // Each sample picks from a table that all share.
            None => {
                let axis = self.aligned(index, &at)?;
                Ok(Axis { dim: position + axis.dim, ..axis })
            }
            Some(axis) if !op.indexed[axis.dim] => {
                let same = index.iter().all(|v| self.axis_of(*v).is_none());
                if same && axis.dim < first && position == first { Ok(axis) } else { Err(Unknown) }
            }
            // `x[arange(rows), i]`: each sample picks from itself.
            Some(axis) if axis.dim == first && axis.inner == 1 => {
                let own = self.counts_up(index[0], ty.shape[axis.dim]).ok_or(Unknown)?;
                let dim = own + at.rank() - types[0].rank();
                let aligned = |v: &ValueId| {
                    let rank = self.graph.ty(*v).rank();
                    let here = (dim + rank).checked_sub(at.rank());
                    match self.axis_of(*v) {
                        Some(other) => other.inner == 1 && Some(other.dim) == here,
                        None => here.is_none_or(|d| self.uniform[v.index()][d]),
                    }
                };
                let aligned = index[1..].iter().all(aligned);
                if aligned { Ok(Axis { dim: position + dim, inner: 1 }) } else { Err(Unknown) }
            }
            Some(_) => Err(Unknown),
        }
    }

    /// The dimension along which a value is `0, 1, …, count - 1`. It does not vary along the others.
    fn counts_up(&self, v: ValueId, count: usize) -> Option<usize> {
        let ty = self.graph.ty(v);
        let along = |d: usize| ty.shape[d] == count && (0..ty.rank()).all(|o| o == d || self.uniform[v.index()][o]);
        let dim = (0..ty.rank()).find(|d| along(*d))?;
        let rest: usize = ty.shape[dim + 1..].iter().product();
        if let Some(constant) = self.graph.constants.get(&self.graph.value(v).name) {
            let numbers = constant.to_f64();
            return (0..count).all(|i| numbers.get(i * rest) == Some(&(i as f64))).then_some(dim);
        }
        match self.graph.producer(v).map(|n| self.graph.node(n)) {
            Some(Node { op: Op::Arange(op), .. }) => (op.start == 0.0 && op.step == 1.0).then_some(dim),
            Some(Node { op, inputs, .. })
                if matches!(op, Op::Cast(_) | Op::Expand(_)) || op.view() == Some(View::Whole) =>
            {
                self.counts_up(inputs[0], count).map(|_| dim)
            }
            _ => None,
        }
    }

    fn product(&self, node: &Node) -> Found<Axis> {
        let out = self.graph.ty(node.outputs[0]);
        let rank = out.rank();
        // A place of the result's leading dimensions, a row, a column, or a place that is added up.
        #[derive(PartialEq)]
        enum Place {
            Leading(usize),
            Outer,
            Inner,
        }
        let place = |v: ValueId, outer: usize| {
            let (axis, r) = (self.axis_of(v)?, self.graph.ty(v).rank());
            let from_end = r - axis.dim;
            let place = match from_end {
                1 | 2 if from_end == outer => Place::Outer,
                1 | 2 => Place::Inner,
                _ => Place::Leading(axis.dim + rank - r),
            };
            Some((place, axis.inner))
        };
        let (a, b) = (node.inputs[0], node.inputs[1]);
        let uniform = |v: ValueId, from_end: usize| {
            let uniform = &self.uniform[v.index()];
            uniform.len().checked_sub(from_end).is_none_or(|d| uniform[d])
        };
        match (place(a, 2), place(b, 1)) {
            (Some((Place::Leading(dim), inner)), Some((Place::Leading(other), i))) if (dim, inner) == (other, i) => {
                Ok(Axis { dim, inner })
            }
            (Some((Place::Inner, i)), Some((Place::Inner, j))) if i == j => Err(Refusal::Sum(self.powers(node))),
            (Some((Place::Inner, _)), None) if uniform(b, 2) => Err(Refusal::Sum(self.powers(node))),
            (None, Some((Place::Inner, _))) if uniform(a, 1) => Err(Refusal::Sum(self.powers(node))),
            (Some(_), Some(_)) => Err(Couples),
            (Some((Place::Leading(dim), inner)), None) if uniform(b, rank - dim) => Ok(Axis { dim, inner }),
            (None, Some((Place::Leading(dim), inner))) if uniform(a, rank - dim) => Ok(Axis { dim, inner }),
            (Some((Place::Outer, inner)), None) => Ok(Axis { dim: rank - 2, inner }),
            (None, Some((Place::Outer, inner))) => Ok(Axis { dim: rank - 1, inner }),
            _ => Err(Unknown),
        }
    }

    fn powers(&self, node: &Node) -> i32 {
        let power = |v: &ValueId| match self.class(*v) {
            Class::Rows { power, .. } | Class::Same { power } => power,
            _ => 0,
        };
        node.inputs.iter().map(power).sum()
    }
}
