//! Curves over the steps of runs.
//!
//! The plot's height is fixed, and its width follows the page. So curves are SVG that is stretched, while words are
//! HTML beside it, which is not. A script draws the cursor from the numbers in `data-` attributes.

use std::fmt::Write as _;

use maud::{Markup, html};
use serde_json::json;

use crate::round_step;

/// The most points of a curve. Longer runs are drawn in intervals of steps.
const MAX_POINTS: usize = 480;

/// The canvas, which the page stretches.
const WIDTH: f64 = 1000.0;
const HEIGHT: f64 = 300.0;

/// How a number is written.
pub(super) type Format = fn(f64) -> String;

/// A curve: values by step, in ascending order. Values that are not known leave a gap.
pub(super) struct Curve {
    pub(super) name: String,
    /// The number of its colour.
    pub(super) color: usize,
    pub(super) shape: Shape,
    pub(super) points: Vec<(u64, Option<f64>)>,
}

/// How a curve is drawn.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    /// A line, with the range of the values where one point stands for several steps.
    Line,
    /// A dot at each value, joined by a thin line.
    Dots,
    /// A dashed line: what was predicted.
    Dashed,
}

/// Something that happened at a step.
#[derive(Clone)]
pub(super) struct Mark {
    pub(super) step: u64,
    /// One character that stands above the plot.
    pub(super) sign: char,
    /// The event in words.
    pub(super) words: String,
}

/// A chart: curves that share their axes.
pub(super) struct Chart {
    pub(super) title: String,
    pub(super) format: Format,
    pub(super) curves: Vec<Curve>,
    pub(super) marks: Vec<Mark>,
    /// Whether the vertical axis begins at zero.
    pub(super) from_zero: bool,
}

/// Some steps in a row, as one point of a curve.
struct Point {
    /// The last step.
    step: u64,
    mean: Option<f64>,
    low: f64,
    high: f64,
}

/// At most [`MAX_POINTS`] points, each for the same number of steps.
fn thin(points: &[(u64, Option<f64>)]) -> Vec<Point> {
    let each = points.len().div_ceil(MAX_POINTS).max(1);
    let point = |steps: &[(u64, Option<f64>)]| {
        let known = || steps.iter().filter_map(|(_, value)| value.filter(|v| v.is_finite()));
        let count = known().count();
        Point {
            step: steps.last().map_or(0, |(step, _)| *step),
            mean: (count > 0).then(|| known().sum::<f64>() / count as f64),
            low: known().fold(f64::INFINITY, f64::min),
            high: known().fold(f64::NEG_INFINITY, f64::max),
        }
    };
    points.chunks(each).map(point).collect()
}

/// A linear map from values to the canvas.
struct Axis {
    from: f64,
    to: f64,
    ticks: Vec<f64>,
}

impl Axis {
    /// An axis over a range, with about `count` ticks at round numbers.
    fn new(from: f64, to: f64, count: f64) -> Self {
        let span = (to - from).max(f64::MIN_POSITIVE);
        let step = round_step(span / count);
        let (first, last) = ((from / step).ceil(), (to / step).floor());
        let count = (last - first).clamp(0.0, 100.0) as u32;
        let ticks = (0..=count).map(|i| (first + f64::from(i)) * step).filter(|t| *t <= to).collect();
        Self { from, to, ticks }
    }

    /// The place of a value, from 0 to 1.
    fn place(&self, value: f64) -> f64 {
        ((value - self.from) / (self.to - self.from)).clamp(0.0, 1.0)
    }
}

fn x(at: f64) -> f64 {
    at * WIDTH
}

fn y(at: f64) -> f64 {
    (1.0 - at) * HEIGHT
}

