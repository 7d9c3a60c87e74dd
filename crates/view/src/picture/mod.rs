//! Pictures of plans as SVG, and one step as a trace.

mod cluster;
pub(crate) mod measure;
pub(crate) mod style;
pub(crate) mod svg;
mod timeline;
mod trace;

pub use cluster::cluster;
pub use style::style;
pub use svg::Picture;
pub use timeline::{Message, Strip, timeline};
pub use trace::chrome_trace;
