//! Weights in pages of an outcore runtime: only what a step uses has to be resident.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use outcore::{Bytes, ComputeStream, DevicePin, Plan, Runtime, StreamPin, Tensor, Walker};
use parking_lot::Mutex;

use crate::arrivals::Arriving;
use crate::error::{Error, Result};
use crate::files::ModelFiles;
use crate::waits::Waits;
use crate::weights::{Arrivals, Rows, Step, TensorId, Weights};

/// A model's weights behind a [`Runtime`].
#[derive(Debug)]
pub struct PagedWeights {
    runtime: Runtime,
    tensors: Vec<Tiled>,
    waits: Waits,
    /// Whether everything fitted the device budget that there was when the weights were opened.
    whole: bool,
    declared: Mutex<Declared>,
    /// Uses experts, which come in no order.
    experts: Walker,
}

/// The part of the pass that is the same for every pass, as declared.
#[derive(Debug, Default)]
struct Declared {
    cycle: Vec<Step>,
    /// Whether the policy took it: some policies follow no plans.
    taken: bool,
    /// Whether the pages that no plan names have been requested, too.
    all_asked: bool,
}

/// Frames of the device tier.
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "a pass on a GPU is divided by them"))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Frames {
    pub count: u64,
    /// Bytes of each.
    pub page: u64,
    /// Whether somebody waits for pages.
    pub wanted: bool,
}

#[derive(Debug)]
struct Tiled {
    whole: Tensor,
    tile: u64,
    /// The tensor in tiles of `tile` rows.
    tiles: Vec<Tensor>,
    /// Whether rows of it are drawn, and are in no order that was declared.
    is_drawn: AtomicBool,
}

impl PagedWeights {
    /// Takes the tensors of `files` from `model`, which was opened in `runtime`. Reads no weight.
    pub fn open(runtime: &Runtime, model: &outcore::Model, files: &ModelFiles) -> Result<Self> {
        Self::open_in_steps(runtime, model, files, None)
    }

    /// As [`open`](Self::open), with steps of at most `step` bytes where not everything fits.
    pub fn open_in_steps(
        runtime: &Runtime,
        model: &outcore::Model,
        files: &ModelFiles,
        step: Option<Bytes>,
    ) -> Result<Self> {
        let stats = runtime.stats();
        let (page, budget) = (stats.page_size, stats.device.budget);
        let needed: u64 = model.header().files.iter().map(|file| page.pages_for(file.len)).sum();
        let frames = budget.get() / page.bytes();
        let whole = frames >= needed;
        let pages = match step {
            Some(step) => page.pages_for(step.get()).clamp(2, (frames / 2).max(2)),
            None => page.pages_for(stats.settings.step.value.get()),
        };
        let mut tensors = Vec::with_capacity(files.tensors().len());
        for info in files.tensors() {
            // A matrix of more than two extents is used as rows of its last one, as the kernels see it. For the file,
            // its elements may be bytes.
            let tensor = model.tensor(&info.name)?;
            let stored = tensor.dtype();
            let cols = info.row_bytes / stored.block_bytes() * stored.block_elements();
            let tensor = tensor.reshape(&[info.rows, cols])?;
            let tile = if whole { info.rows.max(1) } else { tensor.rows_within(pages as u32)? };
            let mut tiles = Vec::new();
            let mut start = 0;
            while start < info.rows {
                let end = (start + tile).min(info.rows);
                tiles.push(tensor.rows(start..end)?);
                start = end;
            }
            tensors.push(Tiled { whole: tensor, tile, tiles, is_drawn: AtomicBool::new(false) });
        }
        let experts = runtime.walker()?;
        experts.plan(Plan::Unordered);
        Ok(Self {
            runtime: runtime.clone(),
            tensors,
            experts,
            waits: Waits::default(),
            whole,
            declared: Mutex::default(),
        })
    }

