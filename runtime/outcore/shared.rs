//! What every handle of a runtime shares.

use std::path::PathBuf;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use crate::engine::Engine;
use crate::ids::{Bytes, FileId, PageSize};
use crate::settings::{Chosen, Settings, Wanted};
use crate::store::{ScratchFile, ScratchOptions};
use crate::verify::Verify;

/// What every handle of a runtime keeps alive. When the last one goes, what is in flight is waited for.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) engine: Arc<Engine>,
    pub(crate) page_size: PageSize,
    pub(crate) verify: Verify,
    pub(crate) scratch_dir: Option<PathBuf>,
    pub(crate) scratch_options: ScratchOptions,
    pub(crate) scratch_budget: Option<Bytes>,
    /// Memory of the staging ring.
    pub(crate) staging: Bytes,
    /// Page tables of this process's that a frame of the device can have for itself.
    pub(crate) frame_tables: Bytes,
    /// The folder of the first model.
    pub(crate) model_dir: OnceLock<PathBuf>,
    pub(crate) scratch: Mutex<Option<(ScratchFile, FileId)>>,
    pub(crate) host_budget: Bytes,
    /// What settings follow from, but for the device budget.
    pub(crate) wanted: Wanted,
    pub(crate) chosen: Chosen<PageSize>,
    /// What they were last, with a device tier of so many frames.
    pub(crate) settings: Mutex<(u32, Settings)>,
    /// Frames of the largest device budget so far.
    pub(crate) most_frames: AtomicU32,
    /// Frames of device budgets that are about to be set: they count as if they were.
    pub(crate) raising: Mutex<Vec<u32>>,
}

/// A device budget that is about to be set.
pub(crate) struct Raising<'a> {
    of: &'a Mutex<Vec<u32>>,
    frames: u32,
}

impl<'a> Raising<'a> {
    pub(crate) fn new(of: &'a Mutex<Vec<u32>>, frames: u32) -> Self {
        of.lock().push(frames);
        Self { of, frames }
    }
}

impl Drop for Raising<'_> {
    fn drop(&mut self) {
        let mut all = self.of.lock();
        if let Some(at) = all.iter().position(|frames| *frames == self.frames) {
            all.swap_remove(at);
        }
    }
}

impl Shared {
    pub(crate) fn page_size(&self) -> PageSize {
        self.page_size
    }

    /// The settings for a device tier of `frames`. Writing the reasons takes longer than
    /// all other counters, so they are kept as long as they hold.
    pub(crate) fn settings(&self, frames: u32) -> Settings {
        let found = || self.wanted.settings(self.chosen.clone(), Some(frames));
        if !self.engine.is_at_home() {
            return found();
        }
        let mut last = self.settings.lock();
        if last.0 != frames {
            // The store keeps the depth that it was opened with.
            let depth = last.1.depth.clone();
            *last = (frames, Settings { depth, ..found() });
        }
        last.1.clone()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.engine.shut_down_at_last();
    }
}
