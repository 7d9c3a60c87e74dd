//! Processor time that the network takes.

use std::fmt::Display;
use std::time::Duration;

use bytes::Bytes;
use fusionllm_backend::Backend;
use fusionllm_plan::congestion::PACKET_BYTES;
use fusionllm_plan::{Curve, Device};
use fusionllm_transport::{Endpoint, EndpointOptions, Lane};
use fusionllm_workbench::profile::Stopwatch;

use crate::NodeError;

/// Bytes per message.
const BYTES: u64 = 1 << 20;
/// Messages that are timed. As many are sent before, while the connection finds its rate.
const MESSAGES: usize = 16;
/// Bytes of a message that fits into one packet.
const SMALL: usize = 1200;
/// Such messages that are timed together.
const PACKETS: usize = 100;

/// Adds the processor time that the network takes to what is measured of a device on which `backend` computes, unless
/// the device leaves the processor to the network.
pub fn measure_traffic(device: &mut Device, backend: &dyn Backend) {
    // A machine that cannot connect to itself may still train with others.
    if let Some(threads) = backend.device().threads
        && let Ok([together, alone]) = cost()
    {
        let of_thread = |curve: Option<Curve>| curve.map(|curve| curve.faster(threads as f64));
        (device.measured.traffic, device.measured.packets) = (of_thread(together), of_thread(alone));
    }
}

/// Processor seconds to encrypt and send, or to receive and decrypt, by bytes: of long messages, and of packets that
/// come one at a time. They are half the time of a connection that has both ends here.
fn cost() -> Result<[Option<Curve>; 2], NodeError> {
    let failed = |e: &dyn Display| NodeError::Network(format!("this machine cannot be connected to itself: {e}"));
    // Everything runs on this thread, whose time is measured.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| failed(&e))?;
    let [together, alone] = runtime.block_on(async {
        let options =
            || EndpointOptions { pinned: true, connect_timeout: Duration::from_secs(2), ..EndpointOptions::new() };
        let bind = async || Endpoint::bind(options()).await.map_err(|e| failed(&e));
        let (one, other) = (bind().await?, bind().await?);
        let to = other.addr();
        let (calling, called) = tokio::join!(one.connect(&to), other.accept());
        let ((from, _lanes), Some((_to, mut lanes))) = (calling.map_err(|e| failed(&e))?, called) else {
            return Err(failed(&"the connection is closed"));
        };
        let [long, small] = [BYTES as usize, SMALL].map(|bytes| [Bytes::from(vec![0; bytes])]);
        let mut pass = async |payload: &[Bytes]| {
            let sent = async { from.send(Lane::Tensors, b"", payload).await.map_err(|e| failed(&e)) };
            let got = async {
                let frame = lanes.tensors.next().await.map_err(|e| failed(&e))?;
                frame.ok_or_else(|| failed(&"the connection is closed"))?.read(BYTES).await.map_err(|e| failed(&e))
            };
            tokio::try_join!(sent, got)
        };
        let [mut together, mut alone] = [const { Vec::new() }; 2];
        for _ in 0..2 * MESSAGES {
            let watch = Stopwatch::start(true);
            pass(&long).await?;
            together.push(watch.seconds());
        }
        for _ in 0..2 * MESSAGES {
            let watch = Stopwatch::start(true);
            for _ in 0..PACKETS {
                pass(&small).await?;
            }
            alone.push(watch.seconds() / PACKETS as f64);
        }
        tokio::join!(one.close(""), other.close(""));
        Ok([together, alone])
    })?;
    let per_byte = |mut took: Vec<f64>, bytes: f64| {
        let mut timed = took.split_off(MESSAGES);
        timed.sort_by(f64::total_cmp);
        timed[MESSAGES / 2] / 2.0 / bytes
    };
    let curve = |per_byte: f64| Curve::new(vec![(1.0, per_byte), (BYTES as f64, per_byte * BYTES as f64)]);
    Ok([curve(per_byte(together, BYTES as f64)), curve(per_byte(alone, PACKET_BYTES))])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_cost_in_proportion() {
        for curve in cost().unwrap() {
            let curve = curve.unwrap();
            let message = curve.at(BYTES as f64);
            assert!(message > 0.0);
            for part in [1.0, 64.0, 1e4, BYTES as f64, 1e9] {
                assert!((curve.at(part) / message / (part / BYTES as f64) - 1.0).abs() < 1e-9);
            }
        }
    }
}
