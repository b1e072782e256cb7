//! The promise: C programs compile against the header without a warning, link either library, and get from it what the
//! file has, within the budget; what they do wrong is told and harms nothing.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use outcore_testkit::headers::{GgufFile, Kv};
use tempfile::TempDir;

const SANITIZERS: [&str; 3] = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"];
const FLAGS: [&str; 6] = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic", "-g"];

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn has(tool: &str) -> bool {
    Command::new(tool).arg("--version").output().is_ok_and(|output| output.status.success())
}

/// Says that tests skip for want of this, unless the machine is known to have it.
fn lacks(what: &str, required: &str) -> Option<PathBuf> {
    let all = std::env::var("OUTCORE_REQUIRE").unwrap_or_default();
    assert!(
        !all.split(',').any(|one| one == required),
        "skips for want of {what}, though OUTCORE_REQUIRE names {required}"
    );
    eprintln!("SKIPPED: {what}");
    None
}

/// The libraries of this build, with header and pkg-config file; `None` where they cannot be made, which is said.
fn prefix() -> Option<PathBuf> {
    static MADE: OnceLock<Option<PathBuf>> = OnceLock::new();
    MADE.get_or_init(|| {
        if !has("cc") {
            return lacks("there is no C compiler", "c");
        }
        let debug = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap().join("debug");
        let archive = debug.join("liboutcore_capi.a");
        if !archive.exists() {
            return lacks("the library is not built; cargo build -p outcore-capi", "c");
        }
        is_fresh(&archive);
        let prefix = Path::new(env!("CARGO_TARGET_TMPDIR")).join("capi");
        let script = repository().join("scripts/capi.sh");
        passes(Command::new(script).arg("--archive").arg(&archive).arg(&prefix));
        Some(prefix)
    })
    .clone()
}

/// Fails if a source is newer than the archive, by the list that Cargo wrote beside it: it would test another library.
fn is_fresh(archive: &Path) {
    let built = archive.metadata().unwrap().modified().unwrap();
    let list = fs::read_to_string(archive.with_extension("d")).unwrap();
    let sources = list.split_once(": ").unwrap().1.replace("\\ ", "\0");
    for source in sources.split_whitespace().map(|source| PathBuf::from(source.replace('\0', " "))) {
        // A source that is gone is not what was built either.
        let changed = source.metadata().map(|metadata| metadata.modified().unwrap());
        let fresh = changed.is_ok_and(|changed| changed <= built);
        assert!(fresh, "{} is older than {}: cargo build -p outcore-capi", archive.display(), source.display());
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn passes(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    let (said, told) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{said}{told}", output.status);
    output
}

fn folder() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// How a program is linked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Link {
    Shared,
    Static,
    /// The shared library; what the program accesses is checked, and that it gives back all memory.
    Checked,
    /// The archive, with the same checks.
    CheckedStatic,
}

impl Link {
    /// All that this machine can do.
    fn all() -> &'static [Self] {
        static ALL: OnceLock<&'static [Link]> = OnceLock::new();
        ALL.get_or_init(|| {
            let folder = folder();
            let source = folder.path().join("none.c");
            fs::write(&source, "int main(void) { return 0; }\n").unwrap();
            let mut command = Command::new("cc");
            let output =
                command.args(SANITIZERS).arg(&source).arg("-o").arg(folder.path().join("none")).output().unwrap();
            if !output.status.success() {
                lacks(
                    "the C compiler has no sanitizers (libasan, libubsan): accesses of programs are not checked",
                    "asan",
                );
                return &[Self::Shared, Self::Static];
            }
            &[Self::Shared, Self::Static, Self::Checked, Self::CheckedStatic]
        })
    }

    fn is_static(self) -> bool {
        matches!(self, Self::Static | Self::CheckedStatic)
    }

    fn is_checked(self) -> bool {
        matches!(self, Self::Checked | Self::CheckedStatic)
    }
}

