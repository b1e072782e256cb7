//! The promise: a simulated machine gives the same result for the same seed, bit for bit. Its times are what the
//! model's arithmetic says. The pager's invariants hold at every event, whatever the machine, the workload and the
//! failures.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod swarm;

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use harness::Rng;
use outcore::device::LinkModel;
use outcore::policy::SegmentClass;
use outcore::stats::WaitCause;
use outcore::store::QueueDepth;
use outcore::{Bytes, DType, ErrorKind, Lookahead, PageSize, PolicyKind, Tier, format};
use outcore_lab::residency::Residency;
use outcore_lab::sim::{
    ComputeModel, DiskModel, Even, Guest, LaneRecord, MachineModel, Part, Settings, Share, Simulated, Span, Step,
    Trouble, TroubleKind, When, Workload, simulate,
};
use outcore_pager::Backing;
use outcore_testkit::{harness, models};
use swarm::{bits, random_case, stalled, swarm};

const PAGE: u64 = 1 << 20;
/// At this rate a page of the even model below takes a millisecond.
const RATE: Bytes = Bytes::new(1_048_576_000);

fn count(n: u32) -> NonZeroU32 {
    NonZeroU32::new(n).unwrap()
}

/// A page takes 1 ms on the link and a tenth of that on the disk; nothing has a latency.
fn machine() -> MachineModel {
    MachineModel {
        name: "test".to_owned(),
        devices: NonZeroU32::MIN,
        device_memory: Bytes::gib(16),
        host_memory: Bytes::gib(16),
        unified_memory: false,
        link: Some(LinkModel::new(RATE, Duration::ZERO, true).unwrap()),
        disk: DiskModel {
            read: Bytes::new(10 * RATE.get()),
            write: Bytes::new(10 * RATE.get()),
            latency: Duration::ZERO,
            depth: QueueDepth::DEFAULT,
        },
        compute: ComputeModel { bandwidth: Bytes::new(1 << 50), flops: None, step: Duration::ZERO },
        jitter: 0.0,
    }
}

/// A tensor of one page in each of `n` layers.
fn pages(n: u32) -> Workload {
    Workload::even(Even { params: u64::from(n) * PAGE, dtype: DType::U8, layers: n, experts: None }).unwrap()
}

fn settings(frames: u64) -> Settings {
    Settings {
        page_size: PageSize::new(Bytes::new(PAGE)).unwrap(),
        passes: count(6),
        checked: true,
        ..Settings::new(Bytes::new(frames * PAGE), Bytes::ZERO)
    }
}

fn by_cause(done: &Simulated, cause: WaitCause, tier: Tier) -> Duration {
    let stall = done.stalls.iter().find(|stall| stall.cause == cause).unwrap();
    stall.tiers.iter().find(|stalls| stalls.tier == tier).unwrap().time
}

#[test]
fn swarm_of_machines_workloads_and_failures() {
    const CASES: u64 = 300;
    let ends = swarm("swarm_of_machines_workloads_and_failures", |at| at < CASES);
    eprintln!("of {CASES} cases: {ends:?}");
    assert!(ends.well >= CASES / 4, "most cases are of no use: {ends:?}");
    assert!(ends.well_in_trouble >= CASES / 8 && ends.devices_lost > 0, "trouble is rare: {ends:?}");
}

#[test]
#[ignore = "takes OUTCORE_SOAK_SECONDS (1200); make soak runs it"]
fn soak_swarm() {
    let seconds = std::env::var("OUTCORE_SOAK_SECONDS").map_or(1200, |text| text.parse().unwrap());
    let end = Instant::now() + Duration::from_secs(seconds);
    eprintln!("{:?}", swarm("soak_swarm", |_| Instant::now() < end));
}

