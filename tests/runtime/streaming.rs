//! The promise: the bytes are the file's, whatever the budget, policy, page size, backend and tiers.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use harness::{AnyDevice, Devices, Setting, alone, check_at_rest, watched};
use outcore::device::Token;
use outcore::policy::{PageId, PageIndex, SegmentId};
use outcore::stats::WaitCause;
use outcore::store::{DiskProfile, QueueDepth, StoreOptions};
use outcore::testing::{CallHook, Injected, IoCall, IoKind};
use outcore::{
    Bytes, DType, ErrorKind, IoBackend, Lookahead, PageSize, Plan, PolicyKind, Runtime, Tensor, Tier, Verify,
};
use outcore_pager::policy::{Policy, Take, Want};
use outcore_pager::state::State;
use outcore_testkit::{harness, models, on_every_device};
use parking_lot::Mutex;

fn kib(n: u64) -> PageSize {
    PageSize::new(Bytes::kib(n)).unwrap()
}

on_every_device! {
    every_byte_is_the_files_for_every_setting
    the_real_model_streams_through_a_tenth_of_its_size
    a_read_write_tensor_larger_than_memory_keeps_what_was_written
    each_dirty_page_is_written_back_once
    what_is_discarded_is_not_written
    pins_are_futures
    regression_hits_never_exceed_the_best_possible
    regression_a_forgotten_request_ends_with_its_segment
    regression_the_lookahead_follows_the_budget
    regression_the_best_possible_is_of_the_largest_budget
    regression_waves_refuse_a_row_that_is_wider_than_a_wave
    waits_are_told_by_cause_tier_and_page
    a_policy_of_the_users_decides_and_cannot_cost_bytes
}

/// Passes over every tensor in order, forwards and backwards, comparing every byte.
fn every_byte_is_the_files_for_every_setting(devices: Devices) {
    let lengths: Vec<usize> = (0..60).map(|n| 1000 + n * 997 % 90_000).collect();
    let file = models::synthetic(&lengths);
    for (n, policy) in PolicyKind::ALL.into_iter().enumerate() {
        // Every policy runs with every size. Each policy runs with one backend, and the first two run with all of them.
        let backends =
            if n < 2 { &IoBackend::CHOICES[..] } else { &IoBackend::CHOICES[n % IoBackend::CHOICES.len()..][..1] };
        for io in backends.iter().copied() {
            for (page, device, host) in [(4, 1, 0), (16, 10, 4), (64, 3, 0), (64, 3, 2), (256, 2, 8)] {
                let runtime = devices[0]
                    .builder()
                    .policy(policy)
                    .io(io)
                    .page_size(kib(page))
                    .device_budget(Bytes::kib(page * device.max(90_000 / 1024 / page + 2)))
                    .host_budget(Bytes::kib(page * host))
                    .verify(Verify::Always)
                    .open()
                    .unwrap();
                let model = runtime.open_model(&file.path).unwrap();
                for pass in 0..4 {
                    for n in 0..lengths.len() {
                        let n = if pass == 2 { lengths.len() - 1 - n } else { n };
                        let tensor = model.tensor(&format!("t{n}")).unwrap();
                        let guard = runtime.read(&tensor).unwrap();
                        let header = model.header().tensor(&format!("t{n}")).unwrap();
                        let expected = &file.bytes[header.offset as usize..][..lengths[n]];
                        assert!(guard.bytes() == expected, "{policy} {io} {page} KiB: tensor {n} differs");
                    }
                }
                let stats = runtime.stats();
                assert!(stats.traffic.peak_device <= stats.device.budget, "{stats:?}");
                drop(model);
                runtime.close().unwrap();
            }
        }
    }
}

