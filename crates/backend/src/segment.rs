//! Segments: runs of operators that a backend gets as a whole.

use std::any::Any;
use std::io::Write;
use std::ops::ControlFlow;

use fusionllm_graph::{Builder, Graph, Op, TensorType, ValueId};
use serde::Serialize;

use crate::{Backend, BackendError, Tensor};

/// Operators that run without a message in between.
///
/// Values are numbered: first the inputs, then the results of the first node, then those of the second, and so on.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Segment {
    /// The types of the inputs.
    pub inputs: Vec<TensorType>,
    /// The operators, in the order in which they run.
    pub nodes: Vec<SegmentNode>,
    /// The values that the segment returns. They may be inputs, and may repeat.
    pub outputs: Vec<u32>,
}

/// One operator of a [`Segment`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SegmentNode {
    /// The operator.
    pub op: Op,
    /// The values that it reads.
    pub inputs: Vec<u32>,
    /// The types of its results.
    pub outputs: Vec<TensorType>,
}

impl Segment {
    /// A digest by which segments are told apart: equal segments have equal ones.
    pub fn digest(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        // A hasher takes everything.
        let _ = write!(hasher, "{self:?}");
        hasher.finalize().into()
    }

    /// The nodes of a graph that `targets` depend on, with `sources` as inputs and `targets` as outputs.
    ///
    /// # Errors
    ///
    /// A target depends on a value of the graph's inputs or tensors that is not among the sources.
    pub fn of_graph(graph: &Graph, sources: &[ValueId], targets: &[ValueId]) -> Result<Self, BackendError> {
        let live = graph.ancestors(targets.iter().copied());
        let mut numbers = vec![None; graph.values.len()];
        let mut next = 0;
        let mut number = |numbers: &mut Vec<Option<u32>>, v: ValueId| {
            numbers[v.index()] = Some(next);
            next += 1;
        };
        let find = |numbers: &[Option<u32>], v: &ValueId| {
            numbers[v.index()].ok_or_else(|| BackendError::Missing { name: graph.value(*v).name.clone() })
        };
        sources.iter().for_each(|v| number(&mut numbers, *v));
        let mut segment = Self { inputs: sources.iter().map(|v| graph.ty(*v).clone()).collect(), ..Self::default() };
        for node in graph.node_ids().filter(|n| live[n.index()]).map(|n| graph.node(n)) {
            segment.nodes.push(SegmentNode {
                op: node.op.clone(),
                inputs: node.inputs.iter().map(|v| find(&numbers, v)).collect::<Result<_, _>>()?,
                outputs: node.outputs.iter().map(|v| graph.ty(*v).clone()).collect(),
            });
            node.outputs.iter().for_each(|v| number(&mut numbers, *v));
        }
        segment.outputs = targets.iter().map(|v| find(&numbers, v)).collect::<Result<_, _>>()?;
        Ok(segment)
    }

    /// The decomposition of an operator for operands of these types, which are the inputs. `None` if it has none.
    pub(crate) fn of_decomposition(op: &Op, operands: &[&TensorType]) -> Result<Option<Self>, BackendError> {
        let mut b = Builder::new(op.name());
        let mut ids = Vec::with_capacity(operands.len());
        for (i, ty) in operands.iter().enumerate() {
            ids.push(b.input(&format!("operand{i}"), ty.dtype, ty.shape.clone())?);
        }
        let results = op.decompose(&mut b, &ids)?;
        results.map(|results| Self::of_graph(b.graph(), &ids, &results)).transpose()
    }

    /// The types of all values, by number.
    pub fn values(&self) -> Vec<&TensorType> {
        self.inputs.iter().chain(self.nodes.iter().flat_map(|n| &n.outputs)).collect()
    }

    /// The most bytes that the segment holds at once: results, and the inputs that are `given` to it, until their last
    /// use.
    pub fn peak_bytes(&self, given: &[bool]) -> u64 {
        let values = self.values();
        let last = self.last_uses();
        let bytes = |v: usize| values[v].bytes() as u64;
        let counts = |v: usize| given.get(v).copied().unwrap_or(true);
        let mut live: u64 = (0..self.inputs.len()).filter(|v| counts(*v)).map(bytes).sum();
        let mut peak = live;
        let mut next = self.inputs.len();
        for (i, node) in self.nodes.iter().enumerate() {
            let mut operands: Vec<usize> = node.inputs.iter().map(|v| *v as usize).collect();
            operands.sort_unstable();
            operands.dedup();
            live -= operands.into_iter().filter(|v| last[*v] == LastUse::Node(i) && counts(*v)).map(bytes).sum::<u64>();
            let results = next..next + node.outputs.len();
            live += results.clone().map(bytes).sum::<u64>();
            peak = peak.max(live);
            live -= results.filter(|v| last[*v] == LastUse::Never).map(bytes).sum::<u64>();
            next += node.outputs.len();
        }
        peak
    }

