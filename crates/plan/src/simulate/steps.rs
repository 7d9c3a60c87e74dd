//! One peer's instructions as steps that take time.

use std::collections::BTreeMap;
use std::ops::Range;

use foldhash::{HashMap, HashMapExt, HashSet, HashSetExt};
use fusionllm_graph::{NodeId, ValueId};
use fusionllm_program::{Access, Address, Instruction, Medium, Memory, PeerId, Program, ProgramError};

use super::activities::Activities;
use super::messages::{Messages, value_type};
use super::stretches::Stretches;
use super::{Activity, SimulateOptions};
use crate::cost::{CopyDirection, Device, signature, squared_norm, sum, update};
use crate::error::PlanError;

/// One step of a peer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Step {
    /// Computes, and holds at most `peak` bytes meanwhile.
    Compute { activity: Activity, micro_batch: Option<u32>, seconds: f64, peak: u64 },
    /// Loses the computing time that a message takes at one end, and holds `peak` bytes meanwhile.
    Exchange { activity: Activity, micro_batch: Option<u32>, message: u32, receives: bool, peak: u64 },
    /// Waits for a message.
    Receive { message: u32 },
    /// Hands over a message.
    Send { message: u32 },
    /// Sends norms and waits for the verdict.
    Clip,
}

/// The cost of a node on the peer's device.
#[derive(Debug, Clone, Copy)]
struct NodeCost {
    seconds: f64,
    scratch: u64,
}

/// Seconds that a parameter's gradient and update take.
#[derive(Debug, Clone, Copy)]
struct UpdateCost {
    norm: f64,
    /// Adding a term to the gradient.
    sum: f64,
    optimizer: f64,
}

/// The steps of a stretch of instructions.
pub(super) struct Written {
    /// Each step with the place of its instruction in the stretch.
    steps: Vec<(Step, usize)>,
    /// Bytes held before the stretch. The peaks of its steps are above these.
    held: u64,
    /// By how many bytes it changes what is held.
    change: i64,
    /// Whether backward has begun after it.
    backward: bool,
}

pub(super) struct Writer<'a> {
    program: &'a Program,
    device: &'a Device,
    messages: &'a Messages,
    /// The cost of each node, by node number less the first.
    nodes: Vec<NodeCost>,
    first_node: u32,
    memory: Memory<'a>,
    /// By micro-batch: the instructions that [`Self::memory`] has not counted, because their steps were known.
    uncounted: HashMap<u32, Vec<Range<usize>>>,
    /// By how many bytes these instructions change what is held.
    uncounted_bytes: i64,
    /// Bytes that stay from step to step.
    kept: u64,
    /// The number of the optimizer's slots.
    slots: usize,
    /// The cost of each parameter's gradient and update.
    updates: BTreeMap<ValueId, UpdateCost>,
    /// Sums that have begun.
    sums: HashSet<Address>,
    /// The tensors that were loaded and have not changed since.
    unchanged: HashSet<Address>,
    out: Vec<Step>,
}

impl<'a> Writer<'a> {
    pub(super) fn new(
        program: &'a Program,
        device: &'a Device,
        options: &SimulateOptions,
        messages: &'a Messages,
    ) -> Result<Self, PlanError> {
        let mut updates = BTreeMap::new();
        for &parameter in program.reductions.keys() {
            let ty = value_type(program, parameter)?;
            let cost = UpdateCost {
                norm: squared_norm(ty).seconds(device),
                sum: sum(ty).seconds(device),
                optimizer: update(&options.optimizer, ty).seconds(device),
            };
            updates.insert(parameter, cost);
        }
        Ok(Self {
            program,
            device,
            messages,
            nodes: node_costs(program, device)?,
            first_node: program.nodes.keys().next().map_or(0, |n| n.0),
            memory: Memory::new(program),
            uncounted: HashMap::new(),
            uncounted_bytes: 0,
            kept: program.kept_bytes(options.optimizer.slots().len()),
            slots: options.optimizer.slots().len(),
            updates,
            sums: HashSet::new(),
            unchanged: HashSet::new(),
            out: Vec::new(),
        })
    }

