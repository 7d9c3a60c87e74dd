//! Training through codecs.

mod common;

use common::*;
use std::collections::BTreeMap;

use fusionllm_compress::{Bits, Codec, Element, Encoder, Mask, TopK, ValueFormat, decode};
use fusionllm_exec::local::{LocalRun, StepResult};
use fusionllm_exec::{Coder, Communicator, EncodeOptions, ExecError, Executor, Message};
use fusionllm_graph::ops::Unary;
use fusionllm_graph::{Builder, DType, Graph, HostTensor, Init, TensorType, Value, ValueId};
use fusionllm_models::AttentionImplementation::Sdpa;
use fusionllm_plan::{Compression, Compressor, LinkCodec, Plan, Schedule, compile};
use fusionllm_program::{Address, PeerId, Program, Verdict};

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
    for graph in [gpt2(Sdpa, 0.1), resnet(DType::F32), narrow(gpt2(Sdpa, 0.1))] {
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
                    let activation = matches!(tensor, Address::Value { .. }) && value.ty.dtype.is_float();
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
    let all = programs(&graph, &plan);
    for p in &all {
        for (tensor, to) in p.sends() {
            let (payload, exact) = (p.payload(tensor, &all[to.0 as usize]).unwrap() as u64, p.bytes(tensor));
            match p.coded_bytes(tensor) {
                Some((least, most)) => assert!(least <= payload && payload <= most),
                None => assert_eq!(payload, exact),
            }
            smaller += usize::from(payload * 4 < exact);
        }
    }
    assert!(smaller > 0);
}

/// A communicator in the place of the only other peer. All numbers of its activations differ.
struct OtherPeer<'a> {
    program: &'a Program,
    other: &'a Program,
    inputs: Vec<BTreeMap<String, HostTensor>>,
    /// The coder of this peer, and that of the other.
    coders: [Coder; 2],
    masks: BTreeMap<Address, Mask>,
    sent: Vec<Sent>,
}

/// A message through a codec.
struct Sent {
    tensor: Address,
    content: HostTensor,
    bytes: Vec<u8>,
    arrived: HostTensor,
}

impl Communicator for OtherPeer<'_> {
    fn receive(&mut self, pass: u64, tensor: Address, from: PeerId) -> Result<HostTensor, ExecError> {
        let value = &self.program.values[&tensor.value()];
        if let (PeerId::BROKER, Address::Value { micro_batch, .. }) = (from, tensor) {
            return Ok(self.inputs[micro_batch as usize][&value.name].clone());
        }
        let number = |i: usize| 0.1 + ((i * 37) % 1009) as f64 / 100.0;
        let numbers: Vec<f64> = (0..value.ty.numel()).map(number).collect();
        let content = HostTensor::from_f64(value.ty.shape.clone(), &numbers)?.cast(value.ty.dtype)?;
        let options = EncodeOptions { codec: self.other.codec(tensor, self.program.peer), seed: 0 };
        if options.codec == Codec::None {
            return Ok(content);
        }
        let mut bytes = Vec::new();
        let there = Message { pass, peer: self.program.peer, tensor };
        self.coders[1].encode(there, &content, &options, &mut bytes)?;
        assert_eq!(bytes.len(), self.other.payload(tensor, self.program).unwrap());
        self.masks.extend(Mask::of(&bytes, value.ty.numel()).map(|mask| (tensor, mask)));
        self.coders[0].decode(Message { pass, peer: from, tensor }, &bytes, value.ty.clone())
    }

    fn send(
        &mut self,
        pass: u64,
        tensor: Address,
        to: PeerId,
        content: HostTensor,
        options: EncodeOptions,
    ) -> Result<(), ExecError> {
        if options.codec == Codec::None {
            return Ok(());
        }
        let mut bytes = Vec::new();
        self.coders[0].encode(Message { pass, peer: to, tensor }, &content, &options, &mut bytes)?;
        assert_eq!(bytes.len(), self.program.payload(tensor, self.other).unwrap(), "the planner knows the size");
        let back = Message { pass, peer: self.program.peer, tensor };
        let arrived = self.coders[1].decode(back, &bytes, content.ty().clone())?;
        self.sent.push(Sent { tensor, content, bytes, arrived });
        Ok(())
    }

    fn report(&mut self, _: u64, _: u32, _: u32, _: f64) -> Result<(), ExecError> {
        Ok(())
    }

    fn verdict(&mut self, _: u64, _: Vec<(ValueId, f64)>) -> Result<Verdict, ExecError> {
        Ok(Verdict { apply: false, update: 1, lr: 0.0, factor: 1.0 })
    }
}

