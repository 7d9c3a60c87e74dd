//! Peers over real connections, with a broker that says what each test needs.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use fusionllm_graph::ops::AdamwStep;
use fusionllm_graph::{Builder, DType, HostTensor, Init, autodiff};
use fusionllm_plan::{Plan, Schedule, compile, compile_forward};
use fusionllm_program::{Address, Optimizer, PassKind, PeerId, Program, TensorKey, Verdict};
use fusionllm_protocol::{
    Assignment, BulkHeader, ComputeCommand, Contact, Farewell, FromPeer, Hello, MemberId, Source, TensorHeader, ToPeer,
    encode,
};
use fusionllm_transport::{Connection, Endpoint, EndpointOptions, Lane, Lanes, Secret, Ticket};
use tokio::task::JoinHandle;

use super::{JoinOptions, PartEnd, Participation, join};
use crate::{NodeError, net};

const OPTIMIZER: Optimizer = Optimizer::Adamw(AdamwStep { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 });

const OVER: Farewell = Farewell::Over { step: 2, steps: 2 };

/// The participation of a peer that had a share until the end of that run.
const TOOK_PART: Participation = Participation { took_part: true, end: PartEnd::Over { step: 2, steps: 2 } };

/// Nothing here takes longer, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Two layers on two peers.
fn programs() -> Vec<(Program, Program)> {
    let mut b = Builder::new("layers");
    let x = b.input("x", DType::F32, [2, 4]).unwrap();
    let labels = b.input("labels", DType::I64, [2]).unwrap();
    let mut y = x;
    for name in ["w0", "w1"] {
        let w = b.parameter(name, DType::F32, [4, 4], Init::Normal { std: 0.5 }).unwrap();
        y = b.linear(y, w, None).unwrap();
    }
    let loss = b.cross_entropy(y, labels, -100).unwrap();
    b.output("loss", loss).unwrap();
    let graph = b.finish().unwrap();
    let mut stages = vec![1; graph.nodes.len()];
    stages[0] = 0;
    let names = vec!["left".to_owned(), "right".to_owned()];
    let plan = Plan::from_stages(&graph, &stages, &[0, 1], names, 1, Schedule::OneFOneB, "test");
    let train = compile(&plan, &graph, &autodiff::differentiate(&graph, loss).unwrap()).unwrap();
    let eval = compile_forward(&plan, &graph, &graph.evaluation().unwrap(), &["loss"]).unwrap();
    train.into_iter().zip(eval).collect()
}

/// A peer as its broker sees it.
struct Member {
    id: MemberId,
    hello: Hello,
    connection: Connection,
    lanes: Lanes,
}

impl Member {
    async fn say(&self, message: ToPeer) {
        net::send_control(&self.connection, &message).await.unwrap();
    }

    /// The next message that is no heartbeat.
    async fn hear(&mut self) -> FromPeer {
        let next = async {
            loop {
                match net::next_control(&mut self.lanes.control).await.unwrap().expect("the peer left") {
                    FromPeer::Heartbeat(_) => {}
                    message => return message,
                }
            }
        };
        tokio::time::timeout(PATIENCE, next).await.expect("no message")
    }

    async fn assign(&self, assignment: &Assignment) {
        assignment.validate().unwrap();
        let bytes = encode(assignment).unwrap();
        net::send_bulk(&self.connection, &BulkHeader::Assign, vec![bytes.into()]).await.unwrap();
    }

    fn contact(&self) -> Contact {
        Contact { member: self.id, name: self.hello.name.clone(), addr: self.hello.addr.clone() }
    }
}

struct TestBroker {
    endpoint: Endpoint,
    ticket: Ticket,
}

impl TestBroker {
    async fn new() -> Self {
        let local = EndpointOptions { listen: Some(([127, 0, 0, 1], 0).into()), ..EndpointOptions::new() };
        let endpoint = Endpoint::bind(local).await.unwrap();
        let ticket = Ticket::new(endpoint.addr(), Secret::from_bytes([7; 16]));
        Self { endpoint, ticket }
    }

    fn join(&self, name: &str) -> JoinHandle<Result<Participation, NodeError>> {
        let backend = fusionllm_backend::open("cpu").unwrap();
        let options = JoinOptions::new(self.ticket.clone(), backend);
        tokio::spawn(join(JoinOptions { name: name.into(), memory: Some(1 << 20), ..options }))
    }

    /// The next joiner, as this member.
    async fn welcome(&self, id: u32) -> Member {
        let accepted = tokio::time::timeout(PATIENCE, self.endpoint.accept()).await.expect("nobody came");
        let (connection, mut lanes) = accepted.unwrap();
        match net::next_control(&mut lanes.control).await.unwrap() {
            Some(FromPeer::Hello(hello)) => Member { id: MemberId(id), hello, connection, lanes },
            other => panic!("{other:?}"),
        }
    }
}

