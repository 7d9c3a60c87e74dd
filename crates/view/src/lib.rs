//! Pictures and pages of plans and runs, as pure functions of what is to be seen.

pub mod page;
pub mod picture;
