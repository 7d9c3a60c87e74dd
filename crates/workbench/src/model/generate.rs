//! Generates text with a trained language model, token by token.

use std::collections::BTreeMap;
use std::sync::Arc;

use fusionllm_backend::{Backend, Tensor, interpret};
use fusionllm_data::Tokenizer;
use fusionllm_graph::{CounterRng, DType, HostTensor, ValueId};
use fusionllm_import::{ImportError, ImportOptions};
use fusionllm_workspace::config::Family;

use crate::WorkbenchError;
use crate::model::continuation::Continuation;
use crate::model::imported::ImportedModel;
use crate::model::last_token::{LastToken, NotLanguage};
use crate::model::{SavedModel, forward};

/// The rule by which each token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// The number that logits are divided by. Below 1, likely tokens become more likely; at 0, the most likely token is
    /// chosen.
    pub temperature: f64,
    /// How many of the most likely tokens to choose from; 0 for all.
    pub top_k: usize,
    /// The least share of the probability that the tokens to choose from have together, the most likely ones first; 1
    /// for all tokens.
    pub top_p: f64,
    /// Decides the choices, together with the number of each token.
    pub seed: u64,
}

impl Sampling {
    /// Chooses token number `n` of a text from the logits of all tokens; `None` if no logit is a number.
    pub fn choose(&self, logits: &[f32], n: u64) -> Option<u32> {
        let mut likely: Vec<(u32, f64)> = (0..).zip(logits).map(|(token, &l)| (token, f64::from(l))).collect();
        likely.retain(|(_, l)| *l > f64::NEG_INFINITY);
        let falling = |a: &(u32, f64), b: &(u32, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        let best = likely.iter().copied().min_by(falling)?;
        if self.temperature <= 0.0 || best.1 == f64::INFINITY {
            return Some(best.0);
        }
        if (1..likely.len()).contains(&self.top_k) {
            likely.select_nth_unstable_by(self.top_k - 1, falling);
            likely.truncate(self.top_k);
            likely.sort_unstable_by_key(|(token, _)| *token);
        }
        let weight = |l: f64| ((l - best.1) / self.temperature).exp();
        if self.top_p < 1.0 {
            likely.sort_unstable_by(falling);
            let share = self.top_p * likely.iter().map(|(_, l)| weight(*l)).sum::<f64>();
            let mut before = 0.0;
            let kept = likely.iter().take_while(|(_, l)| {
                let kept = before < share;
                before += weight(*l);
                kept
            });
            likely.truncate(kept.count().max(1));
            likely.sort_unstable_by_key(|(token, _)| *token);
        }
        let weights: Vec<f64> = likely.iter().map(|(_, l)| weight(*l)).collect();
        let block = CounterRng::for_name(self.seed, "generate").block(n, 0);
        let uniform = (u64::from(block[0]) << 21 ^ u64::from(block[1]) >> 11) as f64 / (1u64 << 53) as f64;
        let mut left = uniform * weights.iter().sum::<f64>();
        let chosen = weights.iter().position(|w| {
            left -= w;
            left < 0.0
        });
        // Rounding may leave the last token's share empty.
        Some(chosen.map_or(best.0, |i| likely[i].0))
    }
}

/// A language model on one backend.
pub struct Generator {
    backend: Arc<dyn Backend>,
    model: SavedModel,
    tokenizer: Tokenizer,
    /// The bytes of each token that both the tokenizer and the model know.
    bytes: Vec<Vec<u8>>,
    held: BTreeMap<String, Tensor>,
    /// The memory of the text, for a model that can have one.
    continuation: Option<Continuation>,
    /// The graphs of this model that read a whole text at once, by number of tokens.
    graphs: BTreeMap<usize, LastToken>,
    /// The most tokens that such a graph reads.
    window: usize,
}

/// The network of a model from `torch.export`; `None` for another one.
fn imported(model: &SavedModel) -> Result<Option<LastToken>, WorkbenchError> {
    let Family::Imported { file, loss } = &model.network.family else { return Ok(None) };
    let open = |samples| {
        let options =
            ImportOptions { batch_size: Some(samples), loss: loss.clone(), results: true, ..Default::default() };
        ImportedModel::open(file, None, options)
    };
    let opened = match open(1) {
        Err(WorkbenchError::Import(ImportError::BatchSize { exported: exported @ 1.., .. })) => open(exported),
        opened => opened,
    };
    let graph = opened?.into_imported().graph;
    LastToken::new(graph).map(Some).map_err(|e| not_language(model, &e))
}

/// The error for a model that continues no text.
fn not_language(model: &SavedModel, reason: &NotLanguage) -> WorkbenchError {
    let hint = "`generate` takes a language model whose forward returns logits of the shape [samples, tokens, vocabulary], \
                or a cross-entropy of them. Others generate in PyTorch: `fusionllm export --format pt2-weights` writes \
                their weights";
    WorkbenchError::input_with_hint(format!("{}: {reason}", model.path().display()), hint)
}

/// Lengths are rounded up to a multiple of this, so that few graphs serve all lengths.
const STRIDE: usize = 64;

impl Generator {
    /// Loads a model. `tokenizer` is used if the model does not name one.
    ///
    /// # Errors
    ///
    /// The model writes no text, its tokenizer is unknown, or its checkpoint is damaged.
    pub fn new(
        model: SavedModel,
        backend: Arc<dyn Backend>,
        tokenizer: Option<Tokenizer>,
    ) -> Result<Self, WorkbenchError> {
        let place = model.path().to_owned();
        let fail = |message: &str, hint: &str| {
            Err(WorkbenchError::input_with_hint(format!("{}: {message}", place.display()), hint))
        };
        let decoder = model.network.family.decoder()?;
        let imported = imported(&model)?;
        let size = match (&decoder, &imported) {
            (Some(decoder), _) => decoder.vocab_size,
            (None, Some(imported)) => imported.vocabulary(),
            (None, None) => {
                return fail(
                    "this model classifies images and writes no text",
                    "give a checkpoint of a language model",
                );
            }
        };
        let Some(tokenizer) = tokenizer.or_else(|| model.network.tokenizer.clone()) else {
            return fail(
                &format!("a vocabulary of {size} tokens is neither GPT-2's nor that of bytes"),
                "name the tokenizer: --tokenizer bytes, --tokenizer gpt2, or the path of a tokenizer.json",
            );
        };
        let known = 0..size.min(tokenizer.vocabulary()) as u32;
        let bytes = known.map(|token| tokenizer.bytes(token).unwrap_or_default()).collect();
        let continuation = decoder.map(|decoder| Continuation::new(backend.clone(), decoder.into_owned()));
        let window = imported.as_ref().map_or(model.network.context, |imported| imported.window);
        let graphs = imported.into_iter().map(|imported| (imported.window, imported)).collect();
        let held = BTreeMap::new();
        let mut generator = Self { continuation, backend, tokenizer, bytes, held, graphs, window, model };
        generator.load()?;
        if generator.continuation.is_none() && !generator.looks_back()? {
            return fail(
                "this model reads the tokens after the one that it predicts from, so it continues no text",
                "give a checkpoint of a causal language model",
            );
        }
        Ok(generator)
    }

