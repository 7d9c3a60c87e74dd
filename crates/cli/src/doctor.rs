//! `doctor`.

use fusionllm_node::doctor::{BackendFindings, BrokerFindings, DoctorOptions, Findings, Nat, examine};
use fusionllm_node::{NodeError, Relay};
use fusionllm_workspace::config::parse_relay;

use crate::args::DoctorArgs;
use crate::failure::Failure;
use crate::join::ticket;
use crate::output::{print, print_json, tell};
use crate::table::{width, wrap, wrap_under};
use crate::train::runtime;
use crate::units::{bytes, measure, rate, seconds};

/// Looks at this machine, and says what does not work.
pub(crate) fn doctor(args: DoctorArgs, json: bool) -> Result<(), Failure> {
    let relay = match &args.relay {
        None => Relay::None,
        Some(text) => parse_relay(text).ok_or_else(|| {
            Failure::input(format!("--relay {text:?} is not a relay"))
                .hint("give \"default\", or the URL that `fusionllm relay` printed")
        })?,
    };
    let ticket = match args.ticket {
        None => None,
        some => Some(ticket(some)?.trim().parse().map_err(NodeError::Ticket)?),
    };
    tell("looking at this machine and its network; this takes a few seconds");
    let findings = runtime()?.block_on(examine(DoctorOptions { ticket, relay }))?;
    match json {
        true => print_json(&findings),
        false => print(&text(&findings)),
    }
}

/// The findings in plain words.
fn text(findings: &Findings) -> String {
    let Findings { addresses, seen_as, nat, relay, broker, backends, memory, memory_limit, disk, problems } = findings;
    let list = |addrs: &[std::net::SocketAddr]| {
        let ips: std::collections::BTreeSet<String> = addrs.iter().map(|addr| addr.ip().to_string()).collect();
        ips.into_iter().collect::<Vec<_>>().join(", ")
    };
    let mut lines = vec![format!("addresses  {}", list(addresses))];
    lines.push(format!("router     {}", describe(*nat, &list(seen_as), relay.is_some())));
    if let Some(relay) = relay {
        let url = relay.url.as_deref().unwrap_or("none of the public ones");
        lines.push(format!("relay      {url}: {}", if relay.works { "works" } else { "does not work" }));
    }
    if let Some(broker) = broker {
        lines.extend(broker_lines(broker));
    }
    lines.extend(backends.iter().map(backend_line));
    let known = |figure: &Option<u64>| figure.map_or("unknown".to_owned(), |n| format!("{} free", bytes(n)));
    let limited = memory_limit.as_ref().map_or_else(String::new, |limit| format!(", by {limit}"));
    lines.push(format!("memory     {}{limited}", known(memory)));
    lines.push(format!("disk       {}", known(disk)));
    let values = "addresses  ".len();
    let mut lines: Vec<String> = lines.iter().flat_map(|line| wrap_under(line, width(), values)).collect();
    lines.push(String::new());
    for problem in problems {
        lines.extend(wrap(&format!("problem: {}", problem.what), width()));
        lines.extend(wrap(&format!("  do: {}", problem.advice), width()));
    }
    if problems.is_empty() {
        lines.push("nothing is wrong".to_owned());
    }
    lines.join("\n") + "\n"
}

fn describe(nat: Nat, seen_as: &str, asked_relay: bool) -> String {
    match nat {
        Nat::None => "none; others reach this machine at its own address".to_owned(),
        Nat::SamePort => format!("others see {seen_as}, with the same port: hole punching works"),
        Nat::PortPerPeer => format!("others see {seen_as}, each with another port: hole punching seldom works"),
        Nat::Unclear => format!("others see {seen_as}; its kind takes a relay and a broker to tell"),
        Nat::Unknown if asked_relay => "the relay sees none; a ticket tells more".to_owned(),
        Nat::Unknown => "unknown; give a ticket or --relay to find out".to_owned(),
    }
}

fn broker_lines(broker: &BrokerFindings) -> [String; 2] {
    let BrokerFindings { relayed, to, from, clock_ahead_s } = broker;
    let path = if *relayed { "through the relay" } else { "directly" };
    let (up, down, round_trip) = (rate(to.bandwidth), rate(from.bandwidth), seconds(to.latency + from.latency));
    let direction = if *clock_ahead_s < 0.0 { "behind" } else { "ahead of" };
    [
        format!("broker     reached {path}: {up} to it, {down} from it, {round_trip} round trip"),
        format!("clock      {} {direction} the broker's", seconds(clock_ahead_s.abs())),
    ]
}

fn backend_line(backend: &BackendFindings) -> String {
    match (&backend.device, &backend.rates) {
        (Some(device), Some(rates)) => {
            let speed = measure(rates.matmul, "FLOP/s");
            format!("backend    {} works on {device}: {speed} in products", backend.name)
        }
        _ => format!("backend    {} does not work", backend.name),
    }
}

#[cfg(test)]
mod tests {
    use fusionllm_node::doctor::{Problem, RelayFindings};
    use fusionllm_plan::Link;

    use super::*;

    #[test]
    fn findings_are_told_in_plain_words() {
        let link = |bandwidth| Link { latency: 0.0125, bandwidth };
        let findings = Findings {
            addresses: vec!["192.168.1.2:4000".parse().unwrap(), "192.168.1.2:4001".parse().unwrap()],
            seen_as: vec!["203.0.113.7:4000".parse().unwrap()],
            nat: Nat::SamePort,
            relay: Some(RelayFindings { url: Some("http://192.0.2.1:3340".into()), works: true }),
            broker: Some(BrokerFindings { relayed: true, to: link(1e6), from: link(5e6), clock_ahead_s: -0.004 }),
            backends: vec![BackendFindings { name: "odd".into(), device: None, rates: None }],
            memory: Some(8 << 30),
            memory_limit: None,
            disk: None,
            problems: vec![Problem { what: "it is slow".into(), advice: "make it faster".into() }],
        };
        insta::assert_snapshot!(text(&findings), @r"
        addresses  192.168.1.2
        router     others see 203.0.113.7, with the same port: hole punching works
        relay      http://192.0.2.1:3340: works
        broker     reached through the relay: 8 Mbps to it, 40 Mbps from it, 25 ms round
                   trip
        clock      4 ms behind the broker's
        backend    odd does not work
        memory     8 GiB free
        disk       unknown

        problem: it is slow
          do: make it faster
        ");
    }
}
