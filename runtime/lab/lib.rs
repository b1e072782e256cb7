//! The laboratory of `outcore`: what policies do on traces, what machines would do that are not there, and what a job
//! needs. The engine imports nothing of it.
//!
//! - [`sim`]: policies on recorded and made-up traces, beside the best possible one; passes over a model on a machine that
//!   is only described.
//! - [`planning`]: what a job needs of memory, what of it moves, and how fast that can be. Arithmetic.
//! - [`residency`]: where pages were over time, for reports.
//! - [`output`]: files that programs leave behind, whole or not at all.

pub mod output;
pub mod planning;
pub mod residency;
pub mod sim;

use outcore::{device, format, machine, shared, store};
use outcore_pager::{self as pager, error, ids, random};
