//! The optimizer: parameters, what is kept of them, and steps.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::thread::available_parallelism;

use outcore::durable::{Durable, Generation, TensorSpec};
use outcore::pin::Walker;
use outcore::policy::SegmentClass;
use outcore::{DType, Error, ErrorKind, Result, Runtime, Tensor};
use serde_json::Value;

use crate::errors::invalid;
use crate::gradients::Gradients;
use crate::group::{Group, most_states};
use crate::layout::{Layout, Parameter, block_of};
use crate::note::Note;
use crate::options::{NonFinite, OptimizerBuilder};
use crate::paged::{Paged, Pass, Used};
use crate::rule::Moment;
use crate::sweep::{Job, Sweep, Update};

/// A place in the order of a pass.
#[derive(Clone, Debug)]
pub enum Planned {
    /// The program uses a tensor.
    Use(Tensor),
    /// It [updates](Optimizer::update) a parameter of this name.
    Update(String),
}

/// A step that was made, or skipped.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Step {
    /// Its number, from 1. A step that was skipped has none of its own: this is that of the step before.
    pub number: u64,
    /// The norm of the gradients of all parameters, before they were clipped.
    pub norm: f64,
    /// A parameter with gradients that are infinite or no numbers, for which the step was skipped.
    pub skipped: Option<String>,
}

/// Parameters with gradients and what a [rule](crate::Rule) keeps of them, paged by a runtime.
///
/// A program adds gradients as it computes them, and calls [`step`](Self::step) when it has them all. Parameters,
/// states and gradients may together exceed the memory: a step brings them up block by block, updates them in one pass,
/// and each dirty page is written once. It ends where the next step begins, so that what memory holds then is used
/// first.
///
/// The result does not depend on budgets, page sizes, threads or policies: each element is computed from its own.
pub struct Optimizer {
    paged: Paged,
    folder: Option<Durable>,
    /// By name, also those that are tied.
    by_name: HashMap<String, usize>,
    clip: Option<f64>,
    non_finite: NonFinite,
    note: Note,
    /// What the program said with the last commit.
    program: Value,
    /// A step that has begun, or failed on its way.
    unfinished: Option<Sweep>,
}

impl std::fmt::Debug for Optimizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Optimizer")
            .field("parameters", &self.paged.layout.parameters.len())
            .field("elements", &self.paged.layout.positions)
            .field("steps", &self.note.step)
            .finish_non_exhaustive()
    }
}

impl Optimizer {
    /// A builder of an optimizer whose tensors are this runtime's.
    pub fn builder(runtime: &Runtime) -> OptimizerBuilder {
        OptimizerBuilder::new(runtime)
    }

    fn open(mut options: OptimizerBuilder, folder: Option<Durable>) -> Result<Self> {
        let page = options.runtime.stats().page_size;
        // A segment of states has those of a number of parameters from the first on, so their positions are the same.
        options.groups.sort_by_key(|group| std::cmp::Reverse(group.rule.states().len()));
        let device = options.device(block_of(page))?;
        let OptimizerBuilder { runtime, groups, tied, gradients, has_working_copy, clip, non_finite, threads, .. } =
            options;
        let order = groups.iter().enumerate().flat_map(|(number, group)| {
            group.parameters.iter().map(move |(name, shape)| (name.clone(), shape.clone(), number))
        });
        let mut layout = Layout::new(order, page)?;
        let mut by_name: HashMap<String, usize> = HashMap::new();
        by_name.extend(layout.parameters.iter().enumerate().map(|(at, parameter)| (parameter.name.clone(), at)));
        for (name, of) in tied {
            let known = by_name.get(&of).copied();
            by_name.extend(known.map(|at| (name, at)));
        }
        let (kept, note, program) = match &folder {
            Some(folder) => of_folder(folder, &layout, &groups)?,
            None => (in_scratch(&runtime, &layout, &groups)?, Note::new(&groups, &layout), Value::Null),
        };
        layout.divide();
        let gradients = Gradients::new(&runtime, &layout, gradients, device.clone())?;
        let working = has_working_copy.then(|| new_working_copy(&runtime, &layout)).transpose()?;
        let walker = runtime.walker()?;
        let threads = threads.or_else(|| available_parallelism().ok()).unwrap_or(NonZeroUsize::MIN);
        let pass = Pass::Between(Vec::new());
        let paged = Paged { runtime, layout, groups, kept, gradients, working, pass, walker, device, threads };
        paged.declare()?;
        let mut this = Self { paged, folder, by_name, clip, non_finite, note, program, unfinished: None };
        this.refresh_working_copy()?;
        Ok(this)
    }