fn the_real_model_streams_through_a_tenth_of_its_size(devices: Devices) {
    let Some(path) = models::real_model() else { return };
    let bytes = std::fs::read(&path).unwrap();
    for policy in [PolicyKind::Lru, PolicyKind::Plan, PolicyKind::Arc, PolicyKind::Lirs] {
        let runtime = devices[0]
            .builder()
            .policy(policy)
            .page_size(kib(256))
            .device_budget(Bytes::mib(10))
            .lookahead(Lookahead::Auto)
            .open()
            .unwrap();
        let model = runtime.open_model(&path).unwrap();
        for _ in 0..3 {
            for header in &model.header().tensors {
                let tensor = model.tensor(&header.name).unwrap();
                let step = tensor.rows_within(8).unwrap();
                let rows = tensor.shape()[0];
                let row = header.len / rows;
                for start in (0..rows).step_by(step as usize) {
                    let end = (start + step).min(rows);
                    let part = tensor.rows(start..end).unwrap();
                    let guard = runtime.read(&part).unwrap();
                    let from = (header.offset + start * row) as usize;
                    assert!(guard.bytes() == &bytes[from..from + ((end - start) * row) as usize], "{}", header.name);
                }
            }
        }
        let stats = runtime.stats();
        eprintln!(
            "{policy}: hit ratio {:.3}, best {:.3}, {:?}",
            stats.hit_ratio(),
            runtime.observe().optimum().ratio(),
            stats.traffic
        );
        drop(model);
        runtime.close().unwrap();
    }
}

fn a_read_write_tensor_larger_than_memory_keeps_what_was_written(devices: Devices) {
    for (host, io) in [(0, IoBackend::Auto), (3, IoBackend::Threads), (40, IoBackend::Buffered)] {
        let runtime = devices[0]
            .builder()
            .page_size(kib(64))
            .device_budget(Bytes::kib(64 * 6))
            .host_budget(Bytes::kib(64 * host))
            .io(io)
            .scratch_dir(env!("CARGO_TARGET_TMPDIR"))
            .open()
            .unwrap();
        let rows = 40u64;
        let tensor = runtime.alloc(outcore::DType::U32, &[rows, 16 * 1024]).unwrap();
        for pass in 0..3u32 {
            for row in 0..rows {
                let part = tensor.rows(row..row + 1).unwrap();
                let mut guard = runtime.write(&part).unwrap();
                let mut values = guard.values::<u32>();
                let before = if pass == 0 { 0 } else { (pass - 1) * 1000 + row as u32 };
                assert!(values.iter().all(|v| *v == before), "pass {pass} row {row}: {} for {before}", values[0]);
                values.fill(pass * 1000 + row as u32);
                guard.set(&values);
            }
        }
        for row in (0..rows).rev() {
            let part = tensor.rows(row..row + 1).unwrap();
            let guard = runtime.read(&part).unwrap();
            assert!(guard.values::<u32>().iter().all(|v| *v == 2000 + row as u32));
        }
        drop(tensor);
        runtime.close().unwrap();
    }
}

/// The write operations that a store was given, by offset. An operation that takes several calls of the kernel counts
/// once.
#[derive(Debug, Default)]
struct Writes(Mutex<HashSet<(u64, Token)>>);

impl Writes {
    fn by_offset(&self) -> BTreeMap<u64, u32> {
        let mut count = BTreeMap::new();
        for (offset, _) in self.0.lock().iter() {
            *count.entry(*offset).or_default() += 1;
        }
        count
    }
}

impl CallHook for Writes {
    fn before(&self, call: &IoCall) -> Injected {
        if call.kind == IoKind::Write {
            // The rest of a partial write is at another offset of the same page.
            self.0.lock().insert((call.offset / ROW * ROW, call.token));
        }
        Injected::Nothing
    }

    fn may_block(&self) -> bool {
        false
    }
}

/// A page and a row of the tables below.
const ROW: u64 = 64 << 10;

/// A runtime with frames for six rows, and host frames, which counts its writes.
fn of_six_rows(devices: Devices, policy: PolicyKind, io: IoBackend, host: u64, writes: &Arc<Writes>) -> Runtime {
    devices[0]
        .builder()
        .page_size(kib(ROW >> 10))
        .device_budget(Bytes::new(6 * ROW))
        .host_budget(Bytes::new(host * ROW))
        .policy(policy)
        .store(StoreOptions::new(io).hook(writes.clone()))
        .scratch_dir(env!("CARGO_TARGET_TMPDIR"))
        .open()
        .unwrap()
}

