//! Pictures and pages of plans and runs, as pure functions of what is to be seen.

pub mod page;
pub mod picture;

/// The distance between ticks of an axis: 1, 2 or 5 times a power of ten, and at least as much as this.
fn round_step(least: f64) -> f64 {
    let power = 10f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|f| f * power).find(|step| *step >= least).unwrap_or(least)
}
