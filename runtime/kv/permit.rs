//! Waiting for a place among the active sequences. Who is next: [`turns`](crate::turns).
//!
//! What is active is counted in *parts*, each a block of one group of layers: in a group with a window, passes use only
//! the last ones of a sequence. Whoever is told gets blocks of all groups.

use std::collections::HashMap;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use oneshot::{AsyncReceiver, Receiver, RecvTimeoutError, Sender};
use outcore::{Bytes, Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::extent::Extent;
use crate::key::TenantId;
use crate::layout::KvLayout;
use crate::turns::{Answer, Counts, Granted, Refusal, RequestId, Turn, Turns};

/// Parts that may be active, and who has them or waits for them.
pub struct Permits {
    layout: KvLayout,
    /// Blocks of the pool.
    blocks: u32,
    state: Mutex<State>,
    start: Instant,
}

/// Without the state: a tenant's request that is printed shows nothing of other tenants.
impl fmt::Debug for Permits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permits").field("blocks", &self.blocks).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct State {
    turns: Turns,
    waiting: HashMap<RequestId, (Sender<Permit>, Extent)>,
}

impl Permits {
    /// Those of a pool of `blocks` blocks. None may be active yet.
    pub fn new(layout: KvLayout, blocks: u32) -> Self {
        let state = State { turns: Turns::new(0, 0), waiting: HashMap::new() };
        Self { layout, blocks, state: Mutex::new(state), start: Instant::now() }
    }

    /// Parts of so many whole blocks.
    fn parts(&self, blocks: u32) -> u32 {
        blocks.saturating_mul(self.layout.groups())
    }

    /// Blocks with so many parts, for whoever is told.
    fn told(&self, parts: u32) -> u32 {
        parts.div_ceil(self.layout.groups())
    }

