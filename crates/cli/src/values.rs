//! The values of options, and what is said about wrong ones.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::Path;
use std::time::Duration;

use fusionllm_data::Tokenizer;
use fusionllm_graph::Advice;
use fusionllm_node::Dashboard;

pub(crate) fn whole<T: TryFrom<u64>>(text: &str) -> Result<T, String> {
    number(text, 0, 0)
}

pub(crate) fn at_least_1<T: TryFrom<u64>>(text: &str) -> Result<T, String> {
    number(text, 1, 1)
}

/// A number of peers. Whoever starts them says how many there may be, and that 0 are too few.
pub(crate) fn peers(text: &str) -> Result<usize, String> {
    number(text, 0, 1)
}

/// A whole number of at least `least`. The message says that it must be at least `told`.
fn number<T: TryFrom<u64>>(text: &str, least: u64, told: u64) -> Result<T, String> {
    let number = text.parse::<u64>().ok().filter(|n| *n >= least);
    let number = number.ok_or_else(|| format!("it must be a whole number of at least {told}"))?;
    T::try_from(number).map_err(|_| "it is too large".to_owned())
}

/// Where the run's page is served.
pub(crate) fn dashboard(text: &str) -> Result<Dashboard, String> {
    match text {
        "off" => Ok(Dashboard::Off),
        addr => addr.parse().map(Dashboard::At).map_err(|_| {
            "it must be \"off\", or an address with a port such as 127.0.0.1:8800 or 0.0.0.0:8800".to_owned()
        }),
    }
}

/// An address that leads to this machine from outside, or a name that leads to several.
#[derive(Debug, Clone)]
pub(crate) struct Advertised {
    text: String,
    pub(crate) addresses: Vec<SocketAddr>,
}

impl fmt::Display for Advertised {
    /// As the user wrote it, since a name may lead elsewhere tomorrow.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// An address or a name, with a port. A name is looked up.
pub(crate) fn advertised(text: &str) -> Result<Advertised, String> {
    let advertised = |addresses| Advertised { text: text.to_owned(), addresses };
    if let Ok(address) = text.parse() {
        return Ok(advertised(vec![address]));
    }
    let has_port = text.rsplit_once(':').is_some_and(|(name, port)| !name.is_empty() && port.parse::<u16>().is_ok());
    if !has_port {
        return Err("give an address or a name with a port, such as 192.0.2.1:4433 or home.example.org:4433".into());
    }
    match text.to_socket_addrs() {
        Ok(found) => Ok(advertised(found.collect())),
        Err(e) => Err(format!("no address is known for this name: {e}")),
    }
}

pub(crate) fn temperature(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(t) if t >= 0.0 && t.is_finite() => Ok(t),
        _ => Err("it must be a number of at least 0".into()),
    }
}

pub(crate) fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if x > 0.0 && x <= 1.0 => Ok(x),
        _ => Err("it must be a number above 0 and at most 1".into()),
    }
}

pub(crate) fn slowdown(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if x >= 1.0 && x.is_finite() => Ok(x),
        _ => Err("it must be a number of at least 1".into()),
    }
}

pub(crate) fn memory(text: &str) -> Result<u64, String> {
    fusionllm_workspace::config::parse_size(text)
}

pub(crate) fn period(text: &str) -> Result<Duration, String> {
    fusionllm_workspace::config::parse_period(text)
}

/// A tokenizer's name or path.
pub(crate) fn tokenizer(text: &str) -> Result<Tokenizer, String> {
    let path = Path::new(text);
    match Tokenizer::of_name(text) {
        Some(known) => Ok(known),
        None if path.exists() => Tokenizer::open(path).map_err(|e| e.report()),
        None => {
            let names = Tokenizer::NAMES.map(|(name, _)| name).join(", ");
            Err(format!("it is one of {names}, or the path of a tokenizer.json or of its folder"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_advertised_by_address_or_name() {
        let by_name = advertised("localhost:4433").unwrap();
        assert!(!by_name.addresses.is_empty() && by_name.addresses.iter().all(|a| a.ip().is_loopback()));
        assert_eq!(by_name.to_string(), "localhost:4433");
        assert_eq!(advertised("192.0.2.1:4433").unwrap().addresses, ["192.0.2.1:4433".parse().unwrap()]);
        for without_port in ["localhost", "192.0.2.1", ":4433", "localhost:port"] {
            assert!(advertised(without_port).unwrap_err().contains("with a port"), "{without_port}");
        }
    }
}
