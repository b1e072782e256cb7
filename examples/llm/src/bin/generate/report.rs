//! What a run was: the summary for people, the JSON line for programs, the timeline for both.

use std::fmt::Write as _;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::Duration;

use outcore::machine::ProcessMemory;
use outcore::stats::{Optimum, PageStalls, Span, TierStalls, TraceRows};
use outcore::{Bytes, PageSize, Result, Stats};
use outcore_lab::output::{Input, NewFile};
use outcore_lab::residency::Residency;
use outcore_lab::sim::ClassBytes;
use outcore_llm::drafts::DraftBy;
use outcore_llm::{ModelFiles, PassCounts};
use serde_json::{Value, json};

/// What a run takes memory for, besides the frames.
#[derive(Debug)]
pub struct Memory {
    /// Of the model's files.
    pub weights: Vec<ClassBytes>,
    /// The tails: what lies beyond the files' ends in the frames of their last pages.
    pub tails: Bytes,
    pub keys_values: Bytes,
    /// Activations, logits, and what else computing takes.
    pub activations: Bytes,
}

impl Memory {
    pub fn of(files: &ModelFiles, page: PageSize, keys_values: Bytes, working: Bytes) -> Self {
        let header = files.header();
        let tail = |len: u64| page.pages_for(len) * page.bytes() - len;
        Self {
            weights: ClassBytes::of_model(header),
            tails: Bytes::new(header.files.iter().map(|file| tail(file.len)).sum()),
            keys_values,
            activations: working.saturating_sub(keys_values),
        }
    }

    fn json(&self) -> Value {
        json!({
            "weights": self.weights,
            "tail_bytes": self.tails.get(),
            "keys_values_bytes": self.keys_values.get(),
            "activations_bytes": self.activations.get(),
        })
    }
}

/// What the passes gave.
#[derive(Debug, Default)]
pub struct Generated {
    pub tokens: Vec<u32>,
    pub text: String,
    /// From the start of the first pass to the first token.
    pub first_token: Duration,
    /// Each pass after the first.
    pub passes: Vec<Duration>,
    /// Tokens that they gave.
    pub later: usize,
    pub drafts: Drafted,
    /// All passes, the first included.
    pub total: Duration,
    /// The part of that time spent waiting for weights.
    pub waited: Duration,
    /// A hash of every logit of every pass, in order, where it was asked for.
    pub logits_hash: Option<u64>,
    /// What passes after the first had the host do, on a GPU.
    pub counts: PassCounts,
}

/// What was drafted.
#[derive(Debug, Default)]
pub struct Drafted {
    lookup: Held,
    model: Held,
    /// What drafting took.
    pub time: Duration,
}

/// Drafted tokens, and those of them that held.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    drafted: usize,
    accepted: usize,
}

impl Drafted {
    /// Counts that `accepted` of `drafted` tokens held.
    pub fn count(&mut self, by: DraftBy, drafted: usize, accepted: usize) {
        let held = match by {
            DraftBy::Lookup => &mut self.lookup,
            DraftBy::SmallModel => &mut self.model,
        };
        held.drafted += drafted;
        held.accepted += accepted;
    }

    fn json(&self) -> Value {
        let of = |held: Held| json!({"drafted": held.drafted, "accepted": held.accepted});
        json!({"lookup": of(self.lookup), "model": of(self.model), "seconds": self.time.as_secs_f64()})
    }
}

/// How long one of several times took.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    first_token: Duration,
    decode_rate: f64,
    median_pass: Duration,
    of_token: TokenTimes,
}

/// Where the time of a token after the first went, in seconds, on average; `None` where that was not measured.
#[derive(Clone, Copy, Debug)]
struct TokenTimes {
    host: Option<f64>,
    gpu: Option<f64>,
    waiting: Option<f64>,
}

impl Generated {
    pub fn times(&self) -> Times {
        Times {
            first_token: self.first_token,
            decode_rate: self.decode_rate(),
            median_pass: self.median_pass(),
            of_token: self.of_token(),
        }
    }

    /// Of a token after the first; `None` where the host computes.
    fn each(&self, n: f64) -> Option<f64> {
        (self.counts.passes > 0).then(|| n / self.passes.len() as f64)
    }

    fn of_token(&self) -> TokenTimes {
        let each = |time: Duration| self.each(time.as_secs_f64());
        let PassCounts { host, gpu, waiting, .. } = self.counts;
        TokenTimes { host: each(host), gpu: each(gpu).filter(|_| !gpu.is_zero()), waiting: each(waiting) }
    }

    fn median_pass(&self) -> Duration {
        let mut passes = self.passes.clone();
        passes.sort_unstable();
        passes.get(passes.len() / 2).copied().unwrap_or(self.first_token)
    }

