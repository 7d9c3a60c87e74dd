//! What one machine does with a job and a model, without a network.
//!
//! [`model`] builds graphs from a job, a checkpoint or a file from elsewhere, and checks, exports and samples models.
//! [`planning`] leads from a job to a plan. [`profile`] measures how fast this machine computes.

mod error;
pub mod machine;
pub mod model;
pub mod planning;
pub mod profile;

pub use error::WorkbenchError;
