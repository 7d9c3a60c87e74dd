//! The graph of a decoder.

use fusionllm_graph::ops::{Compare, Embedding, IndexPut, ScaledDotProductAttention, Split, Triangle, Unary};
use fusionllm_graph::{Builder, DType, Graph, GraphError, HostTensor, Init, TensorType, ValueId};

use super::{Attention, Decoder, Layer, MlpInput, NormKind, Norms, Projections, QueryKeyNorm, Rotary};
use crate::count_correct;

impl Decoder {
    /// The graph for micro-batches of `batch` sequences of `sequence` tokens.
    ///
    /// The inputs are `input_ids` and `labels`, both `i64 [batch, sequence]`. Labels are already shifted: the label of
    /// a position is the next token. The label -100 does not count. The outputs are `loss`, `logits` and `correct`.
    /// Parameters have the names of the family's checkpoints.
    ///
    /// # Errors
    ///
    /// The sequence is longer than the model's positions, or sizes are too large.
    pub fn build(&self, batch: usize, sequence: usize, dtype: DType) -> Result<Graph, GraphError> {
        self.train(batch, sequence, dtype, false)
    }

    /// The graph of [`Self::build`] for sequences of several documents, which do not read each other. It has another
    /// input, `position_ids`, `i64 [batch, sequence]`: the position of each token in its document. In each document,
    /// positions grow by one; they need not begin at 0.
    ///
    /// # Errors
    ///
    /// The same as those of [`Self::build`].
    pub fn build_documents(&self, batch: usize, sequence: usize, dtype: DType) -> Result<Graph, GraphError> {
        self.train(batch, sequence, dtype, true)
    }

    fn train(&self, batch: usize, sequence: usize, dtype: DType, apart: bool) -> Result<Graph, GraphError> {
        let longest = self.longest();
        if sequence == 0 || sequence > longest {
            return Err(GraphError::Config(format!(
                "a sequence of {sequence} tokens is not between 1 and the {longest} positions of this model"
            )));
        }
        let mut b = Builder::new(self.model_type);
        let ids = b.input("input_ids", DType::I64, [batch, sequence])?;
        let labels = b.input("labels", DType::I64, [batch, sequence])?;
        let read = match apart {
            true => Read::Documents(b.input("position_ids", DType::I64, [batch, sequence])?),
            false => Read::Sequence,
        };
        let (mut x, embedding) = self.embed(&mut b, ids, read, dtype)?;
        let mut positions = Positions { keys: sequence, dtype, read, turns: Vec::new(), masks: Vec::new() };
        for (number, layer) in self.layers.iter().enumerate() {
            let mut place = positions.of(&mut b, layer)?;
            x = b.scope(self.layer_name(number), |b| self.block(b, x, &mut place))?;
        }
        let logits = self.logits(&mut b, x, embedding)?;
        let loss = b.scope("loss", |b| b.cross_entropy(logits, labels, -100))?;
        b.output("logits", logits)?;
        b.output("loss", loss)?;
        let correct = b.scope("correct", |b| count_correct(b, logits, labels, dtype))?;
        b.output("correct", correct)?;
        b.metadata("family", self.model_type.into());
        b.metadata("config", self.config.clone().into());
        b.finish()
    }

    /// The graph that continues one text by `tokens` tokens at once, up to the logits of the last of them, without dropout. `None` if
    /// the frequencies of positions depend on the length of the text, since all keys then change with each token.
    ///
    /// The inputs are `input_ids`, `i64 [1, tokens]`, their `positions`, `i64 [tokens]`, and for each layer `n` the keys
    /// and values of earlier tokens, `cache.n.key` and `cache.n.value`, both `[1, key_value_heads, capacity, head_dim]`.
    /// The outputs are `logits`, `[1, 1, vocab_size]`, and the caches with the new tokens, `new.n.key` and `new.n.value`.
    /// What a cache holds at positions that have no token yet does not matter, as long as it is finite.
    ///
    /// # Errors
    ///
    /// The capacity is larger than the model's positions, there are more tokens than it, or sizes are too large.
    pub fn continuation(&self, tokens: usize, capacity: usize, dtype: DType) -> Result<Option<Graph>, GraphError> {
        let longest = self.longest();
        if tokens == 0 || tokens > capacity || capacity > longest {
            return Err(GraphError::Config(format!(
                "{tokens} tokens and a cache of {capacity} do not fit the {longest} positions of this model"
            )));
        }
        if self.layers.iter().filter_map(|layer| layer.rotary.as_ref()).any(Rotary::depends_on_length) {
            return Ok(None);
        }
        self.without_dropout().next_tokens(tokens, capacity, dtype).map(Some)
    }

