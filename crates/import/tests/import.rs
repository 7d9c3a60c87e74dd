//! The import of a small model.

mod common;

use common::*;
use fusionllm_graph::{Advice, Op, ValueKind};
use fusionllm_import::{Archive, FloatType, ImportError, ImportOptions, operator_table};
use serde_json::json;

#[test]
fn parameters_buffers_and_constants_are_imported() {
    let (mut archive, imported) = import(archive(&program(), &weights())).unwrap();
    let graph = &imported.graph;
    let names = |values: Vec<fusionllm_graph::ValueId>| -> Vec<String> {
        values.iter().map(|v| graph.value(*v).name.clone()).collect()
    };
    assert_eq!(names(graph.parameters().collect()), ["head.weight", "head.bias"]);
    assert_eq!(names(graph.buffers().collect()), ["count"]);
    assert_eq!(names(graph.inputs().collect()), ["x", "y"]);
    assert_eq!(graph.state_updates.len(), 1);
    // The product of a constant and a number is folded at import.
    let operators: Vec<&str> = graph.nodes.iter().map(|n| n.op.name()).collect();
    assert!(!operators.iter().any(|name| name.starts_with("mul")), "{operators:?}");
    assert!(graph.nodes.iter().any(|n| matches!(n.op, Op::CrossEntropy(_)) && n.name.starts_with("head.")));
    assert_eq!(archive.load(&imported, "head.bias").unwrap().to_f64().len(), 4);
    assert_eq!(archive.load(&imported, "count").unwrap().to_i64().unwrap(), [7]);
    assert_eq!(graph.metadata["targets"], json!({"input": "y", "ignore_index": -100}));
}

/// The first number was taken for the loss, whatever it was.
#[test]
fn the_loss_is_an_output_that_parameters_have_a_gradient_of() {
    let mut program = program();
    let module = &mut program["graph_module"];
    let nodes = module["graph"]["nodes"].as_array_mut().unwrap();
    nodes.push(node("detach.default", &[("self", tensor("loss"))], "seen"));
    module["graph"]["tensor_values"]["seen"] = meta(7, &[], false);
    let returned =
        |names: &[&str]| names.iter().map(|n| json!({"user_output": {"arg": tensor(n)}})).collect::<Vec<_>>();
    module["signature"]["output_specs"] = json!(returned(&["add", "seen", "loss"]));
    let (_, imported) = import(archive(&program, &weights())).unwrap();
    assert!(imported.graph.outputs.contains_key("correct") && imported.without_loss().is_none());
    assert!(imported.graph.nodes.iter().all(|n| n.op.name() != "detach"), "it is pruned");
    let told = "net.pt2: output 2 (`loss`) is the loss; no parameter has a gradient of output 1 (`seen`)";
    assert_eq!(imported.choice_of_loss().as_deref(), Some(told));

    program["graph_module"]["signature"]["output_specs"] = json!(returned(&["add", "seen"]));
    let (_, imported) = import(archive(&program, &weights())).unwrap();
    let error = imported.without_loss().unwrap();
    assert_eq!(error.to_string(), "net.pt2: no parameter has a gradient of output 1 (`seen`)");
    assert!(error.hint().unwrap().starts_with("export a module whose forward(x, y) returns the mean loss"));
    assert!(imported.graph.outputs.keys().eq(["add", "seen"]) && imported.choice_of_loss().is_none());
}

#[test]
fn names_with_the_same_storage_are_one_parameter() {
    let (mut program, mut weights) = (program(), weights());
    weights["config"]["tied.weight"] = weights["config"]["head.weight"].clone();
    let graph = &mut program["graph_module"]["graph"];
    graph["tensor_values"]["p_t"] = meta(7, &[4, 5], true);
    graph["inputs"].as_array_mut().unwrap().push(tensor("p_t"));
    graph["nodes"][1]["inputs"][1]["arg"] = tensor("p_t");
    let spec = json!({"parameter": {"arg": {"name": "p_t"}, "parameter_name": "tied.weight"}});
    program["graph_module"]["signature"]["input_specs"].as_array_mut().unwrap().push(spec);
    let (_, imported) = import(archive(&program, &weights)).unwrap();
    assert_eq!(imported.tied["tied.weight"], "head.weight");
    assert_eq!(imported.graph.parameters().count(), 2);
}

#[test]
fn a_write_through_a_view_is_read_through_the_base() {
    let mut program = program();
    let graph = &mut program["graph_module"]["graph"];
    // The first three columns of relu are overwritten in place. Then other columns of it are read.
    graph["nodes"][4] =
        node("fill_.Scalar", &[("self", tensor("slice_1")), ("value", json!({"as_float": 2.0}))], "mul");
    let columns = [
        ("self", tensor("relu")),
        ("dim", json!({"as_int": 1})),
        ("start", json!({"as_int": 1})),
        ("end", json!({"as_int": 4})),
    ];
    graph["nodes"][5] = node("slice.Tensor", &columns, "add");
    graph["tensor_values"]["mul"] = meta(7, &[2, 3], true);
    let (_, imported) = import(archive(&program, &weights())).unwrap();
    let cat = imported
        .graph
        .nodes
        .iter()
        .find(|n| matches!(n.op, Op::Cat(_)))
        .expect("a concatenation of the written part and the rest");
    assert_eq!(cat.inputs.len(), 2);
}

