//! Areas, blocks, wires and the key.

use fusionllm_graph::units::{bytes, counted, rate, seconds};

use super::super::measure::{shortened, text_width};
use super::super::svg::{Anchor, Svg};
use super::inside;
use super::layout::{Detail, Layout, MARGIN, Place, WIDTH, flow, label_width};
use super::scene::{Area, Block, Bundle, Scene, Uplink, percent, stem};
use super::wires::{LABELLED, THIN, Wire, rounded};

/// The class for a line that is busy for a share of the step.
fn heat(share: f64) -> &'static str {
    match share {
        s if s < 0.25 => "calm",
        s if s < 0.5 => "fair",
        s if s < 0.75 => "warm",
        _ => "hot",
    }
}

/// Draws all sites with their devices, and what these send each other.
pub(super) fn areas(svg: &mut Svg, scene: &Scene, layout: &Layout) {
    for (area, place) in scene.areas.iter().zip(&layout.places) {
        let [x, y, w, _] = place.rect;
        let cell = layout.detail == Detail::Cell;
        svg.rect(place.rect, if cell { 8.0 } else { 14.0 }, "site", &area.title);
        let (size, pad, line) = if cell { (11.0, 8.0, 16.0) } else { (13.5, 16.0, 23.0) };
        let title = shortened(&area.title, size, "strong", w - 2.0 * pad);
        svg.text([x + pad, y + line], size, Anchor::Start, "ink strong", &title);
        if !cell {
            let fits = |s: &&String| text_width(s, 11.0, "") <= w - 2.0 * pad;
            let subtitle = area.subtitles.iter().find(fits).map_or("", |s| s);
            svg.text([x + pad, y + 40.0], 11.0, Anchor::Start, "faint", subtitle);
        }
        connections(svg, area, place, layout.detail);
        for (block, spot) in area.blocks.iter().zip(&place.blocks) {
            match layout.detail {
                Detail::Card => card(svg, block, *spot),
                Detail::Compact => compact(svg, block, *spot),
                Detail::Cell => cell_block(svg, block, *spot),
            }
        }
    }
}

/// Draws what the blocks of an area send each other.
fn connections(svg: &mut Svg, area: &Area, place: &Place, detail: Detail) {
    let most = area.inside.iter().map(|b| b.bytes).max().unwrap_or(1).max(1) as f64;
    let mut rank = 0;
    for b in &area.inside {
        let path = inside::path(place, b.ends, &mut rank, &detail.lengths());
        let Some(points) = path.filter(|p| detail != Detail::Cell || p.len() == 2) else { continue };
        let width = 1.6 + 3.4 * (b.bytes as f64 / most).sqrt();
        let width = if points.len() > 2 { width.min(2.2) } else { width };
        let [one, other] = b.ends.map(|e| &area.blocks[e].title);
        link(svg, &points, b, width, &format!("{one} – {other}"));
    }
}

fn link(svg: &mut Svg, points: &[[f64; 2]], b: &Bundle, width: f64, ends: &str) {
    let class = if b.limits { "hot" } else { heat(b.busy) };
    let limits = if b.limits { "; limits the step" } else { "" };
    let tooltip = format!("{ends}: {}{limits}", b.tooltip);
    svg.path(&rounded(points), &format!("link-{class}"), width, &tooltip);
}

/// Draws the connections that have no label. They are drawn below all else.
pub(super) fn faint_wires(svg: &mut Svg, scene: &Scene, layout: &Layout) {
    for b in scene.bundles.iter().skip(LABELLED).take(THIN) {
        let ends = b.ends.map(|e| {
            let [x, y, w, h] = layout.places[e].rect;
            [x + w / 2.0, y + h]
        });
        let [[x1, y1], [x2, y2]] = ends;
        let class = if b.limits { "hot" } else { heat(b.busy) };
        let d = format!("M{x1:.1} {y1:.1}C{x1:.1} {:.1} {x2:.1} {:.1} {x2:.1} {y2:.1}", y1 + 22.0, y2 + 22.0);
        let tooltip = format!("{}: {}", names(scene, b), b.tooltip);
        svg.path(&d, &format!("link-{class} thin"), thickness(scene, b) / 2.0, &tooltip);
    }
}

