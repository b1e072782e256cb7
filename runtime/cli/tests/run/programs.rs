//! Programs of others, as they are: numpy and safetensors read a model that is larger than its memory.

use super::*;

/// The interpreter that has numpy and safetensors: `scripts/fetch_programs.sh` installs them. Says so if it has not.
fn interpreter() -> Option<PathBuf> {
    let folder = std::env::var_os("OUTCORE_PEERS").map_or_else(|| PathBuf::from(".venv"), PathBuf::from);
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(folder).join("bin/python");
    let has = Command::new(&python).args(["-c", "import numpy, safetensors"]).output();
    if has.is_ok_and(|output| output.status.success()) {
        return Some(python);
    }
    let required = std::env::var("OUTCORE_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|one| one == "programs"), "skips, though OUTCORE_REQUIRE names programs");
    eprintln!("SKIPPED: numpy and safetensors are not there; run scripts/fetch_programs.sh");
    None
}

/// Writes tensors, 57 MiB in all, whose values follow from their names.
const WRITE: &str = r#"
import numpy, sys
from safetensors.numpy import save_file

def values(layer):
    return numpy.random.default_rng(layer).standard_normal((1000 + layer, 499), dtype=numpy.float32)

if __name__ == "__main__" and len(sys.argv) == 2:
    save_file({f"model.layers.{layer}.weight": values(layer) for layer in range(30)}, sys.argv[1])
"#;

fn reads(program: &str) {
    if !can_run() {
        return;
    }
    let Some(python) = interpreter() else { return };
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("model.safetensors");
    let written = Command::new(&python).args(["-c", WRITE]).arg(&path).output().unwrap();
    assert!(written.status.success(), "{written:?}");
    let output = outcore()
        .args(["run", "--budget", "8MiB", "--"])
        .arg(&python)
        .args(["-c", &format!("{WRITE}{program}\nprint('all is equal')")])
        .arg(&path)
        .arg("read")
        .output()
        .unwrap();
    let [said, told] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    assert!(output.status.success() && said == "all is equal\n", "{:?}: {said}{told}", output.status);
    assert!(told.contains("1 file(s) mapped, model.safetensors (57."), "{told}");
}

#[test]
fn numpy_memmap_reads_the_same_bytes() {
    reads(
        r#"
import json
plain = open(sys.argv[1], "rb")
header = json.loads(plain.read(int.from_bytes(plain.read(8), "little")))
begin = plain.tell()
whole = numpy.memmap(sys.argv[1], mode="r")
for turn in range(2):
    for layer in range(30):
        first, end = header[f"model.layers.{layer}.weight"]["data_offsets"]
        view = whole[begin + first : begin + end].view(numpy.float32).reshape(1000 + layer, 499)
        assert numpy.array_equal(view, values(layer)), (turn, layer)
# A part of the file, which begins anywhere.
first, end = header["model.layers.3.weight"]["data_offsets"]
part = numpy.memmap(sys.argv[1], mode="r", dtype=numpy.float32, offset=begin + first, shape=(1003, 499))
assert numpy.array_equal(part, values(3)) and part.sum() == values(3).sum()
"#,
    );
}

/// `mode="c"` is a private mapping that is written, as PyTorch makes it.
#[test]
fn numpy_memmap_with_copy_on_write_finds_what_it_wrote() {
    reads(
        r#"
import json
plain = open(sys.argv[1], "rb")
header = json.loads(plain.read(int.from_bytes(plain.read(8), "little")))
begin = plain.tell()
whole = numpy.memmap(sys.argv[1], mode="c")
def view(layer):
    first, end = header[f"model.layers.{layer}.weight"]["data_offsets"]
    return whole[begin + first : begin + end].view(numpy.float32).reshape(1000 + layer, 499)
expected = {layer: values(layer).copy() for layer in range(30)}
for turn in range(3):
    for layer in range(30):
        assert numpy.array_equal(view(layer), expected[layer]), (turn, layer)
        if layer % 3 == turn:
            view(layer)[:] *= 2
            expected[layer] *= 2
        view(layer)[turn::100, 5] = layer
        expected[layer][turn::100, 5] = layer
for layer in range(30):
    assert numpy.array_equal(view(layer), expected[layer]), layer
# The file is as it was, and another mapping of it too.
again = numpy.memmap(sys.argv[1], mode="r")
first, end = header["model.layers.3.weight"]["data_offsets"]
assert numpy.array_equal(again[begin + first : begin + end].view(numpy.float32).reshape(1003, 499), values(3))
"#,
    );
}

#[test]
fn safetensors_reads_the_same_tensors() {
    reads(
        r#"
from safetensors import safe_open
# Opened anew for each pass, as programs do.
for turn in range(3):
    with safe_open(sys.argv[1], framework="numpy") as file:
        for layer in list(range(30)) if turn != 1 else list(range(29, -1, -1)):
            name = f"model.layers.{layer}.weight"
            assert numpy.array_equal(file.get_tensor(name), values(layer)), (turn, name)
            assert numpy.array_equal(file.get_slice(name)[7:900, 3:77], values(layer)[7:900, 3:77]), (turn, name)
"#,
    );
}

/// llama.cpp as `make peers` builds it. Says so if it is not there.
fn llama_cpp() -> Option<PathBuf> {
    let folder = std::env::var_os("OUTCORE_PEERS").map_or_else(|| PathBuf::from(".venv"), PathBuf::from);
    let peer = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(folder).join("bin/llama-peer");
    if !peer.exists() {
        eprintln!("SKIPPED: llama.cpp is not built; make peers builds it");
        return None;
    }
    Some(peer)
}

/// The words of a model by llama.cpp, and what was said beside them.
fn words(mut command: Command, peer: &Path, model: &Path, seed: Option<&str>) -> (String, String) {
    let output = command.arg(peer).arg(model).args(["1,5,9", "12", "2"]).args(seed).output().unwrap();
    let [said, told] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    assert!(output.status.success(), "{:?}: {said}{told}", output.status);
    let (_, tokens) = said.split_once(r#""tokens": ["#).unwrap_or_else(|| panic!("{said}"));
    (tokens.split_once(']').unwrap().0.to_owned(), told)
}

fn says_the_same(peer: &Path, model: &Path, budget: &str, seed: Option<&str>, parts: &[&str]) {
    let (plain, _) = words(Command::new("env"), peer, model, seed);
    for setting in ["OUTCORE_RUN_ROUTING=on", "OUTCORE_RUN_ROUTING=off"] {
        let mut command = outcore();
        command.args(["run", "--budget", budget, "--", "env", setting]);
        let (name, value) = setting.split_once('=').unwrap();
        command.envs((value == "off").then_some((name, value)));
        let (found, told) = words(command, peer, model, seed);
        assert_eq!(found, plain, "{setting}: {told}");
        assert!(told.contains("1 file(s) mapped"), "{told}");
        if value == "on" {
            assert!(parts.iter().all(|part| told.contains(part)), "{told}");
        }
    }
}

#[test]
fn llama_cpp_says_the_same_words() {
    if !can_run() {
        return;
    }
    let Some(peer) = llama_cpp() else { return };
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/SmolLM2-135M-Instruct.Q4_1.gguf");
    match model.exists() {
        true => says_the_same(&peer, &model, "40MiB", None, &[]),
        false => eprintln!("SKIPPED: the real model is not there; scripts/fetch_model.sh fetches it"),
    }
    let make = Path::new(env!("CARGO_BIN_EXE_outcore")).with_file_name("make_model");
    if !make.exists() {
        eprintln!("SKIPPED: no mixture; cargo build -p outcore-llm builds what makes one");
        return;
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let model = folder.path().join("mixture.gguf");
    let sizes = "--layers 4 --dim 512 --heads 8 --kv-heads 4 --ffn 256 --vocab 4000 --experts 32 --experts-used 4";
    let made = Command::new(&make).arg(&model).args(sizes.split(' ')).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    says_the_same(&peer, &model, "24MiB", Some("7"), &["The router's choice was read"]);
}
