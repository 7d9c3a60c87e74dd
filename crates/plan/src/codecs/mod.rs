//! The codecs of links: the rule in a job file, the traffic that codecs apply to, and the choice of codecs by that
//! rule.

mod choice;
mod rule;
mod traffic;

pub use choice::SLACK;
pub(crate) use choice::assign;
pub use rule::{Compression, Compressor, LinkCodec};
pub use traffic::Traffic;
pub(crate) use traffic::codable;
