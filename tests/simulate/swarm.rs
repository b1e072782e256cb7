//! Random machines, workloads and failures for the simulator, and checks of the results.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fmt::Debug;
use std::num::NonZeroU32;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use outcore::device::LinkModel;
use outcore::policy::SegmentClass;
use outcore::store::QueueDepth;
use outcore::{Bytes, ErrorKind, Lookahead, PageSize, Result};
use outcore_lab::sim::{
    AnyPolicy, ComputeModel, DiskModel, Guest, MachineModel, Part, Settings, Share, Simulated, Span, Step, Trouble,
    TroubleKind, When, Workload, simulate,
};
use outcore_pager::Backing;

use outcore_testkit::harness::Rng;
use outcore_testkit::harness::replay::{Case as Replayed, first_seed};

/// The page size of the swarm's machines.
const PAGE: u64 = 4096;

fn count(n: u32) -> NonZeroU32 {
    NonZeroU32::new(n).unwrap()
}

/// A random case. It is small, so that all its pages can be checked at every event.
#[derive(Clone, Debug)]
pub struct Case {
    pub machine: MachineModel,
    pub workload: Workload,
    pub settings: Settings,
}

impl Case {
    pub fn run(&self) -> Result<Simulated> {
        simulate(&self.workload, &self.machine, &self.settings)
    }

    fn has(&self, is: impl Fn(&TroubleKind) -> bool) -> bool {
        self.settings.trouble.iter().any(|trouble| is(&trouble.kind))
    }
}

/// A case without trouble.
fn calm_case(rng: &mut Rng) -> Case {
    let page = PageSize::new(Bytes::kib(4)).unwrap();
    let rate = |rng: &mut Rng| Bytes::new(1 << (10 + rng.below(24)));
    let micros = |rng: &mut Rng| Duration::from_micros(*rng.pick(&[0, 1, 10, 1000]));
    let link = (!rng.one_in(4)).then(|| LinkModel::new(rate(rng), micros(rng), rng.one_in(2)).unwrap());
    let frames = 1 + rng.below(24);
    let host = rng.below(3) * rng.below(16);
    let devices = *rng.pick(&[1, 1, 1, 2, 3]);
    let machine = MachineModel {
        name: "random".to_owned(),
        devices: count(devices),
        device_memory: Bytes::gib(1),
        host_memory: Bytes::gib(1),
        unified_memory: false,
        link,
        disk: DiskModel {
            read: rate(rng),
            write: rate(rng),
            latency: micros(rng),
            depth: QueueDepth::new(*rng.pick(&[1, 2, 16, 64])).unwrap(),
        },
        compute: ComputeModel { bandwidth: rate(rng), flops: None, step: micros(rng) },
        jitter: *rng.pick(&[0.0, 0.1, 0.9]),
    };
    let segments: Vec<(Backing, u64)> = (0..1 + rng.below(3))
        .map(|_| {
            let backing = if rng.one_in(3) { Backing::ReadWrite } else { Backing::File };
            (backing, (1 + rng.below(40)) * 4096 * u64::from(devices) + rng.below(4096))
        })
        .collect();
    let mut steps = Vec::new();
    for _ in 0..1 + rng.below(40) {
        let spans: Vec<Span> = (0..1 + rng.below(3))
            .map(|_| {
                let segment = rng.below(segments.len() as u64);
                let all = segments[segment as usize].1;
                let offset = rng.below(all);
                // Most spans fit by themselves.
                let most = (all - offset).min(1 + frames * 4096 / 2 * u64::from(devices));
                let len = 1 + rng.below(most);
                Span { segment: segment as u32, offset, len, row: 1 + rng.below(300) }
            })
            .collect();
        let writes = spans.iter().all(|span| segments[span.segment as usize].0 == Backing::ReadWrite) && rng.one_in(2);
        let parts = 1 + rng.below(8) as u32;
        let used = 1 + rng.below(u64::from(parts)) as u32;
        let group = rng.below(3) as u32;
        let share = match rng.below(4) {
            0 => Share::Parts { group, parts, used },
            1 => Share::Member { group, parts, used, member: rng.below(u64::from(parts)) as u32 },
            _ => Share::All,
        };
        steps.push(Step { spans, share, writes });
    }
    // This step makes sure that every pass has one.
    steps.push(Step { spans: vec![Span { segment: 0, offset: 0, len: 1, row: 1 }], share: Share::All, writes: false });
    let settings = Settings {
        policy: *rng.pick(&AnyPolicy::all(&[]).collect::<Vec<_>>()),
        page_size: page,
        lookahead: *rng.pick(&[Lookahead::Auto, Lookahead::Off, Lookahead::Bytes(Bytes::kib(16))]),
        step_pages: if rng.one_in(2) { None } else { Some(count(1 + rng.below(8) as u32)) },
        steps_ahead: rng.below(3) as u32,
        passes: count(1 + rng.below(4) as u32),
        seed: rng.next(),
        fail_one_in: *rng.pick(&[None, None, Some(count(3)), Some(count(30))]),
        checked: true,
        ..Settings::new(Bytes::new(frames * 4096), Bytes::new(host * 4096 * u64::from(devices)))
    };
    let mut workload = Workload::new(segments, steps).unwrap();
    if rng.one_in(2) {
        let classes = workload.segments().iter().map(|_| *rng.pick(&SegmentClass::ALL)).collect();
        workload = workload.with_classes(classes).unwrap();
    }
    Case { machine, workload, settings }
}

