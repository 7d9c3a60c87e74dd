//! A part of a cluster.

use fusionllm_program::PeerId;

use super::{Cluster, DirectLink, Place};
use crate::error::PlanError;

impl Cluster {
    /// The cluster of some devices, in the given order: device `i` is `devices[i]`. All sites stay, and the devices
    /// keep their network cards. If the broker's device is left out, the broker keeps its place: with another device
    /// of its host, else with the links of the device that is left out.
    ///
    /// # Errors
    ///
    /// A device does not exist, is named twice, or none is named.
    pub fn select(&self, devices: &[PeerId]) -> Result<Self, PlanError> {
        let fail = |m: String| Err(PlanError::Cluster(m));
        let mut index = vec![None; self.devices.len()];
        let mut chosen = Vec::with_capacity(devices.len());
        for (i, p) in (0..).zip(devices) {
            match (self.devices.get(p.0 as usize), index.get_mut(p.0 as usize)) {
                (Some(device), Some(slot @ None)) => {
                    *slot = Some(i);
                    chosen.push(device.clone());
                }
                _ => return fail(format!("{p} does not exist, or is named twice")),
            }
        }
        let host = self.host_of(PeerId::BROKER).filter(|host| *host != Place::Broker);
        let on_its_host = host.and_then(|host| self.devices_of(host).find_map(|p| index[p.0 as usize]));
        // Without a device, the broker's host becomes its own.
        let alone = host.is_some() && on_its_host.is_none();
        let moved = |p: Place| match p {
            Place::Device(_) if alone && p == self.broker => Some(Place::Broker),
            Place::Device(d) => index[d as usize].map(Place::Device),
            other => Some(other),
        };
        let direct = self
            .direct
            .iter()
            .filter_map(|l| Some(DirectLink { from: moved(l.from)?, to: moved(l.to)?, ..*l }))
            .collect();
        let broker = match self.broker {
            Place::Device(_) if alone => self.site_of(self.broker).map_or(Place::Broker, Place::Site),
            on @ Place::Device(_) => moved(on).or(on_its_host.map(Place::Device)).unwrap_or(on),
            own => own,
        };
        let cluster = Self::new(chosen, self.sites.clone(), direct, Some(broker))?;
        Ok(cluster.with_cards(|p| self.card(devices[p.0 as usize]), self.card(PeerId::BROKER)))
    }
}
