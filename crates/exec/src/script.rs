//! Cuts a Program into segments: instructions that a backend can run without the executor in between.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;

use fusionllm_backend::{Prepared, Segment, SegmentNode};
use fusionllm_graph::ops::{Binary, Cat, Reshape, SquaredNorm};
use fusionllm_graph::{DType, NodeId, Op, TensorType, ValueId, ValueKind};
use fusionllm_program::{Access, Address, Instruction, Program};

use crate::ExecError;
use crate::state::State;

/// A variable of a script: where a tensor stays between segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Variable {
    /// The Program's tensor with this address.
    Tensor(Address),
    /// The key of a micro-batch's random numbers.
    Key(u32),
    /// The optimizer's numbers of this step, at this multiple of the learning rate.
    Hyper(Rate),
    /// The squared norm of a parameter's gradient that leaves memory before all norms are measured.
    Norm(ValueId),
    /// The squared norms of [`Script::norms`], as one tensor.
    Norms,
}

/// A multiple of the learning rate, as its bits, which can be compared and hashed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Rate(u64);

impl Rate {
    pub(crate) fn get(self) -> f64 {
        f64::from_bits(self.0)
    }
}

impl Variable {
    /// The address of a tensor that stays from pass to pass.
    pub(crate) fn lasting(self) -> Option<Address> {
        match self {
            Self::Tensor(address) if address.stays() => Some(address),
            _ => None,
        }
    }
}

/// A Program as a backend runs it.
pub struct Script {
    pub(crate) steps: Vec<Step>,
    /// The parameters whose gradients' squared norms are measured, in graph order.
    pub(crate) norms: Vec<ValueId>,
    /// The buffers that the program changes.
    pub(crate) buffers: BTreeSet<ValueId>,
    /// The number of instructions, to notice another program.
    pub(crate) instructions: usize,
}

/// One step of a [`Script`].
pub(crate) enum Step {
    /// The instruction at this index.
    Alone(usize),
    /// A segment.
    Compute(Compute),
}

/// A segment, the places that its tensors come from, and the places that they go to.
pub(crate) struct Compute {
    /// The instructions that it stands for.
    pub(crate) instructions: Range<usize>,
    /// For each node, the index of the first instruction that is not done after it.
    pub(crate) until: Vec<usize>,
    /// The inputs, and whether they leave their variable.
    pub(crate) inputs: Vec<(Variable, bool)>,
    pub(crate) outputs: Vec<Variable>,
    /// Variables that are emptied without being read by a node.
    pub(crate) freed: Vec<Variable>,
    /// Whether it updates parameters, which a verdict can forbid.
    pub(crate) update: bool,
    /// Most bytes that the segment holds at once, beside tensors that stay in their variables.
    pub(crate) peak_bytes: u64,
    /// `None` if the step only moves tensors from variable to variable.
    pub(crate) prepared: Option<Arc<Prepared>>,
    /// For each output, its index among the inputs. It is used only if nothing is prepared.
    pub(crate) moves: Vec<usize>,
}

impl Script {
    /// Cuts a valid Program. With `each`, every instruction is a segment of its own.
    ///
    /// # Errors
    ///
    /// The backend cannot prepare a segment.
    pub(crate) fn new(program: &Program, state: &State, each: bool) -> Result<Self, ExecError> {
        let mut cutter = Cutter {
            program,
            state,
            each,
            open: Open::default(),
            reports: Vec::new(),
            parts: BTreeSet::new(),
            gradients: BTreeSet::new(),
            measured: BTreeSet::new(),
            norms: Vec::new(),
            steps: Vec::new(),
            prepared: HashMap::new(),
        };
        for (index, instruction) in program.instructions.iter().enumerate() {
            cutter.instruction(index, instruction)?;
            if each {
                cutter.cut(index + 1)?;
            }
        }
        cutter.report(program.instructions.len())?;
        cutter.cut(program.instructions.len())?;
        let (steps, norms) = (cutter.steps, cutter.norms);
        Ok(Self { steps, norms, buffers: changed_buffers(program), instructions: program.instructions.len() })
    }
}

