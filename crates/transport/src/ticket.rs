//! The line of text that lets a machine join a run.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use data_encoding::BASE32_NOPAD;

use crate::key::{PeerAddr, PeerKey};

/// Where the broker is, and the secret that shows that one was invited.
///
/// ```text
///  offset  bytes
///   0      1      version, now 1
///   1      2      length of the body, little-endian
///   3      1      check of bytes 0..3, so that a typo here is not taken for a cut
///   4      32     the broker's public key
///   36     16     secret
///   52     1      number of addresses, 0..=32
///   53     7|19   each address: 4 | 6, the IP's 4 | 16 bytes, port little-endian
///   end-4  4      check of all before it
/// ```
///
/// as lower-case base32 (RFC 4648, no padding). A check is the first bytes of BLAKE3.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ticket {
    /// The broker.
    pub addr: PeerAddr,
    /// What the broker asks for before it listens to anything else.
    pub secret: Secret,
}

/// Sixteen bytes that only the invited know. Compared in constant time and never printed.
#[derive(Clone)]
pub struct Secret([u8; 16]);

impl Secret {
    /// A new secret from the operating system's randomness.
    pub fn generate() -> Self {
        // A fresh Ed25519 seed is 32 uniformly random bytes, and no key is ever made of this one.
        let seed = iroh::SecretKey::generate().to_bytes();
        let mut secret = [0; 16];
        secret.copy_from_slice(&seed[..16]);
        Self(secret)
    }

    /// The secret with these bytes.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The bytes to show to the broker.
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl PartialEq for Secret {
    fn eq(&self, other: &Self) -> bool {
        // Comparing `blake3::Hash`es takes the same time wherever they first differ.
        blake3::hash(&self.0) == blake3::hash(&other.0)
    }
}

impl Eq for Secret {}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Why a text is not a ticket.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TicketError {
    /// Nothing but white space.
    #[error("the ticket is empty: give the line that the broker printed")]
    Empty,
    /// A character that no ticket contains.
    #[error("the ticket has {character:?} at character {position}: only a-z and 2-7 occur in one")]
    Character {
        /// The first such character.
        character: char,
        /// Counted from 1.
        position: usize,
    },
    /// Made by an incompatible version of this program.
    #[error(
        "the ticket is of version {0}, this program reads version {VERSION}: \
         use the same version of fusionllm on both machines"
    )]
    Version(u8),
    /// The end is missing.
    #[error("the ticket is cut short: {got} of {expected} characters; copy the whole line")]
    Truncated {
        /// Characters given.
        got: usize,
        /// Characters that its beginning announces; 0 if even that is missing.
        expected: usize,
    },
    /// There is something after the end.
    #[error("the ticket is too long: {got} characters instead of {expected}; copy one line only")]
    TooLong {
        /// Characters given.
        got: usize,
        /// Characters that its beginning announces.
        expected: usize,
    },
    /// The checks do not agree with the rest.
    #[error("the ticket has a typo: its checksum does not match; copy it again")]
    Typo,
}

const VERSION: u8 = 1;
const HEAD: usize = 4;
const CHECK: usize = 4;
/// A ticket names a machine's few interfaces; more would not fit a line.
const MAX_ADDRS: usize = 32;

impl fmt::Display for Ticket {
    /// Only the first 32 addresses fit.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut body = Vec::with_capacity(128);
        body.extend_from_slice(self.addr.key.as_bytes());
        body.extend_from_slice(self.secret.as_bytes());
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
        let end = check::<CHECK>(&bytes);
        bytes.extend_from_slice(&end);
        f.write_str(&BASE32_NOPAD.encode(&bytes).to_ascii_lowercase())
    }
}

impl FromStr for Ticket {
    type Err = TicketError;