    fn find(&self, name: &str) -> Result<(usize, &Parameter)> {
        let known = self.by_name.get(name).map(|at| (*at, &self.paged.layout.parameters[*at]));
        known.ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("the optimizer has no parameter {name:?}"))
                .remedy("use a name that a group or `tied` has")
        })
    }

    /// The parameters' names, in the order of a step.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.paged.layout.parameters.iter().map(|parameter| parameter.name.as_str())
    }

    /// A parameter, in `f32`. A new one is zeros until the program writes it. Of a working copy, the program makes
    /// [a new one](Self::refresh_working_copy) after that.
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound).
    pub fn parameter(&self, name: &str) -> Result<Tensor> {
        let (at, parameter) = self.find(name)?;
        self.paged.kept[at][0].reshape(&parameter.shape)
    }

    /// A parameter in `bf16`, rounded to nearest, as of the last step.
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound), also if the optimizer has no working copy.
    pub fn working_copy(&self, name: &str) -> Result<Tensor> {
        let (_, parameter) = self.find(name)?;
        let working = self.paged.working.as_ref().ok_or_else(|| {
            Error::new(ErrorKind::NotFound, "the optimizer has no working copy")
                .remedy("open it with `with_working_copy`")
        })?;
        working.rows(parameter.first..parameter.first + parameter.elements)?.reshape(&parameter.shape)
    }

    /// The gradients of a parameter, as the program names them in [`plan_pass`](Self::plan_pass). What their bytes are
    /// is the optimizer's alone to know.
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound).
    pub fn gradients_of(&self, name: &str) -> Result<Tensor> {
        let (_, parameter) = self.find(name)?;
        self.paged.gradients.tensor().rows(parameter.first..parameter.first + parameter.elements)
    }

    /// The walker of the optimizer's pins: for those of a program that has [planned](Self::plan_pass) them.
    pub fn walker(&self) -> &Walker {
        &self.paged.walker
    }

    /// Declares what the program uses between two steps, in order: parameters and tensors of its own, which it pins
    /// [of the optimizer's walker](Self::walker), and [gradients](Self::gradients_of) where it accumulates them. So
    /// passes and steps are one order, and while a pass runs nothing is read ahead for the step that would have to
    /// leave again. Bits do not depend on it. A [roll back](Self::rollback) withdraws the plan.
    ///
    /// # Errors
    /// None for tensors of the optimizer's runtime; those of other runtimes are left out.
    pub fn plan_pass(&mut self, order: &[Tensor]) -> Result<()> {
        self.paged.pass = Pass::Between(order.to_vec());
        self.paged.declare()
    }

    /// [`plan_pass`](Self::plan_pass) for a program that [updates](Self::update) parameters while it uses them: also
    /// where it does. Blocks that it updates nowhere count as updated at the end.
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound) for a parameter that it does not have.
    pub fn plan_pass_with_updates(&mut self, order: &[Planned]) -> Result<()> {
        let blocks = self.paged.layout.blocks.len();
        let mut is_planned = vec![false; blocks];
        let mut all = Vec::with_capacity(order.len() + blocks);
        let mut add = |blocks: Range<usize>, all: &mut Vec<Used>| {
            for block in blocks {
                if !std::mem::replace(&mut is_planned[block], true) {
                    all.push(Used::Block(block));
                }
            }
        };
        for planned in order {
            match planned {
                Planned::Use(tensor) => all.push(Used::Tensor(tensor.clone())),
                Planned::Update(name) => {
                    let (number, parameter) = self.find(name)?;
                    add(self.paged.layout.blocks_with(number, 0..parameter.elements), &mut all);
                }
            }
        }
        add(0..blocks, &mut all);
        self.paged.pass = Pass::With(all);
        self.paged.declare()
    }

    /// Makes the working copy anew, after the program has written parameters.
    ///
    /// # Errors
    /// Those of pins.
    pub fn refresh_working_copy(&mut self) -> Result<()> {
        if self.paged.working.is_none() {
            return Ok(());
        }
        let blocks = self.paged.layout.blocks.len();
        Sweep::new(blocks, Job::Copy).run(&self.paged, 0..blocks, false)
    }

    /// Adds `values` times `factor` to the gradient of a parameter, from its element `first` on. What several threads
    /// add to one element is rounded in the order in which they come. The thread may hold no guard of these gradients.
    ///
    /// If it fails, some of the values may have been added: then [`step`](Self::step) is refused until
    /// [`drop_gradients`](Self::drop_gradients).
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound) for an unknown name; [`InvalidArgument`](ErrorKind::InvalidArgument) for
    /// elements that the parameter does not have, and while a step is under way; those of pins.
    pub fn accumulate(&self, name: &str, first: u64, values: &[f32], factor: f32) -> Result<()> {
        let (number, parameter) = self.find(name)?;
        self.is_between_steps()?;
        if first.checked_add(values.len() as u64).is_none_or(|end| end > parameter.elements) {
            let (given, has) = (values.len(), parameter.elements);
            let what =
                format!("gradients of {given} elements from {first} on were given for {name:?}, which has {has}");
            return Err(invalid(what, "give those of its elements only"));
        }
        let Paged { layout, gradients, walker, pass, .. } = &self.paged;
        // Without a plan for passes they are no part of the walker's order.
        let walker = (!pass.is_empty()).then_some(walker);
        gradients.accumulate(layout, number, (first, values), factor, walker)
    }

    /// Drops what was accumulated since the last step.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) while a step is under way, which needs it.
    pub fn drop_gradients(&mut self) -> Result<()> {
        self.is_between_steps()?;
        self.paged.gradients.forget();
        Ok(())
    }

    fn is_between_steps(&self) -> Result<()> {
        if self.unfinished.is_none() {
            return Ok(());
        }
        Err(invalid("a step is under way, or has failed".into(), "call `end_step`, `step` again, or `rollback`"))
    }

    /// How many steps were made.
    pub fn steps(&self) -> u64 {
        self.note.step
    }

    /// Updates all parameters by the gradients times `factor`, which undoes a scale of the loss or takes an average.
    /// The gradients are used up by that. Elements to which nothing was added since the last step have gradients of 0.
    ///
    /// If it fails while it updates, parts of the parameters are of the next step already. They are remembered: the
    /// next call goes on with the others, with the same factor. Nothing can be accumulated or committed in between.
    /// After a rule that has panicked, and a GPU that failed with a block half updated, no call goes on: only
    /// [`rollback`](Self::rollback) does.
    ///
    /// No guard of parameters, states or gradients may be held on the calling thread: it would wait for itself.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if a parameter has no gradient, or one that is infinite or no
    /// number (unless such steps are [skipped](NonFinite::Skip)): the message names it, and nothing has changed. So for
    /// gradients that were [added in part](Self::accumulate), and a factor that is not finite.
    /// [`BudgetTooSmall`](ErrorKind::BudgetTooSmall) if the budget does not hold one block.
    /// [`Busy`](ErrorKind::Busy) if others hold what is needed: repeat it. Those of pins.
    pub fn step(&mut self, factor: f32) -> Result<Step> {
        let is_new = self.unfinished.is_none();
        if is_new {
            let begun = self.begin_step(factor)?;
            if begun.skipped.is_some() {
                return Ok(begun);
            }
        }
        let norm = self.norm_of_step();
        if let Err(error) = self.end_step() {
            // One that somebody else has begun stays.
            if is_new && self.unfinished.as_ref().is_some_and(|sweep| !sweep.has_begun()) {
                self.unfinished = None;
                self.note.in_step = false;
                self.remember()?;
            }
            return Err(error);
        }
        Ok(Step { number: self.note.step, norm, skipped: None })
    }

    /// Begins a [`step`](Self::step) that updates parameters when they are needed: [`update`](Self::update) those of
    /// its choice, [`end_step`](Self::end_step) the others. A program that updates each layer just before its next pass
    /// uses it has pages read and written for the step while it computes. Until its end no gradients can be added, and
    /// nothing can be committed.
    ///
    /// A step that is [skipped](Step::skipped) does not begin.
    ///
    /// # Errors
    /// As for [`step`](Self::step), also if a step has begun.
    pub fn begin_step(&mut self, factor: f32) -> Result<Step> {
        self.is_between_steps()?;
        if let Some(skipped) = self.prepare(factor)? {
            return Ok(skipped);
        }
        self.note.in_step = true;
        self.remember()?;
        Ok(Step { number: self.note.step + 1, norm: self.norm_of_step(), skipped: None })
    }

    /// Updates these elements of a parameter, and what lies in one block with them, if a step has begun that has not
    /// done so. Several threads may do so at once.
    ///
    /// No guard of parameters, states or gradients may be held on the calling thread, of neighbours in a block either:
    /// it would wait for itself.
    ///
    /// # Errors
    /// [`NotFound`](ErrorKind::NotFound) for an unknown name; [`InvalidArgument`](ErrorKind::InvalidArgument) for
    /// elements that the parameter does not have, and if a rule has panicked or a GPU has failed with a block half
    /// updated. Otherwise as for [`step`](Self::step): it can be repeated.
    pub fn update(&self, name: &str, elements: Range<u64>) -> Result<()> {
        let (number, parameter) = self.find(name)?;
        if elements.start > elements.end || elements.end > parameter.elements {
            let what = format!("elements {elements:?} of {name:?} are to be updated, which has {}", parameter.elements);
            return Err(invalid(what, "give those of its elements only"));
        }
        match &self.unfinished {
            Some(sweep) => sweep.run(&self.paged, self.paged.layout.blocks_with(number, elements), false),
            None => Ok(()),
        }
    }

    /// Whether a step has begun, and not ended.
    pub fn is_in_step(&self) -> bool {
        self.unfinished.is_some()
    }

    /// Ends a step that has [begun](Self::begin_step): updates what was not updated yet. Without one, nothing happens.
    ///
    /// # Errors
    /// As for [`step`](Self::step): it can be repeated.
    pub fn end_step(&mut self) -> Result<()> {
        // It stays where it is while a rule may panic.
        let Some(sweep) = &self.unfinished else { return Ok(()) };
        // Where the next one begins, memory has what this one used last.
        sweep.run(&self.paged, 0..self.paged.layout.blocks.len(), self.note.step % 2 == 1)?;
        self.unfinished = None;
        self.paged.gradients.forget();
        self.note.step += 1;
        self.note.in_step = false;
        self.remember()
    }

    fn norm_of_step(&self) -> f64 {
        match self.unfinished.as_ref().map(|sweep| &sweep.job) {
            Some(Job::Update(update)) => update.norm,
            _ => 0.0,
        }
    }

    /// Makes the sweep of a step, or skips the step.
    fn prepare(&mut self, factor: f32) -> Result<Option<Step>> {
        if !factor.is_finite() {
            return Err(invalid(format!("gradients cannot be multiplied by {factor}"), "give a finite factor"));
        }
        let gradients = &self.paged.gradients;
        if gradients.is_torn() {
            let what = "a call of `accumulate` has failed when it had added some of its gradients".to_string();
            return Err(invalid(what, "call `drop_gradients`, and add all of them again"));
        }
        let (norm, infinite) = self.norm(factor)?;
        if let Some(name) = infinite {
            if self.non_finite == NonFinite::Refuse {
                let what = format!("gradients of {name:?} are infinite or no numbers, or become so by the factor");
                return Err(invalid(
                    what,
                    "call `drop_gradients` and go on, or have such steps skipped (`non_finite`)",
                ));
            }
            gradients.forget();
            return Ok(Some(Step { number: self.note.step, norm, skipped: Some(name) }));
        }
        // As PyTorch's clip_grad_norm_, which keeps away from 0 by the same number.
        let clipped = self.clip.map_or(1.0, |most| (most / (norm + 1e-6)).min(1.0));
        let step = self.note.step + 1;
        let moments = self.paged.groups.iter().map(|group| Moment { step, rate: group.schedule.rate(step) }).collect();
        let blocks = self.paged.layout.blocks.len();
        let without = (0..blocks).map(|block| gradients.is_new(block)).collect();
        let job = Job::Update(Update { moments, factor: factor * clipped as f32, norm, without });
        self.unfinished = Some(Sweep::new(blocks, job));
        Ok(None)
    }

    /// The norm of the gradients times `factor`, and the first parameter whose gradients times that are not finite.
    fn norm(&self, factor: f32) -> Result<(f64, Option<String>)> {
        let (mut total, mut infinite) = (0.0, None);
        let factor = f64::from(factor.abs());
        for parameter in &self.paged.layout.parameters {
            let (mut has_any, mut own) = (false, 0.0);
            for part in parameter.parts.clone() {
                has_any |= self.paged.gradients.squares(&self.paged.layout, part, |squares| {
                    own += squares;
                    total += squares;
                });
            }
            if !has_any {
                let what = format!("the parameter {:?} has no gradient", parameter.name);
                let remedy = "accumulate one (zeros too), or leave a frozen parameter out of the groups";
                return Err(invalid(what, remedy));
            }
            // Not `>`: the sum may be no number.
            let is_finite = own.sqrt() * factor <= f64::from(f32::MAX);
            if !is_finite && infinite.is_none() {
                infinite = Some(parameter.name.clone());
            }
        }
        Ok((total.sqrt() * factor, infinite))
    }

    /// Writes down in the folder where the optimizer is, for whoever commits and opens it.
    fn remember(&self) -> Result<()> {
        if let Some(folder) = &self.folder {
            folder.set_note(&self.note.with(&self.program)?);
        }
        Ok(())
    }

    /// Makes all steps so far durable, and `program` with them: what else the program needs to go on, such as its place
    /// in the data. Gradients are not kept.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) without a folder, and while a step is under way; those of
    /// [`Durable::commit`].
    pub fn commit(&mut self, program: &Value) -> Result<Generation> {
        let folder = self.durable()?;
        self.is_between_steps()?;
        folder.set_note(&self.note.with(program)?);
        match folder.commit() {
            Ok(generation) => {
                self.program = program.clone();
                Ok(generation)
            }
            Err(error) => {
                self.remember()?;
                Err(error)
            }
        }
    }

    /// What the program gave to the last commit; `Null` before the first one.
    pub fn program(&self) -> &Value {
        &self.program
    }

    /// Goes back to the last commit, also from a step that has failed on its way. Drops all gradients.
    ///
    /// # Errors
    /// Those of [`Durable::rollback`]: then nothing has changed. [`InvalidArgument`](ErrorKind::InvalidArgument) if
    /// that commit was made before the optimizer was: open it anew. Those of [`Runtime::alloc`] and of pins, if the
    /// gradients and the working copy cannot be made.
    pub fn rollback(&mut self) -> Result<()> {
        let folder = self.durable()?;
        folder.rollback()?;
        let Some((note, program)) = Note::read(&folder.note())? else {
            return Err(invalid("the last commit has no optimizer".into(), "drop this one, and open it anew"));
        };
        note.is_between_steps()?;
        (self.note, self.program, self.unfinished) = (note, program, None);
        // New ones: pages of the scratch file that were lost do not come back.
        let Paged { runtime, layout, gradients, working, pass, device, .. } = &mut self.paged;
        // It names the old ones.
        *pass = Pass::Between(Vec::new());
        *gradients = Gradients::new(runtime, layout, gradients.tensor().dtype(), device.clone())?;
        if working.is_some() {
            *working = Some(new_working_copy(runtime, layout)?);
        }
        self.paged.declare()?;
        self.refresh_working_copy()
    }

    fn durable(&self) -> Result<&Durable> {
        self.folder
            .as_ref()
            .ok_or_else(|| invalid("the optimizer's state is in no durable folder".into(), "open it with `open_in`"))
    }
}

