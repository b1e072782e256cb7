//! A training from its first step, or from where it was left, to its last.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use candle_core::DType as Element;
use clap::ValueEnum;
use outcore::durable::{Durable, DurableOptions};
use outcore::machine::ProcessMemory;
use outcore::store::StoreOptions;
use outcore::{Bytes, DType, Error, ErrorKind, PageSize, PolicyKind, Result, Runtime, Tensor};
use outcore_lab::output::{Input, NewFile};
use outcore_lab::sim::{CaptureFile, CaptureHeader};
use outcore_train::{AdamW, Group, NonFinite, Optimizer, Schedule};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::checkpoint::{Checkpoint, extents};
use crate::file_id::FileId;
use crate::losses::{Losses, hash};
use crate::memory::{bytes, for_pages, work};
use crate::paged::Paged;
use crate::pass::Pass;
use crate::shape::Shape;
use crate::text::Text;

/// Bytes of a page: large enough for the disk's full speed, and small beside a layer.
pub const PAGE: Bytes = Bytes::kib(256);
/// What a training needs in pages at least: a block of the optimizer, a pin of a pass, and what is read ahead.
const LEAST: Bytes = Bytes::new(32 * PAGE.get());
/// Elements of a model that are read at once.
const IMPORTED: usize = 1 << 18;
/// The standard deviation of a new matrix' elements.
const DEVIATION: f32 = 0.02;

/// What a run does about a step whose gradients are infinite or no numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum AtNonFinite {
    /// It ends with an error that names a parameter, and the last commit stays.
    #[default]
    Stop,
    /// It goes on with the next step. The step counts and has its loss, and changes nothing else.
    Skip,
}

/// What a run is given beside what its results depend on.
#[derive(Clone, Debug)]
pub struct Limits {
    /// The folder of the state.
    pub state: PathBuf,
    /// Whether a run may go on from it.
    pub resume: bool,
    /// The step to end with.
    pub steps: u64,
    /// Bytes of a page. A folder keeps its own for good.
    pub page: Bytes,
    /// Memory for pages: [of a limit for the process](Settings::pages_within), or as much as there can be.
    pub budget: Option<Bytes>,
    /// Steps from one commit to the next.
    pub commit_every: u64,
    /// What becomes of a step whose gradients are not finite. A run that was stopped by one may go on and skip it.
    pub non_finite: AtNonFinite,
    /// Where to write which pages each step uses, in order.
    pub capture: Option<PathBuf>,
    /// How files are read and written, in detail: as the runtime chooses unless it is given.
    pub store: Option<StoreOptions>,
}

/// All that the result of a step depends on. It is durable with the state, and the same in every part of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// The model.
    pub shape: Shape,
    /// What it began with, if it was not new.
    pub model: Option<FileId>,
    /// Tokens of a window.
    pub window: usize,
    /// Windows of a step.
    pub batch: usize,
    /// Windows that are computed at once: it decides in which order gradients are added.
    pub micro: usize,
    /// Whether passes read a copy of the parameters in `bf16`, and gradients are added up in `bf16`.
    #[serde(default)]
    pub mixed: bool,
    /// Of the new parameters and of the order of the windows.
    pub seed: u64,
    /// The learning rate after the warm-up.
    pub rate: f64,
    /// Steps over which it rises.
    pub warm_up: u64,
    /// The norm to which gradients are clipped.
    pub clip: f64,
    /// The decay of matrices.
    pub weight_decay: f64,
}

impl Settings {
    /// # Errors
    /// `InvalidArgument` for what is out of range. Rates and norms are the optimizer's to check.
    pub fn check(&self) -> Result<()> {
        self.shape.check()?;
        let sizes =
            [("--window", self.window, 1 << 15), ("--batch", self.batch, 1 << 20), ("--micro", self.micro, 1 << 20)];
        for (what, value, most) in sizes {
            if !(1..=most).contains(&value) {
                let what = format!("{what} is {value}");
                return Err(Error::new(ErrorKind::InvalidArgument, what).remedy(format!("choose 1 to {most}")));
            }
        }
        if !self.batch.is_multiple_of(self.micro) {
            let what = format!("--batch is {}, which is not a multiple of --micro, {}", self.batch, self.micro);
            return Err(Error::new(ErrorKind::InvalidArgument, what).remedy("choose a divisor of --batch"));
        }
        Ok(())
    }

    /// What a limit for the whole process leaves for pages.
    ///
    /// # Errors
    /// Those of [`check`](Self::check). `BudgetTooSmall` with the least that would do.
    pub fn pages_within(&self, limit: Bytes) -> Result<Bytes> {
        self.check()?;
        for_pages(limit, bytes(work(&self.shape, self.window, self.micro).computing()), LEAST)
    }

