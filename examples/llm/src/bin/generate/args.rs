//! The options of `generate`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Parser;
use outcore::{Bytes, IoBackend, Lookahead, PolicyKind, Verify};
use outcore_llm::drafts::DRAFT_MOST;
use outcore_llm::{Error, KvType, Pool, Result};

use crate::device::Device;

/// Runs a Llama-family model whose weights may exceed the memory it is given.
#[derive(Debug, Parser)]
#[command(version)]
pub struct Args {
    /// A .gguf file (any one of a split model), a folder with safetensors files and config.json, or
    /// `hf:owner/repo[:file]`.
    #[arg(long)]
    pub model: OsString,
    /// The prompt.
    #[arg(long, conflicts_with = "prompt_tokens", required_unless_present = "prompt_tokens")]
    pub prompt: Option<String>,
    /// The prompt as token ids, separated by commas.
    #[arg(long, value_delimiter = ',')]
    pub prompt_tokens: Option<Vec<u32>>,
    /// Most tokens to generate.
    #[arg(long, visible_alias = "max-tokens", default_value_t = 128)]
    pub tokens: usize,
    /// Where weights are paged to and computed with: host, cuda, or cuda: and a GPU's number, UUID or PCI address.
    #[arg(long, default_value_t)]
    pub device: Device,
    /// With --device cuda: a PTX, cubin or fatbin file with the kernels, in place of compiling them with NVRTC.
    #[arg(long)]
    pub kernels: Option<PathBuf>,
    /// Most memory the whole process may take; the budgets are what is left of it. Default: the limit of the control
    /// group or the machine, less headroom. A GPU's memory is not part of it.
    #[arg(long)]
    pub memory: Option<Bytes>,
    /// Memory for pages in the device tier. Default: what --memory leaves.
    #[arg(long)]
    pub device_budget: Option<Bytes>,
    /// Memory for pages in the host tier.
    #[arg(long, default_value = "0")]
    pub host_budget: Bytes,
    /// Bytes of a page: a power of two. Default: 2MiB; less where the device budget or the model's experts are small or
    /// the disk is slow, and more where the kernel allows too few mappings (vm.max_map_count).
    #[arg(long)]
    pub page_size: Option<Bytes>,
    /// Which page goes when a frame is needed: plan (follows the order of use), model (as plan, and experts by their
    /// uses), lru, s3fifo, 2q, arc, lirs, wtinylfu, kv, shares or auto. Default: plan; model for a mixture of experts.
    #[arg(long)]
    pub policy: Option<PolicyKind>,
    /// How far ahead of use pages are filled: auto, off, or a size.
    #[arg(long, default_value = "auto")]
    pub prefetch: Lookahead,
    /// Most reads and writes that the disk is given at once. Default: what the disk needs for its full rate, which is
    /// measured and remembered (`outcore doctor` has it measured anew), unless this, --prefetch and --page-size are all
    /// given.
    #[arg(long)]
    pub depth: Option<u32>,
    /// Most bytes of weights that are computed with at a time, where not all fit. Default: 8MiB, less where the device
    /// budget is small.
    #[arg(long)]
    pub step: Option<Bytes>,
    /// How files are read: auto, io_uring, threads or buffered.
    #[arg(long, default_value = "auto")]
    pub io: IoBackend,
    /// When pages read again are compared with what was first read: off, first or always.
    #[arg(long, default_value = "off")]
    pub verify: Verify,
    /// Randomness of the choice of tokens; 0 always takes the likeliest.
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub temperature: f32,
    /// Seed of that randomness.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// A small model with the same vocabulary that drafts tokens: a .gguf file or a folder, as for --model. The model
    /// verifies several in one pass, and the answer is the same. Its weights stay in memory, which is part of --memory.
    #[arg(long)]
    pub draft_model: Option<OsString>,
    /// With --draft-model: most tokens of a draft, up to 16.
    #[arg(long, default_value_t = 8)]
    pub draft_tokens: usize,
    /// Puts the prompt into the model's chat template as a user's message.
    #[arg(long, conflicts_with = "prompt_tokens")]
    pub chat: bool,
    /// Prints one JSON object as the last line.
    #[arg(long)]
    pub json: bool,
    /// Writes a timeline that chrome://tracing and Perfetto show.
    #[arg(long)]
    pub timeline: Option<PathBuf>,
    /// Writes which pages are used, in order, for `outcore policies --trace`.
    #[arg(long)]
    pub capture: Option<PathBuf>,
    /// Threads that compute; 0 means one a core.
    #[arg(long, default_value_t = 0)]
    pub threads: usize,
    /// Keeps keys and values in pages, beside the weights: a context may be larger than memory.
    #[arg(long)]
    pub paged_kv: bool,
    /// How keys and values are stored: f32 or f16. Default: f16 on a GPU, f32 on the host device and with --paged-kv.
    #[arg(long)]
    pub kv_type: Option<KvType>,
    /// With --device cuda: only kernels whose results do not depend on how a prompt is cut into passes, and keys and
    /// values in f32. Prompts are read more slowly.
    #[arg(long)]
    pub deterministic: bool,
    /// With --device cuda: launches the kernels of every token one by one, not as CUDA graphs.
    #[arg(long)]
    pub no_graphs: bool,
    /// With --device cuda: also times how long the GPU's stream waits for weights, by two events for each set of
    /// weights that is pinned.
    #[arg(long)]
    pub time_stalls: bool,
    /// With --json on a GPU: hashes the logits of every pass, which are copied from the GPU for that.
    #[arg(long)]
    pub logits_hash: bool,
    /// Repeats everything this often, with a new sequence each time; the results are those of the last time.
    #[arg(long, default_value_t = 1)]
    pub repeat: usize,
}

