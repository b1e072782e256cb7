//! Estimates the unknown sizes of a transformer from its number of parameters.

use super::declared::{check_active, divided};
use super::experts::Experts;
use super::shape::{MOST, Shape, within};
use super::units::Parameters;
use crate::error::{Error, ErrorKind, Result};
use crate::ids::Bytes;
use outcore::DType;

/// What is known of a model without a file. Sizes that are `None` are estimated, and the shape says so.
#[derive(Clone, Copy, Debug)]
pub struct Given {
    /// Parameters.
    pub parameters: Parameters,
    /// Element type of all weights.
    pub dtype: DType,
    /// Layers.
    pub layers: Option<u64>,
    /// Elements of the residual stream.
    pub hidden: Option<u64>,
    /// Query heads.
    pub heads: Option<u64>,
    /// Heads of keys and values.
    pub kv_heads: Option<u64>,
    /// Elements of the feed-forward layer.
    pub ffn: Option<u64>,
    /// Token ids.
    pub vocab: Option<u64>,
    /// Whether the feed-forward layer has a gate.
    pub gated: bool,
    /// Experts, if there are any. The parameters then include all experts.
    pub experts: Option<GivenExperts>,
}

impl Given {
    /// Only parameters and their type are known; all sizes are estimated.
    pub const fn new(parameters: Parameters, dtype: DType) -> Self {
        Self {
            parameters,
            dtype,
            layers: None,
            hidden: None,
            heads: None,
            kv_heads: None,
            ffn: None,
            vocab: None,
            gated: false,
            experts: None,
        }
    }

    /// Mixtral 8x7B (Jiang et al. 2024, "Mixtral of Experts"): 46.7 billion parameters, of which 45.1 billion are those
    /// of 8 experts a layer. A token uses `active` of them; the model was trained with 2.
    #[cfg(test)]
    pub(super) fn mixtral(active: u64) -> Result<Self> {
        Ok(Self {
            layers: Some(32),
            hidden: Some(4096),
            heads: Some(32),
            kv_heads: Some(8),
            vocab: Some(32_000),
            gated: true,
            experts: Some(GivenExperts { count: 8, active: Some(active), ffn: Some(14_336) }),
            ..Self::new(Parameters::new(46_700_000_000)?, DType::BF16)
        })
    }
}

/// What is known of a model's experts without a file.
#[derive(Clone, Copy, Debug)]
pub struct GivenExperts {
    /// Experts of each layer.
    pub count: u64,
    /// How many of them a token uses; if `None`, all.
    pub active: Option<u64>,
    /// Elements of an expert's feed-forward layer. If `None`: the model's [`ffn`](Given::ffn), or what the other
    /// parameters leave for it.
    pub ffn: Option<u64>,
}

/// Parameters of a layer over the square of its hidden size: 4 of attention, and 8 of a feed-forward layer that is four
/// times as wide (Kaplan et al. 2020, "Scaling Laws for Neural Language Models", table 1).
const LAYER_PARAMETERS: f64 = 12.0;
/// Hidden elements for each layer if neither size is given: Llama's 4096 over 32 layers.
const HIDDEN_A_LAYER: f64 = 128.0;
/// Attention's part of [`LAYER_PARAMETERS`].
const ATTENTION_PARAMETERS: f64 = 4.0;
const VOCAB: u64 = 32_000;
/// Halvings that find a hidden size: enough for all digits of a double.
const HALVINGS: u32 = 64;

impl Shape {
    /// Estimates the shape of a model of which only `given` is known.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`]: a size is 0 or larger than any model's, heads do not fit each other, or the
    /// weights take 2^64 bytes.
    pub fn estimate(given: &Given) -> Result<Self> {
        // Errors that blame a file blame the arguments here.
        Self::guess(given).map_err(|error| Error::new(ErrorKind::InvalidArgument, error.to_string()))
    }

