//! Keeps measurements of disks in the user's cache folder and in this process.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

use crate::error::{Error, Result};
use crate::ids::Bytes;
use crate::os::cache::cache_folder;
use crate::os::notes;
use crate::store::file::{file_system, filesystem_name};
use crate::store::probe::disk::{BLOCK, DiskProfile, MOST, WAIT};

/// How long a measurement counts that no other agrees with. Measurements made within this time count as one.
const UNSURE: Duration = Duration::from_secs(600);
/// The age from which on no measurement counts.
const SURE: Duration = Duration::from_secs(24 * 60 * 60);
/// Rates that differ by no more than this factor agree.
const AGREE: f64 = 1.5;
/// Most measurements of a disk that are kept.
const KEPT: usize = 16;
/// More bytes than any note of ours has. A larger file is not read.
const NOTE_MOST: u64 = 16 << 10;
/// The rates that a disk can have, in bytes a second. Measuring a slower one would not come to an end.
const RATES: std::ops::RangeInclusive<u64> = 1 << 20..=1 << 40;

/// The notes of this process, the newest last. They are all there is where nothing can be written.
static HERE: Mutex<Vec<Note>> = Mutex::new(Vec::new());
/// Most notes of this process.
const HERE_MOST: usize = 64;
/// How long to wait for [`HERE`]. It is locked for microseconds, but in a child by `fork` perhaps for ever.
const HERE_WAIT: Duration = Duration::from_millis(10);
/// Whether it was logged that measurements are not written down.
static TOLD: AtomicBool = AtomicBool::new(false);
/// The beginning of the names of our files in the folder.
const PREFIX: &str = "disk-";

/// A disk, and the path of its note.
pub(crate) struct Disk {
    /// Everything that tells the disk from others. Its number is not enough: after a restart, a remount, or on another
    /// machine that shares the folder, another disk has it.
    identity: String,
    note: Option<PathBuf>,
}

/// A disk's measurements, as they are written down.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Note {
    disk: String,
    measured: Vec<Measured>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Measured {
    bytes_per_second: u64,
    latency_us: u64,
    in_flight: u64,
    /// Seconds since 1970.
    at: u64,
}

impl Measured {
    fn is_sound(&self, now: Duration) -> bool {
        let age = now.as_secs().checked_sub(self.at);
        age.is_some_and(|age| age < SURE.as_secs())
            && RATES.contains(&self.bytes_per_second)
            && self.latency_us <= WAIT.as_micros() as u64
            && (BLOCK.get()..=BLOCK.get() * u64::from(MOST)).contains(&self.in_flight)
    }

    fn agrees(&self, other: &Self) -> bool {
        let (one, other) = (self.bytes_per_second as f64, other.bytes_per_second as f64);
        one <= AGREE * other && other <= AGREE * one
    }

    fn profile(&self) -> DiskProfile {
        DiskProfile {
            bytes_per_second: Bytes::new(self.bytes_per_second),
            latency: Duration::from_micros(self.latency_us),
            in_flight: Bytes::new(self.in_flight),
        }
    }
}

impl Note {
    /// The measurements that may count, the oldest first.
    fn sound(&self, now: Duration) -> Vec<Measured> {
        let mut sound: Vec<Measured> = self.measured.iter().filter(|one| one.is_sound(now)).copied().collect();
        sound.sort_by_key(|one| one.at);
        sound
    }

    fn chosen(sound: &[Measured]) -> Option<Measured> {
        let newest = sound.last()?;
        let agreed = sound.iter().filter(|one| sound.iter().filter(|other| one.agrees(other)).count() > 1);
        agreed.chain([newest]).max_by_key(|one| one.bytes_per_second).copied()
    }

    /// The fastest measurement with which another agrees, or the newest if that is faster.
    pub fn best(&self, now: Duration) -> Option<DiskProfile> {
        Self::chosen(&self.sound(now)).map(|one| one.profile())
    }

