//! Tensors through codecs.

use std::collections::HashMap;

use fusionllm_compress::{Codec, Encoder, decode, relative_error, stable_rank};
use fusionllm_graph::{CounterRng, DType, HostTensor, TensorType};
use fusionllm_plan::{PeerId, Slot};

use crate::ExecError;

/// How a message is to be encoded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EncodeOptions {
    /// The codec; with [`Codec::None`] the tensor's own bytes are sent, whatever its type.
    pub codec: Codec,
    /// What random signs and rounding are drawn from.
    pub seed: u64,
}

/// The seed of a message's random choices: a function of what it is, so that every way of running a plan gives the same bits.
pub fn message_seed(seed: u64, step: u64, slot: Slot) -> u64 {
    let micro_batch = match slot {
        Slot::Value { micro_batch, .. } | Slot::Buffer { micro_batch, .. } => micro_batch,
        Slot::Part { part, .. } => part,
        Slot::Parameter { .. } => 0,
    };
    // Dropout's streams are the numbers of micro-batches: below 2^32.
    let stream = (u64::from(slot.value().0) + 1) << 32 | u64::from(micro_batch);
    let block = CounterRng::new(seed).block(step, stream);
    u64::from(block[0]) | u64::from(block[1]) << 32
}

/// Encodes and decodes; keeps its buffers from tensor to tensor.
#[derive(Default)]
pub struct Coder {
    encoder: Encoder,
    values: Vec<f32>,
    /// What was meant, while what came of it is in `values`.
    meant: Vec<f32>,
    /// What codecs left out of messages whose next one makes up for it.
    owed: HashMap<(PeerId, Slot), Vec<f32>>,
}

/// A coded tensor beside the one that was meant.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fidelity {
    /// |received - meant| / |meant|, in the Euclidean norm.
    pub relative_error: f64,
    /// The stable rank of what was meant and of what is received, if it was asked for and both have one.
    pub stable_ranks: Option<(f64, f64)>,
}

impl Coder {
    /// Writes `tensor`'s coded form into `out`, replacing its content. Returns whether it went exactly because the codec cannot hold its values.
    ///
    /// # Errors
    ///
    /// It is not of f32, or has more elements than the wire form can count.
    pub fn encode(
        &mut self,
        tensor: &HostTensor,
        coding: &EncodeOptions,
        out: &mut Vec<u8>,
    ) -> Result<bool, ExecError> {
        self.read(tensor)?;
        let encoded = self.encoder.encode(&coding.codec, &self.values, coding.seed, out);
        Ok(encoded.map_err(|e| ExecError::Communication(e.to_string()))?.out_of_range)
    }

    /// [`Self::encode`] with error feedback: to the tensor is added what the codec left out of the last one in the same slot to the same peer.
    ///
    /// # Errors
    ///
    /// As [`Self::encode`]; or the last tensor had another length.
    pub fn encode_with_feedback(
        &mut self,
        tensor: &HostTensor,
        coding: &EncodeOptions,
        (to, slot): (PeerId, Slot),
        out: &mut Vec<u8>,
    ) -> Result<bool, ExecError> {
        self.read(tensor)?;
        let owed = self.owed.entry((to, slot)).or_default();
        let encoded = self.encoder.encode_with_feedback(&coding.codec, &self.values, owed, coding.seed, out);
        Ok(encoded.map_err(|e| ExecError::Communication(e.to_string()))?.out_of_range)
    }

    /// What became of a tensor that was encoded as `coded`. What it makes up for by [`Self::encode_with_feedback`] counts as error.
    ///
    /// # Errors
    ///
    /// These are not its bytes.
    pub fn fidelity(&mut self, tensor: &HostTensor, coded: &[u8], ranks: bool) -> Result<Fidelity, ExecError> {
        self.read(tensor)?;
        std::mem::swap(&mut self.meant, &mut self.values);
        self.values.resize(self.meant.len(), 0.0);
        decode(coded, &mut self.values).map_err(|e| ExecError::Communication(e.to_string()))?;
        // An image's rows are its channels, all others' those of the last dimension.
        let columns = tensor
            .shape()
            .iter()
            .skip(if tensor.shape().len() > 3 { 2 } else { tensor.shape().len().max(1) - 1 })
            .product();
        let rank = |matrix: &[f32]| stable_rank(matrix, columns);
        Ok(Fidelity {
            relative_error: relative_error(&self.meant, &self.values),
            stable_ranks: if ranks { rank(&self.meant).zip(rank(&self.values)) } else { None },
        })
    }

    /// Owes nothing any more: codecs are others from here on.
    pub fn clear_feedback(&mut self) {
        self.owed.clear();
    }

    /// The tensor of type `ty` that coded bytes stand for.
    ///
    /// # Errors
    ///
    /// The type is not of f32, or the bytes are not the coded form of so many elements.
    pub fn decode(&mut self, bytes: &[u8], ty: TensorType) -> Result<HostTensor, ExecError> {
        if ty.dtype != DType::F32 {
            return Err(ExecError::Communication(format!("a tensor of type {ty} came coded; only f32 is")));
        }
        self.values.resize(ty.numel(), 0.0);
        decode(bytes, &mut self.values).map_err(|e| ExecError::Communication(e.to_string()))?;
        let mut data = vec![0; ty.bytes()];
        for (bytes, x) in data.as_chunks_mut::<4>().0.iter_mut().zip(&self.values) {
            *bytes = x.to_le_bytes();
        }
        Ok(HostTensor::from_bytes(ty, data)?)
    }

    fn read(&mut self, tensor: &HostTensor) -> Result<(), ExecError> {
        if tensor.dtype() != DType::F32 {
            return Err(ExecError::Communication(format!(
                "a tensor of type {} cannot be coded; only f32 is",
                tensor.ty()
            )));
        }
        let (numbers, _) = tensor.bytes().as_chunks::<4>();
        self.values.clear();
        self.values.extend(numbers.iter().map(|x| f32::from_le_bytes(*x)));
        Ok(())
    }
}
