//! What is asked for is kept: budgets, which files, which policy, where the report goes. What cannot be is said.

use super::*;

/// Reads a file in a mapping once, and says whether the mapping was the kernel's, with the process's memory.
const PASS: &str = r#"
import ctypes, mmap, os, subprocess, sys

file = open(sys.argv[1], "rb")
one = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def status(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))


def passes():
    for at in range(0, len(one), 1 << 20):
        file.seek(at)
        assert one[at : at + 1000] == file.read(1000)


of_kernel = os.path.realpath(sys.argv[1]) in open("/proc/self/maps").read()
"#;

fn with(options: &[&str], program: &str, path: &Path) -> (String, String) {
    let mut command = outcore();
    command.arg("run").args(options).args(["--", "python3", "-c", &format!("{PASS}{program}")]).arg(path);
    let output = command.output().unwrap();
    let [said, told] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    assert!(output.status.success(), "{options:?}: {:?}: {said}{told}", output.status);
    (said, told)
}

const MAPPED: &str = "passes()\nprint('kernel' if of_kernel else 'mapped')";

/// The program's memory grows by 200 MB within a second, and goes again. Pages make room, and then take it.
#[test]
fn the_whole_process_stays_within_its_memory() {
    if !can_run() {
        return;
    }
    const GROW: &str = r#"
import time
passes()
before = status("VmRSS")
kept, begin = [], time.monotonic()
for step in range(100):
    kept.append(mmap.mmap(-1, 2_000_000))
    kept[-1].write(b"\1" * 2_000_000)
    at = (step << 22) % len(one)
    one[at : at + 1000]
    time.sleep(max(0, begin + (step + 1) * 0.01 - time.monotonic()))
passes()
grown = status("VmRSS")
for memory in kept:
    memory.close()
while status("VmRSS") < grown - 200_000_000 + (100 << 20):
    passes()
assert not of_kernel
print(status("VmHWM"), before)
"#;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), 330 << 20);
    let (said, told) = with(&["--memory", "320MiB"], GROW, &path);
    let numbers: Vec<u64> = said.split_whitespace().map(|number| number.parse().unwrap()).collect();
    assert!(numbers[0] <= 320 << 20, "the peak was {} bytes: {told}", numbers[0]);
    // Before it grew, pages had the room.
    assert!(numbers[1] > 240 << 20, "{} bytes were held: {told}", numbers[1]);
    assert!(told.contains("of 320.0 MiB") && told.contains("pages were given"), "{told}");
}

/// Four threads compare what is mapped with what is read, while another one takes and gives back memory.
const THREADS: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static const unsigned char *bytes;
static long size;
static int fd;

static void *reader(void *seed) {
    unsigned state = (unsigned)(long)seed;
    unsigned char expected[3000];
    for (int round = 0; round < 1500; round++) {
        long at = (((long)rand_r(&state) << 31) ^ rand_r(&state)) % (size - (long)sizeof expected);
        if (pread(fd, expected, sizeof expected, at) != sizeof expected) exit(3);
        if (memcmp(expected, bytes + at, sizeof expected) != 0) exit(4);
    }
    return NULL;
}

int main(int argc, char **argv) {
    pthread_t threads[4];
    struct stat found;
    if (argc < 2 || (fd = open(argv[1], O_RDONLY)) < 0 || fstat(fd, &found) != 0) return 2;
    size = found.st_size;
    bytes = mmap(NULL, size, PROT_READ, MAP_PRIVATE, fd, 0);
    for (long i = 0; i < 4; i++) pthread_create(&threads[i], NULL, reader, (void *)(i + 1));
    for (int round = 0; round < 12; round++) {
        char *own = mmap(NULL, 64 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        for (long at = 0; at < 64 << 20; at += 4096) {
            own[at] = 1;
            if (at % (1 << 20) == 0) usleep(2000);
        }
        munmap(own, 64 << 20);
    }
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    printf("all is equal\n");
    return 0;
}
"#;

#[test]
fn threads_read_the_file_while_its_budget_comes_and_goes() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), 150 << 20);
    let (source, threads) = (folder.path().join("threads.c"), folder.path().join("threads"));
    std::fs::write(&source, THREADS).unwrap();
    let built = Command::new("cc").args(["-O1", "-pthread", "-o"]).arg(&threads).arg(&source).output();
    if !built.is_ok_and(|output| output.status.success()) {
        return eprintln!("SKIPPED: there is no C compiler (cc)");
    }
    // The second is less than the program takes at times.
    for memory in ["150MiB", "80MiB"] {
        let mut command = outcore();
        let output = command.args(["run", "--memory", memory, "--"]).arg(&threads).arg(&path).output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{memory}: {:?}: {told}", output.status);
        assert_eq!(String::from_utf8_lossy(&output.stdout), "all is equal\n", "{told}");
        assert!(told.contains("1 file(s) mapped"), "{memory}: {told}");
    }
}

