//! Checks whether what a run of `outcore run` was can be drawn.

use outcore::{Error, ErrorKind, Result};
use outcore_mapped::live::{Held, Run};

/// More than this project writes, and no more than a browser can draw.
const SAMPLES_MAX: usize = 2048;
const LINES_MAX: usize = 4096;

/// Checks that it can be drawn.
///
/// # Errors
/// `Unsupported` if it is too large, `Format` if times are out of order: the file was not written by this project.
pub fn check(run: &Run, file: &str) -> Result<()> {
    let lines = run.end.files.iter().map(|file| 1 + 2 * file.parts.len()).sum::<usize>();
    if run.samples.len() > SAMPLES_MAX || lines > LINES_MAX {
        let what = format!(
            "{file} has a run with {} samples and {lines} layers: at most {SAMPLES_MAX} and {LINES_MAX} can be drawn",
            run.samples.len()
        );
        return Err(Error::new(ErrorKind::Unsupported, what).remedy("write it again with this release"));
    }
    let finite = run.samples.iter().all(|counts| counts.at.is_finite() && counts.read_seconds.is_finite());
    let held = |held: &Held| held.used.checked_add(held.ahead).is_some_and(|there| there <= held.bytes);
    let mut parts = run.end.files.iter().flat_map(|file| &file.parts);
    let even = run.end.files.iter().all(|file| held(&file.held))
        && parts.all(|part| held(&part.held) && part.experts.as_ref().is_none_or(|experts| held(&experts.held)));
    if finite && even && run.samples.is_sorted_by(|before, after| before.at <= after.at) {
        return Ok(());
    }
    let what = format!("{file} has a run that is uneven: times in order, and no more in memory than there is");
    Err(Error::new(ErrorKind::Format, what).remedy("write it again with this release"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use outcore_mapped::live::{Counts, File, Snapshot};

    use super::*;

    #[test]
    fn what_cannot_be_drawn_is_refused() {
        let at = |at: f64| Counts { at, ..Counts::default() };
        let run = |samples: Vec<Counts>, held: Held| Run {
            samples,
            end: Snapshot { files: vec![File { held, ..File::default() }], ..Snapshot::default() },
        };
        let none = Held::default();
        check(&run(vec![at(0.0), at(0.0), at(1.0)], Held { bytes: 3, used: 2, ahead: 1 }), "t").unwrap();
        for wrong in [
            run(vec![at(1.0), at(0.0)], none),
            run(vec![at(f64::NAN)], none),
            run(Vec::new(), Held { bytes: 3, used: 3, ahead: 1 }),
            run(Vec::new(), Held { bytes: 3, used: u64::MAX, ahead: u64::MAX }),
        ] {
            assert!(check(&wrong, "t").unwrap_err().to_string().contains("t has a run that is uneven"));
        }
        let large = run(vec![at(0.0); SAMPLES_MAX + 1], none);
        assert!(check(&large, "t").unwrap_err().to_string().contains("2049 samples"));
    }
}