fn changed_buffers(program: &Program) -> BTreeSet<ValueId> {
    let is_buffer = |v: &ValueId| matches!(program.values.get(v).map(|v| &v.kind), Some(ValueKind::Buffer(_)));
    let mut buffers = BTreeSet::new();
    for instruction in &program.instructions {
        instruction.effects(program, 0, |tensor, access| {
            if let (Address::Held { value }, Access::Replace) = (tensor, access) {
                buffers.extend(Some(value).filter(is_buffer));
            }
        });
    }
    buffers
}

/// A value of the open segment. Inputs get the first numbers once all are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Local {
    Input(usize),
    Result(usize),
}

/// The segment that grows.
#[derive(Default)]
struct Open {
    from: usize,
    inputs: Vec<(Variable, TensorType)>,
    nodes: Vec<(Op, Vec<Local>, Vec<TensorType>)>,
    /// The instruction of each node.
    instructions: Vec<usize>,
    results: usize,
    /// The values that the variables hold, as far as the segment knows.
    held: BTreeMap<Variable, Local>,
    /// Variables that were written.
    written: BTreeSet<Variable>,
    freed: Vec<Variable>,
    /// The nodes that run in it, with their micro-batches.
    ran: BTreeSet<(NodeId, u32)>,
    update: bool,
}

impl Open {
    fn read(&mut self, variable: Variable, ty: &TensorType) -> Local {
        *self.held.entry(variable).or_insert_with(|| {
            self.inputs.push((variable, ty.clone()));
            Local::Input(self.inputs.len() - 1)
        })
    }

    fn write(&mut self, variable: Variable, local: Local) {
        self.held.insert(variable, local);
        self.written.insert(variable);
    }

    fn free(&mut self, variable: Variable) {
        self.written.remove(&variable);
        if self.held.remove(&variable).is_none() {
            self.freed.push(variable);
        }
    }

    fn run(&mut self, index: usize, op: Op, inputs: Vec<Local>, outputs: Vec<TensorType>) -> Vec<Local> {
        let results = self.results..self.results + outputs.len();
        self.results = results.end;
        self.nodes.push((op, inputs, outputs));
        self.instructions.push(index);
        results.map(Local::Result).collect()
    }

    fn is_empty(&self) -> bool {
        self.nodes.is_empty() && self.written.is_empty() && self.freed.is_empty() && self.inputs.is_empty()
    }
}

struct Cutter<'a> {
    program: &'a Program,
    state: &'a State,
    each: bool,
    open: Open,
    /// Reports that wait until the device is waited for anyway: their instructions and values, and whether these are
    /// freed then.
    reports: Vec<(usize, Variable, bool)>,
    /// The parts that have a sum.
    parts: BTreeSet<Address>,
    /// The parameters that have a gradient.
    gradients: BTreeSet<ValueId>,
    /// The parameters among them whose gradient's norm is measured already.
    measured: BTreeSet<ValueId>,
    norms: Vec<ValueId>,
    steps: Vec<Step>,
    /// The prepared segments, by their digests, because micro-batches have the same segments.
    prepared: HashMap<[u8; 32], Arc<Prepared>>,
}

