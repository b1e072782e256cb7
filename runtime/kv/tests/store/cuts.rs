//! Power cuts, replayed from the log of a real run: of what was written since the last sync, any part may be there.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::sync::Arc;

use outcore::Bytes;
use outcore_kv::files::{Access, Files, Memory, OpenFile};
use outcore_kv::{Put, Store, StoreKey, StoreOptions, TenantId};
use outcore_testkit::harness::replay::{self, Case};
use parking_lot::Mutex;

use crate::blocks::{BYTES, Block, below, held_in, model, options};

/// What a disk keeps whole.
const SECTOR: usize = 512;
/// Tenants of a run.
const TENANTS: u64 = 3;
/// Blocks of a tenant.
const NUMBERS: u64 = 100;
/// Seeds of a test.
const SEEDS: usize = 20;
/// Cuts of each run.
const CUTS_OF_A_RUN: usize = 10;

/// What a run did.
#[derive(Clone, Debug)]
enum Did {
    Make(usize, String),
    Write(usize, u64, Vec<u8>),
    Erase(usize, u64, u64),
    Cut(usize, u64),
    Sync(usize),
    Rename(String, String),
    Remove(String),
    SyncFolder,
    /// These blocks were acknowledged, by tenant and number.
    Acknowledged(BTreeSet<(u64, u64)>),
    /// The deletion of a tenant began.
    Deleting(u64),
    /// It is done: none of its blocks may come back.
    Deleted(u64),
    /// A block is put.
    Putting(u64, u64),
    /// An operation ended. It dropped these to make room.
    Evicted(BTreeSet<(u64, u64)>),
}

/// The files of a folder.
type Contents = BTreeMap<String, Vec<u8>>;

/// Records what is done to files in memory. Files that are there already are numbered from 0 on, by name.
#[derive(Debug)]
struct Recorder {
    files: Memory,
    log: Arc<Mutex<Vec<Did>>>,
    /// The number of each file that was opened, by its name.
    names: Mutex<(usize, HashMap<String, usize>)>,
}

#[derive(Debug)]
struct Recorded {
    file: Arc<dyn OpenFile>,
    number: usize,
    log: Arc<Mutex<Vec<Did>>>,
}

impl Recorder {
    fn on(before: &Contents) -> Self {
        let names = before.keys().enumerate().map(|(at, name)| (name.clone(), at)).collect();
        let files = Memory::with(before.clone());
        Self { files, log: Arc::default(), names: Mutex::new((before.len(), names)) }
    }
}

impl Files for Recorder {
    fn open(&self, name: &str, access: Access) -> io::Result<Arc<dyn OpenFile>> {
        // A file that is emptied is a new one here: the harder case, because the old one may stay.
        let file = self.files.open(name, access)?;
        let mut names = self.names.lock();
        let made = matches!(access, Access::Create | Access::Replace);
        let number = match names.1.get(name) {
            Some(number) if !made => *number,
            _ => {
                let number = names.0;
                names.0 += 1;
                names.1.insert(name.to_owned(), number);
                self.log.lock().push(Did::Make(number, name.to_owned()));
                number
            }
        };
        Ok(Arc::new(Recorded { file, number, log: self.log.clone() }))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut names = self.names.lock();
        if let Some(number) = names.1.remove(from) {
            names.1.insert(to.to_owned(), number);
        }
        self.log.lock().push(Did::Rename(from.to_owned(), to.to_owned()));
        self.files.rename(from, to)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.names.lock().1.remove(name);
        self.log.lock().push(Did::Remove(name.to_owned()));
        self.files.remove(name)
    }

    fn list(&self) -> io::Result<Vec<String>> {
        self.files.list()
    }

    fn sync_folder(&self) -> io::Result<()> {
        self.log.lock().push(Did::SyncFolder);
        Ok(())
    }

    fn lock(&self, access: Access) -> io::Result<Option<Box<dyn Any + Send + Sync>>> {
        self.files.lock(access)
    }
}

