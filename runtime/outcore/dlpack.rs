//! Pinned tensors for other libraries, by the DLPack exchange format: a C structure that says where a tensor is, with a
//! function that gives it back.

use std::ffi::c_void;
use std::fmt;
use std::ptr::{self, NonNull};

use dlpack_ffi as ffi;

use crate::compute::ComputeStream;
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use crate::pin::{DevicePin, Write};
use crate::tensor::Tensor;

pub use dlpack_ffi::{DLDataType, DLDataTypeCode, DLDevice, DLDeviceType, DLManagedTensorVersioned, DLTensor};

/// What another library will end: whatever keeps the memory of a view.
trait Keep: Send + Sized + 'static {
    /// Ends behind the work on `stream`. If that is refused the memory stays for good, unless nothing can use it any
    /// more.
    fn end_after(self, stream: &ComputeStream) -> Result<()>;
}

/// A guard of pages.
trait Guard: Keep {
    const READ_ONLY: bool;
    fn tensor(&self, index: usize) -> Result<&Tensor>;
}

impl Keep for DevicePin {
    fn end_after(self, stream: &ComputeStream) -> Result<()> {
        Ok(self.unpin_after(stream)?)
    }
}

impl Guard for DevicePin {
    const READ_ONLY: bool = true;
    fn tensor(&self, index: usize) -> Result<&Tensor> {
        Self::tensor(self, index)
    }
}

impl Keep for DevicePin<Write> {
    fn end_after(self, stream: &ComputeStream) -> Result<()> {
        Ok(self.unpin_after(stream)?)
    }
}

impl Guard for DevicePin<Write> {
    const READ_ONLY: bool = false;
    fn tensor(&self, index: usize) -> Result<&Tensor> {
        Self::tensor(self, index)
    }
}

/// An owner of memory that is the CPU's. Its views are on no stream.
struct Owner<T>(#[allow(dead_code, reason = "held, and never looked at")] T);

impl<T: Send + 'static> Keep for Owner<T> {
    fn end_after(self, _: &ComputeStream) -> Result<()> {
        Ok(())
    }
}

/// The allocation that the C structure is part of. The structure is its first field, and its deleter frees the whole.
#[repr(C)]
struct View<K> {
    managed: ffi::DLManagedTensorVersioned,
    shape: Vec<i64>,
    strides: Vec<i64>,
    keep: K,
    stream: Option<ComputeStream>,
}

/// A view of a pinned tensor as a DLPack structure, version 1: row-major, with explicit strides, read-only if the guard
/// is. Its memory is the CPU's where the process may access it, and else what the device
/// [says](crate::device::Device::dlpack).
///
/// The view holds the guard. When the consumer calls the deleter the pages are unpinned, behind the work on the named
/// stream if there is one. A view that is dropped unconsumed calls the deleter itself.
///
/// ```
/// use outcore::dlpack::DLDeviceType;
/// use outcore::{Bytes, DType, Runtime};
///
/// let runtime = Runtime::builder().device_budget(Bytes::mib(4)).open()?;
/// let tensors = [runtime.alloc(DType::F32, &[10, 20])?];
/// let view = runtime.pin(&tensors).on_device().wait()?.into_dlpack(0, None)?;
/// let tensor = view.tensor();
/// assert_eq!((tensor.device.device_type, tensor.ndim), (DLDeviceType::kDLCPU, 2));
/// assert_eq!(tensor.data.addr() as u64, tensors[0].address());
/// let pointer = view.into_raw(); // for a capsule named "dltensor_versioned"
/// # drop(unsafe { outcore::dlpack::DlpackView::from_raw(pointer) });
/// # drop(tensors);
/// # runtime.close()?;
/// # Ok::<(), outcore::Error>(())
/// ```
pub struct DlpackView(NonNull<ffi::DLManagedTensorVersioned>);

// SAFETY: the pointer is to a `View`, whose keeper and stream are Send, and this value alone owns it.
unsafe impl Send for DlpackView {}

/// The deleter of a view that `K` keeps.
unsafe extern "C" fn delete<K: Keep>(managed: *mut ffi::DLManagedTensorVersioned) {
    if managed.is_null() {
        return;
    }
    // SAFETY: `view` made it from a box of this type, whose first field it is, and a consumer calls the deleter
    // once.
    let view = unsafe { Box::from_raw(managed.cast::<View<K>>()) };
    let View { keep, stream, .. } = *view;
    let Some(stream) = stream else { return };
    if let Err(error) = keep.end_after(&stream) {
        tracing::warn!(%error, "a DLPack view was given back when its end could not be put on its stream");
    }
}

