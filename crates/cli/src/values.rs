//! The values of options, and what is said about wrong ones.

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
