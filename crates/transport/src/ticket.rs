//! The line of text with which a machine joins a run.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use data_encoding::BASE32_NOPAD;

use crate::key::{PeerAddr, PeerKey, RelayUrl};
use crate::options::Relay;

/// The broker's key and addresses, and the secret that proves an invitation.
///
/// ```text
///  offset  bytes
///   0      1      version, now 2
///   1      2      length of the body, little-endian
///   3      1      check of bytes 0..3, to tell a typo here from a missing end
///   4      32     the broker's public key
///   36     16     secret
///   52     1|9    expiry: 0 if there is none | 1, seconds since the Unix epoch little-endian
///          1+n    relay: its URL's length n, 0 if there is none; the URL
///          1      number of addresses, 0..=32
///          7|19   each address: 4 | 6, the IP's 4 | 16 bytes, port little-endian
///   end-4  4      check of all bytes before
/// ```
///
/// The text is these bytes in lower-case base32 (RFC 4648, no padding). A check is the first bytes of BLAKE3.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ticket {
    /// The broker's key and addresses.
    pub addr: PeerAddr,
    /// The broker accepts no other message from a peer before it has seen this.
    pub secret: Secret,
    /// The time until which the ticket is valid, in seconds since the Unix epoch. `None`: it is valid as long as the
    /// broker runs.
    pub expires: Option<u64>,
}

impl Ticket {
    /// A ticket without an expiry.
    pub fn new(addr: PeerAddr, secret: Secret) -> Self {
        Self { addr, secret, expires: None }
    }

    /// The relay that a holder of the ticket uses: the broker's.
    pub fn relay(&self) -> Relay {
        self.addr.relay.clone().map_or(Relay::None, Relay::At)
    }

    /// Whether the ticket is invalid at `now`, in seconds since the Unix epoch. The holder's clock may be wrong, so
    /// only the broker's answer counts.
    pub fn expired(&self, now: u64) -> bool {
        self.expires.is_some_and(|expires| now >= expires)
    }
}

/// Sixteen bytes that only invited machines know. They are compared in constant time and never printed.
#[derive(Clone)]
pub struct Secret([u8; 16]);

impl Secret {
    /// A new secret from the operating system's randomness.
    pub fn generate() -> Self {
        // An Ed25519 seed is 32 uniformly random bytes. No key is made from this one.
        let seed = iroh::SecretKey::generate().to_bytes();
        let mut secret = [0; 16];
        secret.copy_from_slice(&seed[..16]);
        Self(secret)
    }

    /// The secret with these bytes.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The bytes that a joiner sends to the broker.
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl PartialEq for Secret {
    fn eq(&self, other: &Self) -> bool {
        // `blake3::Hash` compares in constant time.
        blake3::hash(&self.0) == blake3::hash(&other.0)
    }
}

impl Eq for Secret {}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// A text is not a ticket.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TicketError {
    /// The text has only white space.
    #[error("the ticket is empty")]
    Empty,
    /// The text does not look like a ticket at all.
    #[error("this is not a ticket: a ticket is one line of about 120 letters and digits")]
    NotATicket,
    /// A character that no ticket contains.
    #[error("the ticket has {character:?} at position {position}, but a ticket has only the characters a-z and 2-7")]
    Character {
        /// The first such character.
        character: char,
        /// Counted from 1.
        position: usize,
    },
    /// An incompatible version of this program made the ticket.
    #[error("the ticket has version {0}, but this program reads version {VERSION}")]
    Version(u8),
    /// The end is missing.
    #[error("the ticket is cut short: it has {got} of {expected} characters")]
    Truncated {
        /// Characters given.
        got: usize,
        /// Characters that the ticket's head announces.
        expected: usize,
    },
    /// More text follows the ticket.
    #[error("the ticket is too long: it has {got} characters instead of {expected}")]
    TooLong {
        /// Characters given.
        got: usize,
        /// Characters that the ticket's head announces.
        expected: usize,
    },
    /// A check does not match.
    #[error("the ticket has a typo: its checksum does not match")]
    Typo,
}