impl<'a> Cutter<'a> {
    fn instruction(&mut self, index: usize, instruction: &Instruction) -> Result<(), ExecError> {
        let program = self.program;
        let updates = matches!(instruction, Instruction::Update { .. });
        if updates != self.open.update {
            self.cut(index)?;
            self.open.update = updates;
        }
        match *instruction {
            Instruction::Run { node, micro_batch } => {
                // A node that runs twice begins another segment. Within one, a compiler may compute equal results once,
                // and so keep a value that was to be freed.
                if self.open.ran.contains(&(node, micro_batch)) {
                    self.cut(index)?;
                }
                self.open.ran.insert((node, micro_batch));
                let node = program.nodes.get(&node).ok_or_else(invalid)?;
                let inputs =
                    node.inputs.iter().map(|v| self.operand(*v, micro_batch)).collect::<Result<Vec<_>, _>>()?;
                let types = node.outputs.iter().map(|v| self.ty(*v).cloned()).collect::<Result<Vec<_>, _>>()?;
                let results = self.open.run(index, node.op.clone(), inputs, types);
                for (v, result) in node.outputs.iter().zip(results) {
                    self.open.write(Variable::Tensor(Address::Value { value: *v, micro_batch }), result);
                }
            }
            Instruction::Free { value, micro_batch } => {
                let variable = Variable::Tensor(Address::Value { value, micro_batch });
                match self.reports.iter_mut().find(|(_, reported, _)| *reported == variable) {
                    Some((_, _, freed)) => *freed = true,
                    None => self.open.free(variable),
                }
            }
            Instruction::Accumulate { parameter, part, value, micro_batch } => {
                let mut sum = self.operand(value, micro_batch)?;
                let part = Address::Part { parameter, part };
                let variable = Variable::Tensor(part);
                if !self.parts.insert(part) {
                    sum = self.add(index, variable, sum, self.ty(value)?.clone());
                }
                self.open.write(variable, sum);
            }
            Instruction::UpdateState { buffer, value, micro_batch } => {
                let local = self.operand(value, micro_batch)?;
                self.open.write(Variable::Tensor(Address::Held { value: buffer }), local);
            }
            Instruction::Join { parameter, part } => {
                let first = program.reductions.get(&parameter).ok_or_else(invalid)?.joined(part).start;
                let [first, part] = [first, part].map(|part| Address::Part { parameter, part });
                let ty = self.ty(parameter)?.clone();
                let term = self.open.read(Variable::Tensor(part), &ty);
                let sum = self.add(index, Variable::Tensor(first), term, ty);
                self.open.write(Variable::Tensor(first), sum);
                self.open.free(Variable::Tensor(part));
                self.parts.remove(&part);
            }
            Instruction::Reduce { parameter } => {
                let reduction = program.reductions.get(&parameter).ok_or_else(invalid)?;
                let ty = self.ty(parameter)?.clone();
                // The sum of the brackets before, and the open bracket with its sum.
                let (mut total, mut open): (Option<Local>, Option<(u32, Local)>) = (None, None);
                for (bracket, part) in reduction.terms() {
                    let mut sum = self.open.read(Variable::Tensor(Address::Part { parameter, part }), &ty);
                    match open {
                        Some((same, before)) if same == bracket => sum = self.sum(index, before, sum, &ty),
                        Some((_, before)) => total = Some(self.total(index, total, before, &ty)),
                        None => {}
                    }
                    open = Some((bracket, sum));
                }
                let (_, last) = open.ok_or_else(invalid)?;
                let sum = self.total(index, total, last, &ty);
                for (_, part) in reduction.terms() {
                    let part = Address::Part { parameter, part };
                    self.open.free(Variable::Tensor(part));
                    self.parts.remove(&part);
                }
                self.open.write(Variable::Tensor(Address::Gradient { parameter }), sum);
                self.gradients.insert(parameter);
            }
            Instruction::Clip => {
                self.report(index)?;
                self.measure_norms(index)?;
                self.alone(index)?;
            }
            Instruction::Update { parameter } => self.update(index, parameter)?,
            Instruction::Report { value, micro_batch, .. } if !self.each => {
                let variable = Variable::Tensor(Address::Value { value, micro_batch });
                self.reports.push((index, variable, false));
            }
            Instruction::Offload { tensor: Address::Gradient { parameter }, .. } => {
                if self.gradients.contains(&parameter) {
                    let norm = self.norm(index, parameter)?;
                    self.open.write(Variable::Norm(parameter), norm);
                    self.measured.insert(parameter);
                }
                self.alone(index)?;
            }
            Instruction::Receive { tensor, .. } => {
                if let Address::Part { .. } = tensor {
                    self.parts.insert(tensor);
                }
                self.alone(index)?;
            }
            Instruction::Send { tensor, .. } => {
                self.parts.remove(&tensor);
                self.alone(index)?;
            }
            Instruction::Report { .. } | Instruction::Offload { .. } | Instruction::Load { .. } => self.alone(index)?,
        }
        Ok(())
    }

