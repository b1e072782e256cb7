//! The capture of a run of this process, in a file.

use std::io::BufWriter;

use outcore::Runtime;
use outcore::stats::PageUses;
use tempfile::NamedTempFile;

use super::capture::{CaptureHeader, CaptureWriter};
use crate::error::{Error, ErrorKind, Result};
use crate::output::NewFile;

/// The capture of a runtime that [keeps its uses](outcore::RuntimeBuilder::keep_uses), under way.
#[derive(Debug)]
pub struct CaptureFile {
    file: NewFile,
    writer: CaptureWriter<BufWriter<NamedTempFile>>,
}

impl CaptureFile {
    /// Begins a capture of what the header has. What the runtime has used so far, and nobody has taken, is in it.
    ///
    /// # Errors
    /// Those of [`CaptureWriter::new`] and of the file.
    pub fn begin(file: NewFile, header: &CaptureHeader) -> Result<Self> {
        let writer = CaptureWriter::new(BufWriter::new(file.beside()?), header)?;
        Ok(Self { file, writer })
    }

    /// Writes what was used since the last call.
    ///
    /// # Errors
    /// [`Unsupported`](ErrorKind::Unsupported) if there was no room to keep all uses; those of the file.
    pub fn take(&mut self, runtime: &Runtime) -> Result<()> {
        let uses = runtime.observe().take_uses();
        self.writer.take(&uses)?;
        if uses.dropped > 0 {
            let what = format!(
                "the capture lacks {} uses: a pass has more than the {} there is room for",
                uses.dropped,
                PageUses::MAX
            );
            return Err(Error::new(ErrorKind::Unsupported, what).remedy("choose larger pages, or shorter passes"));
        }
        Ok(())
    }

    /// A pass has ended: writes what it used, and a mark.
    ///
    /// # Errors
    /// As for [`take`](Self::take).
    pub fn pass(&mut self, runtime: &Runtime) -> Result<()> {
        self.take(runtime)?;
        self.writer.pass()
    }

    /// The run has ended, by itself or by an interrupt.
    ///
    /// # Errors
    /// As for [`take`](Self::take).
    pub fn finish(mut self, runtime: &Runtime, interrupted: bool) -> Result<()> {
        self.take(runtime)?;
        if interrupted {
            self.writer.interrupted()?;
        }
        let out = self.writer.finish()?;
        let file = out.into_inner().map_err(|refused| self.file.failed(refused.into_error()))?;
        self.file.put(file)
    }
}
