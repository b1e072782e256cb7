//! A signal that ends the program: what is said at its end comes first, and the status is that of the signal.

use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;

use super::*;

/// Maps the file, and does with signals what its last argument says.
const SIGNALS: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

static volatile sig_atomic_t seen;
static struct sigaction before;

static void own(int signal) { (void)signal; seen = 1; }
static void chained(int signal)
{
    if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) before.sa_handler(signal);
    seen = 1;
}

typedef void (*handler)(int);
static handler signal_of(int number, handler new) { return signal(number, new); }

/* As programs end that clean up first. It may interrupt whoever holds a lock. */
static void dies(int number)
{
    (void)number;
    signal(SIGTERM, SIG_DFL);
    raise(SIGTERM);
    _exit(8);
}

/* Ends the process by the default action; what is behind it must not run. */
static void *ends(void *how)
{
    int signal = SIGTERM;
    if (!strcmp(how, "raises")) raise(signal = SIGHUP);
    if (!strcmp(how, "kills")) kill(getpid(), signal = SIGINT);
    if (!strcmp(how, "kills by a raw call")) syscall(SYS_kill, getpid(), signal);
    if (!strcmp(how, "kills in a thread")) kill(getpid(), signal);
    if (!strcmp(how, "kills its group")) kill(0, signal);
    if (!strcmp(how, "asks")) {
        struct sigaction found;
        int wrong = sigaction(signal, NULL, &found) || found.sa_handler != SIG_DFL || found.sa_flags;
        found.sa_handler = own, found.sa_flags = 0;
        wrong |= sigaction(signal, &found, &before) || before.sa_handler != SIG_DFL;
        kill(getpid(), signal);
        wrong |= !seen || sigaction(signal, &before, &found) || found.sa_handler != own;
        wrong |= signal_of(signal, SIG_DFL) != SIG_DFL || signal_of(signal, own) != SIG_DFL;
        wrong |= signal_of(signal, SIG_DFL) != own;
        wrong |= __sysv_signal(signal, own) != SIG_DFL || sigset(signal, SIG_DFL) != own;
        if (wrong) _exit(9);
        raise(signal);
    }
    if (!strcmp(how, "raises in malloc")) {
        struct sigaction action = {.sa_handler = dies};
        sigaction(SIGALRM, &action, NULL);
        struct itimerval soon = {{0, 0}, {0, 20000}};
        setitimer(ITIMER_REAL, &soon, NULL);
        for (unsigned long n = 0;; n++) free(malloc(200 << n % 12));
    }
    if (!strcmp(how, "unblocks")) {
        sigset_t only;
        sigemptyset(&only), sigaddset(&only, signal);
        pthread_sigmask(SIG_BLOCK, &only, NULL);
        kill(getpid(), signal);
        puts("blocked");
        fflush(stdout);
        pthread_sigmask(SIG_UNBLOCK, &only, NULL);
    }
    puts("behind");
    fflush(stdout);
    _exit(0);
}

int main(int count, char **arguments)
{
    struct stat found;
    int fd = open(arguments[1], O_RDONLY);
    if (count < 3 || fd < 0 || fstat(fd, &found)) return 2;
    const char *what = arguments[2];
    /* Whoever runs the tests may ignore some. */
    signal(SIGINT, SIG_DFL), signal(SIGTERM, SIG_DFL), signal(SIGHUP, SIG_DFL);
    int is_ignored = !strcmp(what, "ignored");
    if (is_ignored) signal(SIGTERM, SIG_IGN);
    const volatile unsigned char *bytes = mmap(NULL, found.st_size, PROT_READ, MAP_SHARED, fd, 0);
    unsigned sum = 0;
    for (long at = 0; at < found.st_size; at += 4096) sum += bytes[at];
    if (!strcmp(what, "reads")) {
        puts("ready");
        fflush(stdout);
        for (unsigned long at = 0;; at += 4096) sum += bytes[at % found.st_size];
    }
    if (count > 3) {
        pthread_t thread;
        if (!strcmp(what, "kills its group")) setpgid(0, 0);
        if (strcmp(what, "kills in a thread")) ends((void *)what);
        if (pthread_create(&thread, NULL, ends, (void *)what)) return 2;
        for (;;) sum += bytes[sum % found.st_size];
    }
    if (!strcmp(what, "exits")) {
        kill(getpid(), SIGTERM);
        exit(0);
    }
    if (!strcmp(what, "child")) {
        pid_t child = fork();
        if (!child) for (;;) pause();
        int status;
        kill(child, SIGTERM);
        waitpid(child, &status, 0);
        return WIFSIGNALED(status) ? WTERMSIG(status) : 3;
    }
    struct sigaction action = {.sa_handler = strcmp(what, "own") ? chained : own};
    if (!is_ignored) sigaction(SIGTERM, &action, &before);
    kill(getpid(), SIGTERM);
    return seen || is_ignored ? 7 : 4;
}
"#;

