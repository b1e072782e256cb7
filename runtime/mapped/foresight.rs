//! Which experts a layer will use, by what followed before, and how far such words can be trusted.
//!
//! For each expert is kept which experts of the next layer were used by the same tokens, and how often: a Markov table
//! over (layer, expert). What followed all experts of a layer together names the ones that are likely next. Memory is
//! bounded: of each expert, the [`FOLLOWERS`] that followed most (as in A. Metwally, D. Agrawal and A. El Abbadi,
//! "Efficient computation of frequent and top-k elements in data streams", ICDT 2005).
//!
//! A read for a prediction that is wrong takes the disk from what is needed. So each prediction of an expert that is
//! not in memory is compared with what was used, apart by how many layers ahead it was, and by its place: the most
//! likely expert of a layer is right more often than the fourth. Where less than [`WORTH`] of such predictions were
//! right lately, nothing is read for them until that is better.

use std::collections::{HashMap, VecDeque};

use crate::experts::{ExpertId, LayerExperts};

/// Experts of the next layer that are remembered for each expert.
const FOLLOWERS: usize = 16;
/// Experts of which something is remembered: about 20 MB.
const KNOWN_MAX: usize = 1 << 17;
/// Uses of one expert after which what followed earlier counts half.
const HALVE: u32 = 64;
/// Predictions are worth a read if this part of them was right lately.
const WORTH: f32 = 0.75;
/// The weight of the last prediction in what counts as lately.
const LAST: f32 = 1.0 / 64.0;
/// Predictions are told apart up to so many layers ahead; what is farther is not taken.
const AHEAD_MAX: usize = 8;
/// Predictions that wait to be compared.
const PREDICTED_MAX: usize = 1024;
/// They are told apart by so many places; those behind count as the last.
const PLACES: usize = 16;

#[derive(Debug, Default)]
struct Followers {
    /// Experts of the next layer, and how often each followed.
    counts: Vec<(u32, u32)>,
    uses: u32,
}

impl Followers {
    fn count(&mut self, expert: u32) {
        if let Some((_, count)) = self.counts.iter_mut().find(|(known, _)| *known == expert) {
            *count += 1;
        } else if self.counts.len() < FOLLOWERS {
            self.counts.push((expert, 1));
        } else if let Some(least) = self.counts.iter_mut().min_by_key(|(_, count)| *count) {
            // The newcomer may have followed as often as the one whose place it takes.
            *least = (expert, least.1 + 1);
        }
    }

    fn used(&mut self) {
        self.uses += 1;
        if self.uses == HALVE {
            self.uses /= 2;
            self.counts.iter_mut().for_each(|(_, count)| *count /= 2);
            self.counts.retain(|(_, count)| *count > 0);
        }
    }
}

/// Experts of one layer.
#[derive(Debug, Default)]
struct Step {
    layer: u32,
    experts: Vec<u32>,
}

/// An expert that was predicted.
#[derive(Debug)]
struct Prediction {
    id: ExpertId,
    /// How many layers ahead, from 0, and in which place, both within what is told apart.
    ahead: usize,
    place: usize,
}

/// See above.
#[derive(Debug)]
pub struct Foresight {
    table: HashMap<ExpertId, Followers>,
    /// What was used last.
    last: Step,
    /// What faults have told of so far.
    coming: Step,
    /// What was predicted and not in memory, until it is seen what was used.
    predicted: VecDeque<Prediction>,
    /// The part of what was predicted lately that was used, by how far ahead and by place.
    right: [[f32; PLACES]; AHEAD_MAX],
}

impl Default for Foresight {
    fn default() -> Self {
        Self {
            table: HashMap::new(),
            last: Step::default(),
            coming: Step::default(),
            predicted: VecDeque::new(),
            right: [[1.0; PLACES]; AHEAD_MAX],
        }
    }
}

