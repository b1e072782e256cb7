//! The promise: the order in which a program uses a file is learned in a few passes, and known from the start the next
//! time; and where there is no order, looking for one costs next to nothing.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use outcore::{Bytes, DType, ErrorKind, PageSize, Plan, PolicyKind, Runtime, Tensor};
use outcore_mapped::live::Touches;
use outcore_mapped::{Faulting, MapOptions, Mapped};
use outcore_testkit::harness::Rng;

use common::{PAGE, byte, folder, runtime};

fn file(folder: &Path, pages: u32) -> PathBuf {
    let path = folder.join("file");
    let bytes: Vec<u8> = (0..u64::from(pages) * PAGE).map(byte).collect();
    fs::write(&path, bytes).unwrap();
    path
}

/// Uses pages in this order. Returns how many of the uses found their page neither there nor on its way.
fn pass(runtime: &Runtime, mapped: &Mapped, order: &[u32]) -> u64 {
    let before = runtime.stats().pager.faults;
    for page in order {
        let at = u64::from(*page) * PAGE + 77;
        assert_eq!(mapped[at as usize], byte(at), "page {page}");
    }
    runtime.stats().pager.faults - before
}

/// All pages in random order, and every fifth of them once more, somewhere else.
fn shuffled(pages: u32, seed: u64) -> Vec<u32> {
    let mut random = Rng::new(seed);
    let mut order: Vec<u32> = (0..pages).chain((0..pages).step_by(5)).collect();
    for at in (1..order.len()).rev() {
        order.swap(at, random.below(at as u64 + 1) as usize);
    }
    order.dedup();
    order
}

#[test]
fn an_order_that_was_learned_is_followed_from_the_first_pass_the_next_time() {
    let folder = folder();
    let (path, notes) = (file(folder.path(), 300), folder.path().join("notes"));
    let order = shuffled(300, 1);
    let start = |options: MapOptions, passes: usize| {
        let runtime = runtime(100)?;
        let mapped = options.open(&runtime, &path).unwrap();
        let faults: Vec<u64> = (0..passes).map(|_| pass(&runtime, &mapped, &order)).collect();
        drop(mapped);
        runtime.close().unwrap();
        Some(faults)
    };
    let options = MapOptions::new().orders_in(&notes);
    let Some(first) = start(options.clone(), 6) else { return };
    let again = start(options.clone(), 2).unwrap();
    let off = start(options.keep_order(false), 1).unwrap();
    // In the third pass at the latest.
    assert!(first[0] > 300 && off[0] > 300, "{first:?} {off:?}");
    assert!(first[2..].iter().all(|faults| *faults < 17), "{first:?}");
    assert!(again.iter().all(|faults| *faults < 17), "{again:?}");
}

#[test]
fn an_order_that_is_not_followed_any_more_is_dropped_and_another_is_learned() {
    let folder = folder();
    let (path, notes) = (file(folder.path(), 300), folder.path().join("notes"));
    let start = |order: &[u32], passes: usize| {
        let runtime = runtime(100)?;
        let mapped = MapOptions::new().orders_in(&notes).open(&runtime, &path).unwrap();
        let faults: Vec<u64> = (0..passes).map(|_| pass(&runtime, &mapped, order)).collect();
        drop(mapped);
        runtime.close().unwrap();
        Some(faults)
    };
    let (before, after) = (shuffled(300, 1), shuffled(300, 2));
    if start(&before, 5).is_none() {
        return;
    }
    let other = start(&after, 6).unwrap();
    assert!(other[0] > 200 && other[3..].iter().all(|faults| *faults < 17), "{other:?}");
    let again = start(&after, 2).unwrap();
    assert!(again.iter().all(|faults| *faults < 17), "{again:?}");
    // The first is known still, and taken up when it is seen.
    let back = start(&before, 3).unwrap();
    assert!(back[0] < 160 && back[1..].iter().all(|faults| *faults < 17), "{back:?}");
}

/// A prompt is read in another order than words are written in: 921 and 543 uses of the same pages.
fn prompt_and_word() -> [Vec<u32>; 2] {
    const PAGES: u32 = 500;
    let mut prompt = shuffled(PAGES, 5);
    let again = shuffled(PAGES, 6);
    prompt.extend(again.iter().take(921 - prompt.len()));
    let mut word: Vec<u32> = (0..PAGES).collect();
    // Layers go in turn, but within a layer of ten pages another order holds, and some pages come twice.
    word.chunks_mut(10).for_each(|layer| layer.rotate_left(3));
    word.extend((0..43).map(|n| n * 11));
    assert_eq!((prompt.len(), word.len()), (921, 543));
    [prompt, word]
}

