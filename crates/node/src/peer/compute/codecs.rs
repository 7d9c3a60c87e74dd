//! The codec thread of a peer. It encodes what the peer sends and decodes what it receives, so that computing waits
//! for neither.

use std::collections::BTreeMap;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use fusionllm_exec::{Coder, EncodeOptions, ExecError, Fidelity, Message, StableRanks};
use fusionllm_graph::{HostTensor, TensorType};
use fusionllm_program::PeerId;
use fusionllm_protocol::TensorHeader;

use super::mailbox::Mailbox;
use crate::NodeError;
use crate::net::Outbox;

/// A handle on the thread, which works in order and ends with its last handle.
#[derive(Clone)]
pub(crate) struct Codecs {
    jobs: mpsc::Sender<Job>,
}

/// The work of the thread since the last tally.
#[derive(Default)]
pub(crate) struct Tally {
    /// Payload bytes sent to each peer.
    pub(crate) sent: BTreeMap<PeerId, u64>,
    /// Seconds of encoding, decoding and measuring.
    pub(crate) seconds: f64,
    /// See [`PassReport::errors`](fusionllm_protocol::PassReport).
    pub(crate) errors: BTreeMap<PeerId, f64>,
    /// See [`PassReport::spectra`](fusionllm_protocol::PassReport).
    pub(crate) spectra: BTreeMap<PeerId, StableRanks>,
}

/// The measurements of an encoded message.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Watch {
    /// Nothing.
    Off,
    /// The relative error.
    Error,
    /// The relative error and the spectra.
    Spectrum,
}

enum Job {
    Encode { header: TensorHeader, tensor: HostTensor, coding: EncodeOptions, watch: Watch, to: PeerId, outbox: Outbox },
    Decode { header: TensorHeader, bytes: Vec<u8>, ty: TensorType, from: PeerId, name: Arc<str> },
    Tally(mpsc::Sender<Tally>),
}

impl Codecs {
    /// Starts the thread. Decoded tensors go to `mailbox`. An error ends the thread and goes to `failed`.
    pub(crate) fn start(
        mailbox: Arc<Mailbox>,
        coder: Coder,
        failed: impl FnOnce(String) + Send + 'static,
    ) -> Result<Self, NodeError> {
        let (jobs, queue) = mpsc::channel();
        let thread = std::thread::Builder::new().name("codec".into());
        let work = move || {
            let mut codec_thread = CodecThread { coder, tally: Tally::default(), mailbox };
            for job in queue {
                if let Err(reason) = codec_thread.work(job) {
                    return failed(reason);
                }
            }
        };
        thread.spawn(work).map_err(|e| NodeError::State(format!("cannot start a thread: {e}")))?;
        Ok(Self { jobs })
    }

    /// Encodes a tensor and queues it.
    pub(crate) fn send(
        &self,
        header: TensorHeader,
        tensor: HostTensor,
        coding: EncodeOptions,
        watch: Watch,
        to: PeerId,
        outbox: &Outbox,
    ) -> Result<(), ExecError> {
        self.hand_over(Job::Encode { header, tensor, coding, watch, to, outbox: outbox.clone() })
    }

    /// Decodes a tensor into the mailbox.
    pub(crate) fn receive(
        &self,
        header: TensorHeader,
        bytes: Vec<u8>,
        ty: TensorType,
        from: PeerId,
        name: &Arc<str>,
    ) -> Result<(), ExecError> {
        self.hand_over(Job::Decode { header, bytes, ty, from, name: name.clone() })
    }

    /// The figures since the last tally, after all work handed over so far.
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
    ExecError::Communication("the codecs' thread has ended".into())
}

impl Tally {
    /// Keeps the worst figures of each receiver.
    fn note(&mut self, to: PeerId, fidelity: Fidelity) {
        let worst = self.errors.entry(to).or_default();
        *worst = worst.max(fidelity.relative_error.min(f64::MAX));
        if let Some(ranks) = fidelity.stable_ranks {
            let flattest = self.spectra.entry(to).or_insert(ranks);
            if ranks.exact > flattest.exact {
                *flattest = ranks;
            }
        }
    }
}

/// The state that the thread itself keeps.
struct CodecThread {
    coder: Coder,
    tally: Tally,
    mailbox: Arc<Mailbox>,
}

impl CodecThread {
    fn work(&mut self, job: Job) -> Result<(), String> {
        let begun = Instant::now();
        match job {
            Job::Encode { header, tensor, coding, watch, to, outbox } => {
                let mut bytes = Vec::new();
                let message = Message { pass: header.pass, peer: to, tensor: header.tensor };
                let flagged = self.coder.encode(message, &tensor, &coding, &mut bytes).map_err(|e| e.to_string())?;
                if flagged {
                    tracing::warn!(tensor = ?header.tensor, "a tensor holds what no codec takes, and went as it is");
                }
                *self.tally.sent.entry(to).or_default() += bytes.len() as u64;
                let watched = (watch != Watch::Off && !flagged).then(|| bytes.clone());
                outbox.frame(&TensorHeader { coded: true, ..header }, bytes).map_err(|e| e.to_string())?;
                // The message is queued already, so the measurement delays nobody.
                if let Some(bytes) = watched {
                    let ranks = watch == Watch::Spectrum;
                    let fidelity = self.coder.fidelity(&tensor, &bytes, ranks).map_err(|e| e.to_string())?;
                    self.tally.note(to, fidelity);
                }
            }
            Job::Decode { header, bytes, ty, from, name } => {
                let message = Message { pass: header.pass, peer: from, tensor: header.tensor };
                let tensor = self.coder.decode(message, &bytes, ty);
                let tensor = tensor.map_err(|e| format!("{name} sent what cannot be read: {e}"))?;
                self.mailbox.put(TensorHeader { coded: false, ..header }, tensor);
            }
            Job::Tally(answer) => {
                // The receiver may have ended.
                let _ = answer.send(std::mem::take(&mut self.tally));
                return Ok(());
            }
        }
        self.tally.seconds += begun.elapsed().as_secs_f64();
        Ok(())
    }
}
