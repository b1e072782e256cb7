//! Which experts a router draws.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crate::arch::Scoring;
use crate::config::Mixture;
use crate::weights::Step;

/// What a router gives vectors.
#[derive(Default)]
pub(crate) struct Scores {
    /// Of each expert for each vector: `[vectors x experts]`.
    pub of_vectors: Vec<f32>,
    /// Of each expert, what is added to its scores before some are chosen.
    pub correction: Option<Vec<f32>>,
}

/// An expert that a vector draws.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Draw {
    pub expert: usize,
    pub vector: usize,
    /// How many experts the vector scores higher.
    pub place: usize,
    /// What the expert's result is multiplied by.
    pub weight: f32,
}

/// The experts that vectors draw, by expert and then by vector. `scores` has a score of each expert for each vector:
/// `[vectors x experts]`.
///
/// Each vector draws the experts with the highest scores; of equal ones the first. An expert's weight is its part of
/// the softmax over all experts' scores, or over those that are drawn (Shazeer et al., "Outrageously large neural
/// networks", 2017; Qwen3's `norm_topk_prob`). Where sigmoids are taken of scores, the `correction` of each expert is
/// added to them before experts are chosen, and weights are the sigmoids alone.
///
/// # Errors
/// The first vector with a score that is infinite or no number.
pub(crate) fn drawn(scores: &[f32], correction: Option<&[f32]>, mixture: &Mixture) -> Result<Vec<Draw>, usize> {
    let sigmoid = |score: &f32| 1.0 / (1.0 + (-score).exp());
    let mut draws = Vec::with_capacity(scores.len() / mixture.count.max(1) * mixture.used);
    let (mut order, mut ranks) = (Vec::with_capacity(mixture.count), Vec::with_capacity(mixture.count));
    for (vector, scores) in scores.chunks_exact(mixture.count.max(1)).enumerate() {
        ranks.clear();
        match mixture.scoring {
            Scoring::Softmax => ranks.extend_from_slice(scores),
            Scoring::Sigmoid => ranks.extend(scores.iter().map(sigmoid)),
        }
        ranks.iter_mut().zip(correction.into_iter().flatten()).for_each(|(rank, correction)| *rank += correction);
        if !scores.iter().chain(&ranks).all(|score| score.is_finite()) {
            return Err(vector);
        }
        order.clear();
        order.extend(0..scores.len());
        order.sort_by(|a, b| ranks[*b].total_cmp(&ranks[*a]).then(a.cmp(b)));
        let most = scores[order[0]];
        let part = |expert: &usize| match mixture.scoring {
            Scoring::Softmax => (scores[*expert] - most).exp(),
            Scoring::Sigmoid => sigmoid(&scores[*expert]),
        };
        let (chosen, others) = order.split_at(mixture.used.min(order.len()));
        let of_chosen: f32 = chosen.iter().map(part).sum();
        let total = match (mixture.scoring, mixture.normalised) {
            (Scoring::Softmax, true) => of_chosen,
            (Scoring::Softmax, false) => of_chosen + others.iter().map(part).sum::<f32>(),
            // Sigmoids may all be 0.
            (Scoring::Sigmoid, true) => of_chosen + 1e-20,
            (Scoring::Sigmoid, false) => 1.0,
        };
        let weight = |expert: &usize| part(expert) / total * mixture.scale;
        let draw = |(place, expert): (usize, &usize)| Draw { expert: *expert, vector, place, weight: weight(expert) };
        draws.extend(chosen.iter().enumerate().map(draw));
    }
    draws.sort_unstable_by_key(|draw| (draw.expert, draw.vector));
    Ok(draws)
}

/// What was foreseen of a layer.
pub(crate) struct Foreseen {
    pub draws: Vec<Draw>,
    /// The rows of these experts, as far as that may be relied upon.
    pub steps: Vec<Step>,
}

/// How often it was right what was foreseen of a layer's experts, by their place among those of a vector: the first are
/// right more often.
#[derive(Debug)]
pub(crate) struct Foresight(Vec<Place>);

#[derive(Debug, Default)]
struct Place {
    right: AtomicU64,
    all: AtomicU64,
}

/// After so many, those before count half.
const REMEMBERED: u64 = 1024;
/// With fewer, nothing is known.
const KNOWN: u64 = 16;
/// A read for what is foreseen takes the disk from what is needed, and perhaps a frame from what is used again. So it
/// has to be right in so many of four cases.
const RIGHT_LEAST: u64 = 3;

impl Foresight {
    /// Of vectors that draw `used` experts.
    pub fn new(used: usize) -> Self {
        Self((0..used).map(|_| Place::default()).collect())
    }

    /// Counts what was foreseen, and what was drawn, which is sorted by expert and then by vector.
    pub fn count(&self, foreseen: &[Draw], drawn: &[Draw]) {
        let key = |draw: &Draw| (draw.expert, draw.vector);
        for draw in foreseen {
            let Some(Place { right, all }) = self.0.get(draw.place) else { continue };
            let is_right = drawn.binary_search_by_key(&key(draw), key).is_ok();
            let right_now = right.fetch_add(u64::from(is_right), Relaxed) + u64::from(is_right);
            let all_now = all.fetch_add(1, Relaxed) + 1;
            if all_now > REMEMBERED {
                all.store(all_now / 2, Relaxed);
                right.store(right_now / 2, Relaxed);
            }
        }
    }

