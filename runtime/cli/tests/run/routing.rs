//! What a router chooses is read before it is used, if the engine is built on ggml.

use super::*;

const EXPERTS: usize = 48;
const PIECE: usize = 1 << 20;

/// As much of ggml as is asked: a scheduler that shows one tensor to whoever wants to see it.
const GGML: &str = r#"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
struct tensor { const char *name; const int32_t *ids; int64_t rows, used, step; };
typedef bool (*callback)(void *, bool, void *);
static callback see;
static void *data;
void ggml_backend_sched_set_eval_callback(void *scheduler, callback of, void *with)
{
    (void)scheduler;
    see = of, data = with;
}
const char *ggml_get_name(const struct tensor *t) { return t->name; }
size_t ggml_nbytes(const struct tensor *t) { return (size_t)((t->rows - 1) * t->step + t->used) * 4; }
int64_t ggml_nelements(const struct tensor *t) { return t->rows * t->used; }
int64_t ggml_nrows(const struct tensor *t) { return t->rows; }
void ggml_backend_tensor_get(const struct tensor *t, void *to, size_t offset, size_t size)
{
    memcpy(to, (const char *)t->ids + offset, size);
}
int ggml_compute(struct tensor *t) { return see && see(t, true, data) && see(t, false, data); }
"#;

/// The library above it, which sets no callback unless it is told to.
const LLAMA: &str = r#"
#include <stdlib.h>
#include <stddef.h>
#include <stdint.h>
struct tensor { const char *name; const int32_t *ids; int64_t rows, used, step; };
void ggml_backend_sched_set_eval_callback(void *scheduler, void *of, void *with);
int ggml_compute(struct tensor *t);
static int own(void *t, int ask, void *data)
{
    return t && data ? 1 : ask + 1;
}
int decode(const char *name, const int32_t *ids, int64_t rows, int64_t used, int64_t step)
{
    struct tensor t = {name, ids, rows, used, step};
    ggml_backend_sched_set_eval_callback(NULL, getenv("OWN_CALLBACK") ? own : NULL, NULL);
    return ggml_compute(&t);
}
"#;

/// Two tokens that use two experts each: the ids lie in rows of four.
const PROGRAM: &str = r#"
import ctypes, mmap, sys

llama = ctypes.CDLL(sys.argv[2])
ids = (ctypes.c_int32 * 6)(3, 40, 0, 0, 17, 3)
row = [ctypes.c_int64(n) for n in (2, 2, 4)]
before = llama.decode(b"ffn_moe_topk-0", ids, *row)
file = open(sys.argv[1], "rb")
one = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
print(before, llama.decode(b"ffn_moe_topk-0", ids, *row), llama.decode(b"ffn_up-0", ids, *row))
"#;

fn library(folder: &Path, name: &str, text: &str, others: &[&str]) -> Option<PathBuf> {
    let (source, library) = (folder.join(format!("{name}.c")), folder.join(format!("lib{name}.so")));
    std::fs::write(&source, text).unwrap();
    let built =
        Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(&source).args(others).output();
    let Ok(built) = built else {
        eprintln!("SKIPPED: there is no C compiler (cc)");
        return None;
    };
    assert!(built.status.success(), "{built:?}");
    Some(library)
}

/// An engine of two libraries; `None` without a C compiler, which is said.
fn engine(folder: &Path) -> Option<PathBuf> {
    library(folder, "ggml-of-test", GGML, &[])?;
    let at = folder.to_str().unwrap();
    let beside = [&format!("-L{at}"), "-lggml-of-test", &format!("-Wl,-rpath,{at}")];
    library(folder, "llama-of-test", LLAMA, &beside)
}

