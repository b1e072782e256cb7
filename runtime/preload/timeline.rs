//! The timeline of a run, as `outcore report` reads it. It is written while the program runs, so that it takes no
//! memory.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use outcore::stats::{Span, TraceRows};
use outcore_mapped::live::Run;
use serde::Serialize;

/// The most spans that are written: what `outcore report` can read of them.
const SPANS_MAX: u64 = 1 << 20;

/// A file in the Trace Event Format that has begun.
#[derive(Debug)]
pub struct Timeline {
    file: BufWriter<File>,
    written: u64,
    pub left_out: u64,
    rows: TraceRows,
}

impl Timeline {
    /// # Errors
    /// That of the file system.
    pub fn create(path: &Path) -> io::Result<Self> {
        let mut file = BufWriter::new(File::create(path)?);
        file.write_all(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n")?;
        file.flush()?;
        Ok(Self { file, written: 0, left_out: 0, rows: TraceRows::default() })
    }

    fn event(&mut self, event: impl Serialize) -> io::Result<()> {
        if self.written > 0 {
            self.file.write_all(b",\n")?;
        }
        self.written += 1;
        serde_json::to_writer(&mut self.file, &event)?;
        Ok(())
    }

    /// # Errors
    /// That of the file system.
    pub fn add(&mut self, mut spans: Vec<Span>) -> io::Result<()> {
        spans.sort_by_key(|span| (span.start, span.duration));
        for span in spans {
            if self.written >= SPANS_MAX {
                self.left_out += 1;
                continue;
            }
            let event = self.rows.event(&span);
            self.event(event)?;
        }
        Ok(())
    }

    /// Ends the file with what the run was.
    ///
    /// # Errors
    /// That of the file system.
    pub fn finish(&mut self, run: &Run) -> io::Result<()> {
        let rows = std::mem::take(&mut self.rows);
        for name in rows.names() {
            self.event(name)?;
        }
        self.file.write_all(b"\n],\"run\":")?;
        serde_json::to_writer(&mut self.file, run)?;
        self.file.write_all(b"}\n")?;
        self.file.flush()
    }
}
