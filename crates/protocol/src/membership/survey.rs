//! Lets members measure their machines and the links between them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;

use fusionllm_plan::Link;
use fusionllm_program::Program;

use crate::{Atlas, FromPeer, MachineProfile, MemberId, ToPeer};

/// Seconds of sending in one direction that suffice to measure a link's rate.
const PATIENCE_S: f64 = 0.3;
/// Most seconds that all rounds of link measurements may take together.
const MAX_PROBING_S: f64 = 60.0;

/// Bounds that no real machine exceeds: operations or bytes per second, bytes, seconds, measured operators.
const MAX_RATE: f64 = 1e18;
const MAX_MEMORY: u64 = 1 << 50;
const MAX_LATENCY_S: f64 = 60.0;
const MAX_OPERATORS: usize = 4096;

/// Lets members measure their machines, and the links to each other and to the broker, as far as the atlas lacks them.
///
/// All members first measure their machines. The links follow in the rounds of a tournament, so no machine takes part
/// in two measurements at once. Neither does a line that several members share, so that each link through it is
/// measured at the line's full rate.
///
/// Members on one processor slow each other down, and would seem slow for ever. So the first of each kind measures
/// alone. Then all of them measure together, which shows what they take from each other.
#[derive(Debug)]
pub struct Survey {
    rounds: VecDeque<Round>,
    /// Requests without an answer.
    pending: BTreeMap<MemberId, ToPeer>,
    /// Of the round that is under way.
    together: Vec<Vec<MemberId>>,
}

/// Requests that are answered at once.
#[derive(Debug, Default)]
struct Round {
    requests: Vec<(MemberId, ToPeer)>,
    /// The members that measure on one processor, for each such processor. The others have theirs to themselves.
    together: Vec<Vec<MemberId>>,
}

impl Survey {
    /// A survey of the unknown machines and links of these members. Each member also measures its machine with
    /// `programs`.
    pub fn new(members: &[MemberId], atlas: &Atlas, programs: &[Program]) -> Self {
        let measure = |m: &MemberId| (*m, ToPeer::Measure { programs: programs.to_vec() });
        let machines = machine_rounds(members, atlas).into_iter().map(|(alone, together)| {
            let requests = alone.iter().chain(together.iter().flatten()).map(measure).collect();
            Round { requests, together }
        });
        let pairs = tournament(members).into_iter().map(|mut round| {
            round.retain(|pair| !atlas.links.contains_key(pair));
            round
        });
        let pairs: Vec<_> = pairs.flat_map(|round| uncrowded(round, atlas)).collect();
        let patience_s = PATIENCE_S.min(MAX_PROBING_S / 2.0 / pairs.len().max(1) as f64);
        let probe = |(from, with)| (from, ToPeer::Probe { with, patience_s });
        let probes = pairs
            .into_iter()
            .map(|round| Round { requests: round.into_iter().map(probe).collect(), together: Vec::new() });
        let rounds = machines.chain(probes).filter(|round| !round.requests.is_empty());
        Self { rounds: rounds.collect(), pending: BTreeMap::new(), together: Vec::new() }
    }

    /// Whether something about these members is not measured yet.
    pub fn is_needed(members: &[MemberId], atlas: &Atlas) -> bool {
        !Self::new(members, atlas, &[]).is_over()
    }

    /// The next requests. Empty while an answer is missing, and at the end of the survey.
    pub fn next_requests(&mut self) -> Vec<(MemberId, ToPeer)> {
        if !self.pending.is_empty() {
            return Vec::new();
        }
        let round = self.rounds.pop_front().unwrap_or_default();
        self.pending = round.requests.iter().cloned().collect();
        self.together = round.together;
        round.requests
    }

