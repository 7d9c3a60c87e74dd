//! The rules that the parts of a cluster keep.

use foldhash::{HashMap, HashMapExt, HashSet, HashSetExt};

use super::{Cluster, Link, Place};
use crate::cost::{Device, Processor, Rates};

impl Cluster {
    pub(super) fn check(&self) -> Result<(), String> {
        if self.devices.is_empty() {
            return Err("it has no devices".into());
        }
        let mut names = HashSet::new();
        for name in self.devices.iter().map(|d| &d.name).chain(self.sites.iter().map(|s| &s.name)) {
            if name.is_empty() || !names.insert(name) {
                return Err(format!("the name {name:?} is empty, or names two devices or sites"));
            }
        }
        for d in &self.devices {
            let Rates { matmul, convolution, memory, overhead } = d.rates;
            let overhead = overhead >= 0.0 && overhead.is_finite();
            if !overhead || ![matmul, convolution, memory].into_iter().all(positive) {
                return Err(format!("the rates of device {:?} must be above zero, its overhead at least zero", d.name));
            }
            if !(d.slowdown >= 1.0 && d.slowdown.is_finite()) {
                return Err(format!("device {:?} has slowdown {}; it must be at least 1", d.name, d.slowdown));
            }
            if !d.network.rates().all(positive) {
                return Err(format!("the network card of device {:?} must be faster than zero", d.name));
            }
            if d.site.is_some_and(|s| s as usize >= self.sites.len()) {
                return Err(format!("device {:?} is in a site that does not exist", d.name));
            }
        }
        self.check_hosts()?;
        self.check_processors()?;
        if !self.broker_network.rates().all(positive) {
            return Err("the broker's network card must be faster than zero".into());
        }
        if let (false, Place::Device(d)) = (self.broker_network.is_unknown(), self.broker) {
            let host = self.devices.get(d as usize).map_or("", |d| &d.name);
            return Err(format!(
                "the broker runs on the machine of device {host:?}, and uses the network card of that"
            ));
        }
        for s in &self.sites {
            for link in [s.inside, s.uplink, s.downlink].into_iter().flatten() {
                check_link(&link, || format!("site {:?}", s.name))?;
            }
        }
        for place in self.direct.iter().flat_map(|l| [l.from, l.to]).chain([self.broker]) {
            let there = match place {
                Place::Device(d) => (d as usize) < self.devices.len(),
                Place::Site(s) => (s as usize) < self.sites.len(),
                Place::Broker => true,
            };
            if !there {
                return Err(format!("{place:?} does not exist"));
            }
        }
        for l in &self.direct {
            check_link(&l.link, || format!("the link from {} to {}", self.place_name(l.from), self.place_name(l.to)))?;
        }
        match self.direct.windows(2).find(|w| (w[0].from, w[0].to) == (w[1].from, w[1].to)) {
            Some(w) => {
                let (from, to) = (self.place_name(w[0].from), self.place_name(w[0].to));
                Err(format!("there are two links from {from} to {to}"))
            }
            None => Ok(()),
        }
    }

    /// Devices of one host share its place and its network card.
    fn check_hosts(&self) -> Result<(), String> {
        let mut first: HashMap<&str, &Device> = HashMap::new();
        for d in &self.devices {
            let Some(host) = d.host.as_deref() else { continue };
            if host.is_empty() {
                return Err(format!("the host of device {:?} has no name", d.name));
            }
            let other = *first.entry(host).or_insert(d);
            let (a, b) = (&other.name, &d.name);
            if other.site != d.site {
                return Err(format!("devices {a:?} and {b:?} are of one host, {host:?}, but in different sites"));
            }
            if other.network != d.network {
                return Err(format!("devices {a:?} and {b:?} are of one host, {host:?}, so they have one `network`"));
            }
        }
        Ok(())
    }

    /// Devices of one processor say the same of it.
    fn check_processors(&self) -> Result<(), String> {
        let mut first: HashMap<&str, &Device> = HashMap::new();
        for d in &self.devices {
            let Some(processor) = &d.processor else { continue };
            let Processor { name, cores, busy, crowded, crowd } = processor;
            let possible = [cores, busy, crowded, crowd].into_iter().all(|x| positive(*x)) && busy <= cores;
            if name.is_empty() || !possible || *crowded < 1.0 {
                return Err(format!(
                    "the processor of device {:?} needs a name and cores, of which the device keeps some or all busy; \
                     in a crowd, operators take at least as long as alone",
                    d.name
                ));
            }
            let other = *first.entry(name).or_insert(d);
            if other.processor.as_ref().is_some_and(|p| (p.cores, p.crowded, p.crowd) != (*cores, *crowded, *crowd)) {
                return Err(format!(
                    "devices {:?} and {:?} compute on one processor, {name:?}, so it has as many cores and is as crowded \
                     for both",
                    other.name, d.name
                ));
            }
        }
        Ok(())
    }
}

fn positive(x: f64) -> bool {
    x > 0.0 && x.is_finite()
}

fn check_link(link: &Link, name: impl Fn() -> String) -> Result<(), String> {
    if !positive(link.bandwidth) {
        return Err(format!("{} has a bandwidth of {} bytes/s; it must be above zero", name(), link.bandwidth));
    }
    if !(link.latency >= 0.0 && link.latency.is_finite()) {
        return Err(format!("{} has a latency of {} s; it must be at least zero", name(), link.latency));
    }
    Ok(())
}