/// Runs one step of a program beside [`OtherPeer`].
fn beside<'a>(graph: &Graph, program: &'a Program, other: &'a Program) -> OtherPeer<'a> {
    program.validate().unwrap();
    let mut executor = Executor::new(backends("cpu", 1).remove(0), adamw().optimizer, 1);
    for held in &program.holdings {
        let value = &program.values[&held.value];
        executor.load(&value.name, &initial(1)(value).unwrap()).unwrap();
    }
    let script = executor.prepare(program).unwrap();
    let (inputs, coders) = (batch(graph, 2, 0), [program, other].map(|p| Coder::new(&p.masks)));
    let mut beside = OtherPeer { program, other, inputs, coders, masks: BTreeMap::new(), sent: Vec::new() };
    executor.run(program, &script, 0, 0, &mut beside).unwrap();
    beside
}

/// A gradient lacks the entries that its activation lacked, and no others. It goes without indices if it is the gradient
/// of one activation.
///
/// Regression: masks took all numbers for f32. So the gradients of bf16 lost half of their entries, and others than
/// their activations lacked. Later, they left out the entries that arrived as zero: few bits round small ones to zero.
#[test]
fn gradients_share_the_masks_of_their_activations() {
    for graph in [gpt2(Sdpa, 0.0), narrow(gpt2(Sdpa, 0.0))] {
        let plan = random_plan(&graph, 2, 2, &mut ChoiceRng::new(3));
        let plan = compressed(&graph, &plan, Compressor::TopK, 8.0);
        let (mut without_indices, mut joined) = (0, 0);
        let shared = programs(&graph, &plan);
        for (program, other) in [(&shared[0], &shared[1]), (&shared[1], &shared[0])] {
            let beside = beside(&graph, program, other);
            for Sent { tensor, content, bytes, arrived } in &beside.sent {
                let Some(of) = program.masks.get(&(tensor.value(), other.peer)) else { continue };
                let micro_batch = tensor.micro_batch().unwrap();
                let mask = |value: &ValueId| &beside.masks[&Address::Value { value: *value, micro_batch }];
                let mut masks = of.iter().map(mask);
                let mut all = masks.next().unwrap().clone();
                masks.for_each(|mask| all.join(mask));
                let mut expected: Vec<f32> = content.to_f64().iter().map(|x| *x as f32).collect();
                all.clear_others(&mut expected);
                // The exact gradient has no zeros, so these are the places.
                let arrived: Vec<f32> = arrived.to_f64().iter().map(|x| *x as f32).collect();
                assert!(arrived.iter().zip(&expected).all(|(got, kept)| *kept != 0.0 || *got == 0.0));
                let error = fusionllm_compress::relative_error(&expected, &arrived);
                assert!(error < if of.len() == 1 { 0.3 } else { 0.9 }, "{error}");
                without_indices += usize::from(of.len() == 1 && bytes[1] == 5);
                joined += usize::from(of.len() > 1 && bytes[1] == 4);
            }
        }
        assert!(without_indices > 0, "{without_indices} without indices, {joined} of several values");
        // The published rule lets a gradient choose its own entries.
        let published = Compression { compressor: Compressor::AdaTopKPublished, ..plan.compression };
        let own = programs(&graph, &Plan { compression: published, ..plan.clone() });
        assert!(own.iter().all(|program| program.masks.is_empty()));
        let beside = beside(&graph, &own[1], &own[0]);
        assert!(beside.sent.iter().all(|sent| sent.bytes[1] == 4), "all have indices");
    }
}