    pub(super) fn steps(self) -> Result<Vec<Step>, PlanError> {
        let stretches = Stretches::new(self.program);
        self.steps_of(stretches)
    }

    pub(super) fn steps_of(mut self, mut stretches: Stretches<'_, Written>) -> Result<Vec<Step>, PlanError> {
        let mut activities = Activities::new(self.program);
        let mut at = 0;
        while at < self.program.instructions.len() {
            let range = stretches.starting_at(at);
            at = range.end;
            if let Some((micro_batch, written)) = stretches.repeated(&range) {
                activities.set_begun(micro_batch, written.backward);
                self.repeat(range, micro_batch, written)?;
            } else {
                let written = self.write(range.clone(), &mut activities)?;
                stretches.remember(range, written);
            }
        }
        Ok(self.out)
    }

    /// Writes the steps of a stretch as they were written for another micro-batch.
    fn repeat(&mut self, range: Range<usize>, micro_batch: u32, written: &Written) -> Result<(), PlanError> {
        let more = self.held(self.memory.live()).cast_signed() - written.held.cast_signed();
        for &(mut step, at) in &written.steps {
            if let Step::Compute { activity, seconds, peak, .. } = step {
                self.compute(activity, Some(micro_batch), seconds, peak.saturating_add_signed(more));
                continue;
            }
            let it = match self.program.instructions[range.start + at] {
                Instruction::Receive { tensor, .. } => self.messages.find(self.program.peer, tensor),
                Instruction::Send { tensor, to } => self.messages.find(to, tensor),
                _ => None,
            };
            let (found, _) = it.ok_or_else(|| self.not_validated())?;
            match &mut step {
                Step::Receive { message } | Step::Send { message } => *message = found,
                Step::Exchange { message, micro_batch: of, peak, .. } => {
                    (*message, *of, *peak) = (found, Some(micro_batch), peak.saturating_add_signed(more));
                }
                Step::Compute { .. } | Step::Clip => {}
            }
            self.out.push(step);
        }
        self.uncounted.entry(micro_batch).or_default().push(range);
        self.uncounted_bytes += written.change;
        Ok(())
    }

    /// Bytes held in all if the memory counts `live` of them.
    fn held(&self, live: u64) -> u64 {
        self.kept.saturating_add(live).saturating_add_signed(self.uncounted_bytes)
    }

    /// Lets the memory count what was left out of this micro-batch.
    fn catch_up(&mut self, micro_batch: u32) {
        for range in self.uncounted.remove(&micro_batch).unwrap_or_default() {
            let before = self.memory.live();
            range.for_each(|at| _ = self.memory.step(at));
            self.uncounted_bytes -= self.memory.live().cast_signed() - before.cast_signed();
        }
    }

    /// Writes the steps of a stretch. Returns them if a later micro-batch can repeat them.
    fn write(&mut self, range: Range<usize>, activities: &mut Activities) -> Result<Option<Written>, PlanError> {
        let micro_batch = self.program.instructions[range.start].micro_batch();
        micro_batch.into_iter().for_each(|micro_batch| self.catch_up(micro_batch));
        let (first, held, sums) = (self.out.len(), self.held(self.memory.live()), self.sums.len());
        // Its first step may extend the last one.
        let joins = matches!(self.out.last(), Some(Step::Compute { micro_batch: m, .. }) if *m == micro_batch);
        let mut places = Vec::new();
        for at in range.clone() {
            let activity = activities.of(&self.program.instructions[at]);
            self.instruction(at, activity)?;
            places.resize(self.out.len() - first, at - range.start);
        }
        let change = self.held(self.memory.live()).cast_signed() - held.cast_signed();
        let backward = micro_batch.is_some_and(|micro_batch| activities.has_begun(micro_batch));
        let steps = || self.out[first..].iter().copied().zip(places).collect();
        Ok((!joins && self.sums.len() == sums).then(|| Written { steps: steps(), held, change, backward }))
    }

