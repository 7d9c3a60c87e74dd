//! Answers the members that connect to this one.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fusionllm_graph::Advice;
use fusionllm_protocol::{BulkHeader, PeerHello};
use fusionllm_transport::{Connection, Lanes};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::net::probe::answer_probes;
use crate::peer::cuts::Kept;
use crate::peer::events::Event;
use crate::peer::shared::Shared;
use crate::{NodeError, net};

/// The time in which a new connection has to say hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// Most connections that say hello, measure or ask for copies at once.
const MAX_VISITORS: usize = 256;

/// The time for which a request waits for a cut that the computing thread has not reached.
const PATIENCE: Duration = Duration::from_secs(60);

/// The time in which a member that got its answer has to hang up.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(60);

/// Most bytes of a tensor that are sent without a look at the rate.
const PIECE_BYTES: usize = 256 << 10;

/// The longest pause between two pieces. A slower rate is not kept to.
const MAX_PAUSE_S: f64 = 60.0;

/// Accepts connections, and reports each that says hello. Probes are answered here.
pub(crate) async fn accept(shared: Arc<Shared>) {
    let places = Arc::new(Semaphore::new(MAX_VISITORS));
    while let Some((connection, mut lanes)) = shared.endpoint.accept().await {
        let Ok(place) = places.clone().try_acquire_owned() else {
            connection.close("too many connections at once");
            continue;
        };
        let shared = shared.clone();
        tokio::spawn(async move {
            match tokio::time::timeout(HELLO_TIMEOUT, net::next_control(&mut lanes.control)).await {
                Ok(Ok(Some(PeerHello::Probe))) => {
                    // A member that breaks off its measurement gets no answer.
                    let _ = answer_probes(&connection, lanes).await;
                    drop(place);
                }
                Ok(Ok(Some(hello))) => shared.send(Event::Greeted { connection, lanes, hello, place }),
                _ => connection.close("say hello first"),
            }
        });
    }
}

/// A member's request for copies.
pub(crate) struct Request {
    pub(crate) connection: Connection,
    pub(crate) lanes: Lanes,
    pub(crate) bytes_per_s: Option<f64>,
    /// Counts the request among the visitors until it is answered.
    pub(crate) place: OwnedSemaphorePermit,
}

/// Reports when a request has waited long enough, or its sender has gone.
pub(crate) async fn watch_request(number: u64, connection: Connection, shared: Arc<Shared>) {
    let _ = tokio::time::timeout(PATIENCE, connection.closed()).await;
    shared.send(Event::RequestOver(number));
}

impl Request {
    /// Sends these tensors.
    pub(crate) async fn serve(self, tensors: Vec<Kept>, shared: Arc<Shared>) {
        if let Err(e) = self.send(tensors, &shared).await {
            // The other side notices that the connection ends too early.
            tracing::debug!("a copy was not sent: {}", e.one_line());
            return;
        }
        self.wait_for_goodbye().await;
    }

    /// Tells the member that the tensors are not here.
    pub(crate) async fn refuse(self) {
        if net::send_bulk(&self.connection, &BulkHeader::NoCopy, Vec::new()).await.is_ok() {
            self.wait_for_goodbye().await;
        }
    }

    async fn send(&self, tensors: Vec<Kept>, shared: &Shared) -> Result<(), NodeError> {
        let mut pace = Pace::new(self.bytes_per_s);
        for kept in tensors {
            let read = tokio::task::spawn_blocking(move || kept.read()).await;
            let tensor = read.map_err(|e| NodeError::State(e.to_string()))??;
            for piece in tensor.bytes().chunks(PIECE_BYTES) {
                pace.pause(piece.len()).await;
                // The run's end waits for its last checkpoint, and for no copy.
                shared.saved().await;
                net::send_bulk(&self.connection, &BulkHeader::Copy, vec![Bytes::copy_from_slice(piece)]).await?;
                shared.progress.bump();
            }
        }
        Ok(())
    }

    /// Keeps the connection until the other side has read everything and closes it.
    async fn wait_for_goodbye(self) {
        let _ = tokio::time::timeout(GOODBYE_TIMEOUT, self.connection.closed()).await;
        drop((self.lanes, self.place));
    }
}

/// Keeps a sender to a rate.
struct Pace {
    /// Bytes per second; `None` for no limit.
    rate: Option<f64>,
    /// The time when the next piece may go.
    next: Instant,
}

impl Pace {
    fn new(bytes_per_s: Option<f64>) -> Self {
        Self { rate: bytes_per_s.filter(|rate| *rate > 0.0), next: Instant::now() }
    }

    /// Waits until a piece of this many bytes may be sent.
    async fn pause(&mut self, bytes: usize) {
        let Some(rate) = self.rate else { return };
        tokio::time::sleep_until(self.next).await;
        // Time in which nothing was sent is not made up for.
        let begun = self.next.max(Instant::now());
        self.next = begun + Duration::from_secs_f64((bytes as f64 / rate).min(MAX_PAUSE_S));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_sender_keeps_to_its_rate() {
        let begun = Instant::now();
        let mut pace = Pace::new(Some(10_000.0));
        for _ in 0..5 {
            pace.pause(500).await;
        }
        assert!(begun.elapsed() >= Duration::from_millis(190), "{:?}", begun.elapsed());
        for rate in [None, Some(0.0), Some(f64::NAN), Some(f64::INFINITY)] {
            let mut pace = Pace::new(rate);
            pace.pause(1 << 30).await;
            pace.pause(1 << 30).await;
        }
    }
}
