//! The bytes on a stream: a prelude once, then frames. The functions are pure, and the crate's documentation draws the
//! format.

use crate::lane::Lane;

/// Longest header of a frame, in bytes.
pub const MAX_HEADER_BYTES: usize = 64 * 1024;

/// Version of the wire format. [`ALPN`] contains the same number.
pub const WIRE_VERSION: u8 = 1;

/// The application protocol that both sides of a connection name in QUIC's handshake.
pub const ALPN: &[u8] = b"fusionllm/1";

pub(crate) const PRELUDE_BYTES: usize = 6;
pub(crate) const PREFIX_BYTES: usize = 12;
const MAGIC: [u8; 4] = *b"FLLM";

/// Received bytes break the wire format. Their connection is closed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// A stream does not begin with "FLLM".
    #[error("a stream begins with {0:02x?} instead of \"FLLM\"")]
    Magic([u8; 4]),
    /// A stream has another version of the format.
    #[error(
        "a stream has wire version {0}, but this program speaks version {WIRE_VERSION}: \
         use the same version of fusionllm on all machines"
    )]
    Version(u8),
    /// A stream names a lane that does not exist.
    #[error("a stream names lane {0}, which does not exist")]
    UnknownLane(u8),
    /// Two streams name the same lane.
    #[error("there are two streams for the {0} lane")]
    DuplicateLane(Lane),
    /// A header is longer than [`MAX_HEADER_BYTES`].
    #[error("a frame announces a header of {0} bytes, but at most {MAX_HEADER_BYTES} are allowed")]
    HeaderTooLong(u32),
    /// A stream ended within its prelude.
    #[error("a stream ends before it names its lane")]
    NoPrelude,
    /// A lane's stream ended or was reset within a frame.
    #[error("the {0} lane ends in the middle of a frame")]
    Truncated(Lane),
}

pub(crate) fn prelude(lane: Lane) -> [u8; PRELUDE_BYTES] {
    let [a, b, c, d] = MAGIC;
    [a, b, c, d, WIRE_VERSION, lane as u8]
}

pub(crate) fn parse_prelude(bytes: [u8; PRELUDE_BYTES]) -> Result<Lane, FormatError> {
    let [a, b, c, d, version, lane] = bytes;
    if [a, b, c, d] != MAGIC {
        return Err(FormatError::Magic([a, b, c, d]));
    }
    if version != WIRE_VERSION {
        return Err(FormatError::Version(version));
    }
    Lane::ALL.get(usize::from(lane)).copied().ok_or(FormatError::UnknownLane(lane))
}

/// The fixed part before each frame: both lengths in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Prefix {
    pub(crate) header: usize,
    pub(crate) payload: u64,
}

impl Prefix {
    pub(crate) fn encode(self) -> [u8; PREFIX_BYTES] {
        let mut bytes = [0; PREFIX_BYTES];
        bytes[..4].copy_from_slice(&(self.header as u32).to_le_bytes());
        bytes[4..].copy_from_slice(&self.payload.to_le_bytes());
        bytes
    }

    pub(crate) fn parse(bytes: [u8; PREFIX_BYTES]) -> Result<Self, FormatError> {
        let [a, b, c, d, payload @ ..] = bytes;
        let header = u32::from_le_bytes([a, b, c, d]);
        if header as usize > MAX_HEADER_BYTES {
            return Err(FormatError::HeaderTooLong(header));
        }
        Ok(Self { header: header as usize, payload: u64::from_le_bytes(payload) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn preludes_name_their_lane() {
        for lane in Lane::ALL {
            assert_eq!(parse_prelude(prelude(lane)), Ok(lane));
        }
    }

    #[test]
    fn other_protocols_versions_and_lanes_are_refused() {
        assert_eq!(parse_prelude(*b"HTTP/1"), Err(FormatError::Magic(*b"HTTP")));
        assert_eq!(parse_prelude(*b"FLLM\x02\x00"), Err(FormatError::Version(2)));
        assert_eq!(parse_prelude(*b"FLLM\x01\x03"), Err(FormatError::UnknownLane(3)));
    }

    proptest! {
        #[test]
        fn prefixes_round_trip(header in 0..=MAX_HEADER_BYTES, payload: u64) {
            let prefix = Prefix { header, payload };
            prop_assert_eq!(Prefix::parse(prefix.encode()), Ok(prefix));
        }

        #[test]
        fn no_prefix_exceeds_the_header_limit(bytes: [u8; PREFIX_BYTES]) {
            match Prefix::parse(bytes) {
                Ok(prefix) => prop_assert!(prefix.header <= MAX_HEADER_BYTES),
                Err(error) => prop_assert!(matches!(error, FormatError::HeaderTooLong(_))),
            }
        }
    }
}
