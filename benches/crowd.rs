//! What does a crowd cost? `N` tasks want a page each, of four times as many pages as there are frames, all at once: CPU time of
//! the process until everybody was served, with a waker a task. In the third case each is a scope that has a page pinned, the
//! same for all, and grows. In the fourth every other task wants one more page, the same for all of these, and the others
//! want two. At last, up to 8,000 tasks that want a page each beside as many frames, all of which are pinned one by one.
//!
//! Parameters: `--frames` (16), `--most` (100000).

#![allow(clippy::unwrap_used, reason = "a measurement that cannot be made should end")]

mod support;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Instant;

use outcore::device::HostDevice;
use outcore::{Bytes, DType, PageSize, Result, Runtime, Tensor};
use parking_lot::Mutex;
use serde_json::json;
use support::{Random, cpu_seconds};

type Pinning<'a> = Pin<Box<dyn Future<Output = Result<()>> + 'a>>;

struct Task {
    number: usize,
    woken: Arc<Mutex<Vec<usize>>>,
    thread: Thread,
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.woken.lock().push(self.number);
        self.thread.unpark();
    }
}

/// What each task does.
#[derive(Clone, Copy, PartialEq)]
enum Does {
    Reads,
    Writes,
    Grows,
    Shares,
}

/// Seconds of CPU, and of the clock, until each of `count` tasks has had its page.
fn crowd(runtime: &Runtime, rows: &[Tensor], shared: &Tensor, count: usize, does: Does) -> (f64, f64) {
    let woken: Arc<Mutex<Vec<usize>>> = Arc::default();
    let mut random = Random::new(count as u64);
    let mut tasks: Vec<Option<Pinning<'_>>> = (0..count)
        .map(|number| {
            let row = &rows[(random.next() >> 16) as usize % rows.len()];
            let pinning: Pinning<'_> = match does {
                Does::Writes => Box::pin(async move { runtime.pin_mut(row).await.map(drop) }),
                Does::Reads => Box::pin(async move { runtime.pin(row).await.map(drop) }),
                Does::Shares => {
                    let other =
                        if number % 2 == 0 { shared } else { &rows[(random.next() >> 16) as usize % rows.len()] };
                    let set = [row.clone(), other.clone()];
                    Box::pin(async move { runtime.pin_set(&set).await.map(drop) })
                }
                Does::Grows => Box::pin(async move {
                    let scope = runtime.scope().open()?;
                    let _holds = scope.pin(shared).await?;
                    scope.pin(row).await.map(drop)
                }),
            };
            Some(pinning)
        })
        .collect();
    let thread = thread::current();
    let task = |number| Waker::from(Arc::new(Task { number, woken: woken.clone(), thread: thread.clone() }));
    let wakers: Vec<Waker> = (0..count).map(task).collect();
    // Nobody gets a page before everybody waits.
    let frames = rows.len() / 4;
    let held: Vec<Tensor> = rows[..frames - 1].iter().chain([shared]).cloned().collect();
    let holds = runtime.pin_set(&held).wait().unwrap();
    let mut holds = Some(holds);
    let (cpu, start) = (cpu_seconds(), Instant::now());
    let mut next: Vec<usize> = (0..count).collect();
    let mut left = count;
    while left > 0 {
        for number in next.drain(..) {
            let Some(task) = &mut tasks[number] else { continue };
            if let Poll::Ready(done) = task.as_mut().poll(&mut Context::from_waker(&wakers[number])) {
                done.unwrap();
                tasks[number] = None;
                left -= 1;
            }
        }
        drop(holds.take());
        while left > 0 && woken.lock().is_empty() {
            thread::park();
        }
        next = std::mem::take(&mut *woken.lock());
    }
    (cpu_seconds() - cpu, start.elapsed().as_secs_f64())
}

/// Seconds of CPU until each of `count` plain pins has had its page, where each of as many frames was pinned when they asked, and
/// is let go after that.
fn beside_pins(count: u64) -> f64 {
    let page = PageSize::new(Bytes::kib(4)).unwrap();
    // Page tables count in it, but for 16 MiB.
    let tables = count * HostDevice::tables_of_a_frame(page).get();
    let budget = Bytes::new(count * page.bytes() + tables.saturating_sub(16 << 20));
    let policy = outcore::PolicyKind::Lru;
    let builder = Runtime::builder().device_budget(budget).scratch_dir(support::dir()).page_size(page).policy(policy);
    let runtime = builder.open().unwrap();
    let table = runtime.alloc(DType::U8, &[2 * count, page.bytes()]).unwrap();
    let rows: Vec<Tensor> = (0..2 * count).map(|n| table.rows(n..n + 1).unwrap()).collect();
    let (held, wanted) = rows.split_at(count as usize);
    let held: Vec<_> = held.iter().map(|row| runtime.pin(row).wait().unwrap()).collect();
    let cpu = cpu_seconds();
    let mut waits: Vec<_> = wanted.iter().map(|row| runtime.pin(row)).collect();
    for wait in &mut waits {
        assert!(Pin::new(wait).poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    drop(held);
    for wait in waits {
        drop(wait.wait().unwrap());
    }
    cpu_seconds() - cpu
}

fn main() {
    let frames: u64 = support::param("frames", "16");
    let most: usize = support::param("most", "100000");
    let hardware = support::hardware(&support::dir());
    let page = PageSize::new(Bytes::kib(64)).unwrap();
    let budget = Bytes::new(frames * page.bytes());
    let runtime = Runtime::builder().device_budget(budget).scratch_dir(support::dir()).page_size(page).open().unwrap();
    let table = runtime.alloc(DType::U8, &[4 * frames + 1, page.bytes()]).unwrap();
    let rows: Vec<Tensor> = (0..4 * frames).map(|n| table.rows(n..n + 1).unwrap()).collect();
    let shared = table.rows(4 * frames..4 * frames + 1).unwrap();
    println!("tasks that wait for {frames} frames, CPU s (clock s); {hardware}");
    let mut results = Vec::new();
    for count in [1000, 2000, 4000, 8000, 100_000].into_iter().filter(|count| *count <= most) {
        for (does, what) in
            [(Does::Reads, "reads"), (Does::Writes, "writes"), (Does::Grows, "grows"), (Does::Shares, "shares")]
        {
            let (cpu, clock) = crowd(&runtime, &rows, &shared, count, does);
            println!("  {count:6} {what:6} {cpu:.2} ({clock:.2})");
            results.push(json!({ "tasks": count, "does": what, "cpu_s": cpu, "clock_s": clock }));
        }
    }
    for count in [1000, 2000, 4000, 8000].into_iter().filter(|count| *count <= most) {
        let cpu = beside_pins(count as u64);
        println!("  {count:6} beside as many pins {cpu:.2}");
        results.push(json!({ "tasks": count, "does": "beside pins", "cpu_s": cpu }));
    }
    drop((rows, shared, table));
    runtime.close().unwrap();
    support::json_line(
        "crowd",
        &hardware,
        json!({ "crowds": results, "goals_cpu_s": { "8000": [0.5, 1.0], "100000": 8 } }),
    );
}
