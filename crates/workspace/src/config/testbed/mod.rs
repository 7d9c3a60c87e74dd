//! The testbed file: devices, sites and the links between them.

mod known;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

pub use known::Known;

use fusionllm_graph::units::counted;
use fusionllm_plan::{Card, Cluster, Curve, Curves, Device, DirectLink, Disk, Link, Place, Processor, Rates, Site};
use fusionllm_program::PeerId;

use super::files::Files;
use super::gpus;
use super::quantity::{RATE, TIME};
use super::reader::{self, JobError, Section, suggest};

/// The content of a testbed file.
///
/// ```toml
/// [[device]]
/// name = "home"                # with `count = 3`: home-0, home-1, home-2
/// count = 3
/// site = "home"
/// network = "10 Gbps"          # its network card, in each direction; by default as fast as its site inside
/// host = "box"                 # devices of one host share its card, and need no link between them
/// processor = { name = "box", cores = 8 }         # shared by all devices that name it
/// gpu = "RTX 3080"             # or tflops, memory_bandwidth and memory; or profile = "DEVICE.toml"
/// efficiency = 0.6             # fraction of its peak that the GPU reaches in matrix products
/// slowdown = 2                 # operators take twice as long
/// backend = "cpu"              # of its peer
///
/// [[site]]
/// name = "home"
/// rate = "1 Gbps"              # between any two of its devices, and of their network cards, in each direction
/// latency = "0.2 ms"
/// uplink = { rate = "8 Mbps", latency = "20 ms" }   # shared by all traffic that leaves; another for all that enters
///
/// [[link]]
/// between = ["home", "lab"]    # sites or devices; or from = and to = for one direction
/// rate = "100 Mbps"
/// latency = "20 ms"
///
/// [broker]
/// at = "lab"                   # a device, by default the first; or a site, for a machine of its own there
/// network = "1 Gbps"           # the network card of a machine of its own
/// ```
///
/// All devices of a site share its uplink, and a link of the site. A device's messages share its network card. The
/// latency of a message is the sum over the uplinks and the link on its route. The slowest line on the route limits its
/// rate. Two sites with uplinks need no link between them.
#[derive(Debug, Clone, PartialEq)]
pub struct Testbed {
    /// The devices and links that the file describes.
    pub cluster: Cluster,
}

impl Testbed {
    /// Reads the file at `path`. Relative paths in it start at its directory.
    ///
    /// # Errors
    ///
    /// The first problem: bad TOML, an unknown setting, unit or name, a value out of range, a device without a route
    /// to the broker, or a profile that cannot be read.
    pub fn load(path: &Path) -> Result<Self, JobError> {
        let (text, directory) = read(path, "give the path of a testbed file")?;
        Self::parse(&path.display().to_string(), &text, directory)
    }

    /// Reads a testbed from `text`. Messages call it `name`, and relative paths start at `directory`.
    ///
    /// # Errors
    ///
    /// The same as those of [`Self::load`].
    pub fn parse(name: &str, text: &str, directory: &Path) -> Result<Self, JobError> {
        Ok(Self { cluster: Self::parts(name, text, directory, true)?.cluster })
    }

