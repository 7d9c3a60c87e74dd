use fusionllm_graph::units::{bytes, counted, seconds};
use fusionllm_program::PeerId;

use super::svg::{Anchor, Picture, Svg};
use fusionllm_plan::Cluster;
use fusionllm_plan::{Activity, Simulation, Span};

const WIDTH: f64 = 1280.0;
const LEFT: f64 = 130.0;
const RIGHT: f64 = 84.0;
const TOP: f64 = 104.0;

/// Up to this many messages, each gets an arrow.
const ARROWS: usize = 600;

fn class(activity: Activity) -> &'static str {
    match activity {
        Activity::Forward => "forward",
        Activity::Backward => "backward",
        Activity::WeightGrad => "weight-grad",
        Activity::Update => "update",
        Activity::Offload => "offload",
        Activity::Wait => "wait",
        Activity::Verdict => "verdict",
    }
}

fn word(activity: Activity) -> &'static str {
    match activity {
        Activity::Forward => "forward",
        Activity::Backward => "backward",
        Activity::WeightGrad => "weight gradients",
        Activity::Update => "update",
        Activity::Offload => "offload and load",
        Activity::Wait => "wait",
        Activity::Verdict => "verdict",
    }
}

/// Draws one recorded step as SVG. Each peer has a row with its activity, and below it the messages that it sends.
pub fn timeline(cluster: &Cluster, simulation: &Simulation) -> Picture {
    let peers = simulation.peers.len();
    let (row, gap) = match peers {
        0..=24 => (30.0, 14.0),
        25..=64 => (16.0, 6.0),
        n => ((1400.0 / n as f64).max(2.0), 0.5),
    };
    let tall = row >= 16.0;
    let sends = if tall { 4.0 } else { 0.0 };
    let pitch = row + sends + gap;
    let height = TOP + pitch * peers as f64 + 40.0;
    let end = simulation.spans.iter().map(|s| s.end).fold(simulation.step_s, f64::max);
    let scale = (WIDTH - LEFT - RIGHT) / end;
    let x = |t: f64| LEFT + t * scale;
    let y = |p: PeerId| TOP + pitch * f64::from(p.0);
    let busy: f64 =
        simulation.peers.iter().map(|p| p.compute_s).sum::<f64>() / (simulation.step_s * peers.max(1) as f64);
    let subtitle = format!(
        "{} from step to step · {}, busy {:.0} % of the time",
        seconds(simulation.step_s),
        counted(peers, "peer"),
        100.0 * busy
    );
    let mut svg = Svg::new(&format!("One training step: {subtitle}"), WIDTH, height);
    svg.text([24.0, 38.0], 20.0, Anchor::Start, "ink strong", "One training step");
    svg.text([24.0, 60.0], 13.0, Anchor::Start, "faint", &subtitle);
    legend(&mut svg, simulation);
    axis(&mut svg, end, &x, height - 34.0);

    for p in (0..peers as u32).map(PeerId) {
        let top = y(p);
        svg.rect([LEFT, top, x(end) - LEFT, row], 0.0, "row", "");
        if tall {
            let middle = top + row / 2.0 + 4.5;
            svg.text([LEFT - 12.0, middle], 13.0, Anchor::End, "ink strong", &short(cluster.name(p)));
            let share = format!("{:.0} %", 100.0 * simulation.peers[p.0 as usize].compute_s / simulation.step_s);
            svg.text([x(end) + 12.0, middle], 12.0, Anchor::Start, "faint", &share);
        }
    }
    for span in merged(&simulation.spans, 0.4 / scale) {
        draw(&mut svg, &span, [x(span.start), y(span.peer), x(span.end) - x(span.start), row], tall);
    }
    let between: Vec<_> = simulation.transfers.iter().filter(|t| t.from != PeerId::BROKER).collect();
    for t in between.iter().filter(|t| tall && t.from.0 < peers as u32) {
        let (start, last) = (x(t.start), x(t.end).max(x(t.start) + 0.75));
        let title =
            format!("{} to {}: {}, {}", t.tensor, cluster.name(t.to), bytes(t.bytes), seconds(t.arrived - t.sent));
        svg.rect([start, y(t.from) + row + 1.5, last - start, sends - 1.0], 1.0, "send", &title);
        if between.len() <= ARROWS && t.to.0 < peers as u32 {
            let down = t.to > t.from;
            let from = y(t.from) + row + sends;
            let to = y(t.to) + if down { 0.0 } else { row + sends };
            let (x1, x2) = (x(t.end), x(t.arrived));
            let bend = (to - from) * 0.5;
            let d = format!("M{x1:.1} {from:.1}C{x1:.1} {:.1} {x2:.1} {:.1} {x2:.1} {to:.1}", from + bend, to - bend);
            svg.path(&d, "message", 0.0, "");
        }
    }
    svg.finish()
}

