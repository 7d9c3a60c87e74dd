//! The `fusionllm` command.
fn main() {}
