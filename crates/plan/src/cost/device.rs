use fusionllm_compress::Codec;
use fusionllm_graph::Cost;
use fusionllm_graph::ops::OpClass;
use fusionllm_program::Medium;
use serde::{Deserialize, Serialize};

use super::card::Card;
use super::curve::Curve;
use super::disk::Disk;
use super::measured::{CodecStep, CopyDirection, Measured, OperatorCurves};
use super::operators::work_units;
use super::processor::Processor;

/// Bytes/s of a tensor that a codec encodes where it was not measured: what `profile` found for top-k on a server's core.
const ENCODE_RATE: f64 = 1.75e9;

/// [`ENCODE_RATE`] of decoding.
const DECODE_RATE: f64 = 2.25e9;

/// A machine that runs a peer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Device {
    /// The name of the device's peer.
    pub name: String,
    /// Index of its site.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub site: Option<u32>,
    /// The name of the machine that it is part of. Devices of one host share its network card, and messages between
    /// them need no link. `None` if it is the only one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The processor that it computes on, if others may compute there, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processor: Option<Processor>,
    /// Its host's network card. What is not known is by default as [`Cluster::card`] says.
    ///
    /// [`Cluster::card`]: crate::Cluster::card
    #[serde(default, skip_serializing_if = "Card::is_unknown")]
    pub network: Card,
    /// The device's speed before [`Self::slowdown`].
    pub rates: Rates,
    /// Bytes of memory for all that its peer holds, such as parameters and activations.
    pub memory: u64,
    /// Operators take this many times as long as measured; at least 1.
    pub slowdown: f64,
    /// Measured times before [`Self::slowdown`]. [`Self::rates`] gives the time of everything else.
    #[serde(rename = "operators", default, skip_serializing_if = "Measured::is_empty")]
    pub measured: Measured,
    /// Measured bytes that operators hold beside their operands and results, by the bytes of these. Operators without
    /// a curve hold none.
    #[serde(default, skip_serializing_if = "OperatorCurves::is_empty")]
    pub scratch: OperatorCurves,
    /// The backend of its peer; `None` for the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend: Option<String>,
    /// Its disk.
    #[serde(default, deserialize_with = "super::disk::in_plan_file", skip_serializing_if = "Disk::is_unknown")]
    pub disk: Disk,
    /// Bytes/s between the device's memory and its host's, if the device has memory of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_link: Option<f64>,
}

/// Bytes/s between a device's memory and its host's where copies were not measured: about PCI Express 3.0 with 16
/// lanes.
pub const HOST_LINK_RATE: f64 = 1.2e10;

/// The rates that a device attains, as opposed to its peak.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// FLOP/s in matrix products.
    pub matmul: f64,
    /// FLOP/s in convolutions.
    pub convolution: f64,
    /// Bytes/s that memory-bound operators read and write.
    pub memory: f64,
    /// The least time of an operator, in seconds.
    pub overhead: f64,
}

impl Device {
    /// A device outside any site, without slowdown and with the default backend.
    pub fn new(name: impl Into<String>, rates: Rates, memory: u64) -> Self {
        Self {
            name: name.into(),
            site: None,
            host: None,
            processor: None,
            network: Card::default(),
            rates,
            memory,
            slowdown: 1.0,
            measured: Measured::default(),
            scratch: OperatorCurves::default(),
            backend: None,
            disk: Disk::UNKNOWN,
            host_link: None,
        }
    }

    /// Seconds of an operator: as measured for its [`signature`](crate::signature), else as [`Self::seconds`].
    pub fn seconds_of(&self, signature: &str, name: &str, cost: &Cost) -> f64 {
        match self.measured.operators.by_signature.get(signature) {
            Some(curve) => self.measured_seconds(curve, cost),
            None => self.seconds(name, cost),
        }
    }

    /// Seconds of an operator, as measured for its name. Without a measurement, they follow from the roofline
    /// (Williams, Waterman and Patterson, 2009): the overhead, plus the longer of computing and of moving its operands.
    /// Both are multiplied by the slowdown.
    pub fn seconds(&self, name: &str, cost: &Cost) -> f64 {
        match self.measured.operators.by_name.get(name) {
            Some(curve) => self.measured_seconds(curve, cost),
            None => {
                let flops = match cost.class {
                    OpClass::Convolution => self.rates.convolution,
                    _ => self.rates.matmul,
                };
                self.slowdown * (self.rates.overhead + (cost.flops / flops).max(cost.bytes / self.rates.memory))
            }
        }
    }

