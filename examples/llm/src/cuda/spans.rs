//! Times on the GPU's stream, between events.
//!
//! An event gets its time when the stream has passed it, so nobody waits for one: spans are read when the stream was
//! waited for anyway. The events are not `CU_EVENT_BLOCKING_SYNC`, so they wake no thread of the driver.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result};

use super::failed::failed;
use super::gpu::Gpu;
use crate::error::Result;

/// CUDA 12.8: since then a driver has the function for the time between events that cudarc calls. cudarc panics where
/// it is missing.
const TIMED_DRIVER: (u32, u32) = (12, 8);

/// Spans of one kind, of which one is open at a time. The events are used again.
#[derive(Default)]
pub(super) struct Spans {
    pairs: Vec<[CudaEvent; 2]>,
    /// How many of the pairs have spans that were not taken yet.
    ended: usize,
    open: bool,
}

/// Whether spans can be read on this GPU's driver.
pub(super) fn can_be_timed(gpu: &Gpu) -> bool {
    gpu.info().driver >= TIMED_DRIVER
}

fn pair(context: &Arc<CudaContext>) -> std::result::Result<[CudaEvent; 2], DriverError> {
    let event = || context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
    Ok([event()?, event()?])
}

impl Spans {
    /// Begins a span behind what is on the stream, unless one is open.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn begin(&mut self, gpu: &Gpu) -> Result<()> {
        if self.open {
            return Ok(());
        }
        if self.pairs.len() == self.ended {
            self.pairs.push(pair(&gpu.context).map_err(|e| failed("create events for the time of a pass", e))?);
        }
        self.record(0, &gpu.stream)?;
        self.open = true;
        Ok(())
    }

    /// Ends the open span behind what is on the stream, if there is one.
    ///
    /// # Errors
    /// What the driver refuses; then the span is as if it had never begun.
    pub fn end(&mut self, gpu: &Gpu) -> Result<()> {
        if std::mem::take(&mut self.open) {
            self.record(1, &gpu.stream)?;
            self.ended += 1;
        }
        Ok(())
    }

    /// Forgets the spans that have not been taken, and the open one. Their events may be recorded again before the
    /// stream has passed them: the last record counts.
    pub fn abandon(&mut self) {
        (self.ended, self.open) = (0, false);
    }

    fn record(&self, which: usize, stream: &CudaStream) -> Result<()> {
        let Some(pair) = self.pairs.get(self.ended) else { return Ok(()) };
        Ok(pair[which].record(stream).map_err(|e| failed("record the time of a pass", e))?)
    }

    /// The sum of the spans that have ended, which are forgotten. The stream has been waited for since.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn take(&mut self) -> Result<Duration> {
        let ended = std::mem::take(&mut self.ended);
        self.pairs[..ended].iter().try_fold(Duration::ZERO, |sum, [start, end]| {
            // SAFETY: both were created with times and recorded on one stream, and live as long as this has them.
            let time = unsafe { result::event::elapsed(start.cu_event(), end.cu_event()) };
            let milliseconds = time.map_err(|e| failed("read the time of a pass", e))?;
            Ok(sum + Duration::try_from_secs_f32(milliseconds / 1e3).unwrap_or_default())
        })
    }
}