fn legend(svg: &mut Svg, simulation: &Simulation) {
    let mut x = WIDTH - RIGHT;
    let all = [
        Activity::Verdict,
        Activity::Wait,
        Activity::Update,
        Activity::WeightGrad,
        Activity::Backward,
        Activity::Forward,
    ];
    let there = all.into_iter().filter(|d| simulation.spans.iter().any(|s| s.activity == *d));
    let entries = [("send", "send")].into_iter().chain(there.map(|d| (class(d), word(d))));
    for (class, word) in entries {
        x -= 7.6 * word.chars().count() as f64 + 30.0;
        svg.rect([x, 27.0, 12.0, 12.0], 3.0, class, "");
        svg.text([x + 18.0, 37.5], 13.0, Anchor::Start, "ink", word);
    }
}

/// Ticks at round times.
fn axis(svg: &mut Svg, end: f64, x: &impl Fn(f64) -> f64, bottom: f64) {
    let rough = end / 8.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|f| f * power).find(|s| *s >= rough).unwrap_or(rough);
    for i in 0..=(end / step) as usize {
        let t = i as f64 * step;
        svg.line([x(t), TOP - 10.0, x(t), bottom], "rule");
        let label = if i == 0 { "0".into() } else { seconds(t) };
        svg.text([x(t), TOP - 16.0], 11.0, Anchor::Middle, "faint", &label);
    }
}

fn draw(svg: &mut Svg, span: &Span, [x, y, w, h]: [f64; 4], tall: bool) {
    let title = match span.micro_batch {
        _ if !tall => String::new(),
        Some(m) => format!("{} of micro-batch {m}, {}", word(span.activity), seconds(span.end - span.start)),
        None => format!("{}, {}", word(span.activity), seconds(span.end - span.start)),
    };
    let works = span.activity.computes();
    // A small gap between neighbours.
    let inner = if w > 3.0 && works { w - 0.8 } else { w };
    svg.rect([x, y, inner, h], if tall && w > 6.0 && works { 2.5 } else { 0.0 }, class(span.activity), &title);
    if let (true, true, Some(m)) = (works && tall, w > 15.0, span.micro_batch) {
        let class = format!("on-{} strong", class(span.activity));
        svg.text([x + w / 2.0, y + h / 2.0 + 4.0], 11.0, Anchor::Middle, &class, &m.to_string());
    }
}

/// Merges spans shorter than `hair` with their neighbours of the same peer.
fn merged(spans: &[Span], hair: f64) -> Vec<Span> {
    let mut out: Vec<Span> = Vec::new();
    for s in spans {
        match out.last_mut() {
            Some(last) if last.peer == s.peer && (last.end - last.start < hair || s.end - s.start < hair) => {
                if s.end - s.start > last.end - last.start {
                    (last.activity, last.micro_batch) = (s.activity, s.micro_batch);
                }
                last.end = s.end;
            }
            _ => out.push(*s),
        }
    }
    out
}

/// A name, shortened to fit beside a row.
fn short(name: &str) -> String {
    const MOST: usize = 14;
    match name.chars().count() {
        0..=MOST => name.to_owned(),
        _ => name.chars().take(MOST - 1).chain(['…']).collect(),
    }
}
