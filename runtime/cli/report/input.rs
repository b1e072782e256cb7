//! Inputs of a report. Their kind is recognised by their fields.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::num::NonZeroU64;
use std::path::Path;

use outcore::{Bytes, Error, ErrorKind, Result};
use outcore_lab::residency::Residency;
use outcore_lab::sim::{ClassBytes, Flow, LaneRecord, OwnPolicy, capture};
use outcore_mapped::live::Run;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::super::comparison::Found;
use super::super::policies;
use super::part::file_name;
use super::timeline::{Event, Timeline};

/// The largest input in bytes: twice the longest timeline that `generate` writes.
const BYTES_MAX: u64 = 256 << 20;

/// The JSON of `generate --json`.
#[derive(Debug, Deserialize)]
pub struct Generated {
    pub model: String,
    pub device: String,
    pub policy: String,
    pub io: String,
    pub page_bytes: u64,
    pub device_budget_bytes: u64,
    pub host_budget_bytes: u64,
    pub prompt_tokens: Vec<u64>,
    pub tokens: Vec<u64>,
    pub ttft_s: f64,
    pub decode_tok_s: f64,
    pub pass_s_median: f64,
    pub compute_s: f64,
    pub stall_s: f64,
    pub overlap: f64,
    pub disk_read_bytes: u64,
    pub disk_written_bytes: u64,
    pub link_bytes: u64,
    pub disk_busy_s: Option<f64>,
    pub link_busy_s: Option<f64>,
    pub hit_ratio: f64,
    pub opt_hit_ratio: f64,
    pub ratio_uses: u64,
    pub peak_device_bytes: u64,
    pub peak_host_bytes: u64,
    pub peak_rss_bytes: u64,
    pub stalls: BTreeMap<String, Stall>,
    #[serde(default)]
    pub interrupted: bool,
    /// None in the JSON of earlier releases.
    pub memory: Option<Memory>,
    /// Added by hand from other measurements.
    #[serde(default)]
    pub ceiling: Ceilings,
}

/// Memory of a run: its model's weights, and what it takes besides frames.
#[derive(Debug, Deserialize)]
pub struct Memory {
    pub weights: Vec<ClassBytes>,
    pub tail_bytes: u64,
    pub keys_values_bytes: u64,
    pub activations_bytes: u64,
}

/// The rates that links can carry, as far as they are known.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ceilings {
    /// The rate of reads.
    pub disk_bytes_per_second: Option<NonZeroU64>,
    pub link_bytes_per_second: Option<NonZeroU64>,
}

/// The JSON of `outcore simulate --json`.
#[derive(Debug, Deserialize)]
pub struct Simulated {
    pub model: String,
    pub machine: String,
    pub devices: u64,
    pub policy: String,
    pub page_bytes: u64,
    pub model_bytes: u64,
    pub frames: u64,
    pub host_frames: u64,
    pub first_pass_s: f64,
    pub median_pass_s: f64,
    pub passes_s: Vec<f64>,
    pub total_s: f64,
    pub hit_ratio: f64,
    pub stalls: Vec<SimulatedStall>,
    pub disk_read: Flow,
    pub disk_written: Flow,
    pub link_in: Flow,
    pub link_out: Flow,
    pub compute: Flow,
    /// This and the next two are not in the JSON of earlier releases.
    #[serde(default)]
    pub weights: Vec<ClassBytes>,
    pub tail_bytes: Option<u64>,
    pub ceiling: Option<MachineCeilings>,
    /// None unless `--timeline` was given.
    pub timeline: Option<Recorded>,
}

/// The rates of a described machine, summed over all devices.
#[derive(Debug, Deserialize)]
pub struct MachineCeilings {
    pub disk_read_bytes_per_second: NonZeroU64,
    pub disk_write_bytes_per_second: NonZeroU64,
    pub link_bytes_per_second: Option<NonZeroU64>,
    pub compute_bytes_per_second: NonZeroU64,
}

/// The record that `simulate --timeline` adds.
#[derive(Debug, Deserialize)]
pub struct Recorded {
    /// These two become a [`Timeline`].
    lanes: Vec<LaneRecord>,
    residency: Residency,
    pub hit_ratio: f64,
    pub opt_hit_ratio: f64,
    pub ratio_uses: u64,
    pub peak_device_frames: u64,
    pub peak_host_frames: u64,
}

impl Simulated {
    /// Returns the name to show.
    pub fn name(&self) -> String {
        format!("{} on {}, simulated", file_name(&self.model), self.machine)
    }

