//! Training through codecs.

mod common;

use common::*;
use std::collections::BTreeMap;

use fusionllm_exec::{Communicator, EncodeOptions, ExecError, Executor};
use fusionllm_graph::{DType, Graph, HostTensor, ValueId};
use fusionllm_models::AttentionImplementation::Sdpa;
use fusionllm_plan::{Address, Compression, Compressor, PeerId, Plan, Program, Verdict, compile};

fn programs(graph: &Graph, plan: &Plan) -> Vec<Program> {
    compile(plan, graph, &train_graph(graph)).unwrap()
}

/// The plan with a codec on every link that carries activations or their gradients.
fn compressed(graph: &Graph, plan: &Plan, compressor: Compressor, ratio: f64) -> Plan {
    let compression = Compression { compressor, ratio, ..Compression::default() };
    let codecs = compression.choose(&programs(graph, plan), None, adamw().optimizer).unwrap();
    Plan { compression, codecs, ..plan.clone() }
}

#[test]
fn compressed_training_learns_and_is_reproducible() {
    let graph = gpt2(Sdpa, 0.1);
    let mut choices = ChoiceRng::new(11);
    let plan = random_plan(&graph, 3, 3, &mut choices);
    let losses_of = |plan: &Plan| losses(&graph, &mut local_run(&graph, plan, &backends("cpu", 3), adamw()), 3, 20);
    let exact = losses_of(&plan);
    let compressors = [
        (Compressor::TopK, 4.0, 0.5),
        (Compressor::Bf16, 1.0, 0.02),
        (Compressor::Int8, 1.0, 0.02),
        (Compressor::Int4, 1.0, 0.2),
        (Compressor::Int4Hadamard, 1.0, 0.2),
        (Compressor::Nvfp4, 1.0, 0.2),
    ];
    for (name, ratio, tolerance) in compressors {
        let plan = compressed(&graph, &plan, name, ratio);
        assert!(!plan.codecs.is_empty());
        let got = losses_of(&plan);
        assert_ne!(got, exact, "{name} changes the losses");
        assert_eq!(got, losses_of(&plan), "{name}: the same bits again");
        assert!(got[19] < got[0], "{name} learns: {got:?}");
        assert!((got[19] - exact[19]).abs() < tolerance, "{name}: {} without, {} with", exact[19], got[19]);
    }
}

/// Under any cut, codecs change only activations and their gradients.
#[test]
fn parameters_inputs_and_integers_are_sent_exactly() {
    let mut choices = ChoiceRng::new(5);
    let mut coded = 0;
    for graph in [gpt2(Sdpa, 0.1), resnet(DType::F32)] {
        for peers in [2, 3, 5] {
            let plan = replicate(random_plan(&graph, peers, 4, &mut choices), &mut choices);
            let plan = compressed(&graph, &plan, Compressor::Bf16, 1.0);
            let all = programs(&graph, &plan);
            for program in &all {
                program.validate().unwrap();
                for (tensor, other) in program.receives().chain(program.sends()) {
                    let value = &program.values[&tensor.value()];
                    let may = program.may_be_coded(tensor);
                    coded += usize::from(may);
                    let activation = matches!(tensor, Address::Value { .. }) && value.ty.dtype == DType::F32;
                    if !activation || other == PeerId::BROKER {
                        assert!(!may, "{tensor:?}, {}", value.name);
                    }
                    // The other end agrees.
                    if other != PeerId::BROKER {
                        assert_eq!(all[other.0 as usize].may_be_coded(tensor), may);
                    }
                }
                let parts = program.reductions.values().flat_map(|r| &r.parts);
                assert!(parts.into_iter().all(|p| !program.coded.contains(&p.value)), "a parameter's gradient");
            }
        }
    }
    assert!(coded > 100, "{coded}");
}

/// The planner's payload size lies within the bounds that a receiver checks.
#[test]
fn payload_sizes_follow_from_the_program() {
    let graph = gpt2(Sdpa, 0.0);
    let plan = random_plan(&graph, 2, 3, &mut ChoiceRng::new(3));
    let plan = compressed(&graph, &plan, Compressor::TopK, 8.0);
    let mut smaller = 0;
    for p in programs(&graph, &plan) {
        for (tensor, to) in p.sends() {
            let (payload, exact) = (p.payload(tensor, to).unwrap() as u64, p.bytes(tensor));
            match p.coded_bytes(tensor) {
                Some((least, most)) => assert!(least <= payload && payload <= most),
                None => assert_eq!(payload, exact),
            }
            smaller += usize::from(payload * 4 < exact);
        }
    }
    assert!(smaller > 0);
}

/// A communicator in the place of all other peers. Every third number of their activations is zero.
struct OtherPeers<'a> {
    program: &'a Program,
    inputs: Vec<BTreeMap<String, HostTensor>>,
    sent: Vec<(ValueId, HostTensor)>,
}

impl Communicator for OtherPeers<'_> {
    fn receive(&mut self, _: u64, tensor: Address, from: PeerId) -> Result<HostTensor, ExecError> {
        let value = &self.program.values[&tensor.value()];
        if let (PeerId::BROKER, Address::Value { micro_batch, .. }) = (from, tensor) {
            return Ok(self.inputs[micro_batch as usize][&value.name].clone());
        }
        let numbers: Vec<f32> =
            (0..value.ty.numel()).map(|i| if i % 3 == 0 { 0.0 } else { 0.1 + (i % 7) as f32 }).collect();
        Ok(HostTensor::from_f32(value.ty.shape.clone(), &numbers)?)
    }

    fn send(
        &mut self,
        _: u64,
        tensor: Address,
        _: PeerId,
        content: HostTensor,
        _: EncodeOptions,
    ) -> Result<(), ExecError> {
        self.sent.push((tensor.value(), content));
        Ok(())
    }

    fn report(&mut self, _: u64, _: u32, _: u32, _: f64) -> Result<(), ExecError> {
        Ok(())
    }

    fn verdict(&mut self, _: u64, _: Vec<(ValueId, f64)>) -> Result<Verdict, ExecError> {
        Ok(Verdict { apply: false, update: 1, lr: 0.0, factor: 1.0 })
    }
}

/// With shared masks, and only then, a gradient lacks the entries that its activation lacked.
#[test]
fn gradients_share_the_masks_of_their_activations() {
    let graph = gpt2(Sdpa, 0.0);
    let plan = random_plan(&graph, 2, 2, &mut ChoiceRng::new(3));
    let mut plan = compressed(&graph, &plan, Compressor::TopK, 2.0);
    for shared in [false, true] {
        plan.compression.shared_masks = shared;
        let mut masked = 0;
        for program in programs(&graph, &plan) {
            program.validate().unwrap();
            let mut executor = Executor::new(backends("cpu", 1).remove(0), adamw().optimizer, 1);
            for held in &program.holdings {
                let value = &program.values[&held.value];
                executor.load(&value.name, &initial(1)(value).unwrap()).unwrap();
            }
            let script = executor.prepare(&program).unwrap();
            let mut others = OtherPeers { program: &program, inputs: batch(&graph, 2, 0), sent: Vec::new() };
            executor.run(&program, &script, 0, 0, &mut others).unwrap();
            for (value, tensor) in others.sent {
                let numbers = tensor.to_f64();
                let masked_out = numbers.iter().step_by(3).all(|x| *x == 0.0) && numbers.iter().any(|x| *x != 0.0);
                assert_eq!(masked_out, program.masks.contains_key(&value), "{}", program.values[&value].name);
                masked += usize::from(masked_out);
            }
        }
        assert_eq!(masked > 0, shared);
    }
}
