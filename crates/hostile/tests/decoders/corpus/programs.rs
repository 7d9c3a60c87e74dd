use fusionllm_backend::conformance::cases;
use fusionllm_compress::Codec;
use fusionllm_graph::ops::{AdamwStep, SgdStep};
use fusionllm_graph::{DType, Graph, Op, TensorType, autodiff};
use fusionllm_hostile::{assignment_of, one_operator};
use fusionllm_models::{Gpt2Config, ResNetConfig, ResNetStem};
use fusionllm_plan::{
    Cluster, Device, Link, Origin, Rates, SavedPlan, Schedule, SimulateOptions, compile, compile_forward,
    equal_compute, simulate,
};
use fusionllm_program::{Optimizer, PeerId};
use fusionllm_protocol::encode;
use serde_json::json;

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
        pairs.into_iter().map(|(mut train, eval)| {
            if !train.coded.is_empty() {
                train.codecs.insert(PeerId(1 - train.peer.0), Codec::Nvfp4);
            }
            assignment_of(train, eval, adamw()).unwrap()
        })
    });
    let sgd = Optimizer::Sgd(SgdStep { momentum: 0.9, weight_decay: 0.1, nesterov: true });
    let of_operators = applied().filter_map(|(op, operands)| one_operator(op, &operands));
    let of_operators = of_operators.map(|program| assignment_of(program.clone(), program, sgd).unwrap());
    of_models.chain(of_operators).map(|a| encode(&a).unwrap()).collect()
}

/// The operators of the conformance suite, with the types of their operands.
fn applied() -> impl Iterator<Item = (Op, Vec<TensorType>)> {
    cases().unwrap().into_iter().flat_map(|case| {
        let types = |float| case.arrays(float).into_iter().map(|array| array.ty).collect();
        case.floats.iter().map(|float| (case.op.clone(), types(*float))).collect::<Vec<_>>()
    })
}

/// The same as JSON. It has no infinite numbers.
pub(super) fn operators() -> Vec<Vec<u8>> {
    let taken = applied().filter(|(op, operands)| one_operator(op.clone(), operands).is_some());
    let texts = taken.map(|(op, operands)| json!({"op": op, "operands": operands}));
    texts
        .filter(|text| serde_json::from_value::<Op>(text["op"].clone()).is_ok())
        .map(|text| text.to_string().into_bytes())
        .collect()
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
    let site = fusionllm_plan::Site { name: "home".into(), inside: Some(link), uplink: Some(link), downlink: None };
    let cluster = Cluster::new(devices.collect(), vec![site], Vec::new(), None).unwrap();
    let saved = SavedPlan { plan, cluster, graph, optimizer: adamw(), origin: Origin::default() };
    let options = SimulateOptions { optimizer: saved.optimizer, record: false };
    let simulation = simulate(&saved.programs().unwrap(), &saved.cluster, &options).unwrap();
    saved.to_json(&simulation).unwrap().into_bytes()
}
