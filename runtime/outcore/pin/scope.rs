//! Scopes: what one task holds and may still ask for.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::member::Member;
use crate::engine::ticket::Ticket;
use crate::engine::{Received, Waiting, may_wait};
use crate::error::{Error, ErrorKind, Result};
use crate::ids::{Bytes, RequestId, ScopeId};
use crate::pager::{ScopePriority, ScopeTerms};
use crate::shared::Shared;

/// Settings of a [`Scope`].
#[must_use = "no scope is opened before `open` or `reserve`"]
#[derive(Clone, Debug)]
pub struct ScopeBuilder {
    shared: Arc<Shared>,
    label: String,
    priority: ScopePriority,
}

impl ScopeBuilder {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, label: String::new(), priority: ScopePriority::default() }
    }

    /// Sets a name, for errors and for [`Observe::waiting`](crate::stats::Observe::waiting).
    pub fn label(self, label: impl Into<String>) -> Self {
        Self { label: label.into(), ..self }
    }

    /// Sets which of several waiting scopes is served first. The default is interactive.
    pub fn priority(self, priority: ScopePriority) -> Self {
        Self { priority, ..self }
    }

    fn start(self, at_most: Option<u32>) -> Result<Scope> {
        let Self { shared, label, priority } = self;
        let terms = ScopeTerms { label, priority, at_most };
        let (id, holdings) = shared.engine.change(|pager, _| pager.open_scope(terms))?;
        Ok(Scope { member: Arc::new(Member { id, holdings, shared }) })
    }

    /// Opens a scope that grows: it pins what it needs when it needs it. This call never waits. While the scope has no
    /// guards, its pins wait in line, as those outside of scopes do. Once it has some, a pin gets what is free or can
    /// be evicted, or [`Busy`](ErrorKind::Busy): it never waits for guards of others.
    ///
    /// # Errors
    /// [`Closed`](ErrorKind::Closed) in a fork of the process that opened the runtime.
    pub fn open(self) -> Result<Scope> {
        self.start(None)
    }

    /// Opens a scope that pins at most `most` bytes at a time, counted in whole pages, a page once for each pin of it.
    ///
    /// It is admitted as a unit. It waits in line, holding nothing, until its frames can be set aside. Its pins draw on
    /// these, and on nothing else: what exceeds `most` is [`BudgetTooSmall`](ErrorKind::BudgetTooSmall). While it holds
    /// guards, a pin is [`Busy`](ErrorKind::Busy) if others have the page and one of the two writes. It is `Busy` for
    /// want of frames only if others still have a page pinned that the scope brought and let go of: so let go of all
    /// guards together. Frames that are set aside and not pinned lie idle: reserve what is needed, and drop the scope
    /// when it is done.
    pub fn reserve(self, most: Bytes) -> ScopeRequest {
        let pages = self.shared.page_size().pages_for(most.get());
        let pages = u32::try_from(pages).unwrap_or(u32::MAX);
        ScopeRequest { pages, state: Opening::Start(Some(self)) }
    }
}

#[derive(Debug)]
enum Opening {
    Start(Option<ScopeBuilder>),
    Waiting { scope: Option<Scope>, id: RequestId, ticket: Arc<Ticket> },
    Done,
}

/// A request for a scope with frames set aside: await it, or call [`wait`](Self::wait). Dropping it withdraws the
/// request.
#[must_use = "no scope is opened until this is awaited or waited for"]
#[derive(Debug)]
pub struct ScopeRequest {
    pages: u32,
    state: Opening,
}

impl ScopeRequest {
    fn start(&mut self) -> Result<Option<Scope>> {
        let Opening::Start(builder) = &mut self.state else { return Ok(None) };
        let Some(builder) = builder.take() else { return Err(ended()) };
        self.state = Opening::Done;
        let scope = builder.start(Some(self.pages))?;
        match scope.member.shared.engine.reserve(scope.member.id, self.pages)? {
            Received::Ready(_) => Ok(Some(scope)),
            Received::Waiting(Waiting { id, ticket, .. }) => {
                self.state = Opening::Waiting { scope: Some(scope), id, ticket };
                Ok(None)
            }
        }
    }

    /// # Errors
    /// As for [`Engine::usable`]. In a child by `fork` no result comes, and a thread that the child does not have may
    /// hold the ticket's lock.
    fn usable(&self) -> Result<()> {
        let Opening::Waiting { scope: Some(scope), .. } = &self.state else { return Ok(()) };
        scope.member.shared.engine.usable()
    }

    fn finish(&mut self, result: Result<crate::pager::Granted>) -> Result<Scope> {
        let Opening::Waiting { scope: Some(scope), .. } = std::mem::replace(&mut self.state, Opening::Done) else {
            return Err(ended());
        };
        result.map(|_| scope)
    }

    /// Blocks until the frames are set aside.
    ///
    /// # Errors
    /// [`BudgetTooSmall`](ErrorKind::BudgetTooSmall) if there can never be so many; [`Closed`](ErrorKind::Closed);
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) in a waker or a closure on a stream.
    pub fn wait(mut self) -> Result<Scope> {
        if let Some(scope) = self.start()? {
            return Ok(scope);
        }
        let Opening::Waiting { ticket, .. } = &self.state else { return Err(ended()) };
        let ticket = ticket.clone();
        self.usable()?;
        may_wait("a scope")?;
        match ticket.wait(None) {
            Some(result) => self.finish(result),
            None => Err(ended()),
        }
    }
}

