//! The timeline of a run, as `outcore report` reads it. It is written while the program runs, so that it takes no
//! memory.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::time::Duration;

use outcore::stats::{Lane, Span};
use serde_json::json;

/// The most spans that are written: what `outcore report` can read of them.
const SPANS_MAX: u64 = 1 << 20;
const ROWS_PER_LANE: usize = 1000;
const LANES: [(Lane, &str); 4] =
    [(Lane::Compute, "pass"), (Lane::Stall, "stall"), (Lane::Link, "link"), (Lane::Disk, "disk")];

/// A file in the Trace Event Format that has begun.
#[derive(Debug)]
pub struct Timeline {
    file: BufWriter<File>,
    written: u64,
    pub left_out: u64,
    /// For each row of a lane, the end of its last span.
    rows: [Vec<Duration>; LANES.len()],
}

impl Timeline {
    /// # Errors
    /// That of the file system.
    pub fn create(path: &Path) -> io::Result<Self> {
        let mut file = BufWriter::new(File::create(path)?);
        file.write_all(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n")?;
        file.flush()?;
        Ok(Self { file, written: 0, left_out: 0, rows: Default::default() })
    }

    fn event(&mut self, event: &serde_json::Value) -> io::Result<()> {
        if self.written > 0 {
            self.file.write_all(b",\n")?;
        }
        self.written += 1;
        serde_json::to_writer(&mut self.file, event)?;
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
            let lane = LANES.iter().position(|(lane, _)| *lane == span.lane).unwrap_or(0);
            let ends = &mut self.rows[lane];
            let free = ends.iter().position(|end| *end <= span.start);
            let row = free.unwrap_or_else(|| {
                if ends.len() < ROWS_PER_LANE {
                    ends.push(Duration::ZERO);
                }
                ends.len() - 1
            });
            ends[row] = span.start + span.duration;
            self.event(&json!({
                "name": span.what,
                "cat": LANES[lane].1,
                "ph": "X",
                "ts": span.start.as_nanos() as f64 / 1e3,
                "dur": span.duration.as_nanos() as f64 / 1e3,
                "pid": 1,
                "tid": lane * ROWS_PER_LANE + row,
                "args": {"detail": span.detail},
            }))?;
        }
        Ok(())
    }

    /// # Errors
    /// That of the file system.
    pub fn finish(&mut self) -> io::Result<()> {
        let rows: Vec<(usize, usize)> =
            self.rows.iter().enumerate().flat_map(|(lane, rows)| (0..rows.len()).map(move |row| (lane, row))).collect();
        for (lane, row) in rows {
            let name = if row == 0 { LANES[lane].1.to_owned() } else { format!("{} {}", LANES[lane].1, row + 1) };
            let tid = lane * ROWS_PER_LANE + row;
            self.event(&json!({"name": "thread_name", "ph": "M", "pid": 1, "tid": tid, "args": {"name": name}}))?;
        }
        self.file.write_all(b"\n]}\n")?;
        self.file.flush()
    }
}
