//! The driver's binary interface: result codes, the structures cudarc passes, and what pointers from C may be used for.

use std::ffi::{CStr, c_char};

/// `CUresult`.
pub type CuResult = u32;
/// What the driver's own functions return; the error is a `CUresult`.
pub type Outcome<T = ()> = Result<T, CuResult>;

macro_rules! codes {
    ($($name:ident = $value:literal, $text:literal;)*) => {
        $(
            #[allow(dead_code, reason = "tests inject codes that the fake itself never returns")]
            pub const $name: CuResult = $value;
        )*
        /// The name and the description of a result code.
        pub fn describe(code: CuResult) -> Option<(&'static CStr, &'static CStr)> {
            match code {
                $($value => Some((
                    const { c_str(concat!("CUDA_", stringify!($name), "\0")) },
                    const { c_str(concat!($text, "\0")) },
                )),)*
                _ => None,
            }
        }
    };
}

const fn c_str(text: &str) -> &CStr {
    match CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        Err(_) => c"",
    }
}

codes! {
    SUCCESS = 0, "no error";
    ERROR_INVALID_VALUE = 1, "invalid argument";
    ERROR_OUT_OF_MEMORY = 2, "out of memory";
    ERROR_NOT_INITIALIZED = 3, "initialization error";
    ERROR_DEINITIALIZED = 4, "driver shutting down";
    ERROR_NO_DEVICE = 100, "no CUDA-capable device is detected";
    ERROR_INVALID_DEVICE = 101, "invalid device ordinal";
    ERROR_INVALID_IMAGE = 200, "device kernel image is invalid";
    ERROR_INVALID_CONTEXT = 201, "invalid device context";
    ERROR_MAP_FAILED = 205, "mapping of buffer object failed";
    ERROR_UNMAP_FAILED = 206, "unmapping of buffer object failed";
    ERROR_ALREADY_MAPPED = 208, "resource already mapped";
    ERROR_NO_BINARY_FOR_GPU = 209, "no kernel image is available for execution on the device";
    ERROR_NOT_MAPPED = 211, "resource not mapped";
    ERROR_ECC_UNCORRECTABLE = 214, "uncorrectable ECC error encountered";
    ERROR_INVALID_PTX = 218, "a PTX JIT compilation failed";
    ERROR_UNSUPPORTED_PTX_VERSION = 222, "the provided PTX was compiled with an unsupported toolchain.";
    ERROR_CONTAINED = 226, "Invalid access of peer GPU memory over nvlink or a hardware error";
    ERROR_FILE_NOT_FOUND = 301, "file not found";
    ERROR_OPERATING_SYSTEM = 304, "OS call failed or operation not supported on this OS";
    ERROR_INVALID_HANDLE = 400, "invalid resource handle";
    ERROR_ILLEGAL_STATE = 401, "the operation cannot be performed in the present state";
    ERROR_NOT_FOUND = 500, "named symbol not found";
    ERROR_NOT_READY = 600, "device not ready";
    ERROR_ILLEGAL_ADDRESS = 700, "an illegal memory access was encountered";
    ERROR_LAUNCH_OUT_OF_RESOURCES = 701, "too many resources requested for launch";
    ERROR_CONTEXT_IS_DESTROYED = 709, "context is destroyed";
    ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712, "part or all of the requested memory range is already mapped";
    ERROR_HOST_MEMORY_NOT_REGISTERED = 713, "pointer does not correspond to a registered memory region";
    ERROR_LAUNCH_FAILED = 719, "unspecified launch failure";
    ERROR_TENSOR_MEMORY_LEAK = 721, "tensor memory not completely freed";
    ERROR_NOT_PERMITTED = 800, "operation not permitted";
    ERROR_NOT_SUPPORTED = 801, "operation not supported";
    ERROR_SYSTEM_NOT_READY = 802, "system not yet initialized";
    ERROR_SYSTEM_DRIVER_MISMATCH = 803, "system has unsupported display driver / cuda driver combination";
    ERROR_STREAM_CAPTURE_UNSUPPORTED = 900, "operation not permitted when stream is capturing";
    ERROR_STREAM_CAPTURE_INVALIDATED = 901, "operation failed due to a previous error during capture";
    ERROR_STREAM_CAPTURE_MERGE = 902, "operation would result in a merge of separate capture sequences";
    ERROR_STREAM_CAPTURE_UNMATCHED = 903, "capture was not ended in the same stream as it began";
    ERROR_STREAM_CAPTURE_UNJOINED = 904, "capturing stream has unjoined work";
    ERROR_STREAM_CAPTURE_ISOLATION = 905, "dependency created on uncaptured work in another stream";
    ERROR_STREAM_CAPTURE_IMPLICIT = 906, "operation would make the legacy stream depend on a capturing blocking stream";
    ERROR_CAPTURED_EVENT = 907, "operation not permitted on an event last recorded in a capturing stream";
    ERROR_UNKNOWN = 999, "unknown error";
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MemLocation {
    pub kind: u32,
    pub id: i32,
}

pub const LOCATION_DEVICE: u32 = 1;

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MemAllocationProp {
    pub kind: u32,
    pub handle_types: u32,
    pub location: MemLocation,
    pub win32: usize,
    pub flags: u64,
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MemAccessDesc {
    pub location: MemLocation,
    pub flags: u32,
}

/// `CUmemcpyAttributes`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MemcpyAttributes {
    pub source_order: u32,
    pub source: MemLocation,
    pub target: MemLocation,
    pub flags: u32,
}

/// `CUlaunchConfig`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LaunchConfig {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared: u32,
    pub stream: u64,
    pub attributes: usize,
    pub attribute_count: u32,
}

