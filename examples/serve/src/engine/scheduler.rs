//! Who is read and written in the next pass.
//!
//! A pass has one token of each answer that is being written, and as many tokens of prompts as make it take about
//! twice as long, but at least [`JOIN_LEAST`]. Which answers share passes changes no bit of them.
//!
//! An answer is active by a permit of the pool, for the tokens it has and those it is expected to get. In layers with a
//! window that counts what its passes use: less, once its prompt has been read. When it needs more than that and there
//! is no room, the answer that became active last is preempted: its keys and values are parked or computed again later,
//! whichever takes less time by what was measured.

use std::collections::{BTreeMap, VecDeque};
use std::mem::take;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use outcore::policy::SegmentClass;
use outcore::{Bytes, ErrorKind};
use outcore_kv::{Extent, KvPool, Permit, PermitRequest, TenantId};
use outcore_llm::drafts::{DRAFT_MOST, DraftBy, follow};
use outcore_llm::pace::Pace;
use outcore_llm::{AnySession, Logits, Output, PagedKeys, Part, PassError, Passes, Tokenizer};

use super::answer::{Answer, Turn};
use super::choose::{Chosen, Given};
use super::turns::Turns;
use super::{Command, Drafter, Embedding, End, Event, Job, Limits, Preempt, Shared, stopping};
use crate::capture::Capture;
use crate::error::ApiError;
use crate::metrics::{Metrics, Preempted};
use crate::slack::Slack;

/// The fewest tokens of prompts that join a pass: fewer would not be worth their share of it.
const JOIN_LEAST: usize = 16;
/// Tokens that an answer is expected to get before any has ended.
const EXPECTED_FIRST: f64 = 64.0;
/// How much the length of the last answer counts beside those before.
const EXPECTED_NEW: f64 = 0.1;
/// What is kept for keys and values changes by at least this part of what is in use.
const KEPT_STEP: u64 = 8;
/// The most that is kept for them, of so many parts of the device budget: seven.
const KEPT_PARTS: u64 = 8;
/// Bytes a second that keys and values move at, where the disk is not known.
const DISK_UNKNOWN: f64 = 1e9;

/// See the [module's documentation](self).
pub struct Scheduler<P: Passes> {
    model: Arc<P>,
    drafter: Option<Drafter>,
    pool: KvPool,
    slack: Arc<Slack>,
    tokenizer: Arc<Tokenizer>,
    limits: Limits,
    metrics: Arc<Metrics>,
    shared: Arc<Shared>,
    pace: Pace,
    /// Those who wait, in order.
    lines: BTreeMap<TenantId, VecDeque<Answer<P>>>,
    /// Where a line's first one stands among those of all tenants.
    places: BTreeMap<TenantId, PermitRequest>,
    turns: Turns,
    running: Vec<Answer<P>>,
    /// How many became active so far.
    next: u64,
    /// Tokens of an answer, by those that have ended.
    expected: f64,
    /// Bytes a second that parked keys and values move at.
    disk: f64,
    /// What is kept in device memory for keys and values, in steps of `KEPT_STEP`. `None` if the policy keeps nothing.
    kept: Option<Bytes>,
    capture: Capture,
}

impl<P: Passes> Scheduler<P> {
    pub fn new(
        model: Arc<P>,
        drafter: Option<Drafter>,
        (pool, slack): (KvPool, Arc<Slack>),
        tokenizer: Arc<Tokenizer>,
        limits: Limits,
        metrics: Arc<Metrics>,
        shared: Arc<Shared>,
    ) -> Self {
        let disk = pool.runtime().stats().settings.disk;
        Self {
            model,
            drafter,
            pool,
            slack,
            tokenizer,
            limits,
            metrics,
            shared,
            pace: Pace::default(),
            lines: BTreeMap::new(),
            places: BTreeMap::new(),
            turns: Turns::default(),
            running: Vec::new(),
            next: 0,
            expected: EXPECTED_FIRST,
            disk: disk.map_or(DISK_UNKNOWN, |disk| disk.bytes_per_second.get() as f64),
            kept: Some(Bytes::ZERO),
            capture: Capture::default(),
        }
    }