#[test]
fn prompts_and_words_have_an_order_each() {
    let folder = folder();
    let (path, notes) = (file(folder.path(), 500), folder.path().join("notes"));
    let [prompt, word] = prompt_and_word();
    let start = |passes: &[&[u32]]| {
        let runtime = runtime(160)?;
        let mapped = MapOptions::new().orders_in(&notes).open(&runtime, &path).unwrap();
        let faults: Vec<u64> = passes.iter().map(|order| pass(&runtime, &mapped, order)).collect();
        drop(mapped);
        runtime.close().unwrap();
        Some(faults)
    };
    let Some(first) = start(&[&prompt, &word, &word, &word, &prompt, &prompt, &prompt, &word, &word, &prompt]) else {
        return;
    };
    let second = start(&[&prompt, &word, &word, &prompt, &word]).unwrap();
    // The words' order is known in their second pass, and the prompt's from its second pass on, although it came but
    // once before.
    assert!(first[0] > 700 && first[2] < 180 && first[3] < 25, "{first:?}");
    assert!(first[4] < 160 && first[5..7].iter().all(|faults| *faults < 45), "{first:?}");
    // What a change of order costs until it is seen.
    assert!(first[7..].iter().all(|faults| *faults < 160), "{first:?}");
    // The next time, from the first pass on.
    assert!(second[0] < 45 && second[1..].iter().all(|faults| *faults < 160), "{second:?}");
}

fn entry(name: &str, len: u64, at: &mut u64) -> String {
    let start = *at;
    *at += len;
    format!(r#""{name}":{{"dtype":"U8","shape":[{},64],"data_offsets":[{start},{at}]}}"#, len / 64)
}

/// A dense model, whose tensors lie in the file in the order of their names. Returns the pages of a pass in the order
/// of an engine: layer by layer, in a layer attention first.
fn dense(folder: &Path, layers: u64) -> (PathBuf, Vec<u32>) {
    const PARTS: [&str; 5] = ["attn_k", "attn_norm", "attn_q", "ffn_down", "ffn_up"];
    let mut at = 0;
    let mut entries = Vec::new();
    for layer in 0..layers {
        entries.extend(PARTS.map(|part| entry(&format!("blk.{layer}.{part}.weight"), 2 * PAGE + 64, &mut at)));
    }
    let header = format!("{{{}}}", entries.join(","));
    let data = 8 + header.len() as u64;
    let mut bytes: Vec<u8> = (0..data + at).map(byte).collect();
    bytes[..8].copy_from_slice(&(header.len() as u64).to_le_bytes());
    bytes[8..8 + header.len()].copy_from_slice(header.as_bytes());
    let path = folder.join("model.safetensors");
    fs::write(&path, bytes).unwrap();
    let of_part = |layer: u64, part: &str| {
        let nth = PARTS.iter().position(|known| *known == part).unwrap() as u64;
        let start = data + (layer * PARTS.len() as u64 + nth) * (2 * PAGE + 64);
        (start / PAGE) as u32..(start + 2 * PAGE + 64).div_ceil(PAGE) as u32
    };
    let parts = ["attn_norm", "attn_q", "attn_k", "ffn_up", "ffn_down"];
    let mut order: Vec<u32> =
        (0..layers).flat_map(|layer| parts.into_iter().flat_map(move |part| of_part(layer, part))).collect();
    order.dedup();
    // The header itself is not a part of the pass, and its bytes are others.
    order.retain(|page| u64::from(*page) * PAGE + 77 >= data);
    (path, order)
}

#[test]
fn a_header_gives_the_order_from_the_first_pass_on() {
    let folder = folder();
    let (path, order) = dense(folder.path(), 30);
    let Some(runtime) = runtime(120) else { return };
    let mapped = MapOptions::new().keep_order(false).open(&runtime, &path).unwrap();
    let faults: Vec<u64> = (0..4).map(|_| pass(&runtime, &mapped, &order)).collect();
    assert!(faults.iter().all(|faults| *faults < 21), "of {} uses a pass: {faults:?}", order.len());
    drop(mapped);
    runtime.close().unwrap();
}

#[test]
fn what_a_program_announces_is_touched_without_a_fault_and_all_else_counts() {
    let folder = folder();
    let (path, order) = dense(folder.path(), 30);
    let Some(runtime) = runtime(120) else { return };
    let walker = runtime.walker().unwrap();
    // Orders would be kept there.
    let notes = folder.path().join("notes");
    let mapped = MapOptions::new().orders_in(&notes).announced(&walker).open(&runtime, &path).unwrap();
    let bytes = |page: u32| {
        let start = u64::from(page) * PAGE;
        mapped.tensor().rows(start..(start + PAGE).min(mapped.len() as u64)).unwrap()
    };
    // Backwards, which no header says.
    let order: Vec<u32> = order.into_iter().rev().collect();
    let pages: Vec<Tensor> = order.iter().map(|page| bytes(*page)).collect();
    walker.plan(Plan::Cycle(&pages));
    let mut faults = Vec::new();
    for _ in 0..4 {
        let before = runtime.stats().pager.faults;
        for (page, tensor) in order.iter().zip(&pages) {
            let _pinned = runtime.pin(tensor).of(&walker).wait().unwrap();
            let at = u64::from(*page) * PAGE + 77;
            assert_eq!(mapped[at as usize], byte(at), "page {page}");
        }
        faults.push(runtime.stats().pager.faults - before);
    }
    assert_eq!(mapped.touches(), Touches::default());
    assert!(faults.iter().all(|faults| *faults < 21), "of {} uses a pass: {faults:?}", order.len());
    // An access that nobody announced: the page has left for others.
    runtime.evict(&pages[5]);
    for tensor in order.iter().zip(&pages).filter(|(page, _)| **page != order[5]).map(|(_, tensor)| tensor) {
        let _pinned = runtime.pin(tensor).of(&walker).wait().unwrap();
    }
    let at = u64::from(order[5]) * PAGE + 77;
    for _ in 0..3 {
        assert_eq!(mapped[at as usize], byte(at));
    }
    let touches = mapped.touches();
    assert_eq!((touches.count, touches.last.len()), (1, 1));
    assert_eq!(touches.last[0] / PAGE, u64::from(order[5]));
    // What is remembered is bounded.
    while mapped.touches().count < 300 {
        pass(&runtime, &mapped, &order);
    }
    assert_eq!(mapped.touches().last.len(), 256);
    drop(mapped);
    assert!(!notes.exists());
    drop(walker);
    runtime.close().unwrap();
}

#[test]
fn a_view_for_other_libraries_has_the_mappings_address_and_keeps_it() {
    let folder = folder();
    let path = file(folder.path(), 20);
    let Some(runtime) = runtime(8) else { return };
    let mapped = Arc::new(Mapped::open(&runtime, &path).unwrap());
    let view = mapped.dlpack(96..96 + 4 * PAGE, DType::F32, &[4, PAGE / 4]).unwrap();
    let tensor = view.tensor();
    assert_eq!(tensor.data.addr(), mapped.as_ptr().addr() + 96);
    assert_eq!((tensor.ndim, tensor.dtype.bits, tensor.byte_offset), (2, 32, 0));
    for (range, dtype, shape) in [
        (0..8, DType::F32, vec![3]),
        (0..20 * PAGE + 1, DType::U8, vec![20 * PAGE + 1]),
        (20 * PAGE..20 * PAGE + 8, DType::U8, vec![8]),
        (0..8, DType::U8, vec![u64::MAX, 2, 8]),
        (2..10, DType::F32, vec![2]),
    ] {
        let refused = mapped.dlpack(range.clone(), dtype, &shape).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidArgument, "{range:?}: {refused}");
    }
    let refused = mapped.dlpack(0..34, DType::Q8_0, &[32]).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
    let kept = Arc::downgrade(&mapped);
    drop(mapped);
    assert!(kept.upgrade().is_some());
    drop(view);
    assert!(kept.upgrade().is_none());
    runtime.close().unwrap();
}

