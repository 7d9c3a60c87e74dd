//! Shared by the tests: random graphs, random cuts, and a machine that runs Programs on symbols.
#![allow(dead_code, clippy::unwrap_used)]

pub(crate) mod clusters;
pub(crate) mod machine;

pub(crate) use fusionllm_graph::ChoiceRng;
use fusionllm_graph::ops::{BatchNorm, Compare, Triangle, Unary};
use fusionllm_graph::{Builder, DType, Graph, GraphError, HostTensor, Init, TensorType, TrainGraph, ValueId, autodiff};
use fusionllm_plan::{Plan, Schedule, compile, compile_forward};
use fusionllm_program::Program;

const ROWS: usize = 4;
const WIDTH: usize = 6;
const NORMAL: Init = Init::Normal { std: 0.1 };

/// A network of `size` blocks, each over values of any earlier blocks. It has values with many readers, tied
/// parameters and values that skip blocks. It has masks made of constants, views of parameters, changing buffers and
/// dropout. Some nodes do not affect the loss.
pub(crate) fn random_graph(size: usize, choices: &mut ChoiceRng) -> Graph {
    let mut b = Builder::new("random");
    build(&mut b, size, choices).unwrap();
    b.finish().unwrap()
}

fn build(b: &mut Builder, size: usize, choices: &mut ChoiceRng) -> Result<(), GraphError> {
    let x = b.input("x", DType::F32, [ROWS, WIDTH])?;
    let labels = b.input("labels", DType::I64, [ROWS])?;
    let table = b.constant("table", HostTensor::zeros(TensorType::new(DType::F32, [ROWS, WIDTH])))?;
    // All have the shape [ROWS, WIDTH]. `halves` are results of splits, of [ROWS, WIDTH / 2].
    let mut values = vec![x];
    let mut halves: Vec<ValueId> = Vec::new();
    let mut weights: Vec<ValueId> = Vec::new();
    let mut weight = |b: &mut Builder, choices: &mut ChoiceRng, name: &str| -> Result<ValueId, GraphError> {
        if !weights.is_empty() && choices.one_in(3) {
            return Ok(choices.choose(&weights));
        }
        let w = b.parameter(name, DType::F32, [WIDTH, WIDTH], NORMAL)?;
        weights.push(w);
        Ok(w)
    };
    for block in 0..size {
        let y = b.scope(format!("b{block}"), |b| {
            let (v, other) = (choices.choose(&values), choices.choose(&values));
            match choices.below(14) {
                0 | 1 => {
                    let w = weight(b, choices, "weight")?;
                    b.linear(v, w, None)
                }
                2 => b.add(v, other),
                3 => b.mul(v, other),
                4 => b.unary(Unary::Relu, v),
                5 => {
                    let y = b.reshape(v, [2, ROWS * WIDTH / 2])?;
                    let y = b.unary(Unary::Tanh, y)?;
                    b.reshape(y, [ROWS, WIDTH])
                }
                6 => {
                    let y = b.sum(v, &[1], true)?;
                    let y = b.expand(y, [ROWS, WIDTH])?;
                    b.add(y, other)
                }
                7 => {
                    let parts = b.chunk(v, 2, 1)?;
                    halves.extend(&parts);
                    let (l, r) = (choices.choose(&halves), choices.choose(&halves));
                    b.cat(&[l, r], 1)
                }
                8 => {
                    let ones = b.full(TensorType::new(DType::I64, [ROWS, WIDTH]), 1.0)?;
                    let seen = b.op(Triangle { upper: false, diagonal: 0 }, &[ones])?;
                    let seen = b.compare_scalar(Compare::Ne, seen, 0.0)?;
                    b.where_(seen, v, other)
                }
                9 => {
                    let w = b.parameter("weight", DType::F32, [WIDTH], Init::Constant(1.0))?;
                    let bias = b.parameter("bias", DType::F32, [WIDTH], Init::Constant(0.0))?;
                    let mean = b.buffer("running_mean", DType::F32, [WIDTH], Init::Constant(0.0))?;
                    let var = b.buffer("running_var", DType::F32, [WIDTH], Init::Constant(1.0))?;
                    let out = b.apply(BatchNorm { momentum: 0.1, eps: 1e-5 }, &[v, w, bias, mean, var])?;
                    b.update_buffer(mean, out[3])?;
                    b.update_buffer(var, out[4])?;
                    Ok(out[0])
                }
                10 => b.dropout(v, 0.5),
                11 => {
                    // A view of a parameter. Its node may be placed anywhere before its reader.
                    let w = weight(b, choices, "weight")?;
                    let w = b.transpose(w)?;
                    b.matmul(v, w)
                }
                12 => {
                    let t = b.mul_scalar(table, 2.0)?;
                    b.add(v, t)
                }
                _ => {
                    // One gradient for two parameters. One operator uses one of them twice.
                    let p = b.parameter("p", DType::F32, [ROWS, WIDTH], NORMAL)?;
                    let q = b.parameter("q", DType::F32, [ROWS, WIDTH], NORMAL)?;
                    let twice = b.add(p, p)?;
                    let sum = b.add(twice, q)?;
                    b.add(v, sum)
                }
            }
        })?;
        values.push(y);
    }
    let mut y = values[values.len() - 1];
    if choices.one_in(2) {
        y = b.add(y, choices.choose(&values))?;
    }
    let head = weight(b, choices, "head")?;
    let logits = b.linear(y, head, None)?;
    let loss = b.cross_entropy(logits, labels, -100)?;
    b.output("loss", loss)?;
    let best = b.argmax(logits, 1)?;
    let hit = b.op(Compare::Eq, &[best, labels])?;
    let hit = b.cast(hit, DType::F32)?;
    let correct = b.sum(hit, &[0], false)?;
    b.output("correct", correct)
}

