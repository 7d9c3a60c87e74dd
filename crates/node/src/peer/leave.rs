//! Ctrl-C and SIGTERM at a joiner.

use std::sync::Arc;

use super::events::Event;
use super::shared::Shared;

/// Reports every request to leave.
pub(super) async fn interrupts(shared: Arc<Shared>) {
    #[cfg(unix)]
    let mut terminate = match tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()) {
        Ok(signal) => signal,
        Err(_) => return,
    };
    loop {
        #[cfg(unix)]
        tokio::select! {
            result = tokio::signal::ctrl_c() => if result.is_err() { return },
            _ = terminate.recv() => {}
        }
        #[cfg(not(unix))]
        if tokio::signal::ctrl_c().await.is_err() {
            return;
        }
        shared.send(Event::Interrupt);
    }
}
