//! What does a crowd cost? Up to 100,000 tasks each want a page at the same time, and there are four times as many
//! pages as frames. The result is the CPU time of the process until every task has been served. Each task has its own
//! waker.
//!
//! - `reads`, `writes`: each task wants one page.
//! - `grows`: each task is a scope. It has a page pinned, the same for all, and wants one page more. If others have all
//!   frames, it gets `Busy`, drops its guard, and queues for both.
//! - `shares`: each task wants two pages. For every other task, one of the two is the same page.
//! - `pairs`, `sets of 4`, `grows by sets of 4`: each task wants two pages, or four, or is a scope that wants four
//!   more.
//! - `grows beside a page that is there`: each task is a scope that wants two pages more: one that all of them want and
//!   that is resident, and one of its own.
//! - `in one scope`: all tasks pin in the same scope.
//! - `beside pins`: up to 8,000 tasks want a page each. There are as many frames, and each holds a page with a pin of
//!   its own, until all tasks wait.
//! - The others: up to 16,000 scopes that each hold a page and ask for what others hold. They get `Busy`, drop
//!   their guards, and queue for both: see [`Crowd`].
//!
//! Parameters: `--frames` (16), `--most` (100000), `--only` (a part of a case's name).

#![allow(clippy::unwrap_used, reason = "a measurement that cannot be made should end")]

mod support;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Instant;

use outcore::testing::HostDevice;
use outcore::{Bytes, DType, ErrorKind, PageSize, PinGuard, Result, Runtime, Scope, Tensor};
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
    Sets(usize),
    GrowsBySets,
    GrowsBesideOne,
    InOneScope,
}

impl Does {
    const ALL: [(Self, &str); 9] = [
        (Self::Reads, "reads"),
        (Self::Writes, "writes"),
        (Self::Grows, "grows"),
        (Self::Shares, "shares"),
        (Self::Sets(2), "pairs"),
        (Self::Sets(4), "sets of 4"),
        (Self::GrowsBySets, "grows by sets of 4"),
        (Self::GrowsBesideOne, "grows beside a page that is there"),
        (Self::InOneScope, "in one scope"),
    ];
}

/// Whether a scope is to let go and try again: others hold what it asked for.
fn is_busy(asked: &Result<()>) -> bool {
    matches!(asked, Err(error) if error.kind() == ErrorKind::Busy)
}

/// A scope that holds one page and wants more.
fn grows<'a>(runtime: &'a Runtime, holds: &'a Tensor, wants: Vec<Tensor>) -> Pinning<'a> {
    Box::pin(async move {
        let scope = runtime.scope().open()?;
        let held = runtime.pin(holds).in_scope(&scope).await?;
        let asked = runtime.pin(&wants).in_scope(&scope).await.map(drop);
        drop(held);
        if !is_busy(&asked) {
            return asked;
        }
        let all: Vec<Tensor> = wants.into_iter().chain([holds.clone()]).collect();
        runtime.pin(&all).in_scope(&scope).await.map(drop)
    })
}

/// Seconds of CPU, and of the clock, until each of `count` tasks has had its page.
fn crowd(runtime: &Runtime, rows: &[Tensor], shared: &Tensor, count: usize, does: Does) -> (f64, f64) {
    let mut random = Random::new(count as u64);
    let own =
        (does == Does::GrowsBesideOne).then(|| runtime.alloc(DType::U8, &[count as u64, shared.shape()[1]]).unwrap());
    let one = &runtime.scope().open().unwrap();
    let tasks: Vec<Option<Pinning<'_>>> = (0..count)
        .map(|number| {
            let row = &rows[(random.next() >> 16) as usize % rows.len()];
            let mut some = |many: usize| {
                let mut at: Vec<usize> = Vec::with_capacity(many);
                while at.len() < many {
                    let next = (random.next() >> 16) as usize % rows.len();
                    if !at.contains(&next) {
                        at.push(next);
                    }
                }
                at.into_iter().map(|at| rows[at].clone()).collect::<Vec<_>>()
            };
            let pinning: Pinning<'_> = match does {
                Does::Writes => Box::pin(async move { runtime.pin(row).write().await.map(drop) }),
                Does::Reads => Box::pin(async move { runtime.pin(row).await.map(drop) }),
                Does::Shares => {
                    let other =
                        if number % 2 == 0 { shared } else { &rows[(random.next() >> 16) as usize % rows.len()] };
                    let set = [row.clone(), other.clone()];
                    Box::pin(async move { runtime.pin(&set).await.map(drop) })
                }
                Does::Sets(many) => {
                    let set = some(many);
                    Box::pin(async move { runtime.pin(&set).await.map(drop) })
                }
                Does::Grows => grows(runtime, shared, vec![row.clone()]),
                Does::GrowsBySets => grows(runtime, shared, some(4)),
                Does::GrowsBesideOne => {
                    let own = own.iter().map(|own| own.rows(number as u64..number as u64 + 1).unwrap());
                    grows(runtime, shared, own.chain([rows[0].clone()]).collect())
                }
                Does::InOneScope => {
                    // So few pages that they never take all frames.
                    let row = &rows[rows.len() / 2 + (random.next() >> 16) as usize % (rows.len() / 8)];
                    Box::pin(async move { runtime.pin(row).in_scope(one).await.map(drop) })
                }
            };
            Some(pinning)
        })
        .collect();
    // All frames are taken, so no task gets a page before every task waits.
    let frames = rows.len() / 4;
    let there = usize::from(does == Does::GrowsBesideOne);
    drop(runtime.pin(&rows[..there]).wait().unwrap());
    let held: Vec<Tensor> = rows[there..frames - 1].iter().chain([shared]).cloned().collect();
    let holds = runtime.pin(&held).wait().unwrap();
    let start = Instant::now();
    (served(tasks, || drop(holds)), start.elapsed().as_secs_f64())
}

