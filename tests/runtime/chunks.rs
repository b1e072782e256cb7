//! The promise: where a page passes through a staging buffer, disk, buffer and link work on parts of it at the same
//! time. It is still one page: nobody sees a part of it, and it fails once.

use std::collections::BTreeMap;
use std::sync::Arc;

use harness::{AnyDevice, Devices, Fault, Faults, On, check_at_rest, small_pages, watched};
use outcore::store::StoreOptions;
use outcore::testing::{CallHook, Injected, IoCall, IoKind};
use outcore::{Bytes, DType, ErrorKind, IoBackend, PageSize, PolicyKind, Result, RuntimeBuilder, Verify};
use outcore_testkit::hooked::{DeviceCall, DeviceHook, Hooked};
use outcore_testkit::{harness, models};
use parking_lot::{Condvar, Mutex};

const PAGE: u64 = 64 << 10;
const CHUNK: u64 = 16 << 10;
const CHUNKS: u64 = PAGE / CHUNK;

mod on_sim {
    #[test]
    fn a_chunk_is_copied_while_others_are_read() {
        super::a_chunk_is_copied_while_others_are_read(super::harness::SIM);
    }
    #[test]
    fn chunks_bring_the_bytes_up_and_back() {
        super::chunks_bring_the_bytes_up_and_back(super::harness::SIM);
    }
    #[test]
    fn a_page_of_which_every_chunk_fails_fails_once() {
        super::a_page_of_which_every_chunk_fails_fails_once(super::harness::SIM);
    }
}

mod on_cuda {
    macro_rules! on_cuda {
        ($($test:ident)*) => {$(
            #[test]
            fn $test() {
                let Some(fake) = super::small_pages(stringify!($test)) else { return };
                super::$test(super::harness::CUDA);
                fake.finish();
            }
        )*};
    }
    on_cuda! {
        a_chunk_is_copied_while_others_are_read
        chunks_bring_the_bytes_up_and_back
        a_page_of_which_every_chunk_fails_fails_once
    }
}

fn builder(on: On, hook: Arc<dyn CallHook>) -> RuntimeBuilder {
    on.builder()
        .page_size(PageSize::new(Bytes::new(PAGE)).unwrap())
        .chunk(Bytes::new(CHUNK))
        .device_budget(Bytes::new(4 * PAGE))
        .policy(PolicyKind::Lru)
        .scratch_dir(models::folder())
        .store(StoreOptions::new(IoBackend::Threads).hook(hook))
}

/// Holds the read of a page's last chunk until the device was given copies of all the others.
#[derive(Default)]
struct LastWaits {
    /// Copies that the device was given, and the reads, by offset and length.
    state: Mutex<(u64, BTreeMap<u64, u32>)>,
    changed: Condvar,
}

impl CallHook for LastWaits {
    fn before(&self, call: &IoCall) -> Injected {
        let mut state = self.state.lock();
        state.1.insert(call.offset, call.len);
        if call.offset == PAGE - CHUNK {
            self.changed.wait_while(&mut state, |(copies, _)| *copies < CHUNKS - 1);
        }
        Injected::Nothing
    }
}

impl DeviceHook for LastWaits {
    fn before(&self, call: DeviceCall) -> Result<()> {
        if call == DeviceCall::Submit {
            self.state.lock().0 += 1;
            self.changed.notify_all();
        }
        Ok(())
    }
}

/// A page was read whole into its staging buffer before the link had anything to do.
fn a_chunk_is_copied_while_others_are_read(devices: Devices) {
    watched("a chunk is copied while others are read", move || {
        for on in devices.iter().copied() {
            let hook = Arc::new(LastWaits::default());
            let runtime = builder(on, hook.clone()).device(Hooked::new(on.factory(), hook.clone())).open().unwrap();
            let file = models::synthetic(&[PAGE as usize]);
            let model = runtime.open_model(&file.path).unwrap();
            let tensor = model.tensor("t0").unwrap();
            drop(runtime.read(&tensor.rows(0..CHUNK).unwrap()).unwrap());
            let (copies, reads) = &*hook.state.lock();
            let expected: BTreeMap<u64, u32> = (0..CHUNKS).map(|chunk| (chunk * CHUNK, CHUNK as u32)).collect();
            assert_eq!((*copies, reads), (CHUNKS, &expected), "{on:?}");
        }
    });
}

