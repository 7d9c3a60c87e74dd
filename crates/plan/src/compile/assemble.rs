//! The Program of each peer, from its instructions.

use std::collections::{BTreeMap, BTreeSet};

use fusionllm_graph::{ValueId, ValueKind};
use fusionllm_program::{Address, Holding, Instruction, PeerId, Program};

use super::compiler::Compiler;
use super::patterns::instructions;
use super::tasks::Task;
use super::uses::Uses;
use crate::offload::rewrite;

/// Writes the Program of every peer.
pub(super) fn programs(c: &Compiler<'_>) -> Vec<Program> {
    let passes = c.passes();
    let orders = c.order(&passes);
    let uses = c.uses();
    let program = |(peer, tasks): (PeerId, &Vec<Task>)| {
        let instructions = instructions(c, peer, &uses, &passes, tasks);
        program(c, peer, instructions, &uses)
    };
    (0..).map(PeerId).zip(&orders).map(program).collect()
}

fn program(c: &Compiler<'_>, peer: PeerId, instructions: Vec<Instruction>, uses: &Uses) -> Program {
    let mut program = Program {
        peer,
        version: c.plan.version,
        micro_batches: c.plan.micro_batches,
        values: BTreeMap::new(),
        nodes: BTreeMap::new(),
        holdings: Vec::new(),
        reductions: BTreeMap::new(),
        reports: c.reports.iter().map(|(name, _)| name.clone()).collect(),
        instructions,
        coded: BTreeSet::new(),
        masks: BTreeMap::new(),
        codecs: BTreeMap::new(),
    };
    let mut touched = BTreeSet::new();
    let mut met = vec![false; c.graph.nodes.len()];
    for i in &program.instructions {
        match *i {
            Instruction::Run { node, .. } if !std::mem::replace(&mut met[node.index()], true) => {
                let n = c.graph.node(node);
                touched.extend(n.inputs.iter().chain(&n.outputs).copied());
                program.nodes.insert(node, n.clone());
            }
            Instruction::Receive { tensor, .. } | Instruction::Send { tensor, .. } => {
                let v = tensor.value();
                touched.insert(v);
                if matches!(tensor, Address::Value { .. }) && c.coded.contains(&v) {
                    program.coded.insert(v);
                }
            }
            _ => {}
        }
    }
    for (i, value) in c.graph.values.iter().enumerate() {
        let v = ValueId(i as u32);
        let owner = match value.kind {
            ValueKind::Parameter(_) | ValueKind::Buffer(_) => match &c.holders[&v][..] {
                list if list.contains(&peer) => list[0] == peer,
                _ => continue,
            },
            // What never changes is not saved, so no peer owns it.
            ValueKind::Frozen(_) | ValueKind::Constant if uses.reads(v, peer) => false,
            _ => continue,
        };
        touched.insert(v);
        program.holdings.push(Holding { value: v, owner });
    }
    for (parameter, r) in &c.reductions {
        if r.owner == peer || r.parts.iter().any(|p| p.peer == peer) {
            touched.insert(*parameter);
            touched.extend(r.parts.iter().map(|p| p.value));
            program.reductions.insert(*parameter, r.clone());
        }
    }
    if !program.coded.is_empty() {
        let ours = c.plan.codecs.iter().filter(|l| l.from == peer);
        program.codecs = ours.map(|l| (l.to, l.codec)).collect();
    }
    program.values = touched.into_iter().map(|v| (v, c.graph.value(v).clone())).collect();
    program.insert_frees();
    if let Some(offload) = c.plan.offload.iter().find(|o| o.peer == peer) {
        rewrite(&mut program, offload);
    }
    program
}
