//! `graph import` and `graph check`: models from PyTorch.

use fusionllm_import::ImportOptions;
use fusionllm_workbench::model::check::{Deviations, check as compare};
use fusionllm_workbench::model::imported::ImportedModel;
use serde::Serialize;

use crate::args::{CheckArgs, ImportArgs};
use crate::failure::Failure;
use crate::output;
use crate::output::note;
use crate::units::{bytes, count, counted};

/// The result of an import.
#[derive(Serialize)]
struct Made {
    name: String,
    operators: usize,
    parameters: usize,
    parameter_bytes: usize,
    buffers: usize,
    inputs: Vec<String>,
}

/// Writes a model's graph and weights.
pub(crate) fn import(args: &ImportArgs, json: bool) -> Result<(), Failure> {
    let options = ImportOptions { batch_size: args.samples, loss: args.loss.clone(), ..Default::default() };
    let mut model = ImportedModel::open(&args.model, None, options)?;
    model.warnings().into_iter().for_each(note);
    if let Some(e) = model.imported().without_loss() {
        note(format_args!("{e}, so the graph cannot be trained"));
    }
    model.write(&args.output)?;
    let graph = &model.imported().graph;
    let made = Made {
        name: graph.name.clone(),
        operators: graph.nodes.len(),
        parameters: graph.parameters().map(|v| graph.ty(v).numel()).sum(),
        parameter_bytes: graph.parameters().map(|v| graph.ty(v).bytes()).sum(),
        buffers: graph.buffers().count(),
        inputs: graph.inputs().map(|v| format!("{}: {}", graph.value(v).name, graph.ty(v))).collect(),
    };
    if json {
        return output::print_json(&made);
    }
    output::print(&format!(
        "{}: {}, {} parameters ({}), inputs {}\nwritten to {}; see it with: fusionllm graph show {}\n",
        made.name,
        counted(made.operators, "operator"),
        count(made.parameters as f64),
        bytes(made.parameter_bytes as u64),
        made.inputs.join(", "),
        args.output.display(),
        args.output.display(),
    ))
}

/// A line about buffers, where the reference has them.
fn buffers(result: &Deviations) -> String {
    match &result.worst_buffer {
        none if none.is_empty() => String::new(),
        worst => format!("buffers: largest relative error {:.1e}, of {worst}\n", result.max_buffer_rel_err),
    }
}

/// Compares a model with PyTorch's results.
pub(crate) fn check(args: &CheckArgs, json: bool) -> Result<(), Failure> {
    let weights = args.weights.as_deref();
    let (loss, backend) = (args.loss.as_deref(), args.backend.name());
    let result = compare(&args.model, weights, loss, &args.against, &backend, args.peers.into())?;
    result.warnings.iter().for_each(note);
    if json {
        output::print_json(&result)?;
    } else {
        output::print(&format!(
            "loss {} (PyTorch {}, relative error {:.1e})\n{}: largest relative error {:.1e}, of {}\n{}{}\n",
            result.loss,
            result.loss_reference,
            result.loss_rel_err,
            counted(result.parameters, "gradient"),
            result.max_grad_rel_err,
            result.worst_parameter,
            buffers(&result),
            counted(result.operators, "operator"),
        ))?;
    }
    if result.error() <= args.tolerance {
        return Ok(());
    }
    Err(Failure::running(format!(
        "{}: it differs from {} by {:.1e}, more than the tolerance of {:.1e}",
        args.model.display(),
        args.against.display(),
        result.error(),
        args.tolerance,
    ))
    .hint("a reference in float64 (of the widened model) does not depend on the kernels"))
}