    fn guess(given: &Given) -> Result<Self> {
        let parameters = given.parameters.get();
        let mut assumed = Vec::new();
        let mut size = |what: &str, said: Option<u64>, guess: u64| match said {
            Some(said) => within(what, said).map_err(|error| error.remedy("give another")),
            None => {
                let guess = guess.clamp(1, MOST);
                assumed.push(format!("{what}: {guess} (estimate)"));
                Ok(guess)
            }
        };
        let experts = given.experts.map(GivenExperts::checked).transpose()?;
        let layer = LayerParameters { experts, given };
        let hidden_of = |layers: Option<f64>| layer.hidden(parameters as f64, layers);
        let layers = match (given.layers, given.hidden) {
            (None, Some(hidden)) => parameters as f64 / layer.parameters(hidden.max(1) as f64),
            _ => hidden_of(None) / HIDDEN_A_LAYER,
        };
        let layers = size("layers", given.layers, layers.round() as u64)?;
        let hidden = hidden_of(Some(layers as f64));
        // A multiple of 64.
        let hidden = size("hidden size", given.hidden, ((hidden / 64.0).round() as u64).saturating_mul(64).max(64))?;
        let heads = size("heads", given.heads, hidden / if hidden >= 2048 { 128 } else { 64 })?;
        if given.heads.is_some() && !hidden.is_multiple_of(heads) {
            let what = format!("{heads} heads do not divide a hidden size of {hidden}");
            return Err(Error::new(ErrorKind::InvalidArgument, what).remedy("give both so that heads are alike"));
        }
        let kv_heads = size("heads of keys and values", given.kv_heads, heads)?;
        let ffn = match &experts {
            None => size("feed-forward size", given.ffn, hidden.saturating_mul(4))?,
            Some(experts) => {
                let left = parameters as f64 - layers as f64 * ATTENTION_PARAMETERS * (hidden as f64).powi(2);
                let each = matrices(given.gated) as f64 * layers as f64 * experts.count as f64 * hidden as f64;
                size("feed-forward size of an expert", experts.ffn.or(given.ffn), (left / each) as u64)?
            }
        };
        let vocab = size("vocabulary", given.vocab, VOCAB)?;
        assumed.push(match experts {
            None => "every pass uses all weights, the embedding too".to_owned(),
            Some(_) => "every pass uses all weights but experts, the embedding too".to_owned(),
        });
        let blocks = parameters.div_ceil(given.dtype.block_elements());
        let weights = blocks.checked_mul(given.dtype.block_bytes()).map(Bytes::new).ok_or_else(|| {
            let what = format!("{parameters} parameters of {} take more than {}", given.dtype, Bytes::new(u64::MAX));
            Error::new(ErrorKind::InvalidArgument, what).remedy("give fewer")
        })?;
        let key_dim = divided(hidden, heads)?;
        let experts = match experts {
            None => None,
            Some(experts) => Some(experts.of(given, [layers, hidden, ffn], weights)?),
        };
        Self {
            parameters,
            dtype: given.dtype,
            weights,
            used: weights,
            used_parameters: parameters,
            experts,
            layers,
            hidden,
            heads,
            kv_heads,
            key_dim,
            value_dim: key_dim,
            ffn,
            vocab,
            gated: given.gated,
            context: None,
            assumed,
        }
        .checked()
    }
}

impl GivenExperts {
    fn checked(self) -> Result<Self> {
        let count = within("experts", self.count).map_err(|error| error.remedy("give another, or none"))?;
        let active = self.active.unwrap_or(count);
        check_active("active experts", active, count)
            .map_err(|error| error.remedy("give from 1 to as many as there are"))?;
        Ok(Self { count, active: Some(active), ..self })
    }

