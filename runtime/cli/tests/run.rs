//! The promise: a program that maps model files reads the same bytes under `outcore run`, in as little memory as it was
//! given; and what cannot be run is said.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

#[path = "run/calls.rs"]
mod calls;
#[path = "run/copies.rs"]
mod copies;
#[path = "run/descriptors.rs"]
mod descriptors;
#[path = "run/memmap.rs"]
mod memmap;
#[path = "run/programs.rs"]
mod programs;
#[path = "run/report.rs"]
mod report;
#[path = "run/routing.rs"]
mod routing;
#[path = "run/settings.rs"]
mod settings;
#[path = "run/shards.rs"]
mod shards;
#[path = "run/signals.rs"]
mod signals;
#[path = "run/starts.rs"]
mod starts;
#[path = "run/top.rs"]
mod top;

/// Reads a mapping in several ways, and compares each with the file read as a file.
const PROGRAM: &str = r#"
import hashlib, mmap, os, random, sys

path = sys.argv[1]
expected = hashlib.sha256(open(path, "rb").read()).hexdigest()
file = open(path, "rb")


def mapped():
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def digest(view):
    found = hashlib.sha256()
    for at in range(0, len(view), 1 << 20):
        found.update(view[at : at + (1 << 20)])
    return found.hexdigest()


one = mapped()
for _ in range(2):
    assert digest(memoryview(one)) == expected, "a pass over the mapping"
random.seed(int(sys.argv[2]))
for _ in range(400):
    at = random.randrange(len(one) - 5000)
    file.seek(at)
    assert one[at : at + 5000] == file.read(5000), f"5000 bytes at {at}"
two = mapped()
one.madvise(mmap.MADV_DONTNEED)
one.close()
assert digest(memoryview(two)) == expected, "after the first mapping was closed"
child = os.fork()
if child == 0:
    os._exit(0 if digest(memoryview(two)) == expected else 3)
assert os.waitpid(child, 0)[1] == 0, "the child by fork read something else"
assert digest(memoryview(mapped())) == expected, "mapped anew"
print("all is equal")
"#;

fn outcore() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_outcore"));
    command.env("XDG_CACHE_HOME", concat!(env!("CARGO_TARGET_TMPDIR"), "/cache"));
    command
}

/// The same, of which what hangs is killed after so many seconds.
fn outcore_within(seconds: u32) -> Command {
    let outcore = outcore();
    let mut command = Command::new("timeout");
    command.args(["-s", "KILL", &seconds.to_string()]).arg(outcore.get_program());
    command.envs(outcore.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command
}

/// The program by `outcore run`, in a control group, and what it says on standard error; `None` where there can be no
/// such group, which is said.
fn in_group<A: AsRef<OsStr>>(
    limit: &str,
    options: &[&str],
    program: impl AsRef<OsStr>,
    arguments: impl IntoIterator<Item = A>,
) -> Option<(Output, String)> {
    let outcore = outcore();
    let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/cgroup_run.sh"));
    command.arg(limit).arg(outcore.get_program()).arg("run").args(options).arg("--").arg(program).args(arguments);
    command.envs(outcore.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.code() == Some(77) {
        eprintln!("SKIPPED: {said}");
        return None;
    }
    Some((output, said))
}

/// Whether the library lies beside the program: `scripts/test.sh` builds it. Says so if it does not.
fn can_run() -> bool {
    let there = Path::new(env!("CARGO_BIN_EXE_outcore")).with_file_name("liboutcore_preload.so").exists();
    if !there {
        let required = std::env::var("OUTCORE_REQUIRE").unwrap_or_default();
        assert!(!required.split(',').any(|one| one == "preload"), "skips, though OUTCORE_REQUIRE names preload");
        eprintln!("SKIPPED: the library is not built; cargo build -p outcore-preload");
        return false;
    }
    if let Err(error) = outcore_mapped::Faulting::new() {
        eprintln!("SKIPPED: {error}");
        return false;
    }
    true
}

/// A file that begins as a model does.
fn model(folder: &Path, len: usize) -> PathBuf {
    let path = folder.join("model.gguf");
    let mut state = 1_u64;
    let mut bytes = b"GGUF".to_vec();
    while bytes.len() < len {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    File::create(&path).unwrap().write_all(&bytes[..len]).unwrap();
    path
}

fn run(budget: &str, path: &Path) -> Output {
    run_program(PROGRAM, budget, path)
}

fn run_program(program: &str, budget: &str, path: &Path) -> Output {
    outcore().args(["run", "--budget", budget, "--", "python3", "-c", program]).arg(path).arg("7").output().unwrap()
}

#[test]
fn a_program_reads_the_same_bytes_in_less_memory() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), (70 << 20) + 12345);
    for (budget, mechanism) in [("8MiB", ""), ("24MiB", ""), ("60MiB", ""), ("8MiB", "copy"), ("60MiB", "copy")] {
        let output = outcore()
            .args(["run", "--budget", budget, "--", "python3", "-c", PROGRAM])
            .arg(&path)
            .arg("7")
            .env("OUTCORE_RUN_MECHANISM", mechanism)
            .output()
            .unwrap();
        let [said, told] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
        let status = output.status;
        assert!(status.success() && said == "all is equal\n", "{budget} {mechanism}: {status:?}: {said}{told}");
        assert!(told.contains("1 file(s) mapped") && told.contains("read"), "{budget}: {told}");
        // The child has none of it, and tells nothing.
        assert_eq!(told.matches("file(s) mapped").count(), 1, "{budget}: {told}");
    }
}

