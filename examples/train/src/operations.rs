//! A layer, and the loss, of operations through which candle carries gradients.
//!
//! candle has faster ones for norms, rotary positions and softmax. They have no backward: what they are given gets no
//! gradient, and no error says so. None of them is used here.

use candle_core::{D, DType, Device, Result, Tensor};

use crate::shape::Shape;

/// What the positions of a window give to attention, in one element type.
#[derive(Clone, Debug)]
pub struct Positions {
    /// Cosines of the angles: a row for each position, an element for each pair of a head's elements.
    cos: Tensor,
    sin: Tensor,
    /// 0 where a position sees another, and negative infinity where it does not: behind it.
    mask: Tensor,
    count: usize,
}

impl Positions {
    /// The positions of windows of `count` tokens.
    ///
    /// # Errors
    /// Those of candle.
    pub fn new(shape: &Shape, count: usize, dtype: DType) -> Result<Self> {
        let half = shape.head() / 2;
        let angle = |at: usize| {
            let (position, pair) = (at / half, at % half);
            position as f64 / shape.rope_base.powf(pair as f64 / half as f64)
        };
        let table = |of: fn(f64) -> f64| {
            let values: Vec<f64> = (0..count * half).map(|at| of(angle(at))).collect();
            Tensor::from_vec(values, (count, half), &Device::Cpu)?.to_dtype(dtype)
        };
        let hidden = |at: usize| if at % count > at / count { f64::NEG_INFINITY } else { 0.0 };
        let mask: Vec<f64> = (0..count * count).map(hidden).collect();
        let mask = Tensor::from_vec(mask, (count, count), &Device::Cpu)?.to_dtype(dtype)?;
        Ok(Self { cos: table(f64::cos)?, sin: table(f64::sin)?, mask, count })
    }

    /// Rotates heads `[windows, heads, positions, elements]`: element `i` with element `i + elements / 2`.
    fn rotate(&self, heads: &Tensor) -> Result<Tensor> {
        let half = heads.dim(D::Minus1)? / 2;
        let (first, second) = (heads.narrow(D::Minus1, 0, half)?, heads.narrow(D::Minus1, half, half)?);
        let rotated_first = (first.broadcast_mul(&self.cos)? - second.broadcast_mul(&self.sin)?)?;
        let rotated_second = (first.broadcast_mul(&self.sin)? + second.broadcast_mul(&self.cos)?)?;
        Tensor::cat(&[rotated_first, rotated_second], D::Minus1)
    }
}

/// `x / sqrt(mean(x^2) + epsilon) * weight`, row by row.
///
/// # Errors
/// Those of candle.
pub fn norm(x: &Tensor, weight: &Tensor, epsilon: f64) -> Result<Tensor> {
    let squares = (x.sqr()?.mean_keepdim(D::Minus1)? + epsilon)?;
    x.broadcast_mul(&squares.sqrt()?.recip()?)?.broadcast_mul(weight)
}

/// The exponents of each row, divided by their sum.
fn softmax(x: &Tensor) -> Result<Tensor> {
    // What is subtracted changes nothing but the rounding, so it has no gradient.
    let exponents = x.broadcast_sub(&x.max_keepdim(D::Minus1)?.detach())?.exp()?;
    exponents.broadcast_div(&exponents.sum_keepdim(D::Minus1)?)
}

/// The vectors behind a layer, of those before it: `[tokens, width]`, windows one behind the other. The weights are in
/// the order of [`Shape::layer`].
///
/// # Errors
/// Those of candle.
pub fn layer(shape: &Shape, positions: &Positions, x: &Tensor, weights: &[Tensor]) -> Result<Tensor> {
    let [attention_norm, queries, keys, values, output, feed_norm, gate, up, down] = weights else {
        candle_core::bail!("a layer has 9 parameters, and {} are given", weights.len());
    };
    let y = norm(x, attention_norm, shape.epsilon)?;
    let attended =
        attention(shape, positions, &y.matmul(&queries.t()?)?, &y.matmul(&keys.t()?)?, &y.matmul(&values.t()?)?)?;
    let x = (x + attended.matmul(&output.t()?)?)?;
    let y = norm(&x, feed_norm, shape.epsilon)?;
    let gated = (y.matmul(&gate.t()?)?.silu()? * y.matmul(&up.t()?)?)?;
    x + gated.matmul(&down.t()?)?
}

