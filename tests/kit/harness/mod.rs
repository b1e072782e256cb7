//! What the tests of the whole runtime share: a watchdog, replayable randomness, injected failures, settings.

mod any_device;
mod drive;
mod every_call;
mod migrates;
mod outlives;
pub mod replay;
mod scene;
mod tasks;
mod watch;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::hooked::{DeviceCall, DeviceHook, Hooked};
use outcore::device::Token;
use outcore::store::StoreOptions;
use outcore::testing::{CallHook, Injected, IoCall, IoKind};
use outcore::{Bytes, Error, ErrorKind, IoBackend, PageSize, PolicyKind, Result, Runtime, RuntimeBuilder, Tensor};
use outcore_cuda::CudaDeviceSelector;
use outcore_pager::random::Random;
use outcore_pager::state::State;
use parking_lot::Mutex;

pub use any_device::small_pages;
pub use any_device::{
    AnyDevice, CUDA, Devices, HOST, InScope, On, Pinned, PinnedMut, PinnedSet, PinnedSetMut, Request, SIM, next_round,
    until_given_back,
};
pub use drive::StalledDrive;
pub use every_call::{fail_every_call, fail_every_call_with, only_pageable};
pub use migrates::Migrates;
pub use outlives::{Ends, outlives_its_scope};
pub use replay::seed;
pub use scene::{Scene, alone, is_child, scene_ended, whole_name};
pub use tasks::{Task, block_on, owned, poll, together};
pub use watch::{progress, tell_of, until, watched};

/// Random numbers that are the same everywhere.
#[derive(Clone, Debug)]
pub struct Rng(Random);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(Random(seed))
    }
    pub fn next(&mut self) -> u64 {
        self.0.next_u64()
    }
    /// A number below `n`; 0 if `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len() as u64) as usize]
    }
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for at in (1..items.len()).rev() {
            items.swap(at, self.below(at as u64 + 1) as usize);
        }
    }
}

/// What happens to a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Errno(i32),
    Short(u32),
}

impl Fault {
    /// Whether the operation cannot succeed.
    pub fn is_hard(self) -> bool {
        !matches!(self, Self::Errno(libc::EINTR | libc::EAGAIN) | Self::Short(1..))
    }
    fn injected(self) -> Injected {
        match self {
            Self::Errno(errno) => Injected::Errno(errno),
            Self::Short(len) => Injected::Short(len),
        }
    }
}

#[derive(Debug, Default)]
enum Mode {
    #[default]
    Off,
    /// The `n`th call from here on, once.
    Nth(u64, Fault),
    /// Every call of a kind.
    All(IoKind, Fault),
    /// One call in `n`, of either kind.
    Random(Rng, u64),
}

/// How often the store tries a read again after EIO.
const READ_RETRIES: u32 = 2;

/// Failures to order, at the layer of system calls. A read that fails with EIO is tried again by the store and fails
/// again, so that each failure ordered is one failed operation.
#[derive(Debug, Default)]
pub struct Faults {
    mode: Mutex<Mode>,
    /// Reads that fail, and for how many more calls they do.
    failing: Mutex<HashMap<Token, u32>>,
    fired: AtomicU64,
}

impl Faults {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }
    pub fn nth(&self, n: u64, fault: Fault) {
        *self.mode.lock() = Mode::Nth(n, fault);
    }
    pub fn all(&self, kind: IoKind, fault: Fault) {
        *self.mode.lock() = Mode::All(kind, fault);
    }
    pub fn random(&self, rng: Rng, one_in: u64) {
        *self.mode.lock() = Mode::Random(rng, one_in);
    }
    pub fn off(&self) {
        *self.mode.lock() = Mode::Off;
    }
    /// How many calls were failed so far.
    pub fn fired(&self) -> u64 {
        self.fired.load(Ordering::SeqCst)
    }
}

const RANDOM_FAULTS: [Fault; 6] = [
    Fault::Errno(libc::EIO),
    Fault::Errno(libc::ENOSPC),
    Fault::Errno(libc::EINTR),
    Fault::Errno(libc::EAGAIN),
    Fault::Short(4096),
    Fault::Short(0),
];

impl CallHook for Faults {
    fn before(&self, call: &IoCall) -> Injected {
        progress();
        let mut failing = self.failing.lock();
        if let Some(more) = failing.get_mut(&call.token) {
            *more -= 1;
            if *more == 0 {
                failing.remove(&call.token);
            }
            return Injected::Errno(libc::EIO);
        }
        let mut mode = self.mode.lock();
        let fault = match &mut *mode {
            Mode::Off => None,
            Mode::Nth(0, _) => None,
            Mode::Nth(n, fault) => {
                *n -= 1;
                (*n == 0).then_some(*fault)
            }
            Mode::All(kind, fault) => (*kind == call.kind).then_some(*fault),
            Mode::Random(rng, n) => rng.one_in(*n).then(|| *rng.pick(&RANDOM_FAULTS)),
        };
        drop(mode);
        if call.kind == IoKind::Read && fault == Some(Fault::Errno(libc::EIO)) {
            failing.insert(call.token, READ_RETRIES);
        }
        fault.map_or(Injected::Nothing, |fault| {
            self.fired.fetch_add(1, Ordering::SeqCst);
            fault.injected()
        })
    }

    fn may_block(&self) -> bool {
        false
    }
}