#[test]
fn the_same_seed_gives_the_same_result_bit_for_bit() {
    for at in 0..40 {
        let mut case = random_case(&mut Rng::new(at));
        case.settings.checked = false;
        let once = || case.run();
        let (first, second) = (once(), once());
        assert_eq!(bits(&first), bits(&second), "case {at}");
    }
    let machine = MachineModel::named("dgx-h200").unwrap();
    let model = Even { params: 2_000_000_000, dtype: DType::BF16, layers: 16, experts: Some((8, 2)) };
    let workload = Workload::even(model).unwrap();
    let with = |seed| {
        let settings = Settings { seed, ..Settings::new(Bytes::mib(128), Bytes::mib(512)) };
        bits(&simulate(&workload, &machine, &settings).unwrap())
    };
    assert_eq!(with(1), with(1));
    assert_ne!(with(1), with(2), "the seed makes a difference");
}

#[test]
fn recording_changes_nothing_and_adds_up() {
    let mut looked = 0;
    for at in 0..60 {
        let mut case = random_case(&mut Rng::new(at));
        case.settings.checked = false;
        let without = case.run();
        case.settings.timeline = true;
        let with = || case.run();
        assert_eq!(bits(&with()), bits(&with()), "case {at}");
        let Ok(mut done) = with() else {
            assert_eq!(bits(&with()), bits(&without), "case {at}");
            continue;
        };
        let recorded = done.recorded.take().unwrap();
        assert_eq!(bits(&done), bits(&without.unwrap()), "case {at}");
        let busy = |name: &str| recorded.lanes.iter().find(|lane| lane.name == name).unwrap().busy();
        assert_eq!((busy("disk read"), busy("disk write")), (done.disk_read.busy, done.disk_written.busy), "case {at}");
        for lane in &recorded.lanes {
            assert!(lane.spans.len() <= LaneRecord::SPANS_MAX);
            assert!(
                lane.spans.iter().all(|span| span.start <= span.end && span.end <= done.time),
                "case {at}: {lane:?}"
            );
            assert_eq!(
                lane.spans.iter().map(|span| span.busy).sum::<Duration>(),
                lane.busy(),
                "case {at}: {}",
                lane.name
            );
        }
        let samples = &recorded.residency.samples;
        assert!(samples.len() <= Residency::SAMPLES_MAX && samples.is_sorted_by(|a, b| a.ts <= b.ts));
        assert!(recorded.peak_frames <= done.frames && recorded.peak_host_frames <= done.host_frames);
        assert!(recorded.optimum.actual_hits <= recorded.optimum.hits, "case {at}: {recorded:?}");
        if case.machine.devices == NonZeroU32::MIN {
            assert_eq!((busy("compute"), busy("stalled")), (done.compute.busy, stalled(&done)), "case {at}");
            assert_eq!((busy("link up"), busy("link down")), (done.link_in.busy, done.link_out.busy), "case {at}");
            assert_eq!(
                (recorded.optimum.uses, recorded.optimum.actual_hits),
                (done.pager.uses, done.pager.hits),
                "case {at}"
            );
            looked += samples.len();
        }
    }
    assert!(looked > 100, "{looked}");
}

#[test]
fn a_record_stays_small_however_long_the_run_is() {
    let of = |passes, timeline| {
        let settings = Settings { passes: count(passes), checked: false, timeline, ..settings(40) };
        simulate(&pages(100), &machine(), &settings).unwrap()
    };
    let recorded = of(1000, true).recorded.unwrap();
    assert!(recorded.lanes.iter().all(|lane| lane.spans.len() <= LaneRecord::SPANS_MAX));
    assert!(recorded.lanes.iter().any(|lane| lane.count() > 50_000));
    assert_eq!(recorded.residency.rows(), 100);
    assert!((200..=Residency::SAMPLES_MAX).contains(&recorded.residency.samples.len()));
    // For nearly all of the time 40 frames of 100 pages are in use, and a few of them are being filled.
    let mean = recorded.residency.mean(|sample| &sample.device);
    assert!((0.3..=0.4).contains(&mean) && recorded.peak_frames == 40, "{mean}");
    // On a cycle, MIN hits as often as all frames but one allow.
    assert_eq!(recorded.optimum.uses, 100_000);
    assert!((0.38..0.4).contains(&recorded.optimum.ratio()), "{:?}", recorded.optimum);
    assert!(of(2, false).recorded.is_none());
}

