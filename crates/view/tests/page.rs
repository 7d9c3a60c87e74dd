//! Pages about runs.

#![allow(clippy::unwrap_used)]

use fusionllm_events::{Event, IncidentSummary, StepMetrics, Timed};
use fusionllm_graph::DType;
use fusionllm_graph::ops::AdamwStep;
use fusionllm_models::Gpt2Config;
use fusionllm_plan::{Activity, Cluster, Device, Link, Origin, Rates, SavedPlan, Schedule, Site, equal_compute};
use fusionllm_program::Optimizer;
use fusionllm_protocol::{MemberStatus, RunPhase, RunStatus, Standing};
use fusionllm_view::page::{self, Prediction, RunView};
use fusionllm_workspace::run_dir::{LinkSummary, PeerSummary, PeerTrace, StepTrace, Summary};

/// A name that a stranger may give his machine.
const EVIL: &str = "<img src=x onerror=alert(1)>\"'&";

struct Run {
    job: toml::Table,
    metrics: Vec<StepMetrics>,
    validations: Vec<(u64, Option<f64>)>,
    events: Vec<&'static Timed>,
    prediction: Option<Prediction>,
    last_step: StepTrace,
    summary: Summary,
    status: RunStatus,
}

impl Run {
    /// A run of this many steps over this many peers, in which the first peer was lost once.
    fn new(steps: u64, peers: usize) -> Self {
        let name = |i: usize| if i == 0 { EVIL.to_owned() } else { format!("peer-{i}") };
        let metrics = (1..=steps).map(|step| StepMetrics {
            step,
            loss: (step != 3).then_some(5.0 / step as f64),
            step_s: 0.25 + (step % 7) as f64 * 0.01,
            tokens_per_s: 4000.0,
            bytes_sent: 1 << 20,
            skipped: step == 3,
            val_loss: step.is_multiple_of(50).then_some(6.0 / step as f64),
            ..StepMetrics::default()
        });
        let metrics: Vec<StepMetrics> = metrics.collect();
        let names: Vec<String> = (0..peers).map(name).collect();
        let planned = Event::Planned {
            model: "gpt2".into(),
            parameters: 842_496,
            operators: 103,
            peers: names.clone(),
            stages: peers as u64,
            scheduler: "op-fence".into(),
            schedule: "1f1b".into(),
            micro_batches: 8,
            targets: "tokens".into(),
            notes: Vec::new(),
            predicted_step_s: Some(0.24),
        };
        let incident = IncidentSummary { peer: name(0), step: 20, restarted_at: 18, ..IncidentSummary::default() };
        let lost = Event::Lost { peer: name(0), reason: EVIL.into(), used: true, step: 20 };
        let events =
            [planned, Event::Started { incidents: vec![] }, lost, Event::Started { incidents: vec![incident] }];
        let mut at = 1.7e9;
        let mut timed = |event| {
            at += 10.0;
            Timed { time: at, event }
        };
        let spans = |i: usize| {
            let start = |m: u32| f64::from(m) * 0.01 + i as f64 * 0.001;
            (0..16).map(|m| (Activity::Forward, Some(m), start(m), start(m) + 0.009)).collect()
        };
        let arrivals = |i: usize| if i > 0 { vec![(i as u32 - 1, 4096, 0.001, 0.002)] } else { Vec::new() };
        let trace =
            |(i, name): (usize, &String)| PeerTrace { name: name.clone(), spans: spans(i), arrivals: arrivals(i) };
        let peer = |name: &String| PeerSummary { name: name.clone(), device: EVIL.into(), ..PeerSummary::default() };
        let link =
            |ends: &[String]| LinkSummary { from: ends[0].clone(), to: ends[1].clone(), ..LinkSummary::default() };
        let member = |(i, name): (usize, &String)| MemberStatus {
            name: name.clone(),
            standing: if i == 1 { Standing::Away } else { Standing::Present },
            backend: "cpu".into(),
            device: "CPU".into(),
            peer: Some(i as u32),
            share_bytes: None,
            operators: Some(3),
            compute_s: Some(0.2),
            predicted_compute_s: Some(0.1),
            flops: None,
            bytes_per_s: None,
            silent_s: None,
        };
        let status = RunStatus {
            phase: RunPhase::Training,
            generation: 2,
            step: steps,
            steps: 2 * steps,
            loss: Some(0.5),
            step_s: Some(0.25),
            predicted_step_s: Some(0.24),
            left_s: Some(60.0),
            saved: None,
            saving: None,
            loading: None,
            wanted: peers as u64,
            members: names.iter().enumerate().map(member).collect(),
            more_members: 0,
            incidents: Vec::new(),
            more_incidents: 0,
        };
        Self {
            job: format!("model.family = {EVIL:?}\ntrain.steps = {steps}").parse().unwrap(),
            validations: page::validations(&metrics),
            metrics,
            // A test may leak a little.
            events: events.into_iter().map(&mut timed).map(|t| &*Box::leak(Box::new(t))).collect(),
            prediction: (peers <= 8).then(|| prediction(&names)),
            last_step: StepTrace { step: steps, step_s: 0.25, peers: names.iter().enumerate().map(trace).collect() },
            summary: Summary {
                peers: names.iter().map(peer).collect(),
                links: names.windows(2).map(link).collect(),
                ..Summary::default()
            },
            status,
        }
    }

