//! The connections between areas. They leave an area at its lower edge, where its uplink is, and lead through the
//! channel below its row. Each has a height of its own there, so labels never meet. Connections between rows go around
//! the areas at the left or right.

use fusionllm_graph::units::{bytes, rate};

use super::layout::{Layout, MARGIN, Place, WIDTH, label_width};
use super::scene::{Bundle, Scene, percent};

/// At most this many connections have a label, the busiest ones.
pub(super) const LABELLED: usize = 16;

/// At most this many more are drawn, as thin lines.
pub(super) const THIN: usize = 64;

/// From the areas of a row to the first wire below, and from wire to wire.
const FIRST: f64 = 34.0;
const PITCH: f64 = 27.0;
/// Space below a row without wires.
const PLAIN: f64 = 34.0;
/// Space below a row for connections without a label.
const SAG: f64 = 16.0;

pub(super) struct Wire<'a> {
    pub(super) bundle: &'a Bundle,
    pub(super) points: Vec<[f64; 2]>,
    pub(super) label: String,
    /// The centre of the label.
    pub(super) at: [f64; 2],
}

/// The horizontal part of a wire.
struct Lane {
    wire: usize,
    row: usize,
    /// The wire's ends, and those of everything that it needs, with its label.
    ends: [f64; 2],
    needs: [f64; 2],
    /// The middle of the label.
    label: Option<f64>,
    y: f64,
}

/// How many connections with labels lead from one row to another.
pub(super) fn crossing(scene: &Scene, places: &[Place]) -> usize {
    let across = |b: &&Bundle| places[b.ends[0]].row != places[b.ends[1]].row;
    scene.bundles.iter().take(LABELLED).filter(across).count()
}

/// Leads the busiest connections through the channels, and moves the rows apart for them. `top` is that of the first
/// row. Returns the wires and the lowest point of all.
pub(super) fn wires<'a>(scene: &'a Scene, layout: &mut Layout, top: f64) -> (Vec<Wire<'a>>, f64) {
    let bundles: Vec<&Bundle> = scene.bundles.iter().take(LABELLED).collect();
    let ports = ports(&bundles, &layout.places);
    let trunks = trunks(&bundles, layout, &ports);
    let mut lanes = Vec::new();
    for (wire, bundle) in bundles.iter().enumerate() {
        let [a, b] = bundle.ends.map(|e| layout.places[e].row);
        let [from, to] = ports[wire];
        let parts = match trunks[wire] {
            None => vec![(a, [from, to])],
            Some(x) => vec![(a, [from, x]), (b, [x, to])],
        };
        let longest = parts.iter().map(|(_, [x, y])| (x - y).abs()).fold(0.0, f64::max);
        let mut labelled = false;
        for (row, ends) in parts {
            let label = !labelled && (ends[0] - ends[1]).abs() >= longest;
            labelled |= label;
            lanes.push(lane(wire, row, ends, label.then(|| label_width(&text(bundle)))));
        }
    }
    let mut bottom = top;
    for row in 0..layout.rows {
        layout.move_down(row, bottom);
        let edge = layout.bottom(row);
        let count = stack(&mut lanes, row, edge);
        let unlabelled = if scene.bundles.len() > LABELLED { SAG } else { 0.0 };
        let below = if count == 0 { PLAIN } else { FIRST + PITCH * count as f64 };
        bottom = edge + below + unlabelled;
    }
    let wires = bundles.iter().enumerate().map(|(wire, bundle)| {
        let [from, to] = ports[wire];
        let edge = |end: usize| {
            let [_, y, _, h] = layout.places[bundle.ends[end]].rect;
            y + h
        };
        let own: Vec<&Lane> = lanes.iter().filter(|l| l.wire == wire).collect();
        let mut points = vec![[from, edge(0)]];
        points.extend(own.iter().flat_map(|l| l.ends.map(|x| [x, l.y])));
        points.push([to, edge(1)]);
        let at = own.iter().find_map(|l| Some([l.label?, l.y])).unwrap_or([from, edge(0)]);
        Wire { bundle, points, label: text(bundle), at }
    });
    (wires.collect(), bottom)
}

/// `100 Mbps · 205 MiB a step · 54 % busy`.
fn text(b: &Bundle) -> String {
    let limits = if b.limits { " · limits the step" } else { "" };
    match b.rate.is_finite() {
        true => format!("{} · {} a step · {} busy{limits}", rate(b.rate), bytes(b.bytes), percent(b.busy)),
        false => format!("{} a step", bytes(b.bytes)),
    }
}

