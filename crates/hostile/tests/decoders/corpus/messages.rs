use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use fusionllm_compress::{Bits, Codec, Element, Encoder, IntBlocks, TopK, ValueFormat};
use fusionllm_graph::{DType, TensorType, ValueId};
use fusionllm_hostile::short_run;
use fusionllm_plan::{Activity, Curve, Disk, Link, Measured, OperatorCurves, Rates};
use fusionllm_program::{Address, Cause, LearningRate, PassKind, PeerId, Poison, TensorKey, Verdict};
use fusionllm_protocol::{
    Admission, Answer, Arrival, BulkHeader, CodecError, CodecSpectrum, ComputeCommand, ComputesOn, Contact,
    ExpectedPeers, Farewell, FromPeer, Heartbeat, Hello, Invitation, MachineProfile, MemberId, PassReport, PassSpan,
    PeerHello, Probe, Question, ReceivedBytes, ReceivedMessage, Request, Roster, Run, RunOptions, RunSettings,
    SentBytes, TensorHeader, TicketRole, ToPeer, VERSION, encode,
};
use fusionllm_transport::{PeerAddr, SecretKey};

fn all<T: serde::Serialize>(messages: impl IntoIterator<Item = T>) -> Vec<Vec<u8>> {
    messages.into_iter().map(|m| encode(&m).unwrap()).collect()
}

fn addr() -> PeerAddr {
    let key = SecretKey::from_bytes([7; 32]).public();
    let addrs = vec!["192.0.2.1:4433".parse().unwrap(), "[2001:db8::1]:9".parse().unwrap()];
    PeerAddr { relay: Some("http://192.0.2.1:3340/?token=abc".parse().unwrap()), ..PeerAddr::new(key, addrs) }
}

pub(super) fn address() -> Vec<Vec<u8>> {
    all([addr()])
}

fn hello() -> Hello {
    let addr = encode(&addr()).unwrap();
    let (backend, device) = ("cpu".into(), "CPU".into());
    let processor = Some(ComputesOn { id: [5; 16], cores: 8, busy: 1.0, profiled: false });
    Hello {
        version: VERSION,
        secret: [7; 16],
        process: 3,
        name: "a".into(),
        backend,
        device,
        slow_bf16: true,
        addr,
        processor,
    }
}

fn machine() -> MachineProfile {
    let curve = || Curve::new(vec![(1e3, 1e-6), (1e6, 1e-3)]).unwrap();
    let operators =
        Measured::from(BTreeMap::from([("mm".into(), curve()), ("add".into(), curve()), ("upload".into(), curve())]));
    let rates = Rates { matmul: 1e9, convolution: 1e9, memory: 1e9, overhead: 1e-6 };
    let scratch = OperatorCurves::default();
    MachineProfile { rates, memory: 1 << 30, slowdown: 1.0, operators, scratch, disk: Disk::default(), host_link: None }
}

pub(super) fn from_peer() -> Vec<Vec<u8>> {
    let report = PassReport {
        sent: vec![SentBytes { to: PeerId(1), bytes: 5 }],
        errors: vec![CodecError { to: PeerId(1), relative_error: 0.5 }],
        spectra: vec![CodecSpectrum { to: PeerId(1), exact: 3.5, decoded: 4.0 }],
        received: vec![ReceivedBytes { from: PeerId(2), bytes: 70_000, seconds: 0.25 }],
        spans: vec![PassSpan { activity: Activity::Wait, micro_batch: Some(1), start_us: 4, end_us: 900 }],
        arrivals: vec![ReceivedMessage { from: PeerId(2), bytes: 70_000, start_us: 0, end_us: 400 }],
        poison: Some(Poison { cause: Cause::Arose, tensor: Address::Held { value: ValueId(3) }, from: None }),
        ..PassReport::default()
    };
    let link = Link { latency: 0.01, bandwidth: 1e6 };
    let ask = |question| FromPeer::Ask(Request { version: VERSION, secret: [9; 16], question });
    all([
        FromPeer::Hello(hello()),
        FromPeer::Machine(Box::new(machine())),
        FromPeer::Links { with: MemberId(2), links: Some((link, link)), relayed: true },
        FromPeer::Ready { generation: 2 },
        FromPeer::Report { pass: 1, report: 0, micro_batch: 2, value: f64::INFINITY },
        FromPeer::Norms { pass: u64::MAX, squared_norms: vec![(ValueId(4), 0.25), (ValueId(9), 1.5)] },
        FromPeer::PassDone { pass: 2, report },
        FromPeer::Heartbeat(Heartbeat {
            generation: 2,
            progress: 70,
            waits_for: Some(MemberId(1)),
            disk_free: Some(9),
        }),
        FromPeer::Mirrored { step: 4, of: MemberId(0) },
        FromPeer::Kept { step: 4 },
        FromPeer::LinkLost { generation: 1, member: MemberId(3), reason: "gone".into() },
        FromPeer::Failed { generation: 1, reason: "no memory".into() },
        FromPeer::Leaving,
        FromPeer::Visit { version: VERSION, secret: [7; 16] },
        ask(Question::Status),
        ask(Question::Kick { name: "a".into() }),
        ask(Question::Revoke { secret: Some([1; 16]) }),
        ask(Question::Invite { seconds: Some(60), uses: Some(3) }),
        ask(Question::Page),
    ])
}

