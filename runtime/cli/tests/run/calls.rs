//! Calls on mapped files do what they do on the kernel's mappings, or end with an error that is said.

use std::process::Stdio;

use super::*;

/// What the programs begin with. Libraries that are loaded by name find the replaced functions, as programs do.
const BEGIN: &str = r#"
import ctypes, errno, hashlib, mmap, os, subprocess, sys

c = ctypes.CDLL(None, use_errno=True)
size_t, address_t, offset_t = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_long
c.mmap.restype = c.mremap.restype = address_t
c.mmap.argtypes = [address_t, size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, offset_t]
c.munmap.argtypes = [address_t, size_t]
c.mremap.argtypes = [address_t, size_t, size_t, ctypes.c_int, address_t]
c.mprotect.argtypes = [address_t, size_t, ctypes.c_int]
FAILED = ctypes.c_void_p(-1).value
READ, WRITE, SHARED, PRIVATE, FIXED, ANON, POPULATE, NOREPLACE = 1, 2, 1, 2, 0x10, 0x20, 0x8000, 0x100000
path = sys.argv[1]
fd = os.open(path, os.O_RDONLY)
data = open(path, "rb").read()
size, page = len(data), 4096
whole = -(-size // page) * page


def map_file(offset=0, len=None, prot=READ, flags=SHARED, fd=fd, at=None):
    found = c.mmap(at, len or size - offset, prot, flags, fd, offset)
    return None if found == FAILED else found


def same(address, offset=0, len=None):
    """Whether these bytes are the file's."""
    end = size if len is None else offset + len
    for first in range(offset, end, 1 << 20):
        n = min(1 << 20, end - first)
        if ctypes.string_at(address + first - offset, n) != data[first : first + n]:
            return False
    return True


def of_kernel(address):
    """Whether the mapping at this address is the kernel's own of the file."""
    for line in open("/proc/self/maps"):
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < last:
            return path in line
    raise AssertionError("there is no mapping")

"#;

/// Runs a program on a file of 40 MiB within 8 MiB. Returns what it said.
pub fn equal(program: &str) -> String {
    equal_with(program, |_| {})
}

/// As [`equal`]. The file of `--report` is a pipe's name: the first mapping waits there until somebody reads from it,
/// as `wait_for_the_opening` and `go_on` let the program do.
pub fn equal_while_opening(program: &str) -> String {
    let report = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = report.path().join("report");
    let begin = r#"
import signal, threading, time

signal.alarm(120)
report = os.environ["OUTCORE_RUN_REPORT"]
os.unlink(report)
os.mkfifo(report)
opened = []
opening = threading.Thread(target=lambda: opened.append(map_file()), daemon=True)


def wait_for_the_opening():
    """Until the runtime is half open: its thread of faults comes before its report."""
    opening.start()
    while not any(
        open(f"/proc/self/task/{task}/comm").read().startswith("faulting") for task in os.listdir("/proc/self/task")
    ):
        time.sleep(0.01)


def go_on():
    reader = os.open(report, os.O_RDONLY)
    opening.join()
    os.close(reader)
    return opened[0]

"#;
    let options = |command: &mut Command| {
        command.arg("--report").arg(path);
    };
    equal_with(&format!("{begin}{program}"), options)
}

fn equal_with(program: &str, options: impl FnOnce(&mut Command)) -> String {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), (40 << 20) + 777);
    let mut command = outcore();
    command.args(["run", "--budget", "8MiB"]);
    options(&mut command);
    let program = format!("{BEGIN}{program}\nprint('all is equal')");
    let output = command.args(["--", "python3", "-c", &program]).arg(&path).arg("7").output().unwrap();
    let [said, told] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    assert!(output.status.success() && said.ends_with("all is equal\n"), "{:?}: {said}{told}", output.status);
    said.lines().filter(|line| line.starts_with("SKIPPED")).for_each(|line| eprintln!("{line}"));
    told
}

#[test]
fn nothing_is_mapped_over_a_mapped_file() {
    if !can_run() {
        return;
    }
    let told = equal(
        r#"
one = map_file()
assert not of_kernel(one)
for over, len in [(one + page, page), (one - page, 3 * page), (one + (38 << 20), 8 << 20)]:
    for flags, of in [(PRIVATE | ANON, -1), (SHARED, fd)]:
        assert map_file(0, len, READ, flags | FIXED, of, over) is None and ctypes.get_errno() == errno.ENOMEM
assert map_file(0, page, READ, PRIVATE | ANON | NOREPLACE, -1, one + page) is None
assert ctypes.get_errno() == errno.EEXIST
plain = c.mmap(None, 8 * page, READ, PRIVATE | ANON, -1, 0)
assert c.mremap(plain, 8 * page, 8 * page, 3, one + page) == FAILED and ctypes.get_errno() == errno.ENOMEM
assert same(one)
# Anywhere else it is the program's business.
assert map_file(0, 8 * page, READ, SHARED | FIXED, fd, plain) == plain and same(plain, 0, 8 * page)
room = c.mmap(None, whole, 0, PRIVATE | ANON, -1, 0)
assert map_file(at=room, flags=PRIVATE | FIXED) == room and of_kernel(room) and same(room)
"#,
    );
    assert_eq!(told.matches("fixed address").count(), 1, "{told}");
}