    fn take_timeline(&mut self, file: &str) -> Result<Option<Timeline>> {
        let name = self.name();
        let Some(recorded) = &mut self.timeline else { return Ok(None) };
        let (lanes, seen) = (std::mem::take(&mut recorded.lanes), std::mem::take(&mut recorded.residency));
        let about = if self.devices > 1 {
            format!(
                "In virtual time. Lanes and pages are those of the first of {} devices; the disk is of all.",
                self.devices
            )
        } else {
            "In virtual time.".to_owned()
        };
        Timeline::of_record(file, name, Some(about), lanes, seen).map(Some)
    }
}

/// Waits for one cause while the bytes were in one tier.
#[derive(Debug, Deserialize)]
pub struct SimulatedStall {
    pub cause: String,
    pub tier: String,
    pub count: u64,
    pub seconds: f64,
}

/// Waits for one cause.
#[derive(Debug, Deserialize)]
pub struct Stall {
    pub count: u64,
    pub seconds: f64,
}

/// The JSON of `outcore probe --json`.
#[derive(Debug, Deserialize)]
pub struct Probed {
    pub file: String,
    pub points: Vec<Point>,
    /// The rate of one thread.
    pub memcpy_bytes_per_second: u64,
}

/// A measured rate of reading.
#[derive(Debug, Deserialize)]
pub struct Point {
    pub block_bytes: u64,
    pub depth: u64,
    pub bytes_per_second: u64,
}

/// All inputs by kind, in the order given.
#[derive(Debug, Default)]
pub struct Inputs {
    pub generated: Vec<Generated>,
    pub timelines: Vec<Timeline>,
    pub policies: Vec<Found>,
    pub simulated: Vec<Simulated>,
    pub probed: Vec<Probed>,
}

/// A parsed file. The events of a timeline, which may be many, are reduced while they are read; everything else is
/// kept.
#[derive(Deserialize)]
struct Object {
    #[serde(rename = "traceEvents")]
    events: Option<Vec<Event>>,
    residency: Option<Residency>,
    run: Option<Run>,
    #[serde(flatten)]
    fields: Map<String, Value>,
}

const EXPECTED: &str = "give what `generate --timeline`, `--capture` or `--json`, `outcore run --report`, `outcore \
     policies --json`, `outcore simulate --json` or `outcore probe --json` wrote";

impl Inputs {
    /// Reads `paths`, and `probe`, which must be the output of a probe. Captures run through all policies, including
    /// `own`.
    pub fn read(paths: &[impl AsRef<Path>], probe: Option<&Path>, own: &[OwnPolicy]) -> Result<Self> {
        let mut inputs = Self::default();
        for path in paths {
            inputs.add(path.as_ref(), own)?;
        }
        if let Some(path) = probe {
            let before = inputs.probed.len();
            inputs.add(path, own)?;
            if inputs.probed.len() == before {
                let what = format!("{}, given with --probe, is not what a probe found", path.display());
                return Err(Error::new(ErrorKind::Format, what).remedy("give what `outcore probe --json` wrote"));
            }
        }
        Ok(inputs)
    }

    fn add(&mut self, path: &Path, own: &[OwnPolicy]) -> Result<()> {
        let name = path.display().to_string();
        let text = read(path, &name)?;
        if text.starts_with(&capture::MAGIC) {
            self.policies.push(policies::of_capture(path, own)?);
            return Ok(());
        }
        self.add_text(&text, name)
    }

    fn add_text(&mut self, text: &[u8], name: String) -> Result<()> {
        let text = text.trim_ascii();
        let parsed = serde_json::from_slice::<Object>(text).or_else(|whole| {
            // `generate` may print other lines before the JSON.
            let last = text.rsplit(|byte| *byte == b'\n').next().unwrap_or_default();
            if last.len() == text.len() { Err(whole) } else { serde_json::from_slice(last).map_err(|_| whole) }
        });
        let object = parsed.map_err(|cause| {
            let what = if cause.is_eof() { "is cut off, or empty" } else { "is no JSON object that is known" };
            Error::new(ErrorKind::Format, format!("{name} {what}: {cause}")).remedy(EXPECTED)
        })?;
        let has = |field: &str| object.fields.contains_key(field);
        if let Some(events) = object.events {
            self.timelines.push(Timeline::new(name, events, object.residency, object.run)?);
        } else if has("capacities") && has("pages") {
            let found: Found = fields(object.fields, &name, "outcore policies --json")?;
            let same = |capacity: &super::super::comparison::Capacity| {
                let names = |of: &super::super::comparison::Capacity| {
                    of.policies.iter().map(|policy| policy.policy.clone()).collect::<Vec<_>>()
                };
                found.capacities.first().is_some_and(|first| names(first) == names(capacity))
            };
            if !found.capacities.iter().all(same) {
                return Err(Error::new(ErrorKind::Format, format!("{name} has other policies at other capacities"))
                    .remedy("give it as `outcore policies --json` wrote it"));
            }
            self.policies.push(found);
        } else if has("pass_s_median") {
            self.generated.push(fields(object.fields, &name, "generate --json")?);
        } else if has("passes_s") && has("machine") {
            let mut simulated: Simulated = fields(object.fields, &name, "outcore simulate --json")?;
            self.timelines.extend(simulated.take_timeline(&name)?);
            self.simulated.push(simulated);
        } else if has("points") && has("memcpy_bytes_per_second") {
            self.probed.push(fields(object.fields, &name, "outcore probe --json")?);
        } else {
            let known: Vec<&str> = object.fields.keys().take(4).map(String::as_str).collect();
            let has = if known.is_empty() { "is empty".to_owned() } else { format!("has {}", known.join(", ")) };
            let what = format!("{name} is JSON of another kind: it {}", super::printable(&has));
            return Err(Error::new(ErrorKind::Format, what).remedy(EXPECTED));
        }
        Ok(())
    }
}

