//! Engines that copy weights into memory of their own.
//!
//! outcore takes pages of files away, and no memory of the program's. An engine that copies what it reads takes as much
//! as the files have, whatever the limit, and the kernel ends it without a word. So it is said before: as soon as the
//! program's own memory has grown with what it read, on and on, and would exceed the limit before all files are read.

use outcore::Bytes;

use crate::engine::Engine;
use crate::limit::{self, Ceiling};

/// The fewest bytes that count as copied: less is no reason to worry.
const LEAST: u64 = 32 << 20;
/// And the least part of the room that the program had: an engine may copy some weights, and leave the others; and
/// what is allocated in the moment of the first reads counts as copied, up to [`WIDER`] times what these read.
const ROOM_PART: u64 = 3;
/// Copies are at least one byte in so many that were read: pages at the edges of tensors are read twice. What grows
/// beside a longer walk over the files is no copy.
const READ_PART: u64 = 3;
/// The limit is looked up again when so much more was copied, as a part of what was copied before.
const AGAIN_PART: u64 = 16;
/// Growth counts as copied up to this many times what was read meanwhile: weights become wider, as 16 bits become 32.
const WIDER: u64 = 2;
/// Whoever copies weights copies on and on. Of what was read, in so many parts, all but one come with copies, at least
/// one byte in [`READ_PART`]: the first part may be of weights that stay where they are. What another thread fills
/// meanwhile, as keys and values, comes once.
const PARTS: u32 = 4;
/// The most steps that are kept of how much was read and how much copied. Where there are more, each second one goes.
const STEPS: usize = 256;

/// One measurement.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    /// The program's own memory.
    pub own: u64,
    /// Bytes of the pages that the program has read so far.
    pub used: u64,
    /// Bytes of all mapped files.
    pub of_files: u64,
    /// The least that pages take beside the program's own memory.
    pub pages: u64,
}

/// Follows the program's own memory while it first reads its files.
#[derive(Debug, Default)]
pub struct Copies {
    /// The program's own memory before it read anything.
    before: u64,
    /// The most that it was.
    highest: u64,
    last: Option<Look>,
    /// What was read between the two measurements before, and not found in copies yet: memory may be measured a moment
    /// later than what fills it.
    read_before: u64,
    /// How much that has grown with what was read.
    copied: u64,
    /// How much was read and how much copied, at some of the measurements.
    steps: Vec<(u64, u64)>,
    /// How much was copied when copies last kept step with what was read.
    in_step: u64,
    /// The limit, and how much was copied when it was last looked up.
    ceiling: Option<Ceiling>,
    looked_up: u64,
    is_said: bool,
}

impl Copies {
    /// Whether the line was said.
    pub fn is_said(&self) -> bool {
        self.is_said
    }

    /// Another file was mapped, after all before it were read. What the program has by now is no copy of that one.
    pub fn begin_again(&mut self) {
        self.last = None;
    }

    /// How much was copied, as long as that kept step with what was read.
    pub fn in_step(&self) -> u64 {
        self.in_step
    }

    /// Takes a measurement. Returns whether the program reads on, so that the next one is to come soon.
    pub fn look(&mut self, look: Look) -> bool {
        let Some(last) = self.last.replace(look) else {
            (self.before, self.highest) = (look.own, look.own);
            self.steps = vec![(look.used, self.copied)];
            return false;
        };
        let read = look.used.saturating_sub(last.used);
        // Frames are counted a moment before they have memory, so what is measured is often too little: only what is
        // more than ever before has grown. So copies that last a moment count once. Memory that grows while nothing is
        // read holds no copies: keys and values, for one.
        let may_be = read + self.read_before;
        let copied = look.own.saturating_sub(self.highest).min(may_be * WIDER);
        self.copied += copied;
        self.highest = self.highest.max(look.own);
        // Each byte was copied once: what was read earlier first.
        self.read_before = read.min(may_be - copied.div_ceil(WIDER));
        self.step(look.used);
        if self.keeps_step() {
            self.in_step = self.copied;
        }
        read > 0
    }

    fn step(&mut self, used: u64) {
        if let Some((at, copied)) = self.steps.last_mut()
            && *at == used
        {
            *copied = self.copied;
            return;
        }
        if self.steps.len() >= STEPS {
            let mut stays = false;
            self.steps.retain(|_| {
                stays = !stays;
                stays
            });
        }
        self.steps.push((used, self.copied));
    }

    /// How much was copied by the last measurement before so much was read, or at it.
    fn copied_at(&self, used: f64) -> u64 {
        let after = self.steps.partition_point(|(at, _)| *at as f64 <= used);
        after.checked_sub(1).and_then(|at| self.steps.get(at)).map_or(0, |(_, copied)| *copied)
    }

