//! Whether bytes are right while copies, kernels and evictions overlap: the soak of the package outcore-soak. Each
//! round has other settings and other random numbers.

use std::time::{Duration, Instant};

use outcore::{Bytes, PageSize, PolicyKind};
use outcore_soak::{FRAMES_MIN, Failure as Stopped, Plan, Until};

use super::pass::builder;
use crate::model::{ModelFile, Shape};
use crate::report::{Goal, Report, Unit};
use crate::{Failure, Scale, Settings};

type Result<T = ()> = std::result::Result<T, Failure>;

/// Bytes of a row of the file's tensors.
const ROW: u64 = 2048;
const TENSORS: u64 = 12;
/// Steps of a kernel before it touches memory, by round: from none to some milliseconds.
const STEPS: [u64; 4] = [0, 20_000, 100_000, 400_000];

pub(super) fn run(settings: &Settings, report: &mut Report<'_>) -> Result {
    // Three pages of each tensor are used.
    let rows = (3 * settings.page.bytes() / ROW) as u32;
    let path = settings.dir.join("outcore-soak.safetensors");
    let file = ModelFile::small(path, Shape { rows, cols: (ROW / 2) as u32 }, TENSORS)?;
    let end = Instant::now() + Duration::from_secs(settings.pick(60, 20, 0));
    let round_time = Duration::from_secs(5);
    let (mut times, mut sums, mut wrong) = (Vec::new(), 0, 0);
    for round in 0.. {
        let start = Instant::now();
        // The small scale has one round of a fixed number of sums, which compute-sanitizer can watch too.
        let until = match settings.scale {
            Scale::Tiny => Until::Uses(150),
            _ => Until::Time(end.min(start + round_time)),
        };
        // Small pages in every other round, of which there are more.
        let (page, many) = if round % 2 == 0 { (settings.page, 1) } else { (PageSize::DEFAULT, 8) };
        let many = if settings.scale == Scale::Tiny { 1 } else { many };
        let pages = |count: u64| Bytes::new(count * page.bytes());
        let runtime = builder(settings)?
            .page_size(page)
            .policy(PolicyKind::ALL[round / 2 % PolicyKind::ALL.len()])
            .device_budget(pages(FRAMES_MIN))
            .host_budget(pages([8 * u64::from(many), 0, 4][round % 3]))
            .open()?;
        let plan = Plan {
            ordinal: settings.device,
            seed: round as u64,
            until,
            many,
            frames: (FRAMES_MIN, FRAMES_MIN + 8 * u64::from(many)),
            blocks: settings.pick(64, 64, 1),
            steps: settings.pick(STEPS[round % STEPS.len()], STEPS[round % STEPS.len()], 1),
            batch: 64,
            stale_tables: None,
            progress: || {},
        };
        let tally = outcore_soak::run(&runtime, &file.path, &plan).map_err(stopped)?;
        report.chosen(&format!("round {round}"), format!("pages of {}: {tally}", pages(1)));
        tally.described.iter().for_each(|sum| report.note(format!("round {round}: {sum}")));
        (sums, wrong) = (sums + tally.uses, wrong + tally.wrong);
        if tally.wrong == 0 {
            runtime.close()?;
        }
        times.push(start.elapsed().as_secs_f64());
        if tally.wrong > 0 || settings.scale == Scale::Tiny || Instant::now() >= end {
            break;
        }
    }
    report.number("round", Unit::Seconds, &times, None);
    let formula = format!("sums that differ from what each tensor must hold at that use / {sums} sums compared");
    report.verdict("no wrong sum", wrong as f64 / sums.max(1) as f64, Unit::Ratio, Goal::AtMost(0.0), formula);
    drop(std::fs::remove_file(&file.path));
    Ok(())
}

fn stopped(failure: Stopped) -> Failure {
    match failure {
        Stopped::Outcore(error) => error.into(),
        Stopped::Driver { what, code } => Failure::Cuda { what, code, text: "in the soak".into() },
        Stopped::NoGpu(..) => Failure::Impossible(failure.to_string()),
        other => Failure::io("the soak", std::io::Error::other(other.to_string())),
    }
}
