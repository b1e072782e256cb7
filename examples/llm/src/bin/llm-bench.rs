//! Tokens a second of a model held in ordinary memory, or in a GPU's: the in-core baseline.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use outcore::{Bytes, PageSize, Runtime};
use outcore_llm::{
    CudaDeviceSelector, CudaModel, CudaSession, Gpu, KvType, Model, ModelFiles, Options, PagedWeights, PassCounts,
    PlainWeights, Result, Sampler, Session, Timing, argmax,
};
use serde_json::{Value, json};

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
    /// With --cuda: launch kernels one by one, without CUDA graphs.
    #[arg(long, requires = "cuda")]
    no_graphs: bool,
    /// Prompt as token ids, instead of a synthetic one.
    #[arg(long, value_delimiter = ',')]
    ids: Vec<u32>,
    /// Print one JSON object in place of the text.
    #[arg(long)]
    json: bool,
}

/// Passes of one token before those that are measured, at most.
const PASSES_BEFORE: usize = 100;

/// What was measured.
struct Done {
    /// Where it was computed: `host`, by as many threads, or a GPU.
    device: String,
    threads: Option<usize>,
    weights: u64,
    prompt: usize,
    prefill: Duration,
    /// Of each token behind the first.
    times: Vec<Duration>,
    ids: Vec<u32>,
    gpu: Option<OnGpu>,
}

/// What a GPU did for the tokens behind the first.
struct OnGpu {
    counts: PassCounts,
    tokens: usize,
    /// Bytes a second that its memory can give.
    bandwidth: Option<u64>,
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
    let done = match &args.cuda {
        Some(selector) => run_on_gpu(args, &files, selector)?,
        None => run_on_host(args, &files)?,
    };
    if args.json {
        println!("{}", done.json());
    } else {
        done.report();
    }
    Ok(())
}

fn run_on_host(args: &Args, files: &ModelFiles) -> Result<Done> {
    let weights = Arc::new(PlainWeights::read(files)?);
    let model = Arc::new(Model::load(files, weights, Options { threads: args.threads, ..Options::default() })?);
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
    Ok(Done {
        device: "host".into(),
        threads: Some(model.threads()),
        weights: files.weight_bytes(),
        prompt: prompt.len(),
        prefill,
        times,
        ids,
        gpu: None,
    })
}

fn prompt(args: &Args, vocab: usize) -> Vec<u32> {
    match args.ids.is_empty() {
        true => (0..args.prompt as u32).map(|i| (i * 7919 + 11) % vocab as u32).collect(),
        false => args.ids.clone(),
    }
}

/// The same with all weights in pages of a GPU's memory.
fn run_on_gpu(args: &Args, files: &ModelFiles, selector: &CudaDeviceSelector) -> Result<Done> {
    let gpu = Arc::new(Gpu::open(selector, args.kernels.as_deref())?);
    let bandwidth = gpu.bandwidth();
    let page = PageSize::DEFAULT;
    let pages: u64 = files.header().files.iter().map(|file| page.pages_for(file.len)).sum();
    let builder = Runtime::builder().for_model(files.header()).device(selector.clone()).page_size(page);
    let runtime = builder.device_budget(Bytes::new(pages * page.bytes())).open()?;
    let done = {
        let opened = runtime.open_parsed(files.header().clone())?;
        let weights = Arc::new(PagedWeights::open(&runtime, &opened, files)?);
        let model = Arc::new(CudaModel::load(files, weights, gpu)?);
        let prompt = prompt(args, model.config().vocab);
        let capacity = prompt.len() + args.tokens + 1;
        let mut session = CudaSession::new(model.clone(), capacity, prompt.len(), KvType::F16)?;
        session.use_graphs(!args.no_graphs);
        bring_all(&mut session)?;
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
        Done {
            device: format!("cuda:{selector}"),
            threads: None,
            weights: files.weight_bytes(),
            prompt: prompt.len(),
            prefill,
            times,
            ids,
            gpu: Some(OnGpu { counts: session.counts() - before, tokens: args.tokens, bandwidth }),
        }
    };
    runtime.close()?;
    Ok(done)
}

/// Has passes until one pins no weights: all are there then, and stay.
fn bring_all(session: &mut CudaSession) -> Result<()> {
    for _ in 0..PASSES_BEFORE {
        let pins = session.counts().pins;
        session.next(&[0], &mut Sampler::greedy())?;
        session.truncate(0)?;
        if session.counts().pins == pins {
            break;
        }
    }
    Ok(())
}

