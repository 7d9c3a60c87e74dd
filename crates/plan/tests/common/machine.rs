//! Peers that run Programs on symbols instead of tensors. A symbol is a hash of the computation that made it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};

use fusionllm_graph::{ValueId, ValueKind};
use fusionllm_program::{Access, Address, Instruction, PeerId, Program};

type Symbol = u64;

fn symbol(parts: impl Hash) -> Symbol {
    let mut h = DefaultHasher::new();
    parts.hash(&mut h);
    h.finish()
}

/// The outcome of a pass, with tensors by name. It does not depend on how the graph is cut.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// The value of each report in each micro-batch.
    pub(crate) reports: BTreeMap<(String, u32), Symbol>,
    /// Parameters after the update.
    pub(crate) parameters: BTreeMap<String, Symbol>,
    /// Buffers.
    pub(crate) buffers: BTreeMap<String, Symbol>,
}

struct Peer<'a> {
    program: &'a Program,
    at: usize,
    tensors: BTreeMap<Address, Symbol>,
    judged: bool,
    /// The most micro-batches whose values were held at once.
    most_held: usize,
}

/// Runs all Programs to their end, with unlimited mailboxes. Checks that each message has one sender and one reader,
/// and that every peer finishes. Returns the outcome, and by peer the most micro-batches whose values it held at
/// once.
pub(crate) fn run(programs: &[Program]) -> (Outcome, Vec<usize>) {
    run_adding(programs, |a, b| symbol((a, b)))
}

/// Runs the Programs like [`run`], but the outcome does not depend on the order in which gradients are added. Replicas
/// add micro-batches in another order.
pub(crate) fn run_in_any_order(programs: &[Program]) -> (Outcome, Vec<usize>) {
    run_adding(programs, |a, b| a.unwrap_or_default().wrapping_add(b))
}

