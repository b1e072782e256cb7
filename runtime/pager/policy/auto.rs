//! Follows whichever of several policies has most hits on the trace at hand.
//!
//! The candidates run side by side in *shadow caches*: small caches without bytes, which see the uses of a sample of
//! the pages. One candidate is *live*: it orders all resident pages, and names the victims. If the shadow of another
//! has had clearly more hits, that candidate becomes the live one.
//!
//! # When the live policy changes
//!
//! A candidate's *lead* is how many hits its shadow has had more than the shadow of the live one. It counts from the
//! last change, or from the last time that it was 0: it does not fall below. A candidate whose lead passes a bar
//! becomes the live one. The bar is half as many hits as the shadow has frames, because a new policy first has to
//! exchange pages. It is lower for a candidate that has had more hits over a long time, and higher for one that has had
//! fewer. At first it is low: nothing speaks for the policy that happens to be live, and the next one is told of all
//! uses so far. After a change it is higher for a while, so that candidates that take turns within a loop, or within a
//! long request, are not followed to and fro.
//!
//! # What the next live policy knows
//!
//! It starts with the pages that are resident, and with the history of all pages: when each was used last, how often,
//! whether it was used again while it was resident, and whether it was wanted again soon after it had left. It is told
//! of these pages as if they had just been used, in order of their last use. It is not exactly in the state that it
//! would have if it had always been live: the order in which pages came is not known.
//!
//! The policy [`kv`](super::kv) keeps that history: it is told of every use, also while it orders nothing.
//!
//! # The sample
//!
//! Pages are taken in blocks of neighbours; of each block one page is in the sample, chosen by a hash. So chains and
//! sweeps keep their order and are sampled in proportion, and a stride through the pages is neither always nor never in
//! the sample.
//!
//! # Sources
//!
//! Shadow caches on a sample: C. Waldspurger, T. Saemundsson, I. Ahmad and N. Park, "Cache modeling and optimization
//! using miniature simulations", USENIX ATC 2017. A cache that follows the better of two policies: R. Subramanian, Y.
//! Smaragdakis and G. H. Loh, "Adaptive caches: effective shaping of cache behavior to workloads", MICRO 2006. A sum
//! that does not fall below 0: E. S. Page, "Continuous inspection schemes", Biometrika 41(1/2), 1954. The bar, and how
//! the history is handed over, are this crate's own: see decision 0033.

use super::arc::ArcPolicy;
use super::kv::KvPolicy;
use super::lirs::LirsPolicy;
use super::lru::LruPolicy;
use super::s3fifo::S3FifoPolicy;
use super::two_q::TwoQPolicy;
use super::wtinylfu::WTinyLfuPolicy;
use super::{Policy, PolicyKind, Take, Want};
use crate::ids::{PageId, PageIndex, SegmentClass, SegmentId};
use crate::numbers::{PageNumbers, fit};

const CANDIDATES: usize = 7;
/// The places of some among the candidates.
const KV: usize = 0;
const S3_FIFO: usize = 1;
const LIRS: usize = 3;
/// Before anything is known: it is nowhere the worst by far.
const AT_FIRST: usize = S3_FIFO;

/// With fewer frames than twice this, all pages may be in the sample. The sample's part of the pages falls with the
/// frames to the power of 2/3.
const SAMPLED_FRAMES: u64 = 512;
/// The most pages in the sample, about; each takes up to 83 bytes.
const SAMPLED_PAGES: u64 = 1 << 16;

/// A lead that makes a candidate the live one, in parts of a shadow's frames, if neither is better in the long run.
const BAR: f64 = 0.5;
const BAR_MIN: f64 = 0.1;
const BAR_MAX: f64 = 1.5;
/// In the first uses, so many for each frame, the bar rises to its height, from this part of it.
const YOUNG: f64 = 8.0;
const YOUNG_MIN: f64 = 0.1;
/// A lead of fewer hits may be chance.
const LEAD_MIN: f64 = 4.0;
/// The bar falls by the hits that a candidate had more in the long run in so many uses for each frame.
const AHEAD: f64 = 256.0;
/// The long run: uses of the sample for each of a shadow's frames.
const LONG_RUN: f64 = 512.0;
/// As many uses for each frame without a hit are assumed before the first one.
const ASSUMED: f64 = 16.0;
/// Where chains are declared, pages are most likely of key-value caches: `kv` has so much more of a hit ratio at first.
const OF_CHAINS: f64 = 0.05;
/// By how much a change raises the bar, how far changes raise it, and after how many uses for each frame a third of the
/// rise is left.
const CAUTION: f64 = 1.5;
const CAUTION_MAX: f64 = 16.0;
const CALM: f64 = 32.0;
/// In uses for each frame, how far back `wtinylfu` counts uses; and the most that it counts.
const COUNTED: u32 = 10;
const COUNT_MAX: u16 = 15;

