//! Tests that run in a process of their own, because they use up what a process has, end it, or leave something behind.
//! Each has a cache folder of its own, so that it does not see what the user's programs remember.

use std::ffi::{OsStr, OsString};
use std::process::{Command, ExitStatus};

/// The variable that names the scene to a child.
const SCENE: &str = "OUTCORE_SCENE";
/// What a child prints at the end of its scene.
const ENDED: &str = "the child ran";
/// The status with which scripts in `scripts/` end where the machine lacks what they need.
const SKIPPED: i32 = 77;

/// How a child ended, and what it printed.
#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    pub text: String,
}

impl Ended {
    /// Fails unless the scene came to its end. Returns what the child printed.
    pub fn well(self, what: &str) -> String {
        assert!(self.status.success() && self.text.contains(ENDED), "{what}: {:?}: {}", self.status, self.text);
        self.text
    }

    /// As [`well`](Self::well). If the script that was to run the scene could not, says so and returns `None`.
    pub fn well_or_skipped(self, what: &str) -> Option<String> {
        if self.status.code() == Some(SKIPPED) {
            eprintln!("SKIPPED {what}: {}", self.text);
            return None;
        }
        Some(self.well(what))
    }
}

/// A test of this program, to be run in a process of its own.
#[derive(Debug)]
pub struct Scene {
    test: String,
    script: Vec<OsString>,
    variables: Vec<(String, OsString)>,
}

impl Scene {
    /// The test must ask whether it [is that process](is_child), and must say when its [scene has ended](scene_ended).
    pub fn of(test: &str) -> Self {
        Self { test: test.to_owned(), script: Vec::new(), variables: Vec::new() }
    }

    /// Sets an environment variable for the scene.
    pub fn tell(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.variables.push((name.to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Has a script of the repository run the scene, with these arguments before the program.
    pub fn by(mut self, script: &str, arguments: &[&str]) -> Self {
        self.script = vec![crate::models::repository().join(script).into()];
        self.script.extend(arguments.iter().map(OsString::from));
        self
    }

    pub fn run(self) -> Ended {
        let mut words = self.script;
        words.push(std::env::current_exe().unwrap().into());
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).args(["--exact", &whole_name(&self.test), "--nocapture", "--include-ignored"]);
        let cache = tempfile::tempdir().unwrap();
        command.env(SCENE, &self.test).env("XDG_CACHE_HOME", cache.path()).envs(self.variables);
        let output = command.output().unwrap();
        let text = [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat();
        Ended { status: output.status, text }
    }
}

/// The name of a test of this program, with the modules that it is in.
pub fn whole_name(test: &str) -> String {
    let list = Command::new(std::env::current_exe().unwrap()).args(["--list", "--format", "terse"]).output().unwrap();
    let list = String::from_utf8(list.stdout).unwrap();
    let tests = list.lines().filter_map(|line| line.strip_suffix(": test"));
    let is_named =
        |name: &&str| name.strip_suffix(test).is_some_and(|modules| modules.is_empty() || modules.ends_with("::"));
    let named: Vec<&str> = tests.filter(is_named).collect();
    assert_eq!(named.len(), 1, "one test of this program has the name {test}: {named:?}");
    named[0].to_owned()
}

/// Whether this is the process that was started for a test. In other processes that test does nothing.
pub fn is_child(test: &str) -> bool {
    std::env::var_os(SCENE).is_some_and(|name| name == test)
}

/// The child's work has come to its end.
pub fn scene_ended() {
    println!("{ENDED}");
}

/// Runs a test of this program, alone, in a process of its own.
pub fn alone(test: &str, in_the_child: impl FnOnce()) {
    if is_child(test) {
        in_the_child();
        scene_ended();
    } else {
        println!("{}", Scene::of(test).run().well(test));
    }
}
