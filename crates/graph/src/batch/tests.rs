use super::*;
use crate::ops::Compare;
use crate::{Builder, DType, Init};

/// A classifier of `rows` samples whose loss `of` makes from logits and labels.
fn classifier(rows: usize, of: impl Fn(&mut Builder, ValueId, ValueId) -> Result<ValueId, GraphError>) -> Graph {
    let mut b = Builder::new("classifier");
    let x = b.input("x", DType::F32, [rows, 4]).unwrap();
    let y = b.input("y", DType::I64, [rows]).unwrap();
    let w = b.parameter("w", DType::F32, [3, 4], Init::Constant(0.0)).unwrap();
    let logits = b.linear(x, w, None).unwrap();
    let loss = of(&mut b, logits, y).unwrap();
    b.output("loss", loss).unwrap();
    b.finish().unwrap()
}

fn weighed(graph: &Graph, samples: usize, other: Option<(&Graph, usize)>) -> (Graph, BatchLoss) {
    BatchLoss::of(graph.clone(), graph.outputs["loss"], Sizes { samples, group: 1, other }).unwrap()
}

fn added<'a>(graph: &'a Graph, loss: &BatchLoss) -> Vec<&'a str> {
    graph.inputs().map(|v| graph.value(v).name.as_str()).filter(|name| loss.fills_in(name)).collect()
}

#[test]
fn a_graph_stays_as_it_is_if_its_loss_is_one_sum_or_one_mean() {
    type Loss = fn(&mut Builder, ValueId, ValueId) -> Result<ValueId, GraphError>;
    type Expected = fn(Weight) -> bool;
    let losses: [(Expected, Loss); 3] = [
        (|weight| matches!(weight, Weight::Targets(_)), |b, logits, y| b.cross_entropy(logits, y, -100)),
        (|weight| weight == Weight::Equal, |b, logits, _| b.mean(logits, &[0, 1], false)),
        (|weight| weight == Weight::Whole, |b, logits, _| b.sum(logits, &[0, 1], false)),
    ];
    for (is_expected, of) in losses {
        for rows in [1, 2, 4] {
            let (graph, other) = (classifier(rows, of), classifier(3, of));
            let (after, loss) = weighed(&graph, rows, Some((&other, 3)));
            assert_eq!(after, graph);
            assert!(is_expected(loss.weight) && loss.doubts.is_empty(), "{loss:?}");
        }
    }
}

#[test]
fn a_number_that_grows_with_the_rows_counts_them() {
    let divided = |rows: usize, by: f64| {
        classifier(rows, move |b, logits, _| {
            let sum = b.sum(logits, &[0, 1], false)?;
            b.div_scalar(sum, by)
        })
    };
    let weight = |by: fn(usize) -> f64| weighed(&divided(2, by(2)), 2, Some((&divided(3, by(3)), 3))).1.weight;
    assert_eq!(weight(|rows| 4.0 * rows as f64), Weight::Equal);
    assert_eq!(weight(|_| 8.0), Weight::Whole);
    // An archive of one size has no second.
    let (_, loss) = weighed(&divided(2, 2.0), 2, None);
    assert_eq!((loss.weight, loss.doubts.len()), (Weight::Equal, 1));
    assert!(matches!(loss.doubts[0], Doubt::Number(_)));
    let (_, loss) = weighed(&divided(2, 100.0), 2, None);
    assert_eq!((loss.weight, loss.doubts.len()), (Weight::Whole, 0));
    // A half of each sample is no mean over two samples.
    let halves = classifier(2, |b, logits, _| {
        let half = b.mul_scalar(logits, 0.5)?;
        let half = b.div_scalar(half, 2.0)?;
        b.mean(half, &[0, 1], false)
    });
    let (_, loss) = weighed(&halves, 2, None);
    assert_eq!((loss.weight, loss.doubts.len()), (Weight::Equal, 0));
}

#[test]
fn what_the_data_decide_becomes_an_input() {
    let graph = classifier(2, |b, logits, y| {
        let counts = b.compare_scalar(Compare::Ne, y, -100.0)?;
        let counts = b.cast(counts, DType::F32)?;
        let count = b.sum(counts, &[0], false)?;
        let each = b.sum(logits, &[1], false)?;
        let each = b.mul(each, counts)?;
        let sum = b.sum(each, &[0], false)?;
        b.div(sum, count)
    });
    let (after, loss) = weighed(&graph, 2, None);
    assert_eq!((loss.weight, &loss.doubts[..]), (Weight::Whole, &[][..]));
    assert_eq!(added(&after, &loss), ["batch.sum"]);
    let division = after.node(after.producer(after.outputs["loss"]).unwrap());
    assert_eq!(after.value(division.inputs[1]).name, "batch.sum");
}

#[test]
fn each_of_two_means_gets_its_share() {
    let graph = classifier(2, |b, logits, y| {
        let (a, c) = (b.cross_entropy(logits, y, -100)?, b.mean(logits, &[0, 1], false)?);
        b.add(a, c)
    });
    let (after, loss) = weighed(&graph, 2, None);
    assert_eq!((loss.weight, &loss.doubts[..]), (Weight::Inside, &[][..]));
    assert_eq!(added(&after, &loss), ["share.of_targets.cross_entropy_loss.f32", "share.of_micro_batch.1.f32"]);
}

/// Regression: the targets of a contrastive loss are the places of the samples, the same in each micro-batch. The losses of
/// the micro-batches were added up.
#[test]
fn a_cross_entropy_with_constant_targets_is_a_mean() {
    let contrastive = |rows: usize| {
        classifier(rows, |b, logits, _| {
            let turned = b.transpose(logits)?;
            let scores = b.matmul(logits, turned)?;
            let places = HostTensor::from_i64([rows], &(0..rows as i64).collect::<Vec<_>>())?;
            let places = b.constant("places", places)?;
            b.cross_entropy(scores, places, -100)
        })
    };
    let (_, loss) = weighed(&contrastive(2), 2, Some((&contrastive(3), 3)));
    assert!(loss.couples());
    let count = |op: &Op, inputs: Vec<HostTensor>, types: &[TensorType]| {
        match op {
            Op::CompareScalar(_) => HostTensor::from_bool([2], &[true; 2]),
            Op::Cast(_) => inputs[0].cast(types[0].dtype),
            _ => HostTensor::from_f64([], &[2.0]),
        }
        .map(|tensor| vec![tensor])
        .map_err(|e| e.to_string())
    };
    let mut micro_batches = vec![BTreeMap::new(); 4];
    assert_eq!(loss.feed(&mut micro_batches, &[1.0; 4], 4, &count).unwrap().weights, [0.25; 4]);
}

#[test]
fn samples_that_meet_are_found_but_not_within_their_group() {
    let pairs = classifier(4, |b, logits, _| {
        let pairs = b.reshape(logits, [2, 2, 3])?;
        let turned = b.flip(pairs, &[1])?;
        let product = b.mul(pairs, turned)?;
        b.mean(product, &[0, 1, 2], false)
    });
    let of = |group| {
        let sizes = Sizes { samples: 4, group, other: None };
        BatchLoss::of(pairs.clone(), pairs.outputs["loss"], sizes).unwrap().1
    };
    assert!(of(1).couples());
    assert_eq!(of(2).doubts, []);
    let scores = classifier(4, |b, logits, _| {
        let turned = b.transpose(logits)?;
        let scores = b.matmul(logits, turned)?;
        b.mean(scores, &[0, 1], false)
    });
    assert!(weighed(&scores, 4, None).1.couples());
}