#[test]
fn fragments_may_be_unmapped_and_mapped_again() {
    if !can_run() {
        return;
    }
    equal(
        r#"
import random
random.seed(3)
for round in range(6):
    one = map_file()
    assert not of_kernel(one) and same(one, 0, 8 << 20)
    parts, at = [], 0
    while at < whole:
        len = min(random.randrange(1, 3000) * page, whole - at)
        parts.append((at, len))
        at += len
    random.shuffle(parts)
    kept = parts[: 1 + round % 3]
    for at, len in parts[1 + round % 3 :]:
        assert c.munmap(one + at, len) == 0
    for at, len in kept:
        assert same(one + at, at, min(len, size - at)), "a part that stayed"
    two = map_file()
    assert same(two), "mapped again"
    for at, len in kept:
        assert c.munmap(one + at, len) == 0
    assert same(two), "when the first mapping was gone"
    assert c.munmap(two, size) == 0
assert c.munmap(one + 1, page) == -1 and ctypes.get_errno() == errno.EINVAL
assert c.munmap(one, 0) == -1 and ctypes.get_errno() == errno.EINVAL
"#,
    );
}

#[test]
fn a_mapping_shrinks_and_moves_as_mremap_says() {
    if !can_run() {
        return;
    }
    equal(
        r#"
MAYMOVE, TO, STAYS = 1, 2, 4
one = map_file()
assert c.mremap(one, size, 9 << 20, 0, None) == one and same(one, 0, 9 << 20)
assert c.mremap(one, 9 << 20, size, 0, None) == FAILED and ctypes.get_errno() == errno.ENOMEM
for wrong in [(one + 1, size, page, 0), (one, size, 0, 0), (one, size, size, 8), (one, size, size, TO)]:
    assert c.mremap(*wrong, None) == FAILED and ctypes.get_errno() == errno.EINVAL, wrong
grown = c.mremap(one, 9 << 20, size, MAYMOVE, None)
assert grown not in (FAILED, one) and of_kernel(grown) and same(grown)
two = map_file()
assert not of_kernel(two) and same(two)
# A part, to a place that the program has chosen, and one that stays where it was besides.
room = c.mmap(None, 2 << 20, 0, PRIVATE | ANON, -1, 0)
assert c.mremap(two + (3 << 20), 2 << 20, 2 << 20, MAYMOVE | TO, room) == room and same(room, 3 << 20, 2 << 20)
again = c.mremap(two + (5 << 20), 1 << 20, 1 << 20, MAYMOVE | STAYS, None)
assert again != FAILED and same(again, 5 << 20, 1 << 20) and same(two)
# Other memory moves as ever.
plain = c.mmap(None, 1 << 20, READ | WRITE, PRIVATE | ANON, -1, 0)
ctypes.memset(plain, 7, 1 << 20)
plain = c.mremap(plain, 1 << 20, 16 << 20, MAYMOVE, None)
assert plain != FAILED and ctypes.string_at(plain, 1 << 20) == b"\7" * (1 << 20)
"#,
    );
}

