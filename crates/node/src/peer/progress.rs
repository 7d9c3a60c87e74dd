//! The progress of a peer, which its heartbeats report.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use fusionllm_protocol::{Heartbeat, MemberId};

/// The progress of this peer. Each of its threads and tasks notes its own part.
#[derive(Default)]
pub(crate) struct Progress {
    generation: AtomicU32,
    done: AtomicU64,
    /// The number of the member that the peer waits for, plus one; 0 if it waits for nobody.
    waits_for: AtomicU64,
}

impl Progress {
    /// Something got done.
    pub(crate) fn bump(&self) {
        self.done.fetch_add(1, Relaxed);
    }

    pub(crate) fn enter(&self, generation: u32) {
        self.generation.store(generation, Relaxed);
    }

    pub(crate) fn wait_for(&self, member: Option<MemberId>) {
        self.waits_for.store(member.map_or(0, |m| u64::from(m.0) + 1), Relaxed);
    }

    /// Notes that the peer waits for a member while `wait` runs.
    pub(crate) fn while_waiting<T>(&self, member: MemberId, wait: impl FnOnce() -> T) -> T {
        self.wait_for(Some(member));
        let result = wait();
        self.wait_for(None);
        result
    }

    pub(crate) fn heartbeat(&self) -> Heartbeat {
        let waits_for = self.waits_for.load(Relaxed).checked_sub(1).map(|m| MemberId(m as u32));
        Heartbeat {
            generation: self.generation.load(Relaxed),
            progress: self.done.load(Relaxed),
            waits_for,
            disk_free: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_heartbeat_names_whom_the_peer_waits_for() {
        let progress = Progress::default();
        assert_eq!(progress.heartbeat(), Heartbeat::default());
        for member in [MemberId(0), MemberId::BROKER] {
            let waiting = progress.while_waiting(member, || progress.heartbeat());
            assert_eq!(waiting.waits_for, Some(member));
        }
        progress.enter(3);
        progress.bump();
        assert_eq!(progress.heartbeat(), Heartbeat { generation: 3, progress: 1, ..Heartbeat::default() });
    }
}
