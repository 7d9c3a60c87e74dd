//! The speed of every codec on one core, compared with `memcpy` of its input.
//!
//! `cargo bench -p fusionllm-compress` prints divan's table, then each codec's speed over the speed of `memcpy`. Codec
//! and `memcpy` are timed alternately, so both see the same machine. Target: 0.3. `--results FILE` after `--` also writes these quotients to a file, as JSON, and leaves out divan's table.
//! `FUSIONLLM_ELEMENTS` sets the number of elements for the comparison (by default 4 Mi).

#![allow(clippy::unwrap_used)]

use std::hint::black_box;
use std::time::Instant;

use divan::Bencher;
use divan::counter::BytesCount;
use fusionllm_compress::{Bits, Codec, Element, Encoder, IntBlocks, Mask, TopK, ValueFormat, decode};

const ELEMENTS: usize = 1 << 20;

fn main() {
    let results = std::env::args().skip_while(|a| a != "--results").nth(1);
    if results.is_none() {
        divan::main();
    }
    if std::env::args().any(|a| a == "--bench") {
        let rows = ratios();
        if let Some(file) = results {
            std::fs::write(file, serde_json::json!({ "rows": rows }).to_string()).unwrap();
        }
    }
}

/// Top-k has a ratio, and perhaps the format of its values. `under a mask` is a gradient's encoding.
const NAMES: [&str; 15] = [
    "bf16",
    "int8",
    "int8 stochastic",
    "int4",
    "int4 stochastic",
    "int4-hadamard",
    "nvfp4",
    "topk 5",
    "topk 7",
    "topk 7 under a mask",
    "topk 10",
    "topk 10 under a mask",
    "topk 30",
    "topk 30 int8",
    "topk 30 f32",
];

fn codec(name: &str) -> Codec {
    let words: Vec<&str> = name.split(' ').collect();
    let int = |bits, rotate| Codec::Int(IntBlocks { bits, rotate, stochastic: words.contains(&"stochastic") });
    let values = match words.last() {
        Some(&"f32") => Some(ValueFormat::F32),
        Some(&"int8") => Some(ValueFormat::Int(Bits::Eight)),
        _ => None,
    };
    match words[0] {
        "int8" => int(Bits::Eight, false),
        "int4" => int(Bits::Four, false),
        "topk" => Codec::TopK(TopK { ratio: words[1].parse().unwrap(), values }),
        other => Codec::from_name(other, 1.0).unwrap(),
    }
}

/// Nearly normal numbers, like activations: sums of four uniform numbers.
fn input(n: usize) -> Vec<f32> {
    let mut state = 1u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / 16_777_216.0 - 0.5
    };
    (0..n).map(|_| uniform() + uniform() + uniform() + uniform()).collect()
}

#[divan::bench]
fn copy(bencher: Bencher<'_, '_>) {
    let values = input(ELEMENTS);
    let mut out = vec![0.0; ELEMENTS];
    bencher.counter(BytesCount::new(4 * ELEMENTS)).bench_local(|| black_box(&mut out).copy_from_slice(&values));
}

#[divan::bench(args = NAMES, sample_count = 20)]
fn encoding(bencher: Bencher<'_, '_>, name: &str) {
    let (values, codec) = (input(ELEMENTS), codec(name));
    let (mut encoder, mut out) = (Encoder::new(), Vec::new());
    bencher
        .counter(BytesCount::new(4 * ELEMENTS))
        .bench_local(|| encoder.encode(&codec, black_box(&values), Element::F32, 1, &mut out).unwrap());
}

#[divan::bench(args = NAMES, sample_count = 20)]
fn decoding(bencher: Bencher<'_, '_>, name: &str) {
    let values = input(ELEMENTS);
    let mut bytes = Vec::new();
    Encoder::new().encode(&codec(name), &values, Element::F32, 1, &mut bytes).unwrap();
    let mut out = vec![0.0; ELEMENTS];
    bencher
        .counter(BytesCount::new(4 * ELEMENTS))
        .bench_local(|| decode(black_box(&bytes), Element::F32, None, &mut out).unwrap());
}

fn ratios() -> Vec<serde_json::Value> {
    let mut rows = Vec::new();
    let elements = std::env::var("FUSIONLLM_ELEMENTS").ok().and_then(|n| n.parse().ok()).unwrap_or(4 << 20);
    let values = input(elements);
    let mut out = vec![0.0; elements];
    let (mut encoder, mut bytes) = (Encoder::new(), Vec::new());
    println!("\n{elements} elements{:21}encode           decode      wire ratio", "");
    for name in NAMES {
        let codec = codec(name);
        let mut copy = Vec::new();
        let (mut encode, mut back) = (Vec::new(), Vec::new());
        encoder.encode(&codec, &values, Element::F32, 1, &mut bytes).unwrap();
        let mask = Mask::of(&bytes, elements).filter(|_| name.ends_with("mask"));
        let mut values = values.clone();
        for _ in 0..15 {
            copy.push(seconds(|| black_box(&mut out).copy_from_slice(&values)));
            encode.push(seconds(|| {
                let values = black_box(&mut values);
                let encoded = match &mask {
                    Some(mask) => encoder.encode_under(mask, &codec, values, Element::F32, 1, &mut bytes),
                    None => encoder.encode(&codec, values, Element::F32, 1, &mut bytes),
                };
                encoded.map(drop).unwrap();
            }));
            back.push(seconds(|| decode(black_box(&bytes), Element::F32, mask.as_ref(), &mut out).map(drop).unwrap()));
        }
        let [copy, encode, back] = [copy, encode, back].map(median);
        let rate = |s: f64| 4e-9 * elements as f64 / s;
        println!(
            "{name:24} memcpy {:5.1} GB/s  {:5.2} GB/s {:5.2}  {:5.2} GB/s {:5.2}  {:6.2}",
            rate(copy),
            rate(encode),
            copy / encode,
            rate(back),
            copy / back,
            4.0 * elements as f64 / bytes.len() as f64,
        );
        rows.push(serde_json::json!({
            "codec": name, "encode": [copy / encode], "decode": [copy / back], "wire_ratio": 4.0 * elements as f64 / bytes.len() as f64,
        }));
    }
    rows
}

fn seconds(mut f: impl FnMut()) -> f64 {
    let start = Instant::now();
    f();
    start.elapsed().as_secs_f64()
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
