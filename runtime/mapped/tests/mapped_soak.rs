//! The promise of mapped files, under random work: sixteen threads read one or two mappings in orders that are bad for
//! some policy, in budgets from four frames to all pages, while mappings are dropped and mapped anew and memory is
//! given back. Some mappings are private: of these each thread writes bytes of its own. A few rounds in the normal run,
//! and as long as one likes with `make soak`.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use outcore::{Bytes, Error, PageSize, PolicyKind, Runtime};
use outcore_mapped::{Faulting, Mapped, MappedMut, Mechanism};
use outcore_testkit::harness::replay::{Case, first_seed, replayed};
use outcore_testkit::harness::{Migrates, Rng, progress, tell_of, until, watched};
use parking_lot::RwLock;

const THREADS: u64 = 16;
const LAYERS: u64 = 3;
const EXPERTS: u64 = 16;
/// Bytes of one matrix of one expert: a few small pages and a bit, or a part of a large one.
const PIECE: u64 = (200 << 10) + 4096;
const DENSE: u64 = (1 << 20) + 192;

/// A file, and all its bytes.
struct Known {
    path: PathBuf,
    bytes: Vec<u8>,
    has_experts: bool,
}

impl Known {
    /// A safetensors file of these tensors of bytes, whose contents have no pattern.
    fn model(folder: &Path, name: &str, tensors: &[(String, Vec<u64>)]) -> Self {
        let mut at = 0;
        let entry = |(name, shape): &(String, Vec<u64>)| {
            let start = at;
            at += shape.iter().product::<u64>();
            format!(r#""{name}":{{"dtype":"U8","shape":{shape:?},"data_offsets":[{start},{at}]}}"#)
        };
        let header = format!("{{{}}}", tensors.iter().map(entry).collect::<Vec<_>>().join(","));
        let first = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
        Self::bytes(folder, name, first, at)
    }

    fn bytes(folder: &Path, name: &str, first: Vec<u8>, more: u64) -> Self {
        let (path, mut random) = (folder.join(name), Rng::new(more));
        let mut bytes = first;
        let len = bytes.len() + more as usize;
        while bytes.len() < len {
            bytes.extend_from_slice(&random.next().to_le_bytes());
        }
        bytes.truncate(len);
        fs::write(&path, &bytes).unwrap();
        Self { path, bytes, has_experts: name == "mixture" }
    }

    /// Bytes without a header, a model whose header gives an order, and a mixture of experts.
    fn all(folder: &Path) -> Vec<Self> {
        let dense = (0..16).map(|layer| (format!("blk.{layer}.attn_q.weight"), vec![DENSE / 64, 64]));
        let mixture = (0..LAYERS).flat_map(|layer| {
            let of = |name: &str, shape| (format!("blk.{layer}.{name}.weight"), shape);
            let experts = vec![EXPERTS, PIECE / 64, 64];
            [of("attn_q", vec![1024, 64]), of("ffn_up_exps", experts.clone()), of("ffn_down_exps", experts)]
        });
        vec![
            Self::bytes(folder, "bytes", Vec::new(), (17 << 20) + 77),
            Self::model(folder, "dense", &dense.collect::<Vec<_>>()),
            Self::model(folder, "mixture", &mixture.collect::<Vec<_>>()),
        ]
    }

    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Where a matrix of an expert is.
    fn piece(&self, layer: u64, expert: u64, matrix: u64) -> u64 {
        let of_layer = (64 << 10) + 2 * EXPERTS * PIECE;
        self.len() - (LAYERS - layer) * of_layer + (64 << 10) + (matrix * EXPERTS + expert) * PIECE
    }
}

/// How a thread goes through a file.
#[derive(Clone, Copy, Debug)]
enum Way {
    Random,
    /// Page by page, over and over.
    Cycle,
    Backwards,
    /// One page more than there are frames, in a cycle: the least recently used page is always the next.
    JustTooMuch,
    /// Across the boundary of two pages.
    Across,
    /// Where all threads of this way are.
    Together,
    Experts,
    /// By pins of the same pages.
    Pins,
}

const WAYS: [Way; 8] =
    [Way::Random, Way::Cycle, Way::Backwards, Way::JustTooMuch, Way::Across, Way::Together, Way::Experts, Way::Pins];

#[derive(Clone, Debug)]
struct Plan {
    mechanism: Mechanism,
    page: u64,
    frames: u64,
    policy: PolicyKind,
    /// Which files are mapped; the same one twice is two mappings of it.
    files: Vec<usize>,
    /// Which of these mappings are private.
    private: Vec<bool>,
    told: bool,
    ways: Vec<Way>,
    drops: bool,
    trims: bool,
    /// Whether the kernel gives pages other memory meanwhile.
    migrates: bool,
}

impl Plan {
    fn random(known: &[Known], rng: &mut Rng) -> Self {
        let page = *rng.pick(&[64 << 10, 128 << 10, 512 << 10, 2 << 20]);
        let files: Vec<usize> = (0..1 + rng.below(2)).map(|_| rng.below(known.len() as u64) as usize).collect();
        let all: u64 = files.iter().map(|file| known[*file].len().div_ceil(page)).sum();
        let frames = match rng.below(4) {
            0 => 4,
            1 => 4 + rng.below(8),
            2 => 4 + rng.below(all),
            _ => all + 4,
        };
        let policy = *rng.pick(&[PolicyKind::Plan, PolicyKind::Model, PolicyKind::Lru]);
        // In some rounds all threads do the same, in others each what it likes.
        let one = *rng.pick(&WAYS);
        let alike = rng.one_in(3);
        let ways = (0..THREADS).map(|_| if alike { one } else { *rng.pick(&WAYS) }).collect();
        let (told, drops, trims) = (rng.one_in(2), rng.one_in(2), rng.one_in(4));
        let (mechanism, private) = (Mechanism::Move, vec![false; files.len()]);
        Self { mechanism, page, frames, policy, files, private, told, ways, drops, trims, migrates: false }
    }

