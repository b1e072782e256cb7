//! A signal that ends the program: what is said at its end comes first, and the status is that of the signal.

use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;

use super::*;

/// Maps the file, and does with signals what its last argument says.
const SIGNALS: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
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

/// Builds the program; `None` without a C compiler, which is said.
fn build(folder: &Path) -> Option<PathBuf> {
    let (source, program) = (folder.join("signals.c"), folder.join("signals"));
    std::fs::write(&source, SIGNALS).unwrap();
    let built = Command::new("cc").arg("-O1").arg("-o").arg(&program).arg(&source).output();
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