impl OptimizerBuilder {
    /// Opens the optimizer. Its state is lost with the runtime.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for settings out of range, a parameter in two groups, a name
    /// that is tied to none, and no parameters. Those of [`Runtime::alloc`].
    pub fn open(self) -> Result<Optimizer> {
        self.check()?;
        Optimizer::open(self, None)
    }

    /// Opens the optimizer with its parameters and its state in a durable folder: as new ones if the folder has none of
    /// them, or as the folder's generation has them. No other program may write these tensors or set the folder's note.
    ///
    /// # Errors
    /// As [`open`](Self::open), and those of [`Durable::alloc_packed`]. [`InvalidArgument`](ErrorKind::InvalidArgument)
    /// if the folder has other parameters, shapes or rules; the message names the first that differs.
    pub fn open_in(self, folder: &Durable) -> Result<Optimizer> {
        self.check()?;
        Optimizer::open(self, Some(folder.clone()))
    }
}

fn new_working_copy(runtime: &Runtime, layout: &Layout) -> Result<Tensor> {
    runtime.alloc_for(SegmentClass::Weights, DType::BF16, &[layout.positions])
}

/// How many parameters have a state of this number; they are the first ones.
fn with_state(layout: &Layout, groups: &[Group], state: usize) -> usize {
    layout.parameters.iter().take_while(|parameter| groups[parameter.group].rule.states().len() > state).count()
}

