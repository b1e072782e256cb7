//! Victims that are on their way out and that nobody waits for.

use std::collections::{BTreeMap, HashMap};

use crate::ids::{MoveId, PageId};

/// Moves in the background that free a frame, oldest first. A page has one such move at most.
#[derive(Debug, Default)]
pub(super) struct Victims {
    /// By the count of moves that were added before.
    by_age: BTreeMap<u64, (PageId, MoveId)>,
    /// By page, its key in `by_age`.
    ages: HashMap<PageId, u64>,
    added: u64,
}

impl Victims {
    pub(super) fn len(&self) -> usize {
        self.by_age.len()
    }

    /// Adds the move of a page that has none here.
    pub(super) fn add(&mut self, page: PageId, id: MoveId) {
        self.by_age.insert(self.added, (page, id));
        self.ages.insert(page, self.added);
        self.added += 1;
    }

    /// The page's move has ended, or frees no frame any more. It may not be here.
    pub(super) fn remove(&mut self, page: PageId) {
        if let Some(age) = self.ages.remove(&page) {
            self.by_age.remove(&age);
        }
    }

    /// Takes the oldest move out.
    pub(super) fn take_oldest(&mut self) -> Option<MoveId> {
        let (_, (page, id)) = self.by_age.pop_first()?;
        self.ages.remove(&page);
        Some(id)
    }

    /// For checks: the moves, oldest first.
    pub(super) fn iter(&self) -> impl Iterator<Item = (PageId, MoveId)> {
        self.by_age.values().copied()
    }
}
