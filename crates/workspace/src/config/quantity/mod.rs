//! Numbers with units.

mod unit;

use std::time::Duration;

use super::reader::{JobError, Section};
use unit::{Meaning, Reading};

/// A kind of quantity.
pub(super) struct Quantity {
    what: &'static str,
    meaning: fn(&str) -> Meaning,
    /// The units that messages name.
    units: &'static [&'static str],
    /// A remark of messages beside the units.
    remark: &'static str,
    /// The number and the unit of an example.
    example: (f64, &'static str),
    /// Whether several of them in a row are added, as in `1 h 30 min`.
    adds_up: bool,
}

/// A rate, in bytes per second.
pub(super) const RATE: Quantity = Quantity {
    what: "a rate",
    meaning: unit::rate,
    units: &["bps", "kbps", "Mbps", "Gbps", "Tbps", "kB/s", "MB/s", "GB/s", "TB/s"],
    remark: "; b is a bit and B a byte",
    example: (8.0, "Mbps"),
    adds_up: false,
};

/// A time, in seconds.
pub(super) const TIME: Quantity = Quantity {
    what: "a time",
    meaning: unit::time,
    units: &["ns", "us", "ms", "s"],
    remark: "",
    example: (20.0, "ms"),
    adds_up: true,
};

/// A period for people, in seconds.
const PERIOD: Quantity = Quantity {
    what: "a time",
    meaning: unit::period,
    units: &["s", "min", "h", "d"],
    remark: "",
    example: (2.0, "h"),
    adds_up: true,
};

/// A size, in bytes.
pub(super) const SIZE: Quantity = Quantity {
    what: "a size",
    meaning: unit::size,
    units: &["B", "kB", "KiB", "MB", "MiB", "GB", "GiB", "TB", "TiB"],
    remark: "",
    example: (16.0, "GiB"),
    adds_up: false,
};

/// A speed of computing, in floating-point operations per second.
const SPEED: Quantity = Quantity {
    what: "a speed",
    meaning: unit::flops,
    units: &["GFLOP/s", "TFLOP/s"],
    remark: "",
    example: (10.0, "TFLOP/s"),
    adds_up: false,
};

/// A share of something.
pub(super) const SHARE: Quantity =
    Quantity { what: "a share", meaning: unit::share, units: &["%"], remark: "", example: (0.5, "%"), adds_up: false };

/// Reads a size such as `8 GiB`, in bytes.
///
/// # Errors
///
/// The problem, for a message.
pub fn parse_size(text: &str) -> Result<u64, String> {
    match SIZE.parse(text).map_err(|wrong| wrong.sentence(text, &SIZE))? {
        bytes if bytes >= 1.0 && bytes.is_finite() => Ok(bytes as u64),
        _ => Err(format!("\"{text}\" is no size above zero")),
    }
}

