//! Passes over a model, whoever computes them: what programs are written against.
//!
//! A model that can be run is a [`Passes`], and one sequence of tokens that it reads is an [`AnySession`].
//! [`Model`](crate::Model) with [`Session`](crate::Session) computes on this machine's processor,
//! [`CudaModel`](crate::CudaModel) with [`CudaSession`](crate::CudaSession) on a GPU. Only what opens a model has to
//! name one of them.
//!
//! A pass is ragged: each [`Part`] is one session with as many tokens as it likes, and says what it wants for them.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use outcore::Bytes;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::paged_kv::PagedKeys;
use crate::sampler::Sampler;

/// A model that is ready to be run, on whatever computes it. Shared by its sessions.
pub trait Passes: Debug + Send + Sync + Sized + 'static {
    /// One sequence of tokens.
    type Session: AnySession;

    /// Sizes and constants.
    fn config(&self) -> &Config;

    /// A session whose keys and values are in blocks of a pool, with the tokens that the pool found. It can grow to the
    /// model's context. Its passes have at most `pass` tokens: a device that makes room for activations beforehand
    /// makes it for so many.
    ///
    /// # Errors
    /// `Invalid` if the pool's layout is another model's, or not one that this model is computed with;
    /// `OutOfMemory` if the device has no room.
    fn begin(self: &Arc<Self>, keys: PagedKeys, pass: usize) -> Result<Self::Session>;

    /// Reads the tokens of several sessions in one pass over the weights. Returns an output for each part, in order,
    /// and what the pass took. Which sessions are read together changes no bit of any output.
    ///
    /// # Errors
    /// After an error all sessions are as they were before the call, unless the device is lost. The error names the
    /// part that has no room or cannot be read, if it is one part's. `Invalid` for tokens that the model does not know
    /// or a session has no room for, for a session of another model, and for a sampler beside hidden states;
    /// `Unsupported` for parts that the device cannot compute in one pass, or whose hidden states it does not give;
    /// what making weights, keys and values resident ends with.
    fn pass(
        self: &Arc<Self>,
        parts: &mut [Part<'_, Self::Session>],
    ) -> std::result::Result<(Vec<Output>, PassTime), PassError>;

    /// Calls `work` for each of `items`, between passes, by whatever threads compute passes: unless there are several,
    /// by this one.
    fn for_each<T: Send>(&self, items: &mut [T], work: impl Fn(&mut T) + Sync) {
        items.iter_mut().for_each(work);
    }
}

/// One sequence of tokens being read or written, on whatever computes its passes.
pub trait AnySession: Debug + Send {
    /// Tokens read so far.
    fn len(&self) -> usize;

    /// Whether no token was read yet.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Forgets everything after the first `len` tokens.
    ///
    /// # Errors
    /// As for [`Sequence::truncate`](outcore_kv::Sequence::truncate).
    fn truncate(&mut self, len: usize) -> Result<()>;

    /// Tells that the session is not needed for some time: its blocks leave the device, and come back with the next
    /// pass. Keys and values that are in no pool stay where they are.
    ///
    /// # Errors
    /// As for [`Sequence::park`](outcore_kv::Sequence::park).
    fn park(&mut self) -> Result<()>;

    /// Its keys and values, if they are in a pool.
    fn paged_keys(&self) -> Option<&PagedKeys>;

    /// What the host did for the passes so far; `None` where the host computes them.
    fn counts(&self) -> Option<PassCounts> {
        None
    }
}

/// Which logits a part of a pass is to give, or which hidden states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// None: more of its tokens come in a later pass, or a token chosen from them is enough.
    None,
    /// Those after its last token.
    Last,
    /// Those after each of its tokens.
    All,
    /// No logits, but the hidden state of its last token behind the last norm, from which they would be computed.
    HiddenLast,
    /// The hidden states of each of its tokens behind the last norm.
    HiddenAll,
}

impl Logits {
    /// Whether hidden states are wanted.
    pub(crate) fn is_hidden(self) -> bool {
        matches!(self, Self::HiddenLast | Self::HiddenAll)
    }
}

/// What one session reads in a pass together with others: see [`Passes::pass`].
#[derive(Debug)]
pub struct Part<'a, S> {
    /// The session. It is in a pass once.
    pub session: &'a mut S,
    /// The tokens that it reads: at least one.
    pub tokens: &'a [u32],
    /// The logits, or hidden states, that are wanted.
    pub logits: Logits,
    /// Chooses the token that follows the last one, if it is wanted: not beside hidden states. A device that can choose
    /// does: its logits need not be copied then.
    pub sampler: Option<&'a mut Sampler>,
}

