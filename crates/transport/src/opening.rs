//! The first messages on a connection: each side opens its lanes.

use iroh::endpoint::{ReadError, ReadExactError, RecvStream, WriteError};

use crate::connection::{Connection, Lanes};
use crate::frame::{FormatError, PRELUDE_BYTES, parse_prelude, prelude};
use crate::lane::{ALL_STREAMS, Lane};
use crate::shared::{Disconnected, OpenConnections, Shared};
use crate::stream::{Receiver, Sender};

/// Opens this side's lanes and waits for the peer's. Both sides do the same, so neither has a connection before the
/// other has accepted it.
pub(crate) async fn open(
    quic: iroh::endpoint::Connection,
    connections: &OpenConnections,
) -> Result<(Connection, Lanes), Disconnected> {
    let shared = Shared::new(quic);
    connections.add(&shared);
    let [control, tensors, bulk] = Lane::ALL;
    let senders =
        [open_lane(&shared, control).await?, open_lane(&shared, tensors).await?, open_lane(&shared, bulk).await?];

    let mut streams = Lane::ALL.map(|lane| Vec::from_iter((0..lane.streams()).map(|_| None::<RecvStream>)));
    for _ in 0..ALL_STREAMS {
        let stream = shared.quic.accept_uni().await;
        let mut stream = stream.map_err(|error| shared.disconnected(error))?;
        let mut bytes = [0; PRELUDE_BYTES];
        match stream.read_exact(&mut bytes).await {
            Ok(()) => {}
            Err(ReadExactError::ReadError(ReadError::ConnectionLost(error))) => {
                return Err(shared.disconnected(error));
            }
            Err(_) => return Err(shared.close_broken(FormatError::NoPrelude)),
        }
        let (lane, number) = parse_prelude(bytes).map_err(|error| shared.close_broken(error))?;
        if streams[lane as usize][number].replace(stream).is_some() {
            return Err(shared.close_broken(FormatError::DuplicateStream(lane)));
        }
    }
    // Each stream has another place, so all places are taken.
    let [control, tensors, bulk] = streams.map(|lane| lane.into_iter().flatten().collect());
    let lanes = Lanes {
        control: Receiver::new(Lane::Control, control, shared.clone()),
        tensors: Receiver::new(Lane::Tensors, tensors, shared.clone()),
        bulk: Receiver::new(Lane::Bulk, bulk, shared.clone()),
    };
    Ok((Connection::new(shared, senders), lanes))
}

async fn open_lane(shared: &Shared, lane: Lane) -> Result<Sender, Disconnected> {
    let mut streams = Vec::with_capacity(lane.streams());
    for number in 0..lane.streams() {
        let stream = shared.quic.open_uni().await;
        let mut stream = stream.map_err(|error| shared.disconnected(error))?;
        // On a new stream, both calls fail only if the connection is lost. The next use of it reports that.
        let _ = stream.set_priority(lane.priority());
        if let Err(WriteError::ConnectionLost(error)) = stream.write_all(&prelude(lane, number as u8)).await {
            return Err(shared.disconnected(error));
        }
        streams.push(stream);
    }
    Ok(Sender::new(lane, streams))
}
