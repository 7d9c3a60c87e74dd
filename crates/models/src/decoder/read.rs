//! From a `config.json` to a decoder, by the table of its family.

use serde_json::{Map, Value};

use super::config::{ConfigError, Keys};
use super::families::{FAMILIES, Family, Given, HARMLESS, MODEL_TYPES, RotaryKeys, Windows};
use super::rotary::{Rotary, Scaling};
use super::{Attention, Decoder, Layer, Mlp, Norm, Projections};
use crate::Activation;

/// The most layers of a model.
const MAX_LAYERS: usize = 10_000;

impl Decoder {
    /// Reads a `config.json`, as [`serde_json`] parses it.
    ///
    /// # Errors
    ///
    /// The family is unknown, a value is missing or invalid, or a key is not understood.
    pub fn from_config(config: &Map<String, Value>) -> Result<Self, ConfigError> {
        let keys = Keys::new("", Some(config));
        let model_type = keys.text("model_type")?;
        let family = FAMILIES.into_iter().find(|family| Some(family.model_type) == model_type).ok_or_else(|| {
            let message = match model_type {
                Some(name) => format!("the family {name:?} is not known"),
                None => "`model_type` is missing".to_owned(),
            };
            let known = MODEL_TYPES.join(", ");
            let hint = format!("the families are gpt2, {known}; export another model with torch.export");
            ConfigError::new("model_type", message, hint)
        })?;
        let decoder = family.read(&keys, config)?;
        keys.finish(&[&HARMLESS, family.harmless].concat())?;
        Ok(decoder)
    }

    /// The longest sequence that the graph is made for, in tokens.
    pub fn longest(&self) -> usize {
        let scaled = |layer: &Layer| match layer.rotary.as_ref().map(|rotary| &rotary.scaling) {
            // These kinds extend the positions of the first training, which `max_position_embeddings` may still be.
            Some(Scaling::Linear { factor } | Scaling::Dynamic { factor, .. }) => {
                (self.max_positions as f64 * factor) as usize
            }
            _ => self.max_positions,
        };
        self.layers.iter().map(scaled).max().unwrap_or(self.max_positions)
    }

    /// The names under which a checkpoint may have a parameter.
    pub fn checkpoint_names(&self, parameter: &str) -> Vec<String> {
        let [embedding, head] = [self.names.embedding, self.names.head].map(|module| format!("{module}.weight"));
        if self.tie_word_embeddings && parameter == embedding {
            return vec![embedding, head];
        }
        vec![parameter.to_owned()]
    }
}

impl Given {
    fn read<'a>(self, keys: &Keys<'a>) -> Result<bool, ConfigError> {
        match self {
            Self::Never => Ok(false),
            Self::Always => Ok(true),
            Self::ByKey(key, default) => Ok(keys.flag(key)?.unwrap_or(default)),
        }
    }
}

