//! A folder on a disk whose power is cut: whatever was not synced is lost, in any order, and torn at 512 bytes.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::io;

use parking_lot::Mutex;
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::strategy::ValueTree;
use twox_hash::XxHash3_64;

use super::generation::Generation;
use super::ledger::Ledger;
use super::manifest::{self, Failed, Files, Part, Terms};
use super::tree::BLOCK;
use crate::error::{Error, ErrorKind, Result};

const SECTOR: usize = 512;
const PAGE: usize = 8 * SECTOR;

type Sector = [u8; SECTOR];

/// What a disk does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lies {
    Never,
    /// It says that it has synced this file, and has not.
    Syncs(Part),
}

#[derive(Debug)]
struct Disk {
    lies: Lies,
    durable: RefCell<HashMap<(Part, u64), Sector>>,
    /// What was written since the last sync, by sector, in order.
    pending: RefCell<BTreeMap<(u8, u64), Vec<Sector>>>,
    /// So many calls until the power is cut.
    calls: RefCell<u64>,
}

fn key(part: Part, sector: u64) -> (u8, u64) {
    (u8::from(part == Part::Pages), sector)
}

impl Disk {
    fn new(lies: Lies) -> Self {
        Self { lies, durable: RefCell::default(), pending: RefCell::default(), calls: RefCell::new(u64::MAX) }
    }

    fn call(&self) -> io::Result<()> {
        let left = self.calls.borrow().checked_sub(1);
        *self.calls.borrow_mut() = left.ok_or_else(|| io::Error::other("the power is cut"))?;
        Ok(())
    }

    /// The power is cut, and comes back. `choose(n)` is below n.
    fn cut(&self, mut choose: impl FnMut(usize) -> usize) {
        for ((part, sector), versions) in std::mem::take(&mut *self.pending.borrow_mut()) {
            let part = if part == 0 { Part::Manifest } else { Part::Pages };
            if let Some(last) = choose(versions.len() + 1).checked_sub(1) {
                self.durable.borrow_mut().insert((part, sector), versions[last]);
            }
        }
        *self.calls.borrow_mut() = u64::MAX;
    }
}

impl Files for Disk {
    fn read(&self, part: Part, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        for (n, to) in bytes.as_chunks_mut::<SECTOR>().0.iter_mut().enumerate() {
            let sector = offset / SECTOR as u64 + n as u64;
            let pending = self.pending.borrow();
            let newest = pending.get(&key(part, sector)).and_then(|versions| versions.last());
            *to = newest.or(self.durable.borrow().get(&(part, sector))).copied().unwrap_or([0; SECTOR]);
        }
        Ok(())
    }

    fn write(&self, part: Part, offset: u64, bytes: &[u8]) -> io::Result<()> {
        for (n, from) in bytes.as_chunks::<SECTOR>().0.iter().enumerate() {
            // In the middle of a write, too.
            self.call()?;
            let sector = offset / SECTOR as u64 + n as u64;
            self.pending.borrow_mut().entry(key(part, sector)).or_default().push(*from);
        }
        Ok(())
    }

    fn sync(&self, part: Part) -> io::Result<()> {
        self.call()?;
        if self.lies != Lies::Syncs(part) {
            let all = std::mem::take(&mut *self.pending.borrow_mut());
            let (synced, rest) =
                all.into_iter().partition(|((is_pages, _), _)| (*is_pages == 1) == (part == Part::Pages));
            *self.pending.borrow_mut() = rest;
            for ((_, sector), versions) in synced as BTreeMap<(u8, u64), Vec<Sector>> {
                self.durable.borrow_mut().extend(versions.last().map(|last| ((part, sector), *last)));
            }
        }
        Ok(())
    }

    fn length(&self, _: Part) -> io::Result<u64> {
        Ok(u64::MAX)
    }

    fn take_room(&self, _: Part, _: u64) -> io::Result<()> {
        self.call()
    }
}

/// What a generation holds: the pages, and the note. Its table is the number of pages.
type Contents = (Vec<u8>, Vec<u8>);