    /// Whether copies came with all parts of what was read but for one. What came between two measurements came with
    /// one part, the one in which the second was taken: of memory that grew once, seen by one measurement behind a long
    /// pause, nothing says that it grew with all that was read meanwhile. So few measurements cannot tell.
    fn keeps_step(&self) -> bool {
        let (Some((first, _)), Some((last, _))) = (self.steps.first(), self.steps.last()) else { return false };
        if self.steps.len() <= PARTS as usize {
            return false;
        }
        let part = (last - first) as f64 / f64::from(PARTS);
        let at = |number: u32| self.copied_at(*first as f64 + part * f64::from(number));
        let with = (0..PARTS).filter(|number| (at(number + 1) - at(*number)) as f64 >= part / READ_PART as f64);
        part > 0.0 && with.count() as u32 + 1 >= PARTS
    }

    /// What the process would hold at the end of its files, if it copies on as it did so far and that comes too near to
    /// `most`. There is memory that is measured nowhere, and pages of the program's own code must stay too.
    fn would_hold(&self, most: u64) -> Option<u64> {
        let Look { used, of_files, pages, .. } = self.last?;
        let room = most.saturating_sub(self.before).saturating_sub(pages);
        if self.copied < LEAST.max(room / ROOM_PART) || self.copied < used / READ_PART {
            return None;
        }
        let more = of_files.saturating_sub(used) as f64 * self.copied as f64 / used.max(1) as f64;
        let held = self.highest.saturating_add(more as u64).saturating_add(pages);
        (held.saturating_add(limit::reserve(most, 0.0)) > most).then_some(held)
    }

    /// The line to be said now, if it is to be said. `ceiling` reads files of the kernel's, so it is called seldom, and
    /// only where something was copied.
    pub fn warning(&mut self, ceiling: impl FnOnce() -> Option<Ceiling>) -> Option<String> {
        let Look { used, of_files, .. } = self.last?;
        if self.is_said || self.copied < LEAST || self.copied < used / READ_PART || !self.keeps_step() {
            return None;
        }
        if self.ceiling.is_none() || self.copied > self.looked_up + self.looked_up / AGAIN_PART {
            (self.looked_up, self.ceiling) = (self.copied, ceiling());
        }
        let ceiling = self.ceiling.as_ref()?;
        let held = self.would_hold(ceiling.bytes)?;
        self.is_said = true;
        Some(format!(
            "the program copies weights into memory of its own: {} so far, of {} that it has read. At the end of {} of \
             files it would hold {}, and {ceiling}. {}",
            Bytes::new(self.copied),
            Bytes::new(used),
            Bytes::new(of_files),
            Bytes::new(held),
            Engine::of_this_process().remedy(),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PART: u64 = 64 << 20;

    /// What was copied, after measurements that each find so much more memory of the program's, and as much more read.
    fn in_step(grown: &[u64]) -> u64 {
        let (mut copies, mut own) = (Copies::default(), 0);
        copies.look(Look { own, used: 0, of_files: 100 * PART, pages: 0 });
        for (number, more) in (1..).zip(grown) {
            own += more;
            copies.look(Look { own, used: number * PART, of_files: 100 * PART, pages: 0 });
        }
        copies.in_step()
    }

    #[test]
    fn regression_memory_that_grows_with_the_first_reads_alone_is_no_copy() {
        assert_eq!(in_step(&[PART, 0]), 0);
        assert_eq!(in_step(&[PART, 0, 0, 0, 0, 0]), 0);
        assert_eq!(in_step(&[PART; 6]), 6 * PART);
        assert_eq!(in_step(&[0, PART, PART, PART]), 3 * PART);
    }

    #[test]
    fn regression_memory_that_grows_once_in_a_long_pause_between_measurements_is_no_copy() {
        // In MiB: what was read, and the program's own memory. It grew once, by 150, while 38 were read before the
        // second measurement. Then there are more of them than parts, most of them in the last part.
        const MIB: u64 = 1 << 20;
        let looks = [(0, 2), (38, 152), (44, 152), (48, 152), (52, 152), (56, 152), (120, 152)];
        let mut copies = Copies::default();
        for (used, own) in looks {
            copies.look(Look { own: own * MIB, used: used * MIB, of_files: 400 * MIB, pages: 40 * MIB });
            assert!(!copies.keeps_step(), "{used} MiB were read");
            // Were these copies, there would be enough of them to be named.
            assert_eq!(copies.would_hold(240 * MIB).is_some(), used > 0, "{used} MiB were read");
        }
        assert_eq!((copies.in_step(), copies.copied), (0, 76 * MIB));
    }

    #[test]
    fn copies_are_seen_behind_a_long_pause_too() {
        // A long pause, then a measurement with each part that follows.
        let (mut copies, mut seen) = (Copies::default(), Vec::new());
        for used in [0, 10, 20, 120, 130, 140, 150, 160, 170, 180, 190] {
            let bytes = used << 20;
            copies.look(Look { own: bytes, used: bytes, of_files: 400 << 20, pages: 0 });
            seen.push(copies.in_step() >> 20);
        }
        assert_eq!(seen.last(), Some(&190), "{seen:?}");
    }
}
