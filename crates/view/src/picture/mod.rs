//! Pictures of plans as SVG, and one step as a trace.

mod cluster;
mod svg;
mod timeline;
mod trace;

pub use cluster::cluster;
pub use timeline::timeline;
pub use trace::chrome_trace;
