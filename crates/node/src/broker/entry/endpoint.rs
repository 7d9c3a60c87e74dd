//! The broker's endpoint, at which joiners meet it.

use std::time::Duration;

use fusionllm_events::Event;
use fusionllm_transport::{Endpoint, EndpointOptions, NoRelay};

use crate::NodeError;
use crate::broker::observer::Observer;
use crate::broker::records::{Identity, Store};

/// The time that a broker waits for its relay before it prints the ticket.
const RELAY_TIMEOUT: Duration = Duration::from_secs(10);

/// Opens the endpoint of a run's broker, under the identity that the run has or gets now.
pub(crate) async fn open_endpoint(
    options: EndpointOptions,
    store: &mut Store,
    observer: &mut dyn Observer,
) -> Result<(Endpoint, Identity), NodeError> {
    let mut identity = store.identity()?;
    let listen = options.listen.map(|addr| identity.with_port(addr));
    let (secret_key, ports) = (identity.key.clone(), identity.ports);
    let endpoint = Endpoint::bind(EndpointOptions { secret_key, listen, ports, ..options }).await?;
    identity.ports = endpoint.ports();
    let ready = meet_relay(&endpoint, store, observer).await.and_then(|()| store.keep_identity(&identity));
    if let Err(e) = ready {
        endpoint.close("").await;
        return Err(e);
    }
    Ok((endpoint, identity))
}

/// Waits for the connection to the relay, at which joiners will meet this machine. If a chosen relay is down for a
/// moment, the run starts all the same. If no relay has been chosen yet, none can stand in the ticket, so that is an
/// error.
async fn meet_relay(endpoint: &Endpoint, store: &mut Store, observer: &mut dyn Observer) -> Result<(), NodeError> {
    match endpoint.online(RELAY_TIMEOUT).await {
        Err(e @ NoRelay::Unreachable { .. }) if endpoint.addr().relay.is_some() => {
            let text = format!("{e}; only machines that reach this one directly can join until it is back");
            let event = Event::note(text);
            observer.event(&event);
            store.tell(event);
            Ok(())
        }
        result => Ok(result?),
    }
}
