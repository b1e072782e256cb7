//! A training has the same losses, bit for bit, in any memory, and whenever it was left and taken up again.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::num::NonZeroU32;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use outcore::store::StoreOptions;
use outcore::testing::{CallHook, FolderCall, Injected, IoCall, IoKind};
use outcore::{Bytes, ErrorKind, IoBackend, PolicyKind, Result};
use outcore_lab::sim::{CaptureReader, CaptureStep, Trace, TraceOptions};
use outcore_testkit::harness::is_child;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use rustix::process::{Pid, Signal, getpid, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;
use train::losses::hash;
use train::run::{AtNonFinite, Limits, Progress, Report, Settings, run};
use train::shape::Shape;

const STEPS: u64 = 6;

fn settings() -> Settings {
    let (vocabulary, layers, width, heads, kv_heads, hidden) = (256, 3, 32, 4, 2, 80);
    let shape =
        Shape { vocabulary, layers, width, heads, kv_heads, hidden, rope_base: 10_000.0, epsilon: 1e-5, tied: false };
    let (window, batch, micro, seed, mixed) = (24, 4, 2, 5, false);
    Settings {
        shape,
        model: None,
        window,
        batch,
        micro,
        mixed,
        seed,
        rate: 3e-3,
        warm_up: 2,
        clip: 1.0,
        weight_decay: 0.1,
    }
}

/// The settings, as arguments of the program.
const ARGUMENTS: &str = "--layers 3 --width 32 --heads 4 --kv-heads 2 --hidden 80 --window 24 --batch 4 --micro 2 \
                         --seed 5 --rate 3e-3 --warm-up 2 --clip 1.0 --weight-decay 0.1";

/// A state of small pages, of which so many are kept.
fn limits(state: &Path, frames: u64, steps: u64) -> Limits {
    let page = Bytes::kib(4);
    Limits {
        state: state.into(),
        resume: true,
        steps,
        page,
        budget: Some(Bytes::new(frames * page.get())),
        commit_every: 1,
        non_finite: AtNonFinite::Stop,
        capture: None,
        store: None,
    }
}

struct Bench {
    folder: TempDir,
    text: PathBuf,
    states: u64,
}

impl Bench {
    fn new() -> Self {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let text = folder.path().join("text");
        let words = ["a page ", "is pinned ", "by a scope ", "that reserved ", "its frames ", "before. "];
        let mut random = ChaCha8Rng::seed_from_u64(1);
        let bytes: String = (0..4000).map(|_| words[random.next_u32() as usize % words.len()]).collect();
        std::fs::write(&text, bytes).unwrap();
        Self { folder, text, states: 0 }
    }

    /// A new place for a state.
    fn state(&mut self) -> PathBuf {
        self.states += 1;
        self.folder.path().join(format!("state-{}", self.states))
    }

    /// A state of small pages, of which so many are kept.
    fn limits(&self, state: &Path, frames: u64, steps: u64) -> Limits {
        limits(state, frames, steps)
    }

    fn run(&self, limits: &Limits) -> Result<Report> {
        run(&self.text, None, &settings(), limits, &AtomicBool::new(false), |_| {}, |_| {})
    }
}

fn bits(report: &Report) -> Vec<u32> {
    report.losses.iter().map(|loss| loss.to_bits()).collect()
}

/// Which pages steps use does not depend on the memory, but for the direction of the sweep and the order in which
/// threads come: `outcore policies` shows what other policies would make of it.
#[test]
fn a_capture_has_all_that_steps_use() {
    let mut bench = Bench::new();
    let [captured, few] = ["captured", "few"].map(|name| {
        let (state, path) = (bench.state(), bench.folder.path().join(name));
        let frames = if name == "few" { 40 } else { 4096 };
        bench.run(&Limits { capture: Some(path.clone()), ..bench.limits(&state, frames, STEPS) }).unwrap();
        path
    });
    let read = |path: &Path| {
        let mut reader = CaptureReader::new(BufReader::new(File::open(path).unwrap()), "capture").unwrap();
        let header = reader.header().clone();
        let (mut passes, mut used, mut written) = (0, BTreeSet::new(), BTreeSet::new());
        while let Some(step) = reader.step().unwrap() {
            match step {
                CaptureStep::Pass => passes += 1,
                CaptureStep::Use { page, write } => {
                    used.insert(page);
                    if write {
                        written.insert(page);
                    }
                }
                other => panic!("{other:?}"),
            }
        }
        (
            header.segments.iter().map(|segment| segment.classes[0].class.clone()).collect::<Vec<_>>(),
            passes,
            used,
            written,
        )
    };
    let mixed = Settings { mixed: true, ..settings() };
    let (state, path) = (bench.state(), bench.folder.path().join("mixed"));
    let limits = Limits { capture: Some(path.clone()), ..bench.limits(&state, 60, 2) };
    run(&bench.text, None, &mixed, &limits, &AtomicBool::new(false), |_| {}, |_| {}).unwrap();
    assert!(read(&path).0.iter().any(|class| class == "working copy"));
    let (classes, passes, used, written) = read(&captured);
    assert_eq!(passes, STEPS);
    assert!(
        ["parameters", "states", "gradients", "activations"].iter().all(|class| classes.iter().any(|c| c == class))
    );
    assert!(written.len() > used.len() / 2 && written.is_subset(&used), "{} of {}", written.len(), used.len());
    assert_eq!(read(&few), (classes, passes, used, written));
    let mut trace = Trace::open(&captured, &TraceOptions::default(), &mut |_| ()).unwrap();
    let frames = NonZeroU32::new(100).unwrap();
    let lru = trace.replay(PolicyKind::Lru.build(), frames, &mut |_| ()).unwrap();
    assert!(lru.hits < trace.optimum(frames, &mut |_| ()).unwrap().hits, "{lru:?}");
    // A file that exists is replaced, and the text is not.
    let refused = bench
        .run(&Limits { capture: Some(bench.text.clone()), ..bench.limits(&bench.folder.path().join("no"), 40, 1) });
    assert!(refused.unwrap_err().to_string().contains("it is the text"));
}

/// Parameters that are read in `bf16`, and gradients that are added up so.
#[test]
fn mixed_precision_has_the_same_losses_in_any_memory_and_after_a_resume() {
    let mut bench = Bench::new();
    let mixed = Settings { mixed: true, ..settings() };
    let states: Vec<PathBuf> = (0..3).map(|_| bench.state()).collect();
    let trained = |state: &Path, frames, steps| {
        let limits = bench.limits(state, frames, steps);
        run(&bench.text, None, &mixed, &limits, &AtomicBool::new(false), |_| {}, |_| {}).map(|report| bits(&report))
    };
    let whole = trained(&states[0], 4096, STEPS).unwrap();
    assert_eq!(trained(&states[1], 40, STEPS).unwrap(), whole);
    trained(&states[2], 60, 2).unwrap();
    assert_eq!(trained(&states[2], 40, STEPS).unwrap(), whole);
    let plain = bench.run(&bench.limits(&bench.folder.path().join("plain"), 4096, STEPS)).unwrap();
    let off = plain.losses.iter().zip(&whole).map(|(loss, mixed)| (loss / f32::from_bits(*mixed) - 1.0).abs());
    let off = off.fold(0f32, f32::max);
    assert!(off > 0.0 && off < 0.01, "{off}");
    // It is part of what a resumed run has to have.
    let error = bench.run(&bench.limits(&states[0], 40, STEPS)).unwrap_err();
    assert!(error.to_string().contains("has mixed true"), "{error}");
}

#[test]
fn any_memory_gives_the_same_losses() {
    let mut bench = Bench::new();
    let state = bench.state();
    let whole = bench.run(&bench.limits(&state, 4096, STEPS)).unwrap();
    assert_eq!((whole.steps, whole.losses.len() as u64), (STEPS, STEPS));
    // State and gradients have some 230 pages.
    for frames in [20, 40, 100] {
        let state = bench.state();
        let report = bench.run(&bench.limits(&state, frames, STEPS)).unwrap();
        assert_eq!(bits(&report), bits(&whole), "{frames} frames");
        assert_eq!(report.losses_xxh3, whole.losses_xxh3);
    }
    let mut other = settings();
    other.seed += 1;
    let state = bench.state();
    let report = run(&bench.text, None, &other, &bench.limits(&state, 100, 1), &AtomicBool::new(false), |_| {}, |_| {});
    assert_ne!(report.unwrap().losses[0], whole.losses[0], "the seed changes nothing");
}

#[test]
fn a_training_that_was_left_goes_on_with_the_same_losses() {
    let mut bench = Bench::new();
    let state = bench.state();
    let whole = bench.run(&bench.limits(&state, 4096, STEPS)).unwrap();
    let state = bench.state();
    let mut last = None;
    for (frames, steps) in [(100, 1), (20, 2), (4096, 4), (40, STEPS)] {
        let report = bench.run(&bench.limits(&state, frames, steps)).unwrap();
        assert_eq!(bits(&report), bits(&whole)[..steps as usize], "{frames} frames, {steps} steps");
        last = Some(serde_json::to_string(&report).unwrap());
    }
    // A finished one has the same object again.
    let again = bench.run(&bench.limits(&state, 40, STEPS)).unwrap();
    let once_more = bench.run(&bench.limits(&state, 4096, STEPS)).unwrap();
    let text = |report: &Report| Some(serde_json::to_string(report).unwrap());
    assert_eq!((text(&again), text(&once_more)), (last.clone(), last));
    assert_eq!(again.losses_xxh3, whole.losses_xxh3);
}

#[test]
fn a_training_that_is_stopped_commits_its_step_and_goes_on() {
    let mut bench = Bench::new();
    let state = bench.state();
    let whole = bench.run(&bench.limits(&state, 4096, STEPS)).unwrap();
    let state = bench.state();
    let limits = Limits { commit_every: 100, ..bench.limits(&state, 40, STEPS) };
    let stop = AtomicBool::new(false);
    let after = |at: &Progress| stop.store(at.step == 2, Ordering::Relaxed);
    let report = run(&bench.text, None, &settings(), &limits, &stop, |_| {}, after).unwrap();
    // It is asked when the next step has been made.
    assert_eq!((report.steps, report.generation), (3, 1));
    let report = bench.run(&limits).unwrap();
    assert_eq!((report.generation, bits(&report)), (2, bits(&whole)));
}

#[test]
fn a_model_learns() {
    let mut bench = Bench::new();
    let state = bench.state();
    let report = bench.run(&Limits { commit_every: 40, ..bench.limits(&state, 100, 40) }).unwrap();
    let (first, last) = (report.losses[0], report.losses[39]);
    assert!((first - 256f32.ln()).abs() < 0.5, "a new model knows nothing: {first}");
    assert!(last < 0.6 * first, "{first} became {last}");
}

#[test]
fn what_cannot_go_on_is_refused_by_name() {
    let mut bench = Bench::new();
    let state = bench.state();
    let limits = bench.limits(&state, 100, 2);
    let whole = bench.run(&limits).unwrap();
    let refused = |settings: &Settings, limits: &Limits, text: &Path, named: &str| {
        let error = run(text, None, settings, limits, &AtomicBool::new(false), |_| {}, |_| {}).unwrap_err();
        assert!(error.to_string().contains(named), "{named}: {error}");
        error
    };
    let asked_to_resume = refused(&settings(), &Limits { resume: false, ..limits.clone() }, &bench.text, "a training");
    assert!(asked_to_resume.to_string().contains("--resume"));
    refused(&settings(), &Limits { steps: 1, ..limits.clone() }, &bench.text, "has made 2 steps, and 1 are asked for");
    refused(&Settings { seed: 6, ..settings() }, &limits, &bench.text, "has seed 5, and 6 is given");
    refused(&Settings { rate: 1.0, ..settings() }, &limits, &bench.text, "has rate 0.003, and 1.0 is given");
    refused(&Settings { window: 12, ..settings() }, &limits, &bench.text, "has window 24, and 12 is given");
    let wider = Shape { hidden: 96, ..settings().shape };
    refused(&Settings { shape: wider, ..settings() }, &limits, &bench.text, "has shape");
    let other = bench.folder.path().join("other");
    let mut bytes = std::fs::read(&bench.text).unwrap();
    bytes[1000] ^= 1;
    std::fs::write(&other, &bytes).unwrap();
    refused(&settings(), &limits, &other, "has the text");
    std::fs::write(&other, &bytes[..24]).unwrap();
    refused(&settings(), &limits, &other, "has 24 bytes, and a window needs 25");
    let new = |bench: &mut Bench| Limits { state: bench.state(), ..limits.clone() };
    let (text, at) = (bench.text.clone(), new(&mut bench));
    let small = refused(&settings(), &Limits { budget: Some(Bytes::kib(16)), ..at.clone() }, &text, "");
    assert_eq!(small.kind(), ErrorKind::BudgetTooSmall, "{small}");
    refused(&Settings { micro: 3, ..settings() }, &at, &text, "--batch is 4");
    refused(&Settings { batch: 0, ..settings() }, &at, &text, "--batch is 0");
    refused(&Settings { clip: 0.0, ..settings() }, &at, &text, "clipped to a norm of 0");
    refused(&Settings { weight_decay: -1.0, ..settings() }, &at, &text, "weight_decay is -1");
    refused(&Settings { shape: Shape { heads: 5, ..settings().shape }, ..settings() }, &at, &text, "5 heads");
    refused(
        &Settings { shape: Shape { kv_heads: 3, ..settings().shape }, ..settings() },
        &at,
        &text,
        "3 heads of keys",
    );
    refused(
        &Settings { shape: Shape { hidden: usize::MAX, ..settings().shape }, ..settings() },
        &at,
        &text,
        "more parameters",
    );
    let error = settings().pages_within(Bytes::mib(20)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BudgetTooSmall);
    assert!(error.to_string().contains("give at least"), "{error}");
    // Nothing of that has changed the training.
    assert_eq!(bits(&bench.run(&limits).unwrap()), bits(&whole));
}

/// Gradients that are no numbers end a run; the commit before stays.
#[test]
fn a_loss_that_is_no_number_ends_the_run_and_leaves_the_last_commit() {
    let mut bench = Bench::new();
    let settings = Settings { rate: 1e30, warm_up: 0, ..settings() };
    let state = bench.state();
    let limits = bench.limits(&state, 100, STEPS);
    let once = |limits: &Limits| run(&bench.text, None, &settings, limits, &AtomicBool::new(false), |_| {}, |_| {});
    let error = once(&limits).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.to_string().contains("infinite or no numbers"), "{error}");
    assert!(error.advice().unwrap().contains("--non-finite skip"), "{error}");
    let report = once(&Limits { steps: 1, ..limits }).unwrap();
    assert_eq!((report.steps, report.skipped_steps, report.generation), (1, 0, 1));
}