#[test]
fn a_dynamic_batch_dimension_accepts_any_size() {
    let mut program = program();
    let values = &mut program["graph_module"]["graph"]["tensor_values"];
    for name in ["x", "y", "linear", "relu", "slice_1", "add"] {
        values[name]["sizes"][0] = json!({"as_expr": {"expr_str": "s0", "hint": {"as_int": 2}}});
    }
    let bytes = archive(&program, &weights());
    for samples in [1, 2, 7] {
        let mut archive = Archive::from_reader("net.pt2", std::io::Cursor::new(bytes.clone())).unwrap();
        let imported =
            archive.import(ImportOptions { batch_size: Some(samples), ..ImportOptions::default() }, &zeros).unwrap();
        let x = imported.graph.inputs().next().unwrap();
        assert_eq!(imported.graph.ty(x).shape, [samples, 5]);
    }
}

#[test]
fn a_fixed_batch_size_is_an_error_with_a_hint() {
    let mut archive = Archive::from_reader("net.pt2", std::io::Cursor::new(archive(&program(), &weights()))).unwrap();
    let options = ImportOptions { batch_size: Some(3), ..ImportOptions::default() };
    let error = archive.import(options, &zeros).unwrap_err();
    assert_eq!(error.to_string(), "net.pt2: the model was exported for a batch of 2, but a batch of 3 is needed");
    assert_eq!(error.hint().unwrap(), "export the model with a dynamic batch dimension");
}

#[test]
fn double_precision_replaces_single_everywhere() {
    let mut archive = Archive::from_reader("net.pt2", std::io::Cursor::new(archive(&program(), &weights()))).unwrap();
    let imported =
        archive.import(ImportOptions { float_type: FloatType::Double, ..ImportOptions::default() }, &zeros).unwrap();
    let floats = imported.graph.values.iter().filter(|v| v.ty.dtype.is_float());
    assert!(floats.clone().count() > 5 && floats.clone().all(|v| v.ty.dtype == fusionllm_graph::DType::F64));
}

#[test]
fn all_unsupported_operators_are_listed_at_once() {
    let mut program = program();
    let nodes = &mut program["graph_module"]["graph"]["nodes"];
    nodes[2]["target"] = json!("torch.ops.aten.grid_sampler_2d.default");
    nodes[5]["target"] = json!("torch.ops.aten.fft_fft.default");
    let error = import(archive(&program, &weights())).unwrap_err();
    let ImportError::UnsupportedOperators { operators, .. } = &error else { panic!("{error}") };
    let targets: Vec<&str> = operators.iter().map(|m| m.target.as_str()).collect();
    assert_eq!(targets, ["aten.fft_fft.default", "aten.grid_sampler_2d.default"]);
    assert_eq!(operators[0].uses, ["add in head, net.py:7"]);
    let hint = error.hint().unwrap();
    assert!(hint.contains("without aten.grid_sampler_2d.default") && hint.contains("run_decompositions"), "{hint}");
}

#[test]
fn an_archive_after_decompositions_is_warned_about() {
    let mut program = program();
    let warning = |program: &serde_json::Value| import(archive(program, &weights())).unwrap().0.warning();
    program["verifiers"] = json!(["TRAINING"]);
    assert_eq!(warning(&program), None);
    program["verifiers"] = json!(["ATEN"]);
    let said = warning(&program).unwrap();
    assert!(
        said.starts_with("net.pt2: ") && said.contains("run_decompositions()") && said.contains("no_grad"),
        "{said}"
    );
    // To decompose the operator again would be useless.
    program["graph_module"]["graph"]["nodes"][2]["target"] = json!("torch.ops.aten.diag.default");
    let error = import(archive(&program, &weights())).unwrap_err();
    assert!(!error.hint().unwrap().contains("call program.run_decompositions()"), "{error}");
}

#[test]
fn operators_that_no_result_needs_may_be_unsupported() {
    let mut program = program();
    let dead = node("fft_fft.default", &[("self", tensor("relu"))], "unused");
    program["graph_module"]["graph"]["nodes"].as_array_mut().unwrap().insert(3, dead);
    let (_, imported) = import(archive(&program, &weights())).unwrap();
    assert!(imported.graph.values.iter().all(|v| v.kind != ValueKind::RngKey));
}

#[test]
fn pickled_tensors_are_refused() {
    let mut weights = weights();
    weights["config"]["head.bias"]["use_pickle"] = json!(true);
    let error = import(archive(&program(), &weights)).unwrap_err().to_string();
    assert!(
        error.contains("model_weights_config.json") && error.contains("head.bias") && error.contains("pickled"),
        "{error}"
    );
}

/// Regression: the hint was to save the model again with a later PyTorch, which changes nothing.
#[test]
fn a_tensor_of_complex_numbers_is_refused_with_what_to_do_instead() {
    let mut weights = weights();
    weights["config"]["head.weight"]["tensor_meta"] = meta(9, &[4, 5], true);
    let error = import(archive(&program(), &weights)).unwrap_err();
    assert!(error.to_string().ends_with(": `head.weight`: complex numbers are not supported"), "{error}");
    let hint = error.hint().unwrap();
    assert!(hint.contains("two real tensors") && !hint.contains("PyTorch"), "{hint}");
}

/// `UPDATE_DOCS=1 cargo test -p fusionllm-import` writes the document.
#[test]
fn the_document_of_operators_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operators.md");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, operator_table()).unwrap();
    }
    assert_eq!(
        std::fs::read_to_string(path).unwrap(),
        operator_table(),
        "run UPDATE_DOCS=1 cargo test -p fusionllm-import"
    );
}
