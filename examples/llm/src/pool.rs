//! A small persistent thread pool for operations that take a tenth of a millisecond.
//!
//! One caller hands out one operation at a time, split into chunks that threads claim with an atomic counter. Workers
//! spin briefly before they sleep, because a token consists of some hundred operations with microseconds between them
//! and waking a sleeping thread costs as much as a small matrix.
//!
//! A worker may be late, because the system runs something else on its core. The caller does not wait for it: it
//! computes all chunks itself and closes the job, and the worker finds it closed.
//!
//! Invariants: (1) a worker joins a job under the lock, while it is open, and leaves it after its last use of the
//! closure; (2) the caller returns only after it has closed the job and every joined worker has left; (3) each chunk
//! index is claimed once.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Spins before a worker sleeps: some 30 microseconds.
const SPINS: u32 = 4_000;

/// One published operation. The pointer is valid until every joined worker has left (invariant 2).
#[derive(Clone, Copy)]
struct Job {
    work: *const (dyn Fn(usize) + Sync),
    chunks: usize,
}

// SAFETY: the closure behind the pointer is Sync, and `Pool::run` keeps it alive while any worker can see the job.
unsafe impl Send for Job {}

struct Shared {
    /// Number of the newest job; read without the lock while spinning.
    generation: AtomicUsize,
    next_chunk: AtomicUsize,
    /// Workers that have joined the open job and not left it. Raised under the lock only.
    joined: AtomicUsize,
    failed: AtomicBool,
    stop: AtomicBool,
    job: Mutex<Option<Job>>,
    wake: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Option<Job>> {
        self.job.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work_on(&self, job: Job) {
        // SAFETY: the caller of `run` waits until this thread has left the job, which it does after this call
        // (invariant 2).
        let work = unsafe { &*job.work };
        loop {
            let chunk = self.next_chunk.fetch_add(1, Ordering::Relaxed);
            if chunk >= job.chunks {
                return;
            }
            if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(chunk))).is_err() {
                self.failed.store(true, Ordering::Relaxed);
            }
        }
    }

    fn worker(&self) {
        let mut seen = 0;
        loop {
            let mut spins = 0;
            while self.generation.load(Ordering::Acquire) == seen && spins < SPINS {
                std::hint::spin_loop();
                spins += 1;
            }
            let mut slot = self.lock();
            while self.generation.load(Ordering::Relaxed) == seen && !self.stop.load(Ordering::Relaxed) {
                slot = self.wake.wait(slot).unwrap_or_else(PoisonError::into_inner);
            }
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            seen = self.generation.load(Ordering::Relaxed);
            let Some(job) = *slot else { continue };
            self.joined.fetch_add(1, Ordering::Relaxed);
            drop(slot);
            self.work_on(job);
            self.joined.fetch_sub(1, Ordering::Release);
        }
    }
}

/// Threads that share the rows of one matrix, or the heads of one attention, among them.
///
/// Which thread computes a chunk never influences its bits: a chunk is computed by one thread from start to end.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    one_caller: Mutex<()>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("threads", &self.threads()).finish()
    }
}

impl Pool {
    /// Most threads of a pool. The standard library ends a process that meets the system's limit of threads or mappings
    /// while a thread starts. So that limit must not be what stops a pool.
    pub const THREADS_MAX: usize = 1024;

    /// A pool in which `threads` threads work, the caller being one of them; 0 means one a core.
    ///
    /// # Errors
    /// `InvalidInput` beyond [`Pool::THREADS_MAX`]; the system's error if it starts no more threads. No thread is left
    /// in that case.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let threads = Self::threads_for(threads);
        Self::with(threads, |name, shared| std::thread::Builder::new().name(name).spawn(move || shared.worker()))
    }

    /// How many threads work in a pool of which `threads` were asked for: as many, or for 0 one a core.
    pub fn threads_for(threads: usize) -> usize {
        match threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            n => n,
        }
    }

    fn with(
        threads: usize,
        mut spawn: impl FnMut(String, Arc<Shared>) -> std::io::Result<JoinHandle<()>>,
    ) -> std::io::Result<Self> {
        if threads > Self::THREADS_MAX {
            let why = format!("{threads} threads are more than the {} a pool may have", Self::THREADS_MAX);
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, why));
        }
        let shared = Arc::new(Shared {
            generation: AtomicUsize::new(0),
            next_chunk: AtomicUsize::new(0),
            joined: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            job: Mutex::new(None),
            wake: Condvar::new(),
        });
        let mut pool = Self { shared, workers: Vec::new(), one_caller: Mutex::new(()) };
        for index in 1..threads {
            // If one cannot be started, dropping the pool ends those that were.
            let worker = spawn(format!("llm-{index}"), Arc::clone(&pool.shared)).map_err(|cause| {
                let what = format!("thread {} of {threads} does not start: {cause} (ask for fewer)", index + 1);
                std::io::Error::new(cause.kind(), what)
            });
            pool.workers.push(worker?);
        }
        Ok(pool)
    }

    /// How many threads work, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `work(0) .. work(chunks - 1)`, each once, on the pool's threads; returns when all have ended.
    ///
    /// # Panics
    /// When `work` panicked.
    pub fn run(&self, chunks: usize, work: &(dyn Fn(usize) + Sync)) {
        if chunks <= 1 || self.workers.is_empty() {
            (0..chunks).for_each(work);
            return;
        }
        let _turn = self.one_caller.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = &*self.shared;
        // SAFETY: only the lifetime is erased; this function returns after every joined worker has left (invariant 2).
        let work: &'static (dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(work) };
        let job = Job { work, chunks };
        {
            let mut slot = shared.lock();
            *slot = Some(job);
            shared.next_chunk.store(0, Ordering::Relaxed);
            shared.generation.fetch_add(1, Ordering::Release);
        }
        shared.wake.notify_all();
        shared.work_on(job);
        *shared.lock() = None;
        let mut spins = 0u32;
        while shared.joined.load(Ordering::Acquire) > 0 {
            spins = spins.wrapping_add(1);
            if spins.is_multiple_of(256) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
        assert!(!shared.failed.swap(false, Ordering::Relaxed), "a pool thread panicked");
    }

    /// Calls `work(i, chunk)` for the consecutive chunks of `chunk_len` elements of `out` (the last may be shorter).
    pub fn run_chunks<T: Send>(&self, out: &mut [T], chunk_len: usize, work: impl Fn(usize, &mut [T]) + Sync) {
        let len = out.len();
        self.run_columns((out, len), 0..len, chunk_len, |i, mut chunk| work(i, chunk.row(0)));
    }
}

