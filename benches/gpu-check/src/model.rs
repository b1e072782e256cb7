//! A synthetic dense model: one safetensors file of equal bf16 matrices, whose bytes are all different and all on disk.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use outcore::{Bytes, DType, Model, Runtime, Tensor, format};

use crate::report::{Report, Unit};
use crate::{Failure, Settings};

type Result<T = ()> = std::result::Result<T, Failure>;

/// The shape of every tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) rows: u32,
    pub(crate) cols: u32,
}

impl Shape {
    pub(crate) fn bytes(self) -> u64 {
        u64::from(self.rows) * u64::from(self.cols) * 2
    }
}

/// A model on disk.
#[derive(Clone, Debug)]
pub(crate) struct ModelFile {
    pub(crate) path: PathBuf,
    pub(crate) shape: Shape,
    pub(crate) tensors: u64,
}

const MODEL: &str = "outcore-gpu-check.safetensors";
const FEW_TENSORS: &str = "outcore-gpu-check-few.safetensors";
/// The data begins at a multiple of this, so every tensor begins at a page.
const ALIGNMENT: u64 = 2 << 20;
/// What is left free on the disk.
const MARGIN: u64 = 4 << 30;
const WRITE: u64 = 16 << 20;
const DIRECT_ALIGNMENT: usize = 4096;

/// Bits of four bf16 values: those that stay as the generator made them, and those that are set. The values are from
/// 0.5 to 2, of either sign, so that no product overflows.
const FREE_BITS: u64 = 0x80FF_80FF_80FF_80FF;
const SET_BITS: u64 = 0x3F00_3F00_3F00_3F00;

/// The `index`th word of tensor `tensor` (SplitMix64, by counter).
fn word(tensor: u64, index: u64) -> u64 {
    let mut z = ((tensor << 40) ^ index).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    ((z ^ (z >> 31)) & FREE_BITS) | SET_BITS
}

/// The bytes of a tensor from its word `first` on.
pub(crate) fn noise(tensor: u64, first: u64, bytes: &mut [u8]) {
    for (at, chunk) in bytes.chunks_exact_mut(8).enumerate() {
        chunk.copy_from_slice(&word(tensor, first + at as u64).to_le_bytes());
    }
}

/// What the words of each tensor add up to, modulo 2^64.
pub(crate) fn expected_sums(file: &ModelFile) -> Vec<u64> {
    let words = file.shape.bytes() / 8;
    let sum = |tensor: u64| (0..words).fold(0_u64, |sum, at| sum.wrapping_add(word(tensor, at)));
    let threads = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let sums: Vec<Vec<(u64, u64)>> = std::thread::scope(|scope| {
        let part = |first: u64| {
            let mine = move || (first..file.tensors).step_by(threads as usize).map(|n| (n, sum(n))).collect::<Vec<_>>();
            scope.spawn(mine)
        };
        let workers: Vec<_> = (0..threads).map(part).collect();
        workers.into_iter().map(|worker| worker.join().unwrap_or_default()).collect()
    });
    let mut all: Vec<(u64, u64)> = sums.into_iter().flatten().collect();
    all.sort_unstable();
    all.into_iter().map(|(_, sum)| sum).collect()
}

impl ModelFile {
    pub(crate) fn bytes(&self) -> u64 {
        self.tensors * self.shape.bytes()
    }

    /// The model in the settings' folder; made if it is not there.
    ///
    /// # Errors
    /// [`Failure::Impossible`] if the disk has no room for two tensors.
    pub(crate) fn ensure(settings: &Settings, report: &mut Report<'_>) -> Result<Self> {
        Self::ensure_of(settings, report, settings.pick(12 << 30, 4 << 30, 64 << 20))
    }

    /// The same, of another size if it has to be made.
    ///
    /// # Errors
    /// As for [`ensure`](Self::ensure).
    pub(crate) fn ensure_of(settings: &Settings, report: &mut Report<'_>, wanted: u64) -> Result<Self> {
        Self::ensure_at(settings.dir.join(MODEL), settings, report, wanted)
    }

    /// The same model if it is there, else one of `tensors` tensors, which is written sooner.
    ///
    /// # Errors
    /// As for [`ensure`](Self::ensure).
    pub(crate) fn ensure_few(settings: &Settings, report: &mut Report<'_>, tensors: u64) -> Result<Self> {
        let whole = settings.dir.join(MODEL);
        let path = if whole.exists() { whole } else { settings.dir.join(FEW_TENSORS) };
        Self::ensure_at(path, settings, report, tensors * Self::shape(settings).bytes())
    }

    fn shape(settings: &Settings) -> Shape {
        let full = Shape { rows: 4096, cols: 8192 };
        settings.pick(full, full, Shape { rows: 1024, cols: 2048 })
    }

