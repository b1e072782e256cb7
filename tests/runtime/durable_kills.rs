//! The promise: whatever call a process is killed at that works on a durable folder, the folder has a whole generation
//! afterwards: that of the last commit that has returned, or the one behind it. A file of exported tensors is whole, or
//! is not there.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use outcore::durable::{Durable, DurableOptions, DurableReader};
use outcore::testing::{CallHook, FolderCall, Injected, IoCall, IoKind};
use outcore::{DType, Error, ErrorKind, Runtime, Tensor};
use outcore_testkit::harness::{AnyDevice, is_child, whole_name};

use super::durable::{PAGE, folder, host};

/// What a process does until it is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    /// Writes and commits, on the folder that another one was killed at.
    Steps,
    /// Makes a folder, and commits for the first time.
    FirstCommit,
    /// Writes, rolls back, and commits.
    RollBack,
    /// Writes a file of exported tensors where there is none.
    Export,
    /// Writes one over an older one.
    ExportAgain,
    /// Commits on a disk that is full at another call each time, until it has room.
    FullDisk,
}

impl Work {
    const ALL: [Self; 6] =
        [Self::Steps, Self::FirstCommit, Self::RollBack, Self::Export, Self::ExportAgain, Self::FullDisk];

    fn name(self) -> String {
        format!("{self:?}")
    }
}

/// Ends the process at a call: a write of a page, or any call for the folder. And is a disk that gets full.
struct Kill {
    left: AtomicU64,
    seen: AtomicU64,
    /// Pages find no room.
    full: AtomicBool,
    /// So many calls for the manifest's room until one finds none.
    until_full: AtomicU64,
}

impl Kill {
    const NEVER: u64 = u64::MAX;

    fn after(calls: u64) -> Arc<Self> {
        let [left, seen, until_full] = [calls, 0, Self::NEVER].map(AtomicU64::new);
        Arc::new(Self { left, seen, full: AtomicBool::new(false), until_full })
    }

    fn count(&self) {
        self.seen.fetch_add(1, Ordering::SeqCst);
        if self.left.fetch_sub(1, Ordering::SeqCst) == 1 {
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        }
    }
}

impl CallHook for Kill {
    fn before(&self, call: &IoCall) -> Injected {
        if call.kind != IoKind::Write {
            return Injected::Nothing;
        }
        self.count();
        if self.full.load(Ordering::SeqCst) { Injected::Errno(libc::ENOSPC) } else { Injected::Nothing }
    }

    fn before_folder(&self, call: FolderCall) -> Injected {
        self.count();
        let needs_room = matches!(call, FolderCall::TakeRoom | FolderCall::Write);
        if needs_room && self.until_full.load(Ordering::SeqCst) != Self::NEVER {
            let left = self.until_full.fetch_sub(1, Ordering::SeqCst);
            if left == 1 {
                self.until_full.store(Self::NEVER, Ordering::SeqCst);
                return Injected::Errno(libc::ENOSPC);
            }
        }
        Injected::Nothing
    }

    fn may_block(&self) -> bool {
        false
    }
}

const STATE: &str = "OUTCORE_STATE";
const CALLS: &str = "OUTCORE_CALLS";
/// Pages of the tensor that is written in every step: more than there are frames.
const PAGES: u64 = 12;
const FRAMES: u64 = 5;
/// How many steps a process makes if it is not killed.
const STEPS: u64 = 4;

/// What a page holds after a step.
fn byte_of(step: u64, page: u64) -> u8 {
    (step * 31 + page * 7) as u8
}

fn pages(tensor: &Tensor) -> impl Iterator<Item = (u64, Tensor)> {
    (0..tensor.size().get() / PAGE).map(|page| (page, tensor.rows(page * PAGE..(page + 1) * PAGE).unwrap()))
}

fn write(runtime: &Runtime, tensor: &Tensor, step: u64) {
    for (page, rows) in pages(tensor) {
        runtime.write(&rows).unwrap().fill(byte_of(step, page));
    }
}

fn tensor_of(state: &Durable, pages: u64) -> Tensor {
    state.tensor("a").or_else(|_| state.alloc("a", DType::U8, &[pages * PAGE])).unwrap()
}

/// Writes a step and commits it.
fn step(runtime: &Runtime, state: &Durable, pages: u64, step: u64) {
    write(runtime, &tensor_of(state, pages), step);
    state.set_note(&step.to_le_bytes());
    assert_eq!(state.commit().unwrap().get(), step);
}

/// The newest generation, every byte of which was compared.
fn checked(runtime: &Runtime, state: &Durable) -> u64 {
    let step = state.generation().get();
    if step == 0 {
        assert!(state.tensors().is_empty() && state.note().is_empty());
        return 0;
    }
    assert_eq!(state.note(), step.to_le_bytes());
    for (page, rows) in pages(&state.tensor("a").unwrap()) {
        let bytes = runtime.read(&rows).unwrap().bytes().into_owned();
        assert!(bytes.iter().all(|byte| *byte == byte_of(step, page)), "page {page} of generation {step}");
    }
    step
}

