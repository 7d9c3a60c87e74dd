//! Members that lie to the broker, and owners that put members out. Each liar is named with the reason, and the run
//! goes on without it.
#![allow(clippy::unwrap_used)]

mod common;

use common::stage::{OWNERS, PEERS, Stage};
use fusionllm_protocol::{
    Action, ExpectedPeers, Farewell, FromPeer, Heartbeat, Invitation, MemberId, Question, Request, Roster, Run,
    RunOptions, RunPhase, Standing, TicketRole, ToPeer, VERSION,
};

#[test]
fn an_early_saved_all_puts_its_sender_out() {
    let mut stage = Stage::training();
    let actions = stage.run.snapshot_arrived(MemberId(1), 5, stage.now);
    stage.carry_out(actions);
    let reason = stage.lost(1).unwrap();
    assert!(reason.starts_with("it broke the protocol: it "), "{reason}");
    assert_eq!(stage.stopped(1), Some(&Farewell::PutOut { reason: reason.to_owned() }));
    stage.goes_on_with(&[0, 2]);
}

#[test]
fn a_peer_that_is_never_ready_is_put_out() {
    let mut stage = Stage::loading();
    stage.pass(29.0, &[0, 1, 2]);
    assert_eq!(stage.lost(2), None);
    // The others are ready and wait for nobody but the broker.
    let waits = Some(MemberId::BROKER);
    for m in [0, 1] {
        stage.say(m, FromPeer::Heartbeat(Heartbeat { generation: 1, progress: 2, waits_for: waits, disk_free: None }));
    }
    stage.pass(2.0, &[2]);
    let reason = stage.lost(2).unwrap();
    assert!(reason.contains("has done nothing for"), "{reason}");
    assert_eq!(stage.standing(2), Standing::Out);
    stage.goes_on_with(&[0, 1]);
}

/// Nothing is known of these machines, so the broker believes the first report. It names the machine that made the
/// report, and the victim is back as soon as it is heard.
#[test]
fn a_false_loss_names_who_reports_it_and_costs_the_victim_nothing() {
    let mut stage = Stage::training();
    let reason = "no answer\u{1b}[2J".to_owned();
    stage.say(0, FromPeer::LinkLost { generation: 1, member: MemberId(2), reason });
    assert_eq!(stage.lost(2), Some("\"m0\" cannot reach it: no answer [2J"));
    assert_eq!(stage.standing(2), Standing::Silent);
    stage.say(2, FromPeer::Heartbeat(Heartbeat::default()));
    assert_eq!(stage.standing(2), Standing::Present);
    assert_eq!(stage.stopped(2), None);
    // The same report again belongs to a generation that is over.
    stage.actions.clear();
    stage.say(0, FromPeer::LinkLost { generation: 1, member: MemberId(2), reason: String::new() });
    assert!(stage.actions.is_empty(), "{:?}", stage.actions);
}

/// Each false report costs a regrouping, so a liar must not have many.
#[test]
fn who_reports_one_loss_after_another_is_put_out() {
    let mut stage = Stage::training();
    for times in 1..=3 {
        let status = stage.run.status(stage.now);
        let victim = stage.run.peers().iter().rev().copied().find(|m| m.0 != 0).unwrap();
        let (generation, reason) = (status.generation, String::new());
        stage.say(0, FromPeer::LinkLost { generation, member: victim, reason });
        assert_eq!(stage.standing(0) == Standing::Out, times == 3, "after {times}");
        // The victims answer.
        stage.pass(1.0, &[0, 1, 2]);
    }
    assert_eq!(stage.lost(0), Some("it reported 3 lost links to members that answer"));
    assert_eq!((stage.standing(1), stage.standing(2)), (Standing::Present, Standing::Present));
}

#[test]
fn a_loss_of_nobody_is_ignored_and_one_of_oneself_puts_its_sender_out() {
    let mut stage = Stage::training();
    let lost = |member| FromPeer::LinkLost { generation: 1, member, reason: String::new() };
    for nobody in [MemberId(77), MemberId::BROKER] {
        stage.say(0, lost(nobody));
        assert!(stage.actions.is_empty(), "{:?}", stage.actions);
    }
    stage.say(0, lost(MemberId(0)));
    assert_eq!(stage.lost(0), Some("it broke the protocol: it lost its link to itself"));
    stage.goes_on_with(&[1, 2]);
}

#[test]
fn a_member_cannot_ask_as_the_owner() {
    let mut stage = Stage::training();
    let question = Question::Kick { name: "m0".into() };
    stage.say(1, FromPeer::Ask(Request { version: VERSION, secret: OWNERS, question }));
    assert_eq!(stage.lost(1), Some("it broke the protocol: it asked what only the run's owner may ask"));
    stage.goes_on_with(&[0, 2]);
}

#[test]
fn a_kicked_member_is_told_and_its_key_cannot_come_back() {
    let mut stage = Stage::training();
    let (member, actions) = stage.run.kick("m1", stage.now).unwrap();
    stage.carry_out(actions);
    assert_eq!((member, stage.standing(1)), (MemberId(1), Standing::Out));
    assert_eq!(stage.stopped(1), Some(&Farewell::PutOut { reason: "the run's owner put it out".into() }));
    assert!(stage.actions.contains(&Action::Dismiss(member)));
    stage.goes_on_with(&[0, 2]);
    for process in [0, 1] {
        let refused = stage.join(1, process).unwrap_err();
        assert!(refused.contains("put it out for good"), "{refused}");
    }
    stage.join(3, 0).unwrap();
}