/// Reads a time such as `90s`, `1h 30min` or `7 d`, of at most 100 years.
///
/// # Errors
///
/// The problem, for a message.
pub fn parse_period(text: &str) -> Result<Duration, String> {
    match PERIOD.parse(text).map_err(|wrong| wrong.sentence(text, &PERIOD))? {
        seconds if (0.0..=100.0 * 365.0 * 86_400.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err(format!("\"{text}\" is not within 0 s and 100 years")),
    }
}

/// The reason why a text is no quantity.
#[derive(Debug, Clone, PartialEq)]
enum Wrong<'t> {
    /// It does not begin with a number.
    Number(&'static str),
    /// There is no unit.
    Bare(f64),
    /// There is no such unit. If it is clear which unit was meant, the quantity with that one.
    Unit(&'t str, Option<String>),
    /// The unit stands for either of two.
    Unclear(f64, [Reading; 2]),
}

impl Wrong<'_> {
    /// The problem.
    fn problem(&self, text: &str, quantity: &Quantity) -> String {
        let text = text.trim();
        match self {
            Self::Number(problem) => format!("\"{text}\" {problem}"),
            Self::Bare(_) => format!("\"{text}\" has no unit"),
            Self::Unit(unit, _) => format!("there is no unit \"{unit}\" of {}", quantity.what),
            Self::Unclear(number, readings) => {
                let [a, b] = readings.each_ref().map(|r| format!("{} ({})", r.of(*number), r.words));
                format!("\"{text}\" may be {a} or {b}")
            }
        }
    }

    /// The problem of an option's value, and what to write.
    fn sentence(&self, text: &str, quantity: &Quantity) -> String {
        let problem = self.problem(text, quantity);
        match self {
            Self::Unclear(..) => format!("{problem}; write one of them"),
            Self::Unit(_, Some(meant)) => format!("{problem}; did you mean \"{meant}\"?"),
            _ => format!("{problem}; it must be {}, such as {}", quantity.what, quantity.example()),
        }
    }

    /// The text to write for a key. Numbers that are not `valid` are no advice.
    fn hint(&self, key: &str, quantity: &Quantity, valid: impl Fn(f64) -> bool) -> String {
        let advice = match self {
            // The only one with one unit is a share.
            Self::Bare(x) if valid(*x) && *x <= 100.0 && quantity.units.len() == 1 => {
                return format!("write {key} = \"{x} {}\"", quantity.example.1);
            }
            Self::Bare(x) if valid(*x) && quantity.units.len() > 1 => {
                format!("write {key} = \"{x} {}\", or another unit", quantity.example.1)
            }
            Self::Unit(_, Some(meant)) => format!("did you mean \"{meant}\"?"),
            Self::Unclear(x, readings) if valid(*x) => {
                let [a, b] = readings.each_ref().map(|r| format!("{key} = \"{}\" for {}", r.of(*x), r.words));
                return format!("write {a}, or {b}");
            }
            _ => format!("it must be {}, such as {key} = {}", quantity.what, quantity.example()),
        };
        let Quantity { units, remark, .. } = quantity;
        let end = if advice.ends_with('?') { "" } else { ";" };
        let are = if units.len() == 1 { "unit is" } else { "units are" };
        format!("{advice}{end} the {are} {}{remark}", units.join(", "))
    }
}

impl Quantity {
    /// The number in the base unit.
    fn parse<'t>(&self, text: &'t str) -> Result<f64, Wrong<'t>> {
        let (mut number, all) = leading_number(text)?;
        let (mut sum, mut rest) = (0.0, all);
        loop {
            // No unit has a digit.
            let end = rest.find(|c: char| self.adds_up && c.is_ascii_digit()).unwrap_or(rest.len());
            let (unit, more) = (rest[..end].trim(), &rest[end..]);
            sum += match (self.meaning)(unit) {
                Meaning::One(factor) => number * factor,
                // A part that is wrong says little about what the whole should be.
                _ if end < all.len() => return Err(Wrong::Unit(all.trim(), None)),
                Meaning::Either(readings) => return Err(Wrong::Unclear(number, readings)),
                Meaning::Unknown if unit.is_empty() => return Err(Wrong::Bare(number)),
                Meaning::Unknown => {
                    let meant = self.meant(unit).map(|unit| format!("{number} {unit}"));
                    return Err(Wrong::Unit(unit, meant));
                }
            };
            if more.is_empty() {
                return Ok(sum);
            }
            (number, rest) = leading_number(more).map_err(|_| Wrong::Unit(all.trim(), None))?;
        }
    }

    /// The unit that was meant by one that does not exist: the same one with or without "per second", or one with the
    /// same letters. A unit that is only similar may have another factor.
    fn meant(&self, unit: &str) -> Option<String> {
        let is_unit = |unit: &String| matches!((self.meaning)(unit), Meaning::One(_));
        let without = |end: &str| unit.strip_suffix(end).map(|unit| unit.trim().to_owned());
        let others = [without("/s"), without("ps"), Some(format!("{unit}/s")), without("s").map(|u| format!("{u}/s"))];
        let letters = |unit: &str| {
            let mut letters: Vec<char> =
                unit.chars().filter(|c| !matches!(c, '/' | 'p') && !c.is_whitespace()).collect();
            letters.sort_unstable();
            letters
        };
        let same = || self.units.iter().find(|name| letters(name) == letters(unit)).map(|name| (*name).to_owned());
        others.into_iter().flatten().find(is_unit).or_else(same)
    }

    fn example(&self) -> String {
        format!("\"{} {}\"", self.example.0, self.example.1)
    }
}