impl OpenFile for Recorded {
    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        self.file.read_at(into, at)
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.log.lock().push(Did::Write(self.number, at, bytes.to_vec()));
        self.file.write_at(bytes, at)
    }

    fn sync(&self) -> io::Result<()> {
        self.log.lock().push(Did::Sync(self.number));
        Ok(())
    }

    fn sync_all(&self) -> io::Result<()> {
        self.sync()
    }

    fn erase(&self, at: u64, len: u64) -> io::Result<()> {
        self.log.lock().push(Did::Erase(self.number, at, len));
        self.file.erase(at, len)
    }

    fn cut(&self, len: u64) -> io::Result<()> {
        self.log.lock().push(Did::Cut(self.number, len));
        self.file.cut(len)
    }

    fn length(&self) -> io::Result<u64> {
        self.file.length()
    }
}

/// Does what was done to a file since its last sync, or some of it: whole sectors, in any order.
fn torn(mut bytes: Vec<u8>, since: &[Did], state: &mut u64) -> Vec<u8> {
    // How much of it: nothing, all, or each sector with some chance.
    let chance = [0, 20, 50, 80, 100][below(state, 5) as usize];
    let mut order: Vec<&Did> = since.iter().collect();
    if below(state, 4) == 0 {
        for at in (1..order.len()).rev() {
            order.swap(at, below(state, at as u64 + 1) as usize);
        }
    }
    for did in order {
        let mut kept = || below(state, 100) < chance;
        match did {
            Did::Write(_, at, new) => {
                let (at, end) = (*at as usize, *at as usize + new.len());
                let mut from = at;
                while from < end {
                    let to = end.min((from / SECTOR + 1) * SECTOR);
                    if kept() {
                        bytes.resize(bytes.len().max(to), 0);
                        bytes[from..to].copy_from_slice(&new[from - at..to - at]);
                    }
                    from = to;
                }
                // The length may last, and the bytes not.
                if kept() {
                    bytes.resize(bytes.len().max(end), 0);
                }
            }
            Did::Erase(_, at, len) => {
                for sector in (*at..at + len).step_by(SECTOR) {
                    let end = bytes.len().min(sector as usize + SECTOR);
                    if kept() && (sector as usize) < end {
                        bytes[sector as usize..end].fill(0);
                    }
                }
            }
            Did::Cut(_, len) if kept() => bytes.resize(*len as usize, 0),
            _ => {}
        }
    }
    bytes
}

/// What was done to a file, all of it.
fn whole(mut bytes: Vec<u8>, all: &[Did]) -> Vec<u8> {
    for did in all {
        match did {
            Did::Write(_, at, new) => {
                let end = *at as usize + new.len();
                bytes.resize(bytes.len().max(end), 0);
                bytes[*at as usize..end].copy_from_slice(new);
            }
            Did::Erase(_, at, len) => {
                let end = bytes.len().min((at + len) as usize);
                bytes[*at as usize..end].fill(0);
            }
            Did::Cut(_, len) => bytes.resize(*len as usize, 0),
            _ => {}
        }
    }
    bytes
}

/// What was done to names.
fn apply(names: &mut BTreeMap<String, usize>, did: &Did) {
    match did {
        Did::Make(number, name) => {
            names.insert(name.clone(), *number);
        }
        Did::Rename(from, to) => {
            // If the file's first name did not last, neither does the second.
            if let Some(number) = names.remove(from) {
                names.insert(to.clone(), number);
            }
        }
        Did::Remove(name) => {
            names.remove(name);
        }
        _ => {}
    }
}

/// The folder after a power cut behind these operations.
fn after_a_cut(before: &Contents, log: &[Did], state: &mut u64) -> Contents {
    // What lasts: names of files, and their bytes; and what was done since.
    let mut names: BTreeMap<String, usize> = before.keys().enumerate().map(|(at, name)| (name.clone(), at)).collect();
    let mut bytes: HashMap<usize, Vec<u8>> = before.values().cloned().enumerate().collect();
    let mut since: HashMap<usize, Vec<Did>> = HashMap::new();
    let mut folder: Vec<Did> = Vec::new();
    for did in log {
        match did {
            Did::Make(..) | Did::Rename(..) | Did::Remove(..) => folder.push(did.clone()),
            Did::Write(number, ..) | Did::Erase(number, ..) | Did::Cut(number, ..) => {
                since.entry(*number).or_default().push(did.clone());
            }
            Did::Sync(number) => {
                let all = since.remove(number).unwrap_or_default();
                let content = bytes.remove(number).unwrap_or_default();
                bytes.insert(*number, whole(content, &all));
            }
            Did::SyncFolder => folder.drain(..).for_each(|did| apply(&mut names, &did)),
            _ => {}
        }
    }
    let chance = [0, 50, 100][below(state, 3) as usize];
    for did in &folder {
        if below(state, 100) < chance {
            apply(&mut names, did);
        }
    }
    let files = names.into_iter().map(|(name, number)| {
        let content = bytes.get(&number).cloned().unwrap_or_default();
        (name, torn(content, since.get(&number).map_or(&[], Vec::as_slice), state))
    });
    files.collect()
}