#[test]
fn tails_are_what_last_pages_have_beyond_their_files() {
    let step = Step { spans: vec![Span { segment: 0, offset: 0, len: 10, row: 1 }], share: Share::All, writes: false };
    let workload = Workload::new(vec![(Backing::File, PAGE + 10), (Backing::File, PAGE)], vec![step]).unwrap();
    let tails = |devices| {
        let machine = MachineModel { devices: count(devices), ..machine() };
        simulate(&workload, &machine, &settings(8)).unwrap().tails.get()
    };
    assert_eq!(tails(1), PAGE - 10);
    // Half of each segment on each device.
    assert_eq!(tails(2), 2 * (PAGE / 2 - 5) + 2 * (PAGE / 2));
}

#[test]
fn what_is_resident_is_computed_on_and_nothing_else() {
    let mut machine = machine();
    machine.compute = ComputeModel { bandwidth: RATE, flops: None, step: Duration::from_micros(7) };
    let done = simulate(&pages(50), &machine, &settings(50)).unwrap();
    let step = Duration::from_micros(1007);
    for pass in &done.passes[1..] {
        assert_eq!(*pass, 50 * step);
    }
    assert_eq!(done.disk_read.bytes, Bytes::new(50 * PAGE), "every page is read once");
    assert_eq!(done.link_in.bytes, Bytes::new(50 * PAGE));
    assert_eq!(done.pager.faults + done.pager.late + done.pager.prefetched, 50);
    assert_eq!((done.pager.uses, done.pager.hits), (6 * 50, 5 * 50), "those at the end count, too");
    assert_eq!(done.median(), 50 * step);
}

#[test]
fn a_pass_that_streams_takes_as_long_as_its_link() {
    // There are 100 pages and 40 frames. The pages that stay are 40 less those that stream.
    let done = simulate(&pages(100), &machine(), &settings(40)).unwrap();
    let later = done.link_in.bytes.get() - 100 * PAGE;
    let each = later / 5 / PAGE;
    assert!((60..=70).contains(&each), "{each} pages stream in a pass");
    let link = Duration::from_millis(each);
    let pass = done.median();
    assert!(pass >= link && pass <= link + link / 20, "{pass:?} for {link:?} of link");
    assert!(done.link_in.utilisation > 0.95, "{:?}", done.link_in);
    assert_eq!(stalled(&done) + done.compute.busy, done.time);
    // If compute takes as long as the link, nearly all of it is hidden.
    let mut busy = machine();
    busy.compute.step = link / 100;
    let hidden = simulate(&pages(100), &busy, &settings(40)).unwrap().median();
    assert!(hidden >= link && hidden <= link + link / 10, "{hidden:?} for {link:?} of link and of compute");
}

#[test]
fn lru_on_a_cycle_hits_nothing_and_plan_does() {
    let of = |policy: PolicyKind| {
        simulate(&pages(100), &machine(), &Settings { policy: policy.into(), ..settings(40) }).unwrap()
    };
    let (lru, plan) = (of(PolicyKind::Lru), of(PolicyKind::Plan));
    assert_eq!(lru.pager.hits, 0);
    assert!(plan.hit_ratio() > 0.25, "{}", plan.hit_ratio());
    // On demand, a page is read and then copied, and nothing else happens meanwhile.
    assert_eq!(lru.median(), 100 * Duration::from_nanos(1_100_001));
    assert_eq!(by_cause(&lru, WaitCause::Disk, Tier::Disk), lru.time - lru.compute.busy);
}

#[test]
fn a_host_tier_takes_the_disk_out_of_the_pass() {
    let mut machine = machine();
    // A tenth of the link's rate.
    machine.disk.read = Bytes::new(RATE.get() / 10);
    let settings = settings(40);
    let without = simulate(&pages(100), &machine, &settings).unwrap();
    let host_budget = Bytes::new(100 * PAGE);
    let with = simulate(&pages(100), &machine, &Settings { host_budget, ..settings }).unwrap();
    assert!(with.median() * 4 < without.median(), "{:?} with, {:?} without", with.median(), without.median());
    assert!(with.pager.fills_host > 0 && with.link_out.bytes > Bytes::ZERO, "{:?}", with.pager);
    assert_eq!(without.link_out.bytes, Bytes::ZERO);
}

