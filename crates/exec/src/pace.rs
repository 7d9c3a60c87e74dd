use std::thread;
use std::time::{Duration, Instant};

use cpu_time::ThreadTime;

/// Makes a thread's work take longer: a multiple of the CPU time that it took, never a guess of it.
#[derive(Debug)]
pub(crate) struct Pace {
    slowdown: f64,
    /// Seconds by which all work so far took too long. Sleeps end late, and other processes take the CPU: later sleeps make up for it.
    late: f64,
}

/// Seconds that later sleeps make up for at most. A machine that was away for longer is slow, and shows it.
const MOST: f64 = 0.02;

impl Pace {
    pub(crate) fn new(slowdown: f64) -> Self {
        Self { slowdown, late: 0.0 }
    }

    /// Does the work, and waits until it has taken its time.
    pub(crate) fn keep<T>(&mut self, work: impl FnOnce() -> T) -> T {
        if self.slowdown <= 1.0 {
            return work();
        }
        let started = Instant::now();
        let cpu = ThreadTime::try_now();
        let result = work();
        // A system that does not tell a thread's time is taken to have let it run throughout.
        let spent = cpu.and_then(|c| c.try_elapsed()).unwrap_or_else(|_| started.elapsed()).as_secs_f64();
        let wait = self.missing(spent, started.elapsed().as_secs_f64());
        if wait > 0.0 {
            let sleeping = Instant::now();
            thread::sleep(Duration::from_secs_f64(wait));
            self.late = sleeping.elapsed().as_secs_f64() - wait;
        }
        result
    }

    /// Seconds to wait after work that took `spent` seconds of CPU time and `elapsed` seconds in all.
    fn missing(&mut self, spent: f64, elapsed: f64) -> f64 {
        let missing = self.slowdown * spent - elapsed - self.late;
        self.late = (-missing).clamp(0.0, MOST);
        missing.max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_takes_a_multiple_of_its_cpu_time() {
        let mut pace = Pace::new(3.0);
        assert_eq!(pace.missing(0.25, 0.25), 0.5);
        assert_eq!(pace.missing(0.25, 0.5), 0.25, "what others took of the CPU is part of the wait");
        assert_eq!(pace.missing(0.25, 0.75), 0.0);
    }

    #[test]
    fn what_took_too_long_is_made_up_for() {
        let mut pace = Pace::new(2.0);
        assert_eq!(pace.missing(0.125, 0.2578125), 0.0);
        assert_eq!(pace.missing(0.125, 0.125), 0.125 - 0.0078125);
        assert_eq!(pace.missing(0.125, 0.125), 0.125, "once");
        assert_eq!(pace.missing(0.125, 9.0), 0.0);
        assert_eq!(pace.missing(0.125, 0.125), 0.125 - MOST, "but not for everything");
    }

    #[test]
    fn a_loop_takes_at_least_its_multiple() {
        let mut pace = Pace::new(2.0);
        let (started, cpu) = (Instant::now(), ThreadTime::now());
        let sum = pace.keep(|| (0..2_000_000u64).fold(0u64, |a, b| std::hint::black_box(a ^ b)));
        // The loop's own CPU time is nearly all of the thread's: sleeping takes none.
        let (took, cpu) = (started.elapsed(), cpu.elapsed());
        assert!(took.as_secs_f64() > 1.5 * cpu.as_secs_f64(), "{took:?} for {cpu:?} of CPU time ({sum})");
    }
}
