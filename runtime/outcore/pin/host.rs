//! Guards that give slices. They exist where device memory is memory of this process.

#![allow(private_interfaces, reason = "the trait that names private types is sealed: nobody outside can call it")]

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::{AnyBitPattern, NoUninit};
use smallvec::SmallVec;

use super::guard::{Complete, Guard};
use super::sealed::Sealed;
use super::{Access, Hold, Pins, Read, Write, disjoint_writable, end_one, no_such_tensor, of_one_runtime, writable};
use crate::device::DeviceAddress;
use crate::error::{Error, ErrorKind, Result};
use crate::pager::{PageRun, Purpose};
use crate::segment::Segment;
use crate::tensor::Tensor;

/// Refuses guards that would give slices of memory this process cannot access.
///
/// # Errors
/// `Unsupported` where device memory is not memory of this process.
#[inline]
fn addressable(tensor: &Tensor) -> Result<()> {
    if tensor.engine().host_addressable { Ok(()) } else { Err(out_of_reach(tensor)) }
}

#[cold]
fn out_of_reach(tensor: &Tensor) -> Error {
    let device = tensor.engine().device.name();
    let message = format!("the bytes of {tensor:?} are in the memory of {device}, not of this process");
    Error::new(ErrorKind::Unsupported, message).remedy("pin them on_device(), and copy, or give a kernel their address")
}

/// Forbids the eviction of a tensor's pages while it lives, and gives the tensor's bytes.
///
/// With access [`Write`] no other guard can have its pages, and it gives the bytes for writing too. The pages are dirty
/// when it is dropped.
#[must_use = "the pages are unpinned when the guard is dropped"]
pub struct PinGuard<A: Access = Read> {
    segment: Arc<Segment>,
    offset: u64,
    len: u64,
    hold: Hold,
    access: PhantomData<A>,
}

impl<A: Access> Sealed for PinGuard<A> {}

impl<A: Access> Guard for PinGuard<A> {
    type Of<'a> = &'a Tensor;
    const PURPOSE: Purpose = A::PURPOSE;
    #[inline]
    fn tensors(of: Self::Of<'_>) -> &[Tensor] {
        std::slice::from_ref(of)
    }
    #[inline]
    fn check(of: Self::Of<'_>) -> Result<()> {
        addressable(of)?;
        if A::PURPOSE == Purpose::Write { writable(of) } else { Ok(()) }
    }
    #[inline]
    fn new(of: Self::Of<'_>, _: &[PageRun], hold: Hold) -> Self {
        let Tensor { segment, offset, len, .. } = of;
        Self { segment: segment.clone(), offset: *offset, len: *len, hold, access: PhantomData }
    }
}

impl<A: Access> Complete for PinGuard<A> {
    type Access = A;
    type Write = PinGuard<Write>;
}

impl<A: Access> PinGuard<A> {
    /// The tensor's bytes.
    pub fn bytes(&self) -> &[u8] {
        slice(self, self.segment.base.offset(self.offset), self.len)
    }

    /// The tensor's bytes as values.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if the address or the number of the bytes does not fit the type.
    pub fn view<T: AnyBitPattern>(&self) -> Result<&[T]> {
        bytemuck::try_cast_slice(self.bytes()).map_err(cast_error::<T>)
    }
}

impl PinGuard<Write> {
    /// The tensor's bytes, for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        if self.len == 0 {
            return &mut [];
        }
        let start = self.segment.base.offset(self.offset).get() as *mut u8;
        // SAFETY: as in `slice`, and the pages are locked by this guard alone: nobody else reads or writes them, and
        // `&mut self` makes this the only slice of it.
        unsafe { std::slice::from_raw_parts_mut(start, self.len as usize) }
    }

    /// The tensor's bytes as values, for writing.
    ///
    /// # Errors
    /// As [`PinGuard::view`].
    pub fn view_mut<T: AnyBitPattern + NoUninit>(&mut self) -> Result<&mut [T]> {
        bytemuck::try_cast_slice_mut(self.bytes_mut()).map_err(cast_error::<T>)
    }
}

impl std::ops::Deref for PinGuard<Read> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.bytes()
    }
}

impl<A: Access> Drop for PinGuard<A> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.len > 0 {
            let run = self.segment.run(self.offset, self.len);
            end_one(&self.segment, run, A::PURPOSE == Purpose::Write, &self.hold);
        }
    }
}

impl<A: Access> fmt::Debug for PinGuard<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = if A::PURPOSE == Purpose::Write { "PinGuard<Write>" } else { "PinGuard" };
        write!(f, "{name}({:?}, {} bytes at {})", self.segment.id, self.len, self.offset)
    }
}

/// A slice of `len` bytes at an address, for as long as `_pins` lives.
#[inline]
fn slice<T>(_pins: &T, start: DeviceAddress, len: u64) -> &[u8] {
    if len == 0 {
        return &[];
    }
    let start = start.get() as *const u8;
    // SAFETY: the address is memory of this process (`addressable`). The guard that calls this holds pins on the pages
    // of `[offset, offset + len)`, which keep them mapped and unchanged (documentation of `pin`). The range lies within
    // the segment: whatever makes a tensor ensures it (`Runtime::open_parsed` by `ModelHeader::check`,
    // `Runtime::alloc`, `Tensor::rows`). The guard holds the segment, which keeps the reservation.
    unsafe { std::slice::from_raw_parts(start, len as usize) }
}

