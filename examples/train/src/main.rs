//! The program `train`.

mod chart;

use std::io::{IsTerminal, Write, stderr, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use outcore::{Bytes, Error, ErrorKind, Result};
use train::checkpoint::Checkpoint;
use train::run::{AtNonFinite, Limits, PAGE, Progress, Report, Settings, run};
use train::shape::Shape;

/// Trains a model on a text, in less memory than its state has. Killed at any time, it goes on from its
/// last commit with --resume, with the same losses.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// The text. It may be larger than memory.
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// The folder of the state: a new one, or with --resume that of a run.
    #[arg(long, value_name = "FOLDER")]
    state: PathBuf,
    /// The step to end with.
    #[arg(long, value_name = "N", default_value_t = 12)]
    steps: u64,
    /// Of the new parameters and of the order of the windows.
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// Memory of the process, such as 200MiB: as much as it needs if this is not given. Losses do not depend on it.
    #[arg(long, value_name = "SIZE")]
    memory: Option<Bytes>,
    /// Begin with this model: a Llama in a GGUF file, or a folder of safetensors. It is trained in f32.
    #[arg(long, value_name = "MODEL", conflicts_with_all = ["layers", "width", "heads", "kv_heads", "hidden"])]
    model: Option<PathBuf>,
    /// Go on from the folder's last commit.
    #[arg(long)]
    resume: bool,
    /// Steps from one commit to the next.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    commit_every: u64,
    /// What to do about a step whose gradients are infinite or no numbers.
    #[arg(long, value_enum, default_value_t)]
    non_finite: AtNonFinite,
    /// Print one JSON object at the end.
    #[arg(long)]
    json: bool,
    /// Write the losses of all steps to a file, a line each.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Draw the losses of all steps into an SVG file.
    #[arg(long, value_name = "FILE")]
    chart: Option<PathBuf>,
    /// Write which pages each step uses, in order, for `outcore policies`.
    #[arg(long, value_name = "FILE")]
    capture: Option<PathBuf>,
    /// Layers of the model.
    #[arg(long, default_value_t = 10)]
    layers: usize,
    /// Elements of a token's vector.
    #[arg(long, default_value_t = 512)]
    width: usize,
    /// Heads of queries.
    #[arg(long, default_value_t = 8)]
    heads: usize,
    /// Heads of keys and values.
    #[arg(long, default_value_t = 8)]
    kv_heads: usize,
    /// Elements inside the feed-forward network.
    #[arg(long, default_value_t = 1408)]
    hidden: usize,
    /// Tokens of a window.
    #[arg(long, default_value_t = 256)]
    window: usize,
    /// Windows of a step.
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// Windows that are computed at once: fewer take less memory.
    #[arg(long, default_value_t = 1)]
    micro: usize,
    /// Compute with a copy of the parameters in bf16, and add gradients up in bf16: fewer bytes move.
    #[arg(long)]
    mixed: bool,
    /// The learning rate.
    #[arg(long, default_value_t = 1e-3)]
    rate: f64,
    /// Steps over which the rate rises.
    #[arg(long, default_value_t = 4)]
    warm_up: u64,
    /// The norm to which gradients are clipped.
    #[arg(long, default_value_t = 1.0)]
    clip: f64,
    /// The decay of matrices.
    #[arg(long, default_value_t = 0.1)]
    weight_decay: f64,
}

fn main() -> ExitCode {
    let args = Args::parse();
    match train(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            let _ = writeln!(stderr(), "train: {why}");
            ExitCode::FAILURE
        }
    }
}

fn train(args: &Args) -> Result<()> {
    let checkpoint = args.model.as_deref().map(Checkpoint::open).transpose()?;
    let new = || Shape {
        vocabulary: 256,
        layers: args.layers,
        width: args.width,
        heads: args.heads,
        kv_heads: args.kv_heads,
        hidden: args.hidden,
        rope_base: 10_000.0,
        epsilon: 1e-5,
        tied: false,
    };
    let settings = Settings {
        shape: checkpoint.as_ref().map_or_else(new, |checkpoint| checkpoint.shape().clone()),
        model: checkpoint.as_ref().map(Checkpoint::id),
        window: args.window,
        batch: args.batch,
        micro: args.micro,
        mixed: args.mixed,
        seed: args.seed,
        rate: args.rate,
        warm_up: args.warm_up,
        clip: args.clip,
        weight_decay: args.weight_decay,
    };
    let limits = Limits {
        state: args.state.clone(),
        resume: args.resume,
        steps: args.steps,
        page: PAGE,
        budget: args.memory.map(|limit| settings.pages_within(limit)).transpose()?,
        commit_every: args.commit_every,
        non_finite: args.non_finite,
        capture: args.capture.clone(),
        store: None,
    };
    let stop = Arc::new(AtomicBool::new(false));
    let asked = stop.clone();
    // Without a handler an interrupt ends the process at once: the last commit stays.
    let _ = ctrlc::set_handler(move || asked.store(true, Ordering::Relaxed));
    let bar = ProgressBar::new(args.steps);
    if let Ok(style) = ProgressStyle::with_template("step {pos}/{len} {bar:30} {msg}") {
        bar.set_style(style);
    }
    let say = |what: &str| bar.suspend(|| drop(writeln!(stderr(), "train: {what}")));
    let show = |at: &Progress| {
        let Progress { step, loss, norm, speed } = *at;
        let message = format!("loss {loss:.4}, norm {norm:.2}, {speed:.1} tokens/s");
        if !stderr().is_terminal() {
            let _ = writeln!(stderr(), "step {step}/{}: {message}", args.steps);
        }
        bar.set_position(step);
        bar.set_message(message);
    };
    let report = run(&args.text, checkpoint, &settings, &limits, &stop, say, show);
    bar.finish_and_clear();
    let report = report?;
    if let Some(path) = &args.csv {
        let lines = report.losses.iter().enumerate().map(|(at, loss)| format!("{},{loss}\n", at + 1));
        let text = std::iter::once("step,loss\n".to_owned()).chain(lines).collect::<String>();
        write(path, &text)?;
    }
    if let Some(path) = &args.chart {
        let text = chart::svg(&report.losses).map_err(|cause| {
            Error::new(ErrorKind::Internal, format!("the losses were not drawn: {cause}")).remedy("take --csv")
        })?;
        write(path, &text)?;
    }
    print(args, &report).map_err(|cause| Error::io("write the report", cause))
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).map_err(|cause| Error::io(format!("write {}", path.display()), cause))
}

fn print(args: &Args, report: &Report) -> std::io::Result<()> {
    let mut out = stdout().lock();
    if args.json {
        return writeln!(out, "{}", serde_json::to_string(report)?);
    }
    let Report { steps, skipped_steps, losses, generation, .. } = report;
    let last = losses.last().copied().unwrap_or_default();
    let skipped = if *skipped_steps == 0 { String::new() } else { format!(", {skipped_steps} of them skipped") };
    writeln!(
        out,
        "{steps} steps{skipped}, loss {last:.4}; durable as generation {generation} of {}",
        args.state.display()
    )
}
