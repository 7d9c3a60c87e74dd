//! Ctrl-C and SIGTERM at a joiner.

use std::sync::Arc;

use super::events::Event;
use super::shared::Shared;
use crate::machine::interrupts::Interrupts;

/// Reports every request to leave.
pub(super) async fn interrupts(shared: Arc<Shared>) {
    let Ok(mut interrupts) = Interrupts::new() else { return };
    while interrupts.next().await.is_ok() {
        shared.send(Event::Interrupt);
    }
}