/// The assignment of `place`, with `source` for every tensor. Both peers keep copies of each other's share.
fn assignment(
    generation: u32,
    place: usize,
    members: [&Member; 2],
    donor: &Member,
    start: (u64, u64),
    source: impl Fn(&TensorKey) -> Source,
) -> Assignment {
    let programs = programs();
    let base = |place: usize| {
        let (train, eval) = programs[place].clone();
        Assignment {
            generation,
            peers: members.iter().map(|m| m.contact()).collect(),
            donors: vec![donor.contact()],
            seed: 7,
            start: start.0,
            passes_before: start.1,
            ..Assignment::new(train, eval, OPTIMIZER)
        }
    };
    let mut assignment = base(place);
    assignment.sources = assignment.tensor_types().into_keys().map(|key| (key.clone(), source(&key))).collect();
    assignment.mirrors = BTreeMap::from([(members[1 - place].id, base(1 - place).share())]);
    assignment
}

/// Trains one step, and returns the loss.
async fn train(members: &mut [Member; 2], pass: u64, step: u64) -> f64 {
    for (member, (program, _)) in members.iter().zip(programs()) {
        member
            .say(ToPeer::Compute(ComputeCommand::Run {
                pass,
                version: program.version,
                kind: PassKind::Train,
                step,
                inspect: false,
            }))
            .await;
        for (address, (from, ty)) in program.incoming() {
            if from != PeerId::BROKER {
                continue;
            }
            let tensor = match ty.dtype {
                DType::F32 => HostTensor::from_f32(ty.shape.clone(), &vec![1.0 + step as f32; ty.numel()]).unwrap(),
                _ => HostTensor::zeros(ty),
            };
            let tensor = match address {
                Address::Value { value, .. } if program.values[&value].name == "loss_weight" => {
                    HostTensor::scalar(DType::F32, 1.0).unwrap()
                }
                _ => tensor,
            };
            let header = encode(&TensorHeader { pass, kind: PassKind::Train, tensor: address, coded: false }).unwrap();
            member.connection.send(Lane::Tensors, &header, &[tensor.into_bytes().into()]).await.unwrap();
        }
    }
    let mut loss = None;
    for member in members.iter_mut() {
        loop {
            match member.hear().await {
                FromPeer::Report { value, .. } => loss = Some(value),
                FromPeer::Norms { .. } => break,
                other => panic!("{other:?}"),
            }
        }
    }
    let verdict = Verdict { apply: true, update: step + 1, lr: 0.1, factor: 1.0 };
    for member in members.iter_mut() {
        member.say(ToPeer::Verdict { pass, verdict }).await;
        assert!(matches!(member.hear().await, FromPeer::PassDone { .. }));
    }
    loss.unwrap()
}