    /// The experts of a model with these `layers`, `hidden` and `ffn`, whose weights take `weights`.
    fn of(self, given: &Given, [layers, hidden, ffn]: [u64; 3], weights: Bytes) -> Result<Experts> {
        let of_one = matrices(given.gated) * hidden * ffn;
        let parameters = u128::from(of_one) * u128::from(layers) * u128::from(self.count);
        let all = given.parameters.get();
        let Some(parameters) = u64::try_from(parameters).ok().filter(|parameters| *parameters <= all) else {
            let what = format!(
                "{} experts of {} matrices of {hidden} x {ffn} in each of {layers} layers have {parameters} \
                 parameters, more than the model's {all}",
                self.count,
                matrices(given.gated)
            );
            return Err(Error::new(ErrorKind::InvalidArgument, what)
                .remedy("give the parameters of all experts together, or fewer or smaller experts"));
        };
        let share = parameters as f64 / all as f64;
        let weights = Bytes::new(((weights.get() as f64 * share) as u64).min(weights.get()));
        Ok(Experts {
            count: self.count,
            active: self.active.unwrap_or(self.count),
            ffn,
            shared_ffn: 0,
            parameters,
            weights,
            piece: None,
        })
    }
}

/// How many matrices a feed-forward layer has.
const fn matrices(gated: bool) -> u64 {
    if gated { 3 } else { 2 }
}

/// How many parameters a layer has, by its hidden size. For estimates of sizes that are not given.
struct LayerParameters<'a> {
    experts: Option<GivenExperts>,
    given: &'a Given,
}