    /// Forgets a member that is gone. It is asked nothing more, and nobody is asked about it.
    pub fn lose(&mut self, member: MemberId) {
        self.pending.remove(&member);
        let about = |message: &ToPeer| matches!(message, ToPeer::Probe { with, .. } if *with == member);
        for round in &mut self.rounds {
            round.requests.retain(|(from, message)| *from != member && !about(message));
            round.together.iter_mut().for_each(|members| members.retain(|m| *m != member));
        }
        self.rounds.retain(|round| !round.requests.is_empty());
    }

    /// Whether all is measured.
    pub fn is_over(&self) -> bool {
        self.rounds.is_empty() && self.pending.is_empty()
    }

    /// The members whose answers are missing.
    pub fn waits_for(&self) -> impl Iterator<Item = MemberId> {
        self.pending.keys().copied()
    }

    /// Takes an answer into the atlas. An answer that nobody waits for is skipped, because its sender may have been
    /// silent and counted as lost when it was asked. The error says how the answer breaks the protocol.
    pub fn answer(&mut self, from: MemberId, message: FromPeer, atlas: &mut Atlas) -> Result<(), String> {
        match (self.pending.get(&from), message) {
            (Some(ToPeer::Measure { .. }), FromPeer::Machine(machine)) => {
                check_machine(&machine)?;
                match self.together.iter().find(|members| members.contains(&from)) {
                    Some(together) => atlas.add_crowded(from, *machine, together),
                    None => atlas.add_alone(from, *machine),
                }
                self.pending.remove(&from);
            }
            (Some(ToPeer::Probe { with, .. }), FromPeer::Links { with: answered, links, relayed })
                if *with == answered =>
            {
                if let Some((there, back)) = &links {
                    check_link(there)?;
                    check_link(back)?;
                }
                match relayed && links.is_some() {
                    true => atlas.relayed.insert((from, answered)),
                    false => atlas.relayed.remove(&(from, answered)),
                };
                atlas.links.insert((from, answered), links);
                self.pending.remove(&from);
            }
            _ => {}
        }
        Ok(())
    }
}

/// Rounds in which every unknown machine is measured: the members that are alone on their processors, and those that
/// are not, for each processor.
fn machine_rounds(members: &[MemberId], atlas: &Atlas) -> Vec<(Vec<MemberId>, Vec<Vec<MemberId>>)> {
    let unknown: Vec<MemberId> = members.iter().copied().filter(|m| !atlas.machines.contains_key(m)).collect();
    let mut alone = vec![unknown.clone()];
    let mut together = Vec::new();
    for mut neighbours in atlas.neighbours(members) {
        neighbours.retain(|m| unknown.contains(m));
        alone[0].retain(|m| !neighbours.contains(m));
        let kinds = atlas.unmeasured_kinds(&neighbours);
        alone.resize(alone.len().max(kinds.len()), Vec::new());
        alone.iter_mut().zip(&kinds).for_each(|(round, first)| round.push(*first));
        // Nothing is new if it has measured alone, and nobody joins it.
        if neighbours != kinds || kinds.len() > 1 {
            together.push(neighbours);
        }
    }
    let mut rounds: Vec<_> = alone.into_iter().map(|round| (round, Vec::new())).collect();
    rounds.push((Vec::new(), together));
    rounds
}

/// Rounds in which every pair of members, the broker included, meets once, and nobody is in two pairs of a round.
///
/// This is the circle method: one participant stays, and the others move on by one place per round. The first of a pair
/// has the smaller number and connects to the second. The broker never connects.
fn tournament(members: &[MemberId]) -> Vec<Vec<(MemberId, MemberId)>> {
    // The broker stays. The circle has an odd number of seats. One is empty if the number of members is even.
    let seats = members.len() + 1 - members.len() % 2;
    (0..seats)
        .map(|round| {
            let at = |place: usize| members.get((round + place) % seats).copied();
            let stays = (Some(MemberId::BROKER), at(0));
            let pairs = (1..=seats / 2).map(|i| (at(i), at(seats - i)));
            let both = [stays].into_iter().chain(pairs).filter_map(|(a, b)| a.zip(b));
            both.filter(|(a, b)| a != b).map(|(a, b)| (a.min(b), a.max(b))).collect()
        })
        .collect()
}

