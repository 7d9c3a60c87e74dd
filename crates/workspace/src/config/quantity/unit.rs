//! The meanings of units, as people write them.
//!
//! The case of a letter tells bits from bytes. It counts where the rest of the unit shows that its writer cares about
//! case: `Mb/s` are bits, and `mb/s` could be either. Nothing is guessed.

/// The meaning of a unit.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Meaning {
    /// So many of the base unit.
    One(f64),
    /// It stands for either of two units.
    Either([Reading; 2]),
    /// There is no such unit.
    Unknown,
}

/// One of two units that a text may stand for.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Reading {
    /// How many of the unit one of the written unit is.
    times: f64,
    unit: String,
    /// The reading in words that follow "for".
    pub(super) words: &'static str,
}

impl Reading {
    fn new(times: f64, unit: impl Into<String>, words: &'static str) -> Self {
        Self { times, unit: unit.into(), words }
    }

    /// The quantity that a number of the written unit is.
    pub(super) fn of(&self, number: f64) -> String {
        format!("{} {}", number * self.times, self.unit)
    }
}

/// A rate, in bytes per second.
pub(super) fn rate(unit: &str) -> Meaning {
    let unit = closed_up(unit);
    let Some(Data { prefix, base, rest }) = Data::read(&unit) else { return Meaning::Unknown };
    let is_rate = PER_SECOND.contains(&rest.to_lowercase().as_str()) || (base == Base::None && rest.is_empty());
    let cares = unit.contains(|c: char| c.is_lowercase());
    match base {
        _ if !is_rate => Meaning::Unknown,
        Base::Bits => Meaning::One(prefix.factor / 8.0),
        Base::Bytes => Meaning::One(prefix.factor),
        Base::Letter('b') if prefix.has_its_case => Meaning::One(prefix.factor / 8.0),
        Base::Letter('B') if cares => Meaning::One(prefix.factor),
        Base::Letter(_) | Base::None => {
            let symbol = prefix.symbol();
            let bits = if prefix.binary { format!("{symbol}bit/s") } else { format!("{symbol}bps") };
            let bytes = format!("{symbol}B/s");
            Meaning::Either([Reading::new(1.0, bits, "bits"), Reading::new(1.0, bytes, "bytes")])
        }
    }
}

/// A size, in bytes. Memory and files are measured in bytes, so `gb` can only mean `GB`.
pub(super) fn size(unit: &str) -> Meaning {
    let unit = closed_up(unit);
    let Some(Data { prefix, base, rest: "" }) = Data::read(&unit) else { return Meaning::Unknown };
    let symbol = prefix.symbol();
    match base {
        Base::Bits => Meaning::One(prefix.factor / 8.0),
        Base::Bytes | Base::Letter('B') => Meaning::One(prefix.factor),
        Base::Letter(_) if unit.len() > 1 && !unit.contains(|c: char| c.is_uppercase()) => Meaning::One(prefix.factor),
        Base::Letter(_) => Meaning::Either([
            Reading::new(1.0, format!("{symbol}bit"), "bits"),
            Reading::new(1.0, format!("{symbol}B"), "bytes"),
        ]),
        Base::None if prefix.binary => Meaning::One(prefix.factor),
        Base::None => Meaning::Either([
            Reading::new(1.0, format!("{symbol}B"), "powers of 1000"),
            Reading::new(1.0, format!("{}iB", symbol.to_uppercase()), "powers of 1024"),
        ]),
    }
}

/// A short time, in seconds.
pub(super) fn time(unit: &str) -> Meaning {
    match unit {
        "m" | "M" => Meaning::Either([MILLISECONDS, MINUTES].map(|(unit, words)| Reading::new(1.0, unit, words))),
        _ => duration(unit),
    }
}

/// A time in which people plan, in seconds.
pub(super) fn period(unit: &str) -> Meaning {
    match unit {
        "m" => Meaning::One(60.0),
        "M" => Meaning::Either([Reading::new(1.0, MINUTES.0, MINUTES.1), Reading::new(30.0, "d", "months of 30 days")]),
        _ => duration(unit),
    }
}