    /// Ends the open segment before the instruction at `end`, and reports what has waited.
    fn report(&mut self, end: usize) -> Result<(), ExecError> {
        if self.reports.is_empty() {
            return Ok(());
        }
        self.cut(end)?;
        let reports = std::mem::take(&mut self.reports);
        self.steps.extend(reports.iter().map(|(index, ..)| Step::Alone(*index)));
        for (_, variable, _) in reports.into_iter().filter(|(_, _, freed)| *freed) {
            self.open.free(variable);
        }
        Ok(())
    }

    fn alone(&mut self, index: usize) -> Result<(), ExecError> {
        self.cut(index)?;
        self.steps.push(Step::Alone(index));
        self.open.from = index + 1;
        Ok(())
    }

    /// The squared norms of all gradients as one tensor, so that one copy brings them to the host.
    fn measure_norms(&mut self, index: usize) -> Result<(), ExecError> {
        let gradients: Vec<ValueId> = std::mem::take(&mut self.gradients).into_iter().collect();
        let single = TensorType::new(DType::F64, [1]);
        let mut norms = Vec::with_capacity(gradients.len());
        for parameter in &gradients {
            norms.push(match self.measured.remove(parameter) {
                true => {
                    let norm = self.open.read(Variable::Norm(*parameter), &single);
                    self.open.free(Variable::Norm(*parameter));
                    norm
                }
                false => self.norm(index, *parameter)?,
            });
        }
        if !norms.is_empty() {
            let all = TensorType::new(DType::F64, [norms.len()]);
            let all = self.open.run(index, Cat { dim: 0 }.into(), norms, vec![all]);
            self.open.write(Variable::Norms, all[0]);
        }
        self.norms = gradients;
        Ok(())
    }

    /// The squared norm of a gradient, as a list of one number.
    fn norm(&mut self, index: usize, parameter: ValueId) -> Result<Local, ExecError> {
        let ty = self.ty(parameter)?.clone();
        let gradient = self.open.read(Variable::Tensor(Address::Gradient { parameter }), &ty);
        let norm = self.open.run(index, SquaredNorm.into(), vec![gradient], vec![TensorType::new(DType::F64, [])]);
        let single = TensorType::new(DType::F64, [1]);
        Ok(self.open.run(index, Reshape { shape: vec![1] }.into(), norm, vec![single])[0])
    }

    fn update(&mut self, index: usize, parameter: ValueId) -> Result<(), ExecError> {
        let ty = self.ty(parameter)?.clone();
        let gradient = Variable::Tensor(Address::Gradient { parameter });
        let name = &self.program.values.get(&parameter).ok_or_else(invalid)?.name;
        let (optimizer, rate) = self.state.update_rule(name);
        let slots = 0..optimizer.slots().len() as u32;
        let state = slots.map(|slot| Address::OptimizerState { parameter, slot });
        let variables: Vec<Variable> =
            std::iter::once(Address::Held { value: parameter }).chain(state).map(Variable::Tensor).collect();
        let mut inputs: Vec<Local> = variables.iter().map(|variable| self.open.read(*variable, &ty)).collect();
        inputs.insert(1, self.open.read(gradient, &ty));
        let hyper = TensorType::new(DType::F64, [optimizer.hyper_len()]);
        inputs.push(self.open.read(Variable::Hyper(Rate(rate.to_bits())), &hyper));
        let results = self.open.run(index, optimizer.op(), inputs, vec![ty; variables.len()]);
        for (variable, result) in variables.into_iter().zip(results) {
            self.open.write(variable, result);
        }
        self.open.free(gradient);
        Ok(())
    }

