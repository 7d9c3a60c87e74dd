use fusionllm_graph::units::{bytes, counted, seconds};
use fusionllm_program::PeerId;

use crate::round_step;

use super::svg::{Anchor, Picture, Svg};
use fusionllm_plan::{Activity, Simulation, Span};
use fusionllm_workspace::run_dir::StepTrace;

const WIDTH: f64 = 1280.0;
const LEFT: f64 = 130.0;
const RIGHT: f64 = 84.0;
const TOP: f64 = 104.0;

/// Up to this many messages, each gets an arrow.
const ARROWS: usize = 600;

/// The most activities and messages that are drawn, so that a page with the picture stays small.
const SPANS: usize = 3000;
const MESSAGES: usize = 1500;

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

/// One step of all peers: simulated, or measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Strip {
    /// `predicted` or `measured`.
    pub name: &'static str,
    /// Seconds from step to step.
    pub step_s: f64,
    /// The activities of the peers, by peer and time.
    pub spans: Vec<Span>,
    /// The messages between peers.
    pub messages: Vec<Message>,
}

/// A message between two peers. All times are in seconds.
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    /// The sender.
    pub from: PeerId,
    /// The receiver.
    pub to: PeerId,
    /// Bytes of the tensor.
    pub bytes: u64,
    /// The name of the tensor, if it is known.
    pub tensor: String,
    /// When its first and its last byte left, and when the last one arrived.
    pub times: [f64; 3],
}

impl Strip {
    /// A simulated step, if it was recorded.
    pub fn predicted(simulation: &Simulation) -> Self {
        let between = simulation.transfers.iter().filter(|t| t.from != PeerId::BROKER);
        let message = |t: &fusionllm_plan::Transfer| Message {
            from: t.from,
            to: t.to,
            bytes: t.bytes,
            tensor: t.tensor.to_string(),
            times: [t.start, t.end, t.arrived],
        };
        Self {
            name: "predicted",
            step_s: simulation.step_s,
            spans: simulation.spans.clone(),
            messages: between.map(message).collect(),
        }
    }

    /// A measured step. Messages leave some time before they arrive, and nobody has measured it.
    pub fn measured(trace: &StepTrace) -> Self {
        let peers = || (0..).map(PeerId).zip(&trace.peers);
        let span = |peer, &(activity, micro_batch, start, end): &_| Span { peer, activity, micro_batch, start, end };
        let message = |to, &(from, bytes, start, end): &(u32, u64, f64, f64)| Message {
            from: PeerId(from),
            to,
            bytes,
            tensor: String::new(),
            times: [start, end, end],
        };
        Self {
            name: "measured",
            step_s: trace.step_s,
            spans: peers().flat_map(|(p, peer)| peer.spans.iter().map(move |s| span(p, s))).collect(),
            messages: peers().flat_map(|(p, peer)| peer.arrivals.iter().map(move |a| message(p, a))).collect(),
        }
    }

    fn end(&self) -> f64 {
        let ends = self.spans.iter().map(|s| s.end).chain(self.messages.iter().map(|m| m.times[2]));
        ends.fold(self.step_s, f64::max)
    }

    /// The part of the step in which a peer's device is busy.
    fn busy(&self, peer: PeerId) -> f64 {
        let works = self.spans.iter().filter(|s| s.peer == peer && s.activity.computes());
        works.map(|s| s.end - s.start).sum::<f64>() / self.step_s
    }
}