/// A safetensors file with one layer's experts.
pub fn mixture(folder: &Path) -> PathBuf {
    let len = EXPERTS * PIECE;
    let header = format!(
        r#"{{"blk.0.ffn_up_exps.weight":{{"dtype":"U8","shape":[{EXPERTS},1024,1024],"data_offsets":[0,{len}]}}}}"#
    );
    let path = folder.join("mixture.safetensors");
    let mut file = File::create(&path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.write_all(&vec![7; len]).unwrap();
    path
}

#[test]
fn experts_that_a_router_chose_are_read_before_they_are_used() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let Some(llama) = engine(folder.path()) else { return };
    let path = mixture(folder.path());
    for (routing, said, read) in [("on", "0 1 0\n", true), ("off", "0 0 0\n", false)] {
        let output = outcore()
            .args(["run", "--budget", "40MiB", "--", "python3", "-c", PROGRAM])
            .args([&path, &llama])
            .envs((routing == "off").then_some(("OUTCORE_RUN_ROUTING", "off")))
            .output()
            .unwrap();
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(String::from_utf8_lossy(&output.stdout), said, "{routing}: {told}");
        // Three experts of 1 MiB, and nobody touched any.
        let (_, rest) = told.split_once("MiB): ").unwrap_or_else(|| panic!("{told}"));
        let (number, _) = rest.split_once(" read").unwrap_or_else(|| panic!("{told}"));
        let some = number.strip_suffix(" MiB").is_some_and(|mib| mib.parse::<f64>().unwrap() >= 3.0);
        assert_eq!(some, read, "{routing}: {told}");
        let why = match read {
            true => "The router's choice was read 1 times, of 3 experts; 0 times an expert came by a fault.",
            false => "The router's choice was not read: OUTCORE_RUN_ROUTING=off. Experts came by 0 faults.",
        };
        assert!(told.contains(why), "{told}");
    }
    for (own, names, why) in [
        (true, "ffn_moe_topk", "the program has a callback of its own"),
        (false, "other", "the engine computed no tensor ffn_moe_topk-N"),
    ] {
        let output = outcore()
            .args(["run", "--budget", "40MiB", "--", "python3", "-c", &PROGRAM.replace("ffn_moe_topk", names)])
            .args([&path, &llama])
            .envs(own.then_some(("OWN_CALLBACK", "1")))
            .output()
            .unwrap();
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && told.contains(&format!("was not read: {why}")), "{told}");
    }
    // An engine of another kind, which touches one expert.
    const OTHER: &str = "import mmap, sys; f = open(sys.argv[1], 'rb'); \
                         m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ); m[20 << 20]";
    let output = run_program(OTHER, "40MiB", &path);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.contains("not read: the engine is not llama.cpp as shared libraries"), "{told}");
    assert!(told.contains("Experts came by 1 faults."), "{told}");
}

/// Bindings have ggml in a library of their own name.
#[test]
fn routing_is_read_where_ggml_is_in_a_library_of_another_name() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let ggml = folder.path().join("ggml.c");
    std::fs::write(&ggml, GGML).unwrap();
    let Some(binding) = library(folder.path(), "binding", LLAMA, &[ggml.to_str().unwrap()]) else { return };
    let path = mixture(folder.path());
    let output = outcore()
        .args(["run", "--budget", "40MiB", "--", "python3", "-c", PROGRAM])
        .args([&path, &binding])
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "0 1 0\n", "{told}");
    assert!(told.contains("The router's choice was read 1 times, of 3 experts"), "{told}");
}

/// Of two models nobody knows which one a layer is of. Their experts come by faults, and that is said.
#[test]
fn two_mixtures_in_one_process_are_told() {
    if !can_run() {
        return;
    }
    const TWO: &str = r#"
import ctypes, mmap, os, sys

llama = ctypes.CDLL(sys.argv[1])
ids, row = (ctypes.c_int32 * 2)(3, 17), [ctypes.c_int64(n) for n in (1, 2, 2)]
files = [open(path, "rb") for path in sys.argv[2:4]]
views = [mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) for file in files]
seen = [llama.decode(b"ffn_moe_topk-0", ids, *row) for turn in range(2)]
for view, file in zip(views, files):
    for mib in (3, 17, 40):
        assert view[mib << 20 : (mib << 20) + 1000] == os.pread(file.fileno(), 1000, mib << 20)
if len(sys.argv[1:]) == 4:
    # The first model is not meant any more.
    views[0].close()
    seen.append(llama.decode(b"ffn_moe_topk-0", ids, *row))