    fn without_dropout(&self) -> Self {
        let attention = Attention { dropout: 0.0, ..self.attention.clone() };
        Self { attention, embedding_dropout: 0.0, residual_dropout: 0.0, ..self.clone() }
    }

    /// The graph of [`Self::continuation`] for a model without dropout.
    fn next_tokens(&self, tokens: usize, capacity: usize, dtype: DType) -> Result<Graph, GraphError> {
        let mut b = Builder::new(self.model_type);
        let ids = b.input("input_ids", DType::I64, [1, tokens])?;
        let at = b.input("positions", DType::I64, [tokens])?;
        let read = Read::New { at, count: tokens };
        let (mut x, embedding) = self.embed(&mut b, ids, read, dtype)?;
        let mut positions = Positions { keys: capacity, dtype, read, turns: Vec::new(), masks: Vec::new() };
        let shape = [1, self.attention.key_value_heads, capacity, self.attention.head_dim];
        for (number, layer) in self.layers.iter().enumerate() {
            let mut place = positions.of(&mut b, layer)?;
            let [key, value] = ["key", "value"].map(|part| b.input(&format!("cache.{number}.{part}"), dtype, shape));
            place.cache = Some(Cache { at, parts: [key?, value?] });
            x = b.scope(self.layer_name(number), |b| self.block(b, x, &mut place))?;
            for (name, part) in ["key", "value"].iter().zip(place.cache.iter().flat_map(|cache| cache.parts)) {
                b.output(&format!("new.{number}.{name}"), part)?;
            }
        }
        let last = b.slice(x, 1, tokens - 1, tokens, 1)?;
        let logits = self.logits(&mut b, last, embedding)?;
        b.output("logits", logits)?;
        b.finish()
    }

    fn layer_name(&self, number: usize) -> String {
        format!("{}.{number}", self.names.layers)
    }

    /// The embeddings of tokens, and the weight of the token embedding.
    fn embed(&self, b: &mut Builder, ids: ValueId, read: Read, dtype: DType) -> Result<(ValueId, ValueId), GraphError> {
        let (module, std) = (self.names.embedding, self.initializer_range);
        let weight = weight_of(b, module, [self.vocab_size, self.hidden_size], dtype, std)?;
        let learnt = self.names.positions.map(|module| {
            let weight = weight_of(b, module, [self.max_positions, self.hidden_size], dtype, std)?;
            Ok((module, weight))
        });
        let tokens = b.scope(module, |b| {
            let x = b.op(Embedding { padding_idx: self.padding_idx }, &[weight, ids])?;
            if self.embedding_scale == 1.0 { Ok(x) } else { b.mul_scalar(x, self.embedding_scale) }
        })?;
        let positions = learnt.transpose()?.map(|(module, weight)| {
            b.scope(module, |b| match read {
                Read::Sequence => b.slice(weight, 0, 0, b.ty(ids).shape[1], 1),
                Read::Documents(positions) | Read::New { at: positions, .. } => b.embedding(weight, positions),
            })
        });
        let x = b.scope(module, |b| {
            let x = match positions.transpose()? {
                Some(positions) => b.add(tokens, positions)?,
                None => tokens,
            };
            b.dropout(x, self.embedding_dropout)
        })?;
        Ok((x, weight))
    }

    /// The logits after the last block. `embedding` is the weight of the token embedding.
    fn logits(&self, b: &mut Builder, x: ValueId, embedding: ValueId) -> Result<ValueId, GraphError> {
        let (module, dtype) = (self.names.head, b.ty(x).dtype);
        let x = self.normalise(b, self.names.final_norm, x)?;
        let head = match self.tie_word_embeddings {
            true => embedding,
            false => weight_of(b, module, [self.vocab_size, self.hidden_size], dtype, self.initializer_range)?,
        };
        b.scope(module, |b| {
            let logits = b.linear(x, head, None)?;
            soft_cap(b, logits, self.logit_soft_cap)
        })
    }

