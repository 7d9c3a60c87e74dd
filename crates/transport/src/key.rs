//! Identities and addresses of peers.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use data_encoding::BASE32_NOPAD;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

/// A peer's identity: an Ed25519 public key. QUIC's handshake proves that the peer has the private half.
///
/// `Display` and `Debug` show the first ten characters, enough to tell a run's peers apart. [`PeerKey::full`] and
/// `FromStr` are inverses. Serialises as the full text in human-readable formats and as 32 bytes in binary ones.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerKey([u8; 32]);

impl PeerKey {
    /// Takes the 32 bytes unchecked. Bytes that are not a point of the curve fail in
    /// [`Endpoint::connect`](crate::Endpoint::connect).
    pub const fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The key's 32 bytes.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// All 52 characters in lower-case base32 (RFC 4648, no padding).
    pub fn full(&self) -> String {
        BASE32_NOPAD.encode(&self.0).to_ascii_lowercase()
    }
}

impl fmt::Display for PeerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.full()[..10])
    }
}

impl fmt::Debug for PeerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PeerKey({self})")
    }
}

/// A text is not a peer's public key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a peer key: expected 52 characters of base32 (a-z, 2-7), got {0:?}")]
pub struct InvalidPeerKey(String);

impl FromStr for PeerKey {
    type Err = InvalidPeerKey;

    fn from_str(text: &str) -> Result<Self, InvalidPeerKey> {
        BASE32_NOPAD
            .decode(text.to_ascii_uppercase().as_bytes())
            .ok()
            .and_then(|bytes| <[u8; 32]>::try_from(bytes).ok())
            .map(Self)
            .ok_or_else(|| InvalidPeerKey(text.chars().take(64).collect()))
    }
}

impl Serialize for PeerKey {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            serializer.serialize_str(&self.full())
        } else {
            self.0.serialize(serializer)
        }
    }
}

impl<'de> Deserialize<'de> for PeerKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if deserializer.is_human_readable() {
            String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
        } else {
            <[u8; 32]>::deserialize(deserializer).map(Self)
        }
    }
}

/// The private half of a [`PeerKey`]. Never printed: `Debug` shows the public half.
#[derive(Clone)]
pub struct SecretKey(pub(crate) iroh::SecretKey);

impl SecretKey {
    /// A new key from the operating system's randomness.
    pub fn generate() -> Self {
        Self(iroh::SecretKey::generate())
    }

    /// The key whose Ed25519 seed is `bytes`.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(iroh::SecretKey::from_bytes(&bytes))
    }

    /// The Ed25519 seed, with which an identity survives a restart.
    pub fn to_bytes(&self) -> [u8; 32] {
        self.0.to_bytes()
    }

    /// The seed's 52 characters in lower-case base32 (RFC 4648, no padding). [`FromStr`] reads them.
    pub fn full(&self) -> String {
        BASE32_NOPAD.encode(&self.to_bytes()).to_ascii_lowercase()
    }

    /// The public half.
    pub fn public(&self) -> PeerKey {
        PeerKey(*self.0.public().as_bytes())
    }
}

/// A text is not a secret key. It does not show the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a secret key: expected 52 characters of base32 (a-z, 2-7)")]
pub struct InvalidSecretKey;

impl FromStr for SecretKey {
    type Err = InvalidSecretKey;

    fn from_str(text: &str) -> Result<Self, InvalidSecretKey> {
        // Both halves of a key have the same form.
        text.parse::<PeerKey>().map(|seed| Self::from_bytes(*seed.as_bytes())).map_err(|_| InvalidSecretKey)
    }
}

impl fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SecretKey(of {})", self.public())
    }
}

/// A peer's key and addresses. A connection tries all addresses at once; the fastest wins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerAddr {
    /// The key that the peer must prove.
    pub key: PeerKey,
    /// The UDP addresses on which it listens.
    pub addrs: Vec<SocketAddr>,
    /// The relay server at which it can be met. A peer without one cannot be reached through a relay.
    pub relay: Option<RelayUrl>,
}

impl PeerAddr {
    /// A peer that is reached without a relay.
    pub fn new(key: PeerKey, addrs: Vec<SocketAddr>) -> Self {
        Self { key, addrs, relay: None }
    }
}

/// The URL of a relay server, `http://` or `https://`, at most 255 bytes.
///
/// The server's secret is the URL's parameter `token`, as in `http://192.0.2.1:3340/?token=abc`. `Debug` and
/// `Display` do not show it. [`RelayUrl::full`] and `FromStr` are inverses.
#[derive(Clone, PartialEq, Eq)]
pub struct RelayUrl(iroh::RelayUrl);

