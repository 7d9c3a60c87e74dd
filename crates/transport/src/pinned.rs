//! A plain UDP socket as iroh's only transport.
//!
//! On its own sockets, iroh exchanges all addresses between two peers and moves the connection to the fastest path,
//! which bypasses an emulated link. On a custom transport iroh looks for no other path.

use std::io::{self, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use iroh::TransportAddr;
use iroh::endpoint::transports::{CustomEndpoint, CustomSender, CustomTransport, RecvInfo, Transmit};
use iroh_base::CustomAddr;
use n0_watcher::Watchable;
use noq_udp::{RecvMeta, UdpSocketState};
use tokio::io::Interest;
use tokio::net::UdpSocket;

use crate::batch::BatchReader;

/// A bound socket for iroh's builder.
#[derive(Debug, Clone)]
pub(crate) struct Pinned {
    socket: Arc<UdpSocket>,
    state: Arc<UdpSocketState>,
    local: Watchable<Vec<CustomAddr>>,
}

/// The receiving half that iroh polls.
#[derive(Debug)]
struct PinnedReceiver {
    pinned: Pinned,
    reader: BatchReader,
}

impl Pinned {
    pub(crate) fn bind(listen: SocketAddr) -> io::Result<Self> {
        let socket = std::net::UdpSocket::bind(listen)?;
        socket.set_nonblocking(true)?;
        // The same size as iroh's own sockets. The system may grant less.
        let _ = socket2::SockRef::from(&socket).set_recv_buffer_size(4 << 20);
        let state = Arc::new(UdpSocketState::new((&socket).into())?);
        let socket = UdpSocket::from_std(socket)?;
        let local = Watchable::new(vec![to_custom(socket.local_addr()?)]);
        Ok(Self { socket: Arc::new(socket), state, local })
    }

    pub(crate) fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// The address of the peer at `addr` in iroh's terms.
    pub(crate) fn address(addr: SocketAddr) -> TransportAddr {
        TransportAddr::Custom(to_custom(addr))
    }

    /// The address of a peer that iroh calls `addr`.
    pub(crate) fn socket_addr(addr: &CustomAddr) -> io::Result<SocketAddr> {
        from_custom(addr)
    }
}

impl CustomTransport for Pinned {
    fn bind(&self) -> io::Result<Box<dyn CustomEndpoint>> {
        Ok(Box::new(PinnedReceiver { pinned: self.clone(), reader: BatchReader::new() }))
    }
}

impl CustomEndpoint for PinnedReceiver {
    fn watch_local_addrs(&self) -> n0_watcher::Direct<Vec<CustomAddr>> {
        self.pinned.local.watch()
    }

    fn create_sender(&self) -> Arc<dyn CustomSender> {
        Arc::new(self.pinned.clone())
    }

    fn poll_recv(
        &mut self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        metas: &mut [RecvMeta],
        infos: &mut [RecvInfo],
    ) -> Poll<io::Result<usize>> {
        let Self { pinned: Pinned { socket, state, .. }, reader } = self;
        while reader.is_empty() {
            ready!(socket.poll_recv_ready(cx))?;
            match socket.try_io(Interest::READABLE, || reader.fetch(state, socket.as_ref().into())) {
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Poll::Ready(Err(error)),
                _ => {}
            }
        }
        let mut count = 0;
        for ((buf, meta), info) in bufs.iter_mut().zip(metas).zip(infos) {
            let Some((from, datagram)) = reader.next() else { break };
            // A datagram longer than the agreed size is damaged anyway.
            let length = datagram.len().min(buf.len());
            buf[..length].copy_from_slice(&datagram[..length]);
            *info = RecvInfo::new(to_custom(from), None);
            *meta = RecvMeta::default();
            (meta.len, meta.stride) = (length, length);
            count += 1;
        }
        Poll::Ready(Ok(count))
    }

    fn max_transmit_segments(&self) -> NonZeroUsize {
        self.pinned.state.max_gso_segments()
    }
}

impl CustomSender for Pinned {
    fn is_valid_send_addr(&self, addr: &CustomAddr) -> bool {
        addr.id() == TRANSPORT_ID
    }

    fn poll_send(
        &self,
        _: &mut Context<'_>,
        to: &CustomAddr,
        _: Option<&CustomAddr>,
        transmit: &Transmit<'_>,
    ) -> Poll<io::Result<()>> {
        let Transmit { contents, segment_size, .. } = *transmit;
        let transmit =
            noq_udp::Transmit { destination: from_custom(to)?, ecn: None, contents, segment_size, src_ip: None };
        let sent =
            self.socket.try_io(Interest::WRITABLE, || self.state.try_send(self.socket.as_ref().into(), &transmit));
        match sent {
            // A full socket drops datagrams, as a full router queue does.
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => Poll::Ready(Err(error)),
            _ => Poll::Ready(Ok(())),
        }
    }
}

/// Our identifier among iroh's custom transports: "FLLM".
const TRANSPORT_ID: u64 = 0x464c_4c4d;

fn to_custom(addr: SocketAddr) -> CustomAddr {
    let mut data = match addr.ip() {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    data.extend_from_slice(&addr.port().to_le_bytes());
    CustomAddr::from_parts(TRANSPORT_ID, &data)
}

fn from_custom(addr: &CustomAddr) -> io::Result<SocketAddr> {
    let foreign = || io::Error::new(io::ErrorKind::InvalidInput, format!("{addr} is not a UDP address"));
    let (ip, port) = addr.data().split_last_chunk::<2>().ok_or_else(foreign)?;
    let ip: IpAddr = match ip.len() {
        4 => <[u8; 4]>::try_from(ip).map_err(|_| foreign())?.into(),
        _ => <[u8; 16]>::try_from(ip).map_err(|_| foreign())?.into(),
    };
    Ok(SocketAddr::new(ip, u16::from_le_bytes(*port)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_round_trip() {
        for addr in ["127.0.0.1:9", "[::1]:65535"] {
            let addr: SocketAddr = addr.parse().unwrap();
            assert_eq!(from_custom(&to_custom(addr)).unwrap(), addr);
        }
        for foreign in [&b""[..], b"x", b"12345", &[0; 40]] {
            assert!(from_custom(&CustomAddr::from_parts(TRANSPORT_ID, foreign)).is_err());
        }
    }
}
