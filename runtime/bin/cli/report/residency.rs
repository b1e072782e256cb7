//! Where a model's pages were over time, as `generate --timeline` writes it.

use outcore::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

/// What a run saw of its pages.
#[derive(Debug, Deserialize, Serialize)]
pub struct Residency {
    pub page_bytes: u64,
    pub files: Vec<PagedFile>,
    pub samples: Vec<Sample>,
}

/// A file of the model.
#[derive(Debug, Deserialize, Serialize)]
pub struct PagedFile {
    pub name: String,
    pub bytes: u64,
    pub pages: u64,
}

/// Where pages were at one time. The pages of all files in order are divided into rows.
#[derive(Debug, Deserialize, Serialize)]
pub struct Sample {
    /// In microseconds.
    pub ts: f64,
    /// Of each row, percent in the device's memory.
    pub device: Vec<u8>,
    /// Percent in the host's.
    pub host: Vec<u8>,
}

/// More than `generate` writes, and no more than a browser draws at once.
const ROWS_MAX: usize = 1024;
const SAMPLES_MAX: usize = 2048;

impl Residency {
    /// Whether it can be drawn.
    ///
    /// # Errors
    /// `Format`, of a file that no `generate` wrote.
    pub fn check(&self, file: &str) -> Result<()> {
        let rows = self.rows();
        if rows > ROWS_MAX || self.samples.len() > SAMPLES_MAX {
            let what = format!(
                "{file} has a residency of {rows} rows at {} times: at most {ROWS_MAX} and {SAMPLES_MAX} can be drawn",
                self.samples.len()
            );
            return Err(Error::new(ErrorKind::Unsupported, what).remedy("write it again with this release"));
        }
        let even = self.samples.iter().all(|sample| {
            let all = || sample.device.iter().zip(&sample.host);
            let sized = sample.device.len() == rows && sample.host.len() == rows;
            sample.ts.is_finite() && sized && all().all(|(device, host)| u16::from(*device) + u16::from(*host) <= 100)
        });
        if even && self.samples.is_sorted_by(|before, after| before.ts <= after.ts) {
            return Ok(());
        }
        let what =
            format!("{file} has a residency that is uneven: times in order, and as many rows at each, are expected");
        Err(Error::new(ErrorKind::Format, what).remedy("write it again with this release"))
    }

    /// Rows at each time.
    pub fn rows(&self) -> usize {
        self.samples.first().map_or(0, |sample| sample.device.len())
    }

    /// Pages of all files.
    pub fn pages(&self) -> u64 {
        self.files.iter().map(|file| file.pages).fold(0, u64::saturating_add)
    }

    /// Bytes of the last page of each file that are beyond its end.
    pub fn tails(&self) -> u64 {
        let tail = |file: &PagedFile| file.pages.saturating_mul(self.page_bytes).saturating_sub(file.bytes);
        self.files.iter().map(tail).fold(0, u64::saturating_add)
    }

    /// The mean part of all pages, over the rows and the times, that `of` says.
    pub fn mean(&self, of: impl Fn(&Sample) -> &[u8]) -> f64 {
        let (mut sum, mut count) = (0.0, 0_u64);
        for percent in self.samples.iter().flat_map(of) {
            sum += f64::from(*percent) / 100.0;
            count += 1;
        }
        sum / count.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

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
        residency(&[]).check("t").unwrap();
        residency(&[(0.0, &[100, 0], &[0, 100]), (0.0, &[0, 0], &[0, 0])]).check("t").unwrap();
        for wrong in [
            residency(&[(0.0, &[1], &[1, 2])]),
            residency(&[(0.0, &[1], &[1]), (1.0, &[1, 2], &[1, 2])]),
            residency(&[(1.0, &[1], &[1]), (0.0, &[1], &[1])]),
            residency(&[(f64::NAN, &[1], &[1])]),
            residency(&[(0.0, &[60], &[41])]),
        ] {
            assert!(wrong.check("t").unwrap_err().to_string().contains("t has a residency"));
        }
        let large = residency(&[(0.0, &[0; ROWS_MAX + 1], &[0; ROWS_MAX + 1])]).check("t").unwrap_err();
        assert!(large.to_string().contains("1025 rows"), "{large}");
    }

    #[test]
    fn sums_are_of_all_rows_and_files() {
        let seen = residency(&[(0.0, &[100, 50], &[0, 50]), (1.0, &[0, 50], &[0, 0])]);
        assert_eq!((seen.rows(), seen.pages(), seen.tails()), (2, 3, 20));
        assert!((seen.mean(|sample| &sample.device) - 0.5).abs() < 1e-9);
        assert!((seen.mean(|sample| &sample.host) - 0.125).abs() < 1e-9);
    }
}
