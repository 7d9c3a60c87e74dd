use std::collections::{BTreeMap, BTreeSet};

use fusionllm_backend::conformance::{Case, cases};
use fusionllm_compress::Codec;
use fusionllm_graph::models::{Gpt2Config, ResNetConfig, ResNetStem};
use fusionllm_graph::ops::{AdamwStep, SgdStep};
use fusionllm_graph::{DType, Graph, Node, NodeId, Phase, TensorType, Value, ValueId, ValueKind, autodiff};
use fusionllm_plan::{
    Cluster, Compression, Device, Instruction, Link, Optimizer, Origin, PeerId, Program, Rates, SavedPlan, Schedule,
    SimulateOptions, Slot, compile, compile_forward, equal_compute, simulate,
};
use fusionllm_protocol::{Assignment, Contact, MemberId, Source, TensorKey, encode};
use fusionllm_transport::{PeerAddr, SecretKey};

fn gpt2() -> Graph {
    let config =
        Gpt2Config { vocab_size: 8, n_positions: 4, n_embd: 4, n_layer: 1, n_head: 2, ..Gpt2Config::default() };
    config.build(1, 4, DType::F32).unwrap()
}

fn resnet() -> Graph {
    let config = ResNetConfig { depth: 18, num_classes: 2, stem: ResNetStem::Cifar, width: 1 };
    config.build(2, 8, DType::F32).unwrap()
}

fn adamw() -> Optimizer {
    Optimizer::Adamw(AdamwStep { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 })
}

/// Assignments of small models over two peers, and one for each case of the conformance suite.
pub(super) fn assignments() -> Vec<Vec<u8>> {
    let of_models = [gpt2(), resnet()].into_iter().flat_map(|graph| {
        let names = ["p0".to_owned(), "p1".to_owned()];
        let plan = equal_compute(&graph, &names, 2, Schedule::OneFOneB).unwrap();
        let train = autodiff::differentiate(&graph, graph.outputs["loss"]).unwrap();
        let train = compile(&plan, &graph, &train).unwrap();
        let eval = compile_forward(&plan, &graph, &graph.evaluation().unwrap(), &["loss", "correct"]).unwrap();
        let pairs: Vec<_> = train.into_iter().zip(eval).collect();
        pairs.into_iter().map(|(train, eval)| assignment(train, eval, adamw()))
    });
    let sgd = Optimizer::Sgd(SgdStep { momentum: 0.9, weight_decay: 0.1, nesterov: true });
    let of_operators = cases().unwrap().into_iter().flat_map(|case| {
        let floats = case.floats.clone();
        floats.into_iter().filter_map(move |float| one_operator(&case, float))
    });
    let of_operators = of_operators.map(|program| assignment(program.clone(), program, sgd));
    of_models.chain(of_operators).map(|a| encode(&a).unwrap()).collect()
}

fn assignment(mut train: Program, eval: Program, optimizer: Optimizer) -> Assignment {
    let peer = train.peer;
    let other = PeerId(1 - peer.0);
    if !train.coded.is_empty() {
        train.codecs.insert(other, Codec::Nvfp4);
    }
    let addr = encode(&PeerAddr::new(SecretKey::from_bytes([7; 32]).public(), Vec::new())).unwrap();
    let contact = |m: u32| Contact { member: MemberId(m), name: format!("p{m}"), addr: addr.clone() };
    let copy = TensorType::new(DType::F32, [4, 4]);
    let mut assignment = Assignment {
        generation: 3,
        peer,
        peers: vec![contact(0), contact(1)],
        donors: vec![contact(5)],
        seed: 7,
        optimizer,
        compression: Compression::default(),
        train,
        eval,
        start: 12,
        passes_before: 40,
        sources: BTreeMap::new(),
        mirrors: BTreeMap::from([(MemberId(6), BTreeMap::from([(TensorKey::value("w1"), copy)]))]),
    };
    assignment.sources = assignment.tensors().into_keys().map(|key| (key, Source::Broker)).collect();
    assignment.validate().unwrap();
    assignment
}

/// A program that receives the case's operands, runs its operator, and frees all.
fn one_operator(case: &Case, float: DType) -> Option<Program> {
    let types: Vec<TensorType> = case.arrays(float).into_iter().map(|array| array.ty).collect();
    // Bad operands of the right types are a case for the kernels; types that do not fit are none here.
    let results = case.op.infer(&types.iter().collect::<Vec<_>>()).ok()?;
    let ids = |from: usize, count: usize| (from as u32..(from + count) as u32).map(ValueId).collect::<Vec<_>>();
    let (inputs, outputs) = (ids(0, types.len()), ids(types.len(), results.len()));
    let node = NodeId(0);
    let made = (0..).map(|index| ValueKind::Result { node, index });
    let kinds = types.iter().map(|_| ValueKind::Input).chain(made);
    let values = (0..)
        .zip(types.iter().chain(&results))
        .zip(kinds)
        .map(|((id, ty), kind)| (ValueId(id), Value { name: format!("v{id}"), ty: ty.clone(), kind }));
    let slot = |value| Slot::Value { value, micro_batch: 0 };
    let receive = inputs.iter().map(|v| Instruction::Receive { slot: slot(*v), from: PeerId::BROKER });
    let free = inputs.iter().chain(&outputs).map(|value| Instruction::Free { value: *value, micro_batch: 0 });
    let run = Instruction::Run { node, micro_batch: 0 };
    let op = case.op.clone();
    let (name, phase) = ("n".to_owned(), Phase::Forward);
    Some(Program {
        peer: PeerId(0),
        version: 1,
        micro_batches: 1,
        values: values.collect(),
        holdings: Vec::new(),
        reductions: Vec::new(),
        reports: Vec::new(),
        instructions: receive.chain([run]).chain(free).collect(),
        nodes: BTreeMap::from([(node, Node { name, op, inputs, outputs, phase, origin: None })]),
        coded: BTreeSet::new(),
        masks: BTreeMap::new(),
        codecs: BTreeMap::new(),
    })
}

pub(super) fn graphs() -> Vec<Vec<u8>> {
    [gpt2(), resnet()].iter().map(|graph| graph.to_json().unwrap().into_bytes()).collect()
}

pub(super) fn plan() -> Vec<u8> {
    let graph = gpt2();
    let names = ["a".to_owned(), "b".to_owned()];
    let plan = equal_compute(&graph, &names, 4, Schedule::OneFOneB).unwrap();
    let rates = Rates { matmul: 1e9, convolution: 1e9, memory: 1e9, overhead: 1e-6 };
    let devices = names.iter().map(|name| Device { site: Some(0), ..Device::new(name, rates, 1 << 20) });
    let link = Link { latency: 1e-4, bandwidth: 1e8 };
    let site = fusionllm_plan::Site { name: "home".into(), inside: Some(link), uplink: Some(link) };
    let cluster = Cluster::new(devices.collect(), vec![site], Vec::new(), None).unwrap();
    let saved = SavedPlan { plan, cluster, graph, optimizer: adamw(), origin: Origin::default() };
    let options = SimulateOptions { optimizer: saved.optimizer, record: false };
    let simulation = simulate(&saved.programs().unwrap(), &saved.cluster, &options).unwrap();
    saved.to_json(&simulation).unwrap().into_bytes()
}