/// Lets both members keep a cut, and a copy of each other's share.
async fn cut(members: &mut [Member; 2], step: u64) {
    let ids = [members[0].id, members[1].id];
    for member in members.iter_mut() {
        member.say(ToPeer::Compute(ComputeCommand::Snapshot { step, save: false })).await;
        assert_eq!(member.hear().await, FromPeer::Kept { step });
    }
    for (member, of) in members.iter_mut().zip([ids[1], ids[0]]) {
        member.say(ToPeer::Mirror { step, of, bytes_per_s: Some(1e6) }).await;
        assert_eq!(member.hear().await, FromPeer::Mirrored { step, of });
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn training_goes_on_with_the_same_numbers_after_a_member_is_lost() {
    let broker = TestBroker::new().await;
    let (first, second) = (broker.join("a"), broker.join("b"));
    let (a, b) = (broker.welcome(0).await, broker.welcome(1).await);
    let spare = broker.join("c");
    let c = broker.welcome(2).await;
    let (first, second) = if a.hello.name == "a" { (first, second) } else { (second, first) };
    let contacts: Vec<Contact> = [&a, &b, &c].iter().map(|m| m.contact()).collect();
    for member in [&a, &b, &c] {
        member.say(ToPeer::Contacts(contacts.clone())).await;
    }
    for (place, member) in [&a, &b].into_iter().enumerate() {
        member.assign(&assignment(1, place, [&a, &b], &c, (0, 0), |_| Source::Seed)).await;
    }
    let mut pair = [a, b];
    for member in &mut pair {
        assert_eq!(member.hear().await, FromPeer::Ready { generation: 1 });
    }
    let before = train(&mut pair, 1, 0).await;
    cut(&mut pair, 1).await;
    let lost_step = train(&mut pair, 2, 1).await;
    assert_ne!(before, lost_step);

    let [mut a, b] = pair;
    b.say(ToPeer::Stop(Farewell::PutOut { reason: "a test".into() })).await;
    assert!(matches!(second.await.unwrap(), Err(NodeError::PutOut(_))));
    match a.hear().await {
        FromPeer::LinkLost { generation: 1, member, .. } => assert_eq!(member, b.id),
        other => panic!("{other:?}"),
    }

    // The newcomer gets everything from the one that is left, which has the copy of the lost share.
    for member in [&a, &c] {
        member.say(ToPeer::Regroup { generation: 2 }).await;
    }
    let donor = a.id;
    for (place, member) in [&a, &c].into_iter().enumerate() {
        member.assign(&assignment(2, place, [&a, &c], &a, (1, 2), |_| Source::Member(donor))).await;
    }
    let mut pair = [a, c];
    for member in &mut pair {
        assert_eq!(member.hear().await, FromPeer::Ready { generation: 2 });
    }
    assert_eq!(train(&mut pair, 3, 1).await, lost_step);
    cut(&mut pair, 2).await;
    for member in &pair {
        member.say(ToPeer::Stop(OVER)).await;
    }
    for peer in [first, spare] {
        assert_eq!(peer.await.unwrap().unwrap(), TOOK_PART);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_finds_its_broker_again_and_still_has_its_copies() {
    let broker = TestBroker::new().await;
    let (first, second) = (broker.join("a"), broker.join("b"));
    let mut pair = [broker.welcome(0).await, broker.welcome(1).await];
    for place in 0..2 {
        let [a, b] = &pair;
        pair[place].assign(&assignment(1, place, [a, b], a, (0, 0), |_| Source::Seed)).await;
    }
    for member in &mut pair {
        assert_eq!(member.hear().await, FromPeer::Ready { generation: 1 });
    }
    train(&mut pair, 1, 0).await;
    cut(&mut pair, 1).await;
    let lost_step = train(&mut pair, 2, 1).await;

    let names = pair.each_ref().map(|m| m.hello.name.clone());
    for member in &pair {
        member.connection.close("the broker starts again");
    }
    let mut back = [broker.welcome(0).await, broker.welcome(1).await];
    if back[0].hello.name != names[0] {
        back.reverse();
    }
    (back[0].id, back[1].id) = (MemberId(0), MemberId(1));
    assert_eq!(back.each_ref().map(|m| m.connection.peer()), pair.each_ref().map(|m| m.connection.peer()));
    for place in 0..2 {
        let [a, b] = &back;
        let me = back[place].id;
        back[place].assign(&assignment(5, place, [a, b], a, (1, 2), |_| Source::Member(me))).await;
    }
    for member in &mut back {
        assert_eq!(member.hear().await, FromPeer::Ready { generation: 5 });
    }
    assert_eq!(train(&mut back, 3, 1).await, lost_step);
    for member in &back {
        member.say(ToPeer::Stop(OVER)).await;
    }
    for peer in [first, second] {
        assert_eq!(peer.await.unwrap().unwrap(), TOOK_PART);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_assignment_that_is_too_large_is_refused_and_the_peer_stays() {
    let broker = TestBroker::new().await;
    let peer = broker.join("a");
    let mut a = broker.welcome(0).await;
    let mut large = assignment(1, 0, [&a, &a], &a, (0, 0), |_| Source::Seed);
    // No disk has room for this copy.
    let ty = fusionllm_graph::TensorType::new(DType::F32, [1 << 44]);
    large.mirrors = BTreeMap::from([(a.id, BTreeMap::from([(TensorKey::value("w1"), ty)]))]);
    a.assign(&large).await;
    match a.hear().await {
        FromPeer::Failed { generation: 1, reason } => assert!(reason.contains("memory"), "{reason}"),
        other => panic!("{other:?}"),
    }
    a.say(ToPeer::Stop(OVER)).await;
    assert!(!peer.await.unwrap().unwrap().took_part, "it had no part");
}

/// The broker sends a tensor in pieces, in its file's element type, and gets it back in the tensor's own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tensor_comes_in_pieces() {
    let broker = TestBroker::new().await;
    let peers = [broker.join("a"), broker.join("b")];
    let mut pair = [broker.welcome(0).await, broker.welcome(1).await];
    let contacts: Vec<Contact> = pair.iter().map(Member::contact).collect();
    let key = TensorKey::value("w0");
    let source = |k: &TensorKey| if *k == key { Source::Broker } else { Source::Seed };
    for (place, member) in pair.iter().enumerate() {
        member.say(ToPeer::Contacts(contacts.clone())).await;
        member.assign(&assignment(1, place, [&pair[0], &pair[1]], member, (0, 0), source)).await;
    }
    let numbers: Vec<f32> = (0..16).map(|i| i as f32).collect();
    let piece = |range: std::ops::Range<usize>, dtype| {
        let numbers = &numbers[range];
        HostTensor::from_f32([numbers.len()], numbers).unwrap().cast(dtype).unwrap()
    };
    let load = |piece: HostTensor| {
        let header = BulkHeader::Load { generation: 1, key: key.clone(), dtype: piece.dtype() };
        (header, vec![piece.into_bytes().into()])
    };
    for piece in [piece(0..6, DType::BF16), piece(6..6, DType::F32), piece(6..16, DType::F16)] {
        let (header, payload) = load(piece);
        net::send_bulk(&pair[0].connection, &header, payload).await.unwrap();
    }
    for member in &mut pair {
        assert_eq!(member.hear().await, FromPeer::Ready { generation: 1 });
        member.say(ToPeer::Compute(ComputeCommand::Snapshot { step: 0, save: true })).await;
        assert_eq!(member.hear().await, FromPeer::Kept { step: 0 });
    }
    let mut saved = Vec::new();
    loop {
        let frame = pair[0].lanes.bulk.next().await.unwrap().unwrap();
        match fusionllm_protocol::decode(frame.header()).unwrap() {
            BulkHeader::Saved { step: 0, key: of, start, .. } if of == key => {
                assert_eq!(start, saved.len() as u64);
                saved.extend_from_slice(&frame.read(64).await.unwrap());
            }
            BulkHeader::Saved { .. } => {}
            BulkHeader::SavedAll { step: 0 } => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(saved, piece(0..16, DType::F32).into_bytes());

    // More than there is room for, and integers for floats.
    for (place, wrong) in [piece(0..16, DType::F32), piece(0..2, DType::I64)].into_iter().enumerate() {
        let member = &pair[place];
        member.say(ToPeer::Regroup { generation: 2 }).await;
        member.assign(&assignment(2, place, [&pair[0], &pair[1]], member, (0, 0), |_| Source::Broker)).await;
        let key = TensorKey::value(if place == 0 { "w0" } else { "w1" });
        for piece in [piece(0..1, DType::F32), wrong] {
            let header = BulkHeader::Load { generation: 2, key: key.clone(), dtype: piece.dtype() };
            net::send_bulk(&member.connection, &header, vec![piece.into_bytes().into()]).await.unwrap();
        }
    }
    for peer in peers {
        let error = peer.await.unwrap().unwrap_err().to_string();
        assert!(error.contains("which lacks 15 of f32[4, 4]"), "{error}");
    }
}

/// A member without a copy says so, and the one that asked for it reports that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_copy_is_reported() {
    let broker = TestBroker::new().await;
    let (first, second) = (broker.join("a"), broker.join("b"));
    let (mut a, b) = (broker.welcome(0).await, broker.welcome(1).await);
    let contacts: Vec<Contact> = [&a, &b].iter().map(|m| m.contact()).collect();
    b.say(ToPeer::Contacts(contacts)).await;
    let donor = b.id;
    let known = BTreeSet::from([TensorKey::value("w0")]);
    let source = |key: &TensorKey| if known.contains(key) { Source::Member(donor) } else { Source::Seed };
    a.assign(&assignment(1, 0, [&a, &b], &b, (3, 0), source)).await;
    match a.hear().await {
        FromPeer::LinkLost { generation: 1, member, reason } => {
            assert_eq!(member, donor);
            assert!(reason.contains("no copy"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    for member in [&a, &b] {
        member.say(ToPeer::Stop(OVER)).await;
    }
    assert!(first.await.unwrap().is_ok() && second.await.unwrap().is_ok());
}

/// Nothing more comes on such a link, so a peer that did not report it would wait forever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_neighbour_that_closes_its_link_without_a_reason_is_reported() {
    let broker = TestBroker::new().await;
    let peer = broker.join("a");
    let mut a = broker.welcome(0).await;
    let local = EndpointOptions { listen: Some(([127, 0, 0, 1], 0).into()), ..EndpointOptions::new() };
    let neighbour = Endpoint::bind(local).await.unwrap();
    let addr = encode(&neighbour.addr()).unwrap();
    let mut with_neighbour = assignment(1, 0, [&a, &a], &a, (0, 0), |_| Source::Seed);
    with_neighbour.peers[1] = Contact { member: MemberId(1), name: "b".into(), addr };
    (with_neighbour.mirrors, with_neighbour.donors) = Default::default();
    a.assign(&with_neighbour).await;
    let (link, _lanes) = tokio::time::timeout(PATIENCE, neighbour.accept()).await.unwrap().unwrap();
    assert_eq!(a.hear().await, FromPeer::Ready { generation: 1 });
    link.close("");
    let reason = "it closed the connection without a reason".into();
    assert_eq!(a.hear().await, FromPeer::LinkLost { generation: 1, member: MemberId(1), reason });
    a.say(ToPeer::Stop(OVER)).await;
    assert_eq!(peer.await.unwrap().unwrap(), TOOK_PART);
}