fn open(path: &Path, hook: Option<Arc<dyn CallHook>>) -> (Runtime, Durable) {
    let runtime = host(FRAMES, hook);
    let state = runtime.open_durable(path, DurableOptions::default()).unwrap();
    (runtime, state)
}

/// What the tests below kill.
#[test]
fn a_process_that_is_killed_at_a_call() {
    let Some(work) = Work::ALL.into_iter().find(|work| is_child(&work.name())) else { return };
    // The name of this test may be on the same line.
    println!();
    let hook = Kill::after(std::env::var(CALLS).unwrap().parse().unwrap());
    let path = PathBuf::from(std::env::var_os(STATE).unwrap());
    if matches!(work, Work::Export | Work::ExportAgain) {
        let reader = DurableReader::open(&path, None).unwrap().hook(hook.clone());
        reader.export(path.with_extension("safetensors")).unwrap();
        println!("exported");
        return println!("calls {}", hook.seen.load(Ordering::SeqCst));
    }
    let (runtime, state) = open(&path, Some(hook.clone()));
    let from = checked(&runtime, &state);
    match work {
        Work::Steps => {
            for next in from + 1..=from + STEPS {
                step(&runtime, &state, PAGES, next);
                println!("committed {next}");
            }
        }
        Work::FirstCommit => {
            step(&runtime, &state, PAGES, 1);
            println!("committed 1");
        }
        Work::RollBack => {
            for wrong in [101, 102] {
                write(&runtime, &tensor_of(&state, PAGES), wrong);
                state.set_note(b"wrong");
                state.rollback().unwrap();
                assert_eq!(checked(&runtime, &state), from);
            }
            step(&runtime, &state, PAGES, from + 1);
            println!("committed {}", from + 1);
        }
        Work::FullDisk => {
            write(&runtime, &tensor_of(&state, PAGES), from + 1);
            state.set_note(&(from + 1).to_le_bytes());
            let is_full = |error: Error| assert_eq!(error.kind(), ErrorKind::DiskFull, "{error}");
            hook.full.store(true, Ordering::SeqCst);
            (0..2).for_each(|_| is_full(state.commit().unwrap_err()));
            hook.full.store(false, Ordering::SeqCst);
            let mut failed = 0;
            loop {
                hook.until_full.store(failed + 1, Ordering::SeqCst);
                match state.commit() {
                    Ok(made) => break assert_eq!(made.get(), from + 1),
                    Err(error) => is_full(error),
                }
                failed += 1;
                assert!(state.generation().get() == from && failed < 100, "{failed} commits have failed");
            }
            hook.until_full.store(Kill::NEVER, Ordering::SeqCst);
            println!("committed {}", from + 1);
            // Blocks, and a head.
            assert!(failed >= 2, "{failed} calls found no room");
            step(&runtime, &state, PAGES, from + 2);
            println!("committed {}", from + 2);
        }
        Work::Export | Work::ExportAgain => {}
    }
    println!("calls {}", hook.seen.load(Ordering::SeqCst));
}

/// A folder of two generations.
fn prepared(dir: &Path, pages: u64) -> PathBuf {
    let path = dir.join("prepared");
    let (runtime, state) = open(&path, None);
    (1..=2).for_each(|next| step(&runtime, &state, pages, next));
    path
}

/// A copy of a folder that nobody has open.
fn copy(from: &Path, to: &Path) {
    let _ = fs::remove_dir_all(to);
    fs::create_dir(to).unwrap();
    fs::set_permissions(to, fs::metadata(from).unwrap().permissions()).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// How a process ended.
struct Ended {
    was_killed: bool,
    /// The last commit that has returned.
    committed: Option<u64>,
    /// The calls of one that was not killed.
    calls: Option<u64>,
    exported: bool,
}

impl Ended {
    fn of(output: &Output, what: &str) -> Self {
        let text = String::from_utf8_lossy(&output.stdout);
        let was_killed = output.status.signal() == Some(libc::SIGKILL);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(was_killed || output.status.success(), "{what}: {:?}: {text}{errors}", output.status);
        let last = |of: &str| text.lines().filter_map(|line| line.strip_prefix(of)?.trim().parse().ok()).next_back();
        let (committed, calls) = (last("committed "), last("calls "));
        assert!(was_killed || calls.is_some(), "{what}: {text}{errors}");
        Self { was_killed, committed, calls, exported: text.lines().any(|line| line == "exported") }
    }
}

/// Runs processes that do this, each on what `on` makes ready. The first one goes on to the end. The others are killed,
/// one at each of its calls, or at some that are evenly spaced if it has more than `OUTCORE_KILLS` (100). Of those that
/// do steps there are so many in any case, because each finds another folder. `check` looks at what they leave behind.
fn kill_at_all_calls(work: Work, path: &Path, mut on: impl FnMut(u64), mut check: impl FnMut(u64, Ended)) {
    let name = whole_name("a_process_that_is_killed_at_a_call");
    let run = |calls: u64| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", &name, "--nocapture"]).env("OUTCORE_SCENE", work.name());
        command.env(STATE, path).env(CALLS, calls.to_string());
        Ended::of(&command.output().unwrap(), &format!("{work:?}, killed at call {calls}"))
    };
    on(0);
    let whole = run(Kill::NEVER);
    let calls = whole.calls.unwrap();
    check(0, whole);
    let most = std::env::var("OUTCORE_KILLS").ok().and_then(|most| most.parse().ok()).unwrap_or(100u64);
    let kills = if work == Work::Steps { most } else { calls.min(most) };
    let mut landed = 0;
    for kill in 1..=kills {
        on(kill);
        let ended = run(if kills > calls { (kill - 1) % calls + 1 } else { kill * calls / kills });
        landed += u64::from(ended.was_killed);
        check(kill, ended);
    }
    eprintln!("{work:?}: {landed} of {kills} processes were killed, at {calls} calls");
    // How many writes are under way when one fails, and a commit with it, differs a little.
    assert!(landed >= kills * 3 / 4, "{work:?}: {landed} of {kills} kills");
}

