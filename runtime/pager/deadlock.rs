//! Finds scopes that hold something and wait for each other.
//!
//! Scopes that hold pins or a purse, and wait, are *members*. Whenever a member gets more or asks for more, the pager
//! checks whether all members can go on. There are two ways to find out:
//!
//! - The *order*. Each member has a rank, and can go on once the members of lower ranks have let go. A member that
//!   holds a page in a way that excludes a request ranks below the member that asks. At each member's turn, at least
//!   `slack` frames are left beside what it asks for and what it and the members behind it hold. As long as such an
//!   order is known, no member is in a circle. A new member finds its rank from the lowest and highest ranks at its own
//!   pages. If it does not fit, others are moved back. So a check costs only what has changed, however many members
//!   hold a page or ask for it.
//! - The *reduction*, if no order is known. Members that could go on are removed, round by round. Each request and each
//!   page is looked at once for each change. The rounds become the new ranks. Members that remain wait forever.
//!
//! The order may be lost at any time (`sure` is then false). That costs one reduction, and nothing else.

use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::fmt::Write;

use super::known::Asks;
use super::members::{AtPage, Member, Members, PLENTY};
use super::request::Purpose;
use super::runs::pages_of;
use super::scope::{Change, Counted, Scope};
use super::{Effects, Pager};
use crate::error::{Error, ErrorKind};
use crate::ids::{Bytes, PageId, RequestId, ScopeId};

impl Pager {
    /// Compares every search for deadlocks with the plain one, which is slow.
    #[doc(hidden)]
    pub fn compare_deadlocks(&mut self) {
        self.members.compares = true;
    }

    /// How many edges between scopes and pages have been looked at to find deadlocks.
    #[doc(hidden)]
    pub fn deadlock_steps(&self) -> u64 {
        self.members.steps
    }

    /// Notes that a request of this scope waits no more. `all` means that none does.
    pub(super) fn asks_no_more(&mut self, key: usize, request: RequestId, all: bool) {
        let Self { scopes, members, .. } = self;
        let known = &mut scopes[key].known;
        if let (Some(rank), Some(asks)) = (known.rank, known.asks.remove(&request)) {
            members.ask_no_more(&asks, (rank, key));
        }
        known.unasked.remove(&request);
        if all {
            members.leave(key, known);
            known.unasked.clear();
        }
    }

    /// Takes in what a waiting scope now holds and asks for. A known order is updated, or lost.
    fn count(&mut self, key: usize) {
        let Self { scopes, members, .. } = self;
        let Scope { holdings, known, declared, .. } = &mut scopes[key];
        let (counted, paid) = holdings.count();
        let changes = match counted {
            Counted::Since(changes) => changes,
            Counted::Anew(runs) => {
                members.leave(key, known);
                runs.into_iter().map(|run| (run, Change::Came)).collect()
            }
        };
        let mut moved = Vec::new();
        for ((run, exclusive), change) in changes {
            for page in run.pages() {
                let times = known.held.entry(page).or_default();
                let before = *times;
                match change {
                    Change::Came => {
                        times.all += 1;
                        times.exclusive += u32::from(exclusive);
                    }
                    Change::Went => {
                        invariant!(times.all > 0, "{page:?} is let go of by who does not hold it");
                        times.all -= 1;
                        times.exclusive -= u32::from(exclusive);
                    }
                }
                let now = *times;
                if now.all == 0 {
                    known.held.remove(&page);
                }
                let Some(rank) = known.rank else { continue };
                match change {
                    Change::Came => {
                        let locks = before.exclusive == 0 && now.exclusive > 0;
                        if members.hold(page, (rank, key), before.all == 0, locks) {
                            moved.push(page);
                        }
                    }
                    Change::Went => {
                        let unlocks = before.exclusive > 0 && now.exclusive == 0;
                        members.let_go(page, (rank, key), now.all == 0, unlocks);
                    }
                }
            }
        }
        let claim = declared.saturating_sub(paid);
        if known.held.is_empty() && claim == 0 {
            members.leave(key, known);
            return;
        }
        if known.rank.is_none() {
            self.join(key, &mut moved);
        }
        let Self { scopes, members, .. } = self;
        let known = &mut scopes[key].known;
        members.claims = members.claims - u64::from(known.claim) + u64::from(claim);
        members.slack -= i64::from(claim.saturating_sub(known.claim));
        known.claim = claim;
        let short = self.register(key, &mut moved);
        self.members.sure &= !self.any_outgrows(key);
        if self.members.sure {
            self.make_way(moved);
        }
        if self.members.sure && short {
            self.put_last(key);
        }
        let left = self.members.left_in_any_order(u64::from(self.frames.target.saturating_sub(self.floor)));
        self.members.slack = self.members.slack.max(left);
        self.members.sure &= self.members.slack >= 0;
    }

