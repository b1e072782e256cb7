//! At the end a few lines say what happened: however the program ends, if the C library learns of it. Where nothing
//! was mapped, it says why.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;

use super::*;

/// Maps the file and reads it once.
const PASS: &str = r#"
import ctypes, mmap, os, signal, sys

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # Whoever runs the tests may ignore it.
file = open(sys.argv[1], "rb")
one = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
for at in range(0, len(one), 1 << 20):
    one[at : at + 1000]
"#;

fn program(program: &str, path: &Path) -> (std::process::ExitStatus, String) {
    let output = run_program(&format!("{PASS}{program}"), "8MiB", path);
    (output.status, String::from_utf8(output.stderr).unwrap())
}

#[test]
fn a_few_lines_say_what_was_read_and_what_waited() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), 40 << 20);
    let (status, told) = program("", &path);
    assert!(status.success(), "{told}");
    let begins = ["1 file(s) mapped", "Pages were used", "The order of use", "Waiting took", "The budget was"];
    assert_eq!(told.lines().count(), begins.len(), "{told}");
    let is_begun = |(line, begin): (&str, &str)| line.starts_with(&format!("outcore: {begin}"));
    assert!(told.lines().zip(begins).all(is_begun), "{told}");
    for part in ["outcore: 1 file(s) mapped, model.gguf (40.0 MiB): ", "Waiting took ", "The budget was 8.0 MiB."] {
        assert!(told.contains(part), "{part:?} is not in {told}");
    }
    let number = |behind: &str| -> f64 {
        let (_, rest) = told.split_once(behind).unwrap_or_else(|| panic!("{behind:?} is not in {told}"));
        let digits: String = rest.chars().take_while(|one| one.is_ascii_digit() || *one == '.').collect();
        digits.trim_end_matches('.').parse().unwrap()
    };
    assert!(number("(40.0 MiB): ") >= 40.0 && number("into at most ") <= 8.0, "{told}");
    let (used, there) = (number("were used "), number("times: "));
    let (ahead, waited) = (number("were there, "), number("read ahead, "));
    assert!(used >= 20.0 && used == there + ahead + waited && waited >= 1.0, "{told}");
    assert!(!told.contains("copied") && !told.contains("grew"), "{told}");
    // The file has no experts, so nothing is said of them.
    assert!(told.contains("/s while reading)") && !told.contains("router"), "{told}");
    let ratio = number("(hit ratio ");
    assert!((ratio - there / used).abs() <= 0.006, "{told}");
}

#[test]
fn weights_that_were_copied_are_told() {
    if !can_run() {
        return;
    }
    const COPY: &str = r#"
c = ctypes.CDLL(None)
c.mmap.restype = ctypes.c_void_p
half = len(one) // 2
# Anonymous memory that stays to the end, as weights do.
room = c.mmap(None, ctypes.c_size_t(half), 3, 0x22, -1, ctypes.c_long(0))
for at in range(0, half, 1 << 20):
    ctypes.memmove(room + at, one[at : at + (1 << 20)], 1 << 20)
"#;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), 96 << 20);
    // Copied while the file is read first, so the pass comes without one before it.
    let copy = format!("{}{COPY}", PASS.split("for at").next().unwrap());
    let output = run_program(&copy, "8MiB", &path);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && told.contains("it copied weights. outcore cannot keep"), "{told}");
}

#[test]
fn it_is_told_however_the_program_ends() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), 40 << 20);
    const HANDLED: &str = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\nos.kill(os.getpid(), signal.SIGTERM)";
    for (end, code, signal, is_told) in [
        ("sys.exit(3)", Some(3), None, true),
        ("raise RuntimeError", Some(1), None, true),
        (HANDLED, Some(5), None, true),
        ("os.kill(os.getpid(), signal.SIGTERM)\nsignal.pause()", None, Some(15), true),
        ("os.kill(os.getpid(), signal.SIGHUP)\nsignal.pause()", None, Some(1), true),
        ("os.kill(os.getpid(), signal.SIGUSR1)\nsignal.pause()", None, Some(10), false),
        ("os._exit(4)", Some(4), None, false),
    ] {
        let (status, told) = program(end, &path);
        assert_eq!((status.code(), status.signal()), (code, signal), "{end}: {told}");
        assert_eq!(told.contains("1 file(s) mapped"), is_told, "{end}: {told}");
    }
}