/// Dirty pages that are discarded leave memory without a write. While somebody reads them they stay as they are, and
/// what is written afterwards is kept.
fn what_is_discarded_is_not_written(devices: Devices) {
    const ROWS: u64 = 6;
    for policy in PolicyKind::ALL {
        let writes = Arc::new(Writes::default());
        let runtime = of_six_rows(devices, policy, IoBackend::Auto, 0, &writes);
        let table = runtime.alloc(DType::U8, &[ROWS, ROW]).unwrap();
        let part = |row: u64| table.rows(row..row + 1).unwrap();
        for row in 0..ROWS {
            runtime.write(&part(row)).unwrap().fill(row as u8 + 1);
        }
        let reader = runtime.read(&part(2)).unwrap();
        assert_eq!(runtime.discard(&table), 0, "{policy}: all are in memory");
        assert!(reader.bytes().iter().all(|byte| *byte == 3), "{policy}");
        drop(reader);
        // A page that is written again is as any other.
        runtime.write(&part(4)).unwrap().fill(50);
        while runtime.observe().snapshot(&table).pages.iter().any(|page| page.device.state != State::Empty) {
            runtime.evict(&table);
            std::thread::yield_now();
        }
        for row in 0..ROWS {
            let expected = if row == 4 { 50 } else { 0 };
            let guard = runtime.read(&part(row)).unwrap();
            assert!(guard.bytes().iter().all(|byte| *byte == expected), "{policy}: row {row}");
        }
        check_writes(&runtime, &writes, 1, policy.name());
        drop(table);
        runtime.close().unwrap();
    }
}

/// A tensor larger than memory is written once from start to end. This takes as many writes as it has pages. Reading it
/// afterwards takes none.
fn each_dirty_page_is_written_back_once(devices: Devices) {
    const ROWS: u64 = 40;
    for (host, io) in [(0, IoBackend::Auto), (0, IoBackend::Threads), (3, IoBackend::Auto), (3, IoBackend::Buffered)] {
        for policy in PolicyKind::ALL {
            let what = format!("{policy} {io}, host tier of {host}");
            let writes = Arc::new(Writes::default());
            let runtime = of_six_rows(devices, policy, io, host, &writes);
            let table = runtime.alloc(DType::U8, &[ROWS, ROW]).unwrap();
            let part = |row: u64| table.rows(row..row + 1).unwrap();
            for row in 0..ROWS {
                runtime.write(&part(row)).unwrap().fill(row as u8 + 1);
            }
            // The last pages go when they are evicted.
            while runtime.observe().snapshot(&table).pages.iter().any(|page| page.device.state != State::Empty) {
                runtime.evict(&table);
                std::thread::yield_now();
            }
            // A host tier may keep some pages, and write them in the background.
            if host == 0 {
                check_writes(&runtime, &writes, ROWS, &what);
            }
            for pass in 0..2 {
                for row in 0..ROWS {
                    let guard = runtime.read(&part(row)).unwrap();
                    assert!(guard.bytes().iter().all(|byte| *byte == row as u8 + 1), "{what}: row {row}, pass {pass}");
                }
            }
            // With a host tier, a read may push pages to the disk that were in memory only. And if a page is read while
            // its host copy is being written, the page goes up as the newest, so that this write was not needed.
            runtime.clone().close().unwrap();
            let on_disk = runtime.observe().snapshot(&table).pages.iter().filter(|page| page.disk).count() as u64;
            if host == 0 {
                assert_eq!(on_disk, ROWS, "{what}");
                check_writes(&runtime, &writes, ROWS, &what);
            } else {
                let by_offset = writes.by_offset();
                assert!(by_offset.len() as u64 >= on_disk, "{what}: {on_disk} on disk, {by_offset:?}");
                let written = Bytes::new(by_offset.values().map(|count| u64::from(*count)).sum::<u64>() * ROW);
                assert_eq!(runtime.stats().traffic.disk_written, written, "{what}");
            }
        }
    }
}

/// Checks that this many pages were written, each once, and that the counters agree.
fn check_writes(runtime: &Runtime, writes: &Writes, pages: u64, what: &str) {
    let by_offset = writes.by_offset();
    assert_eq!(by_offset.len() as u64, pages, "{what}");
    assert!(by_offset.values().all(|count| *count == 1), "{what}: {by_offset:?}");
    let stats = runtime.stats();
    assert_eq!(stats.traffic.disk_written, Bytes::new(pages * ROW), "{what}: {stats:?}");
    assert_eq!(stats.pager.write_backs, pages, "{what}: {stats:?}");
}

