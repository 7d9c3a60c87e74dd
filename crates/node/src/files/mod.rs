//! Files that the program writes and reads: atomic writes, safetensors, checkpoints and run directories.

pub mod checkpoint;
mod disk;
pub mod run_dir;
mod tensor_file;
pub mod weights;

pub use disk::DiskError;
pub(crate) use disk::{sync_directory, write_atomic, write_private, write_private_atomic};
pub(crate) use tensor_file::{TensorFile, write_tensors};