    fn instruction(&mut self, at: usize, (activity, micro_batch): (Activity, Option<u32>)) -> Result<(), PlanError> {
        let program = self.program;
        let i = &program.instructions[at];
        let live = self.memory.step(at);
        let held = self.held(live);
        match *i {
            Instruction::Receive { tensor, .. } => self.receive(tensor, activity, held)?,
            Instruction::Send { tensor, to } => self.send(tensor, to, activity, held)?,
            Instruction::Run { node, .. } => {
                let NodeCost { seconds, scratch } = self.node(node)?;
                self.compute(activity, micro_batch, seconds, held + scratch);
            }
            Instruction::Accumulate { parameter, part, .. } => {
                let first = self.sums.insert(Address::Part { parameter, part });
                let seconds = if first { 0.0 } else { self.cost(parameter)?.sum };
                self.compute(activity, micro_batch, seconds, held);
            }
            Instruction::Free { .. } | Instruction::UpdateState { .. } | Instruction::Report { .. } => {}
            Instruction::Join { parameter, .. } => {
                self.compute(activity, micro_batch, self.cost(parameter)?.sum, held);
            }
            Instruction::Reduce { parameter } => {
                let seconds = self.cost(parameter)?.sum;
                let more = program.reductions[&parameter].terms().count().saturating_sub(1);
                self.compute(activity, micro_batch, more as f64 * seconds, held);
            }
            Instruction::Clip => {
                let seconds = program.owned().map(|(parameter, _)| self.updates[&parameter].norm).sum();
                self.compute(activity, micro_batch, seconds, held);
                self.out.push(Step::Clip);
            }
            Instruction::Update { parameter } => {
                self.compute(activity, micro_batch, self.cost(parameter)?.optimizer, held);
            }
            Instruction::Offload { tensor, to } if !self.unchanged.contains(&tensor) => {
                self.movement(tensor, CopyDirection::Download, to, held);
            }
            Instruction::Offload { .. } => {}
            Instruction::Load { tensor, from } => {
                self.movement(tensor, CopyDirection::Upload, from, held);
                if tensor.stays() {
                    self.unchanged.insert(tensor);
                }
            }
        }
        if !self.unchanged.is_empty() {
            i.effects(program, self.slots, |tensor, access| {
                if matches!(access, Access::Change | Access::Replace) {
                    self.unchanged.remove(&tensor);
                }
            });
        }
        Ok(())
    }

    fn not_validated(&self) -> PlanError {
        ProgramError(format!("{} was not validated", self.program.peer)).into()
    }

    fn cost(&self, parameter: ValueId) -> Result<UpdateCost, PlanError> {
        self.updates.get(&parameter).copied().ok_or_else(|| self.not_validated())
    }

    fn receive(&mut self, tensor: Address, activity: Activity, held: u64) -> Result<(), PlanError> {
        let found = self.messages.find(self.program.peer, tensor);
        let (message, _) = found.ok_or_else(|| self.not_validated())?;
        self.out.push(Step::Receive { message });
        let bytes = value_type(self.program, tensor.value())?.bytes() as u64;
        let copy = self.device.copy_seconds(CopyDirection::Upload, bytes as f64);
        self.compute(activity, tensor.micro_batch(), copy, held);
        self.exchange((tensor, activity), message, true, held);
        Ok(())
    }

    fn send(&mut self, tensor: Address, to: PeerId, activity: Activity, held: u64) -> Result<(), PlanError> {
        let bytes = value_type(self.program, tensor.value())?.bytes() as u64;
        let copy = self.device.copy_seconds(CopyDirection::Download, bytes as f64);
        self.compute(activity, tensor.micro_batch(), copy, held);
        let (message, _) = self.messages.find(to, tensor).ok_or_else(|| {
            ProgramError(format!("{} sends {to} a message that {to} does not expect", self.program.peer))
        })?;
        self.out.push(Step::Send { message });
        self.exchange((tensor, activity), message, false, self.held(self.memory.live()));
        Ok(())
    }

