//! A backend that is another process, so that any framework in any language can compute for a peer.
//!
//! docs/worker.md is the reference of the protocol.

mod exchange;
mod find;
mod message;
mod process;

use std::collections::{BTreeSet, HashMap};
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fusionllm_graph::{DType, HostTensor, Op, TensorType};

use crate::{Backend, BackendError, DeviceInfo, Done, Prepared, Segment, SegmentNode, Tensor};
use exchange::Exchange;
pub use find::{FoundWorker, find};
use message::{Failed, Hello, Request};
pub use process::Patience;
use process::Process;

/// A process that computes.
pub struct Worker {
    hello: Hello,
    dtypes: BTreeSet<DType>,
    operators: BTreeSet<String>,
    conversation: Mutex<Conversation>,
    dropped: Dropped,
    dropped_segments: Dropped,
    /// Operators that were run one by one, by their digests.
    single: Mutex<HashMap<[u8; 32], Arc<Prepared>>>,
}

/// The one conversation with the process. A thread that holds it may send a request.
struct Conversation {
    process: Process,
    exchange: Option<Exchange>,
    tensors: u64,
    segments: u64,
}

/// The numbers of tensors or of segments that nothing holds any more, and that the process still keeps.
type Dropped = Arc<Mutex<Vec<u64>>>;

/// A tensor or a segment of the process. Dropping it sends nothing, so that nobody waits. The next request tells the
/// process.
struct Handle {
    number: u64,
    dropped: Dropped,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.dropped.lock().unwrap_or_else(PoisonError::into_inner).push(self.number);
    }
}

/// The process's copy of a segment.
struct Sent {
    handle: Handle,
    /// The segment with decompositions instead of the operators that the worker lacks.
    expanded: Segment,
}

impl Worker {
    /// Starts a worker by a command line, and waits for its first message.
    ///
    /// # Errors
    ///
    /// The command cannot be started, or the process does not say that it is a worker of this protocol's version.
    pub fn start(command: &str) -> Result<Self, BackendError> {
        Self::start_with(command, Patience::default())
    }

    /// Starts a worker with other limits on waiting than the default.
    pub fn start_with(command: &str, patience: Patience) -> Result<Self, BackendError> {
        let (process, hello) = Process::start(command, patience)?;
        Ok(Self {
            dtypes: hello.dtypes.iter().filter_map(|name| serde_json::from_value(name.as_str().into()).ok()).collect(),
            operators: hello.operators.iter().cloned().collect(),
            hello,
            conversation: Mutex::new(Conversation { process, exchange: None, tensors: 0, segments: 0 }),
            dropped: Dropped::default(),
            dropped_segments: Dropped::default(),
            single: Mutex::default(),
        })
    }

    /// Takes the conversation. First, it tells the process to forget the segments that nothing holds any more. That
    /// request has no answer.
    fn conversation(&self) -> Result<MutexGuard<'_, Conversation>, BackendError> {
        let mut conversation = self.conversation.lock().unwrap_or_else(PoisonError::into_inner);
        let segments = take(&self.dropped_segments);
        if !segments.is_empty() {
            conversation.process.send(&Request::Forget { segments: &segments })?;
        }
        Ok(conversation)
    }

    fn dropped(&self) -> Vec<u64> {
        take(&self.dropped)
    }

    /// A tensor that the process keeps under a new number.
    fn tensor(&self, ty: &TensorType, number: u64) -> Tensor {
        Tensor::new(ty.clone(), Arc::new(Handle { number, dropped: self.dropped.clone() }))
    }

    fn number(&self, tensor: &Tensor) -> Result<u64, BackendError> {
        let handle = tensor.get::<Arc<Handle>>().filter(|handle| Arc::ptr_eq(&handle.dropped, &self.dropped));
        handle.map(|handle| handle.number).ok_or_else(|| self.refused("it belongs to another backend".into()))
    }

    fn refused(&self, reason: String) -> BackendError {
        BackendError::Tensor { backend: self.hello.name.clone(), reason }
    }

    fn check_type(&self, ty: &TensorType) -> Result<(), BackendError> {
        match self.dtypes.contains(&ty.dtype) {
            true => Ok(()),
            false if ty.dtype == DType::BF16 => {
                Err(self.refused("it does not hold bf16, in which runs with train.precision = \"bf16\" compute".into()))
            }
            false => Err(self.refused(format!("it does not hold {}", ty.dtype))),
        }
    }

    /// The error of a request that the worker did not carry out.
    fn failed(&self, failed: Failed, nodes: &[SegmentNode], types: &[&TensorType]) -> BackendError {
        let Failed { reason, node, kind } = failed;
        let advice = match kind.as_deref() {
            Some("memory") => "; give this peer less with `join --memory`, or end what else uses the device",
            _ => "",
        };
        let reason = reason + advice;
        match node.and_then(|i| nodes.get(i)) {
            Some(node) => BackendError::Operator {
                backend: self.hello.name.clone(),
                op: node.op.name().into(),
                reason,
                operands: node.inputs.iter().map(|v| types[*v as usize].clone()).collect(),
            },
            None => self.refused(reason),
        }
    }
}

