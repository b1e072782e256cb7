//! Experts that a router has drawn, from their requests to their use.

use std::collections::VecDeque;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;

use futures_util::future::FutureExt;
use futures_util::stream::{FuturesUnordered, StreamExt};
use outcore::{ErrorKind, PinSet, Scope, Tensor};

use crate::error::Result;
use crate::paged::PagedWeights;
use crate::weights::{Arrivals, Arrived, Rows, Step};

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
    weights: &'a PagedWeights,
    scope: Arc<Scope>,
    experts: Vec<Expert>,
    requests: FuturesUnordered<Request>,
    /// Those that are yet to be requested.
    idle: VecDeque<usize>,
    /// What the caller has now.
    #[expect(clippy::vec_box, reason = "a guard is moved from its state into this")]
    taken: Vec<Box<PinSet>>,
    /// Pages of those that are requested, here or taken; and the most of them.
    pages: u64,
    pages_most: u64,
}

impl<'a> Arriving<'a> {
    /// Requests experts; `None` if one of them has more pages than may be held at once.
    pub fn of(weights: &'a PagedWeights, experts: &[Vec<Step>]) -> Result<Option<Self>> {
        let pages_most = weights.drawn_most();
        let mut found = Vec::with_capacity(experts.len());
        for steps in experts {
            let parts: Arc<[Tensor]> = weights.parts(steps)?.into();
            let pages = parts.iter().map(Tensor::page_count).sum();
            if pages > pages_most {
                return Ok(None);
            }
            found.push(Expert { parts, pages, state: State::Idle });
        }
        let mut arriving = Self {
            weights,
            scope: Arc::new(weights.runtime().scope().label("experts").open()?),
            idle: (0..found.len()).collect(),
            experts: found,
            requests: FuturesUnordered::new(),
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
            if self.pages + *pages > self.pages_most {
                break;
            }
            self.pages += *pages;
            *state = State::Requested;
            self.idle.pop_front();
            let (runtime, walker, scope) = (self.weights.runtime(), &self.weights.experts, &self.scope);
            if let Some(here) = runtime.pin(&parts[..]).of(walker).in_scope(scope).if_resident() {
                *state = State::Here(Box::new(here));
                continue;
            }
            let (runtime, walker, scope, parts) = (runtime.clone(), walker.clone(), scope.clone(), parts.clone());
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

    /// Gives up what is here, so that the scope holds nothing. Returns whether there was anything.
    fn let_go(&mut self) -> bool {
        let here = |expert: &Expert| matches!(expert.state, State::Here(_));
        let here: Vec<usize> = (0..self.experts.len()).filter(|nth| here(&self.experts[*nth])).collect();
        here.iter().for_each(|nth| self.put_back(*nth));
        !here.is_empty()
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
            let comes = any(&self.experts[among.clone()], |state| matches!(state, State::Requested));
            // Where none of these comes, those behind them have the room.
            if (comes || !self.let_go())
                && let Some(arrived) = self.weights.wait_for(|| Ok(pollster::block_on(self.requests.next())))?
            {
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