    fn node(&self, node: NodeId) -> Result<NodeCost, PlanError> {
        let cost = node.0.checked_sub(self.first_node).and_then(|n| self.nodes.get(n as usize)).copied();
        cost.ok_or_else(|| self.not_validated())
    }

    /// Loses computing time to a message, if the device does.
    fn exchange(&mut self, (tensor, activity): (Address, Activity), message: u32, receives: bool, peak: u64) {
        if self.device.measured.traffic.is_some() {
            let micro_batch = tensor.micro_batch();
            self.out.push(Step::Exchange { activity, micro_batch, message, receives, peak });
        }
    }

    /// Moves a tensor out of memory, or back.
    fn movement(&mut self, tensor: Address, direction: CopyDirection, medium: Medium, held: u64) {
        let seconds = self.device.move_seconds(direction, medium, self.program.bytes(tensor) as f64);
        self.compute(Activity::Offload, tensor.micro_batch(), seconds, held);
    }

    /// Adds a step, or extends the last one if that is the same activity.
    fn compute(&mut self, activity: Activity, micro_batch: Option<u32>, seconds: f64, held: u64) {
        let backward = |a: Activity| matches!(a, Activity::Backward | Activity::WeightGrad);
        if let Some(Step::Compute { activity: last, micro_batch: m, seconds: sum, peak }) = self.out.last_mut()
            && *m == micro_batch
            && (*last == activity || (backward(*last) && backward(activity)))
        {
            // Only a step without any other work counts as delayed weight gradients.
            *last = if *last == activity { activity } else { Activity::Backward };
            *sum += seconds;
            *peak = held.max(*peak);
        } else {
            self.out.push(Step::Compute { activity, micro_batch, seconds, peak: held });
        }
    }
}

/// The predicted seconds of each node of a Program.
pub(crate) fn node_seconds(program: &Program, device: &Device) -> Result<HashMap<NodeId, f64>, PlanError> {
    let costs = node_costs(program, device)?;
    let first = program.nodes.keys().next().map_or(0, |n| n.0);
    Ok(program.nodes.keys().map(|id| (*id, costs[(id.0 - first) as usize].seconds)).collect())
}

/// The cost of each node, by node number less the first.
fn node_costs(program: &Program, device: &Device) -> Result<Vec<NodeCost>, PlanError> {
    let first = program.nodes.keys().next().map_or(0, |n| n.0);
    let last = program.nodes.keys().next_back().map_or(0, |n| n.0);
    let mut costs = vec![NodeCost { seconds: 0.0, scratch: 0 }; (last - first) as usize + 1];
    let by_signature = device.knows_signatures();
    let mut views: HashMap<ValueId, &str> = HashMap::new();
    for (id, node) in &program.nodes {
        let types = |ids: &[ValueId]| ids.iter().map(|v| value_type(program, *v)).collect::<Result<Vec<_>, _>>();
        let (inputs, outputs) = (types(&node.inputs)?, types(&node.outputs)?);
        let (name, cost) = (node.op.name(), node.op.cost(&inputs, &outputs));
        let signature = match by_signature {
            true => signature(&node.op, &inputs, &outputs, |i| views.get(&node.inputs[i]).copied()),
            false => String::new(),
        };
        if by_signature && node.op.view().is_some() {
            views.extend(node.outputs.iter().map(|v| (*v, name)));
        }
        costs[(id.0 - first) as usize] = NodeCost {
            seconds: device.seconds_of(&signature, name, &cost),
            scratch: device.scratch_bytes(&signature, name, &cost),
        };
    }
    Ok(costs)
}