impl Family {
    fn read(&'static self, keys: &Keys<'_>, config: &Map<String, Value>) -> Result<Decoder, ConfigError> {
        let hidden_size = keys.needed("hidden_size")?;
        let heads = keys.needed("num_attention_heads")?;
        let key_value_heads = match self.names.projections {
            Projections::ByHead(_) => heads,
            _ if keys.is_null("num_key_value_heads") => heads,
            _ => keys.size("num_key_value_heads")?.or(self.key_value_heads).unwrap_or(heads),
        };
        if heads % key_value_heads != 0 {
            return Err(keys.wrong("num_key_value_heads", &format!("a divisor of `num_attention_heads` = {heads}")));
        }
        let named = if self.names_head_dim { keys.size("head_dim")?.or(self.head_dim) } else { None };
        let head_dim = match named {
            Some(width) => width,
            None if hidden_size % heads == 0 => hidden_size / heads,
            None => {
                return Err(keys.wrong("hidden_size", &format!("a multiple of `num_attention_heads` = {heads}")));
            }
        };
        let max_positions = keys.needed("max_position_embeddings")?;
        let (activation_key, activation) = self.activation;
        let activation = keys.text(activation_key)?.unwrap_or(activation);
        let activation = Activation::named(activation).ok_or_else(|| {
            let known: Vec<&str> = Activation::NAMES.iter().map(|(name, _)| *name).collect();
            keys.wrong(activation_key, &format!("one of {}", known.join(", ")))
        })?;
        let scalar = match self.query_scalar {
            Some(default) => keys.positive("query_pre_attn_scalar")?.unwrap_or(default),
            None => head_dim as f64,
        };
        let [attention_cap, logit_cap] = self.soft_caps(keys)?;
        let vocab_size = keys.needed("vocab_size")?;
        let residual = self.residual_dropout.map(|(key, _)| keys.dropout(key)).transpose()?.unwrap_or(0.0);
        if keys.flag("use_bidirectional_attention")? == Some(true) {
            return Err(keys.wrong("use_bidirectional_attention", "false, for a model that writes text"));
        }
        let initializer_range = keys.positive("initializer_range")?.unwrap_or(0.02);
        Ok(Decoder {
            config: config.clone(),
            model_type: self.model_type,
            vocab_size,
            hidden_size,
            intermediate_size: keys.needed("intermediate_size")?,
            max_positions,
            layers: self.layers(keys, head_dim, max_positions)?,
            norm: Norm { kind: self.norm, eps: keys.positive(self.norm_eps.0)?.unwrap_or(self.norm_eps.1) },
            attention: Attention {
                heads,
                key_value_heads,
                head_dim,
                scale: 1.0 / scalar.sqrt(),
                soft_cap: attention_cap,
                input_bias: self.input_bias.read(keys)?,
                output_bias: self.output_bias.read(keys)?,
                query_key_norm: self.query_key_norm,
                dropout: keys.dropout("attention_dropout")?,
                fused: true,
            },
            mlp: Mlp { activation, bias: self.mlp_bias.read(keys)? },
            parallel: self.parallel && keys.flag("use_parallel_residual")?.unwrap_or(true),
            embedding_scale: if self.scaled_embedding { (hidden_size as f64).sqrt() } else { 1.0 },
            padding_idx: self.padding(keys, vocab_size)?,
            logit_soft_cap: logit_cap,
            tie_word_embeddings: keys.flag("tie_word_embeddings")?.unwrap_or(self.tied),
            embedding_dropout: self.residual_dropout.filter(|(_, embeddings)| *embeddings).map_or(0.0, |_| residual),
            residual_dropout: residual,
            initializer_range,
            residual_initializer_range: initializer_range,
            names: &self.names,
        })
    }

    fn soft_caps(&self, keys: &Keys<'_>) -> Result<[Option<f64>; 2], ConfigError> {
        let Some([attention, logits]) = self.soft_caps else { return Ok([None; 2]) };
        let cap = |key, default: Option<f64>| match keys.is_null(key) {
            true => Ok(None),
            false => Ok(keys.positive(key)?.or(default)),
        };
        Ok([cap("attn_logit_softcapping", attention)?, cap("final_logit_softcapping", logits)?])
    }

    fn padding(&self, keys: &Keys<'_>, vocabulary: usize) -> Result<Option<usize>, ConfigError> {
        let Some(default) = self.padding else { return Ok(None) };
        let must = "a number of a token, or null";
        let padding = keys.number("pad_token_id", must, |n| n.fract() == 0.0 && n < vocabulary as f64)?;
        Ok(match padding {
            // PyTorch counts a negative one from the end.
            Some(n) if n < 0.0 => vocabulary.checked_sub(-n as usize),
            Some(n) => Some(n as usize),
            None if keys.is_null("pad_token_id") => None,
            None => default.filter(|n| *n < vocabulary),
        })
    }

    fn layers(&self, keys: &Keys<'_>, head_dim: usize, max_positions: usize) -> Result<Vec<Layer>, ConfigError> {
        let count = keys.needed("num_hidden_layers")?;
        if count > MAX_LAYERS {
            return Err(keys.wrong("num_hidden_layers", &format!("at most {MAX_LAYERS}")));
        }
        let turned = self.turned_layers(keys, count)?;
        let windows = self.windows(keys, &turned)?;
        let full = self.rotary.read(keys, head_dim, max_positions, false)?;
        let local = self.rotary.read(keys, head_dim, max_positions, true)?;
        let layer = |(turned, window): (bool, Option<usize>)| {
            let rotary = if window.is_some() { &local } else { &full };
            Layer { rotary: turned.then(|| rotary.clone()), window }
        };
        Ok(turned.into_iter().zip(windows).map(layer).collect())
    }