/// The element type in DLPack's terms; `of` is what has it.
fn dtype(dtype: DType, of: impl fmt::Debug) -> Result<ffi::DLDataType> {
    use ffi::DLDataTypeCode as C;
    let (code, bits) = match dtype {
        DType::F16 => (C::kDLFloat, 16),
        DType::F32 => (C::kDLFloat, 32),
        DType::F64 => (C::kDLFloat, 64),
        DType::BF16 => (C::kDLBfloat, 16),
        DType::I8 => (C::kDLInt, 8),
        DType::I16 => (C::kDLInt, 16),
        DType::I32 => (C::kDLInt, 32),
        DType::I64 => (C::kDLInt, 64),
        DType::U8 => (C::kDLUInt, 8),
        DType::U16 => (C::kDLUInt, 16),
        DType::U32 => (C::kDLUInt, 32),
        DType::U64 => (C::kDLUInt, 64),
        DType::BOOL => (C::kDLBool, 8),
        DType::C64 => (C::kDLComplex, 64),
        DType::F8_E4M3 => (C::kDLFloat8_e4m3fn, 8),
        DType::F8_E5M2 => (C::kDLFloat8_e5m2, 8),
        DType::F8_E8M0 => (C::kDLFloat8_e8m0fnu, 8),
        DType::F8_E4M3FNUZ => (C::kDLFloat8_e4m3fnuz, 8),
        DType::F8_E5M2FNUZ => (C::kDLFloat8_e5m2fnuz, 8),
        other => {
            let message = format!("DLPack has no element type for {other}: {of:?} is stored in blocks");
            return Err(Error::new(ErrorKind::Unsupported, message)
                .remedy("give the consumer the address and the length, or dequantise into a tensor of a plain type"));
        }
    };
    Ok(ffi::DLDataType { code: code.0 as u8, bits, lanes: 1 })
}

/// The extents, and for each the distance of neighbours in elements.
fn layout(shape: &[u64], of: impl fmt::Debug) -> Result<(Vec<i64>, Vec<i64>)> {
    let extents = shape.iter().map(|extent| i64::try_from(*extent));
    let shape: Vec<i64> = extents.collect::<std::result::Result<_, _>>().map_err(|_| {
        let message = format!("DLPack has signed 64-bit extents, which {of:?} exceeds");
        Error::new(ErrorKind::Unsupported, message).remedy("reshape it")
    })?;
    let mut strides = vec![1_i64; shape.len()];
    for at in (1..shape.len()).rev() {
        // The product of all extents is the number of elements, which fits, unless an extent is 0.
        strides[at - 1] = strides[at].saturating_mul(shape[at].max(1));
    }
    Ok((shape, strides))
}

fn device(tensor: &Tensor) -> Result<ffi::DLDevice> {
    let device = &tensor.engine().device;
    if device.host_addressable() {
        return Ok(ffi::DLDevice { device_type: ffi::DLDeviceType::kDLCPU, device_id: 0 });
    }
    device.dlpack().ok_or_else(|| {
        let message = format!("DLPack has no name for the memory of {}", device.name());
        Error::new(ErrorKind::Unsupported, message).remedy("give the consumer the address")
    })
}

fn view_of<G: Guard>(guard: G, index: usize, stream: Option<&ComputeStream>) -> Result<DlpackView> {
    let tensor = guard.tensor(index)?;
    if stream.is_some_and(|stream| !stream.belongs_to(&tensor.segment.shared)) {
        let message = format!("the stream belongs to another runtime than {tensor:?}");
        return Err(Error::new(ErrorKind::InvalidArgument, message).remedy("have it adopted by the tensor's runtime"));
    }
    let (dtype, device, lists) = (dtype(tensor.dtype(), tensor)?, device(tensor)?, layout(tensor.shape(), tensor)?);
    if i32::try_from(lists.0.len()).is_err() {
        return Err(Error::new(ErrorKind::Unsupported, format!("{tensor:?} has more extents than DLPack can say"))
            .remedy("reshape it"));
    }
    let address = if tensor.size().get() == 0 { 0 } else { tensor.address() };
    Ok(view(guard, stream, address, (dtype, device, G::READ_ONLY), lists))
}

/// A view of memory with these extents, of which there are at most `i32::MAX`, and strides.
fn view<K: Keep>(
    keep: K,
    stream: Option<&ComputeStream>,
    address: u64,
    (dtype, device, read_only): (ffi::DLDataType, ffi::DLDevice, bool),
    (mut shape, mut strides): (Vec<i64>, Vec<i64>),
) -> DlpackView {
    let pointer = |list: &mut Vec<i64>| if list.is_empty() { ptr::null_mut() } else { list.as_mut_ptr() };
    let tensor = ffi::DLTensor {
        data: ptr::with_exposed_provenance_mut::<c_void>(address as usize),
        device,
        ndim: shape.len() as i32,
        dtype,
        // The lists' memory stays where it is when they move into the box.
        shape: pointer(&mut shape),
        strides: pointer(&mut strides),
        byte_offset: 0,
    };
    let managed = ffi::DLManagedTensorVersioned {
        version: ffi::DLPackVersion { major: ffi::DLPACK_MAJOR_VERSION, minor: ffi::DLPACK_MINOR_VERSION },
        manager_ctx: ptr::null_mut(),
        deleter: Some(delete::<K>),
        flags: if read_only { u64::from(ffi::DLPACK_FLAG_BITMASK_READ_ONLY) } else { 0 },
        dl_tensor: tensor,
    };
    let view = Box::new(View { managed, shape, strides, keep, stream: stream.cloned() });
    DlpackView(NonNull::from(Box::leak(view)).cast())
}

