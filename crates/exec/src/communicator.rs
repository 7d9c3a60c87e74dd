use fusionllm_graph::{HostTensor, ValueId};
use fusionllm_program::{Address, PeerId, Verdict};

use crate::{EncodeOptions, ExecError};

/// A peer's messages to and from other peers and the broker.
///
/// One pass is one run of a Program. Passes are numbered, so that a message cannot be mistaken for one of another pass.
pub trait Communicator {
    /// Waits for a message.
    fn receive(&mut self, pass: u64, tensor: Address, from: PeerId) -> Result<HostTensor, ExecError>;

    /// Queues a message. It waits neither for the network nor for the codec.
    fn send(
        &mut self,
        pass: u64,
        tensor: Address,
        to: PeerId,
        content: HostTensor,
        options: EncodeOptions,
    ) -> Result<(), ExecError>;

    /// Sends a scalar to the broker. `report` is the scalar's index among the program's reports.
    fn report(&mut self, pass: u64, report: u32, micro_batch: u32, value: f64) -> Result<(), ExecError>;

    /// Sends the squared norms of the owned gradients to the broker, in graph order, and waits for the verdict.
    fn verdict(&mut self, pass: u64, squared_norms: Vec<(ValueId, f64)>) -> Result<Verdict, ExecError>;

    /// Notes that an instruction is done. It is called after each instruction, with the instruction's index in the
    /// program.
    fn instruction_done(&mut self, _index: usize) -> Result<(), ExecError> {
        Ok(())
    }
}
