//! The readable form of a Program.

use std::fmt;

use fusionllm_graph::{ValueId, ValueKind};

use crate::{Address, GradientPart, Instruction, Program};

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "program of {}, {} micro-batches {{", self.peer, self.micro_batches)?;
        for h in &self.holdings {
            let kind = match self.values.get(&h.value).map(|v| &v.kind) {
                Some(ValueKind::Parameter(_)) => "parameter",
                Some(ValueKind::Frozen(_)) => "frozen parameter",
                Some(ValueKind::Buffer(_)) => "buffer",
                _ => "constant",
            };
            let ty = self.values.get(&h.value).map_or_else(String::new, |v| format!(": {}", v.ty));
            writeln!(f, "  keep {kind} {}{ty}{}", self.name(h.value), if h.owner { ", own" } else { "" })?;
        }
        for (parameter, r) in &self.reductions {
            let part = |p: &GradientPart| format!("{} ({})", self.name(p.value), p.peer);
            let sum = |parts: &[GradientPart]| parts.iter().map(part).collect::<Vec<_>>().join(" + ");
            let brackets = || r.parts.chunks(r.bracket.max(1) as usize);
            let sums = match brackets().len() {
                2.. if r.bracket > 1 => brackets().map(|b| format!("({})", sum(b))).collect::<Vec<_>>().join(" + "),
                _ => sum(&r.parts),
            };
            writeln!(f, "  gradient of {} at {}: {sums}", self.name(*parameter), r.owner)?;
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
        let name = |v: ValueId| self.name(v);
        let list = |values: &[ValueId]| values.iter().map(|v| name(*v)).collect::<Vec<_>>().join(", ");
        let tensor = |tensor: Address| match tensor {
            Address::Value { value: v, .. } | Address::Held { value: v } | Address::BufferAfter { buffer: v, .. } => {
                name(v)
            }
            Address::Part { parameter, part } => format!("part {part} of {}", name(parameter)),
            Address::Gradient { parameter } => format!("the gradient of {}", name(parameter)),
            Address::OptimizerState { parameter, slot } => format!("slot {slot} of {}", name(parameter)),
        };
        let text = match *i {
            Instruction::Receive { tensor: t, from } => format!("receive {} from {from}", tensor(t)),
            Instruction::Send { tensor: t, to } => format!("send {} to {to}", tensor(t)),
            Instruction::Run { node, .. } => match self.nodes.get(&node) {
                Some(n) => format!("run {} = {}({})", list(&n.outputs), n.op.name(), list(&n.inputs)),
                None => format!("run {node}"),
            },
            Instruction::Free { value, .. } => format!("free {}", name(value)),
            Instruction::Accumulate { parameter, part, value, .. } => {
                format!("add {} to part {part} of {}", name(value), name(parameter))
            }
            Instruction::UpdateState { buffer, value, .. } => {
                format!("leave {} in {}", name(value), name(buffer))
            }
            Instruction::Report { report, value, .. } => {
                let report = self.reports.get(report as usize).map_or("?", String::as_str);
                format!("report {} as {report}", name(value))
            }
            Instruction::Join { parameter, part } => {
                let first = self.reductions.get(&parameter).map_or(part, |r| r.joined(part).start);
                format!("add part {part} to part {first} of {}", name(parameter))
            }
            Instruction::Reduce { parameter } => format!("reduce {}", name(parameter)),
            Instruction::Clip => "clip".into(),
            Instruction::Update { parameter } => format!("update {}", name(parameter)),
            Instruction::Offload { tensor: t, to } => format!("offload {} to {to}", tensor(t)),
            Instruction::Load { tensor: t, from } => format!("load {} from {from}", tensor(t)),
        };
        match i.micro_batch() {
            Some(m) => format!("[{m}] {text}"),
            None => text,
        }
    }

    /// The name of a value, or its number if the program does not have it.
    pub fn name(&self, v: ValueId) -> String {
        self.values.get(&v).map_or_else(|| v.to_string(), |value| value.name.clone())
    }
}
