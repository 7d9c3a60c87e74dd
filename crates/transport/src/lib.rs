//! QUIC between public keys, and the frames on it.
//!
//! An [`Endpoint`] is one UDP port and one identity. A [`Connection`] leads to one peer, whose key
//! QUIC's handshake has proved, and carries *frames* both ways on three *lanes* ([`Lane`]): a frame
//! keeps its place in its lane and does not wait for other lanes. What headers and payloads mean is
//! the callers' business; nothing here looks into them. A [`Ticket`] is what a person copies to the
//! machine that is to join, and the [`emulator`] puts slow links between peers on one machine.
//!
//! # On the wire
//!
//! Both sides name `fusionllm/1` as QUIC's application protocol (RFC 9001, section 8.1). Each then
//! opens one unidirectional stream a lane and keeps it. A stream is a prelude and frames:
//!
//! ```text
//!   0     1     2     3     4     5
//! +-----+-----+-----+-----+-----+-----+
//! | 'F' | 'L' | 'L' | 'M' |  1  |lane |    prelude, once; 1 is the version of the format
//! +-----+-----+-----+-----+-----+-----+
//!
//!   0                 4                                   12         12+h           12+h+p
//! +-----------------+-----------------------------------+----- ~ -----+----- ~ -----+
//! | h: header bytes | p: payload bytes                  | header      | payload     |    a frame
//! +-----------------+-----------------------------------+----- ~ -----+----- ~ -----+
//!   u32, at most      u64
//!   65536
//! ```
//!
//! Numbers are little-endian. A stream ends only between frames. Connections are closed with the
//! application codes 0 (in good order, with a reason), 1 (the key is not allowed) and 2 (the other
//! side broke the format, with what it did).
//!
//! # What a hostile peer can do
//!
//! Before its key is on the list of those [`Allowed`], no byte of its streams is looked at. After
//! that, a frame's header costs at most 64 KiB, and its payload nothing until the caller has seen
//! the header and the length and says how much is allowed; QUIC itself holds back 1.25 MB a lane.
//! Breaking the format closes the connection, and both sides learn how.
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
//! to_server.send(Lane::Tensors, b"what it is", &["its".into(), "bytes".into()]).await?;
//! let frame = lanes.tensors.next().await?.ok_or("finished")?;
//! assert_eq!(frame.header(), &b"what it is"[..]);
//! assert_eq!(frame.read(100).await?, "itsbytes");
//!
//! client.close("all done").await;
//! server.close("all done").await;
//! # Ok(())
//! # }
//! ```

mod batch;
mod congestion;
mod connection;
pub mod emulator;
mod endpoint;
mod frame;
mod key;
mod lane;
mod pinned;
mod ticket;

pub use connection::{Connection, DisconnectReason, Lanes, Lost, Stats};
pub use endpoint::{Allowed, BindError, ConnectError, Endpoint, EndpointOptions};
pub use frame::{ALPN, MAX_HEADER, VERSION, Violation};
pub use key::{InvalidPeerKey, PeerAddr, PeerKey, SecretKey};
pub use lane::{Frame, Lane, LaneStats, ReceiveError, Receiver, SendError};
pub use ticket::{Secret, Ticket, TicketError};
