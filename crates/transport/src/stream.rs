//! The sending and the receiving end of a lane: frames on QUIC streams.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use iroh::endpoint::{ReadError, RecvStream, SendStream, StoppedError, WriteError};
use tokio::sync::OwnedMutexGuard;

use crate::congestion::STREAM_WINDOW_BYTES;
use crate::frame::{Deal, FormatError, MAX_HEADER_BYTES, PREFIX_BYTES, Prefix, Turn};
use crate::lane::Lane;
use crate::shared::{Disconnected, Shared};

/// A frame could not be sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The connection has ended.
    #[error(transparent)]
    Disconnected(#[from] Disconnected),
    /// The header has this many bytes, more than [`MAX_HEADER_BYTES`].
    #[error("a frame's header has {0} bytes, but at most {MAX_HEADER_BYTES} are allowed")]
    HeaderTooLong(usize),
    /// The peer dropped the lane's [`Receiver`].
    #[error("the peer no longer reads the {0} lane")]
    Unread(Lane),
    /// [`Connection::finish`](crate::Connection::finish) was called before.
    #[error("the {0} lane is already finished")]
    Finished(Lane),
}

/// A frame could not be received.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReceiveError {
    /// The connection has ended. This side closed it if the peer broke the wire format.
    #[error(transparent)]
    Disconnected(#[from] Disconnected),
    /// The payload is larger than the caller allows. It is skipped; the lane continues with the next frame.
    #[error("a payload on the {lane} lane has {announced} bytes, but at most {allowed} are allowed")]
    TooLong {
        /// The frame's lane.
        lane: Lane,
        /// The payload's length in bytes.
        announced: u64,
        /// The caller's limit in bytes.
        allowed: u64,
    },
    /// The payload's length differs from the caller's buffer. It is skipped.
    #[error("a payload on the {lane} lane has {announced} bytes instead of {expected}")]
    Length {
        /// The frame's lane.
        lane: Lane,
        /// The payload's length in bytes.
        announced: u64,
        /// The buffer's length in bytes.
        expected: u64,
    },
    /// There is no memory for a payload of this many bytes. It is skipped.
    #[error("there is no memory for a payload of {0} bytes")]
    NoMemory(u64),
}

/// The sending end of a lane.
pub(crate) struct Sender {
    lane: Lane,
    streams: Arc<tokio::sync::Mutex<Vec<SendStream>>>,
}

impl Sender {
    /// The sender of a lane with these streams, of which there is at least one.
    pub(crate) fn new(lane: Lane, streams: Vec<SendStream>) -> Self {
        Self { lane, streams: Arc::new(tokio::sync::Mutex::new(streams)) }
    }

    pub(crate) async fn send(&self, shared: &Arc<Shared>, header: &[u8], payload: &[Bytes]) -> Result<(), SendError> {
        if header.len() > MAX_HEADER_BYTES {
            return Err(SendError::HeaderTooLong(header.len()));
        }
        let length = payload.iter().map(|slice| slice.len() as u64).sum();
        let head = Prefix { header: header.len(), payload: length };
        let prefix = head.encode();
        let mut rest = VecDeque::with_capacity(1 + payload.len());
        rest.push_back([&prefix, header].concat().into());
        rest.extend(payload.iter().filter(|slice| !slice.is_empty()).cloned());

        // Tokio's mutex is granted in the order of arrival, so waiting senders are served fairly.
        let streams = Arc::clone(&self.streams).lock_owned().await;
        let mut write = FrameWrite {
            streams: Some(streams),
            shared: shared.clone(),
            head: prefix.len() + header.len(),
            deal: Deal::new(length),
            rest,
            begun: false,
        };
        let counters = &shared.sent[self.lane as usize];
        counters.add_frame(head.head_bytes());
        counters.add_payload(length);
        write.run().await.map_err(|error| self.error(shared, error))
    }

    pub(crate) async fn finish(&self) {
        for stream in self.streams.lock().await.iter_mut() {
            // The only possible error is that the stream was finished before.
            let _ = stream.finish();
        }
    }

    /// Waits until the peer's QUIC has received everything that was sent before `finish`.
    pub(crate) async fn wait_delivered(&self, shared: &Shared) -> Result<(), SendError> {
        let stopped = Vec::from_iter(self.streams.lock().await.iter().map(SendStream::stopped));
        for stopped in stopped {
            match stopped.await {
                Ok(None) => {}
                Ok(Some(_)) => return Err(self.error(shared, WriteError::Stopped(0u32.into()))),
                Err(StoppedError::ConnectionLost(error)) => return Err(shared.disconnected(error).into()),
                Err(StoppedError::ZeroRttRejected) => return Err(SendError::Finished(self.lane)),
            }
        }
        Ok(())
    }

    fn error(&self, shared: &Shared, error: WriteError) -> SendError {
        match error {
            WriteError::ConnectionLost(error) => shared.disconnected(error).into(),
            WriteError::Stopped(_) => SendError::Unread(self.lane),
            WriteError::ClosedStream | WriteError::ZeroRttRejected => SendError::Finished(self.lane),
        }
    }
}