#[test]
fn where_nothing_is_mapped_the_reason_is_told() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), 40 << 20);
    const WRITABLE: &str =
        "import mmap, sys; f = open(sys.argv[1], 'r+b'); mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)";
    let output = run_program(WRITABLE, "8MiB", &path);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.contains("no file was mapped: model.gguf may be written by the program"), "{told}");
    // Without a model there is nothing to tell.
    for nothing in
        ["pass", "import mmap, sys; f = open(sys.executable, 'rb'); mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)"]
    {
        let output = run_program(nothing, "8MiB", &path);
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    }
}

/// What copies weights is told from what reads a file through.
#[test]
fn engines_that_read_the_file_into_memory_are_told() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), 64 << 20);
    const COPIES: &str = "import sys; weights = open(sys.argv[1], 'rb').read()";
    const READS: &str = "import sys; f = open(sys.argv[1], 'rb')\nwhile f.read(1 << 20): pass";
    const HEADER: &str = "import sys; f = open(sys.argv[1], 'rb'); f.read(1 << 20); other = bytearray(64 << 20)";
    const BOTH: &str = "import mmap, sys; f = open(sys.argv[1], 'rb'); weights = f.read(); \
                        m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ); m[5]";
    let told = |options: &[&str], program: &str| {
        let mut command = outcore();
        command.arg("run").args(options).args(["--", "python3", "-c", program]).arg(&path).arg("--no-warmup");
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let small = ["--budget", "8MiB"];
    let copies = told(&small, COPIES);
    for part in ["no file was mapped: the program read model.gguf (64.0 MiB) into memory of its own", "copies"] {
        assert!(copies.contains(part) && copies.lines().count() == 1, "{part:?} is not in {copies}");
    }
    for nothing in [READS, HEADER] {
        assert_eq!(told(&small, nothing), "");
    }
    assert!(told(&small, BOTH).starts_with("outcore: 1 file(s) mapped"));
    assert_eq!(told(&["--budget", "8MiB", "--match", "*.safetensors"], COPIES), "", "another one is meant");
    // By the C library's streams, as llama.cpp does; and the option that has it do so is named.
    let (source, program) = (folder.path().join("copy.c"), folder.path().join("copy"));
    std::fs::write(&source, COPY).unwrap();
    let built = Command::new("cc").arg("-O1").arg("-o").arg(&program).arg(&source).output();
    if !built.is_ok_and(|output| output.status.success()) {
        return eprintln!("SKIPPED: there is no C compiler (cc)");
    }
    let mut command = outcore();
    let output = command.args(["run", "--budget", "8MiB", "--"]).arg(&program).arg(&path).arg("--no-mmap").output();
    let output = output.unwrap();
    let copies = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && copies.contains("was given --no-mmap: leave that out"), "{output:?}");
}

/// Reads its first argument into memory.
const COPY: &str = r#"
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv) {
    FILE *file = argc > 1 ? fopen(argv[1], "rb") : NULL;
    if (!file || fseek(file, 0, SEEK_END) != 0) return 2;
    long size = ftell(file);
    char *bytes = malloc(size);
    rewind(file);
    return bytes && fread(bytes, 1, size, file) == (size_t)size && bytes[0] == 'G' ? 0 : 3;
}
"#;

/// Maps its first argument by a raw system call, or by the C library; and its second one by the latter.
const RAW: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static long opened(const char *path, int is_raw)
{
    struct stat found;
    int fd = open(path, O_RDONLY);
    if (fd < 0 || fstat(fd, &found)) exit(2);
    void *bytes = is_raw ? (void *)syscall(SYS_mmap, NULL, found.st_size, PROT_READ, MAP_SHARED, fd, 0)
                         : mmap(NULL, found.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (bytes == MAP_FAILED) exit(3);
    return ((unsigned char *)bytes)[0] == 'G' ? 0 : 4;
}

int main(int argc, char **argv)
{
    int failed = opened(argv[1], RAW) || (argc > 2 && opened(argv[2], 0));
    /* Once more, to read it. */
    return failed || open(argv[1], O_RDONLY) < 0;
}
"#;

#[test]
fn mappings_by_raw_system_calls_are_told() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), 40 << 20);
    let other = folder.path().join("other.gguf");
    std::fs::copy(&path, &other).unwrap();
    let source = folder.path().join("raw.c");
    std::fs::write(&source, RAW).unwrap();
    for raw in [1, 0] {
        let program = folder.path().join(format!("raw-{raw}"));
        let built = Command::new("cc").arg(format!("-DRAW={raw}")).arg("-o").arg(&program).arg(&source).output();
        if !built.is_ok_and(|output| output.status.success()) {
            return eprintln!("SKIPPED: there is no C compiler (cc)");
        }
        for (others, budget) in [([].as_slice(), "8MiB"), (&[&other], "8MiB"), (&[], "60MiB")] {
            let mut command = outcore();
            let output = command.args(["run", "--budget", budget, "--"]).arg(&program).arg(&path).args(others).output();
            let output = output.unwrap();
            let told = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{told}");
            let is_told =
                told.contains("the kernel maps model.gguf (40.0 MiB): the program asked it by a raw system call");
            assert_eq!(is_told, raw == 1, "{told}");
            let is_mapped = budget == "8MiB" && (raw == 0 || !others.is_empty());
            assert_eq!(told.contains("file(s) mapped"), is_mapped, "{told}");
        }
    }
}

