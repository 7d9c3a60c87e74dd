//! Connects to a broker that may not run any more.

use std::time::{Duration, Instant};

use fusionllm_transport::{ConnectError, Connection, Endpoint, Lanes, PeerAddr, nobody_listens};

use crate::NodeError;

/// After this time, a person who waits is told that the broker has not answered, and again after each further such
/// time.
const REPORTS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(3));

/// The time in which a machine has to say that nobody listens at its port. Most machines say it at once, or never.
const PORT_TIMEOUT: Duration = Duration::from_secs(2);

/// Connects to the broker at this address. `waiting` gets the seconds that have passed, now and then.
///
/// # Errors
///
/// It cannot be reached. If the machines at all of its addresses say that nobody listens there, the attempt ends at
/// once.
pub(crate) async fn reach(
    endpoint: &Endpoint,
    to: &PeerAddr,
    mut waiting: impl FnMut(f64),
) -> Result<(Connection, Lanes), NodeError> {
    let begun = Instant::now();
    let mut connecting = std::pin::pin!(endpoint.connect(to));
    let mut asking = std::pin::pin!(nobody_listens(to, PORT_TIMEOUT));
    let mut reports = tokio::time::interval_at((begun + REPORTS.0).into(), REPORTS.1);
    let mut asked = false;
    loop {
        tokio::select! {
            biased;
            _ = reports.tick() => waiting(begun.elapsed().as_secs_f64()),
            connected = &mut connecting => return connected.map_err(NodeError::BrokerUnreachable),
            gone = &mut asking, if !asked => {
                asked = true;
                if gone {
                    return Err(NodeError::BrokerUnreachable(ConnectError::NobodyListens(to.clone())));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use fusionllm_transport::{EndpointOptions, SecretKey};

    use super::*;

    fn address(port: u16) -> PeerAddr {
        PeerAddr::new(SecretKey::generate().public(), vec![([127, 0, 0, 1], port).into()])
    }

    /// Regression: it took 14 s in silence to learn that a run had ended.
    #[tokio::test]
    #[cfg(target_os = "linux")]
    async fn a_broker_that_has_ended_is_told_from_one_that_is_silent() {
        let options = EndpointOptions { connect_timeout: Duration::from_millis(1500), ..EndpointOptions::new() };
        let endpoint = Endpoint::bind(options).await.unwrap();
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = address(socket.local_addr().unwrap().port());

        let mut told = 0;
        let silent = reach(&endpoint, &to, |seconds| told += usize::from(seconds >= 1.0)).await.unwrap_err();
        assert!(matches!(silent, NodeError::BrokerUnreachable(ConnectError::NoAnswer { .. })), "{silent:?}");
        assert!(told > 0, "a person is told that it takes long");

        drop(socket);
        let gone = reach(&endpoint, &to, |_| ()).await.unwrap_err();
        assert!(matches!(gone, NodeError::BrokerUnreachable(ConnectError::NobodyListens(_))), "{gone:?}");
        endpoint.close("").await;
    }
}
