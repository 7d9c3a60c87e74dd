use crate::{Hello, VERSION};

/// Longest name, backend or device, in bytes.
const MAX_TEXT_BYTES: usize = 64;

/// Longest address, in bytes.
const MAX_ADDR_BYTES: usize = 4096;

/// The peers that a run waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExpectedPeers {
    /// This many peers, with any names.
    Any(usize),
    /// Peers with these names, numbered in this order.
    Named(Vec<String>),
}

impl ExpectedPeers {
    /// The number of peers.
    pub fn count(&self) -> usize {
        match self {
            Self::Any(count) => *count,
            Self::Named(names) => names.len(),
        }
    }
}

/// Gathers the peers of a run.
#[derive(Debug)]
pub struct Lobby {
    expected: ExpectedPeers,
    secret: [u8; 16],
    members: Vec<Member>,
    /// The next number for a generated name.
    next_number: usize,
}

/// A peer that has joined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// The caller's number of its connection.
    pub connection: u64,
    /// Unique among the members.
    pub name: String,
    /// The backend's name.
    pub backend: String,
    /// The device's name, for people.
    pub device: String,
    /// The address for other peers.
    pub addr: Vec<u8>,
}

impl Lobby {
    /// A lobby for peers that know the secret.
    pub fn new(expected: ExpectedPeers, secret: [u8; 16]) -> Self {
        Self { expected, secret, members: Vec::new(), next_number: 0 }
    }

    /// Admits a joiner, or returns the reason for refusing it.
    pub fn join(&mut self, connection: u64, hello: Hello) -> Result<&Member, String> {
        // Compared without a branch on the bytes, so that timing reveals nothing.
        let wrong = hello.secret.iter().zip(&self.secret).fold(0u8, |d, (a, b)| d | (a ^ b));
        if wrong != 0 {
            return Err("the ticket's secret is wrong; use the ticket of this run".into());
        }
        if hello.version != VERSION {
            return Err(format!(
                "it speaks protocol version {}, but the broker speaks {VERSION}; install the same FusionLLM on both",
                hello.version
            ));
        }
        if self.members.len() >= self.expected.count() {
            return Err(format!("all {} peers have already joined", self.expected.count()));
        }
        for (what, text) in [("name", &hello.name), ("backend", &hello.backend), ("device", &hello.device)] {
            if text.len() > MAX_TEXT_BYTES || text.chars().any(char::is_control) {
                return Err(format!("its {what} must be at most {MAX_TEXT_BYTES} bytes without control characters"));
            }
        }
        if hello.addr.len() > MAX_ADDR_BYTES {
            return Err(format!(
                "its address has {} bytes, but at most {MAX_ADDR_BYTES} are allowed",
                hello.addr.len()
            ));
        }
        if self.members.iter().any(|m| m.name == hello.name) {
            return Err(format!("the name {:?} is taken; choose another with --name", hello.name));
        }
        let free = |name: &String| !self.members.iter().any(|m| m.name == *name);
        let mut name = hello.name;
        match &self.expected {
            ExpectedPeers::Any(_) => {
                while name.is_empty() || !free(&name) {
                    name = format!("peer-{}", self.next_number);
                    self.next_number += 1;
                }
            }
            ExpectedPeers::Named(names) if name.is_empty() => {
                name = names.iter().find(|n| free(n)).cloned().unwrap_or_default();
            }
            ExpectedPeers::Named(names) if !names.contains(&name) => {
                let left: Vec<&str> = names.iter().filter(|n| free(n)).map(String::as_str).collect();
                return Err(format!(
                    "the run's plan has no peer {name:?}; join as one of those it waits for with --name: {}",
                    left.join(", ")
                ));
            }
            ExpectedPeers::Named(_) => {}
        }
        self.members.push(Member { connection, name, backend: hello.backend, device: hello.device, addr: hello.addr });
        Ok(&self.members[self.members.len() - 1])
    }

    /// Removes a joiner whose connection has ended.
    pub fn leave(&mut self, connection: u64) -> Option<Member> {
        let at = self.members.iter().position(|m| m.connection == connection)?;
        Some(self.members.remove(at))
    }

    /// The peers that have joined so far.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// All peers in the order of their numbers, once all have joined; `None` before.
    ///
    /// The order is that of [`ExpectedPeers::Named`], or else that of the names with digits compared as numbers. So the
    /// order of joining has no influence.
    pub fn complete(&self) -> Option<Vec<Member>> {
        let mut members = self.members.clone();
        match &self.expected {
            ExpectedPeers::Any(_) => members.sort_by_cached_key(|m| (natural_key(&m.name), m.name.clone())),
            ExpectedPeers::Named(names) => members.sort_by_key(|m| names.iter().position(|n| *n == m.name)),
        }
        (members.len() == self.expected.count()).then_some(members)
    }
}

