//! The testbed file: which devices there are, and what joins them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fusionllm_plan::{Cluster, Curve, Curves, Device, DirectLink, Link, PeerId, Place, Rates, Site};

use super::gpus::{GPUS, PRODUCTS};
use super::quantity::{RATE, SIZE, TIME};
use super::reader::{self, JobError, Section, suggest};

/// A testbed file, read.
///
/// ```toml
/// [[device]]
/// name = "home"                # with `count = 3`: home-0, home-1, home-2
/// count = 3
/// site = "home"
/// gpu = "RTX 3080"             # or tflops, memory_bandwidth and memory outright, or profile = "DEVICE.toml"
/// efficiency = 0.6             # what a gpu attains of its peak in matrix products
/// slowdown = 2                 # operators take twice as long
/// backend = "cpu"         # what its peer computes with
///
/// [[site]]
/// name = "home"
/// rate = "1 Gbps"              # between each two of its devices, in each direction
/// latency = "0.2 ms"
/// uplink = { rate = "8 Mbps", latency = "20 ms" }   # shared by all that leaves the site; all that enters shares another such
///
/// [[link]]
/// between = ["home", "lab"]    # sites or devices, or from = and to = for one direction; between sites, each pair of devices has one of its own
/// rate = "100 Mbps"
/// latency = "20 ms"
///
/// [broker]
/// at = "lab"                   # with a device, by default the first, or on a machine of its own in a site
/// ```
///
/// A message's latency is that of the uplinks and the link it takes, added up; the slowest of them limits its rate. Two sites with uplinks need no link
/// between them.
#[derive(Debug, Clone, PartialEq)]
pub struct Testbed {
    /// What it describes.
    pub cluster: Cluster,
}

impl Testbed {
    /// Reads the file at `path`. Paths in it start at its directory.
    ///
    /// # Errors
    ///
    /// The first thing wrong: bad TOML, an unknown setting, unit or name, a figure out of range, a device that no link joins to the broker, or a
    /// profile that cannot be read.
    pub fn load(path: &Path) -> Result<Self, JobError> {
        let text = read(path, "give the path of a testbed file")?;
        let directory = path.parent().filter(|p| !p.as_os_str().is_empty());
        Self::parse(&path.display().to_string(), &text, directory.unwrap_or(Path::new(".")))
    }

    /// [`Self::load`] of a file's content. Messages call it `name`; relative paths start at `directory`.
    ///
    /// # Errors
    ///
    /// As [`Self::load`].
    pub fn parse(name: &str, text: &str, directory: &Path) -> Result<Self, JobError> {
        let root = reader::parse(name, text)?;
        let top = Section::top(&root);
        let (devices, sites, links) = (top.tables("device")?, top.tables("site")?, top.tables("link")?);
        let broker = top.section("broker")?;
        top.finish()?;
        if devices.is_empty() {
            let hint = "describe each machine in a table [[device]] with a name and a gpu";
            return Err(JobError::new(name, "there are no devices", hint));
        }
        let mut names = Names::default();
        let sites = sites.iter().zip(0..).map(|(s, i)| site(s, i, &mut names)).collect::<Result<Vec<_>, _>>()?;
        let mut profiles = Profiles { directory, files: BTreeMap::new(), devices: count(&devices)? };
        let mut machines: Vec<Device> = Vec::new();
        for section in &devices {
            device(section, &mut names, &mut profiles, &mut machines)?;
        }
        let mut lines = BTreeMap::new();
        for section in &links {
            link(section, &names, &mut lines)?;
        }
        let broker_at = match broker.text("at")? {
            Some(at) => Some(names.find(&broker, "at", at)?),
            // A link to it says that it has a machine of its own.
            None => lines.keys().any(|(a, b)| [*a, *b].contains(&Place::Broker)).then_some(Place::Broker),
        };
        broker.finish()?;
        let lines = lines.into_iter().map(|((from, to), link)| DirectLink { from, to, link }).collect();
        let cluster = Cluster::new(machines, sites, lines, broker_at)
            .map_err(|e| JobError::new(name, e.to_string(), "correct the testbed"))?;
        connected(&cluster, &devices)?;
        Ok(Self { cluster })
    }
}

