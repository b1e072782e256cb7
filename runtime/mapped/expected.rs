//! What of a model's experts is read before it is used.

use std::collections::HashSet;
use std::sync::atomic::Ordering;

use crate::device::Core;
use crate::experts::LayerExperts;
use crate::foresight::Foresight;
use crate::model::Model;

impl Model {
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
}
