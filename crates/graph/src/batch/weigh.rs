//! Gives each part of a loss the micro-batch's share of it.

use std::collections::BTreeMap;

use super::class::{Class, Classes, Share, is_linear};
use super::recipe::Recipe;
use super::{BatchLoss, Doubt, Sizes, Weight};
use crate::ops::{Binary, Compare, CompareScalar, CrossEntropy, Where};
use crate::{Builder, DType, Graph, GraphError, NodeId, Op, TensorType, ValueId};

/// The number of targets of each cross-entropy that the loss depends on.
type Counts = Vec<(NodeId, ValueId)>;

pub(super) fn weighed(graph: Graph, loss: ValueId, sizes: Sizes<'_>) -> Result<(Graph, BatchLoss), GraphError> {
    let own = graph.values.len();
    let (counting, mut counts) = with_counts(&graph, loss)?;
    let other = match sizes.other {
        Some((other, samples)) if is_alike(&graph, other) => Some((with_counts(other, loss)?.0, samples)),
        _ => None,
    };
    // With one sample, a dimension of samples looks like any other of size 1. So the larger graph is followed.
    let mut seen = Sizes { other: None, ..sizes };
    let mut followed = &counting;
    if let Some((other, samples)) = &other {
        if sizes.samples / sizes.group.max(1) > 1 {
            seen.other = Some((other, *samples));
        } else {
            (followed, seen.samples, seen.other) = (other, *samples, Some((&counting, sizes.samples)));
        }
    }
    let classes = Classes::of(followed, seen);
    counts.retain(|(_, count)| classes.is_statistic(*count));

    let mut weighing = Weighing {
        classes: &classes,
        b: Builder::extend(graph),
        recipe: Recipe::of(counts),
        doubts: Vec::new(),
        weighed: BTreeMap::new(),
    };
    let weight = weighing.weigh(loss)?;
    let Weighing { b, mut recipe, mut doubts, .. } = weighing;
    let graph = with_statistics(b.finish()?, own, &classes, &mut recipe)?;
    if !classes.guesses.is_empty() {
        let live = followed.ancestors([loss]);
        doubts.extend(classes.guesses.iter().filter(|n| live[n.index()]).map(|n| Doubt::Number(*n)));
    }
    doubts.sort_by_key(|d| (d.node(), *d));
    doubts.dedup();
    recipe.complete(&counting, &classes);
    let place = |doubt: &Doubt| {
        let node = graph.node(doubt.node());
        format!("`{}` ({})", node.name, node.op.name())
    };
    let places = doubts.iter().map(place).collect();
    Ok((graph, BatchLoss { weight, doubts, places, recipe }))
}

/// Whether two graphs differ in sizes alone.
fn is_alike(a: &Graph, b: &Graph) -> bool {
    let same = |(a, b): (&crate::Node, &crate::Node)| {
        a.op.variant() == b.op.variant() && a.inputs == b.inputs && a.outputs == b.outputs
    };
    a.values.len() == b.values.len()
        && a.nodes.len() == b.nodes.len()
        && a.outputs == b.outputs
        && a.nodes.iter().zip(&b.nodes).all(same)
        && a.values.iter().zip(&b.values).all(|(a, b)| a.ty.rank() == b.ty.rank() && a.ty.dtype == b.ty.dtype)
}

/// The graph with nodes that count the targets of each cross-entropy in the loss.
fn with_counts(graph: &Graph, loss: ValueId) -> Result<(Graph, Counts), GraphError> {
    let live = graph.ancestors([loss]);
    let mut b = Builder::extend(graph.clone());
    let mut counts = Counts::new();
    for id in graph.node_ids().filter(|n| live[n.index()]) {
        let Op::CrossEntropy(CrossEntropy { ignore_index }) = graph.node(id).op else { continue };
        let target = graph.node(id).inputs[1];
        let counted = b.op(CompareScalar { op: Compare::Ne, scalar: ignore_index as f64 }, &[target])?;
        let counted = b.cast(counted, DType::F64)?;
        counts.push((id, b.sum(counted, &[0], false)?));
    }
    Ok((b.finish()?, counts))
}

struct Weighing<'a> {
    classes: &'a Classes<'a>,
    b: Builder,
    recipe: Recipe,
    doubts: Vec<Doubt>,
    /// The weighed form of each part of the loss.
    weighed: BTreeMap<ValueId, ValueId>,
}

