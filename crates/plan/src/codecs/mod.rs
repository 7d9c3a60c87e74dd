//! The codecs of links: the rule in a job file, the values and the traffic that codecs apply to, and the choice of codecs
//! by that rule.

mod choice;
mod coded;
mod loss;
mod rule;
mod traffic;

pub use choice::SLACK;
pub(crate) use choice::assign;
pub(crate) use coded::{coded_values, widest_coded};
pub use loss::LossBudget;
pub use rule::{Compression, Compressor, LinkCodec};
pub use traffic::Traffic;