/// A speed, in floating-point operations per second. Nobody writes a thousandth of one, so case does not count.
pub(super) fn flops(unit: &str) -> Meaning {
    let unit = closed_up(unit).to_lowercase();
    let ends = ["flop/s", "flops", "flops/s", "flop/sec", "flops/sec"];
    let prefix = ends.iter().find_map(|end| unit.strip_suffix(end));
    match prefix.map(|prefix| (prefix, Prefix::read(prefix))) {
        Some(("", _)) => Meaning::One(1.0),
        Some((_, Some((Prefix { factor, binary: false, .. }, "")))) => Meaning::One(factor),
        _ => Meaning::Unknown,
    }
}

/// A share of something.
pub(super) fn share(unit: &str) -> Meaning {
    match unit {
        "%" | "percent" => Meaning::One(0.01),
        _ => Meaning::Unknown,
    }
}

const MILLISECONDS: (&str, &str) = ("ms", "milliseconds");
const MINUTES: (&str, &str) = ("min", "minutes");

/// The names of times in the singular, each with its seconds.
const DURATIONS: [(&[&str], f64); 8] = [
    (&["ns", "nsec", "nanosecond"], 1e-9),
    // The micro sign and the Greek letter look alike.
    (&["us", "\u{b5}s", "\u{3bc}s", "usec", "microsecond"], 1e-6),
    (&["ms", "msec", "millisecond"], 1e-3),
    (&["s", "sec", "second"], 1.0),
    (&["min", "minute"], 60.0),
    (&["h", "hr", "hour"], 3600.0),
    (&["d", "day"], 86_400.0),
    (&["w", "week"], 604_800.0),
];

fn duration(unit: &str) -> Meaning {
    let lower = unit.to_lowercase();
    let singular = lower.strip_suffix('s').filter(|name| name.len() > 1);
    let is_named = |names: &[&str]| names.contains(&lower.as_str()) || singular.is_some_and(|s| names.contains(&s));
    match DURATIONS.iter().find(|(names, _)| is_named(names)) {
        // A capital letter before a symbol stands for a million.
        Some((names, _)) if names.contains(&"ms") && unit.starts_with('M') && !lower.starts_with("milli") => {
            Meaning::Either([
                Reading::new(1.0, MILLISECONDS.0, MILLISECONDS.1),
                Reading::new(1e6, "s", "millions of seconds"),
            ])
        }
        Some((_, seconds)) => Meaning::One(*seconds),
        None => Meaning::Unknown,
    }
}

/// The ends of a rate's unit.
const PER_SECOND: [&str; 7] = ["/s", "ps", "/sec", "/second", "pers", "persec", "persecond"];

/// A unit without its blanks.
fn closed_up(unit: &str) -> String {
    unit.split_whitespace().collect()
}

/// The things that a unit of data counts.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Base {
    /// Bits, in full.
    Bits,
    /// Bytes, in full.
    Bytes,
    /// A letter whose case may tell.
    Letter(char),
    /// It does not say.
    None,
}

/// A unit that begins with a unit of data, such as `MiB` or `kbit/s`.
struct Data<'u> {
    prefix: Prefix,
    base: Base,
    rest: &'u str,
}

impl<'u> Data<'u> {
    fn read(unit: &'u str) -> Option<Self> {
        let alone = (Prefix::NONE, unit);
        let with_prefix = Prefix::read(unit);
        let named = [with_prefix, Some(alone)].into_iter().flatten().find_map(|(prefix, text)| {
            let (base, rest) = Base::read(text)?;
            Some(Self { prefix, base, rest })
        });
        named.or_else(|| with_prefix.map(|(prefix, rest)| Self { prefix, base: Base::None, rest }))
    }
}

impl Base {
    /// The base at the start of a text, and the text after it.
    fn read(text: &str) -> Option<(Self, &str)> {
        let names = [("bits", Self::Bits), ("bit", Self::Bits), ("bytes", Self::Bytes), ("byte", Self::Bytes)];
        let named = names.into_iter().find_map(|(name, base)| Some((base, without(text, name)?)));
        named.or_else(|| {
            let letter = text.chars().next().filter(|c| matches!(c, 'b' | 'B'))?;
            Some((Self::Letter(letter), &text[1..]))
        })
    }
}

