//! Descriptors of the program and of the library, and what hangs on them.

use super::calls::{equal, equal_while_opening};
use super::{can_run, outcore};

/// What another thread opened while the runtime was opened was taken for the library's: to close it failed.
#[test]
fn regression_descriptors_that_the_program_opens_meanwhile_stay_its_own() {
    if !can_run() {
        return;
    }
    equal_while_opening(
        r#"
wait_for_the_opening()
own = [os.open(path, os.O_RDONLY), os.eventfd(0), os.open("/proc/self/statm", os.O_RDONLY), os.memfd_create("own")]
hidden = os.path.join(os.path.dirname(path), "outcore-1-1.scratch")
own.append(os.open(hidden, os.O_RDWR | os.O_CREAT))
os.unlink(hidden)
one = go_on()
assert not of_kernel(one)
for n in own:
    assert c.dup2(fd, n) == n, n
    os.close(n)
    try:
        os.fstat(n)
        assert False, n
    except OSError as error:
        assert error.errno == errno.EBADF
assert same(one)
"#,
    );
}

#[test]
fn regression_threads_map_a_file_privately_and_close_what_they_opened() {
    if !can_run() {
        return;
    }
    equal(
        r#"
import signal, threading

signal.alarm(240)
failed = []


def work(number):
    try:
        for turn in range(4):
            with open(path, "rb") as file:
                one = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            at = (number * 4 + turn) << 20
            assert one[at : at + 5000] == data[at : at + 5000]
            one[at] = 7
            one.close()
    except BaseException as error:
        failed.append(error)


work(0)
before = len(os.listdir("/proc/self/fd"))
threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not failed, failed
assert len(os.listdir("/proc/self/fd")) == before, (before, os.listdir("/proc/self/fd"))
"#,
    );
}

/// A copy of the program's descriptor kept its lock, after the program had closed its own.
#[test]
fn regression_a_lock_of_the_file_goes_when_the_program_closes_it() {
    if !can_run() {
        return;
    }
    equal(
        r#"
import fcntl

for prot in (READ, READ | WRITE):
    locked, other = os.open(path, os.O_RDONLY), os.open(path, os.O_RDONLY)
    fcntl.flock(locked, fcntl.LOCK_EX)
    one = map_file(prot=prot, flags=PRIVATE, fd=locked)
    assert not of_kernel(one) and same(one, 0, page)
    try:
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        assert False, "the lock is lost"
    except BlockingIOError:
        pass
    assert c.munmap(one, size) == 0
    os.close(locked)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
"#,
    );
}

/// The file was opened by a name that had been compared before: in between, it could be another file's.
#[test]
fn regression_what_is_mapped_is_the_open_file_while_its_name_changes() {
    if !can_run() {
        return;
    }
    equal(
        r#"
import signal, threading

signal.alarm(240)
# Two folders change their names, which leaves the files as they are.
one, two = (os.path.join(os.path.dirname(path), name) for name in ("one", "two"))
os.mkdir(one)
os.mkdir(two)
os.rename(path, os.path.join(one, "model.gguf"))
begin = data[:4] + bytes(reversed(data[4:page]))
assert begin != data[:page]
open(os.path.join(two, "model.gguf"), "wb").write(begin + data[page:])
EXCHANGE, HERE = 2, -100
c.renameat2.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
ended = threading.Event()


def is_ours(address):
    """The kernel's mapping of a file has its number, whatever its name is by now."""
    for where, _, _, _, number, *_ in (line.split() for line in open("/proc/self/maps")):
        first, last = (int(part, 16) for part in where.split("-"))
        if first <= address < last:
            return number == "0"


def exchange():
    while not ended.is_set():
        assert c.renameat2(HERE, one.encode(), HERE, two.encode(), EXCHANGE) == 0


thread = threading.Thread(target=exchange)
thread.start()
try:
    # Until enough of them were mapped by the library: others find that the name leads elsewhere.
    taken = 0
    for turn in range(400):
        found = map_file(prot=READ | WRITE, flags=PRIVATE)
        assert ctypes.string_at(found, page) == data[:page], "another file"
        taken += is_ours(found)
        assert c.munmap(found, size) == 0
        if taken == 20:
            break
finally:
    ended.set()
    thread.join()
"#,
    );
}

/// Each private mapping counted as one more file that is read for the first time.
#[test]
fn regression_a_file_that_is_mapped_often_counts_once() {
    if !can_run() {
        return;
    }
    let told = equal(
        r#"
for turn in range(20):
    one = map_file(prot=READ | WRITE, flags=PRIVATE)
    assert not of_kernel(one) and c.munmap(one, size) == 0
one = map_file()
for turn in range(3):
    assert same(one)
grown = bytearray(b"\1") * (120 << 20)
for turn in range(3):
    assert same(one)
"#,
    );
    assert!(told.contains("1 file(s) mapped") && !told.contains("first read the file"), "{told}");
}

/// A line for each of some thousand files said the same.
#[test]
fn regression_of_many_files_that_stay_the_kernels_three_are_named() {
    if !can_run() {
        return;
    }
    const MANY: &str = r#"
import ctypes, mmap, os, resource, sys

c = ctypes.CDLL(None, use_errno=True)
c.mmap.restype = ctypes.c_void_p
name, files, limit = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (limit or most, most))
views = []
for number in range(files):
    shard = f"{name}-{number}"
    with open(shard, "wb") as file:
        file.write(b"GGUF" + number.to_bytes(8, "little"))
        file.truncate(33 << 20)
    fd = os.open(shard, os.O_RDONLY)
    views.append(c.mmap(None, ctypes.c_size_t(33 << 20), mmap.PROT_READ, mmap.MAP_PRIVATE, fd, ctypes.c_long(0)))
    os.close(fd)
assert [int.from_bytes(ctypes.string_at(view + 4, 8), "little") for view in views] == list(range(files))
"#;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let name = folder.path().join("model.gguf");
    for (files, limit, why) in
        [("280", "0", "256 files are mapped already"), ("100", "150", "37 files are mapped already; raise `ulimit -n`")]
    {
        let output = outcore()
            .args(["run", "--budget", "16MiB", "--", "python3", "-c", MANY])
            .args([name.as_os_str(), files.as_ref(), limit.as_ref()])
            .output()
            .unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{told}");
        let lines: Vec<&str> = told.lines().filter(|line| line.contains(why)).collect();
        assert_eq!(lines.len(), 4, "{files}: {told}");
        assert!(lines[..3].iter().all(|line| line.contains(" stays the kernel's: ")), "{files}: {told}");
        assert!(lines[3].starts_with("outcore: further files stay the kernel's too"), "{files}: {told}");
    }
}
