//! The capture of a run: in which order it used its pages.

use std::io::BufWriter;

use outcore::stats::PageUses;
use outcore::{Error, ErrorKind, Model, PageSize, Runtime};
use outcore_lab::output::NewFile;
use outcore_lab::sim::{CaptureHeader, CaptureWriter};
use outcore_llm::Result;
use tempfile::NamedTempFile;

/// A capture under way.
#[derive(Debug)]
pub struct Capture {
    file: NewFile,
    writer: CaptureWriter<BufWriter<NamedTempFile>>,
}

impl Capture {
    /// Begins the capture of what `runtime`, which keeps its uses, does with `model`.
    ///
    /// # Errors
    /// Those of the file.
    pub fn begin(file: NewFile, runtime: &Runtime, model: &Model, page_size: PageSize, about: &str) -> Result<Self> {
        let header = model.header();
        let segment = |file| {
            let tensor = header.tensors.iter().find(|tensor| tensor.file == file)?;
            Some(runtime.observe().snapshot(&model.tensor(&tensor.name).ok()?).id)
        };
        let header = CaptureHeader::of_model(header, page_size, about, segment);
        let writer = CaptureWriter::new(BufWriter::new(file.beside()?), &header)?;
        Ok(Self { file, writer })
    }

    /// Writes what was used since the last call.
    ///
    /// # Errors
    /// `Unsupported` if there was no room to keep all uses; errors of the file.
    pub fn take(&mut self, runtime: &Runtime) -> Result<()> {
        let uses = runtime.observe().take_uses();
        self.writer.take(&uses)?;
        if uses.dropped > 0 {
            let what = format!(
                "the capture lacks {} uses: a pass has more than the {} there is room for",
                uses.dropped,
                PageUses::MAX
            );
            return Err(Error::new(ErrorKind::Unsupported, what).remedy("choose larger pages (--page-size)").into());
        }
        Ok(())
    }

    /// A pass has ended: writes what it used, and a mark.
    ///
    /// # Errors
    /// As for [`take`](Self::take).
    pub fn pass(&mut self, runtime: &Runtime) -> Result<()> {
        self.take(runtime)?;
        Ok(self.writer.pass()?)
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
        Ok(self.file.put(file)?)
    }
}