/// A prefix of a unit.
#[derive(Debug, Clone, Copy)]
struct Prefix {
    /// Its letter, as the standards write it; empty for none.
    letter: &'static str,
    /// Whether it is one of those that count in 1024.
    binary: bool,
    factor: f64,
    /// Whether it is written in the case of the standards, or in one that is as usual.
    has_its_case: bool,
}

/// The prefixes in order: letters, and names for powers of 1000 and of 1024.
const PREFIXES: [(&str, &str, &str); 6] = [
    ("k", "kilo", "kibi"),
    ("M", "mega", "mebi"),
    ("G", "giga", "gibi"),
    ("T", "tera", "tebi"),
    ("P", "peta", "pebi"),
    ("E", "exa", "exbi"),
];

impl Prefix {
    const NONE: Self = Self { letter: "", binary: false, factor: 1.0, has_its_case: true };

    /// The prefix that a unit begins with, and the text after it.
    fn read(unit: &str) -> Option<(Self, &str)> {
        PREFIXES.into_iter().zip(1..).find_map(|((letter, decimal, binary), power)| {
            let rest = without(unit, letter)?;
            let (binary, rest, named) = if let Some(rest) = without(unit, binary) {
                (true, rest, true)
            } else if let Some(rest) = without(unit, decimal) {
                (false, rest, true)
            } else {
                // An `i` belongs to the prefix before a `b`, and at the end.
                let after = without(rest, "i").filter(|after| after.is_empty() || without(after, "b").is_some());
                (after.is_some(), after.unwrap_or(rest), false)
            };
            let factor = if binary { 1024f64.powi(power) } else { 1000f64.powi(power) };
            let has_its_case = named || unit.starts_with(char::is_uppercase) || (letter == "k" && !binary);
            Some((Self { letter, binary, factor, has_its_case }, rest))
        })
    }

    fn symbol(&self) -> String {
        match self.binary {
            true => format!("{}i", self.letter.to_uppercase()),
            false => self.letter.to_owned(),
        }
    }
}

