//! What the mapped files of one model share: one order of use, one walker, and what is known of its experts.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread;

use outcore::{Error, ErrorKind, Result, Runtime, Tensor, Walker};
use parking_lot::{Mutex, RwLock};

use crate::device::Core;
use crate::experts::{ExpertId, LayerExperts};
use crate::foresight::Foresight;
use crate::live::Order;
use crate::options::MapOptions;
use crate::outline::Outline;
use crate::remembered::{Identity, InTurn};
use crate::row::{Members, Row};
use crate::scan::ExpertScan;
use crate::uses::Uses;

/// Uses of experts that nobody told of, after which it is believed that nobody tells.
pub const UNTOLD_MAX: u64 = 64;
/// Outlines that are kept while no file of theirs is mapped: a program may map one file after the other.
const OUTLINES_MAX: usize = 8;

/// What of an order of use is a model's: all, unless models are used in turn.
#[derive(Clone, Debug)]
pub struct Part {
    pub uses: Arc<Uses>,
    /// The number of the model's first file there, and of its first page.
    pub file: usize,
    pub page: u32,
}

impl Part {
    /// Tells orders of use apart, while they live.
    pub fn id(&self) -> u64 {
        Arc::as_ptr(&self.uses) as u64
    }
}

/// A model of which files are mapped on a runtime. A file that is no part of one is a model of its own.
#[derive(Debug)]
pub struct Model {
    pub outline: Arc<Outline>,
    /// The files that are mapped.
    pub members: Arc<Members>,
    /// Uses that have an order.
    part: RwLock<Part>,
    /// Uses of experts: they have none.
    pub drawn: Walker,
    /// The first page of each expert. It is hidden after use, so that each use of the expert is seen.
    pub firsts: HashSet<u32>,
    /// Uses of experts since one was [told of](crate::Mapped::expert_hint); more than [`UNTOLD_MAX`] if none was.
    pub untold: AtomicU64,
    /// Addresses of the pages that are [expected](crate::Mapped::expect_experts).
    expected: Mutex<Vec<u64>>,
    pub foresight: Mutex<Foresight>,
    pub expert_scan: Mutex<ExpertScan>,
    /// Whether experts are expected by what followed before: not if the program predicts what its router will choose.
    pub foresees: AtomicBool,
    /// Faults so far.
    pub faults: AtomicU64,
    /// Frames of the runtime at the last look: its budget may change.
    pub frames: AtomicUsize,
    private: bool,
    /// Models that were used in turn in an earlier run, of which this was the first.
    in_turn: Option<InTurn>,
    options: MapOptions,
}

/// The models of a device.
#[derive(Debug, Default)]
pub struct Models {
    /// What headers told lately, so that a model of many files is read once.
    outlines: VecDeque<Arc<Outline>>,
    live: Vec<Weak<Model>>,
}

/// Finds the model that has this file, which was mapped as `bytes`, and adds the file to it. Files that are mapped to
/// be written are apart from others, and so is a file that the model has already. Returns the file's number in the
/// model.
///
/// # Errors
/// As for [`Runtime::walker`].
pub fn join(
    runtime: &Runtime,
    core: &Core,
    (path, identity): (&Path, Identity),
    bytes: &Tensor,
    private: bool,
    options: &MapOptions,
) -> Result<(Arc<Model>, usize)> {
    let has = |outline: &Outline| outline.files.iter().position(|file| *file == identity);
    let known = core.models.lock().outlines.iter().find_map(|outline| Some((outline.clone(), has(outline)?)));
    let (outline, file) = known.unwrap_or_else(|| {
        // Other files may be mapped meanwhile: their headers are read here.
        let (outline, file) = Outline::of(path, identity, core.page());
        (Arc::new(outline), file)
    });
    let mut models = core.models.lock();
    // What was read last comes first: of a model of which a file was replaced, that is what is true.
    models.outlines.retain(|other| !Arc::ptr_eq(other, &outline));
    models.outlines.push_front(outline.clone());
    models.outlines.truncate(OUTLINES_MAX);
    models.live.retain(|model| model.strong_count() > 0);
    for model in models.live.iter().filter_map(Weak::upgrade) {
        let fits = model.outline.files == outline.files && model.private == private && model.options.keeps_as(options);
        if fits && model.join(file, bytes) {
            return Ok((model, file));
        }
    }
    let model = Arc::new(Model::new(runtime, core, outline, private, options)?);
    model.join(file, bytes);
    models.live.push(Arc::downgrade(&model));
    let live: Vec<Arc<Model>> = models.live.iter().filter_map(Weak::upgrade).collect();
    join_as_before(runtime, core, &live);
    Ok((model, file))
}

