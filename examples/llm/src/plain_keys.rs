//! Keys and values of a sequence in memory of its own, and attention over them.

use std::ops::Range;

use half::f16;

use crate::block_attention::{Scores, seen};
use crate::config::Config;
use crate::dtype::KvType;
use crate::kernels::{self, Level};
use crate::paged_kv::Operands;
use crate::pool::Pool;

/// Keys and values of one layer: `[kv_head][position][head_dim]`.
pub(crate) enum Cache {
    F32 { keys: Vec<f32>, values: Vec<f32> },
    F16 { keys: Vec<f16>, values: Vec<f16> },
}

impl Cache {
    pub fn new(kind: KvType, elements: usize) -> Self {
        match kind {
            KvType::F32 => Self::F32 { keys: vec![0.0; elements], values: vec![0.0; elements] },
            KvType::F16 => Self::F16 { keys: vec![f16::ZERO; elements], values: vec![f16::ZERO; elements] },
        }
    }

    fn store(&mut self, at: usize, k: &[f32], v: &[f32]) {
        match self {
            Self::F32 { keys, values } => {
                keys[at..at + k.len()].copy_from_slice(k);
                values[at..at + v.len()].copy_from_slice(v);
            }
            Self::F16 { keys, values } => {
                keys[at..at + k.len()].iter_mut().zip(k).for_each(|(c, x)| *c = f16::from_f32(*x));
                values[at..at + v.len()].iter_mut().zip(v).for_each(|(c, x)| *c = f16::from_f32(*x));
            }
        }
    }

    /// `softmax(scores(q K^T)) V` over `seen` positions, counted from element `base`. The softmax sums up the sink too.
    fn attend(
        &self,
        (level, scores_of): (Level, Scores),
        (base, seen): (usize, Range<usize>),
        sink: Option<f32>,
        q: &[f32],
        out: &mut [f32],
    ) {
        let hd = q.len();
        let base = base + seen.start * hd;
        let at = |p: usize| base + p * hd..base + (p + 1) * hd;
        let mut scores = vec![0f32; seen.len()];
        match self {
            Self::F32 { keys, .. } => kernels::dots(level, q, &keys[base..], hd, &mut scores),
            Self::F16 { keys, .. } => {
                scores.iter_mut().enumerate().for_each(|(p, score)| *score = kernels::dot_f16(level, q, &keys[at(p)]));
            }
        }
        scores.iter_mut().for_each(|score| *score = scores_of.of(*score));
        let peak = scores.iter().fold(sink.unwrap_or(f32::NEG_INFINITY), |peak, score| peak.max(*score));
        kernels::exp_less(level, &mut scores, peak);
        let total = sink.map_or(0.0, |sink| (sink - peak).exp()) + scores.iter().sum::<f32>();
        scores.iter_mut().for_each(|score| *score /= total);
        out.fill(0.0);
        match self {
            Self::F32 { values, .. } => kernels::add_rows(level, &scores, &values[base..], hd, out),
            Self::F16 { values, .. } => {
                scores.iter().enumerate().for_each(|(p, share)| kernels::axpy_f16(level, *share, &values[at(p)], out));
            }
        }
    }
}

/// Stores the new keys and values, then attends: `[m x heads * head_dim]`.
pub(crate) fn attention(
    (config, level, pool): (&Config, Level, &Pool),
    (layer, cache): (usize, &mut Cache),
    (capacity, past): (usize, usize),
    operands: &Operands<'_>,
) -> Vec<f32> {
    let c = config;
    let hd = c.head_dim;
    let Operands { q, k, v, sinks } = *operands;
    let m = q.len() / (c.heads * hd);
    for t in 0..m {
        for h in 0..c.kv_heads {
            let at = (t * c.kv_heads + h) * hd;
            cache.store((h * capacity + past + t) * hd, &k[at..at + hd], &v[at..at + hd]);
        }
    }
    let cache = &*cache;
    let (group, scores, window) = (c.heads / c.kv_heads, Scores::new(c), c.window_of(layer));
    let mut out = vec![0f32; m * c.heads * hd];
    pool.run_chunks(&mut out, hd, |i, out| {
        let (t, h) = (i / c.heads, i % c.heads);
        let base = h / group * capacity * hd;
        let seen = seen(past + t, window);
        let sink = sinks.map(|sinks| sinks[h]);
        cache.attend((level, scores), (base, seen), sink, &q[i * hd..(i + 1) * hd], out);
    });
    out
}