/// Most bytes handed to QUIC at once, so that other lanes can send in between.
const MAX_CHUNK_BYTES: usize = 256 * 1024;

/// The exclusive right to write one frame on a lane.
struct FrameWrite {
    streams: Option<OwnedMutexGuard<Vec<SendStream>>>,
    shared: Arc<Shared>,
    /// Bytes at the beginning of `rest` that belong on the first stream: the frame's head, or a block's.
    head: usize,
    deal: Deal,
    rest: VecDeque<Bytes>,
    begun: bool,
}

impl FrameWrite {
    async fn run(&mut self) -> Result<(), WriteError> {
        let Some(streams) = &mut self.streams else {
            return Ok(());
        };
        loop {
            let (stream, at_most) = match self.deal.turn() {
                _ if self.head > 0 => (0, self.head),
                Turn::Part { stream, bytes } => (stream, usize::try_from(bytes).unwrap_or(usize::MAX)),
                Turn::Block => {
                    let windows = self.shared.window().div_ceil(u64::from(STREAM_WINDOW_BYTES));
                    let count = windows.clamp(1, streams.len() as u64) as u8;
                    self.deal.begin(count);
                    self.rest.push_front(Bytes::copy_from_slice(&[count]));
                    self.head = 1;
                    continue;
                }
                Turn::Over => return Ok(()),
            };
            let Some(front) = self.rest.front_mut() else { return Ok(()) };
            let mut chunk = [front.slice(..front.len().min(at_most).min(MAX_CHUNK_BYTES))];
            let written = streams[stream].write_many_chunks(&mut &mut chunk[..]).await;
            match written {
                // No more of this frame can be written, here or in the background.
                Err(error) => {
                    self.rest.clear();
                    return Err(error);
                }
                Ok(length) => {
                    self.begun = true;
                    match self.head {
                        0 => self.deal.moved(length as u64),
                        _ => self.head -= length,
                    }
                    let _ = front.split_to(length);
                    if front.is_empty() {
                        self.rest.pop_front();
                    }
                }
            }
        }
    }
}

impl Drop for FrameWrite {
    /// Completes a frame that was sent in part. Otherwise the peer would read the next frame as the rest of this one.
    fn drop(&mut self) {
        let unfinished = self.begun && !self.rest.is_empty();
        let (true, Some(streams)) = (unfinished, self.streams.take()) else {
            return;
        };
        let mut write = Self {
            streams: Some(streams),
            shared: self.shared.clone(),
            head: self.head,
            deal: std::mem::take(&mut self.deal),
            rest: std::mem::take(&mut self.rest),
            begun: false,
        };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => {
                // The next use of the connection reports the error, if there is one.
                runtime.spawn(async move { write.run().await.ok() });
            }
            Err(_) => {
                // Without a runtime the connection is dead too.
                for stream in write.streams.iter_mut().flat_map(|streams| streams.iter_mut()) {
                    let _ = stream.reset(0u32.into());
                }
            }
        }
    }
}

/// The receiving end of a lane.
pub struct Receiver {
    lane: Lane,
    streams: Vec<RecvStream>,
    shared: Arc<Shared>,
    /// Bytes of the next frame's prefix and header that have arrived.
    head: Vec<u8>,
    /// The current frame's payload that is still to be read.
    unread: Deal,
}

impl Receiver {
    /// The receiver of a lane with these streams, of which there is at least one.
    pub(crate) fn new(lane: Lane, streams: Vec<RecvStream>, shared: Arc<Shared>) -> Self {
        Self { lane, streams, shared, head: Vec::new(), unread: Deal::default() }
    }

