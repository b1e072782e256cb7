//! Where a model's pages were over time: what `outcore report` draws as a map.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use outcore::{Model, PageSize, Runtime, Tensor, Tier};
use outcore_lab::residency::{PagedFile, Residency, Sample};

/// The time between samples, at first. When there are too many samples, every second one goes and the time doubles.
const INTERVAL: Duration = Duration::from_millis(5);
/// A sample holds up the runtime. It may do so for one part in so many of the time.
const COST: u32 = 100;

/// Takes samples on a thread of its own, until it is asked for them.
#[derive(Debug)]
pub struct Watch {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<Residency>>,
}

impl Watch {
    /// Looks at the pages of `model`, of a runtime that was opened at `opened`.
    pub fn start(runtime: &Runtime, model: &Model, page_size: PageSize, opened: Instant) -> Self {
        let header = model.header();
        let (mut files, mut tensors) = (Vec::new(), Vec::new());
        for (at, file) in (0_u32..).zip(&header.files) {
            let tensor =
                header.tensors.iter().find(|tensor| tensor.file == at).map(|tensor| model.tensor(&tensor.name));
            let Some(Ok(tensor)) = tensor else { continue };
            files.push(PagedFile {
                name: crate::source::name(file.path.as_os_str()).into_owned(),
                bytes: file.len,
                pages: runtime.observe().snapshot(&tensor).pages.len() as u64,
            });
            tensors.push(tensor);
        }
        let (stop, told) = channel();
        let mut residency = Residency { page_bytes: page_size.bytes(), files, samples: Vec::new() };
        let runtime = runtime.clone();
        let watched = move || {
            let (mut interval, mut pause, mut stopped) = (INTERVAL, INTERVAL, false);
            while !stopped {
                stopped = told.recv_timeout(pause) != Err(RecvTimeoutError::Timeout);
                let now = Instant::now();
                let sample = look(&runtime, &tensors, (now - opened).as_nanos() as f64 / 1e3);
                let cost = now.elapsed() * COST;
                // The last one stays, and is the end of the run if it was stopped.
                if residency.push(sample) {
                    interval *= 2;
                }
                // One look that took long, as on a busy machine, delays the next one only.
                pause = interval.max(cost);
            }
            residency
        };
        Self { stop: Some(stop), thread: std::thread::Builder::new().name("residency".into()).spawn(watched).ok() }
    }

    /// The samples; none if the thread could not be started.
    pub fn finish(mut self) -> Residency {
        self.end().unwrap_or_default()
    }

    fn end(&mut self) -> Option<Residency> {
        self.stop.take();
        self.thread.take().and_then(|thread| thread.join().ok())
    }
}

impl Drop for Watch {
    /// Ends the thread. It uses the runtime, which is then able to end where its owner drops it.
    fn drop(&mut self) {
        self.end();
    }
}

fn look(runtime: &Runtime, tensors: &[Tensor], ts: f64) -> Sample {
    let tiers: Vec<Tier> =
        tensors.iter().flat_map(|tensor| runtime.observe().snapshot(tensor).pages).map(|page| page.tier()).collect();
    Sample::of(ts, tiers.len(), |page| tiers.get(page).copied().unwrap_or(Tier::Disk), usize::MAX)
}
