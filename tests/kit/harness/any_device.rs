//! The devices the tests of the whole runtime run on, and pins that work on all of them.
//!
//! A test that should run on every device is a function of [`Devices`], named in [`on_every_device!`]. It pins with
//! [`AnyDevice`]: by slices if device memory belongs to this process, and otherwise by copies.

use std::borrow::Cow;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use super::progress;
use crate::sim::Simulated;
use bytemuck::{AnyBitPattern, NoUninit};
use outcore::device::{DeviceFactory, Host, LinkModel};
use outcore::pin::Tensors;
use outcore::{Bytes, DevicePin, PinGuard, PinRequest, PinSet, Result, Runtime, RuntimeBuilder, Scope, Tensor, Write};
use outcore_cuda::CudaDeviceSelector;

use crate::fake_cuda as control;

/// The device of a runtime's device tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    /// The host device. The store reaches its frames.
    Host,
    /// The host device behind a modelled link.
    Link,
    /// The simulated device.
    Sim,
    /// The simulated device behind a modelled link.
    SimLink,
    /// The emulated CUDA driver's GPU.
    Cuda,
}

impl On {
    /// What opens the device.
    pub fn factory(self) -> Arc<dyn DeviceFactory> {
        match self {
            Self::Host | Self::Link => Arc::new(Host),
            Self::Sim => Arc::new(Simulated { seed: 1 }),
            Self::SimLink => Arc::new(Simulated { seed: 2 }),
            Self::Cuda => Arc::new(CudaDeviceSelector::default()),
        }
    }

    /// Settings of a runtime on this device.
    pub fn builder(self) -> RuntimeBuilder {
        let link = LinkModel::new(Bytes::gib(8), Duration::from_micros(5), true).unwrap();
        let builder = Runtime::builder().device(self.factory());
        match self {
            Self::Link | Self::SimLink => builder.link(link),
            Self::Host | Self::Sim | Self::Cuda => builder,
        }
    }
}

/// The devices that one test runs on: all of these, or only the first.
pub type Devices = &'static [On];

pub const HOST: Devices = &[On::Host, On::Link];
pub const SIM: Devices = &[On::Sim, On::SimLink];
pub const CUDA: Devices = &[On::Cuda];

