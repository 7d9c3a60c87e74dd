//! Invalid graphs from a file or a peer are refused before anything runs them.

#![allow(clippy::unwrap_used)]

use fusionllm_graph::ops::{Matmul, Unary};
use fusionllm_graph::{
    Builder, DType, Graph, GraphError, HostTensor, Init, NodeId, Phase, StateUpdate, TensorType, ValueId, ValueKind,
};
use fusionllm_models::{Gpt2Config, ResNetConfig};

/// `loss = Σ tanh(x w)` with a buffer that stores the product.
fn graph() -> Graph {
    let mut b = Builder::new("small");
    let x = b.input("x", DType::F32, [2, 3]).unwrap();
    let w = b.parameter("w", DType::F32, [3, 4], Init::Normal { std: 0.1 }).unwrap();
    let saved = b.buffer("saved", DType::F32, [2, 4], Init::Constant(0.0)).unwrap();
    let y = b.matmul(x, w).unwrap();
    b.update_buffer(saved, y).unwrap();
    let t = b.unary(Unary::Tanh, y).unwrap();
    let loss = b.sum(t, &[0, 1], false).unwrap();
    b.output("loss", loss).unwrap();
    b.finish().unwrap()
}

/// The error of `validate` for the graph after a change.
fn error_after(change: impl FnOnce(&mut Graph)) -> String {
    let mut g = graph();
    change(&mut g);
    g.validate().unwrap_err().to_string()
}

fn matmul(g: &mut Graph) -> &mut fusionllm_graph::Node {
    g.nodes.iter_mut().find(|n| n.op == Matmul.into()).unwrap()
}

