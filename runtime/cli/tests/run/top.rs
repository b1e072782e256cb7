//! `outcore top` shows what a program does that runs under `outcore run`, holds it up nowhere, and says what it cannot
//! show.

use std::io::Read;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

use serde_json::Value;

use super::routing::mixture;
use super::*;

/// Maps a file and reads it, then once more for each line that it is sent.
const PROGRAM: &str = r#"
import mmap, os, sys

file = open(sys.argv[1], "rb")
one = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
while True:
    for at in range(0, len(one), 1 << 20):
        one[at : at + 1000]
    print("read", os.getpid(), flush=True)
    if not sys.stdin.readline():
        break
"#;

/// A program under `outcore run` that has read its file. It ends when its input does.
struct Running {
    child: Child,
    input: Option<ChildStdin>,
    said: BufReader<ChildStdout>,
}

impl Running {
    fn start(program: &str, path: &Path) -> Self {
        let mut command = outcore();
        command.args(["run", "--budget", "8MiB", "--", "python3", "-c", program]).arg(path);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (input, said) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        let mut this = Self { child, input, said };
        assert_eq!(this.line(), format!("read {}", this.child.id()));
        this
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.said.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn again(&mut self) {
        self.input.as_mut().unwrap().write_all(b"\n").unwrap();
        assert_eq!(self.line(), format!("read {}", self.child.id()));
    }

    fn id(&self) -> String {
        self.child.id().to_string()
    }

    /// Returns what it said at the end.
    fn end(mut self) -> String {
        drop(self.input.take());
        let mut rest = String::new();
        self.said.read_to_string(&mut rest).unwrap();
        let output = self.child.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}: {rest}");
        String::from_utf8(output.stderr).unwrap()
    }
}

fn top(arguments: &[&str]) -> Output {
    outcore().arg("top").args(arguments).output().unwrap()
}

fn refused(arguments: &[&str], parts: &[&str]) {
    let output = top(arguments);
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && output.stdout.is_empty(), "{arguments:?}: {told}");
    for part in parts {
        assert!(told.contains(part), "{arguments:?}: {part:?} is not in {told}");
    }
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