impl Done {
    fn prefill_rate(&self) -> f64 {
        self.prompt as f64 / self.prefill.as_secs_f64()
    }

    /// Tokens a second: on average, and of the median pass.
    fn decode_rates(&self) -> [f64; 2] {
        let mut times = self.times.clone();
        times.sort_unstable();
        let total: f64 = times.iter().map(Duration::as_secs_f64).sum();
        let median = times.get(times.len() / 2).map_or(0.0, Duration::as_secs_f64);
        [times.len() as f64 / total, 1.0 / median]
    }

    /// For programs. Fields that `generate --json` has too have its names.
    fn json(&self) -> Value {
        let [decode, median] = self.decode_rates();
        json!({
            "device": self.device,
            "threads": self.threads,
            "weight_bytes": self.weights,
            "prompt_tokens": self.prompt,
            "prefill_tok_s": self.prefill_rate(),
            "decode_tok_s": decode,
            "decode_tok_s_median": median,
            "tokens": self.ids,
            "per_token": self.gpu.as_ref().map(OnGpu::json),
        })
    }

    fn report(&self) {
        let [decode, median] = self.decode_rates();
        let on = self.threads.map_or(format!("on {}", self.device), |threads| format!("{threads} threads"));
        println!("weights {:.1} MB, {on}", self.weights as f64 / 1e6);
        println!("prefill {} tokens: {:.1} tok/s", self.prompt, self.prefill_rate());
        println!(
            "decode {} tokens: {decode:.1} tok/s (median {median:.1}), {:.1} GB/s of weights",
            self.times.len(),
            self.weights as f64 * median / 1e9
        );
        if let Some(gpu) = &self.gpu {
            gpu.report();
        }
        println!("ids {:?}", self.ids);
    }
}

impl OnGpu {
    fn each(&self, n: u64) -> f64 {
        n as f64 / self.tokens.max(1) as f64
    }

    fn seconds(&self, time: Duration) -> f64 {
        self.each(time.as_nanos() as u64) / 1e9
    }

    /// Seconds of a token on the GPU. Old drivers do not time passes.
    fn gpu_seconds(&self) -> Option<f64> {
        (!self.counts.gpu.is_zero()).then(|| self.seconds(self.counts.gpu))
    }

    fn bandwidth_share(&self) -> Option<f64> {
        let (all, gpu) = self.bandwidth.zip(self.gpu_seconds())?;
        Some(self.each(self.counts.read.get()) / gpu / all as f64)
    }

    fn json(&self) -> Value {
        let counts = &self.counts;
        json!({
            "launches": self.each(counts.launches),
            "graph_launches": self.each(counts.graph_launches),
            "graph_nodes": self.each(counts.graph_nodes),
            "synchronisations": self.each(counts.synchronisations),
            "pins": self.each(counts.pins),
            "host_seconds": self.seconds(counts.host),
            "gpu_seconds": self.gpu_seconds(),
            "waiting_seconds": self.seconds(counts.waiting),
            "device_bytes": self.each(counts.read.get()),
            "bandwidth_share": self.bandwidth_share(),
        })
    }

    fn report(&self) {
        let counts = &self.counts;
        println!(
            "a token: {:.1} launches, {:.1} graphs of {:.1} nodes, {:.1} waits for the GPU, {:.1} pins",
            self.each(counts.launches),
            self.each(counts.graph_launches),
            self.each(counts.graph_nodes),
            self.each(counts.synchronisations),
            self.each(counts.pins)
        );
        println!(
            "time of a token: {:.1} us of the host's processor, {} on the GPU, {:.1} us waiting for it",
            1e6 * self.seconds(counts.host),
            self.gpu_seconds().map_or("an unknown time".into(), |gpu| format!("{:.1} us", 1e6 * gpu)),
            1e6 * self.seconds(counts.waiting)
        );
        let share = self.bandwidth_share();
        let share = share.map_or("an unknown part".into(), |share| format!("{:.1} %", 100.0 * share));
        let read = self.each(counts.read.get()) / 1e6;
        println!("read {read:.1} MB a token, {share} of the bandwidth of the GPU's memory");
    }
}