    /// Gives up passes while `flag` is raised: they get [`Error::Cancelled`] in place of the next rows.
    #[must_use]
    pub fn cancelled_by(mut self, flag: Arc<AtomicBool>) -> Self {
        self.waits.cancelled = flag;
        self
    }

    /// An error if the pass is given up.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "a pass on a GPU asks between its steps"))]
    pub(crate) fn check_cancelled(&self) -> Result<()> {
        self.waits.check_cancelled()
    }

    fn tensor(&self, id: TensorId) -> Result<&Tiled> {
        self.tensors.get(id.0 as usize).ok_or_else(|| Error::Invalid(format!("there is no tensor {}", id.0)))
    }

    /// Rows `range` as a handle: a tile that is kept, or a new one. An error if the pass is given up.
    fn part(&self, id: TensorId, range: &Range<u64>) -> Result<Cow<'_, Tensor>> {
        self.waits.check_cancelled()?;
        let tiled = self.tensor(id)?;
        let kept = tiled.tiles.get((range.start / tiled.tile) as usize);
        let whole_tile = range.start.is_multiple_of(tiled.tile)
            && range.end == (range.start + tiled.tile).min(tiled.whole.shape().first().copied().unwrap_or(0));
        match kept.filter(|_| whole_tile) {
            Some(tile) => Ok(Cow::Borrowed(tile)),
            None => Ok(Cow::Owned(tiled.whole.rows(range.clone())?)),
        }
    }

    /// Pins rows `rows` of `tensor` on whichever device the runtime has them; waits until they are there.
    pub fn pin_device(&self, tensor: TensorId, rows: Range<u64>) -> Result<DevicePin> {
        let part = self.part(tensor, &rows)?;
        self.waits.wait_for(|| self.runtime.pin(&*part).on_device().wait())
    }

    /// Pins rows `rows` of `tensor` for work on `stream`, which is made to wait for them: this waits until their copies
    /// have been handed to the device.
    pub fn pin_device_on(&self, tensor: TensorId, rows: Range<u64>, stream: &ComputeStream) -> Result<StreamPin> {
        let part = self.part(tensor, &rows)?;
        self.waits.wait_for(|| self.runtime.pin(&*part).on(stream).wait())
    }

    /// The tensors' parts that these steps are.
    pub(crate) fn parts(&self, steps: &[Step]) -> Result<Vec<Tensor>> {
        steps.iter().map(|(id, rows)| self.part(*id, rows).map(Cow::into_owned)).collect()
    }

    /// As [`pin_device_on`](Self::pin_device_on), for several [parts](Self::parts) as a unit.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "a pass on a GPU pins several as a unit"))]
    pub(crate) fn pin_parts_on(&self, parts: &[Tensor], stream: &ComputeStream) -> Result<StreamPin> {
        self.waits.check_cancelled()?;
        self.waits.wait_for(|| self.runtime.pin(parts).on(stream).wait())
    }

    /// The frames that there are now.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "a pass on a GPU is divided by them"))]
    pub(crate) fn frames(&self) -> Frames {
        let stats = self.runtime.stats();
        let page = stats.page_size.bytes();
        Frames { count: stats.device.budget.get() / page, page, wanted: stats.waiting > 0 }
    }

    /// How many rows of a tensor fit in `pages` pages wherever they begin; at least one.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "a pass on a GPU is divided by them"))]
    pub(crate) fn rows_within(&self, tensor: TensorId, pages: u64) -> Result<u64> {
        Ok(self.tensor(tensor)?.whole.rows_within(u32::try_from(pages).unwrap_or(u32::MAX))?)
    }

    /// The most pages of experts that are requested, expected or held at a time: more would evict each other.
    fn drawn_most(&self) -> u64 {
        let stats = self.runtime.stats();
        stats.device.budget.get() / stats.page_size.bytes() / 2
    }

    /// Expects rows of experts, in the order of their use, as far as there is room for them: what is missing of that is
    /// read, and it stays until it is used.
    fn expect<'a>(&self, steps: impl Iterator<Item = &'a Step>) {
        let most = self.drawn_most();
        let mut parts = Vec::new();
        let mut pages = 0;
        for (id, rows) in steps {
            let Ok(part) = self.part(*id, rows) else { return };
            pages += part.page_count();
            if pages > most && !parts.is_empty() {
                break;
            }
            parts.push(part.into_owned());
        }
        self.experts.expect(&parts[..]);
    }

    fn is_drawn(&self, tensor: TensorId) -> Option<&AtomicBool> {
        self.tensors.get(tensor.0 as usize).map(|tiled| &tiled.is_drawn)
    }

    /// The runtime.
    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }
}

