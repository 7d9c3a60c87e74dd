//! How long things take: random, but each by itself.
//!
//! The delays of each kind and machine are a sequence of their own. So a fault that is left out of a scenario does not
//! change the delays of everything after it, and a scenario that is shrunk goes on failing in the same way.

use fusionllm_graph::CounterRng;

/// Something that takes time. A new kind goes to the end, because its place is part of what the random numbers of
/// committed scenarios are drawn from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Delay {
    /// A machine starts its process.
    Dial,
    /// A machine waits before it dials again.
    Redial,
    /// A message of a peer travels.
    Up,
    Heartbeat,
    /// A message of the broker travels.
    Down,
    /// An assignment or a tensor of the broker travels.
    Load,
    /// The tensors of a checkpoint travel.
    Save,
    /// A generation ends on a machine.
    End,
    /// A machine asks another one for tensors.
    Fetch,
    /// A machine asks another one for a copy.
    Copy,
    /// Two machines connect.
    Connect,
    /// A machine goes on after a pass.
    Work,
    /// The broker completes a checkpoint.
    Commit,
    /// The broker makes a plan.
    Plan,
    /// A broker that was started again reaches a machine. It gives up after [`RETURN_S`], which is so for one in four.
    Return,
}

/// The seconds for which a broker that was started again tries to reach a machine.
pub(super) const RETURN_S: f64 = 0.5;

impl Delay {
    /// The longest delay in seconds.
    fn most(self) -> f64 {
        match self {
            Self::Up | Self::Heartbeat | Self::Down => 0.02,
            Self::Load | Self::Connect => 0.1,
            Self::End => 0.2,
            Self::Fetch | Self::Work | Self::Plan => 0.3,
            Self::Return => RETURN_S / 0.75,
            Self::Dial | Self::Copy | Self::Commit => 1.0,
            Self::Save => 2.0,
            Self::Redial => 10.0,
        }
    }
}

/// The delays of a world.
#[derive(Debug)]
pub(super) struct Delays {
    rng: CounterRng,
    /// The number of delays so far in each sequence.
    drawn: Vec<u64>,
}

impl Delays {
    pub(super) fn new(seed: u64) -> Self {
        Self { rng: CounterRng::new(seed), drawn: Vec::new() }
    }

    /// The next delay of a machine, in seconds.
    pub(super) fn next(&mut self, delay: Delay, m: usize) -> f64 {
        let sequence = sequence(delay, m);
        if self.drawn.len() <= sequence {
            self.drawn.resize(sequence + 1, 0);
        }
        self.drawn[sequence] += 1;
        self.draw(delay, m, self.drawn[sequence])
    }

    /// The delay of something that begins at this time, whatever came before.
    pub(super) fn once(&self, delay: Delay, m: usize, now: f64) -> f64 {
        self.draw(delay, m, now.to_bits())
    }

    fn draw(&self, delay: Delay, m: usize, counter: u64) -> f64 {
        let thousandths = 1 + self.rng.block(counter, sequence(delay, m) as u64)[0] % 1000;
        delay.most() * f64::from(thousandths) / 1000.0
    }
}

fn sequence(delay: Delay, m: usize) -> usize {
    m << 5 | delay as usize
}

#[test]
fn delays_of_one_machine_do_not_depend_on_those_of_another() {
    let (mut alone, mut among) = (Delays::new(7), Delays::new(7));
    for _ in 0..50 {
        among.next(Delay::Work, 2);
        among.next(Delay::Fetch, 1);
        assert_eq!(alone.next(Delay::Work, 1), among.next(Delay::Work, 1));
    }
    assert_eq!(alone.once(Delay::Return, 1, 20.5), among.once(Delay::Return, 1, 20.5));
}