/// The orders of these numbers are used in turn: they are joined soon, on a thread of its own, because notes are read
/// and written then. Whoever calls this waits for nobody.
pub fn use_in_turn(runtime: &Runtime, core: &Arc<Core>, orders: Vec<u64>) {
    // They are seen again if they are not joined.
    core.turns.lock().forget();
    let (runtime, core) = (runtime.clone(), core.clone());
    let join = move || {
        let models = core.models.lock();
        let live: Vec<Arc<Model>> = models.live.iter().filter_map(Weak::upgrade).collect();
        match join_in_turn(&runtime, &core, &live, &orders, true) {
            Ok(Some(joined)) => keep_turns(&core, &joined),
            // One of them is just being dropped.
            Ok(None) => {}
            Err(error) => tracing::debug!(%error, "files that are used in turn keep their own orders"),
        }
    };
    if let Err(cause) = thread::Builder::new().name("outcore-order".to_owned()).spawn(join) {
        tracing::debug!(%cause, "files that are used in turn are not joined");
    }
}

/// Joins the orders of these numbers, of models that are used in turn. Returns the models; `None` if an order is gone.
/// The caller has the lock of all models. Waits for the disk.
///
/// # Errors
/// As for [`Runtime::walker`].
fn join_in_turn(
    runtime: &Runtime,
    core: &Core,
    live: &[Arc<Model>],
    orders: &[u64],
    was_seen: bool,
) -> Result<Option<Vec<Arc<Model>>>> {
    let (mut all, mut files, mut header, mut pages) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (mut used, mut of_pass) = (0, 0);
    for order in orders {
        let mut of_order: Vec<(Part, &Arc<Model>)> = live.iter().map(|model| (model.part(), model)).collect();
        of_order.retain(|(part, _)| part.id() == *order);
        of_order.sort_by_key(|(part, _)| part.file);
        let Some((Part { uses, .. }, _)) = of_order.first().cloned() else { return Ok(None) };
        // By their numbers in this order. Models that had part in it may be gone.
        let mut renumbered = HashMap::new();
        let before = pages.len();
        for (part, model) in of_order {
            let of_model = &model.outline.files;
            renumbered.extend((0..of_model.len()).map(|number| (part.file + number, files.len() + number)));
            files.extend(of_model);
            pages.extend(of_model.iter().map(|file| file.len.div_ceil(core.page())));
            all.push(model.clone());
        }
        let known = uses.known_order().into_iter();
        header.extend(known.filter_map(|(file, bytes)| Some((*renumbered.get(&file)?, bytes))));
        used += uses.count();
        of_pass += uses.pass().unwrap_or_else(|| pages[before..].iter().sum());
        // Its orders are its models' own, if they are used alone another time.
        uses.keep(runtime);
    }
    let (Some(first), Some(row)) = (all.first(), Row::of(pages)) else { return Ok(None) };
    let keep_alike = all.iter().all(|model| model.options.keeps_as(&first.options));
    let place = if keep_alike { first.options.place(&files, &row, core.page()) } else { None };
    let members = Arc::new(Members::new(row, core.page()));
    let pass = used.div_ceil(of_pass.max(1)).max(1);
    let told_by = Order::InTurn { pass: was_seen.then_some(pass) };
    let uses = Arc::new(Uses::new(runtime, &members, (header, told_by), used, place)?);
    let mut file = 0;
    for model in &all {
        for (number, bytes) in model.members.mapped() {
            uses.join(file + number, &bytes);
        }
        *model.part.write() = Part { uses: uses.clone(), file, page: members.row().first(file) };
        file += model.outline.files.len();
    }
    uses.begin();
    Ok(Some(all))
}

/// Keeps for the next start that these models are used in turn.
fn keep_turns(core: &Core, models: &[Arc<Model>]) {
    let files: Vec<Identity> = models.iter().filter_map(|model| model.outline.files.first().copied()).collect();
    let place =
        models.first().zip(files.first()).and_then(|(model, first)| model.options.turns_place(first, core.page()));
    if let Some(Err(cause)) = place.map(|place| place.write(&files)) {
        tracing::debug!(%cause, "which files are used in turn is not kept for the next start");
    }
}

