//! Programs of random graphs under random cuts: valid, complete, without deadlock, and the same computation under
//! every cut.

#![allow(clippy::unwrap_used)]

mod common;

use std::collections::{BTreeMap, BTreeSet};

use common::*;
use fusionllm_graph::{NodeId, Op, ValueId, ValueKind};
use fusionllm_plan::{Schedule, equal_compute};
use fusionllm_program::{Address, Instruction, PeerId, Program};
use proptest::prelude::*;

fn schedules() -> impl Strategy<Value = Schedule> {
    prop::sample::select(&Schedule::ALL[..])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_cut_changes_nothing_but_the_place(
        size in 0usize..14, peers in 1usize..=7, micro_batches in 1u32..=5, schedule in schedules(), seed in any::<u64>(),
    ) {
        let mut choices = ChoiceRng::new(seed);
        let graph = random_graph(size, &mut choices);
        let plan = random_plan(&graph, peers, micro_batches, schedule, &mut choices);
        let whole = programs(&graph, &one_peer(&graph, micro_batches));
        for (cut, whole) in programs(&graph, &plan).iter().zip(&whole) {
            for p in cut {
                prop_assert_eq!(p.validate(), Ok(()));
            }
            let (outcome, held) = machine::run(cut);
            prop_assert_eq!(&outcome, &machine::run(whole).0);
            check_structure(cut, whole, micro_batches);
            if schedule != Schedule::GPipe {
                check_memory(&plan, &held);
            }
        }
    }

    /// Stages with several peers each compute the same, except for the order in which gradients are added.
    #[test]
    fn replicas_share_the_work_of_one(
        size in 0usize..14, peers in 2usize..=7, micro_batches in 1u32..=6, schedule in schedules(), seed in any::<u64>(),
    ) {
        let mut choices = ChoiceRng::new(seed);
        let graph = random_graph(size, &mut choices);
        let mut plan = random_plan(&graph, peers, micro_batches, schedule, &mut choices);
        replicate(&mut plan, &mut choices);
        let whole = programs(&graph, &one_peer(&graph, micro_batches));
        for (cut, whole) in programs(&graph, &plan).iter().zip(&whole) {
            for p in cut {
                prop_assert_eq!(p.validate(), Ok(()));
                prop_assert!(plan.used().contains(&p.peer) || (p.instructions.is_empty() && p.holdings.is_empty()));
            }
            prop_assert_eq!(&machine::run_in_any_order(cut).0, &machine::run_in_any_order(whole).0);
            check_structure(cut, whole, micro_batches);
        }
    }

    /// Equal shares of any weights make a valid plan.
    #[test]
    fn equal_shares_can_be_carried_out(size in 0usize..14, peers in 1usize..=7, seed in any::<u64>()) {
        let graph = random_graph(size, &mut ChoiceRng::new(seed));
        let plan = equal_compute(&graph, &names(peers), 2, Schedule::OneFOneB).unwrap();
        machine::run(&programs(&graph, &plan)[0]);
    }
}

