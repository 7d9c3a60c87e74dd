//! The tickets and keys that decide who may join. Only the broker's clock counts.

use std::collections::BTreeSet;
use std::fmt;

use fusionllm_graph::units::counted;
use serde::{Deserialize, Serialize};

/// The public key of a connection's other end, which the handshake has proved.
pub type Identity = [u8; 32];

/// Most tickets of one run.
const MAX_TICKETS: usize = 1000;

const WRONG_SECRET: &str = "the ticket's secret is wrong; use the ticket of this run";

/// The rights of a ticket's holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TicketRole {
    /// Take part in the run.
    Peer,
    /// Look into the run, and decide who takes part. The holder is no member.
    Owner,
}

/// A ticket, as the broker knows it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Invitation {
    /// The secret that proves that somebody has the ticket.
    pub secret: [u8; 16],
    /// The rights of the ticket's holder.
    pub role: TicketRole,
    /// The time when it expires, in seconds since the Unix epoch; `None` for never.
    pub expires: Option<u64>,
    /// How many machines may join with it; `None` for any number.
    pub uses: Option<u32>,
    /// How many machines have joined with it.
    pub used: u32,
    /// Whether the owner has taken it back.
    pub revoked: bool,
}

impl Invitation {
    /// A ticket without limits.
    pub fn new(role: TicketRole, secret: [u8; 16]) -> Self {
        Self { secret, role, expires: None, uses: None, used: 0, revoked: false }
    }

    /// The reason why no new machine may join with the ticket, if there is one.
    fn refusal(&self, unix_s: u64) -> Option<String> {
        if self.revoked {
            return Some("its ticket has been revoked; ask the run's owner for another".into());
        }
        if self.expires.is_some_and(|expires| unix_s >= expires) {
            return Some("its ticket has expired; ask the run's owner for another".into());
        }
        let uses = self.uses.filter(|uses| self.used >= *uses)?;
        Some(format!("its ticket is used up: it was for {}; ask the run's owner for another", counted(uses, "machine")))
    }
}

impl fmt::Debug for Invitation {
    /// Hides the secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { secret: _, role, expires, uses, used, revoked } = self;
        let mut s = f.debug_struct("Invitation");
        s.field("role", role).field("expires", expires).field("uses", uses).field("used", used);
        s.field("revoked", revoked).finish_non_exhaustive()
    }
}

/// The tickets of a run, and the keys that may or may not join.
///
/// The limits of a ticket are for machines that are new. A machine that has joined may come back until its key is
/// banned.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Admission {
    tickets: Vec<Invitation>,
    /// The only keys that may join; `None` for all.
    allowed: Option<BTreeSet<Identity>>,
    banned: BTreeSet<Identity>,
}

impl From<[u8; 16]> for Admission {
    /// One ticket for peers, without limits.
    fn from(secret: [u8; 16]) -> Self {
        Self { tickets: vec![Invitation::new(TicketRole::Peer, secret)], ..Self::default() }
    }
}

impl Admission {
    /// An admission without tickets: nobody may come in yet. Only the keys in `allowed` may ever join; `None` allows
    /// all keys.
    pub fn new(allowed: Option<BTreeSet<Identity>>) -> Self {
        Self { allowed, ..Self::default() }
    }

    /// Adds a ticket.
    ///
    /// # Errors
    ///
    /// The run has too many tickets.
    pub fn invite(&mut self, ticket: Invitation) -> Result<(), String> {
        if self.tickets.len() >= MAX_TICKETS {
            return Err(format!("a run has at most {MAX_TICKETS} tickets"));
        }
        self.tickets.push(ticket);
        Ok(())
    }

    /// Takes back the ticket for peers with this secret, or all of them. Returns how many.
    pub fn revoke(&mut self, secret: Option<&[u8; 16]>) -> usize {
        let meant =
            |t: &&mut Invitation| t.role == TicketRole::Peer && !t.revoked && secret.is_none_or(|s| same(s, &t.secret));
        self.tickets.iter_mut().filter(meant).map(|t| t.revoked = true).count()
    }

    /// When the ticket with this secret expires, in seconds since the Unix epoch.
    pub fn expires(&self, secret: &[u8; 16]) -> Option<u64> {
        self.ticket(secret)?.expires
    }

    /// Replaces the list of keys that may join.
    pub fn allow_only(&mut self, allowed: BTreeSet<Identity>) {
        self.allowed = Some(allowed);
    }

    /// Keeps a key out for good.
    pub fn ban(&mut self, identity: Identity) {
        self.banned.insert(identity);
    }

    /// Whether this is the secret of the owner's ticket.
    pub fn is_owner(&self, secret: &[u8; 16]) -> bool {
        self.ticket(secret).is_some_and(|t| t.role == TicketRole::Owner)
    }

