//! Archives with many nodes. The work and the memory of an import grow with the file and not with its square, and no
//! function calls itself once for each node of a chain.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::Cursor;

use common::*;
use fusionllm_graph::{HostTensor, Op, TensorType, autodiff};
use fusionllm_import::{Archive, ImportOptions, Imported};
use serde_json::{Value, json};

/// Counts the bytes that each thread allocates, freed ones too.
struct CountingAllocator;

thread_local! {
    static ALLOCATED: Cell<u64> = const { Cell::new(0) };
}

fn count(bytes: usize) {
    ALLOCATED.with(|total| total.set(total.get() + bytes as u64));
}

// SAFETY: forwards every call to the system's allocator unchanged.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size.saturating_sub(layout.size()));
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Imports the archive, and calls `then`, on a small stack. Returns the bytes that the thread allocated, and the
/// result.
fn import_on_a_small_stack<T: Send>(bytes: Vec<u8>, then: impl FnOnce(&Imported) -> T + Send) -> (u64, T) {
    let work = move || {
        let (_, imported) = import(bytes).map_err(|e| e.to_string()).unwrap();
        let result = then(&imported);
        (ALLOCATED.with(Cell::get), result)
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(512 << 10).spawn_scoped(scope, work).unwrap();
        thread.join().unwrap()
    })
}

/// The model of [`program`], with `links` between its ReLU and the slice of its result. Each is a node and the shape of
/// its result, and reads the result of the one before it.
fn chained(links: impl Iterator<Item = (Value, [i64; 2])>) -> Vec<u8> {
    let mut program = program();
    let graph = &mut program["graph_module"]["graph"];
    let mut last = "relu".to_owned();
    let mut chain = Vec::new();
    for (i, (mut link, shape)) in links.enumerate() {
        let name = format!("link_{i}");
        link["inputs"][0]["arg"] = tensor(&last);
        link["outputs"] = json!([tensor(&name)]);
        graph["tensor_values"][&name] = meta(7, &shape, true);
        chain.push(link);
        last = name;
    }
    let nodes = graph["nodes"].as_array_mut().unwrap();
    nodes[3]["inputs"][0]["arg"] = tensor(&last);
    nodes.splice(3..3, chain);
    archive(&program, &weights())
}

/// Views of `[2, 4]` as `[4, 2]` and back.
fn views(count: usize) -> impl Iterator<Item = (Value, [i64; 2])> {
    (0..count).map(move |i| {
        let shape = if i % 2 == 0 { [4, 2] } else { [2, 4] };
        (node("view.default", &[("self", json!(null)), ("size", json!({"as_ints": shape}))], ""), shape)
    })
}

fn in_place(count: usize) -> impl Iterator<Item = (Value, [i64; 2])> {
    let add = node("add_.Tensor", &[("self", json!(null)), ("other", json!({"as_int": 1}))], "");
    std::iter::repeat_n((add, [2, 4]), count)
}

fn dropouts(count: usize) -> impl Iterator<Item = (Value, [i64; 2])> {
    let inputs = [("input", json!(null)), ("p", json!({"as_float": 0.5})), ("train", json!({"as_bool": true}))];
    std::iter::repeat_n((node("dropout.default", &inputs, ""), [2, 4]), count)
}

/// Fails if twice the file takes more than twice the memory, with a margin for tables that double.
fn grows_with_the_file(archive: impl Fn(usize) -> Vec<u8>) {
    let allocated = |count| import_on_a_small_stack(archive(count), |_| ()).0;
    let (once, twice) = (allocated(1000), allocated(2000));
    assert!(twice < once * 5 / 2, "{once} bytes for 1000 nodes, but {twice} for 2000");
}

/// A chain of views took memory that grew with the square of its length: each view kept a list of all operators from
/// the storage to it.
#[test]
fn twenty_thousand_chained_views() {
    grows_with_the_file(|count| chained(views(count)));
    let (bytes, views) = import_on_a_small_stack(chained(views(20_000)), |imported| {
        let graph = &imported.graph;
        let loss = graph.outputs["loss"];
        let train = autodiff::differentiate(graph, loss).unwrap();
        assert!(train.graph.nodes.len() > 40_000);
        let _ = (graph.evaluation().unwrap().digest(), graph.to_string().len(), graph.to_json().unwrap().len());
        graph.nodes.iter().filter(|n| matches!(n.op, Op::Reshape(_))).count()
    });
    assert!((20_000..20_010).contains(&views), "{views} reshapes");
    assert!(bytes < 4 << 30, "{bytes} bytes");
}

/// A write through a long chain of views called itself once for each of them.
#[test]
fn a_write_through_a_long_chain_of_views() {
    let bytes = chained(views(20_000).chain(in_place(1)).chain(views(2)));
    let (_, nodes) = import_on_a_small_stack(bytes, |imported| imported.graph.nodes.len());
    // The view is computed, written back into its storage, and computed again.
    assert!((60_000..60_020).contains(&nodes), "{nodes} nodes");
}

