//! Who waits for what, and who holds it: what a person reads who wants to know why nothing goes on.

use std::collections::HashMap;

use super::admit::Stage;
use super::line::Class;
use super::{Pager, Purpose, State};
use crate::ids::{PageId, RequestId, ScopeId};

/// A request that waits.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waiter {
    /// The request.
    pub id: RequestId,
    /// Its scope, if it has one, and that scope's label.
    pub scope: Option<(ScopeId, String)>,
    /// Whether its scope holds pins while it waits.
    pub holds: bool,
    /// What it wants to pin: the first of them, and how many there are in all.
    pub first: Option<PageId>,
    /// See [`first`](Self::first).
    pub pages: u64,
    /// What for.
    pub purpose: Purpose,
    /// What is in its way.
    pub waits_for: WaitsFor,
    /// Who has what is in its way. Empty where it waits for moves.
    pub holders: Vec<Holder>,
}

/// What is in a request's way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum WaitsFor {
    /// Nothing but the ends of moves: reads, copies, write backs.
    Moves,
    /// Frames: so many more than its scope has set aside, in a budget of so many that somebody may have pinned.
    Frames {
        /// How many it wants.
        wanted: u32,
        /// Frames of the budget.
        budget: u32,
    },
    /// A page that others have pinned, or wait for and came before.
    Page(PageId),
}

/// Who has pages pinned.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// The scope and its label; of pins outside of scopes nothing is known.
    pub scope: Option<(ScopeId, String)>,
    /// How many pages, of those that are in the way, it has pinned.
    pub pages: u64,
    /// Whether one of them is pinned for writing.
    pub writes: bool,
}

impl Pager {
    /// Requests that wait, in the order they are served, at most `most`, and how many there are in all.
    ///
    /// It looks at every page that is resident, under the latch: for people, not for loops.
    pub fn waiting(&self, most: usize) -> (Vec<Waiter>, usize) {
        let mut ids: Vec<(super::line::Turn, RequestId)> = self
            .request_stages()
            .filter(|(_, stage, ..)| *stage != Stage::Shrinking as u8)
            .filter_map(|(id, ..)| self.request_stand(id).map(|(turn, ..)| (turn, id)))
            .collect();
        ids.sort_unstable();
        let total = ids.len();
        ids.truncate(most);
        let held = self.held_by_scopes();
        // Found once for everybody who waits for frames.
        let mut of_frames = None;
        let waiters = ids.into_iter().filter_map(|(turn, id)| {
            let (_, frames, pages) = self.request_stand(id)?;
            let runs = self.request_runs(id)?;
            let (scope, purpose) = self.request_terms(id)?;
            let (waits_for, holders) = match (frames, pages.first()) {
                (Some(wanted), _) => {
                    let holders = of_frames.get_or_insert_with(|| self.holders(&held, self.policy.tracked())).clone();
                    (WaitsFor::Frames { wanted, budget: self.frames.target }, holders)
                }
                (None, Some(page)) => (WaitsFor::Page(*page), self.holders(&held, vec![*page])),
                (None, None) => (WaitsFor::Moves, Vec::new()),
            };
            Some(Waiter {
                id,
                scope: self.named(scope),
                holds: turn.class == Class::Growing,
                first: runs.first().and_then(|run| run.pages().next()),
                pages: super::scope::pages_of(runs),
                purpose,
                waits_for,
                holders,
            })
        });
        (waiters.collect(), total)
    }

    fn named(&self, id: Option<ScopeId>) -> Option<(ScopeId, String)> {
        Some((id?, self.scope(id).map(|scope| scope.label().to_owned()).unwrap_or_default()))
    }

    fn held_by_scopes(&self) -> HashMap<PageId, Vec<(ScopeId, bool)>> {
        let mut held: HashMap<PageId, Vec<(ScopeId, bool)>> = HashMap::new();
        for (id, runs) in self.all_holdings() {
            for (run, writes) in runs {
                for page in run.pages() {
                    held.entry(page).or_default().push((id, writes));
                }
            }
        }
        held
    }

    /// Who has these pages pinned, whoever has most of them first.
    fn holders(&self, held: &HashMap<PageId, Vec<(ScopeId, bool)>>, pages: Vec<PageId>) -> Vec<Holder> {
        let mut holders: HashMap<Option<ScopeId>, (u64, bool)> = HashMap::new();
        for page in pages {
            let word = self.word(page).load();
            if word.pins == 0 || word.state == State::Empty {
                continue;
            }
            let scopes = held.get(&page).map_or(&[][..], Vec::as_slice);
            let mut distinct: Vec<ScopeId> = scopes.iter().map(|(id, _)| *id).collect();
            distinct.sort_unstable();
            distinct.dedup();
            for id in distinct {
                let writes = scopes.iter().any(|(other, writes)| *other == id && *writes);
                let holder = holders.entry(Some(id)).or_default();
                *holder = (holder.0 + 1, holder.1 || writes);
            }
            if word.pins as usize > scopes.len() {
                let holder = holders.entry(None).or_default();
                *holder = (holder.0 + 1, holder.1 || word.exclusive);
            }
        }
        let mut holders: Vec<Holder> =
            holders.into_iter().map(|(id, (pages, writes))| Holder { scope: self.named(id), pages, writes }).collect();
        holders.sort_by(|a, b| b.pages.cmp(&a.pages).then_with(|| a.scope.cmp(&b.scope)));
        holders
    }
}
