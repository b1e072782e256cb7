//! The laboratory of `outcore`: it simulates policies on traces, simulates machines that are only described, and
//! computes what a job needs. The engine imports nothing of this crate.
//!
//! - [`sim`]: runs policies on recorded and made-up traces, and compares them with the best possible one. Simulates
//!   passes over a model on a machine that is only described.
//! - [`planning`]: computes how much memory a job needs, how much of it moves, and how fast that can be.
//! - [`residency`]: records where pages were over time, for reports.
//! - [`output`]: writes output files: complete, or not at all.

pub mod output;
pub mod planning;
pub mod residency;
pub mod sim;

use outcore::{device, format, machine, store};
use outcore_pager::{self as pager, error, ids, random};