#[test]
fn advice_about_the_file_loses_nothing() {
    if !can_run() {
        return;
    }
    equal(
        r#"
one = map_file()
half = ctypes.string_at(one, size // 2)
def cached():
    """Kilobytes of the page cache that are this file's."""
    plain = map_file(fd=os.open(path, os.O_RDWR))
    state = (ctypes.c_ubyte * (whole // page))()
    assert of_kernel(plain) and c.mincore(ctypes.c_void_p(plain), size_t(size), state) == 0
    c.munmap(plain, size)
    return 4 * sum(one & 1 for one in state)
os.sync()
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
dropped = cached()
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
assert c.readahead(fd, offset_t(0), size_t(size)) == 0
for advice in (os.POSIX_FADV_SEQUENTIAL, os.POSIX_FADV_RANDOM, os.POSIX_FADV_NORMAL):
    os.posix_fadvise(fd, 0, 0, advice)
assert cached() <= dropped + 4096, (dropped, cached())
assert c.posix_fadvise(fd, offset_t(0), offset_t(0), 99) == errno.EINVAL
for advice in (mmap.MADV_DONTNEED, mmap.MADV_WILLNEED, mmap.MADV_RANDOM):
    assert c.madvise(ctypes.c_void_p(one), size_t(size), advice) == 0
assert c.mlock(ctypes.c_void_p(one), size_t(size)) == 0 and c.mlock2(ctypes.c_void_p(one), size_t(size), 1) == 0
assert same(one)
"#,
    );
}

/// Before, it is the business of what is mapped later; afterwards it would wait for ever.
#[test]
fn regression_a_program_that_locks_all_its_memory_reads_the_file_and_goes_on() {
    if !can_run() {
        return;
    }
    let told = equal(
        r#"
CURRENT, FUTURE = 1, 2
if c.mlockall(FUTURE) != 0:
    print("locking is not allowed")
one = map_file()
assert not of_kernel(one) and same(one)
for flags in (CURRENT, CURRENT | FUTURE):
    assert c.mlockall(flags) == -1 and ctypes.get_errno() == errno.ENOMEM
assert c.munlockall() == 0 and same(one)
"#,
    );
    assert_eq!(told.matches("mlockall").count(), 1, "{told}");
}

#[test]
fn read_only_mappings_of_every_kind_are_taken() {
    if !can_run() {
        return;
    }
    equal(
        r#"
for flags in (SHARED, PRIVATE, SHARED | POPULATE, PRIVATE | POPULATE, 3):
    one = map_file(flags=flags)
    assert one and not of_kernel(one), flags
    assert same(one), flags
    assert c.munmap(one, size) == 0
for offset, len in [(page, None), (3 << 20, 33 << 20), (0, 32 << 20), (0, whole)]:
    one = map_file(offset, len)
    assert one and not of_kernel(one) and same(one, offset, min(len or size, size - offset)), (offset, len)
    assert ctypes.string_at(one + size - offset, 50) == bytes(50), "zeros behind the end"
# A mapping too short to matter, and one that reaches behind the end, are the kernel's.
for offset, len in [(0, 1 << 20), (page, whole)]:
    one = map_file(offset, len)
    assert of_kernel(one) and same(one, offset, min(len, size - offset))
assert map_file(1) is None and ctypes.get_errno() == errno.EINVAL
"#,
    );
}

#[test]
fn a_file_that_may_be_written_stays_the_kernels() {
    if !can_run() {
        return;
    }
    equal(
        r#"
both = os.open(path, os.O_RDWR)
for flags in (PRIVATE, SHARED):
    one = map_file(prot=READ | WRITE, flags=flags, fd=both)
    assert of_kernel(one)
    assert c.munmap(one, size) == 0
assert map_file(prot=READ | WRITE, flags=SHARED) is None and ctypes.get_errno() == errno.EACCES
two = map_file(fd=both)
assert of_kernel(two) and same(two)
assert c.mprotect(two, page, READ | WRITE) == 0
three = map_file()
assert not of_kernel(three) and same(three)
assert c.mprotect(three, page, READ | WRITE) == -1 and ctypes.get_errno() == errno.EACCES
assert c.mprotect(three, page, READ) == 0
"#,
    );
}

#[test]
fn what_is_written_to_a_private_mapping_stays_there_and_nowhere_else() {
    if !can_run() {
        return;
    }
    let told = equal(
        r#"
known = bytearray(data) + bytes(whole - size)
one = map_file(prot=READ | WRITE, flags=PRIVATE)
two = map_file(prot=READ | WRITE, flags=PRIVATE)
three = map_file()
assert len({one, two, three}) == 3 and not any(of_kernel(at) for at in (one, two, three))
for at in list(range(100, size, 777777)) + [whole - 5]:
    n = min(5000, whole - at)
    ctypes.memset(one + at, at % 251, n)
    known[at : at + n] = bytes([at % 251]) * n
def is_known():
    return all(
        ctypes.string_at(one + at, min(1 << 20, whole - at)) == known[at : at + (1 << 20)]
        for at in range(0, whole, 1 << 20)
    )
for turn in range(3):
    assert is_known(), f"what was written, turn {turn}"
    assert same(two) and same(three), "seen elsewhere"
assert open(path, "rb").read() == data, "the file was written"
assert c.mprotect(one, size, READ) == 0 and c.mprotect(one, size, READ | WRITE) == 0
assert c.madvise(ctypes.c_void_p(one), size_t(size), mmap.MADV_WILLNEED) == 0
# It is not moved: what was written is nowhere else.
assert c.mremap(one, size, size + (1 << 20), 1, None) == FAILED and ctypes.get_errno() == errno.ENOMEM
assert map_file(0, page, READ, PRIVATE | ANON | FIXED, -1, one) is None and ctypes.get_errno() == errno.ENOMEM
# Parts of it go; the rest stays.
assert c.munmap(one + (8 << 20), 8 << 20) == 0
assert ctypes.string_at(one, 8 << 20) == known[: 8 << 20]
assert c.munmap(one, 8 << 20) == 0 and ctypes.string_at(one + (16 << 20), 1 << 20) == known[16 << 20 : 17 << 20]
assert c.munmap(one + (16 << 20), size - (16 << 20)) == 0
# Mapped anew, it is the file. Many times, because each takes a place that the next finds free.
for turn in range(300):
    one = map_file(prot=READ | WRITE, flags=PRIVATE)
    assert not of_kernel(one) and ctypes.string_at(one + (20 << 20), 999) == data[20 << 20 : (20 << 20) + 999]
    ctypes.memset(one + (20 << 20), turn % 256, 1000)
    assert c.munmap(one, size) == 0
assert same(two) and same(three)
"#,
    );
    assert!(told.contains("1 file(s) mapped") && told.contains("went to a scratch file"), "{told}");
}

/// A child by `fork` gets the file, but for what its parent has written: it has no other bytes there.
#[test]
fn a_child_by_fork_never_finds_the_file_where_its_parent_has_written() {
    if !can_run() {
        return;
    }
    equal(
        r#"
import signal
one = map_file(prot=READ | WRITE, flags=PRIVATE)
two = map_file(prot=READ | WRITE, flags=PRIVATE)
ctypes.memset(one + (20 << 20), 1, 10)
child = os.fork()
if child == 0:
    code = 3
    try:
        assert of_kernel(one) and same(one, 0, 8 << 20) and same(two) and same(one + (30 << 20), 30 << 20)
        ctypes.memset(two, 9, 10)
        ctypes.memset(one + (30 << 20), 9, 10)
        assert ctypes.string_at(two, 10) == b"\t" * 10
        code = 0
    finally:
        os._exit(code)
assert os.waitpid(child, 0)[1] == 0, "what was not written"
child = os.fork()
if child == 0:
    found = ctypes.string_at(one + (20 << 20), 10)
    os._exit(4)
status = os.waitpid(child, 0)[1]
assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV, status
assert same(two) and ctypes.string_at(one + (20 << 20), 10) == b"\1" * 10
"#,
    );
}

/// As PyTorch does: a file that is only read is mapped to be written privately, read, written in part, and read again.
const PRIVATE_READER: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { THREADS = 4, TURNS = 5, PART = 4096 };
static unsigned char *mapped, *expected;
static size_t size;

static unsigned char value(size_t at, int turn) { return (unsigned char)(at / PART * 31 + turn); }

/* Each thread has every fourth part of 4096 bytes. */
static void *work(void *argument)
{
    size_t own = (size_t)(intptr_t)argument;
    for (int turn = 0; turn < TURNS; turn++)
        for (size_t at = own * PART; at < size; at += THREADS * PART) {
            size_t len = size - at < PART ? size - at : PART;
            if (memcmp(mapped + at, expected + at, len)) {
                printf("thread %zu, turn %d: other bytes at %zu\n", own, turn, at);
                exit(3);
            }
            if ((at / PART + (size_t)turn) % 7 == 0) {
                memset(mapped + at, value(at, turn), len);
                memset(expected + at, value(at, turn), len);
            }
        }
    return NULL;
}

int main(int count, char **arguments)
{
    int fd = open(arguments[1], O_RDONLY);
    struct stat found;
    if (count < 2 || fd < 0 || fstat(fd, &found)) return 4;
    size = (size_t)found.st_size;
    expected = malloc(size);
    for (size_t at = 0; at < size;) {
        ssize_t read = pread(fd, expected + at, size - at, (off_t)at);
        if (read <= 0) return 5;
        at += (size_t)read;
    }
    mapped = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    close(fd);
    if (mapped == MAP_FAILED) return 6;
    pthread_t threads[THREADS];
    for (intptr_t n = 0; n < THREADS; n++) pthread_create(&threads[n], NULL, work, (void *)n);
    for (int n = 0; n < THREADS; n++) pthread_join(threads[n], NULL);
    if (memcmp(mapped, expected, size)) return 7;
    if (munmap(mapped, size)) return 8;
    puts("all is equal");
    return 0;
}
"#;

#[test]
fn a_program_that_maps_as_pytorch_does_finds_what_it_wrote() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (source, program) = (folder.path().join("reader.c"), folder.path().join("reader"));
    std::fs::write(&source, PRIVATE_READER).unwrap();
    let compiled = Command::new("cc").arg("-O1").arg("-pthread").arg(&source).arg("-o").arg(&program).status();
    if !compiled.is_ok_and(|status| status.success()) {
        return eprintln!("SKIPPED: there is no C compiler");
    }
    let path = model(folder.path(), (50 << 20) + 333);
    let before = std::fs::read(&path).unwrap();
    for (budget, mechanism) in [("8MiB", ""), ("14MiB", ""), ("40MiB", ""), ("8MiB", "copy")] {
        let mut command = outcore();
        command.args(["run", "--budget", budget, "--"]).arg(&program).arg(&path);
        let output = command.env("OUTCORE_RUN_MECHANISM", mechanism).output().unwrap();
        let [said, told] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
        assert!(
            output.status.success()
                && said
                    == "all is equal
",
            "{budget}: {:?}: {said}{told}",
            output.status
        );
        assert!(told.contains("1 file(s) mapped") && told.contains("went to a scratch file"), "{budget}: {told}");
        assert!(std::fs::read(&path).unwrap() == before, "{budget}: the file was written");
    }
}

/// A mapping that may be executed was taken, and could not be executed; to make one so did nothing, and was no error.
#[test]
fn regression_a_mapping_that_may_be_executed_is_the_kernels() {
    if !can_run() {
        return;
    }
    equal(
        r#"
EXEC = 4
for flags in (SHARED, PRIVATE):
    one = map_file(prot=READ | EXEC, flags=flags)
    if one is None:
        # A disk that is mounted `noexec`.
        assert ctypes.get_errno() == errno.EPERM
        continue
    assert of_kernel(one) and same(one, 0, 1 << 20)
    rights = [line.split()[1] for line in open("/proc/self/maps") if line.startswith(f"{one:x}-")]
    assert len(rights) == 1 and "x" in rights[0], rights
for prot, flags in ((READ, SHARED), (READ | WRITE, PRIVATE)):
    one = map_file(prot=prot, flags=flags)
    assert not of_kernel(one)
    assert c.mprotect(one, page, prot | EXEC) == -1 and ctypes.get_errno() == errno.EACCES
    assert c.mprotect(one, page, READ) == 0 and same(one, 0, 1 << 20)
"#,
    );
}

/// A part over several fragments took nothing away: a private mapping of which a fragment was unmapped, and then all of
/// it, never went.
#[test]
fn regression_a_private_mapping_goes_when_its_fragments_are_unmapped_together() {
    if !can_run() {
        return;
    }
    equal(
        r#"
def mapped_bytes():
    return int(open("/proc/self/statm").read().split()[0]) * page


def fragmented(cuts):
    one = map_file(prot=READ | WRITE, flags=PRIVATE)
    assert not of_kernel(one)
    ctypes.memset(one + (30 << 20), 7, 10)
    for at, len in cuts:
        assert c.munmap(one + at, len) == 0
        # Only what was unmapped is gone.
        assert (at, len) == (0, size) or ctypes.string_at(one + (30 << 20), 10) == b"\7" * 10


cuts = (
    [(16 << 20, 8 << 20), (0, size)],
    [(0, 8 << 20), (16 << 20, 4 << 20), (4 << 20, 14 << 20), (0, size)],
    [(0, 4 << 20), (0, size)],
    [(0, size)],
)
for cut in cuts:
    fragmented(cut)
descriptors, before = len(os.listdir("/proc/self/fd")), mapped_bytes()
for turn in range(8):
    fragmented(cuts[turn % 3])
assert len(os.listdir("/proc/self/fd")) == descriptors
assert mapped_bytes() - before < 2 * size, mapped_bytes() - before
# Of a range that the program has twice, each byte is given back once for each.
one, two = map_file(), map_file()
assert one == two
for at, len in ((0, 20 << 20), (10 << 20, 8 << 20), (0, size), (20 << 20, size - (20 << 20))):
    assert c.munmap(one + at, len) == 0
assert map_file() == one and same(one)
"#,
    );
}

/// It never counted as one that the program has unmapped: its place was not free for others.
#[test]
fn regression_a_file_whose_fragments_are_unmapped_together_makes_room() {
    if !can_run() {
        return;
    }
    let told = equal(
        r#"
import resource
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
one = map_file()
assert not of_kernel(one)
assert c.munmap(one + (16 << 20), 8 << 20) == 0 and c.munmap(one, size) == 0
# As many as there are places.
for turn in range(256):
    two = map_file(0, 32 << 20, READ | WRITE, PRIVATE)
assert not of_kernel(two)
assert of_kernel(map_file())
"#,
    );
    assert_eq!(told.matches("256 files are mapped already").count(), 1, "{told}");
}

/// A child waited for ever for the thread that its parent had there.
#[test]
fn regression_a_child_that_is_forked_while_the_first_file_is_mapped_maps_it_too() {
    if !can_run() {
        return;
    }
    equal_while_opening(
        r#"
other = os.path.join(os.path.dirname(path), "other.gguf")
open(other, "wb").write(data)
wait_for_the_opening()
children = []
for turn in range(4):
    child = os.fork()
    if child == 0:
        code = 3
        try:
            signal.alarm(60)
            two = map_file(prot=READ | WRITE if turn % 2 else READ, flags=PRIVATE)
            # One that nobody has asked for.
            three = map_file(fd=os.open(other, os.O_RDONLY))
            assert of_kernel(two) and same(two) and same(three)
            code = 0
        finally:
            os._exit(code)
    children.append(child)
for child in children:
    status = os.waitpid(child, 0)[1]
    assert status == 0, status
one = go_on()
assert not of_kernel(one) and same(one)
"#,
    );
}

/// A program that is started by this one has the library, and a pool of its own. A child by `fork` has the kernel's
/// mappings, of files that it maps later too.
#[test]
fn children_map_the_file_for_themselves() {
    if !can_run() {
        return;
    }
    let told = equal(
        r#"
if len(sys.argv) == 4:
    one = map_file()
    assert not of_kernel(one) and same(one)
    sys.exit(0)
one = map_file()
assert same(one)
again = [sys.executable, "-c", sys.argv[0] == "-c" and open("/proc/self/cmdline").read().split("\0")[2], path, "7", "x"]
assert subprocess.run(again).returncode == 0, "by vfork and exec"
assert os.waitpid(os.posix_spawn(again[0], again, os.environ), 0)[1] == 0, "by posix_spawn"
assert same(one)
child = os.fork()
if child == 0:
    code = 3
    try:
        two = map_file()
        assert of_kernel(one) and of_kernel(two) and two != one and same(two) and same(one)
        assert c.munmap(one, size) == 0 and map_file(0, page, READ, PRIVATE | ANON | FIXED, -1, one) == one
        assert ctypes.string_at(one, page) == bytes(page)
        code = 0
    finally:
        os._exit(code)
assert os.waitpid(child, 0)[1] == 0, "by fork"
child = os.fork()
if child == 0:
    os.execv(again[0], again)
assert os.waitpid(child, 0)[1] == 0, "by fork and exec"
assert same(one)
"#,
    );
    // This one, and three programs that it started.
    assert_eq!(told.matches("file(s) mapped").count(), 4, "{told}");
}

#[test]
fn two_programs_map_a_file_at_once() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), (40 << 20) + 777);
    // Each waits until the other has mapped the file and read some of it.
    let program = format!(
        "{BEGIN}{}",
        r#"
one = map_file()
assert not of_kernel(one) and same(one, 0, 20 << 20)
print("half", flush=True)
sys.stdin.readline()
assert same(one)
print("all is equal", flush=True)
"#
    );
    let start = || {
        let mut command = outcore();
        command.args(["run", "--budget", "8MiB", "--", "python3", "-c", &program]).arg(&path).arg("7");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut both = [start(), start()];
    let mut readers = both.each_mut().map(|child| BufReader::new(child.stdout.take().unwrap()));
    for reader in &mut readers {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        assert_eq!(line, "half\n");
    }
    for child in &mut both {
        child.stdin.take().unwrap().write_all(b"\n").unwrap();
    }
    for (child, reader) in both.into_iter().zip(&mut readers) {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success() && line == "all is equal\n", "{output:?}: {line}");
    }
}