fn pins_are_futures(devices: Devices) {
    let file = models::synthetic(&[100_000, 50_000]);
    let runtime = devices[0].builder().page_size(kib(16)).device_budget(Bytes::kib(160)).open().unwrap();
    let model = runtime.open_model(&file.path).unwrap();
    let (a, b) = (model.tensor("t0").unwrap(), model.tensor("t1").unwrap());
    let both = [a, b];
    block_on(async {
        let set = runtime.pin(&both).on_device().await.unwrap();
        let mut bytes = vec![0; 50_000];
        set.copy_out(1, 0, &mut bytes).unwrap();
        assert_eq!(bytes, &file.bytes[file.bytes.len() - 50_000..]);
        drop(set);
        if runtime.host_addressable() {
            let set = runtime.pin(&both).await.unwrap();
            assert_eq!(set.bytes(0).unwrap().len(), 100_000);
            assert_eq!(set.bytes(1).unwrap(), &file.bytes[file.bytes.len() - 50_000..]);
        }
        let guard = runtime.reading(&both[0]).await.unwrap();
        assert_eq!(guard.bytes(), &file.bytes[file.bytes.len() - 150_000..][..100_000]);
    });
}

fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

/// Units of several pages, some of them filled ahead and some late. A page that was late must not count as a hit.
fn regression_hits_never_exceed_the_best_possible(devices: Devices) {
    let file = models::synthetic(&[90_000; 40]);
    let runtime = devices[0].builder().page_size(kib(16)).device_budget(Bytes::kib(16 * 64)).open().unwrap();
    let model = runtime.open_model(&file.path).unwrap();
    let order: Vec<_> = (0..40).map(|n| model.tensor(&format!("t{n}")).unwrap()).collect();
    runtime.plan(Plan::Cycle(&order));
    for _ in 0..20 {
        for tensor in &order {
            drop(runtime.read(tensor).unwrap());
        }
    }
    let (stats, optimum) = (runtime.stats(), runtime.observe().optimum());
    assert_eq!((optimum.uses, optimum.actual_hits), (stats.pager.uses, stats.pager.hits));
    assert!(stats.pager.hits <= optimum.hits, "{:?} against {optimum:?}", stats.pager);
    assert!(stats.pager.hits * 10 > optimum.hits * 8, "{:?} against {optimum:?}", stats.pager);
}

/// A request that was polled and then forgotten must not outlive the pages it waits for.
fn regression_a_forgotten_request_ends_with_its_segment(devices: Devices) {
    let (kept, gone) = (models::synthetic(&[15_000]), models::synthetic(&[15_000]));
    let runtime = devices[0].builder().page_size(kib(16)).device_budget(Bytes::kib(16)).open().unwrap();
    let model = runtime.open_model(&kept.path).unwrap();
    let tensor = model.tensor("t0").unwrap();
    let guard = runtime.read(&tensor).unwrap();
    {
        let model = runtime.open_model(&gone.path).unwrap();
        let tensor = model.tensor("t0").unwrap();
        let mut request = runtime.reading(&tensor);
        let polled = std::future::poll_fn(|cx| std::task::Poll::Ready(request.as_mut().poll(cx).is_pending()));
        assert!(block_on(polled), "the only frame is pinned");
        std::mem::forget(request);
    }
    drop(guard);
    let again = runtime.open_model(&gone.path).unwrap().tensor("t0").unwrap();
    let guard = block_on(runtime.reading(&again)).unwrap();
    assert!(guard.bytes() == &gone.bytes[gone.bytes.len() - 15_000..]);
    drop((guard, again, tensor, model));
    runtime.close().unwrap();
}

/// The lookahead that is right for the first budget is too large or too small for another one.
fn regression_the_lookahead_follows_the_budget(devices: Devices) {
    let pages = |n: u64| Bytes::kib(16 * n);
    for (asked, at_1024, at_64) in [
        (Lookahead::Auto, pages(64), pages(8)),
        (Lookahead::Bytes(Bytes::mib(1)), pages(64), pages(16)),
        (Lookahead::Off, pages(0), pages(0)),
    ] {
        let runtime =
            devices[0].builder().page_size(kib(16)).device_budget(pages(1024)).lookahead(asked).open().unwrap();
        assert_eq!(runtime.stats().lookahead, at_1024, "{asked:?}");
        runtime.set_device_budget(pages(64)).unwrap();
        assert_eq!(runtime.stats().lookahead, at_64, "{asked:?}");
        runtime.set_device_budget(pages(1024)).unwrap();
        assert_eq!(runtime.stats().lookahead, at_1024, "{asked:?}");
        runtime.close().unwrap();
    }
}