/// The folder that was left by such a step goes on without it.
#[test]
fn the_program_stops_at_gradients_that_are_no_numbers_or_skips_such_steps() {
    let bench = Bench::new();
    let state = bench.state_of("state");
    let arguments = ARGUMENTS.replace("--rate 3e-3", "--rate 1e30").replace("--warm-up 2", "--warm-up 0");
    let ended = |more: &str| {
        let out = program_with(&bench, &state, 4, &format!("{arguments}{more}")).output().unwrap();
        (out.status.code(), String::from_utf8(out.stderr).unwrap(), out.stdout)
    };
    let (code, told, _) = ended("");
    assert_eq!(code, Some(1), "{told}");
    assert!(told.contains("in step 2 the gradients of \"") && told.contains("--non-finite skip"), "{told}");
    let (code, told, out) = ended(" --non-finite skip");
    assert_eq!(code, Some(0), "{told}");
    for step in 2..=4 {
        let skipped = format!("step {step} is skipped: the gradients of \"");
        assert_eq!(told.matches(&skipped).count(), 1, "{told}");
    }
    let report = last_object(&out);
    assert_eq!((&report["steps"], &report["skipped_steps"], &report["generation"]), (&json!(4), &json!(3), &json!(4)));
    assert_eq!(report["losses"].as_array().unwrap().len(), 4);
}

