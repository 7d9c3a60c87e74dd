//! Random graphs: on every backend, the gradients of autodiff's backward nodes are the slopes of the loss.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use backends::backends;
use fusionllm_backend::conformance::reference::Reference;
use fusionllm_backend::{Backend, interpret};
use fusionllm_graph::ops::{Binary, Cat, ConstantPad, Gather, LayerNorm, Linear, Softmax, Split, Unary};
use fusionllm_graph::{Builder, CounterRng, DType, Graph, GraphError, HostTensor, Init, ValueId, autodiff};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

#[path = "support/backends.rs"]
mod backends;

/// One step of a recipe: the operator, two of the values so far, and a number that chooses attributes.
type Step = (u8, u8, u8, u8);

const SHAPES: [&[usize]; 6] = [&[2, 3], &[3, 2], &[3], &[1, 3], &[2, 1, 2], &[]];

/// A graph of `f64` parameters from a recipe. Steps whose operands do not fit are skipped. Every value that no node
/// reads enters the loss.
fn build(parameters: &[u8], steps: &[Step]) -> Result<Graph, GraphError> {
    let mut b = Builder::new("random");
    let mut pool = Vec::new();
    for (i, shape) in parameters.iter().enumerate() {
        let shape = SHAPES[usize::from(*shape) % SHAPES.len()];
        pool.push(b.parameter(&format!("p{i}"), DType::F64, shape, Init::Normal { std: 0.8 })?);
    }
    pool.push(b.input("x", DType::F64, [2, 3])?);
    for &(op, l, r, k) in steps {
        let (x, y) = (pool[usize::from(l) % pool.len()], pool[usize::from(r) % pool.len()]);
        // A step that does not fit leaves no node.
        let before = b.clone();
        match step(&mut b, op, x, y, usize::from(k)) {
            Ok(results) => pool.extend(results),
            Err(GraphError::Operand { .. }) => b = before,
            Err(e) => return Err(e),
        }
    }
    let read: Vec<ValueId> = b.graph().nodes.iter().flat_map(|n| n.inputs.clone()).collect();
    let mut loss = b.full(fusionllm_graph::TensorType::new(DType::F64, []), 0.0)?;
    for v in pool.into_iter().filter(|v| !read.contains(v)) {
        // Bounded, with another slope for each element.
        let n = b.ty(v).numel();
        let t = b.unary(Unary::Tanh, v)?;
        let flat = b.reshape(t, [n])?;
        let weights = b.arange(DType::F64, 0.3, 0.17, n)?;
        let weighted = b.mul(flat, weights)?;
        let part = b.sum(weighted, &[0], false)?;
        loss = b.add(loss, part)?;
    }
    b.output("loss", loss)?;
    b.finish()
}

fn step(b: &mut Builder, op: u8, x: ValueId, y: ValueId, k: usize) -> Result<Vec<ValueId>, GraphError> {
    let shape = b.ty(x).shape.clone();
    let rank = shape.len();
    let dim = k % rank.max(1);
    let size = shape.get(dim).copied().unwrap_or(1);
    let one = |r: Result<ValueId, GraphError>| r.map(|v| vec![v]);
    match op % 18 {
        0 => one(b.unary([Unary::Tanh, Unary::Sin, Unary::Sigmoid, Unary::Erf, Unary::Softplus][k % 5], x)),
        1 => one(b.add(x, y)),
        2 => one(b.sub(x, y)),
        3 => {
            let small = b.unary(Unary::Tanh, y)?;
            one(b.mul(x, small))
        }
        4 => {
            // A quotient whose divisor stays away from 0.
            let square = b.mul(y, y)?;
            let divisor = b.add_scalar(square, 1.0)?;
            one(b.op(Binary::Div, &[x, divisor]))
        }
        5 => one(b.matmul(x, y)),
        6 => {
            let xt = b.transpose(x)?;
            one(b.matmul(xt, y))
        }
        7 => one(b.op(Linear, &[x, y])),
        8 => one(b.sum(x, &[dim], k.is_multiple_of(2))),
        9 => one(b.mean(x, &[dim], k.is_multiple_of(2))),
        10 => {
            let n = b.ty(x).numel();
            one(b.reshape(x, if k.is_multiple_of(2) { vec![n] } else { vec![1, n] }))
        }
        11 => {
            let dims: Vec<usize> = (0..rank).map(|d| (d + k) % rank).collect();
            one(b.permute(x, &dims))
        }
        12 => {
            let start = k / 4 % size.max(1);
            one(b.slice(x, dim, start, size, 1 + k % 3))
        }
        13 => one(b.expand(x, [&[2], &shape[..]].concat())),
        // Parts of unequal sizes. Some may stay unread.
        14 => b.apply(Split { dim, sizes: vec![size / 2, size - size / 2] }, &[x]),
        15 => one(b.op(Cat { dim }, &[x, y, x])),
        16 => match k % 3 {
            0 => one(b.op(Softmax { dim }, &[x])),
            1 => one(b.op(LayerNorm { dims: 1, eps: 0.1 }, &[x])),
            _ => one(b.op(ConstantPad { pads: vec![[k % 2, 1]; rank], value: 0.5 }, &[x])),
        },
        _ => {
            // Reads some elements several times, others never.
            let twice: Vec<usize> = shape.iter().enumerate().map(|(d, n)| if d == dim { 2 } else { *n }).collect();
            let n: usize = twice.iter().product();
            let ids: Vec<i64> = (0..n).map(|i| ((i * 5 + k) % size.max(1)) as i64).collect();
            let name = format!("ids{}", b.graph().values.len());
            let tensor = HostTensor::from_i64(twice, &ids)?;
            let index = b.constant(&name, tensor)?;
            one(b.op(Gather { dim }, &[x, index]))
        }
    }
}

