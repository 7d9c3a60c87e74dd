use crate::{Hello, VERSION};

/// Longest name, backend or device, in bytes.
const MAX_TEXT: usize = 64;

/// Longest address, in bytes.
const MAX_ADDR: usize = 4096;

/// Gathers the peers of a run.
#[derive(Debug)]
pub struct Lobby {
    wanted: usize,
    secret: [u8; 16],
    members: Vec<Member>,
    /// How many were ever let in, for names.
    count: usize,
}

/// A peer that was let in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// The caller's number for its connection.
    pub connection: u64,
    /// Unique among the members.
    pub name: String,
    /// Its backend's name.
    pub backend: String,
    /// Its device, for people.
    pub device: String,
    /// Where other peers reach it.
    pub addr: Vec<u8>,
}

impl Lobby {
    /// A lobby that waits for `wanted` peers who know the secret.
    pub fn new(wanted: usize, secret: [u8; 16]) -> Self {
        Self { wanted, secret, members: Vec::new(), count: 0 }
    }

    /// Lets a joiner in and returns the name it gets, or says why not.
    pub fn join(&mut self, connection: u64, hello: Hello) -> Result<&Member, String> {
        // Compared without a branch on the bytes, so that timing tells nothing.
        let wrong = hello.secret.iter().zip(&self.secret).fold(0u8, |d, (a, b)| d | (a ^ b));
        if wrong != 0 {
            return Err("the ticket's secret is wrong; is it the ticket of this run?".into());
        }
        if hello.version != VERSION {
            return Err(format!(
                "it speaks protocol version {}, the broker speaks {VERSION}; install the same FusionLLM on both",
                hello.version
            ));
        }
        if self.members.len() >= self.wanted {
            return Err(format!("all {} places are taken", self.wanted));
        }
        for (what, text) in [("name", &hello.name), ("backend", &hello.backend), ("device", &hello.device)] {
            if text.len() > MAX_TEXT || text.chars().any(char::is_control) {
                return Err(format!("its {what} must be at most {MAX_TEXT} bytes without control characters"));
            }
        }
        if hello.addr.len() > MAX_ADDR {
            return Err(format!("its address takes {} bytes, more than {MAX_ADDR}", hello.addr.len()));
        }
        if self.members.iter().any(|m| m.name == hello.name) {
            return Err(format!("the name {:?} is taken; choose another with --name", hello.name));
        }
        let mut name = hello.name;
        while name.is_empty() || self.members.iter().any(|m| m.name == name) {
            name = format!("peer-{}", self.count);
            self.count += 1;
        }
        self.members.push(Member { connection, name, backend: hello.backend, device: hello.device, addr: hello.addr });
        Ok(&self.members[self.members.len() - 1])
    }

    /// Forgets a joiner whose connection is gone.
    pub fn leave(&mut self, connection: u64) -> Option<Member> {
        let at = self.members.iter().position(|m| m.connection == connection)?;
        Some(self.members.remove(at))
    }

    /// Those let in so far.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// All peers, in the order in which they are numbered, once they are there: by name, digits by value, so that who
    /// joined first decides nothing.
    pub fn complete(&self) -> Option<Vec<Member>> {
        let mut members = self.members.clone();
        members.sort_by_cached_key(|m| (natural_key(&m.name), m.name.clone()));
        (members.len() == self.wanted).then_some(members)
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
    fn only_holders_of_the_secret_get_in() {
        let mut lobby = Lobby::new(1, [7; 16]);
        assert!(lobby.join(1, Hello { secret: [8; 16], ..hello("a") }).unwrap_err().contains("secret"));
        assert!(lobby.join(1, Hello { version: 99, ..hello("a") }).unwrap_err().contains("version 99"));
        assert_eq!(lobby.join(1, hello("a")).unwrap().name, "a");
        assert!(lobby.join(2, hello("b")).unwrap_err().contains("taken"));
    }

    fn numbered(lobby: &Lobby) -> Vec<String> {
        lobby.complete().unwrap().into_iter().map(|m| m.name).collect()
    }

    /// Names that differ in leading zeros alone stood in the order of their arrival.
    #[test]
    fn no_two_names_are_equal_in_order() {
        for names in [["p01", "p1", "p001"], ["p1", "p001", "p01"]] {
            let mut lobby = Lobby::new(3, [7; 16]);
            for (i, name) in names.iter().enumerate() {
                lobby.join(i as u64, hello(name)).unwrap();
            }
            assert_eq!(numbered(&lobby), ["p001", "p01", "p1"]);
        }
    }

    #[test]
    fn what_a_joiner_says_of_itself_is_bounded() {
        let mut lobby = Lobby::new(1, [7; 16]);
        let mut refusal = |h: Hello| lobby.join(1, h).unwrap_err();
        assert!(refusal(hello(&"n".repeat(65))).contains("name"));
        assert!(refusal(Hello { device: "\u{1b}[2J".into(), ..hello("a") }).contains("device"));
        assert!(refusal(Hello { backend: "b".repeat(65), ..hello("a") }).contains("backend"));
        assert!(refusal(Hello { addr: vec![0; 4097], ..hello("a") }).contains("4097"));
    }

    #[test]
    fn peers_are_numbered_by_name_not_by_arrival() {
        let mut lobby = Lobby::new(4, [7; 16]);
        for (i, name) in ["p10", "p2", "", "p1"].iter().enumerate() {
            lobby.join(i as u64, hello(name)).unwrap();
        }
        assert_eq!(numbered(&lobby), ["p1", "p2", "p10", "peer-0"]);
        assert!(lobby.join(9, hello("p2")).unwrap_err().contains("places"));
        lobby.leave(0);
        assert!(lobby.complete().is_none());
        assert!(lobby.join(9, hello("p2")).unwrap_err().contains("--name"));
    }
}