    /// Which layers have positions.
    fn turned_layers(&self, keys: &Keys<'_>, count: usize) -> Result<Vec<bool>, ConfigError> {
        if !self.rotary.may_be_left_out {
            return Ok(vec![true; count]);
        }
        let interval = keys.size("no_rope_layer_interval")?.unwrap_or(4);
        match keys.list("no_rope_layers", count)? {
            None => Ok((1..=count).map(|layer| layer % interval != 0).collect()),
            Some(list) => Ok(list.iter().map(|turned| turned.as_f64() != Some(0.0)).collect()),
        }
    }

    /// The window of each layer.
    fn windows(&self, keys: &Keys<'_>, turned: &[bool]) -> Result<Vec<Option<usize>>, ConfigError> {
        let count = turned.len();
        let size = |default| match keys.is_null("sliding_window") {
            true => Ok(None),
            false => Ok(keys.size("sliding_window")?.or(default)),
        };
        let (window, default): (_, Vec<bool>) = match self.windows {
            Windows::Never => return Ok(vec![None; count]),
            Windows::All(default) => return Ok(vec![size(default)?; count]),
            Windows::Upper => {
                let first = keys.number("max_window_layers", "a number of layers", |n| n >= 0.0)?.unwrap_or(28.0);
                let used = keys.flag("use_sliding_window")?.unwrap_or(false);
                let window = size(Some(4096))?.filter(|_| used);
                (window, (0..count).map(|layer| layer as f64 >= first).collect())
            }
            Windows::Between(key, default) => {
                let pattern = key.map(|key| keys.size(key)).transpose()?.flatten().unwrap_or(default);
                (size(Some(4096))?, (1..=count).map(|layer| layer % pattern != 0).collect())
            }
            Windows::WithoutPositions => {
                let used = keys.flag("use_sliding_window")?.unwrap_or(false);
                (size(None)?.filter(|_| used), turned.iter().map(|turned| !turned).collect())
            }
        };
        let slides = match keys.list("layer_types", count)? {
            None => default,
            Some(types) => {
                let slides = |kind: &Value| match kind.as_str() {
                    Some("sliding_attention") => Ok(true),
                    Some("full_attention") => Ok(false),
                    _ => Err(keys.wrong("layer_types", "a list of \"full_attention\" and \"sliding_attention\"")),
                };
                types.iter().map(slides).collect::<Result<_, _>>()?
            }
        };
        Ok(slides.into_iter().map(|slides| window.filter(|_| slides)).collect())
    }
}

/// The keys of `rope_parameters` besides those of its kind.
const ROTARY_KEYS: [&str; 4] = ["rope_type", "type", "rope_theta", "partial_rotary_factor"];

impl RotaryKeys {
    /// The embedding of layers with a window (`local`), or of the others.
    fn read(&self, keys: &Keys<'_>, head_dim: usize, max_positions: usize, local: bool) -> Result<Rotary, ConfigError> {
        let (theta_key, theta) = self.local_theta.filter(|_| local).unwrap_or(self.theta);
        let written = keys.positive(theta_key)?;
        let share = self.share.map(|(key, default)| Ok((keys.positive(key)?, default))).transpose()?;
        // Older versions of `transformers` write `rope_scaling`, and its values for layers without a window alone.
        let (new, old) = (keys.table("rope_parameters")?, keys.table("rope_scaling")?);
        let is_new = new.is_some();
        let mut scaling = new.or(old.filter(|_| !local || self.local_theta.is_none()));
        if let Some(table) = &scaling {
            let by_layer = if local { "sliding_attention" } else { "full_attention" };
            match table.table(by_layer)? {
                Some(own) => scaling = Some(own),
                None if is_new && self.local_theta.is_some() => scaling = None,
                None => {}
            }
        }
        let scaling = scaling.unwrap_or_else(|| Keys::new("rope_parameters", None));
        let theta = scaling.positive("rope_theta")?.or(written).unwrap_or(theta);
        let inner = scaling.number("partial_rotary_factor", "above 0 and at most 1", |x| x > 0.0 && x <= 1.0)?;
        let dims = match share {
            Some((outer, default)) => (head_dim as f64 * inner.or(outer).unwrap_or(default)) as usize,
            None if inner.is_some_and(|share| share != 1.0) => {
                return Err(scaling.wrong("partial_rotary_factor", "1 in this family"));
            }
            None => head_dim,
        };
        if dims == 0 || dims % 2 != 0 || dims > head_dim {
            let message = format!("rotary position embeddings turn {dims} of {head_dim} elements of a head");
            return Err(keys.error("head_dim", message, "the number must be even, above 0 and at most the head's"));
        }
        let scaling = self.scaling(keys, &scaling, dims, max_positions)?;
        Ok(Rotary { theta, dims, scaling })
    }

