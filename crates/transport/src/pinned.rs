//! A plain UDP socket as iroh's only way out.
//!
//! Over its own sockets iroh tells each peer all of the other's addresses and moves the connection
//! to the quickest path it finds: past any forwarder in between. What it cannot do is find another
//! path on a transport that it does not know, which is what this is.

use std::io::{self, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use iroh::TransportAddr;
use iroh::endpoint::transports::{CustomEndpoint, CustomSender, CustomTransport, RecvInfo, Transmit};
use iroh_base::CustomAddr;
use n0_watcher::Watchable;
use noq_udp::RecvMeta;
use tokio::io::ReadBuf;
use tokio::net::UdpSocket;

/// A bound socket, to be given to iroh's builder.
#[derive(Debug, Clone)]
pub(crate) struct Pinned {
    socket: Arc<UdpSocket>,
    local: Watchable<Vec<CustomAddr>>,
    /// Never touched, so that no memory stands behind it. Over its own sockets iroh sets this much aside to receive into, 64 packets in each of 32 buffers, and next to nothing
    /// over this one: emulated peers would hold less than real ones, of which they are to tell.
    _buffers: Arc<Vec<u8>>,
}

/// What iroh sets aside for its own sockets, in bytes.
const BUFFERS: usize = 32 * 64 * 1500;

impl Pinned {
    pub(crate) fn bind(listen: SocketAddr) -> io::Result<Self> {
        let socket = std::net::UdpSocket::bind(listen)?;
        socket.set_nonblocking(true)?;
        // As iroh does with its own sockets. The system may grant less.
        let _ = socket2::SockRef::from(&socket).set_recv_buffer_size(4 << 20);
        let socket = UdpSocket::from_std(socket)?;
        let local = Watchable::new(vec![to_custom(socket.local_addr()?)]);
        Ok(Self { socket: Arc::new(socket), local, _buffers: Arc::new(Vec::with_capacity(BUFFERS)) })
    }

    pub(crate) fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// How iroh knows the peer at `addr` on this transport.
    pub(crate) fn address(addr: SocketAddr) -> TransportAddr {
        TransportAddr::Custom(to_custom(addr))
    }
}

impl CustomTransport for Pinned {
    fn bind(&self) -> io::Result<Box<dyn CustomEndpoint>> {
        Ok(Box::new(self.clone()))
    }
}

impl CustomEndpoint for Pinned {
    fn watch_local_addrs(&self) -> n0_watcher::Direct<Vec<CustomAddr>> {
        self.local.watch()
    }

    fn create_sender(&self) -> Arc<dyn CustomSender> {
        Arc::new(self.clone())
    }

    fn poll_recv(
        &mut self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        metas: &mut [RecvMeta],
        infos: &mut [RecvInfo],
    ) -> Poll<io::Result<usize>> {
        let mut count = 0;
        for ((buf, meta), info) in bufs.iter_mut().zip(metas).zip(infos) {
            let received = if count == 0 {
                let mut buf = ReadBuf::new(buf);
                let from = ready!(self.socket.poll_recv_from(cx, &mut buf));
                from.map(|from| (buf.filled().len(), from))
            } else {
                self.socket.try_recv_from(buf)
            };
            match received {
                Ok((length, from)) => {
                    *info = RecvInfo::new(to_custom(from), None);
                    *meta = RecvMeta::default();
                    (meta.len, meta.stride) = (length, length);
                    count += 1;
                }
                Err(error) if count == 0 => return Poll::Ready(Err(error)),
                // An error after the first datagram comes again at the next call.
                Err(_) => break,
            }
        }
        Poll::Ready(Ok(count))
    }
}

impl CustomSender for Pinned {
    fn is_valid_send_addr(&self, addr: &CustomAddr) -> bool {
        addr.id() == TRANSPORT
    }

    fn poll_send(
        &self,
        _: &mut Context<'_>,
        to: &CustomAddr,
        _: Option<&CustomAddr>,
        transmit: &Transmit<'_>,
    ) -> Poll<io::Result<()>> {
        let to = from_custom(to)?;
        let segment = transmit.segment_size.unwrap_or(transmit.contents.len()).max(1);
        for datagram in transmit.contents.chunks(segment) {
            match self.socket.try_send_to(datagram, to) {
                Ok(_) => {}
                // A full socket loses the datagram, as a full queue on the way would.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        Poll::Ready(Ok(()))
    }
}

/// Ours among iroh's custom transports: "FLLM".
const TRANSPORT: u64 = 0x464c_4c4d;

fn to_custom(addr: SocketAddr) -> CustomAddr {
    let mut data = match addr.ip() {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    data.extend_from_slice(&addr.port().to_le_bytes());
    CustomAddr::from_parts(TRANSPORT, &data)
}

fn from_custom(addr: &CustomAddr) -> io::Result<SocketAddr> {
    let foreign = || io::Error::new(io::ErrorKind::InvalidInput, format!("{addr} is no UDP address"));
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
    fn addresses_come_back() {
        for addr in ["127.0.0.1:9", "[::1]:65535"] {
            let addr: SocketAddr = addr.parse().unwrap();
            assert_eq!(from_custom(&to_custom(addr)).unwrap(), addr);
        }
        for foreign in [&b""[..], b"x", b"12345", &[0; 40]] {
            assert!(from_custom(&CustomAddr::from_parts(TRANSPORT, foreign)).is_err());
        }
    }
}
