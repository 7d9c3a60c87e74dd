//! One entry of the table of operators.

use crate::call::{Call, Output};
use crate::context::{Context, Result, Value};

/// Translates one call of an operator. By convention `c` is the context and `a` the call with its arguments.
pub(crate) type Translate = fn(&mut Context<'_>, &Call<'_>) -> Result<Vec<Output>>;

/// One operator of PyTorch. Its in-place form `NAME_` is supported with it.
pub(crate) struct Entry {
    /// The name in `torch.ops`, without library and overload.
    pub(crate) name: &'static str,
    /// The supported overloads; empty if the operator has none.
    pub(crate) overloads: &'static [&'static str],
    pub(crate) translate: Translate,
}

/// The entries of a file: `"name" ["overload", ..] => function`.
macro_rules! entries {
    ($($name:literal [$($overload:literal),*] => $f:expr,)*) => {
        pub(super) const ENTRIES: &[$crate::aten::entry::Entry] = &[
            $($crate::aten::entry::Entry { name: $name, overloads: &[$($overload),*], translate: $f },)*
        ];
    };
}

pub(super) use entries;

/// A single result.
pub(super) fn one(value: Value) -> Result<Vec<Output>> {
    Ok(vec![Output::Value(value)])
}
