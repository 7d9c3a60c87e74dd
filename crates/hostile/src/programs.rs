//! Assignments from a broker that may be hostile: what a peer accepts, it can run.

use std::collections::BTreeMap;

use fusionllm_backend::open;
use fusionllm_compress::Codec;
use fusionllm_exec::{Coder, Communicator, EncodeOptions, ExecError, Executor};
use fusionllm_graph::{HostTensor, TensorType, ValueId};
use fusionllm_node::decoders::accepts;
use fusionllm_plan::{Instruction, PeerId, Program, Slot, Verdict};
use fusionllm_protocol::{Assignment, decode};

/// A program with more work than this is not run: operations, and bytes read and written.
const MAX_WORK: f64 = 4e6;

/// Memory of the machine that gets the assignment, in bytes.
const MEMORY: u64 = 32 << 20;

/// Bytes that arrive as tensors: zeros; integers of -1 and floats that are NaN; very large integers and floats.
const FILLS: [u8; 3] = [0, 0xff, 0x7f];

/// A peer accepts the assignment and runs its programs, if they are short. The tensors are a stranger's, too.
pub(crate) fn assignment(bytes: &[u8]) -> bool {
    let Ok(assignment) = decode::<Assignment>(bytes) else { return false };
    if accepts(assignment.clone(), Some(MEMORY)).is_err() {
        return false;
    }
    for program in [&assignment.train, &assignment.eval] {
        let _ = program.to_string();
        if is_short(program) {
            for fill in FILLS {
                // An error is an answer.
                let _ = run(&assignment, program, fill);
            }
        }
    }
    true
}

fn is_short(program: &Program) -> bool {
    let types = |ids: &[ValueId]| ids.iter().map(|v| &program.values[v].ty).collect::<Vec<_>>();
    let work = |i: &Instruction| match i {
        Instruction::Run { node, .. } => {
            let node = &program.nodes[node];
            let (inputs, outputs) = (types(&node.inputs), types(&node.outputs));
            let cost = node.op.cost(&inputs, &outputs);
            // A view costs nothing, but a backend may copy it.
            let bytes: f64 = inputs.iter().chain(&outputs).map(|ty| ty.bytes() as f64).sum();
            cost.flops + cost.bytes + bytes
        }
        Instruction::Receive { slot, .. } | Instruction::Send { slot, .. } => {
            program.values[&slot.value()].ty.bytes() as f64
        }
        Instruction::Accumulate { value, .. }
        | Instruction::UpdateState { value, .. }
        | Instruction::Report { value, .. } => program.values[value].ty.bytes() as f64,
        Instruction::Reduce { reduction } | Instruction::Update { reduction } => {
            let r = &program.reductions[*reduction as usize];
            (r.parts.len() * program.values[&r.parameter].ty.bytes()) as f64
        }
        Instruction::Free { .. } | Instruction::Clip => 0.0,
    };
    program.instructions.iter().map(work).sum::<f64>() <= MAX_WORK
}

fn run(assignment: &Assignment, program: &Program, fill: u8) -> Result<(), ExecError> {
    let mut executor = Executor::new(open("cpu")?, assignment.optimizer, assignment.seed);
    for (key, ty) in assignment.tensors() {
        let tensor = filled(ty, fill)?;
        match &key.slot {
            None => executor.load(&key.name, &tensor)?,
            Some(slot) => executor.load_slot(&key.name, slot, &tensor)?,
        }
    }
    executor.prepare(program)?;
    let mut strangers = Strangers { incoming: program.incoming(), fill, coder: Coder::default(), encoded: Vec::new() };
    executor.run(program, assignment.passes_before, assignment.start, &mut strangers)?;
    Ok(())
}

fn filled(ty: &TensorType, fill: u8) -> Result<HostTensor, ExecError> {
    Ok(HostTensor::from_bytes(ty.clone(), vec![fill; ty.bytes()])?)
}

/// Sends what the program waits for, of the right size.
struct Strangers {
    incoming: BTreeMap<Slot, (PeerId, TensorType)>,
    fill: u8,
    coder: Coder,
    encoded: Vec<u8>,
}

impl Communicator for Strangers {
    fn receive(&mut self, _pass: u64, slot: Slot, _from: PeerId) -> Result<HostTensor, ExecError> {
        let (_, ty) = self.incoming.get(&slot).ok_or_else(|| ExecError::State("it waits for nothing".into()))?;
        filled(ty, self.fill)
    }

    fn send(
        &mut self,
        _pass: u64,
        slot: Slot,
        to: PeerId,
        tensor: HostTensor,
        options: EncodeOptions,
    ) -> Result<(), ExecError> {
        if options.codec != Codec::None {
            self.coder.encode_with_feedback(&tensor, &options, (to, slot), &mut self.encoded)?;
            self.coder.decode(&self.encoded, tensor.ty().clone())?;
        }
        Ok(())
    }

    fn report(&mut self, _pass: u64, _report: u32, _micro_batch: u32, _value: f64) -> Result<(), ExecError> {
        Ok(())
    }

    fn verdict(&mut self, _pass: u64, _squared_norms: Vec<(ValueId, f64)>) -> Result<Verdict, ExecError> {
        Ok(Verdict { apply: true, update: u64::MAX, lr: 1e-3, factor: 1.0 })
    }
}
