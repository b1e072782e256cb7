//! Asks a process that was started by `outcore run` what it does.

use std::fs;
use std::io::{self, Read};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::PathBuf;
use std::time::Duration;

use outcore::{Error, ErrorKind, Result};
use outcore_mapped::live::{Snapshot, socket_name};
use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;

use crate::output::printable;

/// A process answers at once, unless it is stopped or a file is just being mapped.
const LIMIT: Duration = Duration::from_secs(5);
/// More than the largest answer: 256 files with all the parts that there can be.
const ANSWER_MAX: u64 = 64 << 20;
/// What `outcore run` sets for each program.
const STARTED: &[u8] = b"OUTCORE_RUN_FIRST=";
/// How names of sockets are listed.
const NAMES: &str = "/proc/net/unix";
const PROGRAM_MAX: usize = 200;

/// A process, and no later one of the same number.
#[derive(Debug)]
pub struct Process {
    pub id: u32,
    /// Its command line, as far as it is needed to recognise it.
    pub program: String,
    /// When it was started, in ticks of the kernel's.
    started: u64,
}

impl Process {
    /// # Errors
    /// `NotFound` if there is no such process, `PermissionDenied` if it is another user's.
    pub fn find(id: u32) -> Result<Self> {
        let none = || {
            Error::new(ErrorKind::NotFound, format!("there is no process {id}"))
                .remedy("give the number of a program that was started by `outcore run`; `pgrep -a` lists numbers")
        };
        let started = started(id).ok_or_else(none)?;
        let owner = fs::metadata(format!("/proc/{id}")).map_err(|_| none())?.uid();
        let own = geteuid().as_raw();
        if own != 0 && owner != own {
            let message = format!("process {id} is of the user with the number {owner}, and this is {own}");
            return Err(Error::new(ErrorKind::PermissionDenied, message).remedy("run this as that user, or as root"));
        }
        let line = fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
        let words: Vec<_> =
            line.split(|byte| *byte == 0).filter(|word| !word.is_empty()).map(String::from_utf8_lossy).collect();
        let program = printable(&words.join(" ")).chars().take(PROGRAM_MAX).collect();
        Ok(Self { id, program, started })
    }

    /// The only process that answers here.
    ///
    /// # Errors
    /// `NotFound` if there is none, `InvalidArgument` if there are several.
    pub fn only() -> Result<Self> {
        let listed = fs::read_to_string(NAMES)
            .map_err(|cause| Error::io(format!("read {NAMES}"), cause).remedy("give the number of the process"))?;
        let mut all: Vec<Self> = found(&listed).into_iter().filter_map(|id| Self::find(id).ok()).collect();
        match all.len() {
            0 => Err(Error::new(ErrorKind::NotFound, "no process of this user has mapped a model under `outcore run`")
                .remedy("start one: outcore run --memory 4GiB -- PROGRAM")),
            1 => Ok(all.remove(0)),
            _ => {
                let all: Vec<String> = all.iter().map(|one| format!("{} ({})", one.id, one.program)).collect();
                let message = format!("several processes run under `outcore run`: {}", all.join("; "));
                Err(Error::new(ErrorKind::InvalidArgument, message).remedy("give the number of one of them"))
            }
        }
    }

    /// What it does now.
    ///
    /// # Errors
    /// - `Closed` if it has ended;
    /// - `NotFound` if it does not run under `outcore run`, or has mapped nothing;
    /// - `TimedOut` if it does not answer;
    /// - `Format` if it answers as another release does.
    pub fn look(&self) -> Result<Snapshot> {
        let answer = self.ask();
        // What goes wrong while a process ends, is that.
        if started(self.id) != Some(self.started) {
            return Err(self.ended());
        }
        let answer = answer?;
        serde_json::from_slice(&answer).map_err(|cause| {
            Error::new(
                ErrorKind::Format,
                format!("process {} gives an answer that is not understood: {cause}", self.id),
            )
            .remedy("use the release of outcore that has started it")
        })
    }

    pub fn ended(&self) -> Error {
        Error::new(ErrorKind::Closed, format!("process {} ({}) has ended", self.id, self.program))
            .remedy("its last line on standard error says what it did")
    }

