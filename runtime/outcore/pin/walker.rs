//! Walkers: passes in progress.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use super::member::Walking;
use super::{DevicePins, DevicePinsOn, HostPin, HostPins, PinRequest, Read, ScopeBuilder, Write};
use crate::compute::ComputeStream;
use crate::error::Result;
use crate::ids::{PageId, SegmentId, WalkerId};
use crate::pager::PageRun;
use crate::shared::Shared;
use crate::tensor::Tensor;

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
/// Clones are one walker. It ends when the last of its clones and of the [scopes](Self::scope) opened from it is
/// dropped; its guards may outlive it.
///
/// ```
/// use outcore::{Bytes, DType, PageSize, Runtime, Tensor};
///
/// let runtime = Runtime::builder().page_size(PageSize::new(Bytes::kib(64))?).device_budget(Bytes::mib(1)).open()?;
/// // Tensors of twice the budget, and two clients that go over them at different places.
/// let layers: Vec<Tensor> = (0..32).map(|_| runtime.alloc(DType::U8, &[64 << 10])).collect::<Result<_, _>>()?;
/// let (one, other) = (runtime.walker()?, runtime.walker()?);
/// one.plan(&layers);
/// other.plan(&layers);
/// for step in 0..3 * layers.len() {
///     let ahead = one.pin(&layers[(step + 4) % layers.len()]).wait()?;
///     // The walker behind finds pages that the one ahead has left resident.
///     let behind = other.pin(&layers[step % layers.len()]).wait()?;
///     assert_eq!(ahead.len() + behind.len(), 128 << 10);
/// }
/// assert!(runtime.stats().hit_ratio() > 0.4);
/// # drop((one, other, layers));
/// # runtime.close()?;
/// # Ok::<(), outcore::Error>(())
/// ```
#[derive(Clone)]
pub struct Walker {
    walking: Arc<Walking>,
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

    /// Declares the order in which this walker will use tensors from now on, again and again. An empty order withdraws
    /// the plan. Walkers that declare the same order share one plan, which takes memory once. Tensors of other runtimes
    /// are left out.
    ///
    /// A walker that begins in the middle may declare the order from its beginning: its place is known after a few
    /// uses.
    pub fn plan(&self, order: &[Tensor]) {
        self.declare(order, true);
    }

    /// As [`plan`](Self::plan), for an order that is used once.
    pub fn plan_once(&self, order: &[Tensor]) {
        self.declare(order, false);
    }

    fn declare(&self, order: &[Tensor], cyclic: bool) {
        let Walking { id, shared } = &*self.walking;
        let ours = order.iter().filter(|tensor| tensor.is_of(shared));
        let runs: Vec<_> = ours.map(Tensor::run).collect();
        shared.engine.with(|pager, fx| pager.declare_plan_of(*id, &runs, cyclic, fx));
    }

    /// Tells of a cycle that this walker, or another one, may follow later, beside the order that it has declared. As
    /// soon as it is seen to follow that one, it is taken up; nothing is read ahead for it before. The last four such
    /// cycles are known, those that walkers have left among them.
    pub fn know(&self, order: &[Tensor]) {
        let shared = &self.walking.shared;
        let ours = order.iter().filter(|tensor| tensor.is_of(shared));
        let runs: Vec<_> = ours.map(Tensor::run).collect();
        shared.engine.with(|pager, _| pager.know_order(&runs));
    }

    /// This walker uses tensors in no order, such as the experts that a router chooses. Withdraws its plan. Its uses
    /// count for what stays resident, but no order is looked for in them.
    pub fn unordered(&self) {
        let Walking { id, shared } = &*self.walking;
        shared.engine.with(|pager, fx| pager.declare_unordered(*id, fx));
    }