/// What must be there after a cut, and what must not: tenants and numbers of blocks.
#[derive(Clone, Debug, Default)]
struct Promised {
    there: BTreeSet<(u64, u64)>,
    gone: BTreeSet<(u64, u64)>,
}

impl Promised {
    /// After this much of a run; `rest` is what would have come.
    fn after(mut self, log: &[Did], rest: &[Did]) -> Self {
        for did in log {
            match did {
                Did::Acknowledged(blocks) => self.there.extend(blocks),
                Did::Putting(tenant, number) => {
                    self.gone.remove(&(*tenant, *number));
                }
                Did::Evicted(blocks) => self.there.retain(|block| !blocks.contains(block)),
                Did::Deleting(tenant) => self.there.retain(|block| block.0 != *tenant),
                Did::Deleted(tenant) => self.gone.extend((0..NUMBERS).map(|number| (*tenant, number))),
                _ => {}
            }
        }
        // The operation that was cut may have dropped some already.
        if let Some(Did::Evicted(blocks)) = rest.iter().find(|did| matches!(did, Did::Evicted(_))) {
            self.there.retain(|block| !blocks.contains(block));
        }
        self
    }
}

/// Does so much with a store in which these blocks are. Returns what was done.
fn run(
    before: &Contents,
    there: &BTreeSet<(u64, u64)>,
    much: u64,
    options: &StoreOptions,
    state: &mut u64,
) -> Vec<Did> {
    let recorder = Recorder::on(before);
    let log = recorder.log.clone();
    let say = |did| log.lock().push(did);
    let store = Store::open_with(Arc::new(recorder), "a run", &model(), Bytes::new(BYTES as u64), options.clone());
    let store = store.unwrap();
    let all: Vec<&Block> = (0..TENANTS * NUMBERS).map(|at| Block::known(at / NUMBERS, at % NUMBERS)).collect();
    // A block that was damaged by the last cut may be in the store until it is read.
    let mut known = there.clone();
    let is_held = |block: &(u64, u64)| {
        let block = all[(block.0 * NUMBERS + block.1) as usize];
        store.contains(block.tenant, block.key)
    };
    for _ in 0..much {
        match below(state, 80) {
            0..8 => {
                store.flush().unwrap();
                say(Did::Acknowledged(known.clone()));
            }
            8 => {
                let tenant = below(state, TENANTS);
                say(Did::Deleting(tenant));
                store.delete_tenant(TenantId::new(tenant)).unwrap();
                say(Did::Deleted(tenant));
                known.retain(|block| block.0 != tenant);
            }
            9..25 => {
                // What is read is kept longer.
                let _ = all[below(state, TENANTS * NUMBERS) as usize].is_in(&store);
            }
            _ => {
                let at = below(state, TENANTS * NUMBERS);
                say(Did::Putting(at / NUMBERS, at % NUMBERS));
                let put = all[at as usize].put(&store);
                assert!(matches!(put, Put::Queued | Put::Known), "{put:?}");
                if put == Put::Queued {
                    known.insert((at / NUMBERS, at % NUMBERS));
                }
            }
        }
        let (held, evicted) = known.into_iter().partition(&is_held);
        known = held;
        say(Did::Evicted(evicted));
    }
    if below(state, 2) == 0 {
        store.close().unwrap();
    }
    std::mem::take(&mut *log.lock())
}

