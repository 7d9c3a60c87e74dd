//! Connects to a member that may not know this machine yet.

use std::time::{Duration, Instant};

use fusionllm_protocol::PeerHello;
use fusionllm_transport::{ConnectError, Connection, Endpoint, Lanes, PeerAddr};

use crate::{NodeError, net};

/// The time for which a member that does not answer at all is tried.
const SILENCE: Duration = Duration::from_secs(15);

/// Waits between attempts start at the first of these and double up to the second.
const DELAYS: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(500));

/// Connects to a member and says hello. A member that does not accept this machine's key may still learn it, and is
/// tried for `patience`.
pub(crate) async fn dial(
    endpoint: &Endpoint,
    to: &PeerAddr,
    hello: &PeerHello,
    patience: Duration,
) -> Result<(Connection, Lanes), NodeError> {
    let begun = Instant::now();
    let mut delay = DELAYS.0;
    loop {
        let error = match endpoint.connect(to).await {
            Ok((connection, lanes)) => {
                net::send_control(&connection, hello).await?;
                return Ok((connection, lanes));
            }
            Err(error) => error,
        };
        let limit = match error {
            ConnectError::Refused(_) => patience,
            ConnectError::NoAnswer { .. } | ConnectError::Disconnected(_) | ConnectError::Handshake(..) => {
                patience.min(SILENCE)
            }
            _ => Duration::ZERO,
        };
        if begun.elapsed() + delay > limit {
            return Err(error.into());
        }
        tokio::time::sleep(delay).await;
        delay = (delay * 2).min(DELAYS.1);
    }
}
