//! Sentences about devices that a plan does not use.

/// Devices that a plan does not use for one reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unused<'a> {
    /// The reason, as half a sentence.
    pub reason: &'a str,
    /// The devices' names.
    pub names: Vec<&'a str>,
}

const ALONE: &str = " is not used: ";
const TOGETHER: &str = "not used, since ";

/// The devices that a plan's notes ([`Origin::notes`](crate::Origin)) call unused.
pub fn unused(notes: &[String]) -> Vec<Unused<'_>> {
    notes.iter().filter_map(|note| read(note)).collect()
}

fn read(note: &str) -> Option<Unused<'_>> {
    if let Some((reason, names)) = note.strip_prefix(TOGETHER).and_then(|rest| rest.split_once(": ")) {
        return Some(Unused { reason, names: names.split(", ").collect() });
    }
    let (name, reason) = note.split_once(ALONE)?;
    Some(Unused { reason, names: vec![name] })
}

/// The note about one device.
pub(super) fn unused_alone(name: &str, reason: &str) -> String {
    format!("{name}{ALONE}{reason}")
}

/// The note about several devices with one reason, which has no colon. Their names are separated by commas.
pub(super) fn unused_together(names: &str, reason: &str) -> String {
    format!("{TOGETHER}{reason}: {names}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_read_as_they_are_written() {
        let notes =
            [unused_alone("ann", "no link leads there: none"), "a note".into(), unused_together("b-0, b-1", "slow")];
        let alone = Unused { reason: "no link leads there: none", names: vec!["ann"] };
        assert_eq!(unused(&notes), [alone, Unused { reason: "slow", names: vec!["b-0", "b-1"] }]);
    }
}