impl LaunchConfig {
    /// Without attributes.
    pub fn plain(grid: [u32; 3], block: [u32; 3], shared: u32, stream: u64) -> Self {
        Self { grid, block, shared, stream, attributes: 0, attribute_count: 0 }
    }
}

/// `CUhostFn`.
pub type HostFn = Option<unsafe extern "C" fn(*mut libc::c_void)>;

/// A pointer from C that a function writes one `T` (or several) through.
#[repr(transparent)]
pub struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Where C passed an untyped pointer.
    pub fn at(address: usize) -> Self {
        Self(address as *mut T)
    }
    /// Writes `value`; a null pointer is an invalid value.
    pub fn set(&self, value: T) -> Outcome {
        if self.0.is_null() {
            return Err(ERROR_INVALID_VALUE);
        }
        // SAFETY: not null; the caller of the C function keeps the driver API's promise that out-parameters are valid.
        unsafe { self.0.write(value) };
        Ok(())
    }
    /// Writes `value` unless the pointer is null.
    pub fn set_if_wanted(&self, value: T) {
        let _ = self.set(value);
    }
}

impl<T: Copy> Out<T> {
    /// The value that is there, where C passes one in to be replaced.
    pub fn get(&self) -> Outcome<T> {
        if self.0.is_null() {
            return Err(ERROR_INVALID_VALUE);
        }
        // SAFETY: as for `set`, and the caller has put a value there.
        Ok(unsafe { self.0.read() })
    }
}

impl Out<c_char> {
    /// Writes at most `len` bytes, NUL-terminated.
    pub fn set_text(&self, text: &str, len: usize) -> Outcome {
        if self.0.is_null() || len == 0 {
            return Err(ERROR_INVALID_VALUE);
        }
        let count = text.len().min(len - 1);
        // SAFETY: the caller of the C function promises `len` bytes behind the pointer, and `count` < `len`.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), self.0.cast(), count) };
        // SAFETY: as above.
        unsafe { self.0.add(count).write(0) };
        Ok(())
    }
}

/// A pointer from C that a function reads through.
#[repr(transparent)]
pub struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// Where C passed an untyped pointer.
    pub fn at_address(address: usize) -> Self {
        Self(address as *const T)
    }
    /// The value behind it.
    pub fn get(&self) -> Outcome<T> {
        self.at(0)
    }
    /// The `index`th value behind it.
    pub fn at(&self, index: usize) -> Outcome<T> {
        if self.0.is_null() {
            return Err(ERROR_INVALID_VALUE);
        }
        // SAFETY: not null; the caller of the C function promises as many values as it says there are.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }
    /// The first `count` values.
    pub fn list(&self, count: usize) -> Outcome<Vec<T>> {
        (0..count).map(|index| self.at(index)).collect()
    }
}

impl In<c_char> {
    /// The text up to the NUL.
    pub fn text(&self) -> Outcome<String> {
        if self.0.is_null() {
            return Err(ERROR_INVALID_VALUE);
        }
        // SAFETY: not null; the caller of the C function promises a NUL-terminated string.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_string_lossy().into_owned())
    }
}