// A page's state.
/// The page is resident.
const RESIDENT: u8 = 1 << 7;
/// The page was missed and is on its way.
const COMING: u8 = 1 << 6;
/// The page was filled ahead and not used yet.
const AHEAD_OF_USE: u8 = 1 << 5;
/// When the page was missed last, it had been used not long before.
const RETURNED: u8 = 1 << 4;
/// How often the page was used since it came; stops at the largest.
const HITS: u8 = 0b111;

/// Policies that may be the live one.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "there are eight at most")]
enum Candidate {
    Kv(KvPolicy),
    S3Fifo(S3FifoPolicy),
    Arc(ArcPolicy),
    Lirs(LirsPolicy),
    Lru(LruPolicy),
    WTinyLfu(WTinyLfuPolicy),
    TwoQ(TwoQPolicy),
}

/// A reference to the policy of a candidate, as mutable as that to the candidate.
macro_rules! policy_of {
    ($candidate:expr) => {
        match $candidate {
            Candidate::Kv(policy) => policy,
            Candidate::S3Fifo(policy) => policy,
            Candidate::Arc(policy) => policy,
            Candidate::Lirs(policy) => policy,
            Candidate::Lru(policy) => policy,
            Candidate::WTinyLfu(policy) => policy,
            Candidate::TwoQ(policy) => policy,
        }
    };
}

impl Candidate {
    fn new(nth: usize) -> Self {
        match nth {
            KV => Self::Kv(KvPolicy::default()),
            S3_FIFO => Self::S3Fifo(S3FifoPolicy::default()),
            2 => Self::Arc(ArcPolicy::default()),
            LIRS => Self::Lirs(LirsPolicy::default()),
            4 => Self::Lru(LruPolicy::new()),
            5 => Self::WTinyLfu(WTinyLfuPolicy::default()),
            _ => Self::TwoQ(TwoQPolicy::default()),
        }
    }

    fn policy(&self) -> &dyn Policy {
        policy_of!(self)
    }

    fn policy_mut(&mut self) -> &mut dyn Policy {
        policy_of!(self)
    }

    /// Tells a new candidate of a page that was used last after all others that it was told of. The pages are resident,
    /// or left not long ago.
    fn learn(&mut self, page: PageId, state: u8) {
        let resident = state & RESIDENT != 0;
        let (returned, hits) = (state & RETURNED != 0, u32::from(state & HITS));
        // By these two, a page that was remembered when it came belongs to the main queue. Pages that leave that queue
        // are not remembered.
        let in_main = match self {
            Self::S3Fifo(_) => returned || hits >= 2,
            Self::TwoQ(_) => returned,
            _ => false,
        };
        let uses_more = match self {
            Self::S3Fifo(_) if in_main => u32::from(hits > 2),
            Self::S3Fifo(_) => hits,
            Self::Arc(_) | Self::Lirs(_) => u32::from(returned || hits > 0),
            Self::WTinyLfu(_) => u32::from(hits > 0),
            Self::Kv(_) | Self::Lru(_) | Self::TwoQ(_) => 0,
        };
        if in_main && !resident {
            return;
        }
        let policy = self.policy_mut();
        if state & AHEAD_OF_USE != 0 {
            policy.inserted(page);
            return;
        }
        for time in 0..=u32::from(in_main) {
            if time > 0 {
                policy.removed(page);
            }
            policy.accessed(page);
            policy.inserted(page);
        }
        (0..uses_more).for_each(|_| policy.accessed(page));
        if !resident {
            policy.removed(page);
        }
    }
}

/// The shadow caches of all candidates.
#[derive(Debug, Default)]
struct Shadows {
    /// Of the pages in the sample.
    numbers: PageNumbers,
    /// By page: a bit for each candidate whose shadow has it.
    resident: Vec<u8>,
    /// By candidate: its policy, and how many pages its shadow has.
    caches: Vec<(Candidate, u32)>,
    /// The frames of each.
    frames: u32,
}

impl Shadows {
    fn new(frames: u32) -> Self {
        let cache = |nth| {
            let mut candidate = Candidate::new(nth);
            candidate.policy_mut().resize(frames, 0, 0);
            (candidate, 0)
        };
        Self { caches: (0..CANDIDATES).map(cache).collect(), frames, ..Self::default() }
    }

    fn resize(&mut self, frames: u32) {
        self.frames = frames;
        let Self { numbers, resident, caches, .. } = self;
        for (nth, (cache, count)) in caches.iter_mut().enumerate() {
            cache.policy_mut().resize(frames, 0, 0);
            while *count > frames && evict(cache.policy_mut(), numbers, resident, nth) {
                *count -= 1;
            }
        }
    }

