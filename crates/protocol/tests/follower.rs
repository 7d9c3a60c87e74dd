//! A peer's part in generations and cuts, without a network.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};

use fusionllm_graph::ChoiceRng;
use fusionllm_program::TensorKey;
use fusionllm_protocol::{Follower, FollowerAction, FromPeer, Greeting, MemberId, Role, SHELF, Source};
use proptest::prelude::*;

const ME: MemberId = MemberId(1);
const OTHER: MemberId = MemberId(2);
const THIRD: MemberId = MemberId(3);

fn key(name: &str) -> TensorKey {
    TensorKey::value(name)
}

/// A part with the neighbour [`OTHER`], whose share of `b` it mirrors. Its own share is `a` with one slot.
fn role(generation: u32, start: u64, sources: &[(TensorKey, Source)]) -> Role {
    Role {
        generation,
        me: ME,
        start,
        neighbours: BTreeSet::from([OTHER]),
        sources: sources.iter().cloned().collect(),
        share: BTreeSet::from([key("a"), TensorKey::slot("a", "m")]),
        shelved: BTreeSet::new(),
        mirrors: BTreeMap::from([(OTHER, BTreeSet::from([key("b")]))]),
    }
}

fn drawn(generation: u32) -> Role {
    role(generation, 0, &[(key("a"), Source::Seed), (TensorKey::slot("a", "m"), Source::Seed)])
}

fn tell(message: FromPeer) -> FollowerAction {
    FollowerAction::Tell(message)
}

/// A follower in generation 1, which runs.
fn running() -> Follower {
    let mut follower = Follower::new();
    follower.assign(drawn(1));
    follower.loaded(1, &key("a"));
    assert_eq!(follower.connected(1, OTHER), [FollowerAction::Start { generation: 1 }]);
    follower
}

/// A follower with the cut of step 4, both its own share and the copy of the other's, whose generation was stopped.
fn stopped_after_a_cut() -> Follower {
    let mut follower = running();
    assert_eq!(follower.cut_taken(1, 4), [tell(FromPeer::Kept { step: 4 })]);
    follower.mirror(4, OTHER, None);
    assert_eq!(follower.copied(1, 4, OTHER), [tell(FromPeer::Mirrored { step: 4, of: OTHER })]);
    assert_eq!(follower.regroup(2), [FollowerAction::Stop]);
    assert_eq!(follower.ended(1, None), []);
    follower
}

#[test]
fn a_generation_starts_once_all_is_loaded_and_all_neighbours_are_connected() {
    let mut follower = Follower::new();
    assert_eq!(follower.waits_for(), Some(MemberId::BROKER), "for an assignment");
    let sources = [
        (key("a"), Source::Seed),
        (TensorKey::slot("a", "m"), Source::Seed),
        (key("c"), Source::Broker),
        (key("d"), Source::Member(THIRD)),
    ];
    let expected = [
        FollowerAction::Begin { generation: 1 },
        FollowerAction::Draw { keys: vec![key("a")] },
        FollowerAction::Fetch { from: THIRD, step: 0, keys: vec![key("d")] },
        FollowerAction::Connect { with: BTreeSet::from([OTHER]) },
    ];
    assert_eq!(follower.assign(role(1, 0, &sources)), expected);
    assert_eq!(follower.assign(role(1, 0, &sources)), [], "twice");
    assert_eq!(follower.waits_for(), Some(MemberId::BROKER));
    assert_eq!(follower.loaded(1, &key("c")), []);
    assert_eq!(follower.waits_for(), Some(THIRD));
    assert_eq!(follower.loaded(1, &key("d")), []);
    assert_eq!(follower.loaded(1, &key("a")), []);
    assert_eq!(follower.waits_for(), Some(OTHER));
    assert_eq!(follower.loaded(2, &key("a")), [], "of no generation of this peer");
    assert_eq!(follower.connected(1, OTHER), [FollowerAction::Start { generation: 1 }]);
    assert!(follower.is_running() && follower.takes_commands());
    assert_eq!(follower.waits_for(), None);
}

