//! The members of a run. The roster never closes: members come, fall silent, come back and go.

use std::collections::BTreeSet;

use fusionllm_graph::units::counted;
use serde::{Deserialize, Serialize};

use crate::{Admission, ComputesOn, Contact, Hello, Identity, MemberId, Standing, VERSION};

/// Longest name, backend or device, in bytes.
const MAX_TEXT_BYTES: usize = 64;

/// Longest address, in bytes.
const MAX_ADDR_BYTES: usize = 1024;

/// Most members of a run that are there at once.
const MAX_PRESENT: usize = 1000;

/// Most members of a run over its whole life. Numbers of members are never used again.
const MAX_MEMBERS: usize = 100_000;

/// The peers that a run waits for before it starts.
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

/// A machine that has joined.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// The member's number.
    pub id: MemberId,
    /// The member's public key.
    pub identity: Identity,
    /// [`Hello::process`].
    pub process: u64,
    /// The member's name, which is unique among the members that are not [`Standing::Out`].
    pub name: String,
    /// The backend's name.
    pub backend: String,
    /// The device's name, for people.
    pub device: String,
    /// [`Hello::slow_bf16`].
    pub slow_bf16: bool,
    /// The address for other members.
    pub addr: Vec<u8>,
    /// Whether it can be used.
    pub standing: Standing,
    /// Whether its process has ended, so that it will not come back. A broker that was started again does not know.
    #[serde(skip)]
    pub ended: bool,
}

impl Member {
    /// How other members reach it.
    pub fn contact(&self) -> Contact {
        Contact { member: self.id, name: self.name.clone(), addr: self.addr.clone() }
    }
}

/// The members of a run.
#[derive(Debug)]
pub struct Roster {
    expected: ExpectedPeers,
    admission: Admission,
    members: Vec<Member>,
    /// The next number for a generated name.
    next_number: usize,
}

impl Roster {
    /// A roster for the machines that may come in.
    pub fn new(expected: ExpectedPeers, admission: impl Into<Admission>) -> Self {
        Self { expected, admission: admission.into(), members: Vec::new(), next_number: 0 }
    }

    /// The roster of a run that goes on. Its members are away. `next_name` is the number that [`Self::next_name`] gave.
    pub(crate) fn with_members(mut self, members: Vec<Member>, next_name: usize) -> Self {
        self.members = members;
        self.next_number = next_name;
        for member in &mut self.members {
            if member.standing != Standing::Out {
                member.standing = Standing::Away;
            }
        }
        self
    }

    /// Everybody who ever joined, by number.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// The number of the next generated name.
    pub(crate) fn next_name(&self) -> usize {
        self.next_number
    }

    /// The tickets and keys that decide who may come in.
    pub fn admission(&self) -> &Admission {
        &self.admission
    }

    /// Changes who may come in.
    pub fn admission_mut(&mut self) -> &mut Admission {
        &mut self.admission
    }

    /// Admits a machine, or returns the reason for refusing it. `unix_s` is the broker's time.
    ///
    /// A process that has joined before is the member that it was. Another process with the same key is a new member,
    /// since it has none of the old one's tensors. See [`Self::predecessor`].
    pub fn join(&mut self, identity: Identity, hello: Hello, unix_s: u64) -> Result<MemberId, String> {
        let known = self.members.iter().any(|m| m.identity == identity);
        self.admission.check(&identity, &hello.secret, known, unix_s)?;
        check(&hello)?;
        let itself = |m: &&mut Member| m.identity == identity && m.process == hello.process;
        if let Some(member) = self.members.iter_mut().find(itself) {
            if member.standing == Standing::Out {
                return Err("it was put out of this run; start `join` again to come back as a new peer".into());
            }
            (member.backend, member.device, member.addr) = (hello.backend, hello.device, hello.addr);
            member.slow_bf16 = hello.slow_bf16;
            (member.standing, member.ended) = (Standing::Present, false);
            return Ok(member.id);
        }
        if self.present().count() >= MAX_PRESENT || self.members.len() >= MAX_MEMBERS {
            return Err(format!("the run is full: {MAX_PRESENT} peers take part"));
        }
        let name = self.name_for(hello.name, &identity)?;
        if !known {
            self.admission.note_use(&hello.secret);
        }
        // A place of a plan has one bearer, and a process that has ended needs no name, so another one has it now.
        for old in self.members.iter_mut().filter(|m| m.name == name && m.identity != identity) {
            old.standing = Standing::Out;
        }
        let id = MemberId(self.members.len() as u32);
        let Hello { backend, device, slow_bf16, addr, process, .. } = hello;
        let standing = Standing::Present;
        let ended = false;
        self.members.push(Member { id, identity, process, name, backend, device, slow_bf16, addr, standing, ended });
        Ok(id)
    }