impl Weighing<'_> {
    /// Weighs the loss: as a whole if it is one sum or one mean, and otherwise by its parts.
    fn weigh(&mut self, loss: ValueId) -> Result<Weight, GraphError> {
        match self.classes.class(loss) {
            Class::Sum(Share::WHOLE) => return Ok(Weight::Whole),
            Class::Sum(Share::EQUAL) | Class::Same { power: 0 } => return Ok(Weight::Equal),
            _ => {}
        }
        if let Some(node) = self.cross_entropy(loss) {
            self.doubt(loss);
            return Ok(Weight::Targets(node));
        }
        if let Class::Lost(_) | Class::Rows { .. } = self.classes.class(loss)
            && self.parts(loss).is_none()
        {
            self.doubt(loss);
            return Ok(Weight::Equal);
        }
        let weighed = self.part(loss)?;
        let mut graph = std::mem::replace(&mut self.b, Builder::new("")).finish()?;
        graph.outputs.values_mut().filter(|v| **v == loss).for_each(|v| *v = weighed);
        self.b = Builder::extend(graph);
        Ok(Weight::Inside)
    }

    /// The cross-entropy whose mean a value is, if its targets can be counted.
    fn cross_entropy(&self, mut v: ValueId) -> Option<NodeId> {
        let graph = self.classes.graph;
        loop {
            let id = graph.producer(v)?;
            let node = graph.node(id);
            match node.op {
                Op::CrossEntropy(_) if node.outputs[0] == v => {
                    return Some(id).filter(|_| self.recipe.counts.iter().any(|(counted, _)| *counted == id));
                }
                Op::Reshape(_) | Op::Detach(_) => v = node.inputs[0],
                _ => return None,
            }
        }
    }

    /// Notes what the analysis does not know about a value.
    fn doubt(&mut self, v: ValueId) {
        match (self.classes.class(v), self.classes.graph.producer(v)) {
            (Class::Lost(doubt), _) => self.doubts.push(doubt),
            (Class::Rows { .. } | Class::Mixed, Some(node)) => self.doubts.push(Doubt::Unknown(node)),
            _ => {}
        }
    }

    /// The operands of a node whose result is a linear combination of them: those to weigh.
    fn parts(&self, v: ValueId) -> Option<(NodeId, Vec<usize>)> {
        let graph = self.classes.graph;
        let id = graph.producer(v)?;
        let node = graph.node(id);
        let shared = |i: usize| matches!(self.classes.class(node.inputs[i]), Class::Same { power: 0 });
        let parts = match &node.op {
            Op::Binary(Binary::Add | Binary::Sub) => vec![0, 1],
            Op::Binary(Binary::Mul) if shared(1) => vec![0],
            Op::Binary(Binary::Mul) if shared(0) => vec![1],
            Op::Binary(Binary::Div) if shared(1) => vec![0],
            Op::BinaryScalar(op) if matches!(op.op, Binary::Add | Binary::Sub) => vec![0],
            Op::BinaryScalar(op) if op.op == Binary::Mul || (op.op == Binary::Div && !op.reverse) => vec![0],
            Op::Cat(_) => (0..node.inputs.len()).collect(),
            Op::Where(_) if shared(0) => vec![1, 2],
            op if is_linear(op) => vec![0],
            _ => return None,
        };
        // A number that follows the rows is no constant factor.
        let constant = match &node.op {
            Op::BinaryScalar(_) => self.classes.sizes.power_of_number(graph, id) == Some(0),
            _ => true,
        };
        constant.then_some((id, parts))
    }

    /// A part of the loss, times the micro-batch's share of it.
    fn part(&mut self, v: ValueId) -> Result<ValueId, GraphError> {
        if let Some(known) = self.weighed.get(&v) {
            return Ok(*known);
        }
        let weighed = match (self.classes.class(v), self.cross_entropy(v)) {
            (_, Some(node)) => {
                self.doubt(v);
                // Without targets there is no mean.
                let share = self.share(Share { power: 0, targets: Some(node) }, v)?;
                let some = self.b.compare_scalar(Compare::Ne, share, 0.0)?;
                let ty = self.b.ty(v).clone();
                let zero = self.b.full(TensorType::new(ty.dtype, ty.shape), 0.0)?;
                let mean = self.b.op(Where, &[some, v, zero])?;
                self.b.mul(mean, share)?
            }
            (Class::Sum(share), _) if share.targets.is_none() => self.shared(share, v)?,
            (Class::Same { power }, _) => self.shared(Share::EQUAL.times(power), v)?,
            _ => match self.parts(v) {
                Some((id, parts)) => self.combined(id, &parts, v)?,
                None => {
                    self.doubt(v);
                    self.shared(Share::EQUAL, v)?
                }
            },
        };
        self.weighed.insert(v, weighed);
        Ok(weighed)
    }

    /// The node's operator on weighed operands.
    fn combined(&mut self, id: NodeId, parts: &[usize], v: ValueId) -> Result<ValueId, GraphError> {
        let node = self.b.graph().node(id).clone();
        let mut inputs = node.inputs.clone();
        for i in parts {
            inputs[*i] = self.part(node.inputs[*i])?;
        }
        let result = node.outputs.iter().position(|o| *o == v).unwrap_or(0);
        match node.op {
            // The number is an addend, of which each micro-batch has an equal share.
            Op::BinaryScalar(op) if matches!(op.op, Binary::Add | Binary::Sub) => {
                let ty = self.b.ty(v).clone();
                let number = self.b.full(ty, op.scalar)?;
                let number = self.shared(Share::EQUAL, number)?;
                let pair = if op.reverse { [number, inputs[0]] } else { [inputs[0], number] };
                self.b.op(op.op, &pair)
            }
            op => Ok(self.b.apply(op, &inputs)?[result]),
        }
    }

    fn shared(&mut self, share: Share, v: ValueId) -> Result<ValueId, GraphError> {
        let share = self.share(share, v)?;
        self.b.mul(v, share)
    }

    /// The input with a share, in the type of a value.
    fn share(&mut self, share: Share, of: ValueId) -> Result<ValueId, GraphError> {
        let dtype = self.b.ty(of).dtype;
        let name = match share.targets {
            Some(node) => format!("share.of_targets.{}", self.b.graph().node(node).name),
            None => format!("share.of_micro_batch.{}", -share.power),
        };
        let name = format!("{name}.{dtype}");
        if let Some(known) = self.b.graph().find(&name) {
            return Ok(known);
        }
        self.recipe.shares.push((name.clone(), dtype, share));
        self.b.input(&name, dtype, [])
    }
}