    /// White space around the ticket and upper case are forgiven.
    fn from_str(text: &str) -> Result<Self, TicketError> {
        let text = text.trim();
        if text.is_empty() {
            return Err(TicketError::Empty);
        }
        let stranger = |c: char| !matches!(c.to_ascii_lowercase(), 'a'..='z' | '2'..='7');
        if let Some((i, character)) = text.chars().enumerate().find(|(_, c)| stranger(*c)) {
            return Err(TicketError::Character { character, position: i + 1 });
        }

        let head = decode_prefix(text, HEAD).ok_or(TicketError::Truncated { got: text.len(), expected: 0 })?;
        if head[3..] != check::<1>(&head[..3]) {
            return Err(TicketError::Typo);
        }
        if head[0] != VERSION {
            return Err(TicketError::Version(head[0]));
        }
        let length = HEAD + usize::from(u16::from_le_bytes([head[1], head[2]])) + CHECK;
        let (got, expected) = (text.len(), BASE32_NOPAD.encode_len(length));
        if got < expected {
            return Err(TicketError::Truncated { got, expected });
        }
        if got > expected {
            return Err(TicketError::TooLong { got, expected });
        }

        let bytes = BASE32_NOPAD.decode(text.to_ascii_uppercase().as_bytes()).map_err(|_| TicketError::Typo)?;
        let (rest, end) = bytes.split_at(length - CHECK);
        if *end != check::<CHECK>(rest) {
            return Err(TicketError::Typo);
        }
        // The checks hold, so only a broken writer gets past here to a `None`.
        Body(&rest[HEAD..]).ticket().ok_or(TicketError::Typo)
    }
}

fn check<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut check = [0; N];
    check.copy_from_slice(&blake3::hash(bytes).as_bytes()[..N]);
    check
}

/// The first `length` bytes, of which the last may take part of a character.
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
        self.0.is_empty().then_some(Ticket { addr: PeerAddr { key, addrs }, secret })
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
        Ticket {
            addr: PeerAddr { key: SecretKey::from_bytes([3; 32]).public(), addrs },
            secret: Secret::from_bytes([0xa5; 16]),
        }
    }

    fn sample() -> Ticket {
        ticket(vec!["192.168.1.7:4433".parse().unwrap(), "[2001:db8::1]:9".parse().unwrap()])
    }

    #[test]
    fn is_one_short_line_and_comes_back() {
        for ticket in [sample(), ticket(vec![])] {
            let text = ticket.to_string();
            assert!(text.len() < 150, "{text}");
            assert_eq!(text.parse::<Ticket>().unwrap(), ticket);
            let copied = format!("  {}\n", text.to_ascii_uppercase());
            assert_eq!(copied.parse::<Ticket>().unwrap(), ticket);
        }
    }

    #[test]
    fn names_what_is_wrong() {
        let text = sample().to_string();
        assert_eq!(" \n".parse::<Ticket>(), Err(TicketError::Empty));
        assert_eq!("abc0".parse::<Ticket>(), Err(TicketError::Character { character: '0', position: 4 }));
        assert_eq!(
            format!("{text}aaaaaaaa").parse::<Ticket>(),
            Err(TicketError::TooLong { got: text.len() + 8, expected: text.len() })
        );

        let mut bytes = BASE32_NOPAD.decode(text.to_ascii_uppercase().as_bytes()).unwrap();
        bytes[0] = 2;
        bytes[3] = check::<1>(&bytes[..3])[0];
        let newer = BASE32_NOPAD.encode(&bytes);
        assert_eq!(newer.parse::<Ticket>(), Err(TicketError::Version(2)));
    }

    #[test]
    fn every_cut_is_called_a_cut() {
        let text = sample().to_string();
        for length in 1..text.len() {
            let error = text[..length].parse::<Ticket>().unwrap_err();
            assert!(matches!(error, TicketError::Truncated { .. }), "{length}: {error}");
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
        fn any_address_list_comes_back(
            addrs in proptest::collection::vec(any::<SocketAddr>(), 0..=MAX_ADDRS),
        ) {
            // Flow labels and zones mean nothing on another machine and are left out.
            let addrs = addrs.iter().map(|a| SocketAddr::new(a.ip(), a.port())).collect();
            let ticket = ticket(addrs);
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
