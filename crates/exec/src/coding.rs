//! Tensors through codecs.

use std::collections::HashMap;

use fusionllm_compress::{Codec, Element, Encoder, decode, relative_error, stable_rank};
use fusionllm_graph::{CounterRng, HostTensor, TensorType};
use fusionllm_plan::{Address, PeerId, element};
use half::bf16;

use crate::ExecError;

/// The way to encode a message.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EncodeOptions {
    /// The codec. [`Codec::None`] sends the tensor's own bytes, whatever its type.
    pub codec: Codec,
    /// The seed of random signs and rounding.
    pub seed: u64,
}

/// The seed of a message's random choices. It depends only on the run's seed, the step and the tensor's address, so
/// threads and processes get the same bits.
pub fn message_seed(seed: u64, step: u64, tensor: Address) -> u64 {
    let number = match tensor {
        Address::Part { part, .. } => part,
        _ => tensor.micro_batch().unwrap_or(0),
    };
    let stream = (u64::from(tensor.value().0) + 1) << 32 | u64::from(number);
    let block = CounterRng::new(seed).block(step, stream);
    u64::from(block[0]) | u64::from(block[1]) << 32
}

/// Encodes and decodes tensors. Reuses its buffers.
#[derive(Default)]
pub struct Coder {
    encoder: Encoder,
    values: Vec<f32>,
    /// The exact values, while `values` has the decoded ones.
    exact: Vec<f32>,
    /// The errors of the last messages under error feedback, by receiver and message.
    residuals: HashMap<(PeerId, Address), Vec<f32>>,
}

/// How close a decoded tensor is to the exact one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fidelity {
    /// |decoded - exact| / |exact|, in the Euclidean norm.
    pub relative_error: f64,
    /// The stable ranks, if they were requested and both tensors have one.
    pub stable_ranks: Option<StableRanks>,
}

/// The stable ranks of a tensor before and after a codec.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StableRanks {
    /// The stable rank of the exact tensor.
    pub exact: f64,
    /// The stable rank of the decoded tensor.
    pub decoded: f64,
}

impl Coder {
    /// Writes `tensor`'s encoded form into `out`, replacing its content. Returns whether the tensor was sent exactly
    /// because the codec cannot represent its values.
    ///
    /// # Errors
    ///
    /// The tensor is of neither f32 nor bf16, or has more elements than the wire form can count.
    pub fn encode(
        &mut self,
        tensor: &HostTensor,
        options: &EncodeOptions,
        out: &mut Vec<u8>,
    ) -> Result<bool, ExecError> {
        let element = self.read(tensor)?;
        let encoded = self.encoder.encode(&options.codec, &self.values, element, options.seed, out);
        Ok(encoded.map_err(|e| ExecError::Communication(e.to_string()))?.out_of_range)
    }

    /// [`Self::encode`] with error feedback: adds the error of the last message with the same address to the same peer.
    ///
    /// # Errors
    ///
    /// The same as those of [`Self::encode`]. It is also an error if the last tensor with this address had another
    /// length.
    pub fn encode_with_feedback(
        &mut self,
        tensor: &HostTensor,
        options: &EncodeOptions,
        (to, message): (PeerId, Address),
        out: &mut Vec<u8>,
    ) -> Result<bool, ExecError> {
        let element = self.read(tensor)?;
        let residual = self.residuals.entry((to, message)).or_default();
        let encoded =
            self.encoder.encode_with_feedback(&options.codec, &self.values, element, residual, options.seed, out);
        Ok(encoded.map_err(|e| ExecError::Communication(e.to_string()))?.out_of_range)
    }

    /// Compares a tensor with its encoded form. A correction by [`Self::encode_with_feedback`] counts as error.
    ///
    /// # Errors
    ///
    /// `encoded` is not the encoded form of this tensor.
    pub fn fidelity(&mut self, tensor: &HostTensor, encoded: &[u8], stable_ranks: bool) -> Result<Fidelity, ExecError> {
        let element = self.read(tensor)?;
        std::mem::swap(&mut self.exact, &mut self.values);
        self.values.resize(self.exact.len(), 0.0);
        decode(encoded, element, &mut self.values).map_err(|e| ExecError::Communication(e.to_string()))?;
        // A row is one channel of an image, and otherwise one vector of the last dimension.
        let columns = tensor
            .shape()
            .iter()
            .skip(if tensor.shape().len() > 3 { 2 } else { tensor.shape().len().max(1) - 1 })
            .product();
        let rank = |matrix: &[f32]| stable_rank(matrix, columns);
        let ranks = || Some(StableRanks { exact: rank(&self.exact)?, decoded: rank(&self.values)? });
        Ok(Fidelity {
            relative_error: relative_error(&self.exact, &self.values),
            stable_ranks: if stable_ranks { ranks() } else { None },
        })
    }

    /// Drops the residuals of error feedback, for example because the codecs change.
    pub fn clear_feedback(&mut self) {
        self.residuals.clear();
    }

    /// Decodes a tensor of type `ty`.
    ///
    /// # Errors
    ///
    /// The type is neither f32 nor bf16, or the bytes do not encode that many elements.
    pub fn decode(&mut self, bytes: &[u8], ty: TensorType) -> Result<HostTensor, ExecError> {
        let element = element(ty.dtype).ok_or_else(|| refused(&ty))?;
        self.values.resize(ty.numel(), 0.0);
        decode(bytes, element, &mut self.values).map_err(|e| ExecError::Communication(e.to_string()))?;
        let mut data = vec![0; ty.bytes()];
        match element {
            Element::Bf16 => {
                for (bytes, x) in data.as_chunks_mut::<2>().0.iter_mut().zip(&self.values) {
                    *bytes = bf16::from_f32(*x).to_le_bytes();
                }
            }
            Element::F32 => {
                for (bytes, x) in data.as_chunks_mut::<4>().0.iter_mut().zip(&self.values) {
                    *bytes = x.to_le_bytes();
                }
            }
        }
        Ok(HostTensor::from_bytes(ty, data)?)
    }

    /// Takes over the numbers of a tensor, and returns their type. Numbers of bf16 become f32, which has all of them.
    fn read(&mut self, tensor: &HostTensor) -> Result<Element, ExecError> {
        let element = element(tensor.dtype()).ok_or_else(|| refused(tensor.ty()))?;
        let bytes = tensor.bytes();
        self.values.clear();
        match element {
            Element::F32 => self.values.extend(bytes.as_chunks().0.iter().map(|x| f32::from_le_bytes(*x))),
            Element::Bf16 => self.values.extend(bytes.as_chunks().0.iter().map(|x| bf16::from_le_bytes(*x).to_f32())),
        }
        Ok(element)
    }
}

fn refused(ty: &TensorType) -> ExecError {
    ExecError::Communication(format!("no codec takes a tensor of type {ty}; codecs take f32 and bf16"))
}
