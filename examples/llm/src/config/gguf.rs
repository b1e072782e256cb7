//! The configuration in the metadata of a GGUF file.

use super::reader::Reader;
use super::rope::Yarn;
use super::{Config, LongRope, MOST_HEAD_DIM, Mixture, RopePairs, Window, activation, embedding_scale};
use crate::arch::{Arch, Routing};
use crate::error::{Error, Result};
use crate::files::ModelFiles;
use outcore_lab::planning::Declared;
use serde_json::Value;

impl Config {
    pub(super) fn from_gguf(model: &ModelFiles, meta: &Reader<'_>) -> Result<Self> {
        let name = meta.text("general.architecture")?;
        let arch = Arch::parse(name).map_err(|error| meta.said(&error))?;
        let key = |suffix: &str| format!("{name}.{suffix}");
        let declared = meta.declared()?;
        let mixes = if arch == Arch::Llama { None } else { Some(arch.is_mixture()) };
        let routing = meta.routing((arch, mixes), &declared, &key("expert_count"))?;
        let mixture = match routing {
            None => None,
            Some(routing) if arch == Arch::Glm4Moe => meta.gguf_glm_mixture(routing, &declared, name)?,
            Some(routing) => meta.mixture(routing, &declared, (routing.normalised[0], 1.0), Vec::new())?,
        };
        // Where another architecture has some, its key is refused.
        let prediction_layers = declared.prediction_layers as usize;
        if declared.key_dim != declared.value_dim {
            return Err(meta.unsupported("heads whose keys and values differ in length are not supported"));
        }
        let head_dim = declared.key_dim as usize;
        let rotary_key = key("rope.dimension_count");
        let rotary = meta.optional_size(&rotary_key, MOST_HEAD_DIM)?.unwrap_or(head_dim);
        let base = meta.positive(meta.map, &key("rope.freq_base"), 10_000.0)?;
        let mut rope_frequencies = meta.frequencies(base, rotary, head_dim)?;
        let mut rope_scale = 1.0;
        let context = meta.there(&key("context_length"), declared.context)?;
        let scaling = match meta.map.get(&key("rope.scaling.type")) {
            None => None,
            Some(_) => Some(meta.text(&key("rope.scaling.type"))?),
        };
        match scaling {
            Some("none") => {}
            // A factor without a type is linear too. The second key is an old name of the factor. 0 means that there is
            // none.
            None | Some("linear") => {
                let keys = [key("rope.scaling.factor"), key("rope.scale_linear")];
                let set = keys.iter().find(|key| meta.map.get(*key).is_some_and(|v| v.as_f64() != Some(0.0)));
                let factor = set.map_or(Ok(1.0), |key| meta.positive(meta.map, key, 1.0))? as f32;
                rope_frequencies.iter_mut().for_each(|f| *f /= factor);
            }
            Some("yarn") if arch != Arch::Phi3 => {
                let number = |name: &str, default: f64| meta.positive(meta.map, &key(name), default);
                let factor = meta.required(&key("rope.scaling.factor"))?;
                let yarn = Yarn {
                    factor,
                    base,
                    dim: rotary,
                    original_context: number("rope.scaling.original_context_length", context as f64)?,
                    beta_fast: number("rope.scaling.yarn_beta_fast", 32.0)?,
                    beta_slow: number("rope.scaling.yarn_beta_slow", 1.0)?,
                    truncate: true,
                };
                yarn.stretch(&mut rope_frequencies);
                rope_scale = yarn.magnitude();
            }
            Some("longrope") if arch == Arch::Phi3 => {
                let factor = key("rope.scaling.factor");
                if meta.map.get(&factor).is_some_and(|v| !matches!(v.as_f64(), Some(0.0 | 1.0))) {
                    let what = format!("{factor} beside rope scaling \"longrope\" is not supported");
                    return Err(meta.unsupported(&what));
                }
            }
            Some(other) => return Err(meta.unsupported(&format!("rope scaling {other:?} is not supported"))),
        }
        let mut rope_factors = Some("rope_freqs.weight").filter(|t| arch == Arch::Llama && model.tensor(t).is_some());
        let mut long_rope = None;
        if arch == Arch::Phi3 {
            rope_scale = meta.positive(meta.map, &key("rope.scaling.attn_factor"), 1.0)? as f32;
            let [short, long] = ["rope_factors_short.weight", "rope_factors_long.weight"];
            // A file with one of them lacks the other.
            if scaling == Some("longrope") || [short, long].into_iter().any(|t| model.tensor(t).is_some()) {
                let original = meta.optional_size(&key("rope.scaling.original_context_length"), usize::MAX)?;
                rope_factors = Some(short);
                long_rope = Some(LongRope {
                    original_context: original.unwrap_or(context),
                    frequencies: rope_frequencies.clone(),
                    factors: Some(long),
                });
            }
        }
        let window = meta.gguf_window(arch, name, declared.layers as usize)?;
        let window = window.map(|(tokens, layers)| -> Result<Window> {
            let base_key = key("rope.freq_base_swa");
            // Gemma 3 turns by other frequencies there, without scaling.
            let rope_frequencies = match (meta.map.get(&base_key), arch) {
                (None, Arch::Gemma3) => Some(meta.frequencies(10_000.0, rotary, head_dim)?),
                (Some(_), Arch::Gemma3) => Some(meta.frequencies(meta.required(&base_key)?, rotary, head_dim)?),
                (Some(_), _) if meta.required(&base_key)? != base => {
                    return Err(meta.unsupported(&format!("{base_key} is not {base}, as rope.freq_base is")));
                }
                _ => None,
            };
            Ok(Window { tokens, layers, rope_frequencies })
        });
        // The largest models of both take another scale, which files do not say.
        let (hidden, heads) = (declared.hidden as usize, declared.heads as usize);
        let largest = [(Arch::Gemma2, 46), (Arch::Gemma3, 62)].contains(&(arch, declared.layers));
        let scaled_by = if largest { hidden / heads } else { head_dim };
        let capped = arch == Arch::Gemma2;
        let cap = |name: &str, usual: f64| meta.cap(&key(name), capped.then_some(usual));
        let vocab = model.tensor("token_embd.weight").map(|t| t.rows as usize);
        Ok(Self {
            arch,
            dim: declared.hidden as usize,
            layers: declared.layers as usize - prediction_layers,
            prediction_layers,
            heads: declared.heads as usize,
            kv_heads: declared.kv_heads as usize,
            head_dim,
            ffn_dim: declared.ffn as usize,
            vocab: vocab.ok_or_else(|| Error::MissingTensor("token_embd.weight".into()))?,
            context,
            norm_eps: meta.required(&key("attention.layer_norm_rms_epsilon"))? as f32,
            rope_pairs: if arch == Arch::Llama { RopePairs::Adjacent } else { RopePairs::Halves },
            rope_frequencies,
            rope_scale,
            rope_factors,
            long_rope,
            window: window.transpose()?,
            attention_scale: 1.0 / (scaled_by as f32).sqrt(),
            attention_cap: cap("attn_logit_softcapping", 50.0)?,
            logit_cap: cap("final_logit_softcapping", 30.0)?,
            embedding_scale: embedding_scale(arch, hidden),
            // The converter has added it.
            norm_offset: 0.0,
            activation: activation(arch),
            bos: meta.token("tokenizer.ggml.bos_token_id")?,
            eos: meta.token("tokenizer.ggml.eos_token_id")?.into_iter().collect(),
            tied: false,
            biases: match arch {
                Arch::Qwen2 | Arch::Qwen2Moe => [Some(true), None, None],
                Arch::GptOss => [Some(true), Some(true), None],
                // In all layers or in none.
                Arch::Glm4Moe => [Some(model.tensor("blk.0.attn_q.bias").is_some()), Some(false), Some(false)],
                _ => [None; 3],
            },
            head_norms: match arch {
                Arch::Glm4Moe => model.tensor("blk.0.attn_q_norm.weight").is_some(),
                _ => arch.has_head_norms(),
            },
            mixture,
            weight_blocks: None,
            scale_bytes: 0,
        })
    }
}