#[test]
fn only_the_first_loss_of_a_generation_is_reported() {
    let mut follower = running();
    let message = FromPeer::LinkLost { generation: 1, member: OTHER, reason: "gone".into() };
    assert_eq!(follower.lost(1, OTHER, "gone".into()), [FollowerAction::Stop, tell(message)]);
    assert_eq!(follower.lost(1, OTHER, "again".into()), []);
    assert_eq!(follower.failed(1, "it waited for the other".into()), []);
    assert_eq!(follower.ended(1, Some("it waited for the other".into())), []);
    assert!(!follower.takes_commands());
    assert_eq!(follower.assign(drawn(1)), [], "that generation is over");
    assert!(follower.assign(drawn(2)).contains(&FollowerAction::Begin { generation: 2 }));
}

#[test]
fn a_thread_that_ends_by_itself_fails_its_generation() {
    let mut follower = running();
    let message = FromPeer::Failed { generation: 1, reason: "no memory".into() };
    assert_eq!(follower.ended(1, Some("no memory".into())), [FollowerAction::Stop, tell(message)]);
    assert_eq!(follower.ended(1, None), []);
    assert_eq!(follower.waits_for(), Some(MemberId::BROKER));
}

#[test]
fn the_next_generation_begins_only_once_the_old_one_has_ended() {
    let mut follower = running();
    assert_eq!(follower.assign(drawn(2)), [FollowerAction::Stop]);
    assert_eq!(follower.greeted(OTHER, 2), Greeting::Keep);
    // A cut that was taken before the end still counts.
    assert_eq!(follower.cut_taken(1, 3), [tell(FromPeer::Kept { step: 3 })]);
    let actions = follower.ended(1, Some("stopped".into()));
    assert_eq!(actions[..2], [FollowerAction::Forget { step: 3 }, FollowerAction::Begin { generation: 2 }]);
    assert_eq!(follower.greeted(OTHER, 2), Greeting::Use);
}

#[test]
fn an_assignment_that_is_overtaken_by_a_regrouping_never_begins() {
    let mut follower = running();
    assert_eq!(follower.assign(drawn(2)), [FollowerAction::Stop]);
    assert_eq!(follower.regroup(3), []);
    assert_eq!(follower.ended(1, None), []);
    assert_eq!(follower.assign(drawn(2)), []);
    assert!(follower.assign(drawn(3)).contains(&FollowerAction::Begin { generation: 3 }));
}

/// An assignment comes on another lane than commands. Commands of the generation before arrive after it, and they once
/// made a peer take a cut of the wrong generation.
#[test]
fn commands_count_only_after_the_regrouping() {
    let mut follower = running();
    follower.assign(drawn(2));
    follower.ended(1, None);
    follower.loaded(2, &key("a"));
    follower.connected(2, OTHER);
    assert!(follower.is_running() && !follower.takes_commands());
    assert_eq!(follower.mirror(4, OTHER, None), []);
    assert_eq!(follower.regroup(2), [], "of the generation that runs");
    assert!(follower.takes_commands());
    let copy = FollowerAction::Copy { of: OTHER, step: 4, keys: vec![key("b")], bytes_per_s: Some(5.0) };
    assert_eq!(follower.mirror(4, OTHER, Some(5.0)), [copy]);
}

#[test]
fn what_the_old_connection_to_the_broker_said_is_forgotten() {
    let mut follower = running();
    assert_eq!(follower.disconnected(), [FollowerAction::Stop]);
    follower.ended(1, None);
    // Another broker may count from the beginning.
    assert!(follower.assign(drawn(1)).contains(&FollowerAction::Begin { generation: 1 }));
}

#[test]
fn tensors_that_are_here_are_taken_and_others_fetched() {
    let mut follower = stopped_after_a_cut();
    let sources = [
        (key("a"), Source::Member(ME)),
        (TensorKey::slot("a", "m"), Source::Member(ME)),
        (key("b"), Source::Member(ME)),
        (key("c"), Source::Member(THIRD)),
    ];
    let actions = follower.assign(Role { neighbours: BTreeSet::new(), ..role(2, 4, &sources) });
    let own = vec![key("a"), TensorKey::slot("a", "m"), key("b")];
    let expected = [
        FollowerAction::Begin { generation: 2 },
        FollowerAction::Take { step: 4, keys: own.clone() },
        FollowerAction::Fetch { from: THIRD, step: 4, keys: vec![key("c")] },
    ];
    assert_eq!(actions, expected);
    let started = own.iter().chain([&key("c")]).map(|key| follower.loaded(2, key)).collect::<Vec<_>>().concat();
    assert_eq!(started, [FollowerAction::Start { generation: 2 }]);
}

