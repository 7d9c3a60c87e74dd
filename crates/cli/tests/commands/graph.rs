//! `graph show`.

use std::fs;
use std::io::Read;
use std::process::Stdio;

use fusionllm_graph::{Builder, DType, Graph, Init};
use insta::assert_snapshot;

use super::{call, command};

/// A linear model with a loss.
fn affine() -> Graph {
    let mut b = Builder::new("affine");
    let x = b.input("x", DType::F32, [4, 3]).unwrap();
    let y = b.input("y", DType::I64, [4]).unwrap();
    let w = b.parameter("w", DType::F32, [2, 3], Init::Normal { std: 0.02 }).unwrap();
    let logits = b.linear(x, w, None).unwrap();
    let loss = b.cross_entropy(logits, y, -100).unwrap();
    b.output("loss", loss).unwrap();
    b.finish().unwrap()
}

#[test]
fn a_graph_file_is_listed() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("affine.json"), affine().to_json().unwrap()).unwrap();
    let ran = call(dir.path(), &["graph", "show", "affine.json", "--backward"]);
    assert_eq!((ran.status, ran.err.as_str()), (0, ""));
    assert_snapshot!(ran.out);
}

#[test]
fn listings_fit_eighty_columns() {
    let dir = tempfile::tempdir().unwrap();
    let gpt2 = "[model]\nfamily = \"gpt2\"\nn_layer = 2\n";
    let resnet = "[model]\nfamily = \"resnet\"\ndepth = 50\n[data]\nkind = \"cifar10\"\ntrain = [\"x.bin\"]\n";
    for (name, job) in [("gpt2.toml", gpt2), ("resnet.toml", resnet)] {
        fs::write(dir.path().join(name), job).unwrap();
        let ran = call(dir.path(), &["graph", "show", name, "--backward"]);
        assert_eq!(ran.status, 0, "{}", ran.err);
        let wide: Vec<&str> = ran.out.lines().filter(|line| line.chars().count() > 80).collect();
        assert!(wide.is_empty(), "{wide:#?}");
    }
}

/// Multiplying by hand: 4 rows of 3 times a 3 x 2 matrix are 2 * 4 * 3 * 2 = 48 operations.
#[test]
fn json_tells_the_same() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("affine.json"), affine().to_json().unwrap()).unwrap();
    let show = |args: &[&str]| call(dir.path(), &[&["graph", "show", "affine.json", "--json"], args].concat()).json();
    let listing = show(&[]);
    assert_eq!(listing["name"], "affine");
    assert_eq!(listing["totals"]["parameters"], 6);
    assert_eq!(listing["totals"]["parameter_bytes"], 24);
    assert_eq!(listing["nodes"].as_array().unwrap().len(), 2);
    let linear = &listing["nodes"][0];
    assert_eq!((&linear["op"], &linear["flops"]), (&"linear".into(), &48.0.into()));
    assert_eq!(linear["reads"], serde_json::json!(["x", "w"]));
    assert_eq!(linear["results"][0]["shape"], serde_json::json!([4, 2]));
    let with_backward = show(&["--backward"]);
    let backward = with_backward["nodes"].as_array().unwrap().iter().filter(|n| n["phase"] != "forward").count();
    assert!(backward > 0);
    assert_eq!(with_backward["totals"], listing["totals"]);
    assert_eq!(listing["totals"]["backward_nodes"], backward);
}

#[test]
fn a_model_is_listed_without_its_data() {
    let dir = tempfile::tempdir().unwrap();
    let job = "[model]\nfamily = \"resnet\"\ndepth = 50\nweights = \"far.safetensors\"\n[data]\nkind = \"cifar10\"\ntrain = [\"far/*.bin\"]\n";
    fs::write(dir.path().join("job.toml"), job).unwrap();
    let listing = call(dir.path(), &["graph", "show", "job.toml", "--json"]).json();
    // torchvision's ResNet-50 has 25,557,032 parameters. With 10 classes instead of 1000 it is 990 * 2049 fewer, and
    // with a 3x3 stem 3 * 64 * 40 fewer.
    assert_eq!(listing["totals"]["parameters"], 25_557_032 - 990 * 2049 - 3 * 64 * 40);

    let config =
        r#"{"model_type": "gpt2", "vocab_size": 50257, "n_layer": 1, "n_embd": 64, "n_head": 4, "summary_type": "x"}"#;
    fs::write(dir.path().join("config.json"), config).unwrap();
    let listing = call(dir.path(), &["graph", "show", "config.json", "--json"]).json();
    let block = 12 * 64 * 64 + 13 * 64;
    assert_eq!(listing["totals"]["parameters"], (50257 + 1024 + 2) * 64 + block);
    let in_directory = call(dir.path(), &["graph", "show", "."]);
    assert!(in_directory.out.starts_with("resnet50: "), "a job stands before a config.json: {}", in_directory.out);
}

/// `graph show | head` ended in a panic, because `println!` panics when its pipe is closed.
#[test]
fn a_closed_pipe_is_no_failure() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("job.toml"), "[model]\nn_layer = 48\n").unwrap();
    let mut child = command(dir.path(), &["graph", "show", "job.toml", "--backward"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 4];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    assert_eq!(&first, b"gpt2");
    let mut err = String::new();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    assert_eq!((child.wait().unwrap().code(), err.as_str()), (Some(0), ""));
}