impl<S> Part<'_, S> {
    /// After how many of its tokens logits, or hidden states, are needed.
    pub(crate) fn rows(&self) -> usize {
        match self.logits {
            Logits::None => usize::from(self.sampler.is_some()).min(self.tokens.len()),
            Logits::Last | Logits::HiddenLast => self.tokens.len().min(1),
            Logits::All | Logits::HiddenAll => self.tokens.len(),
        }
    }
}

/// What a pass gives for a part.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Output {
    /// The logits that were wanted: none, `[vocab]`, or `[tokens x vocab]`; or the hidden states: `[dim]`, or
    /// `[tokens x dim]`.
    pub logits: Vec<f32>,
    /// The token that was chosen, if there was a sampler.
    pub next: Option<u32>,
}

/// Why a pass was given up.
#[derive(Debug)]
pub struct PassError {
    /// The part whose error it is; `None` if it is that of all.
    pub part: Option<usize>,
    /// The error.
    pub error: Error,
}

impl From<Error> for PassError {
    fn from(error: Error) -> Self {
        Self { part: None, error }
    }
}

/// What one pass took.
#[derive(Clone, Copy, Debug, Default)]
pub struct PassTime {
    /// From start to end.
    pub total: Duration,
    /// Of that, waiting for weights to become resident.
    pub waited: Duration,
}

/// What a session on a GPU times, by events on the GPU's stream. Recording one is a call of the driver; nobody waits
/// for it. Where the driver is older than CUDA 12.8, nothing is timed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Timing {
    /// Nothing.
    #[default]
    Off,
    /// From the first to the last operation of a pass: two events.
    Passes,
    /// Also how long the stream waits for weights: two events more for each set of weights that is pinned.
    Stalls,
}

/// What the host did for the passes of a session on a GPU, and what the GPU read for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PassCounts {
    /// Passes over the weights.
    pub passes: u64,
    /// Kernels that were launched one by one.
    pub launches: u64,
    /// Graphs that were launched.
    pub graph_launches: u64,
    /// Kernels and copies in these graphs.
    pub graph_nodes: u64,
    /// How often the thread waited for the GPU.
    pub synchronisations: u64,
    /// Sets of weights that were pinned.
    pub pins: u64,
    /// Processor time of the thread, without that of its waits for the GPU, in which the driver may poll.
    pub host: Duration,
    /// Time in which the thread waited for the GPU, at the end of passes. Waits for pages are in [`PassTime::waited`].
    pub waiting: Duration,
    /// Time on the GPU's stream, from the first operation of a pass to the last one before the thread waits. It
    /// contains what the stream waits for within a pass: for pages, for the thread while that is still launching, and
    /// for other sessions that use the stream. Zero unless [`Timing`] asks for it; a pass counts when it was waited
    /// for, and not at all if it ended in an error.
    pub gpu: Duration,
    /// Of that, what lies between the end of the operations before a pin of weights and the moment when the stream has
    /// these weights: copies that the stream waits for, and the pin itself, if the stream had nothing left to do.
    /// Blocks of keys and values are not in it. Zero unless [`Timing::Stalls`] asks for it.
    pub stalled: Duration,
    /// Bytes of weights, keys and values that the passes read: counted, not measured.
    pub read: Bytes,
}

impl std::ops::Add for PassCounts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            passes: self.passes + other.passes,
            launches: self.launches + other.launches,
            graph_launches: self.graph_launches + other.graph_launches,
            graph_nodes: self.graph_nodes + other.graph_nodes,
            synchronisations: self.synchronisations + other.synchronisations,
            pins: self.pins + other.pins,
            host: self.host + other.host,
            waiting: self.waiting + other.waiting,
            gpu: self.gpu + other.gpu,
            stalled: self.stalled + other.stalled,
            read: self.read + other.read,
        }
    }
}

impl std::ops::Sub for PassCounts {
    type Output = Self;

    /// What was added since `earlier`.
    fn sub(self, earlier: Self) -> Self {
        Self {
            passes: self.passes - earlier.passes,
            launches: self.launches - earlier.launches,
            graph_launches: self.graph_launches - earlier.graph_launches,
            graph_nodes: self.graph_nodes - earlier.graph_nodes,
            synchronisations: self.synchronisations - earlier.synchronisations,
            pins: self.pins - earlier.pins,
            host: self.host.saturating_sub(earlier.host),
            waiting: self.waiting.saturating_sub(earlier.waiting),
            gpu: self.gpu.saturating_sub(earlier.gpu),
            stalled: self.stalled.saturating_sub(earlier.stalled),
            read: self.read.saturating_sub(earlier.read),
        }
    }
}