    /// Parts for a sequence that goes so far, where `most` may be active: those that its passes use. But no smaller a
    /// part of these than its blocks are of the pool, since a block is a whole one there: sequences that all have
    /// permits then find a block for each of their tokens. Where blocks let groups go, what counts is the part that the
    /// sequence has of the pool's room, and of its blocks. And no more than its blocks have.
    fn parts_for(&self, extent: Extent, most: u32) -> u32 {
        let blocks = u128::from(extent.tokens().div_ceil(u64::from(self.layout.block_tokens())));
        let whole = blocks * u128::from(self.layout.groups());
        let part_of = |some: u128, all: u32| (some * u128::from(most)).div_ceil(u128::from(all.max(1)));
        let of_pool = match self.layout.lets_go() {
            false => part_of(blocks, self.blocks),
            true => part_of(u128::from(self.layout.kept_parts_most(extent)), self.parts(self.blocks))
                .max(part_of(blocks, self.layout.blocks_most(self.blocks))),
        };
        let used = u128::from(self.layout.parts_most(extent));
        u32::try_from(used.max(of_pool).min(whole)).unwrap_or(u32::MAX)
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// Changes the state, and gives permits to those to whom it grants some.
    fn change(self: &Arc<Self>, change: impl FnOnce(&mut State, Duration) -> Vec<Granted>) {
        let mut state = self.state.lock();
        let granted = change(&mut state, self.now());
        let to = |(tenant, id, parts)| {
            let (sender, extent) = state.waiting.remove(&id)?;
            Some((sender, Permit { permits: self.clone(), tenant, extent, parts }))
        };
        let sent: Vec<_> = granted.into_iter().filter_map(to).collect();
        drop(state);
        for (sender, permit) in sent {
            // Nobody waits for it any more: then it is given back, which takes the lock.
            let _ = sender.send(permit);
        }
    }

    /// So many blocks may be active, of which so many are the reserve.
    pub fn resize(self: &Arc<Self>, blocks: u32, reserve: u32) {
        let [parts, reserve] = [blocks, reserve].map(|blocks| self.parts(blocks));
        self.change(|state, now| state.turns.resize(parts, reserve, now));
    }

    /// What a tenant may have; its static share is in blocks. If that is refused, returns how many blocks all static
    /// shares would be.
    pub fn set(self: &Arc<Self>, tenant: TenantId, turn: Turn) -> std::result::Result<(), u64> {
        let turn = Turn { reserved: self.parts(turn.reserved), ..turn };
        let reserved = {
            let turns = &self.state.lock().turns;
            let all = u64::from(turn.reserved) + turns.reserved_by_others(tenant);
            let too_many = turn.reserved > 0 && all > u64::from(turns.blocks());
            if too_many { Err(all / u64::from(self.layout.groups())) } else { Ok(()) }
        };
        reserved?;
        self.change(|state, now| state.turns.set(tenant, turn, now));
        Ok(())
    }

    pub fn forget(self: &Arc<Self>, tenant: TenantId) {
        self.change(|state, now| state.turns.forget(tenant, now));
    }

    /// Blocks that may be active, blocks that are, and requests that wait.
    pub fn sums(&self) -> (u32, u32, usize) {
        let turns = &self.state.lock().turns;
        (turns.blocks() / self.layout.groups(), self.told(turns.active()), turns.waiting())
    }

    /// Blocks active, requests that wait, and counts of a tenant.
    pub fn of(&self, tenant: TenantId) -> (u32, usize, Counts) {
        let (parts, waiting, counts) = self.state.lock().turns.of(tenant);
        (self.told(parts), waiting, counts)
    }

    /// How long a request for so much more would wait now.
    pub fn estimate(&self, tenant: TenantId, extent: Extent) -> Option<Duration> {
        let turns = &mut self.state.lock().turns;
        turns.estimate(tenant, None, self.parts_for(extent, turns.blocks()), self.now())
    }

    fn estimate_of(&self, tenant: TenantId, id: RequestId) -> Option<Duration> {
        self.state.lock().turns.estimate(tenant, Some(id), 0, self.now())
    }

    pub fn ask(self: &Arc<Self>, tenant: TenantId, extent: Extent) -> Result<PermitRequest> {
        let mut state = self.state.lock();
        let parts = self.parts_for(extent, state.turns.blocks());
        let progress = match state.turns.ask(tenant, parts, self.now()) {
            Answer::Granted => Progress::Granted(Permit { permits: self.clone(), tenant, extent, parts }),
            Answer::Waits(id) => {
                let (sender, receiver) = oneshot::channel();
                state.waiting.insert(id, (sender, extent));
                Progress::Waits(Place { permits: self.clone(), tenant, id }, receiver)
            }
            Answer::Refused(refusal) => {
                let estimate = state.turns.estimate(tenant, None, parts, self.now());
                let all = state.turns.blocks();
                drop(state);
                return Err(self.refused(tenant, parts, refusal, all, estimate));
            }
        };
        Ok(PermitRequest(progress))
    }

    /// So many parts as blocks, in words.
    fn in_blocks(&self, parts: u32) -> String {
        let groups = self.layout.groups();
        match parts.is_multiple_of(groups) {
            true => (parts / groups).to_string(),
            false => format!("{:.2}", f64::from(parts) / f64::from(groups)),
        }
    }

    fn refused(&self, tenant: TenantId, parts: u32, refusal: Refusal, all: u32, estimate: Option<Duration>) -> Error {
        let tenant = tenant.get();
        match refusal {
            Refusal::Never(most) => {
                let [blocks, most, all] = [parts, most, all].map(|parts| self.in_blocks(parts));
                let message = format!(
                    "a sequence of {blocks} blocks, and {most} of the {all} blocks that may be active can be tenant \
                     {tenant}'s"
                );
                Error::new(ErrorKind::BudgetTooSmall, message).remedy(
                    "ask for fewer tokens, raise ActiveOptions::blocks_most or lower the static shares of other tenants",
                )
            }
            Refusal::QueueFull(most) => {
                let when = estimate.map_or_else(String::new, |estimate| {
                    format!(", and one more would wait for about {:.1} s", estimate.as_secs_f64())
                });
                Error::new(
                    ErrorKind::BudgetTooSmall,
                    format!("{most} requests of tenant {tenant} wait already, as many as may{when}"),
                )
                .remedy("try again later, or raise TenantOptions::waiting_most")
            }
        }
    }
}

/// Leave for a sequence to be active, and to go so far. It is given back when this is dropped.
pub struct Permit {
    permits: Arc<Permits>,
    tenant: TenantId,
    extent: Extent,
    parts: u32,
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Permit({:?}, {:?}, {} blocks)", self.tenant, self.extent, self.blocks())
    }
}

