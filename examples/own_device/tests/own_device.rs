//! The promise: a runtime keeps its tensors on a device of another crate, within its budget, and no byte is wrong.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::path::Path;
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use outcore::device::{
    Completion, Completions, Device, DeviceFactory, DeviceSettings, LinkModel, StreamKind, StreamOp, Token,
};
use outcore::{Bytes, DType, ErrorKind, PageSize, Result, Runtime, RuntimeBuilder, Tensor};
use outcore_own_device::Accelerator;

const PAGE: u64 = 64 << 10;

fn builder() -> RuntimeBuilder {
    Runtime::builder()
        .device(Accelerator)
        .page_size(PageSize::new(Bytes::new(PAGE)).unwrap())
        .device_budget(Bytes::new(8 * PAGE))
        .scratch_dir(env!("CARGO_TARGET_TMPDIR"))
}

fn read(runtime: &Runtime, tensor: &Tensor) -> Vec<u8> {
    let mut bytes = vec![0; PAGE as usize];
    runtime.pin(tensor).on_device().wait().unwrap().copy_out(0, 0, &mut bytes).unwrap();
    bytes
}

fn write(runtime: &Runtime, tensor: &Tensor, value: u8) {
    let mut guard = runtime.pin(tensor).write().on_device().wait().unwrap();
    guard.copy_in(0, 0, &vec![value; PAGE as usize]).unwrap();
}

#[test]
fn tensors_larger_than_the_device_keep_their_bytes() {
    for host in [0, 4 * PAGE] {
        let runtime = builder().host_budget(Bytes::new(host)).open().unwrap();
        let table = runtime.alloc(DType::U8, &[64, PAGE]).unwrap();
        let rows: Vec<Tensor> = (0..64).map(|row| table.rows(row..row + 1).unwrap()).collect();
        thread::scope(|scope| {
            for part in rows.chunks(16) {
                let runtime = &runtime;
                scope.spawn(move || {
                    for round in 0..3 {
                        for (n, row) in part.iter().enumerate() {
                            write(runtime, row, 3 * n as u8 + round);
                        }
                        for (n, row) in part.iter().enumerate() {
                            assert!(read(runtime, row).iter().all(|byte| *byte == 3 * n as u8 + round));
                        }
                    }
                });
            }
        });
        let stats = runtime.stats();
        assert!(stats.pager.evictions > 100 && stats.traffic.peak_device <= Bytes::new(8 * PAGE), "{stats:?}");
        drop((rows, table));
        runtime.close().unwrap();
    }
}

#[test]
fn its_memory_is_neither_this_machines_nor_a_gpus_of_another_maker() {
    let runtime = builder().host_budget(Bytes::new(4 * PAGE)).open().unwrap();
    let memory = runtime.stats().memory;
    assert_eq!((memory.device, memory.host), (Bytes::ZERO, Bytes::new(4 * PAGE)), "{memory:?}");
    let tensor = runtime.alloc(DType::U8, &[PAGE]).unwrap();
    write(&runtime, &tensor, 7);
    let guard = runtime.pin(&tensor).on_device().wait().unwrap();
    assert_eq!(guard.into_dlpack(0, None).unwrap_err().kind(), ErrorKind::Unsupported);
    assert!(read(&runtime, &tensor).iter().all(|byte| *byte == 7));
    drop(tensor);
    runtime.close().unwrap();
}

fn model(folder: &Path, rows: u64) -> std::path::PathBuf {
    let path = folder.join("model.safetensors");
    let header =
        format!("{{\"w\":{{\"dtype\":\"U8\",\"shape\":[{rows},{PAGE}],\"data_offsets\":[0,{}]}}}}", rows * PAGE);
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend((0..rows).flat_map(|row| vec![row as u8; PAGE as usize]));
    std::fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn a_model_streams_through_it_ahead_of_use() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let runtime = builder().open().unwrap();
    let weights = runtime.open_model(model(folder.path(), 40)).unwrap().tensor("w").unwrap();
    for _ in 0..4 {
        for row in 0..40 {
            let bytes = read(&runtime, &weights.rows(row..row + 1).unwrap());
            assert!(bytes.iter().all(|byte| *byte == row as u8), "row {row}");
        }
    }
    assert!(runtime.stats().pager.prefetched > 0);
    drop(weights);
    runtime.close().unwrap();
}

