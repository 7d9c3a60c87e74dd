//! Lanes: the independent sequences of frames on one connection.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// One of a connection's sequences of frames.
///
/// Frames keep their order within a lane and never wait for another lane. QUIC sends queued data of earlier
/// lanes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Lane {
    /// Small, urgent messages.
    Control = 0,
    /// Activations and gradients.
    Tensors = 1,
    /// Parameters, data and checkpoints: large and not urgent.
    Bulk = 2,
}

impl Lane {
    /// The number of lanes in each direction of a connection.
    pub const COUNT: usize = 3;
    /// All lanes, most urgent first.
    pub const ALL: [Self; Self::COUNT] = [Self::Control, Self::Tensors, Self::Bulk];

    /// The QUIC streams of the lane in each direction. A receiver buffers
    /// [`STREAM_WINDOW_BYTES`](crate::congestion::STREAM_WINDOW_BYTES) for each. More would end the connection after a
    /// loss, since QUIC keeps at most 1,024 pieces of a stream that came out of order.
    pub const fn streams(self) -> usize {
        match self {
            Self::Control => 1,
            Self::Tensors | Self::Bulk => MAX_STREAMS,
        }
    }

    pub(crate) fn priority(self) -> i32 {
        -i32::from(self as u8)
    }
}

/// The most streams of a lane.
pub(crate) const MAX_STREAMS: usize = 8;

/// The streams of all lanes in one direction.
pub(crate) const ALL_STREAMS: usize = Lane::Control.streams() + Lane::Tensors.streams() + Lane::Bulk.streams();

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Control => "control",
            Self::Tensors => "tensors",
            Self::Bulk => "bulk",
        })
    }
}

/// Counters of one lane in one direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LaneStats {
    /// Frames begun.
    pub frames: u64,
    /// Bytes of payload.
    pub payload_bytes: u64,
    /// Bytes of payloads and of all that stands before them: headers, prefixes, and a byte for each block.
    pub total_bytes: u64,
}

/// [`LaneStats`] that many tasks add to.
#[derive(Default)]
pub(crate) struct LaneCounters {
    frames: AtomicU64,
    payload_bytes: AtomicU64,
    total_bytes: AtomicU64,
}

impl LaneCounters {
    /// Counts a new frame with so many bytes before its payload and the payload's blocks.
    pub(crate) fn add_frame(&self, head_bytes: u64) {
        self.frames.fetch_add(1, Relaxed);
        self.total_bytes.fetch_add(head_bytes, Relaxed);
    }

    pub(crate) fn add_payload(&self, bytes: u64) {
        self.payload_bytes.fetch_add(bytes, Relaxed);
        self.total_bytes.fetch_add(bytes, Relaxed);
    }

    pub(crate) fn read(&self) -> LaneStats {
        LaneStats {
            frames: self.frames.load(Relaxed),
            payload_bytes: self.payload_bytes.load(Relaxed),
            total_bytes: self.total_bytes.load(Relaxed),
        }
    }
}