/// Files are opened as they were without the library, by all functions there are: flags, modes, errors.
#[test]
fn files_are_opened_as_ever() {
    if !can_run() {
        return;
    }
    const OPENS: &str = r#"
import ctypes, errno, os, sys

c = ctypes.CDLL(None, use_errno=True)
c.fopen.restype = c.fopen64.restype = ctypes.c_void_p
folder = os.path.dirname(sys.argv[1])
os.umask(0o027)
at = os.open(folder, os.O_RDONLY)
for name in ("open", "open64", "openat", "openat64"):
    path = os.path.join(folder, name).encode()
    first = [at, name.encode()] if "at" in name else [path]
    fd = getattr(c, name)(*first, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
    assert fd >= 0 and os.write(fd, name.encode()) == len(name), name
    assert os.stat(path).st_mode & 0o777 == 0o640 and not os.get_inheritable(fd), name
    assert getattr(c, name)(*first, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666) == -1, name
    assert ctypes.get_errno() == errno.EEXIST, name
for name in ("__open_2", "__open64_2", "__openat_2", "__openat64_2"):
    first = [at, b"open"] if "at" in name else [os.path.join(folder, "open").encode()]
    fd = getattr(c, name)(*first, os.O_RDONLY)
    assert fd >= 0 and os.read(fd, 9) == b"open", name
    os.lseek(fd, 0, 0)
    assert getattr(c, name)(*([at] if "at" in name else []), b"none such", os.O_RDONLY) == -1, name
    assert ctypes.get_errno() == errno.ENOENT, name
for name in ("fopen", "fopen64"):
    assert not getattr(c, name)(b"/none/such", b"r") and ctypes.get_errno() == errno.ENOENT, name
    stream = getattr(c, name)(os.path.join(folder, "open").encode(), b"re")
    text = ctypes.create_string_buffer(10)
    assert c.fread(text, 1, 9, ctypes.c_void_p(stream)) == 4 and text.value == b"open", name
# The model itself.
for fd in [c.open(sys.argv[1].encode(), os.O_RDONLY), c.openat(-100, sys.argv[1].encode(), os.O_PATH)]:
    assert os.fstat(fd).st_size == 40 << 20
"#;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let output = run_program(OPENS, "8MiB", &model(folder.path(), 40 << 20));
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

/// Maps its first argument, prints a checksum.
const C: &str = r#"
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>

int main(int argc, char **argv) {
    struct stat found;
    int fd = open(argv[argc - 1], O_RDONLY);
    if (fd < 0 || fstat(fd, &found) != 0) return 2;
    const unsigned char *bytes = mmap(NULL, found.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (bytes == MAP_FAILED) return 3;
    unsigned long sum = 0;
    for (long at = 0; at < found.st_size; at++) sum = sum * 31 + bytes[at];
    printf("%lu\n", sum);
    return 0;
}
"#;

#[test]
fn programs_that_do_not_take_the_library_are_told_and_run() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), 40 << 20);
    let source = folder.path().join("sum.c");
    std::fs::write(&source, C).unwrap();
    let build = |name: &str, options: &[&str]| {
        let program = folder.path().join(name);
        let built = Command::new("cc").arg("-O1").args(options).arg("-o").arg(&program).arg(&source).output();
        built.is_ok_and(|output| output.status.success()).then_some(program)
    };
    let run = |program: &Path| {
        let output = outcore().args(["run", "--budget", "8MiB", "--"]).arg(program).arg(&path).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap())
    };
    let Some(usual) = build("usual", &[]) else { return eprintln!("SKIPPED: there is no C compiler (cc)") };
    let [expected, told] = run(&usual);
    assert!(told.contains("1 file(s) mapped") && told.lines().count() == 5, "{told}");
    // A script is what runs it.
    let script = folder.path().join("script");
    let line = format!("#!/usr/bin/env -S {} \n", usual.display());
    std::fs::write(&script, line).unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let [said, told] = run(&script);
    assert!(said == expected && told.contains("1 file(s) mapped") && told.lines().count() == 5, "{told}");
    with_capabilities(&usual, &path, &expected);
    let Some(alone) = build("alone", &["-static"]) else {
        return eprintln!("SKIPPED: the C library cannot be linked statically here");
    };
    let [said, told] = run(&alone);
    assert_eq!(said, expected);
    assert!(
        told.contains("is statically linked: its mappings stay the kernel's") && told.lines().count() == 1,
        "{told}"
    );
}

