//! The tensors that an instruction uses, and how.

use super::{Address, Instruction, Medium, Program};

/// How an instruction uses a tensor of its peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Its content is read.
    Read,
    /// It is made. It was not there before.
    Make,
    /// A term is added to it. The first term makes it.
    Add,
    /// Its content is read and replaced.
    Change,
    /// Its content is replaced without having been read.
    Replace,
    /// Its content is read. It is gone afterwards.
    Take,
    /// It is gone afterwards.
    Free,
    /// It leaves the device's memory.
    Offload(Medium),
    /// It returns to the device's memory.
    Load(Medium),
}

impl Instruction {
    /// The tensors that the instruction uses on its peer, in the order of their use. `slots` is the number of the
    /// optimizer's slots.
    ///
    /// Every analysis that must know how an instruction uses tensors asks here. So a new instruction needs a line here
    /// and not in every analysis. Keys of random numbers are not listed, because they are computed where they are
    /// needed. Gradients whose norm [`Instruction::Clip`] sends are not listed either, because an executor measures the
    /// norm whenever the gradient is complete. Tensors that the program does not have are left out.
    pub fn effects<'a>(&self, program: &'a Program, slots: usize) -> impl Iterator<Item = (Address, Access)> + use<'a> {
        use Access::{Add, Change, Free, Load, Make, Offload, Read, Replace, Take};
        let (mut node, mut micro_batch) = (None, 0);
        // The parameter whose parts are taken, and the one whose optimizer state changes.
        let (mut parts, mut state) = (None, None);
        let [first, second] = match *self {
            Self::Receive { tensor, .. } => {
                [Some((tensor.place(), if tensor.place().stays() { Replace } else { Make })), None]
            }
            Self::Send { tensor, .. } => {
                let access = if matches!(tensor, Address::Part { .. }) { Take } else { Read };
                [Some((tensor.place(), access)), None]
            }
            Self::Run { node: id, micro_batch: m } => {
                (node, micro_batch) = (program.nodes.get(&id), m);
                [None, None]
            }
            Self::Free { value, micro_batch } => [Some((Address::Value { value, micro_batch }, Free)), None],
            Self::Accumulate { parameter, part, value, micro_batch } => {
                let term = program.operand(value, micro_batch).map(|value| (value, Read));
                [term, Some((Address::Part { parameter, part }, Add))]
            }
            Self::UpdateState { buffer, value, micro_batch } => {
                let content = program.operand(value, micro_batch).map(|value| (value, Read));
                [content, Some((Address::Held { value: buffer }, Replace))]
            }
            Self::Report { value, micro_batch, .. } => {
                [program.operand(value, micro_batch).map(|value| (value, Read)), None]
            }
            Self::Reduce { parameter } => {
                parts = Some(parameter);
                [Some((Address::Gradient { parameter }, Make)), None]
            }
            Self::Clip => [None, None],
            Self::Update { parameter } => {
                state = Some(parameter);
                let (gradient, value) = (Address::Gradient { parameter }, Address::Held { value: parameter });
                [Some((gradient, Take)), Some((value, Change))]
            }
            Self::Offload { tensor, to } => [Some((tensor, Offload(to))), None],
            Self::Load { tensor, from } => [Some((tensor, Load(from))), None],
        };
        let (inputs, outputs) = node.map_or((&[][..], &[][..]), |node| (&node.inputs, &node.outputs));
        let inputs = inputs.iter().filter_map(move |v| Some((program.operand(*v, micro_batch)?, Read)));
        let outputs = outputs.iter().map(move |v| (Address::Value { value: *v, micro_batch }, Make));
        let parts = parts.into_iter().flat_map(move |parameter| {
            let count = program.reductions.get(&parameter).map_or(0, |r| r.parts.len() as u32);
            (0..count).map(move |part| (Address::Part { parameter, part }, Take))
        });
        let state = state.into_iter().flat_map(move |parameter| {
            (0..slots as u32).map(move |slot| (Address::OptimizerState { parameter, slot }, Change))
        });
        inputs.chain(outputs).chain(parts).chain(first).chain(second).chain(state)
    }
}