impl Permit {
    /// How many blocks it counts as, rounded up. Of layers with a [window](KvLayout::with_windows), only what a pass
    /// uses counts, and so the sequence may have more.
    pub fn blocks(&self) -> u32 {
        self.permits.told(self.parts)
    }
    /// The pages that it counts.
    pub fn bytes(&self) -> Bytes {
        Bytes::new(u64::from(self.parts) * self.permits.layout.block_room().get())
    }
    /// How far the sequence may go.
    pub fn extent(&self) -> Extent {
        self.extent
    }
    /// The tenant that has it.
    pub fn tenant(&self) -> TenantId {
        self.tenant
    }
    /// Makes it one for so many tokens, if it is for fewer, and for passes of this length. Those who wait get what it
    /// needs less. What it needs more it gets if so much is not active. It does not wait, and passes those who do: a
    /// sequence that goes on comes before one that has yet to begin. Returns whether it is for so much then; if not, it
    /// is as before, and one of the active sequences has to be [parked](crate::Sequence::park).
    pub fn fit(&mut self, extent: impl Into<Extent>) -> bool {
        let extent = extent.into();
        let extent = Extent::new(extent.tokens().max(self.extent.tokens())).in_passes_of(extent.pass());
        if extent == self.extent {
            return true;
        }
        let (tenant, before, mut fitted) = (self.tenant, self.parts, None);
        self.permits.change(|State { turns, .. }, now| {
            let parts = self.permits.parts_for(extent, turns.blocks());
            if parts <= before || turns.grow(tenant, parts - before, now) {
                fitted = Some(parts);
            }
            if parts < before { turns.give_back(tenant, before - parts, now) } else { Vec::new() }
        });
        if let Some(parts) = fitted {
            (self.extent, self.parts) = (extent, parts);
        }
        fitted.is_some()
    }
    /// Whether a pass over the tokens at these positions is among what it is for. The error says what is missing.
    pub(crate) fn allows(&self, positions: &std::ops::Range<u64>) -> Result<()> {
        let pass = positions.end.saturating_sub(positions.start);
        if self.extent.holds(positions.end, pass) {
            return Ok(());
        }
        let most = self.permits.state.lock().turns.blocks();
        let parts = self.permits.parts_for(Extent::new(positions.end).in_passes_of(pass), most);
        if parts <= self.parts {
            return Ok(());
        }
        let [needed, granted] = [parts, self.parts].map(|parts| self.permits.in_blocks(parts));
        let message = format!("{needed} blocks of a sequence that has a permit for {granted}");
        let of_windows = "; where layers have windows, also in passes of fewer tokens";
        let also = if self.permits.layout.has_windows() { of_windows } else { "" };
        Err(Error::new(ErrorKind::BudgetTooSmall, message).remedy(format!(
            "ask for a permit for all tokens that the sequence may get, or take the permit away{also}"
        )))
    }
    /// Whether these gave it.
    pub(crate) fn is_of(&self, permits: &Arc<Permits>) -> bool {
        Arc::ptr_eq(&self.permits, permits)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.permits.change(|state, now| state.turns.give_back(self.tenant, self.parts, now));
    }
}

