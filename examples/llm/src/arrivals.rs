//! Experts that a router has drawn, from their requests to their use.

use std::collections::VecDeque;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;

use futures_util::future::FutureExt;
use futures_util::stream::{FuturesUnordered, StreamExt};
use outcore::{ErrorKind, PinSet, Runtime, Scope, Tensor, Walker};

use crate::error::Result;
use crate::waits::Waits;
use crate::weights::{Arrivals, Arrived, Rows};

/// A request for the rows of an expert, with its place among those that were drawn.
type Request = Pin<Box<dyn Future<Output = (usize, outcore::Result<PinSet>)> + Send>>;

/// An expert's rows, and where they are.
struct Expert {
    parts: Arc<[Tensor]>,
    pages: u64,
    state: State,
}

enum State {
    /// There was no room yet to request it.
    Idle,
    Requested,
    Here(Box<PinSet>),
    Taken,
}

/// Experts that were drawn. As many as there is room for are requested at a time, in order, and each expert's rows as a
/// unit.
///
/// All requests are in one scope: once it has pins, a request of it gets [`Busy`](ErrorKind::Busy) rather than wait for
/// pages that other passes hold. So two passes never wait for each other.
pub(crate) struct Arriving<'a> {
    runtime: &'a Runtime,
    walker: &'a Walker,
    waits: &'a Waits,
    scope: Arc<Scope>,
    experts: Vec<Expert>,
    requests: FuturesUnordered<Request>,
    /// Those that have not been requested.
    idle: VecDeque<usize>,
    /// Whether at most one expert may be requested: other passes hold frames that the next one needs.
    alone: bool,
    /// What the caller has now.
    #[expect(clippy::vec_box, reason = "a guard is moved from its state into this")]
    taken: Vec<Box<PinSet>>,
    /// Pages of those that are requested, here or taken; and the most of them.
    pages: u64,
    pages_most: u64,
}

impl<'a> Arriving<'a> {
    /// Requests experts, of which these tensors are the rows, as uses of the walker: at most `pages_most` pages at a
    /// time. `None` if one of them has more.
    pub fn of(
        (runtime, walker): (&'a Runtime, &'a Walker),
        waits: &'a Waits,
        pages_most: u64,
        experts: Vec<Vec<Tensor>>,
    ) -> Result<Option<Self>> {
        let expert = |parts: Vec<Tensor>| {
            let pages = parts.iter().map(Tensor::page_count).sum();
            Expert { parts: parts.into(), pages, state: State::Idle }
        };
        let experts: Vec<Expert> = experts.into_iter().map(expert).collect();
        if experts.iter().any(|expert| expert.pages > pages_most) {
            return Ok(None);
        }
        let mut arriving = Self {
            runtime,
            walker,
            waits,
            scope: Arc::new(runtime.scope().label("experts").open()?),
            idle: (0..experts.len()).collect(),
            experts,
            requests: FuturesUnordered::new(),
            alone: false,
            taken: Vec::new(),
            pages: 0,
            pages_most,
        };
        arriving.request()?;
        Ok(Some(arriving))
    }

    /// Requests the next ones that there is room for, and takes up what is here already.
    fn request(&mut self) -> Result<()> {
        while let Some(&nth) = self.idle.front() {
            let Expert { parts, pages, state } = &mut self.experts[nth];
            if self.pages + *pages > self.pages_most || (self.alone && self.pages > 0) {
                break;
            }
            self.pages += *pages;
            *state = State::Requested;
            self.idle.pop_front();
            if let Some(here) = self.runtime.pin(&parts[..]).of(self.walker).in_scope(&self.scope).if_resident() {
                *state = State::Here(Box::new(here));
                continue;
            }
            let (runtime, walker) = (self.runtime.clone(), self.walker.clone());
            let (scope, parts) = (self.scope.clone(), parts.clone());
            self.requests
                .push(Box::pin(async move { (nth, runtime.pin(&parts[..]).of(&walker).in_scope(&scope).await) }));
        }
        // The first poll of a request submits it.
        while let Some(Some(arrived)) = self.requests.next().now_or_never() {
            self.arrived(arrived)?;
        }
        Ok(())
    }