/// The text after a start, whose case does not count.
fn without<'t>(text: &'t str, start: &str) -> Option<&'t str> {
    text.get(..start.len()).filter(|head| head.eq_ignore_ascii_case(start))?;
    text.get(start.len()..)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The units that a text may stand for.
    fn units(meaning: &Meaning) -> Vec<String> {
        match meaning {
            Meaning::Either(readings) => readings.iter().map(|r| format!("{} {}", r.times, r.unit)).collect(),
            Meaning::One(_) | Meaning::Unknown => panic!("{meaning:?}"),
        }
    }

    #[test]
    fn a_bit_is_small_and_a_byte_is_large() {
        let bits =
            ["Mb/s", "Mbps", "Mbit/s", "Mbits/s", "mbit/s", "MBIT/S", "Mbits/sec", "megabits per second", "M bit / s"];
        let bytes = ["MB/s", "MBps", "mB/s", "MByte/s", "MBytes/sec", "mbyte/s", "megabytes per second"];
        for unit in bits {
            assert_eq!(rate(unit), Meaning::One(125e3), "{unit}");
        }
        for unit in bytes {
            assert_eq!(rate(unit), Meaning::One(1e6), "{unit}");
        }
        let others = [
            ("bps", 0.125),
            ("b/s", 0.125),
            ("B/s", 1.0),
            ("kb/s", 125.0),
            ("kbps", 125.0),
            ("Kbps", 125.0),
            ("KB/s", 1e3),
            ("kB/s", 1e3),
            ("Gb/s", 125e6),
            ("GBps", 1e9),
            ("Tb/s", 125e9),
            ("Pbit/s", 125e12),
            ("KiB/s", 1024.0),
            ("MiB/s", 1048576.0),
            ("GiBps", 1073741824.0),
            ("Mibit/s", 131072.0),
            ("Mib/s", 131072.0),
            ("gibibytes per second", 1073741824.0),
        ];
        for (unit, bytes_per_s) in others {
            assert_eq!(rate(unit), Meaning::One(bytes_per_s), "{unit}");
        }
    }

    #[test]
    fn a_unit_without_case_has_two_readings() {
        for unit in ["mb/s", "MB/S", "MBPS", "mbps", "M", "m", "M/s"] {
            assert_eq!(units(&rate(unit)), ["1 Mbps", "1 MB/s"], "{unit}");
        }
        for unit in ["gb/s", "GBPS", "gbps", "G"] {
            assert_eq!(units(&rate(unit)), ["1 Gbps", "1 GB/s"], "{unit}");
        }
        assert_eq!(units(&rate("KBPS")), ["1 kbps", "1 kB/s"]);
        assert_eq!(units(&rate("BPS")), ["1 bps", "1 B/s"]);
        assert_eq!(units(&rate("mib/s")), ["1 Mibit/s", "1 MiB/s"]);
        assert_eq!(units(&size("Gb")), ["1 Gbit", "1 GB"]);
        assert_eq!(units(&size("Kib")), ["1 Kibit", "1 KiB"]);
        assert_eq!(units(&size("b")), ["1 bit", "1 B"]);
        assert_eq!(units(&size("G")), ["1 GB", "1 GiB"]);
        assert_eq!(units(&size("k")), ["1 kB", "1 KiB"]);
        for unit in ["m", "M"] {
            assert_eq!(units(&time(unit)), ["1 ms", "1 min"]);
        }
        assert_eq!(units(&period("M")), ["1 min", "30 d"]);
        for unit in ["Ms", "MS", "Msec"] {
            assert_eq!(units(&time(unit)), ["1 ms", "1000000 s"]);
        }
    }

    #[test]
    fn sizes_times_and_speeds_have_the_usual_units() {
        for (unit, bytes) in [
            ("B", 1.0),
            ("kB", 1e3),
            ("KB", 1e3),
            ("gb", 1e9),
            ("GB", 1e9),
            ("GiB", 1073741824.0),
            ("gib", 1073741824.0),
            ("Gi", 1073741824.0),
            ("Gbit", 125e6),
            ("gigabytes", 1e9),
            ("PiB", 1125899906842624.0),
            ("EB", 1e18),
        ] {
            assert_eq!(size(unit), Meaning::One(bytes), "{unit}");
        }
        for (unit, seconds) in [
            ("ms", 1e-3),
            ("µs", 1e-6),
            ("US", 1e-6),
            ("S", 1.0),
            ("secs", 1.0),
            ("Minutes", 60.0),
            ("weeks", 604_800.0),
        ] {
            assert_eq!(time(unit), Meaning::One(seconds), "{unit}");
        }
        assert_eq!((period("m"), period("H")), (Meaning::One(60.0), Meaning::One(3600.0)));
        for (unit, speed) in [("TFLOPS", 1e12), ("tflops", 1e12), ("TFLOP/s", 1e12), ("Gflops/s", 1e9), ("FLOP/s", 1.0)]
        {
            assert_eq!(flops(unit), Meaning::One(speed), "{unit}");
        }
    }

    #[test]
    fn nothing_is_guessed() {
        for unit in ["MB/min", "MB/h", "MB", "Mbit", "parsecs", "ms", "ps", "MHz", "MB/s/s", "", "/s", "ü", "Mü", "biü"]
        {
            assert_eq!(rate(unit), Meaning::Unknown, "{unit}");
        }
        for unit in ["MB/s", "GBs", "%", "", "ms", "iB"] {
            assert_eq!(size(unit), Meaning::Unknown, "{unit}");
        }
        for unit in ["Gs", "ks", "mm", "%", "", "months"] {
            assert_eq!(time(unit), Meaning::Unknown, "{unit}");
        }
        for unit in ["TOPS", "T", "TiFLOPS", "GB/s", ""] {
            assert_eq!(flops(unit), Meaning::Unknown, "{unit}");
        }
    }
}