/// Checks which nodes run and which tensors stay on which peer, over all programs of a pass. `whole` is the program of
/// a single peer.
fn check_structure(programs: &[Program], whole: &[Program], micro_batches: u32) {
    let mut runs: BTreeMap<(NodeId, u32), usize> = BTreeMap::new();
    let mut added: BTreeMap<(ValueId, u32, u32), usize> = BTreeMap::new();
    let mut owners: BTreeMap<ValueId, usize> = BTreeMap::new();
    let mut updates: BTreeMap<ValueId, usize> = BTreeMap::new();
    for p in programs {
        for i in &p.instructions {
            match *i {
                Instruction::Run { node, micro_batch } => *runs.entry((node, micro_batch)).or_default() += 1,
                Instruction::Accumulate { parameter, part, micro_batch, .. } => {
                    *added.entry((parameter, part, micro_batch)).or_default() += 1;
                }
                Instruction::Update { parameter } => *updates.entry(parameter).or_default() += 1,
                // A mask made of constants is computed where it is needed.
                Instruction::Send { tensor: Address::Value { value, .. }, .. } => {
                    let ValueKind::Result { node, .. } = p.values[&value].kind else {
                        unreachable!("{value} is no result")
                    };
                    assert!(!matches!(p.nodes[&node].op, Op::Triangle(_) | Op::Full(_) | Op::CompareScalar(_)));
                }
                _ => {}
            }
        }
        for h in p.holdings.iter().filter(|h| h.owner) {
            *owners.entry(h.value).or_default() += 1;
        }
    }
    let nodes: BTreeMap<NodeId, &fusionllm_graph::Node> =
        programs.iter().flat_map(|p| p.nodes.iter().map(|(id, n)| (*id, n))).collect();
    for ((node, m), count) in runs {
        let n = nodes[&node];
        // Dropout, batch normalisation and every expensive operator run once.
        let dear =
            matches!(n.op, Op::Linear(_) | Op::Matmul(_) | Op::Dropout(_) | Op::BatchNorm(_) | Op::CrossEntropy(_));
        assert!(count == 1 || !dear, "{} runs {count} times on micro-batch {m}", n.name);
    }
    assert!(owners.values().all(|c| *c == 1), "{owners:?}");
    assert!(updates.values().all(|c| *c == 1), "{updates:?}");
    let parts: usize = whole.iter().flat_map(|p| p.reductions.values()).map(|r| r.parts.len()).sum();
    assert_eq!(added.len(), parts * micro_batches as usize);
    assert!(added.values().all(|c| *c == 1), "{added:?}");
}

/// A stage has at most as many micro-batches in flight as there are stages from it to the last. If weight gradients
/// wait, it has at most as many as there are stages. With ZB-H2 it has twice as many, less one.
fn check_memory(plan: &fusionllm_plan::Plan, held: &[usize]) {
    for (peer, held) in held.iter().enumerate() {
        let of = |(s, stage): (usize, &fusionllm_plan::Stage)| match stage.peers == [peer as u32] {
            true if plan.schedule == Schedule::ZeroBubble => plan.stages.len(),
            true if plan.schedule == Schedule::DeepZeroBubble => 2 * plan.stages.len() - 1,
            true => plan.stages.len() - s,
            false => 0,
        };
        let most: usize = plan.stages.iter().enumerate().map(of).sum();
        assert!(*held <= most.max(1), "peer {peer} holds {held} micro-batches, {most} are needed");
    }
}

/// Three layers with one shared weight, on three peers. A fourth peer is idle.
fn tied() -> fusionllm_graph::Graph {
    use fusionllm_graph::{Builder, DType, Init};
    let mut b = Builder::new("tied");
    let x = b.input("x", DType::F32, [2, 4]).unwrap();
    let labels = b.input("labels", DType::I64, [2]).unwrap();
    let w = b.parameter("w", DType::F32, [4, 4], Init::Constant(0.5)).unwrap();
    let mut y = x;
    for layer in ["a", "b", "c"] {
        y = b.scope(layer, |b| b.linear(y, w, None)).unwrap();
    }
    let loss = b.scope("c", |b| b.cross_entropy(y, labels, -100)).unwrap();
    b.output("loss", loss).unwrap();
    b.output("correct", loss).unwrap();
    b.finish().unwrap()
}

fn by_first_letter(name: &str) -> u32 {
    u32::from(name.as_bytes()[0] - b'a')
}

fn sends(p: &Program) -> BTreeSet<(String, PeerId)> {
    p.instructions
        .iter()
        .filter_map(|i| match *i {
            Instruction::Send { tensor, to } => {
                let name = p.values[&tensor.value()].name.clone();
                Some((if matches!(tensor, Address::Part { .. }) { format!("part of {name}") } else { name }, to))
            }
            _ => None,
        })
        .collect()
}

fn sent(name: &str, to: u32) -> (String, PeerId) {
    (name.to_string(), PeerId(to))
}

