//! A graph from a file or a peer is refused unless all that running it relies on holds.

#![allow(clippy::unwrap_used)]

use fusionllm_graph::models::{Gpt2Config, ResNetConfig};
use fusionllm_graph::ops::{Matmul, Unary};
use fusionllm_graph::{
    Builder, DType, Graph, GraphError, HostTensor, Init, NodeId, Phase, StateUpdate, TensorType, ValueId, ValueKind,
};

/// `loss = Σ tanh(x w)` with a buffer that keeps the product.
fn graph() -> Graph {
    let mut b = Builder::new("small");
    let x = b.input("x", DType::F32, [2, 3]).unwrap();
    let w = b.parameter("w", DType::F32, [3, 4], Init::Normal { std: 0.1 }).unwrap();
    let kept = b.buffer("kept", DType::F32, [2, 4], Init::Constant(0.0)).unwrap();
    let y = b.matmul(x, w).unwrap();
    b.update_buffer(kept, y).unwrap();
    let t = b.unary(Unary::Tanh, y).unwrap();
    let loss = b.sum(t, &[0, 1], false).unwrap();
    b.output("loss", loss).unwrap();
    b.finish().unwrap()
}

/// What `validate` says about the graph after a change.
fn complaint(change: impl FnOnce(&mut Graph)) -> String {
    let mut g = graph();
    change(&mut g);
    g.validate().unwrap_err().to_string()
}

fn matmul(g: &mut Graph) -> &mut fusionllm_graph::Node {
    g.nodes.iter_mut().find(|n| n.op == Matmul.into()).unwrap()
}

