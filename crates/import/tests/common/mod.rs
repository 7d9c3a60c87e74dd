//! A small archive as `torch.export.save` writes it. The tests need no file.

#![allow(dead_code)]

use std::io::Cursor;

use fusionllm_graph::{HostTensor, Op, TensorType};
use fusionllm_import::{Archive, ImportError, ImportOptions, Imported};
use serde_json::{Value, json};

/// A zip file with uncompressed members.
pub(crate) fn zip(members: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let (mut file, mut directory) = (Vec::new(), Vec::new());
    for (name, bytes) in members {
        let mut fields = Vec::new();
        fields.extend([0u8; 2]); // flags
        fields.extend([0u8; 6]); // method, time, date
        fields.extend(crc32fast::hash(bytes).to_le_bytes());
        fields.extend((bytes.len() as u32).to_le_bytes());
        fields.extend((bytes.len() as u32).to_le_bytes());
        fields.extend((name.len() as u16).to_le_bytes());
        fields.extend([0u8; 2]); // extra
        directory.extend(b"PK\x01\x02\0\0\0\0");
        directory.extend(&fields);
        directory.extend([0u8; 10]);
        directory.extend((file.len() as u32).to_le_bytes());
        directory.extend(name.as_bytes());
        file.extend(b"PK\x03\x04\0\0");
        file.extend(&fields);
        file.extend(name.as_bytes());
        file.extend(bytes);
    }
    let (count, offset) = (members.len() as u16, file.len() as u32);
    file.extend(&directory);
    file.extend(b"PK\x05\x06\0\0\0\0");
    file.extend(count.to_le_bytes());
    file.extend(count.to_le_bytes());
    file.extend((directory.len() as u32).to_le_bytes());
    file.extend(offset.to_le_bytes());
    file.extend([0u8; 2]);
    file
}

pub(crate) fn meta(dtype: u32, sizes: &[i64], trained: bool) -> Value {
    let mut strides = vec![1i64; sizes.len()];
    for d in (1..sizes.len()).rev() {
        strides[d - 1] = strides[d].saturating_mul(sizes[d]);
    }
    let ints = |v: &[i64]| v.iter().map(|n| json!({"as_int": n})).collect::<Vec<_>>();
    json!({
        "dtype": dtype, "sizes": ints(sizes), "requires_grad": trained, "device": {"type": "cpu", "index": null},
        "strides": ints(&strides), "storage_offset": {"as_int": 0}, "layout": 7
    })
}

pub(crate) fn tensor(name: &str) -> Value {
    json!({"as_tensor": {"name": name}})
}

pub(crate) fn node(target: &str, inputs: &[(&str, Value)], output: &str) -> Value {
    let inputs: Vec<Value> = inputs.iter().map(|(n, a)| json!({"name": n, "arg": a, "kind": 1})).collect();
    json!({
        "target": format!("torch.ops.aten.{target}"), "inputs": inputs, "outputs": [tensor(output)],
        "metadata": {
            "stack_trace": "File \"/home/someone/net.py\", line 7, in forward\n    y = f(x)",
            "nn_module_stack": "L__self__,,__main__.Net;L__self__head,head,torch.nn.modules.linear.Linear"
        }
    })
}

