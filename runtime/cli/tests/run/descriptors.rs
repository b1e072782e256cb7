//! Descriptors of the program and of the library, and what hangs on them.

use super::calls::{equal, equal_while_opening};
use super::can_run;

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