    fn arrived(&mut self, (nth, result): (usize, outcore::Result<PinSet>)) -> Result<()> {
        match result {
            Ok(here) => self.experts[nth].state = State::Here(Box::new(here)),
            // Others hold what it takes. It waits for them when this pass holds nothing.
            Err(error) if error.kind() == ErrorKind::Busy => self.put_back(nth),
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Gives up the place of an expert: it will be requested again, before those behind it.
    fn put_back(&mut self, nth: usize) {
        let expert = &mut self.experts[nth];
        expert.state = State::Idle;
        self.pages -= expert.pages;
        let at = self.idle.partition_point(|other| *other < nth);
        self.idle.insert(at, nth);
    }

    /// Gives up what is here or requested. The scope then holds nothing, so that the next request waits for whatever
    /// others hold, and it is the only one until it has come.
    fn let_go(&mut self) {
        self.requests.clear();
        let holds = |nth: &usize| matches!(self.experts[*nth].state, State::Requested | State::Here(_));
        let held: Vec<usize> = (0..self.experts.len()).filter(holds).collect();
        held.into_iter().for_each(|nth| self.put_back(nth));
        self.alone = true;
    }

    /// Takes what is here of these, as far as it fits.
    fn take(&mut self, among: Range<usize>, fits: &mut dyn FnMut(usize) -> bool) -> Vec<usize> {
        let mut places = Vec::new();
        for nth in among {
            let state = &mut self.experts[nth].state;
            if matches!(state, State::Here(_))
                && fits(nth)
                && let State::Here(here) = std::mem::replace(state, State::Taken)
            {
                self.taken.push(here);
                places.push(nth);
            }
        }
        places
    }
}

impl Arrivals for Arriving<'_> {
    fn next(&mut self, among: Range<usize>, fits: &mut dyn FnMut(usize) -> bool) -> Result<Vec<Arrived<'_>>> {
        self.taken.clear();
        self.alone = false;
        let holds = |expert: &&Expert| matches!(expert.state, State::Requested | State::Here(_));
        self.pages = self.experts.iter().filter(holds).map(|expert| expert.pages).sum();
        let any = |experts: &[Expert], of: fn(&State) -> bool| experts.iter().any(|expert| of(&expert.state));
        if !any(&self.experts[among.clone()], |state| !matches!(state, State::Taken)) {
            return Ok(Vec::new());
        }
        let places = loop {
            self.request()?;
            let places = self.take(among.clone(), fits);
            if !places.is_empty() {
                break places;
            }
            self.waits.check_cancelled()?;
            if !any(&self.experts[among.clone()], |state| matches!(state, State::Requested)) {
                // Those behind these have the room, and others hold the rest.
                self.let_go();
            } else if let Some(arrived) = self.waits.wait_for(|| Ok(pollster::block_on(self.requests.next())))? {
                self.arrived(arrived)?;
            }
        };
        let mut arrived = Vec::with_capacity(places.len());
        for (nth, here) in places.into_iter().zip(&self.taken) {
            let rows = (0..here.count()).map(|part| here.bytes(part).map(Rows::new));
            arrived.push((nth, rows.collect::<outcore::Result<_>>()?));
        }
        Ok(arrived)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use outcore::{Bytes, DType, PageSize};

    use super::*;

    /// The pass went round and round: what came next was pinned as soon as it was let go.
    #[test]
    fn regression_an_expert_whose_frames_the_next_ones_have_arrives_alone() {
        let page = Bytes::kib(64);
        let builder = Runtime::builder().page_size(PageSize::new(page).unwrap());
        let runtime = builder.device_budget(Bytes::new(8 * page.get())).open().unwrap();
        let tensor = |nth: u8| {
            let tensor = runtime.alloc(DType::U8, &[page.get()]).unwrap();
            runtime.pin(&tensor).write().wait().unwrap().bytes_mut().fill(nth);
            tensor
        };
        let parts: Vec<Tensor> = (0..10).map(tensor).collect();
        // Others hold six of eight frames; the second and third expert have the rest.
        let held = runtime.pin(&parts[4..]).wait().unwrap();
        for part in &parts[2..4] {
            drop(runtime.pin(part).wait().unwrap());
        }
        let experts = vec![parts[..2].to_vec(), vec![parts[2].clone()], vec![parts[3].clone()]];
        let (walker, waits) = (runtime.walker().unwrap(), Waits::default());
        let mut arriving = Arriving::of((&runtime, &walker), &waits, 4, experts).unwrap().unwrap();
        let mut found = Vec::new();
        for among in [0..1, 1..3] {
            loop {
                let arrived = arriving.next(among.clone(), &mut |_| true).unwrap();
                if arrived.is_empty() {
                    break;
                }
                found.extend(
                    arrived.iter().map(|(nth, rows)| (*nth, rows.iter().map(|rows| rows[0]).collect::<Vec<_>>())),
                );
            }
        }
        found.sort();
        assert_eq!(found, [(0, vec![0, 1]), (1, vec![2]), (2, vec![3])]);
        drop(arriving);
        drop((held, parts, walker));
        runtime.close().unwrap();
    }
}
