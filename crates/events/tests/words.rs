//! An event as files and people get it.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use fusionllm_events::{Event, IncidentSummary, StepMetrics, Timed};
use insta::assert_snapshot;

fn json(event: Event) -> String {
    let line = serde_json::to_string(&Timed { time: 1.5, event: event.clone() }).unwrap();
    let read: Timed = serde_json::from_str(&line).unwrap();
    assert_eq!(read, Timed { time: 1.5, event });
    line
}

#[test]
fn a_line_has_the_time_the_name_and_the_fields() {
    let lost = Event::Lost { peer: "attic".into(), reason: "its line is down".into(), used: true, step: 7 };
    assert_snapshot!(json(lost.clone()), @r#"{"time":1.5,"event":"lost","peer":"attic","reason":"its line is down","used":true,"step":7}"#);
    assert_snapshot!(lost.lines().join("\n"), @"lost attic at step 7: its line is down; the others take over its share");
    assert_snapshot!(json(Event::Measuring), @r#"{"time":1.5,"event":"measuring"}"#);
    let incident =
        IncidentSummary { kind: "lost".into(), peer: "attic".into(), step: 7, restarted_at: 6, ..Default::default() };
    assert_snapshot!(json(Event::Started { incidents: vec![incident] }), @r#"{"time":1.5,"event":"started","incidents":[{"kind":"lost","peer":"attic","step":7,"restarted_at":6,"detected_s":0.0,"replanned_s":0.0,"restored_s":0.0,"restored_bytes":0,"lost_work_s":0.0}]}"#);
    // JSON has no number for it.
    let diverged = Event::Evaluated { step: 3, val_loss: None, val_accuracy: Some(0.125) };
    assert_snapshot!(json(diverged.clone()), @r#"{"time":1.5,"event":"evaluated","step":3,"val_loss":null,"val_accuracy":0.125}"#);
    assert_snapshot!(diverged.lines().join("\n"), @"step 3: the validation loss is not finite, accuracy 12.5 %");
    let skipped = StepMetrics { step: 4, skipped: true, ..StepMetrics::default() };
    let step = Event::Step(Box::new(skipped));
    assert!(step.is_metric() && !lost.is_metric());
    assert_snapshot!(step.lines().join("\n"), @"step 4: the loss or a gradient is not finite; this update is skipped");
    json(step);
}

#[test]
fn a_plan_has_several_lines() {
    let planned = Event::Planned {
        model: "gpt2".into(),
        parameters: 124_439_808,
        operators: 1,
        peers: vec!["attic".into(), "cellar".into()],
        stages: 2,
        scheduler: "op-fence".into(),
        schedule: "1f1b".into(),
        micro_batches: 4,
        targets: "tokens".into(),
        notes: vec!["a sentence".into()],
        predicted_step_s: Some(0.5),
    };
    assert_snapshot!(planned.lines().join("\n"), @r"
    gpt2: 124 M parameters, 1 operator in 2 stages over 2 peers
    plan: op-fence, 1f1b schedule, 4 micro-batches
    a sentence
    predicted: 500 ms a step
    ");
    json(planned);
}