/// The devices of a file that `fusionllm profile` wrote: tables `[[device]]` as a testbed has them, each with the threads it was measured with.
///
/// # Errors
///
/// As [`Testbed::load`].
pub fn load_profile(path: &Path) -> Result<Vec<(usize, Device)>, JobError> {
    let name = path.display().to_string();
    let root = reader::parse(&name, &read(path, "make it with `fusionllm profile -o DEVICE.toml`")?)?;
    let top = Section::top(&root);
    let sections = top.tables("device")?;
    top.finish()?;
    let mut devices = Vec::new();
    for section in &sections {
        let name = section.text("name")?.unwrap_or("device").to_owned();
        let threads = section.size("threads", 1)?.unwrap_or(1);
        let mut device = figures(section, name)?;
        device.backend = section.text("backend")?.map(str::to_owned);
        section.finish()?;
        devices.push((threads, device));
    }
    match devices.is_empty() {
        true => Err(JobError::new(name, "there are no devices", "make it with `fusionllm profile -o DEVICE.toml`")),
        false => Ok(devices),
    }
}

fn read(path: &Path, hint: &str) -> Result<String, JobError> {
    std::fs::read_to_string(path)
        .map_err(|e| JobError::new(path.display(), format!("the file cannot be read: {e}"), hint))
}

/// What links and devices may name.
#[derive(Default)]
struct Names(BTreeMap<String, Place>);

impl Names {
    fn add(&mut self, section: &Section<'_>, name: &str, place: Place) -> Result<(), JobError> {
        if name.is_empty() || name == "broker" || self.0.insert(name.to_owned(), place).is_some() {
            let message = match name {
                "" => "a name is empty".to_owned(),
                "broker" => "the name `broker` is taken".to_owned(),
                _ => format!("two devices or sites are called `{name}`"),
            };
            return Err(section.error("name", message, "give each device and site a name of its own"));
        }
        Ok(())
    }

    fn find(&self, section: &Section<'_>, key: &str, name: &str) -> Result<Place, JobError> {
        if name == "broker" {
            return Ok(Place::Broker);
        }
        self.0.get(name).copied().ok_or_else(|| {
            let known: Vec<&str> = self.0.keys().map(String::as_str).collect();
            let message = format!("there is no device or site `{name}`");
            section.error(key, message, suggest(name, &known, "there are"))
        })
    }
}

fn site(section: &Section<'_>, index: u32, names: &mut Names) -> Result<Site, JobError> {
    let name = required(section, "name", "a site needs a name", "write name = \"home\"")?.to_owned();
    names.add(section, &name, Place::Site(index))?;
    let inside = rate_and_latency(section)?;
    let uplink = section.section("uplink")?;
    let shared = rate_and_latency(&uplink)?;
    if section.has("uplink") && shared.is_none() {
        return Err(section.error("uplink", "an uplink needs a rate", "write uplink = { rate = \"8 Mbps\" }"));
    }
    uplink.finish()?;
    section.finish()?;
    Ok(Site { name, inside, uplink: shared })
}

fn required<'a>(section: &Section<'a>, key: &'static str, message: &str, hint: &str) -> Result<&'a str, JobError> {
    section.text(key)?.ok_or_else(|| section.missing(message, hint))
}

fn rate_and_latency(section: &Section<'_>) -> Result<Option<Link>, JobError> {
    let bandwidth = section.quantity("rate", &RATE, true)?;
    let latency = section.quantity("latency", &TIME, false)?;
    match (bandwidth, latency) {
        (Some(bandwidth), latency) => Ok(Some(Link { latency: latency.unwrap_or(0.0), bandwidth })),
        (None, Some(_)) => Err(section.error("latency", "a latency needs a rate beside it", "write rate = \"1 Gbps\"")),
        (None, None) => Ok(None),
    }
}

