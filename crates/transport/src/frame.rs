//! The bytes on a stream: a prelude once, then frames. Pure; drawn in the crate's documentation.

use crate::Lane;

/// Longest header a frame may carry, in bytes.
pub const MAX_HEADER: usize = 64 * 1024;

/// The wire format's version, also the number in [`ALPN`].
pub const VERSION: u8 = 1;

/// What both sides of a connection must name in QUIC's handshake.
pub const ALPN: &[u8] = b"fusionllm/1";

pub(crate) const PRELUDE: usize = 6;
pub(crate) const PREFIX: usize = 12;
const MAGIC: [u8; 4] = *b"FLLM";

/// How received bytes break the wire format. The connection they came on is closed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// A stream does not begin as ours do.
    #[error("a stream begins with {0:02x?} instead of \"FLLM\"")]
    Magic([u8; 4]),
    /// A stream of another version of the format.
    #[error(
        "the stream is of wire version {0}, this program speaks version {VERSION}: \
         use the same version of fusionllm on all machines"
    )]
    Version(u8),
    /// A stream for a lane that does not exist.
    #[error("a stream is for lane {0}, which does not exist")]
    Lane(u8),
    /// A second stream for one lane.
    #[error("there are two streams for the {0} lane")]
    LaneTwice(Lane),
    /// A header longer than [`MAX_HEADER`].
    #[error("a frame announces a header of {0} bytes, more than {MAX_HEADER}")]
    HeaderTooLong(u32),
    /// A stream ended before it said what it is.
    #[error("a stream ends before it says which lane it is for")]
    NoPrelude,
    /// A lane's stream ended or was given up inside a frame.
    #[error("the {0} lane ends in the middle of a frame")]
    Truncated(Lane),
}

pub(crate) fn prelude(lane: Lane) -> [u8; PRELUDE] {
    let [a, b, c, d] = MAGIC;
    [a, b, c, d, VERSION, lane as u8]
}

pub(crate) fn parse_prelude(bytes: [u8; PRELUDE]) -> Result<Lane, Violation> {
    let [a, b, c, d, version, lane] = bytes;
    if [a, b, c, d] != MAGIC {
        return Err(Violation::Magic([a, b, c, d]));
    }
    if version != VERSION {
        return Err(Violation::Version(version));
    }
    Lane::ALL.get(usize::from(lane)).copied().ok_or(Violation::Lane(lane))
}

/// The fixed part before each frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Prefix {
    pub(crate) header: usize,
    pub(crate) payload: u64,
}

impl Prefix {
    pub(crate) fn encode(self) -> [u8; PREFIX] {
        let mut bytes = [0; PREFIX];
        bytes[..4].copy_from_slice(&(self.header as u32).to_le_bytes());
        bytes[4..].copy_from_slice(&self.payload.to_le_bytes());
        bytes
    }

    pub(crate) fn parse(bytes: [u8; PREFIX]) -> Result<Self, Violation> {
        let [a, b, c, d, payload @ ..] = bytes;
        let header = u32::from_le_bytes([a, b, c, d]);
        if header as usize > MAX_HEADER {
            return Err(Violation::HeaderTooLong(header));
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
    fn strangers_and_other_versions_are_refused() {
        assert_eq!(parse_prelude(*b"HTTP/1"), Err(Violation::Magic(*b"HTTP")));
        assert_eq!(parse_prelude(*b"FLLM\x02\x00"), Err(Violation::Version(2)));
        assert_eq!(parse_prelude(*b"FLLM\x01\x03"), Err(Violation::Lane(3)));
    }

    proptest! {
        #[test]
        fn prefixes_come_back(header in 0..=MAX_HEADER, payload: u64) {
            let prefix = Prefix { header, payload };
            prop_assert_eq!(Prefix::parse(prefix.encode()), Ok(prefix));
        }

        #[test]
        fn no_prefix_announces_more_header_than_the_bound(bytes: [u8; PREFIX]) {
            match Prefix::parse(bytes) {
                Ok(prefix) => prop_assert!(prefix.header <= MAX_HEADER),
                Err(violation) => prop_assert!(matches!(violation, Violation::HeaderTooLong(_))),
            }
        }
    }
}
