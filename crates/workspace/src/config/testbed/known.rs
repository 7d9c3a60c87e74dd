//! The user's knowledge of a run's machines and links, before anybody has measured them.

use std::collections::BTreeSet;
use std::path::Path;

use fusionllm_plan::{Cluster, Device, DirectLink, Place, PlanError};
use fusionllm_program::PeerId;

use super::{Parts, Testbed, read};
use crate::config::reader::JobError;

/// A testbed file for machines that join: its figures count, and the rest is measured.
///
/// Its devices are joiners, by their names. They need no speed and no links. The broker stands where it is.
#[derive(Debug, Clone, PartialEq)]
pub struct Known {
    cluster: Cluster,
    /// The devices whose speed the file says.
    timed: BTreeSet<String>,
}

impl Known {
    /// Reads the file at `path`. Relative paths in it start at its directory.
    ///
    /// # Errors
    ///
    /// The same as those of [`Testbed::load`], except that devices need no speed and no route. A place for the broker
    /// is an error.
    pub fn load(path: &Path) -> Result<Self, JobError> {
        let (text, directory) = read(path, "give the path of a testbed file")?;
        Self::parse(&path.display().to_string(), &text, directory)
    }

    /// Reads the known machines and links from `text`. Messages call it `name`, and relative paths start at
    /// `directory`.
    ///
    /// # Errors
    ///
    /// The same as those of [`Self::load`].
    pub fn parse(name: &str, text: &str, directory: &Path) -> Result<Self, JobError> {
        let Parts { cluster, timed } = Testbed::parts(name, text, directory, false)?;
        Ok(Self { cluster, timed })
    }

    /// The measured cluster, with the file's figures about its devices and links. Links to the broker count if the file
    /// has one. The notes name the file's devices that are not there.
    ///
    /// # Errors
    ///
    /// A name in the file also stands for something else.
    pub fn correct(&self, measured: &Cluster) -> Result<(Cluster, Vec<String>), PlanError> {
        let known: Vec<Option<PeerId>> = measured.devices().iter().map(|d| self.cluster.find(&d.name)).collect();
        let shift = self.cluster.sites().len() as u32;
        let sites = [self.cluster.sites(), measured.sites()].concat();
        let devices = measured.devices().iter().zip(&known).map(|(device, known)| match known {
            Some(known) => self.correct_device(device, &self.cluster.devices()[known.0 as usize]),
            None => Device { site: device.site.map(|s| s + shift), ..device.clone() },
        });
        let peer = |place: Place| match place {
            Place::Device(d) => known[d as usize],
            Place::Broker => (self.cluster.broker() == Place::Broker).then_some(PeerId::BROKER),
            Place::Site(_) => None,
        };
        let is_known = |l: &DirectLink| {
            peer(l.from).zip(peer(l.to)).is_some_and(|(from, to)| self.cluster.route(from, to).is_some())
        };
        // Measured links are between devices, or a device and the broker.
        let mut direct: Vec<DirectLink> = measured.direct_links().iter().filter(|l| !is_known(l)).copied().collect();
        let place = |place: Place| match place {
            Place::Device(d) => known.iter().position(|k| *k == Some(PeerId(d))).map(|i| Place::Device(i as u32)),
            place => Some(place),
        };
        direct.extend(self.cluster.direct_links().iter().filter_map(|l| {
            let (from, to) = place(l.from).zip(place(l.to))?;
            Some(DirectLink { from, to, ..*l })
        }));
        let there = |name: &str| measured.find(name).is_some();
        let absent = self.cluster.devices().iter().map(|d| &d.name).filter(|name| !there(name));
        let notes = absent.map(|name| format!("the testbed file has {name}, but nobody of that name is here"));
        let mut cluster = Cluster::new(devices.collect(), sites, direct, Some(measured.broker()))?;
        if !matches!(cluster.broker(), Place::Device(_)) {
            cluster = cluster.with_broker_network(self.cluster.broker_network())?;
        }
        Ok((cluster, notes.collect()))
    }

    fn correct_device(&self, measured: &Device, known: &Device) -> Device {
        let device = if self.timed.contains(&known.name) { known } else { measured };
        Device {
            name: measured.name.clone(),
            site: known.site,
            host: known.host.clone(),
            processor: known.processor.clone().or_else(|| measured.processor.clone()),
            network: known.network,
            slowdown: measured.slowdown.max(known.slowdown),
            // A machine cannot give more memory than it has measured.
            memory: if known.memory == 0 { measured.memory } else { measured.memory.min(known.memory) },
            backend: measured.backend.clone(),
            disk: if known.disk.is_unknown() { device.disk } else { known.disk },
            host_link: known.host_link.or(device.host_link),
            ..device.clone()
        }
    }
}
