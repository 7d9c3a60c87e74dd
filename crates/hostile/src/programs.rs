//! Assignments from a broker that may be hostile: what a peer accepts, it can run.

use std::collections::{BTreeMap, BTreeSet};

use fusionllm_backend::open;
use fusionllm_compress::Codec;
use fusionllm_exec::{Coder, Communicator, EncodeOptions, ExecError, Executor, Message};
use fusionllm_graph::ops::SgdStep;
use fusionllm_graph::{DType, HostTensor, Node, NodeId, Op, Phase, TensorType, Value, ValueId, ValueKind};
use fusionllm_node::decoders::accepts;
use fusionllm_program::{Address, Instruction, Optimizer, PeerId, Program, TensorKey, Verdict};
use fusionllm_protocol::{Assignment, Contact, MemberId, Source, decode, encode};
use fusionllm_transport::{PeerAddr, SecretKey};
use serde::Deserialize;

/// A program with more work than this is not run: operations, and bytes read and written.
const MAX_WORK: f64 = 4e6;

/// Memory of the machine that gets the assignment, in bytes.
const MEMORY: u64 = 32 << 20;

const SGD: SgdStep = SgdStep { momentum: 0.9, weight_decay: 0.1, nesterov: true };

/// Bytes that arrive as tensors: zeros; integers of -1 and floats that are NaN; very large integers and floats.
const FILLS: [u8; 3] = [0, 0xff, 0x7f];

/// An operator with the types of its operands, as JSON: `{"op": {"matmul": null}, "operands": [...]}`. A peer runs it
/// if the operator has results for these types.
pub(crate) fn operator(bytes: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Applied {
        op: Op,
        operands: Vec<TensorType>,
    }
    let Ok(Applied { op, operands }) = serde_json::from_slice(bytes) else { return false };
    let Some(program) = one_operator(op, &operands) else { return false };
    let assignment = assignment_of(program.clone(), program, Optimizer::Sgd(SGD));
    assignment.is_ok_and(|assignment| take_part(&assignment))
}

/// A peer accepts the assignment and runs its programs, if they are short. The tensors are a stranger's, too.
pub(crate) fn assignment(bytes: &[u8]) -> bool {
    decode::<Assignment>(bytes).is_ok_and(|assignment| take_part(&assignment))
}

fn take_part(assignment: &Assignment) -> bool {
    if accepts(assignment.clone(), Some(MEMORY)).is_err() {
        return false;
    }
    for program in [&assignment.train, &assignment.eval] {
        let _ = program.to_string();
        if is_short(program) {
            for fill in FILLS {
                // An error is an answer.
                let _ = run(assignment, program, fill);
            }
        }
    }
    true
}

fn is_short(program: &Program) -> bool {
    let types = |ids: &[ValueId]| ids.iter().map(|v| &program.values[v].ty).collect::<Vec<_>>();
    let work = |i: &Instruction| {
        let mut bytes = 0.0;
        i.effects(program, 0, |tensor, _| bytes += program.bytes(tensor) as f64);
        let Instruction::Run { node, .. } = i else { return bytes };
        let node = &program.nodes[node];
        let cost = node.op.cost(&types(&node.inputs), &types(&node.outputs));
        // A view costs nothing, but a backend may copy it.
        cost.flops + cost.bytes + bytes
    };
    program.instructions.iter().map(work).sum::<f64>() <= MAX_WORK
}

fn run(assignment: &Assignment, program: &Program, fill: u8) -> Result<(), ExecError> {
    let mut executor = Executor::new(open("cpu")?, assignment.optimizer, assignment.seed);
    for (key, ty) in assignment.tensor_types() {
        let tensor = filled(ty, fill)?;
        executor.load(key, &tensor)?;
    }
    let script = executor.prepare(program)?;
    executor.set_inspect(true);
    let mut strangers =
        Strangers { incoming: program.incoming(), fill, coder: Coder::new(&program.masks), encoded: Vec::new() };
    executor.run(program, &script, assignment.passes_before, assignment.start, &mut strangers)?;
    Ok(())
}

