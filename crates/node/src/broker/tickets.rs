//! Makes tickets, by the broker's clock.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fusionllm_protocol::{Admission, Invitation, TicketRole};
use fusionllm_transport::{PeerAddr, PeerKey, Secret, Ticket};

use super::store::Store;
use crate::NodeError;

/// Longest that a new ticket may be valid. A later second does not fit a date.
const MAX_TICKET_S: u64 = 100 * 365 * 24 * 3600;

/// The broker's time in seconds since the Unix epoch.
pub(super) fn unix_s() -> u64 {
    // A clock before 1970 is wrong in any case; no ticket has expired then.
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// A new ticket for `addr`, and what the roster knows of it.
pub(super) fn invite(
    addr: PeerAddr,
    role: TicketRole,
    valid: Option<Duration>,
    uses: Option<u32>,
) -> (Ticket, Invitation) {
    let expires = valid.map(|valid| unix_s().saturating_add(valid.as_secs().min(MAX_TICKET_S)));
    let ticket = Ticket { expires, ..Ticket::new(addr, Secret::generate()) };
    let invitation = Invitation { expires, uses, ..Invitation::new(role, *ticket.secret.as_bytes()) };
    (ticket, invitation)
}

/// Makes the ticket for peers, which is returned, and the owner's, and writes both to the run directory.
pub(super) fn tickets(
    addr: PeerAddr,
    valid: Option<Duration>,
    uses: Option<u32>,
    allowed: Option<BTreeSet<PeerKey>>,
    store: &Store,
) -> Result<(Ticket, Admission), NodeError> {
    let (peers, for_peers) = invite(addr.clone(), TicketRole::Peer, valid, uses);
    let (owner, for_owner) = invite(addr, TicketRole::Owner, None, None);
    let mut admission = Admission::new(allowed.map(|keys| keys.iter().map(|key| *key.as_bytes()).collect()));
    for invitation in [for_peers, for_owner] {
        admission.invite(invitation).map_err(NodeError::State)?;
    }
    store.tickets(&peers, &owner)?;
    Ok((peers, admission))
}