/// Seconds of CPU until each of these tasks has ended. They begin in order, all of them before `then` is called.
fn served(mut tasks: Vec<Option<Pinning<'_>>>, then: impl FnOnce()) -> f64 {
    let woken: Arc<Mutex<Vec<usize>>> = Arc::default();
    let thread = thread::current();
    let task = |number| Waker::from(Arc::new(Task { number, woken: woken.clone(), thread: thread.clone() }));
    let wakers: Vec<Waker> = (0..tasks.len()).map(task).collect();
    let cpu = cpu_seconds();
    let mut next: Vec<usize> = (0..tasks.len()).collect();
    let mut left = tasks.len();
    let mut then = Some(then);
    while left > 0 {
        for number in next.drain(..) {
            let Some(task) = &mut tasks[number] else { continue };
            if let Poll::Ready(done) = task.as_mut().poll(&mut Context::from_waker(&wakers[number])) {
                done.unwrap();
                tasks[number] = None;
                left -= 1;
            }
        }
        if let Some(then) = then.take() {
            then();
        }
        while left > 0 && woken.lock().is_empty() {
            thread::park();
        }
        next = std::mem::take(&mut *woken.lock());
    }
    cpu_seconds() - cpu
}

/// Seconds of CPU until each of `count` plain pins has had its page. When they asked, there were as many frames, and
/// each held a pinned page. These pins are dropped after that.
fn beside_pins(count: u64) -> f64 {
    let page = PageSize::new(Bytes::kib(4)).unwrap();
    let budget = budget_of(count, page);
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

/// Scopes that each hold a page and ask for another one.
#[derive(Clone, Copy, PartialEq)]
enum Crowd {
    /// Every other one reads one page, and asks for another that somebody writes. The rest hold one each, and ask to
    /// write the page that is read.
    WritersBesideReaders,
    /// Each asks to write what the next one holds, and the last one a page that somebody writes. The first one asks
    /// first.
    Chain,
    /// The same, and the last one asks first.
    ChainFromItsEnd,
    /// Each asks to write what the next one holds, and the last one what the first one holds.
    Circle,
    /// All ask to write one page, which somebody writes.
    OnePage,
    /// They hold all frames, and each asks for one more.
    ShortOfFrames,
}

impl Crowd {
    const ALL: [(Self, &str); 6] = [
        (Self::WritersBesideReaders, "writers beside readers"),
        (Self::Chain, "chain"),
        (Self::ChainFromItsEnd, "chain from its end"),
        (Self::Circle, "circle"),
        (Self::OnePage, "one page"),
        (Self::ShortOfFrames, "short of frames"),
    ];
}

/// A budget that holds `frames` frames. Their page tables count too, except the first 16 MiB.
fn budget_of(frames: u64, page: PageSize) -> Bytes {
    let tables = frames * HostDevice::tables_of_a_frame(page).get();
    Bytes::new(frames * page.bytes() + tables.saturating_sub(16 << 20))
}

/// A scope that holds the first of these pages, by `held`, and asks for the second one.
fn asks<'a>(
    runtime: &'a Runtime,
    scope: &'a Scope,
    held: PinGuard,
    pages: [&'a Tensor; 2],
    writes: bool,
) -> Pinning<'a> {
    Box::pin(async move {
        let asked = match writes {
            true => runtime.pin(pages[1]).in_scope(scope).write().await.map(drop),
            false => runtime.pin(pages[1]).in_scope(scope).await.map(drop),
        };
        drop(held);
        if !is_busy(&asked) {
            return asked;
        }
        let both = pages.map(Tensor::clone);
        match writes {
            true => runtime.pin(&both).in_scope(scope).write().await.map(drop),
            false => runtime.pin(&both).in_scope(scope).await.map(drop),
        }
    })
}

