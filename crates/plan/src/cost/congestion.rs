//! How fast a connection sends. These constants describe the congestion control of `fusionllm_transport` and
//! the queue of its emulated links.

/// Bytes that a new connection may have in flight.
pub const INITIAL_WINDOW: u64 = 128 << 10;

/// Bytes that may be in flight on any path: the receiver's window of one stream.
pub const STREAM_WINDOW: u64 = 1_250_000;

/// The most bytes that may be in flight, on paths that hold as many.
pub const MAX_WINDOW: u64 = 10_000_000;

/// The window of a path, over the bytes that it holds.
pub const WINDOW_GAIN: f64 = 1.5;

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

/// Bytes on the wire of a full packet.
pub const PACKET_BYTES: f64 = 1480.0;

/// Bytes on the wire for a tensor of `payload` bytes.
///
/// Of a full packet, 1,416 bytes are payload. The rest are headers of IP, UDP, QUIC and the stream. Each message has a
/// header of its own.
pub fn message_bytes(payload: u64) -> f64 {
    const HEADER: f64 = 40.0;
    (payload as f64 + HEADER) * (PACKET_BYTES / 1416.0)
}

/// Most bytes in flight on a path of `bandwidth` bytes/s. It follows what the path holds.
pub(crate) fn window(bandwidth: f64, round_trip_s: f64) -> f64 {
    // Without a link, the product is not a number.
    (WINDOW_GAIN * bandwidth * round_trip_s).max(STREAM_WINDOW as f64).min(MAX_WINDOW as f64)
}

/// The rate at which a connection sends `bytes` when no link limits it, in bytes/s. `window` is that of its path.
///
/// It sends a quarter faster than one window per round trip, or per 10 ms if that is shorter. The window grows for as
/// long as it delays tensors (RFC 9002, section 7.3), up to the path's.
pub(crate) fn send_rate(bytes: f64, round_trip_s: f64, window: f64) -> f64 {
    let is_burst = bytes < STREAM_WINDOW as f64;
    let spread = if is_burst { round_trip_s.min(MAX_SPREAD_S) } else { round_trip_s };
    SEND_FACTOR * if is_burst { bytes.max(INITIAL_WINDOW as f64) } else { window } / spread
}

/// The bytes/s that a link carries for `connections` with `in_flight` bytes that are sent or wait to be: at most one
/// window of each. Of the connections, `pausing` are known to have nothing to send after the message that they send.
/// The link holds those of `round_trip_s`, the shortest one of them, beside those in its queue.
///
/// When more bytes are in flight than that, packets are lost. Lost bytes are sent again, and connections with
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
pub(crate) fn shared_bandwidth(
    bandwidth: f64,
    connections: usize,
    pausing: usize,
    in_flight: f64,
    round_trip_s: f64,
) -> f64 {
    let held = (QUEUE_S * bandwidth).max(MIN_QUEUE as f64) + round_trip_s * bandwidth;
    if connections < 2 || in_flight <= held {
        return bandwidth;
    }
    let (all, pausing) = (connections as f64, pausing as f64);
    let share = CROWDED_SHARE + REMAINING_SHARE / all;
    bandwidth * (pausing * share + (all - pausing) * STEADY_SHARE) / all
}

#[cfg(test)]
mod tests {
    use super::{send_rate, shared_bandwidth, window};

    #[test]
    fn a_window_is_sent_at_once_and_the_receivers_window_once_a_round_trip() {
        let slow = |rtt| window(1e6, rtt);
        let rates = [0.001, 0.01, 0.2].map(|rtt| send_rate(65_536.0, rtt, slow(rtt)));
        assert_eq!(rates, [163_840_000.0, 16_384_000.0, 16_384_000.0]);
        assert_eq!(send_rate(200_000.0, 0.2, slow(0.2)), 25_000_000.0, "the window has grown");
        assert_eq!(send_rate(1e9, 0.2, slow(0.2)), 7_812_500.0, "one stream's window limits");
    }

    #[test]
    fn the_window_follows_what_the_path_holds() {
        assert_eq!(window(1e6, 0.1), 1.25e6, "a slow path has one stream's window");
        assert_eq!(window(5e7, 0.1), 7.5e6);
        assert_eq!(window(1.25e9, 0.1), 1e7, "memory limits");
        assert_eq!(send_rate(1e8, 0.1, window(5e7, 0.1)), 93_750_000.0, "more than the path carries");
        assert_eq!(send_rate(1e8, 0.1, window(1.25e9, 0.1)), 125_000_000.0, "the largest window in each round trip");
    }

    #[test]
    fn a_link_carries_less_when_several_connections_overflow_its_queue() {
        assert_eq!(shared_bandwidth(1e6, 1, 1, 1e9, 0.0), 1e6, "one connection uses all");
        assert_eq!([2, 8].map(|n| shared_bandwidth(1e6, n, n, 1e5, 0.0)), [1e6; 2], "the queue holds the bytes");
        assert_eq!([2, 4].map(|n| shared_bandwidth(1e6, n, n, 1.1e5, 0.0).round()), [850_000.0, 775_000.0]);
        assert_eq!(shared_bandwidth(1e6, 4, 4, 1.1e5, 0.01), 1e6, "the link holds the rest");
        assert_eq!([0, 2].map(|pausing| shared_bandwidth(1e6, 4, pausing, 1e9, 0.0).round()), [950_000.0, 862_500.0]);
        assert_eq!(shared_bandwidth(1e5, 2, 2, 65_536.0, 0.0), 1e5, "the smallest queue");
    }
}
