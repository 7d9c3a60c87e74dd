//! The cost of Programs: the steps of each peer, its messages, and the channels that the messages take.

use foldhash::{HashMap, HashMapExt};
use fusionllm_compress::Codec;
use fusionllm_graph::ValueId;
use fusionllm_program::{Address, PeerId, Program, ProgramError};

use super::SimulateOptions;
use super::messages::{Message, Messages, value_type};
use super::steps::{Step, Writer};
use crate::cost::congestion::window;
use crate::cost::{Cluster, CodecStep, Line, Link, message_bytes};
use crate::error::PlanError;

/// All messages from one peer to another. They keep their order.
#[derive(Debug, Clone)]
pub(super) struct Channel {
    pub(super) from: PeerId,
    pub(super) to: PeerId,
    pub(super) latency: f64,
    /// Latency there and back.
    pub(super) round_trip: f64,
    /// Indices of the lines that it takes.
    pub(super) lines: Vec<u32>,
    /// Those of them that another channel takes, too.
    pub(super) shared: Vec<u32>,
    /// Bytes/s of the slowest of its lines.
    pub(super) bandwidth: f64,
    /// The most bytes in flight.
    pub(super) window: f64,
}

pub(super) struct Load {
    /// The steps of each peer.
    pub(super) steps: Vec<Vec<Step>>,
    pub(super) messages: Vec<Message>,
    pub(super) channels: Vec<Channel>,
    /// The lines that channels take.
    pub(super) lines: Vec<(Line, Link)>,
    /// The broker's messages, in the order in which it sends them.
    pub(super) inputs: Vec<u32>,
    /// The peers that wait for the verdict: all that hold a stage.
    pub(super) voters: Vec<u32>,
    /// By peer: seconds that norms take to the broker.
    pub(super) to_broker: Vec<f64>,
    /// By peer: seconds that the verdict takes from the broker.
    pub(super) from_broker: Vec<f64>,
    pub(super) micro_batches: u32,
    /// In the order of the gradients in their Programs.
    pub(super) masks: Vec<Mask>,
}

/// The places of an activation that are kept until a gradient goes back.
pub(super) struct Mask {
    /// The activation's message.
    there: u32,
    /// The gradient's message.
    back: u32,
    bytes: u64,
}

impl Load {
    pub(super) fn new(programs: &[Program], cluster: &Cluster, options: &SimulateOptions) -> Result<Self, PlanError> {
        let mut routes = Routes::new(cluster);
        let messages = messages(programs, &mut routes)?;
        let control = |from, to, bytes| {
            let link = cluster.link(from, to).ok_or_else(|| no_link(cluster, from, to))?;
            Ok::<f64, PlanError>(link.seconds(message_bytes(bytes)))
        };
        let (mut to_broker, mut from_broker) = (Vec::new(), Vec::new());
        let mut steps = Vec::with_capacity(programs.len());
        for (p, device) in programs.iter().zip(cluster.devices()) {
            steps.push(Writer::new(p, device, options, &messages)?.steps()?);
            // Each norm is sent with its parameter's number.
            to_broker.push(control(p.peer, PeerId::BROKER, 10 * p.owned().count() as u64)?);
            from_broker.push(control(PeerId::BROKER, p.peer, 32)?);
        }
        let votes = |steps: &Vec<Step>| steps.iter().any(|s| matches!(s, Step::Clip));
        let voters = (0..).zip(&steps).filter(|(_, s)| votes(s)).map(|(p, _)| p).collect();
        let micro_batches = programs.first().map_or(1, |p| p.micro_batches);
        let masks = masks(programs, &messages)?;
        let messages = messages.all;
        let from_the_broker = |m: &u32| messages[*m as usize].from == PeerId::BROKER;
        let mut inputs: Vec<u32> = (0..messages.len() as u32).filter(from_the_broker).collect();
        // The broker sends inputs micro-batch by micro-batch.
        inputs.sort_by_key(|&m| {
            let Message { tensor, to, .. } = messages[m as usize];
            (tensor.micro_batch(), to, tensor.value())
        });
        let (channels, lines) = routes.finish();
        let mut load =
            Self { steps, messages, channels, lines, inputs, voters, to_broker, from_broker, micro_batches, masks };
        load.code(programs, cluster)?;
        Ok(load)
    }