impl DlpackView {
    /// The view's description of the tensor.
    pub fn tensor(&self) -> &ffi::DLTensor {
        // SAFETY: the view owns the structure until it is dropped or becomes a pointer.
        unsafe { &self.0.as_ref().dl_tensor }
    }

    /// The structure, for a consumer, which must call its deleter once.
    #[must_use = "the pages stay pinned until the deleter is called"]
    pub fn into_raw(self) -> NonNull<ffi::DLManagedTensorVersioned> {
        let pointer = self.0;
        std::mem::forget(self);
        pointer
    }

    /// A read-only view of memory of this process that nobody pins, such as that of a mapped file: `owner` keeps it,
    /// and goes when the consumer calls the deleter, on whatever thread that is.
    ///
    /// # Errors
    /// [`Unsupported`](ErrorKind::Unsupported) for types that are stored in blocks, and for extents that DLPack cannot
    /// say; [`InvalidArgument`](ErrorKind::InvalidArgument) if the address is not aligned for the type.
    ///
    /// # Safety
    /// From `address` on there are as many bytes as the type and the shape take. As long as `owner` lives they can be
    /// read by any thread, and nobody changes them.
    pub unsafe fn of_memory<T: Send + 'static>(address: u64, of: DType, shape: &[u64], owner: T) -> Result<Self> {
        Self::owned(address, of, shape, owner, true)
    }

    /// As [`of_memory`](Self::of_memory), and the consumer may write.
    ///
    /// # Errors
    /// The same.
    ///
    /// # Safety
    /// From `address` on there are as many bytes as the type and the shape take. As long as `owner` lives they can be
    /// read and written by any thread, and nobody but the consumer uses them.
    pub unsafe fn of_memory_mut<T: Send + 'static>(address: u64, of: DType, shape: &[u64], owner: T) -> Result<Self> {
        Self::owned(address, of, shape, owner, false)
    }

    /// A view of memory that `owner` keeps. What may be done with the memory is the caller's to know.
    fn owned<T: Send + 'static>(address: u64, of: DType, shape: &[u64], owner: T, read_only: bool) -> Result<Self> {
        let what = format!("memory of {of}, shape {shape:?}");
        let (dtype, lists) = (dtype(of, &what)?, layout(shape, &what)?);
        if i32::try_from(lists.0.len()).is_err() {
            return Err(Error::new(ErrorKind::Unsupported, format!("{what} has more extents than DLPack can say")));
        }
        if !address.is_multiple_of(of.block_bytes()) {
            let message = format!("{what} begins at {address:#x}, which is not aligned for its type");
            return Err(Error::new(ErrorKind::InvalidArgument, message).remedy("copy the bytes to memory that is"));
        }
        let address = if shape.contains(&0) { 0 } else { address };
        let cpu = ffi::DLDevice { device_type: ffi::DLDeviceType::kDLCPU, device_id: 0 };
        Ok(view(Owner(owner), None, address, (dtype, cpu, read_only), lists))
    }

    /// Takes back a structure that no consumer has taken.
    ///
    /// # Safety
    /// The pointer is from [`into_raw`](Self::into_raw), and its deleter has not been called and will not be.
    pub unsafe fn from_raw(pointer: NonNull<ffi::DLManagedTensorVersioned>) -> Self {
        Self(pointer)
    }
}

impl Drop for DlpackView {
    fn drop(&mut self) {
        // SAFETY: the view owns the structure, and nobody has called the deleter.
        unsafe {
            if let Some(deleter) = self.0.as_ref().deleter {
                deleter(self.0.as_ptr());
            }
        }
    }
}

impl fmt::Debug for DlpackView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DlpackView").field(self.tensor()).finish()
    }
}

impl DevicePin {
    /// A read-only DLPack view of the `index`th tensor. The view takes the guard with all its tensors. When the
    /// consumer gives it back the pages are unpinned at once, or behind the work that is on `stream` by then. It must
    /// not be given back while that stream is being captured into a graph.
    ///
    /// # Errors
    /// [`Unsupported`](ErrorKind::Unsupported) for types that are stored in blocks, which DLPack cannot describe;
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is no such tensor, and for a stream of another runtime.
    /// On an error the pages are unpinned.
    pub fn into_dlpack(self, index: usize, stream: Option<&ComputeStream>) -> Result<DlpackView> {
        view_of(self, index, stream)
    }
}

impl DevicePin<Write> {
    /// As [`DevicePin::into_dlpack`], for writing.
    ///
    /// # Errors
    /// The same.
    pub fn into_dlpack(self, index: usize, stream: Option<&ComputeStream>) -> Result<DlpackView> {
        view_of(self, index, stream)
    }
}