impl TicketError {
    /// Advice to the user about this error.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Version(_) => "use the same version of fusionllm on both machines",
            Self::TooLong { .. } => "copy one line only",
            _ => "copy the whole line after `fusionllm join` that the broker printed",
        }
    }
}

const VERSION: u8 = 2;
const HEAD_BYTES: usize = 4;
const CHECK_BYTES: usize = 4;
/// Most addresses in a ticket, so that it stays short. A machine has few interfaces.
const MAX_ADDRS: usize = 32;
/// Length of a ticket without expiry, relay and addresses. A shorter text is hardly a ticket.
const MIN_CHARS: usize = 95;

impl fmt::Display for Ticket {
    /// Writes at most the first 32 addresses.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut body = Vec::with_capacity(128);
        body.extend_from_slice(self.addr.key.as_bytes());
        body.extend_from_slice(self.secret.as_bytes());
        match self.expires {
            Some(expires) => {
                body.push(1);
                body.extend_from_slice(&expires.to_le_bytes());
            }
            None => body.push(0),
        }
        let relay = self.addr.relay.as_ref().map_or("", RelayUrl::full);
        // A relay's URL has at most 255 bytes.
        body.push(relay.len() as u8);
        body.extend_from_slice(relay.as_bytes());
        let addrs = &self.addr.addrs[..self.addr.addrs.len().min(MAX_ADDRS)];
        body.push(addrs.len() as u8);
        for addr in addrs {
            match addr.ip() {
                IpAddr::V4(ip) => {
                    body.push(4);
                    body.extend_from_slice(&ip.octets());
                }
                IpAddr::V6(ip) => {
                    body.push(6);
                    body.extend_from_slice(&ip.octets());
                }
            }
            body.extend_from_slice(&addr.port().to_le_bytes());
        }

        let length = (body.len() as u16).to_le_bytes();
        let mut bytes = vec![VERSION, length[0], length[1]];
        bytes.push(check::<1>(&bytes)[0]);
        bytes.append(&mut body);
        let end = check::<CHECK_BYTES>(&bytes);
        bytes.extend_from_slice(&end);
        f.write_str(&BASE32_NOPAD.encode(&bytes).to_ascii_lowercase())
    }
}

impl FromStr for Ticket {
    type Err = TicketError;

    /// Accepts white space around the ticket, and upper case.
    fn from_str(text: &str) -> Result<Self, TicketError> {
        let text = text.trim();
        if text.is_empty() {
            return Err(TicketError::Empty);
        }
        // The length is checked first, because a path or a word is no damaged ticket.
        let head = decode_prefix(text, HEAD_BYTES).filter(|head| head[3..] == check::<1>(&head[..3]));
        if head.is_none() && text.len() < MIN_CHARS {
            return Err(TicketError::NotATicket);
        }
        let invalid = |c: char| !matches!(c.to_ascii_lowercase(), 'a'..='z' | '2'..='7');
        if let Some((i, character)) = text.chars().enumerate().find(|(_, c)| invalid(*c)) {
            return Err(TicketError::Character { character, position: i + 1 });
        }
        let head = head.ok_or(TicketError::Typo)?;
        if head[0] != VERSION {
            return Err(TicketError::Version(head[0]));
        }
        let length = HEAD_BYTES + usize::from(u16::from_le_bytes([head[1], head[2]])) + CHECK_BYTES;
        let (got, expected) = (text.len(), BASE32_NOPAD.encode_len(length));
        if got < expected {
            return Err(TicketError::Truncated { got, expected });
        }
        if got > expected {
            return Err(TicketError::TooLong { got, expected });
        }

        let bytes = BASE32_NOPAD.decode(text.to_ascii_uppercase().as_bytes()).map_err(|_| TicketError::Typo)?;
        let (rest, end) = bytes.split_at(length - CHECK_BYTES);
        if *end != check::<CHECK_BYTES>(rest) {
            return Err(TicketError::Typo);
        }
        // The checks match, so `None` means that the writer was faulty.
        Body(&rest[HEAD_BYTES..]).ticket().ok_or(TicketError::Typo)
    }
}

