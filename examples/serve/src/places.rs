//! Where pages are: of the weights, and of keys and values.

use outcore::{Tensor, Tier};
use outcore_kv::KvPool;

/// What the server has pages of.
#[derive(Debug)]
pub struct Places {
    /// A tensor of each of the model's files.
    weights: Vec<Tensor>,
    pool: KvPool,
}

impl Places {
    /// `weights` is a tensor of each of the model's files.
    pub fn new(weights: Vec<Tensor>, pool: KvPool) -> Self {
        Self { weights, pool }
    }

    /// The pool of keys and values.
    pub fn pool(&self) -> &KvPool {
        &self.pool
    }

    /// The fastest tier that has each page, of weights and of keys and values, in the order of addresses.
    pub fn pages(&self) -> [(&'static str, Vec<Tier>); 2] {
        let weights = self.weights.iter().map(|tensor| self.pool.runtime().observe().snapshot(tensor));
        let weights = weights.flat_map(|segment| segment.pages).map(|page| page.tier()).collect();
        let keys_and_values = self.pool.snapshot().pages.iter().map(|page| page.tier()).collect();
        [("weights", weights), ("keys_and_values", keys_and_values)]
    }
}