    /// Writes down which pages are used.
    pub fn capturing(self, capture: Capture) -> Self {
        Self { capture, ..self }
    }

    /// Until told to stop, or until nobody can tell anything any more.
    pub fn run(mut self, commands: &Receiver<Command>) {
        loop {
            let command = match self.running.is_empty() && self.lines.is_empty() {
                true => commands.recv().map_err(|_| TryRecvError::Disconnected),
                false => commands.try_recv(),
            };
            match command {
                Ok(Command::Submit(job)) => {
                    self.lines.entry(job.tenant).or_default().push_back(Answer::new(*job));
                    continue;
                }
                Ok(Command::Stop) | Err(TryRecvError::Disconnected) => return self.stop(),
                Err(TryRecvError::Empty) => {}
            }
            self.forget_those_over();
            self.admit();
            self.pass();
            self.count();
        }
    }

    /// Tells others how many wait and run.
    fn count(&self) {
        let of_line = |answer: &Answer<P>| 1 + answer.job.followers.len();
        let waiting: usize = self.lines.values().flatten().map(of_line).sum();
        let followers: usize = self.running.iter().map(|answer| answer.job.followers.len()).sum();
        self.metrics.load(waiting + followers, self.running.len());
    }

    /// An answer neither waits nor runs any more.
    fn leave(&mut self, mut answer: Answer<P>) {
        let tenant = answer.job.tenant;
        if let Some(charged) = answer.charged {
            let more = answer.tokens.len() as f64 - charged as f64;
            self.turns.ended(tenant, more / self.weight(tenant));
        }
        self.line_up_followers(take(&mut answer.job.followers));
        // The places of embeddings are their request's.
        let places = usize::from(answer.job.embedding.is_none());
        // With its blocks.
        drop(answer);
        self.shared.unfinished.fetch_sub(places, Ordering::SeqCst);
    }

    fn fail(&mut self, answer: Answer<P>, error: ApiError) {
        answer.send(Event::Failed(Box::new(error)));
        self.leave(answer);
    }

    /// The prompt was read, or never will be: the other answers to it go into the line, before all who came later.
    fn line_up_followers(&mut self, followers: Vec<Job>) {
        followers.into_iter().rev().for_each(|job| self.line_up_first(Answer::new(job)));
    }

    fn line_up_first(&mut self, answer: Answer<P>) {
        let tenant = answer.job.tenant;
        // The place was for as many tokens as the one behind it has.
        self.places.remove(&tenant);
        self.lines.entry(tenant).or_default().push_front(answer);
    }

    /// Lets answers go that nobody waits for, or that took too long.
    fn forget_those_over(&mut self) {
        let now = Instant::now();
        let mut over: Vec<Answer<P>> = self.running.extract_if(.., |answer| answer.is_over(now)).collect();
        for (tenant, line) in &mut self.lines {
            if line.front().is_some_and(|first| first.is_over(now)) {
                self.places.remove(tenant);
            }
            if line.iter().any(|answer| answer.is_over(now)) {
                let (gone, stay): (Vec<_>, Vec<_>) = take(line).into_iter().partition(|answer| answer.is_over(now));
                *line = stay.into();
                over.extend(gone);
            }
        }
        for answer in over {
            // What was written by then is kept: it is cut short as by a limit of tokens.
            if answer.written() > 0 {
                self.end_one(answer, End::Length);
                continue;
            }
            let message = match answer.job.embedding {
                None => "No token was written in the time that the server allows. Try again later.",
                Some(_) => "The input was not read in the time that the server allows. Try again later, or with less.",
            };
            self.fail(answer, ApiError::unavailable(message, Some(Duration::from_secs(10))));
        }
        self.lines.retain(|_, line| !line.is_empty());
    }

    /// Tokens for which an answer asks for a permit.
    fn wanted(&self, answer: &Answer<P>) -> u64 {
        let more = answer.job.most - answer.written();
        (answer.tokens.len() + more.min(self.expected as usize + 1)) as u64
    }

