//! Many datagrams per system call, for our own sockets. Iroh does the same for its sockets.

use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::ops::Range;

use noq_udp::{BATCH_SIZE, RecvMeta, UdpSockRef, UdpSocketState};

/// Bytes for the datagrams that the system returns as one piece. Iroh uses the same size.
const PIECE_BYTES: usize = 64 * 1500;

/// Reads batches of datagrams and yields them one at a time.
#[derive(Debug)]
pub(crate) struct BatchReader {
    buffers: Vec<u8>,
    /// Datagrams that were read but not yielded: the sender, and the bytes' place in `buffers`.
    waiting: VecDeque<(SocketAddr, Range<usize>)>,
}

impl BatchReader {
    pub(crate) fn new() -> Self {
        Self { buffers: vec![0; BATCH_SIZE * PIECE_BYTES], waiting: VecDeque::new() }
    }

    /// Reads the datagrams that have arrived at a socket. Call it only when [`Self::is_empty`].
    pub(crate) fn fetch(&mut self, state: &UdpSocketState, socket: UdpSockRef<'_>) -> io::Result<()> {
        let mut metas = [RecvMeta::default(); BATCH_SIZE];
        let mut buffers: Vec<IoSliceMut<'_>> = self.buffers.chunks_mut(PIECE_BYTES).map(IoSliceMut::new).collect();
        let count = state.recv(socket, &mut buffers, &mut metas)?;
        for (i, meta) in metas.iter().take(count).enumerate() {
            let (start, end) = (i * PIECE_BYTES, i * PIECE_BYTES + meta.len);
            let each = (start..end).step_by(meta.stride.max(1));
            self.waiting.extend(each.map(|at| (meta.addr, at..end.min(at + meta.stride))));
        }
        Ok(())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The next datagram and its sender.
    pub(crate) fn next(&mut self) -> Option<(SocketAddr, &[u8])> {
        let (from, range) = self.waiting.pop_front()?;
        Some((from, self.buffers.get(range)?))
    }
}

/// Datagrams that one system call sends to one address. All have the same size; only the last may be shorter.
#[derive(Debug, Default)]
pub(crate) struct SendBatch {
    pub(crate) bytes: Vec<u8>,
    /// The size of all datagrams but the last.
    pub(crate) segment: usize,
    pub(crate) count: usize,
}

impl SendBatch {
    /// Whether a datagram of this length can join the batch, which may have at most `max_count` datagrams.
    pub(crate) fn accepts(&self, length: usize, max_count: usize) -> bool {
        /// Most bytes that the system sends at once.
        const MAX_BATCH_BYTES: usize = 65_000;
        let equal_sizes = self.bytes.len() == self.count * self.segment;
        let fits = self.count < max_count && self.bytes.len() + length <= MAX_BATCH_BYTES;
        self.count == 0 || (equal_sizes && length <= self.segment && fits)
    }

    pub(crate) fn add(&mut self, datagram: &[u8]) {
        if self.count == 0 {
            self.segment = datagram.len();
        }
        self.bytes.extend_from_slice(datagram);
        self.count += 1;
    }

    pub(crate) fn clear(&mut self) {
        self.bytes.clear();
        self.count = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_arrives_as_its_datagrams() {
        let [a, b] = [(); 2].map(|()| std::net::UdpSocket::bind("127.0.0.1:0").unwrap());
        let [state_a, state_b] = [&a, &b].map(|s| UdpSocketState::new(s.into()).unwrap());
        let mut batch = SendBatch::default();
        let sent: Vec<Vec<u8>> = (0..9u8).map(|i| vec![i; if i == 8 { 70 } else { 1200 }]).collect();
        for datagram in &sent {
            assert!(batch.accepts(datagram.len(), 64));
            batch.add(datagram);
        }
        assert!(!batch.accepts(70, 64), "a shorter datagram is the last");
        // Some systems send one datagram at a time.
        let segment = if state_a.max_gso_segments().get() > 1 { batch.bytes.len() } else { 1200 };
        for contents in batch.bytes.chunks(segment) {
            let (destination, segment_size) = (b.local_addr().unwrap(), Some(batch.segment));
            let transmit = noq_udp::Transmit { destination, ecn: None, contents, segment_size, src_ip: None };
            state_a.try_send((&a).into(), &transmit).unwrap();
        }
        let (mut reader, mut got) = (BatchReader::new(), Vec::new());
        while got.len() < sent.len() {
            reader.fetch(&state_b, (&b).into()).unwrap();
            while let Some((from, datagram)) = reader.next() {
                assert_eq!(from, a.local_addr().unwrap());
                got.push(datagram.to_vec());
            }
        }
        assert_eq!(got, sent);
        batch.clear();
        assert!(batch.accepts(1, 1));
        batch.add(&[0]);
        assert!(!batch.accepts(2, 64), "a longer datagram does not fit");
        assert!(!batch.accepts(1, 1), "the batch is full");
    }
}
