use std::ops::{Index, IndexMut};

use serde::{Deserialize, Serialize};

/// How many passes a run has in flight: the one that peers finish, and those whose inputs the broker sends ahead.
pub const PASSES_IN_FLIGHT: usize = 3;

/// The purpose of one pass over a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum PassKind {
    /// A training step: forward, backward and the update of the parameters.
    Train,
    /// An evaluation: forward alone, with no update.
    Eval,
}

impl PassKind {
    /// Both kinds.
    pub const ALL: [Self; 2] = [Self::Train, Self::Eval];

    /// Whether the pass updates parameters.
    pub fn trains(self) -> bool {
        self == Self::Train
    }
}

/// One value for each [`PassKind`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PerPass<T> {
    /// The value for training steps.
    pub train: T,
    /// The value for evaluations.
    pub eval: T,
}

impl<T> PerPass<T> {
    /// Computes each kind's value.
    pub fn new(mut value: impl FnMut(PassKind) -> T) -> Self {
        Self { train: value(PassKind::Train), eval: value(PassKind::Eval) }
    }

    /// References to both values.
    pub fn as_ref(&self) -> PerPass<&T> {
        PerPass { train: &self.train, eval: &self.eval }
    }

    /// Converts both values.
    pub fn map<U>(self, mut convert: impl FnMut(T) -> U) -> PerPass<U> {
        PerPass { train: convert(self.train), eval: convert(self.eval) }
    }

    /// Both values, each with its kind.
    pub fn iter(&self) -> impl Iterator<Item = (PassKind, &T)> {
        [(PassKind::Train, &self.train), (PassKind::Eval, &self.eval)].into_iter()
    }
}

impl<T> Index<PassKind> for PerPass<T> {
    type Output = T;

    fn index(&self, kind: PassKind) -> &T {
        match kind {
            PassKind::Train => &self.train,
            PassKind::Eval => &self.eval,
        }
    }
}

impl<T> IndexMut<PassKind> for PerPass<T> {
    fn index_mut(&mut self, kind: PassKind) -> &mut T {
        match kind {
            PassKind::Train => &mut self.train,
            PassKind::Eval => &mut self.eval,
        }
    }
}