    /// With private mappings, where pages are copied, and where they are migrated. Apart, so that seeds of earlier
    /// failures are the same rounds.
    fn of_every_kind(self, rng: &mut Rng) -> Self {
        let mechanism = *rng.pick(&[Mechanism::Move, Mechanism::Copy]);
        let private = self.files.iter().map(|_| rng.one_in(2)).collect();
        Self { mechanism, private, migrates: rng.one_in(3), ..self }
    }
}

enum Mapping {
    Shared(Mapped),
    Private(MappedMut, *mut u8),
}

// SAFETY: the pointer is that of the mapping, where each thread reads and writes bytes of its own.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn failure(&self) -> Option<Error> {
        match self {
            Self::Shared(mapped) => mapped.failure(),
            Self::Private(mapped, _) => mapped.failure(),
        }
    }
}

/// Bytes of a private mapping that one thread has.
const STRIPE: usize = 256;

/// A mapping that may be dropped between two reads.
struct Slot<'a> {
    known: &'a Known,
    private: bool,
    mapped: RwLock<Option<Mapping>>,
    /// Of a private mapping, what each stripe was filled with, plus one; 0 is the file's bytes.
    written: Vec<AtomicU64>,
}

impl<'a> Slot<'a> {
    fn new(known: &'a Known, private: bool) -> Self {
        let stripes = if private { known.bytes.len().div_ceil(STRIPE) } else { 0 };
        let written = (0..stripes).map(|_| AtomicU64::new(0)).collect();
        Self { known, private, mapped: RwLock::new(None), written }
    }

    fn map_anew(&self, runtime: &Runtime) {
        let mut mapped = self.mapped.write();
        if let Some(before) = mapped.take() {
            assert!(before.failure().is_none(), "{:?}", before.failure());
        }
        *mapped = Some(if self.private {
            self.written.iter().for_each(|stripe| stripe.store(0, Ordering::Relaxed));
            let mut mapped = MappedMut::open(runtime, &self.known.path).unwrap();
            let start = mapped.as_mut_ptr();
            Mapping::Private(mapped, start)
        } else {
            Mapping::Shared(Mapped::open(runtime, &self.known.path).unwrap())
        });
    }

    fn with_shared(&self, run: impl FnOnce(&Mapped)) {
        if let Some(Mapping::Shared(mapped)) = self.mapped.read().as_ref() {
            run(mapped);
        }
    }