#[test]
fn what_fits_beside_the_program_is_left_to_the_kernel() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), 80 << 20);
    for (options, whose) in [
        (["--memory", "60MiB"].as_slice(), "mapped\n"),
        (&["--memory", "84MiB"], "mapped\n"),
        (&["--memory", "200MiB"], "kernel\n"),
        (&["--budget", "79MiB"], "mapped\n"),
        (&["--budget", "80MiB"], "kernel\n"),
        // There is more than that on any machine that builds this.
        (&[], "kernel\n"),
    ] {
        let (said, told) = with(options, MAPPED, &path);
        assert_eq!(said, whose, "{options:?}: {told}");
        assert_eq!(told.contains("no file was mapped: model.gguf (80.0 MiB) fits"), whose == "kernel\n", "{told}");
    }
}

/// Two files that fit alone do not fit together.
#[test]
fn files_are_to_fit_together() {
    if !can_run() {
        return;
    }
    const SECOND: &str = r#"
other = open(sys.argv[1].replace("model", "second"), "rb")
two = mmap.mmap(other.fileno(), 0, access=mmap.ACCESS_READ)
again = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
maps = open("/proc/self/maps").read()
assert of_kernel and "second.gguf" not in maps and maps.count("model.gguf") == 2
passes()
assert two[:] == other.read()
print("equal")
"#;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), 40 << 20);
    std::fs::copy(&path, folder.path().join("second.gguf")).unwrap();
    let (said, told) = with(&["--budget", "64MiB"], SECOND, &path);
    assert_eq!(said, "equal\n");
    assert!(told.contains("1 file(s) mapped, second.gguf"), "{told}");
}

/// The first of three files fits; its name tells that there are more.
#[test]
fn the_files_of_one_model_are_to_fit_together() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), 40 << 20);
    for (name, whose) in [("m-00001-of-00003.gguf", "mapped\n"), ("m-00001-of-00002.gguf", "kernel\n")] {
        let part = folder.path().join(name);
        std::fs::copy(&path, &part).unwrap();
        let (said, told) = with(&["--budget", "100MiB"], MAPPED, &part);
        assert_eq!(said, whose, "{name}: {told}");
    }
}

/// Without a size, the limit is that of the control group.
#[test]
fn without_a_size_the_control_group_is_the_limit() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), 150 << 20);
    let program = format!("{PASS}{MAPPED}");
    let arguments = [OsStr::new("-c"), program.as_ref(), path.as_ref()];
    let Some((output, told)) = in_group("120MiB", &[], "python3", arguments) else { return };
    assert!(output.status.success() && told.contains("oom_kills=0"), "{told}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "mapped\n", "{told}");
}

/// What the process had of files counted twice, as its own and as page cache that can go. The limit came out above that
/// of the control group, and the kernel ended the program.
#[test]
fn regression_files_of_the_process_count_once() {
    if !can_run() {
        return;
    }
    const BESIDE: &str = r#"
libraries = open(sys.argv[1] + ".other", "rb")
other = mmap.mmap(libraries.fileno(), 0, access=mmap.ACCESS_READ)
assert sum(other[at] for at in range(0, len(other), 4096)) == 0
"#;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), 150 << 20);
    File::create(folder.path().join("model.gguf.other")).unwrap().set_len(60 << 20).unwrap();
    let program = format!("import mmap, sys\n{BESIDE}{PASS}passes()");
    let arguments = [OsStr::new("-c"), program.as_ref(), path.as_ref()];
    let Some((output, told)) = in_group("140MiB", &[], "python3", arguments) else { return };
    assert!(output.status.success() && told.contains("oom_kills=0"), "{told}");
    let (_, rest) = told.split_once("The process held at most ").unwrap_or_else(|| panic!("{told}"));
    let limit = rest.split_once(" of ").and_then(|(_, rest)| rest.split_once(" MiB,")).unwrap().0;
    assert!(limit.parse::<f64>().unwrap() < 140.0, "{told}");
}

#[test]
fn only_files_that_match_are_mapped() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), 40 << 20);
    let whole = format!("{}/*.gguf", folder.path().canonicalize().unwrap().display());
    for (patterns, whose) in [
        (["*.gguf"].as_slice(), "mapped\n"),
        (&[&whole], "mapped\n"),
        (&["*.safetensors", "mod?l.*"], "mapped\n"),
        (&["*.safetensors"], "kernel\n"),
        (&["/nowhere/*.gguf"], "kernel\n"),
    ] {
        let mut options = vec!["--budget", "8MiB"];
        options.extend(patterns.iter().flat_map(|pattern| ["--match", pattern]));
        let (said, told) = with(&options, MAPPED, &path);
        assert_eq!(said, whose, "{patterns:?}: {told}");
        assert_eq!(told.contains("does not match --match"), whose == "kernel\n", "{told}");
    }
}

