/// A number of bytes for the user.
pub(crate) fn size(bytes: f64) -> String {
    match bytes {
        b if b >= 1024.0 * 1024.0 * 1024.0 => format!("{:.1} GiB", b / 1024.0 / 1024.0 / 1024.0),
        b if b >= 1024.0 * 1024.0 => format!("{:.1} MiB", b / 1024.0 / 1024.0),
        b => format!("{:.1} KiB", b / 1024.0),
    }
}
