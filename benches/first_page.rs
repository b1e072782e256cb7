//! How long after opening is the first page there? With a large host tier, much memory is locked and registered with
//! the kernel while the first page is asked for. Frames smaller than a huge page get their memory together with others.
//! For comparison: a fault in a runtime without a host tier, whose frames have been used before.
//!
//! Parameters: `--hosts` (0,2GiB,8GiB), `--opens` of each (20), `--size` of the file (256MiB), `--page` in KiB (2048),
//! `--dir`.

#![allow(clippy::unwrap_used, reason = "a measurement that cannot be made should end")]

mod support;

use std::thread;
use std::time::{Duration, Instant};

use outcore::{Bytes, IoBackend, Lookahead, PageSize, PolicyKind, Runtime, Tensor};
use serde_json::{Value, json};
use support::{Random, Spread};

/// Milliseconds of a fault.
fn fault(runtime: &Runtime, tensor: &Tensor, awaits: bool) -> f64 {
    let executor = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let start = Instant::now();
    let guard = if awaits { executor.block_on(runtime.pin(tensor)) } else { runtime.pin(tensor).wait() };
    let time = start.elapsed();
    drop(guard.unwrap());
    time.as_secs_f64() * 1e3
}

fn main() {
    let hosts: String = support::param("hosts", "0,2GiB,8GiB");
    let hosts: Vec<Bytes> = hosts.split(',').map(|host| host.parse().ok().unwrap()).collect();
    let opens: usize = support::param("opens", "20");
    let size: Bytes = support::param("size", "256MiB");
    let dir = support::dir();
    let hardware = support::hardware(&dir);
    let page = support::param::<u64>("page", "2048") << 10;
    let page_size = PageSize::new(Bytes::new(page)).unwrap();
    let file = support::model(&dir, size.get() / page, page, page);
    let backends = [IoBackend::IoUring, IoBackend::Threads];
    let mut cases: Vec<(Bytes, IoBackend, bool)> = Vec::new();
    for host in hosts {
        for backend in backends {
            cases.extend([(host, backend, false), (host, backend, true)]);
        }
    }
    let mut first = vec![Vec::new(); cases.len()];
    let mut random = Random::new(11);
    let open = |host: Bytes, backend: IoBackend| {
        let builder = Runtime::builder().page_size(page_size).device_budget(Bytes::new(32 * page));
        let builder = builder.host_budget(host).io(backend);
        builder.policy(PolicyKind::Lru).lookahead(Lookahead::Off).open().unwrap()
    };
    // An unloaded fault, by backend and kind of caller: the runtime has no host tier, and nothing else to do.
    let mut unloaded = vec![Vec::new(); 4];
    for _ in 0..opens {
        let mut order: Vec<usize> = (0..cases.len()).collect();
        random.shuffle(&mut order);
        for case in order {
            let (host, backend, awaits) = cases[case];
            let runtime = open(host, backend);
            let model = runtime.open_model(&file.0).unwrap();
            let tensors: Vec<Tensor> =
                (0..size.get() / page).map(|n| model.tensor(&format!("t{n}")).unwrap()).collect();
            let at = random.next() as usize % tensors.len();
            first[case].push(fault(&runtime, &tensors[at], awaits));
            if host.get() == 0 {
                // These use all frames before the fault that is measured.
                (0..64).for_each(|n| {
                    fault(&runtime, &tensors[n], awaits);
                });
                thread::sleep(Duration::from_millis(5));
                let kind = 2 * usize::from(backend == IoBackend::Threads) + usize::from(awaits);
                unloaded[kind].push(fault(&runtime, &tensors[100], awaits));
            }
            drop((tensors, model));
            runtime.close().unwrap();
        }
    }
    println!(
        "first page after opening, ms: median [least - most] of {opens} opens; pages of {}; {hardware}",
        Bytes::new(page)
    );
    let mut rows: Vec<Value> = Vec::new();
    for ((host, backend, awaits), times) in cases.into_iter().zip(&first) {
        let kind = 2 * usize::from(backend == IoBackend::Threads) + usize::from(awaits);
        let (spread, bare) = (Spread::of(times), Spread::of(&unloaded[kind]));
        let how = if awaits { "await" } else { "wait" };
        let ratio = spread.median / bare.median;
        println!(
            "  host tier {:>8}, {backend:9} {how:5} {spread:.2}   unloaded {bare:.2}   {ratio:.2} times",
            host.to_string()
        );
        rows.push(json!({ "host_bytes": host.get(), "backend": backend.to_string(), "caller": how,
            "first_ms": spread.json(), "unloaded_ms": bare.json(), "ratio": ratio }));
    }
    support::json_line("first_page", &hardware, json!({ "rows": rows, "goal": 1.5 }));
}
