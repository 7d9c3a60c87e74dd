//! The serialised form of a cluster.

use serde::{Deserialize, Serialize};

use super::{Cluster, DirectLink, Place, Site};
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
    #[serde(default, skip_serializing_if = "Option::is_none")]
    broker_network: Option<f64>,
}

impl TryFrom<Parts> for Cluster {
    type Error = PlanError;

    fn try_from(p: Parts) -> Result<Self, PlanError> {
        let cluster = Self::new(p.devices, p.sites, p.links, Some(p.broker))?;
        match p.broker_network {
            Some(rate) => cluster.with_broker_network(rate),
            None => Ok(cluster),
        }
    }
}

impl From<Cluster> for Parts {
    fn from(c: Cluster) -> Self {
        let Cluster { devices, sites, direct, broker, broker_network, .. } = c;
        Self { devices, sites, links: direct, broker, broker_network }
    }
}