print(seen)
"#;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let Some(llama) = engine(folder.path()) else { return };
    let path = mixture(folder.path());
    let other = folder.path().join("other.safetensors");
    std::fs::copy(&path, &other).unwrap();
    for (closes, said, part) in [
        ([].as_slice(), "[1, 1]\n", "The router's choice was not read: two models have the same layers."),
        (&["closes"], "[1, 1, 1]\n", "The router's choice was read 1 times, of 2 experts"),
    ] {
        let mut command = outcore();
        command.args(["run", "--budget", "40MiB", "--", "python3", "-c", TWO]).args([&llama, &path, &other]);
        let output = command.args(closes).output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && told.contains("2 file(s) mapped"), "{told}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), said, "{told}");
        assert!(told.contains(part), "{told}");
    }
}

/// As [`mixture`], of two layers. The router of the second has a row of four numbers for each expert: `[e, -e, 0, 0]`
/// for even ones, `[0, 0, e, -e]` for others.
fn two_layers(folder: &Path) -> PathBuf {
    let len = EXPERTS * PIECE;
    let experts = |layer: usize| {
        let (start, end) = (layer * len, (layer + 1) * len);
        format!(
            r#""blk.{layer}.ffn_up_exps.weight":{{"dtype":"U8","shape":[{EXPERTS},1024,1024],"data_offsets":[{start},{end}]}}"#
        )
    };
    let (start, end) = (2 * len, 2 * len + EXPERTS * 16);
    let router = format!(
        r#""blk.1.ffn_gate_inp.weight":{{"dtype":"F32","shape":[{EXPERTS},4],"data_offsets":[{start},{end}]}}"#
    );
    let header = format!("{{{},{},{router}}}", experts(0), experts(1));
    let path = folder.join("layers.safetensors");
    let mut file = File::create(&path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.write_all(&vec![7; 2 * len]).unwrap();
    for expert in 0..EXPERTS {
        let e = expert as f32;
        let row = if expert % 2 == 0 { [e, -e, 0.0, 0.0] } else { [0.0, 0.0, e, -e] };
        row.iter().for_each(|number| file.write_all(&number.to_le_bytes()).unwrap());
    }
    path
}

/// Computes a token's experts in the first layer, and waits until `sys.argv[3]` MiB were read.
const PREDICTED: &str = r#"
import ctypes, mmap, re, sys, time

llama = ctypes.CDLL(sys.argv[2])
given, ids = (ctypes.c_float * 4)(1, 0, 0, 0), (ctypes.c_int32 * 2)(3, 40)
row = lambda used: [ctypes.c_int64(n) for n in (1, used, used)]
file = open(sys.argv[1], "rb")
one = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
read = lambda: int(re.search(r"^read_bytes: (\d+)", open("/proc/self/io").read(), re.M)[1])
before, end = read(), time.monotonic() + 60
seen = llama.decode(b"ffn_norm-0", ctypes.cast(given, ctypes.POINTER(ctypes.c_int32)), *row(4))
llama.decode(b"ffn_moe_topk-0", ids, *row(2))
while read() - before < int(sys.argv[3]) << 20 and time.monotonic() < end: pass
print(seen, read() - before >= int(sys.argv[3]) << 20)
"#;

#[test]
fn experts_that_the_next_router_would_choose_are_read_ahead() {
    if !can_run() {
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let Some(llama) = engine(folder.path()) else { return };
    let path = two_layers(folder.path());
    // Two experts of 1 MiB were chosen, and two are predicted: 46 and 44. Only those that were chosen are waited for.
    for (prediction, mib, seen) in [("on", "4", "1 True\n"), ("off", "2", "0 True\n")] {
        let output = outcore()
            .args(["run", "--budget", "40MiB", "--", "python3", "-c", PREDICTED])
            .args([path.as_os_str(), llama.as_os_str(), mib.as_ref()])
            .envs((prediction == "off").then_some(("OUTCORE_RUN_PREDICTION", "off")))
            .output()
            .unwrap();
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(String::from_utf8_lossy(&output.stdout), seen, "{prediction}: {told}");
    }
}