fn bytes_of(value: u8) -> Vec<u8> {
    let mut bytes = vec![value; PAGE];
    bytes[SECTOR] = !value;
    bytes
}

/// What is read of a folder. Every page has the bytes that it was written with, or the error says otherwise.
fn contents(disk: &Disk, ledger: &Ledger) -> Result<Contents> {
    manifest::verify(disk, ledger)?;
    let pages = (0..ledger.page_count() as u32).map(|page| {
        let mut bytes = vec![0; PAGE];
        if let Some(at) = ledger.page(page) {
            disk.read(Part::Pages, at.place * PAGE as u64, &mut bytes).unwrap();
        }
        bytes[0]
    });
    let pages: Vec<u8> = pages.collect();
    assert!(pages.is_empty() || ledger.table() == pages.len().to_le_bytes());
    Ok((pages, ledger.note().to_vec()))
}

struct World {
    disk: Disk,
    ledger: Mutex<Ledger>,
    keep: usize,
    now: Vec<u8>,
    /// What was committed, by generation.
    committed: BTreeMap<Generation, Contents>,
}

#[derive(Clone, Debug)]
enum Step {
    Write(Index, u8),
    Sweep(u8),
    Grow(usize),
    Commit(usize),
    RollBack,
    /// The power is cut, after so many calls of a commit with a note of so many bytes if there is one.
    Cut(Option<(u64, usize)>),
    /// From an older generation, which was kept.
    GoBack(Index),
}

#[derive(Debug)]
struct Wrong(String);

impl World {
    fn new(lies: Lies, keep: usize) -> Self {
        let disk = Disk::new(lies);
        let ledger = Ledger::new([7; 16], PAGE as u64, keep);
        manifest::create(&disk, &ledger).unwrap();
        let ledger = Mutex::new(
            manifest::open(&disk, Terms { page_bytes: Some(PAGE as u64), keep, from: None }).unwrap().ledger,
        );
        let committed = BTreeMap::from([(Generation::default(), Default::default())]);
        Self { disk, ledger, keep, now: Vec::new(), committed }
    }

    fn write(&mut self, page: u32, value: u8) {
        let slot = self.ledger.lock().begin_write(page).unwrap();
        let bytes = bytes_of(value);
        self.disk.write(Part::Pages, slot * PAGE as u64, &bytes).unwrap();
        self.ledger.lock().end_write(page, XxHash3_64::oneshot(&bytes));
        self.now[page as usize] = value;
    }

    fn commit(&mut self, note: &[u8]) -> Result<(), Failed> {
        let table = self.now.len().to_le_bytes();
        let next = self.ledger.lock().head().newest().next();
        // Whether or not the call returns, this may be there afterwards.
        self.committed.insert(next, (self.now.clone(), note.to_vec()));
        manifest::commit(&self.disk, &self.ledger, &table, note).map(|made| assert_eq!(made, next))
    }

    /// Opens the folder anew. It must be in the newest generation, or, if `may_be_newer`, in the one behind it.
    fn reopen(&mut self, from: Option<Generation>, may_be_newer: bool) -> Result<(), Wrong> {
        let newest = self.ledger.lock().head().newest();
        let wrong = |error: Error| Wrong(format!("generation {newest}: {error}"));
        let opened = manifest::open(&self.disk, Terms { page_bytes: Some(PAGE as u64), keep: self.keep, from })
            .map_err(wrong)?;
        self.ledger = Mutex::new(opened.ledger);
        let found = self.ledger.lock().head().newest();
        if found != newest && !(may_be_newer && found == newest.next()) {
            return Err(Wrong(format!("generation {found} in place of {newest}")));
        }
        let expected = from.unwrap_or(found);
        let contents = contents(&self.disk, &self.ledger.lock()).map_err(wrong)?;
        if contents != self.committed[&expected] && expected != Generation::default() {
            return Err(Wrong(format!("generation {expected} holds {contents:?}")));
        }
        self.now = contents.0;
        self.committed.retain(|generation, _| *generation <= found);
        Ok(())
    }