/// Counts the store's operations by kind and length.
#[derive(Default)]
struct Counts(Mutex<BTreeMap<(bool, u32), u64>>);

impl CallHook for Counts {
    fn before(&self, call: &IoCall) -> Injected {
        *self.0.lock().entry((call.kind == IoKind::Read, call.len)).or_default() += 1;
        Injected::Nothing
    }
    fn may_block(&self) -> bool {
        false
    }
}

fn chunks_bring_the_bytes_up_and_back(devices: Devices) {
    const ROWS: u64 = 12;
    watched("chunks bring the bytes up and back", move || {
        for on in devices.iter().copied() {
            for (verify, host) in [(Verify::Off, 0), (Verify::First, 0), (Verify::Always, 3)] {
                let counts = Arc::new(Counts::default());
                let runtime = builder(on, counts.clone()).verify(verify).host_budget(Bytes::new(host * PAGE));
                let runtime = runtime.open().unwrap();
                // The last page ends within its third chunk.
                let lengths = [100_000, 7, 150_000, 3 * PAGE as usize, 90_001];
                let file = models::synthetic(&lengths);
                let model = runtime.open_model(&file.path).unwrap();
                let private = runtime.open_private(model.header().clone()).unwrap();
                let table = runtime.alloc(DType::U8, &[ROWS, PAGE / 2 + 5]).unwrap();
                for round in 0..3u8 {
                    for row in 0..ROWS {
                        let mut guard = runtime.write(&table.rows(row..row + 1).unwrap()).unwrap();
                        let before = if round == 0 { 0 } else { round * 16 + row as u8 };
                        assert!(guard.try_bytes().unwrap().iter().all(|byte| *byte == before), "row {row}, {round}");
                        guard.try_fill((round + 1) * 16 + row as u8).unwrap();
                    }
                    for n in 0..lengths.len() {
                        for of in [&model, &private] {
                            let tensor = of.tensor(&format!("t{n}")).unwrap();
                            let header = of.header().tensor(&format!("t{n}")).unwrap();
                            let expected = &file.bytes[header.offset as usize..][..header.len as usize];
                            assert!(*runtime.read(&tensor).unwrap().try_bytes().unwrap() == *expected, "t{n} differs");
                        }
                    }
                }
                let counts = counts.0.lock().clone();
                // What leaves the host tier passes through no staging buffer.
                assert!(counts.keys().all(|(read, len)| u64::from(*len) <= CHUNK || !read && host > 0), "{counts:?}");
                assert!(counts[&(true, CHUNK as u32)] > 50, "{counts:?}");
                // With a host tier, timing decides how many pages find it full and go past it.
                let written = counts.get(&(false, CHUNK as u32)).copied().unwrap_or(0);
                assert!(host > 0 || written > 4, "{counts:?}");
                drop((model, private));
                check_at_rest(runtime, vec![table], "pages in chunks");
                harness::next_round(on);
            }
        }
    });
}

/// Whoever waits gets one error, once nothing uses the page's memory any more; the next try finds all of it in order.
fn a_page_of_which_every_chunk_fails_fails_once(devices: Devices) {
    watched("every chunk fails", move || {
        for on in devices.iter().copied() {
            let faults = Faults::new();
            let runtime = builder(on, faults.clone()).open().unwrap();
            let file = models::synthetic(&[PAGE as usize]);
            let model = runtime.open_model(&file.path).unwrap();
            let tensor = model.tensor("t0").unwrap();
            let header = model.header().tensor("t0").unwrap();
            let expected = &file.bytes[header.offset as usize..][..header.len as usize];
            for _ in 0..5 {
                faults.all(IoKind::Read, Fault::Errno(libc::EIO));
                let error = runtime.read(&tensor).map(drop).unwrap_err();
                assert!(error.kind() == ErrorKind::Io && error.to_string().contains("page "), "{error}");
                faults.off();
                assert!(*runtime.read(&tensor).unwrap().try_bytes().unwrap() == *expected);
                runtime.evict(&tensor);
            }
            drop(model);
            check_at_rest(runtime, vec![tensor], "every chunk fails");
            harness::next_round(on);
        }
    });
}
