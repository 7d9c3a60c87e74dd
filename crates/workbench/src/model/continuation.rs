//! A text under way: the keys and values of its tokens, so that a new one costs no second look at those before.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use fusionllm_backend::{Backend, Prepared, Segment, Tensor};
use fusionllm_graph::{DType, HostTensor, TensorType, ValueId};
use fusionllm_models::Decoder;

use crate::WorkbenchError;

/// The tokens that are read at once. More take more memory for their scores.
const CHUNK: usize = 256;

/// The number of tokens that there is room for is a multiple of this. Each new token looks at all of the room.
const ROOM: usize = 128;

/// A decoder's memory of one text.
pub(super) struct Continuation {
    backend: Arc<dyn Backend>,
    decoder: Decoder,
    /// The room in tokens.
    capacity: usize,
    /// The tokens whose keys and values are there.
    text: Vec<u32>,
    /// Keys and values, layer by layer.
    caches: Vec<Tensor>,
    /// The graph for one more token. It stays ready, because most of a text comes token by token.
    next: Option<Reading>,
}

/// A graph that reads a number of tokens, ready to run.
struct Reading {
    prepared: Prepared,
    /// Where each input comes from.
    inputs: Vec<Source>,
}

/// The origin of an input of a graph.
enum Source {
    Tensor(Tensor),
    Ids,
    Positions,
    Cache(usize),
}

impl Continuation {
    pub(super) fn new(backend: Arc<dyn Backend>, decoder: Decoder) -> Self {
        Self { backend, decoder, capacity: 0, text: Vec::new(), caches: Vec::new(), next: None }
    }

    /// The logits of the token after `text`. `None` if this model or a text of this length has no such graph.
    /// `held` has the parameters.
    pub(super) fn logits(
        &mut self,
        held: &BTreeMap<String, Tensor>,
        text: &[u32],
    ) -> Result<Option<Tensor>, WorkbenchError> {
        if text.len() > self.decoder.longest() {
            return Ok(None);
        }
        if text.len() > self.capacity {
            let room = text.len() + text.len() / 8;
            self.make_room(room.next_multiple_of(ROOM).min(self.decoder.longest()))?;
        }
        let same = self.text.iter().zip(text).take_while(|(a, b)| a == b).count();
        // The last token is read again if it is known, since nothing else gives its logits.
        self.text.truncate(same.min(text.len() - 1));
        let mut logits = None;
        for chunk in text[self.text.len()..].chunks(CHUNK) {
            logits = match chunk.len() {
                1 => {
                    let reading = match self.next.take() {
                        Some(reading) => Some(reading),
                        None => self.prepare(held, 1)?,
                    };
                    let Some(reading) = reading else { return Ok(None) };
                    let logits = self.read(&reading, chunk)?;
                    self.next = Some(reading);
                    Some(logits)
                }
                count => match self.prepare(held, count)? {
                    Some(reading) => Some(self.read(&reading, chunk)?),
                    None => return Ok(None),
                },
            };
        }
        Ok(logits)
    }

    /// Makes room for more tokens, and keeps the keys and values of those that are known.
    fn make_room(&mut self, capacity: usize) -> Result<(), WorkbenchError> {
        let attention = &self.decoder.attention;
        let ty = TensorType::new(DType::F32, [1, attention.key_value_heads, capacity, attention.head_dim]);
        let row = attention.head_dim * DType::F32.size();
        let mut known = std::mem::take(&mut self.caches).into_iter();
        // Each is a tensor of its own, so that it can be written in place.
        let caches = (0..2 * self.decoder.layers.len()).map(|_| {
            let mut bytes = vec![0; ty.bytes()];
            if let Some(known) = known.next().filter(|_| !self.text.is_empty()) {
                let known = self.backend.download(&known)?;
                let heads = bytes.chunks_mut(capacity * row).zip(known.bytes().chunks(self.capacity * row));
                heads.for_each(|(new, old)| new[..old.len()].copy_from_slice(old));
            }
            Ok(self.backend.upload(&HostTensor::from_bytes(ty.clone(), bytes)?)?)
        });
        self.caches = caches.collect::<Result<_, WorkbenchError>>()?;
        (self.capacity, self.next) = (capacity, None);
        Ok(())
    }

