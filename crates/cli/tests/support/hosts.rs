//! Several hosts on one machine: network namespaces joined by a bridge. They need root and iproute2, and routers need
//! nftables.

use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Hosts on one bridge. Dropping them removes them.
pub(crate) struct Hosts {
    tag: String,
    pub(crate) count: usize,
    /// Hosts behind routers. Their numbers follow those of the hosts on the bridge.
    hidden: usize,
}

/// How a router gives ports of its own to the machines behind it.
#[allow(dead_code, reason = "not all that include this need it")]
#[derive(Clone, Copy)]
pub(crate) enum Nat {
    /// The machine's own port, whomever it talks to.
    SamePort,
    /// A random port for each machine that it talks to.
    PortPerPeer,
}

impl Hosts {
    /// `None` if this user may not make network namespaces.
    pub(crate) fn make(count: usize) -> Option<Self> {
        // Tests run in parallel.
        static MADE: AtomicU32 = AtomicU32::new(0);
        let tag = format!("fl{}{}", std::process::id() % 100_000, MADE.fetch_add(1, Relaxed));
        let hosts = Self { tag, count, hidden: 0 };
        let switch = hosts.name("s");
        let made = ip(&format!("netns add {switch}"))
            && ip(&format!("-n {switch} link add br0 type bridge"))
            && ip(&format!("-n {switch} link set br0 up"))
            && (0..count).all(|i| {
                let host = hosts.name(&i.to_string());
                ip(&format!("netns add {host}"))
                    && ip(&format!("-n {host} link set lo up"))
                    && ip(&format!("-n {host} link add eth0 type veth peer name p{i} netns {switch}"))
                    && ip(&format!("-n {host} addr add 10.77.0.{}/24 dev eth0", i + 1))
                    && ip(&format!("-n {host} link set eth0 up"))
                    && ip(&format!("-n {switch} link set p{i} master br0"))
                    && ip(&format!("-n {switch} link set p{i} up"))
            });
        made.then_some(hosts)
    }