impl Foresight {
    /// These experts of a layer are all that is used there now. They are compared with what was predicted, and
    /// remembered as what followed the experts of the layer before.
    pub fn used(&mut self, layer: u32, experts: &[u32]) {
        let Self { predicted, right, .. } = self;
        predicted.retain(|Prediction { id, ahead, place }| {
            if id.layer == layer {
                let right = &mut right[*ahead][*place];
                *right += LAST * (f32::from(experts.contains(&id.expert)) - *right);
            }
            id.layer != layer
        });
        if self.last.layer.checked_add(1) == Some(layer) {
            for before in &self.last.experts {
                let id = ExpertId { layer: self.last.layer, expert: *before };
                if self.table.len() >= KNOWN_MAX && !self.table.contains_key(&id) {
                    continue;
                }
                let followers = self.table.entry(id).or_default();
                experts.iter().for_each(|expert| followers.count(*expert));
                followers.used();
            }
        }
        self.last = Step { layer, experts: experts.to_vec() };
    }

    /// This expert was touched: one of those that its layer uses now. Returns whether they are likely to be all.
    pub fn touched(&mut self, id: ExpertId) -> bool {
        if self.coming.layer != id.layer {
            let ended = std::mem::replace(&mut self.coming, Step { layer: id.layer, experts: Vec::new() });
            self.used(ended.layer, &ended.experts);
        }
        if self.coming.experts.contains(&id.expert) {
            return false;
        }
        self.coming.experts.push(id.expert);
        self.coming.experts.len() == self.last.experts.len()
    }

    /// The experts of the next layer that followed those which were used last, as many as these are.
    pub fn after_used(&self) -> Option<(u32, Vec<u32>)> {
        self.after(&self.last)
    }

    /// The experts of the next layer that followed those which were [touched](Self::touched).
    pub fn after_touched(&self) -> Option<(u32, Vec<u32>)> {
        self.after(&self.coming)
    }

    fn after(&self, step: &Step) -> Option<(u32, Vec<u32>)> {
        let layer = step.layer.checked_add(1)?;
        let mut sums: HashMap<u32, u32> = HashMap::new();
        for expert in &step.experts {
            let followers = self.table.get(&ExpertId { layer: step.layer, expert: *expert });
            for (follower, count) in followers.into_iter().flat_map(|followers| &followers.counts) {
                *sums.entry(*follower).or_default() += count;
            }
        }
        let mut most: Vec<(u32, u32)> = sums.into_iter().map(|(expert, sum)| (sum, expert)).collect();
        most.sort_unstable_by(|a, b| b.cmp(a));
        most.truncate(step.experts.len());
        (!most.is_empty()).then(|| (layer, most.into_iter().map(|(_, expert)| expert).collect()))
    }

