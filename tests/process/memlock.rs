//! The promise: where the system lets a process lock no memory, or little, a host tier of any size works unlocked. The
//! log says so once, and every byte is the file's.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::io::{self, Write};
use std::sync::Arc;

use harness::{AnyDevice, HOST, Scene, scene_ended, watched};
use outcore::{Bytes, PageSize};
use outcore_testkit::{harness, models};
use parking_lot::Mutex;
use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

const PAGE: u64 = 1 << 20;
const DEVICE: u64 = 8 << 20;
const HOST_TIER: u64 = 64 << 20;
/// A model that does not fit in both tiers.
const LENGTHS: [usize; 3] = [40 << 20, 50_000_001, 7];

/// What was logged.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().clone()).unwrap()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Gives up this thread's right to lock more than the limit, also for the threads that it starts. False if the right
/// stays.
fn without_the_right_to_lock() -> bool {
    let mut sets = capabilities(None).unwrap();
    sets.effective.remove(CapabilitySet::IPC_LOCK);
    sets.permitted.remove(CapabilitySet::IPC_LOCK);
    sets.inheritable.remove(CapabilitySet::IPC_LOCK);
    if let Err(cause) = set_capabilities(None, sets) {
        eprintln!("CAP_IPC_LOCK stays: {cause}");
    }
    !capabilities(None).unwrap().effective.contains(CapabilitySet::IPC_LOCK)
}

/// Locked memory of this process, in bytes.
fn locked() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|line| line.starts_with("VmLck:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

/// Run by the test below, in a process of its own: a limit is the process's.
#[test]
fn child_streams_with_little_locked() {
    let Some(limit) = std::env::var("OUTCORE_CHILD_MEMLOCK").ok().map(|limit| limit.parse().unwrap()) else { return };
    watched("stream with little locked", move || {
        let rlimit = Rlimit { current: Some(limit), maximum: Some(limit) };
        setrlimit(Resource::Memlock, rlimit).unwrap();
        if !without_the_right_to_lock() {
            println!("SKIPPED: CAP_IPC_LOCK cannot be given up here, so the limit is none");
            scene_ended();
            return;
        }
        let log = Log::default();
        let writer = log.clone();
        let level = tracing_subscriber::fmt().with_max_level(tracing::Level::WARN).with_ansi(false);
        level.with_writer(move || writer.clone()).init();
        let file = models::synthetic(&LENGTHS);
        for on in HOST {
            log.0.lock().clear();
            let runtime = on
                .builder()
                .page_size(PageSize::new(Bytes::new(PAGE)).unwrap())
                .device_budget(Bytes::new(DEVICE))
                .host_budget(Bytes::new(HOST_TIER))
                .open()
                .unwrap();
            // Memory is locked in the background. At the limit the log says so.
            while log.text().is_empty() {
                std::thread::yield_now();
            }
            assert_eq!(locked(), limit, "{on:?}");
            let model = runtime.open_model(&file.path).unwrap();
            for _ in 0..2 {
                for (n, len) in LENGTHS.into_iter().enumerate() {
                    let header = model.header().tensor(&format!("t{n}")).unwrap();
                    let expected = &file.bytes[header.offset as usize..][..len];
                    let tensor = model.tensor(&format!("t{n}")).unwrap();
                    for start in (0..len).step_by(3_000_000) {
                        let end = (start + 3_000_000).min(len);
                        let guard = runtime.read(&tensor.rows(start as u64..end as u64).unwrap()).unwrap();
                        assert!(*guard.bytes() == expected[start..end], "{on:?}: t{n} differs after {start}");
                    }
                }
            }
            let stats = runtime.stats();
            assert!(stats.pager.fills_host > 0 && stats.host.budget == Bytes::new(HOST_TIER), "{on:?}: {stats:?}");
            drop(model);
            runtime.close().unwrap();
            let text = log.text();
            let warning = text.lines().next().unwrap();
            assert_eq!(text.lines().count(), 1, "{on:?}: {text}");
            assert!(warning.contains("goes on unlocked") && warning.contains("RLIMIT_MEMLOCK"), "{on:?}: {warning}");
            println!("{on:?}: {warning}");
        }
        scene_ended();
    });
}

#[test]
fn a_host_tier_that_may_not_be_locked_streams_unlocked_and_says_so_once() {
    for limit in [8 << 20, 0] {
        let child = Scene::of("child_streams_with_little_locked").tell("OUTCORE_CHILD_MEMLOCK", limit.to_string());
        let text = child.run().well(&format!("RLIMIT_MEMLOCK of {limit}"));
        let shown = text.lines().filter(|line| line.contains("SKIPPED") || line.contains("unlocked"));
        eprintln!("RLIMIT_MEMLOCK of {}: {}", Bytes::new(limit), shown.collect::<Vec<_>>().join("; "));
    }
}