    /// The earlier process of a member's key that is not out yet. Two processes with one key cannot both take part.
    pub fn predecessor(&self, member: MemberId) -> Option<MemberId> {
        let identity = self.get(member)?.identity;
        let earlier = |m: &&Member| m.identity == identity && m.id != member && m.standing != Standing::Out;
        self.members.iter().find(earlier).map(|m| m.id)
    }

    /// The name of a new member that asks for `name`, or for any if that is empty. A machine may keep its own.
    fn name_for(&mut self, name: String, identity: &Identity) -> Result<String, String> {
        match &self.expected {
            ExpectedPeers::Any(_) => Ok(self.free_name(name, identity)),
            ExpectedPeers::Named(places) => self.place_for(name, places, identity),
        }
    }

    /// A name that no other machine has. Machines are told apart by their keys, and many have the same host name. One that
    /// is silent or away keeps its name, because it may come back, unless its process has ended.
    fn free_name(&mut self, asked: String, identity: &Identity) -> String {
        let has_a_name = |m: &&Member| m.standing != Standing::Out && !m.ended && m.identity != *identity;
        let others = self.members.iter().filter(has_a_name);
        let taken: BTreeSet<&str> = others.map(|m| m.name.as_str()).collect();
        let mut number = if asked.is_empty() { self.next_number } else { 2 };
        let mut name = asked.clone();
        while name.is_empty() || taken.contains(name.as_str()) {
            name = if asked.is_empty() { format!("peer-{number}") } else { format!("{asked}-{number}") };
            number += 1;
        }
        if asked.is_empty() {
            self.next_number = number;
        }
        name
    }

    /// A place of the plan. A silent member may be a process that died, so another machine may take its place.
    fn place_for(&self, name: String, places: &[String], identity: &Identity) -> Result<String, String> {
        let others = self.present().filter(|m| m.identity != *identity);
        let bearers: BTreeSet<&str> = others.map(|m| m.name.as_str()).collect();
        if bearers.contains(name.as_str()) {
            return Err(format!("the name {name:?} is taken; choose another with --name"));
        }
        let left: Vec<&str> = places.iter().map(String::as_str).filter(|place| !bearers.contains(place)).collect();
        match left.first() {
            None => Err(format!(
                "all peers of the run's plan have already joined: it has {}",
                counted(places.len(), "place")
            )),
            Some(first) if name.is_empty() => Ok((*first).to_owned()),
            Some(_) if !places.contains(&name) => Err(format!(
                "the run's plan has no peer {name:?}; join as one of those it waits for with --name: {}",
                left.join(", ")
            )),
            Some(_) => Ok(name),
        }
    }

    /// A member. Numbers of members come from [`Self::join`].
    pub fn get(&self, member: MemberId) -> Option<&Member> {
        self.members.get(member.0 as usize)
    }

    /// Changes a member's standing. Nobody comes back from [`Standing::Out`].
    pub fn set(&mut self, member: MemberId, standing: Standing) {
        let member = self.members.get_mut(member.0 as usize);
        if let Some(member) = member.filter(|m| m.standing != Standing::Out) {
            member.standing = standing;
        }
    }

    /// Notes that a member's process has ended.
    pub fn note_end(&mut self, member: MemberId) {
        if let Some(member) = self.members.get_mut(member.0 as usize) {
            member.ended = true;
        }
    }

    /// The member with this name, or the last one that had it.
    pub fn named(&self, name: &str) -> Option<MemberId> {
        let bearers = || self.members.iter().rev().filter(|m| m.name == name);
        let member = bearers().find(|m| m.standing != Standing::Out).or_else(|| bearers().next());
        member.map(|m| m.id)
    }

    /// A member's name, for messages.
    pub fn display_name(&self, member: MemberId) -> &str {
        match member {
            MemberId::BROKER => "the broker",
            m => self.get(m).map_or("?", |m| m.name.as_str()),
        }
    }

    /// Whether a member is connected and answers.
    pub fn is_present(&self, member: MemberId) -> bool {
        self.get(member).is_some_and(|m| m.standing == Standing::Present)
    }

