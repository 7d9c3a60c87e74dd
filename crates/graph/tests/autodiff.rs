//! The backward graph: which nodes it has, what they are tagged with, and in what order gradients add up. That the numbers are right is the
//! backend crate's to test.

#![allow(clippy::unwrap_used, clippy::panic)]

use fusionllm_graph::autodiff::differentiate;
use fusionllm_graph::models::{Gpt2Config, ResNetConfig, ResNetStem};
use fusionllm_graph::ops::{Binary, CumSum, Matmul, ScaledDotProductAttention, SquaredNorm, Unary};
use fusionllm_graph::{Builder, DType, Graph, GraphError, Init, Node, Op, Phase, TrainGraph, ValueId};

const F: DType = DType::F32;
const NORMAL: Init = Init::Normal { std: 0.1 };

fn train(b: Builder, loss: ValueId) -> TrainGraph {
    differentiate(&b.finish().unwrap(), loss).unwrap()
}

/// The backward nodes of a forward node, as "operator phase".
fn backward_of(t: &TrainGraph, forward: &str) -> Vec<String> {
    let at = t.graph.nodes.iter().position(|n| n.name == forward).unwrap();
    let of = |n: &&Node| n.phase != Phase::Forward && n.origin.is_some_and(|o| o.index() == at);
    t.graph.nodes.iter().filter(of).map(|n| format!("{} {:?}", n.op.name(), n.phase)).collect()
}

fn phase_of(t: &TrainGraph, v: ValueId) -> Phase {
    t.graph.node(t.graph.producer(v).unwrap()).phase
}

#[test]
fn the_forward_graph_stays_as_it_was() {
    let config = Gpt2Config { n_layer: 2, n_embd: 8, n_head: 2, vocab_size: 11, ..Gpt2Config::default() };
    let forward = config.build(2, 4, F).unwrap();
    let t = differentiate(&forward, forward.outputs["loss"]).unwrap();
    assert_eq!(t.graph.nodes[..forward.nodes.len()], forward.nodes[..]);
    assert_eq!(t.graph.values[..forward.values.len()], forward.values[..]);
    t.graph.validate().unwrap();
    for n in &t.graph.nodes[forward.nodes.len()..] {
        let origin = n.origin.unwrap();
        assert_ne!(n.phase, Phase::Forward);
        assert!(origin.index() < forward.nodes.len(), "{} stems from a backward node", n.name);
    }
    assert_eq!(t.gradients.len(), forward.parameters().count());
    for g in &t.gradients {
        for c in &g.contributions {
            assert_eq!(t.graph.ty(*c), t.graph.ty(g.parameter));
        }
    }
}

/// dX waits for nothing but goes on; dW = Gᵀ X and db = Σ G can wait.
#[test]
fn a_linear_layer_splits_into_input_and_weight_gradient() {
    let mut b = Builder::new("linear");
    let x = b.input("x", F, [2, 3]).unwrap();
    let w0 = b.parameter("w0", F, [3, 3], NORMAL).unwrap();
    let w1 = b.parameter("w1", F, [4, 3], NORMAL).unwrap();
    let bias = b.parameter("bias", F, [4], NORMAL).unwrap();
    let h = b.scope("first", |b| b.linear(x, w0, None)).unwrap();
    let y = b.scope("second", |b| b.linear(h, w1, Some(bias))).unwrap();
    let loss = b.mean(y, &[0, 1], false).unwrap();
    let t = train(b, loss);
    assert_eq!(
        backward_of(&t, "second.linear"),
        ["matmul InputGrad", "permute WeightGrad", "matmul WeightGrad", "sum.dim_IntList WeightGrad",]
    );
    // The data want no gradient, so nothing of the first layer's backward has to go on.
    assert_eq!(backward_of(&t, "first.linear"), ["permute WeightGrad", "matmul WeightGrad"]);
    assert!(backward_of(&t, "mean").iter().all(|n| n.ends_with("InputGrad")));
}

