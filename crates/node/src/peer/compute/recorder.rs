//! A record of the computing thread's activities and their times.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use fusionllm_plan::{Activity, activities};
use fusionllm_program::{PeerId, Program};
use fusionllm_protocol::{MAX_SPANS, PassSpan, ReceivedMessage};

/// An activity that is shorter belongs to the one before it, so that a step has few activities. Computing that comes
/// after a wait is kept, however short it is, so that it never counts as waiting.
const SHORTEST_US: u64 = 20;

/// Records the activities of training passes. A backend that runs a segment as a whole reports all of its instructions
/// at its end, so the time of the segment counts for the first of them.
pub(crate) struct Recorder {
    /// By instruction of the training program: what it is.
    activities: Vec<(Activity, Option<u32>)>,
    messages: Messages,
    /// The start of the pass in flight, if it is recorded.
    began: Option<Instant>,
    /// The end of the last activity.
    last_us: u64,
    spans: Vec<PassSpan>,
}

/// Messages from other peers, as they come.
#[derive(Clone, Default)]
pub(crate) struct Messages(Arc<Mutex<Vec<Message>>>);

/// The sender, bytes, and the arrival of the first and the last byte.
type Message = (PeerId, u64, [Instant; 2]);

impl Messages {
    /// A message has come whole. `begun` is the arrival of its first byte.
    pub(crate) fn came(&self, from: PeerId, bytes: u64, begun: Instant) {
        let mut messages = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if messages.len() < MAX_SPANS {
            messages.push((from, bytes, [begun, Instant::now()]));
        }
    }
}

fn micros(from: Instant, to: Instant) -> u64 {
    to.saturating_duration_since(from).as_micros() as u64
}

impl Recorder {
    pub(crate) fn new(train: &Program, messages: Messages) -> Self {
        Self { activities: activities(train), messages, began: None, last_us: 0, spans: Vec::new() }
    }

    /// A pass begins. Only training is recorded.
    pub(crate) fn begin(&mut self, training: bool) {
        self.began = training.then(Instant::now);
        self.last_us = 0;
        self.spans.clear();
    }

    /// An instruction is done.
    pub(crate) fn done(&mut self, index: usize) {
        let (activity, micro_batch) = self.activities.get(index).copied().unwrap_or((Activity::Update, None));
        self.until_now(activity, micro_batch);
    }

    /// The time from the last activity until now was spent with this one.
    pub(crate) fn until_now(&mut self, activity: Activity, micro_batch: Option<u32>) {
        let Some(began) = self.began else { return };
        self.until(micros(began, Instant::now()), activity, micro_batch);
    }

    /// The time from the last activity until `end_us` was spent with this one.
    fn until(&mut self, end_us: u64, activity: Activity, micro_batch: Option<u32>) {
        let start_us = self.last_us;
        let room = self.spans.len() < MAX_SPANS;
        match self.spans.last_mut() {
            Some(last) if (last.activity, last.micro_batch) == (activity, micro_batch) => last.end_us = end_us,
            // The clocks of peers are compared by the verdict.
            Some(last)
                if end_us - start_us < SHORTEST_US
                    && activity != Activity::Verdict
                    && (last.activity.computes() || !activity.computes()) =>
            {
                last.end_us = end_us;
            }
            _ if room => {
                self.spans.push(PassSpan { activity, micro_batch, start_us, end_us });
            }
            _ => {}
        }
        self.last_us = end_us;
    }

    /// The activities of the pass that has ended, and the messages that came since the one before.
    pub(crate) fn take(&mut self) -> (Vec<PassSpan>, Vec<ReceivedMessage>) {
        let messages = std::mem::take(&mut *self.messages.0.lock().unwrap_or_else(PoisonError::into_inner));
        let Some(began) = self.began.take() else { return Default::default() };
        let arrival = |(from, bytes, [start, end]): Message| ReceivedMessage {
            from,
            bytes,
            start_us: micros(began, start),
            end_us: micros(began, end),
        };
        (std::mem::take(&mut self.spans), messages.into_iter().map(arrival).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_activities_join_the_one_before_but_computing_is_no_waiting() {
        let mut recorder = Recorder {
            activities: Vec::new(),
            messages: Messages::default(),
            began: None,
            last_us: 0,
            spans: Vec::new(),
        };
        recorder.begin(true);
        let (wait, forward, backward) = (Activity::Wait, Activity::Forward, Activity::Backward);
        let ends = [
            (700, wait, Some(0)),
            (705, forward, Some(0)),
            (712, wait, Some(1)),
            (720, backward, Some(0)),
            (900, wait, Some(1)),
            (930, forward, Some(1)),
            (960, backward, Some(1)),
            (965, Activity::Verdict, None),
        ];
        for (end_us, activity, micro_batch) in ends {
            recorder.until(end_us, activity, micro_batch);
        }
        let spans: Vec<_> =
            recorder.take().0.iter().map(|s| (s.activity, s.micro_batch, s.start_us, s.end_us)).collect();
        let expected = [
            (wait, Some(0), 0, 700),
            (forward, Some(0), 700, 720),
            (wait, Some(1), 720, 900),
            (forward, Some(1), 900, 930),
            (backward, Some(1), 930, 960),
            (Activity::Verdict, None, 960, 965),
        ];
        assert_eq!(spans, expected);
    }
}
