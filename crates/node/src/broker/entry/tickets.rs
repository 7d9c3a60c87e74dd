//! Makes tickets, by the broker's clock.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fusionllm_protocol::{Admission, Invitation, TicketRole};
use fusionllm_transport::{PeerAddr, PeerKey, Secret, Ticket};

use crate::NodeError;
use crate::broker::Entry;
use crate::broker::records::{Identity, Store};

/// Longest that a new ticket may be valid. A later second does not fit a date.
const MAX_TICKET_S: u64 = 100 * 365 * 24 * 3600;

/// The broker's time in seconds since the Unix epoch.
pub(crate) fn unix_s() -> u64 {
    // A clock before 1970 is wrong in any case; no ticket has expired then.
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The time when a ticket expires that is made now, in seconds since the Unix epoch.
fn expiry(valid: Duration) -> u64 {
    unix_s().saturating_add(valid.as_secs().min(MAX_TICKET_S))
}

/// A new ticket for `addr`, and its entry in the roster.
pub(crate) fn invite(
    addr: PeerAddr,
    role: TicketRole,
    valid: Option<Duration>,
    uses: Option<u32>,
) -> (Ticket, Invitation) {
    let expires = valid.map(expiry);
    let ticket = Ticket { expires, ..Ticket::new(addr, Secret::generate()) };
    let invitation = Invitation { expires, uses, ..Invitation::new(role, *ticket.secret.as_bytes()) };
    (ticket, invitation)
}

/// The admission to a new run, with a ticket for machines and one for the owner.
pub(crate) fn admission(
    identity: &Identity,
    entry: &Entry,
    allowed: Option<BTreeSet<PeerKey>>,
) -> Result<Admission, NodeError> {
    let mut admission = Admission::new(allowed.map(identities));
    let [peers, owner] = &identity.secrets;
    let peers = Invitation::new(TicketRole::Peer, *peers.as_bytes());
    admission
        .invite(Invitation { expires: entry.valid.map(expiry), uses: entry.uses, ..peers })
        .and_then(|()| admission.invite(Invitation::new(TicketRole::Owner, *owner.as_bytes())))
        .map_err(NodeError::State)?;
    Ok(admission)
}

/// The admission to a run that goes on: as before, unless there is another list of keys.
pub(crate) fn renewed(
    before: &Admission,
    entry: &Entry,
    allowed: Option<BTreeSet<PeerKey>>,
) -> Result<Admission, NodeError> {
    if entry.valid.is_some() || entry.uses.is_some() {
        return Err(NodeError::input_with_hint(
            "the run goes on with the tickets that it has, whose limits stay",
            "make another ticket with `fusionllm invite` once the broker runs",
        ));
    }
    let mut admission = before.clone();
    if let Some(keys) = allowed {
        admission.allow_only(identities(keys));
    }
    Ok(admission)
}

fn identities(keys: BTreeSet<PeerKey>) -> BTreeSet<[u8; 32]> {
    keys.iter().map(|key| *key.as_bytes()).collect()
}

/// Writes the tickets for peers and for the owner to the run directory. Returns the one for peers.
pub(crate) fn write_tickets(
    addr: PeerAddr,
    identity: &Identity,
    admission: &Admission,
    store: &Store,
) -> Result<Ticket, NodeError> {
    let [peers, owner] = identity.secrets.clone().map(|secret| {
        let expires = admission.expires(secret.as_bytes());
        Ticket { expires, ..Ticket::new(addr.clone(), secret) }
    });
    store.tickets(&peers, &owner)?;
    Ok(peers)
}