/// Values of everything from outside the graph.
fn sources(graph: &Graph) -> BTreeMap<ValueId, HostTensor> {
    let mut sources = BTreeMap::new();
    for i in 0..graph.values.len() as u32 {
        let at = ValueId(i);
        let value = graph.value(at);
        if graph.producer(at).is_some() {
            continue;
        }
        let rng = CounterRng::for_name(11, &value.name);
        let tensor = match graph.constants.get(&value.name) {
            Some(constant) => constant.clone(),
            None if value.name == "loss_weight" => HostTensor::scalar(DType::F64, 1.0).unwrap(),
            None => {
                let values: Vec<f64> = (0..value.ty.numel() as u64).map(|i| 0.8 * rng.normal(i, 0)).collect();
                HostTensor::from_f64(value.ty.shape.clone(), &values).unwrap()
            }
        };
        sources.insert(at, tensor);
    }
    sources
}

fn run(
    backend: &dyn Backend,
    graph: &Graph,
    sources: &BTreeMap<ValueId, HostTensor>,
    targets: &[ValueId],
) -> Vec<Vec<f64>> {
    let uploaded = sources.iter().map(|(v, t)| (*v, backend.upload(t).unwrap())).collect();
    let results = interpret(backend, graph, uploaded, targets).unwrap();
    results.iter().map(|t| backend.download(t).unwrap().to_f64()).collect()
}

fn check(parameters: &[u8], steps: &[Step]) -> Result<(), TestCaseError> {
    let graph = build(parameters, steps).unwrap();
    let train = autodiff::differentiate(&graph, graph.outputs["loss"]).unwrap();
    let targets: Vec<ValueId> = train.gradients.iter().flat_map(|g| g.contributions.iter().copied()).collect();
    let (given, loss) = (sources(&train.graph), graph.outputs["loss"]);
    let slope = |p: ValueId, element: usize| {
        let at = |by: f64| {
            let mut moved = given.clone();
            let mut values = moved[&p].to_f64();
            values[element] += by;
            moved.insert(p, HostTensor::from_f64(graph.ty(p).shape.clone(), &values).unwrap());
            run(&Reference, &graph, &moved, &[loss])[0][0]
        };
        let step = 1e-5;
        (at(step) - at(-step)) / (2.0 * step)
    };
    let slopes: Vec<(ValueId, Vec<f64>)> =
        graph.parameters().map(|p| (p, (0..graph.ty(p).numel()).map(|e| slope(p, e)).collect())).collect();

    let mut backends = backends();
    backends.push(std::sync::Arc::new(Reference));
    for backend in backends {
        let mut found = run(&*backend, &train.graph, &given, &targets).into_iter();
        let mut gradients: BTreeMap<ValueId, Vec<f64>> = BTreeMap::new();
        for g in &train.gradients {
            for part in found.by_ref().take(g.contributions.len()) {
                let sum = gradients.entry(g.parameter).or_insert_with(|| vec![0.0; part.len()]);
                sum.iter_mut().zip(part).for_each(|(s, v)| *s += v);
            }
        }
        for (p, slopes) in &slopes {
            // A parameter without a gradient must have none.
            let none = vec![0.0; slopes.len()];
            for (e, (slope, gradient)) in slopes.iter().zip(gradients.get(p).unwrap_or(&none)).enumerate() {
                prop_assert!(
                    (slope - gradient).abs() <= 1e-6 * (1.0 + slope.abs()),
                    "{} on {}: element {e} of {} has gradient {gradient}, but slope {slope}\n{graph}",
                    backend.name(),
                    graph.name,
                    graph.value(*p).name,
                );
            }
        }
    }
    Ok(())
}

proptest! {
    // The same graphs in every run. A failure prints its recipe and the graph.
    #![proptest_config(ProptestConfig {
        cases: 150,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(5),
        ..ProptestConfig::default()
    })]

    #[test]
    fn gradients_of_random_graphs_are_slopes(
        parameters in proptest::collection::vec(any::<u8>(), 1..4),
        steps in proptest::collection::vec(any::<Step>(), 3..20),
    ) {
        check(&parameters, &steps)?;
    }
}

/// Guards the recipes: a change to [`step`] could leave a test of nothing.
#[test]
fn recipes_cover_operators_and_shared_parameters() {
    let mut shared = 0;
    let mut operators = std::collections::BTreeSet::new();
    for seed in 0..150u64 {
        let rng = CounterRng::new(seed);
        let byte = |i: u64| (rng.block(i, 0)[0] & 0xff) as u8;
        let steps: Vec<Step> =
            (0..15).map(|i| (byte(4 * i), byte(4 * i + 1), byte(4 * i + 2), byte(4 * i + 3))).collect();
        let graph = build(&[byte(1000), byte(1001), 0], &steps).unwrap();
        operators.extend(graph.nodes.iter().map(|n| n.op.name()));
        let users = graph.consumers();
        shared += usize::from(graph.parameters().any(|p| users[p.index()].len() > 1));
    }
    assert!(shared > 100, "a parameter is used twice in {shared} of 150 graphs");
    let wanted = [
        "matmul",
        "linear",
        "cat",
        "split_with_sizes",
        "slice.Tensor",
        "permute",
        "expand",
        "gather",
        "_softmax",
        "native_layer_norm",
    ];
    for name in wanted {
        assert!(operators.contains(name), "no graph has {name}");
    }
}
