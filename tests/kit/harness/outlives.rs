//! Guards that outlive their scope.

use std::sync::mpsc;
use std::task::Waker;

use outcore::stats::WaitsFor;
use outcore::{Bytes, ComputeStream, DType, ErrorKind, PageSize, Runtime, Scope, Tensor};

use super::tasks::{Task, poll, together};
use super::{On, check_at_rest};

const PAGE: u64 = 16 << 10;

/// How a guard ends its pins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ends {
    /// Its pins end when the work that is on the stream by then has ended. Otherwise they end at once.
    pub behind_the_stream: bool,
    /// It pins to write, so it is the only guard of its pages.
    pub writes: bool,
}

fn pins_of(runtime: &Runtime, tensor: &Tensor) -> u32 {
    runtime.observe().snapshot(tensor).pages.iter().map(|page| page.device.pins).sum()
}

/// `pin` pins tensors in a scope and returns a guard that outlives the scope. Until that guard is dropped, its pages
/// belong to nobody's scope. Scopes that hold nothing wait for one of these pages, or for a frame. They can see who has
/// it, and go on when the guard ends. A scope that holds pages is told at once.
pub fn outlives_its_scope<G: Send>(on: On, ends: Ends, pin: impl Fn(&Runtime, &Scope, &[Tensor], &ComputeStream) -> G) {
    for reserved in [false, true] {
        let what = format!("{on:?}, {ends:?}, reserved: {reserved}");
        let page_size = PageSize::new(Bytes::new(PAGE)).unwrap();
        let runtime = on.builder().page_size(page_size).device_budget(Bytes::new(4 * PAGE)).open().unwrap();
        let tensors: Vec<Tensor> = (0..5).map(|_| runtime.alloc(DType::U8, &[PAGE]).unwrap()).collect();
        let stream = runtime.compute_stream().unwrap();
        let scope = match reserved {
            true => runtime.scope().label("has ended").reserve(Bytes::new(2 * PAGE)).wait().unwrap(),
            false => runtime.scope().label("has ended").open().unwrap(),
        };
        let left = pin(&runtime, &scope, &tensors[..1], &stream);
        assert_eq!(scope.held(), Bytes::new(PAGE), "{what}: it is the scope's as long as that is open");
        drop(scope);
        assert_eq!((pins_of(&runtime, &tensors[0]), runtime.evict(&tensors[0])), (1, 0), "{what}");

        // Frames that were set aside for the scope and not spent are free for anybody, so all other frames can be
        // pinned.
        let [holds, reads, writes] =
            ["holds", "reads", "writes"].map(|label| runtime.scope().label(label).open().unwrap());
        let held = runtime.pin(&tensors[1..4]).in_scope(&holds).on_device().wait().unwrap();
        // Each of the others waits: one for a frame, the other for the page of the guard.
        let (mut frame, mut page) = (
            runtime.pin(&tensors[4..]).in_scope(&reads).on_device(),
            runtime.pin(&tensors[..1]).in_scope(&writes).write().on_device(),
        );
        assert!(poll(&mut frame, Waker::noop()).is_pending() && poll(&mut page, Waker::noop()).is_pending(), "{what}");
        for told in [
            runtime.pin(&tensors[4..]).in_scope(&holds).on_device().wait().map(drop),
            runtime.pin(&tensors[..1]).in_scope(&holds).write().on_device().wait().map(drop),
        ] {
            assert_eq!(told.unwrap_err().kind(), ErrorKind::Busy, "{what}");
        }
        let waiting = runtime.observe().waiting();
        assert_eq!((waiting.total, runtime.stats().waiting), (2, 2), "{what}: {waiting}");
        let of = |label: &str| {
            let named =
                |waiter: &&outcore::stats::Waiter| waiter.scope.as_ref().is_some_and(|scope| scope.label == label);
            waiting.waiters.iter().find(named).unwrap_or_else(|| panic!("{what}: {waiting}"))
        };
        let holders = |label: &str| -> Vec<(Option<&str>, u64, bool)> {
            let holders = of(label).holders.iter();
            holders.map(|h| (h.scope.as_ref().map(|scope| scope.label.as_str()), h.pages, h.writes)).collect()
        };
        assert_eq!(of("reads").waits_for, WaitsFor::Frames { wanted: 1, budget: 4 }, "{what}");
        assert_eq!(holders("reads"), [(Some("holds"), 3, false), (None, 1, ends.writes)], "{what}: {waiting}");
        assert!(matches!(of("writes").waits_for, WaitsFor::Page(_)), "{what}: {waiting}");
        assert_eq!(holders("writes"), [(None, 1, ends.writes)], "{what}: {waiting}");
        assert!(waiting.to_string().contains("held by pins outside of scopes (1 pages"), "{what}: {waiting}");

        let (passes, passed) = mpsc::channel::<()>();
        stream.call(move || _ = passed.recv());
        // The guard ends on another thread.
        std::thread::scope(|threads| _ = threads.spawn(|| drop(left)));
        if ends.behind_the_stream {
            assert_eq!(pins_of(&runtime, &tensors[0]), 1, "{what}: work on the stream may use it");
            assert!(
                poll(&mut frame, Waker::noop()).is_pending() && poll(&mut page, Waker::noop()).is_pending(),
                "{what}"
            );
            assert_eq!(runtime.stats().waiting, 2, "{what}");
            passes.send(()).unwrap();
        }
        let goes_on: [Task<'_>; 2] = [
            (Box::pin(async { drop(frame.await.unwrap()) }), u64::MAX),
            (Box::pin(async { drop(page.await.unwrap()) }), u64::MAX),
        ];
        together(goes_on.into());
        drop(passes);
        stream.synchronize().unwrap();
        assert_eq!((runtime.stats().pager.busy, runtime.stats().waiting), (2, 0), "{what}");
        drop((held, holds, reads, writes));
        // No frame is kept for the scope that has ended.
        drop(runtime.scope().reserve(Bytes::new(4 * PAGE)).wait().unwrap());
        drop(stream);
        check_at_rest(runtime, tensors, &what);
    }
}