/// Joins models that were used in turn in an earlier run, as soon as all of them are here. The caller has the lock of
/// all models.
fn join_as_before(runtime: &Runtime, core: &Core, live: &[Arc<Model>]) {
    // Not those that have been joined.
    let alone = |model: &&Arc<Model>| model.part().uses.members().row().files() == model.outline.files.len();
    let alone: Vec<&Arc<Model>> = live.iter().filter(alone).collect();
    for first in &alone {
        let Some(in_turn) = &first.in_turn else { continue };
        let like = |model: &&&Arc<Model>| {
            model.private == first.private && model.options.keeps_as(&first.options) && !model.outline.files.is_empty()
        };
        let likely: Vec<(Identity, u64)> =
            alone.iter().filter(like).map(|model| (model.outline.files[0], model.part().id())).collect();
        let Some(orders) = in_turn.pick(&likely) else { continue };
        if let Err(error) = join_in_turn(runtime, core, live, &orders, false) {
            tracing::debug!(%error, "files that were used in turn before keep their own orders");
        }
        return;
    }
}

impl Model {
    fn new(runtime: &Runtime, core: &Core, outline: Arc<Outline>, private: bool, options: &MapOptions) -> Result<Self> {
        let page = core.page();
        let members = Arc::new(Members::new(outline.row.clone(), page));
        let place = options.place(&outline.files, &outline.row, page);
        let told = (outline.order.clone(), Order::OfHeaders);
        let uses = Arc::new(Uses::new(runtime, &members, told, 0, place)?);
        let turns = outline.files.first().and_then(|first| options.turns_place(first, page));
        let drawn = runtime.walker()?;
        drawn.unordered();
        let firsts = outline.experts.firsts(page).collect();
        Ok(Self {
            outline,
            members,
            part: RwLock::new(Part { uses, file: 0, page: 0 }),
            drawn,
            firsts,
            untold: AtomicU64::new(UNTOLD_MAX + 1),
            expected: Mutex::default(),
            foresight: Mutex::default(),
            expert_scan: Mutex::default(),
            foresees: AtomicBool::new(true),
            faults: AtomicU64::new(0),
            frames: AtomicUsize::new(0),
            private,
            in_turn: turns.and_then(|place| place.read()),
            options: options.clone(),
        })
    }

    /// What of an order of use is this model's.
    pub fn part(&self) -> Part {
        self.part.read().clone()
    }

    /// A file is mapped. Returns whether it was not before; if it was, nothing changes.
    fn join(&self, file: usize, bytes: &Tensor) -> bool {
        let part = self.part();
        let is_new = part.uses.join(part.file + file, bytes);
        // The same members, unless models are used in turn.
        if is_new {
            self.members.join(file, bytes);
        }
        is_new
    }

    /// A file is mapped no more.
    pub fn leave(&self, core: &Core, file: usize) {
        // What is used in turn changes under this lock.
        let models = core.models.lock();
        let part = self.part();
        part.uses.leave(part.file + file);
        self.members.leave(file);
        drop(models);
        core.turns.lock().forget();
    }

    /// Forgets that this model and others were used in turn in an earlier run, if now they are not.
    pub fn keep_what_is_true(&self, core: &Core) {
        let place = || self.options.turns_place(self.outline.files.first()?, core.page());
        if self.in_turn.is_some()
            && self.part().uses.order() == Order::NoneFound
            && let Some(place) = place()
        {
            place.forget();
        }
    }

    pub fn count_frames(&self, runtime: &Runtime) {
        let frames = runtime.stats().device_frames;
        self.frames.store((frames.used + frames.free) as usize, Ordering::Relaxed);
    }

    /// Pages that stay pinned behind their use at most.
    pub fn may_keep(&self) -> usize {
        /// Where pages are used one by one.
        const KEPT: usize = 16;
        let frames = self.frames.load(Ordering::Relaxed);
        // Beside the pages of turns, and one that is on its way.
        if self.outline.experts.is_empty() { (frames / 16).clamp(2, KEPT) } else { (frames / 4).max(1) }
    }

    /// Whether uses of experts are told of.
    pub fn is_told(&self) -> bool {
        self.untold.load(Ordering::Relaxed) <= UNTOLD_MAX
    }

    /// Where the pages of the row are, as far as their files are mapped.
    pub fn addresses(&self, pages: &[u32]) -> Vec<u64> {
        pages.iter().filter_map(|page| self.members.address(*page)).collect()
    }

    pub fn check_experts(&self, layer: u32, experts: &[u32]) -> Result<()> {
        let has = |expert: &&u32| self.outline.experts.has(ExpertId { layer, expert: **expert });
        experts.iter().find(|expert| !has(expert)).map_or(Ok(()), |unknown| {
            let message = format!("the model has no expert {unknown} in layer {layer}");
            Err(Error::new(ErrorKind::InvalidArgument, message)
                .remedy("tell of experts that the router of this model can choose"))
        })
    }