    fn segment(&mut self, segment: SegmentId, pages: u32) {
        self.numbers.add(segment, pages);
        fit(&mut self.resident, self.numbers.end(), 0);
        self.caches.iter_mut().for_each(|(cache, _)| cache.policy_mut().segment(segment, pages));
    }

    fn forget(&mut self, segment: SegmentId) {
        for number in self.numbers.of_segment(segment) {
            let resident = std::mem::take(&mut self.resident[number]);
            let page = self.numbers.page(number as u32);
            for (nth, (cache, count)) in self.caches.iter_mut().enumerate() {
                if resident >> nth & 1 != 0 {
                    cache.policy_mut().removed(page);
                    *count -= 1;
                }
            }
        }
        self.caches.iter_mut().for_each(|(cache, _)| cache.policy_mut().forget(segment));
        self.numbers.remove(segment);
        fit(&mut self.resident, self.numbers.end(), 0);
    }

    /// These pages of the sample are in a chain that is about to be used. `ends` if the last one is the chain's last.
    fn chain(&mut self, pages: &[PageId], ends: bool) {
        for (cache, _) in &mut self.caches {
            cache.policy_mut().chain(pages);
            if let Candidate::Kv(kv) = cache
                && !ends
            {
                kv.goes_on_after_chain();
            }
        }
    }

    /// Uses a page. Returns a bit for each candidate whose shadow had it.
    fn used(&mut self, page: PageId) -> u8 {
        let Some(number) = self.numbers.number(page) else { return 0 };
        let Self { numbers, resident, caches, frames } = self;
        let had = resident[number as usize];
        for (nth, (cache, count)) in caches.iter_mut().enumerate() {
            let policy = cache.policy_mut();
            policy.accessed(page);
            if had >> nth & 1 != 0 {
                continue;
            }
            if *count < *frames {
                *count += 1;
            } else {
                evict(policy, numbers, resident, nth);
            }
            policy.inserted(page);
            resident[number as usize] |= 1 << nth;
        }
        had
    }
}

/// Evicts a page of a shadow. Returns whether it had one.
fn evict(policy: &mut dyn Policy, numbers: &PageNumbers, resident: &mut [u8], nth: usize) -> bool {
    let Some(victim) = policy.victim(Want::Demand, &mut |_| Take::Yes) else { return false };
    policy.removed(victim);
    if let Some(number) = numbers.number(victim) {
        resident[number as usize] &= !(1 << nth);
    }
    true
}

/// Which candidate has most hits.
#[derive(Debug)]
struct Judge {
    /// By candidate: its lead over the live one.
    leads: [f64; CANDIDATES],
    /// By candidate: its hit ratio in the long run.
    ratios: [f64; CANDIDATES],
    uses: u64,
    /// By what changes have raised the bar.
    caution: f64,
}

impl Default for Judge {
    fn default() -> Self {
        Self { leads: [0.0; CANDIDATES], ratios: [0.0; CANDIDATES], uses: 0, caution: 1.0 }
    }
}

impl Judge {
    /// Counts a use of the sample; `had` has a bit for each candidate that had the page. Returns the candidate that is
    /// to be live in place of `live`.
    fn used(&mut self, had: u8, live: usize, frames: f64) -> Option<usize> {
        self.uses = self.uses.saturating_add(1);
        let part = 1.0 / (self.uses as f64 + ASSUMED * frames).min(LONG_RUN * frames);
        let hit = |nth: usize| f64::from(had >> nth & 1);
        for (nth, ratio) in self.ratios.iter_mut().enumerate() {
            *ratio += (hit(nth) - *ratio) * part;
        }
        self.caution += (1.0 - self.caution) / (CALM * frames);
        let age = (self.uses as f64 / (YOUNG * frames)).clamp(YOUNG_MIN, 1.0);
        let own = hit(live);
        let (mut best, mut most) = (None, 1.0);
        for nth in 0..CANDIDATES {
            let lead = (self.leads[nth] + hit(nth) - own).max(0.0);
            self.leads[nth] = lead;
            if lead < LEAD_MIN {
                continue;
            }
            let bar = (BAR - AHEAD * (self.ratios[nth] - self.ratios[live])).clamp(BAR_MIN, BAR_MAX);
            let above = lead / (bar * self.caution * age * frames);
            if above > most {
                (best, most) = (Some(nth), above);
            }
        }
        if best.is_some() {
            self.caution = (self.caution * CAUTION).min(CAUTION_MAX);
            self.leads = [0.0; CANDIDATES];
        }
        best
    }
}

