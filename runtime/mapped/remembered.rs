//! Orders of use that were learned, kept for the next start, in the user's cache folder.
//!
//! A note belongs to a file as it is now: its device, inode, length, time of the last change, and to a page size. A
//! note that is wrong costs time only, as a header's order that nobody follows does: its pages are read ahead for
//! nothing until the policy sees that. So what is read here needs to be sound, not true.

use std::collections::HashSet;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use outcore::os::notes;
use serde::{Deserialize, Serialize};

/// The beginning of the names of our files in the folder.
const PREFIX: &str = "order-";
/// More bytes than any note of ours has. A larger file is not read, and orders that need more are not kept.
const NOTE_MOST: u64 = 1 << 20;
/// Most notes in the folder, and the age at which they go.
const NOTES_MOST: usize = 64;
const AGE_MOST: Duration = Duration::from_secs(90 * 24 * 60 * 60);
/// Most orders of a file: a prompt is read in another one than words are written in.
pub const ORDERS_MOST: usize = 4;
/// Uses in a row that are not those of a period before, at which a cycle has begun.
const CHANGE: usize = 8;
/// Most models that are used in turn.
const TURNS_MOST: usize = 64;
/// Most uses in an order: the recogniser remembers no more.
pub const USES_MOST: u64 = 1 << 18;

/// The note of a file, or of files that belong together, and where it is.
#[derive(Clone, Debug)]
pub struct Place {
    path: PathBuf,
    file: String,
    pages: u32,
}

/// What is written: of which file, and of each order the runs of pages that follow one another in the file, as first
/// page and number of pages in turn. The order with which the program begins is the first.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    file: String,
    orders: Vec<Vec<u32>>,
}

/// One state of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    device: u64,
    inode: u64,
    /// Bytes.
    pub len: u64,
    /// When it was written last, in seconds and nanoseconds.
    changed: (i64, i64),
}

impl Identity {
    /// Device and inode.
    pub fn file(&self) -> (u64, u64) {
        (self.device, self.inode)
    }

    pub fn of(file: &Metadata) -> Self {
        let changed = (file.mtime(), file.mtime_nsec());
        Self { device: file.dev(), inode: file.ino(), len: file.len(), changed }
    }

    /// As it stands in notes.
    fn text(&self) -> String {
        let Self { device, inode, len, changed: (seconds, nanoseconds) } = self;
        format!("{device:x}:{inode:x} {len} {seconds}.{nanoseconds:09}")
    }
}

/// Where it is kept which models were used in turn. Each is known by its first file.
#[derive(Debug)]
pub struct TurnsPlace {
    path: PathBuf,
    first: String,
}

/// What is written there: the first files of the models, in the order of their turns.
#[derive(Debug, Serialize, Deserialize)]
struct TurnsNote {
    in_turn: Vec<String>,
}

impl TurnsPlace {
    /// Of models that begin with this file. `None` where there is no folder for notes.
    pub fn of(first: &Identity, page: u64, folder: Option<PathBuf>) -> Option<Self> {
        let folder = folder.or_else(notes::folder)?;
        let Identity { device, inode, .. } = first;
        Some(Self {
            path: folder.join(format!("{PREFIX}{device:x}-{inode:x}-{page:x}-turns.json")),
            first: first.text(),
        })
    }

    /// What was kept. `None` if nothing was for the first file as it is now.
    pub fn read(&self) -> Option<InTurn> {
        let note: TurnsNote = serde_json::from_slice(&notes::read(&self.path, NOTE_MOST).ok()?).ok()?;
        let fits = (2..=TURNS_MOST).contains(&note.in_turn.len()) && note.in_turn[0] == self.first;
        fits.then_some(InTurn(note.in_turn))
    }

    /// Nothing is kept any more.
    pub fn forget(&self) {
        if let Err(cause) = fs::remove_file(&self.path) {
            tracing::debug!(%cause, note = %self.path.display(), "a note that is not true stays");
        }
    }

    /// Keeps the first files of models, in the order of their turns.
    ///
    /// # Errors
    /// What the system says.
    pub fn write(&self, files: &[Identity]) -> io::Result<()> {
        let note = TurnsNote { in_turn: files.iter().map(Identity::text).collect() };
        keep(&self.path, &serde_json::to_vec(&note)?)
    }
}

/// The first files of models that were used in turn, in that order.
#[derive(Debug)]
pub struct InTurn(Vec<String>);