/// The program, on a state.
fn program(bench: &Bench, state: &Path) -> Command {
    program_to(bench, state, STEPS)
}

/// The program, on a state, to a step.
fn program_to(bench: &Bench, state: &Path, steps: u64) -> Command {
    program_with(bench, state, steps, ARGUMENTS)
}

/// The program, on a state, to a step, with these arguments.
fn program_with(bench: &Bench, state: &Path, steps: u64, arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_train"));
    command.arg("--text").arg(&bench.text).arg("--state").arg(state).args(arguments.split_whitespace());
    command.args(["--steps", &steps.to_string(), "--resume", "--json"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// What the program says at its end.
fn ended(child: Child) -> Value {
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    last_object(&out.stdout)
}

/// The JSON object in the last line of what a program has written.
fn last_object(out: &[u8]) -> Value {
    let text = std::str::from_utf8(out).unwrap();
    let object: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert!(object.is_object(), "{text}");
    object
}

/// What the program says on its way, the losses as text, and the picture of them.
#[test]
fn a_run_says_where_it_begins_and_writes_the_losses_of_all_its_parts() {
    let bench = Bench::new();
    let (state, csv, chart) = (bench.state_of("state"), bench.state_of("losses.csv"), bench.state_of("losses.svg"));
    let trained = |steps: u64| {
        let mut program = program_to(&bench, &state, steps);
        let out = program.arg("--csv").arg(&csv).arg("--chart").arg(&chart).output().unwrap();
        let told = String::from_utf8(out.stderr).unwrap();
        assert!(out.status.success(), "{told}");
        let text = std::fs::read_to_string(&csv).unwrap();
        let mut lines = text.lines();
        assert_eq!(lines.next(), Some("step,loss"));
        let lines: Vec<(u64, f32)> = lines
            .map(|line| line.split_once(',').unwrap())
            .map(|(step, loss)| (step.parse().unwrap(), loss.parse().unwrap()))
            .collect();
        let (numbers, losses): (Vec<u64>, Vec<f32>) = lines.into_iter().unzip();
        assert_eq!(numbers, (1..=steps).collect::<Vec<u64>>());
        let report = last_object(&out.stdout);
        // They are as exact as the object's: the sum over their bits is the same.
        assert_eq!(report["losses_xxh3"], format!("{:016x}", hash(&losses)));
        let of_object: Vec<f32> =
            report["losses"].as_array().unwrap().iter().map(|loss| loss.to_string().parse().unwrap()).collect();
        assert_eq!(of_object, losses);
        let picture = std::fs::read_to_string(&chart).unwrap();
        assert!(picture.starts_with("<svg") && picture.contains("polyline"), "{picture}");
        told
    };
    let told = trained(2);
    assert!(told.contains("the folder has no training: it begins at step 0"), "{told}");
    let told = trained(4);
    assert!(told.contains("it goes on from step 2, generation 2") && !told.contains("begins at"), "{told}");
}

/// What a program says at its end, and on its way, that is interrupted when it has shown its first step.
fn interrupted_after_a_step(mut program: Command) -> (Value, String) {
    let mut child = program.spawn().unwrap();
    let mut told = BufReader::new(child.stderr.take().unwrap());
    let mut text = String::new();
    while !text.contains("step 1/") {
        assert_ne!(told.read_line(&mut text).unwrap(), 0, "{text}");
    }
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    told.read_to_string(&mut text).unwrap();
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(0), "{:?}: {text}", out.status);
    (last_object(&out.stdout), text)
}

/// It is asked for more steps than anybody waits for, so nothing else ends it.
#[test]
fn an_interrupt_ends_the_program_after_its_step_with_all_it_has_made() {
    let bench = Bench::new();
    let state = bench.state_of("state");
    let mut program = program_to(&bench, &state, 1_000_000);
    program.args(["--commit-every", "1000000"]);
    let (report, told) = interrupted_after_a_step(program);
    let made = report["steps"].as_u64().unwrap();
    assert!((1..1_000_000).contains(&made), "{made}");
    // Every step that was shown is durable.
    assert_eq!(told.lines().filter(|line| line.starts_with("step ")).count() as u64, made, "{told}");
    assert_eq!((&report["generation"], report["losses"].as_array().unwrap().len() as u64), (&json!(1), made));
    let report = ended(program_to(&bench, &state, made + 2).spawn().unwrap());
    let whole = ended(program_to(&bench, &bench.state_of("whole"), made + 2).spawn().unwrap());
    for field in ["losses", "losses_xxh3", "steps"] {
        assert_eq!(report[field], whole[field], "{field}, interrupted after step {made}");
    }
}

/// A model whose state and gradients have 58 MB, in no more than 13 MiB for pages.
#[test]
fn a_process_stays_within_its_memory_and_has_the_losses_that_it_has_in_core() {
    let bench = Bench::new();
    let wide = "--layers 8 --width 128 --heads 4 --kv-heads 2 --hidden 1024 --window 16 --batch 1 --commit-every 9";
    let program = |name: &str, steps: u64| program_with(&bench, &bench.state_of(name), steps, wide);
    let done = |name: &str, steps: u64, memory: Bytes| {
        ended(program(name, steps).args(["--memory", &memory.to_string()]).spawn().unwrap())
    };
    let whole = ended(program("whole", 3).spawn().unwrap());
    let refused = |memory: &str| {
        let out = program("little", 3).args(["--memory", memory]).output().unwrap();
        let told = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(1), "{told}");
        let least = told.split_once("give at least ").and_then(|(_, rest)| rest.split_once(" (--memory)"));
        least.unwrap_or_else(|| panic!("{told}")).0.parse::<Bytes>().unwrap()
    };
    // What it names is enough.
    let least = refused("1MiB");
    let limits = [(2, least + Bytes::mib(4)), (3, least)];
    assert!(whole["peak_rss_bytes"].as_u64().unwrap() > limits[0].1.get(), "it would fit: {whole}");
    for (steps, memory) in limits {
        let report = done("little", steps, memory);
        let peak = report["peak_rss_bytes"].as_u64().unwrap();
        assert!(peak <= memory.get(), "{peak} bytes were resident, and {memory} are allowed");
        let losses = report["losses"].as_array().unwrap();
        assert_eq!(losses[..], whole["losses"].as_array().unwrap()[..steps as usize]);
    }
    let manifest = || std::fs::read(bench.state_of("little").join("manifest")).unwrap();
    let before = manifest();
    assert_eq!(refused("20MiB"), least);
    assert_eq!(manifest(), before);
    let again = done("little", 3, least);
    assert_eq!((&again["generation"], &again["losses_xxh3"]), (&json!(2), &whole["losses_xxh3"]));
}

/// Killed anywhere in a step or a commit, it goes on from a whole generation.
#[test]
fn a_training_that_is_killed_goes_on_with_the_same_losses() {
    let seed = std::env::var("OUTCORE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0x2026_1130);
    eprintln!("seed {seed}");
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut bench = Bench::new();
    let whole = ended(program(&bench, &bench.state_of("whole")).spawn().unwrap());
    let (mut kills, mut ends) = (0, 0);
    while kills < 30 {
        let state = bench.state();
        loop {
            let mut child = program(&bench, &state).spawn().unwrap();
            let mut lines = BufReader::new(child.stderr.take().unwrap());
            // Killed some time after one of the lines that it writes, or not at all if it ends before.
            let (mut line, count) = (String::new(), random.next_u32() % 4);
            for _ in 0..count {
                let _ = lines.read_line(&mut line).unwrap();
            }
            std::thread::sleep(Duration::from_micros(u64::from(random.next_u32() % 20_000)));
            let _ = child.kill();
            let mut out = String::new();
            child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
            if child.wait().unwrap().success() {
                ends += 1;
                break;
            }
            kills += 1;
        }
        let report = ended(program(&bench, &state).spawn().unwrap());
        for field in ["losses", "losses_xxh3", "steps"] {
            assert_eq!(report[field], whole[field], "seed {seed}: {field}");
        }
    }
    eprintln!("{kills} kills in {ends} trainings");
}

/// Counts the calls that change what is on the disk, and ends the process just before one of them.
struct Calls {
    made: AtomicU64,
    last: u64,
}

impl Calls {
    fn until(last: u64) -> Arc<Self> {
        Arc::new(Self { made: AtomicU64::new(0), last })
    }

    fn count(&self) -> Injected {
        if self.made.fetch_add(1, Ordering::SeqCst) + 1 == self.last {
            let _ = kill_process(getpid(), Signal::KILL);
        }
        Injected::Nothing
    }

    fn store(self: &Arc<Self>) -> Option<StoreOptions> {
        Some(StoreOptions::new(IoBackend::Auto).hook(self.clone()))
    }
}

impl CallHook for Calls {
    fn before(&self, call: &IoCall) -> Injected {
        if call.kind == IoKind::Write { self.count() } else { Injected::Nothing }
    }
    fn before_folder(&self, _: FolderCall) -> Injected {
        self.count()
    }
    fn may_block(&self) -> bool {
        false
    }
}

/// Steps of a run that is killed at a call.
const FEW: u64 = 4;
const AT_A_CALL: &str = "whatever_call_a_training_is_killed_at_it_goes_on_with_the_same_losses";
/// What the child is told: the text, the state, and at which call it ends.
const CHILD: [&str; 3] = ["OUTCORE_TEXT", "OUTCORE_STATE", "OUTCORE_CALLS"];

/// A run of a model of two layers that are smaller still.
fn smallest(text: &Path, limits: &Limits, say: impl FnMut(&str)) -> Result<Report> {
    let shape = Shape { layers: 2, width: 16, heads: 2, kv_heads: 1, hidden: 40, ..settings().shape };
    let settings = Settings { shape, window: 8, batch: 2, micro: 1, ..settings() };
    run(text, None, &settings, limits, &AtomicBool::new(false), say, |_| {})
}

/// The child of [`whatever_call_a_training_is_killed_at_it_goes_on_with_the_same_losses`].
#[test]
fn a_training_that_is_killed_at_a_call() {
    if !is_child(AT_A_CALL) {
        return;
    }
    let [text, state, calls] = CHILD.map(|name| std::env::var(name).unwrap());
    let store = Calls::until(calls.parse().unwrap()).store();
    let limits = Limits { store, ..limits(Path::new(&state), 24, FEW) };
    smallest(Path::new(&text), &limits, |_| {}).unwrap();
}

/// Each child is killed at a later call than the one before: a write of a page, a write or a sync of a manifest, or its
/// rename.
#[test]
fn whatever_call_a_training_is_killed_at_it_goes_on_with_the_same_losses() {
    const CHILDREN: u64 = 32;
    if is_child(AT_A_CALL) {
        return;
    }
    let mut bench = Bench::new();
    let state = bench.state();
    let whole = smallest(&bench.text, &bench.limits(&state, 4096, FEW), |_| {}).unwrap();
    let (state, calls) = (bench.state(), Calls::until(u64::MAX));
    let counted = Limits { store: calls.store(), ..bench.limits(&state, 24, FEW) };
    assert_eq!(bits(&smallest(&bench.text, &counted, |_| {}).unwrap()), bits(&whole));
    let all = calls.made.load(Ordering::SeqCst);
    assert!(all >= CHILDREN, "{all} calls");
    let (mut kills, mut begins) = (0, BTreeSet::new());
    for child in 0..CHILDREN {
        let (state, at) = (bench.state(), 1 + child * all / CHILDREN);
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "a_training_that_is_killed_at_a_call", "--nocapture"]).env("OUTCORE_SCENE", AT_A_CALL);
        command.env(CHILD[0], &bench.text).env(CHILD[1], &state).env(CHILD[2], at.to_string());
        let out = command.output().unwrap();
        // A run whose threads come in another order may have fewer calls.
        let is_killed = out.status.signal() == Some(Signal::KILL.as_raw());
        assert!(is_killed || out.status.success(), "call {at}: {}", String::from_utf8_lossy(&out.stderr));
        kills += u64::from(is_killed);
        let begin = |said: &str| {
            begins.insert(said.to_owned());
        };
        let report = smallest(&bench.text, &bench.limits(&state, 30, FEW), begin).unwrap();
        assert_eq!(bits(&report), bits(&whole), "killed at call {at} of {all}");
        assert_eq!(report.losses_xxh3, whole.losses_xxh3);
    }
    assert!(kills > CHILDREN * 3 / 4, "{kills} kills show nothing");
    eprintln!("{kills} kills, at up to {all} calls; the next ones said {begins:?}");
    // They were killed in all parts of a run.
    assert!(begins.len() as u64 >= FEW, "{begins:?}");
}

