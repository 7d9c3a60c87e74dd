//! Reads the archives (`.pt2`) that `torch.export.save` of PyTorch 2.9 to 2.15 writes, and translates them into graphs.
//!
//! A model needs no change for this, and the import needs no Python.
//!
//! [`Archive::open`] reads and checks the file, which is not trusted. [`Archive::import`] translates the operators of
//! the export. [`Archive::load`] reads a parameter or buffer. [`Archive::replace_state`] gives them other contents than
//! the archive's.
//!
//! Loss, gradients and buffers are those of PyTorch's eager mode, or the import fails and names the operator. The
//! operators that `run_decompositions()` leaves are supported, too. But such an archive has lost `detach` and
//! `no_grad`, and with them some gradients: [`Archive::warning`] says so.
//!
//! ```text
//! model.pt2 (zip, members not compressed)         use
//! ├── archive_format, archive_version, byteorder  checked
//! ├── models/model.json                           the graph: nodes, signature, types
//! ├── data/weights/model_weights_config.json      names, types and members of parameters and buffers
//! ├── data/weights/weight_0 …                     raw storages; names that share one are one (tied) parameter
//! ├── data/constants/…                            the same for constants, which become part of the graph
//! └── data/sample_inputs/…                        pickled: never read
//! ```

mod analysis;
mod archive;
mod aten;
mod call;
mod catalog;
mod context;
mod decompositions;
mod error;
mod layout;
mod loss;
mod program;
mod prune;
mod scalars;
mod schema;
mod zip;

pub use archive::{Archive, State};
pub use catalog::operator_table;
pub use context::Evaluate;
pub use error::{ImportError, StateError, UnsupportedOperator};
pub use program::{FloatType, ImportOptions, Imported, TARGETS_KEY};
pub use scalars::Scalar;
