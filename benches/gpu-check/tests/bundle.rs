//! run.sh and its helpers, as they lie in a bundle, over the emulated CUDA driver: what they print, write and exit
//! with.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

mod rig;

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
        for inside in ["bin", "driver", "tools", "work"] {
            fs::create_dir(folder.path().join(inside)).unwrap();
        }
        for file in ["run.sh", "report.py", "extra.py", "peers.py", "limits.py"] {
            fs::copy(sources().join(file), folder.path().join(file)).unwrap();
        }
        symlink(env!("CARGO_BIN_EXE_gpu-probe"), folder.path().join("bin/gpu-probe")).unwrap();
        let sources = Command::new("python3").arg(sources().join("sources.py")).output().unwrap();
        assert!(sources.status.success(), "{}", said(&sources));
        fs::write(folder.path().join("SOURCES"), sources.stdout).unwrap();
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
        let tools = format!("{}:{}", self.path("tools").display(), std::env::var("PATH").unwrap());
        command.env("LD_LIBRARY_PATH", self.path("driver")).env("PATH", tools).envs(environment.iter().copied());
        command.output().unwrap()
    }

    fn results(&self) -> Value {
        self.results_of(1)
    }

    fn results_of(&self, run: u32) -> Value {
        let file = self.path(&format!("out/gpu-check-{run}.json"));
        serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap()
    }

    /// In place of gpu-probe, this program with its kernels done by the host.
    fn with_kernels(&self) {
        let program = std::env::current_exe().unwrap();
        let script = format!(
            "#!/bin/bash\nPROBE_ARGUMENTS=$(printf '%s\\n' \"$@\")\nexport PROBE_ARGUMENTS\n'{}' as_the_probe --exact \
             --ignored --nocapture --test-threads=2 | grep --line-buffered -vE '^(running 1 test)?$'\n\
             exit \"${{PIPESTATUS[0]}}\"\n",
            program.display()
        );
        let probe = self.path("bin/gpu-probe");
        fs::remove_file(&probe).unwrap();
        executable(&probe, &script);
    }
}

