//! Every part over the emulated CUDA driver, with sizes of megabytes: it produces its numbers, its calls are in order,
//! and a refused call ends it with an error. What the numbers are means nothing here.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod rig;

use outcore::{Bytes, PageSize};
use outcore_gpu_check::{Failure, Part, Record, Report, Scale, Settings, Unit, run};
use outcore_testkit::fake_cuda::Reach;
use outcore_testkit::harness::until;
use rig::driver;
use tempfile::TempDir;

const OUT_OF_MEMORY: u32 = 2;
const ILLEGAL_ADDRESS: u32 = 700;

fn settings(folder: &TempDir) -> Settings {
    Settings {
        scale: Scale::Tiny,
        device: 0,
        dir: folder.path().to_owned(),
        memory: Bytes::gib(1),
        page: PageSize::new(Bytes::mib(2)).unwrap(),
    }
}

fn folder() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// What a part reported, and how it ended.
fn records(part: Part, settings: &Settings) -> (Vec<Record>, Result<(), Failure>) {
    let mut records = Vec::new();
    let outcome = run(part, settings, &mut Report::new(|record| records.push(record.clone())));
    (records, outcome)
}

/// Names of verdicts, and of some numbers with their units.
fn expected(part: Part) -> (&'static [&'static str], &'static [(&'static str, Unit)]) {
    use Unit as U;
    match part {
        Part::Machine => (&[], &[("memory of the GPU", U::Bytes), ("memory copy, one thread", U::GigabytesPerSecond)]),
        Part::Copies => (
            &["host to device", "device to host", "both ways"],
            &[
                ("host to device, one copy", U::GigabytesPerSecond),
                ("device to host, pages of 64.0 KiB", U::GigabytesPerSecond),
                ("both ways, pages of 2.0 MiB", U::GigabytesPerSecond),
                ("submit a copy of 2.0 MiB", U::Microseconds),
                ("batches of 4, pages of 2.0 MiB: batched / looped", U::Ratio),
            ],
        ),
        Part::Mapping => (
            &[],
            &[
                ("map, a page of 2.0 MiB, runs of 1, a frame a page", U::Microseconds),
                ("set access, a page of 4.0 MiB, runs of 4, a frame a run, beside a kernel", U::Microseconds),
                ("the kernel's time beside mapping / alone", U::Ratio),
                ("longest unmap beside a kernel", U::Milliseconds),
            ],
        ),
        Part::Lock => (
            &[],
            &[("allocate 8.0 MiB", U::GigabytesPerSecond), ("register 8.0 MiB, untouched", U::GigabytesPerSecond)],
        ),
        Part::Events => {
            (&[], &[("record an event", U::Microseconds), ("zero 4 KiB and wait, sleeping", U::Microseconds)])
        }
        Part::Pin => (
            &["pin of a resident tensor"],
            &[
                ("pin and unpin 1 resident pages", U::Microseconds),
                ("pin for a stream and unpin 1 resident pages", U::Microseconds),
            ],
        ),
        Part::Disk => (&[], &[("read 2.0 MiB, 4 in flight", U::GigabytesPerSecond)]),
        Part::FirstPage => (
            &["first page after opening"],
            &[("open the runtime", U::Milliseconds), ("open the model and pin its first page", U::Milliseconds)],
        ),
        Part::Soak => (&["no wrong sum"], &[("round", U::Seconds)]),
        // Other ratios are measured, and not judged.
        Part::Overlap => (
            &["overlap at compute:transfer 0.5", "overlap at compute:transfer 1", "overlap at compute:transfer 2"],
            &[
                ("compute:transfer 0.8: pass", U::Seconds),
                ("compute:transfer 1: computing, in the pass", U::Seconds),
                ("compute:transfer 1: eta, pinned for the stream", U::Ratio),
                ("host to device, one copy", U::GigabytesPerSecond),
            ],
        ),
        Part::Oversized | Part::ThreeTier => (
            &["pass over the roofline", "memory of the GPU over the budget"],
            &[
                ("roofline", U::Seconds),
                ("pass", U::Seconds),
                ("pass, pinned for the stream", U::Seconds),
                ("pass, pinned for the stream: processor time for a page moved", U::Microseconds),
                ("bytes over the link / least possible", U::Ratio),
            ],
        ),
        Part::Queue => (
            &[],
            &[
                ("launches, while none waits: longest query of an event of another stream", U::Microseconds),
                ("closures, while none waits: longest map, set access and unmap", U::Microseconds),
            ],
        ),
        Part::Variants => (
            &[],
            &[
                ("handles of 2.0 MiB: map, 99.9 %", U::Microseconds),
                ("handles of 4.0 MiB, mapped elsewhere for good: unmap, longest", U::Microseconds),
                ("map, set access and unmap a page of 2.0 MiB, two threads", U::Microseconds),
            ],
        ),
        Part::Budget => (
            &[
                "memory of the GPU over a budget of nine tenths, pages of 16.0 MiB",
                "memory of the GPU over a budget of nine tenths, pages of 2.0 MiB",
            ],
            &[("open, pages of 16.0 MiB", U::Seconds), ("close, pages of 2.0 MiB", U::Seconds)],
        ),
        Part::Managed => {
            (&["managed memory takes longer by"], &[("pass", U::Seconds), ("pass, managed memory", U::Seconds)])
        }
        Part::Sweep => (
            &[],
            &[
                ("pages of 4.0 MiB, lookahead auto (4.0 MiB): over the link", U::GigabytesPerSecond),
                ("pages of 2.0 MiB, lookahead 8.0 MiB: of one copy", U::Ratio),
            ],
        ),
        _ => unreachable!("{part} is not expected to produce anything"),
    }
}