/// More bytes make a thicker line.
fn thickness(scene: &Scene, b: &Bundle) -> f64 {
    let most = scene.bundles.iter().map(|b| b.bytes).max().unwrap_or(1).max(1) as f64;
    1.8 + 4.2 * (b.bytes as f64 / most).sqrt()
}

/// The areas at the ends of a connection.
fn names(scene: &Scene, b: &Bundle) -> String {
    let name = |area: usize| match &scene.areas[area] {
        a if a.title.is_empty() => a.blocks.first().map_or("", |b| &b.title),
        a => &a.title,
    };
    format!("{} – {}", name(b.ends[0]), name(b.ends[1]))
}

/// Draws the busiest connections between areas, with their labels.
pub(super) fn wires(svg: &mut Svg, scene: &Scene, wires: &[Wire<'_>]) {
    // The busiest ones are drawn last, so that the others cross below them.
    for wire in wires.iter().rev() {
        link(svg, &wire.points, wire.bundle, thickness(scene, wire.bundle), &names(scene, wire.bundle));
    }
    for wire in wires {
        let b = wire.bundle;
        let class = if b.limits { "hot" } else { heat(b.busy) };
        pill(
            svg,
            wire.at,
            &wire.label,
            &format!("label-{class}"),
            b.limits,
            &format!("{}: {}", names(scene, b), b.tooltip),
        );
    }
}

/// Draws the uplinks on the lower edges of their sites.
pub(super) fn uplinks(svg: &mut Svg, scene: &Scene, layout: &Layout) {
    for (area, place) in scene.areas.iter().zip(&layout.places) {
        let Some(uplink) = &area.uplink else { continue };
        let [x, y, w, h] = place.rect;
        let fits = |text: &String| label_width(text) <= w - 12.0;
        let Some(text) = uplink_texts(uplink).into_iter().find(fits) else { continue };
        let busy = uplink.out.max(uplink.in_);
        let class = match (uplink.limits, busy > 0.0) {
            (true, _) => "label-hot".to_owned(),
            (_, true) => format!("label-{}", heat(busy)),
            _ => "label".into(),
        };
        pill(svg, [x + w / 2.0, y + h], &text, &class, uplink.limits, &uplink.tooltip);
    }
}

/// The label of an uplink, from long to short.
fn uplink_texts(u: &Uplink) -> Vec<String> {
    let busy = u.out.max(u.in_);
    let (rate, latency) = (rate(u.link.bandwidth), seconds(u.link.latency));
    let limits = if u.limits { " · limits the step" } else { "" };
    if busy <= 0.0 {
        return vec![format!("uplink {rate}, {latency}"), format!("uplink {rate}")];
    }
    vec![
        format!("uplink {rate}, {latency} · busy {} out, {} in{limits}", percent(u.out), percent(u.in_)),
        format!("uplink {rate} · {} busy{limits}", percent(busy)),
        format!("uplink {} busy{limits}", percent(busy)),
        format!("{}{}", if u.limits { "limit: " } else { "" }, percent(busy)),
    ]
}

/// A text in a frame with rounded ends.
fn pill(svg: &mut Svg, [x, y]: [f64; 2], text: &str, class: &str, limits: bool, tooltip: &str) {
    let width = label_width(text);
    let rect = [x - width / 2.0, y - 10.0, width, 20.0];
    svg.rect(rect, 10.0, class, tooltip);
    if limits {
        svg.rect(rect, 10.0, "limit", "");
    }
    let ink = if limits { "alarm strong" } else { "ink" };
    svg.text([x, y + 4.0], 11.0, Anchor::Middle, ink, text);
}

/// The frame of a block. Several devices look like a stack.
fn frame(svg: &mut Svg, b: &Block, [x, y, w, h]: [f64; 4], radius: f64) {
    for i in (1..b.count.min(3)).rev() {
        let by = 4.0 * i as f64;
        svg.rect([x + by, y + by, w, h], radius, "device", "");
    }
    svg.rect([x, y, w, h], radius, "device", &b.tooltip);
    if b.limits {
        svg.rect([x, y, w, h], radius, "limit", "");
    }
}

fn card(svg: &mut Svg, b: &Block, spot: [f64; 4]) {
    let [x, y, w, _] = spot;
    frame(svg, b, spot, 10.0);
    let (left, right) = (x + 12.0, x + w - 12.0);
    let stages = shortened(&b.stages, 11.5, "strong", 0.6 * (w - 24.0));
    let room = w - 32.0 - text_width(&stages, 11.5, "strong");
    svg.text([left, y + 21.0], 13.0, Anchor::Start, "ink strong", &shortened_name(&b.title, 13.0, room));
    svg.text([right, y + 21.0], 11.5, Anchor::End, "stage strong", &stages);
    let room = w - 24.0;
    match b.limits {
        true => {
            let text = shortened(&format!("limits the step · {}", b.detail), 11.0, "strong", room);
            svg.text([left, y + 37.0], 11.0, Anchor::Start, "alarm strong", &text);
        }
        false => svg.text([left, y + 37.0], 11.0, Anchor::Start, "faint", &shortened(&b.detail, 11.0, "", room)),
    }
    let of = |share: f64, whole: String| format!("{} of {whole}", percent(share));
    let busy = b.busy.map(|[least, most]| ("computes", most, range(least, most), "busy"));
    let memory = b
        .memory
        .map(|(share, whole)| ("memory", share, of(share, bytes(whole)), if share > 1.0 { "hot" } else { "memory" }));
    let network = b.network.map(|(share, whole)| ("network", share, of(share, rate(whole)), heat(share)));
    let bars: Vec<_> = [busy, memory, network].into_iter().flatten().collect();
    let widest = bars.iter().map(|b| text_width(&b.2, 11.0, "")).fold(0.0, f64::max);
    for (i, (name, share, value, class)) in bars.into_iter().enumerate() {
        let line = y + 55.0 + 16.0 * i as f64;
        svg.text([left, line], 11.0, Anchor::Start, "faint", name);
        svg.text([right, line], 11.0, Anchor::End, "ink", &value);
        bar(svg, [left + 61.0, line - 6.5, (w - 24.0 - 61.0 - widest - 8.0).max(8.0), 5.0], share, class);
    }
}

/// A device's name, shortened before its number.
fn shortened_name(name: &str, size: f64, width: f64) -> String {
    let (stem, number) = name.split_at(stem(name).len());
    let room = width - text_width(number, size, "strong");
    format!("{}{number}", shortened(stem, size, "strong", room))
}

/// `52–58 %`, or `54 %`.
fn range(least: f64, most: f64) -> String {
    match (percent(least), percent(most)) {
        (a, b) if a == b => a,
        (a, b) => format!("{}–{b}", a.trim_end_matches(" %")),
    }
}

fn bar(svg: &mut Svg, [x, y, w, h]: [f64; 4], share: f64, class: &str) {
    svg.rect([x, y, w, h], h / 2.0, "track", "");
    let share = share.clamp(0.0, 1.0);
    if share > 0.0 {
        svg.rect([x, y, (w * share).max(h.min(w)), h], h / 2.0, class, "");
    }
}

fn compact(svg: &mut Svg, b: &Block, spot: [f64; 4]) {
    let [x, y, w, _] = spot;
    frame(svg, b, spot, 8.0);
    let stages = shortened(&b.stages, 11.0, "", 0.56 * (w - 16.0));
    let room = w - 22.0 - text_width(&stages, 11.0, "");
    let ink = if b.limits { "alarm strong" } else { "ink strong" };
    svg.text([x + 8.0, y + 18.0], 11.0, Anchor::Start, ink, &shortened_name(&b.title, 11.0, room));
    svg.text([x + w - 8.0, y + 18.0], 11.0, Anchor::End, "stage", &stages);
    let Some([least, most]) = b.busy else { return };
    let value = range(least, most);
    let value = if b.limits { format!("limit: {value}") } else { value };
    let wide = text_width(&value, 11.0, "");
    svg.text([x + w - 8.0, y + 37.0], 11.0, Anchor::End, ink.trim_end_matches(" strong"), &value);
    bar(svg, [x + 8.0, y + 31.0, (w - 24.0 - wide).max(6.0), 5.0], most, "busy");
}

fn cell_block(svg: &mut Svg, b: &Block, spot: [f64; 4]) {
    let [x, y, w, h] = spot;
    frame(svg, b, spot, 5.0);
    let number = b.stages.split(' ').nth(1).unwrap_or(&b.title);
    let number = number.trim_end_matches(',');
    let ink = if b.limits { "alarm strong" } else { "stage" };
    let both = format!("{number}×{}", b.count);
    let text = match b.count > 1 && text_width(&both, 11.0, ink) <= w - 6.0 {
        true => both,
        false => shortened(number, 11.0, ink, w - 6.0),
    };
    svg.text([x + w / 2.0, y + 15.0], 11.0, Anchor::Middle, ink, &text);
    if let Some([_, most]) = b.busy {
        bar(svg, [x + 5.0, y + h - 8.0, w - 10.0, 3.5], most, "busy");
    }
}

/// An entry of the key: its sample's class, and its text.
pub(super) type Key = (&'static str, String);

pub(super) fn keys(scene: &Scene, detail: Detail) -> Vec<Key> {
    let mut keys = vec![
        ("", "Lines by the share of the step that their busiest part is busy:"),
        ("calm", "below 25 %"),
        ("fair", "25 to 50 %"),
        ("warm", "50 to 75 %"),
        ("hot", "above 75 %"),
        ("", "Thicker lines carry more."),
    ];
    keys.extend(scene.limited.then_some(("limit", "limits the step")));
    match detail {
        Detail::Card => {}
        Detail::Compact => keys.push(("busy", "share of the step that a device computes")),
        Detail::Cell => keys.extend([
            ("busy", "share of the step that a device computes"),
            ("", "A box has the number of its stage, and of its devices if they are several. Tooltips have the rest."),
        ]),
    }
    let mut keys: Vec<Key> = keys.into_iter().map(|(class, text)| (class, text.to_owned())).collect();
    let hidden = scene.bundles.get(LABELLED + THIN..).unwrap_or(&[]);
    keys.extend(hidden.first().map(|busiest| {
        let more = counted(hidden.len(), "more connection");
        ("", format!("{more} between sites, at most {} busy, are not drawn.", percent(busiest.busy)))
    }));
    keys
}

fn key_places(keys: &[Key]) -> Vec<(f64, usize)> {
    let sample = |class: &str| if class.is_empty() { 0.0 } else { 30.0 };
    let widths: Vec<f64> = keys.iter().map(|(class, text)| sample(class) + text_width(text, 11.5, "") + 18.0).collect();
    flow(&widths, MARGIN, WIDTH - MARGIN)
}

pub(super) fn keys_height(keys: &[Key]) -> f64 {
    20.0 + 22.0 * key_places(keys).last().map_or(0.0, |p| p.1 as f64)
}

pub(super) fn draw_keys(svg: &mut Svg, keys: &[Key], top: f64) {
    for ((class, text), (x, line)) in keys.iter().zip(key_places(keys)) {
        let y = top + 14.0 + 22.0 * line as f64;
        let mut left = x;
        match *class {
            "" => {}
            "limit" => svg.rect([x, y - 9.0, 22.0, 10.0], 5.0, "limit", ""),
            class => svg.rect([x, y - 6.5, 22.0, 5.0], 2.5, class, ""),
        }
        if !class.is_empty() {
            left += 30.0;
        }
        svg.text([left, y], 11.5, Anchor::Start, if class.is_empty() { "faint" } else { "ink" }, text);
    }
}