/// The graph with an input in place of each statistic that its nodes read. The first `own` values are those that were
/// classified.
fn with_statistics(graph: Graph, own: usize, classes: &Classes<'_>, recipe: &mut Recipe) -> Result<Graph, GraphError> {
    let is_statistic = |v: &ValueId| v.index() < own && classes.is_statistic(*v);
    let outputs: Vec<ValueId> = graph.outputs.values().copied().collect();
    let updates: Vec<ValueId> = graph.state_updates.iter().map(|u| u.value).collect();
    let live = graph.ancestors(outputs.into_iter().chain(updates));
    // Readers that are statistics themselves are computed by the broker, too.
    let reader = |n: usize| live[n] && !graph.nodes[n].outputs.iter().all(is_statistic);
    let readers: Vec<usize> = (0..graph.nodes.len()).filter(|n| reader(*n)).collect();
    let mut found: BTreeMap<ValueId, bool> = BTreeMap::new();
    for node in readers.iter().map(|n| &graph.nodes[*n]) {
        for (i, v) in node.inputs.iter().enumerate().filter(|(_, v)| is_statistic(v)) {
            let divides = matches!(node.op, Op::Binary(Binary::Div)) && i == 1;
            found.entry(*v).and_modify(|d| *d &= divides).or_insert(divides);
        }
    }
    let mut b = Builder::extend(graph);
    let mut inputs = BTreeMap::new();
    for (v, divides) in found {
        let (name, ty) = (format!("batch.{}", b.graph().value(v).name), b.ty(v).clone());
        inputs.insert(v, b.input(&name, ty.dtype, ty.shape)?);
        recipe.statistics.push((name, v, divides));
    }
    let mut graph = b.finish()?;
    for n in readers {
        for v in &mut graph.nodes[n].inputs {
            *v = inputs.get(v).copied().unwrap_or(*v);
        }
    }
    graph.validate()?;
    Ok(graph)
}