/// Where the wires leave their areas: side by side around the middle, in the order of their other ends.
fn ports(bundles: &[&Bundle], places: &[Place]) -> Vec<[f64; 2]> {
    let middle = |area: usize| places[area].rect[0] + places[area].rect[2] / 2.0;
    let mut ports = vec![[0.0; 2]; bundles.len()];
    for (area, place) in places.iter().enumerate() {
        let mut ends: Vec<(f64, usize, usize)> = Vec::new();
        for (wire, bundle) in bundles.iter().enumerate() {
            let end = bundle.ends.iter().position(|e| *e == area);
            ends.extend(end.map(|end| (middle(bundle.ends[1 - end]), wire, end)));
        }
        ends.sort_by(|a, b| a.0.total_cmp(&b.0));
        let count = ends.len() as f64;
        let pitch = (place.rect[2] * 0.5 / count.max(1.0)).min(18.0);
        for (i, (_, wire, end)) in ends.into_iter().enumerate() {
            ports[wire][end] = middle(area) + pitch * (i as f64 - (count - 1.0) / 2.0);
        }
    }
    ports
}

/// For each wire between rows, where it goes up and down: beside the areas, at the side that is nearer.
fn trunks(bundles: &[&Bundle], layout: &Layout, ports: &[[f64; 2]]) -> Vec<Option<f64>> {
    let across = |w: &usize| bundles[*w].ends.map(|e| layout.places[e].row);
    let mut order: Vec<usize> = (0..bundles.len()).filter(|w| across(w)[0] != across(w)[1]).collect();
    order.sort_by(|a, b| ports[*a].iter().sum::<f64>().total_cmp(&ports[*b].iter().sum()));
    let mut trunks = vec![None; bundles.len()];
    let half = order.len().div_ceil(2);
    let pitch = (layout.margin - 18.0) / half.max(1) as f64;
    for (i, wire) in order.iter().enumerate() {
        let (side, place) = if i < half { (0.0, i) } else { (WIDTH, order.len() - 1 - i) };
        let inward = 10.0 + pitch * place as f64;
        trunks[*wire] = Some((side - inward).abs());
    }
    trunks
}

fn lane(wire: usize, row: usize, ends: [f64; 2], label: Option<f64>) -> Lane {
    let mut needs = [ends[0].min(ends[1]), ends[0].max(ends[1])];
    let mut middle = None;
    if let Some(width) = label {
        let half = width / 2.0;
        let x = ((ends[0] + ends[1]) / 2.0).clamp(MARGIN + half, (WIDTH - MARGIN - half).max(MARGIN + half));
        needs = [needs[0].min(x - half), needs[1].max(x + half)];
        middle = Some(x);
    }
    Lane { wire, row, ends, needs, label: middle, y: 0.0 }
}

/// Gives each lane of a row a height, the short ones first; returns how many heights there are.
fn stack(lanes: &mut [Lane], row: usize, edge: f64) -> usize {
    let mut own: Vec<&mut Lane> = lanes.iter_mut().filter(|l| l.row == row).collect();
    own.sort_by(|a, b| (a.needs[1] - a.needs[0]).total_cmp(&(b.needs[1] - b.needs[0])));
    let mut taken: Vec<Vec<[f64; 2]>> = Vec::new();
    for lane in own {
        let free = |of: &Vec<[f64; 2]>| of.iter().all(|t| lane.needs[1] + 12.0 < t[0] || t[1] + 12.0 < lane.needs[0]);
        let level = taken.iter().position(free).unwrap_or(taken.len());
        if level == taken.len() {
            taken.push(Vec::new());
        }
        taken[level].push(lane.needs);
        lane.y = edge + FIRST + PITCH * level as f64;
    }
    taken.len()
}

/// A path through points, with rounded corners.
pub(super) fn rounded(points: &[[f64; 2]]) -> String {
    let mut d = String::new();
    for (i, [x, y]) in points.iter().copied().enumerate() {
        let neighbours = i.checked_sub(1).and_then(|b| points.get(b)).zip(points.get(i + 1));
        let Some((before, after)) = neighbours else {
            d += &format!("{}{x:.1} {y:.1}", if i == 0 { 'M' } else { 'L' });
            continue;
        };
        let toward = |[tx, ty]: [f64; 2]| {
            let length = (tx - x).hypot(ty - y).max(1e-9);
            let r = (length / 2.0).min(9.0) / length;
            [x + (tx - x) * r, y + (ty - y) * r]
        };
        let ([ax, ay], [bx, by]) = (toward(*before), toward(*after));
        d += &format!("L{ax:.1} {ay:.1}Q{x:.1} {y:.1} {bx:.1} {by:.1}");
    }
    d
}