    /// Thread `n` looks at these bytes, and of a private mapping writes some of its own.
    fn compare(&self, n: u64, start: u64, len: u64, what: &dyn Fn() -> String) {
        let (start, end) = (start as usize, (start + len).min(self.known.len()) as usize);
        let mapped = self.mapped.read();
        let first = match mapped.as_ref().unwrap() {
            Mapping::Shared(mapped) => {
                assert!(mapped[start..end] == self.known.bytes[start..end], "{start}..{end}, {}", what());
                return;
            }
            Mapping::Private(_, first) => *first,
        };
        let mine = |stripe: &usize| *stripe as u64 % THREADS == n;
        for stripe in (start / STRIPE..=(end - 1) / STRIPE + THREADS as usize).filter(mine) {
            let (from, to) = (stripe * STRIPE, ((stripe + 1) * STRIPE).min(self.known.bytes.len()));
            if from >= to {
                return;
            }
            // SAFETY: within the mapping, which is not dropped meanwhile; nobody else touches this stripe.
            let bytes = unsafe { std::slice::from_raw_parts_mut(first.add(from), to - from) };
            let filled = self.written[stripe].load(Ordering::Relaxed);
            let right = match filled {
                0 => *bytes == self.known.bytes[from..to],
                filled => bytes.iter().all(|byte| *byte == (filled - 1) as u8),
            };
            assert!(right, "{from}..{to}, filled with {filled}, {}", what());
            if (filled + stripe as u64).is_multiple_of(3) || filled == 0 {
                let next = filled % 255 + 1 + n % 2;
                bytes.fill((next - 1) as u8);
                self.written[stripe].store(next, Ordering::Relaxed);
            }
        }
    }
}

/// One thread's reads.
fn go(plan: &Plan, runtime: &Runtime, slots: &[Slot], n: u64, seed: u64, reads: u64, common: &AtomicU64) {
    let (way, mut rng) = (plan.ways[n as usize], Rng::new(seed + n));
    let mut at_page = rng.next();
    for read in 0..reads {
        let slot = rng.pick(slots);
        let (len, page) = (slot.known.len(), plan.page);
        let pages = len.div_ceil(page);
        let short = 1 + rng.below(300);
        at_page = at_page.wrapping_add(1);
        let what = || format!("read {read} of thread {n}, {way:?}");
        let within = rng.below(page);
        match way {
            Way::Random => slot.compare(n, rng.below(len), short, &what),
            Way::Cycle => slot.compare(n, (at_page % pages * page + within).min(len - 1), short, &what),
            Way::Backwards => {
                slot.compare(n, ((pages - 1 - at_page % pages) * page + within).min(len - 1), short, &what)
            }
            Way::JustTooMuch => {
                let first = at_page % (plan.frames + 1).min(pages);
                slot.compare(n, (first * page + within).min(len - 1), short, &what);
            }
            Way::Across => {
                let boundary = (1 + rng.below(pages - 1)) * page;
                slot.compare(n, boundary - rng.below(300) - 1, 300 + short, &what);
            }
            Way::Together => {
                let place = common.fetch_add(1, Ordering::Relaxed) / THREADS * (7 * page + 13) % len;
                slot.compare(n, place, short, &what);
            }
            Way::Experts if slot.known.has_experts && !slot.private => {
                let (layer, expert) = (rng.below(LAYERS), rng.below(EXPERTS));
                let other = rng.below(EXPERTS / 4);
                if plan.told {
                    let experts = [expert as u32, other as u32];
                    slot.with_shared(|mapped| mapped.expert_hint(layer as u32, &experts).unwrap());
                }
                for (expert, matrix) in [(expert, 0), (expert, 1), (other, 0), (other, 1)] {
                    slot.compare(n, slot.known.piece(layer, expert, matrix), PIECE, &what);
                }
            }
            Way::Experts => slot.compare(n, rng.below(len), page, &what),
            Way::Pins if slot.private => slot.compare(n, rng.below(len), page, &what),
            Way::Pins => {
                let start = rng.below(pages) * page;
                let end = (start + page).min(len);
                slot.with_shared(|mapped| {
                    let rows = mapped.tensor().rows(start..end).unwrap();
                    let guard = runtime.pin(&rows).wait().unwrap();
                    assert!(guard.bytes() == &slot.known.bytes[start as usize..end as usize], "{}", what());
                });
            }
        }
        if plan.drops && n < 2 && rng.one_in(40) {
            rng.pick(slots).map_anew(runtime);
        }
        if plan.trims && n == 2 && rng.one_in(20) {
            runtime.trim(Bytes::new(plan.page * rng.below(plan.frames)));
        }
        progress();
    }
}