impl LayerParameters<'_> {
    fn parameters(&self, hidden: f64) -> f64 {
        let square = hidden * hidden;
        let Some(experts) = self.experts else { return LAYER_PARAMETERS * square };
        let (count, active) = (experts.count as f64, experts.active.unwrap_or(experts.count) as f64);
        let of_experts = match experts.ffn.or(self.given.ffn) {
            // The experts of one token are together as wide as a dense model's feed-forward layer.
            None => (LAYER_PARAMETERS - ATTENTION_PARAMETERS) * square * count / active,
            Some(ffn) => matrices(self.given.gated) as f64 * count * ffn as f64 * hidden,
        };
        ATTENTION_PARAMETERS * square + of_experts
    }

    /// The hidden size at which `layers` layers have this many parameters. If `layers` is `None`, their number grows
    /// with the hidden size.
    fn hidden(&self, parameters: f64, layers: Option<f64>) -> f64 {
        let all = |hidden: f64| layers.unwrap_or(hidden / HIDDEN_A_LAYER) * self.parameters(hidden);
        let (mut low, mut high) = (0.0, MOST as f64);
        for _ in 0..HALVINGS {
            let middle = (low + high) / 2.0;
            if all(middle) < parameters { low = middle } else { high = middle }
        }
        high
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(parameters: u64) -> Given {
        Given::new(Parameters::new(parameters).unwrap(), DType::BF16)
    }

    #[test]
    fn what_is_left_out_is_estimated_and_named() {
        let shape = Shape::estimate(&given(7_000_000_000)).unwrap();
        assert_eq!((shape.layers, shape.heads, shape.key_dim), (33, 33, 128), "{shape:?}");
        assert_eq!(shape.weights, Bytes::new(14_000_000_000));
        assert_eq!(shape.assumed.iter().filter(|what| what.contains("(estimate)")).count(), 6, "{:?}", shape.assumed);
        // The estimate has about as many parameters as were given.
        for parameters in [1_000, 135_000_000, 7_000_000_000, 175_000_000_000, 1_000_000_000_000_000] {
            let shape = Shape::estimate(&given(parameters)).unwrap();
            let ratio = (12 * shape.layers * shape.hidden.pow(2)) as f64 / parameters as f64;
            assert!(parameters < 1_000_000 || (0.9..1.1).contains(&ratio), "{parameters}: {ratio} {shape:?}");
        }
        let said = Given { layers: Some(80), hidden: Some(8192), heads: Some(64), kv_heads: Some(8), ..given(70) };
        let said = Given { ffn: Some(28672), vocab: Some(32000), ..said };
        assert!(!Shape::estimate(&said).unwrap().assumed.iter().any(|what| what.contains("(estimate)")));
    }

    fn experts(count: u64, active: Option<u64>, ffn: Option<u64>) -> Option<GivenExperts> {
        Some(GivenExperts { count, active, ffn })
    }

    #[test]
    fn models_with_experts_have_the_active_parameters_they_are_said_to_have() {
        // Jiang et al. 2024, "Mixtral of Experts": 47B, 13B active. Yang et al. 2025, "Qwen3 Technical Report": 30.5B,
        // 3.3B.
        let mixtral = Given {
            layers: Some(32),
            hidden: Some(4096),
            gated: true,
            experts: experts(8, Some(2), Some(14_336)),
            ..given(46_700_000_000)
        };
        let qwen = Given {
            layers: Some(48),
            hidden: Some(2048),
            gated: true,
            experts: experts(128, Some(8), Some(768)),
            ..given(30_500_000_000)
        };
        for (given, wanted) in [(mixtral, 12.9e9), (qwen, 3.3e9)] {
            let found = Shape::estimate(&given).unwrap().active_parameters();
            assert!((found / wanted - 1.0).abs() < 0.01, "{found} {wanted}");
            // If the feed-forward size is not given, it is what the other parameters leave.
            let guessed = GivenExperts { ffn: None, ..given.experts.unwrap() };
            let guessed = Shape::estimate(&Given { experts: Some(guessed), ..given }).unwrap();
            let wanted = given.experts.unwrap().ffn.unwrap() as f64;
            assert!((guessed.ffn as f64 / wanted - 1.0).abs() < 0.05, "{} {wanted}", guessed.ffn);
            assert!(guessed.assumed.iter().any(|what| what.contains("of an expert")), "{:?}", guessed.assumed);
        }
    }

    #[test]
    fn what_is_left_out_beside_experts_adds_up() {
        for parameters in [1_000_000_000, 30_500_000_000, 1_000_000_000_000] {
            for (ffn, active) in [(None, 8), (None, 1), (Some(1000), 8), (None, 128)] {
                let given = Given { experts: experts(128, Some(active), ffn), gated: true, ..given(parameters) };
                let shape = Shape::estimate(&given).unwrap();
                let found = 4 * shape.layers * shape.hidden.pow(2) + shape.experts.unwrap().parameters;
                let ratio = found as f64 / parameters as f64;
                assert!((0.9..1.1).contains(&ratio), "{parameters} {ffn:?} {active}: {ratio} {shape:?}");
                assert_eq!(shape.experts.unwrap().weights.get(), 2 * shape.experts.unwrap().parameters);
            }
        }
        // A model whose experts are all active is a dense model.
        let all = Shape::estimate(&Given { experts: experts(8, None, None), ..given(7_000_000_000) }).unwrap();
        assert_eq!((all.active_parameters(), all.used_by(1)), (7e9, 14e9));
    }

    #[test]
    fn experts_no_model_has_are_refused_with_the_limit() {
        let model =
            |given_experts| Given { experts: given_experts, layers: Some(32), hidden: Some(4096), ..given(7 << 30) };
        for (experts, parts) in [
            (experts(0, Some(1), None), ["experts is 0", "from 1 to"]),
            (experts(8, Some(9), None), ["active experts is 9", "the 8 experts"]),
            (experts(8, Some(0), None), ["active experts is 0", "the 8 experts"]),
            (experts(8, Some(2), Some(14_336)), ["8 experts of 2 matrices of 4096 x 14336", "30064771072"]),
            (experts(1 << 24, None, Some(1 << 24)), ["more than the model's 7516192768", "smaller experts"]),
            (experts(u64::MAX, None, None), ["experts is", "from 1 to"]),
        ] {
            let error = Shape::estimate(&model(experts)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            for part in parts {
                assert!(error.to_string().contains(part), "{part}: {error}");
            }
        }
    }

    #[test]
    fn sizes_no_model_has_are_refused() {
        let bad = [
            Given { layers: Some(0), ..given(1_000_000) },
            Given { hidden: Some(u64::MAX), ..given(1_000_000) },
            Given { hidden: Some(64), heads: Some(65), ..given(1_000_000) },
            Given { heads: Some(8), kv_heads: Some(3), ..given(1_000_000_000) },
        ];
        for given in bad {
            let error = Shape::estimate(&given).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        }
    }
}
