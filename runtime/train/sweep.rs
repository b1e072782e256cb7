//! One pass over all blocks, by several threads.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use half::bf16;
use outcore::Result;
use outcore::pin::Scope;
use parking_lot::Mutex;

use crate::device::{CopiedPart, Device, GradientsOnDevice, UpdatedPart};
use crate::errors::{invalid, of_other_elements};
use crate::gradients::{CHUNK, Stored, narrowed};
use crate::layout::Part;
use crate::paged::Paged;
use crate::rule::Moment;
use crate::torn::Torn;

/// What is done to each block.
#[derive(Debug)]
pub(crate) enum Job {
    /// The working copy is made.
    Copy,
    /// The parameters are updated.
    Update(Update),
}

#[derive(Debug)]
pub(crate) struct Update {
    /// By group.
    pub moments: Vec<Moment>,
    /// What gradients are multiplied by.
    pub factor: f32,
    /// The norm of the gradients.
    pub norm: f64,
    /// Blocks without gradients: they count as zeros.
    pub without: Vec<bool>,
}

/// A pass, and which blocks it has done.
#[derive(Debug)]
pub(crate) struct Sweep {
    pub job: Job,
    done: Vec<AtomicBool>,
    /// Whether some elements of a block may have been updated, and others not: a rule has panicked, or a device failed.
    torn: Torn,
}

impl Sweep {
    pub fn new(blocks: usize, job: Job) -> Self {
        let done = (0..blocks).map(|_| AtomicBool::new(false)).collect();
        Self { job, done, torn: Torn::default() }
    }

    pub fn has_begun(&self) -> bool {
        self.done.iter().any(|done| done.load(Ordering::Relaxed)) || self.is_torn()
    }

    fn is_torn(&self) -> bool {
        self.torn.get()
    }

    fn is_done(&self, block: usize) -> bool {
        self.done[block].load(Ordering::Relaxed)
    }

    /// Does those of these blocks that are not done, from the last one on if it `descends`. After an error some more
    /// may be done.
    pub fn run(&self, on: &Paged, blocks: Range<usize>, descends: bool) -> Result<()> {
        self.is_whole()?;
        let count = blocks.clone().filter(|block| !self.is_done(*block)).count();
        if count == 0 {
            return Ok(());
        }
        let (next, failed) = (AtomicUsize::new(0), Mutex::new(None));
        let work = || {
            let scope = on.runtime.scope().label("optimizer").reserve(on.block_bytes()).wait();
            let result = scope.and_then(|scope| {
                while failed.lock().is_none() && !self.is_torn() {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= blocks.len() {
                        break;
                    }
                    let block = if descends { blocks.end - 1 - number } else { blocks.start + number };
                    if self.is_done(block) {
                        continue;
                    }
                    match &self.job {
                        Job::Copy => copy(on, block, &scope)?,
                        Job::Update(update) => {
                            self.update(on, block, update, &scope)?;
                            on.gradients.used(on.layout.blocks[block].positions.clone())?;
                        }
                    }
                }
                Ok(())
            });
            if let Err(error) = result {
                failed.lock().get_or_insert(error);
            }
        };
        thread::scope(|threads| {
            for _ in 1..on.threads().min(count) {
                // Where the system has no more threads, fewer do it.
                let _ = thread::Builder::new().name("outcore-update".into()).spawn_scoped(threads, work);
            }
            work();
        });
        match failed.into_inner() {
            Some(error) => Err(error),
            None => self.is_whole(),
        }
    }

    fn is_whole(&self) -> Result<()> {
        if !self.is_torn() {
            return Ok(());
        }
        let what = "a rule has panicked, or a GPU has failed, and a block is half updated".to_string();
        Err(invalid(what, "`rollback`, or open the last commit"))
    }

