//! Peers that run Programs on symbols instead of tensors. A symbol is a hash of the computation that made it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};

use fusionllm_graph::{ValueId, ValueKind};
use fusionllm_plan::{Instruction, PeerId, Program, Slot};

type Symbol = u64;

fn symbol(parts: impl Hash) -> Symbol {
    let mut h = DefaultHasher::new();
    parts.hash(&mut h);
    h.finish()
}

/// The outcome of a pass, by name. It does not depend on the cut.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// By report and micro-batch.
    pub(crate) reports: BTreeMap<(String, u32), Symbol>,
    /// Parameters after the update.
    pub(crate) parameters: BTreeMap<String, Symbol>,
    /// Buffers.
    pub(crate) buffers: BTreeMap<String, Symbol>,
}

struct Peer<'a> {
    program: &'a Program,
    at: usize,
    values: HashMap<(ValueId, u32), Symbol>,
    state: BTreeMap<ValueId, Symbol>,
    parts: HashMap<(u32, u32), Symbol>,
    gradients: HashMap<u32, Symbol>,
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

/// As [`run`], but the outcome does not depend on the order in which gradients are added. Replicas add micro-batches
/// in another order.
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
        assert!(p.values.is_empty(), "{} keeps {:?}", p.program.peer, p.values);
        assert!(p.parts.is_empty() && p.gradients.is_empty());
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
            let old = into.insert(value.name.clone(), p.state[&h.value]);
            assert!(old.is_none_or(|old| old == p.state[&h.value]), "copies of {} differ", value.name);
        }
    }
    let held = peers.iter().map(|p| p.most_held).collect();
    (machine.outcome, held)
}

struct Machine {
    mail: HashMap<(PeerId, PeerId, Slot), Symbol>,
    sent: BTreeSet<(PeerId, PeerId, Slot)>,
    outcome: Outcome,
    add: fn(Option<Symbol>, Symbol) -> Symbol,
}

impl Machine {
    fn start<'a>(&mut self, program: &'a Program) -> Peer<'a> {
        for (slot, (from, _)) in program.incoming() {
            if let (Slot::Value { value, micro_batch }, PeerId::BROKER) = (slot, from) {
                self.post(PeerId::BROKER, program.peer, slot, symbol((&program.values[&value].name, micro_batch)));
            }
        }
        let state = program.holdings.iter().map(|h| (h.value, symbol(&program.values[&h.value].name))).collect();
        Peer {
            program,
            at: 0,
            values: HashMap::new(),
            state,
            parts: HashMap::new(),
            gradients: HashMap::new(),
            judged: false,
            most_held: 0,
        }
    }

    fn post(&mut self, from: PeerId, to: PeerId, slot: Slot, s: Symbol) {
        assert!(self.sent.insert((from, to, slot)), "{from} sends {slot:?} to {to} twice");
        self.mail.insert((from, to, slot), s);
    }

    /// Runs a peer's next instruction, if possible.
    fn step(&mut self, p: &mut Peer) -> bool {
        let program = p.program;
        let Some(instruction) = program.instructions.get(p.at) else { return false };
        let reduction_of = |parameter| program.reductions.iter().position(|r| r.parameter == parameter).unwrap() as u32;
        let value = |p: &Peer, v: ValueId, m: u32| -> Symbol {
            match p.values.get(&(v, m)).or_else(|| p.state.get(&v)) {
                Some(s) => *s,
                None => {
                    assert_eq!(program.values[&v].kind, ValueKind::RngKey, "{v} is not there");
                    symbol(("rng", m))
                }
            }
        };
        match *instruction {
            Instruction::Receive { slot, from } => {
                let Some(s) = self.mail.remove(&(from, program.peer, slot)) else { return false };
                match slot {
                    Slot::Value { value, micro_batch } => drop(p.values.insert((value, micro_batch), s)),
                    Slot::Part { parameter, part } => drop(p.parts.insert((reduction_of(parameter), part), s)),
                    Slot::Parameter { parameter: v } | Slot::Buffer { buffer: v, .. } => drop(p.state.insert(v, s)),
                }
            }
            Instruction::Send { slot, to } => {
                let s = match slot {
                    Slot::Value { value: v, micro_batch } => value(p, v, micro_batch),
                    Slot::Part { parameter, part } => p.parts.remove(&(reduction_of(parameter), part)).unwrap(),
                    Slot::Parameter { parameter: v } | Slot::Buffer { buffer: v, .. } => p.state[&v],
                };
                self.post(program.peer, to, slot, s);
            }
            Instruction::Run { node, micro_batch: m } => {
                let n = &program.nodes[&node];
                let inputs: Vec<Symbol> = n.inputs.iter().map(|v| value(p, *v, m)).collect();
                for (i, v) in n.outputs.iter().enumerate() {
                    let old = p.values.insert((*v, m), symbol((&n.name, &inputs, i)));
                    assert_eq!(old, None, "{} is made twice", n.name);
                }
            }
            Instruction::Free { value, micro_batch } => {
                assert!(p.values.remove(&(value, micro_batch)).is_some(), "{value} is freed twice");
            }
            Instruction::Accumulate { reduction, part, value: v, micro_batch } => {
                let s = (self.add)(p.parts.get(&(reduction, part)).copied(), value(p, v, micro_batch));
                p.parts.insert((reduction, part), s);
            }
            Instruction::UpdateState { buffer, value: v, micro_batch } => {
                let s = value(p, v, micro_batch);
                p.state.insert(buffer, s);
            }
            Instruction::Report { report, value: v, micro_batch } => {
                let name = program.reports[report as usize].clone();
                let old = self.outcome.reports.insert((name, micro_batch), value(p, v, micro_batch));
                assert_eq!(old, None, "reported twice");
            }
            Instruction::Reduce { reduction } => {
                let count = program.reductions[reduction as usize].parts.len() as u32;
                let parts = (0..count).map(|part| p.parts.remove(&(reduction, part)).unwrap());
                let sum = parts.fold(None, |sum, part| Some((self.add)(sum, part)));
                p.gradients.insert(reduction, sum.unwrap());
            }
            Instruction::Clip => {
                if !p.judged {
                    return false;
                }
            }
            Instruction::Update { reduction } => {
                let parameter = program.reductions[reduction as usize].parameter;
                let gradient = p.gradients.remove(&reduction).unwrap();
                p.state.insert(parameter, symbol((p.state[&parameter], gradient)));
            }
            // They change no value.
            Instruction::Offload { .. } | Instruction::Load { .. } => {}
        }
        let held: BTreeSet<u32> = p.values.keys().map(|(_, m)| *m).collect();
        p.most_held = p.most_held.max(held.len());
        p.at += 1;
        true
    }
}