/// See the [module documentation](self). Takes 8 bytes a page beyond the live policy, 13 where chains are declared, 1
/// if the live policy is `kv`; and at most 83 for each page of the sample.
#[derive(Debug)]
pub(super) struct AutoPolicy {
    /// By segment: its pages.
    segments: Vec<Option<u32>>,
    /// Pages of all segments.
    pages: u64,
    /// By page: [`RESIDENT`] and so on.
    state: Vec<u8>,
    /// Is told of every use; orders pages only if it is live.
    history: KvPolicy,
    /// The live policy, unless that is `history`.
    other: Option<Candidate>,
    /// Which candidate is live.
    live: usize,
    /// Frames, host frames, lookahead.
    sizes: (u32, u32, u32),
    unit: u32,
    /// One of 2^`shift` pages is in the sample.
    shift: u32,
    shadows: Shadows,
    judge: Judge,
    /// Whether a chain was declared, and whether a victim was asked for.
    chains: bool,
    evicting: bool,
    /// Misses since `since`, a time in uses, and how many uses `2 c` misses take.
    misses: u32,
    since: u32,
    reach: u32,
    /// Kept to reuse its memory.
    sampled: Vec<PageId>,
    /// See [`behind`](AutoPolicy::behind).
    behind: f64,
}

/// What a policy knows of a trace beyond its pages. Small.
#[derive(Debug)]
pub(super) struct Learned {
    live: usize,
    chains: bool,
}

impl Default for AutoPolicy {
    fn default() -> Self {
        let mut history = KvPolicy::default();
        history.sleep();
        Self {
            segments: Vec::new(),
            pages: 0,
            state: Vec::new(),
            history,
            other: Some(Candidate::new(AT_FIRST)),
            live: AT_FIRST,
            sizes: (0, 0, 0),
            unit: 1,
            shift: 0,
            shadows: Shadows::new(1),
            judge: Judge::default(),
            chains: false,
            evicting: false,
            misses: 0,
            since: 0,
            reach: u32::MAX,
            sampled: Vec::new(),
            behind: 0.0,
        }
    }
}

impl AutoPolicy {
    /// For pages of one class: begins with a policy that suits what is usual there.
    pub(super) fn of(class: SegmentClass) -> Self {
        let mut policy = Self::default();
        policy.change(if class == SegmentClass::KeysAndValues { KV } else { LIRS });
        policy
    }

    /// Goes on with what another one had learned. There are no pages yet.
    pub(super) fn after(learned: Learned) -> Self {
        let mut this = Self { chains: learned.chains, ..Self::default() };
        this.change(learned.live);
        this
    }

    /// What a later one can go on with.
    pub(super) fn learned(self) -> Learned {
        Learned { live: self.live, chains: self.chains }
    }

    fn live(&self) -> &dyn Policy {
        self.other.as_ref().map_or(&self.history, Candidate::policy)
    }

    fn live_mut(&mut self) -> &mut dyn Policy {
        match &mut self.other {
            Some(other) => other.policy_mut(),
            None => &mut self.history,
        }
    }

    /// Calls the live policy, and `history` too.
    fn both(&mut self, mut call: impl FnMut(&mut dyn Policy)) {
        call(&mut self.history);
        if let Some(other) = &mut self.other {
            call(other.policy_mut());
        }
    }