fn executable(path: &Path, script: &str) {
    fs::write(path, script).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// Not a test: gpu-probe, with kernels, where a bundle's script starts this program.
#[test]
#[ignore = "started by other tests"]
fn as_the_probe() {
    let Ok(arguments) = std::env::var("PROBE_ARGUMENTS") else { return };
    // It is never dropped: the process ends first.
    let _driver = rig::driver();
    let name = std::iter::once("gpu-probe").chain(arguments.lines()).map(Into::into);
    std::process::exit(outcore_gpu_check::command_line(name).into());
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn programs_that_are_packed_are_unpacked_once() {
    let bundle = Bundle::new();
    let mut pack = Command::new("tar");
    // A link would lead to this machine's folder.
    pack.arg("-C").arg(bundle.folder.path()).args(["--dereference", "-czf"]).arg(bundle.path("bin.tar.gz")).arg("bin");
    assert!(pack.status().unwrap().success());
    fs::remove_dir_all(bundle.path("bin")).unwrap();
    for _ in 0..2 {
        let output = bundle.run(&["--only", "machine"], &[]);
        assert_eq!(bundle.results()["parts"]["machine"]["status"], "ok", "{}", said(&output));
    }
    fs::remove_dir_all(bundle.path("bin")).unwrap();
    fs::write(bundle.path("bin.tar.gz"), "no archive").unwrap();
    let output = bundle.run(&["--only", "machine"], &[]);
    assert!(output.status.code() == Some(1) && said(&output).contains("was not unpacked"), "{}", said(&output));
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
    let log = fs::read_to_string(bundle.path("out/gpu-check-1.log")).unwrap();
    assert!(log.contains("== copies") && !log.contains("fake CUDA"), "{log}");
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
        text.contains("parts that did not end: generate (not possible), copies (failed), mapping (failed)"),
        "{text}"
    );
}

#[test]
fn a_part_that_takes_too_long_leaves_what_it_had() {
    let bundle = Bundle::new();
    let probe = bundle.path("bin/gpu-probe");
    fs::remove_file(&probe).unwrap();
    let script = "#!/bin/sh\n[ \"$1\" = gpu ] && exit 0\n[ \"$1\" = parts ] && echo machine copies && exit\n\
        echo '{\"record\":\"number\",\"name\":\"n\",\"unit\":\"s\",\"median\":1,\"least\":1,\"most\":1,\"rounds\":1}'\n\
        printf '{\"record\":\"num'\nexec tail -f /dev/null\n";
    executable(&probe, script);
    let output = bundle.run(&["--only", "machine", "--limit", "3"], &[]);
    let (text, results) = (said(&output), bundle.results());
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert_eq!(results["parts"]["machine"]["status"], "stopped", "{text}");
    assert_eq!(results["parts"]["machine"]["numbers"]["n"]["median"], 1, "{text}");
    assert!(text.contains("it took longer than 3 s: "), "{text}");
    // By whatever debugger there is, or by the kernel.
    let log = fs::read_to_string(bundle.path("out/gpu-check-1.log")).unwrap();
    assert!(log.contains("== backtrace of") && log.contains("(tail) by"), "{log}");

    // A debugger's words are made short. Where it fails, the kernel is asked.
    let frames = "Thread 2 (Thread 0x7f (LWP 12) \"cuda-reap\"):\n#0  0x00007f in futex_wait (x=1) at f.c:3\n\
        #1  outcore_gpu::reaper::run (self=0x1)\n\nThread 1 (Thread 0x7e (LWP 11) \"tail\"):\n#0  read () at r.c:1\n";
    executable(
        &bundle.path("tools/cuda-gdb"),
        &format!("#!/bin/sh\n[ \"$1 $3\" = '-p -batch' ] && cat <<'E'\n{frames}E\n"),
    );
    let output = bundle.run(&["--only", "machine", "--limit", "1"], &[]);
    let short = "cuda-reap: futex_wait < outcore_gpu::reaper::run; tail: read";
    assert!(said(&output).contains(short), "{}", said(&output));
    for debugger in ["tools/cuda-gdb", "tools/gdb"] {
        executable(&bundle.path(debugger), "#!/bin/sh\necho 'ptrace: Operation not permitted.' >&2\nexit 1\n");
    }
    let output = bundle.run(&["--only", "machine", "--limit", "1"], &[]);
    let text = said(&output);
    assert!(text.contains("(tail): waits in "), "{text}");
    let log = fs::read_to_string(bundle.path("out/gpu-check-1.log")).unwrap();
    assert!(log.contains("by /proc (cuda-gdb: ptrace: Operation not permitted.; gdb: ptrace:"), "{log}");
    let output = bundle.run(&["--only", "machine,copies", "--seconds", "0"], &[]);
    let (text, results) = (said(&output), bundle.results());
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert_eq!(results["parts"]["copies"]["status"], "skipped", "{text}");
}

/// A program of the bundle that prints what a test needs.
fn says(bundle: &Bundle, name: &str, script: &str) {
    executable(&bundle.path("bin").join(name), &format!("#!/bin/sh\n{script}\n"));
}

#[test]
fn tests_that_did_not_run_and_logits_that_differ_are_found() {
    let bundle = Bundle::new();
    let device = "[ \"$OUTCORE_REAL_CUDA\" = 1 ] || exit 9\n\
         ended() { echo \"test result: ok. $1 passed; 0 failed; 0 ignored\"; }\n\
         case $1 in\n\
         suite::cuda_real) for name in one two three; do echo \"suite::cuda_real::$name: test\"; done ;;\n\
         --exact)\n\
           case $2 in *one) echo 'SKIPPED one: no reason' ;; *two) exit 3 ;; *three) exec tail -f /dev/null ;; esac ;;\n\
         cuda::cuda_real) ended 7 ;;\n\
         pins_on_streams::cuda_real) echo 'SKIPPED one: no reason'; ended 3 ;;\n\
         *) exit 8 ;;\n\
         esac";
    says(&bundle, "device", device);
    says(&bundle, "make_model", ": >\"$1\"");
    // The hashes depend on the budget, so they differ between the runs.
    says(&bundle, "generate", &generating("BUDGET", "", ""));
    let output = bundle.run(&["--only", "device-suite,runtime-suite,generate"], &[]);
    let (text, results) = (said(&output), bundle.results());
    assert_eq!(output.status.code(), Some(1), "{text}");
    let part = |name: &str| &results["parts"][name];
    assert_eq!(part("device-suite")["status"], "failed", "{text}");
    let error = part("device-suite")["error"].as_str().unwrap();
    assert!(error.contains("suite::cuda_real::two failed; suite::cuda_real::three did not end within 3 s ("), "{text}");
    assert_eq!(part("device-suite")["numbers"]["suite: tests passed"]["median"], 0, "{text}");
    // A test that is for a GPU must not skip on one.
    assert_eq!(part("runtime-suite")["status"], "failed", "{text}");
    assert!(part("runtime-suite")["error"].as_str().unwrap().contains("pins_on_streams skipped 1 tests"), "{text}");
    assert_eq!(part("runtime-suite")["numbers"]["cuda: tests passed"]["median"], 7, "{text}");
    assert_eq!(part("runtime-suite")["numbers"]["pins_on_streams: tests passed"]["median"], 2, "{text}");
    assert_eq!(part("generate")["status"], "ok", "{text}");
    let verdicts = part("generate")["verdicts"].as_object().unwrap();
    let of_logits: Vec<_> = verdicts.iter().filter(|(name, _)| name.ends_with("same logits")).collect();
    assert!(of_logits.len() == 3 && of_logits.iter().all(|(_, verdict)| verdict["pass"] == false), "{text}");
    assert!(text.contains("generate: 1.2 GB Q8_0: same logits"), "{text}");
    // What this generate does not print is said to be absent; its card is not one that speeds are judged on.
    let notes = part("generate")["notes"].to_string();
    assert!(notes.contains("absent from generate's object: launches, graph_launches"), "{notes}");
    assert!(notes.contains("judged on an H100 only") && notes.contains("no --repeat"), "{notes}");
}

/// What `generate` prints of a token, and of the GPU's memory.
const WORK: &str = r#","per_token":{"launches":154.0,"graph_launches":1.0,"graph_nodes":150.0,"synchronisations":1.0,
"pins":24.0,"host_seconds":0.0001,"gpu_seconds":0.0007,"waiting_seconds":0.0006,"gpu_stall_seconds":0.00035,
"device_bytes":1200000000.0,"bandwidth_share":0.5},
"device_bandwidth_bytes_per_s":3350000000000"#;

