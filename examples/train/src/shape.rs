//! The shape of a model: how many layers, how wide, and what its parameters are called. The names and the order of rows
//! are those of Llamas in transformers.

use outcore::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

/// A Llama-shaped decoder: RMS norms before attention and a gated feed-forward network, rotary positions, no biases.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// How many tokens there are.
    pub vocabulary: usize,
    /// How many layers.
    pub layers: usize,
    /// Elements of a token's vector between layers.
    pub width: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values: each serves as many heads of queries.
    pub kv_heads: usize,
    /// Elements between the two halves of the feed-forward network.
    pub hidden: usize,
    /// The base of the rotary positions' angles.
    pub rope_base: f64,
    /// What a norm adds to the mean of the squares.
    pub epsilon: f64,
    /// Whether the embedding is the output matrix too.
    pub tied: bool,
}

/// A parameter: its name, and its extents, outermost first.
pub type Parameter = (String, Vec<usize>);

impl Shape {
    /// Elements of a head.
    pub fn head(&self) -> usize {
        self.width / self.heads
    }

    /// # Errors
    /// `InvalidArgument` for extents that do not go together.
    pub fn check(&self) -> Result<()> {
        let Self { vocabulary, layers, width, heads, kv_heads, hidden, .. } = *self;
        let refused = |what: String, remedy: &str| Err(Error::new(ErrorKind::InvalidArgument, what).remedy(remedy));
        if [vocabulary, layers, width, heads, kv_heads, hidden].contains(&0) {
            return refused("a model has an extent of 0".into(), "choose extents of at least 1");
        }
        if !width.is_multiple_of(heads) || !self.head().is_multiple_of(2) {
            let what = format!("{heads} heads do not divide a width of {width} into even parts");
            return refused(what, "choose a width that is an even multiple of the heads");
        }
        if !heads.is_multiple_of(kv_heads) {
            let what = format!("{kv_heads} heads of keys and values cannot serve {heads} heads");
            return refused(what, "choose a divisor of the heads");
        }
        let Some(parameters) = self.checked_parameters() else {
            return refused("the model has more parameters than can be counted".into(), "choose smaller extents");
        };
        if parameters > 1 << 40 || layers > 1 << 16 {
            return refused(
                format!("a model of {layers} layers and {parameters} parameters"),
                "choose smaller extents",
            );
        }
        Ok(())
    }

    fn checked_parameters(&self) -> Option<u64> {
        let product = |shape: &[usize]| shape.iter().try_fold(1u64, |all, extent| all.checked_mul(*extent as u64));
        let sum = |unit: &[Parameter]| unit.iter().try_fold(0u64, |sum, (_, shape)| sum.checked_add(product(shape)?));
        let layers = sum(&self.layer(0))?.checked_mul(self.layers as u64)?;
        let output = if self.tied { 0 } else { product(&self.output().1)? };
        layers.checked_add(product(&self.embedding().1)?)?.checked_add(output)?.checked_add(self.width as u64)
    }

    /// How many parameters it has. Only of a shape that was [checked](Self::check).
    pub fn parameters(&self) -> u64 {
        self.checked_parameters().unwrap_or(u64::MAX)
    }

    /// The vectors of the tokens, a row each.
    pub fn embedding(&self) -> Parameter {
        ("model.embed_tokens.weight".into(), vec![self.vocabulary, self.width])
    }

    /// The parameters of a layer, from 0, in the order in which it uses them. Matrices have a row for each output.
    pub fn layer(&self, layer: usize) -> Vec<Parameter> {
        let Self { width, hidden, .. } = *self;
        let (queries, keys) = (self.heads * self.head(), self.kv_heads * self.head());
        let named = |name: &str, shape: &[usize]| (format!("model.layers.{layer}.{name}.weight"), shape.to_vec());
        vec![
            named("input_layernorm", &[width]),
            named("self_attn.q_proj", &[queries, width]),
            named("self_attn.k_proj", &[keys, width]),
            named("self_attn.v_proj", &[keys, width]),
            named("self_attn.o_proj", &[width, queries]),
            named("post_attention_layernorm", &[width]),
            named("mlp.gate_proj", &[hidden, width]),
            named("mlp.up_proj", &[hidden, width]),
            named("mlp.down_proj", &[width, hidden]),
        ]
    }

    /// The norm behind the last layer.
    pub fn output_norm(&self) -> Parameter {
        ("model.norm.weight".into(), vec![self.width])
    }

    /// A row for each token, by which vectors become logits: that of the embedding, if they are tied.
    pub fn output(&self) -> Parameter {
        if self.tied { self.embedding() } else { ("lm_head.weight".into(), vec![self.vocabulary, self.width]) }
    }

    /// All parameters, in the order of a pass.
    pub fn all(&self) -> Vec<Parameter> {
        let layers = (0..self.layers).flat_map(|layer| self.layer(layer));
        let output = (!self.tied).then(|| self.output());
        std::iter::once(self.embedding()).chain(layers).chain([self.output_norm()]).chain(output).collect()
    }

    /// Parameters of a layer.
    pub fn in_a_layer(&self) -> u64 {
        self.layer(0).iter().map(|(_, shape)| shape.iter().map(|extent| *extent as u64).product::<u64>()).sum()
    }
}