    /// Whether what follows a token leaves its logits as they are.
    fn looks_back(&mut self) -> Result<bool, WorkbenchError> {
        let first = &[0][..];
        let [one, other] = [0, 1].map(|padding| self.row(first, padding));
        let (one, other) = (one?, other?);
        let largest = one.iter().fold(f32::MIN_POSITIVE, |most, x| most.max(x.abs()));
        Ok(one.iter().zip(&other).all(|(a, b)| (a - b).abs() <= 1e-4 * largest))
    }

    /// Uploads parameters, buffers and constants.
    fn load(&mut self) -> Result<(), WorkbenchError> {
        let whole;
        let graph = match self.graphs.values().next() {
            Some(imported) => &imported.graph,
            None => {
                whole = forward(&self.model.network.family, 1, 1)?.evaluation()?;
                &whole
            }
        };
        for v in &graph.values {
            let tensor = match v.kind {
                ref kind if kind.init().is_some() => self.model.read(&v.name, &v.ty)?,
                _ => continue,
            };
            self.held.insert(v.name.clone(), self.backend.upload(&tensor)?);
        }
        Ok(())
    }

    /// Continues `prompt` by up to `tokens` tokens, or until the text ends or has one of the texts `stop` in it, which
    /// it ends before. `read` gets the new text piece by piece, and returns whether it wants more. Returns the number
    /// of tokens.
    ///
    /// # Errors
    ///
    /// The prompt has tokens that the model does not know, the logits are not numbers, or a kernel fails.
    pub fn generate(
        &mut self,
        prompt: &str,
        sampling: &Sampling,
        tokens: usize,
        stop: &[String],
        read: impl FnMut(&str) -> bool,
    ) -> Result<usize, WorkbenchError> {
        let mut text = [self.tokenizer.opening(), &self.tokenizer.encode(prompt)?].concat();
        if text.is_empty() {
            // The model needs a token to start from.
            match self.tokenizer.start_of_text().or(self.tokenizer.end_of_text()) {
                Some(token) => text.push(token),
                None => text = self.tokenizer.encode("\n")?,
            }
        }
        self.go_on(text, sampling, tokens, stop, read)
    }