    /// Whether that is right often enough, as far as is known.
    pub fn is_trusted(&self, draw: &Draw) -> bool {
        self.0.get(draw.place).is_some_and(|Place { right, all }| {
            let all = all.load(Relaxed);
            all < KNOWN || 4 * right.load(Relaxed) >= RIGHT_LEAST * all
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    fn mixture(count: usize, used: usize, normalised: bool) -> Mixture {
        Mixture {
            count,
            used,
            ffn_dim: 1,
            shared_ffn_dim: 0,
            scoring: Scoring::Softmax,
            normalised,
            scale: 1.0,
            dense_layers: Vec::new(),
        }
    }

    #[test]
    fn the_highest_scores_are_drawn_and_weighed() {
        let scores = [0.0, 3.0, 1.0, 2.0, 5.0, 5.0, 5.0, -1.0];
        let draws = drawn(&scores, None, &mixture(4, 2, true)).unwrap();
        let found: Vec<_> = draws.iter().map(|draw| (draw.expert, draw.vector)).collect();
        // Of three equal ones the first two.
        assert_eq!(found, [(0, 1), (1, 0), (1, 1), (3, 0)]);
        let weight = |expert, vector| draws.iter().find(|d| (d.expert, d.vector) == (expert, vector)).unwrap().weight;
        assert!((weight(1, 0) - 1.0 / (1.0 + (-1f32).exp())).abs() < 1e-6);
        assert!((weight(1, 0) + weight(3, 0) - 1.0).abs() < 1e-6 && weight(0, 1) == 0.5);
        let all: f32 = scores[..4].iter().map(|score| score.exp()).sum();
        let draws = drawn(&scores[..4], None, &mixture(4, 2, false)).unwrap();
        assert!((draws[0].weight - 3f32.exp() / all).abs() < 1e-6, "{draws:?}");
    }

    #[test]
    fn foresight_is_trusted_by_place_while_three_of_four_are_right() {
        let draws = |experts: &[usize]| -> Vec<Draw> {
            experts
                .iter()
                .zip(0..)
                .map(|(expert, place)| Draw { expert: *expert, vector: 0, place, weight: 1.0 })
                .collect()
        };
        let foresight = Foresight::new(2);
        let trusted = |foresight: &Foresight| [0, 1].map(|place| foresight.is_trusted(&draws(&[5, 6])[place]));
        assert_eq!(trusted(&foresight), [true; 2]);
        (0..KNOWN).for_each(|_| foresight.count(&draws(&[3, 2]), &draws(&[3, 4])));
        assert_eq!(trusted(&foresight), [true, false]);
        // What was long ago counts less and less.
        (0..4 * REMEMBERED)
            .for_each(|nth| foresight.count(&draws(&[3, 4]), &draws(&[3, 4 + usize::from(nth % 5 == 0)])));
        assert_eq!(trusted(&foresight), [true; 2]);
        (0..4 * REMEMBERED)
            .for_each(|nth| foresight.count(&draws(&[3, 4]), &draws(&[3, 4 + usize::from(nth % 3 == 0)])));
        assert_eq!(trusted(&foresight), [true, false]);
    }

    #[test]
    fn a_correction_chooses_and_does_not_weigh() {
        let sigmoid = |score: f32| 1.0 / (1.0 + (-score).exp());
        let scores = [0.0, 3.0, 1.0, 2.0];
        let correction = [0.6, 0.0, 0.0, 0.0];
        let of = |normalised, scale| {
            let mixture = Mixture { scoring: Scoring::Sigmoid, scale, ..mixture(4, 2, normalised) };
            let draws = drawn(&scores, Some(&correction), &mixture).unwrap();
            assert_eq!(draws.iter().map(|draw| draw.expert).collect::<Vec<_>>(), [0, 1]);
            [draws[0].weight, draws[1].weight]
        };
        assert_eq!(of(false, 1.0), [0.5, sigmoid(3.0)]);
        let [a, b] = of(true, 2.5);
        assert!((a + b - 2.5).abs() < 1e-6 && (a / b - 0.5 / sigmoid(3.0)).abs() < 1e-6, "{a} {b}");
        let none = Mixture { scoring: Scoring::Sigmoid, ..mixture(2, 2, true) };
        assert_eq!(drawn(&[-3e38, -3e38], Some(&[0.0; 2]), &none).unwrap()[0].weight, 0.0);
        assert_eq!(drawn(&[1.0, 1.0], Some(&[0.0, f32::NAN]), &none), Err(0));
    }

    #[test]
    fn a_score_that_is_no_number_names_its_vector() {
        for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(drawn(&[0.0, 1.0, wrong, 1.0], None, &mixture(2, 1, true)), Err(1));
        }
        // Large ones are numbers.
        let draws = drawn(&[3e38, -3e38], None, &mixture(2, 2, true)).unwrap();
        assert_eq!((draws[0].weight, draws[1].weight), (1.0, 0.0));
    }
}
