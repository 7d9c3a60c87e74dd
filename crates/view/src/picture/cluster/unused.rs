//! The machines that a plan does not use, with the reasons.

use std::collections::{BTreeSet, HashMap};

use fusionllm_graph::units::counted;
use fusionllm_plan::{Cluster, Device, Plan, unused};
use fusionllm_program::PeerId;

use super::super::measure::{shortened, text_width};
use super::super::svg::{Anchor, Svg};
use super::layout::{MARGIN, WIDTH, flow};
use super::scene::stem;

/// At most this many lines of machines for one reason.
const LINES: usize = 4;
const LINE: f64 = 32.0;
/// Up to this many alike machines are named.
const FEW: usize = 3;

/// The machines that are not used for one reason.
pub(super) struct Group {
    pub(super) count: usize,
    reason: String,
    /// Alike machines, with all their names.
    kinds: Vec<(String, Vec<String>)>,
}

/// The unused machines, by reason. A plan that is being made leaves them out of its cluster, so that the notes alone
/// name them. Others are devices of the cluster without a stage.
pub(super) fn groups(cluster: &Cluster, plan: &Plan, notes: &[String]) -> Vec<Group> {
    let used: BTreeSet<PeerId> = plan.used();
    let is_used = |name: &str| cluster.find(name).is_some_and(|p| used.contains(&p));
    let site = |d: &Device| d.site.and_then(|s| cluster.sites().get(s as usize)).map_or("", |s| &s.name);
    let idle = (0..).map(PeerId).zip(cluster.devices()).filter(|(p, _)| !used.contains(p));
    let mut idle: Vec<(&str, &str)> = idle.map(|(_, d)| (d.name.as_str(), site(d))).collect();
    let mut groups = Vec::new();
    let mut told: BTreeSet<&str> = BTreeSet::new();
    for note in unused(notes) {
        let mut kinds = Kinds::default();
        if note.names.is_empty() {
            // The note is about the cluster's own idle devices, if it has them.
            idle.retain(|d| !told.contains(d.0));
            std::mem::take(&mut idle).into_iter().for_each(|(name, site)| kinds.add(name, site));
            let count = note.count.max(kinds.count());
            groups.push(Group { count, reason: note.reason.into(), kinds: kinds.finish() });
            continue;
        }
        for name in note.names.into_iter().filter(|n| !is_used(n)).filter(|n| told.insert(n)) {
            let device = cluster.find(name).and_then(|p| cluster.devices().get(p.0 as usize));
            kinds.add(name, device.map_or("", site));
        }
        groups.push(Group { count: kinds.count(), reason: note.reason.into(), kinds: kinds.finish() });
    }
    let mut kinds = Kinds::default();
    idle.into_iter().filter(|d| !told.contains(d.0)).for_each(|(name, site)| kinds.add(name, site));
    groups.push(Group {
        count: kinds.count(),
        reason: "without an operator in this plan".into(),
        kinds: kinds.finish(),
    });
    groups.retain(|g| g.count > 0);
    groups
}

/// Machines whose names differ in their numbers alone, by name and site, in the order in which they came.
#[derive(Default)]
struct Kinds<'a> {
    order: Vec<(&'a str, &'a str)>,
    names: HashMap<(&'a str, &'a str), Vec<String>>,
}

impl<'a> Kinds<'a> {
    fn add(&mut self, name: &'a str, site: &'a str) {
        let kind = (stem(name), site);
        let names = self.names.entry(kind).or_default();
        if names.is_empty() {
            self.order.push(kind);
        }
        names.push(name.into());
    }

    fn count(&self) -> usize {
        self.names.values().map(Vec::len).sum()
    }

    /// Labels, and the names that each stands for.
    fn finish(mut self) -> Vec<(String, Vec<String>)> {
        let label = |kind: (&str, &str), names: &[String]| {
            let what = match names {
                few if few.len() <= FEW => few.join(", "),
                several => format!("{} × {}", several.len(), kind.0),
            };
            if kind.1.is_empty() { what } else { format!("{what} · {}", kind.1) }
        };
        let order = std::mem::take(&mut self.order).into_iter();
        order.filter_map(|kind| self.names.remove(&kind).map(|names| (label(kind, &names), names))).collect()
    }
}

/// Where everything is drawn.
pub(super) struct Strip {
    top: f64,
    /// By group: its top, and the machines that are drawn, with their places.
    groups: Vec<(f64, Vec<[f64; 3]>)>,
    pub(super) bottom: f64,
}

pub(super) fn place(groups: &[Group], top: f64) -> Strip {
    let mut y = top + 14.0;
    let mut placed = Vec::new();
    for group in groups {
        let widths: Vec<f64> = group.kinds.iter().map(|k| chip_width(&k.0) + 8.0).collect();
        let right = WIDTH - MARGIN - 16.0;
        let places = flow(&widths, MARGIN + 16.0, right);
        let fits = |((x, line), w): ((f64, usize), f64)| (line < LINES).then_some([x, line as f64, w - 8.0]);
        let mut shown: Vec<[f64; 3]> = places.into_iter().zip(widths).filter_map(fits).collect();
        // The last ones make room for the number of the rest.
        while shown.len() < group.kinds.len() && shown.last().is_some_and(|[x, _, w]| x + w + 150.0 > right) {
            shown.pop();
        }
        let lines = shown.last().map_or(0.0, |c| c[1] + 1.0);
        placed.push((y, shown));
        y += 26.0 + lines * LINE + if lines > 0.0 { 10.0 } else { 0.0 };
    }
    let bottom = if groups.is_empty() { top } else { y + 16.0 };
    Strip { top, groups: placed, bottom }
}

fn chip_width(text: &str) -> f64 {
    (text_width(text, 11.5, "faint") + 24.0).min(320.0)
}

pub(super) fn paint(svg: &mut Svg, groups: &[Group], strip: &Strip) {
    if groups.is_empty() {
        return;
    }
    let frame = [MARGIN, strip.top, WIDTH - 2.0 * MARGIN, strip.bottom - 16.0 - strip.top];
    svg.rect(frame, 14.0, "unused dashed", "");
    for (group, (top, places)) in groups.iter().zip(&strip.groups) {
        let sentence = format!("{}: {}", counted(group.count, "unused machine"), group.reason);
        let sentence = shortened(&sentence, 12.0, "strong", frame[2] - 32.0);
        svg.text([MARGIN + 16.0, top + 10.0], 12.0, Anchor::Start, "faint strong", &sentence);
        let mut end = MARGIN + 16.0;
        let mut last = 0.0;
        for ((label, names), &[x, line, width]) in group.kinds.iter().zip(places) {
            let y = top + 26.0 + line * LINE;
            svg.rect([x, y, width, 24.0], 6.0, "unused", &names.join(", "));
            let label = shortened(label, 11.5, "faint", width - 20.0);
            svg.text([x + width / 2.0, y + 16.0], 11.5, Anchor::Middle, "faint", &label);
            (end, last) = (x + width + 10.0, line);
        }
        let rest: usize = group.kinds.iter().skip(places.len()).map(|k| k.1.len()).sum();
        if rest > 0 {
            let at = [end, top + 42.0 + last * LINE];
            svg.text(at, 11.5, Anchor::Start, "faint", &format!("and {rest} more"));
        }
    }
}
