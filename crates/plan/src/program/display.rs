//! The readable form of a Program.

use std::fmt;

use fusionllm_graph::{ValueId, ValueKind};

use super::{Instruction, Movable, Program, Slot};

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "program of {}, {} micro-batches {{", self.peer, self.micro_batches)?;
        for h in &self.holdings {
            let kind = match self.values.get(&h.value).map(|v| &v.kind) {
                Some(ValueKind::Parameter(_)) => "parameter",
                Some(ValueKind::Buffer(_)) => "buffer",
                _ => "constant",
            };
            let ty = self.values.get(&h.value).map_or_else(String::new, |v| format!(": {}", v.ty));
            writeln!(f, "  keep {kind} {}{ty}{}", self.name(h.value), if h.owner { ", own" } else { "" })?;
        }
        for r in &self.reductions {
            let parts = r.parts.iter().map(|p| format!("{} ({})", self.name(p.value), p.peer)).collect::<Vec<_>>();
            writeln!(f, "  gradient of {} at {}: {}", self.name(r.parameter), r.owner, parts.join(" + "))?;
        }
        for i in &self.instructions {
            writeln!(f, "  {}", self.show(i))?;
        }
        write!(f, "}}")
    }
}

impl Program {
    /// An instruction with the names of its values. Its micro-batch, if any, comes first.
    pub(crate) fn show(&self, i: &Instruction) -> String {
        let slot = |slot: Slot| match slot {
            Slot::Value { value, .. } => self.name(value),
            Slot::Part { parameter, part } => format!("part {part} of {}", self.name(parameter)),
            Slot::Parameter { parameter } => self.name(parameter),
            Slot::Buffer { buffer, .. } => self.name(buffer),
        };
        let parameter = |reduction: u32| match self.reductions.get(reduction as usize) {
            Some(r) => self.name(r.parameter),
            None => format!("reduction {reduction}"),
        };
        let list = |values: &[ValueId]| values.iter().map(|v| self.name(*v)).collect::<Vec<_>>().join(", ");
        let movable = |what: Movable| match what {
            Movable::Value { value, .. } => self.name(value),
            Movable::Part { reduction, part } => format!("part {part} of {}", parameter(reduction)),
            Movable::Gradient { reduction } => format!("the gradient of {}", parameter(reduction)),
            Movable::Parameter { parameter } => self.name(parameter),
            Movable::Slot { reduction, slot } => format!("slot {slot} of {}", parameter(reduction)),
        };
        let text = match *i {
            Instruction::Receive { slot: s, from } => format!("receive {} from {from}", slot(s)),
            Instruction::Send { slot: s, to } => format!("send {} to {to}", slot(s)),
            Instruction::Run { node, .. } => match self.nodes.get(&node) {
                Some(n) => format!("run {} = {}({})", list(&n.outputs), n.op.name(), list(&n.inputs)),
                None => format!("run {node}"),
            },
            Instruction::Free { value, .. } => format!("free {}", self.name(value)),
            Instruction::Accumulate { reduction, part, value, .. } => {
                format!("add {} to part {part} of {}", self.name(value), parameter(reduction))
            }
            Instruction::UpdateState { buffer, value, .. } => {
                format!("leave {} in {}", self.name(value), self.name(buffer))
            }
            Instruction::Report { report, value, .. } => {
                let name = self.reports.get(report as usize).map_or("?", String::as_str);
                format!("report {} as {name}", self.name(value))
            }
            Instruction::Reduce { reduction } => format!("reduce {}", parameter(reduction)),
            Instruction::Clip => "clip".into(),
            Instruction::Update { reduction } => format!("update {}", parameter(reduction)),
            Instruction::Offload { what, to } => format!("offload {} to {to}", movable(what)),
            Instruction::Load { what, from } => format!("load {} from {from}", movable(what)),
        };
        match i.micro_batch() {
            Some(m) => format!("[{m}] {text}"),
            None => text,
        }
    }

    pub(crate) fn name(&self, v: ValueId) -> String {
        self.values.get(&v).map_or_else(|| v.to_string(), |value| value.name.clone())
    }
}
