use fusionllm_graph::Advice;
use fusionllm_plan::Line;
use insta::assert_snapshot;

use super::*;

const HOME_AND_LAB: &str = r#"
[[device]]
name = "home"
count = 2
site = "home"
gpu = "RTX 3080"
slowdown = 2

[[device]]
name = "lab-0"
site = "lab"
tflops = 10
memory_bandwidth = "500 GB/s"
memory = "8 GiB"
overhead = "4 ms"
backend = "burn"

[[site]]
name = "home"
rate = "1 Gbps"
latency = "0.2 ms"
uplink = { rate = "8 Mbps", latency = "20 ms" }

[[site]]
name = "lab"
rate = "10 Gbps"

[[link]]
between = ["home", "lab"]
rate = "100 Mbps"
latency = "5 ms"

[[link]]
from = "lab"
to = "home-1"
rate = "1 Mbps"

[broker]
at = "lab"
"#;

fn testbed(text: &str) -> Result<Cluster, JobError> {
    Testbed::parse("t.toml", text, Path::new("/nowhere")).map(|t| t.cluster)
}

fn error(from: &str, to: &str) -> String {
    assert!(HOME_AND_LAB.contains(from), "{from}");
    testbed(&HOME_AND_LAB.replacen(from, to, 1)).unwrap_err().report()
}

#[test]
fn a_testbed_describes_devices_and_links() {
    let c = testbed(HOME_AND_LAB).unwrap();
    let names: Vec<&str> = c.devices().iter().map(|d| d.name.as_str()).collect();
    assert_eq!(names, ["home-0", "home-1", "lab-0"]);
    assert_eq!(c.link(PeerId(0), PeerId(1)), Some(Link { latency: 0.0002, bandwidth: 125e6 }));
    assert_eq!(c.link(PeerId(0), PeerId(2)), Some(Link { latency: 0.025, bandwidth: 1e6 }));
    assert_eq!(
        c.link(PeerId(2), PeerId(1)),
        Some(Link { latency: 0.02, bandwidth: 125e3 }),
        "its own link, not that of its site"
    );
    let [home, _, lab] = c.devices() else { panic!("three devices") };
    assert_eq!((home.slowdown, home.memory, home.backend.as_deref()), (2.0, 10 << 30, None));
    assert!((home.rates.matmul - 0.6 * 29.8e12).abs() < 1.0);
    let expected = Rates { matmul: 10e12, convolution: 10e12, memory: 500e9, overhead: 4e-3 };
    assert_eq!((lab.rates, lab.backend.as_deref()), (expected, Some("burn")));
    assert_eq!(c.broker(), Place::Site(1));
}

#[test]
fn devices_of_a_processor_say_the_same_of_it() {
    let text = HOME_AND_LAB.replace("count = 2", "count = 2\nprocessor = { name = \"pc\", cores = 4, busy = 2 }");
    let c = testbed(&text).unwrap();
    let expected = Processor { name: "pc".into(), cores: 4.0, busy: 2.0, crowded: 1.0, crowd: 4.0 };
    assert_eq!([0, 1].map(|d: usize| c.devices()[d].processor.clone()), [Some(expected.clone()), Some(expected)]);
    assert_eq!(c.devices()[2].processor, None);
    for (from, to, message) in [
        ("cores = 4, ", "", "a processor has a name and cores"),
        ("\"pc\"", "\"\"", "the processor of device \"home-0\" needs a name and cores"),
        ("busy = 2", "busy = 5", "`device.processor.busy` is 5"),
        ("busy = 2", "crowded = 0.5", "`device.processor.crowded` is 0.5"),
        (
            "\"lab-0\"",
            "\"lab-0\"\nprocessor = { name = \"pc\", cores = 8 }",
            "\"home-0\" and \"lab-0\" compute on one processor, \"pc\", so it has as many cores",
        ),
    ] {
        let e = testbed(&text.replace(from, to)).unwrap_err().report();
        assert!(e.contains(message), "{e}");
    }
}

