//! Which experts a layer will use, by what followed before, and how far such words can be trusted.
//!
//! For each expert is kept which experts of the next layer were used by the same tokens, and how often: a Markov table
//! over (layer, expert). What followed all experts of a layer together names the ones that are likely next. Memory is
//! bounded: of each expert, the [`FOLLOWERS`] that followed most (as in A. Metwally, D. Agrawal and A. El Abbadi,
//! "Efficient computation of frequent and top-k elements in data streams", ICDT 2005).
//!
//! A prediction that is wrong takes the disk from what is needed. So each one is compared with what was used. Where
//! less than [`WORTH`] of what was predicted lately was used, nothing is read for a prediction until that is better.

use std::collections::HashMap;

use crate::experts::ExpertId;

/// Experts of the next layer that are remembered for each expert.
const FOLLOWERS: usize = 16;
/// Experts of which something is remembered: about 20 MB.
const KNOWN_MAX: usize = 1 << 17;
/// Uses of one expert after which what followed earlier counts half.
const HALVE: u32 = 64;
/// Predictions are worth a read if this part of them was right lately.
const WORTH: f32 = 0.4;
/// The weight of the last prediction in what counts as lately.
const LAST: f32 = 1.0 / 64.0;

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

/// See above.
#[derive(Debug)]
pub struct Foresight {
    table: HashMap<ExpertId, Followers>,
    /// What was used last.
    last: Step,
    /// What faults have told of so far.
    coming: Step,
    /// What was predicted, until it is seen what was used.
    predicted: Step,
    /// The part of what was predicted lately that was used.
    right: f32,
}

impl Default for Foresight {
    fn default() -> Self {
        Self {
            table: HashMap::new(),
            last: Step::default(),
            coming: Step::default(),
            predicted: Step::default(),
            right: 1.0,
        }
    }
}

impl Foresight {
    /// These experts of a layer are all that is used there now. They are compared with what was predicted, and
    /// remembered as what followed the experts of the layer before.
    pub fn used(&mut self, layer: u32, experts: &[u32]) {
        let predicted = std::mem::take(&mut self.predicted);
        if predicted.layer == layer && !predicted.experts.is_empty() {
            let right = predicted.experts.iter().filter(|expert| experts.contains(expert)).count();
            self.right += LAST * (right as f32 / predicted.experts.len() as f32 - self.right);
        }
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

    /// These experts of a layer are predicted. Returns whether that is worth a read.
    pub fn predicts(&mut self, layer: u32, experts: &[u32]) -> bool {
        self.predicted = Step { layer, experts: experts.to_vec() };
        self.right >= WORTH
    }
}

#[cfg(test)]
mod tests {
    use super::{ExpertId, Foresight};

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
        assert!(foresight.predicts(1, &[1, 2]));
        let tries = |foresight: &mut Foresight, used: &[u32]| {
            let ends = |foresight: &mut Foresight| {
                foresight.used(1, used);
                foresight.predicts(1, &[1, 2])
            };
            let before = ends(foresight);
            (0..1000).find(|_| ends(foresight) != before).unwrap_or(1000)
        };
        assert!((20..200).contains(&tries(&mut foresight, &[8, 9])));
        assert_eq!(tries(&mut foresight, &[8, 9]), 1000);
        assert!((20..200).contains(&tries(&mut foresight, &[2, 1])));
        // Half of them right is worth it.
        assert_eq!(tries(&mut foresight, &[2, 9]), 1000);
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
        assert_eq!(foresight.after_used(), None);
    }
}