    /// Sets what depends on the programs' codecs.
    pub(super) fn code(&mut self, programs: &[Program], cluster: &Cluster) -> Result<(), PlanError> {
        let mut known: Vec<Option<Coded>> = vec![None; self.messages.len()];
        for m in &mut self.messages {
            let known = &mut known[m.like as usize];
            let coded = match *known {
                Some(coded) => coded,
                None => *known.insert(coded(m, programs, cluster)?),
            };
            (m.payload, m.bytes) = (coded.payload, message_bytes(coded.payload));
            (m.encode, m.decode, m.lost) = (coded.encode, coded.decode, coded.lost);
            (m.sparse, m.mask, m.given_up) = (coded.sparse, 0, 0);
        }
        for &Mask { there, back, bytes } in &self.masks {
            let there = &mut self.messages[there as usize];
            // The first gradient in the program's order stands for all.
            if there.sparse && there.mask == 0 {
                there.mask = bytes;
                self.messages[back as usize].given_up += bytes;
            }
        }
        Ok(())
    }
}

/// All messages. Their sizes and codecs follow later.
fn messages(programs: &[Program], routes: &mut Routes<'_>) -> Result<Messages, PlanError> {
    let mut messages = Messages { all: Vec::new(), index: HashMap::new() };
    // The messages of all micro-batches are alike.
    let mut first: HashMap<(PeerId, PeerId, ValueId), u32> = HashMap::new();
    for p in programs {
        for (tensor, from) in p.receives() {
            let channel = routes.channel(from, p.peer)?;
            let id = messages.all.len() as u32;
            let like = match tensor.micro_batch() {
                Some(_) => *first.entry((from, p.peer, tensor.value())).or_insert(id),
                None => id,
            };
            messages.all.push(Message::new((from, p.peer), tensor, channel, like));
            messages.index.insert((p.peer, tensor), id);
        }
    }
    Ok(messages)
}

/// The masks that are kept if top-k sends the activations.
fn masks(programs: &[Program], messages: &Messages) -> Result<Vec<Mask>, PlanError> {
    let mut masks = Vec::new();
    for p in programs.iter().filter(|p| !p.masks.is_empty()) {
        for (gradient, to) in p.sends() {
            let Some((of, micro_batch)) = p.masks.get(&(gradient.value(), to)).zip(gradient.micro_batch()) else {
                continue;
            };
            for value in of {
                let activation = Address::Value { value: *value, micro_batch };
                let ends = [(p.peer, activation), (to, gradient)].map(|(to, tensor)| messages.find(to, tensor));
                if let [Some((there, _)), Some((back, _))] = ends {
                    let bytes = value_type(p, *value)?.numel().div_ceil(64) as u64 * 8;
                    masks.push(Mask { there, back, bytes });
                }
            }
        }
    }
    Ok(masks)
}

/// The part of a message that follows from its codec.
#[derive(Debug, Clone, Copy)]
struct Coded {
    payload: u64,
    sparse: bool,
    encode: f64,
    decode: f64,
    lost: [f64; 2],
}

/// The size of a message, and the seconds of both ends for it.
fn coded(m: &Message, programs: &[Program], cluster: &Cluster) -> Result<Coded, PlanError> {
    let at = |peer: PeerId| programs.get(peer.0 as usize);
    let receiver = at(m.to).ok_or_else(|| ProgramError(format!("there is no {}", m.to)))?;
    let ty = value_type(receiver, m.tensor.value())?;
    // The sender's codec decides; the broker has none.
    let sender = at(m.from);
    let payload = sender.and_then(|s| s.payload(m.tensor, receiver)).unwrap_or(ty.bytes()) as u64;
    let codec = sender.map_or(Codec::None, |s| s.codec(m.tensor, m.to));
    let device = |end: PeerId| cluster.devices().get(end.0 as usize);
    let takes = |end, step| match (codec, device(end)) {
        (Codec::None, _) | (_, None) => 0.0,
        (codec, Some(device)) => device.codec_seconds(step, &codec, ty.numel()),
    };
    let bytes = message_bytes(payload);
    let rate = cluster.link(m.from, m.to).map_or(f64::INFINITY, |link| link.bandwidth);
    let lost = [m.from, m.to].map(|end| device(end).map_or(0.0, |device| device.traffic_seconds(bytes, rate)));
    let sparse = matches!(codec, Codec::TopK(_));
    Ok(Coded {
        payload,
        sparse,
        encode: takes(m.from, CodecStep::Encode),
        decode: takes(m.to, CodecStep::Decode),
        lost,
    })
}

fn no_link(cluster: &Cluster, from: PeerId, to: PeerId) -> PlanError {
    PlanError::Cluster(format!("no link leads from {} to {}", cluster.name(from), cluster.name(to)))
}

/// Numbers channels and lines as messages need them.
struct Routes<'a> {
    cluster: &'a Cluster,
    channels: Vec<Channel>,
    known: HashMap<(PeerId, PeerId), u32>,
    lines: Vec<(Line, Link)>,
    numbers: HashMap<Line, u32>,
}