/// A range that begins below a mapped file went to the kernel as a whole: then the file's first pages were gone.
#[test]
fn regression_a_range_that_reaches_into_a_mapped_file_is_unmapped_around_it() {
    if !can_run() {
        return;
    }
    let told = equal(
        r#"
one = map_file()
assert not of_kernel(one)


def line_at(address):
    """What is mapped there: its first and last address, rights, and name."""
    for line in open("/proc/self/maps"):
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < last:
            return line.split()[1], line.split()[5:]
    return None


# Nobody's page, or one that nobody may use: it can go.
below = line_at(one - page)
if below is not None and below != ("---p", []):
    print(f"SKIPPED: {below} is mapped below the file")
else:
    c.mmap(one - page, page, READ, PRIVATE | ANON | FIXED, -1, 0)
    assert line_at(one - page)[0] == "r--p"
    assert c.munmap(one - page, 3 * page) == 0
    assert line_at(one - page) is None and same(one)
    assert c.munmap(one - page, 0) == -1 and ctypes.get_errno() == errno.EINVAL
"#,
    );
    assert!(!told.contains("panicked"), "{told}");
}

/// A program that closes all descriptors it does not know closed those that pages come by: the next page hung.
#[test]
fn regression_descriptors_of_the_library_are_not_closed_by_the_program() {
    if !can_run() {
        return;
    }
    for closes in [
        "os.closerange(3, 1 << 16)",
        "[c.close(n) for n in range(3, 1024)]",
        "c.close_range(3, (1 << 32) - 1, 0)",
        "c.closefrom(3)",
        "[c.dup2(1, n) for n in range(3, 64)]",
        "[c.dup3(1, n, 0) for n in range(3, 64)]",
    ] {
        equal(&format!(
            r#"
import signal

signal.alarm(120)
c.close_range.argtypes = [ctypes.c_uint, ctypes.c_uint, ctypes.c_int]
first = map_file()
assert not of_kernel(first) and same(first, 0, page)
own = os.open("/dev/null", os.O_RDONLY)
{closes}
assert same(first) and same(first)
# The program's own are closed, or replaced.
assert not os.path.exists(f"/proc/self/fd/{{own}}") or os.readlink(f"/proc/self/fd/{{own}}") != "/dev/null"
# Files are mapped as before.
fd = os.open(path, os.O_RDONLY)
assert map_file(0, None, READ, SHARED, fd) == first
"#
        ));
    }
}