#[test]
fn devices_of_a_host_share_the_card_that_the_file_gives() {
    let text = HOME_AND_LAB.replace("count = 2", "count = 2\nhost = \"box\"\nnetwork = \"2 Gbps\"");
    let c = testbed(&text).unwrap();
    assert_eq!([0, 1].map(|p| c.card(PeerId(p))), [Card::new(250e6); 2]);
    assert_eq!(c.link(PeerId(0), PeerId(1)).map(|l| l.bandwidth), Some(f64::INFINITY), "inside the host");
    let lines = c.route(PeerId(1), PeerId(2)).unwrap();
    let names: Vec<String> = lines.lines().map(|(line, _)| c.line_name(line)).collect();
    assert_eq!(names[0], "card of box, out");
    for (from, to, message) in [
        ("\"2 Gbps\"", "\"0 Gbps\"", "`device.network` is 0 Gbps"),
        ("\"box\"", "\"\"", "the host of device \"home-0\" has no name"),
        (
            "\"lab-0\"",
            "\"lab-0\"\nhost = \"box\"",
            "\"home-0\" and \"lab-0\" are of one host, \"box\", but in different",
        ),
        (
            "at = \"lab\"",
            "at = \"home-0\"\nnetwork = \"1 Gbps\"",
            "the broker runs on the machine of device \"home-0\"",
        ),
    ] {
        let e = testbed(&text.replace(from, to)).unwrap_err().report();
        assert!(e.contains(message), "{e}");
    }
    let own = testbed(&text.replace("at = \"lab\"", "at = \"lab\"\nnetwork = \"1 Gbps\"")).unwrap();
    assert_eq!(own.card(PeerId::BROKER), Card::new(125e6));
}