pub(super) fn to_peer() -> Vec<Vec<u8>> {
    let contact = Contact { member: MemberId(1), name: "b".into(), addr: encode(&addr()).unwrap() };
    let top = Codec::TopK(TopK { ratio: 10.0, values: Some(ValueFormat::Bf16) });
    all([
        ToPeer::Refused { reason: "full".into() },
        ToPeer::Contacts(vec![contact.clone(), contact]),
        ToPeer::Measure { programs: Vec::new() },
        ToPeer::Probe { with: MemberId::BROKER, patience_s: 0.3 },
        ToPeer::Regroup { generation: 2 },
        ToPeer::Compute(ComputeCommand::Run { pass: 4, version: 2, kind: PassKind::Train, step: 3, inspect: true }),
        ToPeer::Verdict { pass: 4, verdict: Verdict { apply: true, update: 3, lr: 1e-3, factor: 0.5 } },
        ToPeer::Compute(ComputeCommand::SetCodecs {
            version: 3,
            codecs: BTreeMap::from([(PeerId(1), Codec::Bf16), (PeerId(2), top)]),
        }),
        ToPeer::Compute(ComputeCommand::Snapshot { step: 9, save: true }),
        ToPeer::Mirror { step: 9, of: MemberId(2), bytes_per_s: Some(1e6) },
        ToPeer::Release { before: 9 },
        ToPeer::Stop(Farewell::Failed { reason: "no".into() }),
        ToPeer::Welcome { seen_as: Some(([192, 0, 2, 1], 4433).into()), clock_s: 1.8e9 },
    ])
}

pub(super) fn peer_hello() -> Vec<Vec<u8>> {
    let tensors = vec![TensorKey::slot("w", "exp_avg"), TensorKey::value("b")];
    all([
        PeerHello::Exchange { generation: 4 },
        PeerHello::Fetch { step: 9, tensors, bytes_per_s: Some(1e6) },
        PeerHello::Probe,
        PeerHello::Restarted,
    ])
}

pub(super) fn bulk_header() -> Vec<Vec<u8>> {
    all([
        BulkHeader::Assign,
        BulkHeader::Load { generation: 2, key: TensorKey::slot("w", "exp_avg"), dtype: DType::BF16 },
        BulkHeader::Copy,
        BulkHeader::NoCopy,
        BulkHeader::Saved { step: 3, key: TensorKey::value("w"), ty: TensorType::new(DType::BF16, [3, 4]), start: 2 },
        BulkHeader::SavedAll { step: 3 },
    ])
}

pub(super) fn tensor_header() -> Vec<Vec<u8>> {
    let value = ValueId(5);
    let tensors = [
        Address::Value { value, micro_batch: 300 },
        Address::Part { parameter: value, part: 1 },
        Address::Gradient { parameter: value },
        Address::Held { value },
        Address::OptimizerState { parameter: value, slot: 1 },
        Address::BufferAfter { buffer: value, micro_batch: 1 },
    ];
    all(tensors.map(|tensor| TensorHeader { pass: 3, kind: PassKind::Eval, tensor, coded: true }))
}

pub(super) fn probe() -> Vec<Vec<u8>> {
    all([Probe::Echo, Probe::Load, Probe::Elapsed(0.25), Probe::Request(1 << 20)])
}

