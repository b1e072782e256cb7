//! When a random test fails, it prints one line that runs the same case again and can be pasted into a shell.

use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

/// The variable that holds the seed to replay.
const SEED: &str = "OUTCORE_SEED";
/// Other variables that a case depends on.
const SIZES: [&str; 4] = ["OUTCORE_SOAK_SECONDS", "OUTCORE_STEPS", "OUTCORE_OPERATIONS", ALL];

/// The seed that is to be replayed, if there is one.
pub fn replayed() -> Option<u64> {
    std::env::var(SEED).ok().map(|text| text.parse().unwrap())
}

/// The seed of a test's first case: the one that is to be replayed, or a new one.
pub fn first_seed() -> u64 {
    replayed().unwrap_or_else(|| SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64 >> 10)
}

/// The seed of a test with one case. Prints the line that replays it, which is shown if the test fails.
pub fn seed(test: &str) -> u64 {
    let seed = first_seed();
    eprintln!("{}", line(test, seed));
    seed
}

/// The variable that has every like case tried.
const ALL: &str = "OUTCORE_ALL";

/// Of cases that are numbered from 1 on and alike, those to try: each third from a place on that another run has
/// elsewhere; all if `OUTCORE_ALL` is set. Prints the line that tries them again.
pub fn a_third(test: &str) -> impl Iterator<Item = u64> + Clone + use<> {
    each(3, test)
}

/// As [`a_third`], each `nth`.
pub fn each(nth: u64, test: &str) -> impl Iterator<Item = u64> + Clone + use<> {
    let all = std::env::var_os(ALL).is_some();
    let (first, step) = if all { (1, 1) } else { (1 + seed(test) % nth, nth) };
    (first..).step_by(step as usize)
}

/// The name of this test program: that of its file, without the hash that cargo gives it.
fn program() -> String {
    let file = std::env::current_exe().unwrap();
    let name = file.file_stem().unwrap().to_string_lossy().into_owned();
    name.rsplit_once('-').map_or(name.clone(), |(program, _)| program.to_owned())
}

/// The line that replays this case of `test`, in any folder of the workspace. Must be called on the test's own thread,
/// which has the test's whole name.
pub fn line(test: &str, seed: u64) -> String {
    let sizes = SIZES.iter().filter_map(|name| Some(format!("{name}={} ", std::env::var(name).ok()?)));
    let strict = if outcore::device::parts::strict() { "OUTCORE_STRICT=1 " } else { "" };
    let release = if cfg!(debug_assertions) { "" } else { " --release" };
    let thread = thread::current();
    let name = thread.name().filter(|name| name.ends_with(test)).unwrap_or(test);
    let exact = if name.len() > test.len() { "--exact " } else { "" };
    // Cargo names the package to the tests that it runs.
    let package = std::env::var("CARGO_PKG_NAME").map_or(String::new(), |package| {
        // Without them cargo does not build its tests of the store.
        let features = if package == "outcore-kv" { " --all-features" } else { "" };
        format!(" -p {package}{features}")
    });
    format!(
        "replay: {strict}{SEED}={seed} {}cargo test{release}{package} --test {} -- {exact}--include-ignored {name}",
        sizes.collect::<String>(),
        program(),
    )
}

/// A case of a test that has many. If it fails, the line that replays it is printed.
pub struct Case(String);

impl Case {
    /// Must be called on the test's own thread.
    pub fn of(test: &str, seed: u64) -> Self {
        Self(line(test, seed))
    }
}

impl Drop for Case {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("{}", self.0);
        }
    }
}

#[cfg(test)]
mod tests {
    /// Without its package, cargo would look for the test program in the default one.
    #[test]
    fn regression_the_replay_line_names_the_package() {
        let line = super::line("a_test", 7);
        let words = ["replay: OUTCORE_SEED=7 ", " -p outcore-testkit", " --test outcore_testkit ", " a_test"];
        assert!(words.iter().all(|word| line.contains(word)), "{line}");
    }
}