    /// Reads a testbed. If it must be `whole`, every device needs a speed and a route to the broker.
    fn parts(name: &str, text: &str, directory: &Path, whole: bool) -> Result<Parts, JobError> {
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
        let (mut machines, mut timed) = (Vec::new(), BTreeSet::new());
        for section in &devices {
            let added = machines.len();
            if device(section, &mut names, &mut profiles, &mut machines, whole)? {
                timed.extend(machines[added..].iter().map(|d: &Device| d.name.clone()));
            }
        }
        let mut direct = BTreeMap::new();
        for section in &links {
            link(section, &names, &mut direct)?;
        }
        let broker_at = match broker.name_among("at", &names.all(), "there are")? {
            Some(_) if !whole => {
                let hint = "leave `at` out; links to `broker` may be given";
                return Err(broker.error("at", "the broker stands where it was started", hint));
            }
            Some(at) => Some(names.find(&broker, "at", at)?),
            // A link to the broker means that it has a machine of its own.
            None => {
                let linked = direct.keys().any(|(a, b)| [*a, *b].contains(&Place::Broker));
                (linked || !whole).then_some(Place::Broker)
            }
        };
        let broker_network = card(&broker)?;
        broker.finish()?;
        let direct = direct.into_iter().map(|((from, to), link)| DirectLink { from, to, link }).collect();
        let cluster = Cluster::new(machines, sites, direct, broker_at)
            .and_then(|c| c.with_broker_network(broker_network))
            .map_err(|e| JobError::new(name, e.to_string(), "correct the testbed"))?;
        if whole {
            connected(&cluster, &devices)?;
        }
        Ok(Parts { cluster, timed })
    }
}

/// The network card that a table declares.
fn card(section: &Section) -> Result<Card, JobError> {
    Ok(section.quantity("network", &RATE, true)?.map_or(Card::default(), Card::new))
}

/// The content of a testbed file.
struct Parts {
    cluster: Cluster,
    /// The devices whose speed the file says. Other devices have rates of 1.
    timed: BTreeSet<String>,
}

/// Reads the devices of a file that `fusionllm profile` wrote, each with its number of threads. The file has tables
/// `[[device]]` like a testbed.
///
/// # Errors
///
/// The same as those of [`Testbed::load`].
pub fn load_profile(path: &Path) -> Result<Vec<(usize, Device)>, JobError> {
    let name = path.display().to_string();
    let root = reader::parse(&name, &read(path, "make it with `fusionllm profile -o DEVICE.toml`")?.0)?;
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

/// The text of a file, and its directory.
fn read<'p>(path: &'p Path, hint: &str) -> Result<(String, &'p Path), JobError> {
    let text = reader::read_text(path, "the file", hint)?;
    let directory = path.parent().filter(|p| !p.as_os_str().is_empty());
    Ok((text, directory.unwrap_or(Path::new("."))))
}

/// The devices and sites by name.
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
            let message = format!("`{}`: {message}", section.full_name("name"));
            return Err(section.error("name", message, "give each device and site a name of its own"));
        }
        Ok(())
    }

    fn all(&self) -> Vec<&str> {
        self.0.keys().map(String::as_str).collect()
    }

    fn sites(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter(|(_, place)| matches!(place, Place::Site(_))).map(|(name, _)| name.as_str())
    }

    fn find(&self, section: &Section<'_>, key: &str, name: &str) -> Result<Place, JobError> {
        if name == "broker" {
            return Ok(Place::Broker);
        }
        self.0.get(name).copied().ok_or_else(|| {
            let message = format!("`{}`: there is no device or site `{name}`", section.full_name(key));
            section.error(key, message, suggest(name, &self.all(), "there are"))
        })
    }
}

fn site(section: &Section<'_>, index: u32, names: &mut Names) -> Result<Site, JobError> {
    let name = required(section, "name", "a site needs a name", "write name = \"home\"")?.to_owned();
    names.add(section, &name, Place::Site(index))?;
    let inside = rate_and_latency(section)?;
    let uplink = shared_link(section, "uplink")?;
    let downlink = shared_link(section, "downlink")?;
    if downlink.is_some() && uplink.is_none() {
        let reason = "`site.downlink`: a site with a downlink needs an uplink";
        return Err(section.error("downlink", reason, "write uplink = { rate = \"8 Mbps\" } beside it"));
    }
    section.finish()?;
    Ok(Site { name, inside, uplink, downlink })
}

fn shared_link(section: &Section<'_>, name: &'static str) -> Result<Option<Link>, JobError> {
    let table = section.section(name)?;
    let link = rate_and_latency(&table)?;
    if section.has(name) && link.is_none() {
        let hint = format!("write {name} = {{ rate = \"8 Mbps\" }}");
        table.misspelt(&["rate"])?;
        return Err(section.error(name, format!("`site.{name}` needs a rate"), hint));
    }
    table.finish()?;
    Ok(link)
}