type Pair = (MemberId, MemberId);

/// Splits a round of pairs so that no two pairs of a part use the same line.
fn uncrowded(round: Vec<Pair>, atlas: &Atlas) -> Vec<Vec<Pair>> {
    let mut parts: Vec<(BTreeSet<IpAddr>, Vec<Pair>)> = Vec::new();
    for (a, b) in round {
        let (from, to) = (atlas.line(a), atlas.line(b));
        // Packets that stay behind a router do not use its line.
        let used: BTreeSet<IpAddr> = [from, to].into_iter().flatten().filter(|_| from != to).collect();
        match parts.iter_mut().find(|(lines, _)| lines.is_disjoint(&used)) {
            Some((lines, pairs)) => {
                lines.extend(used);
                pairs.push((a, b));
            }
            None => parts.push((used, vec![(a, b)])),
        }
    }
    parts.into_iter().map(|(_, pairs)| pairs).collect()
}

fn positive(x: f64, max: f64) -> bool {
    x > 0.0 && x <= max
}

fn check_machine(machine: &MachineProfile) -> Result<(), String> {
    let MachineProfile { rates, memory, slowdown, operators, scratch, disk, host_link } = machine;
    let mut attained =
        [rates.matmul, rates.convolution, rates.memory, disk.read, disk.write].into_iter().chain(*host_link);
    let figures = attained.all(|r| positive(r, MAX_RATE))
        && (0.0..=MAX_LATENCY_S).contains(&rates.overhead)
        && (1..=MAX_MEMORY).contains(memory)
        && (1.0..=MAX_RATE).contains(slowdown);
    let curves = operators.len().saturating_add(scratch.by_name.len()).saturating_add(scratch.by_signature.len());
    match figures && curves <= 2 * MAX_OPERATORS {
        true => Ok(()),
        false => Err("sent impossible numbers about its machine".into()),
    }
}