    fn decode_rate(&self) -> f64 {
        let total = self.passes.iter().sum::<Duration>() + self.drafts.time;
        if total.is_zero() { 0.0 } else { self.later as f64 / total.as_secs_f64() }
    }
}

impl Times {
    fn json(&self) -> Value {
        json!({
            "ttft_s": self.first_token.as_secs_f64(),
            "decode_tok_s": self.decode_rate,
            "pass_s_median": self.median_pass.as_secs_f64(),
            "host_seconds": self.of_token.host,
            "gpu_seconds": self.of_token.gpu,
            "waiting_seconds": self.of_token.waiting,
        })
    }
}

/// A finished run.
#[derive(Debug)]
pub struct Run {
    pub model: String,
    pub device: String,
    pub device_budget: Bytes,
    /// What was asked for, if the model has fewer pages.
    pub device_asked: Option<Bytes>,
    pub host_budget: Bytes,
    pub memory: Memory,
    /// Bytes of the weights that a pass over one token uses.
    pub pass_bytes: Bytes,
    /// Bytes a second that the GPU's memory can give, if it is known.
    pub bandwidth: Option<u64>,
    /// Whether the stream's waits for weights were timed.
    pub times_stalls: bool,
    pub prompt_tokens: Vec<u32>,
    /// Whether drafts were made.
    pub drafts: bool,
    pub done: Generated,
    /// Each time that it was done.
    pub repeats: Vec<Times>,
    pub interrupted: bool,
    pub stats: Stats,
    /// The best possible on the same uses.
    pub optimum: Optimum,
    /// The pages that were waited for longest.
    pub worst_pages: Vec<PageStalls>,
}

impl Run {
    /// What the host did for a token after the first, where its time went, and what the GPU read for it; nulls where
    /// the host computes.
    fn per_token(&self) -> Value {
        let (counts, each) = (&self.done.counts, |n| self.done.each(n));
        let TokenTimes { host, gpu, waiting } = self.done.of_token();
        json!({
            "launches": each(counts.launches as f64),
            "graph_launches": each(counts.graph_launches as f64),
            "graph_nodes": each(counts.graph_nodes as f64),
            "synchronisations": each(counts.synchronisations as f64),
            "pins": each(counts.pins as f64),
            "host_seconds": host,
            "gpu_seconds": gpu,
            "gpu_stall_seconds": gpu.and(self.stalled()),
            "waiting_seconds": waiting,
            "device_bytes": each(counts.read.get() as f64),
            "bandwidth_share": self.bandwidth_share(),
        })
    }

    /// How long the GPU's stream waited for the weights of a token after the first, in seconds, if that was timed.
    fn stalled(&self) -> Option<f64> {
        self.done.each(self.done.counts.stalled.as_secs_f64()).filter(|_| self.times_stalls)
    }

    /// The part of the bandwidth of the GPU's memory that passes after the first used in their time on the GPU, if both
    /// are known.
    fn bandwidth_share(&self) -> Option<f64> {
        let (time, read) = (self.done.counts.gpu.as_secs_f64(), self.done.counts.read.get() as f64);
        self.bandwidth.filter(|_| time > 0.0 && read > 0.0).map(|rate| read / time / rate as f64)
    }

    /// The part of the transfer time in which nobody waited for it.
    fn overlap(&self) -> f64 {
        let busy = self.stats.traffic.disk_busy.max(self.stats.traffic.link_busy).as_secs_f64();
        if busy == 0.0 { 1.0 } else { (1.0 - self.done.waited.as_secs_f64() / busy).clamp(0.0, 1.0) }
    }