    /// The segment with decompositions in place of operators that do not run, as far as there are any.
    pub(crate) fn expanded(&self, runs: &dyn Fn(&Op) -> bool) -> Result<Self, BackendError> {
        let mut expanded = Self { inputs: self.inputs.clone(), ..Self::default() };
        let mut next = self.inputs.len() as u32;
        expanded.outputs = self.expand_into(&mut expanded.nodes, (0..next).collect(), &mut next, runs)?;
        Ok(expanded)
    }

    /// Appends the nodes to those of another segment. `numbers` are the inputs there, and `next` is its next free
    /// number. Returns the outputs' numbers there.
    fn expand_into(
        &self,
        nodes: &mut Vec<SegmentNode>,
        mut numbers: Vec<u32>,
        next: &mut u32,
        runs: &dyn Fn(&Op) -> bool,
    ) -> Result<Vec<u32>, BackendError> {
        let values = self.values();
        for node in &self.nodes {
            let inputs: Vec<u32> = node.inputs.iter().map(|v| numbers[*v as usize]).collect();
            let types: Vec<&TensorType> = node.inputs.iter().map(|v| values[*v as usize]).collect();
            let parts = if runs(&node.op) { None } else { Self::of_decomposition(&node.op, &types)? };
            if let Some(parts) = parts {
                numbers.extend(parts.expand_into(nodes, inputs, next, runs)?);
            } else {
                nodes.push(SegmentNode { op: node.op.clone(), inputs, outputs: node.outputs.clone() });
                numbers.extend(*next..*next + node.outputs.len() as u32);
                *next += node.outputs.len() as u32;
            }
        }
        Ok(self.outputs.iter().map(|v| numbers[*v as usize]).collect())
    }

    /// The last use of each value.
    fn last_uses(&self) -> Vec<LastUse> {
        let mut last =
            vec![LastUse::Never; self.inputs.len() + self.nodes.iter().map(|n| n.outputs.len()).sum::<usize>()];
        for (i, node) in self.nodes.iter().enumerate() {
            node.inputs.iter().for_each(|v| last[*v as usize] = LastUse::Node(i));
        }
        self.outputs.iter().for_each(|v| last[*v as usize] = LastUse::Output);
        last
    }
}

/// The last use of a value in a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LastUse {
    Never,
    Node(usize),
    Output,
}

/// A segment that a backend is ready to run. No other backend can run it.
pub struct Prepared {
    segment: Segment,
    last: Vec<LastUse>,
    data: Box<dyn Any + Send + Sync>,
}

impl Prepared {
    /// `data` is the form of the segment that the backend runs.
    pub fn new(segment: Segment, data: impl Any + Send + Sync) -> Self {
        Self { last: segment.last_uses(), segment, data: Box::new(data) }
    }

    /// The segment.
    pub fn segment(&self) -> &Segment {
        &self.segment
    }

    /// The data that the backend needs, or `None` if another backend prepared it.
    pub fn get<T: 'static>(&self) -> Option<&T> {
        (*self.data).downcast_ref()
    }

    /// Runs the segment operator by operator. Each tensor is given up at its last use, so that a kernel may work in
    /// place.
    pub(crate) fn run_each<B: Backend + ?Sized>(
        &self,
        backend: &B,
        inputs: Vec<Tensor>,
        done: Done<'_>,
    ) -> Result<Vec<Tensor>, BackendError> {
        let mut values: Vec<Option<Tensor>> = Vec::with_capacity(self.last.len());
        for (tensor, last) in inputs.into_iter().zip(&self.last) {
            values.push((*last != LastUse::Never).then_some(tensor));
        }
        for (i, node) in self.segment.nodes.iter().enumerate() {
            let mut operands = Vec::with_capacity(node.inputs.len());
            for (k, v) in node.inputs.iter().enumerate() {
                let last = self.last[*v as usize] == LastUse::Node(i) && !node.inputs[k + 1..].contains(v);
                operands.push(take(&mut values, *v, last)?);
            }
            let results = backend.run(&node.op, operands, &node.outputs)?;
            if results.len() != node.outputs.len() {
                let name = format!("result {} of {}", results.len(), node.op.name());
                return Err(BackendError::Missing { name });
            }
            for tensor in results {
                let used = self.last.get(values.len()).is_some_and(|last| *last != LastUse::Never);
                values.push(used.then_some(tensor));
            }
            if done(i).is_break() {
                return Err(BackendError::Stopped);
            }
        }
        let outputs = &self.segment.outputs;
        outputs.iter().enumerate().map(|(k, v)| take(&mut values, *v, !outputs[k + 1..].contains(v))).collect()
    }
}

/// A value. With `last`, the segment gives it up.
fn take(values: &mut [Option<Tensor>], v: u32, last: bool) -> Result<Tensor, BackendError> {
    let slot = values.get_mut(v as usize);
    let tensor = slot.and_then(|slot| if last { slot.take() } else { slot.clone() });
    tensor.ok_or_else(|| BackendError::Missing { name: format!("value {v} of a segment") })
}

/// Told after each node that has run. It may stop the segment there.
pub type Done<'a> = &'a mut dyn FnMut(usize) -> ControlFlow<()>;