/// The kernel has the dynamic linker ignore the library for users that a program's file gives rights.
fn with_capabilities(program: &Path, path: &Path, expected: &str) {
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::process::CommandExt;
    const NOBODY: u32 = 65534;
    const SET: &str = "import os, sys; os.setxattr(sys.argv[1], 'security.capability', bytes.fromhex(sys.argv[2]))";
    // Version 2, effective; of what is permitted, to bind low ports. Then one that gives nothing.
    let (ports, none) = ("0100000200040000000000000000000000000000", "0000000200000000000000000000000000000000");
    if std::fs::metadata("/proc/self").unwrap().uid() != 0 {
        return eprintln!("SKIPPED: only root can give a file capabilities, and be another user");
    }
    // Where anybody may go.
    let folder = tempfile::tempdir_in("/tmp").unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let place = |from: &Path, name: &str| {
        let to = folder.path().join(name);
        std::fs::copy(from, &to).unwrap();
        to
    };
    let beside = Path::new(env!("CARGO_BIN_EXE_outcore"));
    let (outcore, program, path) = (place(beside, "outcore"), place(program, "usual"), place(path, "model.gguf"));
    place(&beside.with_file_name("liboutcore_preload.so"), "liboutcore_preload.so");
    for (capabilities, user, is_told) in [(none, NOBODY, false), (ports, 0, false), (ports, NOBODY, true)] {
        let set = Command::new("python3").args(["-c", SET]).arg(&program).arg(capabilities).output().unwrap();
        if !set.status.success() {
            return eprintln!("SKIPPED: files have no capabilities here");
        }
        let mut command = Command::new(&outcore);
        command.args(["run", "--budget", "8MiB", "--"]).arg(&program).arg(&path);
        let output = command.current_dir("/").uid(user).gid(user).output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        if told.contains("vm.unprivileged_userfaultfd") {
            return eprintln!("SKIPPED: only root has userfaultfd here");
        }
        assert!(output.status.success() && String::from_utf8_lossy(&output.stdout) == expected, "{output:?}");
        assert_eq!(told.contains("has file capabilities"), is_told, "{capabilities}, {user}: {told}");
        assert_eq!(told.contains("1 file(s) mapped"), !is_told, "{capabilities}, {user}: {told}");
    }
}

#[test]
fn a_page_that_cannot_be_read_is_told_before_the_signal() {
    if !can_run() {
        return;
    }
    const CHANGE: &str = r#"
with open(sys.argv[1], "r+b") as other:
    other.seek(1 << 20)
    other.write(b"changed")
for at in range(0, len(one), 1 << 20):
    one[at : at + 1000]
"#;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), 40 << 20);
    let (status, told) = program(CHANGE, &path);
    assert_eq!(status.signal(), Some(7), "{told}");
    assert!(told.contains("SIGBUS") && told.contains("model.gguf") && told.contains("changed"), "{told}");
    assert!(told.contains("the page at 0x"), "{told}");
}

/// What lies behind the new end is not to be had any more, and what lies before it may be other bytes.
#[test]
fn a_file_that_is_cut_underneath_is_told_before_the_signal() {
    if !can_run() {
        return;
    }
    const CUT: &str = "import mmap, os, sys; f = open(sys.argv[1], 'rb'); \
                       m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ); \
                       m[5]; os.truncate(sys.argv[1], 20 << 20); print('cut', flush=True); m[AT << 20]";
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for at in ["39", "10"] {
        let path = model(folder.path(), 40 << 20);
        let output = run_program(&CUT.replace("AT", at), "8MiB", &path);
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.signal(), output.stdout.as_slice()), (Some(7), b"cut\n".as_slice()), "{told}");
        for part in ["so it gets SIGBUS", "the page at 0x", "model.gguf", "size went from 41943040 to 20971520"] {
            assert!(told.contains(part), "{at}: {part:?} is not in {told}");
        }
    }
}