    /// The object that programs read.
    pub fn json(&self) -> Value {
        let stats = &self.stats;
        let stalls: serde_json::Map<String, Value> = stats
            .stalls
            .iter()
            .map(|stall| {
                let of_tier = |at: &TierStalls| {
                    (at.tier.to_string(), json!({"count": at.count, "seconds": at.time.as_secs_f64()}))
                };
                let tiers: serde_json::Map<String, Value> = stall.tiers.iter().map(of_tier).collect();
                let value = json!({"count": stall.count, "seconds": stall.time.as_secs_f64(), "tiers": tiers});
                (stall.name.to_owned(), value)
            })
            .collect();
        let of_page = |page: &PageStalls| {
            json!({
                "tensor": page.tensor,
                "page": page.page.index.get(),
                "count": page.count,
                "seconds": page.time.as_secs_f64(),
                "cause": page.name,
                "tier": page.tier.to_string(),
            })
        };
        let worst_pages: Vec<Value> = self.worst_pages.iter().map(of_page).collect();
        let mut all = json!({
            "model": self.model,
            "device": self.device,
            "page_bytes": stats.page_size.bytes(),
            "settings": stats.settings,
            "device_budget_bytes": self.device_budget.get(),
            "host_budget_bytes": self.host_budget.get(),
            "policy": stats.policy,
            "io": stats.io.to_string(),
            "io_buffered_files": stats.buffered_files,
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.done.tokens,
            "text": self.done.text,
            "ttft_s": self.done.first_token.as_secs_f64(),
            "decode_tok_s": self.done.decode_rate(),
            "pass_s_median": self.done.median_pass().as_secs_f64(),
            "compute_s": self.done.total.saturating_sub(self.done.waited).as_secs_f64(),
            "stall_s": self.done.waited.as_secs_f64(),
            "disk_read_bytes": stats.traffic.disk_read.get(),
            "disk_written_bytes": stats.traffic.disk_written.get(),
            "link_bytes": (stats.traffic.link_in + stats.traffic.link_out).get(),
            "disk_busy_s": stats.traffic.disk_busy.as_secs_f64(),
            "link_busy_s": stats.traffic.link_busy.as_secs_f64(),
            "pass_bytes": self.pass_bytes.get(),
            // These two ratios are over the same uses, `ratio_uses` of them. `hits` and `uses` cover all uses of a long
            // run.
            "hit_ratio": self.optimum.actual_ratio(),
            "opt_hit_ratio": self.optimum.ratio(),
            "ratio_uses": self.optimum.uses,
            "overlap": self.overlap(),
            "peak_device_bytes": stats.traffic.peak_device.get(),
            "peak_host_bytes": stats.traffic.peak_host.get(),
            "peak_rss_bytes": peak_rss().get(),
            "memory": self.memory.json(),
            "logits_xxh3": self.done.logits_hash.map(|hash| format!("{hash:016x}")),
            "interrupted": self.interrupted,
            "stalls": stalls,
            "worst_pages": worst_pages,
            "uses": stats.pager.uses,
            "hits": stats.pager.hits,
            "prefetched": stats.pager.prefetched,
            "late": stats.pager.late,
            "faults": stats.pager.faults,
        });
        if let Value::Object(all) = &mut all {
            all.insert("per_token".into(), self.per_token());
            all.insert("device_bandwidth_bytes_per_s".into(), self.bandwidth.into());
            if self.drafts {
                all.insert("drafts".into(), self.done.drafts.json());
            }
            all.insert("repeats".into(), self.repeats.iter().map(Times::json).collect());
        }
        all
    }

