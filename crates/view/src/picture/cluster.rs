use std::collections::BTreeMap;

use fusionllm_graph::units::{bytes, counted, rate, seconds};
use fusionllm_program::PeerId;

use super::measure::shortened;
use super::svg::{Anchor, Picture, Svg};
use fusionllm_plan::Plan;
use fusionllm_plan::Simulation;
use fusionllm_plan::{Cluster, Link, Place};

const WIDTH: f64 = 1280.0;
const MARGIN: f64 = 28.0;
const TOP: f64 = 92.0;

/// The size in which devices are drawn.
struct Card {
    width: f64,
    height: f64,
    gap: f64,
    /// Most devices in a column of a group.
    column: usize,
    detailed: bool,
}

/// Machines that are drawn together: a site, or a device on its own.
struct Group {
    title: String,
    subtitle: String,
    devices: Vec<PeerId>,
    /// Left, top, width, height.
    place: [f64; 4],
}

/// Draws a cluster and a plan as SVG: sites and devices in pipeline order, what each device runs and holds, and what
/// each link carries.
pub fn cluster(cluster: &Cluster, plan: &Plan, simulation: &Simulation) -> Picture {
    let card = match cluster.devices().len() {
        0..=60 => Card { width: 188.0, height: 78.0, gap: 26.0, column: 6, detailed: true },
        _ => Card { width: 30.0, height: 30.0, gap: 8.0, column: 12, detailed: false },
    };
    let first_stage = first_stages(cluster, plan);
    let mut groups = groups(cluster, &first_stage);
    let bottom = lay_out(&mut groups, &card);
    let spots: BTreeMap<PeerId, [f64; 2]> = groups.iter().flat_map(|g| spots(g, &card)).collect();

    let subtitle = format!(
        "{} a step · {} · {} on {} of {}, {}",
        seconds(simulation.step_s),
        plan.scheduler,
        counted(plan.stages.len(), "stage"),
        plan.used().len(),
        counted(cluster.devices().len(), "device"),
        counted(plan.micro_batches, "micro-batch")
    );
    let mut svg = Svg::new(&format!("The cluster and the cut: {subtitle}"), WIDTH, bottom + 56.0);
    svg.text([24.0, 38.0], 20.0, Anchor::Start, "ink strong", "The cluster and the cut");
    svg.text([24.0, 60.0], 13.0, Anchor::Start, "faint", &subtitle);
    for g in &groups {
        svg.rect(g.place, 12.0, "site", "");
        let [x, y, ..] = g.place;
        svg.text([x + 14.0, y + 22.0], 13.0, Anchor::Start, "ink strong", &g.title);
        if card.detailed {
            svg.text([x + 14.0, y + 38.0], 11.0, Anchor::Start, "faint", &g.subtitle);
        }
    }
    let labels = links(&mut svg, cluster, simulation, &spots, &card);
    for (&p, &spot) in &spots {
        device(&mut svg, p, spot, &card, cluster, plan, simulation);
    }
    // Labels are drawn above all else.
    for ([x, y], text, color) in labels {
        let width = 6.2 * text.chars().count() as f64 + 12.0;
        svg.rect([x - width / 2.0, y - 9.0, width, 18.0], 9.0, &format!("label-{color}"), "");
        svg.text([x, y + 4.0], 11.0, Anchor::Middle, "ink", &text);
    }
    key(&mut svg, bottom + 34.0);
    svg.finish()
}

fn first_stages(cluster: &Cluster, plan: &Plan) -> Vec<usize> {
    let mut first = vec![usize::MAX; cluster.devices().len()];
    for (s, stage) in plan.stages.iter().enumerate().rev() {
        for p in stage.replicas() {
            first[p.0 as usize] = s;
        }
    }
    first
}