fn run_adding(programs: &[Program], add: fn(Option<Symbol>, Symbol) -> Symbol) -> (Outcome, Vec<usize>) {
    let mut machine = Machine { mail: HashMap::new(), sent: BTreeSet::new(), outcome: Outcome::default(), add };
    let mut peers: Vec<Peer> = programs.iter().map(|p| machine.start(p)).collect();
    loop {
        let mut moved = false;
        // The verdict comes once all peers with instructions wait for it.
        let waits = |p: &Peer| p.program.instructions.get(p.at) == Some(&Instruction::Clip);
        if peers.iter().all(|p| p.program.instructions.is_empty() || waits(p)) {
            peers.iter_mut().for_each(|p| p.judged = true);
        }
        for peer in &mut peers {
            while machine.step(peer) {
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    for p in &peers {
        let waits = p.program.instructions.get(p.at);
        assert_eq!(waits, None, "{} waits for ever in\n{}", p.program.peer, p.program);
        assert!(p.tensors.keys().all(|tensor| tensor.stays()), "{} keeps {:?}", p.program.peer, p.tensors.keys());
    }
    assert!(machine.mail.is_empty(), "never read: {:?}", machine.mail.keys());
    // The owner's copy counts, and all others are equal to it.
    for p in &peers {
        for h in &p.program.holdings {
            let value = &p.program.values[&h.value];
            let into = match value.kind {
                ValueKind::Parameter(_) => &mut machine.outcome.parameters,
                ValueKind::Buffer(_) => &mut machine.outcome.buffers,
                _ => continue,
            };
            let held = p.tensors[&Address::Held { value: h.value }];
            let old = into.insert(value.name.clone(), held);
            assert!(old.is_none_or(|old| old == held), "copies of {} differ", value.name);
        }
    }
    let held = peers.iter().map(|p| p.most_held).collect();
    (machine.outcome, held)
}

struct Machine {
    mail: HashMap<(PeerId, PeerId, Address), Symbol>,
    sent: BTreeSet<(PeerId, PeerId, Address)>,
    outcome: Outcome,
    add: fn(Option<Symbol>, Symbol) -> Symbol,
}

impl Machine {
    fn start<'a>(&mut self, program: &'a Program) -> Peer<'a> {
        for (tensor, (from, _)) in program.incoming() {
            if let (Address::Value { value, micro_batch }, PeerId::BROKER) = (tensor, from) {
                self.post(PeerId::BROKER, program.peer, tensor, symbol((&program.values[&value].name, micro_batch)));
            }
        }
        let held = |value| (Address::Held { value }, symbol(&program.values[&value].name));
        let tensors = program.holdings.iter().map(|h| held(h.value)).collect();
        Peer { program, at: 0, tensors, judged: false, most_held: 0 }
    }

    fn post(&mut self, from: PeerId, to: PeerId, tensor: Address, s: Symbol) {
        assert!(self.sent.insert((from, to, tensor)), "{from} sends {tensor:?} to {to} twice");
        self.mail.insert((from, to, tensor), s);
    }

    /// Runs a peer's next instruction, if possible. Checks that it does with tensors what its effects say.
    fn step(&mut self, p: &mut Peer) -> bool {
        let program = p.program;
        let Some(instruction) = program.instructions.get(p.at) else { return false };
        let before: BTreeSet<Address> = p.tensors.keys().copied().collect();
        if !self.carry_out(p, instruction) {
            return false;
        }
        let mut expected = before;
        instruction.effects(program, 0, |tensor, access| {
            let fits = match access {
                Access::Make => expected.insert(tensor),
                Access::Take | Access::Free => expected.remove(&tensor),
                Access::Add => {
                    expected.insert(tensor);
                    true
                }
                Access::Read | Access::Change | Access::Replace => expected.contains(&tensor),
                Access::Offload(_) | Access::Load(_) => true,
            };
            assert!(fits, "{instruction:?} cannot {access:?} {tensor:?}");
        });
        assert!(p.tensors.keys().eq(&expected), "{instruction:?} leaves {:?}, not {expected:?}", p.tensors.keys());
        let held: BTreeSet<u32> = p.tensors.keys().filter_map(|tensor| tensor.micro_batch()).collect();
        p.most_held = p.most_held.max(held.len());
        p.at += 1;
        true
    }

    fn carry_out(&mut self, p: &mut Peer, instruction: &Instruction) -> bool {
        let program = p.program;
        let value = |p: &Peer, v: ValueId, m: u32| -> Symbol {
            match program.operand(v, m) {
                Some(operand) => p.tensors[&operand],
                None => symbol(("rng", m)),
            }
        };
        match *instruction {
            Instruction::Receive { tensor, from } => {
                let Some(s) = self.mail.remove(&(from, program.peer, tensor)) else { return false };
                p.tensors.insert(tensor.place(), s);
            }
            Instruction::Send { tensor, to } => {
                let s = p.tensors[&tensor.place()];
                if let Address::Part { .. } = tensor {
                    p.tensors.remove(&tensor);
                }
                self.post(program.peer, to, tensor, s);
            }
            Instruction::Run { node, micro_batch } => {
                let n = &program.nodes[&node];
                let inputs: Vec<Symbol> = n.inputs.iter().map(|v| value(p, *v, micro_batch)).collect();
                for (i, v) in n.outputs.iter().enumerate() {
                    let made = Address::Value { value: *v, micro_batch };
                    let old = p.tensors.insert(made, symbol((&n.name, &inputs, i)));
                    assert_eq!(old, None, "{} is made twice", n.name);
                }
            }
            Instruction::Free { value, micro_batch } => {
                let freed = p.tensors.remove(&Address::Value { value, micro_batch });
                assert!(freed.is_some(), "{value} is freed twice");
            }
            Instruction::Accumulate { parameter, part, value: v, micro_batch } => {
                let part = Address::Part { parameter, part };
                let s = (self.add)(p.tensors.get(&part).copied(), value(p, v, micro_batch));
                p.tensors.insert(part, s);
            }
            Instruction::Join { parameter, part } => {
                let first = Address::Part { parameter, part: program.reductions[&parameter].joined(part).start };
                let term = p.tensors.remove(&Address::Part { parameter, part }).unwrap();
                let sum = (self.add)(p.tensors.get(&first).copied(), term);
                p.tensors.insert(first, sum);
            }
            Instruction::UpdateState { buffer, value: v, micro_batch } => {
                let s = value(p, v, micro_batch);
                p.tensors.insert(Address::Held { value: buffer }, s);
            }
            Instruction::Report { report, value: v, micro_batch } => {
                let name = program.reports[report as usize].clone();
                let old = self.outcome.reports.insert((name, micro_batch), value(p, v, micro_batch));
                assert_eq!(old, None, "reported twice");
            }
            Instruction::Reduce { parameter } => {
                let mut brackets: BTreeMap<u32, Symbol> = BTreeMap::new();
                for (bracket, part) in program.reductions[&parameter].terms() {
                    let term = p.tensors.remove(&Address::Part { parameter, part }).unwrap();
                    let sum = match brackets.get(&bracket) {
                        Some(sum) => (self.add)(Some(*sum), term),
                        None => term,
                    };
                    brackets.insert(bracket, sum);
                }
                let sum = brackets.into_values().reduce(|a, b| (self.add)(Some(a), b));
                p.tensors.insert(Address::Gradient { parameter }, sum.unwrap());
            }
            Instruction::Clip => return p.judged,
            Instruction::Update { parameter } => {
                let gradient = p.tensors.remove(&Address::Gradient { parameter }).unwrap();
                let held = p.tensors.get_mut(&Address::Held { value: parameter }).unwrap();
                *held = symbol((*held, gradient));
            }
            // These instructions change no value.
            Instruction::Offload { .. } | Instruction::Load { .. } => {}
        }
        true
    }
}