/// What `pkg-config` says, or what it would: machines without it can run the tests too.
fn libraries(prefix: &Path, all: bool) -> Vec<String> {
    let pc = fs::read_to_string(prefix.join("lib/pkgconfig/outcore.pc")).unwrap();
    let field = |name: &str| pc.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
    let mut flags = format!("{} {}", field("Cflags:"), field("Libs:"));
    if all {
        flags = format!("{flags} {}", field("Libs.private:"));
    }
    let flags = flags.replace("${libdir}", "${prefix}/lib").replace("${includedir}", "${prefix}/include");
    flags.replace("${prefix}", prefix.to_str().unwrap()).split_whitespace().map(str::to_owned).collect()
}

fn compile(prefix: &Path, source: &Path, to: &Path, link: Link) -> PathBuf {
    let program = to.join(format!("{}-{link:?}", source.file_stem().unwrap().to_str().unwrap()));
    let mut command = Command::new("cc");
    command.args(FLAGS).arg(source).arg("-o").arg(&program).arg("-pthread");
    if link.is_checked() {
        command.args(SANITIZERS);
    }
    if link.is_static() {
        let lib = format!("-L{}", prefix.join("lib").display());
        let flags = libraries(prefix, true);
        let rest = flags.iter().filter(|flag| **flag != "-loutcore" && **flag != lib);
        let before = rest.clone().filter(|flag| flag.starts_with("-I"));
        command.args(before).arg(prefix.join("lib/liboutcore.a")).args(rest.filter(|flag| flag.starts_with("-l")));
    } else {
        command.args(libraries(prefix, false)).arg(format!("-Wl,-rpath,{}", prefix.join("lib").display()));
    }
    passes(&mut command);
    program
}

fn run(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("XDG_CACHE_HOME", concat!(env!("CARGO_TARGET_TMPDIR"), "/cache"));
    command.env("TMPDIR", env!("CARGO_TARGET_TMPDIR"));
    command
}

const EXPERTS: u64 = 16;

/// A model with two layers of 16 experts of F32, 64 KiB each in three tensors: 6 MiB in all.
fn model(folder: &Path) -> PathBuf {
    let mut file = GgufFile::default().kv("general.architecture", Kv::str("llama"));
    for layer in 0..2 {
        for part in ["gate", "up", "down"] {
            let name = format!("blk.{layer}.ffn_{part}_exps.weight");
            file = file.tensor(&name, &[128, 128, EXPERTS], 0, 128 * 128 * EXPERTS * 4);
        }
    }
    let mut bytes = file.bytes();
    let data = bytes.len() - file.data_len as usize;
    for (at, value) in bytes[data..].chunks_exact_mut(4).enumerate() {
        // Small whole numbers: their sums are exact, whatever the order.
        value.copy_from_slice(&(((at * 2_654_435_761) >> 7) as u8 as f32).to_le_bytes());
    }
    let path = folder.join("experts.gguf");
    fs::write(&path, bytes).unwrap();
    path
}

/// The numbers of a line of text, in order.
fn numbers(line: &str) -> Vec<u64> {
    line.split(|c: char| !c.is_ascii_digit()).filter_map(|number| number.parse().ok()).collect()
}

#[test]
fn experts_of_a_layer_are_the_files_in_less_memory_than_they_take() {
    let Some(prefix) = prefix() else { return };
    let folder = folder();
    let model = model(folder.path());
    let source = repository().join("examples/c/moe.c");
    let mut lines = BTreeSet::new();
    for &link in Link::all() {
        let program = compile(&prefix, &source, folder.path(), link);
        let output = passes(run(&program).arg(&model).args(["1", "1", "40"]));
        let said = text(&output.stdout);
        let [first, second] = said.lines().collect::<Vec<_>>()[..] else { panic!("{said}") };
        assert!(first.starts_with("40 tokens, experts of 3145728 bytes, sum "), "{said}");
        assert!(first.ends_with("equal to the file's"), "{said}");
        let [page, uses, hits, read, peak, budget] = numbers(second)[..] else { panic!("{said}") };
        assert!(page >= 4096 && uses >= 240 && (1..uses).contains(&hits), "{said}");
        assert!(read > 0 && peak <= budget && budget == 1 << 20, "{said}");
        lines.insert(first.to_owned());
    }
    assert_eq!(lines.len(), 1, "{lines:?}");
    // What the program printed is what the file has, computed here.
    let wanted = format!("sum {}", c_float(sum_of_the_file(&model, 1, 40)));
    assert!(lines.iter().all(|line| line.contains(&wanted)), "{lines:?}: {wanted}");
}

