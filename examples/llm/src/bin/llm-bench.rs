//! Tokens a second of a model held in ordinary memory, or in a GPU's: the in-core baseline.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use outcore::{Bytes, PageSize, Runtime};
use outcore_llm::{
    CudaDeviceSelector, CudaModel, CudaSession, Gpu, KvType, Model, ModelFiles, Options, PagedWeights, PlainWeights,
    Result, Sampler, Session, Timing, argmax,
};

/// Measures prefill and decode speed with all weights in ordinary memory, or in a GPU's.
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
    /// A GPU to compute on, by its number, UUID or PCI address.
    #[arg(long)]
    cuda: Option<CudaDeviceSelector>,
    /// With --cuda: a PTX, cubin or fatbin file with the kernels, in place of compiling them with NVRTC.
    #[arg(long)]
    kernels: Option<PathBuf>,
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
    if let Some(selector) = &args.cuda {
        return run_on_gpu(args, &files, selector);
    }
    let weights = Arc::new(PlainWeights::read(&files)?);
    let model = Arc::new(Model::load(&files, weights, Options { threads: args.threads, ..Options::default() })?);
    let prompt = prompt(args, model.config().vocab);
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
    println!("weights {:.1} MB, {} threads", files.weight_bytes() as f64 / 1e6, model.threads());
    report(&files, prompt.len(), prefill, times);
    println!("ids {ids:?}");
    Ok(())
}

fn prompt(args: &Args, vocab: usize) -> Vec<u32> {
    match args.ids.is_empty() {
        true => (0..args.prompt as u32).map(|i| (i * 7919 + 11) % vocab as u32).collect(),
        false => args.ids.clone(),
    }
}

fn report(files: &ModelFiles, prompt: usize, prefill: Duration, mut times: Vec<Duration>) {
    times.sort_unstable();
    let total: f64 = times.iter().map(Duration::as_secs_f64).sum();
    let median = times.get(times.len() / 2).map_or(0.0, Duration::as_secs_f64);
    println!("prefill {prompt} tokens: {:.1} tok/s", prompt as f64 / prefill.as_secs_f64());
    println!(
        "decode {} tokens: {:.1} tok/s (median {:.1}), {:.1} GB/s of weights",
        times.len(),
        times.len() as f64 / total,
        1.0 / median,
        files.weight_bytes() as f64 / median / 1e9
    );
}

/// The same with all weights in pages of a GPU's memory.
fn run_on_gpu(args: &Args, files: &ModelFiles, selector: &CudaDeviceSelector) -> Result<()> {
    let gpu = Arc::new(Gpu::open(selector, args.kernels.as_deref())?);
    let bandwidth = gpu.bandwidth();
    let page = PageSize::DEFAULT;
    let pages: u64 = files.header().files.iter().map(|file| page.pages_for(file.len)).sum();
    let builder = Runtime::builder().for_model(files.header()).device(selector.clone()).page_size(page);
    let runtime = builder.device_budget(Bytes::new(pages * page.bytes())).open()?;
    {
        let opened = runtime.open_parsed(files.header().clone())?;
        let weights = Arc::new(PagedWeights::open(&runtime, &opened, files)?);
        let model = Arc::new(CudaModel::load(files, weights, gpu)?);
        let prompt = prompt(args, model.config().vocab);
        let capacity = prompt.len() + args.tokens + 1;
        let mut session = CudaSession::new(model.clone(), capacity, prompt.len(), KvType::F16)?;
        session.time(Timing::Passes);
        let mut sampler = Sampler::greedy();
        let mut ids = vec![session.next(&prompt, &mut sampler)?];
        let prefill = session.last_pass().total;
        let before = session.counts();
        let mut times = Vec::with_capacity(args.tokens);
        for _ in 0..args.tokens {
            let next = session.next(&ids[ids.len() - 1..], &mut sampler)?;
            ids.push(next);
            times.push(session.last_pass().total);
        }
        let counts = session.counts() - before;
        println!("weights {:.1} MB, on cuda:{selector}", files.weight_bytes() as f64 / 1e6);
        report(files, prompt.len(), prefill, times);
        let each = |n: u64| n as f64 / args.tokens.max(1) as f64;
        println!(
            "a token: {:.1} launches, {:.1} graphs of {:.1} nodes, {:.1} waits for the GPU, {:.1} pins",
            each(counts.launches),
            each(counts.graph_launches),
            each(counts.graph_nodes),
            each(counts.synchronisations),
            each(counts.pins)
        );
        // Old drivers do not time passes.
        let gpu = (!counts.gpu.is_zero()).then_some(counts.gpu.as_secs_f64());
        let micros = |time: Duration| each(time.as_nanos() as u64) / 1e3;
        println!(
            "time of a token: {:.1} us of the host's processor, {} on the GPU, {:.1} us waiting for it",
            micros(counts.host),
            gpu.map_or("an unknown time".into(), |_| format!("{:.1} us", micros(counts.gpu))),
            micros(counts.waiting)
        );
        let share = bandwidth.zip(gpu).map(|(all, gpu)| counts.read.get() as f64 / gpu / all as f64);
        let share = share.map_or("an unknown part".into(), |share| format!("{:.1} %", 100.0 * share));
        println!("read {:.1} MB a token, {share} of the bandwidth of the GPU's memory", each(counts.read.get()) / 1e6);
        println!("ids {ids:?}");
    }
    runtime.close()?;
    Ok(())
}