/// Makes tests of functions of [`Devices`]: `on_host::...`, `on_sim::...` and `on_cuda::...`. The last ones fail if the
/// emulated driver found anything, or anything was not given back.
#[macro_export]
macro_rules! on_every_device {
    ($($test:ident)*) => {
        mod on_sim {
            $(#[test] fn $test() { super::$test($crate::harness::SIM); })*
        }
        $crate::on_host_and_cuda! { $($test)* }
    };
}

/// The same without the simulated device.
#[macro_export]
macro_rules! on_host_and_cuda {
    ($($test:ident)*) => {
        mod on_host {
            $(#[test] fn $test() { super::$test($crate::harness::HOST); })*
        }
        mod on_cuda {
            $(#[test] fn $test() {
                let Some(fake) = $crate::harness::small_pages(stringify!($test)) else { return };
                super::$test($crate::harness::CUDA);
                fake.finish();
            })*
        }
    };
}

/// The emulated driver, with an allocation granularity that lets pages be as small as on the host. A GPU's is 2 MiB. If
/// its library was not built, says so and returns `None`.
pub fn small_pages(test: &str) -> Option<control::Fake> {
    let fake = control::Fake::load_or_skip(test)?;
    fake.set_granularity(4096);
    Some(fake)
}

/// Called between two rounds of a test that opens many runtimes. Checks that the emulated driver found nothing and that
/// everything was given back, and makes it like new, because its clocks grow with every stream that it ever had.
pub fn next_round(device: On) {
    if device == On::Cuda {
        control::Fake::start_over();
    }
    let _ = device;
}

/// Waits until a runtime that is closed by another thread has given everything back.
pub fn until_given_back(device: On) {
    while device == On::Cuda && control::Fake::left() > 0 {
        std::thread::yield_now();
    }
    let _ = device;
}

/// A request that is polled.
pub type Request<'a, G> = Pin<Box<dyn Future<Output = Result<G>> + Send + 'a>>;

/// Pins on any device.
pub trait AnyDevice {
    /// Whether guards give slices.
    fn host_addressable(&self) -> bool;

    /// A request of the runtime, to read.
    fn request<'a, T: Tensors + ?Sized>(&self, tensors: &'a T) -> PinRequest<'a, T::Guard>
    where
        Self: 'a;

    /// Pins for reading, and waits.
    fn read(&self, tensor: &Tensor) -> Result<Pinned> {
        progress();
        if self.host_addressable() {
            return self.request(tensor).wait().map(Pinned::Slice);
        }
        let guard = self.request(tensor).on_device().wait()?;
        Ok(Pinned::Copies(Box::new(guard), tensor.size().get()))
    }

    /// Pins for writing, and waits.
    fn write(&self, tensor: &Tensor) -> Result<PinnedMut> {
        progress();
        if self.host_addressable() {
            return self.request(tensor).write().wait().map(PinnedMut::Slice);
        }
        let guard = self.request(tensor).write().on_device().wait()?;
        Ok(PinnedMut::Copies(Box::new(guard), tensor.size().get()))
    }

    /// Pins a set for reading, and waits.
    fn read_set(&self, tensors: &[Tensor]) -> Result<PinnedSet> {
        progress();
        if self.host_addressable() {
            return self.request(tensors).wait().map(PinnedSet::Slices);
        }
        Ok(PinnedSet::Copies(self.request(tensors).on_device().wait()?, lengths(tensors)))
    }

    /// Pins a set for writing, and waits.
    fn write_set(&self, tensors: &[Tensor]) -> Result<PinnedSetMut> {
        progress();
        if self.host_addressable() {
            return self.request(tensors).write().wait().map(PinnedSetMut::Slices);
        }
        Ok(PinnedSetMut::Copies(self.request(tensors).write().on_device().wait()?, lengths(tensors)))
    }

    /// As [`read`](Self::read), to be polled.
    fn reading<'a>(&self, tensor: &'a Tensor) -> Request<'a, Pinned>
    where
        Self: 'a,
    {
        progress();
        let request = self.request(tensor);
        if self.host_addressable() {
            return Box::pin(async move { request.await.map(Pinned::Slice) });
        }
        let (request, len) = (request.on_device(), tensor.size().get());
        Box::pin(async move { Ok(Pinned::Copies(Box::new(request.await?), len)) })
    }

    /// As [`write`](Self::write), to be polled.
    fn writing<'a>(&self, tensor: &'a Tensor) -> Request<'a, PinnedMut>
    where
        Self: 'a,
    {
        progress();
        let request = self.request(tensor).write();
        if self.host_addressable() {
            return Box::pin(async move { request.await.map(PinnedMut::Slice) });
        }
        let (request, len) = (request.on_device(), tensor.size().get());
        Box::pin(async move { Ok(PinnedMut::Copies(Box::new(request.await?), len)) })
    }

    /// As [`read_set`](Self::read_set), to be polled.
    fn reading_set<'a>(&self, tensors: &'a [Tensor]) -> Request<'a, PinnedSet>
    where
        Self: 'a,
    {
        progress();
        let request = self.request(tensors);
        if self.host_addressable() {
            return Box::pin(async move { request.await.map(PinnedSet::Slices) });
        }
        let request = request.on_device();
        Box::pin(async move { Ok(PinnedSet::Copies(request.await?, lengths(tensors))) })
    }

    /// As [`write_set`](Self::write_set), to be polled.
    fn writing_set<'a>(&self, tensors: &'a [Tensor]) -> Request<'a, PinnedSetMut>
    where
        Self: 'a,
    {
        progress();
        let request = self.request(tensors).write();
        if self.host_addressable() {
            return Box::pin(async move { request.await.map(PinnedSetMut::Slices) });
        }
        let request = request.on_device();
        Box::pin(async move { Ok(PinnedSetMut::Copies(request.await?, lengths(tensors))) })
    }
}

impl AnyDevice for Runtime {
    fn host_addressable(&self) -> bool {
        Runtime::host_addressable(self)
    }
    fn request<'a, T: Tensors + ?Sized>(&self, tensors: &'a T) -> PinRequest<'a, T::Guard>
    where
        Self: 'a,
    {
        self.pin(tensors)
    }
}

/// A scope, to pin on any device.
#[derive(Clone, Copy)]
pub struct InScope<'s> {
    runtime: &'s Runtime,
    pub scope: &'s Scope,
}

impl<'s> InScope<'s> {
    pub fn new(runtime: &'s Runtime, scope: &'s Scope) -> Self {
        Self { runtime, scope }
    }
}

impl AnyDevice for InScope<'_> {
    fn host_addressable(&self) -> bool {
        self.runtime.host_addressable()
    }
    fn request<'a, T: Tensors + ?Sized>(&self, tensors: &'a T) -> PinRequest<'a, T::Guard>
    where
        Self: 'a,
    {
        self.runtime.pin(tensors).in_scope(self.scope)
    }
}