/// The best possible is that of the largest budget so far: it allowed more hits than the present one could.
fn regression_the_best_possible_is_of_the_largest_budget(devices: Devices) {
    let file = models::synthetic(&[16 << 10; 8]);
    let runtime = devices[0].builder().page_size(kib(16)).device_budget(Bytes::kib(16 * 16)).open().unwrap();
    let model = runtime.open_model(&file.path).unwrap();
    for _ in 0..10 {
        for n in 0..8 {
            drop(runtime.read(&model.tensor(&format!("t{n}")).unwrap()).unwrap());
        }
    }
    runtime.set_device_budget(Bytes::kib(16 * 2)).unwrap();
    let optimum = runtime.observe().optimum();
    assert!(optimum.actual_hits > 0 && optimum.actual_hits <= optimum.hits, "{optimum:?}");
}

/// A wave that cannot hold one row is refused at once. Otherwise only the pin could refuse it later.
fn regression_waves_refuse_a_row_that_is_wider_than_a_wave(devices: Devices) {
    let runtime = devices[0].builder().page_size(kib(16)).device_budget(Bytes::kib(160)).open().unwrap();
    let wide = [runtime.alloc(DType::U8, &[2, 40 << 10]).unwrap()];
    let error = Tensor::waves(&wide, 2).unwrap_err();
    let text = error.to_string();
    assert_eq!(error.kind(), ErrorKind::BudgetTooSmall, "{text}");
    for part in ["U8 [2, 40960]", "40.0 KiB", "3 pages", "2 (32.0 KiB)", "at least 3 pages"] {
        assert!(text.contains(part), "{text:?} does not say {part:?}");
    }
    // A row as large as a page fits if it begins with the page.
    let fitting = [runtime.alloc(DType::U8, &[4, 16 << 10]).unwrap()];
    assert_eq!(Tensor::waves(&fitting, 1).unwrap().len(), 4);
    for wave in Tensor::waves(&wide, 4).unwrap() {
        assert!(wave.iter().map(|part| part.page_count()).sum::<u64>() <= 4);
        drop(runtime.read_set(&wave).unwrap());
    }
}

/// Every wait has a cause, a tier and a page, and the sums agree.
fn waits_are_told_by_cause_tier_and_page(devices: Devices) {
    watched("waits", move || {
        for setting in Setting::tiers(devices) {
            let setting = Setting { policy: PolicyKind::Lru, ..setting };
            let file = models::synthetic(&[40_000, 33_000, 16, 50_000]);
            let runtime = setting.builder(None).open().unwrap();
            let model = runtime.open_model(&file.path).unwrap();
            let table = runtime.alloc(DType::U8, &[16 << 10]).unwrap();
            for _ in 0..3 {
                for n in [1, 0, 2, 3] {
                    drop(runtime.read(&model.tensor(&format!("t{n}")).unwrap()).unwrap());
                }
            }
            drop(runtime.read(&table).unwrap());
            let stats = runtime.stats();
            let of = |cause| stats.stalls.iter().find(|stalls| stalls.cause == cause).unwrap();
            for stalls in &stats.stalls {
                assert_eq!(stalls.tiers.map(|at| at.tier), Tier::ALL);
                assert_eq!(stalls.tiers.iter().map(|at| at.count).sum::<u64>(), stalls.count, "{stalls:?}");
                assert_eq!(stalls.tiers.iter().map(|at| at.time).sum::<Duration>(), stalls.time, "{stalls:?}");
            }
            let (disk, host, zero) = (of(WaitCause::Disk), of(WaitCause::Host), of(WaitCause::Zero));
            assert!(disk.count > 0 && disk.tiers[Tier::Disk as usize].count == disk.count, "{disk:?}");
            assert!((host.count > 0) == (setting.host > 0), "{setting:?}: {host:?}");
            assert_eq!(host.tiers[Tier::Host as usize].count, host.count, "{host:?}");
            assert_eq!((zero.count, zero.tiers[Tier::Device as usize].count), (1, 1), "{zero:?}");

            let worst = &runtime.observe().worst_pages(16);
            assert!(worst.len() <= 16 && worst.is_sorted_by_key(|page| std::cmp::Reverse(page.time)), "{worst:?}");
            // There are so few pages that all of them are in the list.
            let counts = stats.stalls.iter().map(|stalls| stalls.count).sum::<u64>();
            assert_eq!(worst.iter().map(|page| page.count).sum::<u64>(), counts, "{worst:?}");
            // A page's time is kept in whole units of 1024 ns a wait.
            let lost = stats.stall_time().checked_sub(worst.iter().map(|page| page.time).sum()).unwrap();
            assert!(lost < Duration::from_nanos(1024) * counts as u32, "{lost:?}: {worst:?}");
            let first =
                worst.iter().find(|page| page.page == PageId { index: PageIndex::new(0), ..page.page }).unwrap();
            assert!(first.count > 0 && !first.name.is_empty(), "{first:?}");
            let named = |text: &str| worst.iter().any(|page| page.tensor == text);
            // The last page of t0 is the first page of t1.
            assert!(named("t0") && named("t0 and 1 more") && named("U8 [16384]"), "{worst:?}");
            drop(model);
            check_at_rest(runtime, vec![table], "waits");
        }
    });
}

