use std::collections::{BTreeMap, BTreeSet, VecDeque};

use fusionllm_plan::{Cluster, Device, DirectLink, Link, PeerId, Place, PlanError};

use crate::{FromPeer, MachineProfile, Member, ToPeer};

/// Seconds of sending in one direction that suffice to measure a link's rate.
const PATIENCE_S: f64 = 0.3;
/// Most seconds that all rounds of link measurements may take together.
const MAX_PROBING_S: f64 = 60.0;

/// Bounds that no real machine exceeds: operations or bytes per second, bytes, seconds, measured operators.
const MAX_RATE: f64 = 1e18;
const MAX_MEMORY: u64 = 1 << 50;
const MAX_LATENCY_S: f64 = 60.0;
const MAX_OPERATORS: usize = 1024;

/// Lets the peers measure their machines, and the links to each other and to the broker.
///
/// All peers first measure their machines. The links follow in the rounds of a tournament, so no machine takes part in
/// two measurements at once. Links that share an uplink do not disturb each other, and the cost of sharing it stays
/// unknown.
#[derive(Debug)]
pub struct Survey {
    members: Vec<Member>,
    rounds: VecDeque<Vec<(PeerId, ToPeer)>>,
    /// Requests without an answer.
    pending: BTreeMap<PeerId, ToPeer>,
    machines: BTreeMap<PeerId, MachineProfile>,
    lines: Vec<DirectLink>,
    /// Pairs that cannot reach each other.
    unreachable: BTreeSet<(PeerId, PeerId)>,
}

impl Survey {
    /// A survey of these peers, numbered in this order.
    pub fn new(members: Vec<Member>) -> Self {
        let peers: Vec<(String, Vec<u8>)> = members.iter().map(|m| (m.name.clone(), m.addr.clone())).collect();
        let all = |message: &ToPeer| (0..peers.len() as u32).map(|p| (PeerId(p), message.clone())).collect::<Vec<_>>();
        let tournament = tournament(peers.len() as u32);
        let patience_s = PATIENCE_S.min(MAX_PROBING_S / 2.0 / tournament.len() as f64);
        let probes = tournament
            .into_iter()
            .map(|round| round.into_iter().map(|(from, with)| (from, ToPeer::Probe { with, patience_s })).collect());
        let first = all(&ToPeer::Measure { peers: peers.clone() });
        let rounds = [first].into_iter().chain(probes).chain([all(&ToPeer::StopProbing)]).collect();
        Self {
            members,
            rounds,
            pending: BTreeMap::new(),
            machines: BTreeMap::new(),
            lines: Vec::new(),
            unreachable: BTreeSet::new(),
        }
    }

    /// The next requests. Empty while an answer is missing, and at the end of the survey.
    pub fn next_requests(&mut self) -> Vec<(PeerId, ToPeer)> {
        if !self.pending.is_empty() {
            return Vec::new();
        }
        let round = self.rounds.pop_front().unwrap_or_default();
        self.pending = round.iter().cloned().collect();
        round
    }

    /// Takes an answer. The error says how the answer breaks the protocol.
    pub fn answer(&mut self, from: PeerId, message: FromPeer) -> Result<(), String> {
        match (self.pending.remove(&from), message) {
            (Some(ToPeer::Measure { .. }), FromPeer::Machine(machine)) => {
                check_machine(&machine)?;
                self.machines.insert(from, machine);
            }
            (Some(ToPeer::Probe { with, .. }), FromPeer::Links(Some((there, back)))) => {
                let place = |p: PeerId| if p == PeerId::BROKER { Place::Broker } else { Place::Device(p.0) };
                for (from, to, link) in [(from, with, there), (with, from, back)] {
                    check_link(&link)?;
                    self.lines.push(DirectLink { from: place(from), to: place(to), link });
                }
            }
            (Some(ToPeer::Probe { with, .. }), FromPeer::Links(None)) => {
                self.unreachable.insert((from, with));
            }
            (Some(ToPeer::StopProbing), FromPeer::ProbingStopped) => {}
            _ => return Err("it sent an answer that nobody requested".into()),
        }
        Ok(())
    }

