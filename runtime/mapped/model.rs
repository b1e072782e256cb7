//! What the mapped files of one model share: one order of use, one walker, and what is known of its experts.

use std::collections::{BTreeSet, HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use outcore::{Error, ErrorKind, Plan, Result, Runtime, Tensor, Walker};
use parking_lot::{Mutex, RwLock};

use crate::experts::{ExpertId, LayerExperts};
use crate::foresight::Foresight;
use crate::live::Order;
use crate::options::MapOptions;
use crate::outline::Outline;
use crate::remembered::{InTurn, TurnsPlace};
use crate::row::Members;
use crate::scan::ExpertScan;
use crate::uses::Uses;

/// Uses of experts that nobody told of, after which it is believed that nobody tells.
pub const UNTOLD_MAX: u64 = 64;

/// What of an order of use is a model's: all, unless models are used in turn.
#[derive(Clone, Debug)]
pub struct Part {
    pub uses: Arc<Uses>,
    /// The number of the model's first file there, and of its first page.
    pub file: usize,
    pub page: u32,
}

impl Part {
    /// Tells orders of use apart, also from those that are gone.
    pub fn id(&self) -> u64 {
        self.uses.serial()
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
    pub expected: Mutex<Vec<u64>>,
    pub foresight: Mutex<Foresight>,
    pub expert_scan: Mutex<ExpertScan>,
    /// Whether experts are expected by what followed before: not if the program predicts what its router will choose.
    pub foresees: AtomicBool,
    /// Faults so far.
    pub faults: AtomicU64,
    /// Frames of the runtime at the last look: its budget may change.
    pub frames: AtomicUsize,
    pub private: bool,
    /// Models that were used in turn in an earlier run, of which this was the first.
    pub in_turn: Option<InTurn>,
    pub options: MapOptions,
}

/// The models of a device.
#[derive(Debug, Default)]
pub struct Models {
    /// What headers told lately, so that a model of many files is read once.
    pub outlines: VecDeque<Arc<Outline>>,
    pub live: Vec<Weak<Model>>,
}

impl Model {
    /// With pages of `page` bytes. No file of it is mapped yet.
    ///
    /// # Errors
    /// As for [`Runtime::walker`].
    pub fn new(
        runtime: &Runtime,
        page: u64,
        outline: Arc<Outline>,
        private: bool,
        options: &MapOptions,
    ) -> Result<Self> {
        let members = Arc::new(Members::new(outline.row.clone(), page));
        let place = options.place(&outline.files, &outline.row, page);
        let told = (outline.order.clone(), Order::OfHeaders);
        let walker = options.walker.clone().map_or_else(|| runtime.walker(), Ok)?;
        let uses = Arc::new(Uses::new(walker, &members, told, 0, place));
        let drawn = runtime.walker()?;
        drawn.plan(Plan::Unordered);
        let firsts = outline.experts.firsts(page).collect();
        let mut model = Self {
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
            in_turn: None,
            options: options.clone(),
        };
        model.in_turn = model.turns_place().and_then(|place| place.read());
        Ok(model)
    }

    /// What of an order of use is this model's.
    pub fn part(&self) -> Part {
        self.part.read().clone()
    }

    /// From now on this is its part of an order of use.
    pub fn take_part(&self, part: Part) {
        *self.part.write() = part;
    }

    /// A file is mapped. Returns whether it was not before; if it was, nothing changes.
    pub fn join(&self, file: usize, bytes: &Tensor) -> bool {
        let part = self.part();
        let is_new = part.uses.join(part.file + file, bytes);
        // The same members, unless models are used in turn.
        if is_new {
            self.members.join(file, bytes);
        }
        is_new
    }

    /// Whether its files are mapped in this way, and orders of it kept as these options say.
    pub fn is_mapped_as(&self, private: bool, options: &MapOptions) -> bool {
        self.private == private && self.options.keeps_as(options)
    }

    /// Where it is kept which models are used in turn, of which this is the first.
    pub fn turns_place(&self) -> Option<TurnsPlace> {
        self.options.turns_place(self.outline.files.first()?, self.members.page())
    }

    /// Forgets that this model and others were used in turn in an earlier run, if now they are not.
    pub fn keep_what_is_true(&self) {
        if self.in_turn.is_some()
            && self.part().uses.order() == Order::NoneFound
            && let Some(place) = self.turns_place()
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
        if self.options.is_announced() {
            // Touches are few, and what is announced needs the frames.
            return 2;
        }
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