fn required<'a>(section: &Section<'a>, key: &'static str, message: &str, hint: &str) -> Result<&'a str, JobError> {
    section.text(key)?.ok_or_else(|| section.missing(&[key], message, hint))
}

fn rate_and_latency(section: &Section<'_>) -> Result<Option<Link>, JobError> {
    let bandwidth = section.quantity("rate", &RATE, true)?;
    let latency = section.quantity("latency", &TIME, false)?;
    match (bandwidth, latency) {
        (Some(bandwidth), latency) => Ok(Some(Link { latency: latency.unwrap_or(0.0), bandwidth })),
        (None, Some(_)) => {
            section.misspelt(&["rate"])?;
            let message = format!("`{}` needs a rate beside it", section.full_name("latency"));
            Err(section.error("latency", message, "write rate = \"1 Gbps\""))
        }
        (None, None) => Ok(None),
    }
}

fn link(section: &Section<'_>, names: &Names, links: &mut BTreeMap<(Place, Place), Link>) -> Result<(), JobError> {
    let form = "write between = [\"a\", \"b\"] for both directions, or from = \"a\" and to = \"b\" for one";
    let end = |key| section.name_among(key, &names.all(), "there are");
    let ends = match (section.texts("between", form)?.as_deref(), end("from")?, end("to")?) {
        (Some(&[a, b]), None, None) => {
            let (a, b) = (names.find(section, "between", a)?, names.find(section, "between", b)?);
            vec![(a, b), (b, a)]
        }
        (None, Some(a), Some(b)) => vec![(names.find(section, "from", a)?, names.find(section, "to", b)?)],
        (Some(_), None, None) => return Err(section.error("between", "`link.between`: a link has two ends", form)),
        _ => return Err(section.missing(&["between", "from", "to"], "a link needs its two ends", form)),
    };
    let link = rate_and_latency(section)?.ok_or_else(|| {
        section.missing(&["rate"], "a link needs a rate", "write rate = \"100 Mbps\" and latency = \"20 ms\"")
    })?;
    section.finish()?;
    let key = if section.has("between") { "between" } else { "from" };
    for (from, to) in ends {
        if from == to {
            let hint = "name two different ends; rate and latency of a site are those between its own devices";
            return Err(section.error(key, format!("`link.{key}`: both ends of a link are the same"), hint));
        }
        if links.insert((from, to), link).is_some() {
            let message = format!("`link.{key}`: this link was given before");
            return Err(section.error(key, message, "leave one of the two out"));
        }
    }
    Ok(())
}

/// The most devices of one testbed. No planner can place a model on more, and each takes memory.
const MAX_DEVICES: usize = 4096;

