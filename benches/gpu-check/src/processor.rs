//! What threads of this process cost the processor.

use std::collections::BTreeMap;
use std::fs;

/// Seconds on a processor, by the name of the thread without its number; the kernel's count.
#[derive(Clone, Debug, Default)]
pub(crate) struct Processor(BTreeMap<String, f64>);

impl Processor {
    /// Of every thread since it began. Empty where the kernel does not say (`/proc/self/task/*/schedstat`).
    pub(crate) fn now() -> Self {
        // The kernel adds a running thread's time to its count only when it switches threads.
        std::thread::yield_now();
        let mut times = BTreeMap::new();
        for task in fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
            let read = |file: &str| fs::read_to_string(task.path().join(file)).ok();
            let (Some(name), Some(stat)) = (read("comm"), read("schedstat")) else { continue };
            let name = name.trim().trim_end_matches(|c: char| c.is_ascii_digit() || c == '-').to_owned();
            let nanos = stat.split_whitespace().next().and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
            *times.entry(name).or_insert(0.0) += nanos as f64 / 1e9;
        }
        Self(times)
    }

    /// What was spent since then. A thread that ended in between is left out.
    pub(crate) fn since(&self, then: &Self) -> Self {
        let before = |name: &str| then.0.get(name).copied().unwrap_or(0.0);
        Self(self.0.iter().map(|(name, spent)| (name.clone(), (spent - before(name)).max(0.0))).collect())
    }

    /// Of all threads together.
    pub(crate) fn all(&self) -> f64 {
        self.0.values().sum()
    }

    /// By name.
    pub(crate) fn threads(&self) -> impl Iterator<Item = (&str, f64)> {
        self.0.iter().map(|(name, spent)| (name.as_str(), *spent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_works_is_counted_by_its_name_without_the_number() {
        let then = Processor::now();
        let (begin, begun) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let worker = std::thread::Builder::new().name("worker-1".into()).spawn(move || {
            let mut x = 1_u64;
            for n in 0..50_000_000_u64 {
                x = std::hint::black_box(x).wrapping_mul(n | 1);
            }
            // The kernel counts what a thread used when the thread sleeps.
            let _ = begin.send(x);
            let _ = ended.recv();
        });
        assert!(worker.is_ok() && begun.recv().is_ok());
        let spent = Processor::now().since(&then);
        let of = |name: &str| spent.threads().find(|(thread, _)| *thread == name).map(|(_, spent)| spent);
        assert!(of("worker").is_some_and(|spent| spent > 1e-3), "{spent:?}");
        assert!(spent.all() >= of("worker").unwrap_or(f64::INFINITY), "{spent:?}");
        drop(end);
        assert!(worker.is_ok_and(|worker| worker.join().is_ok()));
    }
}
