//! Where the known walkers of a plan stand, and how far each position is from them.
//!
//! Of two walkers on the way to a position, the one behind arrives first only if it is faster. So a search for the
//! first begins with the nearest walker behind the position and goes on to faster ones only: a few steps, however many
//! walkers there are.

use smallvec::SmallVec;

use super::place::{NEVER, Place, Stretch};
use crate::steps::step;

#[derive(Clone, Copy, Debug)]
struct Stand {
    place: usize,
    /// The least weight of the walkers here.
    weight: u64,
    /// How many stands behind this one the next stand with a smaller weight is; 0 if there is none.
    faster: usize,
}

/// Where the known walkers of one plan stand. Valid until one of them makes a use.
#[derive(Debug)]
pub(super) struct Standing {
    /// In order of places; each place once.
    stands: SmallVec<[Stand; 8]>,
    least: u64,
    /// Positions of the plan.
    len: usize,
    cyclic: bool,
}

impl Standing {
    pub(super) fn new(places: &[Place], len: usize, cyclic: bool) -> Self {
        let known = places.iter().filter(|place| place.is_known());
        let stand = |place: &Place| Stand { place: place.place, weight: place.weight, faster: 0 };
        let mut stands: SmallVec<[Stand; 8]> = known.map(stand).collect();
        stands.sort_unstable_by_key(|stand| (stand.place, stand.weight));
        stands.dedup_by_key(|stand| stand.place);
        step(stands.len());
        let count = stands.len();
        let least = stands.iter().map(|stand| stand.weight).min().unwrap_or(0);
        // For a cycle, two rounds: the second one knows the stands behind the first stand.
        let mut slower: SmallVec<[usize; 16]> = SmallVec::new();
        for at in 0..if cyclic { 2 * count } else { count } {
            let weight = stands[at % count].weight;
            while slower.last().is_some_and(|last| stands[last % count].weight >= weight) {
                slower.pop();
            }
            stands[at % count].faster = slower.last().map_or(0, |last| at - last);
            slower.push(at);
        }
        Self { stands, least, len, cyclic }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.stands.is_empty()
    }

    /// After how many uses of all walkers the first walker comes to this position.
    pub(super) fn distance_at(&self, position: u32) -> u64 {
        let (position, count) = (position as usize, self.stands.len());
        let before = self.stands.partition_point(|stand| stand.place <= position);
        if count == 0 || before == 0 && !self.cyclic {
            return NEVER;
        }
        let mut nearest = NEVER;
        // Counted from one turn before, so that `at` is never below 0.
        let (mut at, end) = (before + count - 1, position + self.len);
        loop {
            step(1);
            let stand = &self.stands[at % count];
            let uses = (end - stand.place - if at < count { 0 } else { self.len }) as u64;
            nearest = nearest.min(uses * stand.weight);
            if stand.faster == 0 || uses * self.least >= nearest {
                return nearest;
            }
            // No walker is behind itself: a stand more than a turn away would be the same stand again.
            at = match at.checked_sub(stand.faster) {
                Some(behind) => behind,
                None => return nearest,
            };
        }
    }

    /// After how many uses of all walkers one of them uses a page that is at these positions.
    pub(super) fn distance(&self, positions: &[u32]) -> u64 {
        positions.iter().map(|position| self.distance_at(*position)).min().unwrap_or(NEVER)
    }

    /// For each gap behind a walker: the distance of the page at its end, and how many pages it has.
    pub(super) fn gaps(&self) -> impl Iterator<Item = (u64, usize)> {
        self.stands.iter().enumerate().map(|(nth, stand)| {
            let before = match nth.checked_sub(1) {
                Some(before) => self.stands[before].place,
                None if !self.cyclic => return (NEVER, self.len),
                None => self.stands[self.stands.len() - 1].place,
            };
            let pages = match stand.place.checked_sub(before) {
                None | Some(0) => stand.place + self.len - before,
                Some(pages) => pages,
            };
            let last = stand.place.checked_sub(1).unwrap_or(self.len - 1);
            (self.distance_at(last as u32), pages)
        })
    }

    /// The stretches between walkers, for both classes.
    pub(super) fn stretches(&self) -> impl Iterator<Item = Stretch> {
        (0..=self.stands.len()).flat_map(|nth| {
            let start = nth.checked_sub(1).map_or(0, |before| self.stands[before].place);
            let end = self.stands.get(nth).map_or(self.len, |stand| stand.place);
            [false, true].map(|kept| Stretch { kept, start, end })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::WalkerId;
    use crate::random::Random;

    /// Compared with a look at every walker.
    #[test]
    fn distances_are_those_of_the_first_to_come() {
        let mut random = Random(5);
        for round in 0..400 {
            let (len, cyclic) = (1 + random.below(60), round % 3 > 0);
            let places: Vec<Place> = (0..random.below(12))
                .map(|id| {
                    let weight = u64::from(random.below(if round % 2 == 0 { 3 } else { 40 }));
                    let mut place = Place::new(WalkerId(id), weight);
                    place.place = random.below(len) as usize;
                    place
                })
                .collect();
            let standing = Standing::new(&places, len as usize, cyclic);
            assert_eq!(standing.is_empty(), !places.iter().any(Place::is_known));
            for position in 0..len {
                let of = |place: &Place| match (position as usize).checked_sub(place.place) {
                    Some(uses) => Some(uses as u64 * place.weight),
                    None if cyclic => Some((position as usize + len as usize - place.place) as u64 * place.weight),
                    None => None,
                };
                let least = places.iter().filter(|place| place.is_known()).filter_map(of).min().unwrap_or(NEVER);
                assert_eq!(standing.distance_at(position), least, "{position} of {len}, {cyclic}: {places:?}");
            }
            if cyclic && !standing.is_empty() {
                assert_eq!(standing.gaps().map(|(_, pages)| pages).sum::<usize>(), len as usize);
            }
        }
    }
}