fn link(section: &Section<'_>, names: &Names, lines: &mut BTreeMap<(Place, Place), Link>) -> Result<(), JobError> {
    let form = "write between = [\"a\", \"b\"] for both directions, or from = \"a\" and to = \"b\" for one";
    let ends = match (section.texts("between")?.as_deref(), section.text("from")?, section.text("to")?) {
        (Some(&[a, b]), None, None) => {
            let (a, b) = (names.find(section, "between", a)?, names.find(section, "between", b)?);
            vec![(a, b), (b, a)]
        }
        (None, Some(a), Some(b)) => vec![(names.find(section, "from", a)?, names.find(section, "to", b)?)],
        (Some(_), None, None) => return Err(section.error("between", "a link has two ends", form)),
        _ => return Err(section.missing("a link needs its two ends", form)),
    };
    let link = rate_and_latency(section)?
        .ok_or_else(|| section.missing("a link needs a rate", "write rate = \"100 Mbps\" and latency = \"20 ms\""))?;
    section.finish()?;
    let key = if section.has("between") { "between" } else { "from" };
    for (from, to) in ends {
        if from == to {
            let hint = "name two different ends; what joins the devices of one site is the site's rate and latency";
            return Err(section.error(key, "both ends of a link are the same", hint));
        }
        if lines.insert((from, to), link).is_some() {
            return Err(section.error(key, "this link was given before", "leave one of the two out"));
        }
    }
    Ok(())
}

/// How many devices the file describes.
fn count(sections: &[Section<'_>]) -> Result<usize, JobError> {
    sections.iter().map(|s| Ok(s.size("count", 1)?.unwrap_or(1))).sum()
}

fn device(
    section: &Section<'_>,
    names: &mut Names,
    profiles: &mut Profiles<'_>,
    machines: &mut Vec<Device>,
) -> Result<(), JobError> {
    let name = required(section, "name", "a device needs a name", "write name = \"a\"")?.to_owned();
    let site = match section.text("site")? {
        None => None,
        Some(site) => match names.find(section, "site", site)? {
            Place::Site(s) => Some(s),
            _ => return Err(section.error("site", format!("`{site}` is no site"), "describe it in a table [[site]]")),
        },
    };
    let backend = section.text("backend")?.map(str::to_owned);
    let mut device = match section.text("profile")? {
        Some(file) => profiles.device(section, file, backend.as_deref(), name.clone())?,
        None => figures(section, name.clone())?,
    };
    if let Some(memory) = section.quantity("memory", &SIZE, true)? {
        device.memory = memory as u64;
    }
    device.site = site;
    device.backend = backend.or(device.backend);
    device.slowdown = section.number("slowdown", "at least 1", |x| x >= 1.0)?.unwrap_or(1.0);
    let count = section.size("count", 1)?;
    section.finish()?;
    for i in 0..count.unwrap_or(1) {
        let name = if count.is_some() { format!("{name}-{i}") } else { name.clone() };
        names.add(section, &name, Place::Device(machines.len() as u32))?;
        machines.push(Device { name, ..device.clone() });
    }
    Ok(())
}

/// A device's own figures: those of its GPU, or given outright.
fn figures(section: &Section<'_>, name: String) -> Result<Device, JobError> {
    let positive = |key| section.number(key, "above 0", |x| x > 0.0);
    if let Some(gpu) = section.text("gpu")? {
        let known = GPUS.iter().find(|g| g.name.eq_ignore_ascii_case(gpu)).ok_or_else(|| {
            let names: Vec<&str> = GPUS.iter().map(|g| g.name).collect();
            let lead = "or give tflops, memory_bandwidth and memory; the table has";
            section.error("gpu", format!("no GPU \"{gpu}\" is in the table"), suggest(gpu, &names, lead))
        })?;
        let efficiency = section.number("efficiency", "above 0 and at most 1", |x| x > 0.0 && x <= 1.0)?;
        return Ok(known.device(name, efficiency.unwrap_or(PRODUCTS)));
    }
    let tflops = positive("tflops")?;
    let convolution = positive("convolution_tflops")?;
    let bandwidth = section.quantity("memory_bandwidth", &RATE, true)?;
    let memory = section.quantity("memory", &SIZE, true)?;
    let (Some(tflops), Some(bandwidth), Some(memory)) = (tflops, bandwidth, memory) else {
        let hint = "write gpu = \"RTX 3080\", or tflops, memory_bandwidth and memory, or profile = \"DEVICE.toml\"";
        return Err(section.missing(&format!("nothing says how fast device `{name}` is"), hint));
    };
    let rates = Rates {
        matmul: tflops * 1e12,
        convolution: convolution.unwrap_or(tflops) * 1e12,
        memory: bandwidth,
        overhead: section.quantity("overhead", &TIME, false)?.unwrap_or(0.0),
    };
    let mut device = Device::new(name, rates, memory as u64);
    let curves = |key: &'static str| -> Result<Curves, JobError> {
        let mut curves = Curves::new();
        for (operator, points) in section.curves(key)? {
            let curve = Curve::new(points).ok_or_else(|| {
                let hint = "points are [work, seconds or bytes], work ascending, all above zero; measure again with `fusionllm profile`";
                section.error(key, format!("the points of operator `{operator}` make no curve"), hint)
            })?;
            curves.insert(operator, curve);
        }
        Ok(curves)
    };
    device.measured = curves("operators")?.into();
    device.scratch = curves("scratch")?.into();
    Ok(device)
}

