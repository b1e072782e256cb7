//! Initialisation, devices, contexts, and the names of errors.

use std::ffi::c_char;

use crate::abi::*;
use crate::capture;
use crate::driver::{Driver, Need, enter};
use crate::exports::print_at_exit;
use crate::state::contexts::{Context, STACK};
use crate::state::streams::PRIORITY_GREATEST;
use crate::stream;

fn device(driver: &Driver, device: i32) -> Outcome<i32> {
    let known = usize::try_from(device).is_ok_and(|device| device < driver.config.devices);
    if known { Ok(device) } else { Err(ERROR_INVALID_DEVICE) }
}

/// A device's attribute: as the test set it, or as a large data-centre card has it.
fn attribute(driver: &Driver, which: i32) -> i32 {
    if let Some(&value) = driver.config.attributes.get(&which) {
        return value;
    }
    match which {
        1..=3 => 1024, // threads in a block
        4 => 64,
        5 => i32::MAX, // grid dimensions
        6 | 7 => 65535,
        8 => 48 << 10,    // shared memory in a block
        9 => 64 << 10,    // constant memory
        10 => 32,         // warp
        12 | 82 => 65536, // registers
        13 => 1_980_000,  // clock, kHz
        14 => 512,
        // overlap, mapped host memory, unified addressing, priorities
        15 | 19 | 31 | 41 | 78 | 79 | 80 | 90 | 91 | 95 => 1,
        16 => 132,  // multiprocessors
        33 => 0x17, // PCI bus
        36 => 3_201_000,
        37 => 6144,
        38 => 50 << 20, // level 2 cache
        39 => 2048,
        40 => 3, // copy engines
        75 => 9, // compute capability 9.0
        81 | 97 => 227 << 10,
        83 | 89 | 99 | 102 | 103 | 110 | 113 | 115 => 1, // managed memory, registering, mapping, pools
        106 => 32,
        _ => 0,
    }
}

