//! Pictures of random clusters.

use fusionllm_graph::{ChoiceRng, NodeId};
use fusionllm_plan::{
    Change, Cluster, Device, DirectLink, LineLoad, Link, LinkLoad, PeerLoad, Place, Plan, Rates, Schedule, Simulation,
    Site, Stage, WhatIf,
};
use fusionllm_program::PeerId;
use fusionllm_view::picture::{self, Picture};

use super::check;

/// Everything that a picture is made of.
struct Case {
    cluster: Cluster,
    plan: Plan,
    simulation: Simulation,
    changes: Vec<WhatIf>,
    notes: Vec<String>,
}

const NAMES: [&str; 9] = [
    "gpu",
    "a",
    "a machine with a name that is much longer than any card",
    "東京の計算機",
    "Вычислитель",
    "b <&\"'>",
    "WWWWWWWWWWWWWWWWWWWW",
    "حاسوب",
    "🖥🖥🖥",
];

/// The demands on a random cluster.
#[derive(Debug, Clone, Copy)]
struct Shape {
    devices: usize,
    sites: usize,
    /// Most replicas of a stage.
    replicas: usize,
}

fn rates() -> Rates {
    Rates { matmul: 1e12, convolution: 1e12, memory: 1e11, overhead: 1e-6 }
}

fn link(rng: &mut ChoiceRng) -> Link {
    Link { latency: rng.log_uniform(1e-5, 0.2), bandwidth: rng.log_uniform(1e5, 1e10) }
}

fn random(rng: &mut ChoiceRng, shape: Shape) -> Case {
    let Shape { devices: count, sites, replicas } = shape;
    let name = rng.choose(&NAMES);
    let one_name = rng.one_in(2);
    let devices = (0..count).map(|i| {
        let name = if one_name { name } else { rng.choose(&NAMES) };
        let site = (sites > 0 && !rng.one_in(12)).then(|| rng.below(sites) as u32);
        Device { site, ..Device::new(format!("{name}-{i}"), rates(), rng.choose(&[8u64, 24, 80]) << 30) }
    });
    let devices: Vec<Device> = devices.collect();
    let with_uplinks = !rng.one_in(4);
    let sites: Vec<Site> = (0..sites)
        .map(|s| Site {
            name: format!("{} {s}", rng.choose(&NAMES)),
            inside: (!rng.one_in(5)).then(|| link(rng)),
            uplink: with_uplinks.then(|| link(rng)),
            downlink: rng.one_in(4).then(|| link(rng)),
        })
        .collect();
    let places = |i: usize| {
        if devices[i].site.is_some() && rng.one_in(2) {
            devices[i].site.map_or(Place::Broker, Place::Site)
        } else {
            Place::Device(i as u32)
        }
    };
    let mut ends: Vec<Place> = (0..count).map(places).collect();
    ends.dedup();
    let mut direct: Vec<DirectLink> = Vec::new();
    for pair in ends.windows(2).filter(|p| p[0] != p[1]) {
        for (from, to) in [(pair[0], pair[1]), (pair[1], pair[0])] {
            if !direct.iter().any(|l| (l.from, l.to) == (from, to)) {
                direct.push(DirectLink { from, to, link: link(rng) });
            }
        }
    }
    let broker = match rng.below(4) {
        0 => Some(Place::Broker),
        1 if !sites.is_empty() => Some(Place::Site(rng.below(sites.len()) as u32)),
        2 => Some(Place::Device(rng.below(count) as u32)),
        _ => None,
    };
    let cluster = Cluster::new(devices, sites, direct, broker).unwrap();
    let plan = plan(rng, &cluster, replicas);
    let simulation = simulation(rng, &cluster, &plan);
    let now = Link { latency: 0.01, bandwidth: 1e6 };
    let change = match rng.below(3) {
        0 => Some(Change::Device { peer: PeerId(rng.below(count) as u32), times: 2.0 }),
        1 if !simulation.lines.is_empty() => {
            let line = simulation.lines[rng.below(simulation.lines.len())].line;
            Some(Change::Line { line, now, then: Link { bandwidth: 1e9, ..now } })
        }
        _ => None,
    };
    let changes =
        change.map(|change| WhatIf { change, replanned: false, step_s: 1.5, speedup: 2.0 }).into_iter().collect();
    let many: Vec<String> =
        (0..rng.below(400)).map(|i| format!("{}-{i}", rng.choose(&["ben", "x", NAMES[2]]))).collect();
    let mut notes = vec!["a note".to_owned(), "far is not used: no link leads to it from the broker".into()];
    if !many.is_empty() {
        notes.push(format!("not used, since none with them is faster: {}", many.join(", ")));
    }
    notes.push("3 of 8 peers have nothing to do: the model's 5 operators make 5 stages".into());
    notes.truncate(rng.below(5));
    Case { cluster, plan, simulation, changes, notes }
}