/// Profiles that devices name, each file read once.
struct Profiles<'a> {
    directory: &'a Path,
    files: BTreeMap<PathBuf, Vec<(usize, Device)>>,
    /// Devices of the testbed.
    devices: usize,
}

impl Profiles<'_> {
    /// The measured device for this backend and number of threads; by default what falls to each device if they share the machine.
    fn device(
        &mut self,
        section: &Section<'_>,
        file: &str,
        backend: Option<&str>,
        name: String,
    ) -> Result<Device, JobError> {
        let path = self.directory.join(file);
        if !self.files.contains_key(&path) {
            self.files.insert(path.clone(), load_profile(&path)?);
        }
        let measured = self.files.get(&path).map_or(&[][..], Vec::as_slice);
        let first = measured.first().and_then(|(_, d)| d.backend.as_deref());
        let backend = backend.or(first);
        let fitting: Vec<&(usize, Device)> = measured.iter().filter(|(_, d)| d.backend.as_deref() == backend).collect();
        let most = fitting.iter().map(|(threads, _)| *threads).max().unwrap_or(1);
        let wanted = section.size("threads", 1)?;
        let found = match wanted {
            Some(n) => fitting.iter().find(|(threads, _)| *threads == n),
            None => {
                let share = (most / self.devices.max(1)).max(1);
                fitting.iter().filter(|(threads, _)| *threads <= share).max_by_key(|(threads, _)| *threads)
            }
        };
        match found {
            Some((_, device)) => Ok(Device { name, ..device.clone() }),
            None => {
                let with = backend.map(|b| format!(" of backend {b}")).unwrap_or_default();
                let message = format!("{file} has no device{with} with {} thread(s)", wanted.unwrap_or(1));
                let there: Vec<String> = measured
                    .iter()
                    .map(|(threads, d)| format!("{} with {threads}", d.backend.as_deref().unwrap_or("any backend")))
                    .collect();
                Err(section.error("profile", message, format!("it has {}", there.join(", "))))
            }
        }
    }
}