    /// Makes a waiting scope a member. Its rank follows from the members that ask for its pages or hold what it asks
    /// for.
    fn join(&mut self, key: usize, moved: &mut Vec<PageId>) {
        let known = &self.scopes[key].known;
        let (mut above, mut below) = (None, None);
        for (_, runs, purpose, _) in known.unasked.iter().filter_map(|request| self.asks(*request)) {
            for page in runs.iter().flat_map(|run| run.pages()) {
                let Some(at) = self.members.pages.get(&page) else { continue };
                if purpose == Purpose::Write || at.locks > 0 {
                    above = above.max(at.top());
                }
            }
        }
        for (page, times) in &known.held {
            let Some(at) = self.members.pages.get(page) else { continue };
            let first = |asking: &BTreeMap<Member, u32>| asking.first_key_value().map(|((rank, _), _)| *rank);
            let reader = first(&at.readers).filter(|_| times.exclusive > 0);
            below = [below, first(&at.writers), reader].into_iter().flatten().min();
        }
        let rank = match (above, below) {
            (Some(above), _) => above + 1,
            (None, Some(below)) => below - 1,
            (None, None) => 0,
        };
        let Self { scopes, members, .. } = self;
        let known = &mut scopes[key].known;
        known.rank = Some(rank);
        members.count += 1;
        for (page, times) in &known.held {
            if members.hold(*page, (rank, key), true, times.exclusive > 0) {
                moved.push(*page);
            }
        }
        members.highest = members.highest.max(rank);
    }

    /// Takes in what a member newly asks for. Returns whether frames are too few for that while all keep what they
    /// have.
    fn register(&mut self, key: usize, moved: &mut Vec<PageId>) -> bool {
        let mut short = false;
        for request in std::mem::take(&mut self.scopes[key].known.unasked) {
            let Some((_, runs, purpose, reserves)) = self.asks(request) else { continue };
            let asks = Asks { runs: runs.to_vec(), writes: purpose == Purpose::Write, reserves };
            let floor = self.floor_for(request);
            let Self { scopes, members, .. } = self;
            let known = &mut scopes[key].known;
            let Some(rank) = known.rank else { continue };
            let mut wanted = u64::from(reserves) + u64::from(floor);
            for page in asks.pages() {
                if members.ask(page, (rank, key), asks.writes, &mut wanted) {
                    moved.push(page);
                }
            }
            *members.wants.entry(asks.most()).or_default() += 1;
            members.reserving += u32::from(reserves > 0);
            // How many frames will be declared at its turn is not known.
            members.sure &= reserves == 0;
            let others = members.claims - u64::from(known.claim);
            let left = i64::from(self.frames.target) - (members.held + wanted + others) as i64;
            known.asks.insert(request, asks);
            if left < 0 {
                short = true;
            } else {
                members.slack = members.slack.min(left);
            }
        }
        short
    }