    /// Tenants of whom somebody waits, the one whose turn is next first: the one whose [turn](Turns) begins first, and
    /// of equals the one whose first in line came first.
    fn tenants_who_wait(&self) -> Vec<TenantId> {
        let mut tenants: Vec<_> =
            self.firsts().map(|(since, tenant)| (self.turns.next(tenant), since, tenant)).collect();
        tenants.sort_by(|one, other| one.0.total_cmp(&other.0).then((one.1, one.2).cmp(&(other.1, other.2))));
        tenants.into_iter().map(|(.., tenant)| tenant).collect()
    }

    fn weight(&self, tenant: TenantId) -> f64 {
        self.pool.tenant_options(tenant).active_weight.max(1).into()
    }

    /// When each tenant's first in line came.
    fn firsts(&self) -> impl Iterator<Item = (Instant, TenantId)> {
        self.lines.iter().filter_map(|(tenant, line)| Some((line.front()?.job.received, *tenant)))
    }

    /// Those who wait become active, while there is room.
    fn admit(&mut self) {
        while self.running.len() < self.limits.concurrency && self.admit_one() {}
    }

    /// One of those who wait becomes active, or is given up. Returns false if nobody can.
    fn admit_one(&mut self) -> bool {
        // One without a permit has more than all that may be active.
        if self.running.iter().any(|answer| answer.permit.is_none()) {
            return false;
        }
        let oldest = self.firsts().min().map(|(_, tenant)| tenant);
        let alone = |tenant: &TenantId| self.lines.get(tenant).and_then(VecDeque::front).is_some_and(|one| one.alone);
        if let Some(tenant) = oldest.filter(alone) {
            // Nobody begins before it: else it would wait for as long as others come.
            return self.running.is_empty() && self.begin(tenant, None);
        }
        for tenant in self.tenants_who_wait() {
            let place = match self.places.remove(&tenant) {
                Some(place) => Ok(place),
                None => self.ask(tenant),
            };
            let permit = place.and_then(|mut place| Ok((place.wait_timeout(Duration::ZERO)?, place)));
            match permit {
                Ok((Some(permit), _)) => {
                    if self.begin(tenant, Some(permit)) {
                        return true;
                    }
                }
                Ok((None, place)) => {
                    self.places.insert(tenant, place);
                }
                // It needs more than there is room for beside anybody else.
                Err(_) => {
                    if let Some(first) = self.lines.get_mut(&tenant).and_then(VecDeque::front_mut) {
                        first.alone = true;
                    }
                    if oldest == Some(tenant) {
                        return self.running.is_empty() && self.begin(tenant, None);
                    }
                }
            }
        }
        false
    }

    /// Asks for room for the first of a tenant's line: for what it is expected to get, or at least for what it has.
    fn ask(&self, tenant: TenantId) -> outcore::Result<PermitRequest> {
        let first = self.lines.get(&tenant).and_then(VecDeque::front);
        let [wanted, least] = first.map_or([1, 1], |first| [self.wanted(first), first.tokens.len() as u64 + 1]);
        let pass = first.map_or(1, |first| self.longest_pass(first));
        let ask = |tokens| self.pool.admit(tenant, Extent::new(tokens).in_passes_of(pass));
        ask(wanted).or_else(|_| ask(least))
    }

    /// The most tokens of an answer in a pass, before it is written.
    fn longest_pass(&self, answer: &Answer<P>) -> u64 {
        (answer.tokens.len() - answer.read()).min(self.limits.pass) as u64
    }

