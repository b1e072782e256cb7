//! The pages that were published last, which stay pinned for a moment: [`crate::faults`] says why.

use std::collections::VecDeque;
use std::sync::Weak;

use parking_lot::Mutex;

use crate::handler::{Handler, Pins};

/// Pages that were published, and are pinned for the moment.
pub struct Held {
    pub range: u64,
    /// Where they begin in the range.
    pub pages: Vec<u64>,
    pub handler: Weak<dyn Handler>,
    /// Whether they are kept because the program told of them, and not because a thread waited for them.
    pub told: bool,
    /// Held, and never looked at.
    pub _pins: Pins,
}

#[derive(Default)]
struct Kept {
    held: VecDeque<Held>,
    /// Addresses of the pages of turns, which are not let go.
    guarded: Vec<u64>,
}

impl Kept {
    /// A page of a turn is held alone too. A set of pages would keep others with it, until no frame is left.
    fn is_guarded(&self, held: &Held) -> bool {
        matches!(held.pages[..], [page] if self.guarded.contains(&(held.range + page)))
    }
}

/// The pages that were published last.
#[derive(Default)]
pub struct Keeper(Mutex<Kept>);

impl Keeper {
    /// Keeps these pages, and lets the oldest go while more than `most` are kept; never the ones that are added. Of
    /// those that go, the ones whose next use is to be seen are given to `hide`, with what says whether anybody but the
    /// keeper has them pinned.
    pub fn keep(&self, held: Held, most: usize, hide: impl Fn(u64, &dyn Fn() -> bool)) {
        // Pins and handlers are dropped without the lock: that may wake whoever waits for frames.
        let (mut gone, mut handlers) = (Vec::new(), Vec::new());
        {
            let mut kept = self.0.lock();
            kept.held.push_back(held);
            let mut pages: usize = kept.held.iter().map(|held| held.pages.len()).sum();
            let mut at = 0;
            while pages > most && at + 1 < kept.held.len() {
                if kept.is_guarded(&kept.held[at]) {
                    at += 1;
                    continue;
                }
                let Some(old) = kept.held.remove(at) else { break };
                pages -= old.pages.len();
                gone.push(old);
            }
            for old in &gone {
                let Some(handler) = old.handler.upgrade() else { continue };
                let again =
                    |page: &u64| kept.held.iter().any(|held| held.range == old.range && held.pages.contains(page));
                for page in old.pages.iter().filter(|page| handler.hides(**page) && !again(page)) {
                    // One pin is the keeper's own.
                    hide(old.range + page, &|| handler.pins(*page) > 1);
                }
                handlers.push(handler);
            }
        }
    }

    /// Lets all pages go but those of the last two faults. A thread that has a turn, and not used its pages yet, asks
    /// for them again.
    pub fn let_go(&self) {
        self.drop_all(|held| held.told);
        let gone: Vec<Held> = {
            let mut kept = self.0.lock();
            let old = kept.held.len().saturating_sub(2);
            kept.held.drain(..old).collect()
        };
        drop(gone);
    }

    /// The pages at these addresses are not let go from now on; others are.
    pub fn guard(&self, pages: Vec<u64>) {
        self.0.lock().guarded = pages;
    }

    /// Lets go of a page that is to be written: a pin for writing waits for all others.
    pub fn let_write(&self, range: u64, page: u64) {
        self.drop_all(|held| held.range == range && held.pages.contains(&page));
    }

    /// As [`guard`](Self::guard), and all other pages are let go.
    pub fn keep_only(&self, pages: Vec<u64>) {
        let gone: VecDeque<Held> = {
            let mut kept = self.0.lock();
            kept.guarded = pages;
            let held = std::mem::take(&mut kept.held);
            let (stay, gone) = held.into_iter().partition(|held| kept.is_guarded(held));
            kept.held = stay;
            gone
        };
        drop(gone);
    }

    pub fn forget(&self, range: u64) {
        self.drop_all(|held| held.range == range);
    }

    fn drop_all(&self, which: impl Fn(&Held) -> bool) {
        let gone: VecDeque<Held> = {
            let mut kept = self.0.lock();
            let (gone, others) = kept.held.drain(..).partition(which);
            kept.held = others;
            gone
        };
        drop(gone);
    }

    pub fn is_empty(&self) -> bool {
        self.0.lock().held.is_empty()
    }

    pub fn clear(&self) {
        let gone = std::mem::take(&mut *self.0.lock());
        drop(gone);
    }
}
