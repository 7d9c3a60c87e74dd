//! The bytes on a stream: a prelude once, then frames. The functions are pure, and the crate's documentation draws the
//! format.

use crate::lane::Lane;

/// Longest header of a frame, in bytes.
pub const MAX_HEADER_BYTES: usize = 64 * 1024;

/// Version of the wire format. [`ALPN`] contains the same number.
pub const WIRE_VERSION: u8 = 2;

/// The application protocol that both sides of a connection name in QUIC's handshake.
pub const ALPN: &[u8] = b"fusionllm/2";

pub(crate) const PRELUDE_BYTES: usize = 7;
pub(crate) const PREFIX_BYTES: usize = 12;
const MAGIC: [u8; 4] = *b"FLLM";
/// A longer payload is dealt out in blocks of this many bytes. The last one may be shorter.
const BLOCK_BYTES: u64 = 1 << 20;

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
    /// A stream has a number that its lane does not have.
    #[error("a stream has number {number} of the {lane} lane, which has {} streams", lane.streams())]
    UnknownStream {
        /// The lane.
        lane: Lane,
        /// The number.
        number: u8,
    },
    /// Two streams have the same place in the same lane.
    #[error("there are two streams for the same place in the {0} lane")]
    DuplicateStream(Lane),
    /// A block is dealt out over no stream, or over more than the lane has.
    #[error("a block on the {lane} lane is said to lie on {streams} streams, and the lane has {}", lane.streams())]
    Streams {
        /// The lane.
        lane: Lane,
        /// The number of streams.
        streams: u8,
    },
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

/// The first bytes of the stream with this number, of those of a lane.
pub(crate) fn prelude(lane: Lane, number: u8) -> [u8; PRELUDE_BYTES] {
    let [a, b, c, d] = MAGIC;
    [a, b, c, d, WIRE_VERSION, lane as u8, number]
}

/// The lane of a stream, and its number among the lane's.
pub(crate) fn parse_prelude(bytes: [u8; PRELUDE_BYTES]) -> Result<(Lane, usize), FormatError> {
    let [a, b, c, d, version, lane, number] = bytes;
    if [a, b, c, d] != MAGIC {
        return Err(FormatError::Magic([a, b, c, d]));
    }
    if version != WIRE_VERSION {
        return Err(FormatError::Version(version));
    }
    let lane = Lane::ALL.get(usize::from(lane)).copied().ok_or(FormatError::UnknownLane(lane))?;
    match usize::from(number) < lane.streams() {
        true => Ok((lane, usize::from(number))),
        false => Err(FormatError::UnknownStream { lane, number }),
    }
}

/// The fixed part before each frame: both lengths in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Prefix {
    pub(crate) header: usize,
    pub(crate) payload: u64,
}

impl Prefix {
    /// Bytes of the frame beside its payload: the prefix itself, the header, and a byte for each block.
    pub(crate) fn head_bytes(self) -> u64 {
        (PREFIX_BYTES + self.header) as u64 + self.payload.div_ceil(BLOCK_BYTES)
    }

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

/// The way in which a payload is dealt out over a lane's streams. Both ends follow it.
///
/// A payload is a sequence of blocks. Before each, the first stream has a byte: the number of streams over which the
/// block is dealt, in parts of the same length, whose last may be shorter. The sender chooses the number. It follows
/// what may be in flight on the path, so that a slow one uses a single stream.
#[derive(Debug, Clone, Default)]
pub(crate) struct Deal {
    /// Bytes of blocks that have not begun.
    unbegun: u64,
    /// Bytes of the block that are left.
    block: u64,
    /// Bytes of each part of the block.
    part_length: u64,
    /// Bytes of the part that are left.
    part: u64,
    /// The stream of the part.
    stream: usize,
}

/// What comes next of a payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Nothing.
    Over,
    /// The number of the next block's streams.
    Block,
    /// Bytes on a stream.
    Part { stream: usize, bytes: u64 },
}

impl Deal {
    pub(crate) fn new(payload: u64) -> Self {
        Self { unbegun: payload, ..Self::default() }
    }

    /// Bytes of the payload that are left.
    pub(crate) fn left(&self) -> u64 {
        self.unbegun + self.block
    }

    pub(crate) fn turn(&self) -> Turn {
        match (self.block, self.unbegun) {
            (0, 0) => Turn::Over,
            (0, _) => Turn::Block,
            _ => Turn::Part { stream: self.stream, bytes: self.part },
        }
    }

    /// The next block begins, on this many streams, of which there must be at least one.
    pub(crate) fn begin(&mut self, streams: u8) {
        self.block = self.unbegun.min(BLOCK_BYTES);
        self.unbegun -= self.block;
        self.part_length = self.block.div_ceil(u64::from(streams));
        (self.part, self.stream) = (self.part_length, 0);
    }

    /// Bytes of the part have been sent or received.
    pub(crate) fn moved(&mut self, bytes: u64) {
        self.part -= bytes;
        self.block -= bytes;
        if self.part == 0 {
            (self.part, self.stream) = (self.part_length.min(self.block), self.stream + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn preludes_name_their_lane() {
        for lane in Lane::ALL {
            for number in 0..lane.streams() {
                assert_eq!(parse_prelude(prelude(lane, number as u8)), Ok((lane, number)));
            }
        }
    }

    #[test]
    fn other_protocols_versions_and_lanes_are_refused() {
        assert_eq!(parse_prelude(*b"HTTP/1."), Err(FormatError::Magic(*b"HTTP")));
        assert_eq!(parse_prelude(*b"FLLM\x01\x00\x00"), Err(FormatError::Version(1)));
        assert_eq!(parse_prelude(*b"FLLM\x02\x03\x00"), Err(FormatError::UnknownLane(3)));
        let [control, bulk] = [(Lane::Control, 1), (Lane::Bulk, 8)];
        for (lane, number) in [control, bulk] {
            let unknown = Err(FormatError::UnknownStream { lane, number });
            assert_eq!(parse_prelude([b'F', b'L', b'L', b'M', 2, lane as u8, number]), unknown);
        }
    }

    #[test]
    fn a_payload_is_dealt_out_in_blocks_of_equal_parts() {
        let mut deal = Deal::new(BLOCK_BYTES + 5);
        assert_eq!((deal.turn(), deal.left()), (Turn::Block, BLOCK_BYTES + 5));
        assert_eq!(Prefix { header: 100, payload: deal.left() }.head_bytes(), 12 + 100 + 2);
        deal.begin(3);
        let part = BLOCK_BYTES.div_ceil(3);
        assert_eq!(deal.turn(), Turn::Part { stream: 0, bytes: part });
        deal.moved(1);
        assert_eq!(deal.turn(), Turn::Part { stream: 0, bytes: part - 1 });
        deal.moved(part - 1);
        assert_eq!(deal.turn(), Turn::Part { stream: 1, bytes: part });
        deal.moved(part);
        assert_eq!(deal.turn(), Turn::Part { stream: 2, bytes: BLOCK_BYTES - 2 * part });
        deal.moved(BLOCK_BYTES - 2 * part);
        assert_eq!((deal.turn(), deal.left()), (Turn::Block, 5));
        deal.begin(8);
        for stream in 0..5 {
            assert_eq!(deal.turn(), Turn::Part { stream, bytes: 1 }, "no more streams than bytes");
            deal.moved(1);
        }
        assert_eq!((deal.turn(), Deal::new(0).turn()), (Turn::Over, Turn::Over));
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