impl Reader<'_> {
    /// The experts of a GLM, whose files say more of them than those of others.
    fn gguf_glm_mixture(&self, routing: Routing, declared: &Declared, name: &str) -> Result<Option<Mixture>> {
        let key = |suffix: &str| format!("{name}.{suffix}");
        let gating = key("expert_gating_func");
        // 0 stands for the architecture's own.
        if let Some(other) = self.optional_count(&gating, usize::MAX)?.filter(|kind| ![0, 2].contains(kind)) {
            return Err(self.unsupported(&format!("{gating} is {other}: supported is 2, which is a sigmoid")));
        }
        let normalised = self.truth(self.map, &key("expert_weights_norm"))?.unwrap_or(routing.normalised[0]);
        let scale = self.positive(self.map, &key("expert_weights_scale"), 1.0)?;
        let leading = self.optional_count(&key("leading_dense_block_count"), declared.layers as usize)?.unwrap_or(0);
        self.mixture(routing, declared, (normalised, scale), (0..leading).collect())
    }

    /// The tokens of the window that a GGUF file declares, and the layers that have it. Of architectures that have
    /// none, the caller refuses the key.
    fn gguf_window(&self, arch: Arch, name: &str, layers: usize) -> Result<Option<(usize, Vec<bool>)>> {
        let key = |suffix: &str| format!("{name}.attention.{suffix}");
        // Of so many layers the last sees all, if the file does not say; 0: none does. As llama.cpp has it, as the
        // window of Gemma 2; but llama.cpp leaves out the window of Phi-3.
        let (every, usual) = match arch {
            Arch::GptOss => (2, None),
            Arch::Gemma2 => (2, Some(4096)),
            Arch::Gemma3 => (6, None),
            Arch::Phi3 => (0, None),
            _ => return Ok(None),
        };
        let declared = self.optional_count(&key("sliding_window"), usize::MAX)?.or(usual);
        let Some(tokens) = declared.filter(|tokens| *tokens > 0) else { return Ok(None) };
        let pattern = key("sliding_window_pattern");
        let is_windowed = |every: usize| (0..layers).map(move |layer| every == 0 || layer % every != every - 1);
        let of_layers = match self.map.get(&pattern) {
            None | Some(Value::Null) => is_windowed(every).collect(),
            Some(Value::Array(all)) => {
                let said: Option<Vec<bool>> = all.iter().map(|value| value.as_bool()).collect();
                said.filter(|said| said.len() == layers)
                    .ok_or_else(|| self.bad(&format!("{pattern} has no truth value for each of {layers} layers")))?
            }
            Some(_) => is_windowed(self.optional_count(&pattern, usize::MAX)?.unwrap_or(every)).collect(),
        };
        Ok(Some((tokens, of_layers)))
    }
}
