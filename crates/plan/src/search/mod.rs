//! The search for plans, on plain numbers.
//!
//! The model is a [`Chain`] of atoms, the cluster is [`Machines`]. [`op_fence`] groups machines by community
//! detection on the graph of throughputs. It orders the groups, and the machines in them, so that the pipeline takes
//! the cheapest links. It cuts the chain for each order by dynamic programming, which may leave machines out. It
//! refines the best plans by local search. [`exact`] finds the best plan of a small problem, and [`lower_bound`]
//! limits the cost of all plans. All of them compare plans by [`Problem::evaluate`].

mod bound;
mod communities;
mod cut;
mod equal;
mod exact;
mod op_fence;
mod orders;
mod problem;
mod refine;
mod round_trip;
mod score;

pub use bound::lower_bound;
pub use communities::communities;
pub(crate) use equal::equal_memory;
pub use equal::{equal_compute, equal_number};
pub use exact::{MAX_CUT_POSITIONS, MAX_UNITS, exact, is_small};
pub use op_fence::op_fence;
pub(crate) use op_fence::{SearchDepth, search};
pub(crate) use orders::typical_message_bytes;
pub use problem::{
    Chain, Input, LineShare, LinkCost, Machines, Message, OffloadCost, Problem, ProcessorShare, Seconds, Tie, TieUser,
    Unit,
};
pub(crate) use problem::{MAX_THOROUGH_UNITS, prefix_sums};
pub(crate) use refine::polish;
pub use score::{Bottleneck, Score, ScoredPlan, StageRange};
