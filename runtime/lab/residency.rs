//! Where pages were over time. `generate --timeline` and `outcore simulate --timeline` record it; `outcore report`
//! draws it.
//!
//! # Invariants
//!
//! 1. A record is bounded, however long the run: at most [`Residency::SAMPLES_MAX`] samples of at most
//!    [`Residency::ROWS_MAX`] rows each.
//! 2. Samples are in order of time, and all have the same number of rows.

use serde::{Deserialize, Serialize};

use crate::ids::Tier;

/// Samples of where a model's pages were.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Residency {
    /// Bytes of a page.
    pub page_bytes: u64,
    /// The files whose pages they are, in order.
    pub files: Vec<PagedFile>,
    /// The samples, in order of time.
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

/// Where pages were at one time. The pages of all files, in order, are divided into rows of as equal size as possible.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Microseconds since the start.
    pub ts: f64,
    /// For each row: the percentage of its pages that are in device memory.
    pub device: Vec<u8>,
    /// For each row: the percentage of its pages that are in host memory and not in device memory.
    pub host: Vec<u8>,
}

impl Residency {
    /// The most rows of a sample.
    pub const ROWS_MAX: usize = 256;
    /// The most samples that are kept.
    pub const SAMPLES_MAX: usize = 400;

    /// Adds a sample, which must be later than those before. If there are then too many, drops every second one and
    /// returns `true`: the caller should then sample half as often.
    ///
    /// ```
    /// use outcore::Tier;
    /// use outcore_lab::residency::{Residency, Sample};
    ///
    /// let mut seen = Residency::default();
    /// let sample = |n: i32| Sample::of(f64::from(n), 4, |page| Tier::ALL[page % 3], 4);
    /// let halved = (0..1000).filter(|n| seen.push(sample(*n))).count();
    /// assert!(halved > 0 && seen.samples.len() <= Residency::SAMPLES_MAX);
    /// assert_eq!((seen.samples[0].ts, seen.samples.last().unwrap().ts), (0.0, 999.0));
    /// ```
    pub fn push(&mut self, sample: Sample) -> bool {
        self.samples.push(sample);
        if self.samples.len() <= Self::SAMPLES_MAX {
            return false;
        }
        // There are 401 samples now. Those at even indices stay, so the first (0) and the last (400) do.
        let mut number = 0_usize;
        self.samples.retain(|_| {
            number += 1;
            number % 2 == 1
        });
        true
    }

    /// Returns the number of rows of each sample.
    pub fn rows(&self) -> usize {
        self.samples.first().map_or(0, |sample| sample.device.len())
    }

    /// Returns the number of pages of all files.
    pub fn pages(&self) -> u64 {
        self.files.iter().map(|file| file.pages).fold(0, u64::saturating_add)
    }

    /// Returns how many bytes of the files' last pages lie beyond the files' ends, summed over all files.
    pub fn tails(&self) -> u64 {
        let tail = |file: &PagedFile| file.pages.saturating_mul(self.page_bytes).saturating_sub(file.bytes);
        self.files.iter().map(tail).fold(0, u64::saturating_add)
    }

    /// Returns the mean over all rows and samples, from 0 to 1, of the percentages that `of` selects.
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
    /// Makes a sample of `pages` pages at `ts` microseconds. `tier` returns the tier of a page by its number. In each
    /// row up to `looks` pages are looked at, evenly spread; all of them if the row has no more.
    pub fn of(ts: f64, pages: usize, tier: impl Fn(usize) -> Tier, looks: usize) -> Self {
        let rows = pages.min(Residency::ROWS_MAX);
        let looks = looks.max(1);
        // In 128 bits: the product of two `usize` may not fit one.
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
        // 30 % of 256 rows is 76.8 rows, 7680 in percent. Rounding costs at most a part of a row.
        assert!(sum(&exact.device).abs_diff(7680) < 100 && sum(&exact.host).abs_diff(7680) < 100, "{exact:?}");
        assert_eq!((exact.device[0], exact.host[100], exact.device[255], exact.host[255]), (100, 100, 0, 0));
        // A few pages of each row are enough where all pages of a row are in the same tier.
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