    /// Answers a conversation that the model's template has written: like [`Self::generate`], but texts of special tokens
    /// in `prompt` are such tokens, and nothing comes before it.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::generate`].
    pub fn answer(
        &mut self,
        prompt: &str,
        sampling: &Sampling,
        tokens: usize,
        read: impl FnMut(&str) -> bool,
    ) -> Result<usize, WorkbenchError> {
        let text = self.tokenizer.encode_with_special(prompt)?;
        self.go_on(text, sampling, tokens, &[], read)
    }

    fn go_on(
        &mut self,
        mut text: Vec<u32>,
        sampling: &Sampling,
        tokens: usize,
        stop: &[String],
        mut read: impl FnMut(&str) -> bool,
    ) -> Result<usize, WorkbenchError> {
        if let Some(unknown) = text.iter().find(|t| **t as usize >= self.bytes.len()) {
            return Err(WorkbenchError::input_with_hint(
                format!(
                    "the prompt has {:?} in it (token {unknown}), but the model's vocabulary ends at {}",
                    self.tokenizer.decode(&[*unknown]),
                    self.bytes.len()
                ),
                "leave it out, or use the model's own tokenizer",
            ));
        }
        let (mut letters, mut pieces) = (Letters::default(), Pieces { stop, held: String::new() });
        let mut written = tokens;
        for n in 0..tokens {
            let mut logits = self.logits(&text)?;
            self.keep_to_utf8(&letters, &mut logits);
            let token = sampling
                .choose(&logits, n as u64)
                .ok_or_else(|| WorkbenchError::Diverged { path: self.model.path().to_owned() })?;
            if self.tokenizer.ends().contains(&token) {
                written = n;
                break;
            }
            text.push(token);
            let (piece, more) = pieces.push(&letters.push(&self.bytes[token as usize]));
            if !read(&piece) || !more {
                return Ok(n + 1);
            }
        }
        read(&pieces.held);
        Ok(written)
    }

    /// Rules out tokens whose bytes cannot follow, unless none can: a model that has seen little takes one in the
    /// middle of a character, or a half of one.
    fn keep_to_utf8(&self, letters: &Letters, logits: &mut [f32]) {
        let takes: Vec<bool> = self.bytes.iter().zip(&*logits).map(|(b, l)| !l.is_nan() && letters.takes(b)).collect();
        if takes.contains(&true) {
            logits.iter_mut().zip(takes).filter(|(_, takes)| !takes).for_each(|(l, _)| *l = f32::NEG_INFINITY);
        }
    }

    /// The logits of the token after `text`, which is not empty.
    fn logits(&mut self, text: &[u32]) -> Result<Vec<f32>, WorkbenchError> {
        if let Some(continuation) = &mut self.continuation
            && let Some(logits) = continuation.logits(&self.held, text)?
        {
            return self.numbers(&logits);
        }
        // Attention looks back only, so padding after the last token changes nothing.
        self.row(&text[text.len().saturating_sub(self.window)..], 0)
    }

