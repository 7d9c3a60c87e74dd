//! The cases, by families as in [`fusionllm_graph::ops`]. They include sizes 1 and 0 and scalars wherever an operator
//! takes them.

mod convolution;
mod elementwise;
mod index;
mod normalization;
mod pooling;
mod products;
mod reduce;
mod training;
mod view;

use super::Case;
use super::case::Cases;

type Family = fn(&mut Cases) -> Result<(), String>;

/// Every case. An error means a mistake in the suite.
pub fn cases() -> Result<Vec<Case>, String> {
    let families: [(&str, Family); 9] = [
        ("elementwise", elementwise::cases),
        ("reduce", reduce::cases),
        ("view", view::cases),
        ("index", index::cases),
        ("products", products::cases),
        ("convolution", convolution::cases),
        ("pooling", pooling::cases),
        ("normalization", normalization::cases),
        ("training", training::cases),
    ];
    let mut all = Vec::new();
    for (name, fill) in families {
        let mut cases = Cases::new(name);
        fill(&mut cases).map_err(|e| format!("the cases of {name}: {e}"))?;
        all.extend(cases.into_vec());
    }
    Ok(all)
}
