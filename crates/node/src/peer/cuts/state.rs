//! A peer's tensors that outlive a step: where their first contents come from, and how snapshots reach the broker.

use bytes::Bytes;
use fusionllm_graph::HostTensor;
use fusionllm_program::TensorKey;
use fusionllm_protocol::{Assignment, BulkHeader};
use fusionllm_transport::Connection;

use super::vault::Kept;
use crate::peer::progress::Progress;
use crate::{NodeError, net};

/// Draws parameters and buffers from the seed, and hands each to `load` until that returns false.
pub(crate) fn draw(
    assignment: &Assignment,
    keys: Vec<TensorKey>,
    mut load: impl FnMut(TensorKey, HostTensor) -> bool,
) -> Result<(), NodeError> {
    let state = assignment.state();
    for key in keys {
        let drawn = state.get(key.name.as_str()).and_then(|value| Some((value.kind.init()?, &value.ty)));
        let tensor = match drawn {
            Some((init, ty)) => init.draw(assignment.seed, &key.name, ty)?,
            None => return Err(NodeError::Protocol(format!("{key} cannot be drawn from a seed"))),
        };
        if !load(key, tensor) {
            break;
        }
    }
    Ok(())
}

/// Reads tensors of a cut, and hands each to `load` until that returns false.
pub(crate) fn read(
    keys: Vec<TensorKey>,
    kept: Vec<Kept>,
    mut load: impl FnMut(TensorKey, HostTensor) -> bool,
) -> Result<(), NodeError> {
    for (key, kept) in keys.into_iter().zip(kept) {
        if !load(key, kept.read()?) {
            break;
        }
    }
    Ok(())
}

/// Streams a cut to the broker. Its lane has the lowest priority.
///
/// # Errors
///
/// A tensor could not be read. A lost connection is no error here: the control lane reports it.
pub(crate) async fn save(
    broker: Connection,
    tensors: Vec<(TensorKey, Kept)>,
    step: u64,
    progress: &Progress,
) -> Result<(), NodeError> {
    for (key, kept) in tensors {
        let read = tokio::task::spawn_blocking(move || kept.read()).await;
        let tensor = read.map_err(|e| NodeError::State(e.to_string()))??;
        let ty = tensor.ty().clone();
        let mut rest = Bytes::from(tensor.into_bytes());
        let mut start = 0;
        // A tensor without elements has one piece, too.
        loop {
            let piece = rest.split_to(rest.len().min(net::PIECE_BYTES));
            let header = BulkHeader::Saved { step, key: key.clone(), ty: ty.clone(), start };
            start += piece.len() as u64;
            if net::send_bulk(&broker, &header, vec![piece]).await.is_err() {
                return Ok(());
            }
            progress.bump();
            if rest.is_empty() {
                break;
            }
        }
    }
    let _ = net::send_bulk(&broker, &BulkHeader::SavedAll { step }, Vec::new()).await;
    Ok(())
}
