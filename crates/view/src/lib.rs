//! Pictures of plans and runs, as pure functions of what is to be seen.

pub mod picture;
