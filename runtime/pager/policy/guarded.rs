//! A policy of the user's, which may panic, and may offer nothing where something could go.
//!
//! The policy is called under the latch, in the middle of the pager's work: a panic that got through would leave
//! requests unserved for ever, and so would a policy that keeps all pages. So every call is caught. After a policy
//! finds no victim for a request, the resident pages that it did not offer are looked at. If it panicked, or one of
//! these can go, the policy is dropped, and least recently used goes on with the resident pages. No page, no pin and
//! no byte is lost; the order of the pages starts anew.
//!
//! Pages that were offered are not looked at again. A pin may end at any time, also between the offer and the look, and
//! that is no fault of the policy. The end of a pin tells the pager of the page.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, OnceLock};

use super::{LruPolicy, Policy, Take, WalkerPlace, Want};
use crate::PageRun;
use crate::bits::Bits;
use crate::error::{Error, ErrorKind, caught};
use crate::ids::{PageId, PageIndex, SegmentClass, SegmentId, WalkerId};

/// A policy that was replaced.
#[derive(Clone, Debug)]
pub struct Replaced {
    /// Its name.
    pub name: &'static str,
    /// What it did: a part of a sentence, whose subject is the policy.
    pub did: String,
}

impl Replaced {
    /// What happened, as an error. Nothing was lost.
    pub fn told(&self) -> Error {
        let Self { name, did } = self;
        let what = format!("the policy {name:?} {did}, and lru has taken its place");
        Error::new(ErrorKind::InvalidArgument, what).remedy("correct the policy; no page was lost")
    }
}

/// Empty as long as the policy is in use.
pub type Fate = Arc<OnceLock<Replaced>>;

/// A policy of the user's that cannot keep requests waiting: see the [module documentation](self).
pub struct Guarded {
    name: &'static str,
    /// In a `RefCell`, because methods that take `&self` may panic, too.
    active: RefCell<Active>,
    /// Which pages are resident, one bit a page: all that is needed to go on without the policy.
    resident: HashMap<SegmentId, (u32, Bits)>,
    /// What the policy offered in the call that is under way.
    offered: HashSet<PageId>,
    fate: Fate,
}

enum Active {
    Own(Box<dyn Policy>),
    /// The policy is gone. The next call that takes `&mut self` makes the `Lru`.
    Gone,
    Lru(LruPolicy),
}

impl Guarded {
    pub fn new(own: Box<dyn Policy>) -> (Self, Fate) {
        let fate = Fate::default();
        let mut this = Self {
            name: "a policy without a name",
            active: RefCell::new(Active::Own(own)),
            resident: HashMap::new(),
            offered: HashSet::new(),
            fate: fate.clone(),
        };
        this.name = this.look(|own| own.name()).unwrap_or(this.name);
        (this, fate)
    }

    fn panicked(&self, message: String) {
        self.gone(format!("panicked ({message})"));
    }

    /// Drops the policy because of what it `did`.
    fn gone(&self, did: String) {
        let own = self.active.replace(Active::Gone);
        let dropped = caught(|| drop(own));
        let also = dropped.err().map_or_else(String::new, |also| format!(", panicked when it was dropped ({also})"));
        let _ = self.fate.set(Replaced { name: self.name, did: did + &also });
    }

    /// Asks the policy. `None` where it panics or has done so.
    fn look<T>(&self, ask: impl FnOnce(&dyn Policy) -> T) -> Option<T> {
        let result = match &*self.active.borrow() {
            Active::Own(own) => caught(|| ask(&**own)),
            Active::Gone => return None,
            Active::Lru(lru) => return Some(ask(lru)),
        };
        result.map_err(|message| self.panicked(message)).ok()
    }

    /// Tells the policy. If it panics, its replacement is made from the resident pages and is not told, because it
    /// knows already.
    fn tell<T: Default>(&mut self, tell: impl FnOnce(&mut dyn Policy) -> T) -> T {
        match self.active.get_mut() {
            Active::Own(own) => match caught(|| tell(&mut **own)) {
                Ok(answer) => return answer,
                Err(message) => self.panicked(message),
            },
            Active::Gone => {}
            Active::Lru(lru) => return tell(lru),
        }
        self.go_on();
        T::default()
    }

    /// The segments, in order, so that the same uses have the same victims in every run.
    fn by_segment(&self) -> Vec<(&SegmentId, &(u32, Bits))> {
        let mut segments: Vec<_> = self.resident.iter().collect();
        segments.sort_unstable_by_key(|(segment, _)| **segment);
        segments
    }