/// The number that a text begins with, and the text after it.
fn leading_number(text: &str) -> Result<(f64, &str), Wrong<'_>> {
    let text = text.trim();
    // An `e` before a digit or a sign is an exponent.
    let bytes = text.as_bytes();
    let end = (0..bytes.len()).find(|&i| match bytes[i] {
        b'0'..=b'9' | b'.' | b'+' | b'-' | b'_' => false,
        b'e' | b'E' => !bytes.get(i + 1).is_some_and(|b| matches!(b, b'0'..=b'9' | b'-' | b'+')),
        _ => true,
    });
    let (number, rest) = text.split_at(end.unwrap_or(text.len()));
    if rest.starts_with(',') {
        return Err(Wrong::Number("has a comma in its number; write a point before decimals alone"));
    }
    let number = number.replace('_', "").parse().map_err(|_| Wrong::Number("begins with no number"))?;
    Ok((number, rest))
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
            let written = self.number(key, "", |_| true).ok().flatten().unwrap_or(f64::NAN);
            let hint = Wrong::Bare(written).hint(key, quantity, valid);
            return Err(self.error(key, format!("`{name}` needs a unit"), hint));
        }
        let example = || Wrong::Number("").hint(key, quantity, valid);
        let text = self.text(key).map_err(|e| JobError { hint: example(), ..e })?;
        let Some(text) = text else { return Ok(None) };
        let value = quantity.parse(text).map_err(|wrong| {
            let problem = wrong.problem(text, quantity);
            self.error(key, format!("`{name}`: {problem}"), wrong.hint(key, quantity, valid))
        })?;
        if valid(value) {
            return Ok(Some(value));
        }
        let least = if positive { "above zero" } else { "at least zero" };
        let hint = format!("it must be {least}, such as {key} = {}", quantity.example());
        Err(self.error(key, format!("`{name}` is {text}"), hint))
    }

    /// A size of at least one byte.
    pub(super) fn bytes(&self, key: &'static str) -> Result<Option<u64>, JobError> {
        match self.quantity(key, &SIZE, true)? {
            Some(bytes) if bytes < 1.0 => {
                let hint = format!("it must be at least \"1 B\", such as {key} = {}", SIZE.example());
                Err(self.error(key, format!("`{}` is less than a byte", self.full_name(key)), hint))
            }
            bytes => Ok(bytes.map(|bytes| bytes as u64)),
        }
    }

    /// A speed of computing as a number of TFLOP/s, as its key says. The hint for a text that has a unit converts it.
    pub(super) fn teraflops(&self, key: &'static str) -> Result<Option<f64>, JobError> {
        let positive = |x: f64| x > 0.0;
        self.number(key, "above 0", positive).map_err(|e| match self.text(key).ok().flatten().map(|t| SPEED.parse(t)) {
            Some(Ok(speed)) if positive(speed) => JobError { hint: format!("write {key} = {}", speed / 1e12), ..e },
            _ => e,
        })
    }
}

#[cfg(test)]
mod tests {
    use fusionllm_graph::units;

    use super::*;

    #[test]
    fn quantities_have_units() {
        assert_eq!(RATE.parse("8 Mbps"), Ok(1e6));
        assert_eq!(RATE.parse("2.5Gbps"), Ok(312.5e6));
        assert_eq!(RATE.parse("1e3 kbps"), Ok(125e3));
        assert_eq!(RATE.parse("94.2 Mbits/sec"), Ok(11.775e6));
        assert_eq!(TIME.parse("20 ms"), Ok(0.02));
        assert_eq!(TIME.parse("0 s"), Ok(0.0));
        assert_eq!(PERIOD.parse("1h30m"), Ok(5400.0));
        assert_eq!(SIZE.parse("1_5 kib"), Ok(15.0 * 1024.0));
        assert_eq!(SIZE.parse("2EiB"), Ok(2f64.powi(61)));
        assert_eq!(parse_size("8 GiB"), Ok(8 << 30));
        // A text of any length is read on a small stack.
        assert_eq!(TIME.parse(&"1 s ".repeat(1_000_000)), Ok(1e6));
    }