    /// Makes a host behind another one, which becomes its router and lets nothing in that was not asked for, as those
    /// in homes do. Returns the new host's number; `None` if this user may not, or nftables is missing.
    #[allow(dead_code, reason = "not all that include this need it")]
    pub(crate) fn behind(&mut self, router: usize, nat: Nat) -> Option<usize> {
        let number = self.count + self.hidden;
        self.hidden += 1;
        let (host, router) = (self.name(&number.to_string()), self.name(&router.to_string()));
        let masquerade = match nat {
            Nat::SamePort => "masquerade",
            Nat::PortPerPeer => "masquerade random,fully-random",
        };
        let rules = format!(
            "table ip home {{
                chain out {{ type nat hook postrouting priority 100; oifname eth0 {masquerade}; }}
                chain to_router {{ type filter hook input priority 0; policy drop;
                    iifname {{ lan0, lo }} accept; ct state established,related accept; }}
                chain through {{ type filter hook forward priority 0; policy drop;
                    iifname lan0 accept; ct state established,related accept; }}
            }}"
        );
        let made = ip(&format!("netns add {host}"))
            && ip(&format!("-n {host} link set lo up"))
            && ip(&format!("-n {host} link add eth0 type veth peer name lan0 netns {router}"))
            && ip(&format!("-n {host} addr add 192.168.1.2/24 dev eth0"))
            && ip(&format!("-n {host} link set eth0 up"))
            && ip(&format!("-n {router} addr add 192.168.1.1/24 dev lan0"))
            && ip(&format!("-n {router} link set lan0 up"))
            && ip(&format!("-n {host} route add default via 192.168.1.1"))
            && ip(&format!("netns exec {router} sysctl -qw net.ipv4.ip_forward=1"))
            && nft(&router, &rules);
        made.then_some(number)
    }

    /// Limits a host's outgoing traffic to `rate` Mbps by a token bucket of the kernel. The queue takes 100 ms, as in
    /// the emulator. False if the kernel has no token buckets.
    #[allow(dead_code, reason = "not all that include this need it")]
    pub(crate) fn limit_from(&self, host: usize, rate: f64) -> bool {
        shape(&self.name(&host.to_string()), "eth0", rate)
    }

    /// Limits a host's incoming traffic.
    #[allow(dead_code, reason = "not all that include this need it")]
    pub(crate) fn limit_to(&self, host: usize, rate: f64) -> bool {
        shape(&self.name("s"), &format!("p{host}"), rate)
    }

    /// Cuts a host off.
    #[allow(dead_code, reason = "not all that include this need it")]
    pub(crate) fn cut(&self, host: usize) {
        assert!(ip(&format!("-n {} link set p{host} down", self.name("s"))));
    }

    /// Connects a host again.
    #[allow(dead_code, reason = "not all that include this need it")]
    pub(crate) fn heal(&self, host: usize) {
        assert!(ip(&format!("-n {} link set p{host} up", self.name("s"))));
    }

    /// Cuts two hosts off from each other. It takes nft.
    #[allow(dead_code, reason = "not all that include this need it")]
    pub(crate) fn part(&self, one: usize, other: usize) {
        for (host, from) in [(one, other), (other, one)] {
            let name = self.name(&host.to_string());
            let nft = |rule: String| assert!(quietly("ip", &format!("netns exec {name} nft {rule}")), "{rule}");
            nft("add table ip parted".into());
            nft("add chain ip parted input { type filter hook input priority 0 ; }".into());
            nft(format!("add rule ip parted input ip saddr 10.77.0.{} drop", from + 1));
        }
    }

    /// Lets two hosts reach each other again.
    #[allow(dead_code, reason = "not all that include this need it")]
    pub(crate) fn unite(&self, one: usize, other: usize) {
        for host in [one, other] {
            let name = self.name(&host.to_string());
            assert!(quietly("ip", &format!("netns exec {name} nft delete table ip parted")));
        }
    }

    /// A command to run on a host.
    pub(crate) fn on(&self, host: usize, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name(&host.to_string())]).arg(program.as_ref()).stdin(Stdio::null());
        command
    }

    fn name(&self, host: &str) -> String {
        format!("{}-{host}", self.tag)
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in (0..self.count + self.hidden).map(|i| i.to_string()).chain(["s".to_owned()]) {
            ip(&format!("netns del {}", self.name(&host)));
        }
    }
}

fn shape(namespace: &str, device: &str, rate: f64) -> bool {
    quietly("tc", &format!("-n {namespace} qdisc add dev {device} root tbf rate {rate}mbit burst 16kb latency 100ms"))
}

/// Gives a host these rules of nftables.
fn nft(host: &str, rules: &str) -> bool {
    let mut command = Command::new("ip");
    command.args(["netns", "exec", host, "nft", "-f", "-"]).stdin(Stdio::piped()).stderr(Stdio::null());
    let Ok(mut child) = command.spawn() else { return false };
    let written = child.stdin.take().is_some_and(|mut stdin| stdin.write_all(rules.as_bytes()).is_ok());
    child.wait().is_ok_and(|status| status.success()) && written
}

fn ip(arguments: &str) -> bool {
    quietly("ip", arguments)
}

fn quietly(program: &str, arguments: &str) -> bool {
    Command::new(program).args(arguments.split_whitespace()).stderr(Stdio::null()).status().is_ok_and(|s| s.success())
}

/// A process that is killed when this is dropped.
pub(crate) struct Running(pub(crate) Child);

impl Running {
    /// Sends a signal. `ip netns exec` becomes the program, so it is the program that gets it.
    #[allow(dead_code, reason = "not all that include this need it")]
    pub(crate) fn signal(&self, signal: &str) {
        assert!(Command::new("kill").args([signal, &self.0.id().to_string()]).status().unwrap().success());
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