fn check<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut check = [0; N];
    check.copy_from_slice(&blake3::hash(bytes).as_bytes()[..N]);
    check
}

/// The first `length` bytes; `None` if the text is too short or is not base32.
fn decode_prefix(text: &str, length: usize) -> Option<Vec<u8>> {
    let block = BASE32_NOPAD.encode_len(length).div_ceil(8) * 8;
    let text = text.get(..block)?.to_ascii_uppercase();
    let mut bytes = BASE32_NOPAD.decode(text.as_bytes()).ok()?;
    bytes.truncate(length);
    Some(bytes)
}

struct Body<'a>(&'a [u8]);

impl Body<'_> {
    fn ticket(mut self) -> Option<Ticket> {
        let key = PeerKey::from_bytes(self.take()?);
        let secret = Secret(self.take()?);
        let expires = match self.take()? {
            [0] => None,
            [1] => Some(u64::from_le_bytes(self.take()?)),
            _ => return None,
        };
        let relay = self.relay()?;
        let [count] = self.take()?;
        if usize::from(count) > MAX_ADDRS {
            return None;
        }
        let mut addrs = Vec::with_capacity(usize::from(count));
        for _ in 0..count {
            let ip: IpAddr = match self.take()? {
                [4] => Ipv4Addr::from(self.take::<4>()?).into(),
                [6] => Ipv6Addr::from(self.take::<16>()?).into(),
                _ => return None,
            };
            addrs.push(SocketAddr::new(ip, u16::from_le_bytes(self.take()?)));
        }
        let addr = PeerAddr { key, addrs, relay };
        self.0.is_empty().then_some(Ticket { addr, secret, expires })
    }

    fn relay(&mut self) -> Option<Option<RelayUrl>> {
        let [length] = self.take()?;
        if length == 0 {
            return Some(None);
        }
        let (url, rest) = self.0.split_at_checked(usize::from(length))?;
        self.0 = rest;
        std::str::from_utf8(url).ok()?.parse().ok().map(Some)
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::SecretKey;
    use proptest::prelude::*;

    fn ticket(addrs: Vec<SocketAddr>) -> Ticket {
        let key = SecretKey::from_bytes([3; 32]).public();
        Ticket::new(PeerAddr::new(key, addrs), Secret::from_bytes([0xa5; 16]))
    }

    fn sample() -> Ticket {
        ticket(vec!["192.168.1.7:4433".parse().unwrap(), "[2001:db8::1]:9".parse().unwrap()])
    }

    #[test]
    fn a_ticket_is_one_short_line_and_round_trips() {
        assert_eq!(ticket(vec![]).to_string().len(), MIN_CHARS);
        let relayed = PeerAddr { relay: Some("http://192.0.2.1:3340/".parse().unwrap()), ..sample().addr };
        let all = Ticket { expires: Some(1_800_000_000), ..Ticket::new(relayed, sample().secret) };
        for ticket in [sample(), ticket(vec![]), all] {
            let text = ticket.to_string();
            assert!(text.len() < 200, "{text}");
            assert_eq!(text.parse::<Ticket>().unwrap(), ticket);
            let copied = format!("  {}\n", text.to_ascii_uppercase());
            assert_eq!(copied.parse::<Ticket>().unwrap(), ticket);
            assert_eq!(ticket.relay() == Relay::None, ticket.addr.relay.is_none());
        }
    }

    #[test]
    fn errors_name_the_problem() {
        let text = sample().to_string();
        assert_eq!(" \n".parse::<Ticket>(), Err(TicketError::Empty));
        let mut damaged = text.clone();
        damaged.replace_range(49..50, "0");
        assert_eq!(damaged.parse::<Ticket>(), Err(TicketError::Character { character: '0', position: 50 }));
        assert_eq!(
            format!("{text}aaaaaaaa").parse::<Ticket>(),
            Err(TicketError::TooLong { got: text.len() + 8, expected: text.len() })
        );

        let mut bytes = BASE32_NOPAD.decode(text.to_ascii_uppercase().as_bytes()).unwrap();
        for other in [1, 3] {
            bytes[0] = other;
            bytes[3] = check::<1>(&bytes[..3])[0];
            assert_eq!(BASE32_NOPAD.encode(&bytes).parse::<Ticket>(), Err(TicketError::Version(other)));
        }
    }

    #[test]
    fn a_ticket_expires_at_the_second_it_names() {
        let ticket = Ticket { expires: Some(1_800_000_000), ..sample() };
        assert!(!ticket.expired(1_799_999_999));
        assert!(ticket.expired(1_800_000_000));
        assert!(!sample().expired(u64::MAX));
    }

    /// Regression: the message about "abc" was "cut short: 3 of 0 characters".
    #[test]
    fn other_texts_are_not_tickets() {
        for text in ["abc", "abc0", "peer-1", "runs/ticket.txt", "https://example.org/", "aaaaaaaaaaaaaaaaaaaaaaaa"] {
            let error = text.parse::<Ticket>().unwrap_err();
            assert_eq!(error, TicketError::NotATicket, "{text}");
            assert!(error.to_string().starts_with("this is not a ticket: "), "{error}");
        }
    }

    #[test]
    fn a_cut_ticket_is_reported_as_cut() {
        let text = sample().to_string();
        for length in 1..text.len() {
            let error = text[..length].parse::<Ticket>().unwrap_err();
            // Without its first 8 characters a ticket cannot be recognised.
            match length < 8 {
                true => assert_eq!(error, TicketError::NotATicket, "{length}"),
                false => assert_eq!(error, TicketError::Truncated { got: length, expected: text.len() }),
            }
        }
    }

    #[test]
    fn secrets_are_compared_and_not_printed() {
        assert_eq!(Secret::from_bytes([1; 16]), Secret::from_bytes([1; 16]));
        assert_ne!(Secret::from_bytes([1; 16]), Secret::from_bytes([2; 16]));
        assert_ne!(Secret::generate(), Secret::generate());
        assert!(!format!("{:?}", sample()).contains("165"));
    }

    proptest! {
        #[test]
        fn any_address_list_round_trips(
            addrs in proptest::collection::vec(any::<SocketAddr>(), 0..=MAX_ADDRS),
            expires: Option<u64>,
        ) {
            // A ticket has no flow labels and zones, which are useless on another machine.
            let addrs = addrs.iter().map(|a| SocketAddr::new(a.ip(), a.port())).collect();
            let ticket = Ticket { expires, ..ticket(addrs) };
            prop_assert_eq!(ticket.to_string().parse::<Ticket>().unwrap(), ticket);
        }

        #[test]
        fn a_changed_character_is_found(at in any::<prop::sample::Index>(), by in 1u8..32) {
            let alphabet = b"abcdefghijklmnopqrstuvwxyz234567";
            let mut text = sample().to_string().into_bytes();
            let at = at.index(text.len());
            let old = alphabet.iter().position(|c| *c == text[at]).unwrap();
            text[at] = alphabet[(old + usize::from(by)) % 32];
            let text = String::from_utf8(text).unwrap();
            prop_assert!(text.parse::<Ticket>().is_err());
        }

        #[test]
        fn no_text_makes_it_panic(text in ".{0,200}") {
            prop_assert!(text.parse::<Ticket>().is_err());
        }

        #[test]
        fn no_body_makes_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Body(&bytes).ticket();
        }
    }
}
