//! run.sh and its helpers, as they lie in a bundle, over the emulated CUDA driver: what they print, write and exit
//! with.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

/// A folder laid out as the bundle is, without what needs a release build.
struct Bundle {
    folder: TempDir,
}

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}

/// The emulated driver, which cargo builds beside the tests.
fn emulated() -> PathBuf {
    let beside = std::env::current_exe().unwrap().parent().unwrap().join("liboutcore_fake_cuda.so");
    assert!(beside.exists(), "{} is not there; `cargo test` builds it", beside.display());
    beside
}

impl Bundle {
    fn new() -> Self {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        for inside in ["bin", "driver", "empty", "work"] {
            fs::create_dir(folder.path().join(inside)).unwrap();
        }
        for file in ["run.sh", "report.py", "extra.py"] {
            fs::copy(sources().join(file), folder.path().join(file)).unwrap();
        }
        symlink(env!("CARGO_BIN_EXE_gpu-probe"), folder.path().join("bin/gpu-probe")).unwrap();
        symlink(emulated(), folder.path().join("driver/libcuda.so")).unwrap();
        Self { folder }
    }

    fn path(&self, inside: &str) -> PathBuf {
        self.folder.path().join(inside)
    }

    /// Runs run.sh with the emulated driver.
    fn run(&self, options: &[&str], environment: &[(&str, &str)]) -> Output {
        let mut command = Command::new(self.path("run.sh"));
        command.args(["--tiny", "--out"]).arg(self.path("out")).arg("--dir").arg(self.path("work")).args(options);
        command.env("LD_LIBRARY_PATH", self.path("driver")).envs(environment.iter().copied());
        command.output().unwrap()
    }