    /// The page's id in the shadows, if it is in the sample.
    fn sample(&self, page: PageId) -> Option<PageId> {
        let (block, mask) = (page.index.0 >> self.shift, (1 << self.shift) - 1);
        let mixed = (u64::from(page.segment.0) << 32 | u64::from(block)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mixed = (mixed ^ mixed >> 32).wrapping_mul(0xD6E8_FEB8_6659_FD93) >> 32;
        (page.index.0 & mask == mixed as u32 & mask)
            .then_some(PageId { segment: page.segment, index: PageIndex(block) })
    }

    /// The blocks of a segment's pages.
    fn blocks(&self, pages: u32) -> u32 {
        pages.div_ceil(1 << self.shift)
    }

    /// The frames of each shadow.
    fn small(&self) -> u32 {
        (self.sizes.0 >> self.shift).max(1)
    }

    /// Fits the sample to the frames and pages there are. It becomes a larger part of the pages only if it
    /// `may_grow`: otherwise segments that come and go could change it each time.
    fn settle(&mut self, may_grow: bool) {
        let times = u64::from(self.sizes.0) / SAMPLED_FRAMES;
        let of_frames = (times * times).max(1).ilog2() / 3;
        let of_pages = self.pages.div_ceil(SAMPLED_PAGES).max(1).next_power_of_two().ilog2();
        let wanted = of_frames.max(of_pages).min(31);
        if wanted <= self.shift && !(may_grow && wanted < self.shift) {
            return;
        }
        self.shift = wanted;
        self.shadows = Shadows::new(self.small());
        for (number, pages) in self.segments.iter().enumerate() {
            if let Some(pages) = pages {
                self.shadows.segment(SegmentId(number as u32), self.blocks(*pages));
            }
        }
    }

    /// Makes another candidate the live one.
    fn change(&mut self, to: usize) {
        // A page's place in the order, and its number.
        let mut order: Vec<(u32, u32)> = Vec::new();
        let back = self.reach.max(self.sizes.0.saturating_mul(COUNTED));
        for (number, state) in (0..).zip(&self.state) {
            let known = self.history.uses(number) > 0;
            let since = self.history.since(number);
            if state & (RESIDENT | COMING) != 0 || known && since < back {
                // What was filled ahead is about to be used.
                let last = known && state & AHEAD_OF_USE == 0;
                order.push((if last { u32::MAX - since } else { u32::MAX }, number));
            }
        }
        order.sort_unstable();
        if self.live == KV {
            self.history.sleep();
        }
        self.live = to;
        if to == KV {
            self.other = None;
            self.history.wake();
            for (_, number) in order {
                match self.state[number as usize] {
                    state if state & RESIDENT != 0 => self.history.restore(number),
                    state if state & COMING != 0 => self.history.comes(number),
                    _ => {}
                }
            }
            self.resized();
            return;
        }
        let mut next = Candidate::new(to);
        let policy = next.policy_mut();
        policy.resize(self.sizes.0, self.sizes.1, self.sizes.2);
        policy.unit(self.unit);
        for (number, pages) in self.segments.iter().enumerate() {
            if let Some(pages) = pages {
                policy.segment(SegmentId(number as u32), *pages);
            }
        }
        // There is nothing to take. But S3-FIFO treats pages that come before the first search otherwise.
        policy.victim(Want::Demand, &mut |_| Take::Stop);
        if let Candidate::WTinyLfu(_) = next {
            self.count(&mut next, &order);
        }
        for (at, number) in order {
            let (state, page) = (self.state[number as usize], self.history.numbers.page(number));
            if state & RESIDENT != 0 || u32::MAX - at < self.reach {
                next.learn(page, state);
            }
            if state & COMING != 0 {
                next.policy_mut().accessed(page);
            }
        }
        if let (Candidate::Arc(arc), (Candidate::Arc(small), _)) = (&mut next, &self.shadows.caches[to]) {
            arc.rule.target_of_a_sample(&small.rule, 1 << self.shift);
        }
        self.other = Some(next);
    }

    /// Has W-TinyLFU count the uses of these pages so far, except for the last one of each.
    fn count(&self, next: &mut Candidate, order: &[(u32, u32)]) {
        let reach = self.sizes.0.saturating_mul(COUNTED);
        let counts = || {
            let near = order.iter().filter(|(at, _)| u32::MAX - at < reach);
            near.map(|(_, number)| (*number, self.history.uses(*number).min(COUNT_MAX)))
        };
        let all: u64 = counts().map(|(_, uses)| u64::from(uses)).sum();
        // The sketch halves its counts when it is full. It should not do so between one page and the next.
        let (some, many) = (u64::from(reach) * 2 / 3, u64::from(reach) * 4 / 3);
        let halves = u32::from(all > some) + u32::from(all > many);
        for (number, uses) in counts() {
            let page = self.history.numbers.page(number);
            for _ in 1..uses >> halves {
                next.policy_mut().accessed(page);
                next.policy_mut().removed(page);
            }
        }
    }

    /// Since the last call, how many hits fewer there were than the live candidate would have had alone, by its shadow,
    /// in parts of the frames. Above 0 if another than this policy chooses what leaves, and chooses worse.
    pub(super) fn behind(&mut self) -> f64 {
        std::mem::take(&mut self.behind)
    }

    fn resized(&mut self) {
        let (frames, host, lookahead) = self.sizes;
        self.both(|policy| policy.resize(frames, host, lookahead));
    }

    /// Counts a miss.
    fn missed(&mut self) {
        self.misses += 1;
        if self.misses >= self.sizes.0 {
            let now = self.history.now();
            self.reach = now.wrapping_sub(self.since).saturating_mul(2);
            (self.misses, self.since) = (0, now);
        }
    }
}

impl Policy for AutoPolicy {
    fn name(&self) -> &'static str {
        PolicyKind::Auto.name()
    }

    fn resize(&mut self, frames: u32, host_frames: u32, lookahead: u32) {
        let before = std::mem::replace(&mut self.sizes, (frames, host_frames, lookahead)).0;
        self.resized();
        if before != frames {
            self.settle(true);
            self.shadows.resize(self.small());
        }
    }

    fn unit(&mut self, pages: u32) {
        self.unit = pages;
        self.live_mut().unit(pages);
    }

