//! The state that the tasks and threads of a peer share.

use std::sync::{Arc, Mutex, PoisonError};

use fusionllm_backend::Backend;
use fusionllm_transport::Endpoint;
use tokio::sync::watch;

use super::compute::Arrivals;
use super::cuts::Vault;
use super::events::{Event, Events};
use super::observer::JoinObserver;
use super::progress::Progress;

/// The state that outlives the generations and connections of a peer.
pub(super) struct Shared {
    pub(super) endpoint: Endpoint,
    pub(super) backend: Arc<dyn Backend>,
    /// How many times slower than this machine the peer computes.
    pub(super) slowdown: f64,
    /// The threads that kernels compute on.
    pub(super) threads: rayon::ThreadPool,
    /// Bytes of memory that the run may use.
    pub(super) memory: Option<u64>,
    pub(super) observer: JoinObserver,
    pub(super) progress: Arc<Progress>,
    pub(super) vault: Vault,
    /// The number of cuts that are being streamed to the broker, for checkpoints.
    pub(super) saving: watch::Sender<usize>,
    /// The destination of tensors from the broker; `None` while nothing computes.
    pub(super) arrivals: Mutex<Option<Arrivals>>,
    pub(super) events: Events,
}

/// While this exists, copies for other members wait.
pub(super) struct Saving<'a>(&'a watch::Sender<usize>);

impl Drop for Saving<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

impl Shared {
    /// Begins to stream a cut to the broker.
    pub(super) fn begin_saving(&self) -> Saving<'_> {
        self.saving.send_modify(|count| *count += 1);
        Saving(&self.saving)
    }

    /// Waits until no cut is being streamed to the broker.
    pub(super) async fn saved(&self) {
        // The sender lives as long as `self`.
        let _ = self.saving.subscribe().wait_for(|count| *count == 0).await;
    }

    pub(super) fn send(&self, event: Event) {
        // The loop is over if this fails.
        let _ = self.events.send(event);
    }

    pub(super) fn arrivals(&self) -> Option<Arrivals> {
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_arrivals(&self, arrivals: Option<Arrivals>) {
        *self.arrivals.lock().unwrap_or_else(PoisonError::into_inner) = arrivals;
    }
}
