//! Counts work, for tests that bound it.

#[cfg(test)]
thread_local! {
    /// Steps of this thread so far.
    pub(crate) static STEPS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Counts steps. Does nothing but in this crate's own tests.
#[inline]
pub(crate) fn step(_count: usize) {
    #[cfg(test)]
    STEPS.with(|steps| steps.set(steps.get() + _count as u64));
}