/// A place in the line. It is given up when this is dropped.
#[derive(Debug)]
struct Place {
    permits: Arc<Permits>,
    tenant: TenantId,
    id: RequestId,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.permits.change(|state, now| match state.waiting.remove(&self.id) {
            Some(_) => state.turns.cancel(self.tenant, self.id, now),
            // It was granted: a permit that nobody took is dropped with the receiver.
            None => Vec::new(),
        });
    }
}

#[derive(Debug)]
enum Progress<R> {
    Granted(Permit),
    Waits(Place, R),
    /// The permit was taken.
    Done,
}

/// A place in the line for a [`Permit`]: [`wait`](Self::wait) for it, or await it. It is given up when this is dropped.
///
/// Whoever waits here should hold no pins: those who have permits may need the pages to go on.
#[derive(Debug)]
#[must_use = "a request that is dropped gives up its place in the line"]
pub struct PermitRequest(Progress<Receiver<Permit>>);

/// A [`PermitRequest`] that is awaited.
#[derive(Debug)]
#[must_use = "a future does nothing unless it is polled"]
pub struct PermitFuture(Progress<AsyncReceiver<Permit>>);

impl PermitRequest {
    /// Whether the permit is there.
    pub fn is_granted(&self) -> bool {
        match &self.0 {
            Progress::Granted(_) => true,
            Progress::Waits(_, receiver) => receiver.has_message(),
            Progress::Done => false,
        }
    }

    /// How long it will take, by the blocks that came back lately. `None` if none did.
    pub fn estimate(&self) -> Option<Duration> {
        match &self.0 {
            Progress::Waits(Place { permits, tenant, id }, _) if !self.is_granted() => {
                permits.estimate_of(*tenant, *id)
            }
            _ => Some(Duration::ZERO),
        }
    }

    /// Blocks until the permit is there.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if [`wait_timeout`](Self::wait_timeout) has returned it before.
    pub fn wait(self) -> Result<Permit> {
        match self.0 {
            Progress::Granted(permit) => Ok(permit),
            Progress::Waits(_place, receiver) => receiver.recv().map_err(|_| ended()),
            Progress::Done => Err(ended()),
        }
    }

    /// Blocks until the permit is there, or for so long: `None` then, and the place in the line is kept.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if this has returned the permit before.
    pub fn wait_timeout(&mut self, limit: Duration) -> Result<Option<Permit>> {
        match std::mem::replace(&mut self.0, Progress::Done) {
            Progress::Granted(permit) => Ok(Some(permit)),
            Progress::Waits(place, receiver) => match receiver.recv_timeout(limit) {
                Ok(permit) => Ok(Some(permit)),
                Err(RecvTimeoutError::Timeout) => {
                    self.0 = Progress::Waits(place, receiver);
                    Ok(None)
                }
                Err(RecvTimeoutError::Disconnected) => Err(ended()),
            },
            Progress::Done => Err(ended()),
        }
    }
}

fn ended() -> Error {
    Error::new(ErrorKind::InvalidArgument, "a request for a permit was asked again after it had ended")
        .remedy("make another one: each becomes one permit")
}

impl IntoFuture for PermitRequest {
    type Output = Result<Permit>;
    type IntoFuture = PermitFuture;

    fn into_future(self) -> PermitFuture {
        PermitFuture(match self.0 {
            Progress::Granted(permit) => Progress::Granted(permit),
            Progress::Waits(place, receiver) => Progress::Waits(place, receiver.into_future()),
            Progress::Done => Progress::Done,
        })
    }
}

impl Future for PermitFuture {
    type Output = Result<Permit>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Progress::Waits(_, receiver) = &mut self.0 {
            let Poll::Ready(result) = Pin::new(receiver).poll(cx) else { return Poll::Pending };
            self.0 = Progress::Done;
            return Poll::Ready(result.map_err(|_| ended()));
        }
        match std::mem::replace(&mut self.0, Progress::Done) {
            Progress::Granted(permit) => Poll::Ready(Ok(permit)),
            _ => Poll::Ready(Err(ended())),
        }
    }
}