impl InTurn {
    /// What is used in turn, of what begins with these files; `None` if something is missing.
    pub fn pick<T: Clone>(&self, all: &[(Identity, T)]) -> Option<Vec<T>> {
        // Each once: a file may be mapped several times.
        let mut left: Vec<(String, &T)> = all.iter().map(|(file, what)| (file.text(), what)).collect();
        let mut take = |wanted: &String| {
            let at = left.iter().position(|(text, _)| text == wanted)?;
            Some(left.remove(at).1.clone())
        };
        self.0.iter().map(&mut take).collect()
    }
}

impl Place {
    /// Of files whose pages of `page` bytes have numbers below `pages`. `None` where there is no folder for notes.
    pub fn of(files: &[Identity], page: u64, pages: u32, folder: Option<PathBuf>) -> Option<Self> {
        let folder = folder.or_else(notes::folder)?;
        let Identity { device, inode, .. } = files.first()?;
        let count = if files.len() > 1 { format!("-{}", files.len()) } else { String::new() };
        // One note for the files, whatever becomes of their bytes.
        let path = folder.join(format!("{PREFIX}{device:x}-{inode:x}-{page:x}{count}.json"));
        let all: Vec<String> = files.iter().map(Identity::text).collect();
        Some(Self { path, file: format!("{} {page}", all.join(" ")), pages })
    }

    /// The orders that were kept; none that names a page which the file has not.
    pub fn read(&self) -> Vec<Vec<u32>> {
        match self.try_read() {
            Ok(orders) => orders,
            Err(cause) => {
                if cause.kind() != io::ErrorKind::NotFound {
                    tracing::debug!(%cause, note = %self.path.display(), "a note of orders is not used");
                }
                Vec::new()
            }
        }
    }

    fn try_read(&self) -> io::Result<Vec<Vec<u32>>> {
        let note: Note = serde_json::from_slice(&notes::read(&self.path, NOTE_MOST)?)?;
        if note.file != self.file {
            return Err(io::Error::other("it is of another file, or of other bytes"));
        }
        if note.orders.len() > ORDERS_MOST {
            return Err(io::Error::other("it has more orders than are kept"));
        }
        let orders: Option<Vec<_>> = note.orders.iter().map(|runs| self.pages_of(runs)).collect();
        orders.ok_or_else(|| io::Error::other("it has an order that cannot be"))
    }

    /// The pages of these runs, if there are such.
    fn pages_of(&self, runs: &[u32]) -> Option<Vec<u32>> {
        let runs = runs.chunks(2).map(|run| match run {
            [first, count] => Some((*first, *count)),
            _ => None,
        });
        let (mut order, mut uses) = (Vec::new(), 0);
        for run in runs {
            let (first, count) = run?;
            let end = first.checked_add(count)?;
            uses += u64::from(count);
            if count == 0 || end > self.pages || uses > USES_MOST {
                return None;
            }
            order.extend(first..end);
        }
        (!order.is_empty()).then_some(order)
    }

    /// Keeps these orders. Of what does not fit, the last are left out.
    ///
    /// # Errors
    /// What the system says.
    pub fn write(&self, orders: &[Vec<u32>]) -> io::Result<()> {
        let mut note = Note { file: self.file.clone(), orders: orders.iter().map(|order| runs_of(order)).collect() };
        note.orders.truncate(ORDERS_MOST);
        let mut text = serde_json::to_vec(&note)?;
        while text.len() as u64 > NOTE_MOST && note.orders.pop().is_some() {
            text = serde_json::to_vec(&note)?;
        }
        if note.orders.is_empty() {
            return Ok(());
        }
        keep(&self.path, &text)
    }
}

/// Writes a note, and removes old ones.
fn keep(path: &Path, text: &[u8]) -> io::Result<()> {
    notes::write(path, PREFIX, text)?;
    if let Some(folder) = path.parent() {
        notes::forget_old(folder, PREFIX, AGE_MOST, NOTES_MOST);
    }
    Ok(())
}

fn runs_of(order: &[u32]) -> Vec<u32> {
    let runs = order.chunk_by(|a, b| a.checked_add(1) == Some(*b));
    runs.flat_map(|run| [run[0], run.len() as u32]).collect()
}

/// Adds an order in front, in place of the same one if it is known. Cycles that differ in where they begin are the
/// same.
pub fn add(orders: &mut Vec<Vec<u32>>, new: Vec<u32>) {
    orders.retain(|known| !is_turned(known, &new));
    orders.insert(0, new);
    orders.truncate(ORDERS_MOST);
}