/// As C prints it with `%.6e`.
fn c_float(value: f64) -> String {
    let text = format!("{value:.6e}");
    let (digits, exponent) = text.split_once('e').unwrap();
    format!("{digits}e{:+03}", exponent.parse::<i32>().unwrap())
}

/// The sum that `moe.c` prints, by its formulas, of bytes that are read as a file.
fn sum_of_the_file(model: &Path, layer: u64, tokens: u64) -> f64 {
    let bytes = fs::read(model).unwrap();
    let size = 128 * 128 * 4;
    let data = bytes.len() - (6 * EXPERTS * size) as usize;
    let mut state = 1_u64;
    let mut draw = || {
        let mut least = EXPERTS;
        for _ in 0..3 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            least = least.min((state >> 33) % EXPERTS);
        }
        least
    };
    let mut sum = 0.0;
    for token in 0..tokens {
        let first = draw();
        let second = loop {
            let second = draw();
            if second != first {
                break second;
            }
        };
        for expert in [first, second] {
            for part in 0..3 {
                let start = data + (((layer * 3 + part) * EXPERTS + expert) * size) as usize;
                let weights = bytes[start..start + size as usize].chunks_exact(4);
                let weights = weights.map(|four| f64::from(f32::from_le_bytes(four.try_into().unwrap())));
                sum += weights.zip(0..).map(|(weight, n)| weight * ((token + n) % 7) as f64).sum::<f64>();
            }
        }
    }
    sum
}

#[test]
fn misuse_is_told_and_harms_nothing() {
    let Some(prefix) = prefix() else { return };
    let folder = folder();
    let model = model(folder.path());
    let source = repository().join("examples/c/misuse.c");
    for &link in Link::all() {
        let program = compile(&prefix, &source, folder.path(), link);
        let output = passes(run(&program).arg(&model).arg(folder.path()));
        let said = text(&output.stdout);
        assert!(said.ends_with("\n0 wrong\n"), "{link:?}: {said}");
        assert!(output.stderr.is_empty(), "{link:?}: {}", text(&output.stderr));
    }
}

#[test]
fn every_function_does_what_it_says_from_one_thread_and_from_several() {
    let Some(prefix) = prefix() else { return };
    let folder = folder();
    let model = model(folder.path());
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tour.c");
    let used = ["tour.c", "check.h"].map(|name| fs::read_to_string(source.with_file_name(name)).unwrap()).concat();
    let unused: Vec<_> = declared().into_iter().filter(|name| !used.contains(&format!("{name}("))).collect();
    // misuse.c has errors to look into.
    let unused: Vec<_> = unused.iter().filter(|name| !name.starts_with("outcore_error_")).collect();
    assert!(unused.is_empty(), "tour.c does not use {unused:?}");
    for &link in Link::all() {
        let program = compile(&prefix, &source, folder.path(), link);
        let said = text(&passes(run(&program).arg(&model).arg(folder.path())).stdout);
        assert!(said.ends_with(": all as it should be\n"), "{link:?}: {said}");
        if said.contains("SKIPPED") {
            eprintln!("{link:?}: {said}");
        }
    }
}