/// Where the kernel may not wait for pages, calls that got an address in the file ended with `EFAULT`.
#[test]
fn regression_system_calls_of_an_unprivileged_process_read_a_mapped_file() {
    const PROGRAM: &str = r#"
import signal, socket, tempfile, threading

signal.alarm(240)
one = map_file()
assert not of_kernel(one)
n = 30 << 20
for call in [c.write, c.pwrite, c.pwrite64, c.writev, c.send, c.sendto, c.sendmsg, c.fwrite]:
    call.restype = ctypes.c_ssize_t
c.write.argtypes = [ctypes.c_int, address_t, size_t]
c.pwrite.argtypes = c.pwrite64.argtypes = [ctypes.c_int, address_t, size_t, offset_t]
c.writev.argtypes = [ctypes.c_int, address_t, ctypes.c_int]
c.send.argtypes = [ctypes.c_int, address_t, size_t, ctypes.c_int]
c.sendto.argtypes = [ctypes.c_int, address_t, size_t, ctypes.c_int, address_t, ctypes.c_uint]
c.sendmsg.argtypes = [ctypes.c_int, address_t, ctypes.c_int]
c.fwrite.argtypes = [address_t, size_t, size_t, address_t]
c.fdopen.restype, c.fdopen.argtypes = address_t, [ctypes.c_int, ctypes.c_char_p]
c.fclose.argtypes = [address_t]
Part = ctypes.c_size_t * 2
begin = ctypes.create_string_buffer(b"begin", 5)
parts = (Part * 2)(Part(ctypes.addressof(begin), 5), Part(one + 100, n))
# The other way round, the kernel has the last word: it does not write into the file.
assert c.read(fd, ctypes.c_void_p(one), 10) == -1


def written(do, expected):
    with tempfile.TemporaryFile() as file:
        do(file.fileno())
        file.seek(0)
        assert file.read() == expected, do


def to_stream(fd):
    stream = c.fdopen(os.dup(fd), b"wb")
    assert c.fwrite(one + 100, 2, n // 2, stream) == n // 2 and c.fclose(stream) == 0


piece = data[100 : 100 + n]
written(lambda fd: c.write(fd, one + 100, n) == n or 1 / 0, piece)
written(lambda fd: c.pwrite(fd, one + 100, n, 3) == n or 1 / 0, b"\0\0\0" + piece)
written(lambda fd: c.pwrite64(fd, one + 100, n, 3) == n or 1 / 0, b"\0\0\0" + piece)
written(lambda fd: c.writev(fd, ctypes.addressof(parts), 2) == n + 5 or 1 / 0, b"begin" + piece)
written(to_stream, piece)
# The end of a file that is mapped is that of its bytes: what lies behind is of no file.
written(lambda fd: c.write(fd, one + size - 10, 10) == 10 or 1 / 0, data[-10:])


def sent(send, expected):
    left, right = socket.socketpair()
    found = []
    reader = threading.Thread(target=lambda: found.extend(iter(lambda: right.recv(1 << 20), b"")))
    reader.start()
    send(left.fileno())
    left.close()
    reader.join()
    assert b"".join(found) == expected, send


def all_of(fd):
    done = 0
    while done < n:
        now = c.send(fd, one + 100 + done, n - done, 0)
        assert now > 0
        done += now


message = (ctypes.c_size_t * 7)(0, 0, ctypes.addressof(parts), 1, 0, 0, 0)
parts[0] = Part(one + 5, 70000)
sent(all_of, piece)
sent(lambda fd: c.sendto(fd, one + 5, 1000, 0, None, 0) == 1000 or 1 / 0, data[5:1005])
sent(lambda fd: c.sendmsg(fd, ctypes.addressof(message), 0) == 70000 or 1 / 0, data[5:70005])
# A datagram is one.
left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
assert c.send(left.fileno(), one + 5, 50000, 0) == 50000 and right.recv(1 << 20) == data[5:50005]
"#;
    if !can_run() {
        return;
    }
    unprivileged(PROGRAM);
}

/// As [`equal`], in a process for whose pages the kernel may not wait. Says so if there is none.
fn unprivileged(program: &str) {
    // A process without privileges, and files that it may read.
    let nobody = ["--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all", "--"];
    let setpriv = |program: &std::ffi::OsStr| {
        let mut command = Command::new("setpriv");
        command.args(nobody).arg(program);
        command
    };
    let may = |path: &Path| setpriv("test".as_ref()).arg("-r").arg(path).status().is_ok_and(|status| status.success());
    let own = Path::new(env!("CARGO_BIN_EXE_outcore"));
    let forbidden =
        std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").is_ok_and(|text| text.trim() == "0");
    if !forbidden || !may(own) {
        eprintln!("SKIPPED: no process without the right to handle the kernel's faults can be started here");
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), (40 << 20) + 777);
    for open in [folder.path(), &path] {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(open, mode).unwrap();
    }
    let program = format!("{BEGIN}{program}\nprint('all is equal')");
    let mut command = setpriv(own.as_os_str());
    command.args(["run", "--budget", "8MiB", "--", "python3", "-c", &program]).arg(&path).arg("7");
    command.env("HOME", "/tmp").env("XDG_CACHE_HOME", "/nonexistent");
    let output = command.output().unwrap();
    let [said, told] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    assert!(output.status.success() && said.ends_with("all is equal\n"), "{:?}: {said}{told}", output.status);
}