/// A text is not the URL of a relay server.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not the URL of a relay server, such as http://192.0.2.1:3340")]
pub struct InvalidRelayUrl(String);

impl RelayUrl {
    /// The longest URL in bytes.
    pub(crate) const MAX_BYTES: usize = 255;

    /// The whole URL, with its secret.
    pub fn full(&self) -> &str {
        self.0.as_str()
    }

    pub(crate) fn from_iroh(url: iroh::RelayUrl) -> Option<Self> {
        (url.as_str().len() <= Self::MAX_BYTES).then_some(Self(url))
    }

    pub(crate) fn to_iroh(&self) -> iroh::RelayUrl {
        self.0.clone()
    }

    pub(crate) fn is_https(&self) -> bool {
        self.0.scheme() == "https"
    }

    /// The TCP port.
    pub(crate) fn port(&self) -> Option<u16> {
        self.0.port_or_known_default()
    }

    /// The server's secret.
    pub(crate) fn token(&self) -> Option<String> {
        self.0.query_pairs().find(|(key, _)| key == "token").map(|(_, token)| token.into_owned())
    }
}

impl FromStr for RelayUrl {
    type Err = InvalidRelayUrl;

    fn from_str(text: &str) -> Result<Self, InvalidRelayUrl> {
        let url = text.parse::<iroh::RelayUrl>().ok().filter(|url| {
            matches!(url.scheme(), "http" | "https") && url.has_host() && url.as_str().len() <= Self::MAX_BYTES
        });
        url.map(Self).ok_or_else(|| InvalidRelayUrl(text.chars().take(64).collect()))
    }
}

impl fmt::Display for RelayUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = self.0.host_str().unwrap_or_default();
        write!(f, "{}://{host}", self.0.scheme())?;
        self.0.port().map_or(Ok(()), |port| write!(f, ":{port}"))
    }
}

impl fmt::Debug for RelayUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RelayUrl({self})")
    }
}

impl Serialize for RelayUrl {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.full())
    }
}

impl<'de> Deserialize<'de> for RelayUrl {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

impl fmt::Display for PeerAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at ", self.key)?;
        for (i, addr) in self.addrs.iter().enumerate() {
            write!(f, "{}{addr}", if i == 0 { "" } else { ", " })?;
        }
        match &self.relay {
            Some(relay) if self.addrs.is_empty() => write!(f, "the relay {relay}"),
            Some(relay) => write!(f, ", or the relay {relay}"),
            None if self.addrs.is_empty() => f.write_str("no address"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_full_text_and_both_serial_forms_round_trip() {
        let key = SecretKey::from_bytes([7; 32]).public();
        assert_eq!(key.full().parse(), Ok(key));
        assert_eq!(key.full().to_ascii_uppercase().parse(), Ok(key));
        assert!(key.full().starts_with(&key.to_string()));

        let binary = postcard::to_allocvec(&key).unwrap();
        assert_eq!(binary, key.as_bytes());
        assert_eq!(postcard::from_bytes::<PeerKey>(&binary).unwrap(), key);
    }

    #[test]
    fn other_texts_are_not_keys() {
        for text in ["", "abc", &"a".repeat(51), &"1".repeat(52), &"ä".repeat(26)] {
            assert!(text.parse::<PeerKey>().is_err(), "{text}");
        }
    }

    #[test]
    fn relay_urls_round_trip_and_hide_their_secret() {
        let url: RelayUrl = "http://192.0.2.1:3340/?token=abc".parse().unwrap();
        assert_eq!(url.full().parse(), Ok(url.clone()));
        assert_eq!(format!("{url} {url:?}"), "http://192.0.2.1:3340 RelayUrl(http://192.0.2.1:3340)");
        assert_eq!(postcard::from_bytes::<RelayUrl>(&postcard::to_allocvec(&url).unwrap()).unwrap(), url);
    }

    #[test]
    fn other_texts_are_not_relay_urls() {
        let long = format!("http://192.0.2.1/?token={}", "a".repeat(255));
        for text in ["", "relay", "ftp://192.0.2.1", "http://", "data:text", &long] {
            assert!(text.parse::<RelayUrl>().is_err(), "{text}");
        }
    }

    #[test]
    fn secrets_are_not_printed() {
        let secret = SecretKey::from_bytes([9; 32]);
        assert_eq!(format!("{secret:?}"), format!("SecretKey(of {})", secret.public()));
        let text = secret.full();
        assert_eq!(text.parse::<SecretKey>().unwrap().public(), secret.public());
        assert!(!text[1..].parse::<SecretKey>().unwrap_err().to_string().contains(&text[1..]));
    }
}