    /// The members that are connected and answer.
    pub fn present(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|m| m.standing == Standing::Present)
    }

    /// All members that are not [`Standing::Out`], in the order of their numbers.
    pub fn not_out(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|m| m.standing != Standing::Out)
    }

    /// The members that are connected, whether or not they answer.
    pub fn connected(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|m| matches!(m.standing, Standing::Present | Standing::Silent))
    }

    /// The number of peers that a run waits for before it starts.
    pub fn wanted(&self) -> usize {
        self.expected.count()
    }

    /// The members that are there, in the order of [`ExpectedPeers::Named`], or else of their names with digits
    /// compared as numbers. So the order of joining has no influence.
    pub fn in_order(&self) -> Vec<MemberId> {
        let mut members: Vec<&Member> = self.present().collect();
        match &self.expected {
            ExpectedPeers::Any(_) => members.sort_by_cached_key(|m| (natural_key(&m.name), m.name.clone())),
            ExpectedPeers::Named(names) => members.sort_by_key(|m| names.iter().position(|n| *n == m.name)),
        }
        members.into_iter().map(|m| m.id).collect()
    }
}

fn check(hello: &Hello) -> Result<(), String> {
    if hello.version != VERSION {
        return Err(other_version(hello.version));
    }
    for (what, text) in [("name", &hello.name), ("backend", &hello.backend), ("device", &hello.device)] {
        if text.len() > MAX_TEXT_BYTES || text.chars().any(char::is_control) {
            return Err(format!("its {what} must be at most {MAX_TEXT_BYTES} bytes without control characters"));
        }
    }
    if hello.name.contains(['/', '\\']) {
        return Err(format!("its name {:?} has a slash; choose another with --name", hello.name));
    }
    if let Some(ComputesOn { cores, busy, .. }) = hello.processor
        && !(busy > 0.0 && busy <= f64::from(cores))
    {
        return Err(format!("it cannot keep {busy} of {cores} cores busy"));
    }
    if hello.addr.len() > MAX_ADDR_BYTES {
        let bytes = hello.addr.len();
        return Err(format!("its address has {bytes} bytes, but at most {MAX_ADDR_BYTES} are allowed"));
    }
    Ok(())
}

