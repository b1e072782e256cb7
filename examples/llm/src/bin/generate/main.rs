//! `generate`: runs a model, in less memory than its weights take if need be.

mod args;
mod device;
mod generation;
mod interrupt;
mod open;
mod progress;
mod report;
mod residency;
mod source;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use clap::Parser;
use outcore::Bytes;
use outcore_lab::output::{Input, NewFile};
use outcore_lab::sim::{CaptureFile, CaptureHeader};
use outcore_llm::{
    ChatTemplate, Config, Decoder, DraftFiles, Error, Message, ModelFiles, PagedWeights, Result, Tokenizer, budget,
};

use args::Args;
use generation::Task;
use interrupt::{INTERRUPTED, Interrupt};
use report::{Memory, Run, Timeline, write_out};
use residency::Watch;

/// How many pages a run reports, of those that were waited for longest.
const WORST_PAGES: usize = 16;

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn".into()))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(wrong) if wrong.use_stderr() => return fail(&args::in_one_line(&wrong)),
        Err(help) => {
            let _ = help.print();
            return ExitCode::SUCCESS;
        }
    };
    let interrupt = Arc::new(Interrupt::default());
    let handler = interrupt.clone();
    if let Err(error) = ctrlc::set_handler(move || handler.ask()) {
        tracing::warn!(%error, "an interrupt will end the program without a summary");
    }
    let run = match run(&args, &interrupt) {
        Ok(run) => run,
        Err(error @ (Error::MissingTensor(_) | Error::Shape { .. })) => {
            return fail(&format!("{}: {}", args.model.display(), error.in_full()));
        }
        Err(error) => return fail(&error.in_full()),
    };
    // Where nobody reads the summary there is nobody to tell.
    let _ = write!(std::io::stderr(), "\n{}", run.summary());
    if args.json
        && let Err(error) = write_out(&format!("{}\n", run.json()))
    {
        return fail(&error.in_full());
    }
    if run.interrupted { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS }
}

fn fail(why: &str) -> ExitCode {
    let _ = writeln!(std::io::stderr(), "generate: {why}");
    ExitCode::FAILURE
}

/// The prompt's tokens.
fn prompt_tokens(args: &Args, files: &ModelFiles, tokenizer: Option<&Tokenizer>) -> Result<Vec<u32>> {
    if let Some(ids) = &args.prompt_tokens {
        return Ok(ids.clone());
    }
    let text = args.prompt.as_deref().unwrap_or_default();
    let Some(tokenizer) = tokenizer else {
        return Err(Error::Unsupported("the model has no tokenizer: give the prompt as --prompt-tokens".into()));
    };
    if !args.chat {
        return tokenizer.encode(text, true);
    }
    let template = ChatTemplate::load(files, tokenizer)?
        .ok_or_else(|| Error::Unsupported("the model has no chat template: leave --chat out".into()))?;
    tokenizer.encode_chat(&template.render(&[Message::new("user", text)], true)?)
}