/// Where `generate` makes its object.
const OBJECT: &str = include_str!("../../../examples/llm/src/bin/generate/report.rs");

/// A `generate` that prints what a run of it prints. `hash` is a shell word, `more` further fields, `options` what it
/// has beside those that it always had: with `--logits-hash` there is no hash without it.
fn generating(hash: &str, more: &str, options: &str) -> String {
    // A generate that prints where the time of a token goes prints it for each repeat, too.
    let of_token = match more.contains("gpu_seconds") {
        true => r#","host_seconds":0.0002,"gpu_seconds":0.0008,"waiting_seconds":null"#,
        false => "",
    };
    let times = format!(r#"{{"ttft_s":0.5,"decode_tok_s":1400.0,"pass_s_median":0.001{of_token}}}"#);
    let more = more.replace('\n', "");
    let report = format!(
        "{{\"decode_tok_s\":1400.0,\"pass_s_median\":0.001,\"ttft_s\":0.5,\"stall_s\":0.25,\"peak_device_bytes\":1,\
         \"device_budget_bytes\":1000,\"pass_bytes\":9000,\"page_bytes\":1000,\"tokens\":['$ids'],\
         \"link_bytes\":'$((tokens * 10000))',\"link_busy_s\":'0.$(printf %04d $((tokens * 10)))',\
         \"logits_xxh3\":'$hash',\"repeats\":['$repeats']{more}}}"
    );
    let fields = report.split(['{', ',']).chain(times.split(['{', ',']));
    for name in fields.filter_map(|field| field.split_once("\":")?.0.strip_prefix('"')) {
        assert!(OBJECT.contains(&format!("\"{name}\"")), "generate prints no {name}");
    }
    format!(
        "[ \"$1\" = --help ] && echo '--device cuda {options}' && exit\n\
         hash='\"{hash}\"' repeat=1\ncase '{options}' in *hash*) hash=null ;; esac\n\
         while [ $# -gt 0 ]; do\n\
           case $1 in --device-budget) budget=$2 ;; --tokens) tokens=$2 ;; --repeat) repeat=$2 ;; \
           --logits-hash) hash='\"{hash}\"' ;; esac\nshift\ndone\n\
         ids=$(seq -s, \"$tokens\")\n\
         repeats=$(seq -s, \"$repeat\" | sed 's/[0-9][0-9]*/{times}/g')\n\
         hash=$(echo \"$hash\" | sed \"s/BUDGET/$budget/\")\necho '{report}'"
    )
}

/// The largest error of each kind is judged. A skipped test is reported. A comparison that is missing is a failure.
#[test]
fn what_the_gpu_computes_is_judged_by_the_largest_error() {
    let bundle = Bundle::new();
    fs::create_dir(bundle.path("kernels")).unwrap();
    for name in ["kernels", "train"] {
        fs::write(bundle.path(&format!("kernels/{name}.fatbin")), "").unwrap();
    }
    let ended = "echo 'test result: ok. 9 passed; 0 failed; 0 ignored'";
    let wanted = "[ \"$OUTCORE_TEST_GPU\" = 0 ] && [ -f \"$OUTCORE_TEST_KERNELS\" ] || exit 7";
    let line = |(error, allowed): (&str, &str)| format!("echo 'relative error {error}, {allowed} allowed: a case'");
    let program = |name: &str, module: &str, errors: &[(&str, &str)], more: &str| {
        let module = format!("[ \"$1\" = {module} ] || exit 8");
        let lines: Vec<String> = errors.iter().map(|error| line(*error)).collect();
        says(&bundle, name, &[wanted, &module, &lines.join("\n"), more, ended].join("\n"));
    };
    let kernels = [("2e-7", "1e-5"), ("1e-8", "1e-5"), ("2e-4", "5e-4"), ("2e-3", "4e-3")];
    let (skipped, of_forward) = ("echo 'SKIPPED with_cublas: there is none'", [("2e-5", "1e-3"), ("1e-2", "3e-2")]);
    let of_prompts = [("1e-3", "2e-3"), ("5e-3", "1e-2"), ("1e-2", "3e-2")];
    let forward = |error| program("forward", "on_a_gpu", &[&[(error, "1e-3")], &of_forward[..]].concat(), skipped);
    let prompts = |error| program("prompts", "on_a_gpu", &[&[(error, "2e-3")], &of_prompts[..]].concat(), "");
    // In order of name: products of cuBLASLt in bf16, in f16, the kernels; logits of types that the CPU rounds
    // activations for, all other logits; logits with cuBLASLt in bf16, in f16, of types that the CPU rounds.
    let judged = |results: &Value, missed: Option<usize>| {
        let part = &results["parts"]["kernels"];
        let by_name: BTreeMap<_, _> = part["verdicts"].as_object().unwrap().iter().collect();
        let verdicts: Vec<_> = by_name.values().map(|one| one["pass"] == true).collect();
        let wanted: Vec<_> = (0..8).map(|at| Some(at) != missed).collect();
        assert_eq!(verdicts, wanted, "{part}");
        part.clone()
    };
    let run = |status: i32| {
        let output = bundle.run(&["--only", "kernels"], &[]);
        assert_eq!(output.status.code(), Some(status), "{}", said(&output));
        said(&output)
    };
    program("kernels", "cuda::", &kernels, "");
    forward("3e-6");
    prompts("3e-6");
    let updates =
        |more: &str| says(&bundle, "updates", &[wanted, "[ \"$1\" = _a_gpu ] || exit 8", more, ended].join("\n"));
    updates("echo 'test result: FAILED. 1 passed; 1 failed; 0 ignored' && exit 101");
    assert!(run(1).contains("updates"));
    updates("");
    run(0);
    let part = judged(&bundle.results(), None);
    assert_eq!(part["verdicts"]["kernels against sums in f64"]["value"], 2e-7, "{part}");
    assert_eq!(part["verdicts"]["cuBLASLt against sums in f64, f16"]["value"], 2e-4, "{part}");
    assert_eq!(part["numbers"]["forward: tests passed"]["median"], 8, "{part}");
    assert!(part["notes"][0].as_str().unwrap().contains("with_cublas"), "{part}");

    for wrong in ["2e-3", "NaN", "inf"] {
        forward(wrong);
        run(1);
        judged(&bundle.results(), Some(4));
    }
    forward("3e-6");
    prompts("3e-3");
    run(1);
    judged(&bundle.results(), Some(6));
    prompts("3e-6");
    program("kernels", "cuda::", &[kernels[0], kernels[1], ("6e-4", "5e-4"), kernels[3]], "");
    run(1);
    judged(&bundle.results(), Some(1));

    // What is missing is a failure, unless there is no such library.
    program("kernels", "cuda::", &kernels[..2], "");
    assert!(run(1).contains("kernels: nothing was compared within 5e-4"));
    let none = "echo 'SKIPPED a_test: there is no cuBLASLt that works with this GPU'";
    program("kernels", "cuda::", &kernels[..2], none);
    program("prompts", "on_a_gpu", &[], &[none; 9].join("\n"));
    run(0);
    let part = &bundle.results()["parts"]["kernels"];
    assert_eq!(part["verdicts"].as_object().unwrap().len(), 3, "{part}");
    assert!(part["notes"].to_string().contains("cuBLASLt against sums in f64, f16: not judged"), "{part}");
    program("forward", "on_a_gpu", &[("1e-6", "1e-3")], "");
    assert!(run(1).contains("forward: nothing was compared within 3e-2"));
}

/// The clock that counts is that of a GPU that computes, while the process runs.
#[test]
fn tokens_a_second_are_judged_by_the_clock_under_load() {
    let bundle = Bundle::new();
    fs::remove_file(bundle.path("bin/gpu-probe")).unwrap();
    let probe = "case $* in 'gpu --pci') echo 0000:3b:00.0 ;; gpu) echo 'NVIDIA H100' ;; esac";
    says(&bundle, "gpu-probe", probe);
    says(&bundle, "make_model", ": >\"$1\"");
    // It ends when its GPU's clock was read often enough.
    let seen = "tools=${0%/*}/../tools\ncase $* in *'--tokens 8 '*--repeat*)\n\
        echo 1980 >\"$tools/mhz\"\n: >\"$tools/asked\"\n: >\"$tools/busy\"\n\
        until [ \"$(wc -l <\"$tools/asked\")\" -ge 3 ]; do sleep 0.01; done\nrm \"$tools/busy\" ;;\nesac\n";
    says(&bundle, "generate", &format!("{seen}{}", generating("one", WORK, "--repeat N, --logits-hash")));
    let verdict = |falls: u32| {
        let script = format!(
            "#!/bin/sh\ntools=${{0%/*}}\ncase $* in *clocks.sm,*) ;; *) echo 'NVIDIA H100' && exit ;; esac\n\
             [ \"${{*##* }}\" = 0000:3b:00.0 ] || exit 9\n[ -e \"$tools/busy\" ] || {{ echo '300, 0' && exit; }}\n\
             mhz=$(cat \"$tools/mhz\")\necho \"$mhz, 80\"\necho $((mhz - {falls})) >\"$tools/mhz\"\n\
             echo >>\"$tools/asked\"\n"
        );
        executable(&bundle.path("tools/nvidia-smi"), &script);
        let output = bundle.run(&["--only", "generate"], &[]);
        let generate = bundle.results()["parts"]["generate"].clone();
        assert_eq!(generate["status"], "ok", "{}", said(&output));
        let clock = &generate["numbers"]["1.2 GB Q8_0, all resident: clock under load"];
        assert!(clock["rounds"].as_u64().unwrap() >= 3 && clock["most"] == 1980.0, "{generate}");
        generate["verdicts"]["1.2 GB Q8_0, all resident: tokens a second"].clone()
    };
    let steady = verdict(0);
    assert!(steady["pass"] == true && steady["not_judged"].is_null(), "{steady}");
    let falling = verdict(60);
    assert!(falling["not_judged"].as_str().unwrap().contains("the clock moved from 19"), "{falling}");
}

/// Both runs, every part: what can run here runs, over the emulated driver; programs that cannot, print what their
/// own prints.
#[test]
fn the_whole_check_is_rehearsed() {
    let bundle = Bundle::new();
    bundle.with_kernels();
    fs::create_dir(bundle.path("kernels")).unwrap();
    for name in ["kernels", "train"] {
        fs::write(bundle.path(&format!("kernels/{name}.fatbin")), "").unwrap();
    }
    let ended = "echo 'test result: ok. 7 passed; 0 failed; 0 ignored'";
    let device = format!(
        "case $1 in\nsuite::cuda_real) echo 'suite::cuda_real::one: test' ;;\n--exact) exit 0 ;;\n*) {ended} ;;\nesac"
    );
    says(&bundle, "device", &device);
    let error = |allowed: &&str| format!("echo 'relative error 1e-9, {allowed} allowed: a case'\n");
    let program = |name: &str, allowed: &[&str]| {
        says(&bundle, name, &format!("{}{ended}", allowed.iter().map(error).collect::<String>()));
    };
    program("kernels", &["1e-5", "5e-4", "4e-3"]);
    program("forward", &["1e-3", "3e-2"]);
    program("prompts", &["2e-3", "1e-2", "3e-2"]);
    program("updates", &[]);
    says(&bundle, "make_model", ": >\"$1\"");
    says(&bundle, "generate", &generating("one", WORK, "--repeat N, --logits-hash, --time-stalls"));
    let rows =
        r#"[{"n_prompt":512,"n_gen":0,"samples_ts":[900.5]},{"n_prompt":0,"n_gen":128,"samples_ts":[700.0,800.0]}]"#;
    says(&bundle, "llama-bench", &format!("[ \"$1\" = -m ] || exit 9\necho 'ggml_cuda_init: found 1'\necho '{rows}'"));
    let profile = r#""ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","products_1(Products)","gpu__time_duration.sum","us","12.5""#;
    let known = "case $* in *regex:products_*|*regex:attention_parts*) ;; *) exit 9 ;; esac";
    let profiler = format!("#!/bin/sh\n{known}\ncat <<'E'\n==PROF== Connected\n{profile}\nE\n");
    executable(&bundle.path("tools/ncu"), &profiler);
    executable(
        &bundle.path("tools/nvidia-smi"),
        "#!/bin/sh\ncase $1 in *=clocks.sm) echo 1980 ;; *=clocks.sm,*) echo '1980, 50' ;; *) echo 'NVIDIA H100' ;; esac\n",
    );

    // A machine of this size is busy with other tests, so nothing but their end bounds these parts.
    let patient = ["--seconds", "100000"];
    let output = bundle.run(&patient, &[]);
    let (text, results) = (said(&output), bundle.results());
    // The judge prints what it found when a process ends; on a lost GPU, and in a process that leaves everything
    // behind, much is not given back.
    let log = fs::read_to_string(bundle.path("out/gpu-check-1.log")).unwrap();
    for section in log.split("\n== ").filter(|section| !section.starts_with("children")) {
        assert!(!section.contains("fake CUDA"), "{section}");
    }
    for (name, part) in results["parts"].as_object().unwrap() {
        // No sanitizer is here.
        let wanted = if name == "soak-sanitized" { "not possible" } else { "ok" };
        assert_eq!(part["status"], wanted, "{name}: {part}\n{text}");
        assert!(part["sources"].is_string(), "{name}");
    }
    let part = |name: &str| &results["parts"][name];
    // What does not depend on speed is met.
    for scenario in ["stray-store", "trap", "evicted-read"] {
        for verdict in ["the cause is named", "the dirty page is named"] {
            assert_eq!(
                part("children")["verdicts"][format!("{scenario}: {verdict}")]["pass"],
                true,
                "{}",
                part("children")
            );
        }
    }
    // What judges this can say no: with nothing dirty, the errors of a lost GPU name no page.
    let none = &part("children")["verdicts"]["trap-clean: no page is named"];
    assert!(none["pass"] == true && none["value"] == 0.0, "{}", part("children"));
    assert_eq!(part("children")["verdicts"]["leaked-exit: clean"]["value"], 1.0, "{}", part("children"));
    assert!(part("children")["numbers"]["fork: fork and wait, locked"]["median"].as_f64().unwrap() > 0.0);
    let generate = part("generate");
    assert_eq!(generate["numbers"]["1.2 GB Q8_0, all resident: launches a token"]["median"], 154.0, "{generate}");
    assert_eq!(generate["numbers"]["1.2 GB Q8_0, all resident: synchronisations a token"]["median"], 1.0, "{generate}");
    assert_eq!(generate["numbers"]["1.2 GB Q8_0, all resident: bandwidth_share a token"]["median"], 0.5, "{generate}");
    let notes = generate["notes"].to_string();
    assert!(!notes.contains("absent from generate's object"), "{generate}");
    // Of the repeats where they have it, else of the last one.
    for (what, seconds) in [("host", 0.0002), ("gpu", 0.0008), ("waiting", 0.0006)] {
        let name = format!("1.2 GB Q8_0, all resident: {what}_seconds a token");
        assert_eq!(generate["numbers"][&name]["median"], seconds, "{generate}");
    }
    assert!(notes.contains("decoding reads at 50% of the GPU's bandwidth, and aims at 50% or more"), "{generate}");
    let stalls = "1.2 GB Q8_0, a quarter on the GPU: waiting for weights, of the time on the GPU";
    assert_eq!(generate["numbers"][stalls]["median"], 0.5, "{generate}");
    assert_eq!(
        generate["numbers"]["1.2 GB Q8_0, a prompt of 512 tokens: tokens a second"]["median"], 1024.0,
        "{generate}"
    );
    assert_eq!(generate["verdicts"]["--paged-kv: same logits"]["pass"], true, "{generate}");
    for verdict in ["bytes over the link", "link busy"] {
        let name = format!("1.2 GB Q8_0, a quarter on the GPU: {verdict}");
        assert_eq!(generate["verdicts"][&name]["pass"], true, "{generate}");
    }
    assert_eq!(part("ncu")["chosen"]["attention: time"], "12.5 us", "{}", part("ncu"));
    let overlap = &part("overlap")["verdicts"]["overlap at compute:transfer 1"];
    assert!(overlap.is_object() && overlap["not_judged"].is_null(), "{overlap}");
    assert!(text.contains("GPU: ") && text.contains("nvidia-smi: NVIDIA H100"), "{text}");

    // The second run has no PyTorch here, and ends all the same. Without llama.cpp it would skip that, too.
    let output = bundle.run(&["--part", "2", patient[0], patient[1]], &[]);
    let (text, results) = (said(&output), bundle.results_of(2));
    for (name, part) in results["parts"].as_object().unwrap() {
        let peer = ["torch-decode", "torch-stream", "accelerate"].contains(&name.as_str());
        // Where PyTorch is installed, it finds no GPU.
        assert_eq!(part["status"], if peer { "not possible" } else { "ok" }, "{name}: {part}\n{text}");
    }
    let peer = &results["parts"]["llama"];
    assert_eq!(peer["numbers"]["1.2 GB Q8_0, all resident: tokens a second, llama.cpp"]["median"], 750.0, "{peer}");
    assert_eq!(peer["verdicts"]["1.2 GB Q8_0, all resident: ours / llama.cpp's"]["pass"], true, "{peer}");
    assert!(results["parts"]["managed"]["verdicts"]["managed memory takes longer by"].is_object(), "{text}");
    fs::remove_file(bundle.path("bin/llama-bench")).unwrap();
    let output = bundle.run(&["--part", "2", "--only", "llama"], &[]);
    assert!(
        output.status.code() == Some(0) && said(&output).contains("llama-bench is not in this bundle"),
        "{}",
        said(&output)
    );
}

/// Numbers of different clocks are not judged; all else is.
#[test]
fn verdicts_wait_for_a_clock_that_stays() {
    let bundle = Bundle::new();
    bundle.with_kernels();
    // Each answer is lower than the last.
    let falling =
        "#!/bin/sh\nat=$(cat \"$0.at\" 2>/dev/null || echo 1980)\necho \"$at\"\necho $((at - 60)) >\"$0.at\"\n";
    executable(&bundle.path("tools/nvidia-smi"), falling);
    let output = bundle.run(&["--only", "overlap"], &[]);
    let (text, results) = (said(&output), bundle.results());
    let verdicts = results["parts"]["overlap"]["verdicts"].as_object().unwrap();
    assert_eq!(verdicts.len(), 3, "{text}");
    for verdict in verdicts.values() {
        assert!(verdict["not_judged"].as_str().unwrap().contains("the clock moved from"), "{verdict}");
    }
    assert!(text.contains("0 verdicts met, 0 missed") && text.contains("not judged: overlap: overlap at"), "{text}");
    assert_eq!(output.status.code(), Some(0), "{text}");
}

#[test]
fn what_passed_with_the_same_sources_runs_last() {
    let bundle = Bundle::new();
    let known: Value = serde_json::from_str(&fs::read_to_string(bundle.path("SOURCES")).unwrap()).unwrap();
    let order = |copies: &Value, pass: bool| {
        let mut before = result("before", 50.0, pass);
        before["scale"] = "tiny".into();
        before["parts"]["copies"]["sources"] = copies.clone();
        fs::create_dir_all(bundle.path("previous")).unwrap();
        fs::write(bundle.path("previous/gpu-1.json"), before.to_string()).unwrap();
        let text = said(&bundle.run(&["--only", "copies,events"], &[]));
        let at = |part: &str| text.find(&format!("\n{part}: ")).unwrap_or_else(|| panic!("{part}: {text}"));
        at("copies") < at("events")
    };
    assert!(!order(&known["copies"], true));
    assert!(order(&known["events"], true), "other sources");
    assert!(order(&known["copies"], false), "a verdict was missed");
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
    let output = bundle.run(&["--part", "3"], &[]);
    assert!(output.status.code() == Some(64) && said(&output).contains("--part takes 1 or 2"), "{}", said(&output));
    // The script's lists have every part of the probe, and what each of theirs is made of is known.
    let output = bundle.run(&["--part", "2", "--only", "nonsense"], &[]);
    let listed = format!("{text} {}", said(&output)).replace('\n', " ");
    let probe = Command::new(bundle.path("bin/gpu-probe")).arg("parts").output().unwrap();
    for part in String::from_utf8_lossy(&probe.stdout).lines() {
        assert!(listed.contains(&format!(" {part} ")), "{part} is missing in run.sh: {listed}");
    }
    let known: Value = serde_json::from_str(&fs::read_to_string(bundle.path("SOURCES")).unwrap()).unwrap();
    for list in listed.split("there are: ").skip(1) {
        for part in list.split_whitespace().take_while(|word| *word != "run.sh:") {
            assert!(known[part].is_string(), "sources.py does not know {part}");
        }
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