    /// `x [.., in]` times the weight of a module, to `[.., out]`.
    fn linear(&self, b: &mut Builder, module: &str, x: ValueId, out: usize, bias: bool) -> Result<ValueId, GraphError> {
        self.product(b, module, x, (out, bias), self.initializer_range)
    }

    /// The same for a module whose result is added to the residual stream.
    fn residual(&self, b: &mut Builder, module: &str, x: ValueId, bias: bool) -> Result<ValueId, GraphError> {
        self.product(b, module, x, (self.hidden_size, bias), self.residual_initializer_range)
    }

    fn product(
        &self,
        b: &mut Builder,
        module: &str,
        x: ValueId,
        (out, bias): (usize, bool),
        std: f64,
    ) -> Result<ValueId, GraphError> {
        let (dtype, width) = (b.ty(x).dtype, b.ty(x).shape.last().copied().unwrap_or(1));
        let shape = if self.names.transposed { [width, out] } else { [out, width] };
        let weight = weight_of(b, module, shape, dtype, std)?;
        b.scope(module, |b| {
            let bias = bias.then(|| b.parameter("bias", dtype, [out], Init::Constant(0.0))).transpose()?;
            match (self.names.transposed, bias) {
                (false, bias) => b.linear(x, weight, bias),
                (true, None) => b.matmul(x, weight),
                (true, Some(bias)) => {
                    let y = b.matmul(x, weight)?;
                    b.add(y, bias)
                }
            }
        })
    }

    /// Normalises `x` over its last dimension.
    fn normalise(&self, b: &mut Builder, module: &str, x: ValueId) -> Result<ValueId, GraphError> {
        let (dtype, width) = (b.ty(x).dtype, b.ty(x).shape.last().copied().unwrap_or(1));
        b.scope(module, |b| {
            let first = if self.norm.kind == NormKind::RmsPlusOne { 0.0 } else { 1.0 };
            let weight = b.parameter("weight", dtype, [width], Init::Constant(first))?;
            match self.norm.kind {
                NormKind::Rms => b.rms_norm(x, weight, self.norm.eps),
                NormKind::RmsPlusOne => {
                    let weight = b.add_scalar(weight, 1.0)?;
                    b.rms_norm(x, weight, self.norm.eps)
                }
                NormKind::Layer => {
                    let bias = b.parameter("bias", dtype, [width], Init::Constant(0.0))?;
                    b.layer_norm(x, weight, bias, self.norm.eps)
                }
            }
        })
    }

    fn block(&self, b: &mut Builder, x: ValueId, place: &mut Place) -> Result<ValueId, GraphError> {
        let Norms { before_attention, after_attention, before_mlp, after_mlp } = &self.names.norms;
        let norm = |b: &mut Builder, module: &Option<&str>, x| match module {
            Some(module) => self.normalise(b, module, x),
            None => Ok(x),
        };
        let h = norm(b, before_attention, x)?;
        let h = b.scope(self.names.attention, |b| {
            let h = self.attention(b, h, place)?;
            b.dropout(h, self.residual_dropout)
        })?;
        let attended = norm(b, after_attention, h)?;
        let read = if self.parallel { x } else { b.add(x, attended)? };
        let h = norm(b, before_mlp, read)?;
        let h = b.scope(self.names.mlp, |b| {
            let h = self.feed_forward(b, h)?;
            b.dropout(h, self.residual_dropout)
        })?;
        let mut h = norm(b, after_mlp, h)?;
        if self.parallel {
            h = b.add(h, attended)?;
        }
        b.add(read, h)
    }

    fn feed_forward(&self, b: &mut Builder, x: ValueId) -> Result<ValueId, GraphError> {
        let (inner, bias) = (self.intermediate_size, self.mlp.bias);
        let h = match self.names.mlp_input {
            MlpInput::Plain(module) => {
                let h = self.linear(b, module, x, inner, bias)?;
                self.mlp.activation.apply(b, h)?
            }
            MlpInput::Gated([gate, up]) => {
                let gate = self.linear(b, gate, x, inner, bias)?;
                let gate = self.mlp.activation.apply(b, gate)?;
                let up = self.linear(b, up, x, inner, bias)?;
                b.mul(gate, up)?
            }
            MlpInput::GatedJoined(module) => {
                let both = self.linear(b, module, x, 2 * inner, bias)?;
                let parts = b.chunk(both, 2, 2)?;
                let gate = self.mlp.activation.apply(b, parts[0])?;
                b.mul(parts[1], gate)?
            }
        };
        self.residual(b, self.names.mlp_output, h, bias)
    }