/// Whether two cycles differ in where they begin only.
pub fn is_turned(one: &[u32], other: &[u32]) -> bool {
    let Some(first) = other.first().filter(|_| one.len() == other.len()) else { return one.len() == other.len() };
    let begins = |(at, _): (usize, &u32)| {
        let (head, tail) = one.split_at(at);
        let (later, sooner) = other.split_at(tail.len());
        later == tail && sooner == head
    };
    one.iter().enumerate().filter(|(_, page)| *page == first).any(begins)
}

/// Puts the order in front with which a program begins, as its first uses tell, and turns it so that it begins where
/// the program does: at the first of its uses that is followed by the next one in the cycle.
pub fn begin_with(orders: &mut [Vec<u32>], first_uses: &[u32]) {
    let pairs: HashSet<(u32, u32)> = first_uses.windows(2).map(|pair| (pair[0], pair[1])).collect();
    let next = |order: &[u32], at: usize| (order[at], order[(at + 1) % order.len()]);
    let common = |order: &Vec<u32>| (0..order.len()).filter(|at| pairs.contains(&next(order, *at))).count();
    let counts: Vec<usize> = orders.iter().map(common).collect();
    // Of orders that have as much in common with it, the one that is the first already.
    let Some(best) = (0..orders.len()).rev().max_by_key(|at| counts[*at]).filter(|best| counts[*best] > 0) else {
        return;
    };
    orders[..=best].rotate_right(1);
    let order = &mut orders[0];
    let place = |pair: &[u32]| (0..order.len()).find(|at| next(order, *at) == (pair[0], pair[1]));
    if let Some(at) = first_uses.windows(2).find_map(place) {
        order.rotate_left(at);
    }
}