#[test]
fn closures_and_ends_of_pins_are_in_the_order_of_the_stream() {
    let runtime = builder().open().unwrap();
    let tensors = [runtime.alloc(DType::U8, &[PAGE]).unwrap()];
    write(&runtime, &tensors[0], 9);
    let stream = runtime.compute_stream().unwrap();
    let (told, ends) = std::sync::mpsc::channel();
    let guard = runtime.pin(&tensors).on_device().wait().unwrap();
    stream.call(move || told.send(()).unwrap());
    guard.unpin_after(&stream).unwrap();
    stream.synchronize().unwrap();
    ends.try_recv().unwrap();
    write(&runtime, &tensors[0], 10);
    assert!(read(&runtime, &tensors[0]).iter().all(|byte| *byte == 10));
    drop((tensors, stream));
    runtime.close().unwrap();
}

/// Opens an accelerator, and keeps the settings with which it was opened.
#[derive(Debug, Default)]
struct Watched(Mutex<Option<DeviceSettings>>);

impl DeviceFactory for Watched {
    fn name(&self) -> String {
        Accelerator.name()
    }
    fn open(&self, settings: DeviceSettings, completions: Arc<dyn Completions>) -> Result<Arc<dyn Device>> {
        *self.0.lock().unwrap() = Some(settings);
        Accelerator.open(settings, completions)
    }
}

/// Settings with which a runtime opens a device.
fn settings() -> DeviceSettings {
    let watched = Arc::new(Watched::default());
    builder().device(watched.clone()).open().unwrap().close().unwrap();
    let settings = watched.0.lock().unwrap().take();
    settings.unwrap()
}

/// Does what it was given when it is told of a completion.
struct Receiver(Mutex<mpsc::Receiver<Box<dyn FnOnce() + Send>>>);

impl Completions for Receiver {
    fn completed(&self, done: &mut Vec<Completion>) {
        done.clear();
        let next = self.0.lock().unwrap().recv();
        next.unwrap()();
    }
}

/// The bug: the device's thread waited for itself if the last owner went in a receiver of completions, which panics.
#[test]
fn regression_the_last_owner_may_go_where_completions_are_received() {
    for closes in [false, true] {
        let (give, given) = mpsc::channel::<Box<dyn FnOnce() + Send>>();
        let device = Accelerator.open(settings(), Arc::new(Receiver(Mutex::new(given)))).unwrap();
        let stream = device.create_stream(StreamKind::Compute).unwrap();
        device.submit(stream, StreamOp::Mark, Some(Token(1)));
        let (tell, told) = mpsc::channel();
        give.send(Box::new(move || {
            let closed = if closes { device.close() } else { Ok(()) };
            drop(device);
            tell.send(closed).unwrap();
        }))
        .unwrap();
        told.recv().expect("nothing panics").unwrap();
    }
}

/// The bug: a receiver of completions that panicked ended the device's thread, and all that waited for it hung.
#[test]
fn regression_a_receiver_that_panics_does_not_end_the_device() {
    let (give, given) = mpsc::channel::<Box<dyn FnOnce() + Send>>();
    let device = Accelerator.open(settings(), Arc::new(Receiver(Mutex::new(given)))).unwrap();
    let stream = device.create_stream(StreamKind::Compute).unwrap();
    give.send(Box::new(|| panic!("on purpose"))).unwrap();
    device.submit(stream, StreamOp::Mark, Some(Token(1)));
    let (tell, told) = mpsc::channel();
    give.send(Box::new(move || tell.send(()).unwrap())).unwrap();
    device.submit(stream, StreamOp::Mark, Some(Token(2)));
    told.recv_timeout(Duration::from_secs(60)).expect("the second completion is reported");
    device.close().unwrap();
}

#[test]
fn what_it_cannot_have_is_refused_by_its_own_error() {
    let link = LinkModel::new(Bytes::gib(8), Duration::from_micros(5), true).unwrap();
    let error = builder().link(link).open().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.to_string().contains("the device accelerator has a link of its own"), "{error}");
    let runtime = builder().open().unwrap();
    let tensor = runtime.alloc(DType::U8, &[PAGE]).unwrap();
    assert_eq!(runtime.pin(&tensor).wait().unwrap_err().kind(), ErrorKind::Unsupported);
    drop(tensor);
    runtime.close().unwrap();
}