    fn attention(&self, b: &mut Builder, x: ValueId, place: &mut Place) -> Result<ValueId, GraphError> {
        let a = &self.attention;
        let (n, t) = (b.ty(x).shape[0], b.ty(x).shape[1]);
        let [q, k, v] = self.projections(b, x)?;
        let (q, k) = match &place.turn {
            Some(turn) => (turn.apply(b, q)?, turn.apply(b, k)?),
            None => (q, k),
        };
        let [k, v] = match &mut place.cache {
            Some(cache) => cache.write(b, [k, v])?,
            None => [k, v],
        };
        // With a cache, the mask knows the order, too.
        let is_causal = place.cache.is_none();
        let y = if a.fused && a.dropout == 0.0 && a.soft_cap.is_none() {
            let operands: Vec<ValueId> = [q, k, v].into_iter().chain(place.mask).collect();
            b.op(ScaledDotProductAttention { is_causal, scale: a.scale }, &operands)?
        } else {
            let [k, v] = [k, v].map(|x| repeat(b, x, a.heads / a.key_value_heads));
            let kt = b.transpose(k?)?;
            let scores = b.matmul(q, kt)?;
            let scores = b.mul_scalar(scores, a.scale)?;
            let mut scores = soft_cap(b, scores, a.soft_cap)?;
            let causal = is_causal.then(|| triangle(b, t, false, 0)).transpose()?;
            let dtype = b.ty(scores).dtype;
            let minus_infinity = b.full(TensorType::new(dtype, []), f64::NEG_INFINITY)?;
            for mask in causal.into_iter().chain(place.mask) {
                scores = b.where_(mask, scores, minus_infinity)?;
            }
            let weights = b.softmax(scores, 3)?;
            let weights = b.dropout(weights, a.dropout)?;
            b.matmul(weights, v?)?
        };
        let y = b.permute(y, &[0, 2, 1, 3])?;
        let y = b.reshape(y, [n, t, a.heads * a.head_dim])?;
        self.residual(b, self.names.attention_output, y, a.output_bias)
    }

    /// Queries `[n, heads, t, head_dim]`, keys and values `[n, key_value_heads, t, head_dim]`.
    fn projections(&self, b: &mut Builder, x: ValueId) -> Result<[ValueId; 3], GraphError> {
        let a = &self.attention;
        let (n, t) = (b.ty(x).shape[0], b.ty(x).shape[1]);
        let heads = [a.heads, a.key_value_heads, a.key_value_heads];
        let widths = heads.map(|heads| heads * a.head_dim);
        let parts = match self.names.projections {
            Projections::Separate(modules) => {
                let part = |i: usize| (modules[i], widths[i]);
                let mut parts = Vec::with_capacity(3);
                for (module, width) in [0, 1, 2].map(part) {
                    parts.push(self.linear(b, module, x, width, a.input_bias)?);
                }
                parts
            }
            Projections::Joined(module) => {
                let all = self.linear(b, module, x, widths.iter().sum(), a.input_bias)?;
                b.apply(Split { dim: 2, sizes: widths.to_vec() }, &[all])?
            }
            Projections::ByHead(module) => {
                let all = self.linear(b, module, x, widths.iter().sum(), a.input_bias)?;
                let all = b.reshape(all, [n, t, a.heads, 3 * a.head_dim])?;
                b.chunk(all, 3, 3)?
            }
        };
        let mut out = [x; 3];
        for (i, part) in parts.into_iter().enumerate().take(3) {
            let norm = self.names.query_key_norms.get(i).copied();
            let part = match (a.query_key_norm, norm) {
                (QueryKeyNorm::Heads, Some(module)) => self.normalise(b, module, part)?,
                _ => part,
            };
            let part = b.reshape(part, [n, t, heads[i], a.head_dim])?;
            let part = match (a.query_key_norm, norm) {
                (QueryKeyNorm::Head, Some(module)) => self.normalise(b, module, part)?,
                _ => part,
            };
            out[i] = b.permute(part, &[0, 2, 1, 3])?;
        }
        Ok(out)
    }
}