/// Opens a folder after a cut and looks at every block. Returns the folder then, and what is there.
fn look(cut: &Contents, promised: &Promised, options: &StoreOptions, thorough: bool) -> (Contents, Promised) {
    // Not even in what is left on the disk. Blocks of noise do not compress.
    let gone = || promised.gone.iter().map(|(tenant, number)| Block::known(*tenant, *number));
    assert!(!held_in(cut, gone()), "bytes of a deleted tenant");
    let memory = Memory::with(cut.clone());
    let on_disk = thorough.then(|| tempfile::tempdir().unwrap());
    let open = || match &on_disk {
        None => {
            let files = Arc::new(memory.clone());
            Store::open_with(files, "after a cut", &model(), Bytes::new(BYTES as u64), options.clone()).unwrap()
        }
        Some(folder) => crate::blocks::open(folder.path(), options.clone()).unwrap(),
    };
    if let Some(folder) = &on_disk {
        cut.iter().for_each(|(name, bytes)| std::fs::write(folder.path().join(name), bytes).unwrap());
    }
    let store = open();
    let mut there = BTreeSet::new();
    for block in (0..TENANTS * NUMBERS).map(|at| (at / NUMBERS, at % NUMBERS)) {
        let found = Block::known(block.0, block.1).is_in(&store);
        assert!(found || !promised.there.contains(&block), "acknowledged and lost: {block:?}, {:?}", store.stats());
        assert!(!found || !promised.gone.contains(&block), "deleted and came back: {block:?}");
        if found {
            there.insert(block);
        }
    }
    let files = match &on_disk {
        None => memory.contents(),
        Some(folder) => crate::blocks::contents(folder.path()),
    };
    // It goes on.
    let new = Block::known(TENANTS, 1);
    new.put(&store);
    store.flush().unwrap();
    drop(store);
    assert!(new.is_in(&open()));
    (files, Promised { there, gone: promised.gone.clone() })
}

/// Where to cut: anywhere, or where names change.
fn cut_point(log: &[Did], state: &mut u64) -> usize {
    let changes = |at: &usize| matches!(log[*at], Did::Make(..) | Did::Rename(..) | Did::Remove(..));
    let changes: Vec<usize> = (0..log.len()).filter(changes).collect();
    if changes.is_empty() || below(state, 2) == 0 {
        return below(state, log.len() as u64 + 1) as usize;
    }
    log.len().min(changes[below(state, changes.len() as u64) as usize] + 1 + below(state, 2) as usize)
}

/// Runs from this seed, and so many cuts of it.
fn cuts(seed: u64, cuts: usize) {
    let state = &mut seed.clone();
    let mut options = options().capacity(Bytes::kib(600)).file_bytes(Bytes::kib(100 + below(state, 150)));
    options = options.coalesce(Bytes::kib(1 + below(state, 64))).compress(below(state, 4) == 0);
    if below(state, 4) == 0 {
        options = options.key(StoreKey::from_bytes([5; 32]));
    }
    let (mut before, mut promised) = (Contents::new(), Promised::default());
    for round in 0..cuts.div_ceil(CUTS_OF_A_RUN) {
        let log = run(&before, &promised.there, 50 + below(state, 300), &options, state);
        let mut last = None;
        for at in 0..CUTS_OF_A_RUN.min(cuts - round * CUTS_OF_A_RUN) {
            let (done, rest) = log.split_at(cut_point(&log, state));
            let cut = after_a_cut(&before, done, state);
            let now = promised.clone().after(done, rest);
            last = Some(look(&cut, &now, &options, at == 0));
        }
        // The next run begins with what the last cut left.
        (before, promised) = last.unwrap();
    }
}

/// Each seed has runs that follow one another, and each run is cut often.
#[test]
fn a_power_cut_loses_nothing_that_was_acknowledged() {
    let first = replay::first_seed();
    for seed in (first..).take(if replay::replayed().is_some() { 1 } else { SEEDS }) {
        let _case = Case::of("a_power_cut_loses_nothing_that_was_acknowledged", seed);
        cuts(seed, 1000 / SEEDS);
    }
}

