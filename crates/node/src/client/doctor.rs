//! Examines this machine and its network as a run would use them, and says what does not work.

use std::borrow::Cow;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fusionllm_backend::machine::memory;
use fusionllm_backend::{self as backend, BackendError};
use fusionllm_graph::Advice;
use fusionllm_plan::{Link, Rates};
use fusionllm_protocol::{FromPeer, ToPeer, VERSION};
use fusionllm_transport::{ConnectError, Endpoint, EndpointOptions, Lanes, Relay, Ticket};
use fusionllm_workbench::profile::measure_briefly;
use serde::Serialize;

use crate::NodeError;
use crate::machine::disk;
use crate::net::probe::{Probed, SETTLING, probe_on};
use crate::net::reach::reach;
use crate::net::{self, printable};

/// The time in which the relay has to answer.
const RELAY_TIMEOUT: Duration = Duration::from_secs(10);

/// The time in which the broker has to answer the visit.
const WELCOME_TIMEOUT: Duration = Duration::from_secs(10);

/// Seconds of sending in one direction that suffice to measure the rate, as when a run begins.
const PATIENCE_S: f64 = 0.3;

/// Clocks that differ by less than this do no harm.
const MAX_CLOCK_DIFFERENCE_S: f64 = 60.0;

/// Less free memory or disk than this suffices for examples only.
const LITTLE: u64 = 1 << 30;

/// The advice about a router that gives each peer another port.
const OPEN_NAT: &str = "if the router lets you, switch its NAT to \"full cone\" or \"endpoint-independent\"";

/// The ticket or relay with which this machine is examined.
pub struct DoctorOptions {
    /// The ticket of a run that this machine may join.
    pub ticket: Option<Ticket>,
    /// The relay to try if there is no ticket.
    pub relay: Relay,
}

/// The findings of an examination.
#[derive(Debug, Serialize)]
pub struct Findings {
    /// The addresses of this machine's interfaces, with the port of this examination.
    pub addresses: Vec<SocketAddr>,
    /// The addresses at which others see this machine, if they could be asked.
    pub seen_as: Vec<SocketAddr>,
    /// The router between this machine and the others, if there is one.
    pub nat: Nat,
    /// The relay that was tried, and whether it answers.
    pub relay: Option<RelayFindings>,
    /// The broker of the ticket; `None` without a ticket or if it cannot be reached.
    pub broker: Option<BrokerFindings>,
    /// The backends of this program, and workers for accelerators.
    pub backends: Vec<BackendFindings>,
    /// Bytes of free memory, where the system says it.
    pub memory: Option<u64>,
    /// The limit on this process that keeps it from more memory, if it is not the machine's own memory.
    pub memory_limit: Option<String>,
    /// Bytes that may be written in the working directory, where the system says it.
    pub disk: Option<u64>,
    /// The problems that were found.
    pub problems: Vec<Problem>,
}

/// The translation of this machine's addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Nat {
    /// Nothing: others see the machine's own address.
    None,
    /// A router that shows the same address and port to everybody. Hole punching works.
    SamePort,
    /// A router that shows another port to each. Hole punching works only towards machines with an open address.
    PortPerPeer,
    /// A router, which only one other machine has seen.
    Unclear,
    /// No other machine has seen this one.
    Unknown,
}

/// A relay that was tried.
#[derive(Debug, Serialize)]
pub struct RelayFindings {
    /// The relay's URL without the secret; `None` if none of the public relays answered.
    pub url: Option<String>,
    /// Whether it lets this machine in.
    pub works: bool,
}

/// A broker that was visited.
#[derive(Debug, Serialize)]
pub struct BrokerFindings {
    /// Whether packets go through the relay.
    pub relayed: bool,
    /// The link to the broker: seconds and bytes per second.
    pub to: Link,
    /// The link from the broker.
    pub from: Link,
    /// Seconds by which this machine's clock is ahead of the broker's, up to half a round trip.
    pub clock_ahead_s: f64,
}