/// Stages on random devices, of which some stay idle and some take several stages.
fn plan(rng: &mut ChoiceRng, cluster: &Cluster, replicas: usize) -> Plan {
    let all = cluster.devices().len();
    let used = rng.between(1, all);
    let mut stages = Vec::new();
    let mut next = 0;
    while next < used {
        let count = rng.between(1, replicas).min(used - next);
        let peers = (next..next + count).map(|p| p as u32).collect();
        stages.push(Stage { peers, nodes: (0..rng.between(1, 5)).map(|n| NodeId(n as u32)).collect() });
        next += count;
    }
    for _ in 0..rng.below(3) {
        stages.push(Stage { peers: vec![rng.below(used) as u32], nodes: vec![NodeId(9)] });
    }
    Plan {
        fusionllm_plan: fusionllm_plan::FORMAT_VERSION,
        version: 1,
        graph: String::new(),
        peers: cluster.devices().iter().map(|d| d.name.clone()).collect(),
        stages,
        micro_batches: 64,
        schedule: Schedule::OneFOneB,
        scheduler: "op-fence".into(),
        compression: Default::default(),
        codecs: Vec::new(),
        offload: Vec::new(),
    }
}

/// Loads as a simulation could have found them. Messages go from stage to stage and among replicas.
fn simulation(rng: &mut ChoiceRng, cluster: &Cluster, plan: &Plan) -> Simulation {
    let step_s = rng.log_uniform(1e-3, 1e4);
    let mut pairs = Vec::new();
    let replicas: Vec<Vec<PeerId>> = plan.stages.iter().map(Stage::replicas).collect();
    for (i, here) in replicas.iter().enumerate() {
        let next = &replicas[(i + 1) % replicas.len()];
        for (k, a) in here.iter().enumerate() {
            pairs.push((*a, next[k % next.len()]));
            pairs.push((*a, here[(k + 1) % here.len()]));
        }
    }
    pairs.extend(replicas[0].iter().map(|p| (PeerId::BROKER, *p)));
    pairs.extend((0..rng.below(20)).map(|_| {
        let any = |rng: &mut ChoiceRng| replicas[rng.below(replicas.len())][0];
        (any(rng), any(rng))
    }));
    pairs.sort();
    pairs.dedup();
    let mut links = Vec::new();
    let mut lines: Vec<LineLoad> = Vec::new();
    for (from, to) in pairs.into_iter().filter(|(a, b)| a != b) {
        let bytes = rng.log_uniform(1.0, 1e12) as u64;
        let busy_s = step_s * rng.log_uniform(1e-3, 1.0);
        links.push(LinkLoad { from, to, bytes, messages: 1, busy_s });
        for (line, link) in cluster.route(from, to).iter().flat_map(|r| r.lines()) {
            if !lines.iter().any(|l| l.line == line) {
                lines.push(LineLoad { line, link, bytes, busy_s });
            }
        }
    }
    let peer = |rng: &mut ChoiceRng| PeerLoad {
        compute_s: step_s * rng.log_uniform(1e-3, 1.0),
        forward_s: 0.0,
        wait_s: 0.0,
        peak_bytes: rng.log_uniform(1e3, 2e11) as u64,
    };
    let peers = cluster.devices().iter().map(|_| peer(rng)).collect();
    Simulation { step_s, closed_form_s: step_s, peers, links, lines, spans: Vec::new(), transfers: Vec::new() }
}

fn draw(c: &Case) -> Picture {
    picture::cluster(&c.cluster, &c.plan, &c.simulation, &c.changes, &c.notes)
}

