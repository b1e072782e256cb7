//! A program that knows nothing of outcore, and maps its model as candle's `MmapedSafetensors` does: by memmap2 and
//! safetensors. Under `outcore run` it needs less memory than the model has:
//!
//! ```sh
//! cargo build --release --example memmap2
//! outcore run --budget 16MiB -- target/release/examples/memmap2 [MODEL]
//! ```
//!
//! MODEL is a safetensors file; without one, one of 48 MiB is made and removed again. It reads all tensors twice, and
//! compares them with the file read as a file.

use std::error::Error;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;

fn main() -> Result<(), Box<dyn Error>> {
    if let Some(model) = std::env::args_os().nth(1) {
        return read(&PathBuf::from(model));
    }
    let folder = tempfile::tempdir()?;
    let made = folder.path().join("model.safetensors");
    write_model(&made)?;
    read(&made)
}

fn read(path: &Path) -> Result<(), Box<dyn Error>> {
    let file = File::open(path)?;
    // SAFETY: nobody writes the file while it is mapped.
    let mapped = unsafe { memmap2::MmapOptions::new().map(&file) }?;
    let tensors = SafeTensors::deserialize(&mapped)?;
    let mut expected = Vec::new();
    for pass in 0..2 {
        let (mut count, mut bytes) = (0, 0);
        for (name, tensor) in tensors.iter() {
            let start = tensor.data().as_ptr().addr() - mapped.as_ptr().addr();
            expected.resize(tensor.data().len(), 0);
            file.read_exact_at(&mut expected, start as u64)?;
            assert!(tensor.data() == expected, "{name} has other bytes than the file");
            (count, bytes) = (count + 1, bytes + expected.len());
        }
        println!("pass {pass}: {count} tensors of {bytes} bytes, as they are in the file");
    }
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let of_kernel = path.canonicalize().is_ok_and(|path| maps.contains(&*path.to_string_lossy()));
    println!("the mapping is {}", if of_kernel { "the kernel's" } else { "outcore's" });
    Ok(())
}

/// Twelve layers of 4 MiB each.
fn write_model(path: &Path) -> std::io::Result<()> {
    const LEN: u64 = 4 << 20;
    let tensor = |n: u64| {
        let (start, end) = (n * LEN, (n + 1) * LEN);
        format!(
            r#""model.layers.{n}.mlp.up_proj.weight":{{"dtype":"F32","shape":[1024,1024],"data_offsets":[{start},{end}]}}"#
        )
    };
    let header = format!("{{{}}}", (0..12).map(tensor).collect::<Vec<_>>().join(","));
    let mut file = BufWriter::new(File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    for n in 0..12 * LEN / 4 {
        file.write_all(&(n as f32).to_le_bytes())?;
    }
    file.flush()
}
