//! Weights that are held in memory, all of them.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;

use crate::error::{Error, Result};
use crate::files::ModelFiles;
use crate::weights::{Arrivals, Arrived, Rows, Step, TensorId, WeightInfo, Weights};

/// A whole model in ordinary memory: the baseline that paged weights are compared with.
#[derive(Debug)]
pub struct PlainWeights {
    files: Vec<Vec<u8>>,
    tensors: Vec<WeightInfo>,
    tile_bytes: u64,
}

impl PlainWeights {
    /// Reads every file of `model` into memory.
    pub fn read(model: &ModelFiles) -> Result<Self> {
        let mut files = Vec::with_capacity(model.paths().len());
        for path in model.paths() {
            let mut bytes = Vec::new();
            let what = || format!("cannot read {}", path.display());
            let mut file = File::open(path).map_err(|e| Error::io(what(), e))?;
            let len = file.seek(SeekFrom::End(0)).map_err(|e| Error::io(what(), e))?;
            file.rewind().map_err(|e| Error::io(what(), e))?;
            let len = usize::try_from(len).map_err(|_| Error::Invalid(format!("{} is too large", path.display())))?;
            bytes.try_reserve_exact(len).map_err(|e| Error::format(what(), e))?;
            file.read_to_end(&mut bytes).map_err(|e| Error::io(what(), e))?;
            files.push(bytes);
        }
        Ok(Self { files, tensors: model.tensors().to_vec(), tile_bytes: u64::MAX })
    }

    /// Limits how many bytes are held at once, as a paged model would, to the whole rows that fit (at least one).
    #[must_use]
    pub fn with_tile_bytes(mut self, bytes: u64) -> Self {
        self.tile_bytes = bytes;
        self
    }

    fn info(&self, tensor: TensorId) -> Result<&WeightInfo> {
        self.tensors.get(tensor.0 as usize).ok_or_else(|| Error::Invalid(format!("there is no tensor {}", tensor.0)))
    }
}

impl Weights for PlainWeights {
    fn rows(&self, tensor: TensorId, rows: Range<u64>) -> Result<Rows<'_>> {
        let info = self.info(tensor)?;
        let range = info.byte_range(&rows)?;
        let bytes = self.files.get(info.file as usize).and_then(|f| f.get(range.start as usize..range.end as usize));
        bytes.map(Rows::new).ok_or_else(|| Error::format(&*info.name, "its bytes lie beyond the end of the file"))
    }

    fn tile_rows(&self, tensor: TensorId) -> u64 {
        self.info(tensor).map_or(1, |info| (self.tile_bytes / info.row_bytes.max(1)).clamp(1, info.rows.max(1)))
    }

    fn will_use(&self, _order: &[Step]) {}

    fn draw(&self, experts: &[Vec<Step>], _foreseen: &[Step]) -> Result<Option<Box<dyn Arrivals + '_>>> {
        let row_bytes = |tensor| self.info(tensor).map_or(0, |info| info.row_bytes);
        let bytes = |(tensor, rows): &Step| (rows.end - rows.start).saturating_mul(row_bytes(*tensor));
        if experts.iter().flatten().any(|step| bytes(step) > self.tile_bytes) {
            return Ok(None);
        }
        let experts = experts.iter().map(|steps| Some(steps.clone())).collect();
        Ok(Some(Box::new(Present { weights: self, experts })))
    }
}

/// Experts that are all there; `None` are those that were taken.
struct Present<'a> {
    weights: &'a PlainWeights,
    experts: Vec<Option<Vec<Step>>>,
}

impl Arrivals for Present<'_> {
    fn next(&mut self, among: Range<usize>, fits: &mut dyn FnMut(usize) -> bool) -> Result<Vec<Arrived<'_>>> {
        let mut arrived = Vec::new();
        for (nth, expert) in self.experts.iter_mut().enumerate().take(among.end).skip(among.start) {
            if let Some(steps) = expert.take_if(|_| fits(nth)) {
                let rows = steps.into_iter().map(|(tensor, rows)| self.weights.rows(tensor, rows));
                arrived.push((nth, rows.collect::<Result<_>>()?));
            }
        }
        Ok(arrived)
    }
}