    fn add(&mut self, index: usize, variable: Variable, term: Local, ty: TensorType) -> Local {
        let sum = self.open.read(variable, &ty);
        self.sum(index, sum, term, &ty)
    }

    fn total(&mut self, index: usize, before: Option<Local>, term: Local, ty: &TensorType) -> Local {
        before.map_or(term, |before| self.sum(index, before, term, ty))
    }

    fn sum(&mut self, index: usize, a: Local, b: Local, ty: &TensorType) -> Local {
        self.open.run(index, Binary::Add.into(), vec![a, b], vec![ty.clone()])[0]
    }

    fn operand(&mut self, v: ValueId, micro_batch: u32) -> Result<Local, ExecError> {
        let ty = self.ty(v)?;
        let variable = self.program.operand(v, micro_batch).map_or(Variable::Key(micro_batch), Variable::Tensor);
        Ok(self.open.read(variable, ty))
    }

    fn ty(&self, v: ValueId) -> Result<&'a TensorType, ExecError> {
        self.program.values.get(&v).map(|v| &v.ty).ok_or_else(invalid)
    }

    /// Ends the open segment before the instruction at `end`.
    fn cut(&mut self, end: usize) -> Result<(), ExecError> {
        let open = std::mem::replace(&mut self.open, Open { from: end, ..Open::default() });
        if open.is_empty() && open.from >= end {
            return Ok(());
        }
        let count = open.inputs.len();
        let number = |local: &Local| match *local {
            Local::Input(i) => i,
            Local::Result(i) => count + i,
        };
        let leaves = |variable: &Variable| open.written.contains(variable) || !open.held.contains_key(variable);
        let inputs: Vec<(Variable, bool)> =
            open.inputs.iter().map(|(variable, _)| (*variable, leaves(variable))).collect();
        let (outputs, locals): (Vec<Variable>, Vec<usize>) =
            open.written.iter().filter_map(|variable| Some((*variable, number(open.held.get(variable)?)))).unzip();
        let mut until: Vec<usize> = open.instructions.iter().skip(1).copied().collect();
        until.push(end);
        until.truncate(open.nodes.len());
        let mut compute = Compute {
            instructions: open.from..end,
            until,
            inputs,
            outputs,
            freed: open.freed,
            update: open.update,
            peak_bytes: 0,
            prepared: None,
            moves: Vec::new(),
        };
        if open.nodes.is_empty() {
            compute.moves = locals;
        } else {
            let nodes = open.nodes.into_iter().map(|(op, inputs, outputs)| SegmentNode {
                op,
                inputs: inputs.iter().map(|local| number(local) as u32).collect(),
                outputs,
            });
            let segment = Segment {
                inputs: open.inputs.into_iter().map(|(_, ty)| ty).collect(),
                nodes: nodes.collect(),
                outputs: locals.iter().map(|local| *local as u32).collect(),
            };
            // The results of an update replace its operands.
            if !open.update {
                let given: Vec<bool> =
                    compute.inputs.iter().map(|(variable, leaves)| *leaves && variable.lasting().is_none()).collect();
                compute.peak_bytes = segment.peak_bytes(&given);
            }
            compute.prepared = Some(self.prepare(segment)?);
        }
        self.steps.push(Step::Compute(compute));
        Ok(())
    }

    fn prepare(&mut self, segment: Segment) -> Result<Arc<Prepared>, ExecError> {
        let digest = segment.digest();
        if let Some(prepared) = self.prepared.get(&digest) {
            return Ok(prepared.clone());
        }
        let prepared = Arc::new(self.state.backend.prepare(segment)?);
        self.prepared.insert(digest, prepared.clone());
        Ok(prepared)
    }
}

/// The error for a Program that [`Program::validate`] rules out.
pub(crate) fn invalid() -> ExecError {
    ExecError::State("the program refers to something missing; it was not validated".into())
}