    fn segment(&mut self, segment: SegmentId, pages: u32) {
        self.forget(segment);
        if self.segments.len() <= segment.index() {
            self.segments.resize(segment.index() + 1, None);
        }
        self.segments[segment.index()] = Some(pages);
        self.pages += u64::from(pages);
        self.both(|policy| policy.segment(segment, pages));
        fit(&mut self.state, self.history.numbers.end(), 0);
        self.shadows.segment(segment, self.blocks(pages));
        self.settle(false);
    }

    fn chain(&mut self, pages: &[PageId]) {
        if !self.chains {
            self.chains = true;
            self.judge.ratios[KV] += OF_CHAINS;
            // As long as nothing had to go, a change costs nothing.
            if !self.evicting && self.live != KV {
                self.change(KV);
            }
        }
        self.both(|policy| policy.chain(pages));
        let mut sampled = std::mem::take(&mut self.sampled);
        sampled.clear();
        sampled.extend(pages.iter().filter_map(|page| self.sample(*page)));
        if !sampled.is_empty() {
            let ends = pages.last().is_some_and(|last| self.sample(*last).is_some());
            self.shadows.chain(&sampled, ends);
        }
        self.sampled = sampled;
    }

    fn accessed(&mut self, page: PageId) {
        let Some(number) = self.history.numbers.number(page) else { return };
        // Before the page's own state changes: it is told to the live policy below.
        if let Some(sampled) = self.sample(page) {
            if let Some((Candidate::Kv(kv), _)) = self.shadows.caches.first_mut() {
                kv.gap_of_a_sample(&self.history, self.shift);
            }
            let had = self.shadows.used(sampled);
            // A page that was filled ahead has moved, as a page that was missed.
            let hit = self.state[number as usize] & (RESIDENT | AHEAD_OF_USE) == RESIDENT;
            let missed = f64::from(had >> self.live & 1) - f64::from(u8::from(hit));
            self.behind += missed / f64::from(self.shadows.frames);
            if let Some(better) = self.judge.used(had, self.live, self.shadows.frames.into()) {
                self.change(better);
            }
        }
        let state = self.state[number as usize];
        // A page that is missed twice before it comes makes one miss.
        if state & COMING == 0 {
            self.state[number as usize] = if state & RESIDENT == 0 {
                let near = self.history.uses(number) > 0 && self.history.since(number) < self.reach;
                self.missed();
                COMING | if near { RETURNED } else { 0 }
            } else if state & AHEAD_OF_USE != 0 {
                state & !AHEAD_OF_USE
            } else {
                state & !HITS | ((state & HITS) + 1).min(HITS)
            };
            if self.other.is_some() {
                self.history.note(number);
            }
        }
        self.live_mut().accessed(page);
    }

    fn inserted(&mut self, page: PageId) {
        let Some(number) = self.history.numbers.number(page) else { return };
        let state = &mut self.state[number as usize];
        if *state & RESIDENT == 0 {
            *state = match *state & COMING {
                0 => RESIDENT | AHEAD_OF_USE,
                _ => *state & !COMING | RESIDENT,
            };
        }
        self.live_mut().inserted(page);
    }

    fn removed(&mut self, page: PageId) {
        let Some(number) = self.history.numbers.number(page) else { return };
        if self.state[number as usize] & AHEAD_OF_USE != 0 && self.sample(page).is_some() {
            // It moved for nothing.
            self.behind += 1.0 / f64::from(self.shadows.frames);
        }
        self.state[number as usize] &= !(COMING | RESIDENT | AHEAD_OF_USE);
        self.live_mut().removed(page);
    }

    fn forget(&mut self, segment: SegmentId) {
        let Some(pages) = self.segments.get_mut(segment.index()).and_then(Option::take) else { return };
        self.pages -= u64::from(pages);
        for number in self.history.numbers.of_segment(segment) {
            self.state[number] = 0;
        }
        self.both(|policy| policy.forget(segment));
        fit(&mut self.state, self.history.numbers.end(), 0);
        self.shadows.forget(segment);
    }

    fn victim(&mut self, want: Want, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
        self.evicting = true;
        self.live_mut().victim(want, take)
    }

    fn tracked(&self) -> Vec<PageId> {
        self.live().tracked()
    }

