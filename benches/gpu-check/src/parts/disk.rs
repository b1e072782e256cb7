//! The local disk, through the store that serves pages: by size of a read and reads in flight.

use outcore::store::{QueueDepth, probe_file};
use outcore::{Bytes, IoBackend};

use crate::model::ModelFile;
use crate::report::{Report, Unit};
use crate::{Failure, Settings};

type Result<T = ()> = std::result::Result<T, Failure>;

pub(super) fn run(settings: &Settings, report: &mut Report<'_>) -> Result {
    let file = ModelFile::ensure(settings, report)?;
    let page = Bytes::new(settings.page.bytes());
    let mut blocks = vec![Bytes::kib(128), page, Bytes::mib(8)];
    blocks.sort_unstable();
    blocks.dedup();
    let depths: Vec<QueueDepth> = settings
        .pick(vec![1, 4, 16, 32, 64], vec![1, 8, 32], vec![1, 4])
        .into_iter()
        .map(QueueDepth::new)
        .collect::<outcore::Result<_>>()?;
    let budget = settings.pick(Bytes::mib(512), Bytes::mib(512), Bytes::mib(16));
    let probe = probe_file(&file.path, IoBackend::Auto, &blocks, &depths, budget)?;
    report.chosen("file system", &probe.filesystem);
    report.chosen("backend", probe.backend);
    if let Err(error) = &probe.direct {
        report.note(error.to_string());
    }
    if let Some(latency) = probe.page_latency {
        report.number("read 4 KiB, alone, median", Unit::Microseconds, &[latency.median.as_secs_f64() * 1e6], None);
        report.number(
            "read 4 KiB, alone, 99th percentile",
            Unit::Microseconds,
            &[latency.p99.as_secs_f64() * 1e6],
            None,
        );
    }
    for point in &probe.points {
        let name = format!("read {}, {} in flight", point.block, point.depth);
        report.number(&name, Unit::GigabytesPerSecond, &[point.bytes_per_second() / 1e9], None);
        let cores = point.cpu.as_secs_f64() / point.elapsed.as_secs_f64().max(1e-9);
        report.number(format!("{name}: cores"), Unit::Ratio, &[cores], None);
    }
    Ok(())
}
