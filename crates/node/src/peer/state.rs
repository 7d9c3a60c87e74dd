//! A peer's tensors that outlive a step: loads them at the start, and sends snapshots of them.

use std::sync::Arc;

use bytes::Bytes;
use fusionllm_exec::{Executor, Snapshot};
use fusionllm_graph::{HostTensor, ValueKind};
use fusionllm_protocol::{Assignment, BulkHeader, FromPeer, decode};
use fusionllm_transport::{Connection, Receiver};

use crate::NodeError;
use crate::net;

/// Loads the executor: tensors that the broker streams, as they come, and the others drawn from the seed.
pub(super) async fn load(
    bulk: &mut Receiver,
    assignment: &Assignment,
    mut executor: Executor,
) -> Result<Executor, NodeError> {
    let kept = assignment.state();
    let mut loads = assignment.loads.clone();
    for (name, value) in &kept {
        if loads.contains(&(name.to_string(), None)) {
            continue;
        }
        match &value.kind {
            ValueKind::Parameter(init) | ValueKind::Buffer(init) => {
                executor.load(name, &init.draw(assignment.seed, name, &value.ty)?)?
            }
            _ => return Err(NodeError::Protocol(format!("constant {name:?} is not among what is loaded"))),
        }
    }
    while !loads.is_empty() {
        let Some(frame) = bulk.next().await? else {
            return Err(NodeError::Protocol("the broker stopped before all was loaded".into()));
        };
        let BulkHeader::Load { name, slot } = decode(frame.header()).map_err(NodeError::Protocol)? else {
            return Err(NodeError::Protocol("the broker sent something else than a tensor to load".into()));
        };
        let key = (name, slot);
        let Some(value) = kept.get(key.0.as_str()).filter(|_| loads.remove(&key)) else {
            return Err(NodeError::Protocol(format!("the broker sent {:?}, which this peer does not load", key.0)));
        };
        let ty = value.ty.clone();
        let mut bytes = vec![0; ty.bytes()];
        frame.read_into(&mut bytes).await?;
        let tensor = HostTensor::from_bytes(ty, bytes)?;
        match key {
            (name, None) => executor.load(&name, &tensor)?,
            (name, Some(slot)) => executor.load_slot(&name, &slot, &tensor)?,
        }
    }
    Ok(executor)
}

/// Streams a snapshot to the broker. Its lane has the lowest priority.
pub(super) async fn stream_snapshot(broker: Connection, snapshot: Snapshot, step: u64) {
    let snapshot = Arc::new(snapshot);
    for i in 0..snapshot.tensors.len() {
        let s = snapshot.clone();
        let Ok(Ok(tensor)) = tokio::task::spawn_blocking(move || s.download(&s.tensors[i])).await else {
            let reason = "a snapshot could not be read".into();
            // The broker may be gone.
            let _ = net::send_control(&broker, &FromPeer::Failed { reason }).await;
            return;
        };
        let t = &snapshot.tensors[i];
        let header =
            BulkHeader::Saved { step, name: t.name.clone(), slot: t.slot.map(str::to_owned), ty: tensor.ty().clone() };
        if net::send_bulk(&broker, &header, vec![Bytes::from(tensor.into_bytes())]).await.is_err() {
            return;
        }
    }
    // The control lane reports a lost broker.
    let _ = net::send_bulk(&broker, &BulkHeader::SavedAll { step }, Vec::new()).await;
}
