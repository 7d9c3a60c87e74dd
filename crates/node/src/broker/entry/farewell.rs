//! The end of a connection whose other side shall read a last message.

use std::time::Duration;

use fusionllm_protocol::ToPeer;
use fusionllm_transport::{Connection, Lanes};

use crate::net;

/// The time in which a machine that was sent away has to hang up.
pub(crate) const GOODBYE_TIMEOUT: Duration = Duration::from_secs(2);

/// Tells a stranger why it may not join, and waits a moment until it hangs up.
pub(crate) async fn refuse(connection: Connection, lanes: Lanes, reason: String) {
    match net::send_control(&connection, &ToPeer::Refused { reason }).await {
        Ok(()) => part(connection, lanes).await,
        Err(_) => connection.close("refused"),
    }
}

/// Waits a moment until the other side hangs up, which has got its answer.
pub(crate) async fn part(connection: Connection, lanes: Lanes) {
    let _ = tokio::time::timeout(GOODBYE_TIMEOUT, connection.closed()).await;
    connection.close("answered");
    drop(lanes);
}
