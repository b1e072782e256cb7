//! The kernels as code that the driver can load: a file that was compiled before, or the source through NVRTC, with a
//! cache of what NVRTC made, or the PTX that is part of the program.

use std::io::Write;
use std::path::{Path, PathBuf};

use cudarc::nvrtc::{self, CompileError, CompileOptions};
use outcore::{Error, ErrorKind};
use outcore_cuda::CudaDeviceInfo;
use twox_hash::XxHash3_64;

use crate::error::Result;

/// The kernels' source: the files that `kernels.cu` includes, in that order.
const SOURCE: &str = concat!(
    include_str!("kernels/numbers.cu"),
    include_str!("kernels/weights.cu"),
    include_str!("kernels/products.cu"),
    include_str!("kernels/layers.cu"),
    include_str!("kernels/attention.cu"),
    include_str!("kernels/choosing.cu"),
    include_str!("kernels/prefill.cu"),
);

/// Compiled kernels.
pub(super) struct Code {
    /// PTX, a cubin or a fatbin.
    pub image: Vec<u8>,
    /// Where they come from, for errors.
    pub origin: String,
}

/// The kernels as PTX for the oldest GPUs that are supported, where there is no NVRTC. `scripts/kernels_ptx.py` makes
/// the file, and lint compares it with the sources.
const PTX: &str = include_str!("kernels.ptx");

/// The kernels for a GPU: from `file`, or by NVRTC, or, where it is absent or does not know the GPU, from the program.
pub(super) fn kernels(gpu: &CudaDeviceInfo, file: Option<&Path>) -> Result<Code> {
    if let Some(file) = file {
        let image = std::fs::read(file).map_err(|cause| {
            Error::io(format!("read the kernels in {}", file.display()), cause)
                .remedy("scripts/check_kernels.sh makes such a file, target/kernels/kernels.fatbin")
        })?;
        return Ok(Code { image, origin: file.display().to_string() });
    }
    // SAFETY: opens libnvrtc and closes it again; its initialisers are trusted as the driver's are.
    if unsafe { nvrtc::sys::is_culib_present() } {
        match of_nvrtc(gpu) {
            Ok(code) => return Ok(code),
            Err(error) => tracing::warn!(%error, "the kernels are taken from this program's own PTX"),
        }
    }
    Ok(Code { image: PTX.into(), origin: "this program's own PTX".into() })
}

/// The kernels by NVRTC, which is there, or what it made before.
fn of_nvrtc(gpu: &CudaDeviceInfo) -> Result<Code> {
    let architecture = format!("compute_{}{}", gpu.capability.0, gpu.capability.1);
    let (major, minor) = version()?;
    let origin = format!("NVRTC {major}.{minor} for {architecture}");
    let key = format!("{SOURCE}\0{origin}");
    let name = format!("kernels-{architecture}-{:016x}.ptx", XxHash3_64::oneshot(key.as_bytes()));
    let cache = Cache::of_user().map(|folder| Cache(folder.0.join(name)));
    if let Some(image) = cache.as_ref().and_then(Cache::get) {
        return Ok(Code { image, origin });
    }
    let image = compile(&architecture)?;
    if let Some(cache) = &cache
        && let Err(error) = cache.put(&image)
    {
        tracing::warn!(%error, path = %cache.0.display(), "compiled kernels are not kept: every start compiles them again");
    }
    Ok(Code { image, origin })
}

fn version() -> Result<(i32, i32)> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both pointers are to integers of the right size; the library is there, as the caller has seen.
    let outcome = unsafe { nvrtc::sys::nvrtcVersion(&mut major, &mut minor) };
    if outcome != nvrtc::sys::nvrtcResult::NVRTC_SUCCESS {
        let message = format!("ask NVRTC for its version: {outcome:?}");
        return Err(Error::new(ErrorKind::Device, message)
            .remedy("name kernels compiled before by --kernels FILE")
            .into());
    }
    Ok((major, minor))
}

fn compile(architecture: &str) -> Result<Vec<u8>> {
    let options = CompileOptions {
        options: vec![format!("--gpu-architecture={architecture}")],
        name: Some("kernels.cu".into()),
        ..CompileOptions::default()
    };
    let compiled = nvrtc::compile_ptx_with_opts(SOURCE, options).map_err(|error| {
        let why = match &error {
            CompileError::CompileError { nvrtc, log, .. } => format!("{:?}: {}", nvrtc.0, log.to_string_lossy()),
            other => format!("{other:?}"),
        };
        Error::new(ErrorKind::Unsupported, format!("NVRTC cannot compile the kernels for {architecture}: {why}"))
            .remedy("use an NVRTC that knows this GPU, or name kernels compiled before by --kernels FILE")
    })?;
    Ok(compiled.to_src().into_bytes())
}

/// A file with what was compiled, after a line with its hash. That line is a comment in PTX. A file that was cut off or
/// changed has another hash, and is not used.
struct Cache(PathBuf);

impl Cache {
    /// The folder, where the user has one.
    fn of_user() -> Option<Self> {
        let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let folder = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")))?;
        Some(Self(folder.join("outcore")))
    }

    fn line(image: &[u8]) -> String {
        format!("// xxh3 {:016x}\n", XxHash3_64::oneshot(image))
    }

    fn get(&self) -> Option<Vec<u8>> {
        let bytes = std::fs::read(&self.0).ok()?;
        let begin = bytes.iter().position(|byte| *byte == b'\n')? + 1;
        let (line, image) = bytes.split_at(begin);
        let whole = line == Self::line(image).as_bytes();
        if !whole {
            tracing::warn!(path = %self.0.display(), "compiled kernels in the cache are damaged: they are compiled again");
        }
        whole.then(|| image.to_vec())
    }

    /// Replaces the file at once: others see the old file or the whole new one.
    fn put(&self, image: &[u8]) -> std::io::Result<()> {
        let folder = self.0.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder)?;
        let unfinished = self.0.with_extension(format!("{}.tmp", std::process::id()));
        let written = std::fs::File::create(&unfinished)
            .and_then(|mut file| {
                file.write_all(Self::line(image).as_bytes())?;
                file.write_all(image)?;
                file.sync_all()
            })
            .and_then(|()| std::fs::rename(&unfinished, &self.0));
        if written.is_err() {
            // What is left of it helps nobody; the first error is the one to report.
            let _ = std::fs::remove_file(&unfinished);
        }
        written
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn a_cache_gives_back_what_it_got_and_nothing_that_is_damaged() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache(folder.path().join("a/b/k.ptx"));
        assert_eq!(cache.get(), None);
        let image = b".version 9.0\n.target sm_90\n".to_vec();
        cache.put(&image).unwrap();
        assert_eq!(cache.get(), Some(image.clone()));
        let good = std::fs::read(&cache.0).unwrap();
        for cut in [0, 1, 10, good.len() - 1] {
            std::fs::write(&cache.0, &good[..cut]).unwrap();
            assert_eq!(cache.get(), None, "cut to {cut}");
        }
        let mut changed = good.clone();
        *changed.last_mut().unwrap() ^= 1;
        std::fs::write(&cache.0, &changed).unwrap();
        assert_eq!(cache.get(), None);
        cache.put(&image).unwrap();
        assert_eq!(cache.get(), Some(image));
        assert_eq!(std::fs::read_dir(cache.0.parent().unwrap()).unwrap().count(), 1, "unfinished files are left");
    }
}