/// `sum(x · w · (2 · c))`. The left peer computes `x · w`, which has a gradient, and `2 · c`, which has none.
fn products(dtype: DType) -> Graph {
    let mut b = Builder::new("products");
    let x = b.input("x", dtype, [40, 8]).unwrap();
    let c = b.input("c", dtype, [40, 8]).unwrap();
    let w = b.parameter("w", dtype, [40, 8], Init::Constant(1.0)).unwrap();
    let h = b.mul(x, w).unwrap();
    let doubled = b.add(c, c).unwrap();
    let product = b.mul(h, doubled).unwrap();
    let product = b.cast(product, DType::F32).unwrap();
    let loss = b.sum(product, &[0, 1], false).unwrap();
    b.output("loss", loss).unwrap();
    b.finish().unwrap()
}

/// The plan of which the left peer has the first `left` nodes, with a codec in both directions.
fn halves(graph: &Graph, left: usize, codec: Codec, compressor: Compressor) -> Plan {
    let stages: Vec<u32> = (0..graph.nodes.len()).map(|n| u32::from(n >= left)).collect();
    let names = vec!["left".into(), "right".into()];
    let mut plan = Plan::from_stages(graph, &stages, &[0, 1], names, 1, Schedule::OneFOneB, "test");
    let link = |from, to| LinkCodec { from: PeerId(from), to: PeerId(to), codec };
    plan.codecs = vec![link(0, 1), link(1, 0)].into_iter().filter(|l| l.codec != Codec::None).collect();
    plan.compression = Compression { compressor, ..Compression::default() };
    plan
}

/// Runs one step. `value` gives what the peers hold.
fn step(
    graph: &Graph,
    plan: &Plan,
    inputs: &[(&str, &HostTensor)],
    value: impl FnMut(&Value) -> Result<HostTensor, ExecError>,
) -> (LocalRun, StepResult) {
    let mut run = LocalRun::new(programs(graph, plan), &backends("cpu", 2), plain_sgd(1.0, 0.9, 0.0), value).unwrap();
    let mut batch: BTreeMap<String, HostTensor> =
        inputs.iter().map(|(name, tensor)| (name.to_string(), (*tensor).clone())).collect();
    batch.insert("loss_weight".into(), HostTensor::from_f32([], &[1.0]).unwrap());
    let result = run.step(&[batch]).unwrap();
    (run, result)
}

