use serde::{Deserialize, Serialize};

/// How the forward and backward passes of a step's micro-batches interleave.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum Schedule {
    /// All forward passes, then all backward passes (Huang et al., 2019).
    #[serde(rename = "gpipe")]
    GPipe,
    /// Each backward pass runs as soon as it can. A stage starts no more micro-batches than keep the later stages
    /// busy (Narayanan et al., 2019).
    #[default]
    #[serde(rename = "1f1b")]
    OneFOneB,
    /// ZB-H1 of Qi et al. (2023). It is like 1F1B, but backward computes only the gradients that other stages wait for.
    /// A peer computes weight gradients when it would be idle, or when it keeps as many micro-batches as 1F1B's first
    /// stage.
    #[serde(rename = "zb-h1")]
    ZeroBubble,
    /// Like ZB-H1, with about twice as many micro-batches in flight (ZB-H2 of the same paper). They fill the time that
    /// tensors spend on slow links, at the cost of memory.
    #[serde(rename = "zb-h2")]
    DeepZeroBubble,
}

impl Schedule {
    /// Every schedule.
    pub const ALL: [Self; 4] = [Self::GPipe, Self::OneFOneB, Self::ZeroBubble, Self::DeepZeroBubble];

    /// The name in job files.
    pub fn name(self) -> &'static str {
        match self {
            Self::GPipe => "gpipe",
            Self::OneFOneB => "1f1b",
            Self::ZeroBubble => "zb-h1",
            Self::DeepZeroBubble => "zb-h2",
        }
    }

    /// The kinds of tasks in a training step, in the order in which a micro-batch goes through them.
    pub fn kinds(self) -> &'static [TaskKind] {
        match self {
            Self::GPipe | Self::OneFOneB => &[TaskKind::Forward, TaskKind::Backward],
            Self::ZeroBubble | Self::DeepZeroBubble => &[TaskKind::Forward, TaskKind::Backward, TaskKind::Weight],
        }
    }

    /// Whether weight gradients are tasks of their own, which fill gaps.
    pub(crate) fn delays_weights(self) -> bool {
        self.kinds().contains(&TaskKind::Weight)
    }

    /// How many micro-batches a stage may have between their forward and backward passes. `peers` is the number of
    /// peers from this stage to the last.
    pub(crate) fn in_flight_limit(self, peers: usize) -> usize {
        match self {
            Self::GPipe => usize::MAX,
            Self::OneFOneB | Self::ZeroBubble => peers,
            Self::DeepZeroBubble => 2 * peers - 1,
        }
    }

    /// The time that a tensor is assumed to spend on a link, in passes. With a delay above zero, tasks are ordered so
    /// that weight gradients fill the gaps that links leave.
    pub(crate) fn link_delay(self) -> usize {
        match self {
            Self::GPipe | Self::OneFOneB | Self::ZeroBubble => 0,
            Self::DeepZeroBubble => 1,
        }
    }
}

/// The kind of results that one task of a stage computes for one micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TaskKind {
    /// Activations.
    Forward,
    /// Gradients. Under a zero-bubble schedule, only those that other operators wait for.
    Backward,
    /// Weight gradients, under a zero-bubble schedule.
    Weight,
}
