//! Who asks about a run without a part in it: its owner, and a machine before it joins.

pub mod doctor;
pub mod owner;
pub mod page;