/// The positions of a layer, as its operators need them.
struct Place {
    turn: Option<Turn>,
    /// Whether a query reads a key, `bool [.., queries, keys]`. Without a cache, apart from order.
    mask: Option<ValueId>,
    cache: Option<Cache>,
}

/// Keys and values of all tokens of a text.
struct Cache {
    /// The positions of the new tokens.
    at: ValueId,
    /// Keys and values.
    parts: [ValueId; 2],
}

impl Cache {
    /// Writes the keys and values of new tokens, and returns those of all.
    fn write(&mut self, b: &mut Builder, new: [ValueId; 2]) -> Result<[ValueId; 2], GraphError> {
        for (part, new) in self.parts.iter_mut().zip(new) {
            let put = IndexPut { indexed: vec![false, false, true, false], accumulate: false };
            *part = b.op(put, &[*part, new, self.at])?;
        }
        Ok(self.parts)
    }
}

/// The tokens that a graph reads, and where their positions come from.
#[derive(Clone, Copy)]
enum Read {
    /// Sequences from their first token on.
    Sequence,
    /// Sequences of documents. The position of each token in its document is `i64 [batch, sequence]`.
    Documents(ValueId),
    /// `count` tokens that continue a text at the positions `at`, `i64 [count]`.
    New { at: ValueId, count: usize },
}

/// Positions for the layers, each made once.
struct Positions {
    /// The number of keys.
    keys: usize,
    dtype: DType,
    read: Read,
    turns: Vec<(Rotary, Turn)>,
    masks: Vec<(Option<usize>, ValueId)>,
}

impl Positions {
    fn of(&mut self, b: &mut Builder, layer: &Layer) -> Result<Place, GraphError> {
        let turn = layer.rotary.as_ref().map(|rotary| self.turn(b, rotary)).transpose()?;
        let window = layer.window.filter(|window| *window < self.keys);
        let is_plain = window.is_none() && matches!(self.read, Read::Sequence);
        let mask = (!is_plain).then(|| self.mask(b, window)).transpose()?;
        Ok(Place { turn, mask, cache: None })
    }

    fn turn(&mut self, b: &mut Builder, rotary: &Rotary) -> Result<Turn, GraphError> {
        if let Some((_, turn)) = self.turns.iter().find(|(made, _)| made == rotary) {
            return Ok(*turn);
        }
        let turn = b.scope("rotary_emb", |b| {
            let frequencies: Vec<f64> = rotary.frequencies(self.keys).into_iter().map(f64::from).collect();
            let frequencies = HostTensor::from_f64([frequencies.len()], &frequencies)?.cast(self.dtype)?;
            let name = format!("inv_freq.{}", self.turns.len());
            let frequencies = b.constant(&name, frequencies)?;
            let positions = match self.read {
                Read::Sequence => b.arange(self.dtype, 0.0, 1.0, self.keys)?,
                Read::Documents(at) | Read::New { at, .. } => b.cast(at, self.dtype)?,
            };
            // Each sample has the positions of its own documents, for all heads.
            let shape = match b.ty(positions).shape[..] {
                [samples, tokens] => vec![samples, 1, tokens, 1],
                _ => vec![b.ty(positions).numel(), 1],
            };
            let positions = b.reshape(positions, shape)?;
            let angles = b.mul(positions, frequencies)?;
            let factor = rotary.attention_factor();
            let mut of = |function| -> Result<ValueId, GraphError> {
                let x = b.unary(function, angles)?;
                if factor == 1.0 { Ok(x) } else { b.mul_scalar(x, factor) }
            };
            Ok(Turn { cos: of(Unary::Cos)?, sin: of(Unary::Sin)?, dims: rotary.dims })
        })?;
        self.turns.push((rotary.clone(), turn));
        Ok(turn)
    }