    /// The first of a tenant's line becomes active, or is given up. Returns false if it has to wait for others of its
    /// tenant, which may not have more blocks.
    fn begin(&mut self, tenant: TenantId, permit: Option<Permit>) -> bool {
        let Some(first) = self.lines.get(&tenant).and_then(VecDeque::front) else { return false };
        let others = self.running.iter().any(|other| other.job.tenant == tenant);
        if others && first.session.is_none() && self.is_at_its_most(tenant, first.tokens.len()) {
            return false;
        }
        let Some(mut answer) = self.lines.get_mut(&tenant).and_then(VecDeque::pop_front) else { return false };
        let parked = answer.session.take();
        let mut session = match parked.map(resume) {
            Some(Ok(session)) => Ok(session),
            Some(Err(error)) => {
                tracing::debug!(error = error.in_full(), "what was parked did not come back, and is computed again");
                self.begin_session(&answer)
            }
            None => self.begin_session(&answer),
        };
        while session.as_ref().is_err_and(is_full)
            && self.give_up_parked(tenant, self.is_at_its_most(tenant, answer.tokens.len()))
        {
            session = self.begin_session(&answer);
        }
        match session {
            Ok(session) => {
                if answer.charged.is_none() {
                    let charged = self.wanted(&answer);
                    answer.charged = Some(charged);
                    self.turns.begun(tenant, charged as f64 / self.weight(tenant));
                    self.metrics.begun(answer.prompt, session.len(), answer.job.received.elapsed());
                    answer.send(Event::Begun(session.len()));
                }
                answer.session = Some(session);
                answer.permit = permit;
                answer.nth = self.next;
                self.next += 1;
                self.running.push(answer);
            }
            Err(error) if is_full(&error) && others => {
                self.lines.entry(tenant).or_default().push_front(answer);
                return false;
            }
            Err(error) => {
                tracing::warn!(error = error.in_full(), "an answer could not begin");
                self.fail(answer, ApiError::of_pass(&error));
            }
        }
        if self.lines.get(&tenant).is_some_and(VecDeque::is_empty) {
            self.lines.remove(&tenant);
        }
        true
    }

    /// Whether the answers of a tenant, with one of so many tokens more, come to more blocks than it may have: then
    /// only its own can make room. Those that run count with what the next pass gives them, since a pass that fails
    /// takes back what it had appended.
    fn is_at_its_most(&self, tenant: TenantId, more: usize) -> bool {
        let most = self.pool.tenant_options(tenant).blocks_most;
        if most == u32::MAX {
            return false;
        }
        // One more, since a block that others share is copied before it is written to.
        let blocks = |tokens: usize| tokens.div_ceil(self.pool.layout().block_tokens() as usize) as u64 + 1;
        let own = |answer: &&Answer<P>| answer.job.tenant == tenant;
        let running = self.running.iter().filter(own).map(|answer| blocks(answer.tokens.len() + self.limits.drafts));
        let waiting = self.lines.get(&tenant).into_iter().flatten();
        let parked = waiting.filter(|answer| answer.session.is_some()).map(|answer| blocks(answer.read()));
        let added = if more > 0 { blocks(more + self.limits.drafts) } else { 0 };
        running.chain(parked).sum::<u64>() + added > most.into()
    }

    /// Gives up the keys and values of a parked answer, of this tenant or of any. They are computed again. Returns
    /// false if there are none.
    fn give_up_parked(&mut self, tenant: TenantId, only_own: bool) -> bool {
        let lines = self.lines.iter_mut().filter(|(of, _)| !only_own || **of == tenant);
        let mut answers = lines.flat_map(|(_, line)| line.iter_mut().rev());
        let Some(parked) = answers.find(|answer| answer.session.is_some()) else { return false };
        parked.session = None;
        self.metrics.preempted(Preempted::Recomputed);
        true
    }

    fn begin_session(&self, answer: &Answer<P>) -> outcore_llm::Result<P::Session> {
        let needs_first = answer.job.embedding.as_ref().is_some_and(Embedding::needs_first);
        // What is there already has no hidden states.
        let found = if needs_first { &[] } else { &answer.tokens[..] };
        let tokens: Vec<_> = found.iter().copied().map(outcore_kv::Token::new).collect();
        let keys = PagedKeys::new(self.pool.begin(answer.job.tenant, &tokens)?);
        self.model.begin(keys, self.limits.pass)
    }