/// One combination of a runtime's settings. Sizes are in pages.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    pub io: IoBackend,
    pub policy: PolicyKind,
    pub page: Bytes,
    pub device: u64,
    pub host: u64,
    pub on: On,
}

impl Setting {
    /// Every backend and device, with and without host tier.
    pub fn tiers(devices: Devices) -> Vec<Self> {
        let mut all = Vec::new();
        for io in IoBackend::CHOICES {
            for host in [0, 3] {
                for on in devices.iter().copied() {
                    // With one device, plain alternation would give the host tier the same policy every time.
                    let policy = PolicyKind::ALL[(all.len() + all.len() / 4) % 2];
                    all.push(Self { io, policy, page: Bytes::kib(16), device: 6, host, on });
                }
            }
        }
        all
    }

    pub fn page_size(&self) -> PageSize {
        PageSize::new(self.page).unwrap()
    }

    pub fn builder(&self, faults: Option<&Arc<Faults>>) -> RuntimeBuilder {
        progress();
        let mut store = StoreOptions::new(self.io);
        if let Some(faults) = faults {
            store = store.hook(faults.clone());
        }
        self.on
            .builder()
            .page_size(self.page_size())
            .device_budget(Bytes::new(self.device * self.page.get()))
            .host_budget(Bytes::new(self.host * self.page.get()))
            .policy(self.policy)
            .scratch_dir(crate::models::folder())
            .store(store)
    }

    /// The same, where every call of the device is shown to a hook.
    pub fn hooked(&self, hook: Arc<dyn DeviceHook>) -> RuntimeBuilder {
        self.builder(None).device(Hooked::new(self.on.factory(), hook))
    }
}

/// Refuses one call of a device.
#[derive(Debug)]
pub struct Refusing {
    pub kind: DeviceCall,
    nth: u64,
    calls: AtomicU64,
}

impl Refusing {
    /// The message of a refused call.
    pub const MESSAGE: &str = "the device refuses this call";

    /// Refuses the `nth` call of a kind, counted from 1.
    pub fn nth(kind: DeviceCall, nth: u64) -> Arc<Self> {
        Arc::new(Self { kind, nth, calls: AtomicU64::new(0) })
    }
    /// Calls of that kind so far, including the refused one.
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::SeqCst)
    }
    pub fn has_refused(&self) -> bool {
        self.calls() >= self.nth
    }
}

impl DeviceHook for Refusing {
    fn before(&self, call: DeviceCall) -> Result<()> {
        if call != self.kind || self.calls.fetch_add(1, Ordering::SeqCst) + 1 != self.nth {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Device, Self::MESSAGE).remedy("ask again: it refuses one"))
    }
}

/// Checks what must hold when nobody uses a runtime, and closes it: there is no pin, nothing is in motion, every frame
/// has a page, and no frame is left once the tensors are gone.
pub fn check_at_rest(runtime: Runtime, tensors: Vec<Tensor>, what: &str) {
    let after = runtime.clone();
    let closed = runtime.close();
    check_closed(after, closed, tensors, what);
}

/// The same for a runtime that was closed, with the result of `close`.
pub fn check_closed(after: Runtime, closed: Result<()>, tensors: Vec<Tensor>, what: &str) {
    progress();
    let mut frames = 0;
    let mut seen = std::collections::HashSet::new();
    let mut poisoned = false;
    for tensor in &tensors {
        let view = after.observe().snapshot(tensor);
        if !seen.insert(view.id) {
            continue;
        }
        for (index, page) in view.pages.iter().enumerate() {
            let state = page.device.state;
            assert_eq!(page.device.pins, 0, "{what}: page {index} of {:?} is pinned for ever", view.id);
            assert!(
                matches!(state, State::Empty | State::Clean | State::Dirty | State::Poisoned),
                "{what}: page {index} of {:?} is {state:?} for ever",
                view.id
            );
            assert_eq!(page.frame.is_some(), matches!(state, State::Clean | State::Dirty), "{what}: {page:?}");
            frames += u64::from(page.frame.is_some());
            poisoned |= state == State::Poisoned;
        }
    }
    let stats = after.stats();
    // Every loss is reported, also of tensors that are gone, and nothing else is reported as a loss.
    assert_eq!(closed.is_err(), stats.pager.poisoned > 0, "{what}: {closed:?}");
    assert!(closed.is_err() || !poisoned, "{what}: a lost page nobody was told of");
    let page = stats.page_size.bytes();
    assert_eq!(stats.device.used.get(), frames * page, "{what}: frames that no page has");
    assert!(stats.device.used <= stats.device.budget, "{what}: {stats:?}");
    drop(tensors);
    let stats = after.stats();
    assert_eq!(stats.device.used, Bytes::ZERO, "{what}: frames leaked");
    assert_eq!(stats.host.used, Bytes::ZERO, "{what}: host frames leaked");
}

/// A runtime on the first GPU, with pages of 2 MiB and tiers of `frames` and `host` frames.
pub fn cuda_builder(frames: u64, host: u64) -> RuntimeBuilder {
    const PAGE: u64 = 2 << 20;
    Runtime::builder()
        .device(CudaDeviceSelector::default())
        .page_size(PageSize::new(Bytes::new(PAGE)).unwrap())
        .device_budget(Bytes::new(frames * PAGE))
        .host_budget(Bytes::new(host * PAGE))
        .staging(Bytes::new(4 * PAGE))
}