/// Numbers that can be zero; or negative, on a driver without a meaningful clock.
fn may_be_small(name: &str) -> bool {
    [
        "cores",
        "eta",
        "of which the thread",
        "part of the host tier",
        "rounds in which",
        "overlap",
        "beside",
        "given back",
    ]
    .iter()
    .any(|part| name.contains(part))
}

fn check_records(part: Part, found: &[Record]) {
    let (verdicts, numbers) = expected(part);
    for record in found {
        match record {
            Record::Number { name, spread, ceiling, .. } => {
                let least = if may_be_small(name) { f64::NEG_INFINITY } else { f64::MIN_POSITIVE };
                for value in [spread.median, spread.least, spread.most] {
                    assert!(value.is_finite() && value >= least, "{part}: {name}: {spread:?}");
                }
                assert!(spread.rounds > 0 && spread.least <= spread.median && spread.median <= spread.most);
                if let Some(ceiling) = ceiling {
                    let there = |record: &Record| matches!(record, Record::Number { name, .. } if name == ceiling);
                    assert!(found.iter().any(there), "{part}: {name} has the ceiling {ceiling:?}, which is not there");
                }
            }
            Record::Verdict { name, value, goal, pass, formula, .. } => {
                assert!(value.is_finite() && *pass == goal.is_met_by(*value) && !formula.is_empty(), "{part}: {name}");
            }
            _ => {}
        }
    }
    let judged: Vec<&str> = found
        .iter()
        .filter_map(|record| if let Record::Verdict { name, .. } = record { Some(name.as_str()) } else { None })
        .collect();
    assert_eq!(judged, verdicts, "{part}");
    for (name, unit) in numbers {
        let there =
            |record: &Record| matches!(record, Record::Number { name: n, unit: u, .. } if n == name && u == unit);
        assert!(found.iter().any(there), "{part}: no number {name:?} in {unit:?}: {found:#?}");
    }
    // The table keeps one number of a name.
    let mut names: Vec<&str> = found
        .iter()
        .filter_map(|record| if let Record::Number { name, .. } = record { Some(name.as_str()) } else { None })
        .collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count, "{part} reports two numbers under one name");
}

#[test]
fn every_part_produces_its_numbers_and_the_judge_finds_nothing() {
    // The model's file is made by the first that needs it, and stays.
    let folder = folder();
    for part in Part::ALL {
        let fake = driver();
        let (found, outcome) = records(part, &settings(&folder));
        outcome.unwrap_or_else(|failure| panic!("{part}: {failure}\n{found:#?}"));
        check_records(part, &found);
        fake.check_leaks();
        fake.expect_clean();
    }
}

#[test]
fn memory_beyond_the_budget_is_not_taken() {
    let (fake, folder) = (driver(), folder());
    let (found, outcome) = records(Part::Oversized, &settings(&folder));
    outcome.unwrap();
    let verdict = found.iter().find_map(|record| match record {
        Record::Verdict { name, value, pass, .. } if name == "memory of the GPU over the budget" => {
            Some((*value, *pass))
        }
        _ => None,
    });
    // The emulated driver counts bytes exactly. The thread that locks the host tier may not have come to its end, so
    // there may be fewer page tables; they are a 512th of the tier.
    assert!(matches!(verdict, Some((over, true)) if over <= 1.0 && over > 0.9), "{verdict:?}");
    fake.expect_clean();
}

#[test]
fn a_refused_call_ends_a_part_with_its_name_and_the_next_part_runs() {
    let folder = folder();
    let cases = [
        (Part::Copies, "cuMemcpyHtoDAsync", 40, OUT_OF_MEMORY, "copy to the GPU"),
        (Part::Mapping, "cuMemSetAccess", 3, OUT_OF_MEMORY, "allow access"),
        (Part::Lock, "cuMemHostRegister", 2, OUT_OF_MEMORY, "lock host memory"),
        (Part::Managed, "cuMemPrefetchAsync_v2", 30, OUT_OF_MEMORY, "move managed memory"),
        (Part::Variants, "cuMemUnmap", 30, OUT_OF_MEMORY, "unmap memory"),
        (Part::Queue, "cuLaunchHostFunc", 20, OUT_OF_MEMORY, "put a closure"),
        (Part::Budget, "cuMemCreate", 20, OUT_OF_MEMORY, "take memory of the GPU"),
        (Part::Overlap, "cuLaunchKernel", 20, OUT_OF_MEMORY, "launch a kernel"),
        (Part::Oversized, "cuMemCreate", 3, OUT_OF_MEMORY, "take memory of the GPU"),
        (Part::ThreeTier, "work", 60, ILLEGAL_ADDRESS, "ILLEGAL_ADDRESS"),
    ];
    for (part, call, nth, code, said) in cases {
        {
            let fake = driver();
            fake.fail_nth(call, nth, code);
            let failure = records(part, &settings(&folder)).1.unwrap_err();
            assert!(fake.fired() > 0 && failure.to_string().contains(said), "{part}: {failure}");
            assert!(!failure.is_of_the_machine(), "{part}: {failure}");
            if code == OUT_OF_MEMORY {
                fake.check_leaks();
                fake.expect_clean();
            } else {
                // On a lost device nothing can be given back, so findings are expected.
                fake.take_findings();
            }
        }
        let fake = driver();
        records(Part::Events, &settings(&folder)).1.unwrap();
        fake.expect_clean();
    }
}

