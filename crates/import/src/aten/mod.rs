//! The supported operators of PyTorch, and their translation into operators of the graph crate.

mod activation;
mod attention;
mod create;
mod elementwise;
mod entry;
mod image;
mod index;
mod loss;
mod nn;
mod product;
mod rearrange;
mod reduce;
mod strided;
mod symbol;
mod view;

pub(crate) use entry::Entry;

/// The operators of ATen, in sections.
pub(crate) const ATEN: &[(&str, &[Entry])] = &[
    ("Arithmetic and functions of one element", elementwise::ENTRIES),
    ("Activation functions", activation::ENTRIES),
    ("Reductions and scans", reduce::ENTRIES),
    ("Views", view::ENTRIES),
    ("Rearranging, padding and converting", rearrange::ENTRIES),
    ("Tensors from nothing", create::ENTRIES),
    ("Indices, sorting and masks", index::ENTRIES),
    ("Products", product::ENTRIES),
    ("Convolution, pooling and resizing", image::ENTRIES),
    ("Normalisation, softmax, dropout and embedding", nn::ENTRIES),
    ("Attention", attention::ENTRIES),
    ("Losses", loss::ENTRIES),
    ("Shapes and checks", symbol::ATEN),
];

/// The operators of other libraries.
pub(crate) const OTHERS: &[(&str, &[Entry])] = &[
    ("_operator", symbol::OPERATOR),
    ("torch", symbol::TORCH),
    ("math", symbol::MATH),
    ("transformers", product::TRANSFORMERS),
];

/// The entry of an operator, and whether the call is in-place.
pub(crate) fn find(library: &str, name: &str, overload: &str) -> Option<(&'static Entry, bool)> {
    let of = |name: &str| -> Option<&'static Entry> {
        let known = |e: &&Entry| e.name == name && (e.overloads.contains(&overload) || e.overloads.is_empty());
        if library == "aten" {
            return ATEN.iter().flat_map(|(_, entries)| *entries).find(known);
        }
        OTHERS.iter().filter(|(l, _)| *l == library).flat_map(|(_, entries)| *entries).find(known)
    };
    if let Some(entry) = of(name) {
        return Some((entry, false));
    }
    let functional = name.strip_suffix('_').filter(|n| !n.ends_with('_') && library == "aten")?;
    of(functional).map(|entry| (entry, true))
}

/// Whether an operator computes each element of its result from those at the same place.
pub(crate) fn works_by_element(entry: &Entry) -> bool {
    let entries = [elementwise::ENTRIES, activation::ENTRIES].into_iter().flatten();
    entries.into_iter().any(|e| e.name == entry.name) || ["copy", "masked_fill"].contains(&entry.name)
}