/// How many devices the file describes.
fn count(sections: &[Section<'_>]) -> Result<usize, JobError> {
    let mut devices = 0;
    for section in sections {
        let others = devices;
        devices = section.part("count", 1)?.unwrap_or(1).saturating_add(others);
        if devices > MAX_DEVICES {
            let hint = match MAX_DEVICES - others {
                0 => format!("a testbed has {MAX_DEVICES} devices or fewer"),
                room => format!("it must be at most {room}: a testbed has {MAX_DEVICES} devices or fewer"),
            };
            return Err(section.error("count", format!("`device.count` makes {devices} devices or more"), hint));
        }
    }
    Ok(devices)
}

/// Adds the devices of a table. Returns whether it says how fast they are. If `whole`, it must.
fn device(
    section: &Section<'_>,
    names: &mut Names,
    profiles: &mut Profiles<'_>,
    machines: &mut Vec<Device>,
    whole: bool,
) -> Result<bool, JobError> {
    let name = required(section, "name", "a device needs a name", "write name = \"a\"")?.to_owned();
    let sites: Vec<String> = names.sites().map(str::to_owned).collect();
    let sites: Vec<&str> = sites.iter().map(String::as_str).collect();
    let site = match section.name_among("site", &sites, "the sites are")? {
        None => None,
        Some(site) => match names.0.get(site) {
            Some(Place::Site(s)) => Some(*s),
            _ => {
                let new = format!("describe it: write [[site]] on a line, and name = \"{site}\" below");
                let hint = if sites.is_empty() { new } else { suggest(site, &sites, "the sites are") };
                return Err(section.error("site", format!("`device.site`: there is no site \"{site}\""), hint));
            }
        },
    };
    let backend = section.text("backend")?.map(str::to_owned);
    let timed = whole || ["profile", "gpu", "tflops", "memory_bandwidth"].into_iter().any(|key| section.has(key));
    let mut device = match Files::from(profiles.directory).one(section, "profile")? {
        Some(path) => profiles.device(section, path, backend.as_deref(), name.clone())?,
        None if timed => figures(section, name.clone())?,
        None => Device::new(name.clone(), Rates { matmul: 1.0, convolution: 1.0, memory: 1.0, overhead: 0.0 }, 0),
    };
    if let Some(memory) = section.bytes("memory")? {
        device.memory = memory;
    }
    device.disk = section.quantity("disk", &RATE, true)?.map_or(device.disk, Disk::new);
    device.host_link = section.quantity("host_link", &RATE, true)?.or(device.host_link);
    device.site = site;
    device.network = card(section)?;
    device.host = section.text("host")?.map(str::to_owned);
    device.processor = processor(section)?;
    device.backend = backend.or(device.backend);
    device.slowdown = section.number("slowdown", "at least 1", |x| x >= 1.0)?.unwrap_or(1.0);
    let count = section.size("count", 1)?;
    section.finish()?;
    for i in 0..count.unwrap_or(1) {
        let name = if count.is_some() { format!("{name}-{i}") } else { name.clone() };
        names.add(section, &name, Place::Device(machines.len() as u32))?;
        machines.push(Device { name, ..device.clone() });
    }
    Ok(timed)
}

/// The processor that a device shares with others.
fn processor(section: &Section<'_>) -> Result<Option<Processor>, JobError> {
    let table = section.section("processor")?;
    let name = table.text("name")?.map(str::to_owned);
    let cores = table.size("cores", 1)?;
    let busy =
        table.number("busy", "above 0 and at most `cores`", |x| x > 0.0 && cores.is_none_or(|c| x <= c as f64))?;
    let crowded = table.number("crowded", "at least 1", |x| x >= 1.0)?;
    let crowd = table.number("crowd", "above 0", |x| x > 0.0)?;
    table.finish()?;
    let (Some(name), Some(cores)) = (name, cores) else {
        return match section.has("processor") {
            true => Err(table.missing(
                &["name", "cores"],
                "a processor has a name and cores",
                "write processor = { name = \"pc\", cores = 8 } for each device that computes on it",
            )),
            false => Ok(None),
        };
    };
    let cores = cores as f64;
    let (busy, crowded, crowd) = (busy.unwrap_or(1.0), crowded.unwrap_or(1.0), crowd.unwrap_or(cores));
    Ok(Some(Processor { name, cores, busy, crowded, crowd }))
}

/// The speed and memory of a device: from the table of GPUs, or from its settings.
fn figures(section: &Section<'_>, name: String) -> Result<Device, JobError> {
    if let Some(written) = section.name_among("gpu", &[gpus::EXAMPLE], gpus::LEAD)? {
        let gpu =
            gpus::find(written).map_err(|e| section.error("gpu", format!("`device.gpu`: {}", e.message), e.hint))?;
        let efficiency = section.number("efficiency", "above 0 and at most 1", |x| x > 0.0 && x <= 1.0)?;
        let memory = match (gpu.memory(), section.bytes("memory")?) {
            (_, Some(given)) => given,
            (Some(own), None) => own,
            (None, None) => {
                section.misspelt(&["memory"])?;
                let message = format!("`device.gpu`: {} shares the memory of its machine", gpu.name);
                return Err(section.error("gpu", message, "write memory = \"16 GiB\" beside it"));
            }
        };
        return Ok(gpu.device(name, efficiency.unwrap_or(gpus::PRODUCTS), memory));
    }
    let tflops = section.teraflops("tflops")?;
    let convolution = section.teraflops("convolution_tflops")?;
    let bandwidth = section.quantity("memory_bandwidth", &RATE, true)?;
    let memory = section.bytes("memory")?;
    let (Some(tflops), Some(bandwidth), Some(memory)) = (tflops, bandwidth, memory) else {
        let hint = "write gpu = \"RTX 3080\", or tflops, memory_bandwidth and memory, or profile = \"DEVICE.toml\"";
        let keys = ["tflops", "memory_bandwidth", "memory", "gpu", "profile"];
        return Err(section.missing(&keys, &format!("nothing says how fast device `{name}` is"), hint));
    };
    let rates = Rates {
        matmul: tflops * 1e12,
        convolution: convolution.unwrap_or(tflops) * 1e12,
        memory: bandwidth,
        overhead: section.quantity("overhead", &TIME, false)?.unwrap_or(0.0),
    };
    let mut device = Device::new(name, rates, memory);
    let curves = |key: &'static str| -> Result<Curves, JobError> {
        let mut curves = Curves::new();
        for (operator, points) in section.curves(key)? {
            let curve = Curve::new(points).ok_or_else(|| {
                let hint = "points are [work, seconds or bytes], work ascending, all above zero; measure again with `fusionllm profile`";
                section.error(key, format!("`device.{key}`: the points of operator `{operator}` make no curve"), hint)
            })?;
            curves.insert(operator, curve);
        }
        Ok(curves)
    };
    device.measured = curves("operators")?.into();
    device.scratch = curves("scratch")?.into();
    Ok(device)
}