#[test]
fn wrong_bytes_on_the_gpu_are_found() {
    let (fake, folder) = (driver(), folder());
    // This kernel finds another sum than the file has.
    fake.register_kernel(
        "outcore_sum",
        |launch| vec![Reach::read(launch.parameter(0), launch.parameter(1) * 8), Reach::write(launch.parameter(3), 16)],
        |launch| launch.write::<u64>(launch.parameter(3), 2)[0] += 1,
    );
    let failure = records(Part::Oversized, &settings(&folder)).1.unwrap_err();
    assert!(matches!(failure, Failure::Wrong(_)), "{failure}");
    fake.expect_clean();
}

#[test]
fn a_stamp_that_is_not_written_misses_the_verdict_of_the_soak() {
    let (fake, folder) = (driver(), folder());
    // This kernel writes nothing.
    fake.register_kernel(
        "soak_stamp",
        |launch| vec![Reach::write(launch.parameter(0) + launch.parameter(1) * 8, launch.parameter(2) * 8)],
        |_| (),
    );
    let (found, outcome) = records(Part::Soak, &settings(&folder));
    outcome.unwrap();
    let missed =
        |record: &Record| matches!(record, Record::Verdict { name, pass: false, .. } if name == "no wrong sum");
    assert!(found.iter().any(missed), "{found:#?}");
    // The table says which use of what it was.
    let said = |record: &Record| matches!(record, Record::Note { text } if text.contains("the sum is"));
    assert!(found.iter().any(said), "{found:#?}");
    fake.expect_clean();
}

#[test]
fn wrong_bytes_in_managed_memory_are_found() {
    let (fake, folder) = (driver(), folder());
    fake.register_kernel(
        "outcore_sum",
        |launch| vec![Reach::read(launch.parameter(0), launch.parameter(1) * 8), Reach::write(launch.parameter(3), 16)],
        |launch| launch.write::<u64>(launch.parameter(3), 2)[0] += 1,
    );
    let failure = records(Part::Managed, &settings(&folder)).1.unwrap_err();
    assert!(failure.to_string().contains("tensor 0 in managed memory"), "{failure}");
    fake.expect_clean();
    fake.fail_nth("cuMemAllocManaged", 1, OUT_OF_MEMORY);
    let failure = records(Part::Managed, &settings(&folder)).1.unwrap_err();
    assert!(failure.to_string().contains("allocate managed memory"), "{failure}");
    fake.expect_clean();
}

/// A call that waits for room in the queue is counted, and other calls are timed while it waits.
#[test]
fn a_call_that_waits_for_the_queue_is_found() {
    let (fake, folder) = (driver(), folder());
    fake.hold_calls("cuLaunchHostFunc", true);
    let folder = settings(&folder);
    let part = std::thread::spawn(move || records(Part::Queue, &folder));
    let calls = |name| fake.calls(name);
    until("a closure is put on a stream", || calls("cuLaunchHostFunc") > 0);
    // The watcher asks and then pauses for a millisecond at least, so after this many the call has waited for longer
    // than one may that does not wait; and the watcher has seen that.
    let asked = calls("cuMemMap");
    until("mapping goes on", || calls("cuMemMap") > asked + 30);
    fake.hold_calls("cuLaunchHostFunc", false);
    let (found, outcome) = part.join().unwrap();
    outcome.unwrap();
    let number = |name: &str| {
        found.iter().find_map(|record| match record {
            Record::Number { name: n, spread, .. } if n == name => Some(spread.median),
            _ => None,
        })
    };
    assert_eq!(number("closures until a call waits"), Some(1.0), "{found:#?}");
    let query = "closures, while one waits: longest query of an event of another stream";
    assert!(number(query).is_some_and(|longest| longest > 0.0), "{found:#?}");
    fake.expect_clean();
}

#[test]
fn without_a_gpu_it_is_the_machine() {
    let (fake, folder) = (driver(), folder());
    fake.set_devices(0);
    for part in [Part::Machine, Part::Copies, Part::Pin] {
        let failure = records(part, &settings(&folder)).1.unwrap_err();
        assert!(failure.is_of_the_machine(), "{part}: {failure}");
    }
}
