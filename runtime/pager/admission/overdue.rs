//! Moves that take too long.

use super::Admission;
use super::request::{Request, Stage, Stand};
use crate::effects::Effects;
use crate::error::Error;
use crate::ids::{MoveId, PageId, RequestId};
use crate::page_move::Place;
use crate::residency::Residency;

/// A move that takes too long.
struct LateMove<'a> {
    page: PageId,
    /// Whether it writes a frame's bytes down, after which the frame is free.
    frees: bool,
    /// Whether it fills a frame.
    fills: bool,
    error: &'a Error,
}

impl Admission {
    /// Handles moves that take too long, each given with its error. Requests of `waiting` that wait for one of these
    /// moves end with that error. The moves go on, and keep their frames and buffers.
    pub(crate) fn overdue(
        &mut self,
        res: &mut Residency,
        moves: &[(MoveId, Error)],
        waiting: &[RequestId],
        fx: &mut Effects,
    ) {
        let late: Vec<LateMove<'_>> = moves.iter().filter_map(|(id, error)| Self::late_move(res, *id, error)).collect();
        for id in waiting {
            if let Some(late) = self.waits_for_page(res, *id, &late) {
                self.end(res, *id, late.error.clone(), fx);
            }
        }
        // Once the requests of a late read have ended, its frame goes to anybody as soon as the read ends, if it ever
        // does.
        let reads: Vec<&LateMove<'_>> = late
            .iter()
            .filter(|late| late.fills && res.fill_of(late.page).is_some_and(|(_, for_nobody)| for_nobody))
            .collect();
        for id in waiting {
            if let Some(read) = reads.first()
                && self.has_frames_but_for(res, *id, reads.len() as u32)
            {
                self.end(res, *id, read.error.clone(), fx);
            }
        }
    }

    fn late_move<'a>(res: &Residency, id: MoveId, error: &'a Error) -> Option<LateMove<'a>> {
        let (page, from, to) = res.page_of_move(id)?;
        let (frees, fills) = (matches!(from, Place::Device(_)), matches!(to, Place::Device(_)));
        Some(LateMove { page, frees, fills, error })
    }

    /// The first of these moves that a request waits for: one of a page that it wants, or one that frees a frame it
    /// could get.
    fn waits_for_page<'a, 'b>(
        &self,
        res: &Residency,
        id: RequestId,
        late: &'b [LateMove<'a>],
    ) -> Option<&'b LateMove<'a>> {
        let Request { frames, stage, stand, .. } = &self.requests[self.request_key(id)?];
        let frees = || late.iter().find(|late| late.frees);
        let of = |page: PageId| late.iter().find(move |late| late.page == page);
        match (stage, stand) {
            (Stage::Filling, _) if *frames > 0 => frees(),
            (Stage::Filling, _) => self.requests[self.request_key(id)?].pages().find_map(|page| {
                let (awaits_frame, _) = res.fill_of(page)?;
                of(page).or_else(|| if awaits_frame { frees() } else { None })
            }),
            (Stage::Queued, Stand::Pages(pages)) => pages.iter().find_map(|(page, _)| of(*page)),
            // A request for a smaller budget only stops waiting: the budget stays as it was set.
            (Stage::Queued | Stage::Shrinking, _) => frees(),
        }
    }

    /// Whether a request waits for frames and would have them with `more` more; for a smaller budget, whether it would
    /// then be met. Otherwise others are in its way, and it waits for them however long that takes.
    fn has_frames_but_for(&self, res: &Residency, id: RequestId, more: u32) -> bool {
        let Some(key) = self.request_key(id) else { return false };
        let Request { terms, stage, stand, frames, .. } = &self.requests[key];
        let there = res.frames().there + more;
        match (stage, stand) {
            (Stage::Queued, Stand::Frames { .. }) => {
                let own = self.scope(terms.scope).map_or(0, |scope| scope.purse + scope.coming);
                let lacks = Self::absent_of(res, self.requests[key].pages()) + frames;
                lacks + res.wanted(self.kept()).saturating_sub(own) <= there
            }
            (Stage::Shrinking, _) => res.promised(self.kept()) <= there,
            _ => false,
        }
    }
}
