//! Errors of the builder, and the names it gives.

#![allow(clippy::unwrap_used)]

use fusionllm_graph::ops::{Conv2d, ScaledDotProductAttention};
use fusionllm_graph::{Builder, DType, Graph, GraphError, Init, TensorType, ValueId};
use fusionllm_models::{Gpt2Config, ResNetConfig};

fn inputs(b: &mut Builder, types: &[(DType, &[usize])]) -> Vec<ValueId> {
    types.iter().enumerate().map(|(i, (d, s))| b.input(&format!("x{i}"), *d, *s).unwrap()).collect()
}

fn error(
    types: &[(DType, &[usize])],
    f: impl FnOnce(&mut Builder, &[ValueId]) -> Result<ValueId, GraphError>,
) -> String {
    let mut b = Builder::new("test");
    let x = inputs(&mut b, types);
    b.scope("model.layer", |b| f(b, &x)).unwrap_err().to_string()
}

#[test]
fn errors_name_the_operator_its_place_and_its_operands() {
    const F: DType = DType::F32;
    assert_eq!(
        error(&[(F, &[2, 3]), (F, &[4, 5])], |b, x| b.matmul(x[0], x[1])),
        "matmul (model.layer.matmul): inner sizes differ: 3 in f32[2, 3], 4 in f32[4, 5]; operands: f32[2, 3], f32[4, 5]"
    );
    assert_eq!(
        error(&[(F, &[2, 3]), (DType::F64, &[3])], |b, x| b.add(x[0], x[1])),
        "add (model.layer.add): operands have different element types, f32 and f64; operands: f32[2, 3], f64[3]"
    );
    assert_eq!(
        error(&[(F, &[2, 3]), (F, &[4])], |b, x| b.mul(x[0], x[1])),
        "mul (model.layer.mul): shapes [[2, 3], [4]] do not broadcast; operands: f32[2, 3], f32[4]"
    );
    assert_eq!(
        error(&[(F, &[2, 3])], |b, x| b.reshape(x[0], [7])),
        "view (model.layer.view): cannot view f32[2, 3] as [7]; operands: f32[2, 3]"
    );
    assert_eq!(
        error(&[(F, &[2, 3])], |b, x| b.softmax(x[0], 2)),
        "_softmax (model.layer.softmax): dimension 2 is out of range for f32[2, 3]; operands: f32[2, 3]"
    );
    assert_eq!(
        error(&[(F, &[2, 3]), (F, &[4, 3]), (F, &[3])], |b, x| b.linear(x[0], x[1], Some(x[2]))),
        "linear (model.layer.linear): the bias must have shape [4], got f32[3]; operands: f32[2, 3], f32[4, 3], f32[3]"
    );
    assert_eq!(
        error(&[(F, &[5, 3]), (DType::I32, &[2])], |b, x| b.embedding(x[0], x[1])),
        "embedding (model.layer.embedding): the index must be i64, got i32[2]; operands: f32[5, 3], i32[2]"
    );
    let conv = Conv2d { stride: [1, 1], padding: [0, 0], dilation: [1, 1], groups: 2 };
    assert_eq!(
        error(&[(F, &[1, 3, 8, 8]), (F, &[4, 1, 3, 3])], |b, x| b.conv2d(x[0], x[1], None, conv)),
        "conv2d (model.layer.conv2d): 3 and 4 channels are not multiples of 2 groups; operands: f32[1, 3, 8, 8], f32[4, 1, 3, 3]"
    );
    let attention = ScaledDotProductAttention { is_causal: true, scale: 1.0 };
    let qkv: [(DType, &[usize]); 3] = [(F, &[1, 3, 4, 8]), (F, &[1, 2, 4, 8]), (F, &[1, 2, 4, 8])];
    assert!(
        error(&qkv, |b, x| b.op(attention, x))
            .contains("the number of query heads, 3, is not a multiple of the number of key heads, 2")
    );
    assert_eq!(
        error(&[(F, &[2])], |b, x| b.op(fusionllm_graph::ops::Matmul, x)),
        "matmul (model.layer.matmul): takes 2 operands, got 1; operands: f32[2]"
    );
}

