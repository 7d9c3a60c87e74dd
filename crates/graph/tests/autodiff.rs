//! The backward graph: its nodes, their tags, and the order in which gradients are added. The backend crate tests the
//! numbers.

#![allow(clippy::unwrap_used, clippy::panic)]

use fusionllm_graph::autodiff::differentiate;
use fusionllm_graph::ops::{Binary, CumSum, Matmul, ScaledDotProductAttention, SquaredNorm, Unary};
use fusionllm_graph::{Builder, DType, Graph, GraphError, Init, Node, Op, Phase, TrainGraph, ValueId};
use fusionllm_models::{Gpt2Config, ResNetConfig, ResNetStem};

const F: DType = DType::F32;
const NORMAL: Init = Init::Normal { std: 0.1 };

fn train(b: Builder, loss: ValueId) -> TrainGraph {
    differentiate(&b.finish().unwrap(), loss).unwrap()
}

/// The backward nodes of a forward node, as "OPERATOR PHASE".
fn backward_of(t: &TrainGraph, forward: &str) -> Vec<String> {
    let at = t.graph.nodes.iter().position(|n| n.name == forward).unwrap();
    let of = |n: &&Node| n.phase != Phase::Forward && n.origin.is_some_and(|o| o.index() == at);
    t.graph.nodes.iter().filter(of).map(|n| format!("{} {:?}", n.op.name(), n.phase)).collect()
}

fn phase_of(t: &TrainGraph, v: ValueId) -> Phase {
    t.graph.node(t.graph.producer(v).unwrap()).phase
}

#[test]
fn the_forward_graph_is_unchanged() {
    let config = Gpt2Config { n_layer: 2, n_embd: 8, n_head: 2, vocab_size: 11, ..Gpt2Config::default() };
    let forward = config.build(2, 4, F).unwrap();
    let t = differentiate(&forward, forward.outputs["loss"]).unwrap();
    assert_eq!(t.graph.nodes[..forward.nodes.len()], forward.nodes[..]);
    assert_eq!(t.graph.values[..forward.values.len()], forward.values[..]);
    t.graph.validate().unwrap();
    for n in &t.graph.nodes[forward.nodes.len()..] {
        let origin = n.origin.unwrap();
        assert_ne!(n.phase, Phase::Forward);
        assert!(origin.index() < forward.nodes.len(), "the origin of {} is a backward node", n.name);
    }
    assert_eq!(t.gradients.len(), forward.parameters().count());
    for g in &t.gradients {
        for c in &g.contributions {
            assert_eq!(t.graph.ty(*c), t.graph.ty(g.parameter));
        }
    }
}

/// Earlier layers need dX. No other node needs dW = Gᵀ X and db = Σ G.
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
    // The data need no gradient, so the first layer has no input gradient.
    assert_eq!(backward_of(&t, "first.linear"), ["permute WeightGrad", "matmul WeightGrad"]);
    assert!(backward_of(&t, "mean").iter().all(|n| n.ends_with("InputGrad")));
}

#[test]
fn a_tied_embedding_has_one_term_per_use() {
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
    // The terms go from the last use to the first. They are not added here, so a cut between the uses does not change
    // the sum.
    assert_eq!(ops, ["matmul", "embedding_dense_backward"]);
    for c in &gradient.contributions {
        assert_eq!(phase_of(&t, *c), Phase::WeightGrad);
    }
    assert_eq!(backward_of(&t, "tanh").iter().filter(|n| n.ends_with("InputGrad")).count(), 3);
}

