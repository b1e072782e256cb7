//! Tells whoever goes through a model's files by offset from whoever goes through them by layers.
//!
//! Within a tensor both use the same pages, one behind the other. They differ where the order of layers leaves the
//! order of bytes: there one use tells.

use std::collections::{HashMap, HashSet};

use crate::experts::ExpertId;

/// So many uses in a row have to tell the same.
const ENOUGH: i32 = 3;
/// Pages that may be passed over between two uses: those that are there are used unseen, as those are that hold the
/// headers of several files.
const PASSED: u32 = 4;

#[derive(Debug, Default)]
pub struct Scan {
    /// Where the order of layers leaves the order of bytes: the next pages with which it goes on, by the last two pages
    /// before. One does not tell: the last page of a tensor is also the first one of the tensor behind it.
    breaks: HashMap<(u32, u32), Vec<u32>>,
    /// The last two pages that were used.
    before: Option<(u32, u32)>,
    /// Uses in a row that went on by offset; elsewhere, if less than 0.
    by_offset: i32,
}

impl Scan {
    /// Beside this order of pages, a cycle.
    pub fn beside(order: &[u32]) -> Self {
        let mut breaks: HashMap<(u32, u32), Vec<u32>> = HashMap::new();
        let mut goes_on: HashSet<(u32, u32)> = HashSet::new();
        let behind = |steps| order.iter().cycle().skip(steps);
        for (at, ((before, page), next)) in order.iter().zip(behind(1)).zip(behind(2)).enumerate() {
            if page.checked_add(1) == Some(*next) {
                goes_on.insert((*before, *page));
            } else if page != next {
                breaks.entry((*before, *page)).or_default().extend(behind(at + 2).take(1 + PASSED as usize));
            }
        }
        breaks.retain(|pages, _| !goes_on.contains(pages));
        Self { breaks, before: None, by_offset: 0 }
    }

    /// The page that was used last.
    pub fn last(&self) -> Option<u32> {
        self.before.map(|(_, last)| last)
    }

    /// Beside this order from now on; what was found so far stays.
    pub fn go_on_beside(&mut self, order: &[u32]) {
        self.breaks = Self::beside(order).breaks;
    }

    /// There was a fault of this page. `may_pass` says of a number whether a program that uses it raises no fault: it
    /// sees that page, or there is none. Returns whether uses go by offset now, once it is known.
    pub fn fault(&mut self, page: u32, may_pass: impl Fn(u32) -> bool) -> Option<bool> {
        let before = self.before.filter(|(_, last)| *last != page);
        if self.before.is_none_or(|(_, last)| last != page) {
            self.before = Some((self.before.map_or(page, |(_, last)| last), page));
        }
        let (last, next) = (before?.1, self.breaks.get(&before?)?);
        let mut passed = last.saturating_add(1)..page;
        let goes_on = last < page && passed.len() <= PASSED as usize && passed.all(may_pass);
        self.by_offset = match (goes_on, next.contains(&page)) {
            // Both orders go on so.
            (true, true) => return None,
            (true, false) => (self.by_offset + 1).clamp(0, ENOUGH),
            (false, _) => (self.by_offset - 1).clamp(-ENOUGH, 0),
        };
        (self.by_offset.abs() == ENOUGH).then_some(self.by_offset > 0)
    }
}

/// Experts in a row that are used one behind the other, from which on the others of their layer are taken to follow so.
const EXPERTS: u32 = 4;

/// Tells whoever goes through experts by offset from whoever uses some of them.
#[derive(Debug, Default)]
pub struct ExpertScan {
    last: Option<(u32, ExpertId)>,
    /// Experts in a row.
    crossed: u32,
}

impl ExpertScan {
    /// This page of an expert is touched. Returns whether experts are touched by offset.
    pub fn used(&mut self, page: u32, expert: ExpertId) -> bool {
        let before = self.last.replace((page, expert));
        if let Some((last, of)) = before {
            match page.checked_sub(last) {
                Some(0) if of == expert => {}
                Some(passed) if passed <= 1 + PASSED => self.crossed += u32::from(of != expert),
                _ => self.crossed = 0,
            }
        }
        self.crossed >= EXPERTS
    }
}