    fn results(&self) -> Value {
        serde_json::from_str(&fs::read_to_string(self.path("out/gpu-check.json")).unwrap()).unwrap()
    }
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn parts_run_and_their_results_are_written_and_nothing_else_stays() {
    let bundle = Bundle::new();
    let output = bundle.run(&["--only", "machine,copies,events,lock,disk"], &[]);
    let text = said(&output);
    let results = bundle.results();
    for part in ["machine", "copies", "events", "lock", "disk"] {
        assert_eq!(results["parts"][part]["status"], "ok", "{text}");
        assert!(!results["parts"][part]["numbers"].as_object().unwrap().is_empty(), "{text}");
    }
    assert_eq!(results["parts"].as_object().unwrap().len(), 5);
    assert_eq!(results["scale"], "tiny");
    let up = &results["parts"]["copies"]["numbers"]["host to device, one copy"];
    assert!(up["unit"] == "GB/s" && up["median"].as_f64().unwrap() > 0.0, "{up}");
    // Whether the copies reach their goals depends on this machine. That missed goals are counted does not.
    let missed =
        results["parts"]["copies"]["verdicts"].as_object().unwrap().values().filter(|v| v["pass"] == false).count();
    assert_eq!(output.status.code(), Some(i32::from(missed > 0)), "{text}");
    assert!(text.contains("the numbers mean nothing") && text.contains(&format!("{missed} missed")), "{text}");
    assert!(!text.contains("fake CUDA"), "the emulated driver found something: {text}");
    let log = fs::read_to_string(bundle.path("out/gpu-check.log")).unwrap();
    assert!(log.contains("== copies: status 0") && !log.contains("fake CUDA"), "{log}");
    assert_eq!(fs::read_dir(bundle.path("work")).unwrap().count(), 0, "large files stay");
}

#[test]
fn a_part_that_fails_is_reported_and_the_others_go_on() {
    let bundle = Bundle::new();
    // In run.sh's processes the emulated driver knows no kernels. It also refuses the call that is named here.
    let output =
        bundle.run(&["--only", "copies,mapping,events,generate"], &[("FAKECUDA_FAIL", "cuMemcpyDtoHAsync:3:2")]);
    let (text, results) = (said(&output), bundle.results());
    assert_eq!(output.status.code(), Some(1), "{text}");
    let part = |name: &str| &results["parts"][name];
    assert_eq!(part("copies")["status"], "failed", "{text}");
    assert!(part("copies")["error"].as_str().unwrap().contains("CUDA_ERROR_OUT_OF_MEMORY"), "{text}");
    assert!(part("mapping")["status"] == "failed" && part("events")["status"] == "ok", "{text}");
    assert!(part("generate")["error"].as_str().unwrap().contains("not in this bundle"), "{text}");
    assert_eq!(part("generate")["status"], "not possible");
    assert!(
        text.contains("parts that did not end: copies (failed), mapping (failed), generate (not possible)"),
        "{text}"
    );
}

#[test]
fn a_part_that_takes_too_long_leaves_what_it_had() {
    let bundle = Bundle::new();
    let probe = bundle.path("bin/gpu-probe");
    fs::remove_file(&probe).unwrap();
    let script = "#!/bin/sh\n[ \"$1\" = gpu ] && exit 0\n\
        echo '{\"record\":\"number\",\"name\":\"n\",\"unit\":\"s\",\"median\":1,\"least\":1,\"most\":1,\"rounds\":1}'\n\
        printf '{\"record\":\"num'\nexec tail -f /dev/null\n";
    fs::write(&probe, script).unwrap();
    fs::set_permissions(&probe, fs::Permissions::from_mode(0o755)).unwrap();
    let output = bundle.run(&["--only", "machine", "--limit", "3"], &[]);
    let (text, results) = (said(&output), bundle.results());
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert_eq!(results["parts"]["machine"]["status"], "stopped", "{text}");
    assert_eq!(results["parts"]["machine"]["numbers"]["n"]["median"], 1, "{text}");
    assert!(text.contains("it took longer than 3 s"), "{text}");
    let output = bundle.run(&["--only", "machine,copies", "--seconds", "0"], &[]);
    let (text, results) = (said(&output), bundle.results());
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert_eq!(results["parts"]["copies"]["status"], "skipped", "{text}");
}

/// A program of the bundle that prints what a test needs.
fn says(bundle: &Bundle, name: &str, script: &str) {
    let path = bundle.path("bin").join(name);
    fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn tests_that_did_not_run_and_logits_that_differ_are_found() {
    let bundle = Bundle::new();
    let device = "[ \"$OUTCORE_REAL_CUDA\" = 1 ] || exit 9\n\
         ended() { echo \"test result: ok. $1 passed; 0 failed; 0 ignored\"; }\n\
         case $1 in\n\
         suite::cuda_real) for name in one two three; do echo \"suite::cuda_real::$name: test\"; done ;;\n\
         --exact)\n\
           case $2 in *one) echo 'SKIPPED one: no reason' ;; *two) exit 3 ;; *three) exit 124 ;; esac ;;\n\
         cuda::cuda_real) ended 7 ;;\n\
         pins_on_streams::cuda_real) echo 'SKIPPED one: no reason'; ended 3 ;;\n\
         *) exit 8 ;;\n\
         esac";
    says(&bundle, "device", device);
    says(&bundle, "make_model", ": >\"$1\"");
    // The hashes depend on the budget, so they differ between the runs.
    let report = r#"{"decode_tok_s":2.0,"pass_s_median":0.5,"peak_device_bytes":1,"device_budget_bytes":2,"logits_xxh3":"'$budget'"}"#;
    let generate = format!(
        "[ \"$1\" = --help ] && echo '--device cuda' && exit\n\
         while [ \"$1\" != --device-budget ]; do shift; done\nbudget=$2\necho '{report}'"
    );
    says(&bundle, "generate", &generate);
    let output = bundle.run(&["--only", "device-suite,runtime-suite,generate"], &[]);
    let (text, results) = (said(&output), bundle.results());
    assert_eq!(output.status.code(), Some(1), "{text}");
    let part = |name: &str| &results["parts"][name];
    assert_eq!(part("device-suite")["status"], "failed", "{text}");
    let error = part("device-suite")["error"].as_str().unwrap();
    assert!(error.contains("suite::cuda_real::two failed; suite::cuda_real::three did not end"), "{text}");
    assert_eq!(part("device-suite")["numbers"]["suite: tests passed"]["median"], 0, "{text}");
    // A test that is for a GPU must not skip on one.
    assert_eq!(part("runtime-suite")["status"], "failed", "{text}");
    assert!(part("runtime-suite")["error"].as_str().unwrap().contains("pins_on_streams skipped 1 tests"), "{text}");
    assert_eq!(part("runtime-suite")["numbers"]["cuda: tests passed"]["median"], 7, "{text}");
    assert_eq!(part("runtime-suite")["numbers"]["pins_on_streams: tests passed"]["median"], 2, "{text}");
    assert_eq!(part("generate")["status"], "ok", "{text}");
    let verdicts = part("generate")["verdicts"].as_object().unwrap();
    assert!(verdicts.len() == 1 && verdicts.values().all(|verdict| verdict["pass"] == false), "{text}");
    assert!(text.contains("1 missed: generate:"), "{text}");
}

/// The largest error of each kind is judged. A skipped test is reported. A comparison that is missing is a failure.
#[test]
fn what_the_gpu_computes_is_judged_by_the_largest_error() {
    let bundle = Bundle::new();
    fs::create_dir(bundle.path("kernels")).unwrap();
    fs::write(bundle.path("kernels/kernels.fatbin"), "").unwrap();
    let ended = "echo 'test result: ok. 9 passed; 0 failed; 0 ignored'";
    let wanted = "[ \"$OUTCORE_TEST_GPU\" = 0 ] && [ -f \"$OUTCORE_TEST_KERNELS\" ] || exit 7";
    let line = |error: &str, allowed: &str| format!("echo 'relative error {error}, {allowed} allowed: a case'");
    let kernels = [wanted, "[ \"$1\" = cuda::tests ] || exit 8", &line("2e-7", "1e-5"), &line("1e-8", "1e-5"), ended];
    says(&bundle, "kernels", &kernels.join("\n"));
    let skipped = "echo 'SKIPPED with_cublas: there is none'";
    let forward = |error| {
        let lines = [&line(error, "1e-3"), &line("2e-5", "1e-3"), &line("1e-2", "3e-2"), skipped, ended];
        [&[wanted, "[ \"$1\" = on_a_gpu ] || exit 8"], &lines.map(|line| -> &str { line })[..]].concat().join("\n")
    };
    // In order of name: the kernels, logits of types that the CPU rounds activations for, all other logits.
    let judged = |results: &Value, wanted: [bool; 3]| {
        let part = &results["parts"]["kernels"];
        let verdicts: Vec<_> = part["verdicts"].as_object().unwrap().values().map(|one| one["pass"] == true).collect();
        assert_eq!(verdicts, wanted, "{part}");
        part.clone()
    };
    says(&bundle, "forward", &forward("3e-6"));
    let output = bundle.run(&["--only", "kernels"], &[]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let part = judged(&bundle.results(), [true, true, true]);
    assert_eq!(part["verdicts"]["kernels and cuBLAS against sums in f64"]["value"], 2e-7, "{part}");
    assert_eq!(part["numbers"]["forward: tests passed"]["median"], 8, "{part}");
    assert!(part["notes"][0].as_str().unwrap().contains("with_cublas"), "{part}");

    for wrong in ["2e-3", "NaN", "inf"] {
        says(&bundle, "forward", &forward(wrong));
        let output = bundle.run(&["--only", "kernels"], &[]);
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        judged(&bundle.results(), [true, true, false]);
    }
    says(&bundle, "forward", &format!("{}\n{ended}", line("1e-6", "1e-3")));
    let output = bundle.run(&["--only", "kernels"], &[]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("nothing was compared within 3e-2"), "{}", said(&output));
}

#[test]
fn without_a_gpu_it_says_so_and_ends_with_2() {
    let bundle = Bundle::new();
    let output = bundle.run(&[], &[("FAKECUDA_NO_DEVICE", "1")]);
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("no GPU can be used here"), "{}", said(&output));
    assert!(!bundle.path("out").exists(), "nothing is written");
    // These files are not libraries: what the loader says is passed on, and there is no panic.
    let broken = bundle.path("driver/libcuda.so");
    fs::remove_file(&broken).unwrap();
    for name in ["libcuda.so", "libcuda.so.1"] {
        fs::write(bundle.path("driver").join(name), "no library").unwrap();
    }
    if Path::new("/dev/nvidia0").exists() {
        return;
    }
    let output = bundle.run(&[], &[]);
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
    assert!(said(&output).contains("libcuda") && !said(&output).contains("panicked"), "{}", said(&output));
}

#[test]
fn wrong_options_are_refused_and_parts_are_listed() {
    let bundle = Bundle::new();
    let output = bundle.run(&["--only", "copies,nonsense"], &[]);
    assert_eq!(output.status.code(), Some(64), "{}", said(&output));
    let text = said(&output);
    assert!(text.contains("'nonsense'") && text.contains("copies") && text.contains("three-tier"), "{text}");
    for options in [&["--nonsense"][..], &["--out"], &["--seconds", "many"]] {
        let output = Command::new(bundle.path("run.sh")).args(options).output().unwrap();
        assert_eq!(output.status.code(), Some(64), "{}", said(&output));
        assert!(said(&output).contains("--only"), "{}", said(&output));
    }
    // The script's list has every part of the probe.
    let probe = Command::new(bundle.path("bin/gpu-probe")).arg("parts").output().unwrap();
    for part in String::from_utf8_lossy(&probe.stdout).lines() {
        assert!(text.contains(&format!(" {part}")), "{part} is missing in run.sh: {text}");
    }
}

fn result(date: &str, rate: f64, pass: bool) -> Value {
    let number = |value: f64| serde_json::json!({ "unit": "GB/s", "median": value, "least": value * 0.99, "most": value * 1.01, "rounds": 3 });
    let verdict = serde_json::json!({ "value": rate / 50.0, "unit": "ratio", "goal": { "at_least": 0.97 }, "pass": pass, "formula": "f" });
    serde_json::json!({
        "format": 1, "date": date, "scale": "full", "built_from": date, "nvidia_smi": null,
        "parts": {
            "copies": {
                "status": "ok", "seconds": 2.0, "chosen": {}, "notes": [],
                "numbers": { "up": number(rate), "ceiling": number(50.0) },
                "verdicts": { "host to device": verdict },
            },
        },
    })
}

#[test]
fn two_results_are_compared_number_by_number() {
    let bundle = Bundle::new();
    let (new, old) = (bundle.path("new.json"), bundle.path("old.json"));
    let mut second = result("second", 40.0, false);
    second["parts"]["lock"] = serde_json::json!({ "status": "failed", "error": "refused", "seconds": 1.0 });
    let mut first = result("first", 50.0, true);
    first["parts"]["disk"] = serde_json::json!({ "status": "ok", "seconds": 1.0 });
    fs::write(&new, second.to_string()).unwrap();
    fs::write(&old, first.to_string()).unwrap();
    let report = |options: &[&std::ffi::OsStr]| {
        Command::new("python3").arg(bundle.path("report.py")).args(options).output().unwrap()
    };
    let output = report(&["compare".as_ref(), new.as_ref(), old.as_ref()]);
    let text = said(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains(" 0.800  copies: up: 40.00 GB/s / 50.00 GB/s  <--"), "{text}");
    assert!(text.contains(" 1.000  copies: ceiling: 50.00 GB/s / 50.00 GB/s\n"), "{text}");
    assert!(text.contains("verdict copies: host to device: MISSED, was met"), "{text}");
    assert!(text.contains("lock: only in the new results") && text.contains("disk: only in the old results"), "{text}");
    let output = report(&["table".as_ref(), new.as_ref()]);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("MISSED host to device: 0.800, wanted >= 0.970"), "{text}");
    assert!(
        text.contains("0 verdicts met, 1 missed: copies: host to device") && text.contains("lock (failed)"),
        "{text}"
    );
    assert_eq!(report(&["table".as_ref(), old.as_ref()]).status.code(), Some(0));
    // Without --previous, the newest packed results are used.
    fs::create_dir(bundle.path("previous")).unwrap();
    fs::write(bundle.path("previous/gpu-1.json"), first.to_string()).unwrap();
    let text = said(&bundle.run(&["--only", "events"], &[]));
    assert!(text.contains("== new / old") && text.contains("copies: only in the old results"), "{text}");
}
