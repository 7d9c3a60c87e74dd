//! The machines, the job and the faults of a world, as a seed draws them and as a file has them.

use serde::{Deserialize, Serialize};

use crate::common::ChoiceRng;

/// Something that goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Fault {
    /// A process ends without a word.
    Kill(usize),
    /// A process sleeps for this many seconds.
    Sleep(usize, f64),
    /// A machine and the broker cannot reach each other for this many seconds.
    CutOff(usize, f64),
    /// Two machines cannot reach each other for this many seconds.
    Part(usize, usize, f64),
    /// A machine asks to leave.
    Leave(usize),
    /// A new machine with this number joins. The numbers below [`Scenario::machines`] are taken.
    Join(usize),
    /// A machine computes this many times slower than at the start.
    Slow(usize, f64),
    /// The broker stands still for this many seconds.
    Pause(f64),
    /// The broker is killed, and started again after this many seconds.
    Restart(f64),
    /// The user stops the run.
    Interrupt,
}

impl Fault {
    pub(crate) fn name(&self) -> String {
        format!("{self:?}").chars().take_while(|c| c.is_alphabetic()).collect()
    }

    /// The duration in seconds, if the fault has one.
    pub(crate) fn seconds_mut(&mut self) -> Option<&mut f64> {
        match self {
            Self::Sleep(_, s) | Self::CutOff(_, s) | Self::Part(_, _, s) | Self::Pause(s) | Self::Restart(s) => Some(s),
            Self::Kill(_) | Self::Leave(_) | Self::Join(_) | Self::Slow(..) | Self::Interrupt => None,
        }
    }
}

/// The machines, the job and the faults of a world.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Scenario {
    /// The machines that are there from the start.
    pub(crate) machines: usize,
    pub(crate) steps: u64,
    pub(crate) checkpoint: u64,
    /// Whether machines and links are measured before they are planned for.
    pub(crate) measured: bool,
    /// The seed of all delays.
    pub(crate) seed: u64,
    /// The faults, each with its time in seconds.
    pub(crate) faults: Vec<(f64, Fault)>,
}

impl Scenario {
    /// The scenario of a seed. The first machine may sleep and be cut off, but stays.
    pub(crate) fn random(seed: u64) -> Self {
        let mut rng = ChoiceRng::new(seed);
        let machines = 1 + rng.below(5);
        let count = rng.below(9);
        let faults = (0..count).map(|_| {
            let at = (3000 + rng.below(25_000)) as f64 / 1000.0;
            let seconds = [0.5, 2.0, 4.0, 8.0, 20.0, 45.0][rng.below(6)];
            let others = 1 + rng.below(machines + 1);
            let fault = match rng.below(10) {
                0 | 1 => Fault::Kill(others),
                2 => Fault::Sleep(rng.below(machines + 1), seconds),
                3 => Fault::CutOff(rng.below(machines + 1), seconds),
                4 => Fault::Part(rng.below(machines), rng.below(machines), seconds),
                5 => Fault::Leave(others),
                6 => Fault::Join(machines),
                7 => Fault::Restart(seconds),
                8 => Fault::Slow(others - 1, [1.0, 4.0, 10.0][rng.below(3)]),
                _ => Fault::Pause(seconds.min(8.0)),
            };
            (at, fault)
        });
        let mut faults: Vec<(f64, Fault)> = faults.collect();
        faults.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        let joiners = faults.iter_mut().filter_map(|(_, fault)| match fault {
            Fault::Join(number) => Some(number),
            _ => None,
        });
        joiners.zip(machines..).for_each(|(number, next)| *number = next);
        Self {
            machines,
            steps: 100 + rng.below(200) as u64,
            checkpoint: [0, 5, 25][rng.below(3)],
            faults,
            measured: rng.one_in(2),
            seed,
        }
    }

    /// The scenario that a file has.
    pub(crate) fn parse(text: &str) -> Result<Self, toml::de::Error> {
        toml::from_str(text)
    }

    /// The content of a file: TOML with a line for each fault.
    pub(crate) fn text(&self) -> String {
        let without_faults = toml::to_string(&Self { faults: Vec::new(), ..self.clone() }).unwrap();
        let line = |fault| format!("    {},\n", toml::Value::try_from(fault).unwrap());
        let lines: String = self.faults.iter().map(line).collect();
        without_faults.replace("faults = []", &format!("faults = [\n{lines}]"))
    }
}
