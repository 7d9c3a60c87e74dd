//! Lanes: independent ordered sequences of frames over one connection.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bytes::Bytes;
use iroh::endpoint::{ReadError, RecvStream, SendStream, StoppedError, WriteError};
use tokio::sync::OwnedMutexGuard;

use crate::connection::{Lost, Shared};
use crate::frame::{MAX_HEADER, PREFIX, Prefix, Violation};

/// One of a connection's sequences of frames. Frames keep their order within a lane and do not wait
/// for other lanes; what is queued on an earlier lane goes on the wire first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Lane {
    /// Small, urgent messages.
    Control = 0,
    /// Activations and gradients.
    Tensors = 1,
    /// Parameters, data and checkpoints: large and in no hurry.
    Bulk = 2,
}

impl Lane {
    /// How many lanes a connection has in each direction.
    pub const COUNT: usize = 3;
    /// All lanes, most urgent first.
    pub const ALL: [Self; Self::COUNT] = [Self::Control, Self::Tensors, Self::Bulk];

    pub(crate) fn priority(self) -> i32 {
        -i32::from(self as u8)
    }
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Control => "control",
            Self::Tensors => "tensors",
            Self::Bulk => "bulk",
        })
    }
}

/// What one lane has carried in one direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LaneStats {
    /// Frames begun.
    pub frames: u64,
    /// Bytes of payload.
    pub payload: u64,
    /// Bytes of payload, headers and framing.
    pub framed: u64,
}

/// A frame could not be sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The connection is gone.
    #[error(transparent)]
    Lost(#[from] Lost),
    /// The header has this many bytes, more than [`MAX_HEADER`].
    #[error("a frame's header of {0} bytes is longer than {MAX_HEADER}")]
    HeaderTooLong(usize),
    /// The peer reads this lane no longer.
    #[error("the peer reads the {0} lane no longer")]
    Unread(Lane),
    /// [`Connection::finish`](crate::Connection::finish) was called before.
    #[error("the {0} lane was finished before")]
    Finished(Lane),
}

/// A frame could not be received.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReceiveError {
    /// The connection is gone; it was closed here if the peer broke the wire format.
    #[error(transparent)]
    Lost(#[from] Lost),
    /// The payload is larger than the caller allows. It stays unread; the lane goes on with
    /// the next frame.
    #[error("a payload of {announced} bytes on the {lane} lane exceeds the {allowed} allowed")]
    TooLong {
        /// Where it came.
        lane: Lane,
        /// Its length in bytes.
        announced: u64,
        /// What the caller allows, in bytes.
        allowed: u64,
    },
    /// The payload does not have the length of the caller's buffer. It stays unread.
    #[error("a payload of {announced} bytes on the {lane} lane is not the {expected} expected")]
    Length {
        /// Where it came.
        lane: Lane,
        /// Its length in bytes.
        announced: u64,
        /// The buffer's length in bytes.
        expected: u64,
    },
    /// There is no memory for a payload of this many bytes. It stays unread.
    #[error("no memory for a payload of {0} bytes")]
    NoMemory(u64),
}

/// The sending end of a lane.
pub(crate) struct Sender {
    lane: Lane,
    stream: Arc<tokio::sync::Mutex<SendStream>>,
}

impl Sender {
    pub(crate) fn new(lane: Lane, stream: SendStream) -> Self {
        Self { lane, stream: Arc::new(tokio::sync::Mutex::new(stream)) }
    }

    pub(crate) async fn send(&self, shared: &Shared, header: &[u8], payload: &[Bytes]) -> Result<(), SendError> {
        if header.len() > MAX_HEADER {
            return Err(SendError::HeaderTooLong(header.len()));
        }
        let length = payload.iter().map(|slice| slice.len() as u64).sum();
        let prefix = Prefix { header: header.len(), payload: length }.encode();
        let mut rest = VecDeque::with_capacity(1 + payload.len());
        rest.push_back([&prefix, header].concat().into());
        rest.extend(payload.iter().filter(|slice| !slice.is_empty()).cloned());

        // Tokio's mutex hands itself on in the order of arrival, which makes turns fair.
        let stream = Arc::clone(&self.stream).lock_owned().await;
        let mut turn = Turn { stream: Some(stream), rest, begun: false };
        let counters = &shared.sent[self.lane as usize];
        counters.begin(prefix.len() + header.len());
        counters.payload(length);
        turn.write().await.map_err(|error| self.error(shared, error))
    }

    pub(crate) async fn finish(&self) {
        // It fails only if it was finished before, which is as well.
        let _ = self.stream.lock().await.finish();
    }