pub(super) fn answer() -> Vec<Vec<u8>> {
    let status = Answer::Status(Box::new(run().status(3.0)));
    let page = Answer::Page { parts: vec![("now".into(), "<p>a</p>".into())], is_last: false };
    all([Answer::Refused { reason: "no".into() }, Answer::Done { what: "a is out".into() }, status, page])
}

/// A run with two members, one of which has left.
fn run() -> Run {
    let settings = RunSettings {
        checkpoint: Some(2),
        learning_rate: LearningRate { base: 1.0, warmup: 3, cosine_until: Some(9), min: 0.1 },
        clip: Some(1.0),
        window: 3,
        ..short_run()
    };
    let mut admission = Admission::new(Some(BTreeSet::from([[1; 32], [2; 32]])));
    let ticket = Invitation { expires: Some(1 << 40), uses: Some(5), ..Invitation::new(TicketRole::Peer, [7; 16]) };
    admission.invite(ticket).unwrap();
    let roster = Roster::new(ExpectedPeers::Any(3), admission);
    let mut run = Run::new(RunOptions { settings, measured: true, programs: Arc::default(), copies: true }, roster);
    for (identity, name) in [([1; 32], "a"), ([2; 32], "b")] {
        let arrival = Arrival { identity, from: None, unix_s: 0 };
        run.join(arrival, Hello { name: name.into(), ..hello() }, 1.0).unwrap();
    }
    run.gone(MemberId(1), "gone", 2.0);
    run
}

pub(super) fn run_state() -> Vec<u8> {
    encode(&run().state()).unwrap()
}

/// The file `state`: the protocol's version, the time, the subject, the number of peers, the first loss, no incidents,
/// and the run.
pub(super) fn broker_state() -> Vec<u8> {
    let left = (1.8e9, ("graph", "data", 7u64, None::<String>), 3usize, Some(4.5), Vec::<u8>::new(), run().state());
    [&VERSION.to_le_bytes()[..], &encode(&left).unwrap()].concat()
}

/// Two machines and the links between them and to the broker, in the order of the fields of `Atlas`.
pub(super) fn atlas() -> Vec<u8> {
    let link = Link { latency: 0.01, bandwidth: 1e6 };
    let (a, b, broker) = (MemberId(0), MemberId(1), MemberId::BROKER);
    let machines = BTreeMap::from([(a, machine()), (b, machine())]);
    let links = BTreeMap::from([((a, b), Some((link, link))), ((a, broker), None)]);
    let lines = BTreeMap::from([(a, IpAddr::from([192, 0, 2, 1]))]);
    let seats = BTreeMap::from([(a, (hello().processor.unwrap(), "cpu"))]);
    let (slower, relayed) = (BTreeMap::from([(a, 2.0)]), BTreeSet::from([(a, b)]));
    let (alone, crowds) = (BTreeSet::from([a]), BTreeMap::from([(a, (1.25, 2.0))]));
    encode(&(machines, links, slower, relayed, lines, seats, alone, crowds)).unwrap()
}

pub(super) fn codec() -> Vec<Vec<u8>> {
    let int = |bits, rotate| Codec::Int(IntBlocks { bits, rotate, stochastic: true });
    let top = |values| Codec::TopK(TopK { ratio: 8.0, values });
    let codecs = [
        Codec::None,
        Codec::Bf16,
        Codec::Nvfp4,
        int(Bits::Four, true),
        int(Bits::Eight, false),
        int(Bits::Eight, true),
        int(Bits::Five, false),
        top(Some(ValueFormat::F32)),
        top(Some(ValueFormat::Bf16)),
        top(Some(ValueFormat::Int(Bits::Three))),
        top(None),
    ];
    let mut samples = Vec::new();
    for n in [0usize, 1, 33, 64, 100, 1000] {
        let values: Vec<f32> = (0..n).map(|i| ((i * 37 % 101) as f32 - 50.0) / 7.0).collect();
        for (codec, element) in codecs.iter().flat_map(|codec| [(codec, Element::F32), (codec, Element::Bf16)]) {
            let mut bytes = Vec::new();
            Encoder::new().encode(codec, &values, element, 3, &mut bytes).unwrap();
            samples.push(bytes);
        }
    }
    samples
}