    /// The logits after the last token of `seen`, which is no longer than the window.
    fn row(&mut self, seen: &[u32], padding: i64) -> Result<Vec<f32>, WorkbenchError> {
        let length = match self.continuation {
            Some(_) => seen.len().next_multiple_of(STRIDE).min(self.window),
            // An archive has one length.
            None => self.window,
        };
        if !self.graphs.contains_key(&length) {
            let forward = forward(&self.model.network.family, 1, length)?;
            let last = LastToken::new(forward).map_err(|e| not_language(&self.model, &e))?;
            self.graphs.insert(length, last);
        }
        let last = &self.graphs[&length];
        let mut sources = BTreeMap::from([
            (last.ids, self.backend.upload(&last.rows(seen, padding)?)?),
            (last.position, self.backend.upload(&HostTensor::from_i64([1], &[seen.len() as i64 - 1])?)?),
        ]);
        for (input, tensor) in &last.filled {
            sources.insert(*input, self.backend.upload(tensor)?);
        }
        for (i, value) in last.graph.values.iter().enumerate() {
            if let Some(tensor) = self.held.get(&value.name) {
                sources.insert(ValueId(i as u32), tensor.clone());
            } else if let Some(constant) = last.graph.constants.get(&value.name) {
                sources.insert(ValueId(i as u32), self.backend.upload(constant)?);
            }
        }
        let logits = interpret(&*self.backend, &last.graph, sources, &[last.logits])?;
        logits.first().map_or_else(|| Ok(Vec::new()), |logits| self.numbers(logits))
    }

    /// The logits of the tokens that the tokenizer knows.
    fn numbers(&self, logits: &Tensor) -> Result<Vec<f32>, WorkbenchError> {
        let logits = self.backend.download(logits)?.cast(DType::F32)?;
        let mut logits = logits.to_f32_exact().unwrap_or_default();
        logits.truncate(self.bytes.len());
        Ok(logits)
    }
}

/// Looks for texts that end another one. It keeps what may be the beginning of such a text.
struct Pieces<'a> {
    stop: &'a [String],
    held: String,
}

impl Pieces<'_> {
    /// Adds a piece. Returns the text that comes before any stop, and whether there may be more of it.
    fn push(&mut self, piece: &str) -> (String, bool) {
        self.held += piece;
        let stop = self.stop.iter().filter(|stop| !stop.is_empty());
        if let Some(at) = stop.clone().filter_map(|stop| self.held.find(stop.as_str())).min() {
            return (self.held[..at].to_owned(), false);
        }
        let begins = |at: &usize| stop.clone().any(|stop| stop.starts_with(&self.held[*at..]));
        let at = self.held.char_indices().map(|(at, _)| at).find(begins).unwrap_or(self.held.len());
        let rest = self.held.split_off(at);
        (std::mem::replace(&mut self.held, rest), true)
    }
}

/// Turns bytes into text. It keeps an incomplete character until its last byte comes.
#[derive(Debug, Default)]
struct Letters {
    held: Vec<u8>,
}

impl Letters {
    /// Whether the text with these bytes after it is the beginning of a text in UTF-8.
    fn takes(&self, bytes: &[u8]) -> bool {
        let begins = |bytes: &[u8]| std::str::from_utf8(bytes).err().is_none_or(|e| e.error_len().is_none());
        if self.held.is_empty() { begins(bytes) } else { begins(&[&self.held, bytes].concat()) }
    }