    /// Moves members back that ask for one of these pages and are not behind all its holders. Does the same for the
    /// members that wait for those.
    fn make_way(&mut self, mut pages: Vec<PageId>) {
        // A member that is moved again and again may be in a circle.
        let mut most = 4 * self.members.edges + 64;
        while let Some(page) = pages.pop() {
            while let Some(at) = self.members.pages.get(&page)
                && let (Some(top), Some(first)) = (at.top(), at.first_excluded())
                && first.0 <= top
            {
                let Self { scopes, members, .. } = self;
                let known = &mut scopes[first.1].known;
                let size = known.size();
                // The member asks for a page that it holds itself, or too many edges were looked at.
                if known.held.contains_key(&page) || size > most {
                    members.sure = false;
                    return;
                }
                most -= size;
                members.move_to(first.1, known, top + 1);
                pages.extend(known.held.keys());
            }
        }
    }

    /// Puts a member last if nobody waits for it: frames are too few for it as long as all others keep what they have.
    fn put_last(&mut self, key: usize) {
        let known = &self.scopes[key].known;
        let is_awaited = |page: &PageId| self.members.pages.get(page).is_some_and(|at| at.first_excluded().is_some());
        let left = known.asks.iter().map(|(request, asks)| {
            let wanted = asks.pages().filter(|page| !known.held.contains_key(page)).count() as u64;
            let beside = wanted + u64::from(asks.reserves) + u64::from(self.floor_for(*request));
            i64::from(self.frames.target) - (known.held.len() as u64 + beside) as i64
        });
        let left = left.min().unwrap_or(i64::MAX);
        if left < 0 || known.held.keys().any(is_awaited) {
            self.members.sure = false;
            return;
        }
        let Self { scopes, members, .. } = self;
        let last = members.highest + 1;
        members.move_to(key, &mut scopes[key].known, last);
        members.slack = members.slack.min(left);
    }

    /// Whether a request may want more frames than its scope ever has for it, whatever others do, while the scope keeps
    /// what it holds. A scope that declared what it needs pays from its purse only, so it has at most its claim. This
    /// can happen in two ways: a request that can never be refused has spent frames that the scope's own requests count
    /// on, or the scope has reserved less than it was opened for. Resident pages may be evicted, so all pages asked for
    /// count.
    fn outgrows(&self, request: RequestId, claim: u32) -> bool {
        let Some((scope, runs, ..)) = self.asks(request) else { return false };
        let declares = self.scope(scope).is_some_and(|scope| scope.declared > 0);
        declares && !self.never_refused(request) && pages_of(runs) > u64::from(claim)
    }

    /// Whether a request of a member outgrows the member's claim.
    fn any_outgrows(&self, key: usize) -> bool {
        let Scope { known, declared, .. } = &self.scopes[key];
        // No request asks for more than `most`.
        let most = self.members.wants.last_key_value().map_or(0, |(most, _)| *most);
        *declared > 0
            && most > u64::from(known.claim)
            && known.asks.keys().any(|request| self.outgrows(*request, known.claim))
    }

    /// Frames that a request must leave to the floor.
    fn floor_for(&self, request: RequestId) -> u32 {
        if self.never_refused(request) { 0 } else { self.floor }
    }

    /// Whether the budget holds all declared frames and the floor. If so, a member that lets go takes nothing from
    /// others.
    fn is_roomy(&self) -> bool {
        self.declared + self.floor <= self.frames.target
    }

    /// Ends requests that wait for each other forever because of this scope, one after the other until none is left.
    /// Returns whether there was one.
    pub(super) fn break_deadlocks(&mut self, scope: ScopeId, fx: &mut Effects) -> bool {
        let Some(key) = self.scope_key(scope).filter(|key| !self.scopes[*key].waiting.is_empty()) else { return false };
        self.count(key);
        if self.scopes[key].known.rank.is_none() || self.members.sure && self.is_roomy() {
            return false;
        }
        self.break_all(fx)
    }

    /// Looks for circles that may have been closed anywhere.
    pub(super) fn look_at_all(&mut self, fx: &mut Effects) {
        self.members.sure = false;
        self.break_all(fx);
    }

    fn break_all(&mut self, fx: &mut Effects) -> bool {
        let mut any = false;
        while let Some((victim, error)) = self.find_deadlock() {
            self.stats.deadlocks += 1;
            self.end(victim, error, fx);
            any = true;
        }
        any
    }