    /// One pass for all that are active.
    fn pass(&mut self) {
        let mut turns = self.turns();
        self.make_room(&mut turns);
        self.keep(&turns);
        if turns.is_empty() {
            return;
        }
        let tokens: usize = turns.iter().map(|turn| turn.input.len()).sum();
        match self.slack.fit(tokens, turns.iter().map(Turn::rows).sum()) {
            Ok(()) => {}
            // Pages still make room. Nothing was begun: the pass is planned anew.
            Err(error) if error.kind() == ErrorKind::TimedOut => {
                tracing::warn!(%error, "a pass waits for pages to make room");
                return;
            }
            Err(error) => return self.pass_failed(None, &error.into()),
        }
        let since = Instant::now();
        let results = {
            let mut turns = turns.iter().peekable();
            let mut parts = Vec::with_capacity(turns.len());
            for (at, answer) in self.running.iter_mut().enumerate() {
                let Some(turn) = turns.next_if(|turn| turn.at == at) else { continue };
                let Some(session) = answer.session.as_mut() else { continue };
                parts.push(Part { session, tokens: &turn.input, logits: turn.logits, sampler: None });
            }
            self.model.pass(&mut parts)
        };
        let took = since.elapsed();
        self.capture.pass(self.pool.runtime());
        match &results {
            Ok((outputs, time)) => {
                self.pace.observe(tokens, took.as_secs_f64());
                self.metrics.pass(tokens, took, time.waited);
                let chosen = self.choose(&turns, outputs);
                for (turn, chosen) in turns.iter().zip(chosen) {
                    self.take(turn, chosen);
                }
                self.end();
            }
            Err(PassError { part, error }) => self.pass_failed(part.and_then(|nth| turns.get(nth)), error),
        }
    }

    /// Bytes of the blocks that a pass over so many tokens behind `read` uses.
    fn bytes_of(&self, read: usize, tokens: usize) -> u64 {
        self.pool.layout().pass_bytes(read as u64..(read + tokens) as u64).get()
    }

    /// Has the runtime keep what the active answers use in each pass.
    fn keep(&mut self, turns: &[Turn]) {
        let Some(kept) = self.kept else { return };
        let of_turn = |turn: &Turn| self.bytes_of(self.running[turn.at].read(), turn.input.len());
        let used: u64 = turns.iter().map(of_turn).sum();
        if used <= kept.get() && kept.get() <= used + used / KEPT_STEP * 2 {
            return;
        }
        let runtime = self.pool.runtime();
        // Of the budget that is always there.
        let most = self.slack.least().get() / KEPT_PARTS * (KEPT_PARTS - 1);
        if used.min(most) == kept.get() {
            return;
        }
        // Some more, so that it need not change with each block.
        let wanted = Bytes::new((used + used / KEPT_STEP).min(most));
        self.kept = match runtime.keep_for_classes(&[(SegmentClass::KeysAndValues, wanted)]) {
            Ok(()) => Some(wanted),
            Err(error) => {
                tracing::debug!(%error, "keys and values stay as the policy chooses");
                None
            }
        };
    }

    /// A pass was given up: because of one of them, or for all.
    fn pass_failed(&mut self, turn: Option<&Turn>, error: &outcore_llm::Error) {
        let api = ApiError::of_pass(error);
        let Some(turn) = turn else {
            tracing::error!(error = error.in_full(), "a pass failed");
            let lasting = [ErrorKind::ModelChanged, ErrorKind::Corrupt, ErrorKind::Closed];
            if matches!(error, outcore_llm::Error::Outcore(error) if lasting.contains(&error.kind())) {
                *self.shared.broken.lock() = Some(api.message.clone());
            }
            for answer in take(&mut self.running) {
                self.fail(answer, api.clone());
            }
            return;
        };
        if is_full(error) && self.make_blocks(turn) {
            return;
        }
        tracing::warn!(error = error.in_full(), "an answer was given up");
        let answer = self.running.remove(turn.at);
        self.fail(answer, api);
    }