/// A case. Three in four have trouble, at moments drawn from the time that the case takes without it.
pub fn random_case(rng: &mut Rng) -> Case {
    let mut case = calm_case(rng);
    if rng.one_in(4) {
        return case;
    }
    // Most cases that do not fit are given more memory. A case that ends at once shows little.
    let calm = loop {
        let hurried = Settings { checked: false, ..case.settings.clone() };
        match simulate(&case.workload, &case.machine, &hurried) {
            Err(error) if error.kind() == ErrorKind::BudgetTooSmall && !rng.one_in(8) => {
                case.settings.device_budget = Bytes::new(2 * case.settings.device_budget.get());
            }
            other => break other,
        }
    };
    let (time, passes) = (calm.map_or(Duration::from_micros(1), |done| done.time), case.settings.passes.get());
    let time = u64::try_from(time.as_nanos()).unwrap();
    let most = *rng.pick(&[2, 4, 12]);
    for _ in 0..=rng.below(most) {
        let moment = |rng: &mut Rng, after: u64| match rng.below(4) {
            0 => When::Pass(rng.below(u64::from(passes)) as u32),
            _ => When::Time(Duration::from_nanos(after + rng.below(1 + time - time.min(after)))),
        };
        // Often several troubles begin at once.
        let from = match case.settings.trouble.last() {
            Some(last) if rng.one_in(3) => last.from,
            _ => moment(rng, 0),
        };
        let mut trouble = Trouble::from(trouble_kind(rng, &case), from);
        if !rng.one_in(4) {
            let after = if let When::Time(from) = from { from.as_nanos() as u64 } else { 0 };
            trouble = trouble.until(moment(rng, after));
        }
        case.settings.trouble.push(trouble);
    }
    case
}

fn spans(rng: &mut Rng, case: &Case) -> Vec<Span> {
    let segments = case.workload.segments();
    let span = |rng: &mut Rng| {
        let segment = rng.below(segments.len() as u64);
        let all = segments[segment as usize].1;
        let offset = rng.below(all);
        Span { segment: segment as u32, offset, len: 1 + rng.below(all - offset), row: 1 }
    };
    (0..1 + rng.below(3)).map(|_| span(rng)).collect()
}

