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
    let Some(_) = library(folder.path(), "ggml-of-test", GGML, &[]) else { return };
    let at = folder.path().to_str().unwrap();
    let beside = [&format!("-L{at}"), "-lggml-of-test", &format!("-Wl,-rpath,{at}")];
    let llama = library(folder.path(), "llama-of-test", LLAMA, &beside).unwrap();
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