#[test]
fn a_model_in_two_files_is_one_and_what_is_no_whole_model_is_told() {
    let Some(prefix) = prefix() else { return };
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/shards.c");
    for &link in Link::all() {
        let folder = folder();
        let program = compile(&prefix, &source, folder.path(), link);
        let files = folder.path().join("files");
        fs::create_dir(&files).unwrap();
        let output = passes(run(&program).arg(&files));
        let said = text(&output.stdout);
        assert!(said.ends_with(": both files are one model\n"), "{link:?}: {said}");
        assert!(output.stderr.is_empty(), "{link:?}: {}", text(&output.stderr));
        if said.contains("SKIPPED") {
            eprintln!("{link:?}: {said}");
        }
    }
}

#[test]
fn the_first_program_of_the_page_shows_each_tensor() {
    let Some(prefix) = prefix() else { return };
    let page = fs::read_to_string(repository().join("docs/c.md")).unwrap();
    let program = page.split_once("```c\n").unwrap().1.split_once("```").unwrap().0;
    let folder = folder();
    let (model, source) = (model(folder.path()), folder.path().join("first.c"));
    fs::write(&source, program).unwrap();
    for &link in Link::all() {
        let program = compile(&prefix, &source, folder.path(), link);
        let said = text(&passes(run(&program).arg(&model)).stdout);
        assert_eq!(said.lines().count(), 6, "{link:?}: {said}");
        let first = "blk.0.ffn_gate_exps.weight: 1048576 bytes, the first is ";
        assert!(said.lines().all(|line| line.contains(" 1048576 bytes, ")) && said.starts_with(first), "{said}");
        let failed = run(&program).arg(folder.path().join("missing.gguf")).output().unwrap();
        let told = text(&failed.stderr);
        assert!(!failed.status.success() && told.contains("missing.gguf") && told.contains("check the path"), "{told}");
    }
}

/// The folder can be moved: `outcore.pc` finds it where it is.
#[test]
fn pkg_config_finds_the_libraries_where_they_were_moved_to() {
    let Some(prefix) = prefix() else { return };
    if !has("pkg-config") {
        eprintln!("SKIPPED: there is no pkg-config");
        return;
    }
    let folder = folder();
    let moved = folder.path().join("elsewhere");
    passes(Command::new("cp").arg("-a").arg(&prefix).arg(&moved));
    let ask = |flags: &[&str]| {
        let mut command = Command::new("pkg-config");
        command.env("PKG_CONFIG_PATH", moved.join("lib/pkgconfig")).args(flags).arg("outcore");
        text(&passes(&mut command).stdout)
    };
    assert_eq!(ask(&["--modversion"]).trim(), env!("CARGO_PKG_VERSION"));
    let flags = ask(&["--cflags", "--libs"]);
    let program = folder.path().join("misuse");
    let source = repository().join("examples/c/misuse.c");
    let mut command = Command::new("cc");
    command.args(FLAGS).arg(source).arg("-o").arg(&program).args(flags.split_whitespace());
    passes(&mut command);
    let model = model(folder.path());
    passes(run(&program).env("LD_LIBRARY_PATH", moved.join("lib")).arg(&model).arg(folder.path()));
    let all = ask(&["--static", "--libs-only-l"]);
    assert!(["-loutcore", "-lgcc_s", "-lpthread"].iter().all(|one| all.contains(one)), "{all}");
}

/// The functions that the header declares.
fn declared() -> BTreeSet<String> {
    let header = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("include/outcore.h")).unwrap();
    // A declaration begins in the first column, and its name is followed by a bracket.
    let starts = header.lines().filter(|line| !line.starts_with([' ', '/', '#', '}']) && !line.starts_with("typedef"));
    let names = starts.filter_map(|line| line.split_once('(')).map(|(before, _)| before);
    names.filter_map(|before| before.rsplit([' ', '*']).next()).map(str::to_owned).collect()
}