    /// The resident pages, in order.
    fn resident_pages(&self) -> impl Iterator<Item = PageId> {
        self.by_segment().into_iter().flat_map(|(segment, (_, resident))| {
            let indices = std::iter::successors(resident.first_from(0), |index| resident.first_from(index + 1));
            indices.map(|index| PageId { segment: *segment, index: PageIndex(index as u32) })
        })
    }

    /// The first resident page that `take` takes, of those that were not offered.
    fn first_not_offered(&self, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
        let silent = self.resident_pages().filter(|page| !self.offered.contains(page));
        let mut answered = silent.map(|page| (page, take(page)));
        answered
            .find(|(_, answer)| *answer != Take::Skip)
            .and_then(|(page, answer)| (answer == Take::Yes).then_some(page))
    }

    fn go_on(&mut self) {
        let mut lru = LruPolicy::new();
        self.by_segment().into_iter().for_each(|(segment, (pages, _))| lru.segment(*segment, *pages));
        self.resident_pages().for_each(|page| lru.inserted(page));
        *self.active.get_mut() = Active::Lru(lru);
    }
}

impl fmt::Debug for Guarded {
    /// Does not call the policy.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guarded")
            .field("policy", &self.name)
            .field("replaced", &self.fate.get())
            .finish_non_exhaustive()
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let own = self.active.replace(Active::Gone);
        // A panic here is not the fault of the caller that drops the last handle.
        let _ = caught(|| drop(own));
    }
}

