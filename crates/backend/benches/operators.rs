//! Measures each kernel of a training step alone: every distinct operator of a GPT-2 block with its head, and of
//! ResNet-50. Forward and backward operators have the shapes of those models. `bytes` counts what an operator reads and
//! writes, `items` its floating-point operations.
//!
//! `cargo bench -p fusionllm-backend [-- FILTER]`

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fmt;
use std::sync::LazyLock;

use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use fusionllm_backend::open;
use fusionllm_graph::{CounterRng, DType, Graph, HostTensor, Op, TensorType, autodiff};
use fusionllm_models::{Gpt2Config, ResNetConfig};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() {
    divan::main();
}

/// One operator at one set of shapes.
#[derive(Clone)]
struct Case {
    name: String,
    op: Op,
    inputs: Vec<TensorType>,
    outputs: Vec<TensorType>,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

static GPT2: LazyLock<Vec<Case>> = LazyLock::new(|| {
    let config = Gpt2Config { n_layer: 1, resid_pdrop: 0.0, embd_pdrop: 0.0, attn_pdrop: 0.0, ..Gpt2Config::default() };
    cases(&config.build(4, 256, DType::F32).unwrap())
});

static RESNET: LazyLock<Vec<Case>> =
    LazyLock::new(|| cases(&ResNetConfig { depth: 50, ..ResNetConfig::default() }.build(4, 224, DType::F32).unwrap()));

fn cases(graph: &Graph) -> Vec<Case> {
    let train = autodiff::differentiate(graph, graph.outputs["loss"]).unwrap();
    let graph = &train.graph;
    let mut cases = BTreeMap::new();
    for id in graph.node_ids() {
        let node = graph.node(id);
        let types = |values| graph.types(values).into_iter().cloned().collect::<Vec<_>>();
        let (inputs, outputs) = (types(&node.inputs), types(&node.outputs));
        let shapes: Vec<String> = inputs.iter().filter(|t| t.rank() > 0).map(ToString::to_string).collect();
        let name = format!("{} {}", node.op.name(), shapes.join(" "));
        // Views move nothing.
        if node.op.cost(&graph.types(&node.inputs), &graph.types(&node.outputs)).bytes > 0.0 {
            cases.entry(name.clone()).or_insert(Case { name, op: node.op.clone(), inputs, outputs });
        }
    }
    cases.into_values().collect()
}

/// Plain numbers; indices are 0, which every table has.
fn operand(ty: &TensorType, stream: u64) -> HostTensor {
    if !matches!(ty.dtype, DType::F32) {
        return HostTensor::zeros(ty.clone());
    }
    let rng = CounterRng::new(1);
    let numbers: Vec<f32> = (0..ty.numel() as u64).map(|i| rng.uniform(i, stream) + 0.1).collect();
    HostTensor::from_f32(ty.shape.clone(), &numbers).unwrap()
}

fn run(bencher: Bencher<'_, '_>, backend: &str, case: &Case) {
    let backend = open(backend).unwrap();
    let operands: Vec<_> = (0..).zip(&case.inputs).map(|(i, ty)| backend.upload(&operand(ty, i)).unwrap()).collect();
    let cost = case.op.cost(&case.inputs.iter().collect::<Vec<_>>(), &case.outputs.iter().collect::<Vec<_>>());
    bencher
        .counter(BytesCount::new(cost.bytes as u64))
        .counter(ItemsCount::new(cost.flops as u64))
        .bench(|| backend.run(&case.op, operands.clone(), &case.outputs).unwrap());
}

#[divan::bench(args = GPT2.iter(), sample_count = 10, sample_size = 1)]
fn cpu_gpt2(bencher: Bencher<'_, '_>, case: &Case) {
    run(bencher, "cpu", case);
}

#[divan::bench(args = RESNET.iter(), sample_count = 10, sample_size = 1)]
fn cpu_resnet(bencher: Bencher<'_, '_>, case: &Case) {
    run(bencher, "cpu", case);
}