    /// Waits until the peer's QUIC has all that was sent before `finish`.
    pub(crate) async fn delivered(&self, shared: &Shared) -> Result<(), SendError> {
        let stopped = self.stream.lock().await.stopped();
        match stopped.await {
            Ok(None) => Ok(()),
            Ok(Some(_)) => Err(self.error(shared, WriteError::Stopped(0u32.into()))),
            Err(StoppedError::ConnectionLost(error)) => Err(shared.lost(error).into()),
            Err(StoppedError::ZeroRttRejected) => Err(SendError::Finished(self.lane)),
        }
    }

    fn error(&self, shared: &Shared, error: WriteError) -> SendError {
        match error {
            WriteError::ConnectionLost(error) => shared.lost(error).into(),
            WriteError::Stopped(_) => SendError::Unread(self.lane),
            WriteError::ClosedStream | WriteError::ZeroRttRejected => SendError::Finished(self.lane),
        }
    }
}

/// At most this much is handed to QUIC at once, so that other lanes get in between.
const CHUNK: usize = 256 * 1024;

/// The right to write on a lane, held for one frame.
struct Turn {
    stream: Option<OwnedMutexGuard<SendStream>>,
    rest: VecDeque<Bytes>,
    begun: bool,
}

impl Turn {
    async fn write(&mut self) -> Result<(), WriteError> {
        let Some(stream) = &mut self.stream else {
            return Ok(());
        };
        while let Some(front) = self.rest.front_mut() {
            let mut chunk = [front.slice(..front.len().min(CHUNK))];
            let written = stream.write_many_chunks(&mut &mut chunk[..]).await;
            match written {
                // Nothing more of this frame can be written, here or in the background.
                Err(error) => {
                    self.rest.clear();
                    return Err(error);
                }
                Ok(length) => {
                    self.begun = true;
                    let _ = front.split_to(length);
                    if front.is_empty() {
                        self.rest.pop_front();
                    }
                }
            }
        }
        Ok(())
    }
}

impl Drop for Turn {
    /// A frame of which a part is on its way must be completed, or the peer would take the next
    /// frame for the rest of this one.
    fn drop(&mut self) {
        let unfinished = self.begun && !self.rest.is_empty();
        let (true, Some(stream)) = (unfinished, self.stream.take()) else {
            return;
        };
        let mut turn = Self { stream: Some(stream), rest: std::mem::take(&mut self.rest), begun: false };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => {
                // Whoever uses the connection next meets the error.
                runtime.spawn(async move { turn.write().await.ok() });
            }
            Err(_) => {
                // Without a runtime the connection does not live either.
                if let Some(stream) = &mut turn.stream {
                    let _ = stream.reset(0u32.into());
                }
            }
        }
    }
}

/// The receiving end of a lane.
pub struct Receiver {
    lane: Lane,
    stream: RecvStream,
    shared: Arc<Shared>,
    /// Bytes of the next frame's prefix and header read so far.
    head: Vec<u8>,
    /// Bytes of the last frame's payload that nobody has read.
    unread: u64,
}

impl Receiver {
    pub(crate) fn new(lane: Lane, stream: RecvStream, shared: Arc<Shared>) -> Self {
        Self { lane, stream, shared, head: Vec::new(), unread: 0 }
    }

    /// Waits for the next frame and yields its header and its payload's length. Room for the
    /// payload is made only when the caller, having seen these, asks for it. `None`: the peer
    /// said that nothing more will come.
    ///
    /// What was left unread of the frame before is discarded. Dropping the future loses nothing.
    ///
    /// # Errors
    /// [`ReceiveError::Lost`] alone; a peer that breaks the wire format is cut off.
    pub async fn next(&mut self) -> Result<Option<Frame<'_>>, ReceiveError> {
        while self.unread > 0 {
            self.chunk().await?;
        }
        let mut wanted = PREFIX;
        let (prefix, header) = loop {
            if let Some((start, header)) = self.head.split_first_chunk::<PREFIX>() {
                let prefix = Prefix::parse(*start).map_err(|v| self.shared.violated(v))?;
                wanted = PREFIX + prefix.header;
                if header.len() == prefix.header {
                    break (prefix, Bytes::copy_from_slice(header));
                }
            }
            let missing = wanted - self.head.len();
            match self.stream.read_chunk(missing).await {
                Ok(Some(bytes)) => self.head.extend_from_slice(&bytes),
                Ok(None) if self.head.is_empty() => return Ok(None),
                Ok(None) => return Err(self.truncated()),
                Err(error) => return Err(self.error(error)),
            }
        };
        self.head.clear();
        self.unread = prefix.payload;
        self.shared.received[self.lane as usize].begin(PREFIX + prefix.header);
        Ok(Some(Frame { header, receiver: self }))
    }

    /// What has come of the rest of the payload.
    async fn chunk(&mut self) -> Result<Bytes, ReceiveError> {
        let at_most = usize::try_from(self.unread).unwrap_or(usize::MAX);
        match self.stream.read_chunk(at_most).await {
            Ok(Some(bytes)) => {
                self.arrived(bytes.len());
                Ok(bytes)
            }
            Ok(None) => Err(self.truncated()),
            Err(error) => Err(self.error(error)),
        }
    }

    fn arrived(&mut self, length: usize) {
        self.unread -= length as u64;
        self.shared.received[self.lane as usize].payload(length as u64);
    }

    fn truncated(&self) -> ReceiveError {
        self.shared.violated(Violation::Truncated(self.lane)).into()
    }

    fn error(&self, error: ReadError) -> ReceiveError {
        match error {
            ReadError::ConnectionLost(error) => self.shared.lost(error).into(),
            // Our side resets a lane only as it dies in the middle of a frame.
            ReadError::Reset(_) | ReadError::ClosedStream | ReadError::ZeroRttRejected => self.truncated(),
        }
    }
}

