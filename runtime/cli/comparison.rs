//! Policies compared on a trace: what `outcore policies` prints as JSON, and `outcore report` and the drawing read.

use std::num::NonZeroU32;

use outcore_lab::sim::ClassUses;
use serde::{Deserialize, Serialize};

/// The result of `outcore policies`. `outcore report` reads it.
#[derive(Debug, Serialize, Deserialize)]
pub struct Found {
    pub trace: String,
    /// The text about a capture's run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub about: Option<String>,
    pub uses: u64,
    pub pages: u32,
    /// How many uses write their page.
    #[serde(default)]
    pub writes: u64,
    #[serde(default)]
    pub passes: u64,
    #[serde(default)]
    pub page_bytes: Option<u64>,
    #[serde(default)]
    pub classes: Vec<ClassUses>,
    pub capacities: Vec<Capacity>,
    /// LRU's hit ratios: at every capacity, or at some hundreds that are evenly spaced.
    #[serde(default)]
    pub lru: Vec<Point>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Capacity {
    pub pages: NonZeroU32,
    /// Ratios of Belady's MIN, which knows the trace.
    pub optimum: Ratio,
    pub policies: Vec<Outcome>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Ratio {
    pub hits: u64,
    pub misses: u64,
    pub hit_ratio: f64,
    /// How many evictions were of written pages.
    #[serde(default)]
    pub written_back: u64,
    /// Bytes that misses bring in, if all pages are whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_moved: Option<u64>,
    /// Bytes that are written back, if all pages are whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_written: Option<u64>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Outcome {
    pub policy: String,
    #[serde(flatten)]
    pub ratio: Ratio,
    /// The optimum's hit ratio less this one's.
    pub regret: f64,
    /// Time of a use in nanoseconds, with what it evicts and brings in, and the simulation's own work.
    pub ns_per_use: f64,
}

/// A hit ratio at a capacity.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Point {
    pub pages: u32,
    pub hit_ratio: f64,
}
