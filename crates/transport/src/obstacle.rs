//! Obstacles on this machine: an interface that is down, or whose packets are too small.

use std::net::{IpAddr, UdpSocket};

use netdev::Interface;

use crate::key::PeerAddr;

/// The UDP payload that QUIC's first packets have at least, in bytes (RFC 9000, section 14.1).
const LEAST_PAYLOAD: u32 = 1200;

/// The obstacle that keeps packets of this machine from all addresses of a peer, with advice, as far as its own
/// interfaces tell. `None` if there is none here, or if a relay leads to the peer.
pub fn obstacle_to(peer: &PeerAddr) -> Option<String> {
    if peer.relay.is_some() {
        return None;
    }
    let interfaces = netdev::get_interfaces();
    let found = peer.addrs.iter().map(|addr| {
        let own = UdpSocket::bind(if addr.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }).and_then(|socket| {
            socket.connect(addr)?;
            socket.local_addr()
        });
        obstacle(&interfaces, addr.ip(), own.ok().map(|own| own.ip()))
    });
    // One address without an obstacle is enough.
    found.collect::<Option<Vec<String>>>()?.into_iter().next()
}

/// The obstacle on the way to `to`. `own` is the address from which the system would send; `None` if it has no way there.
fn obstacle(interfaces: &[Interface], to: IpAddr, own: Option<IpAddr>) -> Option<String> {
    let has = |interface: &&Interface, ip: IpAddr| match ip {
        IpAddr::V4(ip) => interface.ipv4.iter().any(|net| net.addr() == ip),
        IpAddr::V6(ip) => interface.ipv6.iter().any(|net| net.addr() == ip),
    };
    let loopback = || interfaces.iter().find(|interface| interface.is_loopback());
    // What a machine sends to itself goes through the loopback interface, whatever the address.
    let to_itself = to.is_loopback() || own == Some(to);
    if let Some(interface) = loopback().filter(|interface| to_itself && !interface.is_up()) {
        let name = &interface.name;
        return Some(format!("the loopback interface {name} of this machine is down: `ip link set {name} up`"));
    }
    let Some(own) = own else {
        return Some(format!("no network of this machine leads to {to}: check that it is connected, and its routes"));
    };
    let interface = if to_itself { loopback() } else { interfaces.iter().find(|interface| has(interface, own)) }?;
    let headers = if to.is_ipv4() { 28 } else { 48 };
    let (name, mtu, needed) = (&interface.name, interface.mtu?, LEAST_PAYLOAD + headers);
    (mtu < needed).then(|| {
        format!(
            "packets of the interface {name} have at most {mtu} bytes, and QUIC needs {needed}: raise its MTU, \
             `ip link set {name} mtu 1500`, or that of the tunnel behind it"
        )
    })
}

#[cfg(test)]
mod tests {
    use netdev::ipnet::Ipv4Net;

    use super::*;
    use crate::key::SecretKey;

    fn interface(name: &str, ip: [u8; 4], flags: u32, mtu: u32) -> Interface {
        let mut interface = Interface::dummy();
        interface.name = name.into();
        interface.ipv4 = vec![Ipv4Net::new(ip.into(), 24).unwrap()];
        interface.flags = flags;
        interface.mtu = Some(mtu);
        interface
    }

    #[test]
    fn an_interface_that_is_down_or_narrow_is_an_obstacle() {
        const UP: u32 = 1;
        const LOOPBACK: u32 = 8;
        let home = |flags, mtu| {
            [interface("lo", [127, 0, 0, 1], LOOPBACK | flags, 65_536), interface("eth0", [192, 0, 2, 1], UP, mtu)]
        };
        let [this, own, other] = ["127.0.0.1", "192.0.2.1", "192.0.2.7"].map(|ip| ip.parse::<IpAddr>().unwrap());
        let told = |interfaces: &[Interface], to, from| obstacle(interfaces, to, from).unwrap_or_default();
        assert!(told(&home(0, 1500), this, None).starts_with("the loopback interface lo of this machine is down"));
        assert!(told(&home(0, 1500), own, Some(own)).starts_with("the loopback interface lo"));
        assert_eq!(told(&home(UP, 1500), this, Some(this)), "");
        assert!(told(&home(UP, 1500), other, None).starts_with("no network of this machine leads to 192.0.2.7"));
        assert_eq!(told(&home(0, 1228), other, Some(own)), "");
        assert!(told(&home(UP, 1227), other, Some(own)).contains("eth0 have at most 1227 bytes, and QUIC needs 1228"));
        assert_eq!(told(&home(UP, 1227), own, Some(own)), "", "what stays on the machine does not leave through it");
    }

    #[test]
    fn this_machine_reaches_itself() {
        let key = SecretKey::generate().public();
        assert_eq!(obstacle_to(&PeerAddr::new(key, vec!["127.0.0.1:9".parse().unwrap()])), None);
        assert_eq!(obstacle_to(&PeerAddr::new(key, Vec::new())), None);
    }
}