    fn groups(&self) -> [Group; 2] {
        let schedule = || Schedule::constant(self.rate).warm_up(self.warm_up);
        let with = |weight_decay: f64| Group::new(AdamW { weight_decay, ..AdamW::default() }, schedule());
        let [mut matrices, mut norms] = [with(self.weight_decay), with(0.0)];
        for (name, shape) in self.shape.all() {
            let extents: Vec<u64> = shape.iter().map(|extent| *extent as u64).collect();
            match extents.len() {
                1 => norms = norms.parameter(name, &extents),
                _ => matrices = matrices.parameter(name, &extents),
            }
        }
        [matrices, norms]
    }
}

/// How a run ended.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Steps of all parts of the run, also those that were skipped.
    pub steps: u64,
    /// Steps that were skipped.
    pub skipped_steps: u64,
    /// The mean loss of each.
    pub losses: Vec<f32>,
    /// XXH3-64 over the bits of these, as 16 hexadecimal digits.
    pub losses_xxh3: String,
    /// The generation that is durable.
    pub generation: u64,
    #[serde(flatten)]
    used: Used,
}

/// What a process has used until its last commit; where others follow, until the pass that makes that step.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Used {
    peak_rss_bytes: u64,
    disk_read_bytes: u64,
    disk_written_bytes: u64,
    tokens_per_second: f64,
}

/// What a step has brought.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Its number, from 1.
    pub step: u64,
    /// The mean loss of its tokens, before the parameters changed.
    pub loss: f32,
    /// The norm of its gradients, before they were clipped.
    pub norm: f64,
    /// Tokens a second.
    pub speed: f64,
}

/// What the program has in the folder's note.
#[derive(Serialize, Deserialize)]
struct Note {
    settings: Settings,
    text: FileId,
    /// Steps that were skipped: the optimizer does not count them.
    #[serde(default)]
    skipped: u64,
    used: Used,
}