/// Seconds of CPU until `count` scopes, each of which holds a page and asks for another one, have all been served.
fn holding(count: usize, crowd: Crowd) -> f64 {
    let page = PageSize::new(Bytes::kib(4)).unwrap();
    let frames = if crowd == Crowd::ShortOfFrames { count } else { count + 16 };
    let budget = budget_of(frames as u64, page);
    let policy = outcore::PolicyKind::Lru;
    let builder = Runtime::builder().device_budget(budget).scratch_dir(support::dir()).page_size(page).policy(policy);
    let runtime = builder.open().unwrap();
    let table = runtime.alloc(DType::U8, &[2 * count as u64 + 2, page.bytes()]).unwrap();
    let rows: Vec<Tensor> = (0..2 * count as u64 + 2).map(|n| table.rows(n..n + 1).unwrap()).collect();
    let (own, others) = rows.split_at(count);
    let [awaited, read, ..] = others else { return 0.0 };
    let scopes: Vec<Scope> = (0..count).map(|_| runtime.scope().open().unwrap()).collect();
    // What each holds and what it asks for, and whether to write.
    let wants = |at: usize| match crowd {
        Crowd::WritersBesideReaders if at.is_multiple_of(2) => ([read, awaited], false),
        Crowd::WritersBesideReaders => ([&own[at], read], true),
        Crowd::Chain | Crowd::ChainFromItsEnd => ([&own[at], own.get(at + 1).unwrap_or(awaited)], true),
        Crowd::Circle => ([&own[at], &own[(at + 1) % count]], true),
        Crowd::OnePage => ([&own[at], awaited], true),
        Crowd::ShortOfFrames => ([&own[at], &others[at]], false),
    };
    // Somebody outside of the scopes writes the page that is awaited, unless frames are awaited.
    let lock = (crowd != Crowd::ShortOfFrames).then(|| runtime.pin(awaited).write().wait().unwrap());
    let guards: Vec<PinGuard> =
        (0..count).map(|at| runtime.pin(wants(at).0[0]).in_scope(&scopes[at]).wait().unwrap()).collect();
    let task = |(at, held): (usize, PinGuard)| {
        let (pages, writes) = wants(at);
        Some(asks(&runtime, &scopes[at], held, pages, writes))
    };
    let mut tasks: Vec<Option<Pinning<'_>>> = guards.into_iter().enumerate().map(task).collect();
    if crowd == Crowd::ChainFromItsEnd {
        tasks.reverse();
    }
    served(tasks, || drop(lock))
}

fn main() {
    let frames: u64 = support::param("frames", "16");
    let most: usize = support::param("most", "100000");
    let only: String = support::param("only", "");
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
        for (does, what) in Does::ALL.into_iter().filter(|(_, what)| what.contains(&only)) {
            let (cpu, clock) = crowd(&runtime, &rows, &shared, count, does);
            println!("  {count:6} {what} {cpu:.2} ({clock:.2})");
            results.push(json!({ "tasks": count, "does": what, "cpu_s": cpu, "clock_s": clock }));
        }
    }
    let counts = [1000, 2000, 4000, 8000].into_iter().filter(|count| *count <= most && "beside pins".contains(&only));
    for count in counts {
        let cpu = beside_pins(count as u64);
        println!("  {count:6} beside as many pins {cpu:.2}");
        results.push(json!({ "tasks": count, "does": "beside pins", "cpu_s": cpu }));
    }
    for (crowd, what) in Crowd::ALL.into_iter().filter(|(_, what)| what.contains(&only)) {
        for count in [1000, 2000, 4000, 8000, 16_000].into_iter().filter(|count| *count <= most) {
            let cpu = holding(count, crowd);
            println!("  {count:6} {what} {cpu:.2}");
            results.push(json!({ "tasks": count, "does": what, "cpu_s": cpu }));
        }
    }
    drop((rows, shared, table));
    runtime.close().unwrap();
    support::json_line(
        "crowd",
        &hardware,
        json!({ "crowds": results, "goals_cpu_s": { "8000": [0.5, 1.0], "100000": 8 } }),
    );
}