#[test]
fn devices_share_the_disk_and_nothing_else() {
    let mut machine = machine();
    machine.link = Some(LinkModel::new(Bytes::new(100 * RATE.get()), Duration::ZERO, true).unwrap());
    machine.disk.read = RATE;
    let settings = Settings { passes: count(1), ..settings(200) };
    let alone = simulate(&pages(200), &machine, &settings).unwrap();
    machine.devices = count(4);
    let four = simulate(&pages(200), &machine, &settings).unwrap();
    // Each device uses its part of each page, so together they read what one device would.
    assert_eq!(four.disk_read.bytes, alone.disk_read.bytes);
    let (four, alone) = (four.median().as_secs_f64(), alone.median().as_secs_f64());
    assert!((four / alone - 1.0).abs() < 0.05, "{four} s on four, {alone} s on one");
}

#[test]
fn a_pass_uses_only_the_experts_it_draws() {
    let model = Even { params: 64 * PAGE * 8, dtype: DType::U8, layers: 8, experts: Some((64, 4)) };
    let done = simulate(&Workload::even(model).unwrap(), &machine(), &settings(600)).unwrap();
    assert_eq!(done.pager.uses, 6 * 8 * 4);
    assert!(done.pager.hits > 0 && done.pager.faults > 100, "{:?}", done.pager);
}

#[test]
fn what_is_written_comes_to_the_disk() {
    let span = |offset| Span { segment: 0, offset, len: PAGE, row: 1 };
    let steps = (0..30).map(|at| Step { spans: vec![span(at * PAGE)], share: Share::All, writes: true }).collect();
    let workload = Workload::new(vec![(Backing::ReadWrite, 30 * PAGE)], steps).unwrap();
    let done = simulate(&workload, &machine(), &settings(10)).unwrap();
    assert!(done.disk_written.bytes >= Bytes::new(5 * 20 * PAGE), "{:?}", done.disk_written);
    assert_eq!(done.link_out.bytes, done.disk_written.bytes);
    assert!(done.pager.fills_zero >= 30);
    // On a link that is not duplex, moves up and moves down take turns.
    let link = Some(LinkModel::new(RATE, Duration::ZERO, false).unwrap());
    let shared = simulate(&workload, &MachineModel { link, ..machine() }, &settings(10)).unwrap();
    assert!(shared.median() > done.median(), "{:?} shared, {:?} duplex", shared.median(), done.median());
}

#[test]
fn failures_cost_time_and_nothing_else() {
    let calm = settings(40);
    let failing = Settings { fail_one_in: Some(count(10)), ..calm.clone() };
    let calm = simulate(&pages(100), &machine(), &calm).unwrap();
    let failing = simulate(&pages(100), &machine(), &failing).unwrap();
    assert!(failing.failures > 20, "{}", failing.failures);
    assert_eq!(failing.lost_steps, 0);
    assert!(failing.time > calm.time);
    let hopeless = Settings { fail_one_in: Some(count(1)), ..settings(40) };
    let error = simulate(&pages(100), &machine(), &hopeless).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io);
}

/// 100 pages in order. LRU hits none of them in 40 frames, so a pass is 100 reads of 100 us, copies of 1 ms and steps
/// of 1 ns.
fn in_trouble(trouble: Vec<Trouble>) -> Simulated {
    let settings = Settings { policy: PolicyKind::Lru.into(), trouble, ..settings(40) };
    simulate(&pages(100), &machine(), &settings).unwrap()
}

const LRU_PASS: Duration = Duration::from_nanos(110_000_100);

fn slow(part: Part, times: u32) -> TroubleKind {
    TroubleKind::Slow { part, times: count(times), one_in: NonZeroU32::MIN }
}