/// What is there after a kill: the last generation whose commit has returned, or the one behind it, byte for byte.
/// Returns its number.
fn left_behind(path: &Path, before: u64, ended: &Ended) -> u64 {
    let last = ended.committed.unwrap_or(before);
    let (runtime, state) = open(path, None);
    let found = checked(&runtime, &state);
    assert!(found == last || ended.was_killed && found == last + 1, "generation {found}, and {last} was committed");
    found
}

/// Each process goes on where the one before it was killed.
#[test]
fn whatever_call_it_is_killed_at_the_newest_generation_is_whole() {
    let dir = folder();
    let (from, path) = (prepared(dir.path(), PAGES), dir.path().join("state"));
    let (mut last, mut newest) = (2, 0);
    let on = |kill: u64| {
        if kill == 0 {
            copy(&from, &path);
        }
    };
    kill_at_all_calls(Work::Steps, &path, on, |_, ended| {
        last = left_behind(&path, last, &ended);
        newest = newest.max(last);
    });
    assert!(newest >= 10, "{newest} generations");
}

#[test]
fn whatever_call_it_is_killed_at_a_new_folder_is_empty_or_has_its_first_generation() {
    let dir = folder();
    let path = dir.path().join("state");
    let on = |_| drop(fs::remove_dir_all(&path));
    kill_at_all_calls(Work::FirstCommit, &path, on, |_, ended| {
        let found = left_behind(&path, 0, &ended);
        // And it goes on from there.
        let (runtime, state) = open(&path, None);
        step(&runtime, &state, PAGES, found + 1);
        assert_eq!(checked(&runtime, &state), found + 1);
    });
}

#[test]
fn whatever_call_it_is_killed_at_nothing_comes_back_that_was_rolled_back() {
    let dir = folder();
    let (from, path) = (prepared(dir.path(), PAGES), dir.path().join("state"));
    let on = |_| copy(&from, &path);
    kill_at_all_calls(Work::RollBack, &path, on, |_, ended| _ = left_behind(&path, 2, &ended));
}

#[test]
fn whatever_call_it_is_killed_at_a_full_disk_has_cost_nothing() {
    let dir = folder();
    let (from, path) = (prepared(dir.path(), PAGES), dir.path().join("state"));
    let on = |_| copy(&from, &path);
    kill_at_all_calls(Work::FullDisk, &path, on, |_, ended| _ = left_behind(&path, 2, &ended));
}

/// Pages of a tensor whose export is several writes.
const EXPORTED: u64 = 150;

#[test]
fn whatever_call_it_is_killed_at_an_export_is_whole_or_not_there() {
    let dir = folder();
    let path = prepared(dir.path(), EXPORTED);
    let [whole, file] = [dir.path().join("whole"), path.with_extension("safetensors")];
    let reader = || DurableReader::open(&path, None).unwrap();
    reader().export(&whole).unwrap();
    let whole = fs::read(&whole).unwrap();
    for (work, older) in [(Work::Export, None), (Work::ExportAgain, Some(b"older".to_vec()))] {
        let on = |_| match &older {
            Some(older) => fs::write(&file, older).unwrap(),
            None => drop(fs::remove_file(&file)),
        };
        kill_at_all_calls(work, &path, on, |kill, ended| {
            let found = fs::read(&file).ok();
            let is_new = found.as_ref() == Some(&whole);
            assert!(is_new || found == older, "{work:?}, kill {kill}: neither the whole file nor what was there");
            assert!(is_new || !ended.exported, "{work:?}, kill {kill}: it was exported");
            // The folder is as it was, and nothing that is left beside is in the way.
            reader().verify().unwrap();
        });
        reader().export(&file).unwrap();
        assert!(fs::read(&file).unwrap() == whole);
    }
    let names = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let (left, others): (Vec<_>, Vec<_>) = names.partition(|name| name.starts_with(".outcore-export-"));
    assert!(!left.is_empty() && others.len() == 3, "{left:?}, {others:?}");
}
