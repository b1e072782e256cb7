//! What a program gets on every device where it asks for what cannot be had: an answer, and no wait without an end.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::task::Waker;
use std::thread;

use super::scopes::{PAGE, row, tensor};
use harness::{AnyDevice, Devices, InScope, On, block_on, check_at_rest, next_round, poll, until, watched};
use outcore::stats::WaitsFor;
use outcore::{Bytes, ErrorKind, PageSize, Runtime, Tensor};
use outcore_testkit::{harness, on_every_device};

on_every_device! {
    a_scope_that_asks_for_more_than_it_reserved_is_told
    a_reservation_that_can_never_fit_is_refused
    regression_what_a_scope_reserved_is_its_also_where_the_budget_shrinks
    pins_outside_of_scopes_that_wait_for_each_other_can_be_seen
}

fn open(on: On, frames: u64) -> Runtime {
    let page = PageSize::new(Bytes::new(PAGE)).unwrap();
    on.builder().page_size(page).device_budget(Bytes::new(frames * PAGE)).open().unwrap()
}

/// Runs a test on each of the devices.
fn each(devices: Devices, what: &'static str, test: impl Fn(On) + Copy + Send + 'static) {
    for &on in devices {
        watched(what, move || test(on));
        next_round(on);
    }
}

/// A scope gets no more than it reserved, neither as a set nor page by page, however many frames are free. The error
/// says so, and the scope keeps what it has.
fn a_scope_that_asks_for_more_than_it_reserved_is_told(devices: Devices) {
    each(devices, "more than was reserved", |on| {
        let runtime = open(on, 8);
        let table = tensor(&runtime, 8);
        let parts = [0..2, 2..5, 5..6].map(|rows| table.rows(rows).unwrap());
        let [two, three, one] = &parts;
        let scope = runtime.scope().label("reserved").reserve(Bytes::new(2 * PAGE)).wait().unwrap();
        let scoped = InScope::new(&runtime, &scope);
        let refused = |more: &Tensor| {
            for waits in [true, false] {
                let error =
                    if waits { scoped.read(more).unwrap_err() } else { block_on(scoped.reading(more)).unwrap_err() };
                assert!(error.kind() == ErrorKind::BudgetTooSmall && !error.is_transient(), "{error}");
                let text = error.to_string();
                assert!(text.contains("\"reserved\"") && text.contains("2 pages (128.0 KiB)"), "{text}");
                assert!(error.advice().is_some(), "{text}");
            }
        };
        refused(three);
        let held = scoped.read(two).unwrap();
        refused(one);
        refused(three);
        assert_eq!((scope.held(), runtime.observe().waiting().total), (Bytes::new(2 * PAGE), 0));
        assert_eq!(runtime.stats().pager.busy, 0);
        drop(runtime.read(three).unwrap());
        drop(held);
        drop(scoped.read(one).unwrap());
        drop(scope);
        check_at_rest(runtime, parts.into_iter().chain([table]).collect(), "more than was reserved");
    });
}

/// A reservation is refused if there are never so many frames: when it is made, or when the budget becomes too small
/// while it waits.
fn a_reservation_that_can_never_fit_is_refused(devices: Devices) {
    each(devices, "reservations that never fit", |on| {
        let runtime = open(on, 4);
        let table = tensor(&runtime, 1);
        let reserve = |bytes: u64| runtime.scope().label("large").reserve(Bytes::new(bytes));
        for bytes in [4 * PAGE + 1, u64::MAX] {
            for error in [reserve(bytes).wait().unwrap_err(), block_on(reserve(bytes)).unwrap_err()] {
                assert!(error.kind() == ErrorKind::BudgetTooSmall && !error.is_transient(), "{error}");
                assert!(error.to_string().contains("(256.0 KiB)") && error.advice().is_some(), "{error}");
            }
        }
        let held = runtime.read(&table).unwrap();
        let mut waits = reserve(4 * PAGE);
        assert!(poll(&mut waits, Waker::noop()).is_pending());
        runtime.set_device_budget(Bytes::new(3 * PAGE)).unwrap();
        let error = block_on(&mut waits).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BudgetTooSmall, "{error}");
        drop((held, waits));
        drop(reserve(3 * PAGE).wait().unwrap());
        assert_eq!(runtime.observe().waiting().total, 0, "{}", runtime.observe().waiting());
        check_at_rest(runtime, vec![table], "reservations that never fit");
    });
}