/// The reason why a machine with another version of the messages is refused.
pub fn other_version(version: u32) -> String {
    format!("it speaks protocol version {version}, but the broker speaks {VERSION}; install the same FusionLLM on both")
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
    use crate::{Invitation, TicketRole};

    /// The broker's time. No ticket here expires.
    const NOW: u64 = 0;

    fn hello(name: &str) -> Hello {
        Hello {
            version: VERSION,
            secret: [7; 16],
            process: 0,
            name: name.into(),
            backend: "b".into(),
            device: "d".into(),
            slow_bf16: false,
            processor: None,
            addr: vec![1],
        }
    }

    fn roster(count: usize) -> Roster {
        Roster::new(ExpectedPeers::Any(count), [7; 16])
    }

    fn identity(i: usize) -> Identity {
        [i as u8; 32]
    }

    fn ordered(roster: &Roster) -> Vec<&str> {
        roster.in_order().into_iter().map(|m| roster.display_name(m)).collect()
    }

    #[test]
    fn only_the_secret_and_the_version_let_a_machine_in() {
        let mut roster = roster(1);
        let refused = roster.join(identity(1), Hello { secret: [8; 16], ..hello("a") }, NOW).unwrap_err();
        assert!(refused.contains("secret"), "{refused}");
        let refused = roster.join(identity(1), Hello { version: VERSION + 1, ..hello("a") }, NOW).unwrap_err();
        assert!(refused.contains("install the same FusionLLM"), "{refused}");
        assert_eq!(roster.join(identity(1), hello("a"), NOW), Ok(MemberId(0)));
    }

    #[test]
    fn names_and_addresses_are_bounded_and_have_no_slash() {
        let mut roster = roster(1);
        let mut refusal = |h: Hello| roster.join(identity(1), h, NOW).unwrap_err();
        assert!(refusal(hello(&"n".repeat(65))).contains("name"));
        assert!(refusal(hello("a/b")).contains("slash"));
        assert!(refusal(hello("a\\b")).contains("slash"));
        assert!(refusal(Hello { device: "\u{1b}[2J".into(), ..hello("a") }).contains("device"));
        assert!(refusal(Hello { backend: "b".repeat(65), ..hello("a") }).contains("backend"));
        assert!(refusal(Hello { addr: vec![0; 1025], ..hello("a") }).contains("1025"));
    }

    #[test]
    fn members_are_ordered_by_name_not_by_arrival() {
        let mut roster = roster(4);
        for (i, name) in ["p10", "p2", "", "p1"].iter().enumerate() {
            roster.join(identity(i), hello(name), NOW).unwrap();
        }
        assert_eq!(ordered(&roster), ["p1", "p2", "p10", "peer-0"]);
        for names in [["p1", "p01", "p001"], ["p001", "p01", "p1"]] {
            let mut roster = super::tests::roster(3);
            for (i, name) in names.iter().enumerate() {
                roster.join(identity(i), hello(name), NOW).unwrap();
            }
            assert_eq!(ordered(&roster), ["p001", "p01", "p1"]);
        }
    }

    #[test]
    fn a_plan_names_its_peers() {
        let names = vec!["lab-1".into(), "home".into(), "lab-0".into()];
        let mut roster = Roster::new(ExpectedPeers::Named(names), [7; 16]);
        assert_eq!(
            roster.join(identity(1), hello("attic"), NOW).unwrap_err(),
            r#"the run's plan has no peer "attic"; join as one of those it waits for with --name: lab-1, home, lab-0"#
        );
        roster.join(identity(2), hello("home"), NOW).unwrap();
        assert!(roster.join(identity(3), hello("home"), NOW).unwrap_err().contains("taken"));
        let first_free = roster.join(identity(4), hello(""), NOW).unwrap();
        assert_eq!(roster.display_name(first_free), "lab-1");
        roster.join(identity(5), hello("lab-0"), NOW).unwrap();
        assert_eq!(ordered(&roster), ["lab-1", "home", "lab-0"]);
        assert!(roster.join(identity(6), hello(""), NOW).unwrap_err().contains("already joined"));
        roster.set(first_free, Standing::Away);
        assert!(roster.join(identity(6), hello(""), NOW).is_ok(), "a place is free again");
    }

    #[test]
    fn a_member_comes_back_as_itself() {
        let mut roster = roster(2);
        let a = roster.join(identity(1), hello("a"), NOW).unwrap();
        roster.set(a, Standing::Away);
        assert_eq!(ordered(&roster), Vec::<&str>::new());
        assert_eq!(roster.join(identity(1), hello("whatever"), NOW), Ok(a));
        assert_eq!(ordered(&roster), ["a"]);
    }

    /// Hosts are often called alike, such as "localhost". A silence of one lets no other take its place.
    #[test]
    fn machines_of_one_name_do_not_put_each_other_out() {
        let mut roster = roster(3);
        let first = roster.join(identity(1), hello("box"), NOW).unwrap();
        roster.join(identity(2), hello("box"), NOW).unwrap();
        assert_eq!(ordered(&roster), ["box", "box-2"]);
        for (process, standing) in [(1, Standing::Silent), (2, Standing::Away)] {
            roster.set(first, standing);
            // The second machine is started again, and a third one comes.
            let new = roster.join(identity(2), Hello { process, ..hello("box") }, NOW).unwrap();
            let old = roster.predecessor(new).unwrap();
            roster.set(old, Standing::Out);
            roster.join(identity(3), hello("box"), NOW).unwrap();
            assert_eq!(ordered(&roster), ["box-2", "box-3"]);
            assert_eq!(roster.join(identity(1), hello("box"), NOW), Ok(first));
            assert_eq!(ordered(&roster), ["box", "box-2", "box-3"]);
        }
        // Without a key, a machine is known by its name alone, once its earlier process has ended.
        roster.set(first, Standing::Away);
        roster.note_end(first);
        let again = roster.join(identity(4), hello("box"), NOW).unwrap();
        assert_eq!((roster.display_name(again), ordered(&roster)), ("box", vec!["box", "box-2", "box-3"]));
        assert_eq!(roster.get(first).unwrap().standing, Standing::Out);
    }

    /// A machine that keeps its key, and is started again, has lost the tensors of its old process.
    #[test]
    fn a_process_that_is_started_again_is_another_member_of_the_same_name() {
        let mut roster = roster(2);
        let ticket = Invitation { uses: Some(1), expires: Some(1), ..Invitation::new(TicketRole::Peer, [8; 16]) };
        roster.admission_mut().invite(ticket).unwrap();
        let hello = |process| Hello { process, secret: [8; 16], ..hello("a") };
        let old = roster.join(identity(1), hello(0), NOW).unwrap();
        assert!(roster.join(identity(2), hello(0), NOW).unwrap_err().contains("used up"));
        let new = roster.join(identity(1), hello(1), 2).unwrap();
        assert_eq!(
            (roster.display_name(new), roster.predecessor(new)),
            ("a", Some(old)),
            "a known key needs no further use"
        );
        roster.set(old, Standing::Out);
        assert_eq!((roster.predecessor(new), ordered(&roster)), (None, vec!["a"]));
        assert_eq!(roster.named("a"), Some(new));
    }

    #[test]
    fn generated_names_are_new() {
        let mut roster = roster(9);
        roster.join(identity(1), hello("peer-0"), NOW).unwrap();
        let made = roster.join(identity(2), hello(""), NOW).unwrap();
        assert_eq!(roster.display_name(made), "peer-1");
        roster.set(made, Standing::Out);
        let next = roster.join(identity(3), hello(""), NOW).unwrap();
        assert_eq!(roster.display_name(next), "peer-2", "nobody gets the name of one who was put out");
    }
}