/// Sorts `peer-2` before `peer-10`.
fn natural_key(name: &str) -> Vec<(u64, String)> {
    let mut key = Vec::new();
    let mut rest = name;
    while !rest.is_empty() {
        let text = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let (word, tail) = rest.split_at(text);
        let digits = tail.find(|c: char| !c.is_ascii_digit()).unwrap_or(tail.len());
        let (number, tail) = tail.split_at(digits);
        key.push((0, word.to_string()));
        key.push((number.parse().unwrap_or(u64::MAX), String::new()));
        rest = tail;
    }
    key
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(name: &str) -> Hello {
        Hello {
            version: VERSION,
            secret: [7; 16],
            name: name.into(),
            backend: "b".into(),
            device: "d".into(),
            addr: vec![],
        }
    }

    #[test]
    fn only_joiners_with_the_secret_are_admitted() {
        let mut lobby = Lobby::new(ExpectedPeers::Any(1), [7; 16]);
        assert!(lobby.join(1, Hello { secret: [8; 16], ..hello("a") }).unwrap_err().contains("secret"));
        assert!(lobby.join(1, Hello { version: 99, ..hello("a") }).unwrap_err().contains("version 99"));
        assert_eq!(lobby.join(1, hello("a")).unwrap().name, "a");
        assert!(lobby.join(2, hello("b")).unwrap_err().contains("already joined"));
    }

    fn numbered(lobby: &Lobby) -> Vec<String> {
        lobby.complete().unwrap().into_iter().map(|m| m.name).collect()
    }

    /// Names that differed only in leading zeros were once ordered by arrival.
    #[test]
    fn different_names_are_never_equal_in_order() {
        for names in [["p01", "p1", "p001"], ["p1", "p001", "p01"]] {
            let mut lobby = Lobby::new(ExpectedPeers::Any(3), [7; 16]);
            for (i, name) in names.iter().enumerate() {
                lobby.join(i as u64, hello(name)).unwrap();
            }
            assert_eq!(numbered(&lobby), ["p001", "p01", "p1"]);
        }
    }

    #[test]
    fn a_plan_names_its_peers() {
        let mut lobby = Lobby::new(ExpectedPeers::Named(vec!["lab-1".into(), "home".into(), "lab-0".into()]), [7; 16]);
        let refused = lobby.join(1, hello("attic")).unwrap_err();
        assert_eq!(
            refused,
            r#"the run's plan has no peer "attic"; join as one of those it waits for with --name: lab-1, home, lab-0"#
        );
        assert_eq!(lobby.join(2, hello("home")).unwrap().name, "home");
        assert!(lobby.join(3, hello("home")).unwrap_err().contains("taken"));
        assert_eq!(lobby.join(4, hello("")).unwrap().name, "lab-1", "the first free name");
        assert!(lobby.join(5, hello("attic")).unwrap_err().ends_with(": lab-0"));
        lobby.leave(4);
        assert_eq!(lobby.join(6, hello("")).unwrap().name, "lab-1");
        assert_eq!(lobby.join(7, hello("lab-0")).unwrap().name, "lab-0");
        assert_eq!(numbered(&lobby), ["lab-1", "home", "lab-0"]);
    }

    #[test]
    fn names_and_addresses_of_joiners_are_bounded() {
        let mut lobby = Lobby::new(ExpectedPeers::Any(1), [7; 16]);
        let mut refusal = |h: Hello| lobby.join(1, h).unwrap_err();
        assert!(refusal(hello(&"n".repeat(65))).contains("name"));
        assert!(refusal(Hello { device: "\u{1b}[2J".into(), ..hello("a") }).contains("device"));
        assert!(refusal(Hello { backend: "b".repeat(65), ..hello("a") }).contains("backend"));
        assert!(refusal(Hello { addr: vec![0; 4097], ..hello("a") }).contains("4097"));
    }

    #[test]
    fn peers_are_numbered_by_name_not_by_arrival() {
        let mut lobby = Lobby::new(ExpectedPeers::Any(4), [7; 16]);
        for (i, name) in ["p10", "p2", "", "p1"].iter().enumerate() {
            lobby.join(i as u64, hello(name)).unwrap();
        }
        assert_eq!(numbered(&lobby), ["p1", "p2", "p10", "peer-0"]);
        assert!(lobby.join(9, hello("p2")).unwrap_err().contains("already joined"));
        lobby.leave(0);
        assert!(lobby.complete().is_none());
        assert!(lobby.join(9, hello("p2")).unwrap_err().contains("--name"));
    }
}