#[test]
fn texts_of_random_clusters_do_not_overlap() {
    for seed in 0..200 {
        let rng = &mut ChoiceRng::new(seed);
        let devices = rng.choose(&[1, 2, 3, 5, 8, 12, 20, 40, 64, 120, 300]);
        let sites = rng.choose(&[0, 1, 2, 3, 5, 10, devices]).min(devices);
        let shape = Shape { devices, sites, replicas: rng.choose(&[1, 1, 2, 4, 8, 40]) };
        let case = random(rng, shape);
        check(&draw(&case), &format!("seed {seed}, {shape:?}"));
    }
}

#[test]
fn a_thousand_devices_have_a_picture() {
    for (sites, replicas) in [(0, 1), (1, 1), (4, 8), (1000, 1), (1, 1000)] {
        let shape = Shape { devices: 1000, sites, replicas };
        let case = random(&mut ChoiceRng::new(7), shape);
        let picture = draw(&case);
        check(&picture, &format!("{shape:?}"));
        assert!(picture.size()[1] < 16_000.0, "{shape:?}: {}", picture.size()[1]);
    }
}

/// A run may ask for a picture before anything is known of its step.
#[test]
fn nothing_to_see_is_drawn() {
    let mut case = random(&mut ChoiceRng::new(3), Shape { devices: 4, sites: 2, replicas: 1 });
    case.simulation.step_s = 0.0;
    check(&draw(&case), "a step without a length");
    case.plan.stages.clear();
    check(&draw(&case), "a plan without a stage");
    case.simulation.peers.clear();
    (case.simulation.links, case.simulation.lines) = (Vec::new(), Vec::new());
    check(&draw(&case), "a step without peers");
}

/// The broker's inputs for a peer on its own machine were drawn as traffic inside a site.
#[test]
fn one_device_sends_nothing() {
    let device = Device { site: Some(0), ..Device::new("alone", rates(), 1 << 34) };
    let inside = Some(Link { latency: 1e-4, bandwidth: 1e8 });
    let site = Site { name: "home".into(), inside, uplink: None, downlink: None };
    let cluster = Cluster::new(vec![device], vec![site], vec![], None).unwrap();
    let plan = plan(&mut ChoiceRng::new(1), &cluster, 1);
    let simulation = simulation(&mut ChoiceRng::new(1), &cluster, &plan);
    assert!(!simulation.links.is_empty(), "the broker sends the batches");
    let picture = picture::cluster(&cluster, &plan, &simulation, &[], &[]);
    check(&picture, "one device");
    assert!(!picture.texts().iter().any(|(_, t)| t.contains("iB a step")), "{:?}", picture.texts());
}

/// Two links were green although the uplink that they share was what limited the step.
#[test]
fn a_shared_uplink_shows_its_load() {
    let link = |bandwidth| Link { latency: 0.01, bandwidth };
    let site =
        |name: &str| Site { name: name.into(), inside: Some(link(1e9)), uplink: Some(link(1e7)), downlink: None };
    let device = |i: u32| Device { site: Some(i / 2), ..Device::new(format!("d{i}"), rates(), 1 << 34) };
    let cluster = Cluster::new((0..4).map(device).collect(), vec![site("left"), site("right")], vec![], None).unwrap();
    let mut plan = plan(&mut ChoiceRng::new(1), &cluster, 1);
    plan.stages = (0..4).map(|p| Stage { peers: vec![p], nodes: vec![NodeId(p)] }).collect();
    let mut simulation = simulation(&mut ChoiceRng::new(1), &cluster, &plan);
    simulation.step_s = 10.0;
    simulation.links = [(0, 2), (1, 3)]
        .map(|(a, b)| LinkLoad { from: PeerId(a), to: PeerId(b), bytes: 1 << 20, messages: 1, busy_s: 4.8 })
        .to_vec();
    simulation.lines =
        cluster.route(PeerId(0), PeerId(2)).unwrap().lines().fold(Vec::new(), |mut all, (line, link)| {
            all.push(LineLoad { line, link, bytes: 2 << 20, busy_s: 9.6 });
            all
        });
    let picture = picture::cluster(&cluster, &plan, &simulation, &[], &[]);
    let texts: Vec<&str> = picture.texts().iter().map(|t| t.1.as_str()).collect();
    let said = |what: &str| texts.iter().any(|t| t.contains(what));
    assert!(said("Limit: the") && said("limits the step"), "{texts:?}");
    assert!(said("2 MiB a step · 96 % busy"), "one connection carries both links: {texts:?}");
    assert!(said("uplink 80 Mbps, 10 ms · busy 96 % out, 0 % in"), "{texts:?}");
}