/// A backend that was tried.
#[derive(Debug, Serialize)]
pub struct BackendFindings {
    /// The backend's name.
    pub name: String,
    /// The device's name; `None` if the backend does not work.
    pub device: Option<String>,
    /// Attained rates.
    pub rates: Option<Rates>,
}

/// Something that does not work.
#[derive(Debug, Serialize)]
pub struct Problem {
    /// A description of the problem.
    pub what: String,
    /// Advice about it.
    pub advice: String,
}

/// Examines everything. A thing that does not work is a [`Problem`], not an error.
///
/// # Errors
///
/// No endpoint can be opened.
pub async fn examine(options: DoctorOptions) -> Result<Findings, NodeError> {
    let DoctorOptions { ticket, relay } = options;
    let relay = ticket.as_ref().map_or(relay, Ticket::relay);
    let endpoint = Endpoint::bind(EndpointOptions { relay: relay.clone(), ..EndpointOptions::new() }).await?;
    let mut problems = Vec::new();
    let relay = try_relay(&endpoint, &relay, &mut problems).await;
    let translated = endpoint.translated();
    let mut addresses = endpoint.addr().addrs;
    addresses.retain(|addr| !translated.contains(addr));

    let (mut broker, mut seen_as) = (None, translated.clone());
    if let Some(ticket) = &ticket {
        match visit(&endpoint, ticket).await {
            Ok((findings, seen)) => {
                seen_as.extend(seen.filter(|addr| !seen_as.contains(addr)));
                broker = Some((findings, seen));
            }
            Err(e) => problems.push(unreachable(&e, relay.is_some())),
        }
    }
    let nat = nat(&addresses, &translated, broker.as_ref().and_then(|(_, seen)| *seen));
    let broker = broker.map(|(findings, _)| findings);
    endpoint.close("the examination is over").await;
    problems.extend(broker.as_ref().map_or(Vec::new(), |broker| doubts(broker, nat)));
    if nat == Nat::PortPerPeer && broker.as_ref().is_none_or(|broker| !broker.relayed) {
        let what = "the router shows another port to each machine, so others behind routers reach this one only through a \
                    relay";
        problems.push(Problem { what: what.into(), advice: OPEN_NAT.into() });
    }
    let tried = tokio::task::spawn_blocking(try_backends).await.map_err(|e| NodeError::State(e.to_string()))?;
    let (backends, failures) = tried;
    problems.extend(failures);
    let (room, disk) = (memory::room(), disk::available(Path::new(".")));
    let memory = room.as_ref().map(|room| room.bytes);
    let memory_limit = room.and_then(|room| room.limit).map(|limit| limit.to_string());
    let more = match &memory_limit {
        Some(limit) => format!("raise {limit}"),
        None => "close other programs, or join with a smaller share: --memory".to_owned(),
    };
    problems.extend(shortage("memory", memory, &more));
    problems.extend(shortage(
        "disk",
        disk,
        "free some space if this machine is to be a broker, which writes checkpoints",
    ));
    Ok(Findings { addresses, seen_as, nat, relay, broker, backends, memory, memory_limit, disk, problems })
}

async fn try_relay(endpoint: &Endpoint, relay: &Relay, problems: &mut Vec<Problem>) -> Option<RelayFindings> {
    if *relay == Relay::None {
        return None;
    }
    let online = endpoint.online(RELAY_TIMEOUT).await;
    if let Err(e) = &online {
        problems.push(Problem { what: e.to_string(), advice: e.hint().to_owned() });
    }
    let url = endpoint.addr().relay.map(|url| url.to_string());
    Some(RelayFindings { url, works: online.is_ok() })
}

/// Visits the broker. Returns also the address that it sees.
async fn visit(endpoint: &Endpoint, ticket: &Ticket) -> Result<(BrokerFindings, Option<SocketAddr>), NodeError> {
    let (connection, mut lanes) = reach(endpoint, &ticket.addr, |_| ()).await?;
    // Through a relay, the broker does not see an address.
    connection.settled(SETTLING).await;
    let begun = now_s();
    let secret = *ticket.secret.as_bytes();
    net::send_control(&connection, &FromPeer::Visit { version: VERSION, secret }).await?;
    let (seen, clock_s) = welcome(&mut lanes).await?;
    let clock_ahead_s = (begun + now_s()) / 2.0 - clock_s;
    let Probed { there, back, relayed } = probe_on(&connection, &mut lanes, PATIENCE_S).await?;
    connection.close("");
    Ok((BrokerFindings { relayed, to: there, from: back, clock_ahead_s }, seen))
}