    /// Waits for the next frame's header. `None`: the peer finished the lane.
    ///
    /// The payload is neither read nor allocated until the caller asks for it. The unread rest of the previous
    /// payload is skipped. Dropping the future loses nothing.
    ///
    /// # Errors
    /// Only [`ReceiveError::Disconnected`]. A peer that breaks the wire format is disconnected.
    pub async fn next(&mut self) -> Result<Option<Frame<'_>>, ReceiveError> {
        while self.unread.left() > 0 {
            self.read_chunk().await?;
        }
        let mut wanted = PREFIX_BYTES;
        let (prefix, header) = loop {
            if let Some((start, header)) = self.head.split_first_chunk::<PREFIX_BYTES>() {
                let prefix = Prefix::parse(*start).map_err(|e| self.shared.close_broken(e))?;
                wanted = PREFIX_BYTES + prefix.header;
                if header.len() == prefix.header {
                    break (prefix, Bytes::copy_from_slice(header));
                }
            }
            let missing = wanted - self.head.len();
            match self.streams[0].read_chunk(missing).await {
                Ok(Some(bytes)) => self.head.extend_from_slice(&bytes),
                Ok(None) if self.head.is_empty() => return Ok(None),
                Ok(None) => return Err(self.truncated()),
                Err(error) => return Err(self.error(error)),
            }
        };
        self.head.clear();
        self.unread = Deal::new(prefix.payload);
        self.shared.received[self.lane as usize].add_frame(prefix.head_bytes());
        Ok(Some(Frame { header, receiver: self }))
    }

    /// Reads the part of the payload that has arrived.
    async fn read_chunk(&mut self) -> Result<Bytes, ReceiveError> {
        let (stream, at_most) = self.part().await?;
        match self.streams[stream].read_chunk(at_most).await {
            Ok(Some(bytes)) => {
                self.count_read(bytes.len());
                Ok(bytes)
            }
            Ok(None) => Err(self.truncated()),
            Err(error) => Err(self.error(error)),
        }
    }

    /// The stream of the payload's next bytes, and how many lie there in a row.
    async fn part(&mut self) -> Result<(usize, usize), ReceiveError> {
        loop {
            match self.unread.turn() {
                Turn::Part { stream, bytes } => return Ok((stream, usize::try_from(bytes).unwrap_or(usize::MAX))),
                Turn::Over => return Ok((0, 0)),
                Turn::Block => match self.streams[0].read_chunk(1).await {
                    Ok(Some(count)) => {
                        let count = count.first().copied().unwrap_or(0);
                        if count == 0 || usize::from(count) > self.streams.len() {
                            let error = FormatError::Streams { lane: self.lane, streams: count };
                            return Err(self.shared.close_broken(error).into());
                        }
                        self.unread.begin(count);
                    }
                    Ok(None) => return Err(self.truncated()),
                    Err(error) => return Err(self.error(error)),
                },
            }
        }
    }

    fn count_read(&mut self, length: usize) {
        self.unread.moved(length as u64);
        self.shared.received[self.lane as usize].add_payload(length as u64);
    }

    fn truncated(&self) -> ReceiveError {
        self.shared.close_broken(FormatError::Truncated(self.lane)).into()
    }

    fn error(&self, error: ReadError) -> ReceiveError {
        match error {
            ReadError::ConnectionLost(error) => self.shared.disconnected(error).into(),
            // A sender of ours resets a lane only when it dies in the middle of a frame.
            ReadError::Reset(_) | ReadError::ClosedStream | ReadError::ZeroRttRejected => self.truncated(),
        }
    }
}

impl fmt::Debug for Receiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Receiver({} from {})", self.lane, self.shared.peer)
    }
}

/// A frame whose header has arrived and whose payload is unread. Dropping it skips the payload.
pub struct Frame<'a> {
    header: Bytes,
    receiver: &'a mut Receiver,
}

impl Frame<'_> {
    /// The header, at most [`MAX_HEADER_BYTES`] bytes.
    pub fn header(&self) -> &Bytes {
        &self.header
    }

    /// The payload's length in bytes, as the peer announces it. It may be any number.
    pub fn payload_len(&self) -> u64 {
        self.receiver.unread.left()
    }

    /// Reads the payload if it has at most `allowed` bytes, and allocates exactly its length.
    ///
    /// # Errors
    /// [`ReceiveError::TooLong`] and [`ReceiveError::NoMemory`] before anything is read or
    /// allocated; [`ReceiveError::Disconnected`].
    pub async fn read(self, allowed: u64) -> Result<Bytes, ReceiveError> {
        let (lane, announced) = (self.receiver.lane, self.payload_len());
        let length = match usize::try_from(announced) {
            Ok(length) if announced <= allowed => length,
            _ => {
                return Err(ReceiveError::TooLong { lane, announced, allowed });
            }
        };
        let mut payload = Vec::new();
        payload.try_reserve_exact(length).map_err(|_| ReceiveError::NoMemory(announced))?;
        while self.receiver.unread.left() > 0 {
            payload.extend_from_slice(&self.receiver.read_chunk().await?);
        }
        Ok(payload.into())
    }

    /// Reads the payload into `buffer`, which must have exactly its length.
    ///
    /// # Errors
    /// [`ReceiveError::Length`] before anything is read; [`ReceiveError::Disconnected`].
    pub async fn read_into(self, buffer: &mut [u8]) -> Result<(), ReceiveError> {
        self.read_into_with(buffer, || {}).await
    }

    /// Like [`Self::read_into`]. Calls `arrived` whenever some more of the payload has arrived, which can take long on
    /// a slow link.
    ///
    /// # Errors
    /// The same as those of [`Self::read_into`].
    pub async fn read_into_with(self, buffer: &mut [u8], mut arrived: impl FnMut()) -> Result<(), ReceiveError> {
        let (lane, announced) = (self.receiver.lane, self.payload_len());
        let expected = buffer.len() as u64;
        if announced != expected {
            return Err(ReceiveError::Length { lane, announced, expected });
        }
        let mut filled = 0;
        while filled < buffer.len() {
            let (stream, at_most) = self.receiver.part().await?;
            let end = filled + at_most.min(buffer.len() - filled);
            match self.receiver.streams[stream].read(&mut buffer[filled..end]).await {
                Ok(Some(length)) => {
                    filled += length;
                    self.receiver.count_read(length);
                    arrived();
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
        let (header, payload) = (self.header.len(), self.payload_len());
        write!(f, "Frame({header} + {payload} bytes, {})", self.receiver.lane)
    }
}