    fn step(&mut self, step: Step, choose: &mut impl FnMut(usize) -> usize) -> Result<(), Wrong> {
        let note = |len: usize, salt: usize| (0..len).map(|n| (n * 7 + salt) as u8).collect::<Vec<u8>>();
        match step {
            Step::Write(page, value) if !self.now.is_empty() => self.write(page.index(self.now.len()) as u32, value),
            Step::Write(..) => {}
            Step::Sweep(value) => (0..self.now.len() as u32).for_each(|page| self.write(page, value ^ page as u8)),
            Step::Grow(more) => {
                self.now.resize(self.now.len() + more, 0);
                self.ledger.lock().grow(self.now.len());
            }
            Step::Commit(len) => self.commit(&note(len, self.committed.len())).unwrap(),
            Step::RollBack => {
                self.ledger.lock().roll_back();
                let mut before = self.committed[&self.ledger.lock().head().newest()].0.clone();
                before.resize(self.now.len(), 0);
                self.now = before;
            }
            Step::Cut(None) => {
                self.disk.cut(choose);
                self.reopen(None, false)?;
            }
            Step::Cut(Some((calls, len))) => {
                *self.disk.calls.borrow_mut() = calls;
                let _ = self.commit(&note(len, 77));
                self.disk.cut(choose);
                self.reopen(None, true)?;
            }
            Step::GoBack(which) => {
                self.disk.cut(&mut *choose);
                let kept: Vec<Generation> = self.ledger.lock().kept().collect();
                let from = kept[which.index(kept.len())];
                self.reopen(Some(from), false)?;
                // All of it is written before anything is committed, as a program does that repeats a step.
                if choose(2) == 0 {
                    self.step(Step::Sweep(choose(256) as u8), choose)?;
                }
                self.commit(&note(20, 3)).unwrap();
                self.step(Step::Sweep(choose(256) as u8), choose)?;
            }
        }
        Ok(())
    }

    /// Every kept generation holds what it was committed with.
    fn check_kept(&self) -> Result<(), Wrong> {
        for generation in self.ledger.lock().kept() {
            let terms = Terms { page_bytes: Some(PAGE as u64), keep: self.keep, from: Some(generation) };
            let wrong = |error: Error| Wrong(format!("generation {generation} is kept: {error}"));
            let opened = manifest::open(&self.disk, terms).map_err(wrong)?;
            // What was under way when the power was cut stays in its head until the next commit.
            let newest = opened.ledger.head().newest();
            if opened.lost.iter().any(|(lost, _)| lost.is_some_and(|lost| lost <= newest)) {
                return Err(Wrong(format!("{:?}", opened.lost)));
            }
            let contents = contents(&self.disk, &opened.ledger).map_err(wrong)?;
            if contents != self.committed[&generation] && generation != Generation::default() {
                return Err(Wrong(format!("generation {generation} is kept and holds {contents:?}")));
            }
        }
        Ok(())
    }
}

fn run(lies: Lies, keep: usize, steps: Vec<Step>, seed: u64) -> Result<World, Wrong> {
    let mut world = World::new(lies, keep);
    let mut state = seed;
    let mut choose = |below: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % below
    };
    for step in steps {
        world.step(step, &mut choose)?;
        world.check_kept()?;
    }
    Ok(world)
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let note = || prop_oneof![Just(0usize), 1usize..100, 4000usize..9000];
    let step = prop_oneof![
        6 => (any::<Index>(), any::<u8>()).prop_map(|(page, value)| Step::Write(page, value)),
        2 => any::<u8>().prop_map(Step::Sweep),
        1 => (1usize..5).prop_map(Step::Grow),
        1 => Just(Step::Grow(300)),
        4 => note().prop_map(Step::Commit),
        1 => Just(Step::RollBack),
        1 => Just(Step::Cut(None)),
        3 => (0u64..80, note()).prop_map(|at| Step::Cut(Some(at))),
        1 => any::<Index>().prop_map(Step::GoBack),
    ];
    prop::collection::vec(step, 1..40)
}