impl fmt::Debug for Receiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Receiver({} from {})", self.lane, self.shared.peer)
    }
}

/// A frame whose header has arrived and whose payload has not been read. Dropping it refuses the
/// payload.
pub struct Frame<'a> {
    header: Bytes,
    receiver: &'a mut Receiver,
}

impl Frame<'_> {
    /// The header, at most [`MAX_HEADER`] bytes.
    pub fn header(&self) -> &Bytes {
        &self.header
    }

    /// The payload's length in bytes, as the peer announces it: any number at all.
    pub fn payload_len(&self) -> u64 {
        self.receiver.unread
    }

    /// Reads the payload if it has at most `allowed` bytes, and allocates just its length for it.
    ///
    /// # Errors
    /// [`ReceiveError::TooLong`] and [`ReceiveError::NoMemory`] before anything is read or
    /// allocated; [`ReceiveError::Lost`].
    pub async fn read(self, allowed: u64) -> Result<Bytes, ReceiveError> {
        let (lane, announced) = (self.receiver.lane, self.receiver.unread);
        let length = match usize::try_from(announced) {
            Ok(length) if announced <= allowed => length,
            _ => {
                return Err(ReceiveError::TooLong { lane, announced, allowed });
            }
        };
        let mut payload = Vec::new();
        payload.try_reserve_exact(length).map_err(|_| ReceiveError::NoMemory(announced))?;
        while self.receiver.unread > 0 {
            payload.extend_from_slice(&self.receiver.chunk().await?);
        }
        Ok(payload.into())
    }

    /// Reads the payload into `buffer`, which must have exactly its length.
    ///
    /// # Errors
    /// [`ReceiveError::Length`] before anything is read; [`ReceiveError::Lost`].
    pub async fn read_into(self, buffer: &mut [u8]) -> Result<(), ReceiveError> {
        let (lane, announced) = (self.receiver.lane, self.receiver.unread);
        let expected = buffer.len() as u64;
        if announced != expected {
            return Err(ReceiveError::Length { lane, announced, expected });
        }
        let mut filled = 0;
        while filled < buffer.len() {
            match self.receiver.stream.read(&mut buffer[filled..]).await {
                Ok(Some(length)) => {
                    filled += length;
                    self.receiver.arrived(length);
                }
                Ok(None) => return Err(self.receiver.truncated()),
                Err(error) => return Err(self.receiver.error(error)),
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Frame<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (header, payload) = (self.header.len(), self.receiver.unread);
        write!(f, "Frame({header} + {payload} bytes, {})", self.receiver.lane)
    }
}

/// [`LaneStats`] that many tasks add to.
#[derive(Default)]
pub(crate) struct Counters {
    frames: AtomicU64,
    payload: AtomicU64,
    framed: AtomicU64,
}

impl Counters {
    fn begin(&self, head: usize) {
        self.frames.fetch_add(1, Relaxed);
        self.framed.fetch_add(head as u64, Relaxed);
    }

    fn payload(&self, length: u64) {
        self.payload.fetch_add(length, Relaxed);
        self.framed.fetch_add(length, Relaxed);
    }

    pub(crate) fn read(&self) -> LaneStats {
        LaneStats {
            frames: self.frames.load(Relaxed),
            payload: self.payload.load(Relaxed),
            framed: self.framed.load(Relaxed),
        }
    }
}
