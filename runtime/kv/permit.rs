//! Waiting for a place among the active sequences. Who is next: [`turns`](crate::turns).

use std::collections::HashMap;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use oneshot::{AsyncReceiver, Receiver, RecvTimeoutError, Sender};
use outcore::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::key::TenantId;
use crate::turns::{Answer, Counts, Granted, Refusal, RequestId, Turn, Turns};

/// Blocks that may be active, and who has them or waits for them.
pub struct Permits {
    /// Tokens of a block.
    block_tokens: u32,
    state: Mutex<State>,
    start: Instant,
}

/// Without the state: a tenant's request that is printed shows nothing of other tenants.
impl fmt::Debug for Permits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permits").field("block_tokens", &self.block_tokens).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct State {
    turns: Turns,
    waiting: HashMap<RequestId, Sender<Permit>>,
}

impl Permits {
    /// Those of a pool whose blocks are of so many tokens. None may be active yet.
    pub fn new(block_tokens: u32) -> Self {
        let state = State { turns: Turns::new(0, 0), waiting: HashMap::new() };
        Self { block_tokens, state: Mutex::new(state), start: Instant::now() }
    }

    /// Blocks of a sequence of so many tokens.
    pub fn blocks_for(&self, tokens: u64) -> u32 {
        u32::try_from(tokens.div_ceil(u64::from(self.block_tokens))).unwrap_or(u32::MAX)
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// Changes the state, and gives permits to those to whom it grants some.
    fn change(self: &Arc<Self>, change: impl FnOnce(&mut State, Duration) -> Vec<Granted>) {
        let mut state = self.state.lock();
        let granted = change(&mut state, self.now());
        let to = |(tenant, id, blocks)| {
            let sender = state.waiting.remove(&id)?;
            Some((sender, Permit { permits: self.clone(), tenant, blocks }))
        };
        let sent: Vec<_> = granted.into_iter().filter_map(to).collect();
        drop(state);
        for (sender, permit) in sent {
            // Nobody waits for it any more: then it is given back, which takes the lock.
            let _ = sender.send(permit);
        }
    }

    pub fn resize(self: &Arc<Self>, blocks: u32, reserve: u32) {
        self.change(|state, now| state.turns.resize(blocks, reserve, now));
    }

    /// What a tenant may have. If that is refused, returns how many blocks all static shares would be.
    pub fn set(self: &Arc<Self>, tenant: TenantId, turn: Turn) -> std::result::Result<(), u64> {
        let reserved = {
            let turns = &self.state.lock().turns;
            let all = u64::from(turn.reserved) + turns.reserved_by_others(tenant);
            if turn.reserved > 0 && all > u64::from(turns.blocks()) { Err(all) } else { Ok(()) }
        };
        reserved?;
        self.change(|state, now| state.turns.set(tenant, turn, now));
        Ok(())
    }

    fn grow(&self, tenant: TenantId, blocks: u32) -> bool {
        self.state.lock().turns.grow(tenant, blocks, self.now())
    }

    pub fn forget(self: &Arc<Self>, tenant: TenantId) {
        self.change(|state, now| state.turns.forget(tenant, now));
    }

    /// Blocks that may be active, blocks that are, and requests that wait.
    pub fn sums(&self) -> (u32, u32, usize) {
        let turns = &self.state.lock().turns;
        (turns.blocks(), turns.active(), turns.waiting())
    }

    /// Blocks active, requests that wait, and counts of a tenant.
    pub fn of(&self, tenant: TenantId) -> (u32, usize, Counts) {
        self.state.lock().turns.of(tenant)
    }

    pub fn estimate(&self, tenant: TenantId, of: Option<RequestId>, blocks: u32) -> Option<Duration> {
        self.state.lock().turns.estimate(tenant, of, blocks, self.now())
    }

    pub fn ask(self: &Arc<Self>, tenant: TenantId, blocks: u32) -> Result<PermitRequest> {
        let mut state = self.state.lock();
        let progress = match state.turns.ask(tenant, blocks, self.now()) {
            Answer::Granted => Progress::Granted(Permit { permits: self.clone(), tenant, blocks }),
            Answer::Waits(id) => {
                let (sender, receiver) = oneshot::channel();
                state.waiting.insert(id, sender);
                Progress::Waits(Place { permits: self.clone(), tenant, id }, receiver)
            }
            Answer::Refused(refusal) => {
                let estimate = state.turns.estimate(tenant, None, blocks, self.now());
                let all = state.turns.blocks();
                drop(state);
                return Err(refused(tenant, blocks, refusal, all, estimate));
            }
        };
        Ok(PermitRequest(progress))
    }
}

fn refused(tenant: TenantId, blocks: u32, refusal: Refusal, all: u32, estimate: Option<Duration>) -> Error {
    let tenant = tenant.get();
    match refusal {
        Refusal::Never(most) => Error::new(
            ErrorKind::BudgetTooSmall,
            format!(
                "a sequence of {blocks} blocks, and {most} of the {all} blocks that may be active can be tenant {tenant}'s"
            ),
        )
        .remedy("ask for fewer tokens, raise ActiveOptions::blocks_most or lower the static shares of other tenants"),
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

/// Leave for a sequence to be active, with so many blocks. It is given back when this is dropped.
pub struct Permit {
    permits: Arc<Permits>,
    tenant: TenantId,
    blocks: u32,
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Permit({:?}, {} blocks)", self.tenant, self.blocks)
    }
}

impl Permit {
    /// How many blocks the sequence may have.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }
    /// The tenant that has it.
    pub fn tenant(&self) -> TenantId {
        self.tenant
    }
    /// Makes it one for so many tokens, if it is for fewer and enough blocks are not active. It does not wait, and
    /// passes those who do: a sequence that goes on comes before one that has yet to begin. Returns whether the permit
    /// is for so many tokens. If not, one of the active sequences has to be [parked](crate::Sequence::park).
    pub fn grow(&mut self, tokens: u64) -> bool {
        let wanted = self.permits.blocks_for(tokens);
        let Some(more) = wanted.checked_sub(self.blocks).filter(|more| *more > 0) else { return true };
        let grown = self.permits.grow(self.tenant, more);
        self.blocks += if grown { more } else { 0 };
        grown
    }
    /// Whether these gave it.
    pub(crate) fn is_of(&self, permits: &Arc<Permits>) -> bool {
        Arc::ptr_eq(&self.permits, permits)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.permits.change(|state, now| state.turns.give_back(self.tenant, self.blocks, now));
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
                permits.estimate(*tenant, Some(*id), 0)
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
