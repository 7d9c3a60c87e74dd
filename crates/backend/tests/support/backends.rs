//! The backends that the tests run on.

use std::sync::Arc;

use fusionllm_backend::{Backend, names, open};

/// The backends that `FUSIONLLM_BACKENDS` names, separated by commas. Without that variable, the backends of this build
/// that every machine can run. So a graphics adapter is tested only if it is named.
pub(crate) fn backends() -> Vec<Arc<dyn Backend>> {
    let chosen = std::env::var("FUSIONLLM_BACKENDS").ok();
    let names: Vec<&str> = match &chosen {
        Some(chosen) => chosen.split(',').collect(),
        None => names().iter().copied().filter(|name| *name != "burn-wgpu").collect(),
    };
    names.into_iter().map(|name| open(name).unwrap()).collect()
}