/// The gradient of a view of a weight is part of the weight gradient: no input gradient needs it.
#[test]
fn the_gradient_of_a_view_of_a_weight_is_a_weight_gradient() {
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

/// The gradients of a value with several readers are added in a chain, from the last reader to the first.
#[test]
fn gradients_of_several_readers_are_added_in_graph_order() {
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
    // Three readers of x need two additions. The second adds to the result of the first.
    assert_eq!(adds.len(), 2);
    assert_eq!(adds[1].inputs[0], adds[0].outputs[0]);
    let from = |v: ValueId| {
        let origin = t.graph.node(t.graph.producer(v).unwrap()).origin.unwrap();
        t.graph.node(origin).name.as_str()
    };
    assert_eq!([from(adds[0].inputs[0]), from(adds[0].inputs[1]), from(adds[1].inputs[1])], ["mul", "cos", "sin"]);
}

/// A weight that is both operands of a node has two terms, in operand order.
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
fn parameters_that_do_not_affect_the_loss_have_no_gradient() {
    let mut b = Builder::new("unused");
    let w = b.parameter("w", F, [2], NORMAL).unwrap();
    let unused = b.parameter("unused", F, [2], NORMAL).unwrap();
    let compared = b.parameter("compared", F, [2], NORMAL).unwrap();
    let dead = b.mul(w, unused).unwrap();
    b.output("dead", dead).unwrap();
    // A comparison passes no gradient. That is not an error.
    let above = b.op(fusionllm_graph::ops::Compare::Gt, &[w, compared]).unwrap();
    let zero = b.zero_like_scalar(w).unwrap();
    let kept = b.where_(above, w, zero).unwrap();
    let loss = b.sum(kept, &[0], false).unwrap();
    let t = train(b, loss);
    let names: Vec<&str> = t.gradients.iter().map(|g| t.graph.value(g.parameter).name.as_str()).collect();
    assert_eq!(names, ["w"]);
}

#[test]
fn nodes_without_a_derivative_are_named() {
    let mut b = Builder::new("loss");
    let w = b.parameter("w", F, [2], NORMAL).unwrap();
    let graph = b.clone().finish().unwrap();
    let message = differentiate(&graph, w).unwrap_err().to_string();
    assert_eq!(message, r#"graph "loss": the loss "w" must be a single float, but is f32[2]"#);
    let count = b.arange(DType::I64, 0.0, 1.0, 1).unwrap();
    let message = differentiate(&b.clone().finish().unwrap(), count).unwrap_err().to_string();
    assert!(message.contains("must be a single float, but is i64[1]"), "{message}");

    let norm = b.scope("clip", |b| b.op(SquaredNorm, &[w])).unwrap();
    let error = differentiate(&b.finish().unwrap(), norm).unwrap_err();
    assert!(matches!(&error, GraphError::NotDifferentiable { name, .. } if name == "clip.foreach_norm"));
    assert_eq!(
        error.to_string(),
        "_foreach_norm (clip.foreach_norm, node #1) has no derivative, but a gradient reaches it: no derivative is defined"
    );

    // Only the backward operator of attention may read the lse.
    let mut b = Builder::new("lse");
    let q = b.parameter("q", F, [1, 1, 2, 2], NORMAL).unwrap();
    let out = b.apply(ScaledDotProductAttention { is_causal: false, scale: 1.0 }, &[q, q, q]).unwrap();
    let loss = b.sum(out[1], &[0, 1, 2], false).unwrap();
    let message = differentiate(&b.finish().unwrap(), loss).unwrap_err().to_string();
    assert!(message.contains("a gradient reaches its lse"), "{message}");
}

/// The loss weight is a scalar. It is reshaped to the shape of the loss.
#[test]
fn a_loss_may_have_any_shape_of_one_element() {
    for shape in [vec![], vec![1], vec![1, 1]] {
        let mut b = Builder::new("shape");
        let w = b.parameter("w", F, shape.clone(), NORMAL).unwrap();
        let loss = if shape.is_empty() { b.unary(Unary::Exp, w) } else { b.op(CumSum { dim: 0 }, &[w]) }.unwrap();
        let t = train(b, loss);
        assert_eq!(t.graph.ty(t.loss_weight).rank(), 0);
        assert_eq!(t.graph.ty(t.gradients[0].contributions[0]).shape, shape);
    }
}

/// Each matrix product of the forward pass has one product for the input gradient and one for the weight gradient.
#[test]
fn backward_has_two_products_per_forward_product() {
    let count = |g: &Graph, op: fn(&Op) -> bool| {
        let t = differentiate(g, g.outputs["loss"]).unwrap();
        let of = |phase| t.graph.nodes.iter().filter(|n| n.phase == phase && op(&n.op)).count();
        [of(Phase::Forward), of(Phase::InputGrad), of(Phase::WeightGrad)]
    };
    let gpt2 =
        Gpt2Config { n_layer: 3, n_embd: 8, n_head: 2, vocab_size: 11, attn_pdrop: 0.0, ..Gpt2Config::default() };
    let gpt2 = gpt2.build(2, 4, F).unwrap();
    // Four products per block and one in the head. Each has an input and a weight gradient.
    assert_eq!(count(&gpt2, |op| *op == Op::Matmul(Matmul)), [12, 13, 13]);
    let resnet = ResNetConfig { depth: 18, width: 2, num_classes: 3, stem: ResNetStem::Cifar }.build(2, 32, F).unwrap();
    // The image needs no gradient.
    assert_eq!(count(&resnet, |op| matches!(op, Op::Conv2d(_))), [20, 0, 0]);
    assert_eq!(count(&resnet, |op| matches!(op, Op::Conv2dInputGrad(_))), [0, 19, 0]);
    assert_eq!(count(&resnet, |op| matches!(op, Op::Conv2dWeightGrad(_))), [0, 0, 20]);
}