/// A handler reads the mapping, in whatever the program is interrupted.
const HANDLER: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

enum { TIMES = 3000 };
static const volatile unsigned char *bytes;
static unsigned long size, place;
static volatile sig_atomic_t times, is_wrong;

static void read_some(int signal)
{
    (void)signal;
    place = place * 6364136223846793005 + 1442695040888963407;
    unsigned long at = (place >> 20) % (size / 8 - 1) * 8 + 8;
    /* Each number of the file is its place, but for the first. */
    unsigned long found;
    memcpy(&found, (const void *)(bytes + at), 8);
    if (found != at / 8) is_wrong = 1;
    times++;
}

int main(int count, char **arguments)
{
    struct stat found;
    int fd = open(arguments[1], O_RDONLY);
    if (count < 3 || fd < 0 || fstat(fd, &found)) return 2;
    size = found.st_size;
    const char *what = arguments[2];
    bytes = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
    if (bytes == MAP_FAILED) return 2;
    struct sigaction action = {.sa_handler = read_some, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &action, NULL);
    struct itimerval often = {{0, 300}, {0, 300}};
    setitimer(ITIMER_REAL, &often, NULL);
    while (times < TIMES && !is_wrong) {
        if (!strcmp(what, "allocates")) {
            void *some[64];
            for (int i = 0; i < 64; i++) some[i] = malloc((size_t)200 << i % 12);
            for (int i = 0; i < 64; i++) free(some[i]);
        } else if (!strcmp(what, "forks")) {
            pid_t child = fork();
            if (!child) _exit(0);
            while (waitpid(child, NULL, 0) < 0) {}
        } else {
            void *more = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
            if (more == MAP_FAILED) return 3;
            munmap(more, size);
        }
    }
    return is_wrong ? 4 : 7;
}
"#;

/// A file of numbers that are their places, behind what a model file begins with.
fn numbers(folder: &Path, len: u64) -> PathBuf {
    let path = folder.join("model.gguf");
    let bytes: Vec<u8> = (0..len / 8).flat_map(u64::to_le_bytes).collect();
    std::fs::write(&path, [b"GGUF\0\0\0\0", &bytes[8..]].concat()).unwrap();
    path
}

/// The thread of faults waited for the lock of `malloc`, and that for the end of a handler that touched a page.
#[test]
fn regression_a_handler_may_touch_a_page_whatever_it_interrupts() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let Some(program) = built(folder.path(), HANDLER) else { return };
    let path = numbers(folder.path(), 64 << 20);
    for (what, arenas) in [("allocates", "1"), ("allocates", "8"), ("forks", "1"), ("forks", "8"), ("maps", "1")] {
        let mut command = outcore_within(100);
        command.args(["run", "--budget", "8MiB", "--"]).arg(&program).arg(&path).arg(what);
        let output = command.env("MALLOC_ARENA_MAX", arenas).output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(7), "{what}, {arenas} arena(s): {told}");
        assert!(told.contains("file(s) mapped"), "{told}");
    }
}

fn build(folder: &Path) -> Option<PathBuf> {
    built(folder, SIGNALS)
}