fn groups(cluster: &Cluster, first_stage: &[usize]) -> Vec<Group> {
    let mut by_place: BTreeMap<(Option<u32>, u32), Vec<PeerId>> = BTreeMap::new();
    for (i, d) in (0..).zip(cluster.devices()) {
        let key = d.site.map_or((None, i), |s| (Some(s), 0));
        by_place.entry(key).or_default().push(PeerId(i));
    }
    let mut groups: Vec<Group> = by_place
        .into_iter()
        .map(|((site, _), mut devices)| {
            devices.sort_by_key(|p| (first_stage[p.0 as usize], *p));
            let site = site.and_then(|s| cluster.sites().get(s as usize));
            let describe = |what: &str, l: Link| format!("{what} {}, {}", rate(l.bandwidth), seconds(l.latency));
            let inside = site.and_then(|s| s.inside).filter(|_| devices.len() > 1).map(|l| describe("inside", l));
            let uplink = site.and_then(|s| s.uplink).map(|l| describe("uplink", l));
            let downlink = site.and_then(|s| s.downlink).map(|l| describe("downlink", l));
            let subtitle = inside.into_iter().chain(uplink).chain(downlink).collect::<Vec<_>>().join(" · ");
            Group { title: site.map_or(String::new(), |s| s.name.clone()), subtitle, devices, place: [0.0; 4] }
        })
        .collect();
    groups.sort_by_key(|g| g.devices.first().map_or((usize::MAX, PeerId(0)), |p| (first_stage[p.0 as usize], *p)));
    groups
}

/// Places groups from left to right, then in further rows; returns the bottom.
fn lay_out(groups: &mut [Group], card: &Card) -> f64 {
    let between = if card.detailed { 84.0 } else { 24.0 };
    let (mut x, mut y, mut lowest) = (MARGIN, TOP, TOP);
    for g in groups {
        let columns = g.devices.len().div_ceil(card.column);
        let rows = g.devices.len().min(card.column);
        let title = 7.5 * g.title.chars().count() as f64 + 28.0;
        let subtitle = if card.detailed { 6.2 * g.subtitle.chars().count() as f64 + 28.0 } else { 0.0 };
        let width = (columns as f64 * (card.width + card.gap) - card.gap + 28.0).max(title).max(subtitle);
        let height = head(card) + rows as f64 * (card.height + card.gap) - card.gap + 16.0;
        if x > MARGIN && x + width > WIDTH - MARGIN {
            (x, y) = (MARGIN, lowest + if card.detailed { 56.0 } else { 24.0 });
        }
        g.place = [x, y, width, height];
        x += width + between;
        lowest = lowest.max(y + height);
    }
    lowest
}

fn head(card: &Card) -> f64 {
    if card.detailed { 50.0 } else { 32.0 }
}

/// The centre of every device of a group.
fn spots(group: &Group, card: &Card) -> Vec<(PeerId, [f64; 2])> {
    let [x, y, width, _] = group.place;
    let columns = group.devices.len().div_ceil(card.column);
    let used = columns as f64 * (card.width + card.gap) - card.gap;
    let left = x + (width - used) / 2.0;
    let spot = |(i, p): (usize, &PeerId)| {
        let (column, row) = (i / card.column, i % card.column);
        let x = left + column as f64 * (card.width + card.gap) + card.width / 2.0;
        (*p, [x, y + head(card) + row as f64 * (card.height + card.gap) + card.height / 2.0])
    };
    group.devices.iter().enumerate().map(spot).collect()
}

/// Green for an idle link, red for one that is always busy.
fn heat(share: f64) -> &'static str {
    match share {
        s if s < 0.25 => "calm",
        s if s < 0.5 => "fair",
        s if s < 0.75 => "warm",
        _ => "hot",
    }
}

