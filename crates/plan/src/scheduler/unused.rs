//! Sentences about devices that a plan does not use.

/// Devices that a plan does not use for one reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unused<'a> {
    /// How many devices they are.
    pub count: usize,
    /// The reason, as half a sentence.
    pub reason: &'a str,
    /// The devices' names, if the note has them.
    pub names: Vec<&'a str>,
}

const ALONE: &str = " is not used: ";
const TOGETHER: &str = "not used, since ";
const IDLE: &str = " nothing to do: ";

/// The devices that a plan's notes ([`Origin::notes`](crate::Origin)) call unused.
pub fn unused(notes: &[String]) -> Vec<Unused<'_>> {
    notes.iter().filter_map(|note| read(note)).collect()
}

fn read(note: &str) -> Option<Unused<'_>> {
    if let Some((reason, names)) = note.strip_prefix(TOGETHER).and_then(|rest| rest.split_once(": ")) {
        let names: Vec<&str> = names.split(", ").collect();
        return Some(Unused { count: names.len(), reason, names });
    }
    if let Some((name, reason)) = note.split_once(ALONE) {
        return Some(Unused { count: 1, reason, names: vec![name] });
    }
    let (who, reason) = note.split_once(IDLE)?;
    let count = who.split(' ').next()?.parse().ok()?;
    Some(Unused { count, reason, names: Vec::new() })
}

/// The note about one device.
pub(super) fn unused_alone(name: &str, reason: &str) -> String {
    format!("{name}{ALONE}{reason}")
}

/// The note about several devices with one reason, which has no colon. Their names are separated by commas.
pub(super) fn unused_together(names: &str, reason: &str) -> String {
    format!("{TOGETHER}{reason}: {names}")
}

/// The note about `idle` of `all` peers, whose names it leaves out.
pub(super) fn unused_unnamed(idle: usize, all: &str, reason: &str) -> String {
    format!("{idle} of {all} {}{IDLE}{reason}", if idle == 1 { "has" } else { "have" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_read_as_they_are_written() {
        let notes = [
            unused_alone("ann", "no link leads there: none"),
            "a note: nothing else".into(),
            unused_together("b-0, b-1", "slow"),
            unused_unnamed(3, "8 peers", "few operators"),
        ];
        let read = |count, reason, names: &[&'static str]| Unused { count, reason, names: names.to_vec() };
        let expected = [
            read(1, "no link leads there: none", &["ann"]),
            read(2, "slow", &["b-0", "b-1"]),
            read(3, "few operators", &[]),
        ];
        assert_eq!(unused(&notes), expected);
    }
}