    /// The request that is to end because scopes wait for each other, and its error.
    fn find_deadlock(&mut self) -> Option<(RequestId, Error)> {
        // No member needs to be moved while all are counted.
        self.members.sure = false;
        let waiting = self.scopes.iter().filter(|(_, scope)| !scope.waiting.is_empty());
        for key in waiting.map(|(key, _)| key).collect::<Vec<_>>() {
            self.count(key);
        }
        self.members.sure = false;
        let left = if self.is_roomy() {
            let reduced = self.reduce();
            if reduced.left.is_empty() {
                self.put_in_order(&reduced);
            }
            reduced.left
        } else {
            self.left_plainly()
        };
        if self.members.compares {
            let plainly = self.left_plainly();
            assert!(left == plainly, "{left:?} wait for each other, or {plainly:?}: {self:#?}");
        }
        (!left.is_empty()).then(|| self.choose(&left)).flatten()
    }

    /// Removes, round by round, the members that can go on once those removed before have let go.
    fn reduce(&mut self) -> Reduction {
        let mut numbers: HashMap<PageId, usize> = HashMap::new();
        let mut pages: Vec<PageLeft> = Vec::new();
        let mut nodes: Vec<NodeLeft> = Vec::new();
        let mut requests: Vec<RequestLeft> = Vec::new();
        let (mut used, mut declared, mut steps) = (0, 0, 0);
        for (key, scope) in self.scopes.iter().filter(|(_, scope)| scope.known.rank.is_some()) {
            let known = &scope.known;
            let mut node = NodeLeft { key, pages: Vec::with_capacity(known.held.len()), claim: known.claim, open: 0 };
            for (page, times) in &known.held {
                let number = *numbers.entry(*page).or_insert_with(|| {
                    pages.push(PageLeft::default());
                    pages.len() - 1
                });
                pages[number].holders += 1;
                pages[number].locked |= times.exclusive > 0;
                node.pages.push(number);
            }
            steps += known.size();
            used += i64::from(known.claim);
            declared += scope.declared;
            nodes.push(node);
        }
        used += pages.len() as i64;
        // Requests to be tried: no member holds one of their pages in a way that excludes them.
        let mut next: Vec<usize> = Vec::new();
        for (at, node) in nodes.iter_mut().enumerate() {
            for id in &self.scopes[node.key].waiting {
                let Some((_, runs, purpose, reserves)) = self.asks(*id) else { continue };
                if self.outgrows(*id, node.claim) {
                    node.open += 1;
                    continue;
                }
                let mut request = RequestLeft {
                    node: at,
                    wanted: u64::from(reserves),
                    floor: self.floor_for(*id),
                    reserves,
                    excluded: 0,
                };
                for page in runs.iter().flat_map(|run| run.pages()) {
                    let Some(number) = numbers.get(&page) else {
                        request.wanted += 1;
                        continue;
                    };
                    let page = &mut pages[*number];
                    let excluded = purpose == Purpose::Write || page.locked;
                    request.excluded += u32::from(excluded);
                    page.asking.push((requests.len(), excluded));
                }
                if request.excluded == 0 {
                    next.push(requests.len());
                }
                node.open += 1;
                requests.push(request);
            }
        }
        let target = i64::from(self.frames.target);
        let mut ready: Vec<usize> = (0..nodes.len()).filter(|at| nodes[*at].open == 0).collect();
        // Requests that wait until at most this many frames are used.
        let mut until: BinaryHeap<(i64, usize)> = BinaryHeap::new();
        let mut undeclared: Vec<usize> = Vec::new();
        let mut rounds = Vec::with_capacity(nodes.len());
        let (mut slack, mut lasts) = (PLENTY, true);
        for round in 0.. {
            next.append(&mut undeclared);
            while until.peek().is_some_and(|(until, _)| *until >= used) {
                next.extend(until.pop().map(|(_, request)| request));
            }
            for number in next.drain(..) {
                steps += 1;
                let RequestLeft { node, wanted, floor, reserves, .. } = requests[number];
                let scope = &self.scopes[nodes[node].key];
                let declares = reserves == 0 || declared + reserves + self.floor <= self.frames.target;
                let most = target - wanted as i64 - i64::from(floor) + i64::from(nodes[node].claim);
                if declares && used <= most {
                    slack = slack.min(most - used);
                } else if wanted <= u64::from(scope.purse + scope.coming) {
                    // Frames in the scope's purse are there, whatever a smaller budget waits for. But another request
                    // may spend them.
                    lasts = false;
                } else if declares {
                    until.push((most, number));
                    continue;
                } else {
                    undeclared.push(number);
                    continue;
                }
                nodes[node].open -= 1;
                if nodes[node].open == 0 {
                    ready.push(node);
                }
            }
            if ready.is_empty() {
                break;
            }
            for node in ready.drain(..) {
                rounds.push((nodes[node].key, round));
                used -= i64::from(nodes[node].claim);
                declared -= self.scopes[nodes[node].key].declared;
                for number in std::mem::take(&mut nodes[node].pages) {
                    pages[number].holders -= 1;
                    if pages[number].holders > 0 {
                        continue;
                    }
                    used -= 1;
                    for (request, excluded) in std::mem::take(&mut pages[number].asking) {
                        steps += 1;
                        requests[request].wanted += 1;
                        requests[request].excluded -= u32::from(excluded);
                        if excluded && requests[request].excluded == 0 {
                            next.push(request);
                        }
                    }
                }
            }
        }
        self.members.steps += steps;
        let left = nodes.iter().filter(|node| node.open > 0).map(|node| node.key).collect();
        Reduction { left, rounds, slack, lasts }
    }