    /// These experts of the layers to come are predicted, in this order, of each layer the most likely first; not all
    /// are in memory. Returns those that are worth a read, of as many layers.
    pub fn predicts(&mut self, layers: &[LayerExperts<'_>], is_there: impl Fn(ExpertId) -> bool) -> Vec<Vec<u32>> {
        let Self { predicted, right, .. } = self;
        let of = |(ahead, LayerExperts { layer, experts }): (usize, &LayerExperts<'_>)| {
            let mut worth_a_read = Vec::new();
            for (place, expert) in experts.iter().enumerate() {
                let (id, place) = (ExpertId { layer: *layer, expert: *expert }, place.min(PLACES - 1));
                if right[ahead][place] >= WORTH {
                    worth_a_read.push(*expert);
                }
                if !is_there(id) {
                    predicted.push_back(Prediction { id, ahead, place });
                }
            }
            worth_a_read
        };
        let all = layers.iter().enumerate().take(AHEAD_MAX).map(of).collect();
        // Layers that do not come leave theirs.
        predicted.drain(..predicted.len().saturating_sub(PREDICTED_MAX));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::{ExpertId, Foresight, LayerExperts};

    #[test]
    fn what_followed_is_predicted_and_what_changes_is_forgotten() {
        let mut foresight = Foresight::default();
        for shift in [0, 5] {
            for token in 0..200 {
                for layer in 0..4 {
                    let experts = [token % 7 + layer, 20 + (token + shift * layer) % 7];
                    foresight.used(layer, &experts);
                }
            }
            foresight.used(2, &[3 + 2, 20 + (3 + 2 * shift) % 7]);
            let (layer, mut next) = foresight.after_used().unwrap_or_default();
            next.sort_unstable();
            assert_eq!((layer, next), (3, vec![3 + 3, 20 + (3 + 3 * shift) % 7]), "shift {shift}");
        }
    }

    #[test]
    fn predictions_that_are_wrong_are_not_worth_a_read_until_they_are_right_again() {
        let mut foresight = Foresight::default();
        let predicts = |foresight: &mut Foresight| {
            let worth = foresight.predicts(&[LayerExperts { layer: 1, experts: &[1, 2] }], |_| false);
            worth[0].contains(&1)
        };
        assert!(predicts(&mut foresight));
        let tries = |foresight: &mut Foresight, used: &[u32]| {
            let ends = |foresight: &mut Foresight| {
                foresight.used(1, used);
                predicts(foresight)
            };
            let before = ends(foresight);
            (0..1000).find(|_| ends(foresight) != before).unwrap_or(1000)
        };
        assert!((10..200).contains(&tries(&mut foresight, &[8, 9])));
        assert_eq!(tries(&mut foresight, &[8, 9]), 1000);
        assert!((10..400).contains(&tries(&mut foresight, &[2, 1])));
        assert_eq!(tries(&mut foresight, &[2, 1]), 1000);
    }

    #[test]
    fn predictions_are_judged_apart_by_place_and_by_how_far_ahead_they_are() {
        let mut foresight = Foresight::default();
        let of = |layer, experts| LayerExperts { layer, experts };
        let mut worth = Vec::new();
        for layer in 0..400 {
            foresight.used(layer, &[1, 2]);
            // Of the next layer one is wrong, and of the second layer the other one.
            worth.push(foresight.predicts(&[of(layer + 1, &[1, 9]), of(layer + 2, &[9, 2])], |_| false));
        }
        assert_eq!(worth[0], [[1, 9], [9, 2]]);
        assert_eq!(worth[399], [[1], [2]]);
        assert!(foresight.predicted.len() <= 6, "what was used is no prediction any more");
    }

    /// What is in memory costs no read, so it says nothing of what reads are worth.
    #[test]
    fn predictions_of_what_is_there_are_not_judged() {
        let mut foresight = Foresight::default();
        for layer in 0..400 {
            foresight.used(layer, &[1]);
            let next = [LayerExperts { layer: layer + 1, experts: &[1, 9] }];
            assert_eq!(foresight.predicts(&next, |id| id.expert == 9), [[1, 9]]);
        }
    }

    #[test]
    fn touches_of_one_layer_are_a_use() {
        let mut foresight = Foresight::default();
        let touch = |foresight: &mut Foresight, layer, expert| foresight.touched(ExpertId { layer, expert });
        for _ in 0..3 {
            for layer in 0..3 {
                touch(&mut foresight, layer, 4);
                assert!(!touch(&mut foresight, layer, 4));
                touch(&mut foresight, layer, 5 + layer);
            }
        }
        assert!(!touch(&mut foresight, 0, 5) && touch(&mut foresight, 0, 4), "two, as in the layer before");
        let (layer, mut next) = foresight.after_touched().unwrap_or_default();
        next.sort_unstable();
        assert_eq!((layer, next), (1, vec![4, 6]));
    }

    #[test]
    fn memory_is_bounded() {
        let mut foresight = Foresight::default();
        for layer in 0..300 {
            foresight.used(layer, &Vec::from_iter(0..1000));
        }
        assert!(foresight.table.len() <= super::KNOWN_MAX);
        assert!(foresight.table.values().all(|followers| followers.counts.len() <= super::FOLLOWERS));
        let all = Vec::from_iter(0..1000);
        let far: Vec<_> = (1000..1100).map(|layer| LayerExperts { layer, experts: &all }).collect();
        assert_eq!(foresight.predicts(&far, |_| false).len(), super::AHEAD_MAX);
        assert_eq!(foresight.predicted.len(), super::PREDICTED_MAX);
        assert_eq!(foresight.after_used(), None);
    }
}
