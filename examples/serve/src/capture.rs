//! The order in which the server uses pages, in a file for `outcore policies`.

use std::path::{Path, PathBuf};

use outcore::format::ModelHeader;
use outcore::stats::{PageUse, PageUses};
use outcore::{Bytes, Runtime, Tensor};
use outcore_kv::KvPool;
use outcore_lab::output::{Input, NewFile};
use outcore_lab::sim::{CaptureFile, CaptureHeader, CapturedSegment, ClassRun};
use outcore_llm::{ModelFiles, Result};

/// Uses of a pass that are kept until they are written, while their list grows.
pub const MEMORY: Bytes = Bytes::new(2 * (PageUses::MAX * size_of::<PageUse>()) as u64);

/// A capture under way, unless none was asked for, or it could not be continued.
#[derive(Debug, Default)]
pub struct Capture(Option<CaptureFile>);

impl Capture {
    /// Prepares the file, before anything long is done. `others` are files that the server reads, besides the model's.
    ///
    /// # Errors
    /// Those of a file that cannot be written, or that is one of these.
    pub fn file(path: &Path, files: &ModelFiles, others: &[Option<&PathBuf>]) -> Result<NewFile> {
        let of_model = |path| Input { path, is: "it is a file of the model" };
        let of_server = |path: &&PathBuf| Input { path: path.to_path_buf(), is: "the server reads it" };
        let inputs = files.all_paths().into_iter().map(of_model).chain(others.iter().flatten().map(of_server));
        Ok(NewFile::create(path, "capture", "--capture", &inputs.collect::<Vec<_>>())?)
    }

    /// Begins a capture of the uses of weights, and of keys and values. `of_files` is a tensor of each file, with the
    /// file's number.
    ///
    /// # Errors
    /// Those of the file.
    pub fn begin(file: NewFile, weights: &ModelHeader, of_files: &[(u32, Tensor)], pool: &KvPool) -> Result<Self> {
        let runtime = pool.runtime();
        let of_file = |file| of_files.iter().find(|(number, _)| *number == file);
        let id = |file| of_file(file).map(|(_, tensor)| runtime.observe().snapshot(tensor).id);
        let mut header = CaptureHeader::of_model(weights, runtime.stats().page_size, "serve", id);
        let rows = pool.snapshot();
        let pages = rows.pages.len() as u32;
        let name = "keys and values".to_owned();
        let classes = vec![ClassRun { first: 0, pages, class: name.clone() }];
        header.segments.push(CapturedSegment { id: rows.id, name, pages, classes });
        Ok(Self(Some(CaptureFile::begin(file, &header)?)))
    }

    /// A pass has ended.
    pub fn pass(&mut self, runtime: &Runtime) {
        if let Some(Err(error)) = self.0.as_mut().map(|capture| capture.pass(runtime)) {
            tracing::warn!(%error, "the capture was given up");
            self.0 = None;
        }
    }

    /// There are no more passes.
    pub fn finish(&mut self, runtime: &Runtime) {
        if let Some(Err(error)) = self.0.take().map(|capture| capture.finish(runtime, false)) {
            tracing::warn!(%error, "the capture could not be written");
        }
    }
}
