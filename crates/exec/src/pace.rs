use std::thread;
use std::time::{Duration, Instant};

use cpu_time::ThreadTime;

/// Slows a thread down: its work takes a multiple of the processor time that was measured, never of an estimate.
///
/// The missing time adds up over many instructions. The thread sleeps before anything that other processes can notice.
/// Sleeping after each instruction would lose the core's caches each time, and slow down the work to be measured.
#[derive(Debug)]
pub struct Pace {
    slowdown: f64,
    /// Seconds still to sleep. Negative if the work so far took too long: sleeps end late, and other processes take
    /// the processor.
    debt_s: f64,
    /// The time when the uncounted work began, and the thread's processor time then, where the system reports it.
    since: (Instant, Option<ThreadTime>),
}

/// Most seconds of excess time that later sleeps make up for. A machine that pauses for longer appears slow.
const MAX_CREDIT_S: f64 = 0.02;

/// Seconds of work after which the thread sleeps even if nothing visible happens. Each sleep cools the caches. So work
/// that is measured alone finds them as cold as a small stage, which sleeps before each tensor that it sends.
const MAX_WORK_BETWEEN_SLEEPS_S: f64 = 0.002;

/// Work shorter than this is counted together with the next, because reading a thread's time takes as long as a small
/// kernel.
const MIN_COUNTED_WORK: Duration = Duration::from_micros(100);

impl Pace {
    /// From now on, work takes `slowdown` times its processor time. 1 or less changes nothing.
    #[must_use]
    pub fn new(slowdown: f64) -> Self {
        Self { slowdown, debt_s: 0.0, since: now() }
    }

    /// Discards the uncounted time, for example after waiting for others.
    pub fn restart(&mut self) {
        self.since = now();
    }

    /// Counts the work since the last call, and sleeps if the debt is large. It is cheap enough to be called after
    /// every instruction.
    pub fn count_work(&mut self) {
        if self.slowdown > 1.0 && self.since.0.elapsed() > MIN_COUNTED_WORK {
            self.count();
        }
    }

    fn count(&mut self) {
        let (started, cpu) = self.since;
        self.restart();
        let elapsed = self.since.0 - started;
        // If the system does not report a thread's time, the thread counts as having run throughout.
        let work = cpu.and_then(|c| c.try_elapsed().ok()).unwrap_or(elapsed);
        self.add_work(work.as_secs_f64(), elapsed.as_secs_f64());
        if self.debt_s > MAX_WORK_BETWEEN_SLEEPS_S * (self.slowdown - 1.0) {
            self.sleep();
        }
    }

    /// Counts the work until now and sleeps for the whole debt. Call it before anything that others can notice.
    pub fn sleep_debt(&mut self) {
        if self.slowdown > 1.0 {
            self.count();
        }
        if self.debt_s > 0.0 {
            self.sleep();
        }
    }

    fn sleep(&mut self) {
        let started = Instant::now();
        thread::sleep(Duration::from_secs_f64(self.debt_s));
        self.pay(started.elapsed().as_secs_f64());
        self.restart();
    }

    /// Adds work of `cpu_s` seconds of processor time that took `elapsed_s` seconds.
    fn add_work(&mut self, cpu_s: f64, elapsed_s: f64) {
        self.pay(elapsed_s - self.slowdown * cpu_s);
    }

    fn pay(&mut self, seconds: f64) {
        self.debt_s = (self.debt_s - seconds).max(-MAX_CREDIT_S);
    }
}

fn now() -> (Instant, Option<ThreadTime>) {
    (Instant::now(), ThreadTime::try_now().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_takes_a_multiple_of_its_processor_time() {
        let mut pace = Pace::new(3.0);
        pace.add_work(0.25, 0.25);
        assert_eq!(pace.debt_s, 0.5);
        pace.add_work(0.25, 0.5);
        assert_eq!(pace.debt_s, 0.75, "time that other processes took is part of the sleep");
        pace.pay(0.75);
        assert_eq!(pace.debt_s, 0.0);
    }

    #[test]
    fn excess_time_shortens_later_sleeps() {
        let mut pace = Pace::new(2.0);
        pace.add_work(0.125, 0.2578125);
        assert_eq!(pace.debt_s, -0.0078125);
        pace.add_work(0.125, 0.125);
        assert_eq!(pace.debt_s, 0.125 - 0.0078125);
        pace.pay(0.125);
        pace.add_work(0.125, 9.0);
        assert_eq!(pace.debt_s, -MAX_CREDIT_S, "only up to a limit");
    }

    #[test]
    fn a_loop_takes_at_least_its_multiple() {
        let mut pace = Pace::new(2.0);
        let (started, cpu) = (Instant::now(), ThreadTime::now());
        let sum = (0..2_000_000u64).fold(0u64, |a, b| std::hint::black_box(a ^ b));
        pace.sleep_debt();
        // The loop is nearly all of the thread's processor time: sleeping takes none.
        let (took, cpu) = (started.elapsed(), cpu.elapsed());
        assert!(took.as_secs_f64() > 1.5 * cpu.as_secs_f64(), "{took:?} for {cpu:?} of processor time ({sum})");
    }
}
