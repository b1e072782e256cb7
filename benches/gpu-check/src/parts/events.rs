//! What events cost the processor, and how long after the end of work a waiting thread runs.

use std::time::Instant;

use crate::cuda::{DeviceMemory, Event, EventKind, Gpu};
use crate::processor::Processor;
use crate::report::{Report, Unit};
use crate::{Failure, Settings};

type Result<T = ()> = std::result::Result<T, Failure>;

pub(super) fn run(settings: &Settings, report: &mut Report<'_>) -> Result {
    let gpu = Gpu::open(settings.device)?;
    let count = settings.pick(2000_usize, 1000, 20);
    let (stream, other) = (gpu.stream()?, gpu.stream()?);
    let memory = DeviceMemory::new(&gpu, 4096)?;
    let mut times: [Vec<f64>; 6] = Default::default();
    for _ in 0..settings.rounds() {
        let mut each = |at: usize, run: &mut dyn FnMut() -> Result| -> Result {
            let start = Instant::now();
            run()?;
            times[at].push(start.elapsed().as_secs_f64() * 1e6 / count as f64);
            Ok(())
        };
        let mut events: Vec<Event> = Vec::with_capacity(count);
        each(0, &mut || (0..count).try_for_each(|_| gpu.event(EventKind::Plain).map(|event| events.push(event))))?;
        each(1, &mut || events.iter().try_for_each(|event| stream.record(event)))?;
        each(2, &mut || events.iter().try_for_each(|event| other.wait(event)))?;
        stream.synchronize()?;
        other.synchronize()?;
        each(3, &mut || events.iter().try_for_each(|event| event.happened().map(drop)))?;
        // The work takes next to no time, so the time of the wait is that of the way to the GPU and back.
        for (at, kind) in [(4, EventKind::Plain), (5, EventKind::Blocking)] {
            let event = gpu.event(kind)?;
            each(at, &mut || {
                (0..count).try_for_each(|_| {
                    stream.zero(memory.address, 4096)?;
                    stream.record(&event)?;
                    event.synchronize()
                })
            })?;
        }
    }
    // Nobody waits for these events. A driver may all the same wake a thread of its own for each that was made for
    // sleepers.
    for (kind, how) in
        [(EventKind::Plain, "made for a waiter that spins"), (EventKind::Blocking, "for one that sleeps")]
    {
        let (events, before) = ((0..count).map(|_| gpu.event(kind)).collect::<Result<Vec<_>>>()?, Processor::now());
        for event in &events {
            stream.zero(memory.address, 4096)?;
            stream.record(event)?;
        }
        // The work has ended when the last has happened, which is asked and not waited for.
        while !events.last().map_or(Ok(true), Event::happened)? {
            std::thread::yield_now();
        }
        let spent = Processor::now().since(&before);
        for (thread, seconds) in spent.threads().filter(|(_, seconds)| *seconds > 0.0) {
            let name = format!("an event {how}: of which the thread {thread}");
            report.number(name, Unit::Microseconds, &[seconds * 1e6 / count as f64], None);
        }
    }
    let names = [
        "create an event",
        "record an event",
        "make a stream wait for an event",
        "ask whether an event has happened",
        "zero 4 KiB and wait, spinning",
        "zero 4 KiB and wait, sleeping",
    ];
    for (name, rounds) in names.into_iter().zip(&times) {
        report.number(name, Unit::Microseconds, rounds, None);
    }
    Ok(())
}