    /// Makes room for a turn for which there were no blocks: those of a parked answer, or of the answer of its tenant
    /// that became active last, if the tenant may not have more. Returns false if there are none that would help.
    fn make_blocks(&mut self, turn: &Turn) -> bool {
        let tenant = self.running[turn.at].job.tenant;
        let only_own = self.is_at_its_most(tenant, 0);
        if self.give_up_parked(tenant, only_own) {
            return true;
        }
        let own = self.running.iter().enumerate().filter(|(_, answer)| answer.job.tenant == tenant);
        if !only_own || own.clone().count() < 2 {
            return false;
        }
        let Some(victim) = own.max_by_key(|(_, answer)| answer.nth).map(|(at, _)| at) else { return false };
        self.preempt(victim, Preempt::Recompute);
        true
    }

    /// What each does in the next pass.
    fn turns(&mut self) -> Vec<Turn> {
        let decoding = self.running.iter().filter(|answer| answer.is_decoding()).count();
        let room = self.limits.pass.saturating_sub(decoding);
        let mut drafts = self.limits.drafts.min(room);
        let reading = decoding < self.running.len();
        // Prompts come first for what is left of a pass: somebody waits for a first token.
        let mut joining = match decoding {
            0 => room,
            _ => self.pace.joining(decoding).unwrap_or(JOIN_LEAST).max(JOIN_LEAST).min(room),
        };
        // What a token of a draft costs, beside what an answer's share of the pass costs.
        let line = self.pace.line().filter(|_| self.limits.drafts > 0 && !reading);
        let worth = |drafting: f64| match line {
            Some((pass, token)) => (token + drafting) * decoding as f64 / (pass + token * decoding as f64),
            None => 1.0,
        };
        let mut sessions = self.drafter.as_ref().map_or(0, |drafter| drafter.sessions);
        sessions = sessions.saturating_sub(self.running.iter().filter(|answer| answer.drafted.is_some()).count());
        let mut turns = Vec::with_capacity(self.running.len());
        for (at, answer) in self.running.iter_mut().enumerate() {
            let read = answer.read();
            if answer.is_decoding() {
                let most = (answer.job.most - answer.written() - 1).min(drafts);
                let mut by = DraftBy::Lookup;
                let mut draft = if self.limits.drafts > 0 { follow(&answer.tokens, DRAFT_MOST) } else { Vec::new() };
                let mut drafted = answer.drafts.pay(draft.len().min(most), worth(0.0));
                if drafted == 0
                    && let Some(drafter) = &self.drafter
                {
                    let made = answer.draft(drafter, most, &worth, &mut sessions);
                    if !made.is_empty() {
                        (drafted, draft, by) = (made.len(), made, DraftBy::SmallModel);
                    }
                }
                drafts -= drafted;
                let input = [&answer.tokens[read..], &draft[..drafted]].concat();
                turns.push(Turn { at, input, draft, drafted, by, logits: Logits::All });
            } else if joining > 0 {
                let pending = &answer.tokens[read..];
                let count = pending.len().min(joining);
                joining -= count;
                let ends = count == pending.len();
                let logits = match &answer.job.embedding {
                    Some(embedding) => embedding.wants(read, ends),
                    None if ends => Logits::Last,
                    None => Logits::None,
                };
                turns.push(Turn {
                    at,
                    input: pending[..count].to_vec(),
                    draft: Vec::new(),
                    drafted: 0,
                    by: DraftBy::Lookup,
                    logits,
                });
            }
        }
        turns
    }

    /// What a turn's answer has to have room for.
    fn extent_of(&self, turn: &Turn) -> Extent {
        let answer = &self.running[turn.at];
        let pass = turn.input.len() as u64;
        let extent = Extent::new(answer.read() as u64 + pass);
        // The next pass may have more of a prompt than this one.
        extent.in_passes_of(if answer.is_decoding() { pass } else { self.longest_pass(answer) })
    }