#[test]
fn policies_are_named() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), 40 << 20);
    for policy in ["lru", "plan", "s3fifo", "arc"] {
        let (said, _) = with(&["--budget", "16MiB", "--policy", policy], MAPPED, &path);
        assert_eq!(said, "mapped\n", "{policy}");
    }
}

/// The timeline is one that `outcore report` draws. What the program starts writes a file of its own.
#[test]
fn a_report_is_written() {
    if !can_run() {
        return;
    }
    const CHILD: &str = "
passes()
if len(sys.argv) == 2:
    again = [sys.executable, '-c', open('/proc/self/cmdline').read().split('\\0')[2], sys.argv[1], 'child']
    os.chdir('/')
    assert subprocess.run(again).returncode == 0
";
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), 40 << 20).canonicalize().unwrap();
    let mut command = outcore();
    command.current_dir(folder.path()).args(["run", "--budget", "8MiB", "--report", "run.json", "--", "python3", "-c"]);
    let output = command.arg(format!("{PASS}{CHILD}")).arg(&path).output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && told.contains("run.json` shows more"), "{told}");
    let found = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
    let written: Vec<_> = found.filter(|path| path.display().to_string().contains("run.json")).collect();
    assert_eq!(written.len(), 2, "{written:?}");
    for file in written {
        let page = folder.path().join("page.html");
        let drawn = outcore().arg("report").arg(&file).arg("-o").arg(&page).output().unwrap();
        assert!(drawn.status.success(), "{}", String::from_utf8_lossy(&drawn.stderr));
        let said = String::from_utf8_lossy(&drawn.stdout);
        for part in [
            "what a run was",
            "timeline by lane",
            "hits, reads and budget over time",
            "layers in memory at the end",
            "stalls by cause",
            "bandwidth by link",
            "hit ratio beside the optimum",
        ] {
            assert!(said.contains(&format!("  {part}\n")), "{part:?} is not in {said}");
        }
        let page = std::fs::read_to_string(page).unwrap();
        for part in ["model.gguf (40.0 MiB)", "read ahead, and ready", "Budget over time", "8.0 MiB"] {
            assert!(page.contains(part), "{part:?} is not in the page");
        }
        let text = std::fs::read_to_string(&file).unwrap();
        let written: serde_json::Value = serde_json::from_str(&text).unwrap();
        let run = &written["run"];
        let read = run["end"]["counts"]["read_bytes"].as_u64().unwrap();
        let samples = run["samples"].as_array().unwrap();
        assert!(read >= 40 << 20 && samples.last().unwrap()["read_bytes"] == read, "{run}");
        // What this project did not write.
        for (from, to, part) in
            [("\"samples\":[", "\"samples\":[{},", "missing field"), ("\"used\":", "\"used\":9", "uneven")]
        {
            std::fs::write(folder.path().join("bad.json"), text.replacen(from, to, 1)).unwrap();
            let refused = outcore().current_dir(folder.path()).args(["report", "bad.json", "-o", "bad.html"]).output();
            let told = String::from_utf8(refused.unwrap().stderr).unwrap();
            assert!(told.contains(part) && told.contains("bad.json"), "{from}: {told}");
        }
    }
}

/// A program may end before the thread that watches has looked once.
#[test]
fn regression_a_short_run_is_drawn_from_its_beginning() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), 40 << 20);
    let report = folder.path().join("run.json");
    let (said, told) = with(&["--budget", "8MiB", "--report", report.to_str().unwrap()], MAPPED, &path);
    assert_eq!(said, "mapped\n", "{told}");
    let written = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
    let written: Vec<_> = written.filter(|path| path.display().to_string().contains("run.json")).collect();
    let [file] = written.as_slice() else { panic!("{written:?}") };
    let run: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    let samples = run["run"]["samples"].as_array().unwrap();
    assert!(samples.len() > 1 && samples[0]["at"] == 0.0 && samples[0]["read_bytes"] == 0, "{run}");
}

#[test]
fn a_report_that_cannot_be_written_is_told_and_the_program_runs() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), 40 << 20);
    let (said, told) = with(&["--budget", "8MiB", "--report", "/dev/full"], MAPPED, &path);
    assert_eq!(said, "mapped\n");
    assert!(told.contains("/dev/full is not written: ") && told.contains("give --report a file"), "{told}");
}