    /// The measured cluster, in which device `i` is peer `i`, and a note for each pair that cannot reach each other.
    ///
    /// # Errors
    ///
    /// The survey is not complete.
    pub fn finish(self) -> Result<(Cluster, Vec<String>), PlanError> {
        if self.machines.len() != self.members.len() || !self.rounds.is_empty() || !self.pending.is_empty() {
            return Err(PlanError::Cluster("not all of its machines and links have been measured".into()));
        }
        let name = |p: PeerId| self.members.get(p.0 as usize).map_or("the broker", |m| m.name.as_str());
        let notes = self.unreachable.iter().map(|(a, b)| {
            format!(
                "{} and {} cannot reach each other; check that no firewall blocks UDP between them",
                name(*a),
                name(*b)
            )
        });
        let notes = notes.collect();
        let devices = self.members.iter().zip(self.machines.into_values()).map(|(member, machine)| Device {
            slowdown: machine.slowdown,
            measured: machine.operators,
            backend: Some(member.backend.clone()),
            ..Device::new(member.name.clone(), machine.rates, machine.memory)
        });
        let cluster = Cluster::new(devices.collect(), Vec::new(), self.lines, Some(Place::Broker))?;
        Ok((cluster, notes))
    }
}

/// Rounds in which every pair of peers, the broker included, meets once, and nobody is in two pairs of a round.
///
/// This is the circle method: one participant stays, and the others move on by one place per round. The first of a pair
/// connects to the second. The broker never connects.
fn tournament(peers: u32) -> Vec<Vec<(PeerId, PeerId)>> {
    // The broker stays. The circle has an odd number of seats. One is empty if the number of peers is even.
    let seats = peers + 1 - peers % 2;
    (0..seats)
        .map(|round| {
            let at = |place: u32| PeerId((round + place) % seats);
            let stays = (PeerId::BROKER, at(0));
            let pairs = (1..=seats / 2).map(|i| (at(i), at(seats - i)));
            let known = |p: PeerId| p == PeerId::BROKER || p.0 < peers;
            let both = [stays].into_iter().chain(pairs).filter(|(a, b)| known(*a) && known(*b));
            both.map(|(a, b)| if a < b { (a, b) } else { (b, a) }).collect()
        })
        .collect()
}

fn positive(x: f64, max: f64) -> bool {
    x > 0.0 && x <= max
}

fn check_machine(machine: &MachineProfile) -> Result<(), String> {
    let MachineProfile { rates, memory, slowdown, operators } = machine;
    let figures = [rates.matmul, rates.convolution, rates.memory].into_iter().all(|r| positive(r, MAX_RATE))
        && (0.0..=MAX_LATENCY_S).contains(&rates.overhead)
        && (1..=MAX_MEMORY).contains(memory)
        && (1.0..=MAX_RATE).contains(slowdown);
    match figures && operators.len() <= MAX_OPERATORS {
        true => Ok(()),
        false => Err("it sent impossible numbers about its machine".into()),
    }
}

fn check_link(link: &Link) -> Result<(), String> {
    match positive(link.bandwidth, MAX_RATE) && (0.0..=MAX_LATENCY_S).contains(&link.latency) {
        true => Ok(()),
        false => Err("it sent impossible numbers about a link".into()),
    }
}

#[cfg(test)]
mod tests {
    use fusionllm_plan::{Measured, Rates};

    use super::*;

    fn members(count: u64) -> Vec<Member> {
        let member = |i| Member {
            connection: i,
            name: format!("p{i}"),
            backend: "b".into(),
            device: "d".into(),
            addr: vec![i as u8],
        };
        (0..count).map(member).collect()
    }

    fn machine() -> MachineProfile {
        let rates = Rates { matmul: 1e9, convolution: 1e9, memory: 1e9, overhead: 1e-6 };
        MachineProfile { rates, memory: 1 << 30, slowdown: 1.0, operators: Measured::default() }
    }

    fn link(bandwidth: f64) -> Link {
        Link { latency: 0.01, bandwidth }
    }

    #[test]
    fn every_pair_meets_once_and_nobody_is_in_two_pairs_of_a_round() {
        for peers in 1..=9u32 {
            let rounds = tournament(peers);
            let mut met = BTreeSet::new();
            for round in &rounds {
                let mut busy = BTreeSet::new();
                for (a, b) in round {
                    assert!(busy.insert(*a) && busy.insert(*b), "{peers}: {round:?}");
                    assert!(a < b && met.insert((*a, *b)), "{peers}: {round:?}");
                }
            }
            assert_eq!(met.len() as u32, peers * (peers + 1) / 2, "{peers}");
            assert!(rounds.len() as u32 <= peers + 1);
        }
    }