    fn check(&self) -> Result<(), String> {
        self.live().check()?;
        let resident = self.state.iter().filter(|state| **state & RESIDENT != 0).count();
        let tracked = self.live().tracked().len();
        if resident != tracked {
            return Err(format!("{resident} pages are resident, and {} knows {tracked}", self.live().name()));
        }
        for (nth, (cache, count)) in self.shadows.caches.iter().enumerate() {
            let marked = self.shadows.resident.iter().filter(|resident| **resident >> nth & 1 != 0).count();
            let tracked = cache.policy().tracked().len();
            if marked != tracked || tracked != *count as usize || *count > self.shadows.frames {
                let name = cache.policy().name();
                return Err(format!(
                    "the shadow of {name} has {count} pages, knows {tracked}, and {marked} are marked"
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::super::bare::BareCache;
    use super::*;
    use crate::ids::SegmentClass;
    use crate::random::Random;

    const SEGMENT: SegmentId = SegmentId(0);

    fn page(index: u32) -> PageId {
        PageId { segment: SEGMENT, index: PageIndex(index) }
    }

    /// A number below `end`; small ones are likelier, the more `times` a number is drawn.
    fn skewed(random: &mut Random, end: u32, times: u32) -> u32 {
        (0..times).fold(end - 1, |most, _| random.below(most + 1))
    }

    /// Hits of each policy in each of the phases.
    fn hits<const N: usize>(kinds: [PolicyKind; N], frames: u32, phases: &[Vec<u32>]) -> [Vec<u32>; N] {
        kinds.map(|kind| {
            let mut cache = BareCache::new(kind.build(), frames);
            cache.segment(SEGMENT, SegmentClass::Other, 20_000);
            let of = |phase: &Vec<u32>| phase.iter().map(|n| u32::from(cache.used(page(*n), false).unwrap())).sum();
            phases.iter().map(of).collect()
        })
    }

    /// A loop, and then pages that are used again soon or not at all.
    #[test]
    fn the_better_policy_is_followed_when_the_trace_changes() {
        for frames in [300, 1500] {
            let swept: Vec<u32> = (0..150 * frames).map(|n| n % (frames * 3 / 2)).collect();
            let mut random = Random(1);
            let lately: Vec<u32> =
                (0..150 * frames).map(|n| 3000 + n / 5 - skewed(&mut random, frames, 2).min(n / 5)).collect();
            let phases = [swept.clone(), lately.clone(), swept, lately];
            let [auto, lirs, lru] = hits([PolicyKind::Auto, PolicyKind::Lirs, PolicyKind::Lru], frames, &phases);
            let all = |hits: &[u32]| hits.iter().sum::<u32>();
            for (phase, best) in lirs.iter().zip(&lru).map(|(lirs, lru)| *lirs.max(lru)).enumerate() {
                assert!(auto[phase] >= best / 100 * 90, "{frames}, phase {phase}: {auto:?}, {lirs:?}, {lru:?}");
            }
            assert!(all(&auto) > all(&lirs).max(all(&lru)), "{frames}: {auto:?}, {lirs:?}, {lru:?}");
        }
    }

    #[test]
    fn chains_begin_with_kv() {
        let mut policy = AutoPolicy::default();
        policy.resize(40, 0, 0);
        policy.segment(SEGMENT, 100);
        policy.accessed(page(3));
        policy.chain(&[page(0), page(1)]);
        assert_eq!((policy.live().name(), policy.tracked()), ("kv", vec![]));
        policy.inserted(page(3));
        assert_eq!(policy.tracked(), [page(3)]);
        // The use for which the page came was counted once.
        assert_eq!(policy.history.uses(3), 1);
    }

    #[test]
    fn one_page_of_each_block_is_in_the_sample() {
        let mut policy = AutoPolicy::default();
        policy.resize(1 << 20, 0, 0);
        for (segment, pages) in [(0, 1 << 20), (1, 1000), (2, 1)] {
            policy.segment(SegmentId(segment), pages);
        }
        assert!(policy.shift > 3, "{}", policy.shift);
        let mut places = BTreeSet::new();
        for block in 0..1 << (20 - policy.shift) {
            let pages = (block << policy.shift..(block + 1) << policy.shift).map(page);
            let sampled: Vec<PageId> = pages.clone().filter(|page| policy.sample(*page).is_some()).collect();
            let [only] = sampled[..] else { panic!("{sampled:?} of block {block}") };
            assert_eq!(policy.sample(only), Some(page(block)));
            places.insert(only.index.0 & ((1 << policy.shift) - 1));
        }
        assert_eq!(places.len(), 1 << policy.shift, "every place of a block comes");
    }

    #[test]
    fn the_sample_is_bounded() {
        for (frames, pages) in [(500, 1_000_000), (500, 3_000), (1_000_000, 1_000_000), (20_000, 10_000_000)] {
            let mut policy = AutoPolicy::default();
            policy.resize(frames, 0, 0);
            policy.settle(false);
            policy.pages = pages;
            policy.settle(false);
            let sampled = pages >> policy.shift;
            assert!(sampled <= SAMPLED_PAGES && frames >> policy.shift <= 8192, "{sampled} pages");
        }
    }

    #[derive(Clone, Debug)]
    enum Event {
        Use(u32),
        Ahead(u32),
        Go(u32),
        Skips(u64),
        Change(usize),
        Resize(u32),
        Forget(u32),
        Chain(u32, u32),
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            12 => (0u32..60).prop_map(Event::Use),
            2 => (0u32..60).prop_map(Event::Ahead),
            1 => (0u32..60).prop_map(Event::Go),
            2 => any::<u64>().prop_map(Event::Skips),
            3 => (0..CANDIDATES).prop_map(Event::Change),
            1 => (1u32..40).prop_map(Event::Resize),
            1 => (0u32..3).prop_map(Event::Forget),
            1 => (0u32..50, 1u32..10).prop_map(|(first, pages)| Event::Chain(first, pages)),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

        /// A change of the live policy loses no page, whatever is on its way, was filled ahead or is refused.
        #[test]
        fn a_change_loses_no_page(events in prop::collection::vec(event(), 0..200)) {
            let page = |n: u32| PageId { segment: SegmentId(n / 20), index: PageIndex(n % 20) };
            let mut policy = AutoPolicy::default();
            policy.resize(16, 0, 0);
            (0..3).for_each(|segment| policy.segment(SegmentId(segment), 20));
            let mut resident = BTreeSet::new();
            let mut coming: Option<PageId> = None;
            for event in events {
                match event.clone() {
                    Event::Use(n) => {
                        policy.accessed(page(n));
                        // The page that was missed before comes only now.
                        if let Some(coming) = coming.take() {
                            policy.inserted(coming);
                            resident.insert(coming);
                        }
                        coming = Some(page(n)).filter(|page| !resident.contains(page));
                    }
                    Event::Ahead(n) => {
                        coming = coming.filter(|coming| *coming != page(n));
                        policy.inserted(page(n));
                        resident.insert(page(n));
                    }
                    Event::Go(n) => {
                        coming = coming.filter(|coming| *coming != page(n));
                        policy.removed(page(n));
                        resident.remove(&page(n));
                    }
                    Event::Skips(skips) => {
                        let mut offered = BTreeSet::new();
                        let found = policy.victim(Want::Demand, &mut |page| {
                            let skip = skips >> (page.segment.0 * 20 + page.index.0) & 1 == 1;
                            assert!(offered.insert(page), "{page:?} is offered twice");
                            if skip { Take::Skip } else { Take::Yes }
                        });
                        prop_assert!(found.is_some() || offered == resident, "{:?} of {:?}", offered, resident);
                        if let Some(found) = found {
                            policy.removed(found);
                            prop_assert!(resident.remove(&found));
                        }
                    }
                    Event::Change(to) => policy.change(to),
                    Event::Resize(frames) => policy.resize(frames, 0, 0),
                    Event::Forget(segment) => {
                        let gone = resident.extract_if(.., |page| page.segment.0 == segment);
                        gone.for_each(|page| policy.removed(page));
                        coming = coming.filter(|coming| coming.segment.0 != segment);
                        policy.forget(SegmentId(segment));
                        policy.segment(SegmentId(segment), 20);
                    }
                    Event::Chain(first, pages) => {
                        policy.chain(&(first..first + pages).map(page).collect::<Vec<_>>());
                    }
                }
                prop_assert_eq!(policy.check(), Ok(()), "after {:?}", event);
                prop_assert_eq!(&policy.tracked().into_iter().collect::<BTreeSet<_>>(), &resident, "after {:?}", event);
            }
        }
    }

    /// What the next policy is told suffices to go on about as well as if it had always been live.
    #[test]
    fn a_policy_that_is_replaced_by_itself_has_about_as_many_hits() {
        let mut random = Random(9);
        let uses: Vec<u32> = (0..60_000).map(|_| skewed(&mut random, 20_000, 3)).collect();
        for kind in 0..CANDIDATES {
            let run = |every: usize| {
                let mut policy = AutoPolicy::default();
                policy.resize(1000, 0, 0);
                policy.segment(SEGMENT, 20_000);
                policy.change(kind);
                let (mut resident, mut hits) = (BTreeSet::new(), 0);
                for (at, number) in uses.iter().enumerate() {
                    if at % every == every - 1 {
                        policy.change(kind);
                    }
                    policy.judge = Judge::default();
                    policy.accessed(page(*number));
                    if !resident.insert(*number) {
                        hits += 1;
                        continue;
                    }
                    if resident.len() > 1000 {
                        let gone = policy.victim(Want::Demand, &mut |_| Take::Yes).unwrap();
                        policy.removed(gone);
                        resident.remove(&gone.index.0);
                    }
                    policy.inserted(page(*number));
                }
                hits
            };
            let (kept, changed) = (run(usize::MAX), run(3000));
            assert!(changed * 100 >= kept * 95, "{kind}: {changed} hits, not {kept}");
        }
    }
}
