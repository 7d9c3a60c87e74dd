//! Random clusters, and random plans for them.

use fusionllm_graph::{ChoiceRng, Graph};
use fusionllm_plan::{Card, Cluster, Device, DirectLink, Link, Place, Plan, Rates, Schedule, Site, equal_compute};

/// Up to nine devices in up to three sites, with or without hosts, uplinks, links between sites and declared cards.
pub(crate) fn cluster(d: &mut ChoiceRng) -> Cluster {
    let rate = |d: &mut ChoiceRng| d.log_uniform(1e5, 1e8);
    let link = |d: &mut ChoiceRng| Link { latency: d.log_uniform(1e-5, 1e-2), bandwidth: rate(d) };
    let sites: Vec<Site> = (0..d.between(1, 3))
        .map(|s| Site {
            name: format!("site-{s}"),
            inside: Some(link(d)),
            uplink: Some(link(d)),
            downlink: d.one_in(3).then(|| link(d)),
        })
        .collect();
    let mut devices = Vec::new();
    for (s, _) in sites.iter().enumerate() {
        let network = if d.one_in(3) { Card::new(rate(d)) } else { Card::default() };
        let (host, hosted) = (format!("host-{s}"), d.one_in(3));
        for i in 0..d.between(1, 3) {
            let rates = Rates { matmul: d.log_uniform(1e8, 1e11), convolution: 1e9, memory: 1e10, overhead: 1e-6 };
            let host = hosted.then(|| host.clone());
            let name = format!("gpu-{s}-{i}");
            devices.push(Device { site: Some(s as u32), host, network, ..Device::new(name, rates, 1 << 30) });
        }
    }
    let mut direct = Vec::new();
    for from in 0..sites.len() as u32 {
        for to in (0..sites.len() as u32).filter(|to| *to != from) {
            if d.one_in(2) {
                direct.push(DirectLink { from: Place::Site(from), to: Place::Site(to), link: link(d) });
            }
        }
    }
    let broker = if d.one_in(2) { Place::Device(0) } else { Place::Site(0) };
    Cluster::new(devices, sites, direct, Some(broker)).unwrap()
}

/// A plan by hand: the devices in a random order, cut into stages of random numbers of replicas.
pub(crate) fn by_hand(graph: &Graph, cluster: &Cluster, micro_batches: u32, d: &mut ChoiceRng) -> Plan {
    let names: Vec<String> = cluster.devices().iter().map(|device| device.name.clone()).collect();
    let stages = d.between(1, names.len().min(3));
    let schedule = d.choose(&Schedule::ALL);
    let mut plan = equal_compute(graph, &names[..stages], micro_batches, schedule).unwrap();
    plan.peers = names;
    // Each device beyond the stages is one more replica of one of them.
    for peer in stages as u32..plan.peers.len() as u32 {
        plan.stages[d.below(stages)].peers.push(peer);
    }
    plan
}