    fn ensure_at(path: PathBuf, settings: &Settings, report: &mut Report<'_>, wanted: u64) -> Result<Self> {
        let shape = Self::shape(settings);
        if !path.exists() {
            let (free, margin) = (free_disk(&settings.dir)?, settings.pick(MARGIN, MARGIN, 0));
            let tensors = wanted.min(free.saturating_sub(margin)) / shape.bytes();
            if tensors < 2 {
                let folder = settings.dir.display();
                return Err(Failure::Impossible(format!(
                    "{folder} has {} free, no room for a model",
                    Bytes::new(free)
                )));
            }
            let start = Instant::now();
            // The file gets its name only when it is complete.
            let file = Self { path: path.with_extension("partial"), shape, tensors };
            let named = |cause| Failure::io(format!("name {}", path.display()), cause);
            let written = file.write().and_then(|()| std::fs::rename(&file.path, &path).map_err(named));
            if let Err(failure) = written {
                drop(std::fs::remove_file(&file.path));
                return Err(failure);
            }
            let rate = file.bytes() as f64 / start.elapsed().as_secs_f64() / 1e9;
            report.number("model written to disk", Unit::GigabytesPerSecond, &[rate], None);
        }
        let header = format::open(&path)?;
        let file = Self { path, shape, tensors: header.tensors.len() as u64 };
        report.chosen(
            "model file",
            format!("{} in {} tensors of {}", Bytes::new(file.bytes()), file.tensors, Bytes::new(shape.bytes())),
        );
        Ok(file)
    }

    /// A model of its own for a part, which removes it.
    pub(crate) fn small(path: PathBuf, shape: Shape, tensors: u64) -> Result<Self> {
        let file = Self { path, shape, tensors };
        file.write().inspect_err(|_| drop(std::fs::remove_file(&file.path)))?;
        Ok(file)
    }

    fn header(&self) -> String {
        let Shape { rows, cols } = self.shape;
        let len = self.shape.bytes();
        let entry = |n: u64| {
            let (from, to) = (n * len, (n + 1) * len);
            format!("\"t{n}\":{{\"dtype\":\"BF16\",\"shape\":[{rows},{cols}],\"data_offsets\":[{from},{to}]}}")
        };
        let mut header = format!("{{{}}}", (0..self.tensors).map(entry).collect::<Vec<_>>().join(","));
        let padded = (header.len() as u64 + 8).next_multiple_of(ALIGNMENT) as usize - 8;
        header.extend(std::iter::repeat_n(' ', padded - header.len()));
        header
    }

    /// Writes past the page cache where the file system allows it: the cache would take memory that the tiers will
    /// lock.
    fn write(&self) -> Result {
        let failed = |cause| Failure::io(format!("write {}", self.path.display()), cause);
        let header = self.header();
        let plain = File::create(&self.path).map_err(failed)?;
        plain.write_all_at(&(header.len() as u64).to_le_bytes(), 0).map_err(failed)?;
        plain.write_all_at(header.as_bytes(), 8).map_err(failed)?;
        plain.set_len(header.len() as u64 + 8 + self.bytes()).map_err(failed)?;
        plain.sync_all().map_err(failed)?;
        let direct = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(&self.path);
        let (file, data) = (direct.unwrap_or(plain), header.len() as u64 + 8);
        let (piece, len) = (WRITE.min(self.shape.bytes()), self.shape.bytes());
        let (next, pieces) = (AtomicU64::new(0), self.bytes() / piece);
        let write = || -> std::io::Result<()> {
            let mut memory = vec![0_u8; piece as usize + DIRECT_ALIGNMENT];
            let skip = memory.as_ptr().align_offset(DIRECT_ALIGNMENT);
            let buffer = &mut memory[skip..skip + piece as usize];
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed) * piece;
                if at >= pieces * piece {
                    return Ok(());
                }
                noise(at / len, at % len / 8, buffer);
                file.write_all_at(buffer, data + at)?;
            }
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(write)).collect();
            let panicked = |_| Err(std::io::Error::other("a thread panicked"));
            workers.into_iter().try_for_each(|worker| worker.join().unwrap_or_else(panicked))
        })
        .and_then(|()| file.sync_all())
        .map_err(failed)
    }
}

/// Bytes that may still be written below a folder.
fn free_disk(folder: &Path) -> Result<u64> {
    let stat = rustix::fs::statvfs(folder)
        .map_err(|errno| Failure::io(format!("ask for the free room of {}", folder.display()), errno.into()))?;
    Ok(stat.f_bavail * stat.f_frsize)
}

/// Models opened in one runtime, and their tensors in the order of use.
pub(crate) struct Opened {
    pub(crate) tensors: Vec<Tensor>,
    /// Handles that keep the models open.
    _models: Vec<Model>,
}

impl Opened {
    /// Opens the file as often as it takes for `count` tensors. Each opening counts as a model with pages of its own.
    /// So the models may together be larger than the disk, and all their bytes are still read from it.
    pub(crate) fn new(runtime: &Runtime, file: &ModelFile, count: u64) -> Result<Self> {
        let mut opened = Self { tensors: Vec::new(), _models: Vec::new() };
        while (opened.tensors.len() as u64) < count {
            let model = runtime.open_model(&file.path)?;
            for n in 0..file.tensors.min(count - opened.tensors.len() as u64) {
                let tensor = model.tensor(&format!("t{n}"))?;
                debug_assert_eq!(tensor.dtype(), DType::BF16);
                opened.tensors.push(tensor);
            }
            opened._models.push(model);
        }
        Ok(opened)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_are_finite_values_that_differ() {
        let mut bytes = [0; 4096];
        noise(3, 7, &mut bytes);
        let mut other = [0; 4096];
        noise(4, 7, &mut other);
        assert_ne!(bytes, other);
        assert_eq!(bytes[8..16], word(3, 8).to_le_bytes());
        for pair in bytes.chunks_exact(2) {
            let value = f32::from_bits(u32::from(u16::from_le_bytes([pair[0], pair[1]])) << 16).abs();
            assert!((0.5..2.0).contains(&value), "{value}");
        }
    }
}