/// Where no file may be as long as the state is, as on a full disk, a run is refused: a new one before its first
/// commit, and one that goes on before its first step. With room, either goes on.
#[test]
fn regression_a_training_without_room_on_the_disk_is_refused_and_goes_on_with_it() {
    let bench = Bench::new();
    let whole = ended(program(&bench, &bench.state_of("whole")).spawn().unwrap());
    let lengths =
        std::fs::read_dir(bench.state_of("whole")).unwrap().map(|file| file.unwrap().metadata().unwrap().len());
    let longest = lengths.max().unwrap();
    let (new, left) = (bench.state_of("new"), bench.state_of("left"));
    assert_eq!(ended(program_to(&bench, &left, 2).spawn().unwrap())["generation"], 2);
    let mut refused = [0, 0];
    for eighths in 1..=8 {
        // In blocks of 512 bytes; a shell that counts in others makes other lengths of them.
        let blocks = longest * eighths / 8 / 512 - 8;
        for (state, refused) in [&new, &left].into_iter().zip(&mut refused) {
            let inner = program(&bench, state);
            let mut limited = Command::new("sh");
            limited.args(["-c", &format!("ulimit -f {blocks}; exec \"$@\""), "sh"]);
            limited.arg(inner.get_program()).args(inner.get_args()).stdout(Stdio::piped()).stderr(Stdio::piped());
            let out = limited.output().unwrap();
            if out.status.success() {
                continue;
            }
            *refused += 1;
            let told = String::from_utf8_lossy(&out.stderr);
            assert_eq!(out.status.code(), Some(1), "{blocks} blocks: {told}");
            assert!(told.contains("ulimit -f") && told.contains("raise that limit"), "{told}");
        }
    }
    assert!(refused.iter().all(|times| *times > 0), "{refused:?} refusals show nothing");
    for state in [new, left] {
        let report = ended(program(&bench, &state).spawn().unwrap());
        assert_eq!((&report["losses"], &report["losses_xxh3"]), (&whole["losses"], &whole["losses_xxh3"]));
    }
}

impl Bench {
    fn state_of(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}