    /// The mask of a layer with this window, or with none.
    fn mask(&mut self, b: &mut Builder, window: Option<usize>) -> Result<ValueId, GraphError> {
        if let Some((_, mask)) = self.masks.iter().find(|(made, _)| *made == window) {
            return Ok(*mask);
        }
        let reach = window.unwrap_or(self.keys);
        let mask = b.scope("mask", |b| match self.read {
            Read::Sequence => triangle(b, self.keys, true, 1 - reach as i64),
            Read::Documents(positions) => {
                let same = same_document(b, positions)?;
                match window {
                    Some(reach) => {
                        let near = triangle(b, self.keys, true, 1 - reach as i64)?;
                        both(b, same, near)
                    }
                    None => Ok(same),
                }
            }
            Read::New { at, count } => {
                let keys = b.arange(DType::I64, 0.0, 1.0, self.keys)?;
                let queries = b.reshape(at, [count, 1])?;
                let first = b.sub_scalar(queries, reach as f64)?;
                let (near, earlier) = (b.op(Compare::Gt, &[keys, first])?, b.op(Compare::Le, &[keys, queries])?);
                both(b, near, earlier)
            }
        })?;
        self.masks.push((window, mask));
        Ok(mask)
    }
}

/// `bool [n, 1, t, t]`: whether two tokens are of one document, by their positions `i64 [n, t]` in it. Tokens of one
/// document have the same distance from their place to their position.
fn same_document(b: &mut Builder, positions: ValueId) -> Result<ValueId, GraphError> {
    let (n, t) = (b.ty(positions).shape[0], b.ty(positions).shape[1]);
    let places = b.arange(DType::I64, 0.0, 1.0, t)?;
    let start = b.sub(places, positions)?;
    let (queries, keys) = (b.reshape(start, [n, 1, t, 1])?, b.reshape(start, [n, 1, 1, t])?);
    b.op(Compare::Eq, &[queries, keys])
}

/// Whether both are true.
fn both(b: &mut Builder, x: ValueId, y: ValueId) -> Result<ValueId, GraphError> {
    let none = b.full(TensorType::new(DType::Bool, []), 0.0)?;
    b.where_(x, y, none)
}

/// A weight of a module.
fn weight_of(b: &mut Builder, module: &str, shape: [usize; 2], dtype: DType, std: f64) -> Result<ValueId, GraphError> {
    b.scope(module, |b| b.parameter("weight", dtype, shape, Init::Normal { std }))
}

/// The angles of a rotary position embedding, by position and pair.
#[derive(Clone, Copy)]
struct Turn {
    cos: ValueId,
    sin: ValueId,
    dims: usize,
}

impl Turn {
    /// Turns the first elements of `x [n, heads, t, head_dim]`.
    fn apply(&self, b: &mut Builder, x: ValueId) -> Result<ValueId, GraphError> {
        let (half, rest) = (self.dims / 2, b.ty(x).shape[3] - self.dims);
        let sizes = [half, half, rest].into_iter().filter(|size| *size > 0).collect();
        let mut parts = b.apply(Split { dim: 3, sizes }, &[x])?;
        let (first, second) = (parts[0], parts[1]);
        let mut product = |x, y| b.mul(x, y);
        let (first_cos, second_sin) = (product(first, self.cos)?, product(second, self.sin)?);
        let (second_cos, first_sin) = (product(second, self.cos)?, product(first, self.sin)?);
        parts[0] = b.sub(first_cos, second_sin)?;
        parts[1] = b.add(second_cos, first_sin)?;
        b.cat(&parts, 3)
    }
}

/// `bool [t, t]`: true on and above (or below) a diagonal.
fn triangle(b: &mut Builder, t: usize, upper: bool, diagonal: i64) -> Result<ValueId, GraphError> {
    let ones = b.full(TensorType::new(DType::I64, [t, t]), 1.0)?;
    let part = b.op(Triangle { upper, diagonal }, &[ones])?;
    b.compare_scalar(Compare::Ne, part, 0.0)
}

/// Each head of `x [n, heads, t, d]`, this many times one after the other.
fn repeat(b: &mut Builder, x: ValueId, times: usize) -> Result<ValueId, GraphError> {
    let &[n, heads, t, d] = &b.ty(x).shape[..] else { return Ok(x) };
    if times == 1 {
        return Ok(x);
    }
    let x = b.reshape(x, [n, heads, 1, t, d])?;
    let x = b.expand(x, [n, heads, times, t, d])?;
    b.reshape(x, [n, heads * times, t, d])
}

/// `c tanh(x / c)`, where there is a bound `c`.
fn soft_cap(b: &mut Builder, x: ValueId, cap: Option<f64>) -> Result<ValueId, GraphError> {
    let Some(cap) = cap else { return Ok(x) };
    let x = b.div_scalar(x, cap)?;
    let x = b.unary(Unary::Tanh, x)?;
    b.mul_scalar(x, cap)
}