/// The profiles that devices name. Each file is read once.
struct Profiles<'a> {
    directory: &'a Path,
    files: BTreeMap<PathBuf, Vec<(usize, Device)>>,
    /// The number of devices in the testbed.
    devices: usize,
}

impl Profiles<'_> {
    /// The measured device for this backend and number of threads. By default, the devices share the threads of one
    /// machine equally.
    fn device(
        &mut self,
        section: &Section<'_>,
        path: PathBuf,
        backend: Option<&str>,
        name: String,
    ) -> Result<Device, JobError> {
        let file = section.text("profile")?.unwrap_or_default();
        if !self.files.contains_key(&path) {
            self.files.insert(path.clone(), load_profile(&path)?);
        }
        let measured = self.files.get(&path).map_or(&[][..], Vec::as_slice);
        let first = measured.first().and_then(|(_, d)| d.backend.as_deref());
        let backend = backend.or(first);
        let fitting: Vec<&(usize, Device)> = measured.iter().filter(|(_, d)| d.backend.as_deref() == backend).collect();
        let most = fitting.iter().map(|(threads, _)| *threads).max().unwrap_or(1);
        let wanted = section.part("threads", 1)?;
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
                let message = format!("{file} has no device{with} with {}", counted(wanted.unwrap_or(1), "thread"));
                let there: Vec<String> = measured
                    .iter()
                    .map(|(threads, d)| format!("{} with {threads}", d.backend.as_deref().unwrap_or("any backend")))
                    .collect();
                let key = if wanted.is_some() { "threads" } else { "profile" };
                let hint = match fitting.iter().map(|(threads, _)| *threads).max() {
                    Some(threads) => format!("write threads = {threads}; it has {}", there.join(", ")),
                    None => format!("it has {}", there.join(", ")),
                };
                Err(section.error(key, format!("`device.{key}`: {message}"), hint))
            }
        }
    }
}

/// Checks that every device has a route to the broker and back, because they exchange inputs and verdicts.
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
mod tests;