/// Some columns of a matrix in row-major order: of each row, the same elements.
#[derive(Debug)]
pub(crate) struct Columns<'a, T> {
    base: *mut T,
    rows: usize,
    /// Elements from the start of a row to that of the next.
    stride: usize,
    columns: Range<usize>,
    matrix: PhantomData<&'a mut [T]>,
}

impl<'a, T> Columns<'a, T> {
    /// All columns of a matrix whose rows have `width` elements.
    pub fn all(matrix: &'a mut [T], width: usize) -> Self {
        let (base, rows) = (matrix.as_mut_ptr(), matrix.len() / width.max(1));
        Self { base, rows, stride: width, columns: 0..width, matrix: PhantomData }
    }

    /// These columns' elements of row `nth`.
    ///
    /// # Panics
    /// When the matrix has fewer rows.
    pub fn row(&mut self, nth: usize) -> &mut [T] {
        assert!(nth < self.rows, "row {nth} of {}", self.rows);
        // SAFETY: the row and the columns are within the matrix, which stays mutably borrowed for `'a`. Others have
        // other columns of it only (`Pool::run_columns`).
        unsafe {
            std::slice::from_raw_parts_mut(self.base.add(nth * self.stride + self.columns.start), self.columns.len())
        }
    }
}

impl Pool {
    /// Calls `work(i, some)` for consecutive groups of `count` of these columns (the last may be smaller) of `matrix`,
    /// whose rows have `width` elements.
    ///
    /// # Panics
    /// When rows have fewer columns.
    pub(crate) fn run_columns<T: Send>(
        &self,
        (matrix, width): (&mut [T], usize),
        columns: Range<usize>,
        count: usize,
        work: impl Fn(usize, Columns<'_, T>) + Sync,
    ) {
        struct Base<T>(*mut T);
        // SAFETY: the pointer is used for disjoint columns only, each by the one thread that claimed its index.
        unsafe impl<T: Send> Sync for Base<T> {}
        assert!(columns.end <= width, "columns {columns:?} of {width}");
        let (count, rows, base) = (count.max(1), matrix.len() / width.max(1), Base(matrix.as_mut_ptr()));
        let base = &base;
        self.run(columns.len().div_ceil(count), &|i| {
            let start = columns.start + i * count;
            let columns = start..columns.end.min(start + count);
            work(i, Columns { base: base.0, rows, stride: width, columns, matrix: PhantomData });
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        {
            let _slot = self.shared.lock();
            self.shared.stop.store(true, Ordering::Relaxed);
        }
        self.shared.generation.fetch_add(1, Ordering::Release);
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches panics of its work, so there is nothing to learn from its result.
            drop(worker.join());
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn regression_more_threads_than_any_machine_has_are_refused() {
        let error = Pool::new(20_000).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
        assert!(error.to_string().contains("1024"), "{error}");
    }

    #[test]
    fn threads_write_columns_of_their_own() {
        let pool = Pool::new(3).unwrap();
        for (rows, width, columns, count) in [(5, 7, 0..7, 2), (4, 9, 3..8, 4), (1, 3, 1..2, 8), (3, 4, 2..2, 1)] {
            let mut matrix = vec![0usize; rows * width];
            pool.run_columns((&mut matrix, width), columns.clone(), count, |i, mut some| {
                for row in 0..rows {
                    some.row(row).iter_mut().for_each(|x| *x += 100 * i + row + 1);
                }
            });
            for (at, x) in matrix.into_iter().enumerate() {
                let (row, column) = (at / width, at % width);
                let own = columns.contains(&column).then(|| 100 * ((column - columns.start) / count) + row + 1);
                assert_eq!(x, own.unwrap_or(0), "{columns:?}, {at}");
            }
        }
    }

    #[test]
    fn workers_end_when_one_of_them_cannot_be_started() {
        let (mut started, ended) = (0, Arc::new(AtomicUsize::new(0)));
        let failed = Pool::with(8, |name, shared| {
            if started == 5 {
                return Err(std::io::Error::from(std::io::ErrorKind::WouldBlock));
            }
            started += 1;
            let ended = Arc::clone(&ended);
            std::thread::Builder::new().name(name).spawn(move || {
                shared.worker();
                ended.fetch_add(1, Ordering::SeqCst);
            })
        });
        assert_eq!(failed.unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
        assert_eq!(ended.load(Ordering::SeqCst), 5);
    }
}