#[test]
fn what_never_changes_is_kept_from_generation_to_generation() {
    let mut follower = Follower::new();
    let part = |generation, start, source| {
        let role = role(generation, start, &[(key("a"), Source::Seed), (key("w"), source)]);
        Role { neighbours: BTreeSet::new(), shelved: BTreeSet::from([key("w")]), ..role }
    };
    let actions = follower.assign(part(1, 0, Source::Broker));
    assert!(!actions.contains(&FollowerAction::Take { step: SHELF, keys: vec![key("w")] }));
    follower.loaded(1, &key("a"));
    follower.shelved(&key("w"));
    let shelved = |generation| tell(FromPeer::Shelved { generation });
    assert_eq!(follower.loaded(1, &key("w")), [shelved(1), FollowerAction::Start { generation: 1 }]);
    // Another member may have it, too.
    assert_eq!(follower.request(7, THIRD, SHELF, vec![key("w")]), [FollowerAction::Serve(7)]);
    assert_eq!(follower.request(8, THIRD, SHELF, vec![key("v")]), [FollowerAction::Refuse(8)]);
    // It outlives cuts, and a start from an earlier one.
    follower.cut_taken(1, 4);
    assert_eq!(follower.release(5), [FollowerAction::Forget { step: 4 }]);
    follower.regroup(2);
    follower.ended(1, None);
    let actions = follower.assign(part(2, 0, Source::Shelf(ME)));
    assert!(actions.contains(&FollowerAction::Take { step: SHELF, keys: vec![key("w")] }), "{actions:?}");
    follower.loaded(2, &key("a"));
    assert_eq!(follower.loaded(2, &key("w")), [shelved(2), FollowerAction::Start { generation: 2 }]);
    // One that was never kept is missed at once.
    follower.regroup(3);
    follower.ended(2, None);
    let mut lacking = part(3, 0, Source::Shelf(ME));
    lacking.sources.insert(key("v"), Source::Shelf(ME));
    let reason = r#"this peer has no copy of "v""#.into();
    assert_eq!(follower.assign(lacking), [tell(FromPeer::Failed { generation: 3, reason })]);
}

#[test]
fn a_peer_without_the_copy_that_it_should_have_says_so() {
    let mut follower = stopped_after_a_cut();
    let reason = r#"this peer has no copy of "c" after step 4"#.into();
    let failed = tell(FromPeer::Failed { generation: 2, reason });
    assert_eq!(follower.assign(role(2, 4, &[(key("c"), Source::Member(ME))])), [failed]);
    assert!(follower.assign(drawn(3)).contains(&FollowerAction::Begin { generation: 3 }));
}

/// After the run went back to step 2, step 4 is computed again. A copy that mixed both courses of training would belong
/// to neither.
#[test]
fn cuts_after_the_one_gone_back_to_are_forgotten() {
    let mut follower = stopped_after_a_cut();
    follower.regroup(2);
    let mut back = drawn(2);
    back.start = 2;
    assert_eq!(follower.assign(back)[0], FollowerAction::Forget { step: 4 });
    assert_eq!(follower.request(1, OTHER, 4, vec![key("b")]), [FollowerAction::Refuse(1)]);
}

#[test]
fn copies_of_one_cut_complete_each_other() {
    let mut follower = stopped_after_a_cut();
    let mut next = role(2, 4, &[(key("b"), Source::Member(ME))]);
    next.share = BTreeSet::from([key("b")]);
    next.mirrors = BTreeMap::from([(OTHER, BTreeSet::from([key("a"), key("c")]))]);
    follower.assign(next);
    follower.loaded(2, &key("b"));
    follower.connected(2, OTHER);
    // The peer's own share of the same cut has `a`.
    let copy = FollowerAction::Copy { of: OTHER, step: 4, keys: vec![key("c")], bytes_per_s: None };
    assert_eq!(follower.mirror(4, OTHER, None), [copy]);
    follower.copied(2, 4, OTHER);
    assert_eq!(follower.mirror(4, OTHER, None), [tell(FromPeer::Mirrored { step: 4, of: OTHER })]);
}