fn take(dropped: &Dropped) -> Vec<u64> {
    std::mem::take(&mut dropped.lock().unwrap_or_else(PoisonError::into_inner))
}

impl Conversation {
    /// A place in the exchange file for a tensor. The worker knows the file.
    fn exchange(&mut self, bytes: usize) -> Result<&mut Exchange, BackendError> {
        if self.exchange.as_ref().is_none_or(|exchange| exchange.bytes() < bytes as u64) {
            self.exchange = None;
            let exchange = Exchange::create(bytes as u64).map_err(|reason| self.process.error(reason))?;
            let request = Request::Exchange { path: exchange.path(), bytes: exchange.bytes() };
            if let Err(failed) = self.process.ask(&request)? {
                return Err(self.process.error(format!(
                    "it cannot open {}: {}",
                    exchange.path().display(),
                    failed.reason
                )));
            }
            exchange.remove_name();
            self.exchange = Some(exchange);
        }
        self.exchange.as_mut().ok_or(BackendError::Stopped)
    }

    fn new_tensor(&mut self) -> u64 {
        self.tensors += 1;
        self.tensors
    }
}

impl Backend for Worker {
    fn name(&self) -> &str {
        &self.hello.name
    }

    fn device(&self) -> DeviceInfo {
        let Hello { name, version, device, memory_bytes, .. } = &self.hello;
        // The time of the worker's threads does not count as this process's.
        DeviceInfo { name: format!("{device}, {name} {version}"), threads: None, memory_bytes: *memory_bytes }
    }

    fn upload(&self, tensor: &HostTensor) -> Result<Tensor, BackendError> {
        self.check_type(tensor.ty())?;
        let mut conversation = self.conversation()?;
        // Weights that a former generation held leave the device before new ones come.
        let dropped = self.dropped();
        if !dropped.is_empty() {
            let answer = conversation.process.ask(&Request::Free { tensors: &dropped })?;
            answer.map_err(|failed| self.failed(failed, &[], &[]))?;
        }
        let exchange = conversation.exchange(tensor.bytes().len())?;
        let written = exchange.write(tensor.bytes());
        written.map_err(|reason| conversation.process.error(reason))?;
        let number = conversation.new_tensor();
        let answer = conversation.process.ask(&Request::Upload { tensor: number, ty: tensor.ty(), at: 0 })?;
        answer.map_err(|failed| self.failed(failed, &[], &[]))?;
        Ok(self.tensor(tensor.ty(), number))
    }

