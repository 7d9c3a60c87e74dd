//! QUIC between public keys, and frames over it.
//!
//! An [`Endpoint`] is one UDP port and one identity. A [`Connection`] leads to one peer, whose key QUIC's handshake
//! has proved. It carries *frames* in both directions on three *lanes* ([`Lane`]). A frame keeps its place in its
//! lane and never waits for other lanes. This crate does not interpret headers and payloads. A [`Ticket`] is the line
//! of text with which a machine joins a run. The [`emulator`] puts slow links between peers on one machine.
//!
//! # On the wire
//!
//! Both sides name `fusionllm/2` as QUIC's application protocol (RFC 9001, section 8.1). Then each side opens the
//! unidirectional streams of its lanes and keeps them: one for control, eight for each of the other two. All begin with
//! a prelude. The first of a lane carries its frames:
//!
//! ```text
//!   0     1     2     3     4     5     6
//! +-----+-----+-----+-----+-----+-----+------+
//! | 'F' | 'L' | 'L' | 'M' |  2  |lane |number|    prelude, once; 2 is the version of the format
//! +-----+-----+-----+-----+-----+-----+------+
//!
//!   0                 4                                   12         12+h           12+h+p
//! +-----------------+-----------------------------------+----- ~ -----+----- ~ -----+
//! | h: header bytes | p: payload bytes                  | header      | payload     |    a frame
//! +-----------------+-----------------------------------+----- ~ -----+----- ~ -----+
//!   u32, at most      u64
//!   65536
//! ```
//!
//! A payload is dealt out over the lane's streams in blocks of 1 MiB, of which the last may be shorter. Before each
//! block stands a byte on the first stream: the number `n` of streams. The block's bytes follow on the streams 0 to
//! `n - 1` in parts of the same length, rounded up; the last may be shorter or empty. The sender chooses `n`. It is 1
//! unless more bytes may be in flight than a receiver buffers for one stream ([`congestion`]).
//!
//! Numbers are little-endian. A stream ends only between frames. A connection is closed with an application code:
//! 0 for a regular end, with a reason; 1 for a key that is not allowed; 2 if the other side broke the format, with
//! the mistake.
//!
//! # What a hostile peer can do
//!
//! A stranger can begin handshakes. Few are open at once, only some of them from one IP address, and old ones give
//! way to newcomers. When several are open, a newcomer must first prove its address, which costs no memory here. A
//! handshake must end within the connect timeout, with all lanes open. One key has only a few connections, and only
//! so many wait for [`Endpoint::accept`]. What exceeds a limit is dropped or closed at once.
//!
//! Before a peer's key is [`Allowed`], no byte of its streams is read. After that, a frame's header costs at most
//! 64 KiB. A payload costs nothing until the caller has seen its header and length and allows it. QUIC buffers at
//! most 1.25 MB per stream, which is 21.25 MB per connection. A peer that breaks the format is disconnected, and both sides learn the mistake.
//!
//! ```
//! use fusionllm_transport::{Endpoint, Lane, EndpointOptions};
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let local = || EndpointOptions { listen: Some(([127, 0, 0, 1], 0).into()), ..EndpointOptions::new() };
//! let (server, client) = (Endpoint::bind(local()).await?, Endpoint::bind(local()).await?);
//! let server_addr = server.addr();
//! let (connecting, accepting) = tokio::join!(client.connect(&server_addr), server.accept());
//! let (to_server, _) = connecting?;
//! let (_to_client, mut lanes) = accepting.ok_or("closed")?;
//!
//! to_server.send(Lane::Tensors, b"a header", &["a pay".into(), "load".into()]).await?;
//! let frame = lanes.tensors.next().await?.ok_or("finished")?;
//! assert_eq!(frame.header(), &b"a header"[..]);
//! assert_eq!(frame.read(100).await?, "a payload");
//!
//! client.close("all done").await;
//! server.close("all done").await;
//! # Ok(())
//! # }
//! ```

mod accepting;
mod batch;
pub mod congestion;
mod connection;
mod discovery;
pub mod emulator;
mod endpoint;
mod frame;
mod gate;
mod key;
mod lane;
mod obstacle;
mod opening;
mod options;
mod pinned;
mod port;
#[cfg(feature = "relay")]
pub mod relay;
mod shared;
mod silence;
mod stream;
mod ticket;

pub use connection::{Connection, ConnectionStats, Lanes, PathKind};
pub use endpoint::{BindError, ConnectError, Endpoint, EndpointStats, NoRelay};
pub use frame::{ALPN, FormatError, MAX_HEADER_BYTES, WIRE_VERSION};
pub use key::{InvalidPeerKey, InvalidRelayUrl, InvalidSecretKey, PeerAddr, PeerKey, RelayUrl, SecretKey};
pub use lane::{Lane, LaneStats};
pub use obstacle::obstacle_to;
pub use options::{Allowed, EndpointOptions, Relay};
pub use port::nobody_listens;
pub use shared::{DisconnectReason, Disconnected};
pub use stream::{Frame, ReceiveError, Receiver, SendError};
pub use ticket::{Secret, Ticket, TicketError};