async fn welcome(lanes: &mut Lanes) -> Result<(Option<SocketAddr>, f64), NodeError> {
    let answer = tokio::time::timeout(WELCOME_TIMEOUT, net::next_control(&mut lanes.control)).await;
    match answer.map_err(|_| NodeError::Network("the broker did not answer the visit".into()))?? {
        Some(ToPeer::Welcome { seen_as, clock_s }) if clock_s.is_finite() => Ok((seen_as, clock_s)),
        Some(ToPeer::Refused { reason }) => Err(NodeError::Refused(printable(&reason))),
        _ => Err(NodeError::Protocol("the broker did not answer the visit as a broker".into())),
    }
}

fn now_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// Concludes from addresses what kind of router there is: those of this machine's interfaces, those that the relay
/// sees, and the one that the broker sees.
fn nat(own: &[SocketAddr], by_relay: &[SocketAddr], by_broker: Option<SocketAddr>) -> Nat {
    let is_own = |addr: &SocketAddr| own.iter().any(|own| own.ip() == addr.ip()) || addr.ip().is_loopback();
    let at_broker = by_broker.filter(|addr| !is_own(addr));
    let comparable: Vec<_> =
        by_relay.iter().filter(|addr| at_broker.is_some_and(|b| b.is_ipv4() == addr.is_ipv4())).collect();
    match (at_broker, comparable.is_empty()) {
        (Some(seen), false) if comparable.contains(&&seen) => Nat::SamePort,
        (Some(_), false) => Nat::PortPerPeer,
        (Some(_), true) => Nat::Unclear,
        (None, _) if !by_relay.is_empty() => Nat::Unclear,
        (None, _) if by_broker.is_some() => Nat::None,
        (None, _) => Nat::Unknown,
    }
}

fn unreachable(e: &NodeError, has_relay: bool) -> Problem {
    let advice = match e {
        NodeError::BrokerUnreachable(ConnectError::NoAnswer { obstacle: Some(obstacle), .. }) => obstacle,
        NodeError::BrokerUnreachable(ConnectError::NoAnswer { .. }) if has_relay => {
            "check that the broker still runs and uses the relay of the ticket"
        }
        NodeError::BrokerUnreachable(ConnectError::NoAnswer { .. }) => {
            "check that the broker still runs. If it stands behind a router, forward a UDP port to it and start it with \
             --listen and --advertise, or give its job a relay: [network] relay"
        }
        _ => "",
    };
    let advice = if advice.is_empty() {
        e.hint().map_or_else(|| "ask the broker's owner".to_owned(), Cow::into_owned)
    } else {
        advice.into()
    };
    Problem { what: format!("no run can be joined with this ticket: {}", e.one_line()), advice }
}

/// The problems with a broker that was reached.
fn doubts(broker: &BrokerFindings, nat: Nat) -> Vec<Problem> {
    let mut problems = Vec::new();
    if broker.relayed {
        let open_broker = "forward a UDP port to the broker on its router, and start it with --listen and --advertise";
        let advice = match nat {
            Nat::PortPerPeer => format!("{OPEN_NAT}; or {open_broker}"),
            _ => open_broker.to_owned(),
        };
        problems.push(Problem {
            what: "the broker is reached only through the relay, which makes the link slower".into(),
            advice,
        });
    }
    let ahead = broker.clock_ahead_s;
    if ahead.abs() > MAX_CLOCK_DIFFERENCE_S {
        let direction = if ahead > 0.0 { "ahead of" } else { "behind" };
        problems.push(Problem {
            what: format!("this machine's clock is {:.0} s {direction} the broker's", ahead.abs()),
            advice: "set the clock, or let NTP do it; training does not need it, but times in logs do".into(),
        });
    }
    problems
}

