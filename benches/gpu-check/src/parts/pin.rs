//! Pinning a tensor that is resident: what a model pays for each tensor of each token. Pins are for the calling thread,
//! or for a stream. For a stream, the driver has to say whether the stream is being captured, and has to record an
//! event.

use std::time::Instant;

use crate::Failure;
use crate::Settings;
use crate::cuda::Gpu;
use crate::model::{ModelFile, Opened};
use crate::report::{Goal, Report, Spread, Unit};

use super::pass::builder;

type Result<T = ()> = std::result::Result<T, Failure>;

/// Pages of the tensors. The largest of up to 16 is judged: 32 MiB at pages of 2 MiB, a bf16 matrix of 4096 x 4096.
const PAGES: [u64; 4] = [1, 4, 16, 32];
const JUDGED: u64 = 16;

pub(super) fn run(settings: &Settings, report: &mut Report<'_>) -> Result {
    let file = ModelFile::ensure(settings, report)?;
    let page = settings.page.bytes();
    let row = u64::from(file.shape.cols) * 2;
    let pages_of_a_tensor = file.shape.bytes() / page;
    let pages: Vec<u64> = PAGES.into_iter().filter(|pages| *pages <= pages_of_a_tensor).collect();
    let judged = pages.iter().copied().filter(|pages| *pages <= JUDGED).max();
    let runtime = builder(settings)?.device_budget(outcore::Bytes::new(2 * file.shape.bytes())).open()?;
    let opened = Opened::new(&runtime, &file, 1)?;
    let gpu = Gpu::open(settings.device)?;
    let stream = gpu.stream()?;
    let adopted = stream.adopted_by(&runtime)?;
    let count = settings.pick(20_000_u32, 10_000, 200);
    for pages in pages {
        let part = [opened.tensors[0].rows(0..pages * page / row)?];
        drop(runtime.pin(&part).on_device().wait()?);
        let mut times = Vec::new();
        for _ in 0..settings.rounds() {
            let start = Instant::now();
            for _ in 0..count {
                drop(runtime.pin(&part).on_device().wait()?);
            }
            times.push(start.elapsed().as_secs_f64() * 1e6 / f64::from(count));
        }
        report.number(format!("pin and unpin {pages} resident pages"), Unit::Microseconds, &times, None);
        let mut for_stream = Vec::new();
        for _ in 0..settings.rounds() {
            let start = Instant::now();
            for _ in 0..count {
                adopted.pin(&runtime, &part)?.unpin().map_err(|refused| refused.error)?;
            }
            for_stream.push(start.elapsed().as_secs_f64() * 1e6 / f64::from(count));
            stream.synchronize()?;
        }
        let name = format!("pin for a stream and unpin {pages} resident pages");
        report.number(name, Unit::Microseconds, &for_stream, Some(&format!("pin and unpin {pages} resident pages")));
        if Some(pages) == judged
            && let Some(spread) = Spread::of(&times)
        {
            let formula =
                format!("time of {count} pins and unpins of {pages} resident pages / {count}; median of rounds");
            report.verdict("pin of a resident tensor", spread.median, Unit::Microseconds, Goal::AtMost(1.0), formula);
        }
    }
    drop(adopted);
    drop(opened);
    runtime.close()?;
    Ok(())
}