type Label = ([f64; 2], String, &'static str);

/// A link's line as a cubic Bézier curve.
struct Curve {
    start: [f64; 2],
    end: [f64; 2],
    /// The two control points.
    bends: [[f64; 2]; 2],
    /// Whether the cards are neighbours in a column.
    near: bool,
}

impl Curve {
    fn between([x1, y1]: [f64; 2], [x2, y2]: [f64; 2], card: &Card) -> Self {
        // A line leaves a card at the side that faces the other card.
        let (half_w, half_h) = (card.width / 2.0, card.height / 2.0);
        let level = (x1 - x2).abs() < card.width;
        let near = level && (y1 - y2).abs() < 1.5 * (card.height + card.gap);
        let (start, end, bends) = if near {
            let s = (y2 - y1).signum();
            let (start, end) = ([x1, y1 + s * half_h], [x2, y2 - s * half_h]);
            (start, end, [start, end])
        } else if level {
            // Around the cards between them.
            let out = half_w + 18.0 + 0.06 * (y1 - y2).abs();
            let (start, end) = ([x1 + half_w, y1], [x2 + half_w, y2]);
            (start, end, [[x1 + out, y1], [x2 + out, y2]])
        } else {
            let s = (x2 - x1).signum();
            let (start, end) = ([x1 + s * half_w, y1], [x2 - s * half_w, y2]);
            let reach = s * ((end[0] - start[0]).abs() / 2.0).max(24.0);
            // Below the cards between them.
            let sag = if (end[0] - start[0]).abs() > 1.5 * card.width { 0.9 * card.height } else { 0.0 };
            (start, end, [[start[0] + reach, start[1] + sag], [end[0] - reach, end[1] + sag]])
        };
        Self { start, end, bends, near }
    }

    /// The point at `t`, from 0 at the start to 1 at the end.
    fn at(&self, t: f64) -> [f64; 2] {
        let Self { start, end, bends, .. } = self;
        let u = 1.0 - t;
        [0, 1].map(|i: usize| {
            u * u * u * start[i] + 3.0 * u * t * (u * bends[0][i] + t * bends[1][i]) + t * t * t * end[i]
        })
    }
}

/// Draws what two machines send each other as one line; returns the labels of the busiest lines.
fn links(
    svg: &mut Svg,
    cluster: &Cluster,
    simulation: &Simulation,
    spots: &BTreeMap<PeerId, [f64; 2]>,
    card: &Card,
) -> Vec<Label> {
    // Bytes of both directions, and the busy time of the busier one.
    let mut pairs: BTreeMap<(PeerId, PeerId), (u64, f64)> = BTreeMap::new();
    for l in &simulation.links {
        let [a, b] = [l.from, l.to].map(|p| match (p, cluster.broker()) {
            (PeerId::BROKER, Place::Device(d)) => PeerId(d),
            _ => p,
        });
        if a != b && spots.contains_key(&a) && spots.contains_key(&b) {
            let pair = pairs.entry((a.min(b), a.max(b))).or_default();
            *pair = (pair.0 + l.bytes, pair.1.max(l.busy_s));
        }
    }
    let most = pairs.values().map(|p| p.0).max().unwrap_or(1).max(1) as f64;
    let mut labels: Vec<(f64, Label)> = Vec::new();
    for (&(a, b), &(carried, busy)) in &pairs {
        let share = busy / simulation.step_s;
        let color = heat(share);
        let width = 1.2 + 4.0 * (carried as f64 / most).sqrt();
        let curve = Curve::between(spots[&a], spots[&b], card);
        let Curve { start, end, bends, near } = curve;
        let d = format!(
            "M{:.1} {:.1}C{:.1} {:.1} {:.1} {:.1} {:.1} {:.1}",
            start[0], start[1], bends[0][0], bends[0][1], bends[1][0], bends[1][1], end[0], end[1]
        );
        let link = cluster.link(a, b);
        let speed = match link.map(|l| l.bandwidth) {
            Some(bandwidth) if bandwidth.is_finite() => rate(bandwidth),
            _ => "one host".into(),
        };
        let title = format!(
            "{} – {}: {speed}, {}; {} a step, busy {:.0} % of it",
            cluster.name(a),
            cluster.name(b),
            link.map_or(String::new(), |l| seconds(l.latency)),
            bytes(carried),
            100.0 * share
        );
        svg.path(&d, &format!("link-{color}"), width, &title);
        // The label is on the line, where no card covers it.
        let clear = |[x, y]: [f64; 2]| {
            spots
                .values()
                .all(|[cx, cy]| (x - cx).abs() > card.width / 2.0 + 44.0 || (y - cy).abs() > card.height / 2.0 + 8.0)
        };
        let places = [0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8].map(|t| curve.at(t));
        if let Some(place) = places.into_iter().find(|p| near || clear(*p)) {
            labels.push((share, (place, format!("{speed} · {:.0} %", 100.0 * share), color)));
        }
    }
    labels.sort_by(|a, b| b.0.total_cmp(&a.0));
    let shown = if card.detailed { 24 } else { 0 };
    labels.into_iter().take(shown).map(|l| l.1).collect()
}

fn device(
    svg: &mut Svg,
    p: PeerId,
    [cx, cy]: [f64; 2],
    card: &Card,
    cluster: &Cluster,
    plan: &Plan,
    simulation: &Simulation,
) {
    let (device, load) = (&cluster.devices()[p.0 as usize], &simulation.peers[p.0 as usize]);
    let stages: Vec<usize> = (0..plan.stages.len()).filter(|s| plan.stages[*s].replicas().contains(&p)).collect();
    let operators: usize = stages.iter().map(|s| plan.stages[*s].nodes.len()).sum();
    let busy = (load.compute_s / simulation.step_s).clamp(0.0, 1.0);
    let full = (load.peak_bytes as f64 / device.memory.max(1) as f64).clamp(0.0, 1.0);
    let [x, y] = [cx - card.width / 2.0, cy - card.height / 2.0];
    let title = format!(
        "{}: computes {} of {} a step, holds {} of {}",
        device.name,
        seconds(load.compute_s),
        seconds(simulation.step_s),
        bytes(load.peak_bytes),
        bytes(device.memory)
    );
    if !card.detailed {
        let shade = if stages.is_empty() { "unused" } else { "device" };
        svg.rect([x, y, card.width, card.height], 6.0, shade, &title);
        if let Some(s) = stages.first() {
            svg.text([cx, cy + 4.0], 11.0, Anchor::Middle, "ink", &s.to_string());
        }
        return;
    }
    let class = if stages.is_empty() { "unused" } else { "device" };
    svg.rect([x, y, card.width, card.height], 9.0, class, &title);
    svg.text([x + 12.0, y + 21.0], 13.5, Anchor::Start, "ink strong", &shortened(&device.name, 13.5, 90.0));
    let what = match &stages[..] {
        [] => "left out".to_owned(),
        [s] => format!("stage {s}"),
        [first, .., last] if last - first + 1 == stages.len() => format!("stages {first}–{last}"),
        several => format!("stages {}", several.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")),
    };
    svg.text([x + card.width - 12.0, y + 21.0], 11.5, Anchor::End, "stage", &what);
    let line = match operators {
        0 => String::new(),
        n => counted(n, "operator"),
    };
    svg.text([x + 12.0, y + 37.0], 11.0, Anchor::Start, "faint", &line);
    for (i, (name, share, value, color)) in [
        ("busy", busy, format!("{:.0} %", 100.0 * busy), "busy"),
        ("memory", full, bytes(load.peak_bytes), if full > 0.95 { "hot" } else { "memory" }),
    ]
    .into_iter()
    .enumerate()
    {
        let top = y + 50.0 + 14.0 * i as f64;
        svg.text([x + 12.0, top + 5.0], 10.0, Anchor::Start, "faint", name);
        let (left, width) = (x + 56.0, card.width - 56.0 - 62.0);
        svg.rect([left, top - 1.0, width, 5.0], 2.5, "track", "");
        svg.rect([left, top - 1.0, (width * share).max(if share > 0.0 { 2.5 } else { 0.0 }), 5.0], 2.5, color, "");
        svg.text([x + card.width - 12.0, top + 5.0], 10.0, Anchor::End, "ink", &value);
    }
}

fn key(svg: &mut Svg, y: f64) {
    let mut x = 24.0;
    svg.text([x, y], 12.0, Anchor::Start, "faint", "links, by the share of a step in which they are busy:");
    x += 334.0;
    for (share, text) in [(0.0, "below 25 %"), (0.3, "25 to 50 %"), (0.6, "50 to 75 %"), (0.9, "above 75 %")] {
        svg.rect([x, y - 6.0, 22.0, 4.0], 2.0, heat(share), "");
        svg.text([x + 30.0, y], 12.0, Anchor::Start, "ink", text);
        x += 116.0;
    }
    svg.text([x + 6.0, y], 12.0, Anchor::Start, "faint", "thicker: carries more");
}