impl Policy for Guarded {
    fn name(&self) -> &'static str {
        if self.fate.get().is_some() { "lru" } else { self.name }
    }
    fn resize(&mut self, frames: u32, host_frames: u32, lookahead: u32) {
        self.tell(|policy| policy.resize(frames, host_frames, lookahead));
    }
    fn unit(&mut self, pages: u32) {
        self.tell(|policy| policy.unit(pages));
    }
    fn class(&mut self, segment: SegmentId, class: SegmentClass) {
        self.tell(|policy| policy.class(segment, class));
    }
    fn floors(&mut self, floors: &[(SegmentClass, u32)]) -> bool {
        self.tell(|policy| policy.floors(floors))
    }
    fn share(&self, class: SegmentClass) -> Option<u32> {
        self.look(|policy| policy.share(class)).flatten()
    }
    fn segment(&mut self, segment: SegmentId, pages: u32) {
        self.resident.insert(segment, (pages, Bits::new(pages as usize)));
        self.tell(|policy| policy.segment(segment, pages));
    }
    fn chain(&mut self, pages: &[PageId]) {
        self.tell(|policy| policy.chain(pages));
    }
    fn expected(&mut self, pages: &[PageId]) {
        self.tell(|policy| policy.expected(pages));
    }
    fn accessed(&mut self, page: PageId) {
        self.tell(|policy| policy.accessed(page));
    }
    fn written(&mut self, page: PageId) {
        self.tell(|policy| policy.written(page));
    }
    fn inserted(&mut self, page: PageId) {
        if let Some((_, resident)) = self.resident.get_mut(&page.segment) {
            resident.insert(page.index.index());
        }
        self.tell(|policy| policy.inserted(page));
    }
    fn removed(&mut self, page: PageId) {
        if let Some((_, resident)) = self.resident.get_mut(&page.segment) {
            resident.remove(page.index.index());
        }
        self.tell(|policy| policy.removed(page));
    }
    fn forget(&mut self, segment: SegmentId) {
        self.resident.remove(&segment);
        self.tell(|policy| policy.forget(segment));
    }
    fn victim(&mut self, want: Want, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
        let (mut taken, mut ended) = (None, false);
        let mut offered = std::mem::take(&mut self.offered);
        offered.clear();
        // What was taken counts, not what the policy returns. A page that was taken before a panic stays taken.
        let mut offer = |page| {
            let answer = take(page);
            offered.insert(page);
            ended |= answer != Take::Skip;
            if answer == Take::Yes {
                taken = Some(page);
            }
            answer
        };
        let asked = self.tell(|policy| Some(policy.victim(want, &mut offer)));
        self.offered = offered;
        if asked.is_none() && taken.is_none() {
            // It panicked. The request that waits for this frame may have no other event to wait for.
            return self.tell(|lru| lru.victim(want, take));
        }
        if !ended && matches!(want, Want::Demand | Want::Room) && matches!(self.active.get_mut(), Active::Own(_)) {
            taken = self.first_not_offered(take);
            if let Some(page) = taken {
                self.gone(format!(
                    "offered nothing to evict although page {} of segment {} could go",
                    page.index.0, page.segment.0
                ));
                self.go_on();
            }
        }
        taken
    }
    fn walker(&mut self, walker: WalkerId) {
        self.tell(|policy| policy.walker(walker));
    }
    fn walker_ended(&mut self, walker: WalkerId) {
        self.tell(|policy| policy.walker_ended(walker));
    }
    fn declare(&mut self, order: &[PageId], cyclic: bool) {
        self.tell(|policy| policy.declare(order, cyclic));
    }
    fn declare_runs(&mut self, order: &[PageRun], cyclic: bool) {
        self.tell(|policy| policy.declare_runs(order, cyclic));
    }
    fn know(&mut self, order: &[PageRun]) {
        self.tell(|policy| policy.know(order));
    }
    fn unordered(&mut self) {
        self.tell(|policy| policy.unordered());
    }
    fn has_plan(&self) -> bool {
        self.look(|policy| policy.has_plan()).unwrap_or(false)
    }
    fn places(&self) -> Vec<WalkerPlace> {
        self.look(|policy| policy.places()).unwrap_or_default()
    }
    fn order_of(&self, walker: WalkerId) -> Vec<PageId> {
        self.look(|policy| policy.order_of(walker)).unwrap_or_default()
    }
    fn next_fill(&mut self, present: &dyn Fn(PageId) -> bool) -> Option<PageId> {
        self.tell(|policy| policy.next_fill(present))
    }
    fn filling(&mut self, page: PageId) {
        self.tell(|policy| policy.filling(page));
    }
    fn worth_host(&self, page: PageId) -> bool {
        self.look(|policy| policy.worth_host(page)).unwrap_or(true)
    }
    fn host_victim(&self, candidate: PageId, incoming: PageId) -> bool {
        self.look(|policy| policy.host_victim(candidate, incoming)).unwrap_or(true)
    }
    fn tracked(&self) -> Vec<PageId> {
        self.look(|policy| policy.tracked()).unwrap_or_default()
    }
    fn check(&self) -> Result<(), String> {
        self.look(|policy| policy.check()).unwrap_or(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::panic::panic_any;

    use super::*;
    use crate::random::Random;
    use crate::{Backing, Effects, PageRun, PageWord, PageWords, Pager, PagerConfig, Purpose, Submitted, pin};

    const ON_PURPOSE: &str = "on purpose";

    /// Last in, first out. Panics at the `n`th call of any method that the pager makes while it serves requests.
    struct Fails {
        left: Cell<u32>,
        resident: Vec<PageId>,
    }

    impl Fails {
        fn called(&self) {
            self.left.set(self.left.get().wrapping_sub(1));
            if self.left.get() == 0 {
                panic_any(ON_PURPOSE);
            }
        }
    }

    impl fmt::Debug for Fails {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "Fails")
        }
    }

    impl Policy for Fails {
        fn name(&self) -> &'static str {
            "fails"
        }
        fn unit(&mut self, _: u32) {
            self.called();
        }
        fn accessed(&mut self, _: PageId) {
            self.called();
        }
        fn inserted(&mut self, page: PageId) {
            self.called();
            self.resident.push(page);
            self.called();
        }
        fn removed(&mut self, page: PageId) {
            self.called();
            self.resident.retain(|other| *other != page);
            self.called();
        }
        fn victim(&mut self, _: Want, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
            self.called();
            let taken = self.resident.iter().rev().copied().find(|page| {
                let taken = take(*page) == Take::Yes;
                self.called();
                taken
            });
            self.called();
            taken
        }
        fn next_fill(&mut self, _: &dyn Fn(PageId) -> bool) -> Option<PageId> {
            self.called();
            None
        }
        fn worth_host(&self, _: PageId) -> bool {
            self.called();
            true
        }
        fn host_victim(&self, _: PageId, _: PageId) -> bool {
            self.called();
            true
        }
        fn tracked(&self) -> Vec<PageId> {
            self.resident.clone()
        }
    }

    fn unpin(pager: &mut Pager, words: &[PageWord], run: PageRun, exclusive: bool, fx: &mut Effects) {
        let first = run.first.index();
        let _ = pin::unpin(&words[first..first + run.count as usize], exclusive);
        pager.released(&[run], fx);
    }

    /// Runs the uses, with a policy that panics at its `n`th call. Returns whether it panicked.
    fn serve(n: u32) -> bool {
        let (policy, fate) = Guarded::new(Box::new(Fails { left: Cell::new(n), resident: Vec::new() }));
        let config =
            PagerConfig { frames: 6, host_frames: 3, staging: 0, direct_io: true, lookahead: 1, page_bytes: 4096 };
        let mut pager = Pager::new(config, Box::new(policy));
        let segments = [
            pager.add_segment(Backing::File, SegmentClass::Weights, 12),
            pager.add_segment(Backing::ReadWrite, SegmentClass::Other, 8),
        ];
        let (mut random, mut fx) = (Random(11), Effects::default());
        for step in 0..60 {
            let at = random.below(2) as usize;
            let (segment, words) = &segments[at];
            let count = 1 + random.below(3);
            let first = PageIndex(random.below(words.len() as u32 - count));
            let (run, exclusive) = (PageRun { segment: *segment, first, count }, at == 1 && random.below(2) == 0);
            let submitted =
                pager.submit(&[run], if exclusive { Purpose::Write } else { Purpose::Read }, &mut fx).unwrap();
            let mut done = matches!(submitted, Submitted::Ready(_));
            loop {
                pager.check_invariants().unwrap_or_else(|broken| panic!("call {n}, step {step}: {broken}"));
                fx.protect.clear();
                fx.raised.clear();
                done |= fx.done.drain(..).any(|(_, result)| result.is_ok());
                let frames = std::mem::take(&mut fx.discard);
                frames.into_iter().for_each(|frame| pager.discarded(frame, &mut fx));
                let Some(planned) = fx.moves.pop() else { break };
                pager.complete(planned.id, Ok(()), &mut fx);
            }
            assert!(done, "call {n}, step {step}: a pin was not served");
            unpin(&mut pager, words, run, exclusive, &mut fx);
        }
        assert_eq!(fate.get().is_some(), pager.policy_state().0 == "lru");
        fate.get().is_some()
    }

    /// Offers every page. While it offers the last one, the pin of the first one ends, as pins of other threads do.
    #[derive(Debug, Default)]
    struct Raced {
        pinned: Arc<OnceLock<PageWords>>,
        resident: Vec<PageId>,
    }

    impl Policy for Raced {
        fn name(&self) -> &'static str {
            "raced"
        }
        fn accessed(&mut self, _: PageId) {}
        fn inserted(&mut self, page: PageId) {
            self.resident.push(page);
        }
        fn removed(&mut self, page: PageId) {
            self.resident.retain(|other| *other != page);
        }
        fn victim(&mut self, _: Want, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
            let taken = self.resident.iter().copied().find(|page| take(*page) == Take::Yes);
            if let (None, Some(words)) = (taken, self.pinned.get()) {
                assert!(pin::unpin(&words[..1], false), "a request waits for this page");
            }
            taken
        }
    }

    #[test]
    fn a_pin_that_ends_behind_the_offer_is_no_fault_of_the_policy() {
        let raced = Raced::default();
        let pinned = raced.pinned.clone();
        let (policy, fate) = Guarded::new(Box::new(raced));
        let config =
            PagerConfig { frames: 2, host_frames: 0, staging: 0, direct_io: true, lookahead: 0, page_bytes: 4096 };
        let mut pager = Pager::new(config, Box::new(policy));
        let (segment, words) = pager.add_segment(Backing::File, SegmentClass::Weights, 3);
        let page = |index| PageRun { segment, first: PageIndex(index), count: 1 };
        let mut fx = Effects::default();
        let served = |pager: &mut Pager, fx: &mut Effects| {
            while let Some(planned) = fx.moves.pop() {
                pager.complete(planned.id, Ok(()), fx);
            }
            fx.done.drain(..).filter(|(_, result)| result.is_ok()).count()
        };
        for index in 0..2 {
            pager.submit(&[page(index)], Purpose::Read, &mut fx).unwrap();
            assert_eq!(served(&mut pager, &mut fx), 1);
        }
        pinned.set(words.clone()).unwrap();
        pager.submit(&[page(2)], Purpose::Read, &mut fx).unwrap();
        assert_eq!(served(&mut pager, &mut fx), 0);
        assert!(fate.get().is_none(), "{fate:?}");
        pager.released(&[page(0)], &mut fx);
        assert_eq!(served(&mut pager, &mut fx), 1);
        assert!(fate.get().is_none(), "{fate:?}");
    }

    #[test]
    fn a_panic_in_any_call_leaves_the_pager_whole() {
        // Other tests' panics are printed all the same.
        let print = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if info.payload().downcast_ref::<&str>() != Some(&ON_PURPOSE) {
                print(info);
            }
        }));
        let calls = (1..).take_while(|n| serve(*n)).count();
        assert!(calls > 300, "{calls}");
    }
}