    /// This walker is likely to use these tensors next, in this order, for example because a predictor says so. They
    /// take the place of those that it expected before. What is missing of them is read while nobody waits for anything
    /// else, and pages that are expected go after all others. A hint: where there is no room, nothing happens. Tensors
    /// of other runtimes are left out.
    pub fn expect(&self, tensors: &[Tensor]) {
        let Walking { id, shared } = &*self.walking;
        let ours = tensors.iter().filter(|tensor| tensor.is_of(shared));
        let runs: Vec<_> = ours.map(Tensor::run).collect();
        shared.engine.with(|pager, fx| pager.expect(*id, &runs, fx));
    }

    /// The order that this walker follows now, or one cycle of it, whether it was declared or recognised: of the pages
    /// that `tensor` has a part of, counted from its first one. Its [place](crate::stats::WalkerStats::places) is in
    /// the whole order, which may name other pages too. Empty if it follows none.
    ///
    /// A program may keep it, and [declare](Self::plan) it the next time.
    pub fn order_of(&self, tensor: &Tensor) -> Vec<u32> {
        self.order_in(std::slice::from_ref(tensor)).into_iter().map(|(_, page)| page).collect()
    }

    /// As [`order_of`](Self::order_of), of the pages that any of these tensors has a part of: the tensor's place among
    /// them, and the page, counted from the tensor's first one. Of tensors of one allocation that share a page, one is
    /// named.
    pub fn order_in(&self, tensors: &[Tensor]) -> Vec<(usize, u32)> {
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

    /// Opens a [scope](crate::Scope), whose pins are uses of this walker.
    pub fn scope(&self) -> ScopeBuilder {
        ScopeBuilder::of_walker(&self.walking)
    }

    /// As [`Runtime::pin`](crate::Runtime::pin). A tensor of another runtime is
    /// [refused](crate::ErrorKind::InvalidArgument), here and in the methods below.
    #[inline]
    pub fn pin<'a>(&self, tensor: &'a Tensor) -> PinRequest<'a, HostPin<'a, Read>> {
        PinRequest::of_walker(HostPin::new(tensor), &self.walking)
    }

    /// As [`Runtime::pin_mut`](crate::Runtime::pin_mut).
    #[inline]
    pub fn pin_mut<'a>(&self, tensor: &'a Tensor) -> PinRequest<'a, HostPin<'a, Write>> {
        PinRequest::of_walker(HostPin::new(tensor), &self.walking)
    }

    /// As [`Runtime::pin_set`](crate::Runtime::pin_set).
    pub fn pin_set<'a>(&self, tensors: &'a [Tensor]) -> PinRequest<'a, HostPins<'a, Read>> {
        PinRequest::of_walker(HostPins::new(tensors), &self.walking)
    }

    /// As [`Runtime::pin_set_mut`](crate::Runtime::pin_set_mut).
    pub fn pin_set_mut<'a>(&self, tensors: &'a [Tensor]) -> PinRequest<'a, HostPins<'a, Write>> {
        PinRequest::of_walker(HostPins::new(tensors), &self.walking)
    }

    /// As [`Runtime::pin_device`](crate::Runtime::pin_device).
    pub fn pin_device<'a>(&self, tensors: &'a [Tensor]) -> PinRequest<'a, DevicePins<'a, Read>> {
        PinRequest::of_walker(DevicePins::new(tensors), &self.walking)
    }

    /// As [`Runtime::pin_device_mut`](crate::Runtime::pin_device_mut).
    pub fn pin_device_mut<'a>(&self, tensors: &'a [Tensor]) -> PinRequest<'a, DevicePins<'a, Write>> {
        PinRequest::of_walker(DevicePins::new(tensors), &self.walking)
    }

    /// As [`Runtime::pin_device_on`](crate::Runtime::pin_device_on).
    pub fn pin_device_on<'a>(
        &self,
        tensors: &'a [Tensor],
        stream: &'a ComputeStream,
    ) -> PinRequest<'a, DevicePinsOn<'a>> {
        PinRequest::of_walker(DevicePinsOn::new(tensors, stream), &self.walking)
    }
}

impl fmt::Debug for Walker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Walker({:?})", self.walking.id)
    }
}