    /// The [best](Self::best) measurement, while it counts: from the newest measurement on, for as long as the
    /// measurements that agree with it lie apart, and at least for [`UNSURE`].
    pub fn believed(&self, now: Duration) -> Option<DiskProfile> {
        let sound = self.sound(now);
        let chosen = Self::chosen(&sound)?;
        let agreed = || sound.iter().filter(|one| one.agrees(&chosen)).map(|one| one.at);
        let apart = agreed().max()? - agreed().min()?;
        let age = now.as_secs().saturating_sub(sound.last()?.at);
        (age < apart.clamp(UNSURE.as_secs(), SURE.as_secs())).then(|| chosen.profile())
    }

    /// Adds a measurement. Of those made within [`UNSURE`] only the fastest is kept: two made at once slow each other
    /// down, and do not confirm each other.
    pub fn add(&mut self, profile: DiskProfile, now: Duration) {
        let new = Measured {
            bytes_per_second: profile.bytes_per_second.get().clamp(*RATES.start(), *RATES.end()),
            latency_us: u64::try_from(profile.latency.min(WAIT).as_micros()).unwrap_or(u64::MAX),
            in_flight: profile.in_flight.get(),
            at: now.as_secs(),
        };
        self.measured = self.sound(now);
        match self.measured.last_mut() {
            Some(last) if new.at - last.at < UNSURE.as_secs() => {
                if last.bytes_per_second < new.bytes_per_second {
                    *last = new;
                }
            }
            _ => self.measured.push(new),
        }
        self.measured.drain(..self.measured.len().saturating_sub(KEPT));
    }
}

impl Disk {
    /// The disk that `file` is on; `path` is for the error.
    pub fn of(file: &File, path: &Path) -> Result<Self> {
        let failed = |cause| Error::io(format!("look at {}", path.display()), cause);
        let device = file.metadata().map_err(failed)?.dev();
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        let (major, minor) = (libc::major(device), libc::minor(device));
        let of_block = format!("/sys/dev/block/{major}:{minor}");
        // A partition has the number of its disk.
        let number = [format!("{of_block}/diskseq"), format!("{of_block}/../diskseq")];
        let number = number.iter().map(|path| read(path)).find(|number| !number.is_empty()).unwrap_or_default();
        let source = mount_source(&read("/proc/self/mountinfo"), major, minor).unwrap_or_default();
        let identity = format!(
            "{} {major}:{minor} {} {:x} {number} {source}",
            read("/proc/sys/kernel/random/boot_id"),
            filesystem_name(file),
            file_system(file).map_or(0, |stat| stat.f_fsid),
        );
        // One file for each disk of a machine, the same after every restart.
        let name = format!("{} {device:x}", read("/etc/machine-id"));
        let name = format!("{PREFIX}{:016x}.json", XxHash3_64::oneshot(name.as_bytes()));
        Ok(Self { identity, note: cache_folder().map(|folder| folder.join(name)) })
    }

    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// What is known of the disk: the note that was written, or this process's if that is newer.
    pub fn note(&self, now: Duration) -> Note {
        let written = self.note.as_deref().and_then(|note| read_note(note).ok());
        let here = HERE.try_lock_for(HERE_WAIT).and_then(|here| self.found_in(&here));
        let known = [here, written.filter(|note| note.disk == self.identity)].into_iter().flatten();
        let newest = known.max_by_key(|note| note.sound(now).last().map(|one| one.at));
        newest.unwrap_or_else(|| Note { disk: self.identity.clone(), measured: Vec::new() })
    }

    fn found_in(&self, notes: &[Note]) -> Option<Note> {
        notes.iter().find(|note| note.disk == self.identity).cloned()
    }

    /// Keeps a note of the disk, in this process and in the folder, as far as possible.
    pub fn remember(&self, note: &Note) {
        if let Some(mut here) = HERE.try_lock_for(HERE_WAIT) {
            here.retain(|other| other.disk != self.identity);
            let over = (here.len() + 1).saturating_sub(HERE_MOST);
            here.drain(..over);
            here.push(note.clone());
        }
        let Some(path) = &self.note else { return };
        if let Err(cause) = write_note(path, note) {
            let note = path.display();
            if cause.kind() == io::ErrorKind::PermissionDenied && !TOLD.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    %cause,
                    %note,
                    "measurements of disks are not written down: every process makes its own"
                );
            } else {
                tracing::debug!(%cause, %note, "a measurement is not written down");
            }
        }
    }

    /// Forgets the disk's note.
    pub fn forget(&self) {
        if let Some(mut here) = HERE.try_lock_for(HERE_WAIT) {
            here.retain(|other| other.disk != self.identity);
        }
        if let Some(path) = &self.note
            && let Err(cause) = fs::remove_file(path)
            && cause.kind() != io::ErrorKind::NotFound
        {
            tracing::debug!(%cause, note = %path.display(), "a measurement cannot be forgotten");
        }
    }
}