#[test]
fn a_program_is_seen_while_it_runs() {
    if !can_run() {
        return;
    }
    let folder = folder();
    let mut program = Running::start(PROGRAM, &model(folder.path(), 40 << 20));
    let seen = |program: &Running| -> Value {
        let output = top(&[&program.id(), "--json", "--interval", "0.1"]);
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let first = seen(&program);
    assert_eq!(first["process"], program.child.id());
    assert!(first["program"].as_str().unwrap().contains("python3 -c"), "{first}");
    assert!(first["counts"]["read_bytes"].as_u64().unwrap() >= 40 << 20, "{first}");
    assert!(first["memory"]["process_limit_bytes"].is_null() && first["counts"]["budget_bytes"] == 8 << 20, "{first}");
    // It does nothing meanwhile.
    assert!(first["last"]["uses"] == 0 && first["last"]["read_bytes"] == 0, "{first}");
    let file = &first["files"][0];
    assert_eq!((&file["name"], &file["held"]["bytes"]), (&"model.gguf".into(), &(40 << 20).into()));
    let there = file["held"]["used"].as_u64().unwrap() + file["held"]["ahead"].as_u64().unwrap();
    assert!(there > 0 && there <= 8 << 20, "{first}");
    program.again();
    let second = seen(&program);
    let read = |seen: &Value| seen["counts"]["read_bytes"].as_u64().unwrap();
    assert!(read(&second) > read(&first), "{second}");
    let output = top(&[&program.id(), "--once", "--interval", "0.1"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    for part in [
        "hit ratio",
        "of 8.0 MiB in use",
        "model.gguf",
        "of 40.0 MiB",
        "evictions",
        "best possible",
        "The order of use ",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    assert!(program.end().contains("1 file(s) mapped"));
}

#[test]
fn layers_and_experts_are_seen() {
    if !can_run() {
        return;
    }
    let folder = folder();
    let program = Running::start(PROGRAM, &mixture(folder.path()));
    let output = top(&[&program.id(), "--json", "--interval", "0.1"]);
    let seen: Value = serde_json::from_slice(&output.stdout).unwrap();
    let part = &seen["files"][0]["parts"][0];
    assert_eq!(part["name"], "layer 0", "{seen}");
    let experts = &part["experts"];
    assert_eq!((&experts["count"], &experts["held"]["bytes"]), (&48.into(), &(48 << 20).into()), "{seen}");
    let cells = experts["cells"].as_array().unwrap();
    // Of each the first of eight pages: the program touched that, and an expert is too large for these frames.
    assert!(cells.len() == 48 && cells.iter().all(|cell| *cell == 12), "{seen}");
    assert_eq!(seen["routing"], "never_asked");
    assert!(seen["experts"]["touched"].as_u64() >= Some(48), "{seen}");
    let text = String::from_utf8(top(&[&program.id(), "--once", "--interval", "0.1"]).stdout).unwrap();
    assert!(text.contains("  layer 0, 48 experts  ") && text.contains("The router's choice was not read"), "{text}");
    program.end();
}

/// The name of a process is not one that its child answers under, nor one that the child keeps from others.
#[test]
fn a_child_by_fork_does_not_answer() {
    if !can_run() {
        return;
    }
    const FORK: &str = r#"
import mmap, os, sys

file = open(sys.argv[1], "rb")
one = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
one[5 << 20]
print("read", os.getpid(), flush=True)
child = os.fork()
if child == 0:
    # Until the test has seen enough: its parent has ended by then.
    sys.stdin.read()
    os._exit(0)
print("child", child, flush=True)
"#;
    let folder = folder();
    let path = model(folder.path(), 40 << 20);
    let mut command = outcore();
    command.args(["run", "--budget", "8MiB", "--", "python3", "-c", FORK]).arg(&path);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut parent = command.spawn().unwrap();
    let (input, mut said) = (parent.stdin.take(), BufReader::new(parent.stdout.take().unwrap()));
    let mut line = || {
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    };
    assert_eq!(line(), format!("read {}", parent.id()));
    let child = line().strip_prefix("child ").unwrap().to_owned();
    assert!(parent.wait().unwrap().success());
    // The parent is gone, the child is not.
    refused(&[&child, "--once"], &["has mapped no model file itself", &child]);
    refused(&[&parent.id().to_string(), "--once"], &["there is no process"]);
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
    let name = format!("@outcore-run-{}", parent.id());
    assert!(!sockets.lines().any(|line| line.ends_with(&name)), "the child keeps its parent's socket");
    drop(input);
}

#[test]
fn what_cannot_be_shown_is_said() {
    refused(&["4294967295", "--once"], &["there is no process 4294967295", "outcore run"]);
    assert!(String::from_utf8_lossy(&top(&["some"]).stderr).contains("some"));
    for wrong in ["0", "0.01", "5000", "often", "nan"] {
        assert_eq!(top(&["1", "--interval", wrong]).status.code(), Some(2), "{wrong}");
    }
    let mut other = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    refused(&[&other.id().to_string(), "--once"], &["(cat) was not started by `outcore run`"]);
    drop(other.stdin.take());
    other.wait().unwrap();
    if !can_run() {
        return;
    }
    // Under `outcore run`, and nothing is mapped.
    let mut command = outcore();
    command.args(["run", "--budget", "8MiB", "--", "cat"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut idle = command.spawn().unwrap();
    idle.stdin.as_mut().unwrap().write_all(b"x").unwrap();
    idle.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    refused(&[&idle.id().to_string(), "--once"], &["has mapped no model file itself"]);
    drop(idle.stdin.take());
    idle.wait().unwrap();
    // No terminal.
    let folder = folder();
    let program = Running::start(PROGRAM, &model(folder.path(), 40 << 20));
    refused(&[&program.id()], &["standard output is no terminal", "--once"]);
    program.end();
}

/// Other users get nothing: neither from the command, nor from the socket.
#[test]
fn other_users_see_nothing() {
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::process::CommandExt;
    if !can_run() {
        return;
    }
    if std::fs::metadata("/proc/self").unwrap().uid() != 0 {
        return eprintln!("SKIPPED: only root can be another user");
    }
    const NOBODY: u32 = 65534;
    let folder = folder();
    let program = Running::start(PROGRAM, &model(folder.path(), 40 << 20));
    const ASK: &str = "import socket, sys; s = socket.socket(socket.AF_UNIX); \
                       s.connect('\\0outcore-run-' + sys.argv[1]); print(len(s.recv(100)))";
    let ask = |user: u32| {
        let mut command = Command::new("python3");
        let output = command.args(["-c", ASK, &program.id()]).current_dir("/").uid(user).gid(user).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!((ask(0).as_str(), ask(NOBODY).as_str()), ("100\n", "0\n"));
    let open = std::fs::File::open(env!("CARGO_BIN_EXE_outcore")).unwrap();
    let mut command = Command::new(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&open)));
    match command.args(["top", &program.id(), "--once"]).current_dir("/").uid(NOBODY).gid(NOBODY).output() {
        Ok(output) => {
            let told = String::from_utf8(output.stderr).unwrap();
            assert!(told.contains("is of the user with the number 0, and this is 65534"), "{told}");
        }
        // The folders above the program may be root's alone.
        Err(cause) => eprintln!("SKIPPED the command: {cause}"),
    }
    program.end();
}

/// Nobody who asks, and does not read, or asks very often, holds the program up.
#[test]
fn who_does_not_read_holds_nobody_up() {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixStream};
    if !can_run() {
        return;
    }
    let folder = folder();
    let mut program = Running::start(PROGRAM, &model(folder.path(), 40 << 20));
    let address = SocketAddr::from_abstract_name(format!("outcore-run-{}", program.id())).unwrap();
    let connect = || UnixStream::connect_addr(&address).unwrap();
    let silent: Vec<UnixStream> = (0..20).map(|_| connect()).collect();
    program.again();
    let mut answer = String::new();
    connect().read_to_string(&mut answer).unwrap();
    assert!(serde_json::from_str::<Value>(&answer).unwrap()["counts"]["uses"].as_u64() > Some(0), "{answer}");
    drop(silent);
    // One who has gone before the answer.
    drop(connect());
    program.again();
    // The thread takes no signals.
    let threads = std::fs::read_dir(format!("/proc/{}/task", program.id())).unwrap().map(|task| task.unwrap().path());
    let status = threads.map(|task| std::fs::read_to_string(task.join("status")).unwrap());
    let own = status.into_iter().find(|status| status.starts_with("Name:\toutcore-answer\n")).unwrap();
    let blocked = own.lines().find_map(|line| line.strip_prefix("SigBlk:\t")).unwrap();
    let blocked = u64::from_str_radix(blocked, 16).unwrap();
    // All that can be blocked: not SIGKILL, SIGSTOP, and two that the C library keeps for itself.
    assert_eq!(blocked | 1 << 8 | 1 << 18 | 3 << 31, u64::MAX, "{own}");
    program.end();
}

/// Starts the live view on a terminal, reads until it is drawn, and does something.
const TERMINAL: &str = r#"
import os, pty, sys

# Arguments: what to send once it is drawn (nothing: the program is ended), and the command.
pid, terminal = pty.fork()
if pid == 0:
    os.environ["TERM"] = "xterm-256color"
    os.execv(sys.argv[2], sys.argv[2:])
import fcntl, struct, termios
fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
seen, sent = b"", False
while True:
    try:
        part = os.read(terminal, 65536)
    except OSError:
        part = b""
    if not part:
        break
    seen += part
    if not sent and b"quits" in seen and b"model.gguf" in seen:
        sent = True
        if sys.argv[1]:
            os.write(terminal, sys.argv[1].encode())
        else:
            print("drawn", flush=True)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
# The screen of before comes back.
print(status, b"\x1b[?1049h" in seen, b"\x1b[?1049l" in seen, b"has ended" in seen)
"#;

#[test]
fn the_live_view_ends_with_a_key_or_with_the_program() {
    if !can_run() {
        return;
    }
    let folder = folder();
    let program = Running::start(PROGRAM, &model(folder.path(), 40 << 20));
    let live = |key: &str| {
        let mut command = Command::new("python3");
        command.args(["-c", TERMINAL, key, env!("CARGO_BIN_EXE_outcore"), "top", &program.id(), "--interval", "0.1"]);
        command.stdout(Stdio::piped()).spawn().unwrap()
    };
    for key in ["q", "\u{3}"] {
        let output = live(key).wait_with_output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), "0 True True False\n", "{key:?}");
    }
    let mut watching = live("");
    let mut said = BufReader::new(watching.stdout.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert_eq!(line, "drawn\n");
    program.end();
    let mut rest = String::new();
    said.read_to_string(&mut rest).unwrap();
    watching.wait().unwrap();
    assert_eq!(rest, "0 True True True\n");
}
