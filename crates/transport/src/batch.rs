//! Many datagrams a system call: what iroh does over its own sockets, for ours.

use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::ops::Range;

use noq_udp::{BATCH_SIZE, RecvMeta, UdpSockRef, UdpSocketState};

/// Room for datagrams that the system hands over in one piece: as much as iroh gives it.
const CHUNK: usize = 64 * 1500;

/// Datagrams that were fetched and not yet looked at.
#[derive(Debug)]
pub(crate) struct Reader {
    buffers: Vec<u8>,
    waiting: VecDeque<(SocketAddr, Range<usize>)>,
}

impl Reader {
    pub(crate) fn new() -> Self {
        Self { buffers: vec![0; BATCH_SIZE * CHUNK], waiting: VecDeque::new() }
    }

    /// Fetches what has come to a socket. What waits here must have been taken before.
    pub(crate) fn fetch(&mut self, state: &UdpSocketState, socket: UdpSockRef<'_>) -> io::Result<()> {
        let mut metas = [RecvMeta::default(); BATCH_SIZE];
        let mut buffers: Vec<IoSliceMut<'_>> = self.buffers.chunks_mut(CHUNK).map(IoSliceMut::new).collect();
        let count = state.recv(socket, &mut buffers, &mut metas)?;
        for (i, meta) in metas.iter().take(count).enumerate() {
            let (start, end) = (i * CHUNK, i * CHUNK + meta.len);
            let each = (start..end).step_by(meta.stride.max(1));
            self.waiting.extend(each.map(|at| (meta.addr, at..end.min(at + meta.stride))));
        }
        Ok(())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The next datagram, and whose it is.
    pub(crate) fn next(&mut self) -> Option<(SocketAddr, &[u8])> {
        let (from, range) = self.waiting.pop_front()?;
        Some((from, self.buffers.get(range)?))
    }
}

/// Datagrams to one address that go out together: all of a size, but for the last, which may be shorter.
#[derive(Debug, Default)]
pub(crate) struct Bunch {
    pub(crate) bytes: Vec<u8>,
    pub(crate) segment: usize,
    pub(crate) count: usize,
}

impl Bunch {
    /// Whether a datagram of this size can go with those that are here, of at most `most`.
    pub(crate) fn takes(&self, length: usize, most: usize) -> bool {
        /// No message that the system takes is larger.
        const LARGEST: usize = 65_000;
        let whole = self.bytes.len() == self.count * self.segment;
        self.count == 0
            || (whole && length <= self.segment && self.count < most && self.bytes.len() + length <= LARGEST)
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
    fn datagrams_that_went_together_come_as_they_were() {
        let [a, b] = [(); 2].map(|()| std::net::UdpSocket::bind("127.0.0.1:0").unwrap());
        let [state_a, state_b] = [&a, &b].map(|s| UdpSocketState::new(s.into()).unwrap());
        let mut bunch = Bunch::default();
        let sent: Vec<Vec<u8>> = (0..9u8).map(|i| vec![i; if i == 8 { 70 } else { 1200 }]).collect();
        for datagram in &sent {
            assert!(bunch.takes(datagram.len(), 64));
            bunch.add(datagram);
        }
        assert!(!bunch.takes(70, 64), "a shorter one is the last");
        // Where the system takes one at a time, they go so.
        let segment = if state_a.max_gso_segments().get() > 1 { bunch.bytes.len() } else { 1200 };
        for contents in bunch.bytes.chunks(segment) {
            let (destination, segment_size) = (b.local_addr().unwrap(), Some(bunch.segment));
            let transmit = noq_udp::Transmit { destination, ecn: None, contents, segment_size, src_ip: None };
            state_a.try_send((&a).into(), &transmit).unwrap();
        }
        let (mut reader, mut got) = (Reader::new(), Vec::new());
        while got.len() < sent.len() {
            reader.fetch(&state_b, (&b).into()).unwrap();
            while let Some((from, datagram)) = reader.next() {
                assert_eq!(from, a.local_addr().unwrap());
                got.push(datagram.to_vec());
            }
        }
        assert_eq!(got, sent);
        bunch.clear();
        assert!(bunch.takes(1, 1));
        bunch.add(&[0]);
        assert!(!bunch.takes(2, 64), "a longer one does not fit");
        assert!(!bunch.takes(1, 1), "as many as the system takes");
    }
}