/// Bytes of all page tables of this process.
fn tables_of_the_process() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPTE:")).unwrap();
    line.trim().strip_suffix("kB").unwrap().trim().parse::<u64>().unwrap() << 10
}

/// 100 GB have 48,000 page tables, of 190 MiB.
#[test]
fn a_walk_over_a_large_file_leaves_no_page_tables_behind() {
    const PAGE: u64 = 64 << 10;
    const LEN: u64 = 100_000_000_000;
    let Ok(device) = Faulting::new() else { return eprintln!("SKIPPED: no userfaultfd") };
    let folder = folder();
    let path = folder.path().join("sparse");
    fs::File::create(&path).unwrap().set_len(LEN).unwrap();
    let builder = Runtime::builder().device(device).page_size(PageSize::new(Bytes::new(PAGE)).unwrap());
    let runtime = builder.device_budget(Bytes::new(64 * PAGE)).scratch_dir(folder.path()).open().unwrap();
    let before = tables_of_the_process();
    let mapped = MapOptions::new().keep_order(false).open(&runtime, &path).unwrap();
    // One page of each slot, forwards, then some back and forth.
    let slots = LEN / (2 << 20);
    let mut random = Rng::new(3);
    let far = (0..4000).map(|_| random.below(slots));
    let mut most = 0;
    for (nth, slot) in (0..slots).chain(far).enumerate() {
        assert_eq!(mapped[(slot * (2 << 20) + 99) as usize], 0);
        if nth % 1000 == 999 {
            most = most.max(tables_of_the_process() - before);
        }
    }
    let counted = runtime.stats().page_tables;
    // On kernels that do not free them, they are counted.
    let least = Bytes::new(most.min(4 << 20));
    assert!(most < 16 << 20 || counted > Bytes::mib(150), "{} at most, {counted} counted", Bytes::new(most));
    assert!(counted + Bytes::kib(512) >= least, "{} at most, {counted} counted", Bytes::new(most));
    drop(mapped);
    runtime.close().unwrap();
}