impl<'a> Routes<'a> {
    fn new(cluster: &'a Cluster) -> Self {
        Self { cluster, channels: Vec::new(), known: HashMap::new(), lines: Vec::new(), numbers: HashMap::new() }
    }

    fn channel(&mut self, from: PeerId, to: PeerId) -> Result<u32, PlanError> {
        if let Some(&id) = self.known.get(&(from, to)) {
            return Ok(id);
        }
        let route = self.cluster.route(from, to).ok_or_else(|| no_link(self.cluster, from, to))?;
        let mut lines = Vec::new();
        for (line, link) in route.lines() {
            let number = *self.numbers.entry(line).or_insert(self.lines.len() as u32);
            if number as usize == self.lines.len() {
                self.lines.push((line, link));
            }
            lines.push(number);
        }
        let id = self.channels.len() as u32;
        let latency = route.link().latency;
        // Without a link back there is no connection. Another check reports that.
        let round_trip = latency + self.cluster.link(to, from).map_or(latency, |back| back.latency);
        let window = window(route.link().bandwidth, round_trip);
        let (shared, bandwidth) = (Vec::new(), f64::INFINITY);
        self.channels.push(Channel { from, to, latency, round_trip, lines, shared, bandwidth, window });
        self.known.insert((from, to), id);
        Ok(id)
    }

    /// The channels and lines, once all channels are known.
    fn finish(mut self) -> (Vec<Channel>, Vec<(Line, Link)>) {
        let mut users = vec![0u32; self.lines.len()];
        self.channels.iter().flat_map(|c| &c.lines).for_each(|l| users[*l as usize] += 1);
        for channel in &mut self.channels {
            let bandwidths = channel.lines.iter().map(|l| self.lines[*l as usize].1.bandwidth);
            channel.bandwidth = bandwidths.fold(f64::INFINITY, f64::min);
            channel.shared = channel.lines.iter().copied().filter(|l| users[*l as usize] > 1).collect();
        }
        (self.channels, self.lines)
    }
}

#[cfg(test)]
mod tests {
    use fusionllm_graph::ops::AdamwStep;
    use fusionllm_graph::{DType, autodiff};
    use fusionllm_models::{Gpt2Config, ResNetConfig};
    use fusionllm_program::Optimizer;

    use super::super::stretches::Stretches;
    use super::*;
    use crate::compile::compile;
    use crate::cost::{Device, Rates, Site};
    use crate::plan::Plan;
    use crate::schedule::Schedule;

    /// Two peers share the second of three stages, the first one has the last stage too, and a buffer changes.
    #[test]
    fn a_stretch_that_repeats_another_has_the_same_steps() {
        let adamw = Optimizer::Adamw(AdamwStep { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 });
        let gpt2 = Gpt2Config { n_layer: 4, n_embd: 32, n_head: 2, vocab_size: 65, ..Gpt2Config::default() };
        let resnet = ResNetConfig::default();
        let rates = Rates { matmul: 1e12, convolution: 1e12, memory: 1e11, overhead: 1e-6 };
        let link = Link { latency: 1e-3, bandwidth: 1e8 };
        let site = Site { name: "hall".into(), inside: Some(link), uplink: None, downlink: None };
        let device = |name: &str| Device { site: Some(0), ..Device::new(name, rates, 1 << 30) };
        let devices = ["a", "b", "c"].map(device).to_vec();
        let cluster = Cluster::new(devices, vec![site], Vec::new(), None).unwrap();
        for graph in [gpt2.build(2, 16, DType::F32).unwrap(), resnet.build(2, 32, DType::F32).unwrap()] {
            let train = autodiff::differentiate(&graph, graph.outputs["loss"]).unwrap();
            let nodes = graph.nodes.len();
            let stage_of: Vec<u32> = (0..nodes).map(|n| (3 * n / nodes) as u32).collect();
            for schedule in Schedule::ALL {
                let names = ["a", "b", "c"].map(String::from).to_vec();
                let mut plan = Plan::from_stages(&graph, &stage_of, &[0, 1, 0], names, 9, schedule, "test");
                plan.stages[1].peers = vec![1, 2];
                let programs = compile(&plan, &graph, &train).unwrap();
                let messages = messages(&programs, &mut Routes::new(&cluster)).unwrap();
                for (program, device) in programs.iter().zip(cluster.devices()) {
                    let writer = || Writer::new(program, device, &SimulateOptions::new(adamw), &messages).unwrap();
                    let each = writer().steps_of(Stretches::new(program).never_repeated()).unwrap();
                    assert!(writer().steps().unwrap() == each, "{schedule:?}, {}", program.peer);
                }
            }
        }
    }
}