fn lengths(tensors: &[Tensor]) -> Vec<u64> {
    tensors.iter().map(|tensor| tensor.size().get()).collect()
}

/// Copies into a buffer of bytes that no copy is likely to leave as they are.
fn copied<'a>(len: u64, copy: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<Cow<'a, [u8]>> {
    let mut bytes = vec![0xEE; len as usize];
    copy(&mut bytes)?;
    Ok(bytes.into())
}

fn values<T: AnyBitPattern>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

/// A tensor pinned for reading.
#[derive(Debug)]
pub enum Pinned {
    Slice(PinGuard),
    Copies(Box<DevicePin>, u64),
}

/// A tensor pinned for writing.
#[derive(Debug)]
pub enum PinnedMut {
    Slice(PinGuard<Write>),
    Copies(Box<DevicePin<Write>>, u64),
}

macro_rules! readable {
    ($($pinned:ident)*) => {$(
        impl $pinned {
            /// Once the runtime is closed, copies fail. A slice would not.
            pub fn try_bytes(&self) -> Result<Cow<'_, [u8]>> {
                match self {
                    Self::Slice(guard) => Ok(guard.bytes().into()),
                    Self::Copies(guard, len) => copied(*len, |bytes| guard.copy_out(0, 0, bytes)),
                }
            }
            pub fn bytes(&self) -> Cow<'_, [u8]> {
                self.try_bytes().unwrap()
            }
            pub fn values<T: AnyBitPattern + NoUninit>(&self) -> Vec<T> {
                match self {
                    Self::Slice(guard) => guard.view().unwrap().to_vec(),
                    Self::Copies(..) => values(&self.bytes()),
                }
            }
        }
    )*};
}

readable! { Pinned PinnedMut }

impl PinnedMut {
    pub fn try_fill(&mut self, byte: u8) -> Result<()> {
        match self {
            Self::Slice(guard) => {
                guard.bytes_mut().fill(byte);
                Ok(())
            }
            Self::Copies(guard, len) => guard.copy_in(0, 0, &vec![byte; *len as usize]),
        }
    }
    pub fn fill(&mut self, byte: u8) {
        self.try_fill(byte).unwrap();
    }
    pub fn set<T: AnyBitPattern + NoUninit>(&mut self, values: &[T]) {
        match self {
            Self::Slice(guard) => guard.view_mut().unwrap().copy_from_slice(values),
            Self::Copies(guard, _) => guard.copy_in(0, 0, bytemuck::cast_slice(values)).unwrap(),
        }
    }
}

/// Tensors pinned for reading as a unit.
#[derive(Debug)]
pub enum PinnedSet {
    Slices(PinSet),
    Copies(DevicePin, Vec<u64>),
}

/// Tensors pinned for writing as a unit.
#[derive(Debug)]
pub enum PinnedSetMut {
    Slices(PinSet<Write>),
    Copies(DevicePin<Write>, Vec<u64>),
}

macro_rules! readable_sets {
    ($($pinned:ident)*) => {$(
        impl $pinned {
            pub fn try_bytes(&self, index: usize) -> Result<Option<Cow<'_, [u8]>>> {
                match self {
                    Self::Slices(guard) => Ok(guard.bytes(index).ok().map(Cow::from)),
                    Self::Copies(guard, lengths) => {
                        let Some(len) = lengths.get(index).copied() else { return Ok(None) };
                        copied(len, |bytes| guard.copy_out(index, 0, bytes)).map(Some)
                    }
                }
            }
            pub fn bytes(&self, index: usize) -> Option<Cow<'_, [u8]>> {
                self.try_bytes(index).unwrap()
            }
        }
    )*};
}

readable_sets! { PinnedSet PinnedSetMut }

impl PinnedSetMut {
    pub fn values<T: AnyBitPattern + NoUninit>(&self, index: usize) -> Vec<T> {
        values(&self.bytes(index).unwrap())
    }
    pub fn try_set<T: AnyBitPattern + NoUninit>(&mut self, index: usize, values: &[T]) -> Result<()> {
        match self {
            Self::Slices(guard) => {
                guard.view_mut(index)?.copy_from_slice(values);
                Ok(())
            }
            Self::Copies(guard, _) => guard.copy_in(index, 0, bytemuck::cast_slice(values)),
        }
    }
    pub fn set<T: AnyBitPattern + NoUninit>(&mut self, index: usize, values: &[T]) {
        self.try_set(index, values).unwrap();
    }
}