/// Trains on a text, from a checkpoint or from new parameters, until the last step, or until `stop` is set: then the
/// step that is under way is the last one. Each step is shown to `progress`, and what there is to say to `say`.
///
/// # Errors
/// `InvalidArgument` for settings out of range, for a folder with a run if none is to be resumed, and for a run with
/// other settings or another text: the message names the first that differs. So for gradients that are not finite,
/// unless such steps are [skipped](AtNonFinite::Skip). `BudgetTooSmall` with the memory that is needed. Those of the
/// text, of the runtime and of the optimizer; what was committed before stays.
pub fn run(
    text: &Path,
    checkpoint: Option<Checkpoint>,
    settings: &Settings,
    limits: &Limits,
    stop: &AtomicBool,
    mut say: impl FnMut(&str),
    mut progress: impl FnMut(&Progress),
) -> Result<Report> {
    settings.check()?;
    // Before a run that is too long to find out at its end.
    let capture = limits.capture.as_deref().map(|path| {
        let others = [Input { path: text.to_owned(), is: "it is the text" }];
        NewFile::create(path, "capture", "--capture", &others)
    });
    let capture = capture.transpose()?;
    let text = {
        let tokenizer = checkpoint.as_ref().map(Checkpoint::tokenizer).transpose()?;
        let beside = limits.state.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let encoder = tokenizer.as_ref().map(|tokenizer| (tokenizer, settings.shape.vocabulary, beside));
        Text::open(text, settings.window, settings.seed, encoder)?
    };
    let began = Instant::now();
    let runtime = open(settings, limits)?;
    let folder = runtime.open_durable(&limits.state, DurableOptions::default())?;
    let mut builder = Optimizer::builder(&runtime).clip(settings.clip).non_finite(NonFinite::Skip);
    for group in settings.groups() {
        builder = builder.group(group);
    }
    if settings.mixed {
        builder = builder.gradients(DType::BF16).with_working_copy();
    }
    let before = kept(&folder, &limits.state)?;
    let is_new = match &before {
        Some(_) if !limits.resume => {
            let what = format!("{} has a training already", limits.state.display());
            return Err(Error::new(ErrorKind::InvalidArgument, what)
                .remedy("give --resume to go on with it, or another folder"));
        }
        Some(note) => {
            settings.compare(note, text.id())?;
            false
        }
        None => true,
    };
    if is_new && limits.resume {
        say("the folder has no training: it begins at step 0");
    }
    let optimizer = builder.open_in(&folder)?;
    let mut skipped = before.as_ref().map_or(0, |note| note.skipped);
    let made = optimizer.steps() + skipped;
    if made > limits.steps {
        let what = format!("the training has made {made} steps, and {} are asked for", limits.steps);
        return Err(Error::new(ErrorKind::InvalidArgument, what).remedy("ask for more (--steps)"));
    }
    if !is_new {
        say(&format!("it goes on from step {made}, generation {}", folder.generation().get()));
    }
    let micros = settings.batch / settings.micro;
    let tokens = settings.micro * settings.window;
    let mut paged = Paged::new(&runtime, optimizer, &settings.shape, micros, tokens)?;
    if is_new {
        match &checkpoint {
            Some(checkpoint) => import(&paged, settings, checkpoint)?,
            None => initialize(&paged, settings)?,
        }
        paged.optimizer.refresh_working_copy()?;
    }
    // Its headers take memory that is not counted.
    drop(checkpoint);
    // A capture names all segments before the first use.
    let known = if capture.is_some() { limits.steps } else { made };
    let (losses, pass) =
        (Losses::new(&runtime, &folder, made..known)?, Pass::new(&settings.shape, settings.window, Element::F32)?);
    let mut capture =
        capture.map(|file| CaptureFile::begin(file, &captured(&runtime, &paged, &folder)?)).transpose()?;
    // What came before the first step is none of its uses.
    if capture.is_some() {
        runtime.observe().take_uses();
    }
    let mut used = before.map_or(Used::default(), |note| note.used);
    let mut made_here = 0;
    let mut one = |step: u64, paged: &mut Paged| -> Result<bool> {
        let of_step = Instant::now();
        let micros = text.step(step, settings.batch, settings.micro)?;
        let loss = pass.run(paged, &micros)? as f32;
        losses.set(step, loss)?;
        made_here += 1;
        let tokens = (settings.batch * settings.window) as f64;
        let is_last = step + 1 == limits.steps || stop.load(Ordering::Relaxed);
        let is_committed = !is_last && (step + 1).is_multiple_of(limits.commit_every.max(1));
        // The next pass makes it, where it needs what it changes.
        let begun = paged.begin_step()?;
        if let Some(name) = &begun.skipped {
            let what = format!("the gradients of {name:?} are infinite or no numbers");
            if limits.non_finite == AtNonFinite::Stop {
                return Err(Error::new(ErrorKind::InvalidArgument, format!("in step {} {what}", step + 1))
                    .remedy("begin anew with a lower --rate, or go on without such steps: --non-finite skip"));
            }
            skipped += 1;
            say(&format!("step {} is skipped: {what}", step + 1));
        }
        let mut note = || -> Result<Value> {
            used = Used::now(tokens * made_here as f64 / began.elapsed().as_secs_f64())?;
            Ok(json!(Note { settings: settings.clone(), text: text.id(), skipped, used }))
        };
        if is_committed {
            paged.commit_with_step(note()?);
        }
        if is_last {
            paged.end_step()?;
            paged.optimizer.commit(&note()?)?;
        }
        if let Some(capture) = &mut capture {
            capture.pass(&runtime)?;
        }
        let norm = begun.norm;
        progress(&Progress { step: step + 1, loss, norm, speed: tokens / of_step.elapsed().as_secs_f64() });
        Ok(is_last)
    };
    for step in made..limits.steps {
        match one(step, &mut paged) {
            Ok(false) => {}
            Ok(true) => break,
            Err(error) => {
                // The step before was shown: it is kept, if that can be.
                let _ = paged.end_step();
                return Err(error);
            }
        }
    }
    let steps = paged.optimizer.steps() + skipped;
    if let Some(capture) = capture {
        capture.finish(&runtime, steps < limits.steps)?;
    }
    let all = losses.first(steps)?;
    let (losses_xxh3, generation) = (format!("{:016x}", hash(&all)), folder.generation().get());
    drop((paged, losses, folder));
    runtime.close()?;
    Ok(Report { steps, skipped_steps: skipped, losses: all, losses_xxh3, generation, used })
}

fn open(settings: &Settings, limits: &Limits) -> Result<Runtime> {
    let Settings { shape, window, batch, micro, .. } = settings;
    let vectors = work(shape, *window, *micro).kept(*batch as u64);
    let all = bytes((16 * u128::from(shape.parameters()) + u128::from(LEAST.get())).saturating_add(vectors));
    let page = PageSize::new(limits.page)?;
    let mut builder = Runtime::builder().page_size(page).device_budget(limits.budget.unwrap_or(all));
    if let Some(store) = &limits.store {
        builder = builder.store(store.clone());
    }
    builder.policy(PolicyKind::Plan).keep_uses(limits.capture.is_some()).open()
}