/// The earliest holder of a tied parameter adds all parts, updates it, and sends the new value.
#[test]
fn a_tied_parameter_has_one_owner() {
    let graph = tied();
    let plan = plan_by(&graph, 2, Schedule::OneFOneB, by_first_letter);
    let [train, _] = programs(&graph, &plan);
    let w = graph.find("w").unwrap();
    for p in &train {
        let owns = p.peer == PeerId(0);
        assert_eq!(p.owned().count(), usize::from(owns));
        assert!(p.holdings.iter().any(|h| h.value == w && h.owner == owns));
        assert_eq!(sends(p).contains(&sent("w", 1)), owns);
        assert_eq!(sends(p).contains(&sent("part of w", 0)), !owns);
    }
    machine::run(&train);
}

/// The parts that a program sends, and those with which they were added.
fn parts_sent(p: &Program) -> Vec<(u32, usize)> {
    let parts = p.instructions.iter().filter_map(|i| match *i {
        Instruction::Send { tensor: Address::Part { parameter, part }, .. } => {
            Some((part, p.reductions[&parameter].joined(part).len()))
        }
        _ => None,
    });
    parts.collect()
}

/// Three uses are one message for each turn of a replica. The turns that one peer takes have the same sums.
#[test]
fn a_peer_adds_the_uses_of_a_tied_parameter_before_it_sends_them() {
    let graph = tied();
    let mut plan = plan_by(&graph, 5, Schedule::OneFOneB, |_| 0);
    plan.peers = names(3);
    plan.stages[0].peers = vec![0, 1, 2, 1];
    let [train, _] = programs(&graph, &plan);
    assert_eq!(train.iter().map(parts_sent).collect::<Vec<_>>(), [vec![], vec![(3, 3), (9, 3)], vec![(6, 3)]]);
    let sum = "gradient of w at peer 0: (c.linear.grad.matmul_2 (peer 0) + b.linear.grad.matmul_2 (peer 0) + ";
    assert!(train[2].to_string().contains(sum), "{}", train[2]);
    plan.stages[0].peers = vec![0; 4];
    let [alone, _] = programs(&graph, &plan);
    assert_eq!(machine::run(&train).0, machine::run(&alone).0);
}

/// A stranger's program adds the parts before it sends them, each once and in order.
#[test]
fn joined_parts_are_checked() {
    let graph = tied();
    let mut plan = plan_by(&graph, 2, Schedule::OneFOneB, |_| 0);
    plan.peers = names(2);
    plan.stages[0].peers = vec![0, 1];
    let [train, _] = programs(&graph, &plan);
    let joins: Vec<usize> = (0..train[1].instructions.len())
        .filter(|at| matches!(train[1].instructions[*at], Instruction::Join { .. }))
        .collect();
    let [first, second] = joins[..] else { panic!("two of three parts are joined: {joins:?}") };
    let refusal = |change: &dyn Fn(&mut Program)| {
        let mut changed = train[1].clone();
        change(&mut changed);
        changed.validate().unwrap_err().to_string()
    };
    let unsent = refusal(&|p| {
        p.instructions.remove(second);
    });
    assert!(unsent.ends_with("the parts that are sent as one are not added"), "{unsent}");
    let swapped = refusal(&|p| p.instructions.swap(first, second));
    assert!(swapped.ends_with("parts must be added in their order"), "{swapped}");
    let early = refusal(&|p| p.instructions.rotate_left(first));
    assert!(early.contains("is not complete"), "{early}");
    for bracket in [0, 4, u32::MAX] {
        let uneven = refusal(&|p| p.reductions.values_mut().for_each(|r| r.bracket = bracket));
        assert_eq!(uneven, "program: the gradient parts of w do not fit it");
    }
    // Without a bracket, each part is a message.
    let alone = refusal(&|p| p.reductions.values_mut().for_each(|r| r.bracket = 1));
    assert!(alone.ends_with("the part stays alone"), "{alone}");
}

/// Without replicas only the first uses in the order of the sum can be added by another peer: the last two layers'.
#[test]
fn parts_are_added_early_only_in_the_order_of_the_sum() {
    let graph = tied();
    let [train, _] = programs(&graph, &plan_by(&graph, 2, Schedule::OneFOneB, |name| by_first_letter(name).min(1)));
    assert_eq!(parts_sent(&train[1]), [(0, 2)]);
    let [train, _] = programs(&graph, &plan_by(&graph, 2, Schedule::OneFOneB, by_first_letter));
    assert_eq!(train.iter().map(parts_sent).collect::<Vec<_>>(), [vec![], vec![(1, 1)], vec![(0, 1)]]);
}

