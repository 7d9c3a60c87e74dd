//! Archives from strangers. Import returns a graph, or an error that names the place. It never panics, and it allocates
//! no more memory than the file accounts for.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use common::*;
use fusionllm_graph::ChoiceRng;
use serde_json::{Value, json};

/// Records the largest allocation.
struct RecordingAllocator;

static LARGEST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: forwards every call to the system's allocator unchanged.
unsafe impl GlobalAlloc for RecordingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LARGEST.fetch_max(size, Ordering::Relaxed);
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: RecordingAllocator = RecordingAllocator;

/// Twice the limit for constants computed at import, since they may be copied once.
const MAX_ALLOCATION: usize = 160 << 20;

/// Imports and loads the archive. Returns whether that succeeded.
fn import_all(bytes: Vec<u8>) -> bool {
    let result = import(bytes).and_then(|(mut archive, imported)| {
        let names: Vec<String> = imported.graph.parameters().map(|v| imported.graph.value(v).name.clone()).collect();
        names.iter().try_for_each(|name| archive.load(&imported, name).map(drop))
    });
    if let Err(e) = &result {
        assert!(e.to_string().contains("net.pt2"), "an error must name the archive: {e}");
    }
    result.is_ok()
}

#[test]
fn flipped_bits_and_cut_files() {
    let original = archive(&program(), &weights());
    assert!(import_all(original.clone()));
    let mut choices = ChoiceRng::new(1);
    let mut accepted = 0;
    for case in 0..3000 {
        let mut bytes = original.clone();
        match case % 3 {
            0 => bytes.truncate(choices.below(original.len())),
            _ => {
                for _ in 0..1 + choices.below(4) {
                    let at = choices.below(bytes.len());
                    bytes[at] ^= 1 << choices.below(8);
                }
            }
        }
        accepted += usize::from(import_all(bytes));
    }
    // Checksums protect the content. Some bits have no effect, such as the time of a member.
    assert!(accepted < 300, "{accepted} damaged archives were accepted");
    assert!(LARGEST.load(Ordering::Relaxed) < MAX_ALLOCATION);
}

/// The path of keys to every value of a document.
fn paths(value: &Value, here: &mut Vec<String>, all: &mut Vec<Vec<String>>) {
    all.push(here.clone());
    let children: Vec<(String, &Value)> = match value {
        Value::Object(map) => map.iter().map(|(k, v)| (k.clone(), v)).collect(),
        Value::Array(list) => list.iter().enumerate().map(|(i, v)| (i.to_string(), v)).collect(),
        _ => Vec::new(),
    };
    for (key, child) in children {
        here.push(key);
        paths(child, here, all);
        here.pop();
    }
}

fn at<'v>(value: &'v mut Value, path: &[String]) -> &'v mut Value {
    path.iter().fold(value, |v, key| match v {
        Value::Array(list) => &mut list[key.parse::<usize>().unwrap()],
        v => &mut v[key.as_str()],
    })
}

/// Archives with correct checksums, but invalid programs.
#[test]
fn invalid_programs() {
    let (program, weights) = (program(), weights());
    let mut all = Vec::new();
    paths(&program, &mut Vec::new(), &mut all);
    let mut of_weights = Vec::new();
    paths(&weights, &mut Vec::new(), &mut of_weights);
    let strange = [
        json!(-1),
        json!(i64::MAX),
        json!(i64::MIN),
        json!(1u64 << 40),
        json!(0),
        json!(3),
        json!(null),
        json!([]),
        json!({}),
        json!("../../etc/passwd"),
        json!("loss"),
        json!("p_w"),
        json!("Infinity"),
        json!(1e300),
        json!(true),
        json!({"as_tensor": {"name": "loss"}}),
        json!({"as_tensor": {"name": "linear"}}),
        json!({"as_int": -7}),
        json!({"as_ints": [1i64 << 40, 1i64 << 40]}),
        json!({"as_float": "NaN"}),
        json!({"as_expr": {"expr_str": "s0"}}),
    ];
    let targets = [
        "expand.default",
        "repeat.default",
        "full.default",
        "zeros.default",
        "arange.default",
        "as_strided.default",
        "pad.default",
        "conv2d.default",
        "index_select.default",
        "unbind.int",
        "chunk.default",
        "einsum.default",
        "view.default",
        "unfold.default",
        "roll.default",
        "topk.default",
        "sort.default",
        "upsample_bilinear2d.vec",
        "max_pool2d.default",
        "copy_.default",
        "batch_norm.default",
        "eye.default",
        "linspace.default",
    ];
    let mut choices = ChoiceRng::new(2);
    let mut accepted = 0;
    for case in 0..6000 {
        let (mut program, mut weights) = (program.clone(), weights.clone());
        for _ in 0..1 + choices.below(2) {
            let value = strange[choices.below(strange.len())].clone();
            match case % 4 {
                0 => *at(&mut weights, &of_weights[choices.below(of_weights.len())]) = value,
                1 => {
                    let nodes = program["graph_module"]["graph"]["nodes"].as_array_mut().unwrap();
                    let node = choices.below(nodes.len());
                    nodes[node]["target"] = json!(format!("torch.ops.aten.{}", targets[choices.below(targets.len())]));
                    let names = [
                        "size",
                        "repeats",
                        "stride",
                        "shape",
                        "dim",
                        "end",
                        "pad",
                        "k",
                        "chunks",
                        "n",
                        "steps",
                        "fill_value",
                        "output_size",
                        "kernel_size",
                    ];
                    for _ in 0..3 {
                        let name = names[choices.below(names.len())];
                        let values = [
                            json!({"as_int": 1i64 << 40}),
                            json!({"as_ints": [1i64 << 33, 3]}),
                            json!({"as_int": -3}),
                            json!({"as_ints": []}),
                        ];
                        let argument = json!({"name": name, "arg": values[choices.below(4)]});
                        nodes[node]["inputs"].as_array_mut().unwrap().push(argument);
                    }
                }
                2 => {
                    let nodes = program["graph_module"]["graph"]["nodes"].as_array_mut().unwrap();
                    let (i, j) = (choices.below(nodes.len()), choices.below(nodes.len()));
                    nodes.swap(i, j);
                }
                _ => *at(&mut program, &all[choices.below(all.len())]) = value,
            }
            if case % 4 != 2 {
                break;
            }
        }
        accepted += usize::from(import_all(archive(&program, &weights)));
    }
    assert!(accepted < 3000, "{accepted} invalid programs were accepted");
    assert!(
        LARGEST.load(Ordering::Relaxed) < MAX_ALLOCATION,
        "an allocation of {} bytes",
        LARGEST.load(Ordering::Relaxed)
    );
}