#[test]
fn wrong_settings_are_refused() {
    let refused = |arguments: &[&str], parts: &[&str]| {
        let output = outcore().arg("run").args(arguments).args(["--", "true"]).output().unwrap();
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{arguments:?}");
        for part in parts {
            assert!(told.contains(part), "{arguments:?}: {part:?} is not in {told}");
        }
    };
    refused(&["--budget", "1GiB", "--memory", "1GiB"], &["--budget", "--memory", "cannot be used"]);
    refused(&["--memory", "much"], &["much", "512MiB"]);
    refused(&["--policy", "lrv"], &["lrv", "the closest name is lru"]);
    refused(&["--match", "a**b"], &["a**b", "--match"]);
    if can_run() {
        refused(&["--report", "/nowhere/run.json"], &["/nowhere/run.json", "--report"]);
    }
}

/// The program ran without a limit.
#[test]
fn regression_a_limit_that_cannot_be_kept_is_refused() {
    for (option, size, least) in [
        ("--memory", "4MiB", "16.0 MiB"),
        ("--memory", "15MiB", "16.0 MiB"),
        ("--budget", "1KiB", "8.0 MiB"),
        ("--budget", "6MiB", "8.0 MiB"),
    ] {
        let output = outcore().args(["run", option, size, "--", "echo", "started"]).output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{told}");
        assert!(told.contains(&format!("give {option} {least} or more")), "{told}");
    }
}

/// Where the program, or a file that was left to the kernel, leaves less than four pages, files have these four.
#[test]
fn regression_files_have_a_limit_where_too_little_is_left() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), 40 << 20);
    let (said, told) = with(&["--memory", "16MiB"], MAPPED, &path);
    assert_eq!(said, "mapped\n", "{told}");
    assert!(told.contains("into at most 8.0 MiB") && told.contains("raise --memory"), "{told}");
    const TWO: &str = r#"
import mmap, sys

for path in sys.argv[1] + ".gguf", sys.argv[1]:
    file = open(path, "rb")
    bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    for at in range(0, len(bytes), 1 << 20):
        bytes[at]
"#;
    let small = format!("{}.gguf", path.display());
    std::fs::write(&small, [&b"GGUF"[..], &[0; 6 << 20]].concat()).unwrap();
    let output = run_program(TWO, "8MiB", &path);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.contains("1 file(s) mapped") && told.contains("into at most 8.0 MiB"), "{told}");
}

/// Variables that nobody understands cost the program its mappings, not its life.
#[test]
fn wrong_variables_leave_all_to_the_kernel() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), 40 << 20);
    for variables in [
        [("OUTCORE_RUN_BUDGET", "much"), ("OUTCORE_RUN_POLICY", "lru")],
        [("OUTCORE_RUN_BUDGET", "8388608"), ("OUTCORE_RUN_MEMORY", "8388608")],
        [("OUTCORE_RUN_BUDGET", "8388608"), ("OUTCORE_RUN_POLICY", "none such")],
        [("OUTCORE_RUN_BUDGET", "8388608"), ("OUTCORE_RUN_MATCH", "a**b")],
    ] {
        let mut command = Command::new("python3");
        command.args(["-c", &format!("{PASS}{MAPPED}")]).arg(&path).envs(variables);
        let library = Path::new(env!("CARGO_BIN_EXE_outcore")).with_file_name("liboutcore_preload.so");
        let output = command.env("LD_PRELOAD", library).output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(String::from_utf8_lossy(&output.stdout), "kernel\n", "{told}");
        assert_eq!(told.matches("files stay the kernel's").count(), 1, "{variables:?}: {told}");
    }
}

/// The runtime took the addresses, and then neither its mapping nor the kernel's found any.
#[test]
fn regression_too_few_addresses_cost_the_program_its_mappings_not_its_life() {
    if !can_run() {
        return;
    }
    const LIMITED: &str = r#"
import mmap, os, resource, sys

now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
most = now + (MOST << 20)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
big = open(sys.argv[1], "rb")
one = mmap.mmap(big.fileno(), 0, access=mmap.ACCESS_READ)
for at in range(0, len(one), 1 << 20):
    assert one[at : at + 1000] == os.pread(big.fileno(), 1000, at)
print("kernel" if sys.argv[1] in open("/proc/self/maps").read() else "mapped")
"#;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), 40 << 20);
    for (mib, whose) in [("45", "kernel\n"), ("75", "kernel\n"), ("500", "kernel\n"), ("900", "mapped\n")] {
        let program = LIMITED.replace("MOST", mib);
        let output = run_program(&program, "8MiB", &path.canonicalize().unwrap());
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(String::from_utf8_lossy(&output.stdout), whose, "{mib} MiB: {told}");
        let is_told = told.contains("no file was mapped: model.gguf takes 816.0 MiB of addresses");
        assert_eq!(is_told && told.contains("`ulimit -v`"), whose == "kernel\n", "{told}");
    }
}