    /// A link's rate is the sum of its ends' numbers. Peers 0 and 2 cannot reach each other.
    #[test]
    fn measurements_become_a_cluster() {
        let mut survey = Survey::new(members(3));
        let mut rounds = 0;
        loop {
            let requests = survey.next_requests();
            if requests.is_empty() {
                break;
            }
            rounds += 1;
            assert!(survey.next_requests().is_empty(), "not before all answers have arrived");
            for (p, message) in requests {
                let answer = match message {
                    ToPeer::Measure { peers } => {
                        assert_eq!(peers[2], ("p2".into(), vec![2]));
                        FromPeer::Machine(MachineProfile { memory: 1000 + u64::from(p.0), ..machine() })
                    }
                    ToPeer::Probe { with, patience_s } => {
                        assert_eq!(patience_s, PATIENCE_S);
                        let rate = f64::from(p.0) + if with == PeerId::BROKER { 100.0 } else { f64::from(with.0) };
                        let apart = (p, with) == (PeerId(0), PeerId(2));
                        FromPeer::Links((!apart).then(|| (link(rate), link(10.0 * rate))))
                    }
                    ToPeer::StopProbing => FromPeer::ProbingStopped,
                    other => panic!("{other:?}"),
                };
                survey.answer(p, answer).unwrap();
            }
        }
        assert_eq!(rounds, 1 + 3 + 1);
        let (cluster, notes) = survey.finish().unwrap();
        assert_eq!(cluster.devices()[2].memory, 1002);
        let rate = |a, b| cluster.link(PeerId(a), PeerId(b)).map(|l| l.bandwidth);
        assert_eq!((rate(1, 2), rate(2, 1), rate(0, 2)), (Some(3.0), Some(30.0), None));
        assert_eq!(cluster.link(PeerId(1), PeerId::BROKER), Some(link(101.0)));
        assert_eq!(cluster.link(PeerId::BROKER, PeerId(1)), Some(link(1010.0)));
        let [note] = &notes[..] else { panic!("{notes:?}") };
        assert!(note.starts_with("p0 and p2 cannot reach each other"), "{note}");
    }

    #[test]
    fn impossible_numbers_are_refused() {
        let refused = |answer: &dyn Fn(&mut MachineProfile)| {
            let mut survey = Survey::new(members(1));
            survey.next_requests();
            let mut m = machine();
            answer(&mut m);
            survey.answer(PeerId(0), FromPeer::Machine(m)).unwrap_err()
        };
        let changes: [&dyn Fn(&mut MachineProfile); 6] = [
            &|m| m.rates.matmul = f64::NAN,
            &|m| m.rates.memory = 0.0,
            &|m| m.rates.overhead = -1.0,
            &|m| m.memory = 0,
            &|m| m.memory = u64::MAX,
            &|m| m.slowdown = 0.5,
        ];
        for change in changes {
            assert!(refused(change).contains("impossible numbers about its machine"));
        }
        let mut survey = Survey::new(members(1));
        survey.next_requests();
        assert!(survey.answer(PeerId(0), FromPeer::ProbingStopped).unwrap_err().contains("nobody requested"));
        survey.next_requests();
        for bad in [link(0.0), link(f64::INFINITY), Link { latency: f64::NAN, bandwidth: 1.0 }] {
            let mut survey = Survey::new(members(1));
            survey.next_requests();
            survey.answer(PeerId(0), FromPeer::Machine(machine())).unwrap();
            assert_eq!(survey.next_requests().len(), 1);
            assert!(survey.answer(PeerId(0), FromPeer::Links(Some((bad, link(1.0))))).is_err());
        }
        assert!(Survey::new(members(1)).finish().is_err());
    }

    #[test]
    fn many_peers_are_measured_in_less_time_each() {
        let patience = |count| match Survey::new(members(count)).rounds[1][0].1 {
            ToPeer::Probe { patience_s, .. } => patience_s,
            _ => 0.0,
        };
        assert_eq!(patience(20), PATIENCE_S);
        assert!((patience(1000) * 2.0 * 1001.0 - MAX_PROBING_S).abs() < 1e-6);
    }
}
