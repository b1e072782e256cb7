//! Tensors larger than memory in a few lines: `cargo run --release --example quickstart [MODEL]`.
//!
//! MODEL is a GGUF or safetensors file; without one a small file is made and removed again.

use std::error::Error;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use outcore::{Bytes, DType, Plan, Runtime, Tensor};

fn main() -> Result<(), Box<dyn Error>> {
    if let Some(model) = std::env::args_os().nth(1) {
        return tour(&PathBuf::from(model));
    }
    let made = std::env::temp_dir().join(format!("outcore-quickstart-{}.safetensors", std::process::id()));
    let toured = write_model(&made).map_err(Into::into).and_then(|()| tour(&made));
    fs::remove_file(&made)?;
    toured
}

fn tour(path: &Path) -> Result<(), Box<dyn Error>> {
    let rt = Runtime::builder().device_budget(Bytes::mib(16)).open()?;

    // Opening reads headers; the file is used where it is.
    let model = rt.open_model(path)?;
    let largest = model.header().tensors.iter().max_by_key(|tensor| tensor.len).ok_or("the model has no tensors")?;
    let tensor = model.tensor(&largest.name)?;
    println!("{:?}: {}, with a budget of 16 MiB", tensor, tensor.size());

    // More than fits is used in pieces: ranges of rows that cover at most two pages. A declared order is read ahead.
    let pieces = Tensor::waves(std::slice::from_ref(&tensor), 2)?.concat();
    rt.plan(Plan::Cycle(&pieces));
    for pass in 1..=2 {
        let mut sum = 0u64;
        for piece in &pieces {
            let guard = rt.pin(piece).wait()?; // or `.await`; the bytes stay while the guard lives
            sum = guard.bytes().iter().fold(sum, |sum, byte| sum.wrapping_add(u64::from(*byte)));
        }
        println!("pass {pass}: the sum of its bytes is {sum}");
    }

    // A read-write tensor of twice the budget: what does not fit goes to a scratch file and comes back.
    let table = rt.alloc(DType::U64, &[4096, 1024])?;
    let step = table.rows_within(2)?;
    let parts = (0..4096).step_by(step as usize).map(|row| table.rows(row..(row + step).min(4096)));
    let parts = parts.collect::<Result<Vec<_>, _>>()?;
    for (n, part) in parts.iter().enumerate() {
        rt.pin(part).write().wait()?.view_mut::<u64>()?.fill(n as u64);
    }
    for (n, part) in parts.iter().enumerate() {
        assert!(rt.pin(part).wait()?.view::<u64>()?.iter().all(|value| *value == n as u64));
    }
    println!("{} written and read back", table.size());

    let stats = rt.stats();
    let traffic = &stats.traffic;
    println!("{} read, {} written, by {}", traffic.disk_read, traffic.disk_written, stats.io);
    println!("at most {} in memory, budget {}", traffic.peak_device, stats.device.budget);
    let (hits, uses) = (100.0 * stats.hit_ratio(), stats.pager.uses);
    println!("{hits:.0} % of {uses} uses were hits; stalled {:.1?}", stats.stall_time());
    Ok(rt.close()?)
}

/// A safetensors file of one tensor of 40 MiB.
fn write_model(path: &Path) -> std::io::Result<()> {
    let header = br#"{"table":{"dtype":"F32","shape":[10240,1024],"data_offsets":[0,41943040]}}      "#;
    let mut file = BufWriter::new(File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header)?;
    for n in 0..10240 * 1024 {
        file.write_all(&(n as f32).to_le_bytes())?;
    }
    file.flush()
}