pub(crate) fn train_graph(graph: &Graph) -> TrainGraph {
    autodiff::differentiate(graph, graph.outputs["loss"]).unwrap()
}

pub(crate) fn names(peers: usize) -> Vec<String> {
    (0..peers).map(|p| format!("p{p}")).collect()
}

/// Cuts into any number of stages, on any peers. A node's stage is not before its operands'. A peer may have many
/// stages, or none.
pub(crate) fn random_plan(
    graph: &Graph,
    peers: usize,
    micro_batches: u32,
    schedule: Schedule,
    choices: &mut ChoiceRng,
) -> Plan {
    let stages = 1 + choices.below(peers + 3);
    let mut cuts: Vec<usize> = (1..stages).map(|_| choices.below(graph.nodes.len())).collect();
    cuts.sort_unstable();
    let mut stage_of: Vec<u32> = Vec::new();
    for id in graph.node_ids() {
        let near = cuts.iter().filter(|c| **c <= id.index()).count() as u32;
        let operands = graph.node(id).inputs.iter().filter_map(|v| graph.producer(*v));
        let earliest = operands.map(|p| stage_of[p.index()]).max().unwrap_or(0);
        // Sometimes a branch runs elsewhere than its neighbours.
        let stray = if choices.one_in(5) { choices.below(stages) as u32 } else { near };
        stage_of.push(stray.max(earliest));
    }
    let peer_of_stage: Vec<u32> = (0..stages).map(|_| choices.below(peers) as u32).collect();
    Plan::from_stages(graph, &stage_of, &peer_of_stage, names(peers), micro_batches, schedule, "random")
}

/// Gives stages more peers: any of the plan's, some with several turns.
pub(crate) fn replicate(plan: &mut Plan, choices: &mut ChoiceRng) {
    for stage in &mut plan.stages {
        if choices.one_in(2) {
            let turns = 1 + choices.below(4.min(plan.micro_batches as usize));
            stage.peers = (0..turns).map(|_| choices.below(plan.peers.len()) as u32).collect();
        }
    }
}

/// A plan from the stage of each node, by the node's name. Each stage has its own peer.
pub(crate) fn plan_by(graph: &Graph, micro_batches: u32, schedule: Schedule, stage: impl Fn(&str) -> u32) -> Plan {
    let stage_of: Vec<u32> = graph.nodes.iter().map(|n| stage(&n.name)).collect();
    let stages = stage_of.iter().max().unwrap() + 1;
    let peers: Vec<u32> = (0..stages).collect();
    Plan::from_stages(graph, &stage_of, &peers, names(stages as usize), micro_batches, schedule, "by hand")
}

pub(crate) fn one_peer(graph: &Graph, micro_batches: u32) -> Plan {
    plan_by(graph, micro_batches, Schedule::GPipe, |_| 0)
}

/// The Programs of a training step and of an evaluation.
pub(crate) fn programs(graph: &Graph, plan: &Plan) -> [Vec<Program>; 2] {
    let eval = graph.evaluation().unwrap();
    [
        compile(plan, graph, &train_graph(graph)).unwrap(),
        compile_forward(plan, graph, &eval, &["loss", "correct"]).unwrap(),
    ]
}