#[cfg(test)]
mod tests {
    use super::{ExpertId, ExpertScan, Scan};

    const NONE: fn(u32) -> bool = |_| false;

    /// Three layers of three tensors with two pages each, of which the last comes first.
    const LAYERS: [u32; 18] = [4, 5, 0, 1, 2, 3, 10, 11, 6, 7, 8, 9, 16, 17, 12, 13, 14, 15];

    #[test]
    fn one_layer_tells() {
        let mut scan = Scan::beside(&LAYERS);
        let found: Vec<Option<bool>> = (0..18).map(|page| scan.fault(page, NONE)).collect();
        assert_eq!(found.iter().position(Option::is_some), Some(10), "{found:?}");
        assert!(found.iter().flatten().all(|by_offset| *by_offset));
        // And back, within a layer or two.
        let found: Vec<Option<bool>> = LAYERS.iter().map(|page| scan.fault(*page, NONE)).collect();
        assert_eq!(found.iter().flatten().last(), Some(&false), "{found:?}");
        assert!(found[..13].contains(&Some(false)), "{found:?}");
    }

    #[test]
    fn regression_a_page_of_two_tensors_tells_nothing() {
        // Each layer's second tensor comes first, and shares a page with the other one.
        let layers: Vec<u32> = (0..20).flat_map(|layer| [3, 4, 5, 0, 1, 2, 3].map(|page| 6 * layer + page)).collect();
        let mut scan = Scan::beside(&layers);
        assert!(layers.iter().chain(&layers).all(|page| scan.fault(*page, NONE) != Some(true)));
        assert!((0..60).any(|page| scan.fault(page, NONE) == Some(true)));
    }

    /// Whoever read the headers of several files sees the first page of each, so a scan has no fault there.
    #[test]
    fn regression_pages_that_are_there_are_passed_over() {
        // Layers of six pages, in the order of their names: 0, 1, 10, 11, ..., twelve in each of 4 files. Behind each
        // file a number is left out.
        let mut layers: Vec<u32> = (0..48).collect();
        layers.sort_by_key(u32::to_string);
        let mut places: Vec<(u32, u32)> = layers.into_iter().zip((0..48).map(|at| 6 * at + at / 12)).collect();
        places.sort_unstable();
        let order: Vec<u32> = places.iter().flat_map(|(_, first)| *first..first + 6).collect();
        let may_pass = |page: u32| [0, 72].contains(&(page % 73));
        let mut scan = Scan::beside(&order);
        let found = (0..291).filter(|page| !may_pass(*page)).find(|page| scan.fault(*page, may_pass) == Some(true));
        assert!(found.is_some_and(|page| page < 100), "{found:?}");
        // By layers nothing changes.
        let mut scan = Scan::beside(&order);
        let mut faults = order.iter().chain(&order).filter(|page| !may_pass(**page));
        assert!(faults.all(|page| scan.fault(*page, may_pass) != Some(true)));
    }

    #[test]
    fn experts_one_behind_the_other_are_a_scan() {
        // Three pages each.
        let expert = |page: u32| ExpertId { layer: 0, expert: page / 3 };
        let mut scan = ExpertScan::default();
        let found: Vec<bool> = (0..24).map(|page| scan.used(page, expert(page))).collect();
        assert_eq!(found.iter().position(|is_scan| *is_scan), Some(12));
        assert!(found[12..].iter().all(|is_scan| *is_scan));
        assert!(!scan.used(3, expert(3)));
        // Some experts of many, in the order of their numbers.
        let mut scan = ExpertScan::default();
        let some = [0, 1, 5, 9, 10, 14].into_iter().flat_map(|expert| 3 * expert..3 * expert + 3);
        assert!(some.cycle().take(200).all(|page| !scan.used(page, expert(page))));
    }

    #[test]
    fn whoever_goes_elsewhere_tells_nothing() {
        let mut scan = Scan::beside(&LAYERS);
        assert!((0..200).all(|n| scan.fault(n * 7 % 18, NONE) != Some(true)));
        let mut scan = Scan::beside(&(0..100).collect::<Vec<_>>());
        assert!((0..300).all(|n| scan.fault(n % 100, NONE) != Some(true)));
        assert_eq!(Scan::beside(&[]).fault(3, NONE), None);
    }
}