#[test]
fn cycles_and_disorder_are_refused() {
    let said = complaint(|g| matmul(g).inputs[0] = ValueId(4));
    assert_eq!(
        said,
        r#"graph "small": node #0 "matmul" (matmul) reads %4 before it is made: the graph has a cycle or is out of order"#
    );
    // In the wrong order every node still names its results, but the first one reads what the second makes.
    let said = complaint(|g| {
        g.nodes.swap(0, 1);
        for (n, node) in g.nodes.iter().enumerate() {
            for (i, v) in node.outputs.iter().enumerate() {
                g.values[v.index()].kind = ValueKind::Result { node: NodeId(n as u32), index: i as u32 };
            }
        }
    });
    assert!(said.contains(r#"node #0 "tanh" (tanh) reads %3 before it is made"#), "{said}");
}

#[test]
fn references_out_of_range_are_refused() {
    let said = complaint(|g| matmul(g).inputs[1] = ValueId(99));
    assert_eq!(said, r#"graph "small": node #0 "matmul" (matmul) reads %99, which is not there"#);
    let said = complaint(|g| matmul(g).outputs[0] = ValueId(99));
    assert!(said.contains("result 0 is %99, which does not name it as its producer"), "{said}");
    let said = complaint(|g| {
        g.outputs.insert("loss".into(), ValueId(99));
    });
    assert!(said.contains(r#"output "loss" is %99, which is not there"#), "{said}");
    let said = complaint(|g| g.state_updates[0].value = ValueId(99));
    assert!(said.contains("a state update names a value that is not there"), "{said}");
    for origin in [None, Some(NodeId(1)), Some(NodeId(2)), Some(NodeId(99))] {
        let said = complaint(|g| {
            g.nodes[1].phase = Phase::InputGrad;
            g.nodes[1].origin = origin;
        });
        assert!(said.contains("is a backward node, but stems from no earlier forward node"), "{said}");
    }
}

#[test]
fn wrong_types_are_refused() {
    // The declared type of a result is not what the operator makes.
    let said = complaint(|g| g.values[3].ty = TensorType::new(DType::F32, [2, 5]));
    assert_eq!(said, r#"graph "small": node #0 "matmul" (matmul): result 0 is f32[2, 4], but f32[2, 5] is declared"#);
    // An operand that the operator cannot take: the error names operator, node and operands.
    let said = complaint(|g| g.values[1].ty = TensorType::new(DType::F32, [5, 4]));
    assert_eq!(
        said,
        "matmul (matmul): inner sizes differ: 3 in f32[2, 3], 5 in f32[5, 4]; operands: f32[2, 3], f32[5, 4]"
    );
    let said = complaint(|g| g.values[1].ty.dtype = DType::I64);
    assert!(said.contains(r#"parameter "w" is i64[3, 4], but only floats are trained"#), "{said}");
    let said = complaint(|g| g.values[2].ty = TensorType::new(DType::F32, [2]));
    assert!(said.contains(r#"buffer "kept" is f32[2], its update f32[2, 4]"#), "{said}");
    let said = complaint(|g| g.state_updates[0].buffer = ValueId(0));
    assert!(said.contains(r#""x" is updated, but is no buffer"#), "{said}");
    let said = complaint(|g| g.values[0].ty = TensorType::new(DType::F32, [usize::MAX, 3]));
    assert!(said.contains("is larger than any memory"), "{said}");
    let said = complaint(|g| g.values[0].kind = ValueKind::RngKey);
    assert!(said.contains(r#"random key "x" must be an i64 scalar"#), "{said}");
}

#[test]
fn names_and_producers_must_be_unique() {
    let said = complaint(|g| g.values[1].name = "x".into());
    assert!(said.contains(r#"two values are named "x""#), "{said}");
    let said = complaint(|g| g.nodes[1].name = "matmul".into());
    assert!(said.contains(r#"node #1 "matmul" (tanh) bears the name of an earlier node"#), "{said}");
    // Two nodes claim one value, and one value is claimed by none.
    let said = complaint(|g| g.nodes[1].outputs[0] = g.nodes[0].outputs[0]);
    assert!(said.contains("which does not name it as its producer"), "{said}");
    let said = complaint(|g| {
        g.nodes.pop();
        g.outputs.clear();
    });
    assert!(said.contains(r#"no node makes "sum""#), "{said}");
    let said = complaint(|g| g.nodes[0].outputs.clear());
    assert!(said.contains("has 1 results, but 0 are declared"), "{said}");
    let said = complaint(|g| {
        g.constants.insert("missing".into(), HostTensor::zeros(TensorType::new(DType::F32, [1])));
    });
    assert!(said.contains(r#"constant "missing" does not fit the value of that name"#), "{said}");
}

/// Two updates of one buffer would make its content depend on the order in which peers run.
#[test]
fn a_buffer_is_updated_once() {
    let said = complaint(|g| {
        let update: StateUpdate = g.state_updates[0];
        g.state_updates.push(update);
    });
    assert!(said.contains(r#"buffer "kept" is updated twice"#), "{said}");
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

/// Numbers that JSON has no literal for stand in real graphs: masks are filled with minus infinity.
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
        GraphError::File("it has version 2, this program reads version 1".into())
    );
    // A version from the future may look like anything; it is still told apart from what is no graph at all.
    let said = Graph::from_json(r#"{"fusionllm_graph": 3, "modules": []}"#).unwrap_err().to_string();
    assert!(said.contains("version 3"), "{said}");
    for text in ["", "{}", "[1, 2]", r#"{"fusionllm_graph": "1"}"#] {
        let said = Graph::from_json(text).unwrap_err().to_string();
        assert!(said.starts_with("graph file: not a FusionLLM graph"), "{said}");
    }
    let said = Graph::from_json(&json.replace("\"matmul\"", "\"hadamard\"")).unwrap_err().to_string();
    assert!(said.starts_with("graph file: unknown variant `hadamard`") || said.contains("matmul"), "{said}");
}

#[test]
fn a_file_that_parses_is_validated() {
    let json = graph().to_json().unwrap().replacen("[\n            3,\n            4\n          ]", "[9, 4]", 1);
    let said = Graph::from_json(&json).unwrap_err().to_string();
    assert!(said.contains("inner sizes differ: 3 in f32[2, 3], 9 in f32[9, 4]"), "{said}");
}

#[test]
fn the_digest_sees_what_decides_the_result() {
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
