//! Checks whether a file's residency over time can be drawn.

use outcore::{Error, ErrorKind, Result};
use outcore_lab::residency::{Residency, Sample};

/// More than this project writes, and no more than a browser can draw.
const ROWS_MAX: usize = 1024;
const SAMPLES_MAX: usize = 2048;

/// Checks that it can be drawn.
///
/// # Errors
/// `Unsupported` if it is too large, `Format` if it is uneven: the file was not written by this project.
pub fn check(seen: &Residency, file: &str) -> Result<()> {
    let rows = seen.rows();
    if rows > ROWS_MAX || seen.samples.len() > SAMPLES_MAX {
        let what = format!(
            "{file} has a residency of {rows} rows at {} times: at most {ROWS_MAX} and {SAMPLES_MAX} can be drawn",
            seen.samples.len()
        );
        return Err(Error::new(ErrorKind::Unsupported, what).remedy("write it again with this release"));
    }
    let even = seen.samples.iter().all(|Sample { ts, device, host }| {
        let sized = device.len() == rows && host.len() == rows;
        let mut all = device.iter().zip(host);
        ts.is_finite() && sized && all.all(|(device, host)| u16::from(*device) + u16::from(*host) <= 100)
    });
    if even && seen.samples.is_sorted_by(|before, after| before.ts <= after.ts) {
        return Ok(());
    }
    let what = format!("{file} has a residency that is uneven: times in order, and as many rows at each, are expected");
    Err(Error::new(ErrorKind::Format, what).remedy("write it again with this release"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use outcore_lab::residency::PagedFile;

    use super::*;

    fn residency(samples: &[(f64, &[u8], &[u8])]) -> Residency {
        let sample = |(ts, device, host): &(f64, &[u8], &[u8])| Sample {
            ts: *ts,
            device: (*device).into(),
            host: (*host).into(),
        };
        let file = PagedFile { name: "m".into(), bytes: 70, pages: 3 };
        Residency { page_bytes: 30, files: vec![file], samples: samples.iter().map(sample).collect() }
    }

    #[test]
    fn what_cannot_be_drawn_is_refused() {
        check(&residency(&[]), "t").unwrap();
        check(&residency(&[(0.0, &[100, 0], &[0, 100]), (0.0, &[0, 0], &[0, 0])]), "t").unwrap();
        for wrong in [
            residency(&[(0.0, &[1], &[1, 2])]),
            residency(&[(0.0, &[1], &[1]), (1.0, &[1, 2], &[1, 2])]),
            residency(&[(1.0, &[1], &[1]), (0.0, &[1], &[1])]),
            residency(&[(f64::NAN, &[1], &[1])]),
            residency(&[(0.0, &[60], &[41])]),
        ] {
            assert!(check(&wrong, "t").unwrap_err().to_string().contains("t has a residency"));
        }
        let large = check(&residency(&[(0.0, &[0; ROWS_MAX + 1], &[0; ROWS_MAX + 1])]), "t").unwrap_err();
        assert!(large.to_string().contains("1025 rows"), "{large}");
    }
}