    fn view(&self) -> RunView<'_> {
        RunView {
            name: "runs/0001",
            job: &self.job,
            metrics: &self.metrics,
            validations: &self.validations,
            events: &self.events,
            prediction: self.prediction.as_ref(),
            last_step: Some(&self.last_step),
            summary: Some(&self.summary),
            status: Some(&self.status),
        }
    }
}

fn prediction(names: &[String]) -> Prediction {
    let config =
        Gpt2Config { vocab_size: 64, n_positions: 16, n_embd: 16, n_layer: 4, n_head: 2, ..Gpt2Config::default() };
    let graph = config.build(1, 16, DType::F32).unwrap();
    // A plan's own names are checked more strictly than those of the machines.
    let mut plan = equal_compute(&graph, names, 4, Schedule::OneFOneB).unwrap();
    plan.peers = names.to_vec();
    let rates = Rates { matmul: 1e9, convolution: 1e9, memory: 1e9, overhead: 1e-6 };
    let devices = names.iter().map(|name| Device { site: Some(0), ..Device::new(name, rates, 1 << 20) });
    let inside = Some(Link { latency: 1e-4, bandwidth: 1e8 });
    let site = Site { name: format!("home of {EVIL}"), inside, uplink: None, downlink: None };
    let cluster = Cluster::new(devices.collect(), vec![site], Vec::new(), None).unwrap();
    let optimizer = Optimizer::Adamw(AdamwStep { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 });
    Prediction::new(SavedPlan { plan, cluster, graph, optimizer, origin: Origin::default() }).unwrap()
}

/// The elements of a page that are open when they should not be. Void elements of HTML are closed by themselves.
fn unclosed(page: &str) -> Vec<String> {
    const VOID: [&str; 4] = ["meta", "link", "br", "!DOCTYPE"];
    let mut open: Vec<String> = Vec::new();
    let body = page.split("<style>").next().unwrap().to_owned() + page.split("</style>").nth(1).unwrap();
    let body = body.split("<script").next().unwrap();
    for tag in body.split('<').skip(1) {
        let tag = tag.split('>').next().unwrap();
        let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap();
        if tag.starts_with('/') {
            assert_eq!(open.pop().as_deref(), Some(name), "{tag}");
        } else if !tag.ends_with('/') && !VOID.contains(&name) {
            open.push(name.to_owned());
        }
    }
    open
}

#[test]
fn names_of_strangers_are_escaped() {
    let run = Run::new(60, 3);
    for page in [
        page::report(&[run.view()]),
        page::report(&[run.view(), run.view()]),
        page::live(&run.view(), &page::parts(&run.view()), "nonce"),
    ] {
        assert!(!page.contains("<img"), "a name became an element");
        assert!(!page.contains("onerror=alert(1)>\"'"), "a name left its attribute");
        assert!(page.contains("&lt;img src=x onerror=alert(1)&gt;"));
        assert_eq!(unclosed(&page), ["html", "body"]);
    }
}

#[test]
fn a_page_needs_nothing_else() {
    let run = Run::new(60, 3);
    let page = page::report(&[run.view()]);
    for outside in ["http://", "https://", "//cdn", "@import", "url("] {
        let found = page.replace("http://www.w3.org/2000/svg", "");
        assert!(!found.contains(outside), "{outside}");
    }
}

#[test]
fn a_large_run_is_a_small_page() {
    let run = Run::new(10_000, 100);
    let page = page::report(&[run.view()]);
    assert!(page.len() < 300_000, "{} bytes", page.len());
    assert_eq!(unclosed(&page), ["html", "body"]);
}

/// The part of a page with this name.
fn part(run: &RunView<'_>, name: &str) -> String {
    page::parts(run).into_iter().find(|(id, _)| *id == name).unwrap().1.into_string()
}

#[test]
fn a_run_without_anything_has_a_page() {
    let run = RunView {
        name: "empty",
        job: &toml::Table::new(),
        metrics: &[],
        validations: &[],
        events: &[],
        prediction: None,
        last_step: None,
        summary: None,
        status: None,
    };
    let page = page::report(&[run, run]);
    assert!(page.contains("No step is done yet"));
    assert_eq!(part(&run, "step"), "");
}

#[test]
fn what_happened_stands_on_the_curve() {
    let run = Run::new(60, 3);
    let curves = part(&run.view(), "curves");
    assert!(
        curves.contains("✕") && curves.contains("↻"),
        "the loss of a peer, and the step that training went back to"
    );
    let peers = part(&run.view(), "peers");
    assert!(peers.contains("<span class=\"pill bad\">lost</span>"), "{peers}");
    let step = part(&run.view(), "step");
    assert!(step.contains("predicted") && step.contains("measured"));
}

#[test]
fn runs_are_compared_by_the_settings_that_differ() {
    let (one, two) = (Run::new(60, 3), Run::new(40, 3));
    let page = page::report(&[one.view(), two.view()]);
    let head = page.split("<thead>").nth(1).unwrap().split("</thead>").next().unwrap();
    assert!(head.contains("train.steps") && !head.contains("model.family"), "{head}");
}