/// Every device exchanges inputs and verdicts with the broker.
fn connected(cluster: &Cluster, sections: &[Section<'_>]) -> Result<(), JobError> {
    let mut first = 0;
    for section in sections {
        let count = section.size("count", 1)?.unwrap_or(1);
        for i in first..first + count {
            let peer = PeerId(i as u32);
            for (from, to) in [(PeerId::BROKER, peer), (peer, PeerId::BROKER)] {
                if cluster.route(from, to).is_none() {
                    let message = format!("no link leads from {} to {}", cluster.name(from), cluster.name(to));
                    let hint = "join their sites or the devices themselves by a [[link]], give both sites an uplink, or say where the broker stands: [broker] at = \"NAME\"";
                    return Err(section.error("name", message, hint));
                }
            }
        }
        first += count;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;
    use crate::printed;

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
backend = "candle-cpu"

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
        printed(testbed(&HOME_AND_LAB.replacen(from, to, 1)).unwrap_err())
    }

    #[test]
    fn a_testbed_says_what_joins_what() {
        let c = testbed(HOME_AND_LAB).unwrap();
        let names: Vec<&str> = c.devices().iter().map(|d| d.name.as_str()).collect();
        assert_eq!(names, ["home-0", "home-1", "lab-0"]);
        assert_eq!(c.link(PeerId(0), PeerId(1)), Some(Link { latency: 0.0002, bandwidth: 125e6 }));
        assert_eq!(c.link(PeerId(0), PeerId(2)), Some(Link { latency: 0.025, bandwidth: 1e6 }));
        assert_eq!(c.link(PeerId(2), PeerId(1)), Some(Link { latency: 0.02, bandwidth: 125e3 }), "a line of its own");
        let [home, _, lab] = c.devices() else { panic!("three devices") };
        assert_eq!((home.slowdown, home.memory, home.backend.as_deref()), (2.0, 10 << 30, None));
        assert!((home.rates.matmul - 0.6 * 29.8e12).abs() < 1.0);
        let expected = Rates { matmul: 10e12, convolution: 10e12, memory: 500e9, overhead: 4e-3 };
        assert_eq!((lab.rates, lab.backend.as_deref()), (expected, Some("candle-cpu")));
        assert_eq!(c.broker(), Place::Site(1));
    }

    #[test]
    fn mistakes_are_shown_where_they_stand() {
        assert_snapshot!(error("gpu = \"RTX 3080\"", "gpu = \"RTX 308\""), @r#"
        t.toml:6:7: no GPU "RTX 308" is in the table
        hint: did you mean `RTX 3080`? or give tflops, memory_bandwidth and memory; the table has GTX 1080 Ti, P100, V100, T4, RTX 2070, RTX 2080, RTX 2080 Ti, RTX 3060, RTX 3070, RTX 3080, RTX 3090, A10, A40, RTX A6000, A100 40GB, A100 80GB, RTX 4060, RTX 4070, RTX 4080, RTX 4090, L4, L40S, RTX 5090, H100 PCIe, H100 SXM, H200, RX 7900 XTX, MI250X die, MI300X
        "#);
        assert_snapshot!(error("rate = \"1 Gbps\"", "rate = \"1 Gpbs\""), @r#"
        t.toml:20:8: there is no unit "Gpbs" of a rate
        hint: write rate = "8 Mbps"; the units are bps, kbps, Mbps, Gbps, Tbps, kB/s, MB/s, GB/s, TB/s
        "#);
        assert_snapshot!(error("rate = \"8 Mbps\"", "rate = \"0 Mbps\""), @r#"
        t.toml:22:19: `site.uplink.rate` is 0 Mbps
        hint: it must be above zero
        "#);
        assert_snapshot!(error("rate = \"100 Mbps\"", "rate = 100"), @r#"
        t.toml:30:8: `link.rate` needs a unit
        hint: write rate = "8 Mbps"; the units are bps, kbps, Mbps, Gbps, Tbps, kB/s, MB/s, GB/s, TB/s
        "#);
        assert_snapshot!(error("[\"home\", \"lab\"]", "[\"hone\", \"lab\"]"), @r#"
        t.toml:29:11: there is no device or site `hone`
        hint: did you mean `home`? there are home, home-0, home-1, lab, lab-0
        "#);
        assert_snapshot!(error("[\"home\", \"lab\"]", "[\"home\", \"home\"]"), @r#"
        t.toml:29:11: both ends of a link are the same
        hint: name two different ends; what joins the devices of one site is the site's rate and latency
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
        hint: did you mean `count`? [device] takes count, name, site, backend, profile, gpu, efficiency, memory, slowdown
        "#);
        assert_snapshot!(error("from = \"lab\"\n", ""), @r#"
        t.toml:33:1: a link needs its two ends
        hint: write between = ["a", "b"] for both directions, or from = "a" and to = "b" for one
        "#);
        assert_snapshot!(error("[[device]]", "[device]"), @r#"
        t.toml:9:3: duplicate key
        hint: the file is TOML: sections as [train], settings as name = value, text in quotes
        "#);
        assert_snapshot!(printed(testbed("").unwrap_err()), @r#"
        t.toml: there are no devices
        hint: describe each machine in a table [[device]] with a name and a gpu
        "#);
    }

    #[test]
    fn a_device_out_of_reach_is_named() {
        assert_snapshot!(error("between = [\"home\", \"lab\"]", "from = \"home\"\nto = \"lab\""), @r#"
        t.toml:3:8: no link leads from broker to home-0
        hint: join their sites or the devices themselves by a [[link]], give both sites an uplink, or say where the broker stands: [broker] at = "NAME"
        "#);
    }

    #[test]
    fn a_profile_gives_each_device_its_share_of_the_machine() {
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
        assert_eq!(e.message, "D.toml has no device of backend cpu with 3 thread(s)");
        assert_eq!(e.hint, "it has cpu with 1, cpu with 4");
    }
}
