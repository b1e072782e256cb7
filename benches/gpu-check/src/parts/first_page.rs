//! The first page after opening, while a large host tier is still being locked in the background.

use std::time::Instant;

use outcore::Bytes;
use outcore::machine::ProcessMemory;
use outcore::store::{QueueDepth, probe_file};

use crate::Failure;
use crate::Settings;
use crate::cuda::Gpu;
use crate::model::{ModelFile, Opened};
use crate::report::{Goal, Report, Spread, Unit};

use super::pass::builder;

type Result<T = ()> = std::result::Result<T, Failure>;

pub(super) fn run(settings: &Settings, report: &mut Report<'_>) -> Result {
    // Loads the driver and makes the context before anything is timed: a program that computes has done so already.
    let gpu = Gpu::open(settings.device)?;
    let file = ModelFile::ensure(settings, report)?;
    let page = settings.page.bytes();
    let wanted = settings.pick(32_u64 << 30, 8 << 30, 32 << 20);
    let host = Bytes::new(wanted.min(settings.memory.get() * 6 / 10) / page * page);
    report.chosen("host tier", host);
    if host.get() < wanted {
        report.note(format!(
            "a host tier of {} was wanted; {} of host memory may be used",
            Bytes::new(wanted),
            settings.memory
        ));
    }
    let device = Bytes::new(settings.pick(2 << 30, 1 << 30, 8 << 20));
    let (mut opens, mut firsts, mut locked) = (Vec::new(), Vec::new(), Vec::new());
    let row = u64::from(file.shape.cols) * 2;
    for round in 0..settings.pick(3, 2, 2) {
        let before = ProcessMemory::now()?.resident;
        let start = Instant::now();
        let runtime = builder(settings)?.device_budget(device).host_budget(host).open()?;
        opens.push(start.elapsed().as_secs_f64() * 1e3);
        let start = Instant::now();
        let opened = Opened::new(&runtime, &file, file.tensors)?;
        // Another tensor each round, and one page of it.
        let tensor = &opened.tensors[(round + 1) % opened.tensors.len()];
        let part = [tensor.rows(0..page / row)?];
        drop(runtime.pin(&part).on_device().wait()?);
        firsts.push(start.elapsed().as_secs_f64() * 1e3);
        // Locked memory is resident. What is not resident yet is still to be locked.
        locked.push(ProcessMemory::now()?.resident.saturating_sub(before).get() as f64 / host.get().max(1) as f64);
        drop((part, opened));
        runtime.close()?;
    }
    drop(gpu);
    report.number("open the runtime", Unit::Milliseconds, &opens, None);
    report.number("open the model and pin its first page", Unit::Milliseconds, &firsts, None);
    report.number("part of the host tier that was there by then", Unit::Ratio, &locked, None);
    let probe = probe_file(
        &file.path,
        outcore::IoBackend::Auto,
        &[Bytes::new(page)],
        &[QueueDepth::ONE],
        Bytes::new(8 * page),
    )?;
    if let Some(point) = probe.points.first() {
        let each = point.elapsed.as_secs_f64() * 1e3 * page as f64 / point.bytes.get().max(1) as f64;
        report.number("read of a page from the disk, alone", Unit::Milliseconds, &[each], None);
    }
    if let Some(spread) = Spread::of(&firsts) {
        let formula =
            format!("from the return of open() to the first pinned page, host tier of {host}; the slowest round");
        report.verdict("first page after opening", spread.most, Unit::Milliseconds, Goal::AtMost(100.0), formula);
    }
    Ok(())
}