/// Every point around the removal of a file, when it is dropped to make room, and some of its blocks are kept.
#[test]
fn a_power_cut_while_room_is_made_loses_nothing_else() {
    let seed = replay::first_seed();
    let _case = Case::of("a_power_cut_while_room_is_made_loses_nothing_else", seed);
    let state = &mut seed.clone();
    let options = options().capacity(Bytes::kib(600)).file_bytes(Bytes::kib(100)).coalesce(Bytes::kib(16));
    let before = Contents::new();
    let removals_of =
        |log: &[Did]| -> Vec<usize> { (0..log.len()).filter(|at| matches!(log[*at], Did::Remove(_))).collect() };
    // By chance, few files are dropped in a run; rarely in several.
    let mut runs = (0..10).map(|_| run(&before, &BTreeSet::new(), 1000, &options, state));
    let log = runs.find(|log| removals_of(log).len() > 3).expect("a run that drops files");
    drop(runs);
    let removals = removals_of(&log);
    for removal in removals.iter().take(20) {
        for at in removal.saturating_sub(10)..(removal + 4).min(log.len()) {
            let (done, rest) = log.split_at(at);
            let promised = Promised::default().after(done, rest);
            look(&after_a_cut(&before, done, state), &promised, &options, false);
        }
    }
}

/// The manifest's new name lasted, and that of a block file in it did not: its blocks were lost.
#[test]
fn regression_the_name_of_a_block_file_lasts_before_the_manifest_that_names_it() {
    let recorder = Recorder::on(&Contents::new());
    let log = recorder.log.clone();
    let options = options().file_bytes(Bytes::kib(100)).coalesce(Bytes::kib(16));
    let store = Store::open_with(Arc::new(recorder), "a run", &model(), Bytes::new(BYTES as u64), options).unwrap();
    for number in 0..200 {
        Block::of(1, number).put(&store);
        if number % 20 == 0 {
            store.flush().unwrap();
        }
    }
    let (mut unsynced, mut made) = (0, 0);
    for did in log.lock().iter() {
        match did {
            Did::Make(_, name) if name.ends_with(".kv") => (unsynced, made) = (unsynced + 1, made + 1),
            Did::SyncFolder => unsynced = 0,
            Did::Rename(..) => assert_eq!(unsynced, 0, "names of files that the manifest names"),
            _ => {}
        }
    }
    assert!(made > 3, "{made}");
}

/// A file that was dropped may have blocks of a tenant that is deleted next.
#[test]
fn a_deletion_makes_removals_last() {
    let recorder = Recorder::on(&Contents::new());
    let log = recorder.log.clone();
    let options = options().capacity(Bytes::kib(600)).file_bytes(Bytes::kib(100)).coalesce(Bytes::kib(16));
    let store = Store::open_with(Arc::new(recorder), "a run", &model(), Bytes::new(BYTES as u64), options).unwrap();
    (0..).find(|number| Block::known(1, *number).put(&store) == Put::Queued && store.stats().evicted > 0).unwrap();
    let last = |what: fn(&Did) -> bool| log.lock().iter().rposition(what);
    let removed = last(|did| matches!(did, Did::Remove(_)));
    assert!(removed > last(|did| matches!(did, Did::SyncFolder)));
    store.delete_tenant(TenantId::new(1)).unwrap();
    assert!(removed < last(|did| matches!(did, Did::SyncFolder)));
}

/// Only a flush writes less than 2 MiB at once, and nothing is written twice.
#[test]
fn blocks_are_written_2_mib_at_once() {
    let recorder = Recorder::on(&Contents::new());
    let log = recorder.log.clone();
    let options = options().file_bytes(Bytes::mib(5));
    let store = Store::open_with(Arc::new(recorder), "a run", &model(), Bytes::new(BYTES as u64), options).unwrap();
    (0..4000).for_each(|number| assert_eq!(Block::of(1, number).put(&store), Put::Queued));
    let writes = |log: &[Did]| -> Vec<usize> {
        let bytes =
            log.iter().filter_map(|did| if let Did::Write(_, _, bytes) = did { Some(bytes.len()) } else { None });
        bytes.filter(|bytes| *bytes > 4096).collect()
    };
    assert_eq!(writes(&log.lock()), [2 << 20; 7]);
    assert_eq!(log.lock().iter().filter(|did| matches!(did, Did::Sync(_))).count(), 1, "of the first manifest");
    store.flush().unwrap();
    let all = writes(&log.lock());
    assert_eq!((all.len(), all.iter().sum::<usize>()), (8, 4000 * 4096));
}