/// The stages of the uses take different numbers of turns, so no turn has a part of each.
#[test]
fn unequal_turns_are_added_use_by_use() {
    let graph = tied();
    let mut plan = plan_by(&graph, 4, Schedule::OneFOneB, |name| by_first_letter(name).min(1));
    plan.peers = names(3);
    plan.stages[1].peers = vec![1, 2];
    let [train, _] = programs(&graph, &plan);
    assert_eq!(train[1].reductions.values().map(|r| (r.parts.len(), r.bracket)).collect::<Vec<_>>(), [(5, 1)]);
    assert_eq!(parts_sent(&train[1]), [(0, 1), (2, 1)]);
    machine::run(&train);
}

#[test]
fn the_printed_program_of_the_middle_of_three_peers() {
    let graph = tied();
    let plan = plan_by(&graph, 1, Schedule::OneFOneB, by_first_letter);
    let [train, eval] = programs(&graph, &plan);
    insta::assert_snapshot!(train[1], @r#"
    program of peer 1, 1 micro-batches {
      keep parameter w: f32[4, 4]
      gradient of w at peer 0: c.linear.grad.matmul_2 (peer 2) + b.linear.grad.matmul_2 (peer 1) + a.linear.grad.matmul (peer 0)
      [0] receive a.linear from peer 0
      [0] run b.linear = linear(a.linear, w)
      [0] send b.linear to peer 2
      [0] free b.linear
      [0] receive c.linear.grad.matmul from peer 2
      [0] run b.linear.grad.matmul = matmul(c.linear.grad.matmul, w)
      [0] send b.linear.grad.matmul to peer 0
      [0] free b.linear.grad.matmul
      [0] run b.linear.grad.permute = permute(c.linear.grad.matmul)
      [0] free c.linear.grad.matmul
      [0] run b.linear.grad.matmul_2 = matmul(b.linear.grad.permute, a.linear)
      [0] free a.linear
      [0] free b.linear.grad.permute
      [0] add b.linear.grad.matmul_2 to part 1 of w
      [0] free b.linear.grad.matmul_2
      send part 1 of w to peer 0
      clip
      receive w from peer 0
    }
    "#);
    insta::assert_snapshot!(eval[1], @r#"
    program of peer 1, 1 micro-batches {
      keep parameter w: f32[4, 4]
      [0] receive a.linear from peer 0
      [0] run b.linear = linear(a.linear, w)
      [0] free a.linear
      [0] send b.linear to peer 2
      [0] free b.linear
    }
    "#);
}

/// A value that skips a stage goes straight to its reader. A reader of one of several results gets only that one.
#[test]
fn values_go_from_maker_to_reader() {
    use fusionllm_graph::{Builder, DType, Init};
    let mut b = Builder::new("skip");
    let x = b.input("x", DType::F32, [4, 4]).unwrap();
    let w = b.parameter("w", DType::F32, [4, 4], Init::Constant(0.5)).unwrap();
    let y = b.scope("a", |b| b.linear(x, w, None)).unwrap();
    let parts = b.scope("a", |b| b.chunk(y, 2, 1)).unwrap();
    let l = b.scope("b", |b| b.mul(parts[0], parts[0])).unwrap();
    let r = b.scope("c", |b| b.mul(parts[1], parts[1])).unwrap();
    let loss =
        b.scope("d", |b| b.cat(&[l, r], 1).and_then(|z| b.add(z, y)).and_then(|z| b.sum(z, &[0, 1], false))).unwrap();
    b.output("loss", loss).unwrap();
    b.output("correct", loss).unwrap();
    let graph = b.finish().unwrap();
    let plan = plan_by(&graph, 2, Schedule::GPipe, by_first_letter);
    let [train, _] = programs(&graph, &plan);
    let names: Vec<String> = graph.node_ids().map(|n| graph.value(graph.node(n).outputs[0]).name.clone()).collect();
    let [y, left, z, r] = [&names[0], &names[1], &names[2], &names[3]];
    let right = &format!("{left}.1");
    assert_eq!(sends(&train[0]), BTreeSet::from([sent(y, 3), sent(left, 1), sent(right, 2)]));
    assert!(sends(&train[1]).contains(&sent(z, 3)) && sends(&train[2]).contains(&sent(r, 3)));
    assert!(train[3].instructions.iter().all(|i| !matches!(i, Instruction::Send { to: PeerId(p), .. } if *p > 2)));
    machine::run(&train);
}

/// Running statistics change once per micro-batch, in order, where they are kept. An evaluation changes nothing.
#[test]
fn buffers_change_in_the_order_of_micro_batches() {
    let mut choices = ChoiceRng::new(0);
    let graph = (0..).map(|_| random_graph(8, &mut choices)).find(|g| !g.state_updates.is_empty()).unwrap();
    let plan = random_plan(&graph, 4, 3, Schedule::OneFOneB, &mut choices);
    let [train, eval] = programs(&graph, &plan);
    for u in &graph.state_updates {
        let updates: Vec<(PeerId, u32)> = train
            .iter()
            .flat_map(|p| p.instructions.iter().map(move |i| (p.peer, i)))
            .filter_map(|(peer, i)| match *i {
                Instruction::UpdateState { buffer, micro_batch, .. } if buffer == u.buffer => Some((peer, micro_batch)),
                _ => None,
            })
            .collect();
        let home = updates[0].0;
        assert_eq!(updates, [(home, 0), (home, 1), (home, 2)]);
    }
    let changes = |i: &Instruction| matches!(i, Instruction::UpdateState { .. } | Instruction::Clip);
    assert!(eval.iter().all(|p| !p.instructions.iter().any(changes)));
}

/// Regression: a view on another peer than its reader was run again by the reader, which does not keep the viewed
/// parameter.
#[test]
fn a_view_of_a_parameter_is_sent() {
    use fusionllm_graph::{Builder, DType, Init};
    let mut b = Builder::new("view");
    let x = b.input("x", DType::F32, [2, 3]).unwrap();
    let w = b.parameter("w", DType::F32, [4, 3], Init::Constant(0.5)).unwrap();
    let t = b.scope("a", |b| b.transpose(w)).unwrap();
    let y = b.scope("b", |b| b.matmul(x, t)).unwrap();
    let loss = b.scope("b", |b| b.sum(y, &[0, 1], false)).unwrap();
    b.output("loss", loss).unwrap();
    b.output("correct", loss).unwrap();
    let graph = b.finish().unwrap();
    let [train, _] = programs(&graph, &plan_by(&graph, 2, Schedule::GPipe, by_first_letter));
    for p in &train {
        assert_eq!(p.validate(), Ok(()));
    }
    assert!(sends(&train[0]).contains(&sent("a.permute", 1)));
    // The view is sent exactly, and so is its gradient.
    assert!(train.iter().all(|p| p.coded.is_empty()));
    machine::run(&train);
}

/// Regression: the weight of a loss with one element in one dimension has that shape, and the view that makes it
/// belonged to no stage.
#[test]
fn a_loss_may_have_a_dimension() {
    use fusionllm_graph::{Builder, DType, Init};
    let mut b = Builder::new("loss");
    let x = b.input("x", DType::F32, [2, 3]).unwrap();
    let w = b.parameter("w", DType::F32, [1, 3], Init::Constant(0.5)).unwrap();
    let y = b.scope("a", |b| b.linear(x, w, None)).unwrap();
    let loss = b.scope("b", |b| b.sum(y, &[0], false)).unwrap();
    b.output("loss", loss).unwrap();
    b.output("correct", loss).unwrap();
    let graph = b.finish().unwrap();
    assert_eq!(graph.ty(loss).shape, [1]);
    machine::run(&programs(&graph, &plan_by(&graph, 2, Schedule::OneFOneB, by_first_letter))[0]);
}