/// Each token's mixture of the values that it sees: `[tokens, heads * elements]`.
fn attention(shape: &Shape, positions: &Positions, queries: &Tensor, keys: &Tensor, values: &Tensor) -> Result<Tensor> {
    let (tokens, elements) = (queries.dim(0)?, shape.head());
    let (windows, count) = (tokens / positions.count, positions.count);
    let of_heads =
        |x: &Tensor, heads: usize| x.reshape((windows, count, heads, elements))?.transpose(1, 2)?.contiguous();
    let scale = 1.0 / (elements as f64).sqrt();
    let queries = positions.rotate(&(of_heads(queries, shape.heads)? * scale)?)?;
    let keys = positions.rotate(&of_heads(keys, shape.kv_heads)?)?;
    let values = of_heads(values, shape.kv_heads)?;
    // The heads of queries that share one of keys lie behind one another, and are multiplied as one matrix.
    let (groups, shared) = (windows * shape.kv_heads, shape.heads / shape.kv_heads);
    let queries = queries.reshape((groups, shared * count, elements))?;
    let (keys, values) = (keys.reshape((groups, count, elements))?, values.reshape((groups, count, elements))?);
    let scores = queries.matmul(&keys.t()?)?.reshape((groups, shared, count, count))?;
    let seen = softmax(&scores.broadcast_add(&positions.mask)?)?;
    let mixed = seen.reshape((groups, shared * count, count))?.matmul(&values)?;
    mixed.reshape((windows, shape.heads, count, elements))?.transpose(1, 2)?.reshape((tokens, shape.width))
}

/// The logits of some tokens of the vocabulary: a column for each row of `output`. `y` is [normed](norm) already.
///
/// # Errors
/// Those of candle.
pub fn logits(y: &Tensor, output: &Tensor) -> Result<Tensor> {
    y.matmul(&output.t()?)
}

/// Of each row, the largest element seen so far, and the sum of the exponents of all, divided by that of the largest.
#[derive(Clone, Debug)]
pub struct Exponents {
    largest: Tensor,
    sum: Tensor,
}

impl Exponents {
    /// Those of some columns.
    ///
    /// # Errors
    /// Those of candle.
    pub fn new(logits: &Tensor) -> Result<Self> {
        let largest = logits.max_keepdim(D::Minus1)?;
        let sum = logits.broadcast_sub(&largest)?.exp()?.sum_keepdim(D::Minus1)?;
        Ok(Self { largest, sum })
    }

    /// Those of more columns.
    ///
    /// # Errors
    /// Those of candle.
    pub fn and(&self, more: &Self) -> Result<Self> {
        let largest = self.largest.maximum(&more.largest)?;
        let part = |of: &Self| of.sum.mul(&(&of.largest - &largest)?.exp()?);
        Ok(Self { sum: (part(self)? + part(more)?)?, largest })
    }

    /// The logarithm of the sum of the exponents of each row.
    ///
    /// # Errors
    /// Those of candle.
    pub fn logarithm(&self) -> Result<Tensor> {
        &self.largest + self.sum.log()?
    }
}

/// The elements at these rows and columns, added up; `None` without any.
///
/// # Errors
/// Those of candle.
pub fn sum_at(x: &Tensor, places: &[(u32, u32)]) -> Result<Option<Tensor>> {
    if places.is_empty() {
        return Ok(None);
    }
    let (rows, columns): (Vec<u32>, Vec<u32>) = places.iter().copied().unzip();
    let rows = x.index_select(&Tensor::from_vec(rows, places.len(), x.device())?, 0)?;
    rows.gather(&Tensor::from_vec(columns, (places.len(), 1), x.device())?, D::Minus1)?.sum_all().map(Some)
}