/// The type and source of a device's mount. They tell network file systems apart, which have no real device.
fn mount_source(mounts: &str, major: u32, minor: u32) -> Option<String> {
    let device = format!("{major}:{minor}");
    let line = mounts.lines().find(|line| line.split(' ').nth(2) == Some(&device))?;
    Some(line.split_once(" - ")?.1.split(' ').take(2).collect::<Vec<_>>().join(" "))
}

fn read_note(path: &Path) -> io::Result<Note> {
    Ok(serde_json::from_slice(&notes::read(path, NOTE_MOST)?)?)
}

fn write_note(path: &Path, note: &Note) -> io::Result<()> {
    notes::write(path, PREFIX, &serde_json::to_vec(note)?)?;
    // Without this their number would grow: each mount of a network file system and each start of a container is
    // another disk.
    notes::forget_old(path.parent().unwrap_or(Path::new(".")), PREFIX, SURE, usize::MAX);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::symlink;
    use std::time::SystemTime;

    use super::*;
    use crate::os::limits::effective_user;

    const MINUTE: u64 = 60;
    const START: u64 = 1_800_000_000;

    fn profile(rate: u64) -> DiskProfile {
        DiskProfile::new(Bytes::new(rate * 1_000_000), Bytes::mib(4)).latency(Duration::from_micros(150))
    }

    fn at(minute: u64) -> Duration {
        Duration::from_secs(START + minute * MINUTE)
    }

    /// The rate that is believed at a minute, in MB/s, after measurements of (minute, MB/s).
    fn believed(measured: &[(u64, u64)], minute: u64) -> Option<u64> {
        let mut note = Note::default();
        measured.iter().for_each(|(minute, rate)| note.add(profile(*rate), at(*minute)));
        note.believed(at(minute)).map(|profile| profile.bytes_per_second.get() / 1_000_000)
    }

    #[test]
    fn regression_a_measurement_of_a_busy_disk_is_soon_made_again() {
        assert_eq!(believed(&[(0, 40)], 9), Some(40));
        assert_eq!(believed(&[(0, 40)], 10), None);
        // A faster one replaces it. With one that agrees, it counts for as long again as the two lie apart.
        assert_eq!(believed(&[(0, 40), (10, 2000)], 11), Some(2000));
        assert_eq!(believed(&[(0, 40), (10, 2000)], 20), None);
        assert_eq!(believed(&[(0, 40), (10, 2000), (40, 1900)], 69), Some(2000));
        assert_eq!(believed(&[(0, 40), (10, 2000), (40, 1900)], 70), None);
        // A slow one later changes nothing.
        assert_eq!(believed(&[(0, 2000), (30, 1900), (60, 300)], 89), Some(2000));
        // Slow ones that agree give way to a fast one.
        assert_eq!(believed(&[(0, 200), (30, 210), (60, 2000)], 61), Some(2000));
        // One that was too fast, say of a cache, loses to the next ones.
        assert_eq!(believed(&[(0, 10_000)], 10), None);
        assert_eq!(believed(&[(0, 10_000), (10, 2000)], 11), Some(2000));
        assert_eq!(believed(&[(0, 10_000), (10, 2000), (20, 2100)], 21), Some(2100));
        // Only those of the last day count.
        let long: Vec<(u64, u64)> = (0..8).map(|n| (n * 200, 2000)).collect();
        assert_eq!((believed(&long, 1900), believed(&long, 2050)), (Some(2000), None));
        assert_eq!(believed(&[(0, 2000)], 24 * 60), None);
        assert_eq!(believed(&[], 0), None);
    }

    #[test]
    fn regression_two_that_measure_at_once_do_not_confirm_each_other() {
        assert_eq!(believed(&[(0, 900), (1, 1000)], 2), Some(1000));
        assert_eq!(believed(&[(0, 1000), (1, 900)], 2), Some(1000));
        assert_eq!(believed(&[(0, 1000), (1, 900)], 11), None);
        assert_eq!(believed(&[(0, 1000), (1, 2000)], 2), Some(2000));
    }

    #[test]
    fn a_note_stays_small_and_within_bounds() {
        let mut note = Note::default();
        for n in 0..100 {
            note.add(profile(1000), at(10 * n));
        }
        assert_eq!(note.measured.len(), KEPT);
        let wild = DiskProfile::new(Bytes::new(u64::MAX), Bytes::mib(1)).latency(Duration::MAX);
        note.add(wild, at(2000));
        assert!(note.measured.iter().all(|one| one.is_sound(at(2000))), "{note:?}");
        // A clock that was set back.
        note.add(profile(1000), at(0));
        assert_eq!(note.measured.len(), 1);
    }

    fn disk(note: Option<PathBuf>, identity: &str) -> Disk {
        Disk { identity: identity.to_owned(), note }
    }

    #[test]
    fn what_is_remembered_is_told_apart_by_disk() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("below/disk-1.json");
        let one = disk(Some(path.clone()), "boot 1 8:1 ext4");
        assert_eq!(one.note(at(0)).believed(at(0)), None);
        let mut note = one.note(at(0));
        note.add(profile(2000), at(0));
        one.remember(&note);
        assert_eq!(read_note(&path).unwrap(), note);
        assert_eq!(one.note(at(1)).believed(at(1)), Some(profile(2000)));
        // Another disk with the same number: after a restart, or on another machine that shares the folder.
        let other = disk(Some(path.clone()), "boot 2 8:1 ext4");
        assert_eq!(other.note(at(1)).believed(at(1)), None);
        one.forget();
        assert!(!path.exists());
        assert_eq!(one.note(at(1)).believed(at(1)), None);
    }

    #[test]
    fn regression_what_cannot_be_written_is_remembered_here() {
        for (n, path) in [None, Some(PathBuf::from("/proc/none/disk-1.json"))].into_iter().enumerate() {
            let disk = disk(path, &format!("nowhere {n}"));
            let mut note = disk.note(at(0));
            note.add(profile(2000), at(0));
            disk.remember(&note);
            assert_eq!(disk.note(at(1)).believed(at(1)), Some(profile(2000)));
            disk.forget();
            assert_eq!(disk.note(at(1)).believed(at(1)), None);
        }
    }

    /// The folder may have become full, read-only or another user's since a note was written.
    #[test]
    fn regression_a_note_that_cannot_be_replaced_hides_nothing_newer() {
        let folder = tempfile::tempdir().unwrap();
        let writable = disk(Some(folder.path().join("disk-1.json")), "written once");
        let no_more = disk(Some(PathBuf::from("/proc/none/disk-1.json")), "written once");
        let measure = |disk: &Disk, minute: u64, rate: u64| {
            let mut note = writable.note(at(minute));
            note.add(profile(rate), at(minute));
            disk.remember(&note);
        };
        measure(&writable, 0, 1000);
        assert_eq!(writable.note(at(11)).believed(at(11)), None, "it is to be measured anew");
        measure(&no_more, 20, 2000);
        assert_eq!(writable.note(at(21)).believed(at(21)), Some(profile(2000)));
        // What another process has written since counts.
        let mut theirs = read_note(&folder.path().join("disk-1.json")).unwrap();
        theirs.add(profile(3000), at(40));
        write_note(&folder.path().join("disk-1.json"), &theirs).unwrap();
        assert_eq!(writable.note(at(41)).believed(at(41)), Some(profile(3000)));
        // A note from the future is not newer.
        write_note(&folder.path().join("disk-1.json"), &{
            let mut note = Note { disk: "written once".into(), ..Note::default() };
            note.add(profile(4000), at(1000));
            note
        })
        .unwrap();
        assert_eq!(writable.note(at(21)).believed(at(21)), Some(profile(2000)));
        writable.forget();
    }

    #[test]
    fn regression_notes_that_no_longer_count_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let made = |name: &str, hours: u64| {
            let file = File::create_new(folder.path().join(name)).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(hours * 60 * MINUTE)).unwrap();
        };
        // A note of a disk that is gone, one of a disk that may be there, a file not written to its end, and somebody
        // else's file.
        for (name, hours) in [("disk-a.json", 25), ("disk-b.json", 23), ("disk-XyZ", 25), ("theirs.json", 2500)] {
            made(name, hours);
        }
        write_note(&folder.path().join("disk-c.json"), &Note::default()).unwrap();
        let mut left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort_unstable();
        assert_eq!(left, ["disk-b.json", "disk-c.json", "theirs.json"]);
    }

    #[test]
    fn regression_a_note_may_be_anything() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk-1.json");
        let disk = disk(Some(path.clone()), "here");
        let none = || assert_eq!(disk.note(at(1)).believed(at(1)), None, "{:?}", fs::symlink_metadata(&path));
        // A pipe that nobody writes to.
        let c_path = CString::new(path.as_os_str().as_bytes()).unwrap();
        // SAFETY: the path is a C string.
        assert_eq!(unsafe { libc::mkfifo(c_path.as_ptr(), 0o600) }, 0);
        none();
        fs::remove_file(&path).unwrap();
        for target in ["/dev/zero", "/dev/tty", "/", "none"] {
            symlink(target, &path).unwrap();
            none();
            fs::remove_file(&path).unwrap();
        }
        fs::create_dir(&path).unwrap();
        none();
        fs::remove_dir(&path).unwrap();
        // A file larger than any note is not read.
        File::create_new(&path).unwrap().set_len(1 << 40).unwrap();
        none();
        let one = |text: &str| format!(r#"{{"disk":"here","measured":[{text}]}}"#);
        let line = |rate: u64, latency: u64, in_flight: u64, at: u64| {
            one(&format!(r#"{{"bytes_per_second":{rate},"latency_us":{latency},"in_flight":{in_flight},"at":{at}}}"#))
        };
        let (rate, mib) = (1_000_000_000, 1 << 20);
        for text in [
            String::new(),
            "{}".into(),
            "[1]".into(),
            "[".repeat(10_000),
            one(""),
            one("1"),
            one(r#"{"bytes_per_second":-1,"latency_us":1,"in_flight":1048576,"at":1800000000}"#),
            line(1, 1, mib, START),
            line(0, 1, mib, START),
            line(u64::MAX, 1, mib, START),
            line(rate, u64::MAX, mib, START),
            line(rate, 1, 0, START),
            line(rate, 1, u64::MAX, START),
            line(rate, 1, mib, START + 61),
            line(rate, 1, mib, u64::MAX),
            line(rate, 1, mib, 0),
        ] {
            fs::write(&path, &text).unwrap();
            none();
        }
        fs::write(&path, line(rate, 1, mib, START)).unwrap();
        assert!(disk.note(at(1)).believed(at(1)).is_some());
        if effective_user() == 0 {
            std::os::unix::fs::chown(&path, Some(65_534), None).unwrap();
            none();
        }
    }

    #[test]
    fn disks_are_told_apart_by_more_than_a_number() {
        let mounts = "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n\
                      90 27 0:45 / /mnt/a rw shared:1 - nfs4 server:/models rw,vers=4.2\n91 27 0:46\n";
        assert_eq!(mount_source(mounts, 0, 45).as_deref(), Some("nfs4 server:/models"));
        assert_eq!((mount_source(mounts, 0, 46), mount_source(mounts, 9, 9)), (None, None));
        let of = |path: &str| Disk::of(&File::open(path).unwrap(), Path::new(path)).unwrap();
        let (one, again, other) = (of("/"), of("/"), of("/proc"));
        assert_eq!((&one.identity, &one.note), (&again.identity, &again.note));
        assert!(one.identity != other.identity && one.note != other.note);
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        assert!(one.identity.contains(boot.trim()), "{}", one.identity);
    }
}