fn run(args: &Args, interrupt: &Interrupt) -> Result<Run> {
    args.check()?;
    // Opened before a model is fetched: most of what can be wrong with a GPU is known at once.
    let gpu = open::gpu(args)?;
    let files = ModelFiles::open(source::resolve(&args.model)?)?;
    let outputs = Outputs::create(args, &files)?;
    let (prompt, decoder) = prompt(args, &files)?;
    let config = Config::new(&files)?;
    let pass_bytes = Bytes::new(outcore_llm::pass_bytes(&files)?);
    check_prompt(&prompt, args.tokens, &config)?;
    let context = prompt.len() + args.tokens;

    let draft = open::draft(args, &files, &config, context)?;
    let (runtime, budgets) = open::runtime(args, &files, &config, &prompt, gpu.as_deref(), draft.as_ref())?;
    let draft = draft.map(DraftFiles::load).transpose()?;
    let page_size = runtime.stats().page_size;
    let opened = Instant::now();
    let model = runtime.open_parsed(files.header().clone())?;
    let about = format!("generate --model {} --device-budget {}", source::name(&args.model), budgets.device);
    let capture = outputs.capture.map(|file| {
        let header = model.header();
        let segment = |file| {
            let tensor = header.tensors.iter().find(|tensor| tensor.file == file)?;
            Some(runtime.observe().snapshot(&model.tensor(&tensor.name).ok()?).id)
        };
        CaptureFile::begin(file, &CaptureHeader::of_model(header, page_size, &about, segment))
    });
    let capture = capture.transpose()?;
    let weights = PagedWeights::open_in_steps(&runtime, &model, &files, args.step)?;
    let weights = Arc::new(weights.cancelled_by(interrupt.asked.clone()));
    let bandwidth = gpu.as_ref().and_then(|gpu| gpu.bandwidth());
    let keys_values = budget::keys_values(&config, open::plain_context(args, context), args.kv_type());
    let memory = Memory::of(&files, page_size, keys_values, budgets.working);
    let size = files.header().files.iter().fold(Bytes::ZERO, |sum, file| sum + Bytes::new(file.len));

    let watch = outputs.timeline.is_some().then(|| Watch::start(&runtime, &model, page_size, opened));
    let task = Task {
        args,
        runtime: &runtime,
        interrupt,
        prompt: &prompt,
        decoder: decoder.as_ref(),
        draft_model: draft.as_ref(),
        pass: budgets.pass,
        first_pass: size.min(budgets.device),
    };
    let (done, repeats) = open::run(&task, files, weights, gpu, context, capture)?;
    if let (Some(timeline), Some(watch)) = (outputs.timeline, watch) {
        timeline.write(runtime.observe().take_timeline(), &watch.finish())?;
        let dropped = runtime.stats().spans_dropped;
        if dropped > 0 {
            tracing::warn!(dropped, "the timeline ends before the run does: there was no room for more spans");
        }
    }
    let (stats, optimum, worst_pages) =
        (runtime.stats(), runtime.observe().optimum(), runtime.observe().worst_pages(WORST_PAGES));
    // What failed outside of the calls is reported only here.
    runtime.close()?;
    Ok(Run {
        model: args.model.to_string_lossy().into_owned(),
        device: args.device.to_string(),
        device_budget: budgets.device,
        device_asked: budgets.device_asked,
        host_budget: budgets.host,
        memory,
        pass_bytes,
        bandwidth,
        times_stalls: args.time_stalls,
        prompt_tokens: prompt,
        drafts: args.draft_model.is_some(),
        done,
        repeats,
        interrupted: interrupt.asked(),
        stats,
        optimum,
        worst_pages,
    })
}

/// The files that a run writes.
struct Outputs {
    timeline: Option<Timeline>,
    capture: Option<NewFile>,
}

impl Outputs {
    /// Creates them before the run, which is too long to find out only at its end that a file cannot be written.
    fn create(args: &Args, files: &ModelFiles) -> Result<Self> {
        let of_model = |path| Input { path, is: "it is a file of the model" };
        let inputs: Vec<Input> = files.all_paths().into_iter().map(of_model).collect();
        let timeline = args.timeline.as_deref().map(|path| Timeline::create(path, &inputs)).transpose()?;
        let capture = args.capture.as_deref().map(|path| {
            let file = NewFile::create(path, "capture", "--capture", &inputs)?;
            args.timeline.as_deref().map_or(Ok(()), |timeline| file.is_not(timeline))?;
            Ok::<_, outcore::Error>(file)
        });
        Ok(Self { timeline, capture: capture.transpose()? })
    }
}

/// The prompt's tokens, and what turns tokens into text.
fn prompt(args: &Args, files: &ModelFiles) -> Result<(Vec<u32>, Option<Decoder>)> {
    let tokenizer = match (Tokenizer::load(files), &args.prompt_tokens) {
        (Ok(tokenizer), _) => Some(tokenizer),
        // With a prompt of ids, ids are printed, and no tokenizer is needed.
        (Err(_), Some(_)) => None,
        (Err(error), None) => return Err(error),
    };
    let prompt = prompt_tokens(args, files, tokenizer.as_ref())?;
    // The memory that an encoder takes is of more use for pages.
    Ok((prompt, tokenizer.map(Tokenizer::into_decoder)))
}

fn check_prompt(prompt: &[u32], tokens: usize, config: &Config) -> Result<()> {
    let (context, vocab) = (config.context, config.vocab);
    if prompt.is_empty() {
        return Err(Error::Invalid("the prompt has no token: give at least one".into()));
    }
    if let Some(id) = prompt.iter().find(|id| **id as usize >= vocab) {
        return Err(Error::Invalid(format!(
            "there is no token {id}: the model has ids 0 to {}",
            vocab.saturating_sub(1)
        )));
    }
    if prompt.len() >= context {
        return Err(Error::Invalid(format!(
            "the prompt has {} tokens, but the model's context is {context}: shorten it",
            prompt.len()
        )));
    }
    if tokens > context - prompt.len() {
        return Err(Error::Invalid(format!(
            "{} tokens of prompt and {tokens} more exceed the model's context of {context}: ask for at most {}",
            prompt.len(),
            context - prompt.len()
        )));
    }
    Ok(())
}
