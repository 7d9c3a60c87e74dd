use std::collections::BTreeSet;

use fusionllm_graph::batch::{BatchLoss, Sizes};
use fusionllm_graph::ops::Binary;
use fusionllm_plan::node_signature;

use super::updates::{TURN_BYTES, turns};
use super::*;

#[test]
fn similar_samples_make_one_point() {
    let samples = [(1e6, 3e-4), (1.1e6, 4e-4), (1e3, 1e-6), (0.0, 1e-6)];
    let curve = super::curve(samples.into_iter()).unwrap();
    assert_eq!(curve.points().len(), 3);
    assert!((curve.at(1.05e6) - 3.5e-4).abs() < 1e-9, "the mean");
    assert!((curve.at(1e3) - 1e-6).abs() < 1e-9);
    assert_eq!(super::curve([].into_iter()), None);
}

#[test]
fn a_models_own_operators_are_measured() {
    let forward = gpt2((16, 2, 8, 2, 32), AttentionImplementation::Eager).unwrap();
    let train = autodiff::differentiate(&forward, forward.outputs["loss"]).unwrap();
    let backend = fusionllm_backend::open("cpu").unwrap();
    let effort = Effort { warm_up: 0, patience: Duration::ZERO, repeats: 1 };
    let mut samples = Samples::default();
    let sample = sample::sample(&train, 4);
    samples.own(&backend, &sample, &train.graph.constants, effort, 1.0).unwrap();
    for node in train.graph.node_ids().filter(|n| sample::live(&train)[n.index()]) {
        assert!(
            samples.seconds.contains_key(&node_signature(&train.graph, node)),
            "{}",
            node_signature(&train.graph, node)
        );
    }
    assert!(samples.seconds.len() < train.graph.nodes.len(), "layers are alike");
}

#[test]
fn parameters_take_turns_that_no_cache_holds() {
    let [bias, weight, large] = [1 << 10, 1 << 20, 1 << 25].map(|elements| TensorType::new(DType::F32, [elements]));
    let bytes = |turn: &[&TensorType]| turn.iter().map(|ty| ty.bytes()).sum::<usize>();
    let layers: Vec<&TensorType> = [&weight, &bias].repeat(30);
    let deep = turns(&layers);
    assert_eq!(deep.len(), 1);
    assert!((TURN_BYTES * 9 / 10..=TURN_BYTES).contains(&bytes(&deep[0])), "not all of them");
    assert_eq!(bytes(&turns(&layers[..4])[0]), bytes(&layers[..4]), "no more than there are");
    let wide = turns(&[&layers[..], &[&large]].concat());
    assert_eq!(wide.len(), 2);
    assert_eq!(wide[1], [&large], "so large a type is alone");
    assert!(turns(&[]).is_empty());
}

#[test]
fn what_a_step_does_for_the_largest_parameter_is_measured() {
    let forward = gpt2((16, 2, 8, 2, 512), AttentionImplementation::Sdpa).unwrap();
    let train = autodiff::differentiate(&forward, forward.outputs["loss"]).unwrap();
    let backend = fusionllm_backend::open("cpu").unwrap();
    let effort = Effort { warm_up: 0, patience: Duration::ZERO, repeats: 1 };
    let mut samples = Samples::default();
    samples.updates(backend.as_ref(), &train.graph, effort, 1.0).unwrap();
    let largest = forward.parameters().map(|v| forward.ty(v)).max_by_key(|ty| ty.numel()).unwrap();
    let sum = Op::from(Binary::Add);
    let work = work_units(&sum.cost(&[largest, largest], &[largest]));
    assert!(samples.operators[sum.name()].iter().any(|sample| sample.work == work && sample.seconds > 0.0));
}

