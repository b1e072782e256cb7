//! Which request waits for what, and who holds it. For a person who wants to know why nothing goes on.

use std::collections::HashMap;
use std::sync::Arc;

use super::Admission;
use super::line::{Class, Turn};
use super::request::Stage;
use crate::ids::{PageId, PageIndex, RequestId, ScopeId, SegmentId};
use crate::residency::Residency;
use crate::runs::pages_of;
use crate::{Holdings, PageWord, PageWords, Purpose, State};

/// A request that waits.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waiter {
    /// The request.
    pub id: RequestId,
    /// Its scope and the scope's label, if it has a scope.
    pub scope: Option<(ScopeId, String)>,
    /// Whether its scope holds pins while it waits.
    pub holds: bool,
    /// The first page that it wants to pin.
    pub first: Option<PageId>,
    /// How many pages it wants to pin.
    pub pages: u64,
    /// What it wants the pins for.
    pub purpose: Purpose,
    /// What is in its way.
    pub waits_for: WaitsFor,
    /// The holders of what is in its way. Empty if it waits for moves.
    pub holders: Vec<Holder>,
}

/// What is in a request's way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum WaitsFor {
    /// Nothing but the ends of moves: reads, copies, write backs, and work on streams behind which pins end.
    Moves,
    /// Frames. Others may have the frames of the budget pinned.
    Frames {
        /// How many frames it wants beyond those its scope has set aside.
        wanted: u32,
        /// Frames of the budget.
        budget: u32,
    },
    /// A page that others have pinned, or that older requests wait for.
    Page(PageId),
    /// A smaller budget. The request wants no page. Frames are given back as guards and scopes end; without
    /// [holders](Waiter::holders), as moves end.
    Budget {
        /// How many frames are still to be given back.
        over: u32,
        /// Frames of the budget.
        budget: u32,
    },
}

/// A scope, or all pins outside of scopes, that have pages pinned.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// The scope and its label. `None` for pins outside of scopes, of which nothing more is known.
    pub scope: Option<(ScopeId, String)>,
    /// How many of the pages in the way it has pinned. If a budget waits, also the frames it has set aside.
    pub pages: u64,
    /// The first of these pages; `None` if all it has are frames set aside.
    pub first: Option<PageId>,
    /// Whether one of them is pinned for writing.
    pub writes: bool,
}

impl Holder {
    fn has(&mut self, page: PageId, writes: bool) {
        self.pages += 1;
        self.first.get_or_insert(page);
        self.writes |= writes;
    }
}

/// The requests that wait, and what is needed to find the holders they wait for. Made under the latch, in time that
/// grows with the number of waiting requests and of scopes. [`told`](Self::told) does the rest without the latch, by a
/// look at every page.
#[derive(Debug)]
pub struct WhoWaits {
    waiters: Vec<Waiter>,
    total: usize,
    words: Vec<(SegmentId, PageWords)>,
    scopes: Vec<ScopeSeen>,
}

#[derive(Debug)]
struct ScopeSeen {
    id: ScopeId,
    label: Arc<str>,
    holdings: Arc<Holdings>,
    set_aside: u32,
}

impl Admission {
    /// The waiting requests in the order they are served, and how many there are in all. Lists at most `most`, and in
    /// addition those that wait for a smaller budget.
    pub(crate) fn who_waits(&self, res: &Residency, most: usize) -> WhoWaits {
        let mut ids: Vec<(Turn, RequestId)> = self
            .request_stages()
            .filter(|(_, stage, ..)| *stage != Stage::Shrinking as u8)
            .filter_map(|(id, ..)| self.request_stand(id).map(|(turn, ..)| (turn, id)))
            .collect();
        let total = ids.len() + self.shrinking.len();
        if ids.len() > most {
            ids.select_nth_unstable(most);
            ids.truncate(most);
        }
        ids.sort_unstable();
        let asking = ids.into_iter().filter_map(|(turn, id)| self.waiter(res, turn, id));
        let over = res.frames().existing.saturating_sub(res.frames().target);
        let shrinking = self.shrinking.iter().map(|id| Waiter {
            id: *id,
            scope: None,
            holds: false,
            first: None,
            pages: 0,
            purpose: Purpose::Read,
            waits_for: WaitsFor::Budget { over, budget: res.frames().target },
            holders: Vec::new(),
        });
        let waiters: Vec<Waiter> = asking.chain(shrinking).collect();
        // Without a request that waits for others, there are no holders to find.
        let (mut words, mut scopes) = (Vec::new(), Vec::new());
        if waiters.iter().any(|waiter| waiter.waits_for != WaitsFor::Moves) {
            words.extend(res.words());
            scopes.extend(self.scopes_seen());
        }
        WhoWaits { waiters, total, words, scopes }
    }

    /// Whether a request waits for anything but moves.
    pub(crate) fn waits_for_others(&self, id: RequestId) -> bool {
        let for_others =
            |(turn, frames, pages): (Turn, bool, Vec<_>)| turn.class != Class::Holding && (frames || !pages.is_empty());
        let stands = self.request_stand(id).is_some_and(for_others);
        stands || self.shrinking.contains(&id)
    }

