//! Opening and closing a runtime that takes nine tenths of the GPU's free memory: how long it takes, and how much
//! memory of the GPU that needs beside the frames.

use std::time::Instant;

use outcore::{Bytes, PageSize};

use crate::cuda::Gpu;
use crate::report::{Goal, Report, Unit};
use crate::{Failure, Settings};

use super::pass::builder;

type Result<T = ()> = std::result::Result<T, Failure>;

pub(super) fn run(settings: &Settings, report: &mut Report<'_>) -> Result {
    let gpu = Gpu::open(settings.device)?;
    let mut pages = vec![PageSize::USUAL_ON_GPU, PageSize::DEFAULT];
    if !pages.contains(&settings.page) {
        pages.push(settings.page);
    }
    for page in pages {
        let size = Bytes::new(page.bytes());
        gpu.synchronize()?;
        let (free, total) = gpu.memory()?;
        // The emulated driver keeps records of each frame, but there is no more to see with many of them.
        let budget = settings.pick(free / 10 * 9, free / 10 * 9, 256 << 20) / page.bytes() * page.bytes();
        let settings = Settings { page, ..settings.clone() };
        let start = Instant::now();
        let runtime = builder(&settings)?.device_budget(Bytes::new(budget)).open()?;
        let opened = start.elapsed().as_secs_f64();
        gpu.synchronize()?;
        let used = free.saturating_sub(gpu.memory()?.0);
        let start = Instant::now();
        runtime.close()?;
        let closed = start.elapsed().as_secs_f64();
        gpu.synchronize()?;
        let left = free.saturating_sub(gpu.memory()?.0);
        let share = budget as f64 / total as f64;
        report.chosen(
            &format!("budget in pages of {size}"),
            format!("{} of {} ({share:.2} of the GPU's memory)", Bytes::new(budget), Bytes::new(free)),
        );
        report.number(format!("open, pages of {size}"), Unit::Seconds, &[opened], None);
        report.number(format!("close, pages of {size}"), Unit::Seconds, &[closed], None);
        let beside = used.saturating_sub(budget) as f64;
        report.number(format!("memory beside the budget, pages of {size}"), Unit::Bytes, &[beside], None);
        report.number(format!("memory not given back, pages of {size}"), Unit::Bytes, &[left as f64], None);
        let formula = "(free before the runtime was opened - free while it is open) / device budget";
        let over = used as f64 / budget as f64;
        let name = format!("memory of the GPU over a budget of nine tenths, pages of {size}");
        report.verdict(&name, over, Unit::Ratio, Goal::AtMost(1.01), formula);
    }
    Ok(())
}