#[test]
fn a_slow_spell_costs_what_it_slows() {
    let spell = |part, times, pass| Trouble::from(slow(part, times), When::Pass(pass)).until(When::Pass(pass + 1));
    let done = in_trouble(vec![
        spell(Part::Disk, 2, 1),
        spell(Part::Link, 3, 2),
        spell(Part::Compute, 1000, 4),
        // Two spells at once.
        spell(Part::Disk, 2, 4),
        spell(Part::Disk, 5, 4),
    ]);
    let longer = [0, 10_000_000, 200_000_000, 0, 90_000_000 + 99_900, 0].map(Duration::from_nanos);
    assert_eq!(done.passes, longer.map(|longer| LRU_PASS + longer));
    // A spell given by the clock: the copies of three pages begin within it.
    let from = LRU_PASS + Duration::from_micros(50);
    let until = from + Duration::from_micros(2200);
    let done = in_trouble(vec![Trouble::from(slow(Part::Link, 2), When::Time(from)).until(When::Time(until))]);
    let later = |pass| if pass == 1 { Duration::from_millis(2) } else { Duration::ZERO };
    assert_eq!(done.passes, [0, 1, 2, 3, 4, 5].map(|pass| LRU_PASS + later(pass)));
}

#[test]
fn a_single_move_can_take_a_thousand_times_as_long() {
    // The copy of the second pass's first page begins at this nanosecond.
    let from = LRU_PASS + Duration::from_micros(100);
    let until = When::Time(from + Duration::from_nanos(1));
    let done = in_trouble(vec![Trouble::from(slow(Part::Link, 1000), When::Time(from)).until(until)]);
    assert_eq!(done.passes[1], LRU_PASS + Duration::from_millis(999));
    assert_eq!(done.time, 6 * LRU_PASS + Duration::from_millis(999));
    // By chance: some of the 600 copies.
    let outliers = TroubleKind::Slow { part: Part::Link, times: count(1000), one_in: count(50) };
    let late = in_trouble(vec![Trouble::from(outliers, When::Pass(0))]).time - 6 * LRU_PASS;
    assert_eq!(late.as_nanos() % 999_000_000, 0);
    assert!((1..60).contains(&(late.as_millis() / 999)), "{late:?}");
}

#[test]
fn a_smaller_budget_costs_the_faults_of_what_it_holds_no_more() {
    let of = |trouble| {
        let settings = Settings { policy: PolicyKind::Lru.into(), trouble, ..settings(100) };
        simulate(&pages(100), &machine(), &settings).unwrap()
    };
    let half = Trouble::from(TroubleKind::DeviceBudget(Bytes::new(50 * PAGE)), When::Pass(2));
    let (calm, smaller) = (of(Vec::new()), of(vec![half.clone()]));
    assert_eq!((calm.pager.faults, smaller.pager.faults), (100, 100 + 4 * 100));
    assert_eq!(smaller.passes[..2], calm.passes[..2]);
    assert_eq!(smaller.passes[2..], [LRU_PASS; 4]);
    // When the budget is back, the 50 pages that are resident hit, and the others are filled and stay.
    let done = of(vec![half.until(When::Pass(4))]);
    assert_eq!(done.pager.faults, 100 + 2 * 100 + 50);
    assert_eq!(done.passes[5], calm.passes[5]);
    // A budget larger than the settings say.
    let more = Trouble::from(TroubleKind::DeviceBudget(Bytes::new(100 * PAGE)), When::Pass(1));
    let done = in_trouble(vec![more]);
    assert_eq!((done.pager.faults, done.frames), (100 + 60, 100));
}

#[test]
fn a_budget_too_small_for_a_step_ends_the_run_with_that_error() {
    let trouble = vec![Trouble::from(TroubleKind::DeviceBudget(Bytes::new(2 * PAGE)), When::Pass(1))];
    // Four pages hold what three pages have from any row on.
    let settings = Settings { step_pages: Some(count(4)), trouble, ..settings(40) };
    let step =
        Step { spans: vec![Span { segment: 0, offset: 0, len: 60 * PAGE, row: 1 }], share: Share::All, writes: false };
    let workload = Workload::new(vec![(Backing::File, 60 * PAGE)], vec![step]).unwrap();
    let error = simulate(&workload, &machine(), &settings).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BudgetTooSmall);
    assert!(error.to_string().contains("3 pages (3.0 MiB) are wanted at once"), "{error}");
}