/// Each write through a chain of views rebuilds the whole chain. So a small file could describe a huge graph.
#[test]
fn many_writes_through_a_long_chain_are_refused() {
    let error = import(chained(views(1000).chain(in_place(1000)))).map(drop).unwrap_err();
    assert!(error.to_string().contains("too many for this file"), "{error}");
}

/// Each detached tensor has views of its own. So a small file could describe a huge number of tensors.
#[test]
fn many_detached_tensors_of_a_long_chain_are_refused() {
    let detach = node("detach.default", &[("self", json!(null))], "");
    let detached = std::iter::repeat_n((detach, [2, 4]), 1000);
    let error = import(chained(views(1000).chain(detached))).map(drop).unwrap_err();
    assert!(error.to_string().contains("too many for this file"), "{error}");
}

/// Regression: every dropout searched the graph for the random key and counted the dropouts before it.
#[test]
fn many_dropouts() {
    grows_with_the_file(|count| chained(dropouts(count)));
    let streams = |imported: &Imported| -> Vec<u64> {
        let streams = imported.graph.nodes.iter().filter_map(|n| match &n.op {
            Op::Dropout(op) => Some(op.stream),
            _ => None,
        });
        streams.collect()
    };
    let (_, streams) = import_on_a_small_stack(chained(dropouts(20_000)), streams);
    assert!(streams.into_iter().eq(0..20_000));
}

/// Adds `count` parameters named `t0`, `t1`, …, which no node reads. `member` names the member of each.
fn with_parameters(count: usize, member: impl Fn(usize) -> String) -> Vec<u8> {
    let (mut program, mut weights) = (program(), weights());
    let module = &mut program["graph_module"];
    for i in 0..count {
        let name = format!("t{i}");
        let stored = json!({"path_name": member(i), "is_param": true, "use_pickle": false, "tensor_meta": meta(7, &[4, 5], true)});
        weights["config"][&name] = stored;
        module["graph"]["inputs"].as_array_mut().unwrap().push(tensor(&name));
        let spec = json!({"parameter": {"arg": {"name": name}, "parameter_name": name}});
        module["signature"]["input_specs"].as_array_mut().unwrap().push(spec);
    }
    archive(&program, &weights)
}

/// Regression: each parameter was compared with all those before it.
#[test]
fn many_parameters() {
    grows_with_the_file(|count| with_parameters(count, |i| format!("m{i}")));
    let (_, (own, tied)) = import_on_a_small_stack(with_parameters(20_000, |_| "weight_0".into()), |imported| {
        (imported.graph.parameters().count(), imported.tied.len())
    });
    assert_eq!((own, tied), (2, 20_000));
    let (_, own) = import_on_a_small_stack(with_parameters(20_000, |i| format!("m{i}")), |imported| {
        imported.graph.parameters().count()
    });
    assert_eq!(own, 20_002);
}

/// The results of operators on constants are computed at import, and equal ones are stored once. So nothing limited how
/// long a small file could keep the import busy.
#[test]
fn the_work_on_constants_is_limited() {
    let mut program = program();
    let graph = &mut program["graph_module"]["graph"];
    let square = [1 << 9, 1 << 9];
    let mut chain = vec![node("zeros.default", &[("size", json!({"as_ints": square}))], "c0")];
    for i in 1..100 {
        let operands = [("self", tensor(&format!("c{}", i - 1))), ("mat2", tensor("c0"))];
        chain.push(node("mm.default", &operands, &format!("c{i}")));
    }
    (0..100).for_each(|i| graph["tensor_values"][format!("c{i}")] = meta(7, &square, false));
    chain.push(node("sum.default", &[("self", tensor("c99"))], "total"));
    let nodes = graph["nodes"].as_array_mut().unwrap();
    nodes.splice(0..0, chain);
    let last = nodes.len() - 1;
    nodes[last]["outputs"] = json!([tensor("entropy")]);
    nodes.push(node("add.Tensor", &[("self", tensor("entropy")), ("other", tensor("total"))], "loss"));
    graph["tensor_values"]["entropy"] = meta(7, &[], true);
    graph["tensor_values"]["total"] = meta(7, &[], false);

    let evaluated = Cell::new(0);
    let evaluate = |op: &Op, operands: Vec<HostTensor>, types: &[TensorType]| {
        evaluated.set(evaluated.get() + 1);
        zeros(op, operands, types)
    };
    let mut archive = Archive::from_reader("net.pt2", Cursor::new(archive(&program, &weights()))).unwrap();
    let imported = archive.import(ImportOptions::default(), &evaluate).unwrap();
    let products = imported.graph.nodes.iter().filter(|n| matches!(n.op, Op::Matmul(_))).count();
    // Each product takes 2^28 operations. The first of them are computed at import, the others at run time. Two passes
    // do so, because the first one finds that a buffer is updated.
    assert!((40..80).contains(&evaluated.get()), "{} operators were computed", evaluated.get());
    assert!((60..80).contains(&products), "{products} products are left");
}