/// The offset at which a child maps a file was once 32 bits of zeros below 32 bits of whatever the stack held.
#[test]
fn regression_children_by_fork_map_the_file_from_its_start() {
    const PROGRAM: &str = r#"
import mmap, os, sys

file = open(sys.argv[1], "rb")
one = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
begin, end = file.read(100), one[-100:]
for _ in range(16):
    child = os.fork()
    if child == 0:
        os._exit(0 if one[:100] == begin and one[-100:] == end else 3)
    assert os.waitpid(child, 0)[1] == 0, "the child by fork read something else"
print("all is equal")
"#;
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), (33 << 20) + 12345);
    let output = run_program(PROGRAM, "8MiB", &path);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "all is equal\n", "{output:?}");
}

#[test]
fn a_file_that_fits_is_left_to_the_kernel() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), 40 << 20);
    let output = run("64MiB", &path);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(!String::from_utf8_lossy(&output.stderr).contains("file(s) mapped"), "{output:?}");
}

#[test]
fn what_cannot_be_run_is_said() {
    let failed = |arguments: &[&str]| {
        let output = outcore().args(arguments).output().unwrap();
        assert!(!output.status.success(), "{arguments:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    if can_run() {
        let told = failed(&["run", "--budget", "64MiB", "--", "no-such-program"]);
        assert!(told.contains("no-such-program") && told.contains("PATH"), "{told}");
    }
    assert!(failed(&["run", "--budget", "64MiB"]).contains("COMMAND"));
    assert!(failed(&["run", "--budget", "much", "--", "true"]).contains("much"));
    // A program that has no library, neither beside it nor in it. Release builds have one.
    if cfg!(debug_assertions) {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let alone = folder.path().join("outcore");
        std::fs::hard_link(env!("CARGO_BIN_EXE_outcore"), &alone).unwrap();
        let output = Command::new(&alone).args(["run", "--budget", "64MiB", "--", "true"]).output().unwrap();
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{told}");
        assert!(told.contains("liboutcore_preload.so is not there") && told.contains("cargo install --path"), "{told}");
    }
    let output = outcore()
        .args(["run", "--budget", "64MiB", "--", "true"])
        .env("OUTCORE_PRELOAD", "/nowhere/library.so")
        .output()
        .unwrap();
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(told.contains("/nowhere/library.so") && told.contains("OUTCORE_PRELOAD"), "{told}");
}
