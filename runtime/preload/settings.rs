//! What `outcore run` asks for. It comes in variables of the environment, which programs that this one starts have too.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use glob::Pattern;
use outcore::{Error, ErrorKind, PolicyKind, Result};
use outcore_mapped::Mechanism;

use crate::sys::say;

const BUDGET: &str = "OUTCORE_RUN_BUDGET";
const MEMORY: &str = "OUTCORE_RUN_MEMORY";
const POLICY: &str = "OUTCORE_RUN_POLICY";
/// Patterns, one a line.
const MATCH: &str = "OUTCORE_RUN_MATCH";
/// How pages come, in place of what fits the kernel: `move` or `copy`.
const MECHANISM: &str = "OUTCORE_RUN_MECHANISM";
const REPORT: &str = "OUTCORE_RUN_REPORT";
/// 0: orders are not kept for the next start.
const KEEP_ORDER: &str = "OUTCORE_RUN_KEEP_ORDER";
/// The process that was asked for. Others are started by it, and write to files of their own.
const FIRST: &str = "OUTCORE_RUN_FIRST";
/// `off`: nothing is asked of ggml, and experts come as they are touched.
const ROUTING: &str = "OUTCORE_RUN_ROUTING";
/// `off`: no experts are predicted. `followed`: they are predicted by what followed before, not by what routers are
/// given.
const PREDICTION: &str = "OUTCORE_RUN_PREDICTION";

/// What memory there is.
#[derive(Clone, Copy, Debug)]
pub enum Memory {
    /// So much for pages; the program's own memory comes on top.
    Pages(u64),
    /// So much for the whole process.
    Process(u64),
    /// What the machine, or the process's control group, leaves.
    Left,
}

#[derive(Debug)]
pub struct Settings {
    pub memory: Memory,
    pub policy: Option<PolicyKind>,
    pub mechanism: Option<Mechanism>,
    /// Whether the order in which files are used is kept for the next start.
    pub keep_order: bool,
    matches: Vec<Pattern>,
    /// Where the timeline goes.
    pub report: Option<PathBuf>,
}

impl Settings {
    fn read() -> Result<Self> {
        let value = |name: &'static str| std::env::var_os(name).filter(|value| !value.is_empty());
        let text = |name: &'static str| {
            let text = |value: OsString| value.into_string().map_err(|value| wrong(name, &value.to_string_lossy()));
            value(name).map(text).transpose()
        };
        let bytes = |name: &'static str| -> Result<Option<u64>> {
            let number = |text: String| text.parse::<u64>().map_err(|_| wrong(name, &text));
            text(name)?.map(number).transpose()
        };
        let memory = match (bytes(BUDGET)?, bytes(MEMORY)?) {
            (Some(_), Some(_)) => {
                let message = format!("{BUDGET} and {MEMORY} exclude each other");
                return Err(Error::new(ErrorKind::InvalidArgument, message).remedy("set one of them"));
            }
            (Some(pages), None) => Memory::Pages(pages),
            (None, Some(process)) => Memory::Process(process),
            (None, None) => Memory::Left,
        };
        let policy = text(POLICY)?.map(|name| name.parse()).transpose()?;
        let mechanism = text(MECHANISM)?.map(|name| name.parse()).transpose()?;
        let pattern = |line: &str| Pattern::new(line).map_err(|_| wrong(MATCH, line));
        let matches = text(MATCH)?.unwrap_or_default().lines().map(pattern).collect::<Result<_>>()?;
        let own = std::process::id();
        let first = text(FIRST)?.is_none_or(|first| first == own.to_string());
        let report = value(REPORT).map(|mut path| {
            if !first {
                path.push(format!(".{own}"));
            }
            PathBuf::from(path)
        });
        let keep_order = match text(KEEP_ORDER)?.as_deref() {
            None | Some("1") => true,
            Some("0") => false,
            Some(other) => return Err(wrong(KEEP_ORDER, other)),
        };
        Ok(Self { memory, policy, mechanism, keep_order, matches, report })
    }

    /// Whether a file of this path may be mapped. A pattern without a slash is one of file names.
    pub fn may_map(&self, path: &Path) -> bool {
        let fits = |pattern: &Pattern| {
            let whole = pattern.as_str().contains('/');
            pattern.matches_path(if whole { path } else { Path::new(path.file_name().unwrap_or_default()) })
        };
        self.matches.is_empty() || self.matches.iter().any(fits)
    }
}

fn wrong(name: &str, value: &str) -> Error {
    Error::new(ErrorKind::InvalidArgument, format!("{name} is {value:?}, which is not understood"))
        .remedy("start the program with `outcore run`, which sets it")
}

/// The settings; `None` if they are not understood, which is said once. Then all is the kernel's.
pub fn settings() -> Option<&'static Settings> {
    static SETTINGS: OnceLock<Option<Settings>> = OnceLock::new();
    let read = || Settings::read().map_err(|error| say(&format!("files stay the kernel's: {error}"))).ok();
    SETTINGS.get_or_init(read).as_ref()
}

/// Whether the program's choice of experts is looked at. Read once: ggml is told of its callback before each pass.
pub fn reads_routing() -> bool {
    static ON: OnceLock<bool> = OnceLock::new();
    *ON.get_or_init(|| value_of(ROUTING, &["off"]).is_none())
}

/// How experts are predicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prediction {
    /// By what routers are given, or else by what followed before.
    Best,
    /// By what followed before.
    Followed,
    Off,
}

pub fn prediction() -> Prediction {
    static BY: OnceLock<Prediction> = OnceLock::new();
    *BY.get_or_init(|| match value_of(PREDICTION, &["off", "followed"]) {
        None => Prediction::Best,
        Some(0) => Prediction::Off,
        Some(_) => Prediction::Followed,
    })
}

/// Which of these words a variable of the environment is.
fn value_of(name: &str, known: &[&str]) -> Option<usize> {
    let value = std::env::var_os(name)?;
    let found = known.iter().position(|known| value == **known);
    if found.is_none() {
        let known = known.join("` or `");
        say(&format!("{name}={}: only `{known}` is known, so it is as if it were not set", value.display()));
    }
    found
}
