//! The serialised form of a cluster.

use serde::{Deserialize, Serialize};

use super::{Cluster, DirectLink, Place, Site};
use crate::cost::Card;
use crate::cost::Device;
use crate::error::PlanError;

/// The serialised form.
#[derive(Serialize, Deserialize)]
pub(super) struct Parts {
    devices: Vec<Device>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    sites: Vec<Site>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    links: Vec<DirectLink>,
    broker: Place,
    #[serde(default, skip_serializing_if = "Card::is_unknown")]
    broker_network: Card,
}

impl TryFrom<Parts> for Cluster {
    type Error = PlanError;

    fn try_from(p: Parts) -> Result<Self, PlanError> {
        Self::new(p.devices, p.sites, p.links, Some(p.broker))?.with_broker_network(p.broker_network)
    }
}

impl From<Cluster> for Parts {
    fn from(c: Cluster) -> Self {
        let Cluster { devices, sites, direct, broker, broker_network, .. } = c;
        Self { devices, sites, links: direct, broker, broker_network }
    }
}