impl Chart {
    /// The chart, or nothing if no value is known.
    pub(super) fn render(&self) -> Markup {
        let thinned: Vec<Vec<Point>> = self.curves.iter().map(|c| thin(&c.points)).collect();
        let points = || thinned.iter().flatten().filter(|p| p.mean.is_some());
        let Some(first) = points().map(|p| p.step).min() else { return html! {} };
        let last = points().map(|p| p.step).max().unwrap_or(first);
        let low = points().filter_map(|p| p.mean).fold(f64::INFINITY, f64::min);
        let high = points().filter_map(|p| p.mean).fold(f64::NEG_INFINITY, f64::max);
        let low = if self.from_zero { low.min(0.0) } else { low };
        // A constant is in the middle.
        let margin = if high > low { 0.06 * (high - low) } else { 0.1 * high.abs().max(1e-9) };
        let bottom = if self.from_zero { low } else { low - margin };
        let vertical = Axis::new(bottom, high + margin, 5.0);
        let horizontal = Axis::new(first as f64, (last as f64).max(first as f64 + 1.0), 6.0);
        let marks = self.merged(&horizontal);
        html! {
            figure.chart {
                figcaption {
                    h3 { (self.title) }
                    (self.legend())
                }
                div.plot tabindex="0" role="img" aria-label=(self.words(&thinned)) data-from=(horizontal.from)
                    data-to=(horizontal.to) data-series=(self.data(&thinned))
                {
                    svg viewBox={ "0 0 " (WIDTH) " " (HEIGHT) } preserveAspectRatio="none" aria-hidden="true" {
                        @for tick in &vertical.ticks {
                            @let at = y(vertical.place(*tick));
                            path.grid d={ "M0 " (at) "H" (WIDTH) } {}
                        }
                        @for mark in &marks {
                            @let at = x(horizontal.place(mark.step as f64));
                            path.event d={ "M" (at) " 0V" (HEIGHT) } {}
                        }
                        @for (curve, points) in self.curves.iter().zip(&thinned) {
                            (curve.draw(points, &horizontal, &vertical))
                        }
                    }
                    @for tick in &vertical.ticks {
                        @let words = (self.format)(*tick);
                        span.y style={ "top:" (percent(1.0 - vertical.place(*tick))) } { (trimmed(&words)) }
                    }
                    @for tick in horizontal.ticks.iter().filter(|t| t.fract() == 0.0) {
                        span.x style={ "left:" (percent(horizontal.place(*tick))) } { (tick) }
                    }
                    @for mark in &marks {
                        span.mark style={ "left:" (percent(horizontal.place(mark.step as f64))) } title=(mark.words) {
                            (mark.sign)
                        }
                    }
                    span.cursor hidden {}
                    span.tip role="status" hidden {}
                }
            }
        }
    }

    /// The marks, of which those that would overlap are one.
    fn merged(&self, horizontal: &Axis) -> Vec<Mark> {
        const APART: f64 = 0.025;
        let mut marks: Vec<Mark> = Vec::new();
        for mark in &self.marks {
            let at = horizontal.place(mark.step as f64);
            match marks.last_mut() {
                Some(last) if (at - horizontal.place(last.step as f64)).abs() < APART => {
                    last.words += "; ";
                    last.words += &mark.words;
                }
                _ => marks.push(mark.clone()),
            }
        }
        marks
    }

    fn legend(&self) -> Markup {
        html! {
            p.legend {
                @for curve in &self.curves {
                    span.{ "c" (curve.color % 6) } { i.(curve.shape.class()) {} (curve.name) }
                }
            }
        }
    }

    /// The chart in a sentence, for those who do not see it.
    fn words(&self, thinned: &[Vec<Point>]) -> String {
        let mut out = format!("{} by step.", self.title);
        for (curve, points) in self.curves.iter().zip(thinned) {
            let known = || points.iter().filter_map(|p| Some((p.step, p.mean?)));
            if let (Some((from, first)), Some((to, last))) = (known().next(), known().next_back()) {
                let (first, last) = ((self.format)(first), (self.format)(last));
                let _ = write!(out, " {}: {first} at step {from}, {last} at step {to}.", curve.name);
            }
        }
        out
    }

    /// The numbers that the script shows beside the cursor.
    fn data(&self, thinned: &[Vec<Point>]) -> String {
        let series = self.curves.iter().zip(thinned).map(|(curve, points)| {
            let known: Vec<(u64, String)> =
                points.iter().filter_map(|p| Some((p.step, (self.format)(p.mean?)))).collect();
            let (steps, values): (Vec<u64>, Vec<String>) = known.into_iter().unzip();
            json!([curve.name, steps, values])
        });
        series.collect::<serde_json::Value>().to_string()
    }
}

impl Shape {
    fn class(self) -> &'static str {
        match self {
            Self::Line => "line",
            Self::Dots => "dots",
            Self::Dashed => "dashed",
        }
    }
}

