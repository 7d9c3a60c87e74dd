//! Compile speed: seconds to cut a model for 48 and for 1,000 peers, to compile the plan, and to check the programs.
//!
//! ```console
//! $ cargo bench -p fusionllm-plan --bench compile_speed
//! ```

use std::error::Error;
use std::time::Instant;

use fusionllm_graph::{DType, autodiff};
use fusionllm_models::Gpt2Config;
use fusionllm_plan::{Schedule, compile, equal_compute};

fn main() -> Result<(), Box<dyn Error>> {
    let xl = Gpt2Config { n_layer: 48, n_embd: 1600, n_head: 25, ..Gpt2Config::default() };
    measure("GPT-2 XL", &xl, 48)?;
    // The number of operators sets the time, not the width. A narrow model takes less memory.
    measure("144 blocks", &Gpt2Config { n_layer: 144, n_embd: 64, n_head: 1, ..Gpt2Config::default() }, 1000)
}

fn measure(name: &str, config: &Gpt2Config, peers: usize) -> Result<(), Box<dyn Error>> {
    println!("{name} on {peers} peers");
    let graph = timed("build", || config.build(1, 1024, DType::F32))?;
    let train = timed("differentiate", || autodiff::differentiate(&graph, graph.outputs["loss"]))?;
    let names: Vec<String> = (0..peers).map(|p| format!("p{p}")).collect();
    for schedule in Schedule::ALL {
        let plan = timed("cut", || equal_compute(&graph, &names, 64, schedule))?;
        let programs = timed(&format!("compile for {schedule:?}"), || compile(&plan, &graph, &train))?;
        timed("validate", || programs.iter().try_for_each(|p| p.validate()))?;
        let instructions = programs.iter().map(|p| p.instructions.len()).sum::<usize>();
        println!("{} nodes, {instructions} instructions", train.graph.nodes.len());
    }
    Ok(())
}

fn timed<T>(what: &str, f: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = f();
    println!("{what}: {:.3} s", start.elapsed().as_secs_f64());
    result
}