/// One step for each page of a segment.
fn one_by_one(segment: u32, pages: u64, writes: bool) -> Vec<Step> {
    let span = |page| Span { segment, offset: page * PAGE, len: PAGE, row: 1 };
    (0..pages).map(|page| Step { spans: vec![span(page)], share: Share::All, writes }).collect()
}

#[test]
fn a_tensor_comes_and_goes_with_its_dirty_pages() {
    let guest = |backing, bytes| {
        let (class, hold) = (SegmentClass::Activations, Duration::ZERO);
        TroubleKind::Guest(Guest { backing, class, bytes: Bytes::new(bytes), hold, hinted: false })
    };
    let of = |frames, kind: Option<TroubleKind>| {
        let trouble = kind.map(|kind| Trouble::from(kind, When::Pass(1)).until(When::Pass(3))).into_iter().collect();
        let settings =
            Settings { policy: PolicyKind::Lru.into(), lookahead: Lookahead::Off, trouble, ..settings(frames) };
        // Each step takes long enough for its pages to come.
        let compute = ComputeModel { step: Duration::from_millis(1), ..machine().compute };
        simulate(&pages(40), &MachineModel { compute, ..machine() }, &settings).unwrap()
    };
    // Where there is room, a tensor of ten pages is made, written twice, and removed. This does not change the
    // program's times.
    let (calm, done) = (of(60, None), of(60, Some(guest(Backing::ReadWrite, 10 * PAGE))));
    assert_eq!(done.passes[3..], calm.passes[3..]);
    assert_eq!((done.pager.fills_zero, done.pager.write_backs), (10, 0));
    assert_eq!((done.pager.uses, done.pager.faults, done.pager.hits), (6 * 40 + 20, 40 + 10, 5 * 40 + 10));
    assert_eq!((done.pager.evictions, calm.pager.evictions), (10, 0));
    // Of a file all pages but the last are whole.
    let done = of(60, Some(guest(Backing::File, 9 * PAGE + 5)));
    assert_eq!(done.disk_read.bytes, Bytes::new(49 * PAGE + 5));
    // Where there is no room, the new tensor's dirty pages are written back and read again.
    let done = of(45, Some(guest(Backing::ReadWrite, 10 * PAGE)));
    assert_eq!(done.disk_written.bytes.get(), done.pager.write_backs * PAGE);
    assert!(done.pager.write_backs > 0 && done.pager.faults > 50, "{:?}", done.pager);
}

#[test]
fn a_full_disk_costs_bytes_only_where_there_is_no_room_for_them() {
    let full = Trouble::from(TroubleKind::DiskFull, When::Pass(1)).until(When::Pass(2));
    let segments = vec![(Backing::ReadWrite, 8 * PAGE), (Backing::File, 30 * PAGE)];
    let steps = [one_by_one(0, 8, true), one_by_one(1, 30, false)].concat();
    let workload = Workload::new(segments, steps).unwrap();
    let settings = Settings { policy: PolicyKind::Lru.into(), trouble: vec![full], ..settings(20) };
    let done = simulate(&workload, &machine(), &settings).unwrap();
    // Pages that cannot be written stay, and pages that can be read again go.
    assert!(done.failures > 0, "{done:?}");
    assert_eq!((done.lost_steps, done.pager.poisoned), (0, 0));
    assert!(done.disk_written.bytes >= Bytes::new(4 * 8 * PAGE), "{:?}", done.disk_written);
    // All 30 pages are dirty, and there is room for ten. The others are lost, and steps that want them are told.
    let full = Trouble::from(TroubleKind::DiskFull, When::Pass(0));
    let all_dirty = Workload::new(vec![(Backing::ReadWrite, 30 * PAGE)], one_by_one(0, 30, true)).unwrap();
    let done =
        simulate(&all_dirty, &machine(), &Settings { trouble: vec![full], ..settings_of(&settings, 10) }).unwrap();
    assert_eq!((done.pager.poisoned, done.lost_steps, done.pager.write_backs), (20, 5 * 20, 0));
    // A write back is tried three times if somebody waits for it, and eight times at most.
    assert!((3 * 20..=8 * 20).contains(&done.failures), "{}", done.failures);
}