    fn prepare(&self, held: &BTreeMap<String, Tensor>, count: usize) -> Result<Option<Reading>, WorkbenchError> {
        let Some(graph) = self.decoder.continuation(count, self.capacity, DType::F32)? else { return Ok(None) };
        let names: Vec<String> = (0..self.decoder.layers.len())
            .flat_map(|layer| ["key", "value"].map(|part| format!("{layer}.{part}")))
            .collect();
        let (mut ids, mut inputs) = (Vec::new(), Vec::new());
        for (i, value) in graph.values.iter().enumerate() {
            let cache = value.name.strip_prefix("cache.").and_then(|name| names.iter().position(|n| n == name));
            let source = match (value.name.as_str(), cache) {
                ("input_ids", _) => Source::Ids,
                ("positions", _) => Source::Positions,
                (_, Some(cache)) => Source::Cache(cache),
                (name, None) => match (held.get(name), graph.constants.get(name)) {
                    (Some(tensor), _) => Source::Tensor(tensor.clone()),
                    (None, Some(constant)) => Source::Tensor(self.backend.upload(constant)?),
                    (None, None) => continue,
                },
            };
            ids.push(ValueId(i as u32));
            inputs.push(source);
        }
        let outputs = std::iter::once("logits".to_owned()).chain(names.iter().map(|name| format!("new.{name}")));
        let targets: Vec<ValueId> = outputs.filter_map(|name| graph.outputs.get(&name).copied()).collect();
        let prepared = self.backend.prepare(Segment::of_graph(&graph, &ids, &targets)?)?;
        Ok(Some(Reading { prepared, inputs }))
    }

    /// Reads the tokens after those that are known, and returns the logits of the last.
    fn read(&mut self, reading: &Reading, tokens: &[u32]) -> Result<Tensor, WorkbenchError> {
        let first = self.text.len();
        let ids: Vec<i64> = tokens.iter().map(|token| i64::from(*token)).collect();
        let positions: Vec<i64> = (first as i64..).take(tokens.len()).collect();
        let ids = self.backend.upload(&HostTensor::from_i64([1, tokens.len()], &ids)?)?;
        let positions = self.backend.upload(&HostTensor::from_i64([tokens.len()], &positions)?)?;
        // The caches are handed over, so that kernels may write into them. After an error, the text is not known.
        let mut caches: Vec<Option<Tensor>> = std::mem::take(&mut self.caches).into_iter().map(Some).collect();
        let known = std::mem::take(&mut self.text);
        self.capacity = 0;
        let lost = || WorkbenchError::State("a cache of keys or values is missing".into());
        let inputs = reading.inputs.iter().map(|source| match source {
            Source::Tensor(tensor) => Ok(tensor.clone()),
            Source::Ids => Ok(ids.clone()),
            Source::Positions => Ok(positions.clone()),
            Source::Cache(cache) => caches.get_mut(*cache).and_then(Option::take).ok_or_else(lost),
        });
        let inputs: Vec<Tensor> = inputs.collect::<Result<_, WorkbenchError>>()?;
        let mut go_on = |_| ControlFlow::Continue(());
        let mut results = self.backend.run_segment(&reading.prepared, inputs, &mut go_on)?.into_iter();
        let logits = results.next().ok_or_else(lost)?;
        self.caches = results.collect();
        self.capacity = self.caches.first().and_then(|cache| cache.ty().shape.get(2).copied()).ok_or_else(lost)?;
        self.text = known;
        self.text.extend_from_slice(tokens);
        Ok(logits)
    }
}