impl Args {
    /// How keys and values are stored.
    pub fn kv_type(&self) -> KvType {
        let of_gpu = self.device != Device::Host && !self.paged_kv && !self.deterministic;
        self.kv_type.unwrap_or(if of_gpu { KvType::F16 } else { KvType::F32 })
    }

    /// Whether the logits are hashed. On the host device they are there in any case.
    pub fn hashes_logits(&self) -> bool {
        self.logits_hash || self.device == Device::Host
    }

    /// What can be known before a model is opened, or even fetched.
    ///
    /// # Errors
    /// `Invalid` for values that no run can have.
    pub fn check(&self) -> Result<()> {
        let wrong = |what: &str| Err(Error::Invalid(what.into()));
        if self.tokens == 0 {
            return wrong("--tokens 0 asks for nothing: ask for at least 1");
        }
        if self.prompt.as_deref() == Some("") {
            return wrong("the prompt is empty: give at least one word");
        }
        if self.threads > Pool::THREADS_MAX {
            return Err(Error::Invalid(format!(
                "--threads {} is more than the {} that may be asked for: 0 takes one a core",
                self.threads,
                Pool::THREADS_MAX
            )));
        }
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return wrong("--temperature must be 0 or a positive number: 0 always takes the likeliest token");
        }
        if self.draft_model.is_some() && self.device != Device::Host {
            return Err(Error::Unsupported(
                "--draft-model needs the logits after each token of a pass, which a GPU does not give yet: use --device \
                 host, or leave it out"
                    .into(),
            ));
        }
        if self.draft_tokens == 0 || self.draft_tokens > DRAFT_MOST {
            return Err(Error::Invalid(format!(
                "--draft-tokens {} is not from 1 to {DRAFT_MOST}: leave --draft-model out for no drafts",
                self.draft_tokens
            )));
        }
        if self.repeat == 0 {
            return wrong("--repeat 0 asks for nothing: ask for at least 1");
        }
        if self.repeat > 1 && self.capture.is_some() {
            return wrong("--capture is for one time: leave --repeat out");
        }
        if self.deterministic && self.device == Device::Host {
            return wrong("--deterministic is of no use on the host device, which always is: leave it out");
        }
        if self.deterministic && self.kv_type == Some(KvType::F16) {
            return wrong("--deterministic has keys and values in f32: leave --kv-type out");
        }
        if self.kv_type == Some(KvType::F16) && self.paged_kv && self.device == Device::Host {
            return wrong("--paged-kv has keys and values in f32 on the host device: leave --kv-type out");
        }
        if self.time_stalls && self.device == Device::Host {
            return wrong("--time-stalls is of no use on the host device: ask for --device cuda, or leave it out");
        }
        if self.kernels.is_some() && self.device == Device::Host {
            return wrong("--kernels is of no use on the host device: ask for --device cuda, or leave it out");
        }
        Ok(())
    }
}

/// What is wrong with the command line, without the usage that clap appends.
pub fn in_one_line(wrong: &clap::Error) -> String {
    let text = wrong.render().to_string();
    let lines =
        text.lines().take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"));
    let words: Vec<&str> = lines.flat_map(str::split_whitespace).collect();
    let text = words.join(" ");
    format!("{} (--help explains the options)", text.strip_prefix("error: ").unwrap_or(&text))
}
