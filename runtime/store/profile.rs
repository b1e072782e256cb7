//! What a disk needs to be read at its full rate: measured in milliseconds, and remembered by device.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::file::{filesystem_name, is_memory, open_direct};
use super::place::cache_folder;
use super::probe::Reader;
use super::{IoBackend, QueueDepth};
use crate::error::{Error, Result};
use crate::ids::Bytes;

/// A read of the measurement.
const BLOCK: Bytes = Bytes::mib(1);
/// Reads in flight at once, one after the other; in two rounds, because a disk that others use as well falters at times.
const DEPTHS: [u32; 6] = [1, 2, 4, 8, 16, MOST];
const MOST: u32 = 32;
const ROUNDS: usize = 2;
/// What is read at least with each.
const BLOCKS_LEAST: u32 = 8;
/// A measurement begins nothing more after so long: on a slow disk, few in flight suffice.
const TIME: Duration = Duration::from_millis(150);
/// Of the best rate, what counts as all of it: a measurement of milliseconds is no better than that.
const NEARLY_ALL: f64 = 0.9;
/// For so long a measurement is remembered.
const REMEMBERED: Duration = Duration::from_secs(24 * 60 * 60);

/// What a disk needs to be read at its full rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DiskProfile {
    /// Bytes a second, at best.
    pub bytes_per_second: Bytes,
    /// The least that has to be in flight for nearly that rate, in reads of 1 MiB.
    pub in_flight: Bytes,
}

/// As it is written to the user's cache folder.
#[derive(Debug, Serialize, Deserialize)]
struct Remembered {
    bytes_per_second: u64,
    in_flight: u64,
    /// Seconds since 1970.
    measured: u64,
}

impl DiskProfile {
    /// A disk of this rate, which needs so much in flight for it.
    pub fn new(bytes_per_second: Bytes, in_flight: Bytes) -> Self {
        Self { bytes_per_second, in_flight }
    }

    /// What the disk needs that has the file `path`, as it was measured within a day, or else measured now: up to 160 MiB of
    /// the file are read, within a fifth of a second. `None` where that would say nothing: the file is in memory, is
    /// read through the page cache, or has less than 32 MiB.
    ///
    /// # Errors
    /// What opening the file or reading it reports. What is remembered is lost without an error.
    pub fn of(path: &Path) -> Result<Option<Self>> {
        let failed = |cause| Error::io(format!("open {}", path.display()), cause);
        let file = File::open(path).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        let note = cache_folder().map(|folder| folder.join(format!("disk-{:x}.json", metadata.dev())));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        if let Some(profile) = note.as_deref().and_then(|note| remembered(note, now)) {
            return Ok(Some(profile));
        }
        let blocks = metadata.len() / BLOCK.get();
        if is_memory(&filesystem_name(&file)) || open_direct(&file, false).is_err() || blocks < MOST.into() {
            return Ok(None);
        }
        let profile = Self::measured(path, file, blocks)?;
        tracing::info!(path = %path.display(), ?profile, "disk measured");
        if let Some(note) = note
            && let Err(cause) = remember(&note, profile, now)
        {
            tracing::debug!(%cause, note = %note.display(), "a measurement is not remembered");
        }
        Ok(Some(profile))
    }

    fn measured(path: &Path, file: File, blocks: u64) -> Result<Self> {
        let mut reader = Reader::open(path, file, IoBackend::Auto, QueueDepth::new(MOST)?, BLOCK)?;
        let begin = Instant::now();
        let mut points: Vec<(u32, f64)> = Vec::new();
        let mut first = 0;
        for (at, depth) in (0..ROUNDS).flat_map(|_| DEPTHS.into_iter().enumerate()) {
            if begin.elapsed() > TIME {
                break;
            }
            let count = u64::from(depth.max(BLOCKS_LEAST));
            let since = Instant::now();
            reader.read_blocks(first, count, blocks, QueueDepth::new(depth)?)?;
            first += count;
            let rate = (count * BLOCK.get()) as f64 / since.elapsed().as_secs_f64().max(1e-9);
            match points.get_mut(at) {
                Some(point) => point.1 = point.1.max(rate),
                None => points.push((depth, rate)),
            }
        }
        Ok(Self::from_points(&points))
    }