    /// Sees to it that each turn's tokens have room, and preempts whom that takes.
    fn make_room(&mut self, turns: &mut Vec<Turn>) {
        // What some need less than before is there for those that need more.
        for turn in &*turns {
            let pass = self.extent_of(turn).pass();
            let permit = self.running[turn.at].permit.as_mut();
            if let Some(permit) = permit.filter(|permit| pass < permit.extent().pass()) {
                permit.fit(permit.extent().in_passes_of(pass));
            }
        }
        let mut nth = 0;
        while let Some(turn) = turns.get(nth) {
            let alone = self.running.len() == 1;
            let extent = self.extent_of(turn);
            let turn = &mut turns[nth];
            let answer = &mut self.running[turn.at];
            if answer.permit.as_mut().is_none_or(|permit| permit.fit(extent)) {
                nth += 1;
                continue;
            }
            if turn.drafted > 0 {
                turn.input.truncate(turn.input.len() - turn.drafted);
                turn.drafted = 0;
                continue;
            }
            if !self.places.is_empty() {
                // What came free is for those who go on: whoever waits asks again.
                self.places.clear();
                continue;
            }
            if alone {
                // Nobody else needs the frames.
                answer.permit = None;
                continue;
            }
            let latest = self.running.iter().enumerate().filter(|(_, answer)| answer.permit.is_some());
            let Some(victim) = latest.max_by_key(|(_, answer)| answer.nth).map(|(at, _)| at) else { return };
            self.preempt(victim, self.limits.preempt);
            if let Some(gone) = turns.iter().position(|turn| turn.at == victim) {
                turns.remove(gone);
                nth -= usize::from(gone < nth);
            }
            turns.iter_mut().filter(|turn| turn.at > victim).for_each(|turn| turn.at -= 1);
        }
    }

    /// An active answer waits again, before all others of its tenant.
    fn preempt(&mut self, at: usize, how: Preempt) {
        let mut answer = self.running.remove(at);
        let read = answer.read();
        // All to the disk, and back what a pass uses; or computed while others are: each token costs what it adds to a
        // pass.
        let layout = self.pool.layout();
        let block = layout.block_room().get() * u64::from(layout.groups());
        let written = (read as u64).div_ceil(u64::from(layout.block_tokens())) * block;
        let park = (written + self.bytes_of(read, 0)) as f64 / self.disk;
        let recompute = self.pace.line().map_or(f64::INFINITY, |(_, token)| token * read as f64);
        let parks = match how {
            Preempt::Auto => park <= recompute,
            Preempt::Park => true,
            Preempt::Recompute => false,
        };
        let parked = answer.session.as_mut().filter(|_| parks).map(AnySession::park);
        if let Some(Err(error)) = &parked {
            tracing::warn!(error = error.in_full(), "an answer's keys and values could not be parked");
        }
        let how = if matches!(parked, Some(Ok(()))) { Preempted::Parked } else { Preempted::Recomputed };
        if how == Preempted::Recomputed {
            answer.session = None;
        }
        answer.permit = None;
        // It is read again, by as few passes.
        answer.drafted = None;
        self.metrics.preempted(how);
        self.line_up_first(answer);
    }

    /// The tokens that follow those of each turn. The threads of the passes share the work: it looks at all logits.
    fn choose(&mut self, turns: &[Turn], outputs: &[Output]) -> Vec<Chosen> {
        let config = self.model.config();
        let mut of_turns = turns.iter().zip(outputs).peekable();
        let mut given = Vec::with_capacity(turns.len());
        for (at, answer) in self.running.iter_mut().enumerate() {
            let Some((turn, output)) = of_turns.next_if(|(turn, _)| turn.at == at) else { continue };
            given.push(Given { answer, turn, logits: &output.logits, chosen: Chosen::default() });
        }
        self.model.for_each(&mut given, |one| one.choose(config, &self.tokenizer));
        given.into_iter().map(|given| given.chosen).collect()
    }