/// The reference encodes and decodes each tensor that the codec applies to, and computes the rest by hand. Its numbers
/// are small integers, which both types have.
#[test]
fn a_step_through_top_k_equals_its_definition() {
    for dtype in [DType::F32, DType::BF16] {
        let ty = TensorType::new(dtype, [40, 8]);
        let tensor = |number: &dyn Fn(usize) -> f64| {
            let numbers: Vec<f64> = (0..320).map(number).collect();
            HostTensor::from_f64([40, 8], &numbers).unwrap().cast(dtype).unwrap()
        };
        // The largest products stand where the gradient is small.
        let x = tensor(&|i| ((i * 37) % 101) as f64 - 50.0);
        let c = tensor(&|i| 60.0 - ((i * 37) % 101) as f64);
        let w = tensor(&|_| 1.0);
        let cases = [
            (4.0, Some(ValueFormat::Bf16), Compressor::TopK),
            (4.0, Some(ValueFormat::Bf16), Compressor::AdaTopKPublished),
            (8.0, Some(ValueFormat::Int(Bits::Eight)), Compressor::TopK),
            (7.0, None, Compressor::TopK),
        ];
        for (ratio, values, compressor) in cases {
            let graph = products(dtype);
            let codec = Codec::TopK(TopK { ratio, values });
            let element = if dtype == DType::F32 { Element::F32 } else { Element::Bf16 };
            let mut encoder = Encoder::new();
            let mut through = |numbers: &[f64], mask: Option<&Mask>| -> (Vec<f64>, Vec<u8>) {
                let mut numbers: Vec<f32> = numbers.iter().map(|x| *x as f32).collect();
                let (mut bytes, mut back) = (Vec::new(), vec![0.0; numbers.len()]);
                match mask {
                    Some(mask) => encoder.encode_under(mask, &codec, &mut numbers, element, 0, &mut bytes).unwrap(),
                    None => encoder.encode(&codec, &numbers, element, 0, &mut bytes).unwrap(),
                };
                assert!(bytes.len() as f64 <= (ty.bytes() + 8) as f64 / ratio + 1.0, "{} bytes", bytes.len());
                decode(&bytes, element, mask, &mut back).unwrap();
                (back.into_iter().map(f64::from).collect(), bytes)
            };
            let (h, bytes) = through(&x.to_f64(), None);
            assert!(h.iter().filter(|h| **h == 0.0).count() > 80, "entries are missing");
            let mask = Mask::of(&bytes, h.len()).filter(|_| compressor.shares_masks());
            let doubled: Vec<f64> = c.to_f64().iter().map(|c| 2.0 * c).collect();
            let products: Vec<f64> = h.iter().zip(&doubled).map(|(h, c)| h * c).collect();
            let products = HostTensor::from_f64([40, 8], &products).unwrap().cast(dtype).unwrap();
            let loss: f64 = products.to_f64().iter().sum();
            let (gradient, _) = through(&doubled, mask.as_ref());
            let gradient: Vec<f64> = gradient.iter().zip(x.to_f64()).map(|(g, x)| g * x).collect();
            let gradient = HostTensor::from_f64([40, 8], &gradient).unwrap().cast(dtype).unwrap();

            let plan = halves(&graph, 2, codec, compressor);
            let (run, result) = step(&graph, &plan, &[("x", &x), ("c", &c)], |_| Ok(w.clone()));
            // The sum itself is rounded.
            let error = (result.loss - loss).abs() / loss.abs();
            assert!(error < 1e-6, "{dtype}: the doubled input arrives exactly: {} {loss}", result.loss);
            let momentum = run.read(fusionllm_program::TensorKey::slot("w", "momentum_buffer")).unwrap();
            assert_eq!(momentum.to_f64(), gradient.to_f64(), "{dtype} at {ratio} by {compressor}");
            assert!(momentum.to_f64().iter().any(|g| *g != 0.0));
        }
    }
}

/// A frozen trunk, a float mask and a target cross the link, and nothing with a gradient. So the step has the same bits
/// with the strongest codec as without one.
#[test]
fn what_has_no_gradient_arrives_with_the_same_bits() {
    for dtype in [DType::F32, DType::BF16] {
        let mut b = Builder::new("frozen");
        let x = b.input("x", dtype, [16, 32]).unwrap();
        let frozen = b.buffer("frozen", dtype, [32, 32], Init::Normal { std: 0.3 }).unwrap();
        let w = b.parameter("w", dtype, [32, 32], Init::Normal { std: 0.3 }).unwrap();
        let trunk = b.linear(x, frozen, None).unwrap();
        let trunk = b.unary(Unary::Tanh, trunk).unwrap();
        let target = b.unary(Unary::Sin, x).unwrap();
        let mask = b.unary(Unary::Sigmoid, x).unwrap();
        let left = b.graph().nodes.len();
        let predicted = b.linear(trunk, w, None).unwrap();
        let error = b.sub(predicted, target).unwrap();
        let error = b.mul(error, mask).unwrap();
        let error = b.cast(error, DType::F32).unwrap();
        let squared = b.mul(error, error).unwrap();
        let loss = b.mean(squared, &[0, 1], false).unwrap();
        b.output("loss", loss).unwrap();
        let graph = b.finish().unwrap();
        let numbers: Vec<f64> = (0..512).map(|i| (i as f64 * 0.37).sin()).collect();
        let x = HostTensor::from_f64([16, 32], &numbers).unwrap().cast(dtype).unwrap();
        let after = |codec| {
            let (run, result) = step(&graph, &halves(&graph, left, codec, Compressor::TopK), &[("x", &x)], initial(3));
            assert!(result.grad_norm > 0.0);
            (result.loss, result.grad_norm, run.read("w").unwrap())
        };
        let exact = after(Codec::None);
        assert_eq!(after(Codec::TopK(TopK { ratio: 30.0, values: None })), exact, "{dtype}");
        assert_eq!(after(Codec::from_name("int4", 1.0).unwrap()), exact, "{dtype}");
    }
}