/// Segments of `f32` for the parameters and their states.
fn in_scratch(runtime: &Runtime, layout: &Layout, groups: &[Group]) -> Result<Vec<Vec<Tensor>>> {
    let mut kept: Vec<Vec<Tensor>> = vec![Vec::new(); layout.parameters.len()];
    let mut add = |class: SegmentClass, count: usize| -> Result<()> {
        let Some(last) = count.checked_sub(1).map(|last| &layout.parameters[last]) else { return Ok(()) };
        let all = runtime.alloc_for(class, DType::F32, &[last.first + last.elements])?;
        for (parameter, kept) in layout.parameters[..count].iter().zip(&mut kept) {
            kept.push(all.rows(parameter.first..parameter.first + parameter.elements)?);
        }
        Ok(())
    };
    add(SegmentClass::Weights, layout.parameters.len())?;
    let states = most_states(groups);
    (0..states).try_for_each(|state| add(SegmentClass::Optimizer, with_state(layout, groups, state)))?;
    Ok(kept)
}

/// The folder's parameters and states; new ones if it has none.
fn of_folder(folder: &Durable, layout: &Layout, groups: &[Group]) -> Result<(Vec<Vec<Tensor>>, Note, Value)> {
    let wanted = Note::new(groups, layout);
    let (note, program) = match Note::read(&folder.note())? {
        Some((note, program)) => {
            note.check(&wanted)?;
            note.is_between_steps()?;
            (note, program)
        }
        None if folder.tensors().is_empty() => {
            // Before there are tensors: an optimizer that is not opened to its end is made to its end by the next one.
            folder.set_note(&wanted.with(&Value::Null)?);
            (wanted, Value::Null)
        }
        None => {
            let what = "the folder has tensors, and no state of an optimizer".to_string();
            return Err(invalid(what, "choose another folder, or an empty one"));
        }
    };
    let states = most_states(groups);
    let mut kept: Vec<Vec<Tensor>> = vec![Vec::new(); layout.parameters.len()];
    for state in std::iter::once(None).chain((0..states).map(Some)) {
        let count = state.map_or(layout.parameters.len(), |state| with_state(layout, groups, state));
        let name_of = |parameter: &Parameter| match state {
            None => parameter.name.clone(),
            Some(state) => format!("{}.{}", parameter.name, groups[parameter.group].rule.states()[state]),
        };
        let parameters = &layout.parameters[..count];
        let is_there = |parameter: &Parameter| folder.tensor(&name_of(parameter)).is_ok();
        if note.step == 0 && !parameters.iter().any(is_there) {
            let spec = |parameter: &Parameter| TensorSpec::new(name_of(parameter), DType::F32, &parameter.shape);
            folder.alloc_packed(&parameters.iter().map(spec).collect::<Vec<_>>())?;
        }
        let mut start = None;
        for (parameter, kept) in parameters.iter().zip(&mut kept) {
            let name = name_of(parameter);
            let tensor = folder.tensor(&name)?;
            if tensor.dtype() != DType::F32 || tensor.shape() != parameter.shape {
                let (dtype, shape, wanted) = (tensor.dtype(), tensor.shape(), &parameter.shape);
                let what = format!("the folder's {name:?} is {dtype} {shape:?}, and the parameter is F32 {wanted:?}");
                return Err(invalid(what, "give the parameters that the folder was made for"));
            }
            let address = tensor.address();
            let start = *start.get_or_insert(address);
            if address.checked_sub(start) != Some(parameter.first * 4) {
                let what = format!("the folder's {name:?} lies elsewhere than in the order of the parameters");
                return Err(invalid(what, "add the parameters in the order in which the folder was made"));
            }
            kept.push(tensor.reshape(&[parameter.elements])?);
        }
    }
    Ok((kept, note, program))
}
