//! The picture of a cluster and a plan.

mod inside;
mod layout;
mod paint;
mod scene;
mod unused;
mod wires;

use fusionllm_graph::units::{bytes, counted, rate, seconds};
use fusionllm_plan::{Change, Cluster, Line, Plan, Simulation, WhatIf};

use super::measure::shortened;
use super::svg::{Anchor, Picture, Svg};
use layout::{Layout, MARGIN, WIDTH};
use scene::{Scene, percent, step};

/// Draws a cluster and a plan: sites and devices in pipeline order, the stages and the load of each device, and what
/// the connections carry.
///
/// `changes` are the answers of [`what_if`](fusionllm_plan::what_if); the first one names what limits the step.
/// `notes` are the [`Origin::notes`](fusionllm_plan::Origin) of the plan, which say why devices are not used.
pub fn cluster(
    cluster: &Cluster,
    plan: &Plan,
    simulation: &Simulation,
    changes: &[WhatIf],
    notes: &[String],
) -> Picture {
    let limit = changes.first().map(|w| w.change).or_else(|| {
        let load = simulation.limiting_line()?;
        Some(Change::Line { line: load.line, now: load.link, then: load.link })
    });
    let scene = Scene::new(cluster, plan, simulation, limit);
    let unused = unused::groups(cluster, plan, notes);
    let absent: usize = unused.iter().map(|g| g.count).sum();
    let used = plan.used().len();
    let subtitle = format!(
        "{} a step · {} · {} on {} of {} · {}",
        seconds(simulation.step_s),
        plan.scheduler,
        counted(plan.stages.len(), "stage"),
        used,
        counted(used + absent, "device"),
        counted(plan.micro_batches, "micro-batch")
    );
    let limit = limit.map(|change| sentence(&change, changes.first(), cluster, simulation));
    let top = if limit.is_some() { 106.0 } else { 82.0 };

    let mut layout = Layout::new(&scene, |places| wires::crossing(&scene, places));
    let (wires, bottom) = wires::wires(&scene, &mut layout, top);
    let strip = unused::place(&unused, bottom);
    let keys = paint::keys(&scene, layout.detail);
    let height = strip.bottom + paint::keys_height(&keys) + 20.0;

    let mut title = format!("The cluster and the cut: {subtitle}");
    title.extend(limit.iter().flat_map(|l| [". ", l]));
    let mut svg = Svg::new(&title, WIDTH, height);
    svg.text([MARGIN, 40.0], 20.0, Anchor::Start, "ink strong", "The cluster and the cut");
    let room = WIDTH - 2.0 * MARGIN;
    svg.text([MARGIN, 62.0], 13.0, Anchor::Start, "faint", &shortened(&subtitle, 13.0, "faint", room));
    if let Some(limit) = limit {
        svg.text([MARGIN, 84.0], 13.0, Anchor::Start, "alarm strong", &shortened(&limit, 13.0, "alarm strong", room));
    }
    paint::faint_wires(&mut svg, &scene, &layout);
    paint::areas(&mut svg, &scene, &layout);
    paint::wires(&mut svg, &scene, &wires);
    paint::uplinks(&mut svg, &scene, &layout);
    unused::paint(&mut svg, &unused, &strip);
    paint::draw_keys(&mut svg, &keys, strip.bottom);
    svg.finish()
}

/// The part that limits the step, and the gain of a faster one.
fn sentence(change: &Change, found: Option<&WhatIf>, cluster: &Cluster, simulation: &Simulation) -> String {
    let share = |seconds: f64| percent(seconds / step(simulation));
    let (what, how) = match change {
        Change::Line { line, now, then } => {
            let what = match line {
                Line::Card { host, .. } => format!("the network card of {}", cluster.host_name(*host)),
                Line::Uplink { site, .. } => {
                    let site = cluster.sites().get(*site as usize);
                    format!("the uplink of {}", site.map_or("?", |s| &s.name))
                }
                Line::Link { .. } => format!("the {}", cluster.line_name(*line)),
            };
            let busy = simulation.lines.iter().filter(|l| l.line == *line || l.line == line.back());
            let busy = busy.map(|l| l.busy_s).fold(0.0, f64::max);
            let how = match now.latency > then.latency {
                true => format!("with a latency of {}", seconds(then.latency)),
                false => format!("at {}", rate(then.bandwidth)),
            };
            (format!("{what} is busy {} of the step", share(busy)), how)
        }
        Change::Device { peer, times } => {
            let busy = simulation.peers.get(peer.0 as usize).map_or(0.0, |p| p.compute_s);
            (format!("{} computes {} of the step", cluster.name(*peer), share(busy)), format!("{times} times as fast"))
        }
        Change::Memory { peer, then } => {
            (format!("the memory of {}", cluster.name(*peer)), format!("with {}", bytes(*then)))
        }
        Change::OneMore { like } => {
            ("the number of devices".to_owned(), format!("with one more like {}", cluster.name(*like)))
        }
    };
    let gain = found.map_or(String::new(), |w| format!("; {how}, a step would take {}", seconds(w.step_s)));
    format!("Limit: {what}{gain}")
}