/// What a capture says of the training: its segments, by what they hold.
fn captured(runtime: &Runtime, paged: &Paged, folder: &Durable) -> Result<CaptureHeader> {
    let parameters = paged.optimizer.names().collect::<HashSet<_>>();
    let class = |tensor: &Tensor| if parameters.contains(tensor.name()) { "parameters" } else { "states" };
    let durable = folder.tensors().into_iter().map(|tensor| (class(&tensor), tensor));
    let mut beside = vec![("activations", paged.vectors().clone())];
    if let Some(name) = paged.optimizer.names().next() {
        beside.push(("gradients", paged.optimizer.gradients_of(name)?));
        beside.extend(paged.optimizer.working_copy(name).ok().map(|tensor| ("working copy", tensor)));
    }
    Ok(CaptureHeader::of_tensors(runtime, "a training", durable.chain(beside)))
}

/// What a run has left in the folder; `None` if there is none.
fn kept(folder: &Durable, path: &Path) -> Result<Option<Note>> {
    let bytes = folder.note();
    if bytes.is_empty() {
        return Ok(None);
    }
    let note: Value = serde_json::from_slice(&bytes).map_err(|_| foreign(path))?;
    match &note["program"] {
        // An optimizer that was made, and no step of a training.
        Value::Null if folder.generation().get() == 0 => Ok(None),
        program => serde_json::from_value(program.clone()).map(Some).map_err(|_| foreign(path)),
    }
}

fn foreign(path: &Path) -> Error {
    Error::new(ErrorKind::Format, format!("{} has the state of another program", path.display()))
        .remedy("choose another folder")
}

impl Settings {
    /// Whether a run with these settings goes on with what another one has left.
    fn compare(&self, note: &Note, text: FileId) -> Result<()> {
        let differs = |what: &str, has: &Value, given: &Value| {
            let what = format!("the training in the folder has {what} {has}, and {given} is given");
            Err(Error::new(ErrorKind::InvalidArgument, what).remedy("give what it began with, or another folder"))
        };
        let (has, given) = (json!(note.settings), json!(self));
        for (name, given) in given.as_object().into_iter().flatten() {
            if has[name] != *given {
                return differs(name, &has[name], given);
            }
        }
        if note.text != text {
            return differs("the text", &json!(note.text), &json!(text));
        }
        Ok(())
    }
}

/// The parameters of a model that is there already.
fn import(paged: &Paged, settings: &Settings, checkpoint: &Checkpoint) -> Result<()> {
    for parameter in settings.shape.all() {
        let (rows, columns) = extents(&parameter);
        let tensor = paged.optimizer.parameter(&parameter.0)?.reshape(&[rows as u64, columns as u64])?;
        let at_once = (IMPORTED / columns).max(1);
        for first in (0..rows).step_by(at_once) {
            let of = first..(first + at_once).min(rows);
            let values = checkpoint.rows(&parameter, of.clone())?;
            paged.write(&tensor.rows(of.start as u64..of.end as u64)?, values)?;
        }
    }
    Ok(())
}

/// New parameters: ones for norms, and for matrices numbers from a uniform distribution around 0.
fn initialize(paged: &Paged, settings: &Settings) -> Result<()> {
    for (number, (name, shape)) in settings.shape.all().into_iter().enumerate() {
        let tensor = paged.optimizer.parameter(&name)?;
        if shape.len() == 1 {
            paged.write(&tensor, std::iter::repeat(1.0))?;
            continue;
        }
        let mut random = ChaCha8Rng::seed_from_u64(settings.seed);
        random.set_stream(number as u64);
        // The deviation of a uniform distribution is its half width over the root of 3.
        let half = DEVIATION * 3f32.sqrt();
        let uniform = || (random.next_u32() >> 8) as f32 / (1 << 24) as f32;
        paged.write(&tensor, std::iter::repeat_with(uniform).map(|part| (2.0 * part - 1.0) * half))?;
    }
    Ok(())
}

impl Used {
    fn now(tokens_per_second: f64) -> Result<Self> {
        const FILE: &str = "/proc/self/io";
        let text = std::fs::read_to_string(FILE).map_err(|cause| Error::io(format!("read {FILE}"), cause))?;
        let field =
            |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok()).unwrap_or_default();
        Ok(Self {
            peak_rss_bytes: ProcessMemory::now()?.peak.get(),
            disk_read_bytes: field("read_bytes:"),
            disk_written_bytes: field("write_bytes:"),
            tokens_per_second,
        })
    }
}