#[test]
fn a_tied_embedding_has_one_contribution_for_each_use() {
    let mut b = Builder::new("tied");
    let ids = b.input("ids", DType::I64, [2, 3]).unwrap();
    let labels = b.input("labels", DType::I64, [2, 3]).unwrap();
    let wte = b.parameter("wte", F, [7, 4], NORMAL).unwrap();
    let x = b.embedding(wte, ids).unwrap();
    let x = b.unary(Unary::Tanh, x).unwrap();
    let logits = b.linear(x, wte, None).unwrap();
    let loss = b.cross_entropy(logits, labels, -100).unwrap();
    let t = train(b, loss);
    let [gradient] = &t.gradients[..] else { panic!("one parameter, {} gradients", t.gradients.len()) };
    assert_eq!(gradient.parameter, wte);
    let ops: Vec<&str> =
        gradient.contributions.iter().map(|c| t.graph.node(t.graph.producer(*c).unwrap()).op.name()).collect();
    // From the last user to the first; each stays on its own, so that a cut between them changes no sum.
    assert_eq!(ops, ["matmul", "embedding_dense_backward"]);
    for c in &gradient.contributions {
        assert_eq!(phase_of(&t, *c), Phase::WeightGrad);
    }
    assert_eq!(backward_of(&t, "tanh").iter().filter(|n| n.ends_with("InputGrad")).count(), 3);
}

/// The way from a weight's view back to the weight is part of its gradient: nothing that goes on waits for it.
#[test]
fn a_weight_seen_through_a_view_still_makes_a_weight_gradient() {
    let mut b = Builder::new("view");
    let x = b.input("x", F, [2, 3]).unwrap();
    let w0 = b.parameter("w0", F, [3, 3], NORMAL).unwrap();
    let w1 = b.parameter("w1", F, [4, 3], NORMAL).unwrap();
    let h = b.matmul(x, w0).unwrap();
    let wt = b.permute(w1, &[1, 0]).unwrap();
    let scaled = b.mul_scalar(wt, 0.5).unwrap();
    let y = b.scope("second", |b| b.matmul(h, scaled)).unwrap();
    let loss = b.sum(y, &[0, 1], false).unwrap();
    let t = train(b, loss);
    assert_eq!(backward_of(&t, "permute"), ["permute WeightGrad"]);
    assert_eq!(backward_of(&t, "mul"), ["mul.Scalar WeightGrad"]);
    let second = backward_of(&t, "second.matmul");
    assert_eq!(second, ["permute InputGrad", "matmul InputGrad", "permute WeightGrad", "matmul WeightGrad"]);
}

/// Where gradients meet, they add up in a chain from the last user to the first.
#[test]
fn gradients_that_meet_are_added_in_the_graphs_order() {
    let mut b = Builder::new("shared");
    let w = b.parameter("w", F, [2], NORMAL).unwrap();
    let x = b.unary(Unary::Exp, w).unwrap();
    let first = b.unary(Unary::Sin, x).unwrap();
    let second = b.unary(Unary::Cos, x).unwrap();
    let third = b.mul(x, second).unwrap();
    let sum = b.add(first, third).unwrap();
    let loss = b.sum(sum, &[0], false).unwrap();
    let t = train(b, loss);
    let adds: Vec<&Node> =
        t.graph.nodes.iter().filter(|n| n.phase != Phase::Forward && n.op == Op::Binary(Binary::Add)).collect();
    // Three users of x: two additions, the second one onto the first one's result.
    assert_eq!(adds.len(), 2);
    assert_eq!(adds[1].inputs[0], adds[0].outputs[0]);
    let from = |v: ValueId| {
        let origin = t.graph.node(t.graph.producer(v).unwrap()).origin.unwrap();
        t.graph.node(origin).name.as_str()
    };
    assert_eq!([from(adds[0].inputs[0]), from(adds[0].inputs[1]), from(adds[1].inputs[1])], ["mul", "cos", "sin"]);
}

/// A weight used twice by one node has two contributions, in operand order.
#[test]
fn a_parameter_may_be_both_operands() {
    let mut b = Builder::new("square");
    let w = b.parameter("w", F, [2, 2], NORMAL).unwrap();
    let y = b.matmul(w, w).unwrap();
    let loss = b.sum(y, &[0, 1], false).unwrap();
    let t = train(b, loss);
    assert_eq!(t.gradients[0].contributions.len(), 2);
}

#[test]
fn parameters_that_the_loss_does_not_see_have_no_gradient() {
    let mut b = Builder::new("unused");
    let w = b.parameter("w", F, [2], NORMAL).unwrap();
    let unused = b.parameter("unused", F, [2], NORMAL).unwrap();
    let compared = b.parameter("compared", F, [2], NORMAL).unwrap();
    let dead = b.mul(w, unused).unwrap();
    b.output("dead", dead).unwrap();
    // A comparison passes no gradient, and no error either.
    let above = b.op(fusionllm_graph::ops::Compare::Gt, &[w, compared]).unwrap();
    let zero = b.zero_like_scalar(w).unwrap();
    let kept = b.where_(above, w, zero).unwrap();
    let loss = b.sum(kept, &[0], false).unwrap();
    let t = train(b, loss);
    let names: Vec<&str> = t.gradients.iter().map(|g| t.graph.value(g.parameter).name.as_str()).collect();
    assert_eq!(names, ["w"]);
}