/// Units that differ in the case of a letter were taken for each other: factors of 8.
#[test]
fn bits_and_bytes_are_told_apart() {
    let rate = |rate: &str| {
        let c = testbed(&HOME_AND_LAB.replace("\"1 Mbps\"", &format!("{rate:?}"))).unwrap();
        c.link(PeerId(2), PeerId(1)).unwrap().bandwidth
    };
    assert_eq!([rate("1 Mb/s"), rate("1 MBps"), rate("1 Mbit/s")], [125e3, 1e6, 125e3]);
    let bandwidth = |text: &str| {
        testbed(&HOME_AND_LAB.replace("500 GB/s", text)).map(|c| c.devices()[2].rates.memory).map_err(|e| e.report())
    };
    assert_eq!((bandwidth("20 Gb/s"), bandwidth("20 GiB/s")), (Ok(2.5e9), Ok(20.0 * 1024f64.powi(3))));
    assert_snapshot!(bandwidth("20 gb/s").unwrap_err(), @r#"
    t.toml:13:20: `device.memory_bandwidth`: "20 gb/s" may be 20 Gbps (bits) or 20 GB/s (bytes)
    hint: write memory_bandwidth = "20 Gbps" for bits, or memory_bandwidth = "20 GB/s" for bytes
    "#);
    assert_snapshot!(error("memory = \"8 GiB\"", "memory = \"8 Gb\""), @r#"
    t.toml:14:10: `device.memory`: "8 Gb" may be 8 Gbit (bits) or 8 GB (bytes)
    hint: write memory = "8 Gbit" for bits, or memory = "8 GB" for bytes
    "#);
    assert_snapshot!(error("memory = \"8 GiB\"", "memory = \"0.5 B\""), @r#"
    t.toml:14:10: `device.memory` is less than a byte
    hint: it must be at least "1 B", such as memory = "16 GiB"
    "#);
    assert_snapshot!(error("overhead = \"4 ms\"", "overhead = \"4 m\""), @r#"
    t.toml:15:12: `device.overhead`: "4 m" may be 4 ms (milliseconds) or 4 min (minutes)
    hint: write overhead = "4 ms" for milliseconds, or overhead = "4 min" for minutes
    "#);
    assert_snapshot!(error("tflops = 10", "tflops = \"120 GFLOPS\""), @r#"
    t.toml:12:10: `device.tflops` takes a number, not the text "120 GFLOPS"
    hint: write tflops = 0.12
    "#);
    assert_snapshot!(error("gpu = \"RTX 3080\"", "gpu = \"RTX 3080\"\nefficiency = \"33.3 %\""), @r#"
    t.toml:7:14: `device.efficiency` takes a number, not the text "33.3 %"
    hint: write efficiency = 0.333
    "#);
    assert_snapshot!(error("slowdown = 2", "slowdown = 200%"), @"
    t.toml:7:12: `slowdown`: string values must be quoted, expected literal string
    hint: write slowdown = 2.0
    ");
}

#[test]
fn errors_name_the_place_in_the_file() {
    assert_snapshot!(error("gpu = \"RTX 3080\"", "gpu = \"RTX 3080 XT\""), @r#"
    t.toml:6:7: `device.gpu`: no GPU "RTX 3080 XT" is in the table
    hint: did you mean "RTX 3080", "RTX 3080 12GB", "RTX 3080 Ti", "RTX 3080 Laptop 8GB", "RTX 3080 Laptop 16GB" or "RTX 3080 Ti Laptop"? docs/gpus.md has all GPUs; for another, give tflops, memory_bandwidth and memory instead
    "#);
    assert_snapshot!(error("gpu = \"RTX 3080\"", "gpu = \"A100\""), @r#"
    t.toml:6:7: `device.gpu`: "A100" stands for several GPUs
    hint: write gpu = "A100 40GB", "A100 80GB" or "A100 80GB PCIe"
    "#);
    assert_snapshot!(error("gpu = \"RTX 3080\"", "gpu = \"Apple M3 Max\""), @r#"
    t.toml:6:7: `device.gpu`: M3 Max shares the memory of its machine
    hint: write memory = "16 GiB" beside it
    "#);
    assert_snapshot!(error("gpu = \"RTX 3080\"", "gpu = 3080"), @r#"
    t.toml:6:7: `device.gpu` takes a string, not 3080
    hint: docs/gpus.md has all GPUs, such as "RTX 3080"
    "#);
    assert_snapshot!(error("rate = \"1 Gbps\"", "rate = \"1 Gpbs\""), @r#"
    t.toml:20:8: `site.rate`: there is no unit "Gpbs" of a rate
    hint: did you mean "1 Gbps"? the units are bps, kbps, Mbps, Gbps, Tbps, kB/s, MB/s, GB/s, TB/s; b is a bit and B a byte
    "#);
    assert_snapshot!(error("rate = \"8 Mbps\"", "rate = \"0 Mbps\""), @r#"
    t.toml:22:19: `site.uplink.rate` is 0 Mbps
    hint: it must be above zero, such as rate = "8 Mbps"
    "#);
    assert_snapshot!(error("rate = \"100 Mbps\"", "rate = 100"), @r#"
    t.toml:30:8: `link.rate` needs a unit
    hint: write rate = "100 Mbps", or another unit; the units are bps, kbps, Mbps, Gbps, Tbps, kB/s, MB/s, GB/s, TB/s; b is a bit and B a byte
    "#);
    assert_snapshot!(error("[\"home\", \"lab\"]", "[\"hone\", \"lab\"]"), @r#"
    t.toml:29:11: `link.between`: there is no device or site `hone`
    hint: did you mean "home"? there are "home", "home-0", "home-1", "lab", "lab-0"
    "#);
    assert_snapshot!(error("[\"home\", \"lab\"]", "[\"home\", \"home\"]"), @r#"
    t.toml:29:11: `link.between`: both ends of a link are the same
    hint: name two different ends; rate and latency of a site are those between its own devices
    "#);
    assert_snapshot!(error("tflops = 10\n", ""), @r#"
    t.toml:9:1: nothing says how fast device `lab-0` is
    hint: write gpu = "RTX 3080", or tflops, memory_bandwidth and memory, or profile = "DEVICE.toml"
    "#);
    assert_snapshot!(error("slowdown = 2", "slowdown = 0.5"), @r#"
    t.toml:7:12: `device.slowdown` is 0.5
    hint: it must be at least 1
    "#);
    assert_snapshot!(error("count = 2", "coutn = 2"), @r#"
    t.toml:4:1: unknown setting `coutn` in [device]
    hint: did you mean `count`? [device] takes count, name, site, backend, profile, gpu, efficiency, memory, disk, host_link, network, host, processor, slowdown
    "#);
    assert_snapshot!(error("from = \"lab\"\n", ""), @r#"
    t.toml:33:1: a link needs its two ends
    hint: write between = ["a", "b"] for both directions, or from = "a" and to = "b" for one
    "#);
    assert_snapshot!(error("[[device]]", "[device]"), @r#"
    t.toml:9:3: duplicate key
    hint: the file is TOML: sections as [train], settings as name = value, text in quotes
    "#);
    assert_snapshot!(testbed("").unwrap_err().report(), @r#"
    t.toml: there are no devices
    hint: describe each machine in a table [[device]] with a name and a gpu
    "#);
}

#[test]
fn a_gpu_without_memory_of_its_own_takes_that_of_the_file() {
    let device = |gpu: &str| {
        let cluster = testbed(&HOME_AND_LAB.replacen("gpu = \"RTX 3080\"", gpu, 1)).unwrap();
        let device = &cluster.devices()[0];
        (device.memory >> 30, device.host_link.is_some())
    };
    assert_eq!(
        device("gpu = \"Apple M3 Max\"\nmemory = \"36 GiB\""),
        (36, false),
        "there is no other memory to offload to"
    );
    assert_eq!(device("gpu = \"RTX 3080\"\nmemory = \"8 GiB\""), (8, true));
    assert_eq!(device("gpu = \"NVIDIA GeForce RTX 3080\""), (10, true));
}

#[test]
fn a_device_without_a_route_to_the_broker_is_named() {
    assert_snapshot!(error("between = [\"home\", \"lab\"]", "from = \"home\"\nto = \"lab\""), @r#"
    t.toml:3:8: no link leads from broker to home-0
    hint: join their sites or the devices themselves by a [[link]], give both sites an uplink, or say where the broker stands: [broker] at = "NAME"
    "#);
}

#[test]
fn devices_of_one_profile_share_the_threads() {
    let dir = tempfile::tempdir().unwrap();
    let profile = |threads: u32, tflops: f64| {
        format!(
            "[[device]]\nname = \"this\"\nbackend = \"cpu\"\nthreads = {threads}\ntflops = {tflops}\nmemory_bandwidth = \"9 GB/s\"\n\
             memory = \"4 GiB\"\noverhead = \"2 us\"\noperators = {{ mm = [[1e3, 2e-6], [1e9, 1e-2]] }}\n"
        )
    };
    std::fs::write(dir.path().join("D.toml"), profile(1, 0.05) + &profile(4, 0.2)).unwrap();
    let file = |rest: &str| {
        format!(
            "[[site]]\nname = \"s\"\nrate = \"1 Gbps\"\n[[device]]\nname = \"a\"\nsite = \"s\"\nprofile = \"D.toml\"\n{rest}"
        )
    };
    let read = |rest: &str| Testbed::parse("t.toml", &file(rest), dir.path()).map(|t| t.cluster);
    let alone = read("").unwrap();
    assert_eq!(alone.devices()[0].rates.matmul, 0.2e12);
    assert!((alone.devices()[0].measured.operators.by_name["mm"].at(1e9) - 1e-2).abs() < 1e-9);
    assert_eq!(read("count = 4").unwrap().devices()[3].rates.matmul, 0.05e12);
    assert_eq!(read("count = 2").unwrap().devices()[0].rates.matmul, 0.05e12, "two threads were not measured");
    assert_eq!(read("count = 4\nthreads = 4").unwrap().devices()[0].rates.matmul, 0.2e12);
    let e = read("threads = 3").unwrap_err();
    assert_eq!(e.message, "`device.threads`: D.toml has no device of backend cpu with 3 threads");
    assert_eq!(e.hint, "write threads = 4; it has cpu with 1, cpu with 4");
}

/// Two machines that were measured, with a link of 1 MB/s between them and of 2 MB/s to the broker.
fn measured() -> Cluster {
    let rates = Rates { matmul: 1e9, convolution: 1e9, memory: 1e9, overhead: 0.0 };
    let device = |name: &str| Device::new(name, rates, 1 << 30);
    let link = |from, to, bandwidth| DirectLink { from, to, link: Link { latency: 0.001, bandwidth } };
    let (a, b) = (Place::Device(0), Place::Device(1));
    let pairs = [(a, b, 1e6), (a, Place::Broker, 2e6), (b, Place::Broker, 2e6)];
    let links = pairs.into_iter().flat_map(|(from, to, rate)| [link(from, to, rate), link(to, from, rate)]);
    Cluster::new(vec![device("a"), device("b")], Vec::new(), links.collect(), Some(Place::Broker)).unwrap()
}

#[test]
fn what_is_known_counts_more_than_measurements() {
    let known = |text: &str| Known::parse("k.toml", text, Path::new(".")).unwrap();
    let rate = |c: &Cluster, from, to| c.link(from, to).map(|l| l.bandwidth);
    let (a, b) = (PeerId(0), PeerId(1));

    let sites = "[[site]]\nname = \"home\"\nuplink = { rate = \"8 Mbps\" }\n[[site]]\nname = \"lab\"\nuplink = { rate = \"80 Mbps\" }\n\
                 [[device]]\nname = \"b\"\nsite = \"lab\"\nmemory = \"1 MiB\"\n[[device]]\nname = \"a\"\nsite = \"home\"\ntflops = 3\n\
                 memory_bandwidth = \"9 GB/s\"\nmemory = \"4 GiB\"\n[[device]]\nname = \"c\"\n";
    let (cluster, notes) = known(sites).correct(&measured()).unwrap();
    assert_eq!(notes, ["the testbed file has c, but nobody of that name is here"]);
    assert_eq!(
        (rate(&cluster, a, b), rate(&cluster, b, a)),
        (Some(1e6), Some(1e6)),
        "both through the uplink of 8 Mbps"
    );
    let lines = cluster.route(a, b).unwrap();
    assert_eq!(lines.lines().filter(|(line, _)| matches!(line, Line::Uplink { .. })).count(), 2);
    let [first, second] = cluster.devices() else { panic!("{:?}", cluster.devices()) };
    assert_eq!((first.rates.matmul, first.memory), (3e12, 1 << 30), "the machine gives no more");
    assert_eq!((second.rates.matmul, second.memory), (1e9, 1 << 20), "its speed was measured");
    assert_eq!(rate(&cluster, b, PeerId::BROKER), Some(2e6), "so was its link to the broker");

    let link = "[[device]]\nname = \"a\"\n[[device]]\nname = \"b\"\n[[link]]\nfrom = \"a\"\nto = \"b\"\nrate = \"80 Mbps\"\n\
                [[link]]\nbetween = [\"b\", \"broker\"]\nrate = \"40 Mbps\"\n";
    let (cluster, notes) = known(link).correct(&measured()).unwrap();
    assert!(notes.is_empty());
    assert_eq!((rate(&cluster, a, b), rate(&cluster, b, a)), (Some(1e7), Some(1e6)));
    assert_eq!((rate(&cluster, PeerId::BROKER, b), rate(&cluster, PeerId::BROKER, a)), (Some(5e6), Some(2e6)));

    let broker = "[[device]]\nname = \"a\"\n[broker]\nat = \"a\"\n";
    assert_snapshot!(Known::parse("k.toml", broker, Path::new(".")).unwrap_err().report(), @r"
    k.toml:4:6: the broker stands where it was started
    hint: leave `at` out; links to `broker` may be given
    ");
}
