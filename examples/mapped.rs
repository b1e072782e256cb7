//! A model file larger than the memory for it, as plain slices: `cargo run --release --example mapped [MODEL]`.
//!
//! MODEL is a GGUF or safetensors file of one part; without one a small safetensors file is made and removed again.

use std::error::Error;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use outcore::{Bytes, PolicyKind, Runtime, format};
use outcore_mapped::{Faulting, Mapped};
use safetensors::SafeTensors;

fn main() -> Result<(), Box<dyn Error>> {
    if let Err(error) = Faulting::new() {
        println!("SKIPPED: files cannot be mapped here: {error}; {}", error.advice().unwrap_or_default());
        return Ok(());
    }
    if let Some(model) = std::env::args_os().nth(1) {
        return tour(&PathBuf::from(model));
    }
    let folder = tempfile::tempdir()?;
    let made = folder.path().join("model.safetensors");
    write_model(&made)?;
    tour(&made)
}

fn tour(path: &Path) -> Result<(), Box<dyn Error>> {
    let header = format::open(path)?;

    // In place of `memmap2::Mmap::map`. It needs no `unsafe`: a file that changes is an error, never other bytes.
    let mapped = Mapped::map(&File::open(path)?)?;
    println!("{} begins with {:?}, {}", path.display(), &mapped[..8], Bytes::new(mapped.len() as u64));
    drop(mapped);

    // On a runtime of one's own, with a budget for pages.
    let budget = Bytes::mib(16);
    let builder = Runtime::builder().device(Faulting::new()?).device_budget(budget).policy(PolicyKind::Model);
    let runtime = builder.open()?;
    let mapped = Mapped::open(&runtime, path)?;

    // A tensor is a part of the slice, by the header.
    let of_file = header.tensors.iter().filter(|tensor| tensor.file == 0);
    let largest = of_file.max_by_key(|tensor| tensor.len).ok_or("the model has no tensors")?;
    let bytes = &mapped[largest.offset as usize..(largest.offset + largest.len) as usize];
    let rows = largest.shape.first().copied().unwrap_or(1).max(1);
    let row = (largest.len / rows).max(1) as usize;
    let sums: Vec<u64> = bytes.chunks(row).map(|row| row.iter().map(|byte| u64::from(*byte)).sum()).collect();
    println!("{}: {} rows of {row} bytes, which add up to {}", largest.name, sums.len(), sums.iter().sum::<u64>());

    // Engines map weights so: the crate safetensors borrows from any slice.
    if path.extension().is_some_and(|extension| extension == "safetensors") {
        let tensors = SafeTensors::deserialize(&mapped)?;
        for (name, tensor) in tensors.iter().take(4) {
            let last = tensor.data().last();
            println!("{name}: {:?} {:?}, its last byte is {last:?}", tensor.dtype(), tensor.shape());
        }
        let same = tensors.tensor(&largest.name)?;
        assert_eq!(same.data().as_ptr(), bytes.as_ptr(), "borrowed, not copied");
    }

    let stats = runtime.stats();
    let (most, read) = (stats.traffic.peak_device, stats.traffic.disk_read);
    println!("{} of file, {read} read, at most {most} in memory", Bytes::new(mapped.len() as u64));
    assert!(most <= budget);
    drop(mapped);
    Ok(runtime.close()?)
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