    fn put_in_order(&mut self, reduction: &Reduction) {
        let Self { scopes, members, .. } = self;
        for (key, round) in &reduction.rounds {
            members.move_to(*key, &mut scopes[*key].known, *round);
        }
        members.highest = reduction.rounds.last().map_or(0, |(_, round)| *round);
        members.slack = reduction.slack;
        members.sure = reduction.lasts && members.reserving == 0;
    }

    /// Members that cannot go on, found by looking at each member again and again.
    fn left_plainly(&self) -> Vec<usize> {
        let waiting = self.scopes.iter().filter(|(_, scope)| !scope.waiting.is_empty()).map(|(key, _)| key);
        let (mut nodes, mut holders) = self.nodes(waiting);
        let mut claims: u64 = nodes.iter().map(|node| u64::from(node.claim)).sum();
        loop {
            let before = nodes.len();
            let declared: u32 = nodes.iter().map(|node| node.scope.declared).sum();
            let frames = self.frames_beside(declared);
            nodes.retain(|node| {
                let all = HeldByAll { pages: &holders, claims, frames, declared };
                let stays = node.scope.waiting.iter().any(|request| !self.goes_on(node, *request, &all));
                if !stays {
                    claims -= u64::from(node.claim);
                    for page in node.held.keys() {
                        if let Some((count, _)) = holders.get_mut(page) {
                            *count -= 1;
                            if *count == 0 {
                                holders.remove(page);
                            }
                        }
                    }
                }
                stays
            });
            if nodes.is_empty() || nodes.len() == before {
                return nodes.iter().map(|node| node.key).collect();
            }
        }
    }

    /// The scopes of `keys` that hold something. Also, for each page held, how many of them hold it, and whether one
    /// does so exclusively.
    fn nodes(&self, keys: impl Iterator<Item = usize>) -> (Vec<Node<'_>>, HashMap<PageId, (u32, bool)>) {
        let mut nodes = Vec::new();
        let mut holders: HashMap<PageId, (u32, bool)> = HashMap::new();
        for key in keys {
            let scope = &self.scopes[key];
            let runs = scope.holdings.runs();
            let held: HashMap<PageId, bool> =
                runs.iter().flat_map(|(run, exclusive)| run.pages().map(|page| (page, *exclusive))).collect();
            let claim = scope.claim();
            if held.is_empty() && claim == 0 {
                continue;
            }
            for (page, exclusive) in &held {
                let holder = holders.entry(*page).or_default();
                *holder = (holder.0 + 1, holder.1 || *exclusive);
            }
            nodes.push(Node { key, id: self.scope_id(key), scope, held, claim });
        }
        (nodes, holders)
    }