#[test]
fn requests_are_served_now_later_or_never() {
    let mut follower = stopped_after_a_cut();
    assert_eq!(follower.request(1, THIRD, 4, vec![key("a"), key("b")]), [FollowerAction::Serve(1)]);
    assert_eq!(follower.request(2, THIRD, 4, vec![key("c")]), [FollowerAction::Refuse(2)]);
    assert_eq!(follower.request(3, THIRD, 5, vec![key("a")]), [FollowerAction::Refuse(3)], "nothing runs");

    let mut follower = running();
    assert_eq!(follower.request(1, THIRD, 6, vec![key("a")]), [], "the thread may not have reached it");
    assert_eq!(follower.request(2, THIRD, 6, vec![key("b")]), [FollowerAction::Refuse(2)], "not its share");
    assert_eq!(follower.cut_taken(1, 4), [tell(FromPeer::Kept { step: 4 })]);
    assert_eq!(follower.cut_taken(1, 6), [tell(FromPeer::Kept { step: 6 }), FollowerAction::Serve(1)]);
    assert_eq!(follower.request(3, THIRD, 5, vec![key("a")]), [FollowerAction::Refuse(3)], "it was not taken");
    assert_eq!(follower.request(4, THIRD, 8, vec![key("a")]), []);
    assert_eq!(follower.request_over(4), [FollowerAction::Refuse(4)]);
    assert_eq!(follower.request_over(4), []);
    assert_eq!(follower.request(5, THIRD, 8, vec![key("a")]), []);
    assert_eq!(follower.regroup(2), [FollowerAction::Stop, FollowerAction::Refuse(5)]);
}

#[test]
fn one_member_cannot_make_many_requests_wait() {
    let mut follower = running();
    let ask = |number| (number, follower.request(number, THIRD, 9, vec![key("a")]));
    let refused: Vec<u64> = (0..6).map(ask).filter(|(_, actions)| !actions.is_empty()).map(|(n, _)| n).collect();
    assert_eq!(refused, [4, 5]);
}

#[test]
fn a_released_cut_is_forgotten_and_not_copied_any_more() {
    let mut follower = running();
    follower.cut_taken(1, 2);
    follower.mirror(2, OTHER, None);
    assert_eq!(follower.release(3), [FollowerAction::Forget { step: 2 }]);
    assert!(!follower.wants_copy(1, 2, OTHER));
    assert_eq!(follower.copied(1, 2, OTHER), []);
    follower.mirror(4, OTHER, None);
    follower.mirror(5, OTHER, None);
    assert!(!follower.wants_copy(1, 4, OTHER) && follower.wants_copy(1, 5, OTHER), "the newer one counts");
}

#[test]
fn neighbours_come_early_late_and_in_vain() {
    let mut follower = Follower::new();
    assert_eq!(follower.greeted(OTHER, 1), Greeting::Keep, "its assignment came first");
    follower.assign(drawn(1));
    assert_eq!(follower.greeted(OTHER, 1), Greeting::Use);
    assert_eq!(follower.greeted(THIRD, 1), Greeting::Close, "no neighbour");
    let overdue = follower.overdue(1, OTHER, "slow".into());
    assert_eq!(overdue[1], tell(FromPeer::LinkLost { generation: 1, member: OTHER, reason: "slow".into() }));
    follower.regroup(3);
    assert_eq!(follower.greeted(OTHER, 2), Greeting::Close);
    assert_eq!(follower.greeted(OTHER, 3), Greeting::Keep);
}

#[test]
fn an_unfit_assignment_stops_what_runs() {
    let mut follower = running();
    let failed = tell(FromPeer::Failed { generation: 2, reason: "too large".into() });
    assert_eq!(follower.unfit(2, "too large".into()), [FollowerAction::Stop, failed]);
    assert_eq!(follower.ended(1, None), []);
    assert_eq!(follower.unfit(2, "too large".into()), []);
}