fn trouble_kind(rng: &mut Rng, case: &Case) -> TroubleKind {
    let devices = u64::from(case.machine.devices.get());
    let frames = case.settings.device_budget.get() / PAGE;
    match rng.below(24) {
        0..4 => TroubleKind::Slow {
            part: *rng.pick(&[Part::Disk, Part::Link, Part::Compute]),
            times: count(*rng.pick(&[2, 10, 1000])),
            one_in: count(*rng.pick(&[1, 1, 5, 30])),
        },
        4..7 => TroubleKind::DiskFull,
        7 => TroubleKind::DeviceLost { device: rng.below(devices) as u32 },
        // Most budgets still hold what the case pins at once.
        8..12 => TroubleKind::DeviceBudget(Bytes::new((1 + frames / 2 + rng.below(2 * frames)) * PAGE)),
        12 => TroubleKind::DeviceBudget(Bytes::new((1 + rng.below(frames)) * PAGE)),
        13..18 => TroubleKind::Guest(Guest {
            backing: if rng.one_in(3) { Backing::File } else { Backing::ReadWrite },
            class: *rng.pick(&SegmentClass::ALL),
            bytes: Bytes::new(1 + rng.below(20 * PAGE) * devices),
            hold: Duration::from_nanos(*rng.pick(&[0, 0, 1_000, 1_000_000])),
            hinted: rng.one_in(2),
        }),
        18 | 19 => TroubleKind::Hint(spans(rng, case)),
        20 => TroubleKind::Evict(spans(rng, case)),
        21 => TroubleKind::Trim(Bytes::new((1 + rng.below(frames)) * PAGE)),
        22 => {
            let order = if rng.one_in(3) { Vec::new() } else { spans(rng, case) };
            TroubleKind::Plan { order, cyclic: rng.one_in(2) }
        }
        _ => TroubleKind::Chain(spans(rng, case)),
    }
}

pub fn stalled(done: &Simulated) -> Duration {
    done.stalls.iter().map(|stall| stall.time).sum()
}

/// Checks what must be true of every result.
fn judge(case: &Case, done: &Simulated) {
    let Case { machine, settings, .. } = case;
    assert_eq!(done.passes.len(), settings.passes.get() as usize);
    assert_eq!(done.passes.iter().sum::<Duration>(), done.time);
    let pager = &done.pager;
    assert_eq!(pager.uses, pager.hits + pager.prefetched + pager.late + pager.faults, "{pager:?}");
    for flow in [done.disk_read, done.disk_written, done.link_in, done.link_out, done.compute] {
        assert!(flow.busy <= done.time && (0.0..=1.0).contains(&flow.utilisation), "{flow:?} in {:?}", done.time);
    }
    assert!(stalled(done) <= done.time * machine.devices.get());
    if settings.fail_one_in.is_none() && !case.has(|kind| *kind == TroubleKind::DiskFull) {
        assert_eq!((done.failures, done.lost_steps, pager.poisoned), (0, 0, 0));
        if machine.devices.get() == 1 {
            assert_eq!(stalled(done) + done.compute.busy, done.time, "a device computes or waits for pages");
        }
    }
    if machine.link.is_none() {
        assert!(done.frames > 0);
    }
}

/// How cases ended.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ends {
    pub well: u64,
    /// With some trouble, or with failures by chance.
    pub well_in_trouble: u64,
    /// A step could not be computed.
    pub lost_steps: u64,
    pub devices_lost: u64,
    /// A step was too large for its budget.
    pub too_small: u64,
    pub events: u64,
    /// Moves that were made to fail.
    pub failures: u64,
}

/// Runs a case and judges how it ends.
fn run(case: &Case, ends: &mut Ends) {
    match case.run() {
        Ok(done) => {
            judge(case, &done);
            ends.well += 1;
            ends.well_in_trouble += u64::from(!case.settings.trouble.is_empty() || done.failures > 0);
            ends.lost_steps += u64::from(done.lost_steps > 0);
            ends.events += done.events;
            ends.failures += done.failures;
        }
        Err(error) if error.kind() == ErrorKind::BudgetTooSmall => ends.too_small += 1,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Device, "{error}");
            assert!(case.has(|kind| matches!(kind, TroubleKind::DeviceLost { .. })), "{error}");
            ends.devices_lost += 1;
        }
    }
}

/// Runs cases of `test` until told to stop, and returns how they ended. A case that is to be replayed comes first.
pub fn swarm(test: &str, mut go_on: impl FnMut(u64) -> bool) -> Ends {
    let (first, mut ends) = (first_seed(), Ends::default());
    for at in 0.. {
        if !go_on(at) {
            break;
        }
        let seed = first.wrapping_add(at);
        let case = random_case(&mut Rng::new(seed));
        let _replayed = Replayed::of(test, seed);
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(&case, &mut ends))) {
            eprintln!("{case:?}");
            std::panic::resume_unwind(panic);
        }
    }
    ends
}

/// The whole result as text.
pub fn bits(done: &dyn Debug) -> String {
    format!("{done:?}")
}