/// `cross_entropy(relu(x wᵀ + b)[:, 0:3] + mask, y)` for 2 samples. A buffer counts the batches.
pub(crate) fn program() -> Value {
    let inputs = ["p_w", "p_b", "b_count", "c_mask", "x", "y"];
    json!({
        "graph_module": {
            "graph": {
                "inputs": inputs.map(tensor),
                "outputs": [tensor("loss")],
                "nodes": [
                    node("add_.Tensor", &[("self", tensor("b_count")), ("other", json!({"as_int": 1}))], "add_"),
                    node("linear.default", &[("input", tensor("x")), ("weight", tensor("p_w")), ("bias", tensor("p_b"))], "linear"),
                    node("relu.default", &[("self", tensor("linear"))], "relu"),
                    node("slice.Tensor", &[("self", tensor("relu")), ("dim", json!({"as_int": 1})), ("start", json!({"as_int": 0})), ("end", json!({"as_int": 3}))], "slice_1"),
                    node("mul.Tensor", &[("self", tensor("c_mask")), ("other", json!({"as_float": 2.0}))], "mul"),
                    node("add.Tensor", &[("self", tensor("slice_1")), ("other", tensor("mul"))], "add"),
                    node("cross_entropy_loss.default", &[("self", tensor("add")), ("target", tensor("y"))], "loss"),
                ],
                "tensor_values": {
                    "p_w": meta(7, &[4, 5], true), "p_b": meta(7, &[4], true), "b_count": meta(5, &[], false), "c_mask": meta(7, &[3], false),
                    "x": meta(7, &[2, 5], false), "y": meta(5, &[2], false), "add_": meta(5, &[], false), "linear": meta(7, &[2, 4], true),
                    "relu": meta(7, &[2, 4], true), "slice_1": meta(7, &[2, 3], true), "mul": meta(7, &[3], false), "add": meta(7, &[2, 3], true),
                    "loss": meta(7, &[], true)
                },
                "sym_int_values": {}, "sym_bool_values": {}
            },
            "signature": {
                "input_specs": [
                    {"parameter": {"arg": {"name": "p_w"}, "parameter_name": "head.weight"}},
                    {"parameter": {"arg": {"name": "p_b"}, "parameter_name": "head.bias"}},
                    {"buffer": {"arg": {"name": "b_count"}, "buffer_name": "count", "persistent": true}},
                    {"tensor_constant": {"arg": {"name": "c_mask"}, "tensor_constant_name": "mask"}},
                    {"user_input": {"arg": tensor("x")}},
                    {"user_input": {"arg": tensor("y")}}
                ],
                "output_specs": [{"user_output": {"arg": tensor("loss")}}]
            }
        },
        "schema_version": {"major": 8, "minor": 20},
        "torch_version": "2.15.0"
    })
}

pub(crate) fn weights() -> Value {
    json!({"config": {
        "head.weight": {"path_name": "weight_0", "is_param": true, "use_pickle": false, "tensor_meta": meta(7, &[4, 5], true)},
        "head.bias": {"path_name": "weight_1", "is_param": true, "use_pickle": false, "tensor_meta": meta(7, &[4], true)},
        "count": {"path_name": "weight_2", "is_param": false, "use_pickle": false, "tensor_meta": meta(5, &[], false)}
    }})
}

/// An archive with this program and these weights.
pub(crate) fn archive(program: &Value, weights: &Value) -> Vec<u8> {
    archive_of(program.to_string().into_bytes(), weights)
}

/// An archive with these bytes in the place of a program.
pub(crate) fn archive_of(program: Vec<u8>, weights: &Value) -> Vec<u8> {
    let floats = |n: usize| (0..n).flat_map(|i| (i as f32 * 0.1).to_le_bytes()).collect::<Vec<u8>>();
    let constants = json!({"config": {
        "mask": {"path_name": "tensor_0", "is_param": false, "use_pickle": false, "tensor_meta": meta(7, &[3], false)}
    }});
    zip(&[
        ("net/data/weights/weight_0", floats(20)),
        ("net/data/weights/weight_1", floats(4)),
        ("net/data/weights/weight_2", 7i64.to_le_bytes().to_vec()),
        ("net/data/weights/model_weights_config.json", weights.to_string().into_bytes()),
        ("net/data/constants/tensor_0", floats(3)),
        ("net/data/constants/model_constants_config.json", constants.to_string().into_bytes()),
        ("net/models/model.json", program),
        ("net/archive_format", b"pt2".to_vec()),
        ("net/byteorder", b"little".to_vec()),
    ])
}

/// Replaces kernels: every result is zeros of the right type.
pub(crate) fn zeros(_: &Op, _: Vec<HostTensor>, types: &[TensorType]) -> Result<Vec<HostTensor>, String> {
    Ok(types.iter().cloned().map(HostTensor::zeros).collect())
}

pub(crate) fn import(bytes: Vec<u8>) -> Result<(Archive, Imported), ImportError> {
    let mut archive = Archive::from_reader("net.pt2", Cursor::new(bytes))?;
    let imported = archive.import(ImportOptions::default(), &zeros)?;
    Ok((archive, imported))
}