    /// The request that is to end, of those that wait for each other, and its error.
    fn choose(&self, left: &[usize]) -> Option<(RequestId, Error)> {
        let (nodes, holders) = self.nodes(left.iter().copied());
        let claims: u64 = nodes.iter().map(|node| u64::from(node.claim)).sum();
        // A scope in its own way comes first: no other scope can do anything about that.
        if let Some(told) = nodes.iter().find_map(|node| self.in_its_own_way(node)) {
            return Some(told);
        }
        // Otherwise the one whose end costs the least. First a scope that helps by letting go, because it holds
        // something that no other does; then one not opened for a number of pages; then a batch one; then the youngest.
        let declared = nodes.iter().map(|node| node.scope.declared).sum();
        let all = HeldByAll { pages: &holders, claims, frames: self.frames.target, declared };
        let victim = nodes
            .iter()
            .filter_map(|node| {
                let Node { id, scope, held, .. } = node;
                let mut refusable = scope.waiting.iter().rev().copied().filter(|request| !self.never_refused(*request));
                let any = refusable.clone().next()?;
                let request = refusable.find(|request| !self.goes_on(node, *request, &all)).unwrap_or(any);
                let alone = |page: &PageId| holders.get(page).is_some_and(|(count, _)| *count == 1);
                let helps = node.claim > 0 || held.keys().any(alone);
                Some(((helps, scope.holdings.at_most().is_none(), scope.priority, scope.serial), *id, request))
            })
            .max_by_key(|(cost, ..)| *cost);
        let (_, chosen, request) = victim?;
        let mut message = String::new();
        for node in nodes.iter().take(NAMED) {
            let asked: u64 =
                node.scope.waiting.iter().filter_map(|id| self.asks(*id)).map(|(_, runs, ..)| pages_of(runs)).sum();
            let _ = write!(
                message,
                "{} holds {} and asks for {}; ",
                self.scope_name(Some(node.id)),
                self.pages_in_words(node.held.len() as u64),
                self.pages_in_words(asked)
            );
        }
        if nodes.len() > NAMED {
            let _ = write!(message, "{} more scopes do likewise; ", nodes.len() - NAMED);
        }
        let _ = write!(
            message,
            "the budget is {}: they wait for each other, and {} gives up",
            self.pages_in_words(u64::from(self.frames.target)),
            self.scope_name(Some(chosen))
        );
        Some((
            request,
            Error::new(ErrorKind::WouldDeadlock, message).remedy(
                "drop the scope's guards and try again, pin what is needed together as a set, or open the scope for \
                 the most it will need, so that it is admitted as a unit",
            ),
        ))
    }

    /// Whether a waiting request could be admitted if nothing but `all` were held.
    fn goes_on(&self, node: &Node<'_>, request: RequestId, all: &HeldByAll<'_>) -> bool {
        let Some((_, runs, purpose, reserves)) = self.asks(request) else { return true };
        if self.outgrows(request, node.claim) {
            return false;
        }
        let mut wanted = u64::from(reserves);
        for page in runs.iter().flat_map(|run| run.pages()) {
            match all.pages.get(&page) {
                None => wanted += 1,
                // Whoever holds the page, the scope itself included.
                Some((_, locked)) if purpose == Purpose::Write || *locked => return false,
                Some(_) => {}
            }
        }
        // It wants no frame, or its frames are in the purse, whatever a smaller budget waits for.
        if wanted <= u64::from(node.scope.purse + node.scope.coming) {
            return true;
        }
        let others = all.claims - u64::from(node.claim);
        let declares = reserves == 0 || all.declared + reserves + self.floor <= self.frames.target;
        let floor = u64::from(self.floor_for(request));
        declares && all.pages.len() as u64 + wanted + floor + others <= u64::from(all.frames)
    }

