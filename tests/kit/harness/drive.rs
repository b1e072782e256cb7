//! A drive that stops answering for one thread: a control group lets one byte a second pass.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const GROUPS: &str = "/sys/fs/cgroup/blkio";

/// While this lives, reads of this drive by threads in the group do not come back.
pub struct StalledDrive {
    group: PathBuf,
    device: String,
}

impl StalledDrive {
    /// Of the drive that holds a file.
    ///
    /// # Errors
    /// Without root, without control groups of version 1, or where the file is on no drive of its own.
    pub fn of(file: &Path) -> io::Result<Self> {
        let device = fs::metadata(file)?.dev();
        let device = format!("{}:{}", libc::major(device), libc::minor(device));
        let group = Path::new(GROUPS).join(format!("outcore-{}", std::process::id()));
        fs::create_dir(&group)?;
        let stalled = Self { group, device };
        stalled.limit(1)?;
        Ok(stalled)
    }

    fn limit(&self, bytes_a_second: u64) -> io::Result<()> {
        fs::write(self.group.join("blkio.throttle.read_bps_device"), format!("{} {bytes_a_second}", self.device))
    }

    /// Puts the calling thread into the group, for good.
    pub fn hold_this_thread(&self) -> io::Result<()> {
        let thread = fs::read_link("/proc/thread-self")?;
        let number = thread.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        fs::write(self.group.join("tasks"), number)
    }

    /// The drive answers again.
    pub fn answer(&self) -> io::Result<()> {
        self.limit(0)
    }
}

impl Drop for StalledDrive {
    fn drop(&mut self) {
        if let Err(error) = self.answer() {
            eprintln!("{}: {error}", self.group.display());
        }
        // Threads that are still in the group go back to where they came from.
        for thread in fs::read_to_string(self.group.join("tasks")).unwrap_or_default().lines() {
            // The thread may have ended.
            let _ended = fs::write(Path::new(GROUPS).join("tasks"), thread);
        }
        if let Err(error) = fs::remove_dir(&self.group) {
            eprintln!("{}: {error}", self.group.display());
        }
    }
}
