//! Which experts a router draws.

use crate::config::Mixture;

/// An expert that a vector draws.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Draw {
    pub expert: usize,
    pub vector: usize,
    /// What the expert's result is multiplied by.
    pub weight: f32,
}

/// The experts that vectors draw, by expert and then by vector. `scores` has a score of each expert for each vector:
/// `[vectors x experts]`.
///
/// Each vector draws the experts with the highest scores; of equal ones the first. An expert's weight is its part of
/// the softmax over all experts' scores, or over those that are drawn (Shazeer et al., "Outrageously large neural
/// networks", 2017; Qwen3's `norm_topk_prob`).
///
/// # Errors
/// The first vector with a score that is infinite or no number.
pub(crate) fn drawn(scores: &[f32], mixture: &Mixture) -> Result<Vec<Draw>, usize> {
    let mut draws = Vec::with_capacity(scores.len() / mixture.count.max(1) * mixture.used);
    let mut order: Vec<usize> = Vec::with_capacity(mixture.count);
    for (vector, scores) in scores.chunks_exact(mixture.count.max(1)).enumerate() {
        if !scores.iter().all(|score| score.is_finite()) {
            return Err(vector);
        }
        order.clear();
        order.extend(0..scores.len());
        order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b)));
        let most = scores[order[0]];
        let odds = |expert: &usize| (scores[*expert] - most).exp();
        let (chosen, others) = order.split_at(mixture.used.min(order.len()));
        let of_chosen: f32 = chosen.iter().map(odds).sum();
        let total = if mixture.normalised { of_chosen } else { of_chosen + others.iter().map(odds).sum::<f32>() };
        draws.extend(chosen.iter().map(|expert| Draw { expert: *expert, vector, weight: odds(expert) / total }));
    }
    draws.sort_unstable_by_key(|draw| (draw.expert, draw.vector));
    Ok(draws)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    fn mixture(count: usize, used: usize, normalised: bool) -> Mixture {
        Mixture { count, used, ffn_dim: 1, shared_ffn_dim: 0, normalised, dense_layers: Vec::new() }
    }

    #[test]
    fn the_highest_scores_are_drawn_and_weighed() {
        let scores = [0.0, 3.0, 1.0, 2.0, 5.0, 5.0, 5.0, -1.0];
        let draws = drawn(&scores, &mixture(4, 2, true)).unwrap();
        let found: Vec<_> = draws.iter().map(|draw| (draw.expert, draw.vector)).collect();
        // Of three equal ones the first two.
        assert_eq!(found, [(0, 1), (1, 0), (1, 1), (3, 0)]);
        let weight = |expert, vector| draws.iter().find(|d| (d.expert, d.vector) == (expert, vector)).unwrap().weight;
        assert!((weight(1, 0) - 1.0 / (1.0 + (-1f32).exp())).abs() < 1e-6);
        assert!((weight(1, 0) + weight(3, 0) - 1.0).abs() < 1e-6 && weight(0, 1) == 0.5);
        let all: f32 = scores[..4].iter().map(|score| score.exp()).sum();
        let draws = drawn(&scores[..4], &mixture(4, 2, false)).unwrap();
        assert!((draws[0].weight - 3f32.exp() / all).abs() < 1e-6, "{draws:?}");
    }

    #[test]
    fn a_score_that_is_no_number_names_its_vector() {
        for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(drawn(&[0.0, 1.0, wrong, 1.0], &mixture(2, 1, true)), Err(1));
        }
        // Large ones are numbers.
        let draws = drawn(&[3e38, -3e38], &mixture(2, 2, true)).unwrap();
        assert_eq!((draws[0].weight, draws[1].weight), (1.0, 0.0));
    }
}