    fn measured_seconds(&self, curve: &Curve, cost: &Cost) -> f64 {
        self.slowdown * curve.at(work_units(cost))
    }

    /// Seconds of computing that are lost to sending or receiving `bytes` on the same processor over a path of `rate`
    /// bytes/s, whatever the slowdown. Zero if not measured. All cores are assumed to compute.
    ///
    /// Where devices share a processor, the network wakes up for each packet, and no core is idle for it. The faster the
    /// path, the more packets it finds each time. So a packet never costs more than the time that it takes on the path.
    pub(crate) fn traffic_seconds(&self, bytes: f64, rate: f64) -> f64 {
        let at = |curve: &Option<Curve>| curve.as_ref().map_or(0.0, |curve| curve.at(bytes));
        let together = at(&self.measured.traffic);
        match &self.processor {
            Some(processor) => together.max(at(&self.measured.packets).min(bytes / rate / processor.busy)),
            None => together,
        }
    }

    /// Seconds of the codec thread for `elements` elements, whatever the slowdown: as measured for that codec, else at
    /// [`ENCODE_RATE`] or [`DECODE_RATE`]. Codecs compute with f32, whatever the tensor's own numbers are.
    pub(crate) fn codec_seconds(&self, step: CodecStep, codec: &Codec, elements: usize) -> f64 {
        let bytes = 4.0 * elements as f64;
        let usual = match step {
            CodecStep::Encode => ENCODE_RATE,
            CodecStep::Decode => DECODE_RATE,
        };
        self.measured.codecs(step).get(codec.name()).map_or(bytes / usual, |curve| curve.at(bytes))
    }

    /// Seconds of the computing thread for a copy between the device and the network's buffers. If not measured, it
    /// is the time to read and write the bytes.
    pub(crate) fn copy_seconds(&self, direction: CopyDirection, bytes: f64) -> f64 {
        let read_and_write = 2.0 * bytes / self.rates.memory;
        self.slowdown * self.measured.copies(direction).map_or(read_and_write, |curve| curve.at(bytes))
    }

    /// Bytes/s to the medium that the device offloads to: its host's memory if it has memory of its own, else the disk.
    pub(crate) fn offload_rate(&self) -> f64 {
        self.host_link.unwrap_or(self.disk.to_and_fro())
    }

    /// Seconds of the computing thread to move `bytes` between the device's memory and a medium.
    pub(crate) fn move_seconds(&self, direction: CopyDirection, medium: Medium, bytes: f64) -> f64 {
        match (medium, self.host_link) {
            (Medium::Host, Some(rate)) if self.measured.copies(direction).is_none() => bytes / rate,
            (Medium::Host, _) => self.copy_seconds(direction, bytes),
            (Medium::Disk, _) => self.copy_seconds(direction, bytes) + bytes / self.disk.rate(direction),
        }
    }

    /// Bytes that an operator holds beside its operands and results. The curve is found by signature if the operator's
    /// time was measured by signature, else by name.
    pub(crate) fn scratch_bytes(&self, signature: &str, name: &str, cost: &Cost) -> u64 {
        let curve = match self.measured.operators.by_signature.contains_key(signature) {
            true => self.scratch.by_signature.get(signature),
            false => self.scratch.by_name.get(name),
        };
        curve.map_or(0, |curve| curve.at(cost.bytes) as u64)
    }

    /// Whether operators were measured by signature.
    pub(crate) fn knows_signatures(&self) -> bool {
        !self.measured.operators.by_signature.is_empty()
    }

    /// Makes the device compute `times` as fast.
    pub(crate) fn speed_up(&mut self, times: f64) {
        let rates = &mut self.rates;
        for rate in [&mut rates.matmul, &mut rates.convolution, &mut rates.memory] {
            *rate *= times;
        }
        rates.overhead /= times;
        self.measured.curves_mut().for_each(|curve| *curve = curve.faster(times));
    }
}

/// Devices with equal computing times, as classes: the class of each device, and one device of each class.
pub(crate) fn classes(devices: &[Device]) -> (Vec<u32>, Vec<&Device>) {
    let mut classes: Vec<&Device> = Vec::new();
    let alike = |d: &Device, k: &Device| (d.rates, d.slowdown) == (k.rates, k.slowdown) && d.measured == k.measured;
    let of = devices.iter().map(|d| {
        let at = classes.iter().position(|k| alike(d, k)).unwrap_or_else(|| {
            classes.push(d);
            classes.len() - 1
        });
        at as u32
    });
    (of.collect(), classes)
}

