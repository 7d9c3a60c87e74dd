use std::thread;
use std::time::{Duration, Instant};

use cpu_time::ThreadTime;

/// Makes a thread's work take longer: a multiple of the CPU time that it took, never a guess of it.
///
/// What is missing adds up over many instructions and is waited out before anything that others can see. A wait after each would
/// hand the core's caches to somebody else each time, and slow down what it is to measure.
#[derive(Debug)]
pub struct Pace {
    slowdown: f64,
    /// Seconds that are still to be waited; less than zero if work so far took too long: sleeps end late, and other processes take the CPU.
    owed: f64,
    /// Since when work counts; the thread's own time where the system tells it.
    since: (Instant, Option<ThreadTime>),
}

/// Seconds that later sleeps make up for at most. A machine that was away for longer is slow, and shows it.
const MOST: f64 = 0.02;

/// Seconds of work after which what they owe is waited out even where nobody looks. Each wait leaves the caches cold: work that is measured without anybody looking is to find them
/// as cold as a small stage does, which waits before each tensor that it sends.
const BURST: f64 = 0.002;

/// To ask for a thread's time takes as long as a small kernel.
const LITTLE: Duration = Duration::from_micros(100);

impl Pace {
    /// Work from now on is to take `slowdown` times its CPU time; not more than it takes if that is 1 or less.
    #[must_use]
    pub fn new(slowdown: f64) -> Self {
        Self { slowdown, owed: 0.0, since: now() }
    }

    /// Lets only work from now on count: until now the thread waited for others.
    pub fn resume(&mut self) {
        self.since = now();
    }

    /// Lets the work until now count, and waits if much is owed. To be called often: a little work waits for more before it counts.
    pub fn keep(&mut self) {
        if self.slowdown > 1.0 && self.since.0.elapsed() > LITTLE {
            self.count();
        }
    }

    fn count(&mut self) {
        let (started, cpu) = self.since;
        self.resume();
        let elapsed = self.since.0 - started;
        // A system that does not tell a thread's time is taken to have let it run throughout.
        let spent = cpu.and_then(|c| c.try_elapsed().ok()).unwrap_or(elapsed);
        self.owe(spent.as_secs_f64(), elapsed.as_secs_f64());
        if self.owed > BURST * (self.slowdown - 1.0) {
            self.rest();
        }
    }

    /// Lets the work until now count, and waits out what is owed.
    pub fn settle(&mut self) {
        if self.slowdown > 1.0 {
            self.count();
        }
        if self.owed > 0.0 {
            self.rest();
        }
    }

    fn rest(&mut self) {
        let sleeping = Instant::now();
        thread::sleep(Duration::from_secs_f64(self.owed));
        self.pay(sleeping.elapsed().as_secs_f64());
        self.resume();
    }

    /// Work took `spent` seconds of CPU time and `elapsed` seconds in all.
    fn owe(&mut self, spent: f64, elapsed: f64) {
        self.pay(elapsed - self.slowdown * spent);
    }

    fn pay(&mut self, seconds: f64) {
        self.owed = (self.owed - seconds).max(-MOST);
    }
}

fn now() -> (Instant, Option<ThreadTime>) {
    (Instant::now(), ThreadTime::try_now().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_takes_a_multiple_of_its_cpu_time() {
        let mut pace = Pace::new(3.0);
        pace.owe(0.25, 0.25);
        assert_eq!(pace.owed, 0.5);
        pace.owe(0.25, 0.5);
        assert_eq!(pace.owed, 0.75, "what others took of the CPU is part of the wait");
        pace.pay(0.75);
        assert_eq!(pace.owed, 0.0);
    }

    #[test]
    fn what_took_too_long_is_made_up_for() {
        let mut pace = Pace::new(2.0);
        pace.owe(0.125, 0.2578125);
        assert_eq!(pace.owed, -0.0078125);
        pace.owe(0.125, 0.125);
        assert_eq!(pace.owed, 0.125 - 0.0078125);
        pace.pay(0.125);
        pace.owe(0.125, 9.0);
        assert_eq!(pace.owed, -MOST, "but not for everything");
    }

    #[test]
    fn a_loop_takes_at_least_its_multiple() {
        let mut pace = Pace::new(2.0);
        let (started, cpu) = (Instant::now(), ThreadTime::now());
        let sum = (0..2_000_000u64).fold(0u64, |a, b| std::hint::black_box(a ^ b));
        pace.settle();
        // The loop's own CPU time is nearly all of the thread's: sleeping takes none.
        let (took, cpu) = (started.elapsed(), cpu.elapsed());
        assert!(took.as_secs_f64() > 1.5 * cpu.as_secs_f64(), "{took:?} for {cpu:?} of CPU time ({sum})");
    }
}
