//! What a test can make go wrong: failing calls, lost devices, late and slow work. Also what the machine looks like.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::abi::{CuResult, ERROR_UNKNOWN};

/// Counts calls and decides which of them fail.
#[derive(Default)]
pub struct Injection {
    counts: HashMap<&'static str, u64>,
    all: u64,
    rules: Vec<Rule>,
    fired: u64,
    /// Functions whose calls do not go on.
    held: Vec<String>,
}

struct Rule {
    /// A function's name without its version suffix, or `*` for any.
    name: String,
    /// The numbers of the calls to fail.
    from: u64,
    count: u64,
    code: CuResult,
    /// Whether the failure takes the device with it: every later call fails the same way.
    fatal: bool,
}

/// `cuMemAlloc_v2` and `cuMemAlloc_v2_ptsz` are `cuMemAlloc` to a test.
fn base(name: &str) -> &str {
    let name = name.strip_suffix("_ptsz").unwrap_or(name);
    match name.rsplit_once("_v") {
        Some((base, version)) if version.bytes().all(|c| c.is_ascii_digit()) => base,
        _ => name,
    }
}

impl Injection {
    /// Counts a call; `Err((code, fatal))` where it is to fail.
    pub fn count(&mut self, name: &'static str) -> Result<(), (CuResult, bool)> {
        let name = base(name);
        // The work of streams is not a call, and asking what an error is called is no part of a program's path.
        let any = name != WORK && !name.starts_with("cuGetError");
        self.all += u64::from(any);
        let all = self.all;
        let own = self.counts.entry(name).or_default();
        *own += 1;
        for rule in &self.rules {
            let number = match rule.name.as_str() {
                "*" if any => all,
                other if other == name => *own,
                _ => continue,
            };
            if number >= rule.from && number - rule.from < rule.count {
                self.fired += 1;
                return Err((rule.code, rule.fatal));
            }
        }
        Ok(())
    }
    /// Fails calls `nth..nth + count`, counted from now, with `code`.
    pub fn fail(&mut self, name: &str, nth: u64, count: u64, code: CuResult, fatal: bool) {
        let name = base(name).to_owned();
        let so_far = if name == "*" { self.all } else { self.counts.get(name.as_str()).copied().unwrap_or(0) };
        self.rules.push(Rule { name, from: so_far.saturating_add(nth), count, code, fatal });
    }
    /// Keeps calls of `name` waiting, or lets them go on.
    pub fn hold(&mut self, name: &str, held: bool) {
        let name = base(name).to_owned();
        self.held.retain(|other| *other != name);
        if held {
            self.held.push(name);
        }
    }
    pub fn is_held(&self, name: &str) -> bool {
        self.held.iter().any(|held| held == base(name))
    }
    pub fn calls(&self, name: &str) -> u64 {
        if name == "*" { self.all } else { self.counts.get(base(name)).copied().unwrap_or(0) }
    }
    pub fn fired(&self) -> u64 {
        self.fired
    }
}

/// The pseudo-function counted once for every operation a stream executes.
pub const WORK: &str = "work";

/// What the machine looks like. `FAKECUDA_*` variables set the start, exports change it.
#[derive(Clone)]
pub struct Config {
    pub devices: usize,
    pub device_bytes: u64,
    /// The instance of a partitioned GPU that the process sees in place of the GPU.
    pub instance: Option<u8>,
    pub driver_version: i32,
    /// Longest random delay of an operation, and the generator's state.
    pub delay: Duration,
    pub seed: u64,
    /// Bytes a second, host to device and device to host; 0 is as fast as the machine.
    pub link: [u64; 2],
    pub attributes: BTreeMap<i32, i32>,
    pub granularity: u64,
    /// How many operations a stream's queue holds: further ones wait in their calls.
    pub queue_depth: u64,
    /// Copies, fills and events end when they are submitted, move nothing, and are not judged.
    pub bare: bool,
    /// What the next kernel to run reads to its end first: a pipe keeps it running until its writer closes it.
    pub gate: Option<PathBuf>,
}

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.trim().parse().ok()
}

impl Config {
    pub fn from_environment() -> Self {
        let no_device = std::env::var_os("FAKECUDA_NO_DEVICE").is_some_and(|v| v != "0");
        Self {
            devices: if no_device { 0 } else { variable("FAKECUDA_DEVICES").unwrap_or(1) as usize },
            device_bytes: variable("FAKECUDA_MEM_MB").unwrap_or(4096) << 20,
            instance: None,
            driver_version: variable("FAKECUDA_DRIVER_VERSION").unwrap_or(13000) as i32,
            delay: Duration::from_micros(variable("FAKECUDA_DELAY_US").unwrap_or(0)),
            seed: variable("FAKECUDA_SEED").unwrap_or(1),
            link: [
                variable("FAKECUDA_H2D_BYTES_PER_S").unwrap_or(0),
                variable("FAKECUDA_D2H_BYTES_PER_S").unwrap_or(0),
            ],
            attributes: BTreeMap::new(),
            granularity: 2 << 20,
            queue_depth: variable("FAKECUDA_QUEUE_DEPTH").unwrap_or(1024).max(1),
            bare: false,
            gate: std::env::var_os("FAKECUDA_GATE").map(PathBuf::from),
        }
    }
    /// A delay between nothing and the longest, by the seed.
    pub fn draw_delay(&mut self) -> Duration {
        if self.delay.is_zero() {
            return Duration::ZERO;
        }
        // xorshift64*: any non-zero seed gives the full period.
        let mut x = self.seed | 1;
        x ^= x >> 12;
        x ^= x << 25;
        x ^= x >> 27;
        self.seed = x;
        let unit = (x.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 40) as f64 / (1u64 << 24) as f64;
        self.delay.mul_f64(unit)
    }
}

/// `FAKECUDA_FAIL=cuMemMap:3:2,cuStreamSynchronize:1:719:lost`: name, number, code, and whether the device is lost.
pub fn rules_from_environment(injection: &mut Injection) {
    for rule in std::env::var("FAKECUDA_FAIL").unwrap_or_default().split(',').filter(|rule| !rule.is_empty()) {
        let mut parts = rule.split(':');
        let name = parts.next().unwrap_or_default();
        let nth = parts.next().and_then(|n| n.parse().ok()).unwrap_or(1);
        let code = parts.next().and_then(|n| n.parse().ok()).unwrap_or(ERROR_UNKNOWN);
        injection.fail(name, nth, 1, code, parts.next() == Some("lost"));
    }
}

/// The two directions of the link, each busy until some time.
#[derive(Default)]
pub struct Link([Option<Instant>; 2]);

impl Link {
    /// Takes the direction for `bytes`; returns when they have crossed.
    pub fn take(&mut self, direction: usize, bytes: u64, per_second: u64) -> Option<Instant> {
        if per_second == 0 {
            return None;
        }
        let now = Instant::now();
        let start = self.0[direction].map_or(now, |busy| busy.max(now));
        let end = start + Duration::from_secs_f64(bytes as f64 / per_second as f64);
        self.0[direction] = Some(end);
        Some(end)
    }
}