/// Members that were measured know each other's keys. They must not let a kicked one in any more.
#[test]
fn the_others_are_told_whom_to_let_in_after_a_kick() {
    let mut stage = Stage::new(3, Invitation::new(TicketRole::Peer, PEERS));
    stage.run =
        Run::new(RunOptions { measured: true, ..stage.options.clone() }, Roster::new(ExpectedPeers::Any(3), PEERS));
    for m in 0..3 {
        stage.join(m, 0).unwrap();
    }
    let known = |stage: &Stage, m: u32| {
        let told = stage.actions.iter().rev().find_map(|a| match a {
            Action::Send(MemberId(to), ToPeer::Contacts(contacts)) if *to == m => Some(contacts.clone()),
            _ => None,
        });
        told.unwrap().iter().map(|c| c.member.0).collect::<Vec<_>>()
    };
    assert_eq!(known(&stage, 0), [0, 1, 2]);
    let (_, actions) = stage.run.kick("m1", stage.now).unwrap();
    stage.carry_out(actions);
    assert_eq!((known(&stage, 0), known(&stage, 2)), (vec![0, 2], vec![0, 2]));
}

#[test]
fn a_name_that_nobody_has_kicks_nobody() {
    let mut stage = Stage::new(3, Invitation::new(TicketRole::Peer, PEERS));
    assert_eq!(stage.run.kick("m9", 0.0).unwrap_err(), "nobody has joined yet");
    stage.join(0, 0).unwrap();
    stage.join(1, 0).unwrap();
    assert_eq!(stage.run.kick("m9", 0.0).unwrap_err(), "no member is called \"m9\"; there are m0, m1");
    // One that has left can still be kept from coming back.
    stage.say(0, FromPeer::Leaving);
    assert_eq!(stage.standing(0), Standing::Out);
    stage.run.kick("m0", 0.0).unwrap();
    assert!(stage.join(0, 1).unwrap_err().contains("put it out for good"));
}

/// The run is over for nobody: members stay and come back, newcomers are refused.
#[test]
fn a_ticket_that_is_expired_used_up_or_revoked_keeps_out_only_newcomers() {
    let ticket = Invitation { expires: Some(100), uses: Some(2), ..Invitation::new(TicketRole::Peer, PEERS) };
    let mut stage = Stage::new(5, ticket);
    stage.join(0, 0).unwrap();
    stage.join(1, 0).unwrap();
    assert!(stage.join(2, 0).unwrap_err().contains("used up"));
    stage.now = 100.0;
    assert!(stage.join(2, 0).unwrap_err().contains("expired"));
    assert_eq!(stage.run.admission_mut().revoke(None), 1);
    assert!(stage.join(2, 0).unwrap_err().contains("revoked"));
    let actions = stage.run.gone(MemberId(0), "its line broke", stage.now);
    stage.carry_out(actions);
    assert_eq!(stage.standing(0), Standing::Away);
    assert_eq!(stage.join(0, 0), Ok(MemberId(0)), "a member comes back as itself");
    assert_eq!(stage.join(1, 1), Ok(MemberId(2)), "its machine was started again");
}

/// The old process has tensors, and the new one has none, although both have the same key. Both cannot take part.
#[test]
fn a_machine_that_is_started_again_takes_its_old_process_place() {
    let mut stage = Stage::training();
    assert_eq!(stage.join(1, 1), Ok(MemberId(3)));
    assert_eq!((stage.standing(1), stage.standing(3)), (Standing::Out, Standing::Present));
    let reason = "another process has joined with its key".into();
    assert_eq!(stage.stopped(1), Some(&Farewell::PutOut { reason }));
    assert_eq!(stage.run.roster().display_name(MemberId(3)), "m1");
    stage.goes_on_with(&[0, 3, 2]);
}

#[test]
fn the_status_names_every_member_and_its_share() {
    let mut stage = Stage::training();
    let actions = stage.run.gone(MemberId(1), "its line broke", stage.now);
    stage.carry_out(actions);
    stage.join(4, 0).unwrap();
    stage.now = 2.0;
    stage.say(0, FromPeer::Heartbeat(Heartbeat::default()));
    let status = stage.run.status(4.0);
    let seen = status.members.iter().map(|m| (m.name.as_str(), m.standing, m.peer, m.silent_s));
    let expected = [
        ("m0", Standing::Present, Some(0), Some(2.0)),
        ("m1", Standing::Away, None, None),
        ("m2", Standing::Present, Some(1), Some(4.0)),
        ("m4", Standing::Present, None, Some(4.0)),
    ];
    assert_eq!(seen.collect::<Vec<_>>(), expected);
    assert_eq!(status.members.iter().map(|m| m.share_bytes).collect::<Vec<_>>(), [Some(64), None, Some(64), None]);
    assert_eq!((status.phase, status.generation, status.steps, status.wanted), (RunPhase::Loading, 2, 60, 3));
}