    fn download(&self, tensor: &Tensor) -> Result<HostTensor, BackendError> {
        let number = self.number(tensor)?;
        let bytes = tensor.ty().bytes();
        let mut conversation = self.conversation()?;
        conversation.exchange(bytes)?;
        let answer = conversation.process.ask(&Request::Download { tensor: number, at: 0 })?;
        let finished = answer.map_err(|failed| self.failed(failed, &[], &[]))?;
        if let Some(ty) = finished.ty.filter(|ty| ty != tensor.ty()) {
            return Err(self.refused(format!("it sent {ty} instead of {}", tensor.ty())));
        }
        let read = conversation.exchange(bytes)?.read(bytes);
        let data = read.map_err(|reason| conversation.process.error(reason))?;
        Ok(HostTensor::from_bytes(tensor.ty().clone(), data)?)
    }

    fn run(&self, op: &Op, inputs: Vec<Tensor>, outputs: &[TensorType]) -> Result<Vec<Tensor>, BackendError> {
        let node =
            SegmentNode { op: op.clone(), inputs: (0..inputs.len() as u32).collect(), outputs: outputs.to_vec() };
        let results = inputs.len() as u32..(inputs.len() + outputs.len()) as u32;
        let segment = Segment {
            inputs: inputs.iter().map(|t| t.ty().clone()).collect(),
            nodes: vec![node],
            outputs: results.collect(),
        };
        let digest = segment.digest();
        let known = self.single.lock().unwrap_or_else(PoisonError::into_inner).get(&digest).cloned();
        let prepared = match known {
            Some(prepared) => prepared,
            None => {
                let prepared = Arc::new(self.prepare(segment)?);
                self.single.lock().unwrap_or_else(PoisonError::into_inner).insert(digest, prepared.clone());
                prepared
            }
        };
        self.run_segment(&prepared, inputs, &mut |_| ControlFlow::Continue(()))
    }

    fn prepare(&self, segment: Segment) -> Result<Prepared, BackendError> {
        let expanded = segment.expanded(&|op| self.operators.contains(&op.tag()))?;
        expanded.values().into_iter().try_for_each(|ty| self.check_type(ty))?;
        let mut conversation = self.conversation()?;
        conversation.segments += 1;
        let number = conversation.segments;
        let answer = conversation.process.ask(&Request::Prepare { segment: number, of: &expanded })?;
        answer.map_err(|failed| self.failed(failed, &expanded.nodes, &expanded.values()))?;
        let handle = Handle { number, dropped: self.dropped_segments.clone() };
        Ok(Prepared::new(segment, Sent { handle, expanded }))
    }

    fn run_segment(
        &self,
        segment: &Prepared,
        inputs: Vec<Tensor>,
        done: Done<'_>,
    ) -> Result<Vec<Tensor>, BackendError> {
        let sent = segment.get::<Sent>().ok_or_else(|| self.refused("the segment is another backend's".into()))?;
        let numbers = inputs.iter().map(|t| self.number(t)).collect::<Result<Vec<_>, _>>()?;
        // Inputs that nobody else holds are now among the dropped ones, so the worker may overwrite them.
        drop(inputs);
        let mut conversation = self.conversation()?;
        let outputs: Vec<u64> = sent.expanded.outputs.iter().map(|_| conversation.new_tensor()).collect();
        let free = self.dropped();
        let request = Request::Run { segment: sent.handle.number, inputs: &numbers, outputs: &outputs, free: &free };
        let answer = conversation.process.ask(&request)?;
        let types = sent.expanded.values();
        answer.map_err(|failed| self.failed(failed, &sent.expanded.nodes, &types))?;
        let tensor = |(v, number): (&u32, &u64)| self.tensor(types[*v as usize], *number);
        let results = sent.expanded.outputs.iter().zip(&outputs).map(tensor).collect();
        drop(conversation);
        match (0..segment.segment().nodes.len()).try_for_each(done) {
            ControlFlow::Continue(()) => Ok(results),
            ControlFlow::Break(()) => Err(BackendError::Stopped),
        }
    }

    fn runs_segments_whole(&self) -> bool {
        true
    }

    fn synchronize(&self) -> Result<(), BackendError> {
        let answer = self.conversation()?.process.ask(&Request::Synchronize {})?;
        answer.map(drop).map_err(|failed| self.failed(failed, &[], &[]))
    }
}