/// `OUTCORE_CUTS`, else 100.
fn cases() -> u32 {
    std::env::var("OUTCORE_CUTS").ok().and_then(|cases| cases.parse().ok()).unwrap_or(100)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases()))]
    /// After a power cut at any call, the newest generation is complete and holds what it was committed with: that of
    /// the last commit that has returned, or the one that was under way. So do all that are kept.
    #[test]
    fn a_power_cut_leaves_whole_generations(steps in steps(), keep in 1usize..4, seed in any::<u64>()) {
        let outcome = run(Lies::Never, keep, steps, seed).map(drop);
        prop_assert!(outcome.is_ok(), "{outcome:?}");
    }

    /// A flipped bit of the manifest or of a page is an error, or leaves a generation that was kept.
    #[test]
    fn a_flipped_bit_never_mixes_generations(
        steps in steps(), keep in 1usize..4, seed in any::<u64>(), which in any::<Index>(), bit in 0..SECTOR * 8
    ) {
        let world = run(Lies::Never, keep, steps, seed).map_err(|wrong| TestCaseError::fail(wrong.0))?;
        world.disk.cut(|versions| versions - 1);
        {
            let mut sectors = world.disk.durable.borrow_mut();
            let mut keys: Vec<_> = sectors.keys().copied().collect();
            keys.sort_by_key(|(part, sector)| key(*part, *sector));
            let at = keys[which.index(keys.len())];
            sectors.get_mut(&at).unwrap()[bit / 8] ^= 1 << (bit % 8);
        }
        let terms = Terms { page_bytes: Some(PAGE as u64), keep, from: None };
        match manifest::open(&world.disk, terms).map(|opened| opened.ledger) {
            Err(error) => prop_assert!(matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Unsupported), "{error}"),
            Ok(ledger) => match contents(&world.disk, &ledger) {
                Err(error) => prop_assert_eq!(error.kind(), ErrorKind::Corrupt),
                Ok(contents) => {
                    let newest = ledger.head().newest();
                    prop_assert!(newest == Generation::default() || contents == world.committed[&newest]);
                }
            },
        }
    }
}

/// How many of 300 runs on a disk that lies go wrong.
fn wrong_runs(lies: Lies) -> usize {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut wrong = 0;
    for seed in 0..300 {
        let steps = steps().new_tree(&mut runner).unwrap().current();
        wrong += usize::from(run(lies, 1, steps, seed).is_err());
    }
    wrong
}

/// Each of the two barriers of a commit is needed, and the tests above would see that one is missing.
#[test]
fn without_one_of_its_syncs_a_commit_is_not_durable() {
    assert_eq!(wrong_runs(Lies::Never), 0);
    for part in [Part::Manifest, Part::Pages] {
        let wrong = wrong_runs(Lies::Syncs(part));
        assert!(wrong > 30, "{wrong} runs without a sync of {part:?}");
    }
}

#[test]
fn a_commit_that_changes_little_writes_little() {
    let mut world = World::new(Lies::Never, 1);
    world.step(Step::Grow(20_000), &mut |_| 0).unwrap();
    world.step(Step::Sweep(1), &mut |_| 0).unwrap();
    world.commit(b"").unwrap();
    world.write(7, 9);
    let table = world.now.len().to_le_bytes();
    manifest::verify(&world.disk, &world.ledger.lock()).unwrap();
    let commit = world.ledger.lock().commit(&table, b"").unwrap();
    // One block of pages, one above it.
    assert_eq!(commit.blocks.len(), 2);
    world.ledger.lock().not_committed(commit);
    let rest = BLOCK as u64 * world.ledger.lock().room().1;
    assert!(rest < 1 << 20, "{rest} bytes of a manifest of 20,000 pages");
}

#[test]
fn sweeps_are_written_in_one_run() {
    let mut world = World::new(Lies::Never, 1);
    world.step(Step::Grow(100), &mut |_| 0).unwrap();
    for step in 0..6u64 {
        let slots: Vec<u64> = (0..100).map(|page| world.ledger.lock().begin_write(page).unwrap()).collect();
        let first = step % 2 * 100;
        assert_eq!(slots, (first..first + 100).collect::<Vec<_>>());
        (0..100).for_each(|page| world.ledger.lock().end_write(page, 0));
        manifest::commit(&world.disk, &world.ledger, b"", b"").unwrap();
    }
}