    pub fn check_layers(&self, layers: &[LayerExperts<'_>]) -> Result<()> {
        layers.iter().try_for_each(|LayerExperts { layer, experts }| self.check_experts(*layer, experts))
    }

    /// These experts are told of, whose pages are at `addresses`. What is used next is what the program expects, if it
    /// does; or all of the next layer, if it is most of this one, as batches of many tokens use it; or what followed
    /// before.
    pub fn look_ahead(&self, core: &Core, now: LayerExperts<'_>, next: Option<&[LayerExperts<'_>]>, addresses: &[u64]) {
        let mut foresight = self.foresight.lock();
        foresight.used(now.layer, now.experts);
        let experts = &self.outline.experts;
        let is_most = || {
            let of_layer = experts.in_layer(now.layer).count();
            of_layer > 0 && now.experts.len() * 4 >= of_layer * 3
        };
        let worth = if let Some(next) = next {
            self.foresees.store(false, Ordering::Relaxed);
            self.worth_a_read(core, &mut foresight, next)
        } else if is_most() {
            let layer = now.layer.saturating_add(1);
            vec![(layer, experts.in_layer(layer).collect())]
        } else if let Some((layer, experts)) = foresight.after_used().filter(|_| self.foresees.load(Ordering::Relaxed))
        {
            self.worth_a_read(core, &mut foresight, &[LayerExperts { layer, experts: &experts }])
        } else {
            return;
        };
        drop(foresight);
        self.expect(core, &worth, addresses);
    }

    /// What of a prediction is worth a read.
    pub fn worth_a_read(
        &self,
        core: &Core,
        foresight: &mut Foresight,
        layers: &[LayerExperts<'_>],
    ) -> Vec<(u32, Vec<u32>)> {
        let is_there = |id| {
            // Not at an end, where a neighbour may have brought the page.
            let place = self.outline.experts.pieces(id).next().map(|piece| piece.start.midpoint(piece.end));
            let address = place.and_then(|at| self.members.address((at / self.members.page()) as u32));
            address.is_none_or(|address| core.has_frame(address))
        };
        let worth = foresight.predicts(layers, is_there);
        layers.iter().map(|layer| layer.layer).zip(worth).collect()
    }

    /// These experts are likely to be used soon, in this order of layers, and nothing else is. The pages at `now` are
    /// waited for already.
    pub fn expect(&self, core: &Core, layers: &[(u32, Vec<u32>)], now: &[u64]) {
        let (mut pages, mut left) = (Vec::new(), self.may_keep());
        for (layer, experts) in layers {
            let of_layer = self.pages_of_experts(*layer, experts, left);
            left -= of_layer.len();
            pages.extend(of_layer);
        }
        // Published as soon as they are there, which costs the program nothing then. If uses are not told of, the first
        // page of each stays hidden, so that its use is seen.
        let told = self.is_told();
        let seen = |page: &&u32| told || !self.firsts.contains(*page);
        let shown: Vec<u64> = pages.iter().filter(seen).filter_map(|page| self.members.address(*page)).collect();
        let mut expected = self.expected.lock();
        if pages.is_empty() && expected.is_empty() {
            return;
        }
        let now: HashSet<u64> = now.iter().copied().collect();
        core.want_no_more(expected.iter().filter(|page| !now.contains(page)));
        core.want_all(&shown);
        *expected = shown;
        // Wakers of the program's may run in what follows, and may tell of experts themselves.
        drop(expected);
        self.drawn.expect(&self.members.runs(&pages));
    }

    /// The pages of these experts of a layer, ascending, as far as they are not more than `most`, and their files are
    /// mapped.
    pub fn pages_of_experts(&self, layer: u32, experts: &[u32], most: usize) -> Vec<u32> {
        let mut pages = BTreeSet::new();
        for id in experts.iter().map(|expert| ExpertId { layer, expert: *expert }) {
            let of_expert = self.pages_of(id);
            if pages.len() + of_expert.iter().filter(|page| !pages.contains(*page)).count() > most {
                break;
            }
            pages.extend(of_expert);
        }
        pages.into_iter().collect()
    }

    /// The pages that hold an expert, in all files that are mapped.
    pub fn pages_of(&self, id: ExpertId) -> Vec<u32> {
        let mut pages = self.outline.experts.pages(id, self.members.page());
        pages.retain(|page| self.members.address(*page).is_some());
        pages
    }
}
