//! The addresses of a member that may be given to others.

use std::net::{IpAddr, SocketAddr};

use fusionllm_transport::PeerAddr;

/// Most addresses of one member. A machine has few interfaces.
const MAX_ADDRS: usize = 16;

/// The claimed addresses to which other members may be sent. `from` is the address from which the member's own packets
/// come, if it is known.
///
/// Only the member's key is proved. Nobody must be made to send packets to its own machine or to a whole network. So an
/// address of loopback counts only for a member that connects over loopback, as in local runs. Addresses of private
/// networks stay: members in one place reach each other there.
pub(crate) fn usable(mut claim: PeerAddr, from: Option<SocketAddr>) -> PeerAddr {
    let local = from.is_some_and(|from| from.ip().to_canonical().is_loopback());
    claim.addrs.retain(|addr| {
        let ip = addr.ip().to_canonical();
        let nobody = ip.is_unspecified() || ip.is_multicast() || matches!(ip, IpAddr::V4(v4) if v4.is_broadcast());
        addr.port() != 0 && !nobody && (local || !ip.is_loopback())
    });
    claim.addrs.truncate(MAX_ADDRS);
    claim
}

#[cfg(test)]
mod tests {
    use fusionllm_transport::SecretKey;

    use super::*;

    fn filtered(addrs: &[&str], from: Option<&str>) -> Vec<String> {
        let key = SecretKey::from_bytes([3; 32]).public();
        let claim = PeerAddr::new(key, addrs.iter().map(|a| a.parse().unwrap()).collect());
        let usable = usable(claim, from.map(|a| a.parse().unwrap()));
        usable.addrs.iter().map(SocketAddr::to_string).collect()
    }

    #[test]
    fn addresses_of_nobody_and_of_the_receiver_itself_are_dropped() {
        let lies = [
            "127.0.0.1:22",
            "127.9.9.9:22",
            "[::1]:22",
            "[::ffff:127.0.0.1]:22",
            "0.0.0.0:9",
            "[::]:9",
            "[::ffff:0.0.0.0]:9",
            "224.0.0.1:9",
            "[ff02::1]:9",
            "255.255.255.255:9",
            "192.0.2.1:0",
        ];
        assert_eq!(filtered(&lies, Some("192.0.2.7:4433")), Vec::<String>::new());
        assert_eq!(filtered(&lies, None), Vec::<String>::new());
    }

    #[test]
    fn public_and_private_addresses_stay_in_their_order() {
        let addrs = ["192.0.2.1:9", "10.0.0.5:9", "192.168.1.2:9", "[2001:db8::1]:9", "[fd00::1]:9", "100.64.0.1:9"];
        assert_eq!(filtered(&addrs, Some("192.0.2.1:9")), addrs);
    }

    #[test]
    fn a_member_that_connects_over_loopback_may_be_met_there() {
        for from in ["127.0.0.1:5", "[::1]:5", "[::ffff:127.0.0.1]:5"] {
            assert_eq!(filtered(&["127.0.0.1:9", "0.0.0.0:9"], Some(from)), ["127.0.0.1:9"]);
        }
    }

    #[test]
    fn a_member_has_few_addresses() {
        let many: Vec<String> = (1..100).map(|i| format!("192.0.2.{i}:9")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert_eq!(filtered(&many, None), &many[..16]);
    }
}