/// Builds a program; `None` without a C compiler, which is said.
fn built(folder: &Path, text: &str) -> Option<PathBuf> {
    let (source, program) = (folder.join("signals.c"), folder.join("signals"));
    std::fs::write(&source, text).unwrap();
    let built = Command::new("cc").args(["-O1", "-pthread", "-o"]).arg(&program).arg(&source).output();
    if !built.is_ok_and(|output| output.status.success()) {
        eprintln!("SKIPPED: there is no C compiler (cc)");
        return None;
    }
    Some(program)
}

#[test]
fn what_happened_is_told_before_a_signal_ends_the_program() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let Some(program) = build(folder.path()) else { return };
    let path = model(folder.path(), 40 << 20);
    let report = folder.path().join("run.json");
    for (signal, number) in [("INT", 2), ("TERM", 15), ("HUP", 1)] {
        let mut command = outcore();
        command.args(["run", "--budget", "8MiB", "--report"]).arg(&report).arg("--").arg(&program).arg(&path);
        let mut child = command.arg("reads").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        let sent = Command::new("kill").arg(format!("-{signal}")).arg(child.id().to_string()).status().unwrap();
        assert!(sent.success());
        let output = child.wait_with_output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.signal(), Some(number), "{told}");
        assert_eq!(told.matches("1 file(s) mapped").count(), 1, "{told}");
        assert!(told.contains("run.json` shows more"), "{told}");
        let written: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&report).unwrap()).unwrap();
        assert!(written["run"]["end"]["counts"]["read_bytes"].as_u64() >= Some(40 << 20), "{}", written["run"]);
    }
}

#[test]
fn what_the_program_does_with_signals_stays_as_it_was() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let Some(program) = build(folder.path()) else { return };
    let path = model(folder.path(), 40 << 20);
    for (what, code, signal) in [
        ("exits", None, Some(15)),
        ("child", Some(15), None),
        ("own", Some(7), None),
        ("chained", Some(7), None),
        ("ignored", Some(7), None),
    ] {
        let mut command = outcore();
        let output =
            command.args(["run", "--budget", "8MiB", "--"]).arg(&program).arg(&path).arg(what).output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), output.status.signal()), (code, signal), "{what}: {told}");
        assert_eq!(told.matches("1 file(s) mapped").count(), 1, "{what}: {told}");
    }
}

#[test]
fn regression_nothing_runs_behind_a_signal_that_a_program_sends_itself() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let Some(program) = build(folder.path()) else { return };
    let path = model(folder.path(), 40 << 20);
    for (how, signal) in [
        ("raises", 1),
        ("kills", 2),
        ("kills by a raw call", 15),
        ("kills in a thread", 15),
        ("kills its group", 15),
        ("asks", 15),
        ("unblocks", 15),
    ] {
        for _ in 0..5 {
            let mut command = outcore();
            command.args(["run", "--budget", "8MiB", "--"]).arg(&program).arg(&path).args([how, "ends"]);
            let output = command.output().unwrap();
            let told = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.signal(), Some(signal), "{how}, {}: {told}", output.status);
            let said = if how == "unblocks" { "blocked\n" } else { "" };
            assert_eq!(String::from_utf8_lossy(&output.stdout), said, "{how}");
            assert_eq!(told.matches("1 file(s) mapped").count(), 1, "{how}: {told}");
        }
    }
}

/// The thread that tells waited for the lock of `malloc`, and its holder for the end of the process.
#[test]
fn regression_a_signal_that_a_handler_sends_ends_the_process_whatever_it_interrupts() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let Some(program) = build(folder.path()) else { return };
    let path = model(folder.path(), 40 << 20);
    for _ in 0..3 {
        let mut command = outcore();
        command.args(["run", "--budget", "8MiB", "--"]).arg(&program).arg(&path).args(["raises in malloc", "ends"]);
        let output = command.env("MALLOC_ARENA_MAX", "1").output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.signal(), Some(15), "{}: {told}", output.status);
    }
}
