//! DLPack views of pinned tensors, as a consumer in C sees them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::mpsc::channel;

use harness::{Devices, Ends, outlives_its_scope, watched};
use outcore::dlpack::{DLManagedTensorVersioned, DlpackView};
use outcore::{Bytes, DType, ErrorKind, PageSize, Runtime, Tensor};
use outcore_testkit::{harness, on_host_and_cuda};

// DLPack has no name for the memory of the simulated device.
on_host_and_cuda! { a_view_may_outlive_its_scope }

const PAGE: u64 = 64 << 10;

fn open(frames: u64) -> Runtime {
    let page_size = PageSize::new(Bytes::new(PAGE)).unwrap();
    Runtime::builder().page_size(page_size).device_budget(Bytes::new(frames * PAGE)).open().unwrap()
}

/// The structure of dlpack.h, version 1, written independently of the one that the library uses.
#[repr(C)]
struct Managed {
    major: u32,
    minor: u32,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
    flags: u64,
    data: *mut u8,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// A library that was given a tensor.
struct Consumer(NonNull<Managed>);

// SAFETY: consumers may be on any thread.
unsafe impl Send for Consumer {}

impl Consumer {
    fn take(view: DlpackView) -> Self {
        let raw: NonNull<DLManagedTensorVersioned> = view.into_raw();
        Self(raw.cast())
    }
    fn get(&self) -> &Managed {
        // SAFETY: the view gave it away, and it is not deleted yet.
        unsafe { self.0.as_ref() }
    }
    fn list(&self, list: *mut i64) -> &[i64] {
        if list.is_null() {
            return &[];
        }
        // SAFETY: a DLPack tensor has as many extents and strides as it says.
        unsafe { std::slice::from_raw_parts(list, self.get().ndim as usize) }
    }
    /// The element at a place, by the strides.
    fn at<T: Copy>(&self, place: &[i64]) -> *mut T {
        let steps = self.list(self.get().strides).iter().zip(place);
        let index: i64 = steps.map(|(stride, at)| stride * at).sum();
        // SAFETY: the tests ask for places within the extents.
        unsafe { self.get().data.add(self.get().byte_offset as usize).cast::<T>().offset(index as isize) }
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        // SAFETY: called once.
        unsafe { self.get().deleter.unwrap()(self.0.as_ptr()) };
    }
}

fn one(tensor: &Tensor) -> &[Tensor] {
    std::slice::from_ref(tensor)
}

#[test]
fn a_consumer_reads_what_is_pinned_and_gives_it_back() {
    let runtime = open(4);
    let table = runtime.alloc(DType::F32, &[300, 7, 20]).unwrap();
    let values: Vec<f32> = (0..300 * 7 * 20).map(|n| n as f32 * 0.5).collect();
    runtime.pin(one(&table)).write().on_device().wait().unwrap().copy_in(0, 0, bytemuck::cast_slice(&values)).unwrap();
    let rows = table.rows(101..250).unwrap();
    let consumer = Consumer::take(runtime.pin(one(&rows)).on_device().wait().unwrap().into_dlpack(0, None).unwrap());
    let tensor = consumer.get();
    assert_eq!((tensor.major, tensor.flags), (1, 1), "version 1, read-only");
    assert_eq!((tensor.device_type, tensor.device_id), (1, 0), "the CPU");
    assert_eq!((tensor.code, tensor.bits, tensor.lanes), (2, 32, 1), "binary32");
    assert_eq!((consumer.list(tensor.shape), consumer.list(tensor.strides)), (&[149, 7, 20][..], &[140, 20, 1][..]));
    for place in [[0, 0, 0], [0, 0, 19], [3, 6, 1], [148, 6, 19]] {
        let expected = values[((101 + place[0]) * 140 + place[1] * 20 + place[2]) as usize];
        // SAFETY: within the tensor, which is pinned.
        assert_eq!(unsafe { consumer.at::<f32>(&place).read() }, expected, "{place:?}");
    }
    assert!(runtime.evict(&rows) < 3, "pages that the consumer has stay");
    let pinned = runtime.observe().snapshot(&rows).pages.iter().filter(|page| page.device.pins > 0).count();
    assert_eq!(pinned as u64, rows.page_count());
    // A consumer may give the tensor back on any thread.
    std::thread::spawn(move || drop(consumer)).join().unwrap();
    assert!(runtime.observe().snapshot(&rows).pages.iter().all(|page| page.device.pins == 0));
    drop((rows, table));
    runtime.close().unwrap();
}

#[test]
fn a_consumer_writes_where_the_guard_lets_it() {
    let runtime = open(1);
    let (table, other) = (runtime.alloc(DType::I64, &[10, 3]).unwrap(), runtime.alloc(DType::U8, &[PAGE]).unwrap());
    let consumer =
        Consumer::take(runtime.pin(one(&table)).write().on_device().wait().unwrap().into_dlpack(0, None).unwrap());
    assert_eq!(consumer.get().flags, 0);
    // SAFETY: within the tensor, which this consumer alone has.
    (0..10).for_each(|row| unsafe { consumer.at::<i64>(&[row, 2]).write(-row) });
    drop(consumer);
    // The page is evicted and filled again.
    drop(runtime.pin(&other).wait().unwrap());
    let guard = runtime.pin(&table).wait().unwrap();
    assert_eq!(
        guard.view::<i64>().unwrap().chunks(3).map(|row| row[2]).collect::<Vec<_>>(),
        (0..10).map(|n| -n).collect::<Vec<_>>()
    );
    drop(guard);
    drop((table, other));
    runtime.close().unwrap();
}

#[test]
fn every_plain_type_has_a_name_and_blocks_are_refused() {
    let runtime = open(4);
    let mut refused = 0;
    for dtype in DType::ALL.iter().copied() {
        let tensor = runtime.alloc(dtype, &[2, 768]).unwrap();
        let view = runtime.pin(one(&tensor)).on_device().wait().unwrap().into_dlpack(0, None);
        if dtype.block_elements() == 1 {
            let consumer = Consumer::take(view.unwrap());
            let Managed { code, bits, lanes, .. } = *consumer.get();
            assert_eq!((u64::from(bits), lanes), (dtype.block_bytes() * 8, 1), "{dtype}");
            // Codes 0 to 2: integers and binary floats.
            let expected = match dtype.name() {
                name if name.starts_with('I') => code == 0,
                name if name.starts_with('U') => code == 1,
                "F16" | "F32" | "F64" => code == 2,
                "BF16" => code == 4,
                "C64" => code == 5,
                "BOOL" => code == 6,
                _ => (7..=14).contains(&code),
            };
            assert!(expected, "{dtype} has the code {code}");
        } else {
            let error = view.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.to_string().contains(dtype.name()) && error.advice().is_some(), "{error}");
            refused += 1;
        }
        assert!(runtime.observe().snapshot(&tensor).pages.iter().all(|page| page.device.pins == 0), "{dtype}");
    }
    assert!(refused > 20);
    runtime.close().unwrap();
}