/// After 256 files nothing more was mapped, though the program had unmapped them.
#[test]
fn regression_files_that_the_program_has_unmapped_make_room() {
    if !can_run() {
        return;
    }
    let told = equal(
        r#"
import resource
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
one = map_file()
assert not of_kernel(one)
MOST = 256


def open_other(number):
    """A file with a hole, and its number at the end."""
    name = os.path.join(os.path.dirname(path), f"{number}.gguf")
    with open(name, "wb") as file:
        file.write(b"GGUF")
        file.truncate(33 << 20)
        file.seek((33 << 20) - 8)
        file.write(number.to_bytes(8, "little"))
    return os.open(name, os.O_RDONLY), name


def is_ours(address, name):
    assert int.from_bytes(ctypes.string_at(address + (33 << 20) - 8, 8), "little") == int(os.path.basename(name)[:-5])
    return not any(line.endswith(name + "\n") for line in open("/proc/self/maps"))


for number in range(MOST + 20):
    other, name = open_other(number)
    at = map_file(0, 33 << 20, fd=other)
    assert is_ours(at, name), name
    # One in two pieces, and one by `mremap`.
    if number == 3:
        assert c.munmap(at, 8 << 20) == 0 and c.munmap(at + (8 << 20), 25 << 20) == 0
    elif number == 5:
        moved = c.mremap(at, 33 << 20, 33 << 20, 3, c.mmap(None, 33 << 20, READ, PRIVATE | ANON, -1, 0))
        assert moved != FAILED and c.munmap(moved, 33 << 20) == 0
    else:
        assert c.munmap(at, 33 << 20) == 0
    os.close(other)
assert same(one)
# As many as there are places, which stay.
kept = []
for number in range(MOST + 1):
    other, name = open_other(number + 1000)
    kept.append((map_file(0, 33 << 20, fd=other), name))
    os.close(other)
assert [is_ours(*each) for each in kept] == [True] * (MOST - 1) + [False] * 2
for at, name in kept[:3]:
    assert c.munmap(at, 33 << 20) == 0
again, name = open_other(9)
assert is_ours(map_file(0, 33 << 20, fd=again), name) and same(one)
"#,
    );
    assert!(told.contains("256 files are mapped already; unmap some"), "{told}");
    assert!(told.contains(&format!("{} file(s) mapped", 1 + 276 + 255)), "{told}");
}