    fn scaling(
        &self,
        keys: &Keys<'_>,
        table: &Keys<'_>,
        dims: usize,
        max_positions: usize,
    ) -> Result<Scaling, ConfigError> {
        // Older files say `type`.
        let (new, old) = (table.text("rope_type")?, table.text("type")?);
        let factor = || table.number("factor", "a number of at least 1", |x| x >= 1.0);
        let needed = |key, value: Option<f64>| value.ok_or_else(|| table.missing(key));
        let outer = keys.size("original_max_position_embeddings")?.or(self.original);
        let positions = || Ok(outer.or(table.size("original_max_position_embeddings")?).unwrap_or(max_positions));
        let kind = match new.or(old).unwrap_or("default") {
            // Phi-3 had other names for its kind.
            "su" | "yarn" if self.original.is_some() => "longrope",
            kind => kind,
        };
        let scaling = match kind {
            "default" => Scaling::Default,
            "linear" => Scaling::Linear { factor: needed("factor", factor()?)? },
            "dynamic" => {
                // It has this key in some files, and does not read it.
                table.size("original_max_position_embeddings")?;
                if dims < 4 {
                    return Err(keys.wrong("head_dim", "at least 4 for dynamic rotary embeddings"));
                }
                Scaling::Dynamic { factor: needed("factor", factor()?)?, positions: max_positions }
            }
            "llama3" => {
                let [low, high] = ["low_freq_factor", "high_freq_factor"].map(|key| needed(key, table.positive(key)?));
                let (low_freq_factor, high_freq_factor) = (low?, high?);
                if low_freq_factor >= high_freq_factor {
                    return Err(table.wrong("high_freq_factor", "above `low_freq_factor`"));
                }
                let factor = needed("factor", factor()?)?;
                Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, positions: positions()? }
            }
            "yarn" => {
                let positions = positions()?;
                let factor = factor()?.unwrap_or(max_positions as f64 / positions as f64);
                let of_scale = |m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 };
                let (mscale, all) = (table.positive("mscale")?, table.positive("mscale_all_dim")?);
                let default = match (mscale, all) {
                    (Some(mscale), Some(all)) => of_scale(mscale) / of_scale(all),
                    _ => of_scale(1.0),
                };
                Scaling::Yarn {
                    factor,
                    attention_factor: table.positive("attention_factor")?.unwrap_or(default),
                    beta_fast: table.positive("beta_fast")?.unwrap_or(32.0),
                    beta_slow: table.positive("beta_slow")?.unwrap_or(1.0),
                    truncate: table.flag("truncate")?.unwrap_or(true),
                    positions,
                }
            }
            "longrope" => {
                let positions = positions()?;
                let factor = factor()?.unwrap_or(max_positions as f64 / positions as f64);
                let default = match factor <= 1.0 {
                    true => 1.0,
                    false => (1.0 + factor.ln() / (positions as f64).ln()).sqrt(),
                };
                let factors =
                    |key| table.positives(key, dims / 2)?.ok_or_else(|| table.wrong(key, "a list of numbers above 0"));
                Scaling::LongRope {
                    short_factor: factors("short_factor")?,
                    long_factor: factors("long_factor")?,
                    attention_factor: table.positive("attention_factor")?.unwrap_or(default),
                    positions,
                }
            }
            _ => {
                let key = if new.is_some() { "rope_type" } else { "type" };
                let known = "\"default\", \"linear\", \"dynamic\", \"llama3\", \"yarn\" or \"longrope\"";
                return Err(table.wrong(key, known));
            }
        };
        table.finish(&ROTARY_KEYS)?;
        Ok(scaling)
    }
}
