//! Several hosts on one machine: network namespaces joined by a bridge. They need root and iproute2.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Hosts on one bridge. Dropping them removes them.
pub(crate) struct Hosts {
    tag: String,
    pub(crate) count: usize,
}

impl Hosts {
    /// `None` if this user may not make network namespaces.
    pub(crate) fn make(count: usize) -> Option<Self> {
        // Tests run in parallel.
        static MADE: AtomicU32 = AtomicU32::new(0);
        let tag = format!("fl{}{}", std::process::id() % 100_000, MADE.fetch_add(1, Relaxed));
        let hosts = Self { tag, count };
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
        for host in (0..self.count).map(|i| i.to_string()).chain(["s".to_owned()]) {
            ip(&format!("netns del {}", self.name(&host)));
        }
    }
}

fn shape(namespace: &str, device: &str, rate: f64) -> bool {
    quietly("tc", &format!("-n {namespace} qdisc add dev {device} root tbf rate {rate}mbit burst 16kb latency 100ms"))
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