fn fields<T: DeserializeOwned>(fields: Map<String, Value>, name: &str, program: &str) -> Result<T> {
    serde_json::from_value(Value::Object(fields)).map_err(|cause| {
        let what = format!("{name} looks like what `{program}` writes, but is not: {cause}");
        Error::new(ErrorKind::Format, what).remedy("write it again with this release")
    })
}

fn read(path: &Path, name: &str) -> Result<Vec<u8>> {
    let failed =
        |cause| Error::io(format!("read {name}"), cause).remedy("check the path, and that you may read the file");
    // Whoever opens a pipe waits for somebody to write to it.
    if !std::fs::metadata(path).map_err(failed)?.is_file() {
        let what = format!("{name} is not a regular file");
        return Err(
            Error::new(ErrorKind::InvalidArgument, what).remedy("write the run's JSON to a file, and name that")
        );
    }
    let file = File::open(path).map_err(failed)?;
    let mut text = Vec::new();
    file.take(BYTES_MAX + 1).read_to_end(&mut text).map_err(failed)?;
    if text.len() as u64 > BYTES_MAX {
        let what = format!("{name} has more than {}", Bytes::new(BYTES_MAX));
        return Err(Error::new(ErrorKind::Unsupported, what).remedy("give the file of a shorter run"));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use super::*;

    fn refused(text: &str, parts: &[&str]) {
        let error = Inputs::default().add_text(text.as_bytes(), "made.json".into()).unwrap_err();
        for part in parts.iter().chain(&["made.json"]) {
            assert!(error.to_string().contains(part), "{part:?} is not in {error}");
        }
    }

    #[test]
    fn regression_a_pipe_is_refused_and_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe.json");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            0,
        )
        .unwrap();
        for path in [&*pipe, folder.path()] {
            let error = read(path, "pipe.json").unwrap_err().to_string();
            assert!(error.contains("pipe.json is not a regular file"), "{error}");
        }
    }

    #[test]
    fn other_kinds_are_refused() {
        refused("", &["cut off, or empty", "generate --timeline"]);
        refused("{\"traceEvents\": [", &["cut off"]);
        refused("[1, 2]", &["is no JSON object"]);
        refused("{}", &["another kind: it is empty"]);
        refused("{\"a\": 1, \"b\\u001b\": 2}", &["another kind: it has a, b\\u{1b}"]);
        refused("{\"pass_s_median\": 1}", &["generate --json", "missing field `model`"]);
        refused("{\"capacities\": 7, \"pages\": 1}", &["outcore policies --json"]);
        refused("{\"traceEvents\": 7}", &["is no JSON object that is known"]);
        refused("{\"traceEvents\": []}", &["has no spans"]);
        refused(&format!("{{\"x\": {}", "[".repeat(1 << 16)), &["is no JSON object"]);
        let policy = |name: &str| {
            format!(
                "{{\"pages\": 4, \"optimum\": {{\"hits\": 0, \"misses\": 1, \"hit_ratio\": 0}}, \
                 \"policies\": [{{\"policy\": \"{name}\", \
                 \"hits\": 0, \"misses\": 1, \"hit_ratio\": 0, \"regret\": 0, \"ns_per_use\": 1}}]}}"
            )
        };
        let found = |capacities: &str| {
            format!("{{\"trace\": \"t\", \"uses\": 1, \"pages\": 1, \"capacities\": [{capacities}]}}")
        };
        refused(&found(&format!("{}, {}", policy("lru"), policy("fifo"))), &["other policies at other capacities"]);
        let mut inputs = Inputs::default();
        inputs.add_text(found(&policy("lru")).as_bytes(), "made.json".into()).unwrap();
        inputs.add_text(format!("text\n\n{}\n", found("")).as_bytes(), "made.json".into()).unwrap();
        assert_eq!(inputs.policies.len(), 2);
    }
}