    fn update(&self, on: &Paged, number: usize, update: &Update, scope: &Scope) -> Result<()> {
        if let Some(device) = &on.device {
            return self.update_on(device, on, number, update, scope);
        }
        let written = on.written_by(number)?;
        let gradients = on.gradients_of(number)?;
        let mut pins = on.runtime.pin(&written).write().in_scope(scope).of(&on.walker).wait()?;
        // Somebody else may have done it while this thread waited. From here on nobody else has the block.
        if self.is_done(number) || self.is_torn() {
            return Ok(());
        }
        let read = || on.runtime.pin(&gradients).in_scope(scope).of(&on.walker).wait();
        let read = if update.without[number] { None } else { Some(read()?) };
        let stored = read.as_ref().map_or(Ok(Stored::Zeros), |read| Stored::new(gradients.dtype(), read.bytes()))?;
        let mut slices = pins.all_mut();
        let block = &on.layout.blocks[number];
        let parts = &on.layout.parts[block.parts.clone()];
        let mut kept_of: Vec<Vec<&mut [f32]>> = Vec::with_capacity(parts.len());
        for part in parts {
            let all = slices.by_ref().take(on.kept[part.parameter].len());
            let all = all.map(|bytes| bytemuck::try_cast_slice_mut(bytes).map_err(of_other_elements));
            kept_of.push(all.collect::<Result<_>>()?);
        }
        let working = slices.next().map(bytemuck::try_cast_slice_mut::<u8, bf16>).transpose();
        let mut working = working.map_err(of_other_elements)?;
        // Nothing fails from here on.
        let _changing = self.torn.changing();
        for (part, mut kept) in parts.iter().zip(kept_of) {
            let at = (part.at - block.positions.start) as usize;
            let group = on.layout.parameters[part.parameter].group;
            let [parameters, states @ ..] = &mut kept[..] else { continue };
            let mut states: Vec<_> = states.iter_mut().map(|state| state.chunks_mut(CHUNK)).collect();
            let mut widened = [0f32; CHUNK];
            for (number, parameters) in parameters.chunks_mut(CHUNK).enumerate() {
                let at = at + number * CHUNK;
                let widened = &mut widened[..parameters.len()];
                stored.widen(at, update.factor, widened);
                let mut states: Vec<_> = states.iter_mut().filter_map(Iterator::next).collect();
                on.groups[group].rule.update(update.moments[group], parameters, widened, &mut states);
                if let Some(working) = &mut working {
                    narrow(parameters, &mut working[at..at + parameters.len()]);
                }
            }
        }
        // Before the pins go.
        self.done[number].store(true, Ordering::Relaxed);
        Ok(())
    }

    /// [`update`](Self::update) where the host cannot address the pages.
    fn update_on(&self, device: &Device, on: &Paged, number: usize, update: &Update, scope: &Scope) -> Result<()> {
        let written = on.written_by(number)?;
        let gradients = on.gradients_of(number)?;
        let mut pins = on.runtime.pin(&written).write().on_device().in_scope(scope).of(&on.walker).wait()?;
        if self.is_done(number) || self.is_torn() {
            return Ok(());
        }
        let read = || on.runtime.pin(&gradients).on_device().in_scope(scope).of(&on.walker).wait();
        let read = if update.without[number] { None } else { Some(read()?) };
        let block = &on.layout.blocks[number];
        let mut first = 0;
        let mut parts = Vec::with_capacity(block.parts.len());
        for part in &on.layout.parts[block.parts.clone()] {
            let group = on.layout.parameters[part.parameter].group;
            let rule = device.rules[group];
            let (at, offset) = (update.moments[group], part.at - block.positions.start);
            parts.push(UpdatedPart { rule, at, first, offset, elements: part.within.end - part.within.start });
            first += on.kept[part.parameter].len();
        }
        let gradients = GradientsOnDevice { pin: read.as_ref(), dtype: gradients.dtype(), factor: update.factor };
        let _changing = self.torn.changing();
        let done = device.kernels.update(&parts, &mut pins, gradients, on.working.is_some());
        if done.as_ref().is_err_and(|failed| failed.has_changed) {
            self.torn.set();
        }
        done?;
        self.done[number].store(true, Ordering::Relaxed);
        Ok(())
    }
}

fn narrow(from: &[f32], to: &mut [bf16]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to = narrowed(*from));
}

/// Makes a block of the working copy.
fn copy(on: &Paged, number: usize, scope: &Scope) -> Result<()> {
    let Some(working) = &on.working else { return Ok(()) };
    let block = &on.layout.blocks[number];
    let parts = &on.layout.parts[block.parts.clone()];
    let parameters = parts.iter().map(|part| on.kept[part.parameter][0].rows(part.within.clone()));
    let parameters = parameters.collect::<Result<Vec<_>>>()?;
    let working = working.rows(block.positions.clone())?;
    if let Some(device) = &on.device {
        let mut to = on.runtime.pin(&working).write().on_device().in_scope(scope).of(&on.walker).wait()?;
        let from = on.runtime.pin(&parameters).on_device().in_scope(scope).of(&on.walker).wait()?;
        let positions = |part: &Part| {
            part.at - block.positions.start..part.at - block.positions.start + part.within.end - part.within.start
        };
        let parts: Vec<CopiedPart> = parts.iter().map(|part| CopiedPart { positions: positions(part) }).collect();
        return device.kernels.narrow(&parts, &from, &mut to);
    }
    let mut to = on.runtime.pin(&working).write().in_scope(scope).of(&on.walker).wait()?;
    let from = on.runtime.pin(&parameters).in_scope(scope).of(&on.walker).wait()?;
    let to: &mut [bf16] = bytemuck::try_cast_slice_mut(to.bytes_mut()).map_err(of_other_elements)?;
    for (index, part) in parts.iter().enumerate() {
        let from: &[f32] = bytemuck::try_cast_slice(from.bytes(index)?).map_err(of_other_elements)?;
        let at = (part.at - block.positions.start) as usize;
        narrow(from, &mut to[at..at + from.len()]);
    }
    Ok(())
}