fn settings_of(settings: &Settings, frames: u64) -> Settings {
    Settings { device_budget: Bytes::new(frames * PAGE), ..settings.clone() }
}

#[test]
fn a_lost_device_ends_the_run_and_names_what_is_lost_with_it() {
    let workload = |writes| {
        let segments = vec![(Backing::ReadWrite, 8 * PAGE), (Backing::File, 30 * PAGE)];
        Workload::new(segments, [one_by_one(0, 8, writes), one_by_one(1, 30, false)].concat()).unwrap()
    };
    let of = |workload: &Workload, frames, host: u64, at| {
        let trouble = vec![Trouble::from(TroubleKind::DeviceLost { device: 0 }, at)];
        let host_budget = Bytes::new(host * PAGE);
        let settings = Settings { policy: PolicyKind::Lru.into(), trouble, host_budget, ..settings(frames) };
        let error = simulate(workload, &machine(), &settings).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Device);
        error.to_string()
    };
    let text = of(&workload(true), 40, 0, When::Pass(2));
    assert!(text.starts_with("8 pages (8.0 MiB) are lost, 0 to 7 of segment 0: device 0 is lost"), "{text}");
    // Pages that were only read, or never written, are still where they came from.
    for at in [When::Pass(2), When::Time(Duration::from_micros(700))] {
        let text = of(&workload(false), 40, 0, at);
        assert!(text.starts_with("device 0 is lost"), "{text}");
    }
    // Pages that were written back when others came are safe, and so are those in the host tier.
    for (frames, host) in [(20, 0), (20, 20)] {
        let text = of(&workload(true), frames, host, When::Pass(2));
        assert!(text.starts_with("device 0 is lost"), "{text}");
    }
    // Either of two devices can be the lost one, and there is no third one.
    let settings = |device| {
        let trouble = vec![Trouble::from(TroubleKind::DeviceLost { device }, When::Pass(1))];
        Settings { trouble, ..settings(40) }
    };
    let two = MachineModel { devices: count(2), ..machine() };
    let error = simulate(&workload(true), &two, &settings(1)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Device);
    assert!(
        error.to_string().starts_with("4 pages (4.0 MiB) are lost, 0 to 3 of segment 0: device 1 is lost"),
        "{error}"
    );
    let error = simulate(&workload(true), &two, &settings(2)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}

#[test]
fn a_program_that_lost_its_device_computes_no_more() {
    // Computing takes nearly all of the memory's bandwidth from the disk. If it went on after the loss, each of the
    // reads that look for lost pages would take a hundred thousand events.
    let disk = machine().disk;
    let compute = ComputeModel { bandwidth: Bytes::kib(1), flops: None, step: Duration::ZERO };
    let machine = MachineModel { link: None, disk, compute, ..machine() };
    let lost = Trouble::from(TroubleKind::DeviceLost { device: 0 }, When::Time(Duration::from_secs(1)));
    let settings = Settings { trouble: vec![lost], checked: true, ..settings(4) };
    let error = simulate(&pages(40), &machine, &settings).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Device, "{error}");
}

#[test]
fn what_a_program_tells_its_pager_is_done_when_it_says() {
    let ten = vec![Span { segment: 0, offset: 10 * PAGE, len: 10 * PAGE, row: 1 }];
    let of = |kinds: Vec<TroubleKind>| {
        let trouble = kinds.into_iter().map(|kind| Trouble::from(kind, When::Pass(2))).collect();
        let settings = Settings { policy: PolicyKind::Lru.into(), trouble, ..settings(60) };
        simulate(&pages(50), &machine(), &settings).unwrap().pager
    };
    assert_eq!(of(Vec::new()).faults, 50);
    assert_eq!(of(vec![TroubleKind::Evict(ten.clone())]).faults, 60);
    // Ten frames are free: they go first, then those of five pages. The first fault comes while they go, and takes one
    // more.
    assert_eq!(of(vec![TroubleKind::Trim(Bytes::new(15 * PAGE))]).faults, 56);
    let hinted = of(vec![TroubleKind::Evict(ten.clone()), TroubleKind::Hint(ten.clone())]);
    assert_eq!((hinted.faults, hinted.prefetched + hinted.late), (50, 10), "{hinted:?}");
    assert_eq!(of(vec![TroubleKind::Chain(ten.clone())]), of(Vec::new()));
    // Without its plan, the policy fills nothing ahead.
    let of = |trouble| simulate(&pages(100), &machine(), &Settings { trouble, ..settings(40) }).unwrap();
    let plan = |order| TroubleKind::Plan { order, cyclic: true };
    let withdrawn = of(vec![Trouble::from(plan(Vec::new()), When::Pass(3))]);
    let calm = of(Vec::new());
    assert_eq!(withdrawn.passes[..2], calm.passes[..2]);
    assert!(withdrawn.time > calm.time && withdrawn.pager.faults > 2 * calm.pager.faults, "{:?}", withdrawn.pager);
}

