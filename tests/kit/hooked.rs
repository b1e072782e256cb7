//! A device that shows every call to a hook first, which may refuse it. For tests of the layers above a device.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::task::Poll;

use outcore::device::{
    Completion, Completions, Device, DeviceAddress, DeviceFactory, DeviceSettings, EventId, FrameId, HostRegion,
    RawStream, StreamId, StreamKind, StreamOp, Token,
};
use outcore::dlpack::DLDevice;
use outcore::{Bytes, Error, ErrorKind, PageSize, PolicyKind, Result};
use outcore_pager::error::caught;
use parking_lot::Mutex;

/// The calls of a [`Device`] that can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceCall {
    /// [`Device::reserve`].
    Reserve,
    /// [`Device::release`].
    Release,
    /// [`Device::free_memory`].
    FreeMemory,
    /// [`Device::grow_frames`].
    GrowFrames,
    /// [`Device::map`] and [`Device::map_here`].
    Map,
    /// [`Device::protect`].
    Protect,
    /// [`Device::discard`].
    Discard,
    /// [`Device::lock_host`].
    LockHost,
    /// [`Device::unlock_host`], which is carried out even so: nobody would try it again.
    UnlockHost,
    /// [`Device::create_stream`].
    CreateStream,
    /// [`Device::adopt_stream`].
    AdoptStream,
    /// [`Device::raw_stream`].
    RawStream,
    /// [`Device::can_mark`].
    CanMark,
    /// [`Device::submit`] of an operation with a token. A refusal is reported to the token in the operation's turn.
    Submit,
    /// [`Device::record`].
    Record,
    /// [`Device::wait`].
    Wait,
    /// [`Device::poll`].
    Poll,
    /// [`Device::close`], which is carried out even so.
    Close,
}

/// Sees the calls of a device before they are made, and can refuse them, for tests of the layers above. It runs on the
/// thread that makes the call, which may hold locks of the runtime's, so it must not call the runtime or wait for it.
/// When a guard's end is [submitted](DeviceCall::Submit), none is held.
pub trait DeviceHook: Send + Sync {
    /// Called just before `call`. On an error the device does nothing, unless [`DeviceCall`] says otherwise.
    ///
    /// # Errors
    /// The error that the device is to return.
    fn before(&self, call: DeviceCall) -> Result<()>;

    /// Whether the device panics in this call, which was not refused. The default is no. If [`before`](Self::before)
    /// panics, the call is refused.
    fn device_panics(&self, _call: DeviceCall) -> bool {
        false
    }
}

/// Opens a device and shows every call of it to a hook before the device gets it, from the first stream on.
#[derive(Clone)]
pub struct Hooked {
    factory: Arc<dyn DeviceFactory>,
    hook: Arc<dyn DeviceHook>,
}

impl Hooked {
    /// The device that `factory` opens, with a hook.
    pub fn new(factory: impl DeviceFactory + 'static, hook: Arc<dyn DeviceHook>) -> Self {
        Self { factory: Arc::new(factory), hook }
    }
}

impl fmt::Debug for Hooked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Hooked").field(&self.factory).finish()
    }
}

impl DeviceFactory for Hooked {
    fn name(&self) -> String {
        self.factory.name()
    }
    fn open(&self, settings: DeviceSettings, completions: Arc<dyn Completions>) -> Result<Arc<dyn Device>> {
        let sink = Arc::new(HookedSink { sink: completions, refused: Mutex::default() });
        let device = self.factory.open(settings, sink.clone())?;
        Ok(Arc::new(HookedDevice { device, hook: self.hook.clone(), sink }))
    }
    fn is_process_memory(&self) -> bool {
        self.factory.is_process_memory()
    }
    fn usual_page(&self) -> PageSize {
        self.factory.usual_page()
    }
    fn default_policy(&self) -> PolicyKind {
        self.factory.default_policy()
    }
    fn tables_of_a_frame(&self, page_size: PageSize) -> Bytes {
        self.factory.tables_of_a_frame(page_size)
    }
    fn tables_of_host_memory(&self, host: Bytes) -> Bytes {
        self.factory.tables_of_host_memory(host)
    }
}

/// Reports refused operations as failed, in the order of their streams. [`HookedDevice`] submits a mark in place of
/// each.
struct HookedSink {
    sink: Arc<dyn Completions>,
    refused: Mutex<HashMap<Token, Error>>,
}

impl Completions for HookedSink {
    fn completed(&self, done: &mut Vec<Completion>) {
        {
            let mut refused = self.refused.lock();
            for Completion { token, result } in done.iter_mut() {
                if let Some(error) = refused.remove(token) {
                    *result = Err(error);
                }
            }
        }
        self.sink.completed(done);
    }

    fn taken_up(&self, token: Token, end: EventId) {
        // A refused operation is never done, although a mark in its place may be taken up.
        if !self.refused.lock().contains_key(&token) {
            self.sink.taken_up(token, end);
        }
    }
}

/// A device with a hook.
struct HookedDevice {
    device: Arc<dyn Device>,
    hook: Arc<dyn DeviceHook>,
    /// The sink to which the device reports.
    sink: Arc<HookedSink>,
}

impl HookedDevice {
    /// Asks the hook. If it panics, the call is refused, and the caller handles that like any refusal.
    fn ask(&self, call: DeviceCall) -> Result<()> {
        caught(|| self.hook.before(call)).unwrap_or_else(|panic| {
            Err(Error::new(ErrorKind::Internal, format!("the device's hook panicked before {call:?}: {panic}")))
        })?;
        assert!(!self.hook.device_panics(call), "the device panics in {call:?}: its hook says so");
        Ok(())
    }
}

