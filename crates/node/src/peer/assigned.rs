//! An assignment as it arrives, with the tensors that the broker streams behind it.

use std::collections::BTreeMap;
use std::sync::Arc;

use fusionllm_graph::TensorType;
use fusionllm_graph::units::bytes;
use fusionllm_program::{Medium, TensorKey};
use fusionllm_protocol::{Assignment, Contact, MemberId, Role, Source, decode};
use fusionllm_transport::PeerAddr;
use fusionllm_workbench::machine::memory as machine_memory;
use tokio::sync::mpsc;

use super::compute::Loading;
use crate::net::neighbours;

/// The most tensors that wait until the computing thread has loaded those before them.
const LOADING_QUEUE: usize = 2;

/// An assignment that this peer can carry out.
pub(super) struct Assigned {
    pub(super) assignment: Arc<Assignment>,
    /// The addresses of its members.
    pub(super) addresses: BTreeMap<MemberId, PeerAddr>,
    pub(super) loading: mpsc::Sender<Loading>,
    pub(super) loads: mpsc::Receiver<Loading>,
}

/// The tensors that the broker still has to stream for an assignment.
pub(super) struct Stream {
    pub(super) generation: u32,
    pub(super) types: BTreeMap<TensorKey, TensorType>,
    /// The bytes that have come of tensors that are not whole.
    pub(super) begun: BTreeMap<TensorKey, Vec<u8>>,
    /// A weak sender, so that the stream ends with the generation.
    pub(super) loading: mpsc::WeakSender<Loading>,
}

impl Assigned {
    /// Checks an assignment before anything is allocated for it. `memory` is the memory that this machine gives to the
    /// run, and `disk` is the free space where copies stand. Both are in bytes, and `None` if they are unknown. The
    /// error says why the assignment does not fit.
    pub(super) fn new(
        assignment: Assignment,
        memory: Option<u64>,
        disk: Option<u64>,
    ) -> Result<(Self, Stream), String> {
        assignment.validate().map_err(|e| e.to_string())?;
        check_room(&assignment, memory, disk)?;
        let addresses = addresses(assignment.peers.iter().chain(&assignment.donors))?;
        let streamed = assignment.tensor_types().into_iter().filter(|(k, _)| assignment.sources[k] == Source::Broker);
        let types = streamed.map(|(key, ty)| (key, ty.clone())).collect();
        let (loading, loads) = mpsc::channel(LOADING_QUEUE);
        let begun = BTreeMap::new();
        let stream = Stream { generation: assignment.generation, types, begun, loading: loading.downgrade() };
        Ok((Self { assignment: Arc::new(assignment), addresses, loading, loads }, stream))
    }

    /// The facts of the assignment that the follower needs.
    pub(super) fn role(&self) -> Role {
        Role::new(&self.assignment, &neighbours(&[&self.assignment.train, &self.assignment.eval]))
    }
}

/// Whether a peer takes part as an assignment says. The error says why not.
#[cfg(feature = "decoders")]
pub(crate) fn accepts_assignment(assignment: Assignment, memory: Option<u64>) -> Result<(), String> {
    Assigned::new(assignment, memory, None).map(|(assigned, _)| drop(assigned.role()))
}

/// The addresses of members.
pub(super) fn addresses<'a>(
    contacts: impl Iterator<Item = &'a Contact>,
) -> Result<BTreeMap<MemberId, PeerAddr>, String> {
    let decoded = contacts.map(|contact| match decode(&contact.addr) {
        Ok(addr) => Ok((contact.member, addr)),
        Err(e) => Err(format!("the address of {:?}: {e}", contact.name)),
    });
    decoded.collect()
}

/// Refuses an assignment that needs more than the machine gives, or than any machine has. Copies for others take memory
/// only where the disk has no room for them. Offloaded tensors get the disk's room first.
fn check_room(assignment: &Assignment, memory: Option<u64>, disk: Option<u64>) -> Result<(), String> {
    let away = |medium| assignment.train.offloaded_bytes(medium).total();
    let (on_disk, in_host) = (away(Medium::Disk), away(Medium::Host));
    for (what, room, needed) in [("disk", disk, on_disk), ("the host's memory", machine_memory::limit(), in_host)] {
        if let Some(room) = room.filter(|room| needed > *room) {
            return Err(format!(
                "its programs offload {} to {what}, which has room for {}",
                bytes(needed),
                bytes(room)
            ));
        }
    }
    let disk = disk.map(|room| room.saturating_sub(on_disk));
    let copies = match assignment.mirrored_bytes() {
        u64::MAX => u64::MAX,
        held => held.saturating_sub(disk.unwrap_or(0)),
    };
    for (what, needed) in [("copies for others", copies), ("programs", assignment.peak_bytes())] {
        match memory {
            _ if needed == u64::MAX => return Err(format!("its {what} need more memory than any machine has")),
            Some(memory) if needed > memory => {
                let reason = format!(
                    "its {what} need {} of memory, and this machine gives the run {}",
                    bytes(needed),
                    bytes(memory)
                );
                return Err(reason);
            }
            _ => {}
        }
    }
    Ok(())
}
