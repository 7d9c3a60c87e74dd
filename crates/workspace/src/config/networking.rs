//! `[network]`: how the machines of a run reach each other.

use fusionllm_transport::Relay;
use serde::{Serialize, Serializer};

use super::reader::{JobError, Section};

/// `[network]`: how the machines of a run reach each other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Networking {
    /// The server through which machines meet that cannot reach each other. Default none.
    #[serde(serialize_with = "relay_name")]
    pub relay: Relay,
}

impl Networking {
    pub(super) fn read(section: &Section<'_>) -> Result<Self, JobError> {
        let hint = "write \"none\", \"default\", or the URL that `fusionllm relay` prints";
        let relay = section.text("relay").map_err(|e| JobError { hint: hint.into(), ..e })?.unwrap_or("none");
        let relay = parse_relay(relay).ok_or_else(|| {
            let message = format!("`network.relay` cannot be {relay:?}");
            section.error("relay", message, hint)
        })?;
        section.finish()?;
        Ok(Self { relay })
    }
}

/// A relay: `none`, `default` for the public ones, or a URL.
pub fn parse_relay(text: &str) -> Option<Relay> {
    match text {
        "none" => Some(Relay::None),
        "default" => Some(Relay::Public),
        url => url.parse().ok().map(Relay::At),
    }
}

fn relay_name<S: Serializer>(relay: &Relay, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(match relay {
        Relay::None => "none",
        Relay::Public => "default",
        Relay::At(url) => url.full(),
    })
}