#[test]
fn names_are_unique() {
    let mut b = Builder::new("test");
    b.parameter("w", DType::F32, [1], Init::Constant(0.0)).unwrap();
    let error = b.input("w", DType::F32, [1]).unwrap_err().to_string();
    assert_eq!(error, r#"graph "test": two values are named "w""#);
    let x = b.input("x", DType::F32, [1]).unwrap();
    b.output("loss", x).unwrap();
    assert_eq!(b.output("loss", x).unwrap_err().to_string(), r#"graph "test": two outputs are named "loss""#);
}

/// A node whose name is taken gets a number. Names that the user gave stay.
#[test]
fn node_names_are_made_unique() {
    let mut b = Builder::new("test");
    let x = b.input("add_2", DType::F32, [1]).unwrap();
    for _ in 0..3 {
        b.add(x, x).unwrap();
    }
    let names: Vec<&str> = b.graph().nodes.iter().map(|n| n.name.as_str()).collect();
    assert_eq!(names, ["add", "add_3", "add_4"]);
    b.finish().unwrap();
}

#[test]
fn shapes_larger_than_any_memory_are_errors() {
    let mut b = Builder::new("test");
    let x = b.input("x", DType::F32, [1 << 20]).unwrap();
    let column = b.reshape(x, [1 << 20, 1]).unwrap();
    let wide = b.mul(x, column).unwrap();
    let flat = b.reshape(wide, [1usize << 40, 1]).unwrap();
    let row = b.reshape(wide, [1usize << 40]).unwrap();
    let error = b.mul(flat, row).unwrap_err().to_string();
    assert!(error.contains("is larger than any memory"), "{error}");
    let error = b.full(TensorType::new(DType::F32, [usize::MAX, 2]), 0.0).unwrap_err().to_string();
    assert!(error.contains("too many elements"), "{error}");
}

#[test]
fn invalid_model_configurations_are_errors() {
    let fails = |c: Gpt2Config, sequence| c.build(1, sequence, DType::F32).unwrap_err().to_string();
    let small = Gpt2Config { n_layer: 1, n_embd: 8, n_head: 2, vocab_size: 5, n_positions: 4, ..Gpt2Config::default() };
    assert_eq!(
        fails(Gpt2Config { n_head: 3, ..small.clone() }, 4),
        "model configuration: n_embd = 8 must be a positive multiple of n_head = 3"
    );
    let error = fails(small.clone(), 5);
    assert!(error.contains("a sequence of 5 tokens is not between 1 and the 4 positions of this model"), "{error}");
    let error = fails(Gpt2Config { activation_function: "sine".into(), ..small.clone() }, 4);
    assert!(error.contains("\"sine\" is not known; use gelu_new"), "{error}");
    let error = fails(Gpt2Config { attn_pdrop: 1.0, ..small }, 4);
    assert!(error.contains("attn_pdrop = 1 must lie in [0, 1)"), "{error}");
    let resnet =
        ResNetConfig { depth: 19, ..ResNetConfig::default() }.build(1, 32, DType::F32).unwrap_err().to_string();
    assert!(resnet.contains("depth = 19 is not supported; use 18, 34, 50, 101 or 152"), "{resnet}");
}

/// Published checkpoints load only if the graph has their names and shapes.
#[test]
fn parameters_have_the_published_names() {
    let config =
        Gpt2Config { n_layer: 1, n_embd: 4, n_head: 2, vocab_size: 7, n_positions: 5, ..Gpt2Config::default() };
    let named = |g: &Graph| -> Vec<String> {
        g.parameters().map(|p| format!("{} {:?}", g.value(p).name, g.ty(p).shape)).collect()
    };
    assert_eq!(
        named(&config.build(1, 3, DType::F32).unwrap()),
        [
            "transformer.wte.weight [7, 4]",
            "transformer.wpe.weight [5, 4]",
            "transformer.h.0.ln_1.weight [4]",
            "transformer.h.0.ln_1.bias [4]",
            "transformer.h.0.attn.c_attn.weight [4, 12]",
            "transformer.h.0.attn.c_attn.bias [12]",
            "transformer.h.0.attn.c_proj.weight [4, 4]",
            "transformer.h.0.attn.c_proj.bias [4]",
            "transformer.h.0.ln_2.weight [4]",
            "transformer.h.0.ln_2.bias [4]",
            "transformer.h.0.mlp.c_fc.weight [4, 16]",
            "transformer.h.0.mlp.c_fc.bias [16]",
            "transformer.h.0.mlp.c_proj.weight [16, 4]",
            "transformer.h.0.mlp.c_proj.bias [4]",
            "transformer.ln_f.weight [4]",
            "transformer.ln_f.bias [4]",
        ]
    );
    // The number of parameters, from the papers and model cards.
    let count = |g: &Graph| g.parameters().map(|p| g.ty(p).numel()).sum::<usize>();
    assert_eq!(count(&Gpt2Config::default().build(1, 8, DType::F32).unwrap()), 124_439_808);
    let resnet = |depth| ResNetConfig { depth, ..ResNetConfig::default() }.build(1, 64, DType::F32).unwrap();
    assert_eq!(count(&resnet(18)), 11_689_512);
    assert_eq!(count(&resnet(50)), 25_557_032);
    assert_eq!(count(&resnet(101)), 44_549_160);
    let names = named(&resnet(50));
    for name in [
        "conv1.weight [64, 3, 7, 7]",
        "layer1.0.downsample.0.weight [256, 64, 1, 1]",
        "layer4.2.bn3.bias [2048]",
        "fc.weight [1000, 2048]",
    ] {
        assert!(names.iter().any(|n| n == name), "{name} is missing");
    }
}
