//! When drafts pay, and drafts by looking up the prompt: where the last tokens stood before, what followed them then
//! may follow now (Saxena, Prompt Lookup Decoding, 2023). A draft is read in one pass and kept as far as the model
//! agrees, so that answers are the same with and without.

/// The most tokens of a draft.
pub const DRAFT_MOST: usize = 16;
/// Lengths of the ends that are looked for, longest first.
const ENDS: [usize; 3] = [4, 3, 2];
/// How far back it looks, in tokens.
const BACK_MOST: usize = 8192;
/// How much the last draft counts beside those before.
const NEW: f64 = 0.2;

/// Who made a draft.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DraftBy {
    /// Looking up what followed the last tokens before.
    #[default]
    Lookup,
    /// A draft model.
    SmallModel,
}

/// Whether drafts of one sequence, made in one way, pay.
#[derive(Clone, Copy, Debug)]
pub struct Drafts {
    /// How likely a drafted token is right, by those before.
    hit: f64,
}

impl Default for Drafts {
    fn default() -> Self {
        Self { hit: 0.6 }
    }
}

impl Drafts {
    /// How many drafted tokens pay, up to `most`. `worth` is what a token of a draft costs, drafting it and reading it,
    /// beside what a token is worth that is got without a pass: below 1 if drafts can pay at all.
    pub fn pay(&self, most: usize, worth: f64) -> usize {
        // The nth token of a draft is right with all before it.
        let mut right = self.hit;
        let mut pays = 0;
        while pays < most && right > worth {
            pays += 1;
            right *= self.hit;
        }
        pays
    }

    /// Records that `right` of `drafted` tokens were right.
    pub fn observe(&mut self, drafted: usize, right: usize) {
        if drafted > 0 {
            // Where all were right the next one would have been, too.
            let share = if right == drafted { 1.0 } else { right as f64 / (right + 1) as f64 };
            self.hit = (self.hit * (1.0 - NEW) + share * NEW).clamp(0.05, 0.98);
        }
    }
}

/// What followed the last tokens when they stood somewhere before, latest place first: up to `most` tokens. It goes on
/// behind the end of `tokens` as if that had come true.
pub fn follow(tokens: &[u32], most: usize) -> Vec<u32> {
    let from = tokens.len().saturating_sub(BACK_MOST);
    for len in ENDS {
        let Some(start) = tokens.len().checked_sub(len) else { continue };
        let end = &tokens[start..];
        let Some(at) = (from..start).rev().find(|at| tokens[*at..].starts_with(end)) else { continue };
        let mut draft: Vec<u32> = Vec::with_capacity(most);
        for next in (at + len..).take(most) {
            draft.extend(tokens.get(next).or_else(|| draft.get(next - tokens.len())).copied());
        }
        return draft;
    }
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draft_is_what_followed_the_longest_end() {
        assert_eq!(follow(&[1, 2, 3, 4, 9, 9, 2, 3, 5, 1, 2, 3], 2), [4, 9]);
        assert_eq!(follow(&[7, 2, 3, 8, 2, 3, 6, 2, 3], 5), [6, 2, 3, 6, 2]);
        assert!(follow(&[1, 2, 3], 4).is_empty() && follow(&[], 4).is_empty() && follow(&[1, 1, 1, 1], 0).is_empty());
        // It may run into itself.
        assert_eq!(follow(&[5, 5, 5, 5], 3), [5, 5, 5]);
        assert_eq!(follow(&[1, 2, 1, 2, 1, 2], 5), [1, 2, 1, 2, 1]);
    }

    #[test]
    fn drafts_that_fail_get_shorter_and_those_that_hold_get_longer() {
        let mut drafts = Drafts::default();
        (0..20).for_each(|_| drafts.observe(8, 8));
        assert_eq!((drafts.pay(DRAFT_MOST, 0.3), drafts.pay(3, 0.3), drafts.pay(DRAFT_MOST, 1.0)), (DRAFT_MOST, 3, 0));
        (0..20).for_each(|_| drafts.observe(8, 0));
        assert_eq!((drafts.pay(DRAFT_MOST, 0.3), drafts.pay(DRAFT_MOST, 0.01)), (0, 1));
    }
}