/// What came before the uses that repeat themselves every `period`: perhaps a pass in another order. Some uses may
/// differ.
pub fn before_the_cycle(uses: &[u32], period: usize) -> &[u32] {
    let mut others = 0;
    let mut start = uses.len().saturating_sub(period);
    for at in (period..uses.len()).rev() {
        let same = uses[at] == uses[at - period];
        others = if same { 0 } else { others + 1 };
        if others == CHANGE {
            break;
        }
        if same {
            start = at - period;
        }
    }
    &uses[..start]
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use std::fs::File;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    const PAGES: u32 = 1000;

    fn identity(of: &Path) -> Identity {
        Identity::of(&fs::metadata(of).unwrap())
    }

    fn place(folder: &Path, of: &Path) -> Place {
        Place::of(&[identity(of)], 4096, PAGES, Some(folder.into())).unwrap()
    }

    fn scene() -> (tempfile::TempDir, PathBuf, Place) {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model");
        fs::write(&file, [1; 10_000]).unwrap();
        let notes = folder.path().join("cache/outcore");
        let place = place(&notes, &file);
        (folder, file, place)
    }

    #[test]
    fn models_in_turn_are_kept_and_each_is_picked_once() {
        let folder = tempfile::tempdir().unwrap();
        let files: Vec<Identity> = ["a", "b"]
            .map(|name| {
                let path = folder.path().join(name);
                fs::write(&path, name).unwrap();
                identity(&path)
            })
            .to_vec();
        let place = TurnsPlace::of(&files[0], 4096, Some(folder.path().join("notes"))).unwrap();
        assert!(place.read().is_none());
        place.write(&files).unwrap();
        let in_turn = place.read().unwrap();
        assert_eq!(in_turn.pick(&[(files[1], 1), (files[0], 0)]), Some(vec![0, 1]));
        assert_eq!(in_turn.pick(&[(files[0], 0)]), None);
        // One file that was mapped twice.
        place.write(&[files[0], files[0]]).unwrap();
        let in_turn = place.read().unwrap();
        assert_eq!(in_turn.pick(&[(files[0], 0)]), None);
        assert_eq!(in_turn.pick(&[(files[0], 0), (files[0], 7)]), Some(vec![0, 7]));
        // What was kept for another state of the file is not true of this one.
        fs::write(folder.path().join("a"), "longer").unwrap();
        let now = TurnsPlace::of(&identity(&folder.path().join("a")), 4096, Some(folder.path().join("notes"))).unwrap();
        assert!(now.read().is_none());
        place.forget();
        assert!(place.read().is_none());
    }

    #[test]
    fn orders_are_read_as_they_were_kept() {
        let (_folder, _, place) = scene();
        assert!(place.read().is_empty());
        let orders = vec![vec![5, 6, 7, 0, 1, 5, 999], (0..PAGES).rev().collect()];
        place.write(&orders).unwrap();
        assert_eq!(place.read(), orders);
        let mode = fs::metadata(&place.path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        // Nothing else is left in the folder.
        assert_eq!(fs::read_dir(place.path.parent().unwrap()).unwrap().count(), 1);
    }

    /// The form is stable: what an earlier version kept under this name is read, of one file and of a model in two.
    #[test]
    fn the_form_of_notes_is_stable() {
        let folder = tempfile::tempdir().unwrap();
        let of = |inode, nanoseconds| Identity { device: 0xfd01, inode, len: 10_000, changed: (17, nanoseconds) };
        let (one, two) = (of(0x2a, 5), of(0x2b, 600_000_000));
        for (files, name, state) in [
            (&[one][..], "order-fd01-2a-1000.json", "fd01:2a 10000 17.000000005 4096"),
            (&[one, two], "order-fd01-2a-1000-2.json", "fd01:2a 10000 17.000000005 fd01:2b 10000 17.600000000 4096"),
        ] {
            let text = format!(r#"{{"file":"{state}","orders":[[5,3,0,2],[9,1]]}}"#);
            fs::write(folder.path().join(name), &text).unwrap();
            let place = Place::of(files, 4096, PAGES, Some(folder.path().into())).unwrap();
            let orders = place.read();
            assert_eq!(orders, [vec![5, 6, 7, 0, 1], vec![9]], "{name}");
            place.write(&orders).unwrap();
            assert_eq!(fs::read_to_string(folder.path().join(name)).unwrap(), text);
        }
        let text = r#"{"in_turn":["fd01:2a 10000 17.000000005","fd01:2b 10000 17.600000000"]}"#;
        let path = folder.path().join("order-fd01-2a-1000-turns.json");
        fs::write(&path, text).unwrap();
        let place = TurnsPlace::of(&one, 4096, Some(folder.path().into())).unwrap();
        assert_eq!(place.read().unwrap().pick(&[(two, 2), (one, 1)]), Some(vec![1, 2]));
        place.write(&[one, two]).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
    }

    #[test]
    fn a_file_that_changed_has_no_order() {
        let (folder, file, before) = scene();
        before.write(&[vec![1, 2, 3]]).unwrap();
        let notes = folder.path().join("cache/outcore");
        let now = |page: u64| Place::of(&[identity(&file)], page, PAGES, Some(notes.clone())).unwrap();
        assert_eq!(now(4096).read().len(), 1);
        assert!(now(8192).read().is_empty(), "other pages");
        let open = File::options().write(true).open(&file).unwrap();
        let changed = open.metadata().unwrap().modified().unwrap();
        open.set_modified(changed + Duration::from_nanos(1)).unwrap();
        assert!(now(4096).read().is_empty(), "another time");
        open.set_len(10_001).unwrap();
        open.set_modified(changed).unwrap();
        assert!(now(4096).read().is_empty(), "another length");
        // What is learned of the new bytes takes the place of the old.
        now(4096).write(&[vec![4]]).unwrap();
        assert_eq!((now(4096).read(), before.read()), (vec![vec![4]], Vec::new()));
    }

    #[test]
    fn a_note_may_be_anything() {
        let (_folder, _, place) = scene();
        place.write(&[vec![1, 2, 3]]).unwrap();
        let good = fs::read_to_string(&place.path).unwrap();
        let with = |orders: &str| {
            let head = good.split_once("[[").unwrap().0;
            format!("{head}{orders}}}")
        };
        assert!(serde_json::from_str::<Note>(&with("[[1,3]]")).is_ok());
        let mut texts = vec![
            String::new(),
            "[".repeat(100_000),
            with("[[1,3,5]]"),
            with("[[-1,3]]"),
            with("[[1,0]]"),
            with("[[999,2]]"),
            with("[[1000,1]]"),
            with("[[4294967295,4294967295]]"),
            with("[[]]"),
            with(&format!("[[{}1,1]]", "0,1000,".repeat(300))),
            with("[[1,1],[2,1],[3,1],[4,1],[5,1]]"),
        ];
        // Torn at any place.
        texts.extend((0..good.len()).map(|end| good[..end].to_owned()));
        for text in texts {
            fs::write(&place.path, &text).unwrap();
            assert!(place.read().is_empty(), "{text}");
        }
        fs::write(&place.path, [0xFF, 0xFE, 0]).unwrap();
        assert!(place.read().is_empty());
        // As large as it may be, or larger, it takes no more memory than its order has uses.
        File::options().write(true).open(&place.path).unwrap().set_len(1 << 40).unwrap();
        assert!(place.read().is_empty());
        for target in ["/dev/zero", "/", "none"] {
            fs::remove_file(&place.path).unwrap();
            symlink(target, &place.path).unwrap();
            assert!(place.read().is_empty(), "{target}");
        }
    }

    #[test]
    fn a_note_stays_small() {
        let (folder, file, place) = scene();
        // Every page alone in its run.
        let long = |step: u32| (0..60_000u32).map(|n| (n * step) % PAGES).collect::<Vec<u32>>();
        place.write(&[long(7), long(11), long(13), long(17), long(19)]).unwrap();
        assert!(fs::metadata(&place.path).unwrap().len() <= NOTE_MOST);
        let read = place.read();
        assert!(!read.is_empty() && read.len() < ORDERS_MOST && read[0] == long(7));
        // One that does not fit alone is not kept, and hides nothing that is.
        place.write(&[(0..200_000u32).map(|n| (n * 7) % PAGES).collect()]).unwrap();
        assert_eq!(place.read(), read);
        // Nor are there more notes than that, however many files are mapped.
        let notes = folder.path().join("cache/outcore");
        for page in 0..NOTES_MOST as u64 + 20 {
            let place = Place::of(&[identity(&file)], 4096 << (page % 8) | page, PAGES, Some(notes.clone()));
            place.unwrap().write(&[vec![1]]).unwrap();
        }
        assert!(fs::read_dir(&notes).unwrap().count() <= NOTES_MOST);
    }

    /// As two processes do that use a file at once.
    #[test]
    fn a_note_that_two_write_at_once_is_always_one_of_theirs() {
        let (_folder, _, place) = scene();
        let orders = [vec![(0..PAGES).collect::<Vec<u32>>()], vec![(0..PAGES).rev().collect::<Vec<u32>>()]];
        place.write(&orders[0]).unwrap();
        std::thread::scope(|scope| {
            for order in &orders {
                scope.spawn(|| (0..200).for_each(|_| place.write(order).unwrap()));
            }
            for _ in 0..400 {
                assert!(orders.contains(&place.read()));
            }
        });
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_an_error() {
        let (_folder, file, _) = scene();
        let place = place(Path::new("/proc/none"), &file);
        assert!(place.write(&[vec![1]]).is_err() && place.read().is_empty());
    }

    #[test]
    fn a_cycle_is_known_wherever_it_begins() {
        let mut orders = Vec::new();
        add(&mut orders, vec![1, 2, 3, 1, 4]);
        add(&mut orders, vec![9, 8]);
        add(&mut orders, vec![1, 4, 1, 2, 3]);
        assert_eq!(orders, [vec![1, 4, 1, 2, 3], vec![9, 8]]);
        (10..20).for_each(|page| add(&mut orders, vec![page]));
        assert_eq!(orders.len(), ORDERS_MOST);
        let turned = |first: &[u32]| {
            let mut orders = vec![vec![1, 2, 3], vec![5, 6, 5, 7, 8]];
            begin_with(&mut orders, first);
            orders.swap_remove(usize::from(orders[0] == [1, 2, 3]))
        };
        // A header first, which the cycle has not, and a page that it has, but in another order.
        assert_eq!(turned(&[0, 6, 8, 7, 8, 5]), [7, 8, 5, 6, 5]);
        assert_eq!(turned(&[5, 7]), [5, 7, 8, 5, 6]);
        assert_eq!(turned(&[0, 2, 1]), [5, 6, 5, 7, 8]);
        assert_eq!(turned(&[]), [5, 6, 5, 7, 8]);
        let mut orders = vec![vec![1, 2, 3], vec![3, 2, 1], vec![1, 3, 9]];
        begin_with(&mut orders, &[7, 1, 3, 9, 2, 3]);
        assert_eq!(orders, [vec![1, 3, 9], vec![1, 2, 3], vec![3, 2, 1]]);
    }

    #[test]
    fn what_came_before_a_cycle_is_found() {
        let first: Vec<u32> = (100..150).collect();
        let cycle: Vec<u32> = (0..40).collect();
        let uses = [&first[..], &cycle, &cycle[..13]].concat();
        assert_eq!(before_the_cycle(&uses, 40), first);
        // One use differs from pass to pass.
        let uses = [&first[..], &[200], &cycle, &[201], &cycle[..20]].concat();
        assert_eq!(before_the_cycle(&uses, 41), [&first[..], &[200]].concat());
        assert!(before_the_cycle(&cycle, 40).is_empty() && before_the_cycle(&[], 7).is_empty());
    }
}