#[test]
fn what_is_exported_is_what_is_declared_with_its_version() {
    let Some(prefix) = prefix() else { return };
    let library = prefix.join("lib/liboutcore.so.0");
    let output = passes(Command::new("nm").args(["-D", "--defined-only", "--with-symbol-versions"]).arg(&library));
    let listed = text(&output.stdout);
    let symbols = listed.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let symbols: BTreeSet<String> = symbols.filter(|of| of[1] != "A").map(|of| of[2].to_owned()).collect();
    let wanted: BTreeSet<String> = declared().iter().map(|name| format!("{name}@@OUTCORE_0")).collect();
    assert!(wanted.len() > 50, "{wanted:?}");
    assert_eq!(symbols, wanted);
    let output = passes(Command::new("nm").args(["-g", "--defined-only"]).arg(prefix.join("lib/liboutcore.a")));
    let listed = text(&output.stdout);
    let symbols = listed.lines().filter_map(|line| line.split_whitespace().nth(2));
    assert_eq!(symbols.map(str::to_owned).collect::<BTreeSet<_>>(), declared());
    let output = passes(Command::new("readelf").arg("-d").arg(&library));
    assert!(text(&output.stdout).contains("[liboutcore.so.0]"), "{}", text(&output.stdout));
}

/// Each archive of Rust brings Rust's standard library. What ours names, or leaves undefined, must not get in the way
/// of the other's.
#[test]
fn a_program_can_link_another_archive_of_rust() {
    let Some(prefix) = prefix() else { return };
    if !has("rustc") {
        lacks("there is no rustc", "c");
        return;
    }
    let folder = folder();
    let (other, source) = (folder.path().join("other.rs"), folder.path().join("both.c"));
    let code = "#[unsafe(no_mangle)]\npub extern \"C\" fn other(n: i32) -> i32 {\n    \
                std::panic::catch_unwind(|| if n > 0 { n } else { panic!() }).unwrap_or(-1)\n}\n";
    fs::write(&other, code).unwrap();
    let archive = folder.path().join("libother.a");
    passes(Command::new("rustc").args(["--edition=2024", "--crate-type=staticlib", "-o"]).arg(&archive).arg(&other));
    let code = "#include <outcore.h>\nint other(int);\nint main(void)\n{\n    outcore_runtime *runtime = 0;\n    \
                if (outcore_runtime_open(0, &runtime, 0) != OUTCORE_OK || other(7) != 7 || other(0) != -1)\n        \
                return 1;\n    return outcore_runtime_close(runtime, 0) == OUTCORE_OK ? 0 : 1;\n}\n";
    fs::write(&source, code).unwrap();
    let program = folder.path().join("both");
    let mut command = Command::new("cc");
    command.args(FLAGS).arg(&source).arg("-o").arg(&program).arg(format!("-I{}", prefix.join("include").display()));
    command.arg(prefix.join("lib/liboutcore.a")).arg(&archive);
    command.args(libraries(&prefix, true).iter().filter(|flag| flag.starts_with("-l") && *flag != "-loutcore"));
    passes(&mut command);
    passes(&mut run(&program));
}

#[test]
fn the_header_is_a_header_of_cpp_too() {
    let Some(prefix) = prefix() else { return };
    if !has("c++") {
        lacks("there is no C++ compiler", "c++");
        return;
    }
    let folder = folder();
    let source = folder.path().join("version.cpp");
    fs::write(
        &source,
        "#include <outcore.h>\n#include <cstdio>\nint main() {\n    outcore_error *error = nullptr;\n    \
         outcore_status status = outcore_runtime_close(nullptr, &error);\n    \
         std::printf(\"%s %s\\n\", outcore_version(), outcore_status_name(status));\n}\n",
    )
    .unwrap();
    let program = folder.path().join("version");
    let mut command = Command::new("c++");
    command.args(["-std=c++11", "-Wall", "-Wextra", "-Werror", "-pedantic"]).arg(&source).arg("-o").arg(&program);
    command.args(libraries(&prefix, false)).arg(format!("-Wl,-rpath,{}", prefix.join("lib").display()));
    passes(&mut command);
    let output = passes(&mut run(&program));
    assert_eq!(text(&output.stdout), concat!(env!("CARGO_PKG_VERSION"), " ok\n"));
}