const UUID: [u8; 16] = *b"outcore-fake-0\0\0";

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: u32) -> CuResult {
    enter("cuInit", Need::Init, |driver| {
        if flags != 0 {
            return Err(ERROR_INVALID_VALUE);
        }
        if driver.config.devices == 0 {
            return Err(ERROR_NO_DEVICE);
        }
        driver.initialised = true;
        print_at_exit();
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDriverGetVersion(version: Out<i32>) -> CuResult {
    enter("cuDriverGetVersion", Need::Nothing, |driver| version.set(driver.config.driver_version))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetCount(count: Out<i32>) -> CuResult {
    enter("cuDeviceGetCount", Need::Init, |driver| count.set(driver.config.devices as i32))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGet(out: Out<i32>, ordinal: i32) -> CuResult {
    enter("cuDeviceGet", Need::Init, |driver| out.set(device(driver, ordinal)?))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetName(name: Out<c_char>, len: i32, id: i32) -> CuResult {
    enter("cuDeviceGetName", Need::Init, |driver| {
        let id = device(driver, id)?;
        let part = if driver.config.instance.is_some() { " MIG 1g.10gb" } else { "" };
        name.set_text(
            &format!("Emulated CUDA device {id}{part}"),
            usize::try_from(len).map_err(|_| ERROR_INVALID_VALUE)?,
        )
    })
}

/// The bytes of the UUID of a device. The second version of the call gives an instance's own on a partitioned GPU, the
/// first that of the whole GPU.
fn uuid(name: &'static str, out: &Out<[u8; 16]>, id: i32) -> CuResult {
    enter(name, Need::Init, |driver| {
        let mut uuid = UUID;
        uuid[15] = device(driver, id)? as u8;
        if let Some(instance) = driver.config.instance.filter(|_| name == "cuDeviceGetUuid_v2") {
            uuid[13] = b'M';
            uuid[14] = instance;
        }
        out.set(uuid)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetUuid(out: Out<[u8; 16]>, id: i32) -> CuResult {
    uuid("cuDeviceGetUuid", &out, id)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetUuid_v2(out: Out<[u8; 16]>, id: i32) -> CuResult {
    uuid("cuDeviceGetUuid_v2", &out, id)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetPCIBusId(out: Out<c_char>, len: i32, id: i32) -> CuResult {
    enter("cuDeviceGetPCIBusId", Need::Init, |driver| {
        let id = device(driver, id)?;
        let text = format!("0000:{:02X}:00.0", 0x17 + id);
        out.set_text(&text, usize::try_from(len).map_err(|_| ERROR_INVALID_VALUE)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceTotalMem_v2(bytes: Out<usize>, id: i32) -> CuResult {
    enter("cuDeviceTotalMem_v2", Need::Init, |driver| {
        device(driver, id)?;
        bytes.set(driver.config.device_bytes as usize)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetAttribute(value: Out<i32>, which: i32, id: i32) -> CuResult {
    enter("cuDeviceGetAttribute", Need::Init, |driver| {
        let id = device(driver, id)?;
        let bus_offset = if which == 33 { id } else { 0 };
        value.set(attribute(driver, which) + bus_offset)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRetain(out: Out<u64>, id: i32) -> CuResult {
    enter("cuDevicePrimaryCtxRetain", Need::Init, |driver| {
        let id = device(driver, id)?;
        let (mut handle, count) = driver.contexts.primary.get(&id).copied().unwrap_or_default();
        if handle == 0 {
            handle = driver.new_handle();
        }
        driver.contexts.primary.insert(id, (handle, count + 1));
        driver.contexts.live.entry(handle).or_insert(Context { device: id, primary: true });
        out.set(handle)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(id: i32) -> CuResult {
    enter("cuDevicePrimaryCtxRelease_v2", Need::Init, |driver| {
        let id = device(driver, id)?;
        let Some((handle, count)) = driver.contexts.primary.get_mut(&id).filter(|(_, count)| *count > 0) else {
            driver
                .judge
                .find("misuse", &format!("the primary context of device {id} was released more often than retained"));
            return Err(ERROR_INVALID_CONTEXT);
        };
        *count -= 1;
        if *count == 0 {
            let handle = *handle;
            stream::destroy_all(driver, handle);
            driver.contexts.live.remove(&handle);
        }
        Ok(())
    })
}

/// What `cudaDeviceReset` calls: the primary context goes, whoever has retained it.
#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxReset_v2(id: i32) -> CuResult {
    enter("cuDevicePrimaryCtxReset_v2", Need::Init, |driver| {
        let id = device(driver, id)?;
        if let Some((handle, _)) = driver.contexts.primary.remove(&id) {
            stream::destroy_all(driver, handle);
            driver.contexts.live.remove(&handle);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxGetState(id: i32, flags: Out<u32>, active: Out<i32>) -> CuResult {
    enter("cuDevicePrimaryCtxGetState", Need::Init, |driver| {
        let id = device(driver, id)?;
        flags.set_if_wanted(0);
        active.set(i32::from(driver.contexts.primary.get(&id).is_some_and(|(_, count)| *count > 0)))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxCreate_v4(out: Out<u64>, _parameters: usize, _flags: u32, id: i32) -> CuResult {
    enter("cuCtxCreate_v4", Need::Init, |driver| {
        let id = device(driver, id)?;
        let handle = driver.new_handle();
        driver.contexts.live.insert(handle, Context { device: id, primary: false });
        STACK.with_borrow_mut(|stack| stack.push(handle));
        out.set(handle)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxDestroy_v2(handle: u64) -> CuResult {
    enter("cuCtxDestroy_v2", Need::Init, |driver| {
        if driver.contexts.live.get(&handle).is_none_or(|context| context.primary) {
            return Err(ERROR_INVALID_CONTEXT);
        }
        stream::destroy_all(driver, handle);
        driver.contexts.live.remove(&handle);
        STACK.with_borrow_mut(|stack| {
            if stack.last() == Some(&handle) {
                stack.pop();
            }
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetCurrent(out: Out<u64>) -> CuResult {
    enter("cuCtxGetCurrent", Need::Init, |driver| out.set(driver.contexts.current().unwrap_or(0)))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(handle: u64) -> CuResult {
    enter("cuCtxSetCurrent", Need::Init, |driver| {
        if handle != 0 && !driver.contexts.live.contains_key(&handle) {
            driver.judge.find("context", "cuCtxSetCurrent was given a context that does not exist, or no longer");
            return Err(ERROR_INVALID_CONTEXT);
        }
        STACK.with_borrow_mut(|stack| {
            stack.pop();
            if handle != 0 {
                stack.push(handle);
            }
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPushCurrent_v2(handle: u64) -> CuResult {
    enter("cuCtxPushCurrent_v2", Need::Init, |driver| {
        if !driver.contexts.live.contains_key(&handle) {
            return Err(ERROR_INVALID_CONTEXT);
        }
        STACK.with_borrow_mut(|stack| stack.push(handle));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPopCurrent_v2(out: Out<u64>) -> CuResult {
    enter("cuCtxPopCurrent_v2", Need::Context, |_| {
        let handle = STACK.with_borrow_mut(Vec::pop).ok_or(ERROR_INVALID_CONTEXT)?;
        out.set_if_wanted(handle);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetDevice(out: Out<i32>) -> CuResult {
    enter("cuCtxGetDevice", Need::Context, |driver| {
        let handle = driver.contexts.required()?;
        out.set(driver.contexts.device_of(handle).ok_or(ERROR_INVALID_CONTEXT)?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetFlags(_flags: u32) -> CuResult {
    enter("cuCtxSetFlags", Need::Context, |_| Ok(()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetLimit(value: Out<usize>, _limit: u32) -> CuResult {
    enter("cuCtxGetLimit", Need::Context, |_| value.set(0))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetLimit(_limit: u32, _value: usize) -> CuResult {
    enter("cuCtxSetLimit", Need::Context, |_| Ok(()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetCacheConfig(value: Out<u32>) -> CuResult {
    enter("cuCtxGetCacheConfig", Need::Context, |_| value.set(0))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCacheConfig(_value: u32) -> CuResult {
    enter("cuCtxSetCacheConfig", Need::Context, |_| Ok(()))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) -> CuResult {
    enter("cuCtxGetStreamPriorityRange", Need::Context, |_| {
        least.set_if_wanted(0);
        greatest.set_if_wanted(PRIORITY_GREATEST);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> CuResult {
    enter("cuCtxSynchronize", Need::Context, |driver| {
        let context = driver.contexts.required()?;
        // Whatever the thread's mode is: a wait for all streams is a wait for those that are captured.
        let captured = driver.streams.iter().filter(|(_, s)| s.context == context && s.capture.is_some());
        let captured: Vec<u64> = captured.map(|(&handle, _)| handle).collect();
        if !captured.is_empty() {
            captured.into_iter().for_each(|stream| capture::invalidate(driver, stream));
            driver
                .judge
                .find("capture", "cuCtxSynchronize was called while a stream was captured, and spoiled the capture");
            return Err(ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        // By timeline, not by stream: a stream may have been destroyed with work on it.
        let timelines = driver.timelines.iter().enumerate().filter(|(_, timeline)| timeline.context == context);
        let timelines: Vec<_> = timelines.map(|(id, _)| id).collect();
        for timeline in timelines {
            stream::synchronize(driver, timeline)?;
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorName(code: CuResult, out: Out<*const c_char>) -> CuResult {
    error_text(code, &out, |(name, _)| name.as_ptr())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorString(code: CuResult, out: Out<*const c_char>) -> CuResult {
    error_text(code, &out, |(_, text)| text.as_ptr())
}

fn error_text(
    code: CuResult,
    out: &Out<*const c_char>,
    part: impl FnOnce((&'static std::ffi::CStr, &'static std::ffi::CStr)) -> *const c_char,
) -> CuResult {
    let text = describe(code);
    let known = text.is_some();
    match out.set(text.map_or(std::ptr::null(), part)) {
        Ok(()) if known => SUCCESS,
        _ => ERROR_INVALID_VALUE,
    }
}
