//! Passes without computing, by page size and by lookahead: how near the runtime comes to the link with each.

use outcore::{Bytes, Lookahead, PageSize};

use crate::Failure;
use crate::Settings;
use crate::compute::{Amount, Compute};
use crate::cuda::Gpu;
use crate::model::{ModelFile, Opened};
use crate::report::{Report, Unit};

use super::copies::Link;
use super::pass::{Passes, builder};

type Result<T = ()> = std::result::Result<T, Failure>;

pub(super) fn run(settings: &Settings, report: &mut Report<'_>) -> Result {
    let gpu = Gpu::open(settings.device)?;
    let file = ModelFile::ensure(settings, report)?;
    let tensor = file.shape.bytes();
    let wanted = settings.pick(4_u64 << 30, 2 << 30, 32 << 20) / tensor;
    let count = wanted.min(file.tensors).min(settings.memory.get() / 2 / tensor);
    let device = Bytes::new((count / 4).max(6) * tensor);
    report.chosen("model", format!("{} in {count} tensors", Bytes::new(count * tensor)));
    report.chosen("device budget", device);
    let link = Link::new(&gpu, settings.pick(1 << 30, 1 << 30, 8 << 20))?;
    let compute = Compute::new(&gpu, file.shape, 1, report)?;

    let pages = settings.pick(vec![2, 4, 8, 16, 32], vec![2, 4, 8, 16], vec![2, 4]);
    let ahead = settings.pick(vec![64, 256, 1024], vec![64, 256], vec![8]);
    let page_sizes = pages
        .into_iter()
        .map(|mib| Ok((PageSize::new(Bytes::mib(mib))?, Lookahead::Auto)))
        .collect::<Result<Vec<_>>>()?;
    let lookaheads = ahead.into_iter().map(|mib| (settings.page, Lookahead::Bytes(Bytes::mib(mib))));
    let mut ceilings = Vec::new();
    for (page, lookahead) in page_sizes.into_iter().chain(lookaheads) {
        let bytes = page.bytes();
        // A page more than the tensors fill, because they do not begin at multiples of large pages.
        let host = Bytes::new((count * tensor).next_multiple_of(bytes) + bytes);
        let settings = Settings { page, ..settings.clone() };
        let runtime = builder(&settings)?.device_budget(device).host_budget(host).lookahead(lookahead).open()?;
        let opened = Opened::new(&runtime, &file, count)?;
        let mut passes = Passes::new(&gpu, &runtime, &opened.tensors, &compute)?;
        passes.settle(5)?;
        let (mut rates, mut shares) = (Vec::new(), Vec::new());
        for _ in 0..settings.rounds() {
            let ceiling = link.up_rate()?;
            let passed = passes.run(Amount(0))?;
            let rate = passed.moved as f64 / passed.seconds / 1e9;
            ceilings.push(ceiling);
            rates.push(rate);
            shares.push(rate / ceiling);
        }
        let ahead = match lookahead {
            Lookahead::Bytes(bytes) => bytes.to_string(),
            _ => format!("auto ({})", runtime.stats().lookahead),
        };
        let name = format!("pages of {}, lookahead {ahead}", Bytes::new(bytes));
        report.number(format!("{name}: over the link"), Unit::GigabytesPerSecond, &rates, None);
        report.number(format!("{name}: of one copy"), Unit::Ratio, &shares, None);
        drop(passes);
        drop(opened);
        runtime.close()?;
    }
    report.number("host to device, one copy", Unit::GigabytesPerSecond, &ceilings, None);
    Ok(())
}
