use std::collections::BTreeMap;

use super::*;
use crate::cost::Rates;

const A: PeerId = PeerId(0);
const B: PeerId = PeerId(1);
const C: PeerId = PeerId(2);

fn link(latency: f64, bandwidth: f64) -> Link {
    Link { latency, bandwidth }
}

/// Devices a and b are at home, behind an uplink; c is in a laboratory.
fn cluster(broker: Option<Place>) -> Cluster {
    let rates = Rates { matmul: 1e12, convolution: 1e12, memory: 1e11, overhead: 1e-6 };
    let at = |name: &str, site| Device { site: Some(site), ..Device::new(name, rates, 1 << 30) };
    let home =
        Site { name: "home".into(), inside: Some(link(0.001, 1e8)), uplink: Some(link(0.0625, 1e6)), downlink: None };
    let lab = Site { name: "lab".into(), inside: None, uplink: None, downlink: None };
    let direct = vec![
        DirectLink { from: Place::Site(0), to: Place::Site(1), link: link(0.125, 5e6) },
        DirectLink { from: Place::Site(1), to: Place::Site(0), link: link(0.125, 5e5) },
        DirectLink { from: Place::Device(1), to: Place::Site(1), link: link(0.25, 7e5) },
    ];
    Cluster::new(vec![at("a", 0), at("b", 0), at("c", 1)], vec![home, lab], direct, broker).unwrap()
}

#[test]
fn messages_take_the_most_specific_link_and_every_uplink() {
    let c = cluster(None);
    assert_eq!(c.link(A, B), Some(link(0.001, 1e8)));
    assert_eq!(c.link(A, C), Some(link(0.1875, 1e6)), "the uplink limits");
    assert_eq!(c.link(C, A), Some(link(0.1875, 5e5)), "the direct link limits");
    assert_eq!(c.link(B, C), Some(link(0.3125, 7e5)), "b has its own link");
    let names = |from, to| c.route(from, to).unwrap().lines().map(|(line, _)| c.line_name(line)).collect::<Vec<_>>();
    assert_eq!(names(B, C), ["card of b, out", "uplink of home, out", "link b -> lab", "card of c, in"]);
    assert_eq!(names(C, B), ["card of c, out", "link lab -> home", "uplink of home, in", "card of b, in"]);
    assert_eq!(names(A, B), ["card of a, out", "link a -> b", "card of b, in"]);
    assert_eq!(c.link(A, PeerId(3)), None);
}

#[test]
fn the_broker_uses_the_links_of_its_place() {
    let c = cluster(None);
    assert_eq!(c.link(PeerId::BROKER, A).unwrap().bandwidth, f64::INFINITY, "with the first device");
    assert_eq!(c.link(PeerId::BROKER, C), c.link(A, C));
    let c = cluster(Some(Place::Site(1)));
    assert_eq!(c.link(PeerId::BROKER, A), c.link(C, A));
    assert_eq!(c.link(PeerId::BROKER, C), None, "no link joins two machines of the laboratory");
    assert_eq!(cluster(Some(Place::Broker)).link(PeerId::BROKER, A), None);
}

#[test]
fn a_card_is_as_fast_as_its_site_or_its_fastest_link() {
    let c = cluster(None);
    assert_eq!(
        [A, B, C].map(|p| c.card(p)),
        [Card::new(1e8), Card::new(1e8), Card { outward: Some(5e5), inward: Some(5e6) }],
        "the lab declares no links inside"
    );
    let rates = c.devices()[0].rates;
    let alone = |name: &str| Device::new(name, rates, 1 << 30);
    let direct = |from, to, bandwidth| DirectLink {
        from: Place::Device(from),
        to: Place::Device(to),
        link: link(0.0, bandwidth),
    };
    let c = Cluster::new(
        vec![alone("a"), Device { network: Card::new(4.0), ..alone("b") }, alone("c")],
        vec![],
        vec![direct(0, 1, 5.0), direct(1, 0, 7.0)],
        Some(Place::Broker),
    )
    .unwrap();
    let a = Card { outward: Some(5.0), inward: Some(7.0) };
    assert_eq!([A, B, C, PeerId::BROKER].map(|p| c.card(p)), [a, Card::new(4.0), Card::default(), Card::default()]);
    assert_eq!(c.link(A, B).unwrap().bandwidth, 4.0, "the card limits");
}