#[test]
fn odd_shapes_and_wrong_arguments() {
    let runtime = open(2);
    let scalar = runtime.alloc(DType::F64, &[]).unwrap();
    let consumer = Consumer::take(runtime.pin(one(&scalar)).on_device().wait().unwrap().into_dlpack(0, None).unwrap());
    assert_eq!((consumer.get().ndim, consumer.get().shape.is_null()), (0, true));
    // SAFETY: one element.
    assert_eq!(unsafe { consumer.at::<f64>(&[]).read() }, 0.0);
    drop(consumer);
    let none = runtime.alloc(DType::F32, &[5, 4]).unwrap().rows(2..2).unwrap();
    let consumer = Consumer::take(runtime.pin(one(&none)).on_device().wait().unwrap().into_dlpack(0, None).unwrap());
    assert_eq!((consumer.list(consumer.get().shape), consumer.get().data.is_null()), (&[0, 4][..], true));
    drop(consumer);
    let error = runtime.pin(one(&scalar)).on_device().wait().unwrap().into_dlpack(1, None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    let other = open(1);
    let theirs = other.compute_stream().unwrap();
    let error = runtime.pin(one(&scalar)).on_device().wait().unwrap().into_dlpack(0, Some(&theirs)).unwrap_err();
    assert!(error.kind() == ErrorKind::InvalidArgument && error.advice().is_some(), "{error}");
    // No consumer took the view. Dropping it ends its pin.
    drop(runtime.pin(one(&scalar)).write().on_device().wait().unwrap().into_dlpack(0, None).unwrap());
    drop(runtime.pin(&scalar).write().wait().unwrap());
    drop((scalar, none, theirs));
    other.close().unwrap();
    runtime.close().unwrap();
}

#[test]
fn a_view_ends_behind_the_consumers_work() {
    watched("a_view_ends_behind_the_consumers_work", || {
        let runtime = open(1);
        let tensors = [runtime.alloc(DType::U8, &[PAGE]).unwrap(), runtime.alloc(DType::U8, &[PAGE]).unwrap()];
        let stream = runtime.compute_stream().unwrap();
        let view = runtime.pin(&tensors[..1]).on_device().wait().unwrap().into_dlpack(0, Some(&stream)).unwrap();
        let consumer = Consumer::take(view);
        let (open_gate, gate) = channel::<()>();
        stream.call(move || _ = gate.recv());
        drop(consumer);
        assert_eq!(runtime.evict(&tensors[0]), 0, "the work has not ended");
        drop(open_gate);
        drop(runtime.pin(&tensors[1]).wait().unwrap());
    });
}

/// While its scope is open, a view counts as a guard of the scope. It may outlive the scope.
fn a_view_may_outlive_its_scope(devices: Devices) {
    watched("a_view_may_outlive_its_scope", move || {
        for on in devices.iter().copied() {
            for (behind_the_stream, writes) in [(false, false), (false, true), (true, false), (true, true)] {
                outlives_its_scope(on, Ends { behind_the_stream, writes }, |runtime, scope, tensors, stream| {
                    let stream = behind_the_stream.then_some(stream);
                    Consumer::take(match writes {
                        true => runtime
                            .pin(tensors)
                            .in_scope(scope)
                            .write()
                            .on_device()
                            .wait()
                            .unwrap()
                            .into_dlpack(0, stream)
                            .unwrap(),
                        false => runtime
                            .pin(tensors)
                            .in_scope(scope)
                            .on_device()
                            .wait()
                            .unwrap()
                            .into_dlpack(0, stream)
                            .unwrap(),
                    })
                });
                harness::next_round(on);
            }
        }
    });
}