    /// The hint for `Mbit/s` proposed `MB/s`, which is eight times as much.
    #[test]
    fn advice_has_the_right_factor() {
        let said = |quantity: &Quantity, text: &str| match quantity.parse(text) {
            Ok(value) => format!("{text}: {value}"),
            Err(wrong) => {
                format!("{text}: {}\n  {}", wrong.problem(text, quantity), wrong.hint("rate", quantity, |x| x > 0.0))
            }
        };
        let rates =
            ["8", "8 MB", "8 Mb", "8 Gpbs", "8 MB/min", "8 parsecs", "8 mb/s", "0.5 G", "-8 mb/s", "8,5 Mbps", "fast"];
        insta::assert_snapshot!(rates.map(|text| said(&RATE, text)).join("\n"), @r#"
        8: "8" has no unit
          write rate = "8 Mbps", or another unit; the units are bps, kbps, Mbps, Gbps, Tbps, kB/s, MB/s, GB/s, TB/s; b is a bit and B a byte
        8 MB: there is no unit "MB" of a rate
          did you mean "8 MB/s"? the units are bps, kbps, Mbps, Gbps, Tbps, kB/s, MB/s, GB/s, TB/s; b is a bit and B a byte
        8 Mb: there is no unit "Mb" of a rate
          did you mean "8 Mb/s"? the units are bps, kbps, Mbps, Gbps, Tbps, kB/s, MB/s, GB/s, TB/s; b is a bit and B a byte
        8 Gpbs: there is no unit "Gpbs" of a rate
          did you mean "8 Gbps"? the units are bps, kbps, Mbps, Gbps, Tbps, kB/s, MB/s, GB/s, TB/s; b is a bit and B a byte
        8 MB/min: there is no unit "MB/min" of a rate
          it must be a rate, such as rate = "8 Mbps"; the units are bps, kbps, Mbps, Gbps, Tbps, kB/s, MB/s, GB/s, TB/s; b is a bit and B a byte
        8 parsecs: there is no unit "parsecs" of a rate
          it must be a rate, such as rate = "8 Mbps"; the units are bps, kbps, Mbps, Gbps, Tbps, kB/s, MB/s, GB/s, TB/s; b is a bit and B a byte
        8 mb/s: "8 mb/s" may be 8 Mbps (bits) or 8 MB/s (bytes)
          write rate = "8 Mbps" for bits, or rate = "8 MB/s" for bytes
        0.5 G: "0.5 G" may be 0.5 Gbps (bits) or 0.5 GB/s (bytes)
          write rate = "0.5 Gbps" for bits, or rate = "0.5 GB/s" for bytes
        -8 mb/s: "-8 mb/s" may be -8 Mbps (bits) or -8 MB/s (bytes)
          it must be a rate, such as rate = "8 Mbps"; the units are bps, kbps, Mbps, Gbps, Tbps, kB/s, MB/s, GB/s, TB/s; b is a bit and B a byte
        8,5 Mbps: "8,5 Mbps" has a comma in its number; write a point before decimals alone
          it must be a rate, such as rate = "8 Mbps"; the units are bps, kbps, Mbps, Gbps, Tbps, kB/s, MB/s, GB/s, TB/s; b is a bit and B a byte
        fast: "fast" begins with no number
          it must be a rate, such as rate = "8 Mbps"; the units are bps, kbps, Mbps, Gbps, Tbps, kB/s, MB/s, GB/s, TB/s; b is a bit and B a byte
        "#);
        let sizes = ["8", "8 GB/s", "8 Mbps", "16 Gb", "16 G", "1 000 MB", "50 %"];
        insta::assert_snapshot!(sizes.map(|text| said(&SIZE, text)).join("\n"), @r#"
        8: "8" has no unit
          write rate = "8 GiB", or another unit; the units are B, kB, KiB, MB, MiB, GB, GiB, TB, TiB
        8 GB/s: there is no unit "GB/s" of a size
          did you mean "8 GB"? the units are B, kB, KiB, MB, MiB, GB, GiB, TB, TiB
        8 Mbps: there is no unit "Mbps" of a size
          it must be a size, such as rate = "16 GiB"; the units are B, kB, KiB, MB, MiB, GB, GiB, TB, TiB
        16 Gb: "16 Gb" may be 16 Gbit (bits) or 16 GB (bytes)
          write rate = "16 Gbit" for bits, or rate = "16 GB" for bytes
        16 G: "16 G" may be 16 GB (powers of 1000) or 16 GiB (powers of 1024)
          write rate = "16 GB" for powers of 1000, or rate = "16 GiB" for powers of 1024
        1 000 MB: there is no unit "000 MB" of a size
          it must be a size, such as rate = "16 GiB"; the units are B, kB, KiB, MB, MiB, GB, GiB, TB, TiB
        50 %: there is no unit "%" of a size
          it must be a size, such as rate = "16 GiB"; the units are B, kB, KiB, MB, MiB, GB, GiB, TB, TiB
        "#);
        let times = ["20 m", "20 Ms", "1 h 20 M", "1 000 ms", "20 sm", "20 months"];
        insta::assert_snapshot!(times.map(|text| said(&TIME, text)).join("\n"), @r#"
        20 m: "20 m" may be 20 ms (milliseconds) or 20 min (minutes)
          write rate = "20 ms" for milliseconds, or rate = "20 min" for minutes
        20 Ms: "20 Ms" may be 20 ms (milliseconds) or 20000000 s (millions of seconds)
          write rate = "20 ms" for milliseconds, or rate = "20000000 s" for millions of seconds
        1 h 20 M: there is no unit "h 20 M" of a time
          it must be a time, such as rate = "20 ms"; the units are ns, us, ms, s
        1 000 ms: there is no unit "000 ms" of a time
          it must be a time, such as rate = "20 ms"; the units are ns, us, ms, s
        20 sm: there is no unit "sm" of a time
          did you mean "20 ms"? the units are ns, us, ms, s
        20 months: there is no unit "months" of a time
          it must be a time, such as rate = "20 ms"; the units are ns, us, ms, s
        "#);
        let options = ["8 GB/s", "16 Gb", "8", "8 parsecs"].map(|text| parse_size(text).unwrap_err());
        insta::assert_snapshot!(options.join("\n"), @r#"
        there is no unit "GB/s" of a size; did you mean "8 GB"?
        "16 Gb" may be 16 Gbit (bits) or 16 GB (bytes); write one of them
        "8" has no unit; it must be a size, such as "16 GiB"
        there is no unit "parsecs" of a size; it must be a size, such as "16 GiB"
        "#);
    }

    /// Whatever a message says can be written in a file.
    #[test]
    fn printed_quantities_read_back() {
        let same = |quantity: &Quantity, text: String, value: f64| {
            let read = quantity.parse(&text).unwrap();
            assert!((read - value).abs() <= 0.005 * value, "{text} is read as {read}, not as {value}");
        };
        let numbers = |powers: std::ops::Range<i32>| {
            powers.flat_map(|power| [1.0, 1.25, 4.44, 9.994, 9.996].map(|digits: f64| digits * 10f64.powi(power)))
        };
        numbers(-9..6).for_each(|x| same(&TIME, units::seconds(x), x));
        for x in numbers(1..19) {
            same(&RATE, units::rate(x), x);
            same(&RATE, units::measure(x, "B/s"), x);
            same(&SPEED, units::measure(x, "FLOP/s"), x);
            same(&SIZE, units::bytes(x as u64), x.floor());
        }
    }
}