#[test]
fn what_cannot_be_differentiated_is_named() {
    let mut b = Builder::new("loss");
    let w = b.parameter("w", F, [2], NORMAL).unwrap();
    let graph = b.clone().finish().unwrap();
    let said = differentiate(&graph, w).unwrap_err().to_string();
    assert_eq!(said, r#"graph "loss": the loss "w" must be one float, is f32[2]"#);
    let count = b.arange(DType::I64, 0.0, 1.0, 1).unwrap();
    let said = differentiate(&b.clone().finish().unwrap(), count).unwrap_err().to_string();
    assert!(said.contains("must be one float, is i64[1]"), "{said}");

    let norm = b.scope("clip", |b| b.op(SquaredNorm, &[w])).unwrap();
    let error = differentiate(&b.finish().unwrap(), norm).unwrap_err();
    assert!(matches!(&error, GraphError::NotDifferentiable { name, .. } if name == "clip.foreach_norm"));
    assert_eq!(
        error.to_string(),
        "_foreach_norm (clip.foreach_norm, node #1) has no derivative, but a gradient reaches it: no derivative is defined"
    );

    // The logarithm of attention's denominators is for its backward operator alone.
    let mut b = Builder::new("lse");
    let q = b.parameter("q", F, [1, 1, 2, 2], NORMAL).unwrap();
    let out = b.apply(ScaledDotProductAttention { is_causal: false, scale: 1.0 }, &[q, q, q]).unwrap();
    let loss = b.sum(out[1], &[0, 1, 2], false).unwrap();
    let said = differentiate(&b.finish().unwrap(), loss).unwrap_err().to_string();
    assert!(said.contains("a gradient reaches its lse"), "{said}");
}

/// The weight of a micro-batch enters where the gradient starts, whatever shape of one element the loss has.
#[test]
fn a_loss_of_one_element_in_any_shape_will_do() {
    for shape in [vec![], vec![1], vec![1, 1]] {
        let mut b = Builder::new("shape");
        let w = b.parameter("w", F, shape.clone(), NORMAL).unwrap();
        let loss = if shape.is_empty() { b.unary(Unary::Exp, w) } else { b.op(CumSum { dim: 0 }, &[w]) }.unwrap();
        let t = train(b, loss);
        assert_eq!(t.graph.ty(t.loss_weight).rank(), 0);
        assert_eq!(t.graph.ty(t.gradients[0].contributions[0]).shape, shape);
    }
}

/// Every product of a model's backward pass is there once: one for the input's gradient and one for the weight's.
#[test]
fn models_have_as_many_backward_products_as_they_should() {
    let count = |g: &Graph, op: fn(&Op) -> bool| {
        let t = differentiate(g, g.outputs["loss"]).unwrap();
        let of = |phase| t.graph.nodes.iter().filter(|n| n.phase == phase && op(&n.op)).count();
        [of(Phase::Forward), of(Phase::InputGrad), of(Phase::WeightGrad)]
    };
    let gpt2 =
        Gpt2Config { n_layer: 3, n_embd: 8, n_head: 2, vocab_size: 11, attn_pdrop: 0.0, ..Gpt2Config::default() };
    let gpt2 = gpt2.build(2, 4, F).unwrap();
    // Four products a block, each with both gradients, and the head's two.
    assert_eq!(count(&gpt2, |op| *op == Op::Matmul(Matmul)), [12, 13, 13]);
    let resnet = ResNetConfig { depth: 18, width: 2, num_classes: 3, stem: ResNetStem::Cifar }.build(2, 32, F).unwrap();
    // The image wants no gradient.
    assert_eq!(count(&resnet, |op| matches!(op, Op::Conv2d(_))), [20, 0, 0]);
    assert_eq!(count(&resnet, |op| matches!(op, Op::Conv2dInputGrad(_))), [0, 19, 0]);
    assert_eq!(count(&resnet, |op| matches!(op, Op::Conv2dWeightGrad(_))), [0, 0, 20]);
}
