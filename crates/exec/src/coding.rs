//! Tensors through codecs.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use fusionllm_compress::{Codec, Element, Encoder, Mask, decode, relative_error, stable_rank};
use fusionllm_graph::{CounterRng, HostTensor, TensorType, ValueId};
use fusionllm_program::{Address, PeerId, element};
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

/// A message between this peer and another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// The pass that it belongs to.
    pub pass: u64,
    /// The other peer: the receiver if this peer encodes, the sender if it decodes.
    pub peer: PeerId,
    /// The tensor.
    pub tensor: Address,
}

/// Encodes and decodes the tensors of one peer, in the order in which it sends and receives them.
///
/// Of an activation, top-k sends a part of the entries. Both ends keep their places until the gradient goes back: see
/// [`Program::masks`](fusionllm_program::Program::masks). So one coder must see all messages of a peer.
#[derive(Default)]
pub struct Coder {
    encoder: Encoder,
    values: Vec<f32>,
    /// The exact values, while `values` has the decoded ones.
    exact: Vec<f32>,
    /// By gradient and other end: the values that it is a gradient of.
    of: BTreeMap<(ValueId, PeerId), Vec<ValueId>>,
    /// The places that were sent of activations, by other end.
    masks: HashMap<(PeerId, Address), Sent>,
    /// The mask of the last encoded tensor.
    under: Option<Mask>,
}

/// The places that were sent of an activation in one pass.
struct Sent {
    pass: u64,
    mask: Mask,
    /// Gradients that need it and have not gone back yet.
    gradients: usize,
}

/// The masks of the values that a tensor is a gradient of.
enum Masks {
    /// Some value went exactly, or the tensor is the gradient of none.
    Whole,
    /// The mask of the only value. Both ends know that they have it.
    One(Mask),
    /// The entries of several values.
    Joined(Mask),
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
    /// A coder for the messages of a program with these [masks](fusionllm_program::Program::masks).
    pub fn new(masks: &BTreeMap<(ValueId, PeerId), BTreeSet<ValueId>>) -> Self {
        let of = masks.iter().map(|(ends, values)| (*ends, values.iter().copied().collect())).collect();
        Self { of, ..Self::default() }
    }

    /// Writes `tensor`'s encoded form into `out`, replacing its content. Returns whether the tensor was sent exactly
    /// because the codec cannot represent its values.
    ///
    /// # Errors
    ///
    /// The tensor is of neither f32 nor bf16, or has more elements than the wire form can count.
    pub fn encode(
        &mut self,
        message: Message,
        tensor: &HostTensor,
        options: &EncodeOptions,
        out: &mut Vec<u8>,
    ) -> Result<bool, ExecError> {
        let element = self.read(tensor)?;
        let masks = self.masks(message, tensor.ty().numel());
        self.under = None;
        let encoded = match (masks, options.codec) {
            (Masks::One(mask), Codec::TopK(_)) => {
                let under = self.under.insert(mask);
                self.encoder.encode_under(under, &options.codec, &mut self.values, element, options.seed, out)
            }
            (masks, codec) => {
                if let (Masks::Joined(mask), Codec::TopK(_)) = (masks, codec) {
                    mask.clear_others(&mut self.values);
                    self.under = Some(mask);
                }
                self.encoder.encode(&codec, &self.values, element, options.seed, out)
            }
        };
        let out_of_range = encoded.map_err(|e| ExecError::Communication(e.to_string()))?.out_of_range;
        self.remember(message, out, self.values.len());
        Ok(out_of_range)
    }

    /// Compares the last tensor that was encoded with its encoded form. The entries that its activation lacks do not
    /// count.
    ///
    /// # Errors
    ///
    /// `encoded` is not the encoded form of this tensor.
    pub fn fidelity(&mut self, tensor: &HostTensor, encoded: &[u8], stable_ranks: bool) -> Result<Fidelity, ExecError> {
        let element = self.read(tensor)?;
        let under = self.under.as_ref().filter(|mask| mask.elements() == self.values.len());
        if let Some(mask) = under {
            mask.clear_others(&mut self.values);
        }
        std::mem::swap(&mut self.exact, &mut self.values);
        self.values.resize(self.exact.len(), 0.0);
        decode(encoded, element, under, &mut self.values).map_err(|e| ExecError::Communication(e.to_string()))?;
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

    /// Decodes a tensor of type `ty`.
    ///
    /// # Errors
    ///
    /// The type is neither f32 nor bf16, or the bytes do not encode that many elements.
    pub fn decode(&mut self, message: Message, bytes: &[u8], ty: TensorType) -> Result<HostTensor, ExecError> {
        let element = element(ty.dtype).ok_or_else(|| refused(&ty))?;
        let mask = match self.masks(message, ty.numel()) {
            Masks::One(mask) => Some(mask),
            Masks::Whole | Masks::Joined(_) => None,
        };
        self.values.resize(ty.numel(), 0.0);
        decode(bytes, element, mask.as_ref(), &mut self.values).map_err(|e| ExecError::Communication(e.to_string()))?;
        self.remember(message, bytes, ty.numel());
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

    /// Keeps the places of an activation that top-k has encoded, until its gradients have gone back.
    fn remember(&mut self, message: Message, encoded: &[u8], elements: usize) {
        let Message { pass, peer, tensor } = message;
        let uses = |((_, other), values): &(&(ValueId, PeerId), &Vec<ValueId>)| {
            *other == peer && values.contains(&tensor.value())
        };
        let gradients = self.of.iter().filter(uses).count();
        if gradients > 0
            && let Some(mask) = Mask::of(encoded, elements)
        {
            self.masks.insert((peer, tensor), Sent { pass, mask, gradients });
        }
    }

    /// The masks of the values that a message has the gradient of. A mask goes with its last gradient.
    fn masks(&mut self, message: Message, elements: usize) -> Masks {
        let Message { pass, peer, tensor: Address::Value { value, micro_batch } } = message else {
            return Masks::Whole;
        };
        let of = self.of.get(&(value, peer)).map_or(&[][..], |values| values);
        let mut masks = Vec::with_capacity(of.len());
        for value in of {
            let place = (peer, Address::Value { value: *value, micro_batch });
            let Some(sent) = self.masks.get_mut(&place).filter(|sent| sent.pass == pass) else { continue };
            sent.gradients -= 1;
            masks.push(if sent.gradients == 0 {
                self.masks.remove(&place).map(|s| s.mask)
            } else {
                Some(sent.mask.clone())
            });
        }
        let all = masks.len() == of.len();
        let mut masks = masks.into_iter().flatten().filter(|mask| mask.elements() == elements);
        match masks.next() {
            Some(first) if all && of.len() == 1 => Masks::One(first),
            Some(mut first) if all => {
                masks.for_each(|mask| first.join(&mask));
                Masks::Joined(first)
            }
            _ => Masks::Whole,
        }
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