/// Uses of pages in an order that is none.
fn touch(mapped: &Mapped, pages: impl Iterator<Item = u32>) {
    for page in pages {
        let at = u64::from(page) * PAGE + 77;
        assert_eq!(mapped[at as usize], byte(at), "page {page}");
    }
}

#[test]
fn pages_that_are_all_there_are_used_without_a_fault_in_the_end() {
    const PAGES: u32 = 200;
    let folder = folder();
    let path = file(folder.path(), PAGES);
    let Some(runtime) = runtime(220) else { return };
    let mapped = MapOptions::new().keep_order(false).open(&runtime, &path).unwrap();
    let mut random = Rng::new(5);
    let mut some = |count: usize| {
        let pages: Vec<u32> = (0..count).map(|_| random.below(u64::from(PAGES)) as u32).collect();
        touch(&mapped, pages.into_iter());
        runtime.stats().pager.uses
    };
    // An order is looked for, and then each page is shown once more.
    let learned = some(8000);
    // A use is counted after its page was shown, so the last one may be counted late.
    let seen = some(100_000) - learned;
    assert!(seen <= 1, "{seen} uses were seen, each of which takes a fault");
    drop(mapped);
    runtime.close().unwrap();
}

/// Random pages, all alike; some much more often than others; and a few that are used all the time beside a walk over
/// all.
fn patterns(pages: u32, uses: usize) -> [(&'static str, Vec<u32>); 3] {
    let mut random = Rng::new(11);
    let mut below = move |count: u32| random.below(u64::from(count)) as u32;
    let random_ones = (0..uses).map(|_| below(pages)).collect();
    let weights: Vec<f64> = (1..=pages).map(|rank| f64::from(rank).powf(-0.9)).collect();
    let all: f64 = weights.iter().sum();
    let mut sums = Vec::new();
    weights.iter().fold(0.0, |sum, weight| {
        sums.push((sum + weight) / all);
        sum + weight
    });
    let zipf = (0..uses).map(|_| {
        let at = f64::from(below(1 << 30)) / f64::from(1 << 30);
        // Spread over the file.
        (sums.partition_point(|sum| *sum < at) as u32 * 7919) % pages
    });
    let zipf = zipf.collect();
    let hot = pages / 8;
    let scan = (0..uses).map(|nth| if nth % 2 == 0 { below(hot) } else { (nth / 2) as u32 % pages }).collect();
    [("random", random_ones), ("zipf", zipf), ("scan and hot", scan)]
}

#[test]
#[ignore = "a measurement"]
fn hits_without_an_order() {
    const PAGES: u32 = 1000;
    let folder = folder();
    let path = file(folder.path(), PAGES);
    for (name, pages) in patterns(PAGES, 60_000) {
        let Some(runtime) = runtime(250) else { return };
        let mapped = MapOptions::new().keep_order(false).open(&runtime, &path).unwrap();
        touch(&mapped, pages[..20_000].iter().copied());
        let (before, start) = (runtime.stats(), std::time::Instant::now());
        touch(&mapped, pages[20_000..].iter().copied());
        let (after, took) = (runtime.stats(), start.elapsed());
        let read = (after.traffic.disk_read.get() - before.traffic.disk_read.get()) / PAGE;
        let seen = after.pager.uses - before.pager.uses;
        println!("{name}: {:.4} hits, {seen} uses seen, {took:?}", 1.0 - read as f64 / 40_000.0);
        drop(mapped);
        runtime.close().unwrap();
    }
}

#[test]
#[ignore = "a measurement"]
fn opening_a_large_file() {
    let Ok(device) = Faulting::new() else { return };
    let folder = folder();
    let path = folder.path().join("sparse");
    fs::File::create(&path).unwrap().set_len(100_000_000_000).unwrap();
    let builder = Runtime::builder().device(device).page_size(PageSize::new(Bytes::kib(64)).unwrap());
    let builder = builder.device_budget(Bytes::mib(4)).policy(PolicyKind::Model);
    let runtime = builder.scratch_dir(folder.path()).open().unwrap();
    for _ in 0..7 {
        let start = std::time::Instant::now();
        let mapped = MapOptions::new().keep_order(false).open(&runtime, &path).unwrap();
        let opened = start.elapsed();
        drop(mapped);
        println!("{opened:?} to open, {:?} to drop", start.elapsed() - opened);
    }
    runtime.close().unwrap();
}