#[test]
fn cycles_and_wrong_orders_are_refused() {
    let error = error_after(|g| matmul(g).inputs[0] = ValueId(4));
    assert_eq!(
        error,
        r#"graph "small": node #0 "matmul" (matmul) reads %4 before it is computed: the nodes are out of order or form a cycle"#
    );
    // The nodes are swapped and their results renumbered: the first node now reads a result of the second.
    let error = error_after(|g| {
        g.nodes.swap(0, 1);
        for (n, node) in g.nodes.iter().enumerate() {
            for (i, v) in node.outputs.iter().enumerate() {
                g.values[v.index()].kind = ValueKind::Result { node: NodeId(n as u32), index: i as u32 };
            }
        }
    });
    assert!(error.contains(r#"node #0 "tanh" (tanh) reads %3 before it is computed"#), "{error}");
}

#[test]
fn references_out_of_range_are_refused() {
    let error = error_after(|g| matmul(g).inputs[1] = ValueId(99));
    assert_eq!(error, r#"graph "small": node #0 "matmul" (matmul) reads %99, which does not exist"#);
    let error = error_after(|g| matmul(g).outputs[0] = ValueId(99));
    assert!(error.contains("result 0 is %99, but %99 names another producer"), "{error}");
    let error = error_after(|g| {
        g.outputs.insert("loss".into(), ValueId(99));
    });
    assert!(error.contains(r#"output "loss" is %99, which does not exist"#), "{error}");
    let error = error_after(|g| g.state_updates[0].value = ValueId(99));
    assert!(error.contains("the value of a state update is %99, which does not exist"), "{error}");
    for origin in [None, Some(NodeId(1)), Some(NodeId(2)), Some(NodeId(99))] {
        let error = error_after(|g| {
            g.nodes[1].phase = Phase::InputGrad;
            g.nodes[1].origin = origin;
        });
        assert!(error.contains("is a backward node, but its origin is no earlier forward node"), "{error}");
    }
}

#[test]
fn wrong_types_are_refused() {
    // The declared type of a result differs from the operator's result.
    let error = error_after(|g| g.values[3].ty = TensorType::new(DType::F32, [2, 5]));
    assert_eq!(error, r#"graph "small": node #0 "matmul" (matmul): result 0 is f32[2, 4], but f32[2, 5] is declared"#);
    // The operator cannot take an operand: the error names the operator, the node and the operands.
    let error = error_after(|g| g.values[1].ty = TensorType::new(DType::F32, [5, 4]));
    assert_eq!(
        error,
        "matmul (matmul): inner sizes differ: 3 in f32[2, 3], 5 in f32[5, 4]; operands: f32[2, 3], f32[5, 4]"
    );
    let error = error_after(|g| g.values[1].ty.dtype = DType::I64);
    assert!(error.contains(r#"parameter "w" must have floats, but is i64[3, 4]"#), "{error}");
    let error = error_after(|g| g.values[2].ty = TensorType::new(DType::F32, [2]));
    assert!(error.contains(r#"buffer "saved" is f32[2], but its update is f32[2, 4]"#), "{error}");
    let error = error_after(|g| g.state_updates[0].buffer = ValueId(0));
    assert!(error.contains(r#""x" is updated, but it is not a buffer"#), "{error}");
    let error = error_after(|g| g.values[0].ty = TensorType::new(DType::F32, [usize::MAX, 3]));
    assert!(error.contains("is larger than any memory"), "{error}");
    let error = error_after(|g| g.values[0].kind = ValueKind::RngKey);
    assert!(error.contains(r#"random key "x" must be an i64 scalar"#), "{error}");
}

/// A product that wraps would make a huge tensor look small.
#[test]
fn sizes_of_hostile_shapes_saturate() {
    let ty = |shape: &[usize]| TensorType::new(DType::F32, shape);
    let max = usize::MAX;
    for shape in [&[max, 2][..], &[1 << 32, 1 << 32], &[1 << 47], &[max, max, 0], &[0, max, max], &[1; 65]] {
        assert!(ty(shape).check().is_err(), "{shape:?}");
        assert_eq!(ty(shape).bytes(), ty(shape).numel().saturating_mul(4), "{shape:?}");
    }
    assert_eq!(ty(&[1 << 32, 1 << 32]).numel(), max);
    assert_eq!(ty(&[1 << 46]).check(), Ok(TensorType::MAX_BYTES));
    assert_eq!((ty(&[0, 7]).check(), ty(&[]).check()), (Ok(0), Ok(4)));
}

#[test]
fn names_and_producers_must_be_unique() {
    let error = error_after(|g| g.values[1].name = "x".into());
    assert!(error.contains(r#"two values are named "x""#), "{error}");
    let error = error_after(|g| g.nodes[1].name = "matmul".into());
    assert!(error.contains(r#"node #1 "matmul" (tanh) has the name of an earlier node"#), "{error}");
    // Two nodes have the same result, and no node has another result.
    let error = error_after(|g| g.nodes[1].outputs[0] = g.nodes[0].outputs[0]);
    assert!(error.contains("names another producer"), "{error}");
    let error = error_after(|g| {
        g.nodes.pop();
        g.outputs.clear();
    });
    assert!(error.contains(r#"no node computes "sum""#), "{error}");
    let error = error_after(|g| g.nodes[0].outputs.clear());
    assert!(error.contains("has 1 results, but 0 are declared"), "{error}");
    let error = error_after(|g| {
        g.constants.insert("missing".into(), HostTensor::zeros(TensorType::new(DType::F32, [1])));
    });
    assert!(error.contains(r#"constant "missing" does not match the value of that name"#), "{error}");
}

/// With two updates the content of a buffer would depend on the order in which peers run.
#[test]
fn a_buffer_has_at_most_one_update() {
    let error = error_after(|g| {
        let update: StateUpdate = g.state_updates[0];
        g.state_updates.push(update);
    });
    assert!(error.contains(r#"buffer "saved" is updated twice"#), "{error}");
}

#[test]
fn json_keeps_every_graph() {
    let gpt2 = Gpt2Config { n_layer: 2, n_embd: 8, n_head: 2, vocab_size: 11, ..Gpt2Config::default() };
    let graphs = [
        graph(),
        gpt2.build(2, 4, DType::F32).unwrap(),
        ResNetConfig { depth: 50, width: 2, num_classes: 3, ..ResNetConfig::default() }
            .build(2, 32, DType::F64)
            .unwrap(),
    ];
    for g in graphs {
        let back = Graph::from_json(&g.to_json().unwrap()).unwrap();
        assert_eq!(back, g);
        assert_eq!(back.digest(), g.digest());
        let train = fusionllm_graph::autodiff::differentiate(&g, g.outputs["loss"]).unwrap().graph;
        assert_eq!(Graph::from_json(&train.to_json().unwrap()).unwrap(), train);
    }
}

/// JSON has no literal for infinities, but real graphs contain them: masks are filled with minus infinity.
#[test]
fn json_keeps_infinities_and_nan() {
    let mut b = Builder::new("mask");
    for value in [f64::NEG_INFINITY, f64::INFINITY, f64::NAN, -0.0, 0.1] {
        b.full(TensorType::new(DType::F32, [1]), value).unwrap();
    }
    let g = b.finish().unwrap();
    let back = Graph::from_json(&g.to_json().unwrap()).unwrap();
    assert_eq!(format!("{:?}", back.nodes), format!("{:?}", g.nodes));
}

#[test]
fn another_version_is_refused() {
    let json = graph().to_json().unwrap();
    let other = json.replacen("\"fusionllm_graph\": 1", "\"fusionllm_graph\": 2", 1);
    assert_ne!(json, other);
    assert_eq!(
        Graph::from_json(&other).unwrap_err(),
        GraphError::File("it has format version 2, but this program reads version 1".into())
    );
    // A future version may have any other fields. The error still names the version.
    let error = Graph::from_json(r#"{"fusionllm_graph": 3, "modules": []}"#).unwrap_err().to_string();
    assert!(error.contains("version 3"), "{error}");
    for text in ["", "{}", "[1, 2]", r#"{"fusionllm_graph": "1"}"#] {
        let error = Graph::from_json(text).unwrap_err().to_string();
        assert!(error.starts_with("graph file: not a FusionLLM graph"), "{error}");
    }
    let error = Graph::from_json(&json.replace("\"matmul\"", "\"hadamard\"")).unwrap_err().to_string();
    assert!(error.starts_with("graph file: unknown variant `hadamard`") || error.contains("matmul"), "{error}");
}

#[test]
fn a_parsed_file_is_validated() {
    let json = graph().to_json().unwrap().replacen("[\n            3,\n            4\n          ]", "[9, 4]", 1);
    let error = Graph::from_json(&json).unwrap_err().to_string();
    assert!(error.contains("inner sizes differ: 3 in f32[2, 3], 9 in f32[9, 4]"), "{error}");
}

#[test]
fn every_change_of_the_result_changes_the_digest() {
    let changes: [fn(&mut Graph); 6] = [
        |g| g.values[0].name = "z".into(),
        |g| g.values[0].ty = TensorType::new(DType::F32, [7, 3]),
        |g| g.values[1].kind = ValueKind::Parameter(Init::Normal { std: 0.2 }),
        |g| g.nodes[1].op = Unary::Sin.into(),
        |g| g.nodes[1].inputs[0] = ValueId(2),
        |g| g.state_updates.clear(),
    ];
    let digest = graph().digest();
    assert_eq!(digest, graph().digest());
    for change in changes {
        let mut g = graph();
        change(&mut g);
        assert_ne!(g.digest(), digest);
    }
}