impl Future for ScopeRequest {
    type Output = Result<Scope>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.start() {
            Ok(Some(scope)) => return Poll::Ready(Ok(scope)),
            Ok(None) => {}
            Err(error) => return Poll::Ready(Err(error)),
        }
        let Opening::Waiting { ticket, .. } = &self.state else { return Poll::Ready(Err(ended())) };
        let ticket = ticket.clone();
        self.usable()?;
        match ticket.poll(cx.waker()) {
            Poll::Ready(result) => Poll::Ready(self.finish(result)),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl Drop for ScopeRequest {
    fn drop(&mut self) {
        if let Opening::Waiting { scope: Some(scope), id, ticket } = &self.state {
            // Frames that it may have been granted return with the scope.
            let _ = scope.member.shared.engine.cancel(*id, ticket);
        }
    }
}

fn ended() -> Error {
    Error::new(ErrorKind::InvalidArgument, "a request for a scope was polled after it ended")
        .remedy("make another one: each becomes one scope, or one error")
}

/// What one task holds and may still ask for: the unit of admission.
///
/// A task that holds guards and asks for more pins all of them [in a scope](crate::PinRequest::in_scope). Two rules say
/// what it waits for:
///
/// 1. A pin gets all that it asks for, or waits in line and holds nothing. At most 16 later ones pass it. This is so
///    for the first pins of a scope, for what it [reserves](ScopeBuilder::reserve), and for pins outside of scopes.
/// 2. A pin of a scope that holds guards passes the line, because others may wait for these guards. It waits for reads
///    and write backs under way, and never for guards of others: if they have what it asks for, it gets
///    [`Busy`](ErrorKind::Busy) at once. So scopes never wait for each other.
///
/// After `Busy` the scope keeps what it holds. The same pin may succeed later, but others may be waiting for just these
/// guards. So drop all of them and try again; or pin what is needed together as a set, or reserve it.
/// If the scope gets its first guard on one thread while a pin waits on another, that pin goes on at once, waits for
/// moves, or gets `Busy`.
///
/// A task uses one scope, and holds no other guards while it waits there: two tasks that do can wait for each other, as
/// can two threads that nest pins outside of scopes. [`Observe::waiting`](crate::stats::Observe::waiting) shows it. A
/// pin does not wait for guards of its own scope either: a task that goes on pinning while another one unpins needs two
/// scopes.
///
/// A scope can be sent to other threads and held across `.await`. Dropping it gives back what was set aside for it.
/// Guards may outlive it: their pages stay pinned, and count as pins outside of scopes.
///
/// # Guards that end behind a stream
///
/// A [`StreamPin`](crate::StreamPin) that is dropped, or a guard given to
/// [`unpin_after`](crate::DevicePin::unpin_after), leaves the scope at once. Its pages are unpinned when the stream has
/// got that far. If the scope needs these pages or their frames before that, it waits for the stream. To others they
/// are guards: who holds nothing waits for them, and a scope that holds guards gets `Busy`. What a scope
/// [reserved](ScopeBuilder::reserve) is still enough: a frame spent on such a page comes back when the stream has
/// passed, and the scope's next pin waits for that.
///
/// A [view for other libraries](crate::DevicePin::into_dlpack) is a guard of the scope like others until its consumer
/// gives it back. Then it ends at once, or behind the stream that was named.
///
/// ```
/// use outcore::{Bytes, DType, ErrorKind, Runtime};
///
/// let runtime = Runtime::builder().device_budget(Bytes::mib(8)).open()?;
/// let tensors: Vec<_> = (0..4).map(|_| runtime.alloc(DType::U8, &[4 << 20])).collect::<Result<_, _>>()?;
///
/// let (one, other) = (runtime.scope().label("one").open()?, runtime.scope().label("other").open()?);
/// let a = runtime.pin(&tensors[0]).in_scope(&one).wait()?;
/// let b = runtime.pin(&tensors[1]).in_scope(&other).wait()?;
/// // The budget is used up. The other scope would wait for guards while it has one, so it is refused at once.
/// let refused = runtime.pin(&tensors[3]).in_scope(&other).wait().map(drop).unwrap_err();
/// assert_eq!(refused.kind(), ErrorKind::Busy);
/// // It lets go of all that it holds. Then the first one, which has a guard too, gets the frames.
/// drop(b);
/// let c = runtime.pin(&tensors[2]).in_scope(&one).wait()?;
/// // The other one holds nothing now. While the frames are taken, its pin would wait in line.
/// drop((a, c));
/// drop(runtime.pin(&tensors[3]).in_scope(&other).wait()?);
/// # Ok::<(), outcore::Error>(())
/// ```
pub struct Scope {
    pub(super) member: Arc<Member>,
}

impl Scope {
    /// The scope's number, as [`Observe::waiting`](crate::stats::Observe::waiting) shows it.
    pub fn id(&self) -> ScopeId {
        self.member.id
    }

    /// Bytes of the pages it has pinned, a page once for each pin. 0 in a child by `fork`.
    pub fn held(&self) -> Bytes {
        Bytes::new(u64::from(self.member.pages()) * self.member.shared.page_size().bytes())
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        self.member.shared.engine.with(|pager, fx| pager.close_scope(self.member.id, fx));
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Scope({:?}, {} pages pinned)", self.member.id, self.member.pages())
    }
}