#[test]
fn devices_of_a_host_share_its_card_and_need_no_link() {
    let c = cluster(None);
    let hosted = |change: &dyn Fn(&mut Vec<Device>)| {
        let mut devices = c.devices().to_vec();
        devices[..2].iter_mut().for_each(|d| d.host = Some("box".into()));
        change(&mut devices);
        Cluster::new(devices, c.sites().to_vec(), c.direct_links().to_vec(), Some(Place::Device(0)))
    };
    let one = hosted(&|_| ()).unwrap();
    assert_eq!(one.route(A, B), Some(Route::default()));
    let first = |from, to| one.route(from, to).unwrap().lines().next().unwrap().0;
    assert_eq!(first(A, C), first(B, C));
    assert_eq!(one.line_name(first(B, C)), "card of box, out");
    assert_eq!(one.link(PeerId::BROKER, B).unwrap().bandwidth, f64::INFINITY, "the broker is on the host, too");
    // Without its device, the broker stays on the host.
    let part = one.select(&[B, C]).unwrap();
    assert_eq!(part.broker(), Place::Device(0));
    let e = hosted(&|d| d[1].site = Some(1)).unwrap_err().to_string();
    assert!(e.contains("\"a\" and \"b\" are of one host, \"box\", but in different sites"), "{e}");
    let e = hosted(&|d| d[1].network = Card::new(1.0)).unwrap_err().to_string();
    assert!(e.contains("so they have one `network`"), "{e}");
    let e = hosted(&|d| d[2].network = Card::new(0.0)).unwrap_err().to_string();
    assert!(e.contains("the network card of device \"c\" must be faster than zero"), "{e}");
}

#[test]
fn selected_devices_keep_their_links() {
    let c = cluster(Some(Place::Device(1)));
    let s = c.select(&[C, A]).unwrap();
    assert_eq!(s.link(PeerId(0), PeerId(1)), c.link(C, A));
    assert_eq!(s.broker(), Place::Site(0));
    assert_eq!(s.link(PeerId::BROKER, PeerId(0)), c.link(B, C), "the broker keeps b's own link");
    assert_eq!(s.link(PeerId::BROKER, PeerId(1)), c.link(B, A));
    assert_eq!(s.card(PeerId::BROKER), c.card(B));
    let without_the_fast_link = {
        let fast = DirectLink { from: Place::Device(0), to: Place::Device(1), link: link(0.0, 1e9) };
        let direct = [c.direct_links(), &[fast]].concat();
        let whole = Cluster::new(c.devices().to_vec(), c.sites().to_vec(), direct, None).unwrap();
        whole.select(&[A, C]).unwrap()
    };
    assert_eq!(without_the_fast_link.card(A).outward, Some(1e9), "the card of a fast link stays");
    assert!(c.select(&[A, A]).is_err());
    assert!(c.select(&[PeerId(7)]).is_err());
    assert!(c.select(&[]).is_err());
}

#[test]
fn links_are_rescaled() {
    let c = cluster(None);
    let now = c.rescaled(&BTreeMap::from([((A, C), 0.5), ((B, C), 0.25), ((A, B), 2.0)])).unwrap();
    assert_eq!(now.sites()[0].uplink, Some(link(0.0625, 5e5)), "the factor of the best link through it");
    assert_eq!(now.link(A, C), Some(link(0.1875, 5e5)));
    assert_eq!(now.link(B, C), Some(link(0.3125, 1.75e5)), "slower by itself");
    assert_eq!(now.link(A, B), Some(link(0.001, 2e8)), "the cards are faster, too");
    assert_eq!(now.link(B, A), c.link(B, A), "nothing is known of the link back");
    assert_eq!(c.rescaled(&BTreeMap::new()).unwrap(), c);
    assert!(c.rescaled(&BTreeMap::from([((A, C), 0.0)])).is_err());
}

#[test]
fn a_cluster_survives_its_file() {
    let c = cluster(Some(Place::Site(0)));
    let text = serde_json::to_string(&c).unwrap();
    assert_eq!(serde_json::from_str::<Cluster>(&text).unwrap(), c);
    let broken = text.replace("\"bandwidth\":500000.0", "\"bandwidth\":0.0");
    assert_ne!(broken, text);
    let e = serde_json::from_str::<Cluster>(&broken).unwrap_err().to_string();
    assert!(e.contains("the link from lab to home has a bandwidth of 0 bytes/s"), "{e}");
}
