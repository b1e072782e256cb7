//! A process that works with a store is killed at any moment, again and again in the same folder.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use outcore::{Bytes, ErrorKind};
use outcore_kv::{Put, StoreKey, StoreOptions, TenantId};
use outcore_testkit::harness::replay::{self, Case};
use outcore_testkit::harness::whole_name;

use crate::blocks::{Block, below, open, options};

/// The variables that tell the child its folder and its seed.
const FOLDER: &str = "OUTCORE_KV_FOLDER";
const SEED: &str = "OUTCORE_KV_SEED";
const TENANTS: u64 = 3;
const NUMBERS: u64 = 100;
/// Kills in one folder.
const KILLS_OF_A_FOLDER: usize = 10;

/// A folder's options follow from its number, so that the child has the same.
fn options_of(folder: u64) -> StoreOptions {
    let options = options().file_bytes(Bytes::kib(200)).coalesce(Bytes::kib(16)).compress(folder.is_multiple_of(3));
    let options = if folder.is_multiple_of(2) { options.key(StoreKey::from_bytes([9; 32])) } else { options };
    // Every fourth has to drop blocks.
    if folder.is_multiple_of(4) { options.capacity(Bytes::kib(600)) } else { options }
}

/// Tells the parent. It is a line that the test's own output has not.
fn say(what: std::fmt::Arguments<'_>) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "kv {what}").unwrap();
    out.flush().unwrap();
}

/// What the child does until it is killed.
fn work(folder: &Path, seed: u64) {
    let state = &mut seed.clone();
    let store = open(folder, options_of(seed % 8)).unwrap();
    say(format_args!("open"));
    loop {
        let (tenant, number) = (below(state, TENANTS), below(state, NUMBERS));
        match below(state, 60) {
            0..8 => {
                store.flush().unwrap();
                say(format_args!("flushed"));
            }
            8 => {
                say(format_args!("deleting {tenant} 0"));
                store.delete_tenant(TenantId::new(tenant)).unwrap();
                say(format_args!("deleted {tenant} 0"));
            }
            _ => {
                say(format_args!("putting {tenant} {number}"));
                if Block::known(tenant, number).put(&store) == Put::Queued {
                    say(format_args!("put {tenant} {number}"));
                }
            }
        }
    }
}

/// What must be in a folder, and what must not.
#[derive(Default)]
struct Promised {
    there: BTreeSet<(u64, u64)>,
    queued: BTreeSet<(u64, u64)>,
    gone: BTreeSet<(u64, u64)>,
    /// The child has the store open.
    is_open: bool,
}

impl Promised {
    fn hear(&mut self, line: &str) {
        let Some(said) = line.split_once("kv ").map(|(_, said)| said) else { return };
        let mut words = said.split(' ');
        let what = words.next().unwrap();
        let mut number = || words.next().map_or(0, |word| word.parse().unwrap());
        let block = (number(), number());
        match what {
            "open" => self.is_open = true,
            "putting" => drop(self.gone.remove(&block)),
            "put" => drop(self.queued.insert(block)),
            "flushed" => self.there.append(&mut self.queued),
            "deleting" => {
                self.there.retain(|known| known.0 != block.0);
                self.queued.retain(|known| known.0 != block.0);
            }
            "deleted" => self.gone.extend((0..NUMBERS).map(|number| (block.0, number))),
            _ => {}
        }
    }

    /// Opens the store and looks at all blocks.
    fn look(&mut self, folder: &Path, number: u64) {
        let store = open(folder, options_of(number)).unwrap();
        let mut there = BTreeSet::new();
        for block in (0..TENANTS * NUMBERS).map(|at| (at / NUMBERS, at % NUMBERS)) {
            let found = Block::known(block.0, block.1).is_in(&store);
            let may_miss = number.is_multiple_of(4) || !self.there.contains(&block);
            assert!(found || may_miss, "acknowledged and lost: {block:?}, {:?}", store.stats());
            assert!(!found || !self.gone.contains(&block), "deleted and came back: {block:?}");
            if found {
                there.insert(block);
            }
        }
        (self.there, self.queued, self.is_open) = (there, BTreeSet::new(), false);
    }
}

/// Kills a child that many times. `test` is the name of the test that is running.
fn kill(test: &str, seed: u64, kills: usize) {
    if let Some(folder) = std::env::var_os(FOLDER) {
        work(folder.as_ref(), std::env::var(SEED).unwrap().parse().unwrap());
    }
    let _case = Case::of(test, seed);
    let (name, state) = (whole_name(test), &mut seed.clone());
    let (mut folder, mut promised) = (tempfile::tempdir().unwrap(), Promised::default());
    let mut number = 0;
    for at in 0..kills {
        if at.is_multiple_of(KILLS_OF_A_FOLDER) {
            (folder, promised) = (tempfile::tempdir().unwrap(), Promised::default());
            number = below(state, 8);
        }
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", &name, "--nocapture", "--include-ignored"]).stdout(Stdio::piped());
        child.env(FOLDER, folder.path()).env(SEED, (below(state, 1 << 40) * 8 + number).to_string());
        let mut child = child.spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        // While the child goes on, so any moment may be the last.
        let heard = below(state, 300) as usize;
        lines.by_ref().take(heard).for_each(|line| promised.hear(&line.unwrap()));
        if promised.is_open {
            let error = open(folder.path(), options_of(number)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::PermissionDenied, "the child has it: {error}");
        }
        child.kill().unwrap();
        lines.for_each(|line| promised.hear(&line.unwrap_or_default()));
        let status = child.wait().unwrap();
        assert_eq!(status.code(), None, "the child ended by itself: {status}");
        promised.look(folder.path(), number);
    }
}

#[test]
fn a_kill_loses_nothing_that_was_acknowledged() {
    kill("a_kill_loses_nothing_that_was_acknowledged", replay::first_seed(), 30);
}

/// Takes about a minute.
#[test]
#[ignore = "a soak"]
fn a_thousand_kills_lose_nothing() {
    kill("a_thousand_kills_lose_nothing", replay::first_seed(), 1000);
}
