//! Pictures of plans.

#![allow(clippy::unwrap_used)]

use fusionllm_graph::DType;
use fusionllm_graph::ops::AdamwStep;
use fusionllm_models::Gpt2Config;
use fusionllm_plan::{Cluster, Device, Link, Origin, Rates, SavedPlan, Schedule, Site, equal_compute};
use fusionllm_program::Optimizer;
use fusionllm_view::picture::{self, Strip};

fn saved() -> SavedPlan {
    // With an explicit mask, which is filled with minus infinity.
    let attn_implementation = fusionllm_models::AttentionImplementation::Eager;
    let config = Gpt2Config {
        vocab_size: 64,
        n_positions: 16,
        n_embd: 16,
        n_layer: 4,
        n_head: 2,
        attn_implementation,
        ..Gpt2Config::default()
    };
    let graph = config.build(1, 16, DType::F32).unwrap();
    let plan = equal_compute(&graph, &["p0", "p1", "p2"].map(String::from), 4, Schedule::OneFOneB).unwrap();
    let rates = Rates { matmul: 1e9, convolution: 1e9, memory: 1e9, overhead: 1e-6 };
    let devices = (0..)
        .zip(&plan.peers)
        .map(|(i, name): (u32, _)| Device { site: Some(i / 2), ..Device::new(name, rates, 1 << 20) });
    let uplink = Some(Link { latency: 0.01, bandwidth: 1e5 });
    let sites = ["a", "b <&\">"].map(|name| Site {
        name: name.into(),
        inside: Some(Link { latency: 1e-4, bandwidth: 1e8 }),
        uplink,
        downlink: None,
    });
    let cluster = Cluster::new(devices.collect(), sites.to_vec(), Vec::new(), None).unwrap();
    let optimizer = Optimizer::Adamw(AdamwStep { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 });
    let origin = Origin { lower_bound_step_s: Some(0.5), solve_s: None, notes: vec!["a note".into()] };
    SavedPlan { plan, cluster, graph, optimizer, origin }
}

/// Every element is closed, and names are escaped.
#[test]
fn pictures_are_well_formed() {
    let saved = saved();
    let simulation = saved.simulate(true).unwrap();
    let pictures = [
        picture::timeline(&["p0", "p1", "p2"], &[Strip::predicted(&simulation)]),
        picture::cluster(&saved.cluster, &saved.plan, &simulation, &[], &saved.origin.notes),
    ];
    for svg in pictures.iter().map(picture::Picture::file) {
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
        let opened = svg.matches("<rect").count() + svg.matches("<path").count() + svg.matches("<line").count();
        let closed = svg.matches("/>").count() + svg.matches("</rect>").count() + svg.matches("</path>").count();
        assert_eq!(opened, closed);
        assert!(!svg.contains("NaN") && !svg.contains("b <&"));
        for p in saved.plan.peers.iter() {
            assert!(svg.contains(&format!(">{p}</text>")), "{p} is shown");
        }
    }
    for picture in pictures {
        let (file, embedded) = (picture.file(), picture.embedded());
        let style = picture::style();
        for class in embedded.split("class=\"").skip(1).flat_map(|rest| rest.split('"').next().unwrap().split(' ')) {
            assert!(style.contains(&format!(".{class}{{")), "{class} has a rule");
        }
        let colorful = |svg: &str| svg.contains("fill=\"") || svg.contains("stroke=\"");
        assert!(!colorful(&file) && !colorful(&embedded), "classes alone have colours");
        assert!(!embedded.contains("<style>") && embedded.contains("role=\"img\" aria-label=\""));
    }
    let trace: serde_json::Value = serde_json::from_str(&picture::chrome_trace(&saved.cluster, &simulation)).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let computed: f64 =
        events.iter().filter(|e| e["cat"] == "compute" && e["pid"] == 0).map(|e| e["dur"].as_f64().unwrap()).sum();
    assert!((computed / 1e6 - simulation.peers[0].compute_s).abs() < 1e-9, "a peer's spans are what it computes");
    let sent = events.iter().filter(|e| e["ph"] == "s").count();
    assert_eq!(sent, simulation.transfers.len());
    assert_eq!(events.iter().filter(|e| e["ph"] == "f").count(), sent, "what is sent comes");
}
