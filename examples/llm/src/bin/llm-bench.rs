//! Tokens a second of a model held in ordinary memory: the in-core baseline.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use outcore_llm::{KvType, Model, ModelFiles, Options, PlainWeights, Result, Session, argmax};

/// Measures prefill and decode speed with all weights in ordinary memory.
#[derive(Debug, Parser)]
struct Args {
    /// A .gguf file or a folder with safetensors.
    model: PathBuf,
    /// Threads that compute; 0 means one a core.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Prompt length in tokens.
    #[arg(long, default_value_t = 128)]
    prompt: usize,
    /// Tokens to generate, each measured.
    #[arg(long, default_value_t = 64)]
    tokens: usize,
    /// Prompt as token ids, instead of a synthetic one.
    #[arg(long, value_delimiter = ',')]
    ids: Vec<u32>,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // If standard error is closed there is nobody left to tell.
            let _ = writeln!(std::io::stderr(), "llm-bench: {}", error.in_full());
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    let files = ModelFiles::open(&args.model)?;
    let weights = Arc::new(PlainWeights::read(&files)?);
    let model = Arc::new(Model::load(&files, weights, Options { threads: args.threads, ..Options::default() })?);
    let vocab = model.config().vocab as u32;
    let prompt: Vec<u32> = if args.ids.is_empty() {
        (0..args.prompt as u32).map(|i| (i * 7919 + 11) % vocab).collect()
    } else {
        args.ids.clone()
    };
    let mut session = Session::new(Arc::clone(&model), prompt.len() + args.tokens + 1, KvType::F32)?;
    let mut next = argmax(&session.forward(&prompt)?);
    let prefill = session.last_pass().total;
    let mut times = Vec::with_capacity(args.tokens);
    let mut ids = vec![next];
    for _ in 0..args.tokens {
        next = argmax(&session.forward(&[next])?);
        ids.push(next);
        times.push(session.last_pass().total);
    }
    times.sort_unstable();
    let total: f64 = times.iter().map(std::time::Duration::as_secs_f64).sum();
    let median = times.get(times.len() / 2).map_or(0.0, std::time::Duration::as_secs_f64);
    println!("weights {:.1} MB, {} threads", files.weight_bytes() as f64 / 1e6, model.threads());
    println!("prefill {} tokens: {:.1} tok/s", prompt.len(), prompt.len() as f64 / prefill.as_secs_f64());
    println!(
        "decode {} tokens: {:.1} tok/s (median {:.1}), {:.1} GB/s of weights",
        times.len(),
        times.len() as f64 / total,
        1.0 / median,
        files.weight_bytes() as f64 / median / 1e9
    );
    println!("ids {ids:?}");
    Ok(())
}