#[test]
fn a_joiner_measures_the_programs_that_fit_it() {
    let forward = gpt2((16, 2, 8, 2, 32), AttentionImplementation::Sdpa).unwrap();
    let train = autodiff::differentiate(&forward, forward.outputs["loss"]).unwrap();
    let eval = forward.evaluation().unwrap();
    let sizes = Sizes { samples: 2, group: 1, other: None };
    let loss = BatchLoss::of(forward.clone(), forward.outputs["loss"], sizes).unwrap().1;
    let own = samples(
        &[Model {
            micro_batch: 2,
            forward,
            train,
            eval,
            loss,
            kept: Default::default(),
            adapters: Default::default(),
            groups: Default::default(),
        }],
        8,
    );
    let backend = fusionllm_backend::open("cpu").unwrap();
    let known = |memory, programs: &[Program]| {
        let (device, left_out) = measure_briefly(&backend, 1.0, memory, programs).unwrap();
        let known: BTreeSet<String> = device.measured.operators.by_signature.into_keys().collect();
        (known, left_out)
    };
    let distinct: BTreeSet<String> = sample::signatures(&own[0]).into_values().collect();
    assert_eq!(known(Some(1 << 30), &own), (distinct.clone(), None));
    let whole = sample::needed_bytes(&own[0]);
    assert_eq!(known(Some(whole - 1), &own), (distinct.clone(), None), "fewer micro-batches fit");
    let least = sample::needed_bytes(&sample::with_fewer(&own[0], 1));
    assert!(own[0].micro_batches > 1 && least < whole, "{least} {whole}");
    let fitting = |bytes: u64| sample::fitting(&own[0], |program| sample::needed_bytes(program) <= bytes);
    assert_eq!(fitting(whole), Some(own[0].clone()));
    assert!(fitting(whole - 1).is_some_and(|program| (1..own[0].micro_batches).contains(&program.micro_batches)));
    assert_eq!(fitting(least).map(|program| program.micro_batches), Some(1));
    assert_eq!(fitting(least - 1), None);
    assert_eq!(known(Some(least), &own), (distinct.clone(), None));
    assert_eq!(known(Some(least - 1), &own), (distinct.clone(), None), "one after the other, they fit");
    // Each alone needs less than all, but some need more than this.
    let alone: Vec<u64> = sample::one_by_one(&own[0]).values().map(sample::needed_bytes).collect();
    let largest = alone.iter().copied().max().unwrap();
    assert!(largest < least / 2, "{largest} {least}");
    let (some, left_out) = known(Some(largest - 1), &own);
    let left_out = left_out.unwrap();
    assert_eq!(left_out.too_large, alone.iter().filter(|bytes| **bytes == largest).count());
    assert!(some.is_subset(&distinct) && some.len() >= distinct.len() - left_out.too_large, "{left_out}");
    let invalid = Program { values: BTreeMap::new(), ..own[0].clone() };
    assert_eq!(known(None, &[invalid]), (BTreeSet::new(), None));
}

#[test]
fn people_read_which_operators_are_estimated() {
    let none = LeftOut::new(Some(40 << 20));
    let left_out = LeftOut { of: 57, too_large: 3, needed: 89_412_100, too_slow: 1, ..none };
    insta::assert_snapshot!(left_out, @"4 of 57 kinds of operators could not be measured, so their times are estimated: 3 need up to 85.3 MiB of memory, and the run may use 40 MiB; 1 would take too long");
}

#[test]
fn a_profile_survives_its_file() {
    let rates = Rates { matmul: 5.123e10, convolution: 2e10, memory: 9e9, overhead: 2e-6 };
    let mut device = Device::new("cpu", rates, 16 << 30);
    device.backend = Some("cpu".into());
    device.measured.operators.by_name.insert("mm".into(), Curve::new(vec![(1e6, 2.5e-5), (1e9, 2e-2)]).unwrap());
    device.scratch.by_name.insert("mm".into(), Curve::new(vec![(1e6, 4096.0)]).unwrap());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("D.toml");
    std::fs::write(&path, to_toml(&[(2, device.clone())]).unwrap()).unwrap();
    let back = fusionllm_workspace::config::load_profile(&path).unwrap();
    assert_eq!(back.len(), 1);
    let (threads, read) = &back[0];
    assert_eq!((*threads, read.name.as_str(), read.memory), (2, "cpu-2", device.memory));
    assert!((read.rates.matmul - rates.matmul).abs() < 1.0 && (read.rates.overhead - 2e-6).abs() < 1e-12);
    assert_eq!((&read.measured, &read.scratch), (&device.measured, &device.scratch));
}