    fn waiter(&self, res: &Residency, turn: Turn, id: RequestId) -> Option<Waiter> {
        let (_, frames, pages) = self.request_stand(id)?;
        let runs = self.request_runs(id)?;
        let (scope, purpose) = self.request_terms(id)?;
        let waits_for = match (frames, pages.first()) {
            _ if turn.class == Class::Holding => WaitsFor::Moves,
            (true, _) => WaitsFor::Frames { wanted: self.frames_short(res, id), budget: res.frames().target },
            (false, Some(page)) => WaitsFor::Page(*page),
            (false, None) => WaitsFor::Moves,
        };
        let label = || self.scope(scope).map(|scope| scope.label().to_string()).unwrap_or_default();
        Some(Waiter {
            id,
            scope: scope.map(|scope| (scope, label())),
            holds: turn.class == Class::Holding,
            first: runs.first().and_then(|run| run.pages().next()),
            pages: pages_of(runs),
            purpose,
            waits_for,
            holders: Vec::new(),
        })
    }

    fn scopes_seen(&self) -> impl Iterator<Item = ScopeSeen> {
        self.open_scopes().map(|(id, scope)| ScopeSeen {
            id,
            label: scope.label().clone(),
            holdings: scope.holdings().clone(),
            set_aside: scope.purse + scope.coming,
        })
    }
}

impl WhoWaits {
    /// The waiting requests, with those that now hold what they wait for, and how many wait in all.
    pub fn told(mut self) -> (Vec<Waiter>, usize) {
        let held = self.held_by_scopes();
        // Found once for all requests that wait for frames.
        let mut of_frames = None;
        let mut waiters = std::mem::take(&mut self.waiters);
        for waiter in &mut waiters {
            waiter.holders = match waiter.waits_for {
                WaitsFor::Moves => Vec::new(),
                WaitsFor::Page(page) => {
                    self.holders(&held, self.word(page).map(|word| (page, word)).into_iter(), false)
                }
                WaitsFor::Frames { .. } => {
                    of_frames.get_or_insert_with(|| self.holders(&held, self.all_words(), false)).clone()
                }
                WaitsFor::Budget { budget, .. } => {
                    let holders = self.holders(&held, self.all_words(), true);
                    // Holders of no more than the budget are not in its way: it waits for write backs.
                    let over = holders.iter().map(|holder| holder.pages).sum::<u64>() > u64::from(budget);
                    if over { holders } else { Vec::new() }
                }
            };
        }
        (waiters, self.total)
    }

    fn word(&self, page: PageId) -> Option<&PageWord> {
        self.words.iter().find(|(segment, _)| *segment == page.segment)?.1.get(page.index.index())
    }

    fn all_words(&self) -> impl Iterator<Item = (PageId, &PageWord)> {
        self.words.iter().flat_map(|(segment, words)| {
            let page = |index| PageId { segment: *segment, index: PageIndex(index as u32) };
            words.iter().enumerate().map(move |(index, word)| (page(index), word))
        })
    }

    fn held_by_scopes(&self) -> HashMap<PageId, Vec<(usize, bool)>> {
        let mut held: HashMap<PageId, Vec<(usize, bool)>> = HashMap::new();
        for (number, scope) in self.scopes.iter().enumerate() {
            for (run, writes) in scope.holdings.runs() {
                for page in run.pages() {
                    held.entry(page).or_default().push((number, writes));
                }
            }
        }
        held
    }

    /// The holders of these pages, the one with the most pages first.
    fn holders<'a>(
        &self,
        held: &HashMap<PageId, Vec<(usize, bool)>>,
        pages: impl Iterator<Item = (PageId, &'a PageWord)>,
        with_purses: bool,
    ) -> Vec<Holder> {
        let named = |number: usize| (self.scopes[number].id, self.scopes[number].label.to_string());
        let holder = |number: Option<usize>| Holder { scope: number.map(named), pages: 0, first: None, writes: false };
        let mut holders: HashMap<Option<usize>, Holder> = HashMap::new();
        let mut has = |number, page, writes| {
            holders.entry(number).or_insert_with(|| holder(number)).has(page, writes);
        };
        for (page, word) in pages {
            let word = word.load();
            if word.pins == 0 || word.state == State::Empty {
                continue;
            }
            let scopes = held.get(&page).map_or(&[][..], Vec::as_slice);
            let mut distinct: Vec<usize> = scopes.iter().map(|(number, _)| *number).collect();
            distinct.sort_unstable();
            distinct.dedup();
            for number in distinct {
                has(Some(number), page, scopes.iter().any(|(other, writes)| *other == number && *writes));
            }
            if word.pins as usize > scopes.len() {
                has(None, page, word.exclusive);
            }
        }
        for (number, scope) in self.scopes.iter().enumerate().filter(|(_, scope)| with_purses && scope.set_aside > 0) {
            let number = Some(number);
            holders.entry(number).or_insert_with(|| holder(number)).pages += u64::from(scope.set_aside);
        }
        let mut holders: Vec<Holder> = holders.into_values().collect();
        holders.sort_by(|a, b| b.pages.cmp(&a.pages).then_with(|| a.scope.cmp(&b.scope)));
        holders
    }
}