fn filled(ty: &TensorType, fill: u8) -> Result<HostTensor, ExecError> {
    Ok(HostTensor::from_bytes(ty.clone(), vec![fill; ty.bytes()])?)
}

/// Sends the tensors that the program waits for, of the right size.
struct Strangers {
    incoming: BTreeMap<Address, (PeerId, TensorType)>,
    fill: u8,
    coder: Coder,
    encoded: Vec<u8>,
}

impl Communicator for Strangers {
    fn receive(&mut self, _pass: u64, tensor: Address, _from: PeerId) -> Result<HostTensor, ExecError> {
        let (_, ty) = self.incoming.get(&tensor).ok_or_else(|| ExecError::State("it waits for nothing".into()))?;
        filled(ty, self.fill)
    }

    fn send(
        &mut self,
        pass: u64,
        tensor: Address,
        to: PeerId,
        content: HostTensor,
        options: EncodeOptions,
    ) -> Result<(), ExecError> {
        if options.codec != Codec::None {
            let message = Message { pass, peer: to, tensor };
            self.coder.encode(message, &content, &options, &mut self.encoded)?;
            self.coder.fidelity(&content, &self.encoded, false)?;
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

/// The assignment of one of two peers, for tests. The broker streams all its tensors.
///
/// # Errors
///
/// A name cannot be encoded.
pub fn assignment_of(train: Program, eval: Program, optimizer: Optimizer) -> Result<Assignment, String> {
    let addr = encode(&PeerAddr::new(SecretKey::from_bytes([7; 32]).public(), Vec::new()))?;
    let contact = |m: u32| Contact { member: MemberId(m), name: format!("p{m}"), addr: addr.clone() };
    let copy = TensorType::new(DType::F32, [4, 4]);
    let mut assignment = Assignment {
        peers: vec![contact(0), contact(1)],
        donors: vec![contact(5)],
        start: 12,
        passes_before: 40,
        mirrors: BTreeMap::from([(MemberId(6), BTreeMap::from([(TensorKey::value("w1"), copy)]))]),
        ..Assignment::new(train, eval, optimizer)
    };
    assignment.sources = assignment.tensor_types().into_keys().map(|key| (key, Source::Broker)).collect();
    Ok(assignment)
}

/// A program that receives operands of these types, runs the operator, and frees all. `None` if the operator does not
/// take them.
pub fn one_operator(op: Op, types: &[TensorType]) -> Option<Program> {
    let results = op.infer(&types.iter().collect::<Vec<_>>()).ok()?;
    let ids = |from: usize, count: usize| (from as u32..(from + count) as u32).map(ValueId).collect::<Vec<_>>();
    let (inputs, outputs) = (ids(0, types.len()), ids(types.len(), results.len()));
    let node = NodeId(0);
    let made = (0..).map(|index| ValueKind::Result { node, index });
    let kinds = types.iter().map(|_| ValueKind::Input).chain(made);
    let values = (0..)
        .zip(types.iter().chain(&results))
        .zip(kinds)
        .map(|((id, ty), kind)| (ValueId(id), Value { name: format!("v{id}"), ty: ty.clone(), kind }));
    let tensor = |value| Address::Value { value, micro_batch: 0 };
    let receive = inputs.iter().map(|v| Instruction::Receive { tensor: tensor(*v), from: PeerId::BROKER });
    let free = inputs.iter().chain(&outputs).map(|value| Instruction::Free { value: *value, micro_batch: 0 });
    let run = Instruction::Run { node, micro_batch: 0 };
    let (name, phase) = ("n".to_owned(), Phase::Forward);
    Some(Program {
        peer: PeerId(0),
        version: 1,
        micro_batches: 1,
        values: values.collect(),
        holdings: Vec::new(),
        reductions: BTreeMap::new(),
        reports: Vec::new(),
        instructions: receive.chain([run]).chain(free).collect(),
        nodes: BTreeMap::from([(node, Node { name, op, inputs, outputs, phase, origin: None })]),
        coded: BTreeSet::new(),
        masks: BTreeMap::new(),
        codecs: BTreeMap::new(),
    })
}
