//! Pictures of plans as SVG, and one step as a trace.

mod cluster;
mod svg;
mod timeline;
mod trace;

pub use cluster::cluster;
pub use timeline::timeline;
pub use trace::chrome_trace;

/// Seconds with a readable unit.
fn seconds(s: f64) -> String {
    match s {
        s if s < 1e-3 => format!("{} µs", three_digits(1e6 * s)),
        s if s < 1.0 => format!("{} ms", three_digits(1e3 * s)),
        s if s < 600.0 => format!("{} s", three_digits(s)),
        s => format!("{} min", three_digits(s / 60.0)),
    }
}

/// Bytes/s as bits per second with a readable unit.
fn rate(bytes_per_s: f64) -> String {
    let bits = 8.0 * bytes_per_s;
    match bits {
        b if b < 1e6 => format!("{} kbps", three_digits(b / 1e3)),
        b if b < 1e9 => format!("{} Mbps", three_digits(b / 1e6)),
        b => format!("{} Gbps", three_digits(b / 1e9)),
    }
}

fn bytes(n: u64) -> String {
    match n as f64 {
        b if b < 1048576.0 => format!("{} KiB", three_digits(b / 1024.0)),
        b if b < 1073741824.0 => format!("{} MiB", three_digits(b / 1048576.0)),
        b => format!("{} GiB", three_digits(b / 1073741824.0)),
    }
}

fn three_digits(x: f64) -> String {
    let digits = match x.abs() {
        a if a < 9.995 => 2,
        a if a < 99.95 => 1,
        _ => 0,
    };
    let text = format!("{x:.digits$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}