/// What a user's policy might do: first in, first out. If it is `hostile`, it breaks every rule of the contract that
/// can be broken without hanging.
#[derive(Debug)]
struct OwnPolicy {
    resident: VecDeque<PageId>,
    hostile: bool,
}

impl Policy for OwnPolicy {
    fn name(&self) -> &'static str {
        "own"
    }
    fn accessed(&mut self, _page: PageId) {}
    fn inserted(&mut self, page: PageId) {
        self.resident.push_back(page);
    }
    fn removed(&mut self, page: PageId) {
        self.resident.retain(|other| *other != page);
    }
    fn victim(&mut self, _want: Want, take: &mut dyn FnMut(PageId) -> Take) -> Option<PageId> {
        let page = |segment, index| PageId { segment: SegmentId::new(segment), index: PageIndex::new(index) };
        if self.hostile {
            for segment in [0, 1, u32::MAX] {
                [0, 1, u32::MAX].map(|index| page(segment, index)).iter().for_each(|page| _ = take(*page));
            }
        }
        let taken = self.resident.iter().copied().find(|page| take(*page) == Take::Yes);
        if self.hostile {
            self.resident.iter().for_each(|page| _ = take(*page));
            return self.resident.len().is_multiple_of(2).then(|| page(u32::MAX, 3));
        }
        taken
    }
    fn next_fill(&mut self, _present: &dyn Fn(PageId) -> bool) -> Option<PageId> {
        let odd = self.resident.len() % 2;
        let anywhere = PageId { segment: SegmentId::new(7), index: PageIndex::new(u32::MAX) };
        self.hostile.then(|| self.resident.get(odd).copied().unwrap_or(anywhere))
    }
}

fn a_policy_of_the_users_decides_and_cannot_cost_bytes(devices: Devices) {
    watched("a policy of one's own", move || {
        for setting in Setting::tiers(devices) {
            for hostile in [false, true] {
                let file = models::synthetic(&[40_000, 33_000, 50_000, 20, 60_000]);
                let own = move || Box::new(OwnPolicy { resident: VecDeque::new(), hostile }) as Box<dyn Policy>;
                let runtime = setting.builder(None).custom_policy(own).open().unwrap();
                let model = runtime.open_model(&file.path).unwrap();
                let table = runtime.alloc(DType::U8, &[12, 16 << 10]).unwrap();
                for round in 0..3u8 {
                    for header in &model.header().tensors {
                        let guard = runtime.read(&model.tensor(&header.name).unwrap()).unwrap();
                        assert!(guard.bytes() == &file.bytes[header.offset as usize..header.end() as usize]);
                    }
                    for row in 0..12 {
                        let row = table.rows(row..row + 1).unwrap();
                        let mut guard = runtime.write(&row).unwrap();
                        assert!(guard.bytes().iter().all(|byte| *byte == round));
                        guard.fill(round + 1);
                    }
                }
                let stats = runtime.stats();
                assert!(stats.policy == "own" && stats.pager.evictions > 0, "{stats:?}");
                let tensors = vec![model.tensor("t0").unwrap(), table];
                drop(model);
                check_at_rest(runtime, tensors, &format!("{setting:?}, hostile: {hostile}"));
            }
        }
    });
}