fn check_link(link: &Link) -> Result<(), String> {
    match positive(link.bandwidth, MAX_RATE) && (0.0..=MAX_LATENCY_S).contains(&link.latency) {
        true => Ok(()),
        false => Err("sent impossible numbers about a link".into()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use fusionllm_plan::{Curve, Disk, Line, Measured, OperatorCurves, Rates};
    use fusionllm_program::PeerId;

    use super::*;
    use crate::{ComputesOn, ExpectedPeers, Hello, Member, Roster, VERSION};

    fn ids(count: u32) -> Vec<MemberId> {
        (0..count).map(MemberId).collect()
    }

    fn roster(count: u8) -> Roster {
        let mut roster = Roster::new(ExpectedPeers::Any(count as usize), [7; 16]);
        for i in 0..count {
            let text = || "b".to_owned();
            let name = format!("p{i}");
            let (version, secret, process, addr) = (VERSION, [7; 16], 0, vec![i]);
            roster
                .join(
                    [i; 32],
                    Hello {
                        version,
                        secret,
                        process,
                        name,
                        backend: text(),
                        device: text(),
                        slow_bf16: false,
                        addr,
                        processor: None,
                    },
                    0,
                )
                .unwrap();
        }
        roster
    }

    fn machine() -> MachineProfile {
        let rates = Rates { matmul: 1e9, convolution: 1e9, memory: 1e9, overhead: 1e-6 };
        let operators = Measured::default();
        let scratch = OperatorCurves::default();
        MachineProfile {
            rates,
            memory: 1 << 30,
            slowdown: 1.0,
            operators,
            scratch,
            disk: Disk::default(),
            host_link: None,
        }
    }

    fn link(bandwidth: f64) -> Link {
        Link { latency: 0.01, bandwidth }
    }

    #[test]
    fn every_pair_meets_once_and_nobody_is_in_two_pairs_of_a_round() {
        for count in 1..=9u32 {
            let rounds = tournament(&ids(count));
            let mut met = BTreeSet::new();
            for round in &rounds {
                let mut busy = BTreeSet::new();
                for (a, b) in round {
                    assert!(busy.insert(*a) && busy.insert(*b), "{count}: {round:?}");
                    assert!(a < b && met.insert((*a, *b)), "{count}: {round:?}");
                }
            }
            assert_eq!(met.len() as u32, count * (count + 1) / 2, "{count}");
            assert!(rounds.len() as u32 <= count + 1);
        }
    }

    /// Answers all requests. A link's rate is the sum of its ends' numbers, the broker's being 100. Members 0 and 2
    /// cannot reach each other. Returns the number of rounds.
    fn measure(members: &[MemberId], atlas: &mut Atlas) -> usize {
        let mut survey = Survey::new(members, atlas, &[]);
        let mut rounds = 0;
        while !survey.is_over() {
            let requests = survey.next_requests();
            assert!(survey.next_requests().is_empty(), "not before all answers have arrived");
            rounds += 1;
            for (m, message) in requests {
                let answer = match message {
                    ToPeer::Measure { .. } => {
                        FromPeer::Machine(Box::new(MachineProfile { memory: 1000 + u64::from(m.0), ..machine() }))
                    }
                    ToPeer::Probe { with, .. } => {
                        let rate = f64::from(m.0) + if with == MemberId::BROKER { 100.0 } else { f64::from(with.0) };
                        let apart = (m, with) == (MemberId(0), MemberId(2));
                        let relayed = (m, with) == (MemberId(0), MemberId(1));
                        let links = (!apart).then(|| (link(rate), link(10.0 * rate)));
                        FromPeer::Links { with, links, relayed }
                    }
                    other => panic!("{other:?}"),
                };
                survey.answer(m, answer, atlas).unwrap();
            }
        }
        rounds
    }

    #[test]
    fn measurements_become_a_cluster() {
        let roster = roster(4);
        let mut atlas = Atlas::default();
        assert_eq!(measure(&ids(3), &mut atlas), 1 + 3);
        let members: Vec<&Member> = roster.present().take(3).collect();
        let (cluster, notes) = atlas.cluster(&members).unwrap();
        assert_eq!(cluster.devices()[2].memory, 1002);
        let rate = |a, b| cluster.link(PeerId(a), PeerId(b)).map(|l| l.bandwidth);
        assert_eq!((rate(1, 2), rate(2, 1), rate(0, 2)), (Some(3.0), Some(30.0), None));
        assert_eq!(cluster.link(PeerId(1), PeerId::BROKER), Some(link(101.0)));
        assert_eq!(cluster.link(PeerId::BROKER, PeerId(1)), Some(link(1010.0)));
        let [relayed, apart] = &notes[..] else { panic!("{notes:?}") };
        assert!(relayed.starts_with("p0 and p1 reach each other only through the relay: "), "{relayed}");
        assert!(apart.starts_with("p0 and p2 cannot reach each other"), "{apart}");

        // A newcomer costs only its own measurements, and a loss costs none.
        assert!(!Survey::is_needed(&ids(3)[1..], &atlas) && Survey::is_needed(&ids(4), &atlas));
        assert_eq!(measure(&ids(4), &mut atlas), 1 + 4);
        let (cluster, _) = atlas.cluster(&[members[1], members[2]]).unwrap();
        assert_eq!(cluster.link(PeerId(0), PeerId(1)).map(|l| l.bandwidth), Some(3.0));

        atlas.cut_off(MemberId(2), MemberId(1));
        assert!(atlas.is_cut_off(MemberId(1), MemberId(2)) && !Survey::is_needed(&ids(4), &atlas));
        atlas.forget_failures(MemberId(2));
        assert!(Survey::is_needed(&[MemberId(1), MemberId(2)], &atlas));
    }

    /// Members 1 and 2 are behind one router, and so are 3 and 4.
    #[test]
    fn a_shared_line_is_measured_by_one_at_a_time_and_becomes_a_site() {
        let mut atlas = Atlas::default();
        for (member, line) in [(1, [192, 0, 2, 1]), (2, [192, 0, 2, 1]), (3, [192, 0, 2, 9]), (4, [192, 0, 2, 9])] {
            atlas.set_line(MemberId(member), Some(line.into()));
        }
        atlas.set_line(MemberId(0), Some([127, 0, 0, 1].into()));
        let mut survey = Survey::new(&ids(5), &atlas, &[]);
        let mut met = 0;
        for round in &mut survey.rounds {
            let mut lines = BTreeSet::new();
            for (a, message) in &round.requests {
                let ToPeer::Probe { with: b, .. } = message else { continue };
                met += 1;
                let ends = [atlas.line(*a), atlas.line(*b)];
                if ends[0] != ends[1] {
                    assert!(ends.into_iter().flatten().all(|line| lines.insert(line)));
                }
            }
        }
        assert_eq!(met, 5 * 6 / 2);

        measure(&ids(5), &mut atlas);
        let roster = roster(5);
        let (cluster, notes) = atlas.cluster(&roster.present().collect::<Vec<_>>()).unwrap();
        let sites: Vec<_> = cluster.sites().iter().map(|s| (s.name.as_str(), s.uplink, s.downlink)).collect();
        let free = |bandwidth| Some(Link { latency: 0.0, bandwidth });
        assert_eq!(
            sites,
            [("line of p1 and p2", free(102.0), free(1020.0)), ("line of p3 and p4", free(104.0), free(1040.0))]
        );
        assert!(notes.iter().any(|n| n.contains("line of p1 and p2 is shared")), "{notes:?}");
        let rate = |a, b| cluster.link(PeerId(a), PeerId(b)).map(|l| l.bandwidth);
        assert_eq!((rate(1, 2), rate(1, 3)), (Some(3.0), Some(4.0)), "links keep what was measured");
        let uplinks = |a, b| {
            let lines = cluster.route(PeerId(a), PeerId(b)).unwrap();
            lines.lines().filter(|(line, _)| matches!(line, Line::Uplink { .. })).count()
        };
        assert_eq!((uplinks(1, 2), uplinks(1, 3)), (0, 2));
    }

    /// Members 1 to 4 compute on one processor of two cores, the last of them with another backend. Member 0 has its own.
    #[test]
    fn members_of_one_processor_measure_alone_by_kind_and_then_together() {
        let mut atlas = Atlas::default();
        let at = |id| Some(ComputesOn { id: [id; 16], cores: 2, busy: 1.0, profiled: false });
        atlas.set_processor(MemberId(0), at(9), "cpu");
        for m in 1..=4 {
            atlas.set_processor(MemberId(m), at(5), if m == 4 { "burn" } else { "cpu" });
        }
        let curve = |seconds| Curve::new(vec![(1e6, seconds)]).unwrap();
        let took = |seconds| MachineProfile {
            operators: Measured::from(BTreeMap::from([("mm".to_owned(), curve(seconds))])),
            ..machine()
        };
        let mut survey = Survey::new(&ids(5), &atlas, &[]);
        let mut rounds = Vec::new();
        while rounds.len() < 3 {
            let asked: Vec<u32> = survey.next_requests().iter().map(|(m, _)| m.0).collect();
            for m in &asked {
                let seconds = if rounds.len() == 2 { 1.5 } else { 1.0 };
                survey.answer(MemberId(*m), FromPeer::Machine(Box::new(took(seconds))), &mut atlas).unwrap();
            }
            rounds.push(asked);
        }
        assert_eq!(rounds, [vec![0, 1], vec![4], vec![1, 2, 3, 4]]);
        measure(&ids(5), &mut atlas);
        let roster = roster(5);
        let (cluster, notes) = atlas.cluster(&roster.present().collect::<Vec<_>>()).unwrap();
        assert!(notes.contains(&"p1 and 3 more compute on one machine, and divide its 2 cores".into()), "{notes:?}");
        let processor = |i: usize| cluster.devices()[i].processor.clone().unwrap();
        assert_eq!([1, 2, 3, 4].map(|i| processor(i).name), ["p1"; 4]);
        assert_eq!((processor(0).name.as_str(), processor(0).crowded), ("p0", 1.0));
        assert_eq!((processor(2).cores, processor(2).busy, processor(2).crowded), (2.0, 1.0, 1.5));
        // Member 2 never measured alone; its kind did.
        assert!(cluster.devices().iter().all(|d| d.measured.operators.by_name["mm"] == curve(1.0)));

        // A profile is that of its member alone.
        let profiled = ComputesOn { profiled: true, ..at(5).unwrap() };
        atlas.set_processor(MemberId(3), Some(profiled), "cpu");
        let (cluster, _) = atlas.cluster(&roster.present().collect::<Vec<_>>()).unwrap();
        assert_eq!(cluster.devices()[3].measured.operators.by_name["mm"], curve(1.5));

        // Since then, the last one may use one core alone.
        atlas.set_processor(
            MemberId(4),
            Some(ComputesOn { id: [5; 16], cores: 1, busy: 1.0, profiled: false }),
            "burn",
        );
        let (cluster, _) = atlas.cluster(&roster.present().collect::<Vec<_>>()).unwrap();
        assert_eq!(cluster.devices()[4].processor.as_ref().map(|p| p.cores), Some(2.0));

        // A newcomer of a known kind measures once, beside whatever the others do.
        atlas.set_processor(MemberId(5), at(5), "cpu");
        let newcomer = Survey::new(&ids(6), &atlas, &[]).next_requests();
        assert_eq!(newcomer.iter().map(|(m, _)| m.0).collect::<Vec<_>>(), [5]);
    }

    #[test]
    fn impossible_numbers_are_refused() {
        let refused = |answer: &dyn Fn(&mut MachineProfile)| {
            let mut atlas = Atlas::default();
            let mut survey = Survey::new(&ids(1), &atlas, &[]);
            survey.next_requests();
            let mut m = machine();
            answer(&mut m);
            survey.answer(MemberId(0), FromPeer::Machine(Box::new(m)), &mut atlas).unwrap_err()
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
        for bad in [link(0.0), link(f64::INFINITY), Link { latency: f64::NAN, bandwidth: 1.0 }] {
            let mut atlas = Atlas::default();
            let mut survey = Survey::new(&ids(1), &atlas, &[]);
            assert_eq!(survey.next_requests(), [(MemberId(0), ToPeer::Measure { programs: Vec::new() })]);
            let unasked = FromPeer::Links { with: MemberId(3), links: None, relayed: false };
            survey.answer(MemberId(0), unasked, &mut atlas).unwrap();
            assert!(!survey.is_over() && !atlas.is_cut_off(MemberId(0), MemberId(3)));
            survey.answer(MemberId(0), FromPeer::Machine(Box::new(machine())), &mut atlas).unwrap();
            assert_eq!(survey.next_requests().len(), 1);
            let with = MemberId::BROKER;
            let links = Some((bad, link(1.0)));
            assert!(survey.answer(MemberId(0), FromPeer::Links { with, links, relayed: false }, &mut atlas).is_err());
        }
    }

    #[test]
    fn many_members_are_measured_in_less_time_each() {
        let patience = |count| match Survey::new(&ids(count), &Atlas::default(), &[]).rounds[1].requests[0].1 {
            ToPeer::Probe { patience_s, .. } => patience_s,
            _ => 0.0,
        };
        assert_eq!(patience(20), PATIENCE_S);
        assert!((patience(1000) * 2.0 * 1001.0 - MAX_PROBING_S).abs() < 1e-6);
    }
}