/// Draws a recorded step, or several beside each other with one scale. Each peer has a row for each of them, and below
/// it the messages that it sends.
pub fn timeline(names: &[&str], strips: &[Strip]) -> Picture {
    let peers = names.len();
    let (row, gap) = match peers * strips.len() {
        0..=24 => (30.0, 14.0),
        25..=64 => (16.0, 6.0),
        n => ((1400.0 / n as f64).max(2.0), 0.5),
    };
    let tall = row >= 16.0;
    let sends = if tall { 4.0 } else { 0.0 };
    let between = if strips.len() > 1 { 2.0 } else { 0.0 };
    let each = row + sends;
    let pitch = strips.len() as f64 * (each + between) + gap;
    let height = TOP + pitch * peers as f64 + 40.0;
    let end = strips.iter().map(Strip::end).fold(f64::MIN_POSITIVE, f64::max);
    let scale = (WIDTH - LEFT - RIGHT) / end;
    let x = |t: f64| LEFT + t * scale;
    let y = |p: PeerId, strip: usize| TOP + pitch * f64::from(p.0) + strip as f64 * (each + between);
    let words = |strip: &Strip| {
        let busy = (0..peers as u32).map(|p| strip.busy(PeerId(p))).sum::<f64>() / peers.max(1) as f64;
        let name = if strips.len() > 1 { format!("{}: ", strip.name) } else { String::new() };
        format!("{name}{} from step to step, peers busy {:.0} % of it", seconds(strip.step_s), 100.0 * busy)
    };
    let subtitle = strips.iter().map(words).collect::<Vec<_>>().join(" · ");
    let subtitle = format!("{}; {subtitle}", counted(peers, "peer"));
    let mut svg = Svg::new(&format!("One training step: {subtitle}"), WIDTH, height);
    svg.text([24.0, 38.0], 20.0, Anchor::Start, "ink strong", "One training step");
    svg.text([24.0, 60.0], 13.0, Anchor::Start, "faint", &subtitle);
    legend(&mut svg, strips);
    axis(&mut svg, end, &x, height - 34.0);

    for (i, strip) in strips.iter().enumerate() {
        for (p, name) in (0..).map(PeerId).zip(names) {
            let top = y(p, i);
            svg.rect([LEFT, top, x(end) - LEFT, row], 0.0, "row", "");
            if tall {
                let middle = top + row / 2.0 + 4.5;
                let label = |svg: &mut Svg, at: f64, size, class, text: &str| {
                    svg.text([LEFT - 12.0, at], size, Anchor::End, class, text);
                };
                match (i, strips.len()) {
                    (0, 1) => label(&mut svg, middle, 13.0, "ink strong", &short(name)),
                    (0, _) => {
                        label(&mut svg, middle - 5.0, 13.0, "ink strong", &short(name));
                        label(&mut svg, middle + 8.0, 11.0, "faint", strip.name);
                    }
                    _ => label(&mut svg, middle, 11.0, "faint", strip.name),
                }
                let share = format!("{:.0} %", 100.0 * strip.busy(p));
                svg.text([x(end) + 12.0, middle], 12.0, Anchor::Start, "faint", &share);
            }
        }
        for span in merged(&strip.spans, scale) {
            draw(&mut svg, &span, [x(span.start), y(span.peer, i), x(span.end) - x(span.start), row], tall);
        }
        let known = |p: PeerId| (p.0 as usize) < peers;
        for m in strip.messages.iter().filter(|m| tall && known(m.from) && known(m.to)).take(MESSAGES) {
            let [left, last, arrived] = m.times;
            let (start, last) = (x(left), x(last).max(x(left) + 0.75));
            let to = names[m.to.0 as usize];
            let title = format!("{}to {to}: {}, {}", m.tensor, bytes(m.bytes), seconds(arrived - left));
            svg.rect([start, y(m.from, i) + row + 1.5, last - start, sends - 1.0], 1.0, "send", &title);
            if strips.len() == 1 && strip.messages.len() <= ARROWS {
                let down = m.to > m.from;
                let from = y(m.from, i) + row + sends;
                let to = y(m.to, i) + if down { 0.0 } else { row + sends };
                let (x1, x2) = (last, x(arrived));
                let bend = (to - from) * 0.5;
                let d =
                    format!("M{x1:.1} {from:.1}C{x1:.1} {:.1} {x2:.1} {:.1} {x2:.1} {to:.1}", from + bend, to - bend);
                svg.path(&d, "message", 0.0, "");
            }
        }
    }
    svg.finish()
}

fn legend(svg: &mut Svg, strips: &[Strip]) {
    let mut x = WIDTH - RIGHT;
    let all = [
        Activity::Verdict,
        Activity::Wait,
        Activity::Offload,
        Activity::Update,
        Activity::WeightGrad,
        Activity::Backward,
        Activity::Forward,
    ];
    let there = all.into_iter().filter(|d| strips.iter().flat_map(|s| &s.spans).any(|s| s.activity == *d));
    let entries = [("send", "send")].into_iter().chain(there.map(|d| (class(d), word(d))));
    for (class, word) in entries {
        x -= 7.6 * word.chars().count() as f64 + 30.0;
        svg.rect([x, 27.0, 12.0, 12.0], 3.0, class, "");
        svg.text([x + 18.0, 37.5], 13.0, Anchor::Start, "ink", word);
    }
}

/// Ticks at round times.
fn axis(svg: &mut Svg, end: f64, x: &impl Fn(f64) -> f64, bottom: f64) {
    let step = round_step(end / 8.0);
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

/// Merges spans that are too short to be seen with their neighbours of the same peer, so that at most [`SPANS`] are
/// drawn. `scale` is the width of a second.
fn merged(spans: &[Span], scale: f64) -> Vec<Span> {
    let mut hair = 0.4 / scale;
    loop {
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
        // A hair of the whole width leaves one span for each peer.
        if out.len() <= SPANS || hair * scale > WIDTH {
            return out;
        }
        hair *= 1.5;
    }
}

/// A name, shortened to fit beside a row.
fn short(name: &str) -> String {
    const MOST: usize = 14;
    match name.chars().count() {
        0..=MOST => name.to_owned(),
        _ => name.chars().take(MOST - 1).chain(['…']).collect(),
    }
}
