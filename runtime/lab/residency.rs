//! Where pages were over time: what `generate --timeline` and `outcore simulate --timeline` keep, and `outcore report` draws.
//!
//! # Invariants
//!
//! 1. However long a run is, what is kept of it is bounded: at most [`Residency::SAMPLES_MAX`] samples of at most
//!    [`Residency::ROWS_MAX`] rows each.
//! 2. Samples are in order, and of equal numbers of rows.

use serde::{Deserialize, Serialize};

use crate::ids::Tier;

/// What was seen of pages, some of the time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Residency {
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Whose pages they are.
    pub files: Vec<PagedFile>,
    /// When and what.
    pub samples: Vec<Sample>,
}

/// A file of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PagedFile {
    /// Its name, without its folder.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// The pages it takes.
    pub pages: u64,
}

/// Where pages were at one time. The pages of all files in order are divided into rows of as equal numbers as can be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Since the beginning, in microseconds.
    pub ts: f64,
    /// Of each row, percent of its pages that are in the device's memory.
    pub device: Vec<u8>,
    /// Percent that are in the host's memory, and not in the device's.
    pub host: Vec<u8>,
}

impl Residency {
    /// Rows of a sample at most.
    pub const ROWS_MAX: usize = 256;
    /// Samples at most.
    pub const SAMPLES_MAX: usize = 400;

    /// Keeps a sample, later than those before. If there are too many, every second one goes, and the answer is `true`: whoever
    /// looks should do so half as often from now on.
    ///
    /// ```
    /// use outcore::Tier;
    /// use outcore_lab::residency::{Residency, Sample};
    ///
    /// let mut seen = Residency::default();
    /// let halved = (0..1000).filter(|n| seen.push(Sample::of(f64::from(*n), 4, |page| Tier::ALL[page % 3], 4))).count();
    /// assert!(halved > 0 && seen.samples.len() <= Residency::SAMPLES_MAX);
    /// assert_eq!((seen.samples[0].ts, seen.samples.last().unwrap().ts), (0.0, 999.0));
    /// ```
    pub fn push(&mut self, sample: Sample) -> bool {
        self.samples.push(sample);
        if self.samples.len() <= Self::SAMPLES_MAX {
            return false;
        }
        // The first and the last stay: of so many as there can be, both have even numbers.
        let mut number = 0_usize;
        self.samples.retain(|_| {
            number += 1;
            number % 2 == 1
        });
        true
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

impl Sample {
    /// At `ts` microseconds, of `pages` pages, each of which is in the tier that `tier` says of its number. Of a row, up to
    /// `looks` pages are looked at, evenly spread: all of them where it has no more.
    pub fn of(ts: f64, pages: usize, tier: impl Fn(usize) -> Tier, looks: usize) -> Self {
        let rows = pages.min(Residency::ROWS_MAX);
        let looks = looks.max(1);
        // Of as many as there are numbers, a product of two may not be one.
        let cut = |of: usize, at: usize, parts: usize| (of as u128 * at as u128 / parts as u128) as usize;
        let (mut device, mut host) = (Vec::with_capacity(rows), Vec::with_capacity(rows));
        for row in 0..rows {
            let first = cut(pages, row, rows);
            let count = cut(pages, row + 1, rows) - first;
            let looked = count.min(looks);
            let mut seen = [0_usize; Tier::ALL.len()];
            for look in 0..looked {
                seen[tier(first + cut(count, look, looked)) as usize] += 1;
            }
            let percent = |tier: Tier| (100 * seen[tier as usize] / looked.max(1)) as u8;
            device.push(percent(Tier::Device));
            host.push(percent(Tier::Host));
        }
        Self { ts, device, host }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_of_all_pages_in_order() {
        let tier = |page: usize| match page {
            0..300 => Tier::Device,
            300..600 => Tier::Host,
            _ => Tier::Disk,
        };
        let exact = Sample::of(1.0, 1000, tier, usize::MAX);
        assert_eq!((exact.device.len(), exact.host.len()), (256, 256));
        let sum = |of: &[u8]| of.iter().map(|percent| u32::from(*percent)).sum::<u32>();
        // 30 % of 256 rows; what is rounded is at most a part of a row.
        assert!(sum(&exact.device).abs_diff(7680) < 100 && sum(&exact.host).abs_diff(7680) < 100, "{exact:?}");
        assert_eq!((exact.device[0], exact.host[100], exact.device[255], exact.host[255]), (100, 100, 0, 0));
        // A few of each row are enough where rows are of one kind.
        let many = |page: usize| tier(page / 10_000);
        let few = Sample::of(1.0, 10_000_000, many, 8);
        assert!(sum(&few.device).abs_diff(7680) < 100, "{few:?}");
        assert_eq!(Sample::of(0.0, 3, tier, 1).device, [100, 100, 100]);
        assert!(Sample::of(0.0, 0, tier, 1).device.is_empty());
    }

    #[test]
    fn sums_are_of_all_rows_and_files() {
        let sample = |ts, device: &[u8], host: &[u8]| Sample { ts, device: device.into(), host: host.into() };
        let file = PagedFile { name: "m".into(), bytes: 70, pages: 3 };
        let samples = vec![sample(0.0, &[100, 50], &[0, 50]), sample(1.0, &[0, 50], &[0, 0])];
        let seen = Residency { page_bytes: 30, files: vec![file], samples };
        assert_eq!((seen.rows(), seen.pages(), seen.tails()), (2, 3, 20));
        assert!((seen.mean(|sample| &sample.device) - 0.5).abs() < 1e-9);
        assert!((seen.mean(|sample| &sample.host) - 0.125).abs() < 1e-9);
    }
}
