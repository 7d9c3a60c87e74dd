//! The thread that encodes what a peer sends and decodes what it gets, so that computing waits for neither.

use std::collections::BTreeMap;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use fusionllm_exec::{Coder, Coding, ExecError};
use fusionllm_graph::{HostTensor, TensorType};
use fusionllm_plan::PeerId;
use fusionllm_protocol::{TensorHeader, ToPeer};

use crate::NodeError;
use crate::wire::{Mailbox, Outbox};

/// Hands work to the thread, which does it in order and ends with the last of these.
#[derive(Clone)]
pub(crate) struct Codecs {
    jobs: mpsc::Sender<Job>,
}

/// What the thread did since it was last asked.
#[derive(Default)]
pub(crate) struct Tally {
    /// Payload bytes sent to each peer.
    pub(crate) sent: BTreeMap<PeerId, u64>,
    /// Seconds spent encoding and decoding.
    pub(crate) seconds: f64,
}

enum Job {
    Encode { header: TensorHeader, tensor: HostTensor, coding: Coding, to: PeerId, outbox: Outbox },
    Decode { header: TensorHeader, bytes: Vec<u8>, ty: TensorType, from: Arc<str> },
    Tally(mpsc::Sender<Tally>),
}

impl Codecs {
    /// Starts the thread. What it decodes goes to `mailbox`; `commands` is told if that fails.
    pub(crate) fn start(mailbox: Arc<Mailbox>, commands: mpsc::Sender<ToPeer>) -> Result<Self, NodeError> {
        let (jobs, queue) = mpsc::channel();
        let thread = std::thread::Builder::new().name("codec".into());
        let work = move || {
            let mut worker = Worker { coder: Coder::default(), tally: Tally::default(), mailbox };
            for job in queue {
                if let Err(reason) = worker.work(job) {
                    worker.mailbox.fail(reason.clone());
                    // The computing thread may be waiting for a command rather than for a tensor. If it is gone, all is said.
                    let _ = commands.send(ToPeer::Stop { reason });
                    return;
                }
            }
        };
        thread.spawn(work).map_err(|e| NodeError::State(format!("cannot start a thread: {e}")))?;
        Ok(Self { jobs })
    }

    /// Encodes a tensor and puts it into an outbox.
    pub(crate) fn send(
        &self,
        header: TensorHeader,
        tensor: HostTensor,
        coding: Coding,
        to: PeerId,
        outbox: &Outbox,
    ) -> Result<(), ExecError> {
        self.hand_over(Job::Encode { header, tensor, coding, to, outbox: outbox.clone() })
    }

    /// Decodes what came into the mailbox.
    pub(crate) fn receive(
        &self,
        header: TensorHeader,
        bytes: Vec<u8>,
        ty: TensorType,
        from: &Arc<str>,
    ) -> Result<(), ExecError> {
        self.hand_over(Job::Decode { header, bytes, ty, from: from.clone() })
    }

    /// What was done since the last time, once all is done that was handed over before.
    pub(crate) fn tally(&self) -> Result<Tally, ExecError> {
        let (answer, tally) = mpsc::channel();
        self.hand_over(Job::Tally(answer))?;
        tally.recv().map_err(|_| gone())
    }

    fn hand_over(&self, job: Job) -> Result<(), ExecError> {
        self.jobs.send(job).map_err(|_| gone())
    }
}

fn gone() -> ExecError {
    ExecError::Link("the codecs' thread has ended".into())
}

struct Worker {
    coder: Coder,
    tally: Tally,
    mailbox: Arc<Mailbox>,
}

impl Worker {
    fn work(&mut self, job: Job) -> Result<(), String> {
        let begun = Instant::now();
        match job {
            Job::Encode { header, tensor, coding, to, outbox } => {
                let mut bytes = Vec::new();
                let flagged = self.coder.encode(&tensor, &coding, &mut bytes).map_err(|e| e.to_string())?;
                if flagged {
                    tracing::warn!(slot = ?header.slot, "a tensor holds what no codec takes, and went as it is");
                }
                *self.tally.sent.entry(to).or_default() += bytes.len() as u64;
                outbox.frame(&TensorHeader { coded: true, ..header }, bytes).map_err(|e| e.to_string())?;
            }
            Job::Decode { header, bytes, ty, from } => {
                let tensor =
                    self.coder.decode(&bytes, ty).map_err(|e| format!("{from} sent what cannot be read: {e}"))?;
                self.mailbox.put(TensorHeader { coded: false, ..header }, tensor);
            }
            Job::Tally(answer) => {
                // Whoever asked may be gone.
                let _ = answer.send(std::mem::take(&mut self.tally));
                return Ok(());
            }
        }
        self.tally.seconds += begun.elapsed().as_secs_f64();
        Ok(())
    }
}