/// Only its first address was looked at: the kernel emptied pages of the file, or left out pages of the program's own.
#[test]
fn regression_a_range_that_is_in_part_of_a_mapped_file_is_divided() {
    if !can_run() {
        return;
    }
    let told = equal(
        r#"
import signal
signal.alarm(120)
for name in ("madvise", "mlock", "mlock2", "munlock", "mincore", "posix_madvise"):
    getattr(c, name).argtypes = [address_t, size_t] + [address_t if name == "mincore" else ctypes.c_int] * (
        name in ("madvise", "mlock2", "mincore", "posix_madvise")
    )
DONTNEED = 4
# Of whole pages of whatever size, so that what lies behind is not the library's.
short = os.path.join(os.path.dirname(path), "short.gguf")
open(short, "wb").write(data[: 40 << 20])
short = os.open(short, os.O_RDONLY)


def line_at(address):
    for line in open("/proc/self/maps"):
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < last:
            return line.split()[1], line.split()[5:]
    return None


def locked():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmLck"))


divisions = []


def divided(file, own, first, unchanged):
    """A range of four pages, of which one is the program's own and the others the file's."""
    there = line_at(own)
    if there is not None and there != ("---p", []):
        # Somebody's, which is to stay as it is.
        state, alone = (ctypes.c_ubyte * 4)(), (ctypes.c_ubyte * 1)()
        assert c.mincore(first, 4 * page, ctypes.addressof(state)) == 0 == c.mincore(own, page, ctypes.addressof(alone))
        assert [n & 1 for n in state] == [alone[0] & 1 if n == (own - first) // page else 1 for n in range(4)]
        return divisions.append(False)
    divisions.append(True)
    assert c.mmap(own, page, READ | WRITE, PRIVATE | ANON | FIXED, -1, 0) == own
    index = (own - first) // page
    for turn in range(3):
        ctypes.memset(own, 9, page)
        assert c.madvise(first, 4 * page, DONTNEED) == 0
        state = (ctypes.c_ubyte * 5)(7, 7, 7, 7, 7)
        assert c.mincore(first, 4 * page - 5, ctypes.addressof(state)) == 0
        assert [n & 1 for n in state[:4]] == [int(n != index) for n in range(4)] and state[4] == 7, list(state)
        assert ctypes.string_at(own, page) == bytes(page) and unchanged(), "emptied"
    before = locked()
    for lock in (c.mlock, lambda *of: c.mlock2(*of, 0)):
        # From the middle of a page to the middle of another.
        assert lock(first + 5, 4 * page - 10) == 0 and locked() == before + 4, (before, locked())
        assert c.munlock(first + 5, 4 * page - 10) == 0 and locked() == before
    assert c.mprotect(first, 4 * page, READ) == 0 and line_at(own)[0] == "r--p" and unchanged()
    if file is None:
        assert c.mprotect(first, 4 * page, READ | WRITE) == 0 and line_at(own)[0] == "rw-p"
    else:
        assert c.mprotect(first, 4 * page, READ | WRITE) == -1 and ctypes.get_errno() == errno.EACCES
    ctypes.set_errno(7)
    assert c.posix_madvise(first, 4 * page, 99) == errno.EINVAL and ctypes.get_errno() == 7
    assert c.posix_madvise(first, 4 * page, DONTNEED) == 0 == c.posix_madvise(first, 4 * page, 0)
    for call in (c.madvise, c.mprotect):
        assert call(first + 1, 4 * page, READ) == -1 and ctypes.get_errno() == errno.EINVAL
    if own == first:
        # Of several mappings none moves; the end is cut off.
        for len, flags in ((page, 1), (8 * page, 1), (8 * page, 0)):
            moved = c.mremap(first, 4 * page, len, flags, None)
            assert moved == (own if len == page else FAILED), (len, flags)
            assert len == page or ctypes.get_errno() == errno.EFAULT, ctypes.get_errno()
        assert line_at(own)[0].startswith("r") and unchanged()
    # Where nothing is mapped, the kernel says so, and does the rest.
    assert c.munmap(own, page) == 0
    assert c.madvise(first, 4 * page, DONTNEED) == -1 and ctypes.get_errno() == errno.ENOMEM
    assert unchanged()


for turn in range(2):
    one = map_file(0, 40 << 20, fd=short)
    assert not of_kernel(one) and same(one, 0, 40 << 20)
    divided(fd, one - page, one - page, lambda: same(one, 0, 40 << 20))
    end = one + (40 << 20)
    divided(fd, end, end - 3 * page, lambda: same(one, 0, 40 << 20))
two = map_file(0, 40 << 20, READ | WRITE, PRIVATE, short)
assert not of_kernel(two)
ctypes.memset(two, 5, 8 * page)
wrote = lambda: ctypes.string_at(two, 8 * page) == b"\5" * 8 * page and same(two + 8 * page, 8 * page, 20 << 20)
divided(None, two - page, two - page, wrote)
if not all(divisions):
    print("SKIPPED: something is mapped beside a file:", divisions)
"#,
    );
    assert!(!told.contains("panicked"), "{told}");
}

/// A write of more than a piece became several messages.
#[test]
fn regression_a_write_to_a_socket_of_messages_is_one_message() {
    const PROGRAM: &str = r#"
import signal, socket

signal.alarm(240)
one = map_file()
assert not of_kernel(one)
for call in [c.write, c.writev, c.send, c.sendmsg]:
    call.restype = ctypes.c_ssize_t
c.write.argtypes = [ctypes.c_int, address_t, size_t]
c.writev.argtypes = c.sendmsg.argtypes = [ctypes.c_int, address_t, ctypes.c_int]
c.send.argtypes = [ctypes.c_int, address_t, size_t, ctypes.c_int]
Part = ctypes.c_size_t * 2
begin = ctypes.create_string_buffer(b"begin", 5)
n = 50000
parts = (Part * 3)(Part(ctypes.addressof(begin), 5), Part(one + 100, n), Part(one + (20 << 20), n))
expected = b"begin" + data[100 : 100 + n] + data[20 << 20 : (20 << 20) + n]
message = (ctypes.c_size_t * 7)(0, 0, ctypes.addressof(parts), 3, 0, 0, 0)
for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
    left, right = socket.socketpair(socket.AF_UNIX, kind)
    to = left.fileno()
    assert c.write(to, one + 5, n) == n and right.recv(1 << 20) == data[5 : 5 + n], kind
    for send in (c.writev(to, ctypes.addressof(parts), 3), c.sendmsg(to, ctypes.addressof(message), 0)):
        assert send == len(expected) and right.recv(1 << 20) == expected, kind
# A copy is sent as it is: the kernel does not read it later.
SO_ZEROCOPY, MSG_ZEROCOPY = 60, 0x4000000
listening = socket.create_server(("127.0.0.1", 0))
left = socket.create_connection(listening.getsockname())
right, _ = listening.accept()
left.setsockopt(socket.SOL_SOCKET, SO_ZEROCOPY, 1)
for at in range(0, 20 << 20, 1 << 20):
    assert c.send(left.fileno(), one + at, n, MSG_ZEROCOPY) == n
    parts[1] = Part(one + at, n)
    assert c.sendmsg(left.fileno(), ctypes.addressof(message), MSG_ZEROCOPY) == len(expected)
    expected = b"begin" + data[at : at + n] + expected[5 + n :]
    assert right.recv(n + len(expected), socket.MSG_WAITALL) == data[at : at + n] + expected, at
try:
    left.recvmsg(1, 1000, socket.MSG_ERRQUEUE | socket.MSG_DONTWAIT)
    assert False, "the kernel tells of a copy that it has read"
except BlockingIOError:
    pass
"#;
    if !can_run() {
        return;
    }
    unprivileged(PROGRAM);
}

/// The write sleeps in the fault with the pipe's lock, and the reason is to be written to the same pipe.
#[test]
fn regression_a_lost_page_that_is_written_to_the_pipe_of_errors_is_an_error() {
    if !can_run() {
        return;
    }
    let program = r#"
c.write.argtypes = [ctypes.c_int, address_t, size_t]
c.write.restype = ctypes.c_ssize_t
start = map_file()
os.truncate(path, page)
if os.geteuid() == 0:
    assert c.write(1, start + (20 << 20), 3 * page) == -1 and ctypes.get_errno() == errno.EFAULT
os._exit(9)
"#;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), 40 << 20);
    let (mut from, to) = std::io::pipe().unwrap();
    let mut command = outcore_within(60);
    command.args(["run", "--budget", "8MiB", "--", "python3", "-c"]);
    command.arg(format!("{BEGIN}{program}")).arg(&path);
    let mut child = command.stdout(to.try_clone().unwrap()).stderr(to).spawn().unwrap();
    drop(command);
    let mut said = String::new();
    std::io::Read::read_to_string(&mut from, &mut said).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(9), "{said}");
}
