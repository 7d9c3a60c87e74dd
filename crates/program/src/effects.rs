//! The tensors that an instruction uses, and how.

use crate::{Address, Instruction, Medium, Program};

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
    /// Calls `each` for every tensor that the instruction uses on its peer, in the order of their use. `slots` is the
    /// number of the optimizer's slots.
    ///
    /// Every analysis that must know how an instruction uses tensors asks here. So a new instruction needs a line here
    /// and not in every analysis. Keys of random numbers are not listed, because they are computed where they are
    /// needed. Gradients whose norm [`Instruction::Clip`] sends are not listed either, because an executor measures the
    /// norm whenever the gradient is complete. Tensors that the program does not have are left out.
    pub fn effects(&self, program: &Program, slots: usize, mut each: impl FnMut(Address, Access)) {
        let read = |value, micro_batch, each: &mut dyn FnMut(Address, Access)| {
            if let Some(operand) = program.operand(value, micro_batch) {
                each(operand, Access::Read);
            }
        };
        match *self {
            Self::Receive { tensor, .. } => {
                let place = tensor.place();
                each(place, if place.stays() { Access::Replace } else { Access::Make });
            }
            Self::Send { tensor: part @ Address::Part { .. }, .. } => each(part, Access::Take),
            Self::Send { tensor, .. } => each(tensor.place(), Access::Read),
            Self::Run { node, micro_batch } => {
                let Some(node) = program.nodes.get(&node) else { return };
                node.inputs.iter().for_each(|v| read(*v, micro_batch, &mut each));
                node.outputs.iter().for_each(|v| each(Address::Value { value: *v, micro_batch }, Access::Make));
            }
            Self::Free { value, micro_batch } => each(Address::Value { value, micro_batch }, Access::Free),
            Self::Accumulate { parameter, part, value, micro_batch } => {
                read(value, micro_batch, &mut each);
                each(Address::Part { parameter, part }, Access::Add);
            }
            Self::UpdateState { buffer, value, micro_batch } => {
                read(value, micro_batch, &mut each);
                each(Address::Held { value: buffer }, Access::Replace);
            }
            Self::Report { value, micro_batch, .. } => read(value, micro_batch, &mut each),
            Self::Join { parameter, part } => {
                let Some(reduction) = program.reductions.get(&parameter) else { return };
                each(Address::Part { parameter, part }, Access::Take);
                each(Address::Part { parameter, part: reduction.joined(part).start }, Access::Change);
            }
            Self::Reduce { parameter } => {
                let terms = program.reductions.get(&parameter).into_iter().flat_map(|r| r.terms());
                terms.for_each(|(_, part)| each(Address::Part { parameter, part }, Access::Take));
                each(Address::Gradient { parameter }, Access::Make);
            }
            Self::Clip => {}
            Self::Update { parameter } => {
                each(Address::Gradient { parameter }, Access::Take);
                each(Address::Held { value: parameter }, Access::Change);
                let slots = 0..slots as u32;
                slots.for_each(|slot| each(Address::OptimizerState { parameter, slot }, Access::Change));
            }
            Self::Offload { tensor, to } => each(tensor, Access::Offload(to)),
            Self::Load { tensor, from } => each(tensor, Access::Load(from)),
        }
    }
}