fn shortage(what: &str, bytes: Option<u64>, advice: &str) -> Option<Problem> {
    let bytes = bytes.filter(|bytes| *bytes < LITTLE)?;
    let what = format!("only {} MiB of {what} are free", bytes >> 20);
    Some(Problem { what, advice: advice.into() })
}

/// Opens each backend, and each worker with an accelerator, and computes a little with it.
fn try_backends() -> (Vec<BackendFindings>, Vec<Problem>) {
    let (mut all, mut problems) = (Vec::new(), Vec::new());
    let workers = backend::worker::find().into_iter().filter(|worker| worker.accelerator);
    let workers = workers.map(|worker| (worker.name, backend::worker_name(&worker.command)));
    for (name, open) in backend::names().iter().map(|name| ((*name).into(), (*name).into())).chain(workers) {
        let opened = match backend::open(&open) {
            // A machine need not have every device that the backends of this build compute on.
            Err(BackendError::Device { .. }) => continue,
            opened => opened,
        };
        let tried = opened.map_err(NodeError::from).and_then(|opened| {
            let (device, _) = measure_briefly(&opened, 1.0, None, &[])?;
            Ok((opened.device().name, device.rates))
        });
        if let Err(e) = &tried {
            let advice = "use another backend or worker: join --backend NAME, join --worker CMD".to_owned();
            problems.push(Problem { what: format!("backend {name} does not work: {}", e.one_line()), advice });
        }
        let (device, rates) = tried.ok().unzip();
        all.push(BackendFindings { name, device, rates });
    }
    (all, problems)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addrs<const N: usize>(texts: [&str; N]) -> Vec<SocketAddr> {
        texts.map(|text| text.parse().unwrap()).into()
    }

    #[test]
    fn routers_are_told_by_the_addresses_that_others_see() {
        let own = addrs(["192.168.1.2:4000", "[2001:db8::2]:4001"]);
        let kind = |relay: &[SocketAddr], broker: Option<&str>| nat(&own, relay, broker.map(|b| b.parse().unwrap()));
        let relay = addrs(["203.0.113.7:4000"]);
        assert_eq!(kind(&[], None), Nat::Unknown);
        assert_eq!(kind(&[], Some("192.168.1.2:4000")), Nat::None);
        assert_eq!(kind(&[], Some("203.0.113.7:4000")), Nat::Unclear);
        assert_eq!(kind(&relay, None), Nat::Unclear);
        assert_eq!(kind(&relay, Some("203.0.113.7:4000")), Nat::SamePort);
        assert_eq!(kind(&relay, Some("203.0.113.7:51234")), Nat::PortPerPeer);
        // A broker in the same house, or one that is reached over IPv6, says nothing about the router.
        assert_eq!(kind(&relay, Some("192.168.1.2:4000")), Nat::Unclear);
        assert_eq!(kind(&relay, Some("[2001:db8::2]:4001")), Nat::Unclear);
    }

    #[test]
    fn a_relayed_link_and_a_wrong_clock_are_problems() {
        let link = Link { latency: 0.01, bandwidth: 1e6 };
        let broker = BrokerFindings { relayed: false, to: link, from: link, clock_ahead_s: 1.0 };
        assert!(doubts(&broker, Nat::None).is_empty());
        let broker = BrokerFindings { relayed: true, clock_ahead_s: -7200.0, ..broker };
        let what: Vec<_> = doubts(&broker, Nat::SamePort).into_iter().map(|problem| problem.what).collect();
        assert!(what[0].contains("only through the relay"), "{what:?}");
        assert_eq!(what[1], "this machine's clock is 7200 s behind the broker's");
    }

    #[test]
    fn little_memory_is_a_problem() {
        assert!(shortage("memory", None, "").is_none() && shortage("memory", Some(LITTLE), "").is_none());
        assert_eq!(shortage("memory", Some(300 << 20), "").unwrap().what, "only 300 MiB of memory are free");
    }
}