    /// Whether a machine may join, or the reason why not. `known`: its key has joined before.
    pub(crate) fn check(&self, identity: &Identity, secret: &[u8; 16], known: bool, unix_s: u64) -> Result<(), String> {
        let Some(ticket) = self.ticket(secret) else {
            return Err(WRONG_SECRET.into());
        };
        if ticket.role == TicketRole::Owner {
            return Err("this is the owner's ticket, with which nobody can join; use the one for peers".into());
        }
        if self.banned.contains(identity) {
            return Err("the run's owner has put it out for good".into());
        }
        if self.allowed.as_ref().is_some_and(|allowed| !allowed.contains(identity)) {
            return Err("its key is not on the run's list; `fusionllm identity FILE` prints the key that the owner \
                        must add, and `join --identity FILE` uses it"
                .into());
        }
        ticket.refusal(unix_s).filter(|_| !known).map_or(Ok(()), Err)
    }

    /// Whether a machine that is new could join with this secret, or the reason why not.
    ///
    /// # Errors
    ///
    /// The reason.
    pub fn look(&self, secret: &[u8; 16], unix_s: u64) -> Result<(), String> {
        let Some(ticket) = self.ticket(secret) else { return Err(WRONG_SECRET.into()) };
        ticket.refusal(unix_s).map_or(Ok(()), Err)
    }

    /// Notes that a machine that is new has joined with this secret.
    pub(crate) fn note_use(&mut self, secret: &[u8; 16]) {
        if let Some(ticket) = self.tickets.iter_mut().find(|t| same(&t.secret, secret)) {
            ticket.used = ticket.used.saturating_add(1);
        }
    }

    fn ticket(&self, secret: &[u8; 16]) -> Option<&Invitation> {
        self.tickets.iter().find(|t| same(&t.secret, secret))
    }
}

/// Compares without a branch on the bytes, so that timing reveals nothing.
fn same(a: &[u8; 16], b: &[u8; 16]) -> bool {
    a.iter().zip(b).fold(0u8, |d, (a, b)| d | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEERS: [u8; 16] = [7; 16];
    const OWNERS: [u8; 16] = [9; 16];

    fn admission(ticket: Invitation) -> Admission {
        let mut admission = Admission::default();
        admission.invite(ticket).unwrap();
        admission.invite(Invitation::new(TicketRole::Owner, OWNERS)).unwrap();
        admission
    }

    fn peers() -> Invitation {
        Invitation::new(TicketRole::Peer, PEERS)
    }

    fn refusal(admission: &Admission, known: bool, unix_s: u64) -> String {
        admission.check(&[1; 32], &PEERS, known, unix_s).unwrap_err()
    }

    #[test]
    fn a_ticket_expires_at_its_second_but_not_for_a_member() {
        let admission = admission(Invitation { expires: Some(100), ..peers() });
        assert_eq!(admission.check(&[1; 32], &PEERS, false, 99), Ok(()));
        assert!(refusal(&admission, false, 100).contains("expired"));
        assert_eq!(admission.check(&[1; 32], &PEERS, true, 100), Ok(()));
    }

    #[test]
    fn a_ticket_is_used_up_but_not_for_a_member() {
        let mut admission = admission(Invitation { uses: Some(2), ..peers() });
        admission.note_use(&PEERS);
        assert_eq!(admission.check(&[1; 32], &PEERS, false, 0), Ok(()));
        admission.note_use(&PEERS);
        assert!(refusal(&admission, false, 0).contains("for 2 machines"));
        assert_eq!(admission.check(&[1; 32], &PEERS, true, 0), Ok(()));
    }

    #[test]
    fn revoking_takes_back_one_ticket_or_all_but_the_owners() {
        let mut admission = admission(peers());
        admission.invite(Invitation::new(TicketRole::Peer, [8; 16])).unwrap();
        assert_eq!(admission.revoke(Some(&OWNERS)), 0);
        assert_eq!(admission.revoke(Some(&PEERS)), 1);
        assert!(refusal(&admission, false, 0).contains("revoked"));
        assert_eq!(admission.check(&[1; 32], &[8; 16], false, 0), Ok(()));
        assert_eq!(admission.revoke(None), 1);
        assert!(admission.is_owner(&OWNERS) && !admission.is_owner(&PEERS));
    }

    #[test]
    fn the_owners_ticket_lets_nobody_train() {
        let refused = admission(peers()).check(&[1; 32], &OWNERS, false, 0).unwrap_err();
        assert!(refused.contains("owner's ticket"), "{refused}");
    }

    #[test]
    fn only_keys_on_the_list_may_join_and_no_banned_one() {
        let mut admission = Admission { allowed: Some(BTreeSet::from([[1; 32], [2; 32]])), ..PEERS.into() };
        assert_eq!(admission.check(&[1; 32], &PEERS, false, 0), Ok(()));
        let refused = admission.check(&[3; 32], &PEERS, false, 0).unwrap_err();
        assert!(refused.contains("not on the run's list"), "{refused}");
        admission.ban([1; 32]);
        assert!(refusal(&admission, true, 0).contains("put it out for good"));
    }

    /// A machine that does not know the secret learns nothing about keys.
    #[test]
    fn a_wrong_secret_is_the_first_reason() {
        let mut admission = Admission::new(Some(BTreeSet::new()));
        admission.ban([1; 32]);
        assert!(refusal(&admission, true, 0).contains("secret is wrong"));
    }

    #[test]
    fn secrets_are_not_printed() {
        let text = format!("{:?}", admission(Invitation { secret: [165; 16], ..peers() }));
        assert!(!text.contains("165"), "{text}");
    }
}