/// A caller that carries out actions in any order, and late, with a broker that sends any message.
#[derive(Default)]
struct Chaos {
    /// The generation that has begun and not ended, and whether it was stopped.
    thread: Option<(u32, bool)>,
    started: BTreeSet<u32>,
    /// The cuts that the caller keeps.
    kept: BTreeMap<u64, BTreeSet<TensorKey>>,
    asked: BTreeMap<u64, (u64, Vec<TensorKey>)>,
    share: BTreeSet<TensorKey>,
}

impl Chaos {
    fn carry_out(&mut self, actions: Vec<FollowerAction>) {
        for action in actions {
            match action {
                FollowerAction::Begin { generation } => {
                    assert_eq!(self.thread, None, "two generations at once");
                    self.thread = Some((generation, false));
                }
                FollowerAction::Stop => {
                    if let Some((_, stopped)) = &mut self.thread {
                        assert!(!*stopped, "stopped twice");
                        *stopped = true;
                    }
                }
                FollowerAction::Start { generation } => {
                    assert_eq!(self.thread, Some((generation, false)), "started what does not run");
                    assert!(self.started.insert(generation), "started twice");
                }
                FollowerAction::Take { step, keys } => {
                    assert!(keys.iter().all(|key| self.kept[&step].contains(key)), "took what is not there");
                }
                FollowerAction::Forget { step } => assert!(self.kept.remove(&step).is_some()),
                FollowerAction::Serve(number) => {
                    let (step, keys) = self.asked.remove(&number).expect("answered twice");
                    assert!(keys.iter().all(|key| self.kept[&step].contains(key)), "served what is not there");
                }
                FollowerAction::Refuse(number) => assert!(self.asked.remove(&number).is_some(), "answered twice"),
                _ => {}
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn no_order_of_events_makes_a_peer_do_the_impossible(seed in any::<u64>()) {
        let mut rng = ChoiceRng::new(seed);
        let mut pick = |n: usize| rng.below(n);
        let names = ["a", "b", "c"];
        let (mut follower, mut chaos) = (Follower::new(), Chaos::default());
        for number in 0..400 {
            let (generation, step) = (1 + pick(6) as u32, pick(5) as u64);
            let name = key(names[pick(3)]);
            let member = [OTHER, THIRD][pick(2)];
            let actions = match pick(13) {
                0 => {
                    let source = |k: usize| [Source::Seed, Source::Broker, Source::Member(ME), Source::Member(OTHER)][k];
                    let sources: Vec<_> = names.iter().map(|n| (key(n), source(pick(4)))).collect();
                    follower.assign(role(generation, step, &sources))
                }
                1 => follower.regroup(generation),
                2 | 3 => follower.loaded(generation, &name),
                4 => follower.connected(generation, OTHER),
                5 if pick(4) == 0 => follower.lost(generation, member, "lost".into()),
                6 if pick(4) == 0 => follower.disconnected(),
                7 => match chaos.thread {
                    Some((ended, stopped)) if stopped || pick(4) == 0 => {
                        chaos.thread = None;
                        chaos.started.remove(&ended);
                        follower.ended(ended, None)
                    }
                    _ => Vec::new(),
                },
                8 => match chaos.thread {
                    Some((taken, _)) if chaos.started.contains(&taken) => {
                        chaos.share = BTreeSet::from([key("a"), TensorKey::slot("a", "m")]);
                        chaos.kept.entry(step).or_default().extend(chaos.share.clone());
                        follower.cut_taken(taken, step)
                    }
                    _ => Vec::new(),
                },
                9 => follower.mirror(step, OTHER, None),
                10 if follower.wants_copy(generation, step, OTHER) => {
                    chaos.kept.entry(step).or_default().insert(key("b"));
                    follower.copied(generation, step, OTHER)
                }
                11 => {
                    let keys = vec![name];
                    chaos.asked.insert(number, (step, keys.clone()));
                    follower.request(number, member, step, keys)
                }
                12 => follower.release(step),
                _ => follower.request_over(number.saturating_sub(pick(20) as u64)),
            };
            chaos.carry_out(actions);
        }
    }
}