    /// The scope's request that waits for what the scope itself holds, and an error that says so.
    fn in_its_own_way(&self, node: &Node<'_>) -> Option<(RequestId, Error)> {
        let budget = u64::from(self.frames.target);
        let most = u64::from(self.frames_beside(node.scope.declared));
        let told =
            node.scope.waiting.iter().copied().filter(|request| !self.never_refused(*request)).find_map(|request| {
                let (_, runs, purpose, reserves) = self.asks(request)?;
                let pages = || runs.iter().flat_map(|run| run.pages());
                let writes = purpose == Purpose::Write;
                let what = if writes { "write" } else { "read" };
                if let Some(page) = pages().find(|page| node.held.get(page).is_some_and(|locked| writes || *locked)) {
                    let has = if node.held[&page] {
                        "which it has pinned to write itself"
                    } else {
                        "which it has pinned itself"
                    };
                    let (index, segment) = (page.index.0, page.segment);
                    return Some((request, format!("asks to {what} page {index} of {segment:?}, {has}")));
                }
                if self.outgrows(request, node.claim) {
                    let declared = node.scope.declared;
                    let [declared, spent, asked] = [declared.into(), (declared - node.claim).into(), pages_of(runs)]
                        .map(|pages| self.pages_in_words(pages));
                    let what =
                        format!("has declared {declared}, has spent {spent} of these for what it holds, and asks for");
                    return Some((request, format!("{what} {asked}")));
                }
                let held = node.held.len() as u64;
                let more = pages().filter(|page| !node.held.contains_key(page)).count() as u64 + u64::from(reserves);
                (held + more + u64::from(self.floor_for(request)) > most).then(|| {
                    let (held, more, budget) =
                        (self.pages_in_words(held), self.pages_in_words(more), self.pages_in_words(budget));
                    (request, format!("holds {held} itself and asks for {more} more, of a budget of {budget}"))
                })
            });
        let (request, what) = told?;
        let message = format!("{} {what}: it would wait for itself", self.scope_name(Some(node.id)));
        let error = Error::new(ErrorKind::WouldDeadlock, message)
            .remedy("let guards go first, and open a scope of its own for each thread or task");
        Some((request, error))
    }

    /// For example "3 pages (6.0 MiB)".
    fn pages_in_words(&self, pages: u64) -> String {
        let noun = if pages == 1 { "page" } else { "pages" };
        format!("{pages} {noun} ({})", Bytes::new(pages * self.config.page_bytes))
    }

