//! How long it takes to cut GPT-2 XL for 48 peers, compile the plan and check the Programs, and to order the tasks of 1,000 stages.
//!
//! `cargo run --release -p fusionllm-plan --example compile`

use std::error::Error;
use std::time::Instant;

use fusionllm_graph::models::Gpt2Config;
use fusionllm_graph::{DType, autodiff};
use fusionllm_plan::{Schedule, compile, equal_compute, order};

fn main() -> Result<(), Box<dyn Error>> {
    let (peers, micro_batches) = (48, 64);
    let config = Gpt2Config { n_layer: 48, n_embd: 1600, n_head: 25, ..Gpt2Config::default() };
    let graph = timed("build", || config.build(1, 1024, DType::F32))?;
    let train = timed("differentiate", || autodiff::differentiate(&graph, graph.outputs["loss"]))?;
    let names: Vec<String> = (0..peers).map(|p| format!("p{p}")).collect();
    let plan = timed("cut", || equal_compute(&graph, &names, micro_batches, Schedule::OneFOneB))?;
    let programs = timed("compile", || compile(&plan, &graph, &train))?;
    timed("validate", || programs.iter().try_for_each(|p| p.validate()))?;
    println!(
        "{} nodes, {} instructions on {peers} peers",
        train.graph.nodes.len(),
        programs.iter().map(|p| p.instructions.len()).sum::<usize>()
    );

    let stages: Vec<u32> = (0..1000).collect();
    let before: Vec<Vec<u32>> = stages.iter().map(|s| s.checked_sub(1).into_iter().collect()).collect();
    let after: Vec<Vec<u32>> = stages.iter().map(|s| if *s < 999 { vec![s + 1] } else { vec![] }).collect();
    let tasks = timed("order 1,000 stages", || {
        order(Schedule::OneFOneB, &stages, stages.len(), micro_batches, &before, &after, true)
    });
    println!("{} tasks", tasks.iter().map(Vec::len).sum::<usize>());
    Ok(())
}

fn timed<T>(what: &str, f: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = f();
    println!("{what}: {:.3} s", start.elapsed().as_secs_f64());
    result
}
