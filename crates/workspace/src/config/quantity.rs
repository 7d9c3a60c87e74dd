//! Numbers with units.

use std::time::Duration;

use super::reader::{JobError, Section};

/// A kind of quantity: its units, each with its factor, and an example.
pub(super) struct Quantity {
    what: &'static str,
    units: &'static [(&'static str, f64)],
    /// The number and the unit of an example.
    example: (f64, &'static str),
}

/// A rate, in bytes per second.
pub(super) const RATE: Quantity = Quantity {
    what: "a rate",
    units: &[
        ("bps", 0.125),
        ("kbps", 125.0),
        ("Mbps", 125e3),
        ("Gbps", 125e6),
        ("Tbps", 125e9),
        ("kB/s", 1e3),
        ("MB/s", 1e6),
        ("GB/s", 1e9),
        ("TB/s", 1e12),
    ],
    example: (8.0, "Mbps"),
};

/// A time, in seconds.
pub(super) const TIME: Quantity = Quantity {
    what: "a time",
    units: &[("ns", 1e-9), ("us", 1e-6), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)],
    example: (20.0, "ms"),
};

/// A period for people, in seconds.
const PERIOD: Quantity = Quantity {
    what: "a time",
    units: &[("s", 1.0), ("min", 60.0), ("m", 60.0), ("h", 3600.0), ("d", 86_400.0)],
    example: (2.0, "h"),
};

/// A size, in bytes.
pub(super) const SIZE: Quantity = Quantity {
    what: "a size",
    units: &[
        ("kB", 1e3),
        ("KiB", 1024.0),
        ("MB", 1e6),
        ("MiB", 1_048_576.0),
        ("GB", 1e9),
        ("GiB", 1_073_741_824.0),
        ("TB", 1e12),
        ("TiB", 1_099_511_627_776.0),
    ],
    example: (16.0, "GiB"),
};

/// Reads a size such as `8 GiB`, in bytes.
///
/// # Errors
///
/// The problem, for a message.
pub fn parse_size(text: &str) -> Result<u64, String> {
    match SIZE.parse(text)? {
        bytes if bytes >= 1.0 && bytes.is_finite() => Ok(bytes as u64),
        _ => Err(format!("\"{text}\" is no size above zero")),
    }
}

/// Reads a time such as `90s`, `2h` or `7 d`, of at most 100 years.
///
/// # Errors
///
/// The problem, for a message.
pub fn parse_period(text: &str) -> Result<Duration, String> {
    match PERIOD.parse(text)? {
        seconds if (0.0..=100.0 * 365.0 * 86_400.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err(format!("\"{text}\" is not within 0 s and 100 years")),
    }
}

impl Quantity {
    /// The number in the base unit, or the problem.
    fn parse(&self, text: &str) -> Result<f64, String> {
        let (number, unit) = split(text)?;
        match self.units.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)) {
            Some((_, factor)) => Ok(number * factor),
            None if unit.is_empty() => Err(format!("\"{}\" has no unit", text.trim())),
            None => Err(format!("there is no unit \"{unit}\" of {}", self.what)),
        }
    }

    /// The advice about a number without a unit, or with a unit that does not exist.
    fn advice(&self, key: &str, written: Option<(f64, &str)>) -> String {
        let units: Vec<&str> = self.units.iter().map(|(name, _)| *name).collect();
        let likeness = |unit: &str, name: &str| strsim::jaro_winkler(&unit.to_lowercase(), &name.to_lowercase());
        let start = match written {
            Some((number, "")) => format!("write {key} = \"{number} {}\", or another unit;", self.example.1),
            Some((number, unit)) => {
                let nearest = units.iter().max_by(|a, b| likeness(unit, a).total_cmp(&likeness(unit, b)));
                format!("did you mean \"{number} {}\"?", nearest.unwrap_or(&self.example.1))
            }
            None => format!("it must be {}, such as {key} = {};", self.what, self.example()),
        };
        format!("{start} the units are {}", units.join(", "))
    }

    fn example(&self) -> String {
        format!("\"{} {}\"", self.example.0, self.example.1)
    }
}

/// A number and the unit after it.
fn split(text: &str) -> Result<(f64, &str), String> {
    let text = text.trim();
    // An `e` before a digit or a sign is an exponent.
    let bytes = text.as_bytes();
    let end = (0..bytes.len()).find(|&i| match bytes[i] {
        b'0'..=b'9' | b'.' | b'+' | b'-' | b'_' => false,
        b'e' | b'E' => !bytes.get(i + 1).is_some_and(|b| matches!(b, b'0'..=b'9' | b'-' | b'+')),
        _ => true,
    });
    let (number, unit) = text.split_at(end.unwrap_or(text.len()));
    let number: f64 = number.replace('_', "").parse().map_err(|_| format!("\"{text}\" begins with no number"))?;
    Ok((number, unit.trim()))
}

impl Section<'_> {
    /// A quantity, written as text with its unit. It is at least zero, or above zero if `positive`.
    pub(super) fn quantity(
        &self,
        key: &'static str,
        quantity: &Quantity,
        positive: bool,
    ) -> Result<Option<f64>, JobError> {
        let name = self.full_name(key);
        let valid = |x: f64| x.is_finite() && (x > 0.0 || (x == 0.0 && !positive));
        if self.is_number(key) {
            let written = self.number(key, "", |_| true).ok().flatten().filter(|x| valid(*x));
            let hint = quantity.advice(key, written.map(|x| (x, "")));
            return Err(self.error(key, format!("`{name}` needs a unit"), hint));
        }
        let text = self.text(key).map_err(|e| JobError { hint: quantity.advice(key, None), ..e })?;
        let Some(text) = text else { return Ok(None) };
        let value = quantity.parse(text).map_err(|problem| {
            let written = split(text).ok().filter(|(x, _)| valid(*x));
            self.error(key, format!("`{name}`: {problem}"), quantity.advice(key, written))
        })?;
        if valid(value) {
            return Ok(Some(value));
        }
        let least = if positive { "above zero" } else { "at least zero" };
        let hint = format!("it must be {least}, such as {key} = {}", quantity.example());
        Err(self.error(key, format!("`{name}` is {text}"), hint))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_have_units() {
        assert_eq!(RATE.parse("8 Mbps"), Ok(1e6));
        assert_eq!(RATE.parse("2.5Gbps"), Ok(312.5e6));
        assert_eq!(RATE.parse("1e3 kbps"), Ok(125e3));
        assert_eq!(TIME.parse("20 ms"), Ok(0.02));
        assert_eq!(TIME.parse("0 s"), Ok(0.0));
        assert_eq!(SIZE.parse("1_5 kib"), Ok(15.0 * 1024.0));
        assert_eq!(RATE.parse("8"), Err("\"8\" has no unit".into()));
        assert_eq!(RATE.parse("8 MB"), Err("there is no unit \"MB\" of a rate".into()));
        assert_eq!(TIME.parse("fast"), Err("\"fast\" begins with no number".into()));
    }
}