fn round(known: &[Known], plan: &Plan, seed: u64, reads: u64) {
    let runtime = Runtime::builder()
        .device(Faulting::with_mechanism(plan.mechanism).unwrap())
        .page_size(PageSize::new(Bytes::new(plan.page)).unwrap())
        .device_budget(Bytes::new(plan.frames * plan.page))
        .policy(plan.policy)
        .scratch_dir(env!("CARGO_TARGET_TMPDIR"))
        .open()
        .unwrap();
    let told = runtime.clone();
    let _tells = tell_of(move || format!("{:?}\n{:?}", told.observe().waiting(), told.stats()));
    let slots: Vec<Slot> = plan
        .files
        .iter()
        .zip(&plan.private)
        .map(|(file, private)| Slot::new(&known[*file], *private))
        .inspect(|slot| slot.map_anew(&runtime))
        .collect();
    let common = AtomicU64::new(0);
    let _migrates = plan.migrates.then(Migrates::start);
    thread::scope(|scope| {
        for n in 0..THREADS {
            let (runtime, slots, common) = (&runtime, &slots, &common);
            scope.spawn(move || go(plan, runtime, slots, n, seed, reads, common));
        }
    });
    let stats = runtime.stats();
    assert!(stats.traffic.peak_device <= Bytes::new(plan.frames * plan.page), "{stats:?}");
    for slot in slots {
        let mapped = slot.mapped.into_inner().unwrap();
        assert!(mapped.failure().is_none(), "{:?}", mapped.failure());
    }
    // Reads ahead that are still going on have theirs until they end.
    until("giving the frames back", || runtime.stats().device_frames.used == 0);
    runtime.close().unwrap();
}

/// Which rounds there are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kinds {
    /// Pages are moved, and files are read.
    Read,
    /// All.
    Every,
}

/// Rounds of these seeds; of the one that is to be replayed, if there is one.
fn rounds(name: &'static str, reads: u64, kinds: Kinds, seeds: impl Iterator<Item = u64>) {
    if let Err(error) = Faulting::with_mechanism(Mechanism::Move) {
        eprintln!("SKIPPED {name}: {error}");
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let known = Arc::new(Known::all(folder.path()));
    let mut done = 0;
    let once = replayed().map_or(usize::MAX, |_| 1);
    for seed in seeds.map(|seed| replayed().unwrap_or(seed)).take(once) {
        let _case = Case::of(name, seed);
        let mut rng = Rng::new(seed);
        let plan = Plan::random(&known, &mut rng);
        let plan = if kinds == Kinds::Every { plan.of_every_kind(&mut Rng::new(!seed)) } else { plan };
        eprintln!("round {done}, seed {seed}: {plan:?}");
        let known = known.clone();
        watched("a round", move || round(&known, &plan, rng.next(), reads));
        done += 1;
    }
    eprintln!("{name}: {done} rounds");
}

fn new_seeds() -> impl Iterator<Item = u64> {
    let mut seeds = Rng::new(first_seed());
    std::iter::repeat_with(move || seeds.next())
}

#[test]
fn mapped_files_are_the_files_in_any_order_and_budget() {
    rounds("mapped_files_are_the_files_in_any_order_and_budget", 60, Kinds::Every, new_seeds().take(16));
}

/// Sixteen threads that each need two pages at once, in eleven frames.
#[test]
fn regression_threads_that_need_two_pages_take_turns() {
    rounds(
        "regression_threads_that_need_two_pages_take_turns",
        60,
        Kinds::Read,
        [11_738_222_534_831_858_367].into_iter(),
    );
}

/// A page that was hidden while a guard had it: its holder waited behind those who waited for the guard's end.
#[test]
fn regression_who_holds_a_guard_of_a_hidden_page_waits_for_nobody() {
    let seeds = [7_039_979_321_916_505_331, 2_773_258_633_253_168_509].into_iter();
    rounds("regression_who_holds_a_guard_of_a_hidden_page_waits_for_nobody", 400, Kinds::Read, seeds);
}

/// Experts that were told of, and the pages of a turn, held all of five frames.
#[test]
fn regression_what_is_kept_leaves_a_frame() {
    rounds("regression_what_is_kept_leaves_a_frame", 60, Kinds::Read, [8_221_405_913_801_235_006].into_iter());
}

#[test]
#[ignore = "takes OUTCORE_SOAK_SECONDS (1200); make soak runs it"]
fn soak_of_mapped_files() {
    let seconds = std::env::var("OUTCORE_SOAK_SECONDS").map_or(1200, |text| text.parse().unwrap());
    let end = Instant::now() + Duration::from_secs(seconds);
    rounds("soak_of_mapped_files", 400, Kinds::Every, new_seeds().take_while(|_| Instant::now() < end));
}
