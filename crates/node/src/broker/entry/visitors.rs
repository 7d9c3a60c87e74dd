//! Machines that do not become members: those that only look whether they could join, and those that may not.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fusionllm_protocol::{ToPeer, VERSION, other_version};
use fusionllm_transport::{Connection, Lanes};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::farewell::refuse;
use crate::net;
use crate::net::probe::answer_probes;

/// Most visitors at once. Each measures its link, which takes a share of the broker's line.
const MAX_VISITORS: usize = 2;

/// How long a visitor may stay.
const VISIT_TIMEOUT: Duration = Duration::from_secs(90);

/// Lets machines with a ticket measure their link to the broker.
#[derive(Clone)]
pub(crate) struct Visitors {
    places: Arc<Semaphore>,
}

impl Visitors {
    pub(crate) fn new() -> Self {
        Self { places: Arc::new(Semaphore::new(MAX_VISITORS)) }
    }

    /// Answers a visitor until it leaves. `ticket` says whether its ticket lets machines in.
    pub(crate) async fn receive(self, connection: Connection, lanes: Lanes, version: u32, ticket: Result<(), String>) {
        let place = match ticket.and_then(|()| self.place(version)) {
            Ok(place) => place,
            Err(reason) => return refuse(connection, lanes, reason).await,
        };
        let clock_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let welcome = ToPeer::Welcome { seen_as: connection.remote_addr(), clock_s };
        if net::send_control(&connection, &welcome).await.is_ok() {
            // A visitor that breaks off, or stays too long, gets no further answer.
            let _ = tokio::time::timeout(VISIT_TIMEOUT, answer_probes(&connection, lanes)).await;
        }
        connection.close("the visit is over");
        drop(place);
    }

    fn place(&self, version: u32) -> Result<OwnedSemaphorePermit, String> {
        if version != VERSION {
            return Err(other_version(version));
        }
        let place = self.places.clone().try_acquire_owned();
        place.map_err(|_| "other machines are measuring their links; try again in a minute".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_visitor_needs_the_version_and_a_place() {
        let visitors = Visitors::new();
        assert!(visitors.place(VERSION + 1).unwrap_err().contains("install the same FusionLLM"));
        let places: Vec<_> = (0..MAX_VISITORS).map(|_| visitors.place(VERSION).unwrap()).collect();
        assert!(visitors.place(VERSION).unwrap_err().contains("try again"));
        drop(places);
        assert!(visitors.place(VERSION).is_ok());
    }
}
