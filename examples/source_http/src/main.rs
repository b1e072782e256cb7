//! Reads every tensor of a model on an HTTP server once, in 64 MiB: `source-http http://127.0.0.1:8000/model.gguf`.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use outcore::{Bytes, Result, Runtime};
use outcore_source_http::HttpSource;

fn main() -> ExitCode {
    let Some(url) = std::env::args().nth(1) else {
        eprintln!("usage: source-http URL");
        return ExitCode::from(2);
    };
    match read_all(&url) {
        Ok(text) => {
            println!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("source-http: {error}");
            ExitCode::FAILURE
        }
    }
}

fn read_all(url: &str) -> Result<String> {
    let runtime = Runtime::builder().device_budget(Bytes::mib(64)).open()?;
    let model = runtime.open_source(Arc::new(HttpSource::open(url)?))?;
    let start = Instant::now();
    let (mut bytes, mut sum) = (0, 0u64);
    for header in &model.header().tensors {
        let tensor = model.tensor(&header.name)?;
        let row = header.shape.iter().skip(1).product::<u64>().max(1);
        let rows = header.shape.first().copied().unwrap_or(1);
        // So many rows that they fit into the budget, whatever the tensor's size.
        let step = ((8 << 20) / (header.len / rows.max(1)).max(1)).max(1);
        for from in (0..rows).step_by(step as usize) {
            let part = if row == 1 && rows == 1 { tensor.clone() } else { tensor.rows(from..rows.min(from + step))? };
            let guard = runtime.pin(&part).wait()?;
            bytes += guard.len() as u64;
            sum = guard.iter().fold(sum, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte)));
        }
    }
    let traffic = runtime.stats().traffic;
    Ok(format!(
        "{} of {} tensors in {:.1} s, at most {} of them in memory; sum {sum:016x}",
        Bytes::new(bytes),
        model.header().tensors.len(),
        start.elapsed().as_secs_f64(),
        traffic.peak_device,
    ))
}
