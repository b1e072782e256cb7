//! What starts, and with what: where the kernel refuses, where there is no such program, and one start in another.

use super::*;

/// Becomes another program, which gets `EPERM` for `userfaultfd`, as seccomp profiles of containers have it.
const FORBIDDING: &str = r#"
import ctypes, os, platform, struct, sys

number = {"x86_64": 323, "aarch64": 282}[platform.machine()]
c = ctypes.CDLL(None, use_errno=True)
# The number of the call; if it is this one, the error, else the call.
code = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
code = b"".join(struct.pack("HBBI", *line) for line in code)
program = ctypes.create_string_buffer(code, len(code))
filter = struct.pack("HxxxxxxP", 4, ctypes.addressof(program))
NO_NEW_PRIVILEGES, SECCOMP = 38, 22
assert c.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
if c.prctl(SECCOMP, 2, ctypes.c_char_p(filter)) != 0:
    sys.exit(77)
os.execv(sys.argv[1], sys.argv[1:])
"#;

/// Says whether its mapping of a model is the kernel's, and whether the library is loaded.
const WHOSE: &str = r#"
import mmap, os, sys

file = open(sys.argv[1], "rb")
one = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
assert one[5 << 20 : (5 << 20) + 1000] == os.pread(file.fileno(), 1000, 5 << 20)
maps = open("/proc/self/maps").read()
print("kernel" if os.path.realpath(sys.argv[1]) in maps else "mapped", "liboutcore_preload" in maps)
"#;

/// It cost the program its life: the kernel's own mappings cost it time only.
#[test]
fn regression_without_userfaultfd_the_program_runs_with_the_kernels_mappings() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), 40 << 20);
    let report = folder.path().join("run.json");
    std::fs::write(&report, "an earlier one").unwrap();
    let library = Path::new(env!("CARGO_BIN_EXE_outcore")).with_file_name("liboutcore_preload.so");
    let mut command = Command::new("python3");
    command.args(["-c", FORBIDDING, env!("CARGO_BIN_EXE_outcore"), "run", "--budget", "8MiB", "--report"]);
    command.arg(&report).args(["--", "python3", "-c", WHOSE]).arg(&path);
    // As if this one had been started by another `outcore run`.
    let output = command.env("LD_PRELOAD", library).output().unwrap();
    if output.status.code() == Some(77) {
        return eprintln!("SKIPPED: no filter for system calls can be set here");
    }
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{told}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "kernel False\n", "{told}");
    assert_eq!(told.lines().count(), 1, "{told}");
    for part in ["python3 is started without", "userfaultfd", "seccomp", "stay the kernel's", "run.json"] {
        assert!(told.contains(part), "{part:?} is not in {told}");
    }
    assert_eq!(std::fs::read_to_string(report).unwrap(), "an earlier one");
}

#[test]
fn a_program_that_cannot_be_started_has_the_status_that_shells_give() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let plain = folder.path().join("plain");
    std::fs::write(&plain, "no program").unwrap();
    let runs = folder.path().join("runs");
    std::fs::write(&runs, "#!/bin/sh\nexit 3\n").unwrap();
    let script = folder.path().join("script");
    std::fs::write(&script, "#!/no/such/interpreter\n").unwrap();
    for path in [&runs, &script] {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(path, mode).unwrap();
    }
    let [old, new] = ["old.json", "new.json"].map(|name| folder.path().join(name));
    let none = folder.path().join("none");
    for (program, status, part) in [(&none, 127, "PATH"), (&plain, 126, "right"), (&script, 127, "script")] {
        for report in [&old, &new] {
            std::fs::write(&old, "an earlier one").unwrap();
            let output =
                outcore().args(["run", "--budget", "8MiB", "--report"]).arg(report).arg("--").arg(program).output();
            let output = output.unwrap();
            let told = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(status), "{told}");
            assert!(told.contains(program.to_str().unwrap()) && told.contains(part), "{told}");
            assert_eq!(std::fs::read_to_string(&old).unwrap(), "an earlier one");
            assert!(!new.exists(), "a file that was not there is not there");
        }
    }
    // One that starts has its own status, and a report of its own.
    let output =
        outcore().args(["run", "--budget", "8MiB", "--report"]).arg(&old).arg("--").arg(&runs).output().unwrap();
    assert_eq!((output.status.code(), std::fs::read(&old).unwrap()), (Some(3), vec![]), "{output:?}");
}

/// The inner one is what was asked for; the library is loaded once.
#[test]
fn one_start_in_another_maps_the_file_once() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = model(folder.path(), 40 << 20);
    let [outer, inner] = ["outer.json", "inner.json"].map(|name| folder.path().join(name));
    const LIBRARIES: &str = "print(os.environ['LD_PRELOAD'].count('liboutcore_preload'))";
    let own = env!("CARGO_BIN_EXE_outcore");
    let mut command = outcore();
    command.args(["run", "--budget", "24MiB", "--report"]).arg(&outer).args(["--", own, "run", "--budget", "8MiB"]);
    command.arg("--report").arg(&inner).args(["--", "python3", "-c", &format!("{WHOSE}{LIBRARIES}")]).arg(&path);
    let output = command.output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "mapped True\n1\n", "{told}");
    assert!(output.status.success() && told.matches("The budget was 8.0 MiB.").count() == 1, "{told}");
    assert_eq!(told.matches("file(s) mapped").count(), 1, "{told}");
    assert_eq!(std::fs::read_to_string(outer).unwrap(), "");
    serde_json::from_str::<serde_json::Value>(&std::fs::read_to_string(inner).unwrap()).unwrap();
}