    /// What a pass gave to one of them.
    fn take(&mut self, turn: &Turn, chosen: Chosen) {
        let Chosen { tokens, right, ended, by_token, failed, masks } = chosen;
        let Some(answer) = self.running.get_mut(turn.at) else { return };
        let before = answer.read() - turn.input.len();
        if let ([first, ..], [drafted, ..], 0) = (&tokens[..], &turn.draft[..], turn.drafted) {
            // What would have been: drafts pay again where they come true.
            answer.drafts_by(turn.by).observe(1, usize::from(first.id == *drafted));
        }
        let count = tokens.len();
        for (nth, token) in tokens.into_iter().enumerate() {
            answer.tokens.push(token.id);
            if by_token && nth + 1 == count {
                break;
            }
            answer.send(Event::Token(token));
            let now = Instant::now();
            self.metrics.token(answer.job.received, answer.last.replace(now), now);
        }
        masks.into_iter().for_each(|took| self.metrics.mask(took));
        answer.ended = ended;
        answer.failed = failed;
        answer.drafts_by(turn.by).observe(turn.drafted, right);
        self.metrics.drafted(turn.by, turn.drafted, right);
        let valid = before + turn.input.len() - turn.drafted + right;
        if right < turn.drafted
            && let Some(session) = answer.session.as_mut()
            && let Err(error) = session.truncate(valid)
        {
            // It is read again.
            tracing::warn!(error = error.in_full(), "a draft could not be taken back");
            answer.session = None;
        }
    }

    /// An answer has all its tokens.
    fn end_one(&mut self, answer: Answer<P>, end: End) {
        let event = match &answer.job.embedding {
            Some(embedding) => {
                self.metrics.embedded();
                embedding.event()
            }
            None => {
                self.expected += (answer.written() as f64 - self.expected) * EXPECTED_NEW;
                Event::Ended(end)
            }
        };
        let sink = answer.job.sink.clone();
        // Whoever is told that it has ended finds its blocks free.
        self.leave(answer);
        sink.send(event);
    }

    /// Lets those go that have ended, and the followers of those whose prompts have been read begin.
    fn end(&mut self) {
        let ended: Vec<Answer<P>> = self.running.extract_if(.., |answer| answer.ended.is_some()).collect();
        for answer in ended {
            let end = answer.ended.unwrap_or(End::Stop);
            self.end_one(answer, end);
        }
        let failed: Vec<Answer<P>> = self.running.extract_if(.., |answer| answer.failed.is_some()).collect();
        for mut answer in failed {
            let error = answer.failed.take().unwrap_or_else(stopping);
            self.fail(answer, error);
        }
        // Those whose drafts could not be taken back are read again.
        let lost: Vec<Answer<P>> = self.running.extract_if(.., |answer| answer.session.is_none()).collect();
        let begun = self.running.iter_mut().filter(|answer| answer.written() > 0);
        let followers: Vec<Job> = begun.flat_map(|answer| take(&mut answer.job.followers)).collect();
        self.line_up_followers(followers);
        for mut answer in lost.into_iter().rev() {
            (answer.permit, answer.drafted) = (None, None);
            self.line_up_first(answer);
        }
    }

    /// Parks what is active and gives up the rest. What was read is found by whoever asks again.
    fn stop(mut self) {
        self.capture.finish(self.pool.runtime());
        for mut answer in take(&mut self.running) {
            if let Some(Err(error)) = answer.session.as_mut().map(AnySession::park) {
                tracing::warn!(error = error.in_full(), "an answer's keys and values could not be kept");
            }
            self.fail(answer, stopping());
        }
        while let Some((_, line)) = self.lines.pop_first() {
            for answer in line {
                self.fail(answer, stopping());
            }
        }
        match self.pool.save(true) {
            Ok(0) => {}
            Ok(blocks) => tracing::info!(blocks, "keys and values were kept"),
            Err(error) => tracing::warn!(%error, "keys and values could not be kept"),
        }
        self.count();
    }
}

/// Whether there were no blocks: none at all, or none that the tenant may have.
fn is_full(error: &outcore_llm::Error) -> bool {
    matches!(error, outcore_llm::Error::Outcore(error) if error.kind() == ErrorKind::BudgetTooSmall)
}

/// Has the keys and values of a parked answer come back.
fn resume<S: AnySession>(session: S) -> outcore_llm::Result<S> {
    if let Some(keys) = session.paged_keys() {
        for group in 0..keys.pool().layout().groups() {
            keys.sequence().resume(group)?;
        }
    }
    Ok(session)
}