/// Settings that nobody made follow only from the model's disk and the device budget. The bytes are the file's.
#[test]
fn settings_that_nobody_made_are_chosen_and_told() {
    alone("settings_that_nobody_made_are_chosen_and_told", || {
        let lengths = [3 << 20; 15];
        let file = models::synthetic(&lengths);
        let header = outcore::format::open(&file.path).unwrap();
        for (budget, page) in [(24, 2 << 10), (16, 1 << 10), (4, 256)] {
            let builder = Runtime::builder().for_model(&header).device_budget(Bytes::mib(budget));
            let before = builder.settings().unwrap();
            let runtime = builder.clone().open().unwrap();
            let stats = runtime.stats();
            // A disk too slow for such pages gets smaller ones.
            let slow = before.disk.is_some_and(|disk| disk.bytes_per_second < Bytes::mib(200));
            assert!(slow || stats.page_size == kib(page), "{budget}: {:?}", stats.settings);
            assert_eq!((&stats.settings, stats.page_size), (&before, before.page_size.value));
            assert_eq!(stats.lookahead, stats.settings.lookahead.value);
            // A builder measures the disk once.
            assert_eq!(builder.settings().unwrap(), before);
            let reasons =
                [&before.page_size.reason, &before.lookahead.reason, &before.depth.reason, &before.step.reason];
            assert!(reasons.iter().all(|reason| !reason.is_empty()), "{before:?}");
            // Reasons are not written anew each time that they are read.
            let again = runtime.stats().settings;
            let shared = [
                (&stats.settings.page_size.reason, &again.page_size.reason),
                (&stats.settings.lookahead.reason, &again.lookahead.reason),
                (&stats.settings.depth.reason, &again.depth.reason),
                (&stats.settings.step.reason, &again.step.reason),
            ];
            assert!(shared.iter().all(|(one, other)| Arc::ptr_eq(one, other)), "{again:?}");
            // Settings follow the budget, except the page size.
            runtime.set_device_budget(Bytes::mib(2 * budget)).unwrap();
            let after = runtime.stats();
            assert_eq!((after.page_size, after.lookahead), (stats.page_size, after.settings.lookahead.value));
            assert!(after.lookahead >= stats.lookahead, "{budget}: {:?}", after.settings);
            assert_ne!(after.settings.lookahead.reason, again.lookahead.reason);
            let model = runtime.open_parsed(header.clone()).unwrap();
            for header in &model.header().tensors {
                let tensor = model.tensor(&header.name).unwrap();
                let bytes = runtime.pin(&tensor).wait().unwrap().bytes().to_vec();
                let range = header.offset as usize..header.end() as usize;
                assert!(bytes == file.bytes[range], "{}", header.name);
            }
            drop(model);
            runtime.close().unwrap();
        }
        // Settings that the user made stay. A disk that is known is not measured.
        let known = DiskProfile::new(Bytes::gib(1), Bytes::mib(4));
        let asked = Runtime::builder().disk(known).for_model(&header).page_size(kib(4)).lookahead(Lookahead::Off);
        // Without these options the depth would be 8, and that is also what the default `depth`, 16, gives.
        for (depth, shown) in [(3, 3), (8, 8), (16, 8)] {
            let depth = QueueDepth::new(depth).unwrap();
            let options = StoreOptions::new(IoBackend::Auto);
            let options = if depth == QueueDepth::DEFAULT { options.depth(depth) } else { options.depth_ahead(depth) };
            let settings = asked.clone().store(options).settings().unwrap();
            assert_eq!(
                (settings.page_size.value, settings.lookahead.value, settings.depth.value),
                (kib(4), Bytes::ZERO, shown)
            );
            assert_eq!((settings.disk, settings.depth.reason.contains("asked")), (Some(known), true), "{settings:?}");
        }
        // If the user made all settings that depend on the disk, it is not measured.
        let depth = StoreOptions::new(IoBackend::Auto).depth_ahead(QueueDepth::new(3).unwrap());
        let asked = Runtime::builder().for_model(&header).page_size(kib(4)).lookahead(Lookahead::Off).store(depth);
        assert_eq!(asked.settings().unwrap().disk, None);
        // A model whose file has gone still has settings. Opening it is an error.
        drop(file);
        let runtime = Runtime::builder().for_model(&header).open().unwrap();
        let settings = runtime.stats().settings;
        assert!(settings.disk.is_none() && settings.depth.reason.contains("open "), "{settings:?}");
        let error = runtime.open_parsed(header).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        runtime.close().unwrap();
    });
}
