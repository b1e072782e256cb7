//! Captures as traces.

use std::io::BufRead;

use super::{Progress, Trace, TraceWriter, tell};
use crate::error::{Error, ErrorKind, Result};
use crate::sim::capture::{CaptureReader, CaptureStep};

/// The class of captured pages to which the header gives none.
const UNCLASSED: &str = "no class";

pub(super) fn read(input: impl BufRead, name: &str, progress: Progress<'_>) -> Result<Trace> {
    let mut reader = CaptureReader::new(input, name)?;
    let header = reader.header().clone();
    let mut classes: Vec<&str> = Vec::new();
    // Sorted by first page: the first page of a run, and its class.
    let mut runs: Vec<(u64, Option<usize>)> = vec![(0, None)];
    let mut first = 0;
    for segment in &header.segments {
        for run in &segment.classes {
            let at = classes.iter().position(|class| *class == run.class).unwrap_or_else(|| {
                classes.push(&run.class);
                classes.len() - 1
            });
            let start = first + u64::from(run.first);
            runs.push((start, Some(at)));
            runs.push((start + u64::from(run.pages), None));
        }
        first += u64::from(segment.pages);
    }
    let other = classes.len();
    let mut writer = TraceWriter::new(classes.into_iter().chain([UNCLASSED]));
    let mut interrupted = false;
    while let Some(step) = reader.step()? {
        match step {
            CaptureStep::Use { page, write } => {
                tell(progress, writer.uses());
                let class = || {
                    let at = runs.partition_point(|(start, _)| *start <= page);
                    runs[at - 1].1.unwrap_or(other)
                };
                if write { writer.written(page, class)? } else { writer.used(page, class)? }
            }
            CaptureStep::Chain(pages) => writer.chain(&pages)?,
            CaptureStep::Pass => writer.pass(),
            CaptureStep::Interrupted => interrupted = true,
        }
    }
    if writer.uses() == 0 {
        return Err(Error::new(ErrorKind::Format, format!("the capture {name} has no uses"))
            .remedy("capture a run that uses pages"));
    }
    let mut trace = writer.end()?;
    trace.page_size = Some(header.page_size);
    trace.about = Some(header.about + if interrupted { " (the run was interrupted)" } else { "" });
    Ok(trace)
}