#[test]
fn bad_settings_are_refused() {
    let refused = |machine: &MachineModel, settings: &Settings| {
        let error = simulate(&pages(100), machine, settings).unwrap_err();
        (error.kind(), error.to_string())
    };
    let whole = Settings { step_pages: Some(count(200)), ..settings(10) };
    let one = Workload::even(Even { params: 100 * PAGE, dtype: DType::U8, layers: 1, experts: None }).unwrap();
    let error = simulate(&one, &machine(), &whole).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BudgetTooSmall);
    assert!(error.to_string().contains("100 pages (100.0 MiB) are wanted at once"), "{error}");
    let (kind, text) = refused(&machine(), &settings(0));
    assert!(kind == ErrorKind::BudgetTooSmall && text.contains("holds no page of 1.0 MiB"), "{text}");
    let (kind, text) = refused(&machine(), &settings(1 << 20));
    assert!(kind == ErrorKind::InvalidArgument && text.contains("machine test has: 16.0 GiB"), "{text}");
    let much = Settings { host_budget: Bytes::gib(17), ..settings(10) };
    let (kind, text) = refused(&machine(), &much);
    assert!(kind == ErrorKind::InvalidArgument && text.contains("a host budget of 17.0 GiB"), "{text}");
    let late = |kind| Settings { trouble: vec![Trouble::from(kind, When::Pass(99))], ..settings(10) };
    let (kind, text) = refused(&machine(), &late(TroubleKind::DeviceBudget(Bytes::ZERO)));
    assert!(kind == ErrorKind::BudgetTooSmall && text.starts_with("trouble 0 of the settings"), "{text}");
    let (kind, text) = refused(&machine(), &late(TroubleKind::DeviceBudget(Bytes::gib(17))));
    assert!(kind == ErrorKind::InvalidArgument && text.contains("more than machine test has"), "{text}");
    let (kind, text) = refused(&machine(), &late(TroubleKind::DeviceLost { device: 1 }));
    assert!(kind == ErrorKind::InvalidArgument && text.contains("machine test has no device 1"), "{text}");
    for (segment, offset, len) in [(1, 0, 1), (0, 0, 0), (0, 100 * PAGE, 1), (0, 1, u64::MAX)] {
        let span = Span { segment, offset, len, row: 1 };
        let (kind, text) = refused(&machine(), &late(TroubleKind::Hint(vec![span])));
        assert!(kind == ErrorKind::InvalidArgument && text.contains("is not in segment"), "{text}");
    }
    assert_eq!(pages(3).with_classes(Vec::new()).unwrap_err().kind(), ErrorKind::InvalidArgument);
}

#[test]
fn a_model_in_file_order_reads_what_its_tensors_have() {
    let made = models::synthetic(&[5 << 20, 3, 2 << 20, 9 << 20]);
    let header = format::open(&made.path).unwrap();
    let workload = Workload::of_model(&header, None).unwrap();
    let names: Vec<u64> = workload.steps().iter().map(|step| step.spans[0].offset).collect();
    assert!(names.windows(2).all(|pair| pair[0] < pair[1]), "{names:?}");
    let done = simulate(&workload, &machine(), &settings(32)).unwrap();
    assert_eq!(done.disk_read.bytes.get(), made.bytes.len() as u64, "the tail page is short");
}