    fn push(&mut self, bytes: &[u8]) -> String {
        self.held.extend_from_slice(bytes);
        let mut text = String::new();
        loop {
            match std::str::from_utf8(&self.held) {
                Ok(rest) => {
                    text += rest;
                    self.held.clear();
                    return text;
                }
                Err(e) => {
                    let (valid, rest) = self.held.split_at(e.valid_up_to());
                    text += &String::from_utf8_lossy(valid);
                    let Some(wrong) = e.error_len() else {
                        self.held = rest.to_vec();
                        return text;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    self.held = rest[wrong..].to_vec();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use fusionllm_graph::{Advice, ValueKind};
    use fusionllm_models::Gpt2Config;
    use fusionllm_workspace::checkpoint::{Checkpoints, Part, State};
    use safetensors::tensor::{Dtype, TensorView};

    use super::*;
    use crate::model::export::config_json;

    /// A network of random weights, as Hugging Face publishes them, and its tensors.
    fn published(dir: &std::path::Path, config: &Gpt2Config) -> BTreeMap<String, HostTensor> {
        fs::write(dir.join("config.json"), config_json(config, None).to_string()).unwrap();
        let graph = config.build(1, 1, DType::F32).unwrap();
        let draw = |v: &fusionllm_graph::Value| match &v.kind {
            ValueKind::Parameter(init) => Some((v.name.clone(), init.draw(3, &v.name, &v.ty).unwrap())),
            _ => None,
        };
        let tensors: BTreeMap<String, HostTensor> = graph.values.iter().filter_map(draw).collect();
        let views: Vec<(&String, TensorView<'_>)> = tensors
            .iter()
            .map(|(name, t)| (name, TensorView::new(Dtype::F32, t.shape().to_vec(), t.bytes()).unwrap()))
            .collect();
        safetensors::serialize_to_file(views, None, &dir.join("model.safetensors")).unwrap();
        tensors
    }

    /// The logits at the last position of the whole graph.
    fn plainly(config: &Gpt2Config, tensors: &BTreeMap<String, HostTensor>, text: &[u32]) -> Vec<f32> {
        let backend = fusionllm_backend::open("cpu").unwrap();
        let graph = config.build(1, text.len(), DType::F32).unwrap().evaluation().unwrap();
        let ids: Vec<i64> = text.iter().map(|t| i64::from(*t)).collect();
        let ids = HostTensor::from_i64([1, text.len()], &ids).unwrap();
        let given = tensors.iter().map(|(name, t)| (graph.find(name).unwrap(), t));
        let given = given.chain([(graph.find("input_ids").unwrap(), &ids)]);
        let sources = given.map(|(v, t)| (v, backend.upload(t).unwrap())).collect();
        let logits = interpret(&*backend, &graph, sources, &[graph.outputs["logits"]]).unwrap();
        let all = backend.download(&logits[0]).unwrap().to_f32_exact().unwrap();
        all[all.len() - config.vocab_size..].to_vec()
    }

    /// Keeping keys and values of short texts and sliding over long ones do not change the logits.
    #[test]
    fn logits_are_those_of_the_whole_graph() {
        let dir = tempfile::tempdir().unwrap();
        let config = Gpt2Config {
            vocab_size: 256,
            n_positions: 80,
            n_embd: 16,
            n_layer: 2,
            n_head: 2,
            initializer_range: 0.5,
            ..Gpt2Config::default()
        };
        let tensors = published(dir.path(), &config);
        let model = SavedModel::open(dir.path(), None).unwrap();
        let backend = fusionllm_backend::open("cpu").unwrap();
        let mut generator = Generator::new(model, backend, None).unwrap();
        let text: Vec<u32> = (0..200).map(|i| i * 37 % 256).collect();
        for length in [1, 63, 64, 65, 80, 81, 200] {
            let got = generator.logits(&text[..length]).unwrap();
            let want = plainly(&config, &tensors, &text[length.saturating_sub(80)..length]);
            assert_eq!(got.len(), 256);
            let far = got.iter().zip(&want).map(|(g, w)| (g - w).abs()).fold(0.0, f32::max);
            assert!(far < 1e-4, "{far} after {length} tokens");
        }
        assert_eq!(generator.graphs.len(), 1, "texts beyond the model's positions have one graph");

        let sampling = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 2 };
        let mut write = |tokens, more: &mut dyn FnMut(&str) -> bool| {
            generator.generate("Once", &sampling, tokens, &[], more).unwrap()
        };
        let mut whole = String::new();
        let count = write(20, &mut |piece| {
            whole += piece;
            true
        });
        assert_eq!(count, 20);
        // Random weights like any byte, and half of them begin no character.
        assert!(!whole.is_ascii() && !whole.contains(char::REPLACEMENT_CHARACTER), "{whole:?}");
        let mut begun = String::new();
        let count = write(20, &mut |piece| {
            begun += piece;
            begun.len() < 5
        });
        assert!(count < 20 && whole.starts_with(&begun), "{begun:?} begins {whole:?}");
    }

    #[test]
    fn prompts_beyond_the_vocabulary_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let config =
            Gpt2Config { vocab_size: 100, n_positions: 8, n_embd: 8, n_layer: 1, n_head: 1, ..Default::default() };
        published(dir.path(), &config);
        let backend = fusionllm_backend::open("cpu").unwrap();
        let open = |tokenizer| Generator::new(SavedModel::open(dir.path(), None).unwrap(), backend.clone(), tokenizer);
        let unknown = open(None).err().unwrap().report();
        assert!(unknown.contains("100 tokens is neither") && unknown.contains("--tokenizer bytes"), "{unknown}");
        let mut generator = open(Some(Tokenizer::Bytes)).unwrap();
        let sampling = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 2 };
        let error = generator.generate("Ax", &sampling, 9, &[], |_| true).unwrap_err().to_string();
        assert!(error.contains(r#"the prompt has "x" in it (token 120)"#), "{error}");
        // No token is chosen that the tokenizer cannot decode. An empty prompt starts from the start token.
        assert_eq!(generator.generate("", &sampling, 9, &[], |_| true).unwrap(), 9);
    }

    /// A checkpoint of an archive of `testdata/zoo`, with the archive's own weights.
    fn trained(dir: &std::path::Path, name: &str) -> SavedModel {
        let archive = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../testdata/zoo/{name}.pt2"));
        fs::write(dir.join("job.toml"), format!("[model]\nfile = '{}'\n", archive.display())).unwrap();
        let mut model = ImportedModel::open(&archive, None, ImportOptions::default()).unwrap();
        let graph = model.imported().graph.clone();
        let state: Vec<_> = graph.parameters().chain(graph.buffers()).map(|v| graph.value(v)).collect();
        let types: Vec<_> = state.iter().map(|value| (value.name.clone(), value.ty.clone())).collect();
        let mut checkpoint = Checkpoints::new(dir.join("checkpoints")).begin(1, &types, &[]).unwrap();
        for value in state {
            checkpoint.put(Part::Model, &value.name, &model.initial(value).unwrap()).unwrap();
        }
        checkpoint.commit(State { step: 1, ..State::default() }).unwrap();
        SavedModel::open(dir, None).unwrap()
    }

    /// The archives return a loss alone, for two samples of 16 tokens.
    #[test]
    fn imported_models_continue_a_text() {
        let backend = fusionllm_backend::open("cpu").unwrap();
        for name in ["gpt2", "llama", "opt"] {
            let dir = tempfile::tempdir().unwrap();
            let mut generator =
                Generator::new(trained(dir.path(), name), backend.clone(), Some(Tokenizer::Bytes)).unwrap();
            assert_eq!((generator.window, generator.bytes.len()), (16, 100));
            if name == "gpt2" {
                let zoo = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/zoo");
                let config = fs::read(zoo.join("gpt2.config.json")).unwrap();
                let config: Gpt2Config = serde_json::from_slice(&config).unwrap();
                let graph = config.build(1, 1, DType::F32).unwrap();
                let weights = fusionllm_data::weights::Weights::open(&zoo.join("gpt2.weights.safetensors")).unwrap();
                let tensors = graph.state().map(|tensor| {
                    let read = weights.state_tensor(&tensor).unwrap().unwrap();
                    (tensor.names[0].clone(), read)
                });
                let tensors = tensors.collect();
                let text: Vec<u32> = (0..40).map(|i| i * 37 % 100).collect();
                for length in [1, 5, 16, 17, 40] {
                    let got = generator.logits(&text[..length]).unwrap();
                    let want = plainly(&config, &tensors, &text[length.saturating_sub(16)..length]);
                    let far = got.iter().zip(&want).map(|(g, w)| (g - w).abs()).fold(0.0, f32::max);
                    assert!(far < 1e-4, "{far} after {length} tokens");
                }
            }
            let sampling = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 2 };
            assert_eq!(generator.generate("AB", &sampling, 20, &[], |_| true).unwrap(), 20);
        }
    }

    #[test]
    fn imported_models_that_continue_no_text_are_refused() {
        let backend = fusionllm_backend::open("cpu").unwrap();
        let error = |name| {
            let dir = tempfile::tempdir().unwrap();
            let generator = Generator::new(trained(dir.path(), name), backend.clone(), Some(Tokenizer::Bytes));
            generator.err().unwrap().report().replace(&dir.path().display().to_string(), "DIR")
        };
        insta::assert_snapshot!(error("bert"), @r"
        DIR/checkpoints/step-1: this model reads the tokens after the one that it predicts from, so it continues no text
        hint: give a checkpoint of a causal language model
        ");
        insta::assert_snapshot!(error("resnet_tiny"), @r"
        DIR/checkpoints/step-1: the model has no logits for each of its tokens
        hint: `generate` takes a language model whose forward returns logits of the shape [samples, tokens, vocabulary], or a cross-entropy of them. Others generate in PyTorch: `fusionllm export --format pt2-weights` writes their weights
        ");
    }

    fn choices(sampling: Sampling, logits: &[f32]) -> Vec<u32> {
        (0..10_000).map(|n| sampling.choose(logits, n).unwrap()).collect()
    }

    fn shares(tokens: &[u32], vocabulary: u32) -> Vec<f64> {
        let count = |t| tokens.iter().filter(|x| **x == t).count() as f64 / tokens.len() as f64;
        (0..vocabulary).map(count).collect()
    }

    /// With logits ln 1, ln 2 and ln 4 the probabilities are 1/7, 2/7 and 4/7. At temperature 1/2 the weights are
    /// squared: 1/21, 4/21 and 16/21.
    #[test]
    fn tokens_come_as_often_as_they_are_likely() {
        let logits = [1f32.ln(), 2f32.ln(), 4f32.ln()];
        let near = |got: Vec<f64>, want: [f64; 3]| {
            assert!(got.iter().zip(want).all(|(g, w)| (g - w).abs() < 0.015), "{got:?} is not {want:?}");
        };
        let plain = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 5 };
        near(shares(&choices(plain, &logits), 3), [1.0 / 7.0, 2.0 / 7.0, 4.0 / 7.0]);
        let cold = Sampling { temperature: 0.5, ..plain };
        near(shares(&choices(cold, &logits), 3), [1.0 / 21.0, 4.0 / 21.0, 16.0 / 21.0]);
        let two = Sampling { top_k: 2, ..plain };
        near(shares(&choices(two, &logits), 3), [0.0, 1.0 / 3.0, 2.0 / 3.0]);
        assert_eq!(choices(Sampling { top_k: 3, ..plain }, &logits), choices(plain, &logits));
        // The first two of the tokens have the share, and the first alone has not.
        assert_eq!(choices(Sampling { top_p: 0.7, ..plain }, &logits), choices(two, &logits));
        assert_eq!(
            choices(Sampling { top_p: 0.1, ..plain }, &logits),
            choices(Sampling { top_k: 1, ..plain }, &logits)
        );
        assert_eq!(choices(plain, &logits), choices(plain, &logits));
        assert_ne!(choices(plain, &logits), choices(Sampling { seed: 6, ..plain }, &logits));
    }

    #[test]
    fn the_likeliest_token_is_the_first_of_its_equals() {
        let logits = [0.0, 3.0, f32::NAN, 3.0, f32::NEG_INFINITY];
        let greedy = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 1 };
        assert_eq!(greedy.choose(&logits, 0), Some(1));
        let one = Sampling { temperature: 1.0, top_k: 1, top_p: 1.0, seed: 1 };
        assert!(choices(one, &logits).iter().all(|t| *t == 1));
        assert_eq!(one.choose(&[f32::INFINITY, 0.0], 0), Some(0));
        assert_eq!(one.choose(&[f32::NAN, f32::NEG_INFINITY], 0), None);
        assert_eq!(one.choose(&[], 0), None);
    }

    #[test]
    fn texts_end_before_a_stop() {
        let stop = ["\n\n".to_owned(), "User:".to_owned(), String::new()];
        let read = |text: &str| {
            let mut pieces = Pieces { stop: &stop, held: String::new() };
            let mut shown = String::new();
            for letter in text.chars() {
                let (piece, more) = pieces.push(&letter.to_string());
                shown += &piece;
                if !more {
                    return (shown, true);
                }
            }
            (shown + &pieces.held, false)
        };
        assert_eq!(read("one\ntwo\n\nthree"), ("one\ntwo".to_owned(), true));
        assert_eq!(read("an UUser: x"), ("an U".to_owned(), true));
        assert_eq!(read("é Use\n"), ("é Use\n".to_owned(), false));
        let mut pieces = Pieces { stop: &stop, held: String::new() };
        assert_eq!(pieces.push("a\n"), ("a".to_owned(), true));
        assert_eq!(pieces.push("\n\nUser:"), (String::new(), false));
    }

    #[test]
    fn letters_come_whole() {
        let text = "a é 日本 🦀.";
        let mut letters = Letters::default();
        let mut pieces: Vec<String> = text.bytes().map(|b| letters.push(&[b])).collect();
        assert!(pieces.iter().all(|p| p.chars().count() <= 1));
        assert_eq!(pieces.concat(), text);
        pieces = [b"x\xffy\xe6".as_slice(), b"\x97z\xf0\x9f"].iter().map(|b| letters.push(b)).collect();
        assert_eq!(pieces, ["x\u{fffd}y", "\u{fffd}z"]);
        // Half a crab.
        assert!(
            letters.takes(b"\xa6") && letters.takes(b"\xa6\x80.") && !letters.takes(b"\xa6.") && !letters.takes(b"a")
        );
        assert!(Letters::default().takes(b"\xf0\x9f") && !Letters::default().takes(b"\x9f"));
    }
}