#[cfg(test)]
mod tests {
    use fusionllm_graph::ops::Matmul;
    use fusionllm_graph::{DType, Op, TensorType};

    use super::*;
    use crate::cost::signature;

    const RATES: Rates = Rates { matmul: 100.0, convolution: 50.0, memory: 10.0, overhead: 1.0 };

    #[test]
    fn an_operator_takes_the_longer_of_computing_and_moving() {
        let mut device = Device { slowdown: 2.0, ..Device::new("a", RATES, 1) };
        let cost = |class, flops, bytes| Cost { class, flops, bytes };
        assert_eq!(device.seconds("mm", &cost(OpClass::Matmul, 400.0, 10.0)), 2.0 * (1.0 + 4.0));
        assert_eq!(device.seconds("mm", &cost(OpClass::Matmul, 400.0, 80.0)), 2.0 * (1.0 + 8.0));
        assert_eq!(device.seconds("conv", &cost(OpClass::Convolution, 400.0, 10.0)), 2.0 * (1.0 + 8.0));
        let curve = Curve::new(vec![(400.0, 7.0)]).unwrap();
        device.measured.operators.by_name.insert("mm".into(), curve);
        assert_eq!(device.seconds("mm", &cost(OpClass::Matmul, 400.0, 80.0)), 14.0);
    }

    #[test]
    fn a_signature_has_the_types_and_names_the_views() {
        let of = |shape: &[usize]| TensorType::new(DType::F32, shape.to_vec());
        let (a, b, c) = (of(&[8, 4]), of(&[4, 2]), of(&[8, 2]));
        let op = Op::from(Matmul);
        let view = |i: usize| (i == 1).then_some("permute");
        let plain = signature(&op, &[&a, &b], &[&c], |_| None);
        let transposed = signature(&op, &[&a, &b], &[&c], view);
        assert_eq!(transposed, "matmul f32[8, 4] f32[4, 2]<permute -> f32[8, 2]");

        let mut device = Device { slowdown: 2.0, ..Device::new("a", RATES, 1) };
        let cost = op.cost(&[&a, &b], &[&c]);
        let curve = |seconds| Curve::new(vec![(cost.flops, seconds)]).unwrap();
        device.measured.operators.by_name.insert("matmul".into(), curve(7.0));
        device.measured.operators.by_signature.insert(transposed.clone(), curve(3.0));
        let scratch = Curve::new(vec![(cost.bytes, 64.0)]).unwrap();
        device.scratch.by_name.insert("matmul".into(), scratch);
        assert_eq!([&transposed, &plain].map(|k| device.seconds_of(k, "matmul", &cost)), [6.0, 14.0]);
        let scratch = [&transposed, &plain].map(|k| device.scratch_bytes(k, "matmul", &cost));
        assert_eq!(scratch, [0, 64], "an operator measured by signature has the scratch measured by signature");
        assert!(device.knows_signatures());
    }

    #[test]
    fn packets_cost_more_where_devices_share_a_processor() {
        let curve = |per_byte: f64| Curve::new(vec![(1.0, per_byte), (1e6, per_byte * 1e6)]);
        let measured = Measured { traffic: curve(1e-9), packets: curve(7e-9), ..Measured::default() };
        let alone = Device { measured, ..Device::new("alone", RATES, 1) };
        let processor = Processor { name: "pc".into(), cores: 2.0, busy: 1.0, crowded: 1.0, crowd: 2.0 };
        let shares = Device { processor: Some(processor), ..alone.clone() };
        let seconds = |device: &Device, rate| (device.traffic_seconds(1e6, rate) * 1e6).round() / 1e6;
        assert_eq!([1e6, 1e10].map(|rate| seconds(&alone, rate)), [1e-3; 2]);
        assert_eq!(seconds(&shares, 1e6), 7e-3, "each packet wakes the network");
        assert_eq!(seconds(&shares, 2.5e8), 4e-3, "as long as the path takes");
        assert_eq!(seconds(&shares, 1e10), 1e-3, "many packets are found at once");
        assert_eq!(seconds(&Device { measured: Measured::default(), ..shares }, 1e6), 0.0);
    }
}