/// The bug: a scope had its frames in its purse, and waited for ever for a frame of the budget, which had shrunk
/// meanwhile.
fn regression_what_a_scope_reserved_is_its_also_where_the_budget_shrinks(devices: Devices) {
    each(devices, "a smaller budget", |on| {
        let runtime = open(on, 8);
        let table = tensor(&runtime, 8);
        let rows: Vec<Tensor> = (0..8).map(|n| row(&table, n)).collect();
        let five = table.rows(0..5).unwrap();
        let scopes = [4, 4].map(|pages| runtime.scope().reserve(Bytes::new(pages * PAGE)).wait().unwrap());
        thread::scope(|threads| {
            let shrinks = threads.spawn(|| runtime.set_device_budget(Bytes::new(4 * PAGE)));
            // Once the budget is smaller, no more than five pages are ever pinned.
            until("the smaller budget", || poll(&mut runtime.reading(&five), Waker::noop()).is_ready());
            let guards: Vec<_> = rows
                .iter()
                .zip(scopes.iter().cycle())
                .map(|(row, scope)| InScope::new(&runtime, scope).read(row).unwrap())
                .collect();
            assert_eq!(scopes[0].held() + scopes[1].held(), Bytes::new(8 * PAGE));
            drop(guards);
            drop(scopes);
            shrinks.join().unwrap().unwrap();
        });
        check_at_rest(runtime, rows.into_iter().chain([table, five]).collect(), "a smaller budget");
    });
}

/// Where pins outside of scopes wait for each other, outcore does not decide. The program can see who waits for what.
fn pins_outside_of_scopes_that_wait_for_each_other_can_be_seen(devices: Devices) {
    each(devices, "nested pins", |on| {
        let runtime = open(on, 2);
        let table = tensor(&runtime, 4);
        let (a, b) = (row(&table, 0), row(&table, 1));
        let (c, d) = (row(&table, 2), row(&table, 3));
        let first = runtime.read(&a).unwrap();
        let second = runtime.read(&b).unwrap();
        let (mut more, mut writes) = (runtime.reading(&c), runtime.writing(&a));
        assert!(poll(&mut more, Waker::noop()).is_pending() && poll(&mut writes, Waker::noop()).is_pending());
        let waiting = runtime.observe().waiting();
        assert_eq!((waiting.total, runtime.stats().waiting), (2, 2), "{waiting}");
        assert_eq!(waiting.waiters[0].waits_for, WaitsFor::Frames { wanted: 1, budget: 2 });
        let [holder] = &waiting.waiters[0].holders[..] else { panic!("{waiting}") };
        assert_eq!((&holder.scope, holder.pages), (&None, 2));
        assert!(waiting.waiters[1].writes, "{waiting}");
        let text = waiting.to_string();
        assert!(text.contains("2 frames") || text.contains("1 frames"), "{text}");
        assert!(text.contains("pins outside of scopes (2 pages, the first is page 0 of a read-write tensor"), "{text}");
        drop((first, second));
        drop(block_on(&mut more).unwrap());
        drop(block_on(&mut writes).unwrap());
        assert_eq!(runtime.observe().waiting().total, 0);
        assert_eq!(runtime.observe().waiting().to_string(), "nothing waits");
        drop((more, writes));
        check_at_rest(runtime, vec![table, a, b, c, d], "nested pins");
    });
}