impl Curve {
    fn draw(&self, points: &[Point], horizontal: &Axis, vertical: &Axis) -> Markup {
        let mut line = String::new();
        let mut dots = String::new();
        let mut gap = true;
        for p in points {
            let Some(mean) = p.mean else {
                gap = true;
                continue;
            };
            let (x, y) = (x(horizontal.place(p.step as f64)), y(vertical.place(mean)));
            let _ = write!(line, "{}{x:.1} {y:.1}", if gap { 'M' } else { 'L' });
            let _ = write!(dots, "M{x:.1} {y:.1}h0");
            gap = false;
        }
        // The range of the steps that share a point: forth along the highest values, and back along the lowest.
        let place = |p: &Point, value: f64| {
            format!("{:.1} {:.1}", x(horizontal.place(p.step as f64)), y(vertical.place(value)))
        };
        let wide: Vec<&Point> = points.iter().filter(|p| p.mean.is_some()).collect();
        let band = wide.iter().any(|p| p.high > p.low) && self.shape == Shape::Line;
        let forth = wide.iter().map(|p| place(p, p.high));
        let back = wide.iter().rev().map(|p| place(p, p.low));
        let band = band.then(|| forth.chain(back).collect::<Vec<_>>().join("L"));
        html! {
            g.{ "c" (self.color % 6) } {
                @if let Some(band) = band { path.band d={ "M" (band) "Z" } {} }
                path.(self.shape.class()) d=(line) {}
                // A line of no length is a dot that the page does not stretch.
                @if self.shape == Shape::Dots || wide.len() == 1 { path.dot d=(dots) {} }
            }
        }
    }
}

/// A number without zeros after its point.
fn trimmed(number: &str) -> &str {
    match number.contains('.') && number.bytes().all(|b| b.is_ascii_digit() || b == b'.') {
        true => number.trim_end_matches('0').trim_end_matches('.'),
        false => number,
    }
}

fn percent(at: f64) -> String {
    format!("{:.2}%", 100.0 * at)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(points: Vec<(u64, Option<f64>)>) -> Curve {
        Curve { name: "loss".into(), color: 0, shape: Shape::Line, points }
    }

    fn chart(curve: Curve) -> Chart {
        let format: Format = |x| format!("{x:.1}");
        Chart { title: "Loss".into(), format, curves: vec![curve], marks: Vec::new(), from_zero: false }
    }

    #[test]
    fn a_long_run_has_few_points_and_keeps_its_range() {
        let points: Vec<_> = (1..=10_000).map(|s| (s, Some(f64::from(s as u32 % 10)))).collect();
        let thinned = thin(&points);
        assert!(thinned.len() <= MAX_POINTS);
        assert_eq!(thinned.last().unwrap().step, 10_000);
        assert!(thinned.iter().all(|p| p.low == 0.0 && p.high == 9.0));
        let page = chart(curve(points)).render().into_string();
        assert!(page.contains("class=\"band\"") && page.len() < 40_000, "{}", page.len());
    }

    #[test]
    fn numbers_that_are_not_finite_leave_a_gap() {
        let page = chart(curve(vec![(1, Some(3.0)), (2, None), (3, Some(f64::NAN)), (4, Some(1.0)), (5, Some(1.0))]));
        let page = page.render().into_string();
        assert!(!page.contains("NaN") && !page.contains("inf"), "{page}");
        let line = page.split("class=\"line\" d=\"").nth(1).unwrap().split('"').next().unwrap();
        assert_eq!(line.matches('M').count(), 2, "{line}");
    }

    #[test]
    fn a_chart_without_values_is_left_out() {
        assert_eq!(chart(curve(vec![(1, None)])).render().into_string(), "");
        assert_eq!(chart(curve(Vec::new())).render().into_string(), "");
    }

    #[test]
    fn ticks_are_round_numbers_inside_the_axis() {
        assert_eq!(Axis::new(1.0, 400.0, 6.0).ticks, [100.0, 200.0, 300.0, 400.0]);
        assert_eq!(Axis::new(2.1, 5.6, 5.0).ticks, [3.0, 4.0, 5.0]);
        assert!(Axis::new(5.0, 5.0, 5.0).ticks.len() <= 2);
    }
}