#[test]
fn member_names_cannot_leave_the_archive() {
    let mut weights = weights();
    weights["config"]["head.bias"]["path_name"] = json!("../../../../../../etc/passwd");
    assert!(!import_all(archive(&program(), &weights)));
}

#[test]
fn a_deeply_nested_document_is_refused() {
    let mut program = program();
    let deep = "[".repeat(100_000) + &"]".repeat(100_000);
    let text = program.to_string().replacen("\"torch_version\"", &format!("\"extra\":{deep},\"torch_version\""), 1);
    program = json!({});
    assert!(!import_all(archive(&program, &weights())));
    assert!(!import_all(zip(&[("net/models/model.json", text.into_bytes()), ("net/archive_format", b"pt2".to_vec())])));
}

/// The model of [`program`], with a node before its loss that reads `x` and gives a result of this type. Nothing reads
/// the result, but `effect` overwrites it.
fn refusal(target: &str, inputs: &[(&str, Value)], x: &[i64], result: &[i64], effect: Option<(&str, Value)>) -> String {
    let mut program = program();
    let graph = &mut program["graph_module"]["graph"];
    graph["tensor_values"]["big"] = meta(7, x, false);
    graph["tensor_values"]["odd"] = meta(7, result, false);
    let spec = json!({"user_input": {"arg": tensor("big")}});
    program["graph_module"]["signature"]["input_specs"].as_array_mut().unwrap().push(spec);
    let graph = &mut program["graph_module"]["graph"];
    let nodes = graph["nodes"].as_array_mut().unwrap();
    let mut added = vec![node(target, &[&[("self", tensor("big"))][..], inputs].concat(), "odd")];
    let read = node("sum.default", &[("self", tensor("odd"))], "total");
    added.extend(effect.map(|(target, value)| node(target, &[("self", tensor("odd")), ("value", value)], "odd")));
    added.push(read);
    nodes.splice(0..0, added);
    let last = nodes.len() - 1;
    nodes[last]["outputs"] = json!([tensor("entropy")]);
    nodes.push(node("add.Tensor", &[("self", tensor("entropy")), ("other", tensor("total"))], "loss"));
    graph["tensor_values"]["entropy"] = meta(7, &[], true);
    graph["tensor_values"]["total"] = meta(7, &[], false);
    match import(archive(&program, &weights())) {
        Ok(_) => "accepted".into(),
        Err(e) => e.to_string(),
    }
}

fn ints(all: &[i64]) -> Value {
    json!({"as_ints": all})
}

/// Sizes and strides whose products or sums overflow, or that describe huge lists.
#[test]
fn sizes_beyond_any_memory_are_refused() {
    let max = i64::MAX;
    let one = [("size", ints(&[2, 5])), ("stride", ints(&[max, max]))];
    let none = [("size", ints(&[1 << 40, 0])), ("stride", ints(&[1, 1]))];
    let step = [("dim", 0), ("start", 0), ("end", max), ("step", 2)].map(|(n, i)| (n, json!({"as_int": i})));
    let zero = json!({"as_float": 0.0});
    let pool = |kernel: i64, padding: i64| {
        let size = |n| ints(&[n, n]);
        [("kernel_size", size(kernel)), ("padding", size(padding)), ("divisor_override", json!({"as_int": 1}))]
    };
    let image = [1, 1, 2, 2];
    let cases = [
        (refusal("alias.default", &[], &[max, max], &[max, max], None), "larger than any memory"),
        (refusal("alias.default", &[], &[max, max, 0], &[max, max, 0], None), "larger than any memory"),
        (refusal("alias.default", &[], &[1; 65], &[1; 65], None), "65 dimensions"),
        (refusal("as_strided.default", &one, &[2, 5], &[2, 5], None), "reach beyond any memory"),
        (refusal("as_strided.default", &none, &[2, 5], &[1 << 40, 0], None), "accepted"),
        (refusal("repeat.default", &[("repeats", ints(&[1; 100_000]))], &[2, 5], &[2, 5], None), "dimensions"),
        (refusal("slice.Tensor", &step, &[1 << 40], &[1 << 39], Some(("fill_.Scalar", zero))), "too many"),
        (refusal("avg_pool2d.default", &pool(1 << 40, 1 << 39), &image, &image, None), "declares"),
        (refusal("avg_pool2d.default", &pool(max, max / 2), &image, &image, None), "padding"),
        (
            refusal(
                "upsample_bilinear2d.vec",
                &[("output_size", ints(&[1 << 13, 1]))],
                &[1, 1, 1 << 14, 1],
                &image,
                None,
            ),
            "resize",
        ),
    ];
    for (case, (reason, part)) in cases.iter().enumerate() {
        assert!(reason.contains(part), "case {case}: {reason}");
    }
    assert!(LARGEST.load(Ordering::Relaxed) < MAX_ALLOCATION);
}
