//! Training a layer at a time: what the example `train` has in memory beside parameters, gradients and states.

/// Bytes of an element: all is computed in `f32`.
const FLOAT: u128 = 4;
/// Vectors of a token that are kept beside those that go into layers: what goes into the last norm, what goes into the
/// head, and the sum of the gradients of that.
const BESIDE_LAYERS: u128 = 3;

/// A Llama-shaped model whose layers are differentiated one after the other, some sequences at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerAtATime {
    /// Layers.
    pub layers: u64,
    /// Elements of a token's vector.
    pub width: u64,
    /// Heads of queries.
    pub heads: u64,
    /// Elements between the two halves of the feed-forward network.
    pub hidden: u64,
    /// Parameters of a layer.
    pub in_a_layer: u64,
    /// Tokens that there are.
    pub vocabulary: u64,
    /// Tokens of a sequence.
    pub window: u64,
    /// Sequences that go through a layer at once.
    pub at_once: u64,
}

impl LayerAtATime {
    /// Logits that are computed at once, and elements of the output matrix that are used at once, at most.
    pub const LOGITS: u64 = 1 << 20;

    /// Rows of the output matrix that are used at once, if no more than so many logits are.
    pub fn rows(&self, logits: u64) -> u64 {
        (logits / self.window.saturating_mul(self.at_once).max(self.width).max(1)).max(1)
    }

    /// Bytes of the vectors that are kept for the way back, of a step of so many sequences.
    pub fn kept(&self, batch: u64) -> u128 {
        let tokens = product([self.window, batch, self.width]);
        (u128::from(self.layers) + BESIDE_LAYERS).saturating_mul(tokens).saturating_mul(FLOAT)
    }

    /// Bytes that computing a layer takes, there and back, or a block of the head if that is more. Counted for
    /// operations as candle carries them out: what they leave for the way back, which is there until its end; what
    /// differentiating the softmax, or the gated half of the network, has beside that; the parameters and their
    /// gradients; and a gradient on its way, which is in five tensors: the product, and twice a sum before and after it
    /// was added.
    pub fn computing(&self) -> u128 {
        let tokens = product([self.window, self.at_once]);
        let of_tokens = |extent: u64| tokens.saturating_mul(u128::from(extent));
        let [vectors, hidden] = [self.width, self.hidden].map(of_tokens);
        let scores = of_tokens(self.heads).saturating_mul(u128::from(self.window));
        let sum = |terms: &[(u128, u128)]| {
            terms.iter().fold(0u128, |sum, (factor, term)| sum.saturating_add(term.saturating_mul(*factor)))
        };
        let left = sum(&[(26, vectors), (5, scores), (4, hidden), (1, product([self.window, self.window]))]);
        let beside = sum(&[(9, scores)]).max(sum(&[(14, hidden)]));
        let matrix = product([self.width, self.hidden]);
        let layer = sum(&[(1, left), (1, beside), (2, self.in_a_layer.into()), (4, matrix)]);
        let rows = self.rows(Self::LOGITS).min(self.vocabulary);
        let head = sum(&[(6, of_tokens(rows)), (6, product([rows, self.width]))]);
        layer.max(head).saturating_mul(FLOAT)
    }
}

fn product<const N: usize>(factors: [u64; N]) -> u128 {
    factors.into_iter().fold(1, |product, factor| product.saturating_mul(u128::from(factor)))
}