    /// Of rates in bytes a second by depth, the depths in ascending order.
    fn from_points(points: &[(u32, f64)]) -> Self {
        let best = points.iter().map(|point| point.1).fold(0.0, f64::max);
        let enough = points.iter().find(|point| point.1 >= NEARLY_ALL * best).map_or(1, |point| point.0);
        Self { bytes_per_second: Bytes::new(best as u64), in_flight: Bytes::new(u64::from(enough) * BLOCK.get()) }
    }
}

/// What the file says, if it is one of ours, and not too old.
fn remembered(note: &Path, now: Duration) -> Option<DiskProfile> {
    let found: Remembered = serde_json::from_slice(&fs::read(note).ok()?).ok()?;
    let age = now.checked_sub(Duration::from_secs(found.measured))?;
    let most = BLOCK.get() * u64::from(MOST);
    let sound = age < REMEMBERED && found.bytes_per_second > 0 && (BLOCK.get()..=most).contains(&found.in_flight);
    sound.then(|| DiskProfile {
        bytes_per_second: Bytes::new(found.bytes_per_second),
        in_flight: Bytes::new(found.in_flight),
    })
}

/// Whole or not at all: another process may be reading it.
fn remember(note: &PathBuf, profile: DiskProfile, now: Duration) -> std::io::Result<()> {
    let folder = note.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let kept = Remembered {
        bytes_per_second: profile.bytes_per_second.get(),
        in_flight: profile.in_flight.get(),
        measured: now.as_secs(),
    };
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(&serde_json::to_vec(&kept)?)?;
    file.persist(note).map_err(|error| error.error)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_depth_that_gives_nearly_all() {
        let profile = |points: &[(u32, f64)]| DiskProfile::from_points(points).in_flight;
        assert_eq!(profile(&[(1, 4e8), (2, 7e8), (4, 1.2e9), (8, 1.9e9), (16, 2.0e9), (32, 2.05e9)]), Bytes::mib(8));
        // A disk that turns is no faster with more; one of which only a little could be measured is slow.
        assert_eq!(profile(&[(1, 1.5e8), (2, 1.5e8), (4, 1.4e8)]), Bytes::mib(1));
        assert_eq!(profile(&[(1, 1e7)]), Bytes::mib(1));
        assert_eq!(profile(&[]), Bytes::mib(1));
    }

    #[test]
    fn what_is_remembered_is_not_trusted() {
        let folder = tempfile::tempdir().unwrap();
        let note = folder.path().join("below/disk-1.json");
        let profile = DiskProfile { bytes_per_second: Bytes::new(2_000_000_000), in_flight: Bytes::mib(8) };
        let day = Duration::from_secs(20_000 * 86_400);
        assert_eq!(remembered(&note, day), None);
        remember(&note, profile, day).unwrap();
        assert_eq!(remembered(&note, day + Duration::from_secs(60)), Some(profile));
        // Too old, and from the future.
        assert_eq!(remembered(&note, day + REMEMBERED), None);
        assert_eq!(remembered(&note, day - Duration::from_secs(60)), None);
        for text in ["", "{}", "[1]", r#"{"bytes_per_second":1,"in_flight":0,"measured":1728000000}"#] {
            fs::write(&note, text).unwrap();
            assert_eq!(remembered(&note, day), None, "{text}");
        }
        fs::write(&note, r#"{"bytes_per_second":1,"in_flight":18446744073709551615,"measured":1728000000}"#).unwrap();
        assert_eq!(remembered(&note, day), None);
    }
}
