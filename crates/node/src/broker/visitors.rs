//! Machines that do not become members: those that only look whether they could join, and those that may not.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fusionllm_protocol::{ToPeer, VERSION};
use fusionllm_transport::{Connection, Lanes, Secret};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::net;
use crate::net::probe::answer_probes;

/// Most visitors at once. Each measures its link, which takes a share of the broker's line.
const MAX_VISITORS: usize = 2;

/// How long a visitor may stay.
const VISIT_TIMEOUT: Duration = Duration::from_secs(90);

/// How long a machine that was sent away may take to hang up.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(2);

/// Lets machines measure their link to the broker that know the ticket's secret.
#[derive(Clone)]
pub(super) struct Visitors {
    secret: Secret,
    places: Arc<Semaphore>,
}

impl Visitors {
    pub(super) fn new(secret: Secret) -> Self {
        Self { secret, places: Arc::new(Semaphore::new(MAX_VISITORS)) }
    }

    /// Answers a visitor until it leaves.
    pub(super) async fn receive(self, connection: Connection, lanes: Lanes, version: u32, secret: [u8; 16]) {
        let place = match self.place(version, secret) {
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

    fn place(&self, version: u32, secret: [u8; 16]) -> Result<OwnedSemaphorePermit, String> {
        if Secret::from_bytes(secret) != self.secret {
            return Err("the ticket's secret is wrong; use the ticket of this run".into());
        }
        if version != VERSION {
            return Err(format!(
                "it speaks protocol version {version}, but the broker speaks {VERSION}; install the same FusionLLM on \
                 both"
            ));
        }
        let place = self.places.clone().try_acquire_owned();
        place.map_err(|_| "other machines are measuring their links; try again in a minute".into())
    }
}

/// Tells a stranger why it may not come in, and waits a moment until it hangs up.
pub(super) async fn refuse(connection: Connection, lanes: Lanes, reason: String) {
    if net::send_control(&connection, &ToPeer::Refused { reason }).await.is_ok() {
        let _ = tokio::time::timeout(GOODBYE_TIMEOUT, connection.closed()).await;
    }
    connection.close("refused");
    drop(lanes);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_visitor_needs_the_secret_the_version_and_a_place() {
        let visitors = Visitors::new(Secret::from_bytes([7; 16]));
        assert!(visitors.place(VERSION, [8; 16]).unwrap_err().contains("secret"));
        assert!(visitors.place(VERSION + 1, [7; 16]).unwrap_err().contains("install the same FusionLLM"));
        let places: Vec<_> = (0..MAX_VISITORS).map(|_| visitors.place(VERSION, [7; 16]).unwrap()).collect();
        assert!(visitors.place(VERSION, [7; 16]).unwrap_err().contains("try again"));
        drop(places);
        assert!(visitors.place(VERSION, [7; 16]).is_ok());
    }
}