    /// For checks: only requests that can never be refused wait forever, and the counts of members are right.
    pub(super) fn check_members(&self) -> Result<(), String> {
        let refusable = |key: &usize| self.scopes[*key].waiting.iter().any(|request| !self.never_refused(*request));
        let left = self.left_plainly();
        // Some changes are looked at later. Lent pages: with the next event, at the latest when the fill ends. A paid
        // guard that is no longer listed: when its end is told, under the same hold of the latch.
        let in_debt =
            |scope: &Scope| scope.paid.iter().map(|(_, frames)| frames).sum::<u32>() != scope.holdings().paid();
        let looks_later = !self.grown.is_empty() || self.scopes.iter().any(|(_, scope)| in_debt(scope));
        ensure!(looks_later || !left.iter().any(refusable), "{left:?} wait for each other, and nobody is told");
        let Members { pages, count, held, claims, edges, wants, reserving, sure, slack, highest, .. } = &self.members;
        let mut expected: HashMap<PageId, AtPage> = HashMap::new();
        let (mut all, mut claimed, mut size, mut most, mut reserve) = (0, 0, 0, BTreeMap::<u64, u32>::new(), 0);
        for (key, scope) in &self.scopes {
            let known = &scope.known;
            let Some(rank) = known.rank else {
                ensure!(known.held.is_empty() && known.asks.is_empty() && known.claim == 0, "no member: {known:?}");
                continue;
            };
            all += 1;
            ensure!(!scope.waiting.is_empty() && rank <= *highest, "{key} is a member at {rank}");
            for request in &scope.waiting {
                ensure!(known.asks.contains_key(request) != known.unasked.contains(request), "{request:?}: {known:?}");
            }
            claimed += u64::from(known.claim);
            size += known.size();
            for (page, times) in &known.held {
                let at = expected.entry(*page).or_default();
                at.holders.insert((rank, key));
                at.locks += u32::from(times.exclusive > 0);
            }
            for asks in known.asks.values() {
                *most.entry(asks.most()).or_default() += 1;
                reserve += u32::from(asks.reserves > 0);
                for page in asks.pages() {
                    *expected.entry(page).or_default().asking(asks.writes).entry((rank, key)).or_default() += 1;
                }
            }
        }
        ensure!(*pages == expected, "at pages is {pages:?}, not {expected:?}");
        let holds = pages.values().filter(|at| !at.holders.is_empty()).count() as u64;
        ensure!(
            (*count, *held, *claims, *edges, wants, *reserving) == (all, holds, claimed, size, &most, reserve),
            "members are counted as {:?}",
            self.members
        );
        if !*sure {
            return Ok(());
        }
        for (page, at) in pages {
            let first = at.first_excluded().map(|(rank, _)| rank);
            ensure!(first.is_none() || at.top() < first, "{page:?} is in the way of who comes first: {at:?}");
        }
        for (key, scope) in &self.scopes {
            let Some(rank) = scope.known.rank else { continue };
            let behind = |at: &AtPage| at.top() >= Some(rank);
            let held = pages.iter().filter(|(_, at)| behind(at)).count() as u64;
            let others = self.scopes.iter().filter(|(other, _)| *other != key).map(|(_, scope)| &scope.known);
            let claims: u64 = others.filter(|known| known.rank >= Some(rank)).map(|known| u64::from(known.claim)).sum();
            for (request, asks) in &scope.known.asks {
                let absent = asks.pages().filter(|page| !pages.get(page).is_some_and(behind)).count() as u64;
                let all = held + claims + absent + u64::from(asks.reserves + self.floor_for(*request));
                let left = i64::from(self.frames.target) - all as i64;
                ensure!(left >= *slack && *slack >= 0, "{request:?} has {left} frames left, and not {slack}");
            }
        }
        Ok(())
    }
}

/// The result of a reduction.
struct Reduction {
    /// Keys of the members that remain.
    left: Vec<usize>,
    /// Keys of the removed members, and the round in which each was removed.
    rounds: Vec<(usize, i64)>,
    /// The fewest frames left in any round for a request that was satisfied in it.
    slack: i64,
    /// Whether the result for these members stays right when others join, as long as those find room.
    lasts: bool,
}

/// A page held by members that are not removed yet.
#[derive(Default)]
struct PageLeft {
    holders: u32,
    locked: bool,
    /// Requests that want it, by number, and whether they are excluded.
    asking: Vec<(usize, bool)>,
}

struct NodeLeft {
    key: usize,
    pages: Vec<usize>,
    claim: u32,
    /// How many of its requests are not satisfied yet.
    open: u32,
}

struct RequestLeft {
    node: usize,
    /// Frames it wants: for pages that nobody holds, and to reserve.
    wanted: u64,
    floor: u32,
    reserves: u32,
    /// How many of its pages are held in a way that excludes it.
    excluded: u32,
}

/// A scope that holds something and waits.
struct Node<'a> {
    key: usize,
    id: ScopeId,
    scope: &'a Scope,
    /// The pages it holds, and whether exclusively.
    held: HashMap<PageId, bool>,
    /// See [`Scope::claim`].
    claim: u32,
}

/// What several scopes hold together.
struct HeldByAll<'a> {
    /// For each page, how many of them hold it, and whether one does so exclusively.
    pages: &'a HashMap<PageId, (u32, bool)>,
    /// Frames they claim beside these.
    claims: u64,
    /// How many frames there are.
    frames: u32,
    /// How many frames they have declared.
    declared: u32,
}

/// How many scopes a message names.
const NAMED: usize = 4;
