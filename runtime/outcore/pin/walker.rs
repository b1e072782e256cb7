//! Walkers: passes in progress.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use super::member::Walking;
use super::tensors::Tensors;
use crate::error::Result;
use crate::ids::{PageId, SegmentId, WalkerId};
use crate::pager::PageRun;
use crate::shared::Shared;
use crate::tensor::Tensor;

/// How tensors will be used: for [`Runtime::plan`](crate::Runtime::plan) and [`Walker::plan`].
#[derive(Clone, Copy, Debug)]
pub enum Plan<'a> {
    /// In this order, again and again, as in passes over a model.
    Cycle(&'a [Tensor]),
    /// In this order, once.
    Once(&'a [Tensor]),
    /// In no order, such as the experts that a router chooses. The uses count for what stays resident, but no order is
    /// looked for in them.
    Unordered,
}

impl Plan<'_> {
    pub(crate) fn declare(self, walker: WalkerId, shared: &Arc<Shared>) {
        let (order, cyclic) = match self {
            Self::Cycle(order) => (order, true),
            Self::Once(order) => (order, false),
            Self::Unordered => {
                shared.engine.with(|pager, fx| pager.declare_unordered(walker, fx));
                return;
            }
        };
        let runs = Tensor::runs_of(order, shared);
        shared.engine.with(|pager, fx| pager.declare_plan_of(walker, &runs, cyclic, fx));
    }
}

/// One pass in progress over a model, or passes one after the other: for example a client of a server, or one of two
/// models that answer together. Several walkers may go over one model at a time, each at its own place.
///
/// A program with one pass at a time needs none: pins without a walker are uses of the runtime's default walker. With
/// several passes, the interleaved uses have no order that a plan could follow, but the uses of each walker do. The
/// walker [declares](Self::plan) its order, or the order is recognised, or the walker is seen to follow an order that
/// another one declared. Then pages stay until the last nearby walker has used them, walkers that are close together
/// share fills, and the page to be evicted is the one that no walker will use for longest. Only the policies
/// [`plan`](crate::PolicyKind::Plan) and [`shares`](crate::PolicyKind::Shares) follow plans; the others do not tell
/// walkers apart.
///
/// Clones are one walker. It ends when the last of them is dropped; its guards may outlive it.
///
/// ```
/// use outcore::{Bytes, DType, PageSize, Plan, Runtime, Tensor};
///
/// let runtime = Runtime::builder().page_size(PageSize::new(Bytes::kib(64))?).device_budget(Bytes::mib(1)).open()?;
/// // Tensors of twice the budget, and two clients that go over them at different places.
/// let layers: Vec<Tensor> = (0..32).map(|_| runtime.alloc(DType::U8, &[64 << 10])).collect::<Result<_, _>>()?;
/// let (one, other) = (runtime.walker()?, runtime.walker()?);
/// one.plan(Plan::Cycle(&layers));
/// other.plan(Plan::Cycle(&layers));
/// for step in 0..3 * layers.len() {
///     let ahead = runtime.pin(&layers[(step + 4) % layers.len()]).of(&one).wait()?;
///     // The walker behind finds pages that the one ahead has left resident.
///     let behind = runtime.pin(&layers[step % layers.len()]).of(&other).wait()?;
///     assert_eq!(ahead.len() + behind.len(), 128 << 10);
/// }
/// assert!(runtime.stats().hit_ratio() > 0.4);
/// # drop((one, other, layers));
/// # runtime.close()?;
/// # Ok::<(), outcore::Error>(())
/// ```
#[derive(Clone)]
pub struct Walker {
    pub(super) walking: Arc<Walking>,
}

impl Walker {
    pub(crate) fn begin(shared: &Arc<Shared>) -> Result<Self> {
        let id = shared.engine.change(|pager, _| pager.begin_walker())?;
        Ok(Self { walking: Arc::new(Walking { id, shared: shared.clone() }) })
    }

    /// The walker's number.
    pub fn id(&self) -> WalkerId {
        self.walking.id
    }

    /// Declares how this walker will use tensors from now on. An empty order withdraws the plan. Walkers that declare
    /// the same order share one plan, which takes memory once. Tensors of other runtimes are left out.
    ///
    /// A walker that begins in the middle may declare the order from its beginning: its place is known after a few
    /// uses.
    pub fn plan(&self, plan: Plan<'_>) {
        let Walking { id, shared } = &*self.walking;
        plan.declare(*id, shared);
    }

    /// Tells of a cycle that this walker, or another one, may follow later, beside the order that it has declared. As
    /// soon as it is seen to follow that one, it is taken up; nothing is read ahead for it before. The last four such
    /// cycles are known, those that walkers have left among them.
    pub fn know(&self, order: &[Tensor]) {
        let shared = &self.walking.shared;
        shared.engine.with(|pager, _| pager.know_order(&Tensor::runs_of(order, shared)));
    }

    /// This walker is likely to use these tensors next, in this order, for example because a predictor says so. They
    /// take the place of those that it expected before. What is missing of them is read while nobody waits for anything
    /// else, and pages that are expected go after all others. A hint: where there is no room, nothing happens. Tensors
    /// of other runtimes are left out.
    pub fn expect(&self, tensors: &(impl Tensors + ?Sized)) {
        let Walking { id, shared } = &*self.walking;
        shared.engine.with(|pager, fx| pager.expect(*id, &Tensor::runs_of(tensors.as_slice(), shared), fx));
    }

    /// The order that this walker follows now, or one cycle of it, whether it was declared or recognised: of the pages
    /// that the tensors have a part of. Its [place](crate::stats::WalkerStats::places) is in the whole order, which may
    /// name other pages too. Empty if it follows none.
    ///
    /// Each page is named by the tensor's place among `tensors` and its number, counted from the tensor's first page.
    /// Of tensors of one allocation that share a page, one is named.
    ///
    /// A program may keep it, and [declare](Self::plan) it the next time.
    pub fn order_of(&self, tensors: &(impl Tensors + ?Sized)) -> Vec<(usize, u32)> {
        let tensors = tensors.as_slice();
        let Walking { id, shared } = &*self.walking;
        let mut runs: HashMap<SegmentId, Vec<(usize, PageRun)>> = HashMap::new();
        for (at, tensor) in tensors.iter().enumerate().filter(|(_, tensor)| tensor.is_of(shared)) {
            let run = tensor.run();
            runs.entry(run.segment).or_default().push((at, run));
        }
        if runs.is_empty() {
            return Vec::new();
        }
        let order = shared.engine.recorded(|pager| pager.order_of(*id)).unwrap_or_default();
        let place = |page: PageId| {
            runs.get(&page.segment)?.iter().find_map(|(at, run)| {
                let nth = page.index.index().checked_sub(run.first.index())?;
                (nth < run.count as usize).then_some((*at, nth as u32))
            })
        };
        order.into_iter().filter_map(place).collect()
    }
}

impl fmt::Debug for Walker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Walker({:?})", self.walking.id)
    }
}
