//! Everything that reaches the broker's loop. A task of its own reads each source.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use fusionllm_graph::{Advice, TensorType};
use fusionllm_program::TensorKey;
use fusionllm_protocol::{
    BulkHeader, FromPeer, Hello, MAX_HELLO_BYTES, MemberId, PeerHello, Request, VERSION, decode, hello_version,
    other_version,
};
use fusionllm_transport::{Connection, Endpoint, Lanes, PeerKey, Receiver};
use tokio::sync::{Semaphore, mpsc, oneshot};

use super::farewell::refuse;
use crate::broker::codec_updates::NewCodecs;
use crate::broker::planner::Proposal;
use crate::broker::records::{Inbox, KeeperEvent, SavedPiece};
use crate::machine::interrupts::Stop;
use crate::net::probe::answer_probes;
use crate::web::Look;
use crate::{NodeError, net};

/// The time in which a new connection has to say what it wants.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// The most connections that have not yet said what they want. Others wait until one of these has.
const MAX_STRANGERS: usize = 64;

/// The tensors that a member may send for a checkpoint, with their types.
pub(crate) type SavedShare = Arc<Mutex<BTreeMap<TensorKey, TensorType>>>;

/// A member, and the number of its connection.
pub(crate) type Origin = (MemberId, u64);

/// An event for the broker's loop.
pub(crate) enum Incoming {
    /// A connection, by number, said hello.
    Hello(u64, Connection, Box<Lanes>, Hello),
    /// The run's owner, or somebody who claims to be, asks something.
    Asked(Connection, Box<Lanes>, Request),
    /// A machine that only looks whether it could join: its version and its ticket's secret.
    Visit(Connection, Box<Lanes>, u32, [u8; 16]),
    /// A member sent a control message.
    Message(Origin, FromPeer),
    /// A member sent all tensors of its snapshot of a step.
    SavedAll(Origin, u64),
    /// A member's connection has ended, for this reason.
    Gone(Origin, String),
    /// A member's process has ended, as its machine says in these words.
    Ended(Origin, String),
    /// A member sent a message that no member may send.
    Broke(Origin, String),
    /// The planner has finished.
    Planned(Result<Box<Proposal>, NodeError>),
    /// The checkpoint thread reports.
    Keeper(KeeperEvent),
    /// The regulator of this generation changes codecs, or warns.
    NewCodecs(u32, NewCodecs),
    /// A tensor of an assignment could not be read.
    LoadFailed(NodeError),
    /// Somebody looks at the run's page.
    Look(oneshot::Sender<Look>),
    /// A sentence for people.
    Note(String),
    /// A process of this machine ended badly.
    Child(String),
    /// The user or the system asks to stop.
    Interrupt(Stop),
}

/// The keys of members, which may measure their links to the broker.
pub(crate) type KnownKeys = Arc<RwLock<BTreeSet<PeerKey>>>;

/// Accepts connections: those of joiners are reported, those of members measure links.
pub(crate) async fn accept(endpoint: Endpoint, known: KnownKeys, events: mpsc::UnboundedSender<Incoming>) {
    let places = Arc::new(Semaphore::new(MAX_STRANGERS));
    let mut number = 0;
    while let Some((connection, mut lanes)) = endpoint.accept().await {
        // The semaphore is never closed.
        let Ok(place) = places.clone().acquire_owned().await else { return };
        number += 1;
        let (known, events) = (known.clone(), events.clone());
        tokio::spawn(async move {
            let first = async {
                let frame = lanes.control.next().await.ok()??;
                frame.read(MAX_HELLO_BYTES).await.ok()
            };
            let first = tokio::time::timeout(HELLO_TIMEOUT, first).await.ok().flatten().unwrap_or_default();
            drop(place);
            match decode(&first) {
                Ok(FromPeer::Hello(hello)) => {
                    let _ = events.send(Incoming::Hello(number, connection, Box::new(lanes), hello));
                    return;
                }
                Ok(FromPeer::Ask(request)) => {
                    let _ = events.send(Incoming::Asked(connection, Box::new(lanes), request));
                    return;
                }
                Ok(FromPeer::Visit { version, secret }) => {
                    let _ = events.send(Incoming::Visit(connection, Box::new(lanes), version, secret));
                    return;
                }
                _ => {}
            }
            if let Some(version) = hello_version(&first).filter(|v| *v != VERSION) {
                return refuse(connection, lanes, other_version(version)).await;
            }
            let is_member = known.read().unwrap_or_else(PoisonError::into_inner).contains(&connection.peer());
            match decode(&first) {
                // A member that breaks off its measurement gets no answer.
                Ok(PeerHello::Probe) if is_member => drop(answer_probes(&connection, lanes).await),
                _ => connection.close("say hello first"),
            }
        });
    }
}

/// Reports a member's control messages until its connection ends.
pub(crate) async fn receive_control(mut lane: Receiver, from: Origin, events: mpsc::UnboundedSender<Incoming>) {
    loop {
        let event = match net::next_control::<FromPeer>(&mut lane).await {
            Ok(Some(message)) => Incoming::Message(from, message),
            Ok(None) => Incoming::Gone(from, "it left".into()),
            Err(NodeError::Lost(reason)) => Incoming::Gone(from, reason.to_string()),
            Err(e) => Incoming::Broke(from, e.one_line()),
        };
        let over = !matches!(event, Incoming::Message(..));
        if events.send(event).is_err() || over {
            return;
        }
    }
}

/// Hands a member's snapshots to the checkpoint thread. A tensor that is not in the member's present share is skipped,
/// because it may belong to a generation that is over.
pub(crate) async fn receive_bulk(
    mut lane: Receiver,
    from: Origin,
    share: SavedShare,
    keeper: Inbox,
    events: mpsc::UnboundedSender<Incoming>,
) {
    let result: Result<(), NodeError> = async {
        while let Some(frame) = lane.next().await? {
            match decode(frame.header()).map_err(NodeError::Protocol)? {
                BulkHeader::Saved { step, key, ty, start } => {
                    let expected = share.lock().unwrap_or_else(PoisonError::into_inner).get(&key) == Some(&ty);
                    if !expected {
                        continue;
                    }
                    let bytes = frame.read(net::PIECE_BYTES as u64).await?;
                    keeper.put(SavedPiece { step, key, ty, start, bytes }).await;
                }
                BulkHeader::SavedAll { step } => drop(events.send(Incoming::SavedAll(from, step))),
                other => return Err(NodeError::Protocol(format!("a peer cannot send {other:?}"))),
            }
        }
        Ok(())
    }
    .await;
    // The control lane reports a lost connection.
    if let Err(e) = result
        && !matches!(e, NodeError::Lost(_))
    {
        let _ = events.send(Incoming::Broke(from, e.one_line()));
    }
}
