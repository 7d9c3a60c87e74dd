//! How fast a connection sends. These constants describe the congestion control of `fusionllm_transport` and
//! the queue of its emulated links.

/// Bytes that a new connection may have in flight.
pub const INITIAL_WINDOW: u64 = 128 << 10;

/// Most bytes in flight: the receiver's window.
pub const MAX_WINDOW: u64 = 1_250_000;

/// The longest time over which a window is spread until packets are lost, in seconds.
pub const MAX_SPREAD_S: f64 = 0.01;

/// How much faster than one window per spread a connection sends.
pub const SEND_FACTOR: f64 = 1.25;

/// The queue of a router, in seconds of its bandwidth.
pub const QUEUE_S: f64 = 0.1;

/// The queue of a slow router, in bytes.
pub const MIN_QUEUE: u64 = 64 << 10;

/// The share of a crowded link that many connections use.
const CROWDED_SHARE: f64 = 0.7;

/// The share that a single connection uses beyond [`CROWDED_SHARE`].
const REMAINING_SHARE: f64 = 0.3;

/// The share of a crowded link that connections use which send both ways without a pause.
const STEADY_SHARE: f64 = 0.95;

/// Bytes on the wire for a tensor of `payload` bytes.
///
/// Of 1,480 bytes of a QUIC datagram, 1,416 are payload. The rest are headers of IP, UDP, QUIC and the stream. Each
/// message has a header of its own.
pub fn message_bytes(payload: u64) -> f64 {
    const HEADER: f64 = 40.0;
    (payload as f64 + HEADER) * (1480.0 / 1416.0)
}

/// The rate at which a connection sends `bytes` when no link limits it, in bytes/s.
///
/// It sends a quarter faster than one window per round trip, or per 10 ms if that is shorter. The window grows for as
/// long as it delays tensors (RFC 9002, section 7.3), up to the receiver's.
pub(crate) fn send_rate(bytes: f64, round_trip_s: f64) -> f64 {
    let spread = if bytes < MAX_WINDOW as f64 { round_trip_s.min(MAX_SPREAD_S) } else { round_trip_s };
    SEND_FACTOR * bytes.clamp(INITIAL_WINDOW as f64, MAX_WINDOW as f64) / spread
}

/// The rate at which a connection sends messages that fill its window, in bytes/s.
pub(crate) fn window_rate(round_trip_s: f64) -> f64 {
    send_rate(MAX_WINDOW as f64, round_trip_s)
}

/// The bytes/s that a link carries for `connections` with `in_flight` bytes that are sent or wait to be: at most one
/// window of each. Of the connections, `pausing` are known to have nothing to send after the message that they send.
///
/// When more bytes are in flight than a router queues, packets are lost. Lost bytes are sent again, and connections with
/// losses slow down. Two connections then use 0.85 of the link, many use 0.7. Training runs that kept uplinks full used
/// 0.87 with two, 0.8 with four.
///
/// The bench `shared_uplink` of `fusionllm_transport` counts how much of a link is used while something waits.
/// Connections that send 256 KiB to and fro used 0.87 to 0.90 with two, 0.77 with four and 0.73 to 0.75 with eight.
/// Connections that never pause used 0.98 if all send one way, and 0.91 to 0.95 if half of them send the other way.
///
/// A router queues a tenth of a second, and each connection has at most one window in flight. So few connections never
/// overflow a fast line, however much waits. Of 1 MiB messages over 80 ms there and back, 100 Mbps lost datagrams with
/// two connections, 400 Mbps only with eight, and 1 Gbps not even then. Network cards are such lines.
pub(crate) fn shared_bandwidth(bandwidth: f64, connections: usize, pausing: usize, in_flight: f64) -> f64 {
    if connections < 2 || in_flight <= (QUEUE_S * bandwidth).max(MIN_QUEUE as f64) {
        return bandwidth;
    }
    let (all, pausing) = (connections as f64, pausing as f64);
    let share = CROWDED_SHARE + REMAINING_SHARE / all;
    bandwidth * (pausing * share + (all - pausing) * STEADY_SHARE) / all
}

#[cfg(test)]
mod tests {
    use super::{send_rate, shared_bandwidth};

    #[test]
    fn a_window_is_sent_at_once_and_the_receivers_window_once_a_round_trip() {
        let rates = [0.001, 0.01, 0.2].map(|rtt| send_rate(65_536.0, rtt));
        assert_eq!(rates, [163_840_000.0, 16_384_000.0, 16_384_000.0]);
        assert_eq!(send_rate(200_000.0, 0.2), 25_000_000.0, "the window has grown");
        assert_eq!(send_rate(1e9, 0.2), 7_812_500.0, "the receiver's window limits");
    }

    #[test]
    fn a_link_carries_less_when_several_connections_overflow_its_queue() {
        assert_eq!(shared_bandwidth(1e6, 1, 1, 1e9), 1e6, "one connection uses all");
        assert_eq!([2, 8].map(|n| shared_bandwidth(1e6, n, n, 1e5)), [1e6; 2], "the queue holds the bytes");
        assert_eq!([2, 4].map(|n| shared_bandwidth(1e6, n, n, 1.1e5).round()), [850_000.0, 775_000.0]);
        assert_eq!([0, 2].map(|pausing| shared_bandwidth(1e6, 4, pausing, 1e9).round()), [950_000.0, 862_500.0]);
        assert_eq!(shared_bandwidth(1e5, 2, 2, 65_536.0), 1e5, "the smallest queue");
    }
}
