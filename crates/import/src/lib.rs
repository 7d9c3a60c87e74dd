//! Reads the archives (`.pt2`) that `torch.export.save` writes, of PyTorch 2.9 to 2.15, into graphs: stock models come as they are, with no
//! Python and none of our code in theirs.
//!
//! [`Archive::open`] reads and checks the file, which is not trusted; [`Archive::import`] translates its operators, both composite ones as exported and those
//! that `run_decompositions()` leaves; [`Archive::load`] gives the content of a parameter or buffer.
//!
//! ```text
//! model.pt2 (zip, members stored)                what becomes of it
//! ├── archive_format, archive_version, byteorder  checked
//! ├── models/model.json                           the graph: nodes, signature, types
//! ├── data/weights/model_weights_config.json      names, types and members of parameters and buffers
//! ├── data/weights/weight_0 …                     raw storages; one that several names share is one (tied) parameter
//! ├── data/constants/…                            the same for constants: folded into the graph
//! └── data/sample_inputs/…                        pickled: never read
//! ```

mod analysis;
mod archive;
mod aten;
mod call;
mod catalog;
mod context;
mod error;
mod loss;
mod program;
mod prune;
mod schema;
mod zip;

pub use archive::Archive;
pub use catalog::operator_table;
pub use context::Evaluate;
pub use error::{ImportError, UnsupportedOperator};
pub use program::{ImportOptions, Imported, Precision, TARGETS_KEY};
