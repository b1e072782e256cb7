//! Locking host memory: allocated by the driver against registered, touched and not, whole and in slices.

use std::time::Instant;

use outcore::Bytes;

use crate::cuda::{Gpu, HostMemory};
use crate::report::{Report, Unit};
use crate::{Failure, Settings};

type Result<T = ()> = std::result::Result<T, Failure>;

/// What the host tier locks at a time.
const SLICE: u64 = 64 << 20;

fn rate(bytes: u64, start: Instant) -> f64 {
    bytes as f64 / start.elapsed().as_secs_f64().max(1e-9) / 1e9
}

pub(super) fn run(settings: &Settings, report: &mut Report<'_>) -> Result {
    let gpu = Gpu::open(settings.device)?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
    for bytes in settings.pick(vec![1_u64 << 30, 8 << 30], vec![1 << 30], vec![8 << 20]) {
        let size = Bytes::new(bytes);
        if bytes * 2 > settings.memory.get() {
            report.note(format!("{size} was not locked: only {} of host memory may be used", settings.memory));
            continue;
        }
        let (start, memory) = (Instant::now(), HostMemory::plain(&gpu, bytes, true));
        report.number(format!("touch {size}"), Unit::GigabytesPerSecond, &[rate(bytes, start)], None);
        drop(memory);

        let (start, memory) = (Instant::now(), HostMemory::alloc(&gpu, bytes)?);
        report.number(format!("allocate {size}"), Unit::GigabytesPerSecond, &[rate(bytes, start)], None);
        let start = Instant::now();
        drop(memory);
        report.number(format!("free {size}"), Unit::GigabytesPerSecond, &[rate(bytes, start)], None);

        let ways = [
            (format!("register {size}, untouched"), false, bytes, 1),
            (format!("register {size}, touched before"), true, bytes, 1),
            (format!("register {size}, untouched, in slices of {}", Bytes::new(SLICE)), false, SLICE, 1),
            (format!("register {size}, untouched, in slices, {threads} threads"), false, SLICE, threads),
        ];
        for (name, touch, slice, threads) in ways {
            let mut memory = HostMemory::plain(&gpu, bytes, touch);
            let start = Instant::now();
            memory.lock_slices(slice, threads)?;
            report.number(name, Unit::GigabytesPerSecond, &[rate(bytes, start)], None);
            if threads == 1 && slice == bytes && !touch {
                let start = Instant::now();
                memory.unlock()?;
                report.number(format!("unregister {size}"), Unit::GigabytesPerSecond, &[rate(bytes, start)], None);
            }
        }
    }
    Ok(())
}