fn cast_error<T>(error: bytemuck::PodCastError) -> Error {
    let message = format!("the tensor's bytes are not a slice of {}: {error}", std::any::type_name::<T>());
    Error::new(ErrorKind::InvalidArgument, message).remedy("use bytes() and convert element by element")
}

/// The place of one tensor of a set.
#[derive(Clone, Copy, Debug)]
struct Piece {
    start: DeviceAddress,
    len: u64,
}

/// Forbids the eviction of a set of tensors, pinned as a unit, and gives their bytes.
///
/// With access [`Write`] no other guard can have their pages, and it gives the bytes for writing too. The pages are
/// dirty when it is dropped.
#[must_use = "the pages are unpinned when the guard is dropped"]
pub struct PinSet<A: Access = Read> {
    /// With access `Write` no two of these share a byte: see [`disjoint_writable`].
    pieces: SmallVec<[Piece; 8]>,
    pins: Pins,
    access: PhantomData<A>,
}

impl<A: Access> Sealed for PinSet<A> {}

impl<A: Access> Guard for PinSet<A> {
    type Of<'a> = &'a [Tensor];
    const PURPOSE: Purpose = A::PURPOSE;
    fn tensors(of: Self::Of<'_>) -> &[Tensor] {
        of
    }
    fn check(of: Self::Of<'_>) -> Result<()> {
        of_one_runtime(of)?;
        of.first().map_or(Ok(()), addressable)?;
        if A::PURPOSE == Purpose::Write { disjoint_writable(of) } else { Ok(()) }
    }
    fn new(of: Self::Of<'_>, runs: &[PageRun], hold: Hold) -> Self {
        let pins = Pins::new(of, runs, A::PURPOSE == Purpose::Write, hold);
        let piece = |tensor: &Tensor| Piece { start: tensor.segment.base.offset(tensor.offset), len: tensor.len };
        Self { pieces: of.iter().map(piece).collect(), pins, access: PhantomData }
    }
}

impl<A: Access> Complete for PinSet<A> {
    type Access = A;
    type Write = PinSet<Write>;
}

impl<A: Access> PinSet<A> {
    /// How many tensors the set has.
    pub fn count(&self) -> usize {
        self.pieces.len()
    }

    /// The bytes of the `index`th tensor of the set.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if the set has no such tensor.
    pub fn bytes(&self, index: usize) -> Result<&[u8]> {
        let piece = self.pieces.get(index).ok_or_else(|| no_such_tensor(index, self.count()))?;
        Ok(slice(self, piece.start, piece.len))
    }

    /// The bytes of the `index`th tensor of the set as values.
    ///
    /// # Errors
    /// As [`PinGuard::view`]; also [`InvalidArgument`](ErrorKind::InvalidArgument) if the set has no such tensor.
    pub fn view<T: AnyBitPattern>(&self, index: usize) -> Result<&[T]> {
        bytemuck::try_cast_slice(self.bytes(index)?).map_err(cast_error::<T>)
    }
}

impl PinSet<Write> {
    /// The bytes of the `index`th tensor of the set, for writing: as [`PinGuard::bytes_mut`], of one of several.
    ///
    /// # Errors
    /// As [`PinSet::bytes`].
    pub fn bytes_mut(&mut self, index: usize) -> Result<&mut [u8]> {
        let count = self.count();
        self.all_mut().nth(index).ok_or_else(|| no_such_tensor(index, count))
    }

    /// The bytes of every tensor of the set, in order, for writing. So results computed from some tensors can be
    /// written to others.
    pub fn all_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        self.pieces.iter().map(|piece| {
            if piece.len == 0 {
                return Default::default();
            }
            let start = piece.start.get() as *mut u8;
            // SAFETY: as in `slice`, and the pages are locked by this guard alone: nobody else reads or writes them. No
            // two tensors of the set share a byte, which `disjoint_writable` has checked. The iterator borrows the
            // guard exclusively and gives each piece once, so no other slice overlaps this one.
            unsafe { std::slice::from_raw_parts_mut(start, piece.len as usize) }
        })
    }

    /// The bytes of the `index`th tensor of the set as values, for writing.
    ///
    /// # Errors
    /// As [`PinSet::view`].
    pub fn view_mut<T: AnyBitPattern + NoUninit>(&mut self, index: usize) -> Result<&mut [T]> {
        bytemuck::try_cast_slice_mut(self.bytes_mut(index)?).map_err(cast_error::<T>)
    }
}

impl<A: Access> Drop for PinSet<A> {
    fn drop(&mut self) {
        self.pins.end();
    }
}

impl<A: Access> fmt::Debug for PinSet<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = if A::PURPOSE == Purpose::Write { "PinSet<Write>" } else { "PinSet" };
        write!(f, "{name}({} tensors)", self.count())
    }
}
