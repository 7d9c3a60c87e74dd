//! How a run ends, for its members, and how it goes on after the end of its broker.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]

mod common;

use common::stage::{PEERS, Stage};
use fusionllm_events::Event;
use fusionllm_protocol::{
    Action, ComputeCommand, Farewell, FromPeer, Heartbeat, Incident, IncidentKind, Invitation, MemberId, Notice, Past,
    TicketRole, ToPeer,
};

/// Regression: the time of the work that was lost was 0, because only the broker that was killed knew when its steps
/// were done.
#[test]
fn the_work_that_a_killed_broker_lost_is_counted() {
    let mut stage = Stage::training();
    // Its metrics have more steps than its last state, and nobody has a cut.
    stage.kill_broker(&Past { away_s: 5.0, steps: vec![(1, 0.5), (2, 0.25), (3, 0.75)] });
    stage.now = 2.0;
    for m in 0..3 {
        stage.join(m, 0).unwrap();
    }
    stage.all_ready();
    let started = |action: &Action| match action {
        Action::Notice(Notice::Started { incidents, .. }) => Some(incidents.clone()),
        _ => None,
    };
    let incidents: Vec<Incident> = stage.actions.iter().filter_map(started).flatten().collect();
    let [incident] = incidents[..] else { panic!("{incidents:?}") };
    assert_eq!(incident.kind, IncidentKind::Broker);
    assert_eq!((incident.step, incident.restarted_at), (3, 0));
    assert_eq!(incident.lost_work_s, 1.5, "of all three steps");
    assert_eq!(incident.detected_s + incident.replanned_s + incident.restored_s, 7.0, "away, and until all were back");
}

/// Regression: the first step was copied at once, which took half of each link in the first minutes.
#[test]
fn no_cut_is_taken_before_it_is_due() {
    let cuts = |stage: &Stage| {
        let snapshots = stage.actions.iter().filter_map(|action| match action {
            Action::Send(MemberId(0), ToPeer::Compute(ComputeCommand::Snapshot { step, .. })) => Some(*step),
            _ => None,
        });
        snapshots.collect::<Vec<_>>()
    };
    let mut stage = Stage::training();
    // A step takes 0.1 s, and cuts are at least 2 s apart.
    (0..19).for_each(|_| _ = stage.step(|_, _| {}));
    assert_eq!(cuts(&stage), Vec::<u64>::new());
    (0..5).for_each(|_| _ = stage.step(|_, _| {}));
    let cuts = cuts(&stage);
    assert!(matches!(cuts[..], [20..24]), "{cuts:?}");
}

/// A member that says so again and again fills no file of the broker.
#[test]
fn a_disk_that_is_nearly_full_is_told_once() {
    let mut stage = Stage::training();
    for free in [None, Some(1 << 40), Some(5 << 20), Some(1 << 40), Some(4 << 20)] {
        let heartbeat = Heartbeat { generation: 1, progress: 1, disk_free: free, ..Heartbeat::default() };
        stage.say(1, FromPeer::Heartbeat(heartbeat));
    }
    let told = stage.actions.iter().filter_map(|action| match action {
        Action::Notice(Notice::Event(event @ Event::DiskLow { .. })) => Some(event.lines().join("\n")),
        _ => None,
    });
    let told: Vec<String> = told.collect();
    insta::assert_snapshot!(told.join("\n"), @"the disk of m1 is nearly full: 5 MiB are left; copies that find no room stay in its memory");
}

/// Regression: a joiner ended with status 0, and nothing said why.
#[test]
fn members_read_how_their_part_ends() {
    let mut stage = Stage::training();
    stage.join(3, 0).unwrap();
    stage.say(3, FromPeer::Leaving);
    assert_eq!(stage.stopped(3), Some(&Farewell::Left));
    let (_, actions) = stage.run.kick("m2", stage.now).unwrap();
    stage.carry_out(actions);
    assert_eq!(stage.stopped(2), Some(&Farewell::PutOut { reason: "the run's owner put it out".into() }));
    stage.all_ready();
    while !stage.issued.is_empty() {
        stage.step(|_, _| {});
    }
    for m in [0, 1] {
        let actions = stage.run.snapshot_arrived(MemberId(m), 60, stage.now);
        stage.carry_out(actions);
    }
    let actions = stage.run.checkpoint_committed(stage.run.progress(), true, stage.now);
    stage.carry_out(actions);
    for m in [0, 1] {
        assert_eq!(stage.stopped(m), Some(&Farewell::Over { step: 60, steps: 60 }));
    }
}

/// Regression: the last one was let go at once, and the others waited for a cut that never came.
#[test]
fn all_members_may_leave_at_once() {
    let mut stage = Stage::training();
    for m in [0, 1, 2] {
        stage.say(m, FromPeer::Leaving);
    }
    for m in [0, 1, 2] {
        assert_eq!(stage.stopped(m), Some(&Farewell::Left), "member {m}");
    }
    let actions = stage.run.interrupt(stage.now);
    let ended = |a: &Action| matches!(a, Action::Suspend(_) | Action::Finish(_) | Action::Fail(_));
    assert!(actions.iter().any(ended), "nobody is left for whom a run that is to stop could wait: {actions:?}");
}

#[test]
fn members_of_a_run_that_fails_read_why() {
    let mut stage = Stage::new(3, Invitation::new(TicketRole::Peer, PEERS));
    stage.join(0, 0).unwrap();
    let actions = stage.run.interrupt(stage.now);
    stage.carry_out(actions);
    let reason = "interrupted before all peers had joined".into();
    assert_eq!(stage.stopped(0), Some(&Farewell::Failed { reason }));
}
