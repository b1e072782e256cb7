//! A bar while the first pass streams the model in.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use outcore::{Bytes, Runtime};

/// Drawn until dropped. Hidden where standard error is not a terminal.
#[derive(Debug)]
pub struct Progress {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Progress {
    /// Follows what `runtime` reads, of `total`.
    pub fn start(runtime: &Runtime, total: Bytes) -> Self {
        const REDRAW: Duration = Duration::from_millis(50);
        let bar = ProgressBar::new(total.get());
        if let Ok(style) = ProgressStyle::with_template("first pass {bar:30} {bytes}/{total_bytes} {bytes_per_sec}") {
            bar.set_style(style);
        }
        let (stop, stopped) = channel();
        let runtime = runtime.clone();
        let thread = std::thread::Builder::new()
            .name("progress".into())
            .spawn(move || {
                while stopped.recv_timeout(REDRAW) == Err(RecvTimeoutError::Timeout) {
                    let read = runtime.observe().traffic().disk_read.get();
                    bar.set_length(total.get().max(read));
                    bar.set_position(read);
                }
                bar.finish_and_clear();
            })
            .ok();
        Self { stop: Some(stop), thread }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.stop.take();
        if let Some(thread) = self.thread.take() {
            // A bar that could not be drawn is no reason to stop.
            let _ = thread.join();
        }
    }
}