impl fmt::Debug for HookedDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HookedDevice").field(&self.device).finish()
    }
}

impl Device for HookedDevice {
    fn name(&self) -> &str {
        self.device.name()
    }
    fn page_size(&self) -> PageSize {
        self.device.page_size()
    }
    fn direct_io(&self) -> bool {
        self.device.direct_io()
    }
    fn host_addressable(&self) -> bool {
        self.device.host_addressable()
    }
    fn dlpack(&self) -> Option<DLDevice> {
        self.device.dlpack()
    }
    fn numa_node(&self) -> Option<u32> {
        self.device.numa_node()
    }
    fn reserve(&self, pages: u32) -> Result<DeviceAddress> {
        self.ask(DeviceCall::Reserve)?;
        self.device.reserve(pages)
    }
    fn release(&self, base: DeviceAddress, pages: u32) -> Result<()> {
        self.ask(DeviceCall::Release)?;
        self.device.release(base, pages)
    }
    fn free_memory(&self) -> Result<Bytes> {
        self.ask(DeviceCall::FreeMemory)?;
        self.device.free_memory()
    }
    fn page_tables(&self) -> Bytes {
        self.device.page_tables()
    }
    fn frame_count(&self) -> u32 {
        self.device.frame_count()
    }
    fn grow_frames(&self, count: u32) -> Result<()> {
        self.ask(DeviceCall::GrowFrames)?;
        self.device.grow_frames(count)
    }
    fn map(&self, frame: FrameId, address: DeviceAddress) -> Result<()> {
        self.ask(DeviceCall::Map)?;
        self.device.map(frame, address)
    }
    fn map_here(&self, frame: FrameId, address: DeviceAddress) -> Result<()> {
        self.ask(DeviceCall::Map)?;
        self.device.map_here(frame, address)
    }
    fn map_soon(&self, frames: &[(FrameId, DeviceAddress)]) {
        self.device.map_soon(frames);
    }
    fn filled_all(&self, pages: &[(FrameId, DeviceAddress)]) -> Vec<Result<()>> {
        self.device.filled_all(pages)
    }
    fn fill_address(&self, frame: FrameId, address: DeviceAddress) -> Result<DeviceAddress> {
        self.device.fill_address(frame, address)
    }
    fn filled(&self, frame: FrameId, address: DeviceAddress) -> Result<()> {
        self.device.filled(frame, address)
    }
    fn publish(&self, frame: FrameId, address: DeviceAddress) -> Result<()> {
        self.device.publish(frame, address)
    }
    fn hides_pages(&self) -> bool {
        self.device.hides_pages()
    }
    fn pinned(&self, first: DeviceAddress, pages: u32) {
        self.device.pinned(first, pages);
    }
    fn protect(&self, frame: FrameId) -> Result<()> {
        self.ask(DeviceCall::Protect)?;
        self.device.protect(frame)
    }
    fn makes_bare_frames(&self) -> bool {
        self.device.makes_bare_frames()
    }
    fn frame_memory(&self, frame: FrameId) -> Result<Bytes> {
        self.device.frame_memory(frame)
    }
    fn discard(&self, frame: FrameId) -> Result<()> {
        self.ask(DeviceCall::Discard)?;
        self.device.discard(frame)
    }
    fn lock_host(&self, memory: HostRegion) -> Result<()> {
        self.ask(DeviceCall::LockHost)?;
        self.device.lock_host(memory)
    }
    fn unlock_host(&self, memory: HostRegion) -> Result<()> {
        let refused = self.ask(DeviceCall::UnlockHost);
        self.device.unlock_host(memory).and(refused)
    }
    fn create_stream(&self, kind: StreamKind) -> Result<StreamId> {
        self.ask(DeviceCall::CreateStream)?;
        self.device.create_stream(kind)
    }
    unsafe fn adopt_stream(&self, raw: RawStream) -> Result<StreamId> {
        self.ask(DeviceCall::AdoptStream)?;
        // SAFETY: the caller's promise is the one that the device asks for.
        unsafe { self.device.adopt_stream(raw) }
    }
    fn forget_stream(&self, stream: StreamId) {
        self.device.forget_stream(stream);
    }
    fn raw_stream(&self, stream: StreamId) -> Result<RawStream> {
        self.ask(DeviceCall::RawStream)?;
        self.device.raw_stream(stream)
    }
    fn can_mark(&self, stream: StreamId) -> Result<()> {
        self.ask(DeviceCall::CanMark)?;
        self.device.can_mark(stream)
    }
    fn submit(&self, stream: StreamId, op: StreamOp, token: Option<Token>) -> Option<EventId> {
        let refused = token.and_then(|token| Some((token, self.ask(DeviceCall::Submit).err()?)));
        match refused {
            None => self.device.submit(stream, op, token),
            Some((refused, error)) => {
                self.sink.refused.lock().insert(refused, error);
                self.device.submit(stream, StreamOp::Mark, token);
                None
            }
        }
    }
    fn record(&self, stream: StreamId) -> Result<EventId> {
        self.ask(DeviceCall::Record)?;
        self.device.record(stream)
    }
    fn wait(&self, stream: StreamId, event: EventId) -> Result<()> {
        self.ask(DeviceCall::Wait)?;
        self.device.wait(stream, event)
    }
    fn poll(&self, event: EventId) -> Result<Poll<()>> {
        self.ask(DeviceCall::Poll)?;
        self.device.poll(event)
    }
    fn lost(&self) -> Option<Error> {
        self.device.lost()
    }
    fn close(&self) -> Result<()> {
        let refused = self.ask(DeviceCall::Close);
        self.device.close().and(refused)
    }
}