impl Weights for PagedWeights {
    fn rows(&self, tensor: TensorId, rows: Range<u64>) -> Result<Rows<'_>> {
        let part = self.part(tensor, &rows)?;
        let pin = self.runtime.pin(&*part);
        let is_drawn = self.is_drawn(tensor).is_some_and(|is_drawn| is_drawn.load(Ordering::Relaxed));
        let pin = if is_drawn { pin.of(&self.experts) } else { pin };
        let guard = self.waits.wait_for(|| pin.wait())?;
        Ok(Rows::new(guard))
    }

    fn tile_rows(&self, tensor: TensorId) -> u64 {
        self.tensor(tensor).map_or(1, |tiled| tiled.tile)
    }

    /// A pass starts with rows of embeddings, which differ from pass to pass. The rest is the same in every pass. The
    /// rows are hinted each time; the rest is declared once. If everything fits, the pages that no plan names
    /// (embeddings of tokens not met yet) are requested too. That happens after the first pass has been served, because
    /// somebody waits for its end.
    fn will_use(&self, order: &[Step]) {
        let Some(first) = order.first() else { return };
        let (changing, cycle) = order.split_at(order.iter().take_while(|step| step.0 == first.0).count());
        let mut declared = self.declared.lock();
        let later = !declared.cycle.is_empty() && !cycle.is_empty();
        if declared.cycle != cycle || (declared.taken && !self.runtime.observe().is_planned()) {
            let parts: Option<Vec<Tensor>> =
                cycle.iter().map(|(id, rows)| self.part(*id, rows).ok().map(Cow::into_owned)).collect();
            if let Some(parts) = parts {
                self.runtime.plan(Plan::Cycle(&parts));
                declared.cycle = cycle.to_vec();
                declared.taken = self.runtime.observe().is_planned();
            }
        }
        let rest = self.whole && later && !std::mem::replace(&mut declared.all_asked, true);
        drop(declared);
        for (id, rows) in changing {
            if let Ok(part) = self.part(*id, rows) {
                self.runtime.prefetch(&*part);
            }
        }
        if rest {
            self.tensors.iter().for_each(|tensor| self.runtime.prefetch(&tensor.whole));
        }
    }

    /// All are requested at once, as far as half of the frames have room for them; the others as these are used.
    fn draw(&self, experts: &[Vec<Step>], foreseen: &[Step]) -> Result<Option<Box<dyn Arrivals + '_>>> {
        let parts: Result<Vec<Vec<Tensor>>> = experts.iter().map(|steps| self.parts(steps)).collect();
        let runtime = (&self.runtime, &self.experts);
        let Some(arriving) = Arriving::of(runtime, &self.waits, self.drawn_most(), parts?)? else { return Ok(None) };
        self.expect(foreseen.iter());
        Ok(Some(Box::new(arriving)))
    }

    fn drawn(&self, steps: &[Step], foreseen: &[Step]) {
        for (tensor, _) in steps {
            self.is_drawn(*tensor).into_iter().for_each(|is_drawn| is_drawn.store(true, Ordering::Relaxed));
        }
        self.expect(steps.iter().chain(foreseen));
    }

    fn foresees(&self) -> bool {
        !self.whole
    }

    fn waited(&self) -> Duration {
        self.waits.took()
    }
}
