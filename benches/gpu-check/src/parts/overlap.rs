//! How much of the transfers hides behind matrix products: eta = (serial - measured) / (serial - ideal), where serial
//! is computing plus transfer and ideal the larger of the two. Computing is measured alone, on a resident tensor;
//! transfer is the bytes that crossed the link over the rate of one large copy, measured in the same round.

use outcore::Bytes;

use crate::Failure;
use crate::Settings;
use crate::compute::{Amount, Compute};
use crate::cuda::Gpu;
use crate::model::{ModelFile, Opened};
use crate::report::{Goal, Report, Spread, Unit};

use super::copies::Link;
use super::pass::{Passed, Passes, Pinned, builder, report_processor};

type Result<T = ()> = std::result::Result<T, Failure>;

/// Computing over transfer.
const RATIOS: [f64; 3] = [0.5, 1.0, 2.0];
/// Rows of each product: few enough that their number can be chosen finely, enough to be bound by arithmetic.
const TOKENS: u32 = 1024;

#[derive(Default)]
struct Rounds {
    eta: Vec<f64>,
    ratio: Vec<f64>,
    compute: Vec<f64>,
    transfer: Vec<f64>,
    measured: Vec<f64>,
    /// The same pass, pinned for the stream.
    for_stream: Vec<f64>,
    eta_for_stream: Vec<f64>,
    passed: Vec<Passed>,
    passed_for_stream: Vec<Passed>,
}

pub(super) fn run(settings: &Settings, report: &mut Report<'_>) -> Result {
    let gpu = Gpu::open(settings.device)?;
    let file = ModelFile::ensure(settings, report)?;
    let tensor = file.shape.bytes();
    let wanted = settings.pick(8_u64 << 30, 2 << 30, 32 << 20) / tensor;
    let count = wanted.min(file.tensors).min(settings.memory.get() / 2 / tensor);
    let (budget, host) = (Bytes::new((count / 4).max(6) * tensor), Bytes::new(count * tensor));
    report.chosen("model", format!("{} in {count} tensors", Bytes::new(count * tensor)));
    report.chosen("device budget", budget);
    report.chosen("host tier", host);
    let link = Link::new(&gpu, settings.pick(1 << 30, 1 << 30, 8 << 20))?;
    let compute = Compute::new(&gpu, file.shape, settings.pick(TOKENS, TOKENS, 16), report)?;
    let runtime = builder(settings)?.device_budget(budget).host_budget(host).open()?;
    let opened = Opened::new(&runtime, &file, count)?;
    let mut passes = Passes::new(&gpu, &runtime, &opened.tensors, &compute)?;

    let settled = passes.settle(5)?;
    if settled.read > 0 {
        report.note(format!("{} still came from the disk after five passes", Bytes::new(settled.read)));
    }
    let mut rates = vec![link.up_rate()?];
    let mut transfers = Vec::new();
    let resident = runtime.pin_device(&opened.tensors[..1]).wait()?;
    let address = opened.tensors[0].address();
    let transfer = settled.moved as f64 / rates[0] / 1e9;
    let amounts = RATIOS
        .map(|ratio| compute.amount_for(address, ratio * transfer / count as f64))
        .into_iter()
        .collect::<Result<Vec<Amount>>>()?;
    drop(resident);

    let mut all: [Rounds; 3] = Default::default();
    for _ in 0..settings.pick(5, 2, 1) {
        let rate = link.up_rate()?;
        rates.push(rate);
        transfers.push(passes.run(Amount(0))?.seconds);
        for (rounds, amount) in all.iter_mut().zip(&amounts) {
            let resident = runtime.pin_device(&opened.tensors[..1]).wait()?;
            let alone = compute.seconds(address, *amount, count)?;
            drop(resident);
            // After a change of pace, the first pass settles what is filled ahead.
            passes.run(*amount)?;
            let passed = passes.run(*amount)?;
            let transfer = passed.moved as f64 / rate / 1e9;
            let (serial, ideal) = (alone + transfer, alone.max(transfer));
            rounds.eta.push((serial - passed.seconds) / (serial - ideal));
            rounds.ratio.push(alone / transfer);
            rounds.compute.push(alone);
            rounds.transfer.push(transfer);
            rounds.measured.push(passed.seconds);
            rounds.passed.push(passed);
            let passed = passes.run_pinned(*amount, Pinned::ForStream)?;
            let transfer = passed.moved as f64 / rate / 1e9;
            rounds.for_stream.push(passed.seconds);
            rounds.eta_for_stream.push((alone + transfer - passed.seconds) / alone.min(transfer));
            rounds.passed_for_stream.push(passed);
        }
    }
    report.number("host to device, one copy", Unit::GigabytesPerSecond, &rates, None);
    report.number("pass without computing", Unit::Seconds, &transfers, None);
    for (rounds, wanted) in all.iter().zip(RATIOS) {
        let of = format!("compute:transfer {wanted}");
        report.number(format!("{of}: as it was"), Unit::Ratio, &rounds.ratio, None);
        report.number(format!("{of}: computing, alone"), Unit::Seconds, &rounds.compute, None);
        report.number(format!("{of}: transfer, at the rate of one copy"), Unit::Seconds, &rounds.transfer, None);
        report.number(format!("{of}: pass"), Unit::Seconds, &rounds.measured, None);
        report.number(format!("{of}: eta"), Unit::Ratio, &rounds.eta, None);
        let for_stream = format!("{of}: pass, pinned for the stream");
        report.number(for_stream.clone(), Unit::Seconds, &rounds.for_stream, Some(&format!("{of}: pass")));
        report.number(format!("{of}: eta, pinned for the stream"), Unit::Ratio, &rounds.eta_for_stream, None);
        report_processor(report, &format!("{of}: pass"), settings.page.bytes(), &rounds.passed);
        report_processor(report, &for_stream, settings.page.bytes(), &rounds.passed_for_stream);
        if let Some(spread) = Spread::of(&rounds.eta) {
            let formula = "(computing + transfer - pass) / min(computing, transfer); median of rounds";
            report.verdict(&format!("overlap at {of}"), spread.median, Unit::Ratio, Goal::AtLeast(0.95), formula);
        }
    }
    drop(passes);
    drop(opened);
    runtime.close()?;
    Ok(())
}