    fn ask(&self) -> Result<Vec<u8>> {
        let id = self.id;
        let failed = |cause: io::Error| {
            let remedy = "try again; a program that is stopped, or closes what it did not open, gives no answer";
            match cause.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Error::new(
                    ErrorKind::TimedOut,
                    format!("process {id} does not answer within {} s", LIMIT.as_secs()),
                ),
                _ => Error::io(format!("ask process {id}"), cause),
            }
            .remedy(remedy)
        };
        let address = SocketAddr::from_abstract_name(socket_name(id)).map_err(failed)?;
        let mut stream = match UnixStream::connect_addr(&address) {
            Err(cause) if cause.kind() == io::ErrorKind::ConnectionRefused => return Err(self.why_silent()),
            found => found.map_err(failed)?,
        };
        // Anybody may take a name that is free.
        let peer = socket_peercred(&stream).map_err(|cause| failed(cause.into()))?.pid.as_raw_pid();
        if u32::try_from(peer) != Ok(id) {
            let message = format!("process {peer} answers in place of process {id}");
            return Err(Error::new(ErrorKind::NotFound, message)
                .remedy("run this where the process has that number: in its container"));
        }
        stream.set_read_timeout(Some(LIMIT)).map_err(failed)?;
        let mut answer = Vec::new();
        (&mut stream).take(ANSWER_MAX).read_to_end(&mut answer).map_err(failed)?;
        if answer.is_empty() {
            return Err(failed(io::ErrorKind::TimedOut.into()));
        }
        Ok(answer)
    }

    /// Nobody listens.
    fn why_silent(&self) -> Error {
        let (id, program) = (self.id, &self.program);
        let elsewhere = |kind: &str| {
            let of = |who: &str| fs::read_link(PathBuf::from(format!("/proc/{who}/ns/{kind}"))).ok();
            of(&id.to_string()) != of("self")
        };
        let not_found = |message: String| Error::new(ErrorKind::NotFound, message);
        if elsewhere("net") {
            return not_found(format!("process {id} ({program}) is in another network namespace"))
                .remedy("run this in its container");
        }
        let variables = fs::read(format!("/proc/{id}/environ")).unwrap_or_default();
        if !variables.split(|byte| *byte == 0).any(|variable| variable.starts_with(STARTED)) {
            return not_found(format!("process {id} ({program}) was not started by `outcore run`"))
                .remedy("start it so: outcore run --memory 4GiB -- PROGRAM");
        }
        not_found(format!("process {id} ({program}) runs under `outcore run`, and has mapped no model file itself"))
            .remedy("wait until it has, or give the number of the process that does; `pgrep -a` lists numbers")
    }
}

/// When the process was started; `None` if it has ended, even if its parent was not told yet.
fn started(id: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    // The name, in brackets, may have any signs.
    let mut fields = text.rsplit_once(')')?.1.split_ascii_whitespace();
    let ended = matches!(fields.next()?, "Z" | "X" | "x");
    fields.nth(18)?.parse().ok().filter(|_| !ended)
}

/// Numbers of processes that listen, in a list of sockets.
fn found(listed: &str) -> Vec<u32> {
    let prefix = format!("@{}", socket_name(0).trim_end_matches('0'));
    let number = |line: &str| line.split_ascii_whitespace().last()?.strip_prefix(&prefix)?.parse().ok();
    let mut all: Vec<u32> = listed.lines().filter_map(number).collect();
    all.sort_unstable();
    // Connections that are open have the name too.
    all.dedup();
    all
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use super::*;

    #[test]
    fn sockets_are_recognised_by_their_names() {
        let listed = "Num       RefCount Protocol Flags    Type St Inode Path\n\
                      0000000000000000: 00000002 00000000 00010000 0001 01 2222 @outcore-run-77\n\
                      0000000000000000: 00000003 00000000 00000000 0001 03 2223 @outcore-run-77\n\
                      0000000000000000: 00000002 00000000 00010000 0001 01 2224 @outcore-run-x\n\
                      0000000000000000: 00000002 00000000 00010000 0001 01 2225 /run/outcore-run-5\n\
                      0000000000000000: 00000002 00000000 00010000 0001 01 2226 @outcore-run-9\n\
                      0000000000000000: 00000002 00000000 00010000 0001 01 2227\n";
        assert_eq!(found(listed), [9, 77]);
    }

    #[test]
    fn a_process_is_told_from_others() {
        let own = Process::find(std::process::id()).unwrap();
        assert!(own.program.contains("outcore"), "{own:?}");
        let error = own.look().unwrap_err().to_string();
        assert!(error.contains("was not started by `outcore run`"), "{error}");
        // A later process of the same number.
        let gone = Process { started: own.started + 1, ..own };
        assert!(gone.look().unwrap_err().to_string().contains("has ended"));
        let none = Process::find(u32::MAX).unwrap_err().to_string();
        assert!(none.contains("there is no process 4294967295"), "{none}");
    }
}
