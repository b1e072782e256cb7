//! What a program has used that nobody saw.
//!
//! A page that is published raises no fault. But where the order of use is known, the faults before and behind it tell:
//! the pages in between were used.

use std::collections::HashMap;

/// An order of pages that repeats, and the place of the last fault in it.
#[derive(Debug)]
pub struct Followed {
    order: Vec<u32>,
    /// The places of each page, ascending.
    places: HashMap<u32, Vec<u32>>,
    at: usize,
}

impl Followed {
    /// The use that comes next is at this place of the order.
    pub fn new(order: Vec<u32>, next: usize) -> Self {
        let mut places: HashMap<u32, Vec<u32>> = HashMap::new();
        for (at, page) in order.iter().enumerate() {
            places.entry(*page).or_default().push(at as u32);
        }
        let at = next.checked_sub(1).unwrap_or(order.len().saturating_sub(1));
        let at = at.min(order.len().saturating_sub(1));
        Self { order, places, at }
    }

    /// There was a fault on `page`. Returns the pages between the fault before and this one, if the program goes
    /// through the order forwards; none if it has gone elsewhere. A step of more than half of the order is taken for a
    /// step back.
    pub fn passed(&mut self, page: u32) -> Vec<u32> {
        let Some(places) = self.places.get(&page) else { return Vec::new() };
        let (at, len) = (self.at, self.order.len());
        let next = places.get(places.partition_point(|place| *place as usize <= at)).or(places.first());
        let next = next.map_or(0, |place| *place as usize);
        let steps = (next + len - at - 1) % len;
        let first = at + 1;
        self.at = next;
        if steps > len / 2 { Vec::new() } else { (first..first + steps).map(|place| self.order[place % len]).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::Followed;

    #[test]
    fn what_lies_between_two_faults_was_used() {
        let mut followed = Followed::new(vec![5, 6, 7, 5, 8, 9, 10, 11], 0);
        assert!(followed.passed(5).is_empty());
        assert_eq!(followed.passed(7), [6]);
        // The later of its places comes next.
        assert!(followed.passed(5).is_empty());
        assert_eq!(followed.passed(10), [8, 9]);
        // Around the end.
        assert_eq!(followed.passed(6), [11, 5]);
        // Back, and somewhere else.
        assert_eq!(followed.passed(5), [7]);
        assert!(followed.passed(7).is_empty());
        assert!(followed.passed(99).is_empty());
        assert!(Followed::new(Vec::new(), 3).passed(1).is_empty());
        // In the middle.
        assert_eq!(Followed::new(vec![5, 6, 7, 8, 9], 2).passed(9), [7, 8]);
    }
}
