//! How much of the transfers hides behind matrix products: eta = (serial - measured) / (serial - ideal), where serial
//! is computing plus transfer and ideal the larger of the two. Computing is that of the same pass, by events around the
//! work with each tensor: alone, the same products run at another clock. Transfer is the bytes that crossed the link
//! over the rate of one large copy, measured before and after in the same round.

use outcore::Bytes;

use crate::Failure;
use crate::Settings;
use crate::clocks;
use crate::compute::{Amount, Compute};
use crate::cuda::Gpu;
use crate::model::{ModelFile, Opened};
use crate::report::{Goal, Report, Spread, Unit};

use super::copies::Link;
use super::pass::{Passed, Passes, Pinned, builder, report_processor};

type Result<T = ()> = std::result::Result<T, Failure>;

/// Computing over transfer.
const RATIOS: [f64; 5] = [0.5, 0.8, 1.0, 1.25, 2.0];
/// Those that are judged, and what they have to reach.
const JUDGED: [f64; 3] = [0.5, 1.0, 2.0];
const GOAL: f64 = 0.97;
/// Rows of each product: few enough that their number can be chosen finely, enough to be bound by arithmetic.
const TOKENS: u32 = 1024;
/// How passes are pinned, in the order of an even round; an odd one runs them the other way round, so that over two
/// rounds neither comes first more often.
const WAYS: [Pinned; 2] = [Pinned::ByThread, Pinned::ForStream];

/// What the rounds of one way to pin were.
#[derive(Default)]
struct Rounds {
    eta: Vec<f64>,
    ratio: Vec<f64>,
    compute: Vec<f64>,
    transfer: Vec<f64>,
    measured: Vec<f64>,
    passed: Vec<Passed>,
}

impl Rounds {
    fn add(&mut self, passed: Passed, transfer: f64) {
        let computing = passed.computing;
        self.eta.push((computing + transfer - passed.seconds) / computing.min(transfer));
        self.ratio.push(computing / transfer);
        self.compute.push(computing);
        self.transfer.push(transfer);
        self.measured.push(passed.seconds);
        self.passed.push(passed);
    }
}

/// A ratio of computing to transfer.
struct Case {
    wanted: f64,
    amount: Amount,
    by_thread: Rounds,
    for_stream: Rounds,
    /// Of the GPU, before the first round and after the last, right behind a pass.
    clocks: Vec<f64>,
}

pub(super) fn run(settings: &Settings, report: &mut Report<'_>) -> Result {
    let gpu = Gpu::open(settings.device)?;
    let file = ModelFile::ensure(settings, report)?;
    let tensor = file.shape.bytes();
    let wanted = settings.pick(128, 32, 8);
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
    let resident = runtime.pin(&opened.tensors[..1]).on_device().wait()?;
    let address = opened.tensors[0].address();
    let transfer = settled.moved as f64 / rates[0] / 1e9;
    let case = |wanted: f64| {
        let amount = compute.amount_for(address, wanted * transfer / count as f64)?;
        let (by_thread, for_stream) = Default::default();
        Ok(Case { wanted, amount, by_thread, for_stream, clocks: Vec::new() })
    };
    let mut cases = RATIOS.into_iter().map(case).collect::<Result<Vec<_>>>()?;
    drop(resident);

    let rounds = settings.pick(9, 3, 1);
    for round in 0..rounds {
        transfers.push(passes.run(Amount(0))?.seconds);
        // The other way round in every second round, too.
        let order: Vec<usize> =
            if round % 2 == 0 { (0..cases.len()).collect() } else { (0..cases.len()).rev().collect() };
        for at in order {
            let case = &mut cases[at];
            // After a change of pace, the first pass settles what is filled ahead.
            passes.run(case.amount)?;
            if round == 0 {
                case.clocks.extend(clocks::now(settings.device));
                passes.run(case.amount)?;
            }
            let before = link.up_rate()?;
            let mut passed = Vec::new();
            for n in 0..WAYS.len() {
                let way = WAYS[if round % 2 == 0 { n } else { WAYS.len() - 1 - n }];
                passed.push((way, passes.run_pinned(case.amount, way)?));
            }
            if round + 1 == rounds {
                case.clocks.extend(clocks::now(settings.device));
            }
            let after = link.up_rate()?;
            let rate = before.midpoint(after);
            rates.extend([before, after]);
            for (way, passed) in passed {
                let transfer = passed.moved as f64 / rate / 1e9;
                match way {
                    Pinned::ByThread => case.by_thread.add(passed, transfer),
                    Pinned::ForStream => case.for_stream.add(passed, transfer),
                }
            }
        }
    }
    report.number("host to device, one copy", Unit::GigabytesPerSecond, &rates, None);
    report.number("pass without computing", Unit::Seconds, &transfers, None);
    cases.iter().for_each(|case| case.report(settings, report));
    drop(passes);
    drop(opened);
    runtime.close()?;
    Ok(())
}

impl Case {
    fn report(&self, settings: &Settings, report: &mut Report<'_>) {
        let of = format!("compute:transfer {}", self.wanted);
        report.number(format!("{of}: clock, before and after"), Unit::Megahertz, &self.clocks, None);
        let pass = format!("{of}: pass");
        for (rounds, how) in [(&self.by_thread, ""), (&self.for_stream, ", pinned for the stream")] {
            let ceiling = (!how.is_empty()).then_some(pass.as_str());
            report.number(format!("{of}: as it was{how}"), Unit::Ratio, &rounds.ratio, None);
            report.number(format!("{of}: computing, in the pass{how}"), Unit::Seconds, &rounds.compute, None);
            let name = format!("{of}: transfer, at the rate of one copy{how}");
            report.number(name, Unit::Seconds, &rounds.transfer, None);
            report.number(format!("{pass}{how}"), Unit::Seconds, &rounds.measured, ceiling);
            report.number(format!("{of}: eta{how}"), Unit::Ratio, &rounds.eta, None);
            report_processor(report, &format!("{pass}{how}"), settings.page.bytes(), &rounds.passed);
        }
        let judged = Spread::of(&self.by_thread.eta).filter(|_| JUDGED.contains(&self.wanted));
        if let Some(spread) = judged {
            let formula = "(computing in the pass + transfer - pass) / min(computing, transfer); median of rounds";
            report.verdict_unless(
                clocks::moved(&self.clocks),
                &format!("overlap at {of}"),
                spread.median,
                Unit::Ratio,
                Goal::AtLeast(GOAL),
                formula,
            );
        }
    }
}