    /// The summary that people read.
    pub fn summary(&self) -> String {
        let stats = &self.stats;
        let mut out = String::new();
        let mut row = |name: &str, value: String| {
            let _ = writeln!(out, "  {name:<22}{value}");
        };
        let seconds = |time: Duration| format!("{:.3} s", time.as_secs_f64());
        let percent = |part: f64| format!("{:.1} %", part * 100.0);
        row("tokens", format!("{} in, {} out", self.prompt_tokens.len(), self.done.tokens.len()));
        row("first token after", seconds(self.done.first_token));
        row(
            "tokens a second",
            format!("{:.2} (median pass {})", self.done.decode_rate(), seconds(self.done.median_pass())),
        );
        if self.drafts {
            let Drafted { lookup, model, time } = &self.done.drafts;
            let of = |held: &Held| format!("{} of {}", held.accepted, held.drafted);
            row("drafts that held", format!("{} by looking up, {} by the draft model", of(lookup), of(model)));
            row("", format!("{} in {} passes of the model's own", seconds(*time), self.done.passes.len()));
        }
        row(
            "computing / waiting",
            format!("{} / {}", seconds(self.done.total.saturating_sub(self.done.waited)), seconds(self.done.waited)),
        );
        let counts = &self.done.counts;
        if counts.passes > 0 {
            let each = |n: u64| format!("{:.1}", n as f64 / self.done.passes.len() as f64);
            row(
                "a token",
                format!(
                    "{} launches, {} graphs of {} nodes, {} waits for the GPU, {} pins",
                    each(counts.launches),
                    each(counts.graph_launches),
                    each(counts.graph_nodes),
                    each(counts.synchronisations),
                    each(counts.pins),
                ),
            );
            let micros = |time: Option<f64>| time.map_or("an unknown time".into(), |s| format!("{:.0} us", s * 1e6));
            let TokenTimes { host, gpu, waiting } = self.done.of_token();
            let stalled = self.stalled().map_or(String::new(), |s| format!(", {} of it for weights", micros(Some(s))));
            let (host, gpu, waiting) = (micros(host), micros(gpu), micros(waiting));
            row("", format!("{host} of the host's processor, {gpu} on the GPU{stalled}, {waiting} waiting for it"));
            let share = self.bandwidth_share().map_or("an unknown part".into(), percent);
            let read = Bytes::new(counts.read.get() / self.done.passes.len().max(1) as u64);
            row("", format!("{read} of the GPU's memory read, at {share} of its bandwidth"));
        }
        for stall in stats.stalls.iter().filter(|stall| stall.count > 0) {
            row("", format!("{} in {} waits: {}", seconds(stall.time), stall.count, stall.name));
        }
        if let Some(worst) = self.worst_pages.first() {
            let (page, tensor, time) = (worst.page.index.get(), &worst.tensor, seconds(worst.time));
            row("", format!("longest for page {page}, {tensor}: {time} in {} waits", worst.count));
        }
        row(
            "budget",
            format!(
                "{} in pages of {}, policy {}",
                self.device_budget,
                Bytes::new(stats.page_size.bytes()),
                stats.policy
            ),
        );
        let settings = &stats.settings;
        row("", format!("pages: {}", settings.page_size.reason));
        row("", format!("{} ahead: {}", settings.lookahead.value, settings.lookahead.reason));
        row("", format!("{} reads ahead at once: {}", settings.depth.value, settings.depth.reason));
        if let Some(asked) = self.device_asked {
            row("", format!("of the {asked} asked for, because the model has no more pages"));
        }
        row(
            "most in use",
            format!(
                "{} device, {} host, {} whole process",
                stats.traffic.peak_device,
                stats.traffic.peak_host,
                peak_rss()
            ),
        );
        row(
            "read from disk",
            format!("{} by {}, {} hidden behind compute", stats.traffic.disk_read, stats.io, percent(self.overlap())),
        );
        if let [first, rest @ ..] = stats.buffered_files.as_slice() {
            let more = if rest.is_empty() { String::new() } else { format!(" and {} more", rest.len()) };
            row("", format!("through the page cache, because O_DIRECT is refused: {}{more}", first.display()));
        }
        if stats.traffic.disk_written > Bytes::ZERO || stats.traffic.link_in > Bytes::ZERO {
            row(
                "moved",
                format!(
                    "{} written, {} up, {} down the link",
                    stats.traffic.disk_written, stats.traffic.link_in, stats.traffic.link_out
                ),
            );
        }
        let uses = stats.pager.uses.max(1) as f64;
        row(
            "page uses",
            format!(
                "{}: {} hit (best possible {}), {} filled ahead, {} late, {} faults",
                stats.pager.uses,
                percent(self.optimum.actual_ratio()),
                percent(self.optimum.ratio()),
                percent(stats.pager.prefetched as f64 / uses),
                percent(stats.pager.late as f64 / uses),
                stats.pager.faults,
            ),
        );
        out
    }
}

fn peak_rss() -> Bytes {
    ProcessMemory::now().map_or(Bytes::ZERO, |memory| memory.peak)
}

/// A file that spans are written to in the Trace Event Format that chrome://tracing and Perfetto read.
#[derive(Debug)]
pub struct Timeline(NewFile);

impl Timeline {
    /// A timeline at `path`, which must not be one of `models`.
    ///
    /// # Errors
    /// As for [`NewFile::create`].
    pub fn create(path: &Path, models: &[Input]) -> Result<Self> {
        NewFile::create(path, "timeline", "--timeline", models).map(Self)
    }

    /// Writes spans, in any order, and where pages were. Overlapping spans of a lane get rows of their own.
    ///
    /// # Errors
    /// `Io` and its kin if the file cannot be written.
    pub fn write(self, mut spans: Vec<Span>, residency: &Residency) -> Result<()> {
        spans.sort_by_key(|span| (span.start, span.duration));
        let failed = |cause| self.0.failed(cause);
        let file = self.0.beside()?;
        let mut out = BufWriter::new(file.as_file());
        let mut rows = TraceRows::default();
        let events = spans.iter().map(|span| serde_json::to_value(rows.event(span)));
        let mut events = events.collect::<serde_json::Result<Vec<Value>>>().map_err(|cause| failed(cause.into()))?;
        for name in rows.names() {
            events.push(serde_json::to_value(name).map_err(|cause| failed(cause.into()))?);
        }
        serde_json::to_writer(
            &mut out,
            &json!({"displayTimeUnit": "ms", "traceEvents": events, "residency": residency}),
        )
        .map_err(|cause| failed(cause.into()))?;
        out.flush().map_err(failed)?;
        drop(out);
        self.0.put(file)
    }
}

/// Writes to standard output, at once.
pub fn write_out(text: &str) -> outcore_llm::Result<()> {
    let mut out = std::io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|cause| {
        let error = outcore::Error::io("cannot write to standard output", cause);
        error.remedy("check where it goes: a reader that ended, or a disk that is full").into()
    })
}
