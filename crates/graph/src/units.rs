//! Numbers as people read them, for the messages of all crates.

/// A number of things: `1 peer`, `3 peers`, `2 micro-batches`. `thing` is its name in the singular.
pub fn counted(count: impl TryInto<u64>, thing: &str) -> String {
    match count.try_into().unwrap_or(u64::MAX) {
        1 => format!("1 {thing}"),
        n if thing.ends_with(['s', 'x']) || thing.ends_with("ch") => format!("{n} {thing}es"),
        n => format!("{n} {thing}s"),
    }
}

/// Ascending numbers, with neighbours as a range: `0–3, 7`; `–` for none.
pub fn ranges(numbers: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &n in numbers {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == n => *last = n,
            _ => runs.push((n, n)),
        }
    }
    let text: Vec<String> = runs.iter().map(|(a, b)| if a == b { a.to_string() } else { format!("{a}–{b}") }).collect();
    if text.is_empty() { "–".into() } else { text.join(", ") }
}

/// Three digits and a decimal prefix: `1.23 M`, `45.6 G`, `789`.
pub fn count(x: f64) -> String {
    measure(x, "").trim_end().to_owned()
}

/// Three digits, a decimal prefix and a unit: `1.23 TFLOP/s`, `789 B/s`.
pub fn measure(x: f64, unit: &str) -> String {
    let (mut x, mut prefix) = (x, "");
    for next in ["k", "M", "G", "T", "P", "E"] {
        // A number that would round to 1000 gets the next prefix.
        if x.abs() < 999.5 {
            break;
        }
        (x, prefix) = (x / 1000.0, next);
    }
    format!("{} {prefix}{unit}", three_digits(x))
}

/// Bytes with a binary prefix: `1.23 MiB`, `512 B`.
pub fn bytes(n: u64) -> String {
    let (mut x, mut unit) = (n as f64, "B");
    for next in ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"] {
        if x < 999.5 {
            break;
        }
        (x, unit) = (x / 1024.0, next);
    }
    format!("{} {unit}", three_digits(x))
}

/// Bytes per second as the bits per second that links are sold by: `8 Mbps`, `2.5 Gbps`.
pub fn rate(bytes_per_s: f64) -> String {
    let (mut x, mut unit) = (8.0 * bytes_per_s, "bps");
    for next in ["kbps", "Mbps", "Gbps", "Tbps"] {
        if x < 999.5 {
            break;
        }
        (x, unit) = (x / 1000.0, next);
    }
    format!("{} {unit}", three_digits(x))
}

/// A duration: `25 µs`, `850 ms`, `12.3 s`, `4 min 05 s`, `2 h 10 min`.
pub fn seconds(s: f64) -> String {
    match s {
        s if !s.is_finite() => "?".into(),
        s if s > 0.0 && s < 0.9995e-6 => format!("{} ns", three_digits(1e9 * s)),
        s if s > 0.0 && s < 0.9995e-3 => format!("{} µs", three_digits(1e6 * s)),
        s if s < 0.9995 => format!("{} ms", three_digits(1000.0 * s)),
        s if s < 59.95 => format!("{} s", three_digits(s)),
        s if s < 3599.5 => {
            let s = s.round() as u64;
            format!("{} min {:02} s", s / 60, s % 60)
        }
        s => {
            let minutes = (s / 60.0).round() as u64;
            format!("{} h {:02} min", minutes / 60, minutes % 60)
        }
    }
}

fn three_digits(x: f64) -> String {
    match x.abs() {
        a if a.fract() == 0.0 && a < 1000.0 => format!("{x:.0}"),
        a if a < 9.995 => format!("{x:.2}"),
        a if a < 99.95 => format!("{x:.1}"),
        _ => format!("{x:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thing_is_no_plural() {
        let said = [(0, "peer"), (1, "peer"), (2, "peer"), (1, "micro-batch"), (8, "micro-batch"), (2, "process")];
        let said = said.map(|(count, thing)| counted(count, thing));
        assert_eq!(said, ["0 peers", "1 peer", "2 peers", "1 micro-batch", "8 micro-batches", "2 processes"]);
    }

    #[test]
    fn neighbours_are_a_range() {
        assert_eq!(ranges(&[0, 1, 2, 3, 7]), "0–3, 7");
        assert_eq!((ranges(&[5]), ranges(&[])), ("5".into(), "–".into()));
    }

    #[test]
    fn numbers_keep_three_digits() {
        let counts = [0.0, 7.0, 999.0, 1000.0, 1234.0, 999_499.0, 999_500.0, 45.6e9, 2.5e20].map(count);
        assert_eq!(counts, ["0", "7", "999", "1 k", "1.23 k", "999 k", "1.00 M", "45.6 G", "250 E"]);
        assert_eq!([0, 512, 1000, 1024, 3_400_000].map(bytes), ["0 B", "512 B", "0.98 KiB", "1 KiB", "3.24 MiB"]);
        assert_eq!([1e6, 312.5e6, 125e3].map(rate), ["8 Mbps", "2.50 Gbps", "1 Mbps"]);
        assert_eq!([789.0, 1.234e12].map(|x| measure(x, "FLOP/s")), ["789 FLOP/s", "1.23 TFLOP/s"]);
        let times = [0.0, 4e-9, 25.04e-6, 0.00085, 0.85, 12.34, 59.96, 245.4, 3600.0, 7800.0].map(seconds);
        assert_eq!(
            times,
            [
                "0 ms",
                "4 ns",
                "25.0 µs",
                "850 µs",
                "850 ms",
                "12.3 s",
                "1 min 00 s",
                "4 min 05 s",
                "1 h 00 min",
                "2 h 10 min"
            ]
        );
    }
}
